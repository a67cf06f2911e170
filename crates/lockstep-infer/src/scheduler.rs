//! Generation of many requests at once (continuous batching: Yu et al., Orca, 2022). Each step reads one token of every request
//! that generates, and a part of the prompts of others; a request that ends makes room for the next.
//!
//! A request's tokens depend on nothing but itself: not on the requests beside it, nor on the order or size of steps.

use std::{collections::VecDeque, ops::ControlFlow};

use lockstep_tensor::host::available_memory_bytes;

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

/// Progress of a request in a step.
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
    /// Tokens of the cache that running requests need, whole pages of each.
    reserved_tokens: usize,
    waiting: VecDeque<Progress>,
    running: Vec<Running>,
    added: usize,
}

/// A request that is generated.
struct Running {
    progress: Progress,
    sequence: SequenceId,
}

/// A request with its progress.
struct Progress {
    id: RequestId,
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
    /// than half of the available memory; at least what the longest needs. All ranks get the same number.
    ///
    /// # Errors
    /// If a prompt is empty, or its tokens exceed the model's positions and none are kept; if another rank is lost.
    pub fn cache_tokens(
        model: &LoadedModel,
        requests: &[Request],
        max_sequences: usize,
    ) -> Result<usize, InferError> {
        let positions = model.config.max_position_embeddings();
        let tokens = requests.iter().map(|request| Ok(model.whole_pages(capacity(positions, request)?)));
        let mut tokens = tokens.collect::<Result<Vec<usize>, InferError>>()?;
        tokens.sort_unstable_by(|a, b| b.cmp(a));
        let longest = tokens.first().copied().unwrap_or(0);
        let wanted = tokens.iter().take(max_sequences).sum();
        let page_tokens = model.page_tokens();
        let page_bytes = model.kv_cache_bytes(page_tokens) * model.ranks().size() as u64;
        let pages = available_memory_bytes().unwrap_or(u64::MAX) / 2 / page_bytes.max(1);
        let pages = model.ranks().all_numbers(pages)?.into_iter().min().unwrap_or(pages);
        let affordable = usize::try_from(pages).unwrap_or(usize::MAX).saturating_mul(page_tokens);
        Ok(affordable.max(longest).min(wanted))
    }

    /// Checks requests as [`Scheduler::add`] does, apart from the room in the cache.
    ///
    /// # Errors
    /// If a prompt is empty, or its tokens exceed the model's positions and none are kept.
    pub fn check(model: &LoadedModel, requests: &[Request]) -> Result<(), InferError> {
        let positions = model.config.max_position_embeddings();
        requests.iter().try_for_each(|request| capacity(positions, request).map(drop))
    }

    /// Adds a request behind those that wait.
    ///
    /// # Errors
    /// If the prompt is empty, its tokens exceed the model's positions and none are kept, the cache is too small for it alone,
    /// or a setting of its sampling is out of range.
    pub fn add(&mut self, request: Request) -> Result<RequestId, InferError> {
        let capacity = capacity(self.positions, &request)?;
        if self.batch.whole_pages(capacity) > self.options.cache_tokens {
            return Err(InferError::CacheFull { tokens: self.options.cache_tokens });
        }
        let Request { prompt, max_new_tokens, sampling, kept } = request;
        let sampler = Sampler::new(sampling, &prompt)?;
        let (id, recent) = (self.added, VecDeque::new());
        self.added += 1;
        let mut new =
            Progress { id, sampler, unread: Vec::new(), recent, kept, capacity, remaining: max_new_tokens };
        new.remember(&prompt);
        new.unread = if prompt.len() <= capacity { prompt } else { new.recent.iter().copied().collect() };
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
        let drawn = self.read()?;
        let mut are_stopped = vec![false; self.running.len()];
        for (index, drawn) in drawn {
            let (token, progress) = (drawn.id, &mut self.running[index].progress);
            progress.remaining -= 1;
            let (id, goes_on) = (progress.id, progress.remaining > 0);
            are_stopped[index] = emit(id, Event::Token(drawn))?.is_break();
            if goes_on && !are_stopped[index] {
                self.follow(index, token);
            }
        }
        let mut ended = Vec::new();
        // From the last one on, so that indices stay valid.
        for (index, is_stopped) in are_stopped.into_iter().enumerate().rev() {
            if is_stopped {
                ended.push((self.finish(index), FinishReason::Stop));
            } else if self.running[index].progress.remaining == 0 {
                ended.push((self.finish(index), FinishReason::Length));
            }
        }
        for (id, reason) in ended.into_iter().rev() {
            let _ = emit(id, Event::Finished(reason))?;
        }
        Ok(())
    }

    /// Starts waiting requests, in their order, while there is room for all tokens of the next one.
    fn admit(&mut self) {
        while self.running.len() < self.options.max_sequences.max(1)
            && let Some(progress) = self.waiting.pop_front_if(|next| {
                self.reserved_tokens + self.batch.whole_pages(next.capacity) <= self.options.cache_tokens
            })
        {
            self.reserved_tokens += self.batch.whole_pages(progress.capacity);
            let sequence = self.batch.open(progress.capacity);
            self.running.push(Running { progress, sequence });
        }
    }

    /// Reads tokens of running requests in one forward. Returns the next token of each whose tokens are all read, with its index.
    fn read(&mut self) -> Result<Vec<(usize, Drawn)>, InferError> {
        let chunks = self.chunks();
        if chunks.is_empty() {
            return Ok(Vec::new());
        }
        let Self { batch, running, .. } = self;
        let new = |&(index, len): &(usize, usize)| {
            let Running { progress: Progress { unread, .. }, sequence } = &running[index];
            NewTokens { sequence: *sequence, ids: &unread[..len], wants_logits: len == unread.len() }
        };
        let mut logits = batch.read(&chunks.iter().map(new).collect::<Vec<_>>())?;
        let mut drawn = Vec::new();
        for (index, len) in chunks {
            let Progress { unread, sampler, .. } = &mut running[index].progress;
            unread.drain(..len);
            if unread.is_empty()
                && let Some(logits) = logits.next()
            {
                drawn.push((index, sampler.draw(logits)));
            }
        }
        Ok(drawn)
    }

    /// Returns the indices of running requests and the numbers of their tokens that the next step reads: those that generate
    /// first, then parts of prompts. Requests for no tokens need none.
    fn chunks(&self) -> Vec<(usize, usize)> {
        let mut room = self.options.max_step_tokens.max(1);
        let unread = |index: &usize| self.running[*index].progress.unread.len();
        let (generating, prompts): (Vec<_>, Vec<_>) = (0..self.running.len())
            .filter(|&index| self.running[index].progress.remaining > 0)
            .partition(|index| unread(index) == 1);
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
        let Running { progress, sequence } = &mut self.running[index];
        progress.remember(&[token]);
        progress.unread = vec![token];
        if self.batch.tokens(*sequence) == progress.capacity {
            self.batch.close(*sequence);
            *sequence = self.batch.open(progress.capacity);
            progress.unread = progress.recent.iter().copied().collect();
        }
    }

    /// Removes a running request and frees its pages. Returns its number.
    fn finish(&mut self, index: usize) -> RequestId {
        let Running { progress, sequence } = self.running.remove(index);
        self.batch.close(sequence);
        self.reserved_tokens -= self.batch.whole_pages(progress.capacity);
        progress.id
    }
}

impl Progress {
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
