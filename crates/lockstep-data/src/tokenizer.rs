//! Converts text to token ids and back: raw bytes, or a Hugging Face `tokenizer.json`.
//!
//! A hash of everything that determines the ids identifies a tokenizer, so a token file made with another one is never
//! used by mistake.

use std::{fs, io, path::Path};

use serde::Deserialize;
use tokenizers::ModelWrapper;

use crate::{
    chat::{ChatTemplate, Message},
    documents::Cut,
    error::{DataError, Result},
    growth, quiet,
};

/// Tokenizer for text to ids and back.
#[derive(Debug, Clone)]
pub enum Tokenizer {
    /// Byte tokenizer: ids are the 256 byte values, without special tokens.
    Bytes,
    /// Hugging Face tokenizer, loaded from a `tokenizer.json`.
    HuggingFace(Box<HfTokenizer>),
}

/// Tokenizer loaded from a `tokenizer.json`.
#[derive(Debug, Clone)]
pub struct HfTokenizer {
    inner: tokenizers::Tokenizer,
    /// Path of the file, for error messages.
    name: String,
    json_hash: blake3::Hash,
    largest_id: u32,
    eos: Option<u32>,
    cut: Cut,
    chat: ChatTemplate,
}

/// Fields of a `tokenizer_config.json` that are used.
#[derive(Deserialize)]
struct TokenizerConfig {
    bos_token: Option<NamedToken>,
    eos_token: Option<NamedToken>,
    chat_template: Option<Templates>,
}

/// Token by name: its text, or an object that holds the text.
#[derive(Deserialize)]
#[serde(untagged)]
enum NamedToken {
    Plain(String),
    Object { content: String },
}

impl NamedToken {
    fn into_name(self) -> String {
        match self {
            Self::Plain(name) | Self::Object { content: name } => name,
        }
    }
}

/// One chat template, or several, of which the one named `default` is used.
#[derive(Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Several(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

impl Templates {
    fn into_default(self) -> Option<String> {
        match self {
            Self::One(template) => Some(template),
            Self::Several(templates) => {
                templates.into_iter().find(|named| named.name == "default").map(|named| named.template)
            }
        }
    }
}

/// Reads a file; returns `None` if it does not exist.
fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(DataError::io("read", path)(error)),
    }
}

/// Upper bound of ids: labels are `i32`, in which negative numbers are masks.
const LARGEST_VOCABULARY: u32 = i32::MAX as u32;

/// Usual names of end-of-text tokens, tried in this order if no `tokenizer_config.json` names the token.
const EOS_NAMES: [&str; 7] =
    ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<｜end▁of▁sentence｜>", "<|im_end|>"];

impl Tokenizer {
    /// Loads the tokenizer that a configuration names: `"bytes"`, a `tokenizer.json`, or a directory that holds one.
    ///
    /// The end-of-text token is the one that the `tokenizer_config.json` in the same directory names. Without one it is
    /// the first of the usual names in the vocabulary.
    ///
    /// # Errors
    /// If a file cannot be read or is not a valid tokenizer.
    pub fn load(name: &str) -> Result<Self> {
        if name == "bytes" {
            return Ok(Self::Bytes);
        }
        let mut path = Path::new(name).to_owned();
        if path.is_dir() {
            path.push("tokenizer.json");
        }
        let json = fs::read(&path).map_err(DataError::io("read the tokenizer", &path))?;
        let tokenizer = Self::from_json(&json, &path)?;
        let config = path.with_file_name("tokenizer_config.json");
        // A `chat_template.jinja` takes precedence over a template in the configuration.
        let template = path.with_file_name("chat_template.jinja");
        let config_json = read_if_there(&config)?.unwrap_or_else(|| b"{}".to_vec());
        match read_if_there(&template)? {
            None => tokenizer.with_config(&config_json, &config),
            Some(source) => {
                let bad = |problem: String| DataError::BadTokenizer { path: template.clone(), problem };
                let source = String::from_utf8(source).map_err(|error| bad(error.to_string()))?;
                tokenizer.with_template(&config_json, &config, Some((source, &template)))
            }
        }
    }

