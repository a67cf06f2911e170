//! A batch of sequences with a common key-value cache. Each step reads new tokens of some of them in one forward, so that every
//! weight is read once for all. A sequence's logits have the same bits in any batch.

use std::slice::ChunksExact;

use crate::{
    InferError, LoadedModel,
    cache::PagePool,
    forward::{Forward, Part},
};

/// A handle of a sequence in a [`Batch`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SequenceId(usize);

/// Tokens to read in one step of a [`Batch`].
#[derive(Debug, Clone, Copy)]
pub struct NewTokens<'a> {
    /// The sequence; at most one entry of a step names it.
    pub sequence: SequenceId,
    /// Its next tokens, at least one.
    pub ids: &'a [u32],
    /// True if the logits after the last of them are wanted.
    pub wants_logits: bool,
}

/// Sequences that are read together.
pub struct Batch<'m> {
    model: &'m LoadedModel,
    forward: Forward<'m>,
    pool: PagePool,
    /// Open sequences, and free places.
    sequences: Vec<Option<Sequence>>,
    logits: Vec<f32>,
}

/// An open sequence.
#[derive(Debug, Default)]
struct Sequence {
    pages: Vec<u32>,
    /// Number of tokens that were read.
    tokens: usize,
    /// True if it may get longer than the model's short context.
    is_long: bool,
}

impl<'m> Batch<'m> {
    /// Creates an empty batch with a cache of pages for `cache_tokens` tokens of one sequence. Sequences share the pages, and
    /// each may waste a part of its last one.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn new(model: &'m LoadedModel, cache_tokens: usize) -> Result<Self, InferError> {
        let pool = PagePool::new(model, cache_tokens)?;
        let forward = Forward::new(model)?;
        Ok(Self { model, forward, pool, sequences: Vec::new(), logits: Vec::new() })
    }

    /// Returns the tokens of the pages that hold `tokens` tokens of one sequence.
    pub fn whole_pages(&self, tokens: usize) -> usize {
        self.model.whole_pages(tokens)
    }

    /// Opens a sequence that gets up to `most_tokens` tokens. Models with LongRoPE have other frequencies for sequences that get longer
    /// than their original context, from their first token on.
    pub fn open(&mut self, most_tokens: usize) -> SequenceId {
        let is_long = self.model.config.short_context().is_some_and(|short| most_tokens > short);
        self.add(Sequence { is_long, ..Sequence::default() })
    }

    fn add(&mut self, sequence: Sequence) -> SequenceId {
        let place = self.sequences.iter().position(Option::is_none).unwrap_or(self.sequences.len());
        if place == self.sequences.len() {
            self.sequences.push(None);
        }
        self.sequences[place] = Some(sequence);
        SequenceId(place)
    }

    /// Opens a sequence with all tokens of another. They share the pages that are full.
    ///
    /// # Errors
    /// If no page is free for the tokens of the last one.
    ///
    /// # Panics
    /// If the sequence is closed.
    pub fn fork(&mut self, sequence: SequenceId) -> Result<SequenceId, InferError> {
        let Sequence { pages, tokens, is_long } =
            self.sequences[sequence.0].as_ref().expect("an open sequence");
        let (tokens, is_long) = (*tokens, *is_long);
        let pages = self.pool.fork(&*self.model.queue, pages, tokens)?;
        Ok(self.add(Sequence { pages, tokens, is_long }))
    }

    /// Removes the sequence, and frees its pages.
    pub fn close(&mut self, sequence: SequenceId) {
        if let Some(mut sequence) = self.sequences[sequence.0].take() {
            self.pool.release(&mut sequence.pages);
        }
    }

    /// Returns the number of tokens that a sequence has read.
    ///
    /// # Panics
    /// If the sequence is closed.
    pub fn tokens(&self, sequence: SequenceId) -> usize {
        self.sequences[sequence.0].as_ref().expect("an open sequence").tokens
    }

    /// Reads a prompt of any length in chunks. Returns the logits after its last token, f32 `[vocabulary]`.
    ///
    /// # Errors
    /// If the prompt is empty, and as [`Batch::read`].
    pub(crate) fn read_prompt(&mut self, sequence: SequenceId, prompt: &[u32]) -> Result<&[f32], InferError> {
        // Chunks bound the memory of activations, and change no bit.
        let mut chunks = prompt.chunks(self.model.chunk_tokens).peekable();
        while let Some(ids) = chunks.next() {
            let wants_logits = chunks.peek().is_none();
            drop(self.read(&[NewTokens { sequence, ids, wants_logits }])?);
        }
        if prompt.is_empty() { Err(InferError::EmptyPrompt) } else { Ok(&self.logits) }
    }

    /// Reads new tokens of sequences in one forward. Returns the logits of those that want them, f32 `[vocabulary]` each, in
    /// the order of `new`.
    ///
    /// # Errors
    /// If a sequence would have more tokens than the model has positions, or too few pages are free: then nothing is read.
    /// If memory runs out.
    ///
    /// # Panics
    /// If an entry has no tokens, or names a closed sequence or one that another entry names.
    pub fn read(&mut self, new: &[NewTokens<'_>]) -> Result<ChunksExact<'_, f32>, InferError> {
        let allowed = self.model.config.max_position_embeddings();
        for (index, entry) in new.iter().enumerate() {
            let is_repeated = new[..index].iter().any(|other| other.sequence == entry.sequence);
            assert!(!is_repeated, "a step names a sequence twice");
            let sequence = self.sequences[entry.sequence.0].as_mut().expect("an open sequence");
            let tokens = sequence.tokens + entry.ids.len();
            if tokens > allowed {
                return Err(InferError::TooLong { tokens, allowed });
            }
            self.pool.extend(&mut sequence.pages, tokens)?;
        }
        let parts: Vec<Part<'_>> = new
            .iter()
            .map(|entry| {
                assert!(!entry.ids.is_empty(), "a step reads at least one token of each of its sequences");
                let sequence = self.sequences[entry.sequence.0].as_ref().expect("an open sequence");
                let Sequence { pages, tokens, is_long } = sequence;
                let (cached, is_long) = (*tokens, *is_long);
                Part { ids: entry.ids, cached, pages, wants_logits: entry.wants_logits, is_long }
            })
            .collect();
        self.forward.run(&parts, &self.pool, &mut self.logits)?;
        for entry in new {
            if let Some(sequence) = &mut self.sequences[entry.sequence.0] {
                sequence.tokens += entry.ids.len();
            }
        }
        Ok(self.logits.chunks_exact(self.model.config.vocab_size()))
    }
}
