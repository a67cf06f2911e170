//! Memory categories, under which every byte is booked, predicted and reported, and the prediction of a rank's memory.
//!
//! - [`StoreLayout`]: layout of a model's parameters in a flat store, and the part that a rank holds.
//! - [`StageMemory`]: units of a pipeline stage, and its micro-batches in flight.
//! - [`ModelProfile`]: memory of each unit of a model, as recorded.
//! - [`StateLayout`]: flat stores of a rank, which the engine allocates.
//! - [`MemoryPrediction`]: all of it together with the buffers of passes and collectives, as bytes by category.
//! - [`ActivationUse`]: activation memory in use over the time of a step.

mod layout;
mod offload_traffic;
mod offloaded_frames;
mod over_time;
mod prediction;
mod profile;
mod stage;
mod state_layout;
mod state_plan;
mod windows;

use std::iter::Sum;
use std::ops::{Add, AddAssign, Index, IndexMut};

use crate::named_enum::named_enum;

named_enum! {
    /// Purpose of a byte of memory. A buffer has one category from its allocation until its last owner drops it.
    /// The order of the variants is that of reports and of the words of a step's metrics.
    #[derive(PartialOrd, Ord)]
    pub enum MemoryCategory {
        /// Weights in the dtype that kernels read.
        Parameters = "parameters",
        /// Accumulated gradients, always f32.
        Gradients = "gradients",
        /// Optimizer moments and, under bf16 or f16, the f32 master weights.
        Optimizer = "optimizer",
        /// Values saved by a forward for its backward, and values between blocks.
        Activations = "activations",
        /// Buckets and staging buffers of collectives.
        Communication = "communication",
        /// Temporary values inside one unit's forward or backward, and packed operands.
        Workspace = "workspace",
        /// Copies of the run's state, to be saved or to roll back to.
        Snapshot = "snapshot",
        /// Freed blocks that the arena keeps for later allocations.
        Cached = "cached",
    }
}

pub use layout::{Extent, FlatParameter, GradientStaging, QuantizedGradientStaging, StoreLayout};
pub use offload_traffic::{
    OffloadBytes, OffloadTraffic, RankTraffic, offload_traffic_by_kind, offloaded_bytes,
};
pub use offloaded_frames::FRAME_PLACES;
pub use over_time::{ActivationUse, StageActivationUse};
pub use prediction::{MemoryItem, MemoryPrediction, RingSizes, SparseGradientSizes, predicted};
pub use profile::{ModelProfile, UnitProfile};
pub use stage::{SharedTable, StageMemory};
pub use state_layout::{StateItem, StateLayout, StoreKind};
pub use state_plan::{StateFacts, StatePlan};
pub use windows::{
    DISK_ALIGNMENT_BYTES, OffloadPlan, WINDOW_SLOTS, aligned_buffer_bytes, window_bytes, window_memory_bytes,
};

/// Granularity of allocations: whole cache lines.
pub const CACHE_LINE_BYTES: usize = 64;

/// Returns the bytes that an allocation of `bytes` is booked as: whole cache lines, at least one.
pub const fn booked_bytes(bytes: usize) -> usize {
    let lines = bytes.div_ceil(CACHE_LINE_BYTES);
    // Saturates beyond the address space; the allocation is refused like any impossible one.
    if lines == 0 { CACHE_LINE_BYTES } else { lines.saturating_mul(CACHE_LINE_BYTES) }
}

/// Bytes per [`MemoryCategory`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryBytes([usize; MemoryCategory::ALL.len()]);

impl MemoryBytes {
    /// Returns the sum over all categories; it saturates.
    pub fn total(&self) -> usize {
        self.0.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }

    /// Returns the bytes of each category, in the order of reports.
    pub fn entries(&self) -> impl Iterator<Item = (MemoryCategory, usize)> + use<> {
        let bytes = self.0;
        MemoryCategory::ALL.into_iter().map(move |category| (category, bytes[category as usize]))
    }

    /// Returns the larger of both values in each category.
    #[must_use]
    pub fn maximum(mut self, other: &Self) -> Self {
        self.0.iter_mut().zip(other.0).for_each(|(bytes, other)| *bytes = (*bytes).max(other));
        self
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

impl AddAssign for MemoryBytes {
    fn add_assign(&mut self, other: Self) {
        self.0.iter_mut().zip(other.0).for_each(|(bytes, more)| *bytes = bytes.saturating_add(more));
    }
}

impl Add for MemoryBytes {
    type Output = Self;

    fn add(mut self, other: Self) -> Self {
        self += other;
        self
    }
}

impl Sum for MemoryBytes {
    fn sum<I: Iterator<Item = Self>>(each: I) -> Self {
        each.fold(Self::default(), Add::add)
    }
}