    /// Parses the bytes of a `tokenizer.json`; `path` is used only in messages.
    ///
    /// # Errors
    /// If the bytes are not a valid tokenizer, or its replacements can lengthen a text too much.
    pub fn from_json(json: &[u8], path: &Path) -> Result<Self> {
        let bad = |problem: String| DataError::BadTokenizer { path: path.to_owned(), problem };
        // The `tokenizers` crate panics on most files that are not JSON, so JSON is parsed first. It also panics on
        // damaged tables of some normalizers, so panics are caught below. The returned error replaces the panic
        // message.
        let value: serde_json::Value = serde_json::from_slice(json).map_err(|e| bad(e.to_string()))?;
        let growth = growth::of(&value);
        if growth > growth::MOST {
            return Err(bad(format!(
                "its replacements may make a text {growth:.0} times as long; allowed: {:.0}, which published tokenizers stay far below",
                growth::MOST
            )));
        }
        let mut inner = quiet::caught(|| tokenizers::Tokenizer::from_bytes(json))
            .ok_or_else(|| bad("its contents make no tokenizer".to_owned()))?
            .map_err(|e| bad(e.to_string()))?;
        // Truncation and padding settings, meant for inference, would silently drop or add training text.
        inner.with_truncation(None).map_err(|e| bad(e.to_string()))?;
        inner.with_padding(None);
        let largest_id = inner.get_vocab(true).into_values().max();
        let largest_id = largest_id.ok_or_else(|| bad("its vocabulary is empty".to_owned()))?;
        if largest_id >= LARGEST_VOCABULARY {
            return Err(bad(format!("it has an id of {largest_id}; allowed: below {LARGEST_VOCABULARY}")));
        }
        let eos = EOS_NAMES.iter().find_map(|name| inner.token_to_id(name));
        Ok(Self::HuggingFace(Box::new(HfTokenizer {
            cut: if line_borders_are_safe(&inner) { Cut::LineBorders } else { Cut::Never },
            name: path.display().to_string(),
            json_hash: blake3::hash(json),
            inner,
            largest_id,
            eos,
            chat: ChatTemplate::default(),
        })))
    }

    /// Takes the end-of-text token and the chat template from the bytes of a `tokenizer_config.json`; `path` is used
    /// only in messages.
    ///
    /// # Errors
    /// If the bytes are not JSON, the vocabulary lacks the named token, or the template cannot be parsed.
    pub fn with_config(self, config_json: &[u8], path: &Path) -> Result<Self> {
        self.with_template(config_json, path, None)
    }

    /// As [`with_config`](Self::with_config), with the chat template from another file.
    fn with_template(
        self,
        config_json: &[u8],
        path: &Path,
        template: Option<(String, &Path)>,
    ) -> Result<Self> {
        let bad = |problem: String| DataError::BadTokenizer { path: path.to_owned(), problem };
        let config: TokenizerConfig = serde_json::from_slice(config_json).map_err(|e| bad(e.to_string()))?;
        let Self::HuggingFace(mut hf) = self else { return Ok(self) };
        let eos_token = config.eos_token.map(NamedToken::into_name);
        if let Some(name) = &eos_token {
            let missing = || bad(format!("eos_token \"{name}\" is not in the tokenizer's vocabulary"));
            hf.eos = Some(hf.inner.token_to_id(name).ok_or_else(missing)?);
        }
        let from_config = || Some((config.chat_template?.into_default()?, path));
        if let Some((source, path)) = template.or_else(from_config) {
            let bos_token = config.bos_token.map(NamedToken::into_name);
            let bad = |problem| DataError::BadTokenizer {
                path: path.to_owned(),
                problem: format!("its chat template: {problem}"),
            };
            hf.chat = ChatTemplate::jinja(&source, bos_token, eos_token).map_err(bad)?;
        }
        Ok(Self::HuggingFace(hf))
    }

    /// Returns the chat template; ChatML if the tokenizer has none.
    pub(crate) fn chat_template(&self) -> &ChatTemplate {
        match self {
            Self::Bytes => &ChatTemplate::ChatMl,
            Self::HuggingFace(hf) => &hf.chat,
        }
    }

