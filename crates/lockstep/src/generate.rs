//! `lockstep generate`: continues prompts and answers chats.
//!
//! The values in a model's `generation_config.json` are the defaults of the command line.

use std::io::{BufRead, IsTerminal, Read, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use lockstep_data::{TextStream, Tokenizer};
use lockstep_infer::{GenerationConfig, Generator, InferError, LoadedModel, Sampler, Sampling, Workload};
use serde_json::{Value, json};

use crate::exit::{CORRUPT_INPUT, Failure};
use crate::infer::ModelArguments;
use crate::output::{note, say, warning};
use crate::placement::FoundModel;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    model: ModelArguments,
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
    /// Divides the logits; 0 takes the most likely token [default: generation_config.json, else 1]
    #[arg(long, allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Only the K most likely tokens; 0 for all [default: generation_config.json, else 0]
    #[arg(long)]
    top_k: Option<usize>,
    /// Only the most likely tokens that together have this probability [default: generation_config.json, else 1]
    #[arg(long)]
    top_p: Option<f32>,
    /// Seed of the random numbers
    #[arg(long, default_value_t = 0)]
    seed: u64,
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
    let prompts = if talks { Vec::new() } else { prompts(arguments)? };
    let found = arguments.model.find()?;
    let (tokenizer, config) = (found.description.tokenizer()?, found.description.generation_config()?);
    let context = context(arguments, &found, (&tokenizer, &config), &prompts)?;
    let placed = found.load(Workload::Generation { sequences: 1, context })?;
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
    let writer = Writer::new(model, &tokenizer, &config, arguments)?;
    if talks {
        return converse(&writer, arguments.system.as_deref());
    }
    let several = prompts.len() as u64 * arguments.samples > 1;
    let mut results = Vec::new();
    for (number, prompt) in prompts.iter().enumerate() {
        let ids = prompt_ids(&tokenizer, prompt, arguments)?;
        for sample in 0..arguments.samples {
            if several && !arguments.json {
                say!("--- prompt {}, sample {}", number + 1, sample + 1);
            }
            let echoed = if arguments.chat { "" } else { prompt.as_str() };
            let show = |piece: &str| if arguments.json { Ok(()) } else { show(piece) };
            let written = writer.write(&ids, echoed, arguments.seed.wrapping_add(sample), show)?;
            if !arguments.json {
                say!("");
            }
            results.push(written.json(prompt));
        }
    }
    if arguments.json {
        let mut document = match results.len() {
            1 => results.remove(0),
            _ => json!({ "results": results }),
        };
        placed.add_map(&mut document);
        say!("{document}");
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the tokens of the longest prompt and of what is generated after it, for which memory is planned. Without limits on
/// memory nothing is planned.
fn context(
    arguments: &Arguments,
    found: &FoundModel,
    (tokenizer, config): (&Tokenizer, &GenerationConfig),
    prompts: &[String],
) -> Result<usize, Failure> {
    let longest = found.description.config().max_position_embeddings();
    // A conversation may become as long as the model allows.
    if prompts.is_empty() || !arguments.model.placement.is_given() {
        return Ok(longest);
    }
    let new_tokens = arguments.max_new_tokens.or(config.max_new_tokens).or(config.max_length);
    let mut tokens = 0;
    for prompt in prompts {
        tokens = tokens.max(prompt_ids(tokenizer, prompt, arguments)?.len());
    }
    Ok(tokens.saturating_add(new_tokens.unwrap_or(DEFAULT_NEW_TOKENS)).min(longest))
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

/// Returns the prompts that the command line names.
fn prompts(arguments: &Arguments) -> Result<Vec<String>, Failure> {
    if let Some(file) = &arguments.prompts {
        return prompts_of(file);
    }
    match arguments.prompt.as_deref() {
        Some(prompt) if prompt != "-" => Ok(vec![prompt.to_owned()]),
        asked => {
            let nothing = || {
                Failure::configuration(
                    "there is no prompt: give --prompt TEXT, --prompts FILE or text on standard input; --chat on a \
                     terminal begins a conversation",
                )
            };
            if asked.is_none() && std::io::stdin().is_terminal() {
                return Err(nothing());
            }
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text).map_err(|error| Failure {
                message: format!("standard input: {error}; a prompt is UTF-8 text"),
                code: CORRUPT_INPUT,
            })?;
            let text = text.strip_suffix('\n').unwrap_or(&text);
            if text.is_empty() { Err(nothing()) } else { Ok(vec![text.to_owned()]) }
        }
    }
}

/// Returns the lines of a file that are not empty.
fn prompts_of(file: &Path) -> Result<Vec<String>, Failure> {
    let shown = file.display();
    let text = std::fs::read(file)
        .map_err(|error| Failure::configuration(format!("cannot read --prompts {shown}: {error}")))?;
    let text = String::from_utf8(text).map_err(|error| Failure {
        message: format!("--prompts {shown} is not UTF-8 text: {error}"),
        code: CORRUPT_INPUT,
    })?;
    let prompts: Vec<String> = text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect();
    if prompts.is_empty() {
        let problem = format!("--prompts {shown} has no prompt; a prompt is a line that is not empty");
        return Err(Failure::configuration(problem));
    }
    Ok(prompts)
}

/// Number of tokens to generate; an end-of-text token ends the text earlier.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Length {
    /// This many; an error if the model has no room for them.
    Exactly(usize),
    /// As many as the model has room for, at most this many.
    UpTo(usize),
    /// As many as the model has room for, at most this many including the prompt.
    UpToTotal(usize),
}

/// Generates text with a model.
struct Writer<'m> {
    model: &'m LoadedModel,
    tokenizer: &'m Tokenizer,
    sampling: Sampling,
    length: Length,
    /// Tokens that end the text.
    end: Vec<u32>,
    /// String that ends the text.
    stop: Option<&'static str>,
    /// Number of tokens kept when the context is full.
    kept: Option<usize>,
}

