//! The corpus of a run: which text, through which tokenizer, cut into training and validation windows.

use std::path::Path;
use std::sync::Arc;

use lockstep_data::{
    Bar, Dataset, Format, SampleOrder, Tail, TokenFile, TokenizeOptions, Tokenizer, WindowOptions,
    demo_sources, expand, split_validation, tokenize_files,
};
use lockstep_model::ModelConfig;

use crate::config::{DataFormat, DataOrder, ModelSource, RunConfig, TokenizerSource};
use crate::{Error, ResolvedModel};

/// How much text the built-in demonstration takes.
const DEMONSTRATION_BYTES: u64 = 8 << 20;

/// What a run reads.
#[derive(Debug)]
pub struct Corpus {
    /// Training windows.
    pub train: Dataset,
    /// Validation windows in their order; none if there is too little text for one.
    pub valid: Option<Dataset>,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// What a checkpoint calls it: `bytes` or a path.
    pub tokenizer_name: String,
    /// Hash of the training text's tokens: two corpora with the same one give the same samples.
    pub digest: String,
    /// Whether the token file was there already.
    pub from_cache: bool,
}

impl Corpus {
    /// Finds, tokenizes and cuts the text that `config` names.
    ///
    /// # Errors
    /// Text that is missing, malformed or too short; a tokenizer that does not fit the model.
    pub fn open(config: &RunConfig, model: &ResolvedModel) -> Result<Self, Error> {
        let (tokenizer, tokenizer_name) = load_tokenizer(config, model)?;
        tokenizer.fits(model.config.vocab_size())?;
        let format = match config.data.format {
            DataFormat::Auto => Format::Auto,
            DataFormat::Text => Format::Text,
            DataFormat::JsonLines => Format::JsonLines,
        };
        let cache_dir = config.cache_dir();
        let progress = Bar::default();
        let options = TokenizeOptions {
            cache_dir: &cache_dir,
            text_field: &config.data.text_field,
            progress: &progress,
        };
        let train_files = if config.data.train.is_empty() {
            demo_sources(DEMONSTRATION_BYTES, own_sources())?
        } else {
            expand(&config.data.train, format)?
        };
        let tokenized = tokenize_files(&train_files, &tokenizer, &options)?;
        let from_cache = tokenized.from_cache;
        let tokens = Arc::new(tokenized.file);
        let digest = tokens.header().payload_hash.to_hex().to_string();
        let (train_range, valid_range) = split_validation(
            tokens.tokens(),
            if config.data.valid.is_empty() { config.data.valid_fraction } else { 0.0 },
        )?;
        let order = match config.data.order {
            DataOrder::Sequential => SampleOrder::Sequential,
            DataOrder::Shuffle => SampleOrder::Shuffle { seed: config.train.seed },
        };
        let seq_len = config.train.seq_len;
        let window = WindowOptions { seq_len, order, tail: Tail::Drop };
        let train = Dataset::new(Arc::clone(&tokens), train_range, window, "the training set")?;
        let window = WindowOptions { seq_len, order: SampleOrder::Sequential, tail: Tail::Drop };
        let valid = if config.data.valid.is_empty() {
            // A short corpus may have no whole window to spare; then there is nothing to evaluate on.
            (valid_range.end - valid_range.start > seq_len as u64)
                .then(|| Dataset::new(tokens, valid_range, window, "the validation set"))
                .transpose()?
        } else {
            let files = expand(&config.data.valid, format)?;
            let tokens = Arc::new(tokenize_files(&files, &tokenizer, &options)?.file);
            Some(whole(tokens, window)?)
        };
        Ok(Self { train, valid, tokenizer, tokenizer_name, digest, from_cache })
    }
}

fn whole(tokens: Arc<TokenFile>, window: WindowOptions) -> Result<Dataset, Error> {
    let range = 0..tokens.tokens();
    Ok(Dataset::new(tokens, range, window, "the validation set")?)
}

/// The project's own sources, for a machine where cargo has downloaded nothing.
fn own_sources() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// The tokenizer that `[data]` names, else the one in the model's directory, else bytes; with its name.
///
/// # Errors
/// A file that is missing or that is not a tokenizer; no tokenizer for a model that is not byte-level.
pub fn load_tokenizer(config: &RunConfig, model: &ResolvedModel) -> Result<(Tokenizer, String), Error> {
    let name = match &config.data.tokenizer {
        Some(TokenizerSource::Bytes) => "bytes".to_owned(),
        // A checkpoint remembers it, and may be read from another directory.
        Some(TokenizerSource::File(path)) => absolute(path),
        None => in_model_directory(config).unwrap_or_else(|| "bytes".to_owned()),
    };
    if name == "bytes" && config.data.tokenizer.is_none() && !is_byte_level(&model.config) {
        let problem = config.problem(
            "data.tokenizer",
            format!("the model has a vocabulary of {} and no tokenizer is named", model.config.vocab_size()),
            "the path of its tokenizer.json; or \"bytes\", which uses the first 256 ids",
        );
        return Err(Error::Configuration(problem.into()));
    }
    Ok((Tokenizer::load(&name)?, name))
}

/// Whether a vocabulary is that of bytes, with room for up to three special tokens.
fn is_byte_level(config: &ModelConfig) -> bool {
    (256..=259).contains(&config.vocab_size())
}

fn in_model_directory(config: &RunConfig) -> Option<String> {
    let ModelSource::Path(dir) = config.model_source() else { return None };
    let file = dir.join("tokenizer.json");
    file.is_file().then(|| absolute(&file))
}

fn absolute(path: &Path) -> String {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned()).display().to_string()
}
