//! Tokenizers of GGUF files as a `tokenizer.json`, the form of Hugging Face's library.
//!
//! Two kinds are read: byte-level BPE (`gpt2`), whose rule for splitting text has a name, and SentencePiece's BPE (`llama`), which has
//! scores and no merges: a piece is merged from any two pieces that it consists of, in the order of scores.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::metadata::GgufMetadata;

/// Tokenizer in a model's file, in the form of Hugging Face.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmbeddedTokenizer {
    /// Contents of `tokenizer.json`.
    pub tokenizer_json: String,
    /// Contents of `tokenizer_config.json`: special tokens and chat template.
    pub config_json: String,
}

/// Rules by which a byte-level tokenizer splits text before merging: names in files, pattern, and true if a piece that is a token is not
/// split (llama.cpp: `llama-vocab.cpp`).
pub(crate) const SPLITS: [Split; 8] = [
    Split {
        names: &["llama-bpe", "llama3", "llama-v3"],
        patterns: &[LLAMA3_PATTERN],
        ignores_merges: true,
        adds_beginning: true,
    },
    Split {
        names: &["dbrx", "smaug-bpe"],
        patterns: &[LLAMA3_PATTERN],
        ignores_merges: false,
        adds_beginning: false,
    },
    Split {
        names: &["tekken"],
        patterns: &[
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ignores_merges: true,
        adds_beginning: true,
    },
    Split {
        names: &["qwen2", "deepseek-r1-qwen", "kormo"],
        patterns: &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ignores_merges: false,
        adds_beginning: false,
    },
    Split {
        names: &["gpt-4o"],
        patterns: &[
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ignores_merges: false,
        adds_beginning: false,
    },
    Split {
        names: &["gpt-2", "phi-2", "olmo", "mpt"],
        patterns: &[GPT2_PATTERN],
        ignores_merges: false,
        adds_beginning: false,
    },
    Split {
        names: &["smollm", "starcoder", "refact", "command-r", "exaone"],
        patterns: &[DIGIT_PATTERN, GPT2_PATTERN],
        ignores_merges: false,
        adds_beginning: false,
    },
    Split {
        names: &["default"],
        patterns: &[
            r"[\p{P}\$\+<=>\^~\|]+",
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
            r"\p{N}+",
            r"[0-9][0-9][0-9]",
        ],
        ignores_merges: false,
        adds_beginning: false,
    },
];

/// Pattern of Llama 3.
const LLAMA3_PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Pattern of single digits, which the library's `Digits` splits off.
pub(crate) const DIGIT_PATTERN: &str = r"\p{N}";

/// Pattern of GPT-2, which the library's `ByteLevel` applies by default.
pub(crate) const GPT2_PATTERN: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Rule by which text is split.
#[derive(Debug)]
pub(crate) struct Split {
    /// Values of `tokenizer.ggml.pre`; the first is written.
    pub(crate) names: &'static [&'static str],
    /// Patterns, applied one after the other.
    pub(crate) patterns: &'static [&'static str],
    /// True if a piece that is a token is not made of merges.
    pub(crate) ignores_merges: bool,
    /// Default of `tokenizer.ggml.add_bos_token`.
    adds_beginning: bool,
}

/// Kind of a token, by its number in files.
pub(crate) mod kind {
    /// Ordinary token.
    pub(crate) const NORMAL: i32 = 1;
    /// Token of text that cannot be represented.
    pub(crate) const UNKNOWN: i32 = 2;
    /// Special token.
    pub(crate) const CONTROL: i32 = 3;
    /// Token that text is searched for before it is split.
    pub(crate) const USER_DEFINED: i32 = 4;
    /// Id without a token.
    pub(crate) const UNUSED: i32 = 5;
    /// Byte.
    pub(crate) const BYTE: i32 = 6;
}

/// Parts that tokenizers of all kinds have.
struct Vocabulary<'a> {
    metadata: &'a GgufMetadata,
    tokens: Vec<&'a str>,
    kinds: Vec<i32>,
}

