//! The headings under which every byte is booked, predicted and reported.

use std::ops::{Index, IndexMut};

use serde::{Deserialize, Serialize};

/// What a byte of memory is for. A buffer has exactly one category from its allocation until its last
/// owner drops it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryCategory {
    /// Weights in the precision that kernels read.
    Parameters,
    /// Accumulated gradients, always f32.
    Gradients,
    /// Moments and, under bf16 or f16, the f32 master weights.
    Optimizer,
    /// Values saved by a forward for its backward, and the values between blocks.
    Activations,
    /// Buckets and staging of collectives.
    Communication,
    /// What lives inside one block's forward or backward, and packed operands.
    Workspace,
    /// Copies of the run's state: being saved, or kept to go back to.
    Snapshot,
    /// Freed blocks the arena keeps for the next allocation.
    Cached,
}

impl MemoryCategory {
    /// All categories, in the order reports print them.
    pub const ALL: [Self; 8] = [
        Self::Parameters,
        Self::Gradients,
        Self::Optimizer,
        Self::Activations,
        Self::Communication,
        Self::Workspace,
        Self::Snapshot,
        Self::Cached,
    ];

    /// The name used in `metrics.jsonl`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Parameters => "parameters",
            Self::Gradients => "gradients",
            Self::Optimizer => "optimizer",
            Self::Activations => "activations",
            Self::Communication => "communication",
            Self::Workspace => "workspace",
            Self::Snapshot => "snapshot",
            Self::Cached => "cached",
        }
    }
}

/// Bytes per [`MemoryCategory`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryBytes([usize; MemoryCategory::ALL.len()]);

impl MemoryBytes {
    /// The sum over all categories.
    pub fn total(&self) -> usize {
        self.0.iter().sum()
    }
}

impl Index<MemoryCategory> for MemoryBytes {
    type Output = usize;

    fn index(&self, category: MemoryCategory) -> &usize {
        &self.0[category as usize]
    }
}

impl IndexMut<MemoryCategory> for MemoryBytes {
    fn index_mut(&mut self, category: MemoryCategory) -> &mut usize {
        &mut self.0[category as usize]
    }
}
