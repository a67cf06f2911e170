//! The text of a run: its sources and their weights, the tokenizer, and the windows for training and validation.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use lockstep_config::{
    DataFormat, DataOrder, DataPacking, DataSource, ModelSource, Problems, ResolvedModel, RunConfig,
    TokenType, TokenizerSource,
};
use lockstep_data::{
    Bar, Columns, DataError, Dataset, FindDocuments, Format, IdType, OpenOptions, Packing, RecordShape,
    SampleOrder, SourceFile, Tail, TextOptions, Tokenizer, Tokens, WindowOptions, demo_sources, expand,
    split_validation,
};
use lockstep_model::ModelConfig;
use serde_json::{Value, json};

use crate::Error;

/// Size of the text of the built-in demonstration, in bytes.
const DEMONSTRATION_BYTES: u64 = 8 << 20;

/// Opened training and validation text of a run.
#[derive(Debug)]
pub struct TextCorpus {
    /// Sources of the training blend; one, unless weights are given.
    pub sources: Vec<CorpusSource>,
    /// Windows for training, in the configured order.
    pub train: Dataset,
    /// Validation windows in file order; `None` if the text is too short for one.
    pub valid: Option<Dataset>,
    /// Tokenizer; `None` if all files hold tokens and no tokenizer is named.
    pub tokenizer: Option<Tokenizer>,
    /// Name of the tokenizer in checkpoints: `bytes` or a path.
    pub tokenizer_name: Option<String>,
    /// Kinds of JSON records at the beginning of the training files.
    pub shapes: Vec<RecordShape>,
    /// Hash of the training tokens: two corpora with the same one give the same samples.
    pub digest: String,
}

/// One source of a blend.
#[derive(Debug)]
pub struct CorpusSource {
    /// Patterns of its files.
    pub name: String,
    /// Tokens of its files.
    pub tokens: Arc<Tokens>,
}

/// A source before its files are opened.
struct Source {
    name: String,
    weight: f64,
    files: Vec<SourceFile>,
}

impl TextCorpus {
    /// Returns the digest, the tokenizer and the sources of the data, as a run's report names them.
    pub(crate) fn described(&self) -> Value {
        let sources = self.sources.iter().map(|source| {
            json!({ "name": source.name, "tokens": source.tokens.tokens(), "digest": source.tokens.digest() })
        });
        json!({ "digest": self.digest, "tokenizer": self.tokenizer_name, "sources": sources.collect::<Vec<_>>() })
    }

    /// Finds, tokenizes and cuts what `config` names.
    ///
    /// # Errors
    /// If files are missing, malformed or too short (one error lists those of all sources), or if the tokenizer does not fit the
    /// model.
    pub fn open(config: &RunConfig, model: &ResolvedModel) -> Result<Self, Error> {
        let sources = sources(config)?;
        let valid_files = expand(&config.data.valid, format(config))?;
        let mut files = sources.iter().flat_map(|source| &source.files).chain(&valid_files);
        let tokenizer = match files.clone().any(SourceFile::is_text) {
            true => Some(load_tokenizer(config, model)?),
            false => find_tokenizer(config, model)?,
        };
        let (tokenizer, tokenizer_name) = tokenizer.unzip();
        if let Some(tokenizer) = &tokenizer {
            tokenizer.fits(model.config.vocab_size())?;
        }
        let packing = config.data.packing.map(|packing| match packing {
            DataPacking::Stream => Packing::Stream,
            DataPacking::Documents => Packing::Documents,
            DataPacking::WholeDocuments => Packing::WholeDocuments,
        });
        let keeps_apart = packing.is_some_and(|packing| packing != Packing::Stream);
        let has_end_of_text = tokenizer.as_ref().is_some_and(|tokenizer| tokenizer.eos_id().is_some());
        if keeps_apart && !has_end_of_text && files.any(SourceFile::hides_documents) {
            let problem = config.problem(
                "data.packing",
                "raw token files show their documents only by the end-of-text token, and no tokenizer names one",
                "data.tokenizer with it, or packing = \"stream\"",
            );
            return Err(Problems::from(problem).into());
        }
        // The column names were checked with the configuration.
        let columns = Columns::new(&config.data.columns).unwrap_or_default();
        let text = TextOptions { text_field: &config.data.text_field, columns: &columns };
        let shapes = shapes(&sources, text);
        let cache_dir = config.cache_dir();
        let progress = Bar::default();
        let options = OpenOptions {
            tokenizer: tokenizer.as_ref(),
            vocab_size: model.config.vocab_size() as u64,
            id_type: config.data.token_type.map(|token_type| match token_type {
                TokenType::U16 => IdType::U16,
                TokenType::U32 => IdType::U32,
            }),
            documents: if keeps_apart { FindDocuments::ByEndOfText } else { FindDocuments::No },
            cache_dir: &cache_dir,
            text,
            progress: &progress,
        };
        let opened = sources.iter().map(|source| Tokens::open(&source.files, &options).map(Arc::new));
        let opened = DataError::all_of(opened)?;
        let valid_tokens = match valid_files.as_slice() {
            [] => None,
            files => Some(Arc::new(Tokens::open(files, &options)?)),
        };

        let (train, valid) = datasets(config, packing, &sources, &opened, valid_tokens)?;
        let named = sources.into_iter().zip(opened);
        let sources: Vec<CorpusSource> =
            named.map(|(source, tokens)| CorpusSource { name: source.name, tokens }).collect();
        Ok(Self { train, valid, tokenizer, tokenizer_name, digest: digest(&sources), shapes, sources })
    }

