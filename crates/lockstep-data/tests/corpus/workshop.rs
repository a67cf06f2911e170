//! Helpers of the tests: a temporary directory, sample text, and a small trained tokenizer.

use std::{
    fs,
    path::PathBuf,
    sync::{Arc, LazyLock},
};

use lockstep_data::{
    FindDocuments, Format, OpenOptions, Progress, Result, Silent, SourceFile, TextOptions, TokenFile,
    TokenizeOptions, Tokenized, Tokenizer, Tokens, expand, tokenize_files,
};
use tokenizers::{
    AddedToken, TokenizerBuilder,
    models::bpe::{BPE, BpeTrainer},
    pre_tokenizers::byte_level::ByteLevel,
};

/// Temporary directory with files to tokenize and a cache.
pub(crate) struct Workshop {
    dir: tempfile::TempDir,
}

impl Workshop {
    pub(crate) fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn cache(&self) -> PathBuf {
        self.path("cache")
    }

    /// Writes a file and returns its path, which is also a pattern.
    pub(crate) fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> String {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    }

    pub(crate) fn sources(&self, patterns: &[String]) -> Vec<SourceFile> {
        expand(patterns, Format::Auto).unwrap()
    }

    pub(crate) fn tokenize(&self, patterns: &[String], tokenizer: &Tokenizer) -> Result<Tokenized> {
        self.tokenize_with(patterns, tokenizer, &Silent)
    }

    pub(crate) fn tokenize_with(
        &self,
        patterns: &[String],
        tokenizer: &Tokenizer,
        progress: &dyn Progress,
    ) -> Result<Tokenized> {
        let text = TextOptions::default();
        let options = TokenizeOptions { cache_dir: &self.cache(), text, progress };
        tokenize_files(&self.sources(patterns), tokenizer, &options)
    }

    /// Opens files as a run does whose model has `vocab_size` ids and which keeps documents apart.
    pub(crate) fn open(
        &self,
        patterns: &[String],
        format: Format,
        tokenizer: Option<&Tokenizer>,
        vocab_size: u64,
    ) -> Result<Arc<Tokens>> {
        let options = OpenOptions {
            tokenizer,
            vocab_size,
            id_type: None,
            documents: FindDocuments::ByEndOfText,
            cache_dir: &self.cache(),
            text: TextOptions::default(),
            progress: &Silent,
        };
        Tokens::open(&expand(patterns, format)?, &options).map(Arc::new)
    }

    /// Opens a text whose tokens are these bytes.
    pub(crate) fn byte_tokens(&self, bytes: impl AsRef<[u8]>) -> Arc<Tokens> {
        let pattern = self.write("bytes.txt", bytes);
        self.open(&[pattern], Format::Auto, Some(&Tokenizer::Bytes), 256).unwrap()
    }

    /// Returns the names in the cache directory, sorted.
    pub(crate) fn cached(&self) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.cache()) else { return Vec::new() };
        let mut names: Vec<String> =
            entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

pub(crate) fn all_ids(file: &TokenFile) -> Vec<u32> {
    let mut ids = Vec::new();
    file.read(0..file.tokens(), &mut ids).unwrap();
    ids
}

/// Returns text of about `lines` lines with words of very different frequency.
pub(crate) fn sample_text(lines: usize) -> String {
    const WORDS: [&str; 12] =
        ["the", "a", "rank", "reduces", "gradients", "über", "世界", "all", "ranks", "wait", "step", "loss"];
    let mut text = String::new();
    for line in 0..lines {
        for word in 0..9 {
            text.push_str(WORDS[(line * line + word * 7) % (WORDS.len() - line % 3)]);
            text.push(' ');
        }
        text.push_str(if line % 11 == 0 { "end.\n\n" } else { "end.\n" });
    }
    text
}

/// Returns the `tokenizer.json` of a byte-level BPE of about 300 tokens with an end-of-text token, trained on
/// [`sample_text`].
pub(crate) fn trained_tokenizer_json() -> String {
    static JSON: LazyLock<String> = LazyLock::new(train_tokenizer);
    JSON.clone()
}

fn train_tokenizer() -> String {
    let mut tokenizer = TokenizerBuilder::new()
        .with_model(BPE::default())
        .with_normalizer(None::<tokenizers::NormalizerWrapper>)
        .with_pre_tokenizer(Some(ByteLevel::new(false, true, true)))
        .with_post_processor(Some(ByteLevel::default()))
        .with_decoder(Some(ByteLevel::default()))
        .build()
        .unwrap();
    let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let mut trainer = BpeTrainer::builder()
        .vocab_size(300)
        .min_frequency(1)
        .initial_alphabet(alphabet.into_iter().collect())
        .special_tokens(vec![AddedToken::from("<|endoftext|>", true)])
        .show_progress(false)
        .build();
    tokenizer.train(&mut trainer, [sample_text(200)].into_iter()).unwrap();
    tokenizer.to_string(false).unwrap()
}

pub(crate) fn trained_tokenizer() -> Tokenizer {
    Tokenizer::from_json(trained_tokenizer_json().as_bytes(), "trained.json".as_ref()).unwrap()
}
