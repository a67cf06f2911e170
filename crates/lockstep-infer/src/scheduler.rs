//! Generation of many requests at once (continuous batching: Yu et al., Orca, 2022). Each step reads one token of every request
//! that generates, and a part of the prompts of others; a request that ends makes room for the next.
//!
//! A request's tokens depend on nothing but itself: not on the requests beside it, nor on the order or size of steps.

use std::{collections::VecDeque, ops::ControlFlow};

use lockstep_tensor::{PAGE_TOKENS, host::available_memory_bytes};

use crate::{Batch, Drawn, InferError, LoadedModel, NewTokens, Sampler, Sampling, SequenceId};

/// Limits of a [`Scheduler`].
#[derive(Debug, Clone, Copy)]
pub struct SchedulerOptions {
    /// Largest number of requests that are generated at once.
    pub max_sequences: usize,
    /// Largest number of tokens in a step. Requests that generate come before prompts.
    pub max_step_tokens: usize,
    /// Tokens of the key-value cache. A request needs room for all its tokens, whole pages of them, before it starts.
    pub cache_tokens: usize,
}

impl SchedulerOptions {
    /// Default number of requests that are generated at once.
    pub const MAX_SEQUENCES: usize = 32;
    /// Default number of tokens in a step.
    pub const MAX_STEP_TOKENS: usize = 512;
}

/// A text to generate.
#[derive(Debug)]
pub struct Request {
    /// Token ids to continue, at least one.
    pub prompt: Vec<u32>,
    /// Largest number of tokens to generate.
    pub max_new_tokens: usize,
    /// Settings of the sampler, with the seed of this request.
    pub sampling: Sampling,
    /// Tokens that are read again, as if none had preceded them, when the model's positions are used up; `None` makes a request
    /// that needs more positions an error.
    pub kept: Option<usize>,
}

/// The number of a request, in the order of [`Scheduler::add`].
pub type RequestId = usize;

/// What happened to a request in a step.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// It has a new token.
    Token(Drawn),
    /// It has ended, and has no more events.
    Finished(FinishReason),
}

/// Reason of the end of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The receiver of its tokens ended it: at an end-of-text token, say.
    Stop,
    /// It has its largest number of tokens.
    Length,
}

/// Requests, and the batch that generates them.
pub struct Scheduler<'m> {
    batch: Batch<'m>,
    options: SchedulerOptions,
    /// Positions of the model.
    positions: usize,
    /// Tokens of the cache that admitted requests may still need.
    reserved_tokens: usize,
    waiting: VecDeque<Admitted>,
    running: Vec<Admitted>,
    added: usize,
}

/// A request with its progress.
struct Admitted {
    id: RequestId,
    /// The open sequence; `None` while it waits.
    sequence: Option<SequenceId>,
    sampler: Sampler,
    /// Tokens to read before the next one is drawn.
    unread: Vec<u32>,
    /// The last tokens, as many as are kept.
    recent: VecDeque<u32>,
    kept: Option<usize>,
    /// Largest number of its tokens that are cached at once.
    capacity: usize,
    /// Number of tokens still to generate.
    remaining: usize,
}

