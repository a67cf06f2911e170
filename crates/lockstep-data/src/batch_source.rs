//! Sources of a run's micro-batches: windows of tokens, or samples of named tensors.

use std::fmt::Debug;
use std::ops::Range;

use crate::batch::{IGNORE_LABEL, MicroBatch};
use crate::dataset::Dataset;
use crate::error::Result;

/// Samples in a fixed global order, from which micro-batches are filled. Sample `i` is the same whichever rank reads it,
/// and whenever.
pub trait BatchSource: Debug + Send + Sync {
    /// Returns the number of samples of an epoch.
    fn samples(&self) -> u64;

    /// Fills `batch` with a range of global sample numbers; numbers from [`BatchSource::samples`] on are those of the next
    /// epochs.
    ///
    /// # Errors
    /// If a sample cannot be read.
    fn fill(&self, samples: Range<u64>, batch: &mut MicroBatch) -> Result<()>;

    /// Masks the targets of the samples of a micro-batch from index `counted` on, so that they do not count in the loss.
    fn mask(&self, counted: usize, batch: &mut MicroBatch);
}

impl BatchSource for Dataset {
    fn samples(&self) -> u64 {
        self.windows()
    }

    fn fill(&self, samples: Range<u64>, batch: &mut MicroBatch) -> Result<()> {
        Self::fill(self, samples, batch)
    }

    fn mask(&self, counted: usize, batch: &mut MicroBatch) {
        batch.labels[counted * batch.seq_len..].fill(IGNORE_LABEL);
    }
}