    /// Encodes `text` without special tokens at its ends.
    ///
    /// # Errors
    /// If the tokenizer cannot represent the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match self {
            Self::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Self::HuggingFace(hf) => {
                let encoding = hf.call(|inner| inner.encode_fast(text, false))?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// Encodes `text` and returns for each id the byte offset in the text at which it ends.
    ///
    /// # Errors
    /// If the tokenizer cannot represent the text.
    pub(crate) fn encode_with_ends(&self, text: &str) -> Result<(Vec<u32>, Vec<usize>)> {
        match self {
            Self::Bytes => Ok((self.encode(text)?, (1..=text.len()).collect())),
            Self::HuggingFace(hf) => {
                let encoding = hf.call(|inner| inner.encode(text, false))?;
                let ends = encoding.get_offsets().iter().map(|&(_, end)| end).collect();
                Ok((encoding.get_ids().to_vec(), ends))
            }
        }
    }

    /// Encodes a prompt for generation: as [`encode`](Self::encode), with the special tokens (such as begin-of-text)
    /// that the tokenizer's post-processor adds.
    ///
    /// # Errors
    /// If the tokenizer cannot represent the text.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        match self {
            Self::Bytes => self.encode(text),
            Self::HuggingFace(hf) => {
                let encoding = hf.call(|inner| inner.encode_fast(text, true))?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// Encodes a chat, given as (role, content) pairs, with the generation prompt of the assistant's next message.
    ///
    /// # Errors
    /// If the template rejects the chat, or the tokenizer cannot represent the text.
    pub fn encode_chat(&self, messages: &[(String, String)]) -> Result<Vec<u32>> {
        let messages: Vec<Message> =
            messages.iter().map(|(role, content)| Message::new(role, content)).collect();
        let failed = |problem| DataError::BadChat { tokenizer: self.name().to_owned(), problem };
        self.encode(&self.chat_template().question(&messages).map_err(failed)?)
    }

    /// Returns the markers of the chat template that are not in the vocabulary and so take several tokens. Empty for
    /// the byte tokenizer.
    pub fn missing_markers(&self) -> Vec<String> {
        let Self::HuggingFace(hf) = self else { return Vec::new() };
        let is_missing = |marker: &String| hf.inner.token_to_id(marker).is_none();
        self.chat_template().markers().into_iter().filter(is_missing).collect()
    }

    /// Returns true if the tokenizer has its own chat template, so that ChatML is not used.
    pub fn has_chat_template(&self) -> bool {
        self.chat_template().hash().is_some()
    }

    /// Returns the text that ends an assistant's message, and its token if the vocabulary has it. `None` if the
    /// tokenizer has its own template, whose messages end with its end-of-text tokens.
    pub fn end_of_answer(&self) -> Option<(&'static str, Option<u32>)> {
        let text = self.chat_template().end_of_answer()?;
        let token = match self {
            Self::Bytes => None,
            Self::HuggingFace(hf) => hf.inner.token_to_id(text),
        };
        Some((text, token))
    }

    /// Decodes `ids`. Special tokens and ids beyond the vocabulary (which a padded model can produce) decode to
    /// nothing; invalid UTF-8 becomes U+FFFD.
    ///
    /// # Errors
    /// If the tokenizer's decoder fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        match self {
            Self::Bytes => {
                let bytes: Vec<u8> = ids.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Self::HuggingFace(hf) => hf.call(|inner| inner.decode(ids, true)),
        }
    }

    /// Returns the largest id plus one: the smallest vocabulary of a model for this tokenizer.
    pub fn vocab_size(&self) -> usize {
        match self {
            Self::Bytes => 256,
            Self::HuggingFace(hf) => hf.largest_id as usize + 1,
        }
    }

    /// Returns the end-of-text token, if the tokenizer has one.
    pub fn eos_id(&self) -> Option<u32> {
        match self {
            Self::Bytes => None,
            Self::HuggingFace(hf) => hf.eos,
        }
    }

    /// Returns the name of the tokenizer: `"bytes"`, or the path of its file.
    pub fn name(&self) -> &str {
        match self {
            Self::Bytes => "bytes",
            Self::HuggingFace(hf) => &hf.name,
        }
    }

    /// Returns a hash of everything that determines the ids of a corpus.
    pub fn content_hash(&self) -> blake3::Hash {
        match self {
            Self::Bytes => blake3::hash(b"lockstep tokenizer: bytes"),
            Self::HuggingFace(hf) => {
                let mut hasher = blake3::Hasher::new();
                hasher.update(b"lockstep tokenizer: tokenizer.json").update(hf.json_hash.as_bytes());
                if let Some(eos) = hf.eos {
                    hasher.update(&eos.to_le_bytes());
                }
                if let Some(template) = hf.chat.hash() {
                    hasher.update(template.as_bytes());
                }
                hasher.finalize()
            }
        }
    }

    /// Checks that a model with `vocab_size` embeddings covers every id.
    ///
    /// # Errors
    /// If an id of the tokenizer is not below `vocab_size`.
    pub fn fits(&self, vocab_size: usize) -> Result<()> {
        if self.vocab_size() <= vocab_size {
            return Ok(());
        }
        Err(DataError::TokenizerTooLarge {
            tokenizer: self.name().to_owned(),
            largest_id: self.vocab_size() as u32 - 1,
            vocab_size,
        })
    }

    /// Checks that `ids`, produced by this tokenizer, are within its vocabulary.
    pub(crate) fn check_ids(&self, ids: &[u32]) -> Result<()> {
        match ids.iter().find(|&&id| id as usize >= self.vocab_size()) {
            None => Ok(()),
            Some(id) => Err(DataError::TokenizerFailed {
                tokenizer: self.name().to_owned(),
                problem: format!("it produced id {id}, beyond its vocabulary of {}", self.vocab_size()),
            }),
        }
    }

    /// Returns where a text may be cut so that the concatenated ids of its pieces are the ids of the whole.
    pub(crate) fn cut(&self) -> Cut {
        match self {
            Self::Bytes => Cut::Anywhere,
            Self::HuggingFace(hf) => hf.cut,
        }
    }
}

impl HfTokenizer {
    /// Calls the `tokenizers` crate and turns a panic into an error. It panics on some texts if the file is
    /// inconsistent, for example a decoder that strips more characters than there are.
    fn call<T>(&self, ask: impl FnOnce(&tokenizers::Tokenizer) -> tokenizers::Result<T>) -> Result<T> {
        let failed = |problem| DataError::TokenizerFailed { tokenizer: self.name.clone(), problem };
        quiet::caught(|| ask(&self.inner))
            .ok_or_else(|| failed("its contents make no sense for this text".to_owned()))?
            .map_err(|problem| failed(problem.to_string()))
    }
}

/// Expressions with which Llama 3 and Qwen 2 split text into words. GPT-2's is built into `tokenizers`. The proof
/// below, that line borders are safe, covers these three.
const KNOWN_SPLITS: [&str; 2] = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// Returns true if cutting a text at a line border does not change its ids. A line border, as in [`Cut::LineBorders`],
/// is after a `\n` that follows a character other than white space and precedes an ASCII letter. True if five
/// conditions hold; false otherwise, even if cutting would be safe:
///
/// 1. Words are split by one of three known expressions. None has an alternative that matches `\n` and a letter after
///    it, so a word ends at the border. None looks behind, so the text after the border is split as if it stood alone.
///    Only `\s+(?!\S)` looks ahead. It affects the white space before the border alone, which is the single `\n`: one
///    word either way.
/// 2. The model is BPE without dropout, which processes one word at a time.
/// 3. Added tokens do not contain `\n`, and do not depend on the white space or words around them.
/// 4. The normalizer, if any, is NFC or NFD. In both, `\n` and ASCII letters never combine with earlier characters, and
///    no other character becomes white space.
/// 5. No space is inserted before the first word.
fn line_borders_are_safe(tokenizer: &tokenizers::Tokenizer) -> bool {
    use tokenizers::{
        NormalizerWrapper, PreTokenizerWrapper,
        pre_tokenizers::{byte_level::ByteLevel, split::SplitPattern},
    };

    let gpt2 = |b: &ByteLevel| b.use_regex && !b.add_prefix_space;
    let bytes_only = |b: &ByteLevel| !b.use_regex && !b.add_prefix_space;
    let known_split = match tokenizer.get_pre_tokenizer() {
        Some(PreTokenizerWrapper::ByteLevel(byte_level)) => gpt2(byte_level),
        Some(PreTokenizerWrapper::Sequence(sequence)) => match sequence.as_ref() {
            [PreTokenizerWrapper::Split(split), PreTokenizerWrapper::ByteLevel(byte_level)] => {
                let known = matches!(&split.pattern, SplitPattern::Regex(regex)
                    if KNOWN_SPLITS.contains(&regex.as_str()));
                let isolated = split.behavior == tokenizers::SplitDelimiterBehavior::Isolated;
                known && isolated && !split.invert && bytes_only(byte_level)
            }
            _ => false,
        },
        _ => false,
    };
    let word_by_word = match tokenizer.get_model() {
        ModelWrapper::BPE(bpe) => bpe.dropout.is_none_or(|dropout| dropout == 0.0),
        _ => false,
    };
    let plain_added_tokens = tokenizer
        .get_added_tokens_decoder()
        .values()
        .all(|token| !token.content.contains('\n') && !token.lstrip && !token.rstrip && !token.single_word);
    let inert_normalizer = matches!(
        tokenizer.get_normalizer(),
        None | Some(NormalizerWrapper::NFC(_) | NormalizerWrapper::NFD(_))
    );
    known_split && word_by_word && plain_added_tokens && inert_normalizer
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::testing::{byte_level_json, byte_level_tokenizer};

    /// Tokenizers with each expression of [`line_borders_are_safe`]. Their merges span every kind of border, so that a
    /// wrong cut changes ids.
    fn tokenizers_with_known_splits() -> Vec<Tokenizer> {
        const MERGES: [&str; 10] = ["Ċ Ċ", "ĊĊ Ċ", ". Ċ", "Ċ a", "Ġ Ċ", "Ċ Ġ", "a b", "Ġ a", "1 1", "č Ċ"];
        let mut pre_tokenizers = vec![byte_level_json(&true.into())];
        for regex in KNOWN_SPLITS {
            pre_tokenizers.push(json!({"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false},
                byte_level_json(&false.into())]}));
        }
        pre_tokenizers.iter().map(|pre_tokenizer| byte_level_tokenizer(pre_tokenizer, &MERGES)).collect()
    }

