//! The metadata of a tokenizer in a GGUF file, from a `tokenizer.json`.

use std::collections::HashMap;

use serde_json::Value as Json;

use super::{
    tokenizer::{DIGIT_PATTERN, GPT2_PATTERN, SPLITS, Split, kind},
    writer::Value,
};

/// Special tokens of a model, and settings of its tokenizer that are in other files than `tokenizer.json`.
#[derive(Debug, Default)]
pub(crate) struct TokenizerSettings {
    /// Id of the token at the beginning of a text.
    pub(crate) beginning: Option<u32>,
    /// Ids of the tokens that end a text.
    pub(crate) end: Vec<u32>,
    /// Id of the token that pads a batch.
    pub(crate) padding: Option<u32>,
    /// Template of chats.
    pub(crate) chat_template: Option<String>,
}

impl TokenizerSettings {
    /// Returns the metadata of the special tokens.
    fn metadata(&self) -> Vec<(String, Value)> {
        let id = |name: &str, id: u32| (format!("tokenizer.ggml.{name}_token_id"), Value::U32(id));
        let mut metadata: Vec<_> = self.beginning.map(|beginning| id("bos", beginning)).into_iter().collect();
        metadata.extend(self.end.first().map(|end| id("eos", *end)));
        metadata.extend(self.end.get(1).map(|end| id("eot", *end)));
        metadata.extend(self.padding.map(|padding| id("padding", padding)));
        let template = self.chat_template.clone();
        metadata.extend(template.map(|text| ("tokenizer.chat_template".to_owned(), Value::Text(text))));
        metadata
    }
}

/// Returns the metadata of a tokenizer of bytes, as one without merges.
pub(crate) fn of_bytes(vocabulary: usize, settings: &TokenizerSettings) -> Vec<(String, Value)> {
    let alphabet = byte_alphabet();
    let names: HashMap<String, u32> =
        alphabet.iter().enumerate().map(|(id, sign)| (sign.to_string(), id as u32)).collect();
    let (tokens, kinds) = filled(&names, &HashMap::new(), vocabulary);
    let mut metadata = common("gpt2", tokens, kinds, false);
    metadata.push(("tokenizer.ggml.pre".to_owned(), Value::Text("gpt-2".to_owned())));
    metadata.push(("tokenizer.ggml.merges".to_owned(), Value::Texts(Vec::new())));
    metadata.extend(settings.metadata());
    metadata
}

/// Returns the characters that stand for the 256 bytes in byte-level vocabularies (GPT-2: `bytes_to_unicode`): printable ones for
/// themselves, the others for characters from 256 on.
fn byte_alphabet() -> [char; 256] {
    let is_printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 256;
    std::array::from_fn(|byte| {
        let byte = byte as u32;
        let code = if is_printable(byte) { byte } else { next };
        next += u32::from(!is_printable(byte));
        char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
    })
}

/// Returns the metadata of a tokenizer for a model with `vocabulary` tokens.
///
/// # Errors
/// If the tokenizer is of a kind that files cannot express, or splits text by an unknown rule.
pub(crate) fn of_json(
    tokenizer: &Json,
    vocabulary: usize,
    settings: &TokenizerSettings,
) -> Result<Vec<(String, Value)>, String> {
    let model = &tokenizer["model"];
    let has_bytes = model["byte_fallback"] == true;
    let kind = model["type"].as_str().unwrap_or("BPE");
    if kind != "BPE" || !model["merges"].is_array() {
        return Err(format!("its tokenizer is of kind {kind}; only BPE can be written"));
    }
    let names = ids_of(&model["vocab"]);
    let (tokens, mut kinds) = filled(&names, &added(tokenizer), vocabulary);
    let merges = merges(&model["merges"])?;
    let beginning = begins_with_special(&tokenizer["post_processor"]);
    let mut metadata;
    if has_bytes {
        for (token, kind) in tokens.iter().zip(&mut kinds) {
            if token.len() == 6 && token.starts_with("<0x") && token.ends_with('>') {
                *kind = kind::BYTE;
            }
        }
        let unknown = model["unk_token"].as_str().and_then(|token| names.get(token)).copied();
        if let Some(kind) = unknown.and_then(|id| kinds.get_mut(id as usize)) {
            *kind = kind::UNKNOWN;
        }
        let scores = scores(&tokens, &merges);
        metadata = common("llama", tokens, kinds, beginning);
        metadata.push(("tokenizer.ggml.scores".to_owned(), Value::F32s(scores)));
        let has_prefix = tokenizer["normalizer"].to_string().contains("\"Prepend\"")
            || tokenizer["pre_tokenizer"]["type"] == "Metaspace"
                && tokenizer["pre_tokenizer"]["prepend_scheme"] != "never";
        metadata.push(("tokenizer.ggml.add_space_prefix".to_owned(), Value::Bool(has_prefix)));
        metadata.extend(unknown.map(|id| ("tokenizer.ggml.unknown_token_id".to_owned(), Value::U32(id))));
    } else {
        metadata = common("gpt2", tokens, kinds, beginning);
        let split = split_of(&tokenizer["pre_tokenizer"], model["ignore_merges"] == true)?;
        let split = Value::Text(split.names[0].to_owned());
        metadata.push(("tokenizer.ggml.pre".to_owned(), split));
        let merges = merges.iter().map(|(left, right)| format!("{left} {right}")).collect();
        metadata.push(("tokenizer.ggml.merges".to_owned(), Value::Texts(merges)));
    }
    metadata.extend(settings.metadata());
    Ok(metadata)
}

