//! `lockstep generate`: continues prompts and answers chats.
//!
//! The values in a model's `generation_config.json` are the defaults of the command line.

mod chat;
mod prompts;
mod sampling;
mod text;
mod writer;

use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use lockstep_data::Tokenizer;
use lockstep_infer::{GenerationConfig, LoadedModel, PlannedWork, Sampling, SchedulerOptions, Workload};
use serde_json::{Value, json};

use self::{
    chat::converse,
    prompts::prompts,
    sampling::{BeamSettings, SamplingArguments},
    writer::{Job, Length, Writer},
};
use crate::exit::Failure;
use crate::infer::{KvCacheArguments, ModelArguments};
use crate::inference_ranks::results_of_replicas;
use crate::output::{note, piece, say, warning};
use crate::placement::{FoundModel, PlacedModel};
use crate::ranks::all_or_none;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    model: ModelArguments,
    #[command(flatten)]
    kv_cache: KvCacheArguments,
    /// The text to continue, or with --chat the question to answer; - or nothing reads standard input
    #[arg(long, allow_hyphen_values = true)]
    prompt: Option<String>,
    /// A file with a prompt on each line
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    prompts: Option<PathBuf>,
    /// Apply the chat template; on a terminal without a prompt, start a conversation
    #[arg(long)]
    chat: bool,
    /// The system message of the chat
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
    /// Samples of each prompt, with the seeds --seed, --seed + 1, ...
    #[arg(long, short = 'n', value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    samples: u64,
    /// Tokens to generate [default: the model's generation_config.json, else 100, or as many as there is room for]
    #[arg(long)]
    max_new_tokens: Option<usize>,
    #[command(flatten)]
    sampling: SamplingArguments,
    /// Seed of the random numbers
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// End the text before this string; may be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, value_parser = clap::builder::NonEmptyStringValueParser::new())]
    stop: Vec<String>,
    /// Largest number of texts that are generated at once
    #[arg(long, value_name = "N", default_value_t = SchedulerOptions::MAX_SEQUENCES as u64, value_parser = clap::value_parser!(u64).range(1..))]
    batch_size: u64,
    /// When the context is full, continue with its last N tokens [default: the model's own window, if it has one]
    #[arg(long, value_name = "N")]
    sliding_window: Option<usize>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// Default limit on the generated tokens, as far as the model has room.
