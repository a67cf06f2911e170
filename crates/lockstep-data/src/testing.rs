//! Small tokenizers for the unit tests, built from `tokenizer.json` text.

use std::path::Path;

use serde_json::{Value, json};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use crate::tokenizer::Tokenizer;

/// Returns the byte-level pre-tokenizer of `tokenizer.json`, with GPT-2's expression or without one.
pub(crate) fn byte_level_json(use_regex: &Value) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex})
}

/// Builds a tokenizer in the style of GPT-2: 256 byte tokens, one token for each of `merges` ("Ġ a"), and an
/// end-of-text token.
pub(crate) fn byte_level_tokenizer(pre_tokenizer: &Value, merges: &[&str]) -> Tokenizer {
    let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let mut vocab: serde_json::Map<String, Value> =
        alphabet.iter().enumerate().map(|(id, c)| (c.to_string(), id.into())).collect();
    for merge in merges {
        vocab.insert(merge.replace(' ', ""), vocab.len().into());
    }
    let json = json!({
        "version": "1.0",
        "added_tokens": [{"id": vocab.len(), "content": "<|endoftext|>", "special": true,
                          "single_word": false, "lstrip": false, "rstrip": false, "normalized": false}],
        "normalizer": null,
        "pre_tokenizer": pre_tokenizer,
        "decoder": byte_level_json(&true.into()),
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    });
    Tokenizer::from_json(json.to_string().as_bytes(), Path::new("byte-level.json")).unwrap()
}
