//! Text to ids and back: bytes as they are, or a Hugging Face `tokenizer.json`.
//!
//! A tokenizer is identified by a hash of everything that decides its ids, so a token file made with
//! another one is never mistaken for it.

use std::{fs, io, path::Path};

use serde::Deserialize;
use tokenizers::ModelWrapper;

use crate::{
    chat::{ChatTemplate, Message},
    documents::Cut,
    error::{DataError, Result},
    growth, quiet,
};

/// Turns text into token ids and back.
#[derive(Debug, Clone)]
pub enum Tokenizer {
    /// Ids are the bytes of the text: 256 of them, no special ones.
    Bytes,
    /// A Hugging Face `tokenizer.json`.
    HuggingFace(Box<HfTokenizer>),
}

/// A loaded `tokenizer.json`.
#[derive(Debug, Clone)]
pub struct HfTokenizer {
    inner: tokenizers::Tokenizer,
    /// What error messages call it: its path.
    name: String,
    json_hash: blake3::Hash,
    largest_id: u32,
    eos: Option<u32>,
    cut: Cut,
    chat: ChatTemplate,
}

/// What is read of a `tokenizer_config.json`.
#[derive(Deserialize)]
struct TokenizerConfig {
    bos_token: Option<NamedToken>,
    eos_token: Option<NamedToken>,
    chat_template: Option<Templates>,
}

/// Either the token itself, or an object that holds it.
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

/// A template, or several of which one is called `default`.
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

/// The bytes of a file, if there is one.
fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(DataError::io("read", path)(error)),
    }
}

/// Labels are `i32`, in which negative numbers mean something else.
const LARGEST_VOCABULARY: u32 = i32::MAX as u32;

/// Names under which published tokenizers carry their end-of-text token, looked up in this order where
/// no `tokenizer_config.json` names it.
const EOS_NAMES: [&str; 7] =
    ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<｜end▁of▁sentence｜>", "<|im_end|>"];

impl Tokenizer {
    /// Loads what a configuration names: `"bytes"`, a `tokenizer.json`, or a directory that holds one.
    ///
    /// The end-of-text token is the one that `tokenizer_config.json` beside it names, else one of the
    /// usual names in the vocabulary.
    ///
    /// # Errors
    /// A file that is missing or that is not a tokenizer.
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
        // A template in a file of its own goes before one in the configuration.
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

