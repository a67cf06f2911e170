//! One sequence that is read token by token, with the logits after each read.

use crate::{Batch, InferError, LoadedModel, SequenceId};

/// A reader of one sequence.
pub struct Generator<'m> {
    batch: Batch<'m>,
    sequence: SequenceId,
    capacity: usize,
    logits: Vec<f32>,
}

impl<'m> Generator<'m> {
    /// Creates a generator with a cache for `capacity` tokens, prompt included.
    ///
    /// # Errors
    /// If `capacity` exceeds the model's positions, or memory runs out.
    pub fn new(model: &'m LoadedModel, capacity: usize) -> Result<Self, InferError> {
        let allowed = model.config.max_position_embeddings();
        if capacity > allowed {
            return Err(InferError::TooLong { tokens: capacity, allowed });
        }
        let mut batch = Batch::new(model, capacity)?;
        let sequence = batch.open(capacity);
        Ok(Self { batch, sequence, capacity, logits: vec![0.0; model.config.vocab_size()] })
    }

    /// Returns the logits that follow the last token read, f32 `[vocabulary]`.
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// Reads a prompt, after the tokens that were read before.
    ///
    /// # Errors
    /// If the prompt is empty, if it does not fit in the cache, or if memory runs out.
    pub fn read(&mut self, prompt: &[u32]) -> Result<(), InferError> {
        let tokens = self.batch.tokens(self.sequence) + prompt.len();
        if tokens > self.capacity {
            return Err(InferError::TooLong { tokens, allowed: self.capacity });
        }
        self.logits.copy_from_slice(self.batch.read_prompt(self.sequence, prompt)?);
        Ok(())
    }

    /// Reads one token.
    ///
    /// # Errors
    /// If the cache is full, or memory runs out.
    pub fn step(&mut self, id: u32) -> Result<(), InferError> {
        self.read(&[id])
    }
}