const DEFAULT_NEW_TOKENS: usize = 100;

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let talks = arguments.chat
        && !arguments.json
        && arguments.prompt.is_none()
        && arguments.prompts.is_none()
        && std::io::stdin().is_terminal();
    let asks_terminal = arguments.prompts.is_none()
        && arguments.prompt.as_deref().is_none_or(|prompt| prompt == "-")
        && std::io::stdin().is_terminal();
    if asks_terminal && arguments.model.ranks.are_several()? {
        return Err(Failure::configuration(
            "several ranks cannot read a terminal: give --prompt TEXT or --prompts FILE, pipe the prompt, or run one rank",
        ));
    }
    let mut found = arguments.model.find()?;
    found.options.kv_cache = arguments.kv_cache.stored();
    let (tokenizer, config) = (found.description.tokenizer()?, found.description.generation_config()?);
    let ranks = match arguments.model.join(&mut found, PlannedWork::Generation)? {
        ControlFlow::Continue(ranks) => ranks,
        ControlFlow::Break(code) => return Ok(code),
    };
    let prompts = if talks {
        Vec::new()
    } else {
        prompts(&ranks, arguments.prompt.as_deref(), arguments.prompts.as_deref())?
    };
    let ids = prompts.iter().map(|prompt| prompt_ids(&tokenizer, prompt, arguments));
    let ids = all_or_none(&ranks, ids.collect::<Result<Vec<Vec<u32>>, Failure>>())?;
    let placed = found.load(workload(arguments, &found, &config, (&ids, ranks.replicas())), ranks)?;
    let model = &placed.model;
    if !config.ignored.is_empty() {
        warning(&format!(
            "generation_config.json: {} is not supported and left out",
            config.ignored.join(", ")
        ));
    }
    if model.has_chats() && !arguments.chat {
        note!("note: the model was trained on chats; --chat asks it as it was trained");
    }
    let writer = Writer::from_arguments(model, &tokenizer, &config, arguments)?;
    if talks {
        return converse(&writer, arguments.system.as_deref());
    }
    if let Some(beams) = arguments.sampling.beams(&config) {
        return search(&writer, (&prompts, &ids), &beams, (arguments, &placed));
    }
    let mut jobs = Vec::new();
    for ids in ids {
        let seeds = (0..arguments.samples).map(|sample| arguments.seed.wrapping_add(sample));
        jobs.extend(seeds.map(|seed| Job { ids: ids.clone(), seed }));
    }
    let samples = arguments.samples as usize;
    let prompt_of = |job: usize| prompts[job / samples].as_str();
    let mut shown = Shown::new(jobs.len(), |job| {
        let number = format!("--- prompt {}, sample {}\n", job / samples + 1, job % samples + 1);
        let echoed = if arguments.chat { "" } else { prompt_of(job) };
        if jobs.len() > 1 { number + echoed } else { echoed.to_owned() }
    });
    let own = model.ranks().replica_part(jobs.len());
    let written = writer.write(&jobs, own.clone(), |job, piece| {
        if !arguments.json {
            shown.add(job, piece);
        }
        Ok(())
    })?;
    let results = own.clone().zip(&written).map(|(job, written)| written.json(prompt_of(job)));
    let results = results_of_replicas(model.ranks(), results.collect())?;
    if arguments.json {
        print_json(results, &placed);
    } else {
        for (job, result) in results.iter().enumerate().skip(own.end) {
            shown.add(job, result["text"].as_str());
            shown.add(job, None);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the best texts of a beam search for each prompt.
fn search(
    writer: &Writer<'_>,
    (prompts, ids): (&[String], &[Vec<u32>]),
    beams: &BeamSettings,
    (arguments, placed): (&Arguments, &PlacedModel),
) -> Result<ExitCode, Failure> {
    let samples = usize::try_from(arguments.samples).unwrap_or(usize::MAX);
    let ranks = writer.model.ranks();
    let check = || -> Result<(), Failure> {
        let most = beams.beams;
        if samples > most {
            let problem = format!("-n {samples}: a search with {most} beams finds {most} texts");
            return Err(Failure::configuration(problem));
        }
        ids.iter().try_for_each(|ids| writer.check_search(ids, beams))
    };
    all_or_none(ranks, check())?;
    let show = |number: usize, found: &[Value]| {
        for (rank, result) in found.iter().enumerate().filter(|_| !arguments.json) {
            if prompts.len() * samples > 1 {
                say!("--- prompt {}, text {}", number + 1, rank + 1);
            }
            let echoed = if arguments.chat { "" } else { prompts[number].as_str() };
            say!("{echoed}{}", result["text"].as_str().unwrap_or_default());
        }
    };
    let own = ranks.replica_part(prompts.len());
    let mut results = Vec::new();
    for number in own.clone() {
        let found = writer.search(&ids[number], samples, beams)?;
        let found: Vec<Value> = found.iter().map(|written| written.json(&prompts[number])).collect();
        show(number, &found);
        results.extend(found);
    }
    let results = results_of_replicas(ranks, results)?;
    if arguments.json {
        print_json(results, placed);
        return Ok(ExitCode::SUCCESS);
    }
    for (number, found) in results.chunks(samples).enumerate().skip(own.end) {
        show(number, found);
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints one result, or an object with a list of several; with the map of a placed model.
fn print_json(mut results: Vec<Value>, placed: &PlacedModel) {
    let mut document = match results.len() {
        1 => results.remove(0),
        _ => json!({ "results": results }),
    };
    placed.add_map(&mut document);
    say!("{document}");
}

/// Returns the sequences at a time of each replica and the tokens of the longest, for which memory is planned. Without limits on memory
/// nothing is planned.
fn workload(
    arguments: &Arguments,
    found: &FoundModel,
    config: &GenerationConfig,
    (prompts, replicas): (&[Vec<u32>], usize),
) -> Workload {
    let positions = found.description.config().max_position_embeddings();
    let Some(longest) = prompts.iter().map(Vec::len).max().filter(|_| arguments.model.placement.is_given())
    else {
        // A conversation may become as long as the model allows.
        return Workload::Generation { sequences: 1, context: positions };
    };
    let new_tokens = arguments.max_new_tokens.or(config.max_new_tokens).or(config.max_length);
    let texts = prompts.len().saturating_mul(arguments.samples as usize).div_ceil(replicas);
    let texts = texts.min(arguments.batch_size as usize);
    let sequences = arguments.sampling.beams(config).map_or(texts, |beams| beams.beams);
    let context = longest.saturating_add(new_tokens.unwrap_or(DEFAULT_NEW_TOKENS)).min(positions);
    Workload::Generation { sequences, context }
}

/// Returns the tokens of a prompt, or of the chat that it begins.
fn prompt_ids(tokenizer: &Tokenizer, prompt: &str, arguments: &Arguments) -> Result<Vec<u32>, Failure> {
    if !arguments.chat {
        return Ok(tokenizer.encode_prompt(prompt)?);
    }
    let system = arguments.system.iter().map(|text| ("system".to_owned(), text.clone()));
    let messages: Vec<_> = system.chain([("user".to_owned(), prompt.to_owned())]).collect();
    Ok(tokenizer.encode_chat(&messages)?)
}

/// Texts on standard output, in the order of their jobs: pieces of a later one wait until those before it have ended.
struct Shown<H> {
    /// Text of each job that waits to be shown, and whether it has ended.
    waiting: Vec<(String, bool)>,
    /// The first job that has not been shown to its end, and whether its heading has been.
    current: usize,
    is_begun: bool,
    heading: H,
}

impl<H: Fn(usize) -> String> Shown<H> {
    fn new(jobs: usize, heading: H) -> Self {
        Self { waiting: vec![(String::new(), false); jobs], current: 0, is_begun: false, heading }
    }

    /// Adds a piece to the text of a job; `None` ends it.
    fn add(&mut self, job: usize, added: Option<&str>) {
        let (text, is_ended) = &mut self.waiting[job];
        *text += added.unwrap_or("");
        *is_ended |= added.is_none();
        while let Some((text, is_ended)) = self.waiting.get_mut(self.current) {
            if !std::mem::replace(&mut self.is_begun, true) {
                piece(&(self.heading)(self.current));
            }
            piece(&std::mem::take(text));
            if !*is_ended {
                break;
            }
            say!("");
            (self.current, self.is_begun) = (self.current + 1, false);
        }
    }
}

impl<'m> Writer<'m> {
    /// Creates the writer that the command line and the model's `generation_config.json` ask for.
    fn from_arguments(
        model: &'m LoadedModel,
        tokenizer: &'m Tokenizer,
        config: &GenerationConfig,
        arguments: &Arguments,
    ) -> Result<Self, Failure> {
        let length = match (arguments.max_new_tokens, config.max_new_tokens, config.max_length) {
            (Some(tokens), _, _) => Length::Exactly(tokens),
            (None, Some(tokens), _) => Length::UpTo(tokens),
            (None, None, Some(tokens)) => Length::UpToTotal(tokens),
            (None, None, None) => Length::UpTo(DEFAULT_NEW_TOKENS),
        };
        let longest = model.config().max_position_embeddings();
        if let Some(kept) = arguments.sliding_window
            && !(1..longest).contains(&kept)
        {
            let allowed = format!("allowed is 1 to {}, the model has {longest} positions", longest - 1);
            return Err(Failure::configuration(format!("--sliding-window {kept}: {allowed}")));
        }
        let mut writer = Self {
            end: config.end.clone().unwrap_or_else(|| model.config().tokens().end.clone()),
            kept: arguments.sliding_window.or(model.config().sliding_window()),
            model,
            tokenizer,
            sampling: arguments.sampling.resolve(config, arguments.seed)?,
            length,
            stops: arguments.stop.clone(),
            batch_size: arguments.batch_size as usize,
        };
        if arguments.chat {
            writer.end_with_the_answer();
        }
        Ok(writer)
    }

    /// Ends the text at the end-of-text token and at the marker that the template writes after an answer.
    fn end_with_the_answer(&mut self) {
        self.end.extend(self.tokenizer.eos_id());
        if let Some((text, token)) = self.tokenizer.end_of_answer() {
            self.stops.push(text.to_owned());
            self.end.extend(token);
            if token.is_none() && !self.model.has_chats() {
                warning(&format!(
                    "the model has no chat template, so ChatML is used, and its marker {text} is no token of the \
                     vocabulary; a model that was not trained on ChatML will not answer sensibly"
                ));
            }
        }
    }
}

/// Continues `prompt` as a demonstration and shows the text as it is generated.
pub(crate) fn show_sample(
    model: &LoadedModel,
    prompt: &str,
    new_tokens: usize,
    sampling: Sampling,
) -> Result<(), Failure> {
    let tokenizer = &model.tokenizer()?;
    let (length, end) = (Length::UpTo(new_tokens), model.config().tokens().end.clone());
    let job = Job { ids: tokenizer.encode_prompt(prompt)?, seed: sampling.seed };
    let writer =
        Writer { model, tokenizer, sampling, length, end, stops: Vec::new(), kept: None, batch_size: 1 };
    piece(prompt);
    writer.write(&[job], 0..1, |_, text| {
        piece(text.unwrap_or(""));
        Ok(())
    })?;
    Ok(())
}
