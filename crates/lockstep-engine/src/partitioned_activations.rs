//! Partitioned activations: each tensor-parallel rank saves only a slice of a unit's output (Rajbhandari et al. 2019,
//! `P_a`; Korthikanti et al. 2022).
//!
//! Without sequence parallelism all tensor-parallel ranks have the same output of a block. If the next block recomputes
//! everything else, each rank saves a flat slice of that output. The slices are all-gathered before the next block's
//! backward. Two outputs are complete at a time: the one that a unit reads and the one that it writes. Pipeline stages
//! send slices, which makes messages shorter, and gather them at the receiver (Narayanan et al. 2021, section 4.1).
//!
//! ```text
//! forward    unit 3 writes [ rank 0 | rank 1 | rank 2 | rank 3 ]    unit 4 reads it, then unit 5 writes there
//! kept       on rank 2                       [ rank 2 ]             in the frame of unit 3, until the backward of unit 4
//! ```

use lockstep_comm::CommError;
use lockstep_graph::Peers;
use lockstep_model::RecordedModel;
use lockstep_plan::{DType, MemoryCategory, StageMemory, TensorPlace};
use lockstep_tensor::{Arena, Buffer, Kernels, TensorError, View};

/// Two buffers for complete outputs, and the shape of their slices.
#[derive(Debug)]
pub(crate) struct PartitionedActivations {
    whole: [Buffer; 2],
    dtype: DType,
    /// Rows and columns of a complete output.
    shape: [usize; 2],
    /// Elements of a slice; because of padding, all slices together may have more than the output.
    elements: usize,
    ranks: usize,
    rank: usize,
}

impl PartitionedActivations {
    /// Allocates memory for complete unit outputs of `stages`, for a rank at this place of the tensor-parallel group.
    /// Returns `None` if no output is partitioned.
    ///
    /// # Errors
    /// If memory runs out.
    pub(crate) fn new(
        model: &RecordedModel,
        stages: &[StageMemory],
        TensorPlace { ranks, rank, .. }: TensorPlace,
        arena: &Arena,
    ) -> Result<Option<Self>, TensorError> {
        let mut units = stages.iter().flat_map(|stage| stage.units.start.saturating_sub(1)..stage.units.end);
        if !units.any(|unit| model.slices_output(unit)) {
            return Ok(None);
        }
        let between = model.program(0);
        let (dtype, elements) = (between.shape().dtype, model.slice_elements());
        let whole = || arena.allocate(ranks * elements * dtype.size_bytes(), MemoryCategory::Communication);
        let shape = [between.output_rows(), between.output_columns()];
        Ok(Some(Self { whole: [whole()?, whole()?], dtype, shape, elements, ranks, rank }))
    }

    /// Returns the complete output of a unit, as it was written or gathered last.
    pub(crate) fn whole(&self, unit: usize) -> View<'_> {
        self.whole[unit % 2].view(self.dtype, 0, self.shape)
    }

    /// Returns the slice at `offset_bytes` of a buffer.
    pub(crate) fn slice<'a>(&self, buffer: &'a Buffer, offset_bytes: usize) -> View<'a> {
        buffer.view(self.dtype, offset_bytes, [self.elements])
    }

    /// Copies this rank's slice of the output of a unit to `kept`.
    pub(crate) fn keep(&self, queue: &dyn Kernels, unit: usize, kept: View<'_>) {
        let offset_bytes = self.rank * self.elements * self.dtype.size_bytes();
        queue.cast(self.slice(&self.whole[unit % 2], offset_bytes), kept);
    }

    /// All-gathers the output of a unit from the slices that `peers` saved.
    ///
    /// # Errors
    /// If a rank is lost, or does not answer in time.
    pub(crate) fn gather(&self, peers: Peers<'_>, unit: usize, kept: View<'_>) -> Result<(), CommError> {
        peers.gather(kept, self.whole[unit % 2].view(self.dtype, 0, [self.ranks * self.elements]))
    }
}