fn common(kind: &str, tokens: Vec<String>, kinds: Vec<i32>, adds_beginning: bool) -> Vec<(String, Value)> {
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    vec![
        (key("model"), Value::Text(kind.to_owned())),
        (key("tokens"), Value::Texts(tokens)),
        (key("token_type"), Value::I32s(kinds)),
        (key("add_bos_token"), Value::Bool(adds_beginning)),
    ]
}

/// Returns the ids of a vocabulary by text.
fn ids_of(vocabulary: &Json) -> HashMap<String, u32> {
    let entries = vocabulary.as_object().into_iter().flatten();
    entries.filter_map(|(token, id)| Some((token.clone(), u32::try_from(id.as_u64()?).ok()?))).collect()
}

/// Returns the ids and kinds of the added tokens by text.
fn added(tokenizer: &Json) -> HashMap<String, (u32, i32)> {
    let added = tokenizer["added_tokens"].as_array().into_iter().flatten();
    let entry = |token: &Json| {
        let id = u32::try_from(token["id"].as_u64()?).ok()?;
        let kind = if token["special"] == true { kind::CONTROL } else { kind::USER_DEFINED };
        Some((token["content"].as_str()?.to_owned(), (id, kind)))
    };
    added.filter_map(entry).collect()
}

/// Returns the tokens and their kinds by id; ids without a token have a name of their own.
fn filled(
    names: &HashMap<String, u32>,
    added: &HashMap<String, (u32, i32)>,
    vocabulary: usize,
) -> (Vec<String>, Vec<i32>) {
    let mut tokens: Vec<String> = (0..vocabulary).map(|id| format!("[PAD{id}]")).collect();
    let mut kinds = vec![kind::UNUSED; vocabulary];
    let named = names.iter().map(|(token, id)| (token, (*id, kind::NORMAL)));
    for (token, (id, kind)) in named.chain(added.iter().map(|(token, entry)| (token, *entry))) {
        if let (Some(place), Some(kind_of)) = (tokens.get_mut(id as usize), kinds.get_mut(id as usize)) {
            (*place, *kind_of) = (token.clone(), kind);
        }
    }
    (tokens, kinds)
}

/// Returns the merges, which are stored as pairs or as texts with a space.
fn merges(merges: &Json) -> Result<Vec<(String, String)>, String> {
    let pair = |merge: &Json| match merge {
        Json::String(text) => text.split_once(' ').map(|(left, right)| (left.to_owned(), right.to_owned())),
        _ => Some((merge[0].as_str()?.to_owned(), merge[1].as_str()?.to_owned())),
    };
    let all = merges.as_array().into_iter().flatten();
    all.map(|merge| pair(merge).ok_or_else(|| format!("the merge {merge} has no two parts"))).collect()
}

/// Returns the scores of pieces: those that are merged earlier have higher ones.
fn scores(tokens: &[String], merges: &[(String, String)]) -> Vec<f32> {
    let mut ranks = HashMap::new();
    for (rank, (left, right)) in merges.iter().enumerate() {
        ranks.entry(format!("{left}{right}")).or_insert(rank);
    }
    // Single characters come last, as in SentencePiece's models.
    tokens.iter().map(|token| -(ranks.get(token).copied().unwrap_or(merges.len()) as f32)).collect()
}

/// Returns true if a post-processor puts a special token before a text.
fn begins_with_special(processor: &Json) -> bool {
    let of_one = |processor: &Json| processor["single"][0].get("SpecialToken").is_some();
    let several = processor["processors"].as_array().into_iter().flatten();
    of_one(processor) || several.into_iter().any(of_one)
}

/// Returns the rule by which a pre-tokenizer splits text; of several with the same patterns, the one that treats merges as the tokenizer.
fn split_of(pre_tokenizer: &Json, ignores_merges: bool) -> Result<&'static Split, String> {
    let steps = match pre_tokenizer["pretokenizers"].as_array() {
        Some(steps) => steps.iter().collect(),
        None => vec![pre_tokenizer],
    };
    let pattern = |step: &Json| match step["type"].as_str() {
        Some("Digits") if step["individual_digits"] == true => Some(DIGIT_PATTERN.to_owned()),
        Some("ByteLevel") if step["use_regex"] != false => Some(GPT2_PATTERN.to_owned()),
        _ => step["pattern"]["Regex"].as_str().map(str::to_owned),
    };
    let patterns: Vec<String> = steps.into_iter().filter_map(pattern).collect();
    let known = || SPLITS.iter().filter(|split| split.patterns == patterns);
    known().find(|split| split.ignores_merges == ignores_merges).or_else(|| known().next()).ok_or_else(|| {
        format!(
            "its tokenizer splits text by {patterns:?}, for which files have no name that is written here"
        )
    })
}