    /// Reads the bytes of a `tokenizer.json`; `path` is only for messages.
    ///
    /// # Errors
    /// [`DataError::BadTokenizer`] for anything that is not one, or one whose replacements let a text explode.
    pub fn from_json(json: &[u8], path: &Path) -> Result<Self> {
        let bad = |problem: String| DataError::BadTokenizer { path: path.to_owned(), problem };
        // The `tokenizers` crate panics on some files: on most that are no JSON, hence the first line, and
        // on damaged tables of a few normalizers, hence the second. What it would print is said by our error.
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
        // Limits that a file may carry for inference would silently drop or invent training text.
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

    /// Takes the end-of-text token and the chat template from the bytes of a `tokenizer_config.json`; `path` is for
    /// messages.
    ///
    /// # Errors
    /// A file that is not JSON, that names a token which the vocabulary does not have, or whose template is broken.
    pub fn with_config(self, config_json: &[u8], path: &Path) -> Result<Self> {
        self.with_template(config_json, path, None)
    }

    /// As [`with_config`](Self::with_config), with a chat template from another file.
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

    /// How chats become text for this tokenizer.
    pub(crate) fn chat_template(&self) -> &ChatTemplate {
        match self {
            Self::Bytes => &ChatTemplate::ChatMl,
            Self::HuggingFace(hf) => &hf.chat,
        }
    }

    /// The ids of `text`, without any that the tokenizer would add at its ends.
    ///
    /// # Errors
    /// [`DataError::TokenizerFailed`] where the tokenizer has no way to represent the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match self {
            Self::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Self::HuggingFace(hf) => {
                let encoding = hf.call(|inner| inner.encode_fast(text, false))?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// The ids of `text`, and for each the byte of the text after its last.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
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

    /// The ids of a prompt for generation: as [`encode`](Self::encode), with the tokens that the
    /// tokenizer's own template puts around a text (a begin-of-text token, say).
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        match self {
            Self::Bytes => self.encode(text),
            Self::HuggingFace(hf) => {
                let encoding = hf.call(|inner| inner.encode_fast(text, true))?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// The ids of a chat, given as roles and what they say, with the words after which the assistant speaks.
    ///
    /// # Errors
    /// A chat that the template refuses, and as [`encode`](Self::encode).
    pub fn encode_chat(&self, messages: &[(String, String)]) -> Result<Vec<u32>> {
        let messages: Vec<Message> =
            messages.iter().map(|(role, content)| Message::new(role, content)).collect();
        let failed = |problem| DataError::BadChat { tokenizer: self.name().to_owned(), problem };
        self.encode(&self.chat_template().question(&messages).map_err(failed)?)
    }

    /// The marks of the chat template that are no token of the vocabulary, and so are spelled out in several tokens.
    /// Bytes have no marks.
    pub fn missing_markers(&self) -> Vec<String> {
        let Self::HuggingFace(hf) = self else { return Vec::new() };
        let is_missing = |marker: &String| hf.inner.token_to_id(marker).is_none();
        self.chat_template().markers().into_iter().filter(is_missing).collect()
    }

    /// Whether the chat template is the tokenizer's own, and not ChatML.
    pub fn has_chat_template(&self) -> bool {
        self.chat_template().hash().is_some()
    }

    /// The text that ends an answer of a chat, and its token if there is one; none where the template is the
    /// tokenizer's own, whose answers end with its end-of-text tokens.
    pub fn end_of_answer(&self) -> Option<(&'static str, Option<u32>)> {
        let text = self.chat_template().end_of_answer()?;
        let token = match self {
            Self::Bytes => None,
            Self::HuggingFace(hf) => hf.inner.token_to_id(text),
        };
        Some((text, token))
    }

    /// The text of `ids`. Special tokens, and ids beyond the vocabulary (a padded model can produce
    /// them), have no text; bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`DataError::TokenizerFailed`] where the tokenizer's decoder fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        match self {
            Self::Bytes => {
                let bytes: Vec<u8> = ids.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Self::HuggingFace(hf) => hf.call(|inner| inner.decode(ids, true)),
        }
    }

    /// One more than the largest id: the smallest vocabulary that a model needs for it.
    pub fn vocab_size(&self) -> usize {
        match self {
            Self::Bytes => 256,
            Self::HuggingFace(hf) => hf.largest_id as usize + 1,
        }
    }

    /// The token that ends a text, where the tokenizer has one.
    pub fn eos_id(&self) -> Option<u32> {
        match self {
            Self::Bytes => None,
            Self::HuggingFace(hf) => hf.eos,
        }
    }

    /// What it is called: `"bytes"`, or the path of its file.
    pub fn name(&self) -> &str {
        match self {
            Self::Bytes => "bytes",
            Self::HuggingFace(hf) => &hf.name,
        }
    }

    /// A hash of everything that decides which ids a corpus becomes.
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

    /// Checks that a model with `vocab_size` entries has an embedding for every id.
    ///
    /// # Errors
    /// [`DataError::TokenizerTooLarge`], with both numbers.
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

    /// Checks that `ids`, which came out of this tokenizer, are within its vocabulary.
    pub(crate) fn check_ids(&self, ids: &[u32]) -> Result<()> {
        match ids.iter().find(|&&id| id as usize >= self.vocab_size()) {
            None => Ok(()),
            Some(id) => Err(DataError::TokenizerFailed {
                tokenizer: self.name().to_owned(),
                problem: format!("it produced id {id}, beyond its vocabulary of {}", self.vocab_size()),
            }),
        }
    }

    /// Where a text may be cut so that the ids of its pieces, put together, are the ids of the whole.
    pub(crate) fn cut(&self) -> Cut {
        match self {
            Self::Bytes => Cut::Anywhere,
            Self::HuggingFace(hf) => hf.cut,
        }
    }
}

impl HfTokenizer {
    /// Asks the `tokenizers` crate, which panics on some texts where the file's numbers make no sense (a decoder
    /// that strips more than there is).
    fn call<T>(&self, ask: impl FnOnce(&tokenizers::Tokenizer) -> tokenizers::Result<T>) -> Result<T> {
        let failed = |problem| DataError::TokenizerFailed { tokenizer: self.name.clone(), problem };
        quiet::caught(|| ask(&self.inner))
            .ok_or_else(|| failed("its contents make no sense for this text".to_owned()))?
            .map_err(|problem| failed(problem.to_string()))
    }
}

/// The expressions with which Llama 3 and Qwen 2 split text into words; GPT-2's is built into
/// `tokenizers`. For these three it is proven below that line borders are safe.
const KNOWN_SPLITS: [&str; 2] = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// Whether the tokenizer gives the same ids when a text is cut at a line border in the sense of
/// [`Cut::LineBorders`]: after a `\n` that follows a character other than white space and precedes an
/// ASCII letter. True under five conditions, and assumed false otherwise:
///
/// 1. Words are split by one of three known expressions. None has an alternative that matches `\n` and a
///    letter after it, so a word ends at the border; none looks behind, so what follows the border is
///    split as if it stood alone; and the only one that looks ahead, `\s+(?!\S)`, matters to the white
///    space before the border alone, which is that single `\n`: it is one word either way.
/// 2. The model is BPE without dropout, which sees one word at a time.
/// 3. Added tokens do not contain `\n`, nor look at the white space or words around them.
/// 4. The normalizer, if any, is NFC or NFD: in both, `\n` and ASCII letters join nothing before them, and
///    no other character becomes white space.
/// 5. No space is put before the first word.
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

    /// Each expression of [`line_borders_are_safe`], with merges that reach over every kind of border, so
    /// that a word cut in the wrong place shows.
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