/// Generated text of one prompt.
struct Written {
    prompt_tokens: usize,
    tokens: Vec<u32>,
    text: String,
    /// Reason of the end: `stop` or `length`.
    finish_reason: &'static str,
}

impl Written {
    fn json(&self, prompt: &str) -> Value {
        json!({
            "prompt": prompt, "text": self.text, "tokens": self.tokens, "prompt_tokens": self.prompt_tokens,
            "finish_reason": self.finish_reason,
        })
    }
}

impl<'m> Writer<'m> {
    fn new(
        model: &'m LoadedModel,
        tokenizer: &'m Tokenizer,
        config: &GenerationConfig,
        arguments: &Arguments,
    ) -> Result<Self, Failure> {
        let draws = config.samples != Some(false) || arguments.temperature.is_some();
        let of_config = |value: Option<f32>| value.filter(|_| draws);
        let sampling = Sampling {
            temperature: arguments.temperature.or(of_config(config.temperature)).unwrap_or(f32::from(draws)),
            top_k: arguments.top_k.or(config.top_k.filter(|_| draws)).unwrap_or(0),
            top_p: arguments.top_p.or(of_config(config.top_p)).unwrap_or(1.0),
            seed: arguments.seed,
        };
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
            sampling,
            length,
            stop: None,
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
            self.stop = Some(text);
            self.end.extend(token);
            if token.is_none() && !self.model.has_chats() {
                warning(&format!(
                    "the model has no chat template, so ChatML is used, and its marker {text} is no token of the \
                     vocabulary; a model that was not trained on ChatML will not answer sensibly"
                ));
            }
        }
    }

    /// Continues `ids`; passes `echoed`, and then each piece of text as it is generated, to `show`.
    fn write(
        &self,
        ids: &[u32],
        echoed: &str,
        seed: u64,
        mut show: impl FnMut(&str) -> Result<(), Failure>,
    ) -> Result<Written, Failure> {
        let longest = self.model.config().max_position_embeddings();
        let room = if self.kept.is_some() { usize::MAX } else { longest.saturating_sub(ids.len()) };
        let new_tokens = match self.length {
            Length::Exactly(tokens) => tokens,
            Length::UpTo(tokens) => tokens.min(room),
            Length::UpToTotal(tokens) => tokens.saturating_sub(ids.len()).min(room),
        };
        let all = ids.len().saturating_add(new_tokens);
        let mut generator = match self.kept {
            Some(kept) => Generator::new(self.model, all.min(longest))?.sliding(kept),
            None => Generator::new(self.model, all)?,
        };
        let mut sampler = Sampler::new(Sampling { seed, ..self.sampling })?;
        let mut stream = TextStream::new(self.tokenizer);
        show(echoed)?;
        let mut text = HeldBack::new(self.stop, show);
        let (mut tokens, mut is_ended) = (Vec::new(), false);
        generator.generate(ids, new_tokens, &mut sampler, |id| -> Result<_, Failure> {
            is_ended = self.end.contains(&id);
            if !is_ended {
                tokens.push(id);
                is_ended = text.push(&stream.push(id).map_err(InferError::from)?)?.is_break();
            }
            Ok(if is_ended { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })?;
        is_ended |= text.push(&stream.finish().map_err(InferError::from)?)?.is_break();
        let finish_reason = if is_ended { "stop" } else { "length" };
        Ok(Written { prompt_tokens: ids.len(), tokens, text: text.finish()?, finish_reason })
    }
}

/// Streams text, except for a tail that may be the beginning of the stop string.
struct HeldBack<F> {
    stop: Option<&'static str>,
    text: String,
    shown_bytes: usize,
    is_ended: bool,
    show: F,
}

impl<F: FnMut(&str) -> Result<(), Failure>> HeldBack<F> {
    fn new(stop: Option<&'static str>, show: F) -> Self {
        Self { stop, text: String::new(), shown_bytes: 0, is_ended: false, show }
    }

    fn push(&mut self, piece: &str) -> Result<ControlFlow<()>, Failure> {
        if self.is_ended {
            return Ok(ControlFlow::Break(()));
        }
        self.text += piece;
        let Some(stop) = self.stop else {
            self.show_to(self.text.len())?;
            return Ok(ControlFlow::Continue(()));
        };
        if let Some(at) = self.text.find(stop) {
            self.text.truncate(at);
            self.is_ended = true;
            self.show_to(at)?;
            return Ok(ControlFlow::Break(()));
        }
        let held = (1..stop.len())
            .rev()
            .find(|&bytes| stop.is_char_boundary(bytes) && self.text.ends_with(&stop[..bytes]));
        self.show_to(self.text.len() - held.unwrap_or(0))?;
        Ok(ControlFlow::Continue(()))
    }

    fn show_to(&mut self, end: usize) -> Result<(), Failure> {
        if let Some(piece) = self.text.get(self.shown_bytes..end).filter(|piece| !piece.is_empty()) {
            (self.show)(piece)?;
            self.shown_bytes = end;
        }
        Ok(())
    }

    /// Shows the held-back tail and returns the whole text.
    fn finish(mut self) -> Result<String, Failure> {
        self.show_to(self.text.len())?;
        Ok(self.text)
    }
}

/// Runs a conversation on the terminal until its input ends.
fn converse(writer: &Writer<'_>, system: Option<&str>) -> Result<ExitCode, Failure> {
    note!("/reset forgets the conversation, /exit or Ctrl-D ends it");
    let opening: Vec<_> = system.iter().map(|&text| ("system".to_owned(), text.to_owned())).collect();
    let (mut messages, mut seed) = (opening.clone(), writer.sampling.seed);
    let mut input = std::io::stdin().lock();
    loop {
        show("> ")?;
        let mut line = String::new();
        if input.read_line(&mut line).unwrap_or(0) == 0 {
            say!("");
            return Ok(ExitCode::SUCCESS);
        }
        match line.trim() {
            "" => continue,
            "/exit" | "/quit" => return Ok(ExitCode::SUCCESS),
            "/reset" => messages.clone_from(&opening),
            question => {
                messages.push(("user".to_owned(), question.to_owned()));
                let answer = writer
                    .tokenizer
                    .encode_chat(&messages)
                    .map_err(Failure::from)
                    .and_then(|ids| writer.write(&ids, "", seed, show));
                match answer {
                    Ok(written) => messages.push(("assistant".to_owned(), written.text.trim().to_owned())),
                    // A question that does not fit does not end the conversation.
                    Err(Failure { message, .. }) => {
                        messages.pop();
                        warning(&format!("{message}; /reset begins anew"));
                    }
                }
                seed = seed.wrapping_add(1);
                say!("");
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
    let writer = Writer { model, tokenizer, sampling, length, end, stop: None, kept: None };
    writer.write(&tokenizer.encode_prompt(prompt)?, prompt, sampling.seed, show)?;
    Ok(())
}

/// Writes a piece of text at once. Errors are ignored because the reader may be gone.
fn show(piece: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(piece.as_bytes()).and_then(|()| out.flush());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_be_the_end_is_held_back_and_the_end_is_not_shown() {
        let mut shown = Vec::new();
        let mut text = HeldBack::new(Some("<end>"), |piece: &str| {
            shown.push(piece.to_owned());
            Ok(())
        });
        for piece in ["a<", "b <e", "nd", "> rest"] {
            let _ = text.push(piece).unwrap();
        }
        assert!(text.push("more").unwrap().is_break());
        assert_eq!(text.finish().unwrap(), "a<b ");
        assert_eq!(shown, ["a", "<b "]);
    }
}