impl<'m> Scheduler<'m> {
    /// Creates a scheduler without requests.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn new(model: &'m LoadedModel, options: SchedulerOptions) -> Result<Self, InferError> {
        Ok(Self {
            batch: Batch::new(model, options.cache_tokens)?,
            options,
            positions: model.config.max_position_embeddings(),
            reserved_tokens: 0,
            waiting: VecDeque::new(),
            running: Vec::new(),
            added: 0,
        })
    }

    /// Returns the tokens of a cache in which the `max_sequences` longest of `requests` have room at once, as far as they take less
    /// than half of the available memory; at least what the longest needs.
    ///
    /// # Errors
    /// If a prompt is empty, or its tokens exceed the model's positions and none are kept.
    pub fn cache_tokens(
        model: &LoadedModel,
        requests: &[Request],
        max_sequences: usize,
    ) -> Result<usize, InferError> {
        let positions = model.config.max_position_embeddings();
        let tokens = requests.iter().map(|request| Ok(Batch::cache_tokens([capacity(positions, request)?])));
        let mut tokens = tokens.collect::<Result<Vec<usize>, InferError>>()?;
        tokens.sort_unstable_by(|a, b| b.cmp(a));
        let longest = tokens.first().copied().unwrap_or(0);
        let wanted = tokens.iter().take(max_sequences).sum();
        let memory = available_memory_bytes().unwrap_or(u64::MAX) / 2 / Batch::page_bytes(model) as u64;
        let affordable = usize::try_from(memory).unwrap_or(usize::MAX).saturating_mul(PAGE_TOKENS);
        Ok(affordable.max(longest).min(wanted))
    }

    /// Adds a request behind those that wait.
    ///
    /// # Errors
    /// If the prompt is empty, its tokens exceed the model's positions and none are kept, the cache is too small for it alone,
    /// or a setting of its sampling is out of range.
    pub fn add(&mut self, request: Request) -> Result<RequestId, InferError> {
        let capacity = capacity(self.positions, &request)?;
        let tokens = Batch::cache_tokens([capacity]);
        if tokens > self.options.cache_tokens {
            return Err(InferError::CacheFull { tokens: self.options.cache_tokens });
        }
        let Request { prompt, max_new_tokens, sampling, kept } = request;
        let sampler = Sampler::new(sampling, &prompt)?;
        let id = self.added;
        self.added += 1;
        let mut new = Admitted {
            id,
            sequence: None,
            sampler,
            unread: Vec::new(),
            recent: VecDeque::new(),
            kept,
            capacity,
            remaining: max_new_tokens,
        };
        let fits = prompt.len() <= capacity;
        new.remember(&prompt);
        new.unread = if fits { prompt } else { new.recent.iter().copied().collect() };
        self.waiting.push_back(new);
        Ok(id)
    }

    /// Returns true if every request has ended.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Runs steps until every request has ended. See [`Scheduler::step`].
    ///
    /// # Errors
    /// As [`Scheduler::step`].
    pub fn run<E: From<InferError>>(
        &mut self,
        mut emit: impl FnMut(RequestId, Event) -> Result<ControlFlow<()>, E>,
    ) -> Result<(), E> {
        while !self.is_idle() {
            self.step(&mut emit)?;
        }
        Ok(())
    }

    /// Admits requests while there is room, reads tokens in one forward, and passes new tokens and ends to `emit`. A request ends
    /// if `emit` answers a token of it with [`ControlFlow::Break`].
    ///
    /// # Errors
    /// If memory runs out, or if `emit` fails.
    pub fn step<E: From<InferError>>(
        &mut self,
        mut emit: impl FnMut(RequestId, Event) -> Result<ControlFlow<()>, E>,
    ) -> Result<(), E> {
        self.admit();
        let mut index = 0;
        while index < self.running.len() {
            // Only requests for no tokens at all have none remaining here.
            if self.running[index].remaining == 0 {
                let id = self.finish(index);
                let _ = emit(id, Event::Finished(FinishReason::Length))?;
            } else {
                index += 1;
            }
        }
        let chunks = self.chunks();
        if chunks.is_empty() {
            return Ok(());
        }
        let Self { batch, running, .. } = self;
        let new: Vec<NewTokens<'_>> = chunks
            .iter()
            .map(|&(index, len)| {
                let Admitted { sequence, unread, .. } = &running[index];
                NewTokens {
                    sequence: sequence.expect("a running request has a sequence"),
                    ids: &unread[..len],
                    wants_logits: len == unread.len(),
                }
            })
            .collect();
        let mut logits = batch.read(&new)?;
        let drawn: Vec<(usize, Option<Drawn>)> = chunks
            .iter()
            .map(|&(index, len)| {
                let request = &mut running[index];
                request.unread.drain(..len);
                let row = if request.unread.is_empty() { logits.next() } else { None };
                (index, row.map(|row| request.sampler.draw(row)))
            })
            .collect();
        let mut ended = Vec::new();
        for (index, drawn) in drawn {
            let Some(drawn) = drawn else { continue };
            let token = drawn.id;
            let request = &mut self.running[index];
            request.remaining -= 1;
            if emit(request.id, Event::Token(drawn))?.is_break() {
                ended.push((index, FinishReason::Stop));
            } else if request.remaining == 0 {
                ended.push((index, FinishReason::Length));
            } else {
                self.follow(index, token);
            }
        }
        ended.sort_unstable_by_key(|&(index, _)| index);
        // From the last one on, so that indices stay valid.
        let ended: Vec<_> = ended.into_iter().rev().map(|(index, why)| (self.finish(index), why)).collect();
        for (id, why) in ended.into_iter().rev() {
            let _ = emit(id, Event::Finished(why))?;
        }
        Ok(())
    }

    /// Starts waiting requests, in their order, while there is room for all tokens of the next one.
    fn admit(&mut self) {
        while self.running.len() < self.options.max_sequences.max(1)
            && let Some(next) = self.waiting.front()
        {
            let tokens = Batch::cache_tokens([next.capacity]);
            if self.reserved_tokens + tokens > self.options.cache_tokens {
                break;
            }
            let Some(mut request) = self.waiting.pop_front() else { break };
            self.reserved_tokens += tokens;
            request.sequence = Some(self.batch.open());
            self.running.push(request);
        }
    }

    /// Returns the indices of running requests and the numbers of their tokens that the next step reads: those that generate
    /// first, then parts of prompts.
    fn chunks(&self) -> Vec<(usize, usize)> {
        let mut room = self.options.max_step_tokens.max(1);
        let unread = |index: &usize| self.running[*index].unread.len();
        let (generating, prompts): (Vec<_>, Vec<_>) =
            (0..self.running.len()).partition(|index| unread(index) == 1);
        let mut chunks = Vec::new();
        for index in generating.into_iter().chain(prompts) {
            let len = unread(&index).min(room);
            if len == 0 {
                break;
            }
            room -= len;
            chunks.push((index, len));
        }
        chunks
    }

    /// Makes `token` the next one to read, or starts anew with the kept tokens if the sequence is full.
    fn follow(&mut self, index: usize, token: u32) {
        let request = &mut self.running[index];
        request.remember(&[token]);
        request.unread = vec![token];
        let Some(sequence) = request.sequence else { return };
        if self.batch.tokens(sequence) == request.capacity {
            self.batch.close(sequence);
            request.sequence = Some(self.batch.open());
            request.unread = request.recent.iter().copied().collect();
        }
    }

    /// Removes a running request and frees its pages. Returns its number.
    fn finish(&mut self, index: usize) -> RequestId {
        let request = self.running.remove(index);
        if let Some(sequence) = request.sequence {
            self.batch.close(sequence);
        }
        self.reserved_tokens -= Batch::cache_tokens([request.capacity]);
        request.id
    }
}

impl Admitted {
    /// Adds tokens to those that are kept.
    fn remember(&mut self, tokens: &[u32]) {
        let Some(kept) = self.kept else { return };
        let kept = kept.clamp(1, self.capacity.saturating_sub(1).max(1));
        self.recent.extend(tokens);
        self.recent.drain(..self.recent.len().saturating_sub(kept));
    }
}

/// Returns the largest number of a request's tokens that are cached at once.
fn capacity(positions: usize, request: &Request) -> Result<usize, InferError> {
    if request.prompt.is_empty() {
        return Err(InferError::EmptyPrompt);
    }
    let tokens = request.prompt.len().saturating_add(request.max_new_tokens);
    if request.kept.is_none() && tokens > positions {
        return Err(InferError::TooLong { tokens, allowed: positions });
    }
    // The last token that is generated is not read.
    Ok(tokens.saturating_sub(1).max(request.prompt.len()).min(positions))
}
