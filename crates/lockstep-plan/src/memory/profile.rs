//! Memory of each unit of a model, as recorded. It depends on nothing of a plan except the rank's place in the tensor-, context- and
//! expert-parallel groups.

use crate::{ContextPlace, DType, ParameterId, ParameterRecord, booked_bytes};

/// Memory of one unit: the embedding, a block, or the head.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct UnitProfile {
    /// Parameters that the unit reads.
    pub parameters: Vec<ParameterId>,
    /// Bytes of the frame: saved activations from forward to backward, including the output or the rank's slice of it.
    pub frame_bytes: usize,
    /// Bytes of the frame before the output.
    pub saved_bytes: usize,
    /// True if the tensor-parallel group shards the output in the frame and gathers it before the next unit's backward.
    pub slices_output: bool,
    /// Bytes saved between the halves of a split backward.
    pub deferred_bytes: usize,
    /// Bytes of temporary values inside a forward or a backward.
    pub workspace_bytes: usize,
    /// Bytes of temporary values if the backward is split.
    pub split_workspace_bytes: usize,
    /// Elements of the keys and values of ring attention; 0 without it.
    pub ring_elements: usize,
    /// Bytes of the row chunks in flight of collectives that overlap with GEMMs; `None` if collectives are not chunked.
    pub overlap_buffer_bytes: Option<usize>,
    /// True if the unit has a backward.
    pub has_backward: bool,
    /// Parameters without gradients: the bias that selects experts, the running statistics of batch norm.
    pub buffers: Vec<ParameterId>,
}

/// Memory of a model, recorded for a rank's place in the tensor-, context- and expert-parallel groups.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelProfile {
    /// Units from the embedding to the head.
    pub units: Vec<UnitProfile>,
    /// All parameters of the model, whichever stage has them.
    pub records: Vec<ParameterRecord>,
    /// Size in elements of each parameter's largest shard in the tensor-parallel group; vocabulary shards may differ.
    pub largest_elements: Vec<usize>,
    /// Dtype of weights and of values between units.
    pub dtype: DType,
    /// Sequences of a micro-batch.
    pub sequences: usize,
    /// Bytes of each named input of a micro-batch.
    pub data_bytes: Vec<usize>,
    /// Tokens of a micro-batch on this rank.
    pub tokens: usize,
    /// Bytes of the largest value between units; buffers for such values are all of this size.
    pub boundary_bytes: usize,
    /// Bytes of a rank's slice of such a value.
    pub slice_bytes: usize,
    /// Bytes of such a value when it is gathered from slices.
    pub gathered_bytes: usize,
    /// Number of elements of each of the model's constants, f32.
    pub constants: Vec<usize>,
    /// The rank's position in the context-parallel group.
    pub context: ContextPlace,
}

impl ModelProfile {
    /// Returns, by unit, whether it is in one of `stages`.
    pub(crate) fn is_here(&self, stages: &[super::StageMemory]) -> Vec<bool> {
        (0..self.units.len()).map(|unit| stages.iter().any(|stage| stage.units.contains(&unit))).collect()
    }

    /// Returns the booked bytes of a micro-batch's inputs: ids, labels, positions, document starts, dropout keys and named
    /// inputs.
    pub(super) fn micro_batch_bytes(&self) -> usize {
        let of_tokens = |tokens: usize| booked_bytes(DType::U32.size_bytes() * tokens);
        3 * of_tokens(self.tokens)
            + of_tokens(self.tokens * self.context.attended())
            + booked_bytes(2 * DType::U32.size_bytes() * self.sequences)
            + self.data_bytes.iter().map(|bytes| booked_bytes(*bytes)).sum::<usize>()
    }

    /// Returns the saved bytes of the input of a stage whose first unit is `unit`; `None` at the beginning of the model.
    pub fn input_bytes(&self, unit: usize) -> Option<usize> {
        let before = self.units[..unit].last()?;
        Some(if before.slices_output { self.slice_bytes } else { self.boundary_bytes })
    }
}
