//! `lockstep eval` and `lockstep generate`.

use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use lockstep_data::{
    Bar, Dataset, FindDocuments, Format, OpenOptions, Packing, SampleOrder, SourceFile, Tail, TextOptions,
    TextStream, Tokens, WindowOptions, expand,
};
use lockstep_infer::{Generator, InferError, LoadedModel, Sampler, Sampling, evaluate};
use lockstep_train::RunConfig;
use serde_json::json;

use crate::exit::Failure;
use crate::output::say;

#[derive(Debug, Args)]
pub(crate) struct EvalArguments {
    /// A Hugging Face directory, or a checkpoint of a run
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// A directory with an adapter of PEFT's for the model
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Files of text, JSON lines or tokens, directories, globs
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    data: Vec<String>,
    /// Tokens per window [default: the model's maximum, at most 1024]
    #[arg(long)]
    seq_len: Option<usize>,
    /// Compute threads [default: all cores]
    #[arg(long)]
    threads: Option<usize>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(crate) fn eval(arguments: &EvalArguments) -> Result<ExitCode, Failure> {
    let model = open(&arguments.model, arguments.adapter.as_deref(), arguments.threads)?;
    let longest = model.config().max_position_embeddings();
    let seq_len = arguments.seq_len.unwrap_or(longest.min(1024));
    if seq_len == 0 || seq_len > longest {
        return Err(Failure::configuration(format!("--seq-len {seq_len}: allowed is 1 to {longest}")));
    }
    let files = expand(&arguments.data, Format::Auto)?;
    let cache_dir = RunConfig::default().cache_dir();
    let progress = Bar::default();
    let tokenizer = files.iter().any(SourceFile::is_text).then(|| model.tokenizer()).transpose()?;
    let options = OpenOptions {
        tokenizer: tokenizer.as_ref(),
        vocab_size: model.config().vocab_size() as u64,
        id_type: None,
        documents: FindDocuments::No,
        cache_dir: &cache_dir,
        text: TextOptions { text_field: "text" },
        progress: &progress,
    };
    let tokens = Arc::new(Tokens::open(&files, &options)?);
    let range = 0..tokens.tokens();
    let window =
        WindowOptions { seq_len, order: SampleOrder::Sequential, tail: Tail::Pad, packing: Packing::Stream };
    let result = evaluate(&model, &Dataset::new(tokens, range, window, "the text")?)?;
    let perplexity = result.perplexity();
    if arguments.json {
        say!("{}", json!({ "loss": result.loss, "perplexity": perplexity, "tokens": result.tokens }));
    } else {
        say!("loss {:.4}  perplexity {perplexity:.3}  tokens {}", result.loss, result.tokens);
    }
    Ok(ExitCode::SUCCESS)
}

fn open(model: &Path, adapter: Option<&Path>, asked_threads: Option<usize>) -> Result<LoadedModel, Failure> {
    let threads = threads(asked_threads)?;
    Ok(match adapter {
        None => LoadedModel::open(model, threads)?,
        Some(adapter) => LoadedModel::open_adapted(model, adapter, threads)?,
    })
}

#[derive(Debug, Args)]
pub(crate) struct GenerateArguments {
    /// A Hugging Face directory, or a checkpoint of a run
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// A directory with an adapter of PEFT's for the model
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// The text to continue
    #[arg(long, allow_hyphen_values = true)]
    prompt: String,
    /// Tokens to generate [default: 100, or as many as the model has room for]
    #[arg(long)]
    max_new_tokens: Option<usize>,
    /// Divides the logits; 0 takes the most likely token
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    temperature: f32,
    /// Only the K most likely tokens; 0 for all
    #[arg(long, default_value_t = 0)]
    top_k: usize,
    /// Only the most likely tokens that together have this probability
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// Decides the random numbers
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Compute threads [default: all cores]
    #[arg(long)]
    threads: Option<usize>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// Tokens that are generated where nobody says how many and the model has room.
const DEFAULT_NEW_TOKENS: usize = 100;

pub(crate) fn generate(arguments: &GenerateArguments) -> Result<ExitCode, Failure> {
    let model = open(&arguments.model, arguments.adapter.as_deref(), arguments.threads)?;
    let GenerateArguments { temperature, top_k, top_p, seed, json, .. } = *arguments;
    let length = arguments.max_new_tokens.map_or(Length::UpTo(DEFAULT_NEW_TOKENS), Length::Exactly);
    let sampling = Sampling { temperature, top_k, top_p, seed };
    let continuation = continue_text(&model, &arguments.prompt, length, sampling, |piece| {
        if !json {
            show(piece);
        }
    })?;
    if json {
        let Continuation { prompt_tokens, tokens, text } = continuation;
        let prompt = &arguments.prompt;
        say!(
            "{}",
            json!({ "prompt": prompt, "text": text, "tokens": tokens, "prompt_tokens": prompt_tokens })
        );
    } else {
        say!("");
    }
    Ok(ExitCode::SUCCESS)
}

/// How many tokens to generate; an end-of-text token ends it sooner.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Length {
    /// As many as this; an error if the model has no room for them.
    Exactly(usize),
    /// As many as the model has room for, and no more than this.
    UpTo(usize),
}

/// A prompt, continued.
pub(crate) struct Continuation {
    prompt_tokens: usize,
    tokens: Vec<u32>,
    text: String,
}

/// Continues `prompt`, handing it and each piece of text to `show` as it comes.
pub(crate) fn continue_text(
    model: &LoadedModel,
    prompt: &str,
    length: Length,
    sampling: Sampling,
    mut show: impl FnMut(&str),
) -> Result<Continuation, Failure> {
    let tokenizer = model.tokenizer()?;
    let ids = tokenizer.encode_prompt(prompt)?;
    let new_tokens = match length {
        Length::Exactly(tokens) => tokens,
        Length::UpTo(tokens) => {
            tokens.min(model.config().max_position_embeddings().saturating_sub(ids.len()))
        }
    };
    let mut generator = Generator::new(model, ids.len().saturating_add(new_tokens))?;
    let mut sampler = Sampler::new(sampling)?;
    let mut stream = TextStream::new(&tokenizer);
    let mut continuation = Continuation { prompt_tokens: ids.len(), tokens: Vec::new(), text: String::new() };
    show(prompt);
    let mut add = |piece: &str| {
        show(piece);
        continuation.text += piece;
    };
    generator.generate(&ids, new_tokens, &mut sampler, |id| -> Result<_, Failure> {
        if model.config().tokens().end.contains(&id) {
            return Ok(ControlFlow::Break(()));
        }
        continuation.tokens.push(id);
        add(&stream.push(id).map_err(InferError::from)?);
        Ok(ControlFlow::Continue(()))
    })?;
    add(&stream.finish().map_err(InferError::from)?);
    Ok(continuation)
}

/// Shows a piece of text at once. A reader that has gone away is no reason to fail.
pub(crate) fn show(piece: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(piece.as_bytes()).and_then(|()| out.flush());
}

/// Most threads that may be asked for, as for `train.threads`.
const MAX_THREADS: usize = 4096;

/// The number of compute threads: as asked, else (and for 0) all cores.
pub(crate) fn threads(asked: Option<usize>) -> Result<usize, Failure> {
    match asked {
        Some(threads) if threads > MAX_THREADS => {
            Err(Failure::configuration(format!("--threads {threads}: allowed is 0 to {MAX_THREADS}")))
        }
        Some(threads) if threads > 0 => Ok(threads),
        _ => Ok(std::thread::available_parallelism().map_or(1, usize::from)),
    }
}