    /// Returns true if the tokens of a text source came from the cache.
    pub fn from_cache(&self) -> bool {
        self.sources.iter().any(|source| source.tokens.from_cache())
    }
}

/// Returns the training windows, blended by weight, and the validation windows: from `valid_tokens`, or from the ends of the
/// sources.
fn datasets(
    config: &RunConfig,
    packing: Option<Packing>,
    sources: &[Source],
    opened: &[Arc<Tokens>],
    valid_tokens: Option<Arc<Tokens>>,
) -> Result<(Dataset, Option<Dataset>), Error> {
    let fraction = if valid_tokens.is_none() { config.data.valid_fraction } else { 0.0 };
    let (mut train, mut valid) = (Vec::new(), Vec::new());
    for (source, tokens) in sources.iter().zip(opened) {
        let (train_range, valid_range) = split(tokens, fraction)?;
        let what = match sources.len() {
            1 => "the training set".to_owned(),
            _ => format!("the training set of {}", source.name),
        };
        let window = window_options(config, packing, tokens);
        let part = Dataset::new(Arc::clone(tokens), train_range, window, &what);
        train.push(part.map(|part| (part, source.weight)));
        let part = Dataset::new(Arc::clone(tokens), valid_range, in_order(window), "the validation set");
        match part {
            Ok(part) => valid.push((part, source.weight)),
            // A short source may have no whole window for validation; it then contributes none.
            Err(DataError::TooFewTokens { .. } | DataError::NoAnswers { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    if let Some(tokens) = valid_tokens {
        let range = 0..tokens.tokens();
        let window = in_order(window_options(config, packing, &tokens));
        valid = vec![(Dataset::new(tokens, range, window, "the validation set")?, 1.0)];
    }
    let valid = if valid.is_empty() { None } else { Some(Dataset::blend(&valid)?) };
    Ok((Dataset::blend(&DataError::all_of(train)?)?, valid))
}

/// Number of files whose first record is inspected.
const FILES_LOOKED_AT: usize = 64;

/// Returns the kinds of records with which the first files begin.
fn shapes(sources: &[Source], text: TextOptions<'_>) -> Vec<RecordShape> {
    let mut shapes = Vec::new();
    for file in sources.iter().flat_map(|source| &source.files).take(FILES_LOOKED_AT) {
        shapes.extend(file.record_shape(text).filter(|shape| !shapes.contains(shape)));
    }
    shapes
}

/// Returns the token ranges for training and, after it, for validation. No sample lies in both.
fn split(tokens: &Tokens, fraction: f64) -> Result<(Range<u64>, Range<u64>), Error> {
    let (train, valid) = split_validation(tokens.tokens(), fraction)?;
    if !tokens.has_contexts() {
        return Ok((train, valid));
    }
    let border = tokens.next_document(valid.start);
    Ok((0..border, border..tokens.tokens()))
}

/// Returns the window options for training. Samples with prompts are packed as whole documents unless `packing` is given.
fn window_options(config: &RunConfig, packing: Option<Packing>, tokens: &Tokens) -> WindowOptions {
    let default = || if tokens.has_contexts() { Packing::WholeDocuments } else { Packing::Stream };
    WindowOptions {
        seq_len: config.train.seq_len,
        order: match config.data.order {
            DataOrder::Sequential => SampleOrder::Sequential,
            DataOrder::Shuffle => SampleOrder::Shuffle { seed: config.train.seed },
        },
        tail: Tail::Drop,
        packing: packing.unwrap_or_else(default),
    }
}

fn in_order(window: WindowOptions) -> WindowOptions {
    WindowOptions { order: SampleOrder::Sequential, ..window }
}

/// Returns the sources in `data.train` with their files. Entries without a weight form one source.
fn sources(config: &RunConfig) -> Result<Vec<Source>, Error> {
    let format = format(config);
    if config.data.train.is_empty() {
        let mut files = demo_sources(DEMONSTRATION_BYTES);
        if files.is_empty() {
            files.push(own_sources(&config.cache_dir())?);
        }
        return Ok(vec![Source { name: "the demonstration's text".to_owned(), weight: 1.0, files }]);
    }
    let mut plain = Vec::new();
    let mut weighted = Vec::new();
    for source in &config.data.train {
        match source {
            DataSource::Plain(path) => plain.push(path.as_str()),
            DataSource::Weighted { path, weight } => weighted.push((vec![path.as_str()], *weight)),
        }
    }
    if !plain.is_empty() {
        // The configuration's check guarantees that the remaining weight is positive.
        let rest = 1.0 - weighted.iter().map(|(_, weight)| weight).sum::<f64>();
        weighted.insert(0, (plain, rest));
    }
    let expanded = weighted.into_iter().map(|(patterns, weight)| {
        let files = expand(&patterns, format)?;
        Ok(Source { name: patterns.join(", "), weight, files })
    });
    Ok(DataError::all_of(expanded)?)
}

fn format(config: &RunConfig) -> Format {
    match config.data.format {
        // Samples are not opened as text: see `TrainingData`.
        DataFormat::Auto
        | DataFormat::Cifar10
        | DataFormat::Cifar100
        | DataFormat::Idx
        | DataFormat::ImageFolder
        | DataFormat::WebDataset
        | DataFormat::TfRecord => Format::Auto,
        DataFormat::Text => Format::Text,
        DataFormat::JsonLines => Format::JsonLines,
        DataFormat::Parquet => Format::Parquet,
        DataFormat::Indexed => Format::Indexed,
        DataFormat::Tokens => Format::RawTokens,
    }
}

fn digest(sources: &[CorpusSource]) -> String {
    match sources {
        [only] => only.tokens.digest(),
        sources => {
            let digests: Vec<String> = sources.iter().map(|source| source.tokens.digest()).collect();
            blake3::hash(digests.concat().as_bytes()).to_hex().to_string()
        }
    }
}

/// Source text of this project, embedded for machines where cargo has downloaded nothing.
const OWN_SOURCES: &str = include_str!(concat!(env!("OUT_DIR"), "/own_sources.rs.txt"));

/// Returns [`OWN_SOURCES`] as a file in the cache directory.
///
/// # Errors
/// If the file cannot be written.
fn own_sources(cache_dir: &Path) -> Result<SourceFile, DataError> {
    let digest = blake3::hash(OWN_SOURCES.as_bytes()).to_hex();
    let path = cache_dir.join(format!("own-sources-{}.rs", &digest[..16]));
    let is_there = std::fs::metadata(&path).is_ok_and(|found| found.len() == OWN_SOURCES.len() as u64);
    if !is_there {
        std::fs::create_dir_all(cache_dir).map_err(DataError::io("create", cache_dir))?;
        // Written to a temporary file first: another run may read it at the same time.
        let staged = path.with_extension(format!("{}.tmp", std::process::id()));
        std::fs::write(&staged, OWN_SOURCES).map_err(DataError::io("write", &staged))?;
        std::fs::rename(&staged, &path).map_err(DataError::io("rename", &path))?;
    }
    SourceFile::new(path, Format::Text)
}

/// Returns the tokenizer named in `[data]`, else the one in the model's directory, else bytes, together with its name.
///
/// # Errors
/// If the file is missing or not a tokenizer, or if a model that is not byte-level has no tokenizer.
pub fn load_tokenizer(config: &RunConfig, model: &ResolvedModel) -> Result<(Tokenizer, String), Error> {
    find_tokenizer(config, model)?.ok_or_else(|| {
        let problem = config.problem(
            "data.tokenizer",
            format!("the model has a vocabulary of {} and no tokenizer is named", model.config.vocab_size()),
            "the path of its tokenizer.json; or \"bytes\", which uses the first 256 ids",
        );
        Problems::from(problem).into()
    })
}

/// As [`load_tokenizer`]; `None` if there is no tokenizer.
fn find_tokenizer(config: &RunConfig, model: &ResolvedModel) -> Result<Option<(Tokenizer, String)>, Error> {
    let name = match &config.data.tokenizer {
        Some(TokenizerSource::Bytes) => Some("bytes".to_owned()),
        // Checkpoints store the path and may be read from another directory.
        Some(TokenizerSource::File(path)) => Some(absolute(path)),
        None => {
            in_model_directory(config).or_else(|| is_byte_level(&model.config).then(|| "bytes".to_owned()))
        }
    };
    Ok(name.map(|name| Tokenizer::load(&name).map(|tokenizer| (tokenizer, name))).transpose()?)
}

/// Returns true if a vocabulary is that of bytes with up to three special tokens.
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