impl Vocabulary<'_> {
    /// Returns the id of a special token: `bos`, `eos`, `unknown`.
    fn id(&self, name: &str) -> Result<Option<usize>, String> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        let Some(id) = self.metadata.integer(&key) else { return Ok(None) };
        let id = usize::try_from(id).ok().filter(|id| *id < self.tokens.len());
        id.map(Some).ok_or_else(|| format!("`{key}` is no id of a vocabulary of {}", self.tokens.len()))
    }

    /// Returns the tokens by text.
    fn ids(&self) -> Result<Map<String, Value>, String> {
        let mut ids = Map::new();
        for (id, token) in self.tokens.iter().enumerate() {
            if ids.insert((*token).to_owned(), json!(id)).is_some() {
                return Err(format!("the token \"{token}\" occurs twice in its vocabulary"));
            }
        }
        Ok(ids)
    }

    /// Returns the tokens that text is searched for before it is split.
    fn added(&self) -> Vec<Value> {
        let is_special = |kind: i32| kind == kind::CONTROL || kind == kind::UNKNOWN;
        let added = self.kinds.iter().enumerate();
        added
            .filter(|(_, kind)| is_special(**kind) || **kind == kind::USER_DEFINED)
            .map(|(id, kind)| {
                json!({
                    "id": id, "content": self.tokens[id], "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": is_special(*kind),
                })
            })
            .collect()
    }

    /// Returns the post-processor, which puts special tokens at the ends of a text; null if there are none.
    fn ends(&self, adds_beginning: bool) -> Result<Value, String> {
        let flag = |name: &str| self.metadata.flag(&format!("tokenizer.ggml.add_{name}_token"));
        let beginning = self.id("bos")?.filter(|_| flag("bos").unwrap_or(adds_beginning));
        let end = self.id("eos")?.filter(|_| flag("eos").unwrap_or(false));
        if beginning.is_none() && end.is_none() {
            return Ok(Value::Null);
        }
        let special = |id: usize| json!({"SpecialToken": {"id": self.tokens[id], "type_id": 0}});
        let text = json!({"Sequence": {"id": "A", "type_id": 0}});
        let single: Vec<Value> =
            beginning.map(special).into_iter().chain([text]).chain(end.map(special)).collect();
        let second = json!({"Sequence": {"id": "B", "type_id": 1}});
        let pair: Vec<Value> = single.iter().cloned().chain([second]).collect();
        let tokens: Map<String, Value> = [beginning, end]
            .into_iter()
            .flatten()
            .map(|id| {
                let token = self.tokens[id];
                (token.to_owned(), json!({"id": token, "ids": [id], "tokens": [token]}))
            })
            .collect();
        Ok(json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}))
    }
}

/// Returns the tokenizer of a file; `None` if it has none.
pub(super) fn read(metadata: &GgufMetadata, file: &[u8]) -> Result<Option<EmbeddedTokenizer>, String> {
    let Some(model) =
        metadata.text("tokenizer.ggml.model").filter(|model| !["none", "no_vocab"].contains(model))
    else {
        return Ok(None);
    };
    let tokens = metadata.strings("tokenizer.ggml.tokens", file).ok_or("its tokenizer has no tokens")??;
    let kinds = metadata.numbers("tokenizer.ggml.token_type", file).unwrap_or_default();
    let kinds = kinds.into_iter().map(|kind| kind as i32).collect();
    let vocabulary = Vocabulary { metadata, tokens, kinds };
    if vocabulary.kinds.len() > vocabulary.tokens.len() {
        return Err("its tokenizer has more types of tokens than tokens".to_owned());
    }
    let tokenizer = match model {
        "gpt2" => byte_level(&vocabulary, file)?,
        "llama" => sentence_pieces(&vocabulary, file)?,
        other => {
            return Err(format!(
                "its tokenizer is of kind \"{other}\"; read here are \"gpt2\" and \"llama\"; a tokenizer.json beside the file is used \
                 instead"
            ));
        }
    };
    let mut config = Map::new();
    for (key, name) in [("bos_token", "bos"), ("eos_token", "eos")] {
        if let Some(id) = vocabulary.id(name)? {
            config.insert(key.to_owned(), json!(vocabulary.tokens[id]));
        }
    }
    if let Some(template) = metadata.text("tokenizer.chat_template") {
        config.insert("chat_template".to_owned(), json!(template));
    }
    let (tokenizer_json, config_json) = (tokenizer.to_string(), Value::Object(config).to_string());
    Ok(Some(EmbeddedTokenizer { tokenizer_json, config_json }))
}

