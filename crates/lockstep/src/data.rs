//! `lockstep data tokenize|show`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use clap::{Args, Subcommand};
use lockstep_config::{RunConfig, find_tokenizer, human, resolve_model};
use lockstep_data::{
    Bar, Contents, Dataset, Ending, ExportOptions, FindDocuments, Format, IdType, OpenOptions, SourceFile,
    TextOptions, Tokenizer, Tokens, expand, tokenize_to_indexed,
};
use lockstep_launch::interrupt::Interrupt;
use lockstep_train::{TextCorpus, answers};
use serde_json::{Value, json};

use crate::exit::Failure;
use crate::output::say;
use crate::sample_view;

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Convert text, JSON lines and Parquet to a .bin and .idx, which Megatron-LM reads too
    Tokenize(TokenizeArguments),
    /// Show documents, tokens and a sample of files, or of a run's text or images
    Show(ShowArguments),
}

/// Options for reading text files.
#[derive(Debug, Args)]
struct TextArguments {
    /// "bytes", the path of a tokenizer.json or of its directory, or a repository (org/name)
    #[arg(long)]
    tokenizer: Option<String>,
    /// auto, text, jsonl, parquet, indexed or tokens
    #[arg(long, default_value = "auto")]
    format: String,
    /// The field of a JSON line or the column of a Parquet file that holds the text
    #[arg(long, default_value = "text")]
    text_field: String,
}

impl TextArguments {
    fn files(&self, patterns: &[String]) -> Result<Vec<SourceFile>, Failure> {
        Ok(expand(patterns, self.format.parse::<Format>()?)?)
    }

    fn tokenizer(&self) -> Result<Option<Tokenizer>, Failure> {
        let Some(name) = &self.tokenizer else { return Ok(None) };
        Ok(Some(Tokenizer::load(&find_tokenizer(name)?)?))
    }

    fn text(&self) -> TextOptions<'_> {
        TextOptions { text_field: &self.text_field, ..TextOptions::default() }
    }
}

