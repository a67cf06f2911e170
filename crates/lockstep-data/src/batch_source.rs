//! Sources of a run's micro-batches: windows of tokens, or samples of named tensors.

use std::{fmt::Debug, ops::Range};

use crate::{batch::MicroBatch, dataset::Dataset, error::Result};

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
}

impl BatchSource for Dataset {
    fn samples(&self) -> u64 {
        self.windows()
    }

    fn fill(&self, samples: Range<u64>, batch: &mut MicroBatch) -> Result<()> {
        Self::fill(self, samples, batch)
    }
}