fn byte_level(vocabulary: &Vocabulary<'_>, file: &[u8]) -> Result<Value, String> {
    let metadata = vocabulary.metadata;
    let name = metadata.text("tokenizer.ggml.pre").unwrap_or("default");
    let split = SPLITS.iter().find(|split| split.names.contains(&name)).ok_or_else(|| {
        let known: Vec<&str> = SPLITS.iter().map(|split| split.names[0]).collect();
        format!(
            "its tokenizer splits text by the rule \"{name}\" (tokenizer.ggml.pre); read here are {}; a tokenizer.json beside the file is \
             used instead",
            known.join(", ")
        )
    })?;
    let merges = metadata.strings("tokenizer.ggml.merges", file).unwrap_or(Ok(Vec::new()))?;
    let merges = merges
        .into_iter()
        .map(|merge| merge.split_once(' ').ok_or_else(|| format!("the merge \"{merge}\" has no two parts")))
        .collect::<Result<Vec<_>, _>>()?;
    let steps = split.patterns.iter().map(|pattern| {
        json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
    });
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let steps: Vec<Value> = steps.chain([byte_level.clone()]).collect();
    Ok(json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": vocabulary.added(),
        "normalizer": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": vocabulary.ends(split.adds_beginning)?,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": split.ignores_merges,
            "vocab": vocabulary.ids()?, "merges": merges,
        },
    }))
}

/// Sign for a space in the pieces of SentencePiece.
const SPACE: &str = "\u{2581}";

fn sentence_pieces(vocabulary: &Vocabulary<'_>, file: &[u8]) -> Result<Value, String> {
    let scores = vocabulary.metadata.numbers("tokenizer.ggml.scores", file).unwrap_or_default();
    if scores.len() != vocabulary.tokens.len() {
        return Err(format!(
            "its tokenizer has {} scores for {} tokens",
            scores.len(),
            vocabulary.tokens.len()
        ));
    }
    let merges = merges(vocabulary, &scores);
    let unknown = vocabulary.id("unknown")?.map(|id| vocabulary.tokens[id]);
    let has_prefix = vocabulary.metadata.flag("tokenizer.ggml.add_space_prefix").unwrap_or(true);
    let to_signs = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
    let prefix = json!({"type": "Prepend", "prepend": SPACE});
    let normalizers: Vec<Value> = has_prefix.then_some(prefix).into_iter().chain([to_signs]).collect();
    let from_signs = json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "});
    let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
    let decoders: Vec<Value> = [from_signs, json!({"type": "ByteFallback"}), json!({"type": "Fuse"})]
        .into_iter()
        .chain(has_prefix.then_some(strip))
        .collect();
    Ok(json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": vocabulary.added(),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": null,
        "post_processor": vocabulary.ends(true)?,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocabulary.ids()?, "merges": merges,
        },
    }))
}

/// Returns the merges that make each piece from two others, those of pieces with high scores first.
fn merges<'a>(vocabulary: &Vocabulary<'a>, scores: &[f64]) -> Vec<(&'a str, &'a str)> {
    /// Longest piece, in bytes, that is made of merges; published vocabularies stay below.
    const LONGEST: usize = 256;
    let is_merged = |id: &usize| {
        vocabulary.kinds.get(*id).is_none_or(|kind| [kind::NORMAL, kind::USER_DEFINED].contains(kind))
    };
    let ids: HashMap<&str, usize> = vocabulary
        .tokens
        .iter()
        .enumerate()
        .filter(|(id, _)| is_merged(id))
        .map(|(id, token)| (*token, id))
        .collect();
    let mut merges = Vec::new();
    for (id, token) in vocabulary.tokens.iter().enumerate().filter(|(id, _)| is_merged(id)) {
        for (at, _) in token.char_indices().skip(1).take_while(|(at, _)| *at < LONGEST) {
            let (left, right) = token.split_at(at);
            if let (Some(first), Some(second)) = (ids.get(left), ids.get(right)) {
                merges.push((scores[id], *first, *second, left, right));
            }
        }
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    merges.into_iter().map(|(_, _, _, left, right)| (left, right)).collect()
}