#[derive(Debug, Args)]
pub(crate) struct TokenizeArguments {
    /// Files, directories, globs
    #[arg(required = true, value_name = "FILE")]
    input: Vec<String>,
    /// Prefix of the result, PREFIX.bin and PREFIX.idx; unfinished work is in PREFIX.partial, and the same command resumes it
    #[arg(long, short, value_name = "PREFIX")]
    output: PathBuf,
    #[command(flatten)]
    text: TextArguments,
    /// Do not append the tokenizer's end-of-text token to documents
    #[arg(long)]
    no_end_of_text: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ShowArguments {
    /// Files, directories, globs; or one RUN.toml
    #[arg(required = true, value_name = "FILE")]
    input: Vec<String>,
    #[command(flatten)]
    text: TextArguments,
    /// Type of raw token files: u16 or u32
    #[arg(long)]
    token_type: Option<String>,
    /// Check every token instead of a thousand pages, or every sample
    #[arg(long)]
    verify: bool,
    /// Set a value of RUN.toml, e.g. --set data.packing=documents
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    settings: Vec<String>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(command: &Command) -> Result<ExitCode, Failure> {
    match command {
        Command::Tokenize(arguments) => tokenize(arguments)?,
        Command::Show(arguments) => show(arguments)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn tokenize(arguments: &TokenizeArguments) -> Result<(), Failure> {
    let files = arguments.text.files(&arguments.input)?;
    let tokenizer = arguments.text.tokenizer()?.unwrap_or(Tokenizer::Bytes);
    let interrupt = Interrupt::on_signals()?;
    let progress = Bar::default();
    let begin = Instant::now();
    let made = tokenize_to_indexed(
        &files,
        &tokenizer,
        &ExportOptions {
            prefix: &arguments.output,
            text: arguments.text.text(),
            ending: if arguments.no_end_of_text { Ending::Nothing } else { Ending::EndOfText },
            progress: &progress,
            should_stop: &|| interrupt.is_requested(),
        },
    )?;
    let seconds = begin.elapsed().as_secs_f64();
    let id_type = made.id_type.name();
    if arguments.json {
        say!(
            "{}",
            json!({
                "bin": made.bin, "idx": made.index, "id_type": id_type, "documents": made.documents,
                "tokens": made.tokens, "resumed_tokens": made.resumed_tokens, "source_bytes": made.source_bytes,
                "seconds": seconds,
            })
        );
        return Ok(());
    }
    say!(
        "{} tokens ({id_type}) in {} from {}, in {}",
        human::count(made.tokens as f64),
        human::plural(made.documents as usize, "document"),
        human::bytes(made.source_bytes),
        human::seconds(seconds),
    );
    say!("wrote {} and {}", made.bin.display(), made.index.display());
    Ok(())
}

fn show(arguments: &ShowArguments) -> Result<(), Failure> {
    let path = Path::new(&arguments.input[0]);
    if arguments.input.len() == 1 && path.extension().is_some_and(|extension| extension == "toml") {
        return show_run(arguments, path);
    }
    if !arguments.settings.is_empty() {
        return Err(Failure::configuration(
            "--set is for a RUN.toml; allowed with it: one file that ends with .toml",
        ));
    }
    let files = arguments.text.files(&arguments.input)?;
    let mut tokenizer = arguments.text.tokenizer()?;
    if tokenizer.is_none() && files.iter().any(SourceFile::is_text) {
        tokenizer = Some(Tokenizer::Bytes);
    }
    let cache_dir = RunConfig::default().cache_dir();
    let progress = Bar::default();
    let options = OpenOptions {
        tokenizer: tokenizer.as_ref(),
        // Without a tokenizer the vocabulary is unknown; ids are limited as labels are.
        vocab_size: tokenizer.as_ref().map_or(1 << 31, |tokenizer| tokenizer.vocab_size() as u64),
        id_type: match &arguments.token_type {
            Some(name) => Some(name.parse()?),
            None if tokenizer.is_none() => Some(IdType::U16),
            None => None,
        },
        documents: FindDocuments::ByEndOfText,
        cache_dir: &cache_dir,
        text: arguments.text.text(),
        progress: &progress,
    };
    let tokens = Tokens::open(&files, &options)?;
    if arguments.verify {
        tokens.verify()?;
    }
    let contents = tokens.contents(tokenizer.as_ref())?;
    if arguments.json {
        say!("{}", describe(&arguments.input.join(", "), &contents));
    } else {
        print(&arguments.input.join(", "), &contents);
    }
    Ok(())
}

fn show_run(arguments: &ShowArguments, path: &Path) -> Result<(), Failure> {
    let config = RunConfig::load(Some(path), &arguments.settings)?;
    let model = resolve_model(&config)?;
    if config.data.format.is_of_samples() {
        return sample_view::show(&config, &model, arguments.verify, arguments.json);
    }
    let corpus = TextCorpus::open(&config, &model)?;
    if arguments.verify {
        corpus.sources.iter().try_for_each(|source| source.tokens.verify())?;
    }
    let samples = config.train.steps * config.train.global_batch as u64;
    let mut sources = Vec::new();
    for (i, source) in corpus.sources.iter().enumerate() {
        let contents = source.tokens.contents(corpus.tokenizer.as_ref())?;
        let (share, epochs) = (corpus.train.share(i), corpus.train.epochs(i, samples));
        if !arguments.json {
            print(&source.name, &contents);
            say!("  in this run  {:.4} % of the samples, {epochs:.2} epochs", share * 100.0);
        }
        let mut described = describe(&source.name, &contents);
        described["share"] = share.into();
        described["epochs"] = epochs.into();
        sources.push(described);
    }
    let sequences = |set: &Dataset| {
        let mut described = json!({ "sequences": set.windows(), "filled": set.filled() });
        if let Some(supervision) = set.supervision() {
            described["answers"] = json!({
                "tokens": supervision.tokens, "predicted_tokens": supervision.labels,
                "samples": supervision.samples, "without_answer": supervision.without_answer,
                "answer_out_of_window": supervision.answer_out_of_window, "truncated": supervision.truncated,
                "masked_windows": supervision.masked_windows,
            });
        }
        described
    };
    if arguments.json {
        let valid = corpus.valid.as_ref().map(sequences);
        say!("{}", json!({ "sources": sources, "train": sequences(&corpus.train), "valid": valid }));
        return Ok(());
    }
    for (name, set) in [("train", Some(&corpus.train)), ("valid", corpus.valid.as_ref())] {
        let Some(set) = set else { continue };
        say!(
            "{name}  {} sequences of {} tokens, {:.2} % filled",
            set.windows(),
            set.seq_len(),
            set.filled() * 100.0
        );
        if let Some(supervision) = set.supervision() {
            say!("       {}", answers(&supervision, set.seq_len()));
        }
    }
    Ok(())
}

fn describe(name: &str, contents: &Contents) -> Value {
    let files: Vec<Value> = contents
        .files
        .iter()
        .map(|file| {
            json!({
                "path": file.path, "id_type": file.id_type.name(), "documents": file.documents, "tokens": file.tokens,
            })
        })
        .collect();
    json!({
        "source": name, "documents": contents.documents, "tokens": contents.tokens,
        "context_tokens": contents.context_tokens, "longest_document_tokens": contents.longest_document,
        "sample_ids": contents.sample_ids, "sample": contents.sample, "files": files,
    })
}

fn print(name: &str, contents: &Contents) {
    say!("{name}");
    say!("  documents    {}", contents.documents);
    say!("  tokens       {} (longest document {})", contents.tokens, contents.longest_document);
    if contents.context_tokens > 0 {
        say!("  context      {} of them are read and never predicted", contents.context_tokens);
    }
    for file in &contents.files {
        say!(
            "  {:<12} {} ({} documents, {} tokens)",
            file.id_type.name(),
            file.path.display(),
            file.documents,
            file.tokens
        );
    }
    match &contents.sample {
        Some(text) => say!("  begins       {text:?}"),
        None => say!("  begins       {:?}", contents.sample_ids),
    }
}
