//! The texts of a model: requests for the scheduler, and their tokens as text.

use std::ops::{ControlFlow, Range};

use lockstep_data::{TextStream, Tokenizer};
use lockstep_infer::{
    BeamOptions, Drawn, Event, FinishReason, Hypothesis, InferError, LoadedModel, Request, Sampling,
    Scheduler, SchedulerOptions, beam_search,
};
use serde_json::{Value, json};

use super::{sampling::BeamSettings, text::StoppedText};
use crate::exit::Failure;
use crate::ranks::all_or_none;

/// Number of tokens to generate; an end-of-text token ends the text earlier.
#[derive(Debug, Clone, Copy)]
pub(super) enum Length {
    /// This many; an error if the model has no room for them.
    Exactly(usize),
    /// As many as the model has room for, at most this many.
    UpTo(usize),
    /// As many as the model has room for, at most this many including the prompt.
    UpToTotal(usize),
}

/// Generates text with a model.
pub(super) struct Writer<'m> {
    pub(super) model: &'m LoadedModel,
    pub(super) tokenizer: &'m Tokenizer,
    pub(super) sampling: Sampling,
    pub(super) length: Length,
    /// Tokens that end the text.
    pub(super) end: Vec<u32>,
    /// Strings that end the text.
    pub(super) stops: Vec<String>,
    /// Number of tokens kept when the context is full.
    pub(super) kept: Option<usize>,
    /// Largest number of texts that are generated at once.
    pub(super) batch_size: usize,
}

/// A text to generate: the tokens that it continues, and its seed.
pub(super) struct Job {
    pub(super) ids: Vec<u32>,
    pub(super) seed: u64,
}

/// A text that is being generated.
struct Draft<'w> {
    stream: TextStream<'w>,
    text: StoppedText<'w>,
    written: Written,
}

/// Generated text of one prompt.
pub(super) struct Written {
    prompt_tokens: usize,
    tokens: Vec<u32>,
    pub(super) text: String,
    finish_reason: FinishReason,
    /// Log-probabilities of the tokens, if they are asked for.
    logprobs: Vec<Value>,
}

impl Written {
    pub(super) fn json(&self, prompt: &str) -> Value {
        let finish_reason = match self.finish_reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        };
        let mut result = json!({
            "prompt": prompt, "text": self.text, "tokens": self.tokens, "prompt_tokens": self.prompt_tokens,
            "finish_reason": finish_reason,
        });
        if !self.logprobs.is_empty() {
            result["logprobs"] = json!({ "content": self.logprobs });
        }
        result
    }
}