    proptest! {
        #[test]
        fn a_cut_at_line_borders_changes_no_id(text in "([ab1.'é\u{301}] ?|[ \n\r\t]|\n[aAsb]|\u{a0}|\u{3000}){0,60}") {
            static TOKENIZERS: LazyLock<Vec<Tokenizer>> = LazyLock::new(tokenizers_with_known_splits);
            for tokenizer in &*TOKENIZERS {
                prop_assert_eq!(tokenizer.cut(), Cut::LineBorders);
                let mut pieces = Vec::new();
                let mut start = 0;
                for border in (1..text.len()).filter(|&at| crate::documents::is_line_border(&text, at)) {
                    pieces.extend(tokenizer.encode(&text[start..border]).unwrap());
                    start = border;
                }
                pieces.extend(tokenizer.encode(&text[start..]).unwrap());
                prop_assert_eq!(&pieces, &tokenizer.encode(&text).unwrap(), "text {:?}", text);
            }
        }
    }

    #[test]
    fn a_decoder_on_which_the_library_panics_is_an_error() {
        let json = r#"{"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
            "decoder": {"type": "Strip", "content": "a", "start": 0, "stop": 4294967296},
            "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}"#;
        let tokenizer = Tokenizer::from_json(json.as_bytes(), Path::new("strip.json")).unwrap();
        let error = tokenizer.decode(&[0]).unwrap_err();
        assert!(error.to_string().starts_with("the tokenizer strip.json failed: its contents"), "{error}");
    }

    #[test]
    fn one_whose_replacements_explode_is_refused_before_it_reads_any_text() {
        let double = serde_json::json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
        let json = serde_json::json!({
            "normalizer": {"type": "Sequence", "normalizers": vec![double; 22]},
            "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
        });
        let refused = Tokenizer::from_json(json.to_string().as_bytes(), Path::new("bomb.json"));
        let message = refused.map(|_| ()).unwrap_err().to_string();
        assert!(message.contains("bomb.json") && message.contains("4194304 times as long"), "{message}");
    }

    #[test]
    fn a_tokenizer_that_marks_the_start_of_a_text_is_never_cut() {
        let json = r#"{"version": "1.0", "added_tokens": [], "normalizer": null, "decoder": null,
            "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
            "model": {"type": "BPE", "vocab": {"a": 0, "▁": 1}, "merges": []}}"#;
        let tokenizer = Tokenizer::from_json(json.as_bytes(), Path::new("metaspace.json")).unwrap();
        assert_eq!(tokenizer.cut(), Cut::Never);
    }
}
