//! What recording a model says of each of its units: everything that its memory depends on, and nothing of a plan but the
//! rank's place among those that share a block.

use crate::{ContextPlace, DType, ParameterId, ParameterRecord};

/// One unit: the embedding, a block, or the head.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct UnitProfile {
    /// The parameters that it reads.
    pub parameters: Vec<ParameterId>,
    /// Bytes kept from its forward to its backward, its output included, or the rank's slice of that.
    pub frame_bytes: usize,
    /// Bytes of it that lie before the output.
    pub saved_bytes: usize,
    /// Whether ranks that have the same output keep a slice of it each, to gather it before the next unit's backward.
    pub slices_output: bool,
    /// Bytes kept between the halves of a split backward.
    pub deferred_bytes: usize,
    /// Bytes used inside a forward or a backward.
    pub workspace_bytes: usize,
    /// The same where the backward is split.
    pub split_workspace_bytes: usize,
    /// Elements of the keys and values that go round the ranks that share each sequence; 0 if none do.
    pub ring_elements: usize,
    /// Bytes of rows that are on their way to other ranks beside products; none if exchanges are by themselves.
    pub transit_bytes: Option<usize>,
    /// Whether its backward computes anything.
    pub has_backward: bool,
    /// The parameter that chooses experts and that no gradient changes, if it has one.
    pub selection_bias: Option<ParameterId>,
}

/// A model, recorded for a rank's place among those that share its blocks, its sequences and its experts.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelProfile {
    /// From the embedding to the head.
    pub units: Vec<UnitProfile>,
    /// Every parameter, whichever stage has it.
    pub records: Vec<ParameterRecord>,
    /// The most elements of each parameter that any of the ranks holds that share its block: parts of a vocabulary may differ.
    pub largest_elements: Vec<usize>,
    /// Type of weights and of values between units.
    pub dtype: DType,
    /// Sequences of a micro-batch.
    pub sequences: usize,
    /// Tokens of a micro-batch that are here.
    pub tokens: usize,
    /// Bytes of the values between units.
    pub boundary_bytes: usize,
    /// Bytes of a slice of one.
    pub slice_bytes: usize,
    /// Bytes of one that is gathered from slices.
    pub gathered_bytes: usize,
    /// Frequencies of rotary embeddings.
    pub frequencies: usize,
    /// The rank's place among those that share each sequence.
    pub context: ContextPlace,
}

impl ModelProfile {
    /// Which units some stages have.
    pub(crate) fn is_here(&self, stages: &[super::StageMemory]) -> Vec<bool> {
        (0..self.units.len()).map(|unit| stages.iter().any(|stage| stage.units.contains(&unit))).collect()
    }

    /// Bytes that are kept of what a stage is given, whose first unit is `unit`: none at the beginning of the model.
    pub fn given_bytes(&self, unit: usize) -> Option<usize> {
        let before = self.units[..unit].last()?;
        Some(if before.slices_output { self.slice_bytes } else { self.boundary_bytes })
    }
}