impl Writer<'_> {
    /// Generates a text for each of the jobs `part`, several at once. Calls `show` with the number of a job and each piece of its text,
    /// and with `None` at its end. Jobs of other replicas are checked as well, so that all replicas report the same problem.
    pub(super) fn write(
        &self,
        jobs: &[Job],
        part: Range<usize>,
        mut show: impl FnMut(usize, Option<&str>) -> Result<(), Failure>,
    ) -> Result<Vec<Written>, Failure> {
        let mut requests: Vec<Request> = jobs.iter().map(|job| self.request(job)).collect();
        let checked = Scheduler::check(self.model, &requests).map_err(Failure::from);
        all_or_none(self.model.ranks(), checked)?;
        let requests: Vec<Request> = requests.drain(part.clone()).collect();
        let options = SchedulerOptions {
            max_sequences: self.batch_size,
            max_step_tokens: self.model.chunk_tokens().max(self.batch_size),
            cache_tokens: Scheduler::cache_tokens(self.model, &requests, self.batch_size)?,
        };
        let mut scheduler = Scheduler::new(self.model, options)?;
        requests.into_iter().try_for_each(|request| scheduler.add(request).map(drop))?;
        let mut drafts: Vec<Draft<'_>> = jobs[part.clone()].iter().map(|job| self.draft(job)).collect();
        scheduler.run(|request, event| -> Result<_, Failure> {
            let job = part.start + request;
            let Draft { stream, text, written } = &mut drafts[request];
            match event {
                Event::Token(drawn) if self.end.contains(&drawn.id) => return Ok(ControlFlow::Break(())),
                Event::Token(drawn) => {
                    written.tokens.push(drawn.id);
                    if drawn.logprob.is_some() {
                        written.logprobs.push(self.logprobs(&drawn)?);
                    }
                    show(job, Some(text.push(&stream.push(drawn.id).map_err(InferError::from)?)))?;
                    if text.is_ended() {
                        return Ok(ControlFlow::Break(()));
                    }
                }
                Event::Finished(reason) => {
                    show(job, Some(text.push(&stream.finish().map_err(InferError::from)?)))?;
                    show(job, Some(text.finish()))?;
                    written.finish_reason = if text.is_ended() { FinishReason::Stop } else { reason };
                    show(job, None)?;
                }
            }
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(drafts
            .into_iter()
            .map(|draft| Written { text: draft.text.into_text(), ..draft.written })
            .collect())
    }

    /// Returns the best texts that a beam search finds for a prompt, at most `count` of them. A text ends with the token that
    /// completes it, or before the first stop string.
    pub(super) fn search(
        &self,
        ids: &[u32],
        count: usize,
        beams: &BeamSettings,
    ) -> Result<Vec<Written>, Failure> {
        let found = beam_search(self.model, ids, &self.beam_options(ids, beams))?;
        found.into_iter().take(count).map(|hypothesis| self.found(ids, hypothesis)).collect()
    }

    /// Checks that a prompt can be searched for.
    pub(super) fn check_search(&self, ids: &[u32], beams: &BeamSettings) -> Result<(), Failure> {
        Ok(self.beam_options(ids, beams).check(self.model, ids)?)
    }

    fn beam_options(&self, ids: &[u32], beams: &BeamSettings) -> BeamOptions {
        BeamOptions {
            beams: beams.beams,
            max_new_tokens: self.max_new_tokens(ids),
            length_penalty: beams.length_penalty,
            early_stopping: beams.early_stopping,
            end: self.end.clone(),
        }
    }

    fn found(&self, ids: &[u32], hypothesis: Hypothesis) -> Result<Written, Failure> {
        let Hypothesis { mut tokens, .. } = hypothesis;
        let is_complete = tokens.pop_if(|last| self.end.contains(last)).is_some();
        let mut text = StoppedText::new(&self.stops);
        text.push(&self.tokenizer.decode(&tokens)?);
        let is_ended = is_complete || text.is_ended();
        Ok(Written {
            prompt_tokens: ids.len(),
            tokens,
            text: text.into_text(),
            finish_reason: if is_ended { FinishReason::Stop } else { FinishReason::Length },
            logprobs: Vec::new(),
        })
    }

    /// Returns the largest number of tokens to generate after a prompt.
    fn max_new_tokens(&self, prompt: &[u32]) -> usize {
        let longest = self.model.config().max_position_embeddings();
        let room = if self.kept.is_some() { usize::MAX } else { longest.saturating_sub(prompt.len()) };
        match self.length {
            Length::Exactly(tokens) => tokens,
            Length::UpTo(tokens) => tokens.min(room),
            Length::UpToTotal(tokens) => tokens.saturating_sub(prompt.len()).min(room),
        }
    }

    fn request(&self, job: &Job) -> Request {
        let max_new_tokens = self.max_new_tokens(&job.ids);
        let sampling = Sampling { seed: job.seed, ..self.sampling.clone() };
        Request { prompt: job.ids.clone(), max_new_tokens, sampling, kept: self.kept }
    }

    fn draft(&self, job: &Job) -> Draft<'_> {
        let written = Written {
            prompt_tokens: job.ids.len(),
            tokens: Vec::new(),
            text: String::new(),
            finish_reason: FinishReason::Length,
            logprobs: Vec::new(),
        };
        Draft { stream: TextStream::new(self.tokenizer), text: StoppedText::new(&self.stops), written }
    }

    /// Returns the log-probabilities of a token as the chat API of OpenAI writes them.
    fn logprobs(&self, drawn: &Drawn) -> Result<Value, Failure> {
        let entry = |id: u32, logprob: f32| -> Result<Value, Failure> {
            Ok(json!({ "token": self.tokenizer.decode(&[id])?, "id": id, "logprob": logprob }))
        };
        let mut content = entry(drawn.id, drawn.logprob.unwrap_or(0.0))?;
        let top = drawn.top_logprobs.iter().map(|token| entry(token.id, token.logprob));
        content["top_logprobs"] = top.collect::<Result<Vec<_>, _>>()?.into();
        Ok(content)
    }
}
