//! Shapes of a recorded block on this rank: its micro-batch, its values and parameters, and which of them have
//! gradients. Replays and cost estimates read them; the operations themselves are in `program`.

use lockstep_plan::ContextPlace;

use crate::{
    block::{BlockShape, ParameterDeclaration, ParameterIndex, Value, ValueInfo},
    facts::Facts,
    reports::Report,
    training::Training,
};

/// Shapes of a recorded block's values and parameters on this rank.
#[derive(Debug)]
pub struct Shapes {
    pub(crate) block: BlockShape,
    pub(crate) context: ContextPlace,
    pub(crate) values: Vec<ValueInfo>,
    pub(crate) parameters: Vec<ParameterDeclaration>,
    pub(crate) training: Training,
    pub(crate) reports: Vec<Report>,
}

impl Shapes {
    /// Returns the micro-batch shape; under context parallelism, with the local tokens of each sequence.
    pub fn block(&self) -> BlockShape {
        self.block
    }

    /// Returns the rank's place in the context-parallel group.
    pub fn context(&self) -> ContextPlace {
        self.context
    }

    /// Returns the tokens per sequence, including those of other ranks.
    pub fn whole_seq_len(&self) -> usize {
        self.block.seq_len * self.context.ranks
    }

    /// Returns the local rows of a value.
    pub fn rows(&self, value: Value) -> u64 {
        self.values[value.0].rows as u64
    }

    /// Returns the local columns of a value.
    pub fn columns(&self, value: Value) -> u64 {
        self.values[value.0].columns as u64
    }

    /// Returns the local elements of a value.
    pub fn elements(&self, value: Value) -> u64 {
        self.values[value.0].elements() as u64
    }

    /// Returns the local bytes of a value.
    pub fn bytes(&self, value: Value) -> u64 {
        self.values[value.0].bytes() as u64
    }

    /// Returns the local elements of a parameter.
    pub fn parameter_elements(&self, index: ParameterIndex) -> u64 {
        let parameter = &self.parameters[index.0];
        parameter.share.shape_of(&parameter.shape).iter().product::<usize>() as u64
    }

    /// Returns the bytes of a parameter in the dtype that kernels read.
    pub fn weight_bytes(&self, index: ParameterIndex) -> u64 {
        self.parameter_elements(index) * self.block.dtype.size_bytes() as u64
    }

    /// Returns true if the parameter is trained.
    pub fn trains(&self, parameter: ParameterIndex) -> bool {
        self.training.trains(parameter)
    }

    /// Returns true if the gradient of the value is needed.
    pub fn differentiates(&self, value: Value) -> bool {
        self.training.differentiates(value)
    }

    /// Bytes of some values that an operation with these facts touches.
    pub(crate) fn touched_bytes<'v>(
        &self,
        facts: &Facts,
        values: impl IntoIterator<Item = &'v Value>,
    ) -> u64 {
        values.into_iter().map(|value| touched_bytes(facts, self.values[value.0])).sum()
    }
}

/// Elements of a value or gradient that an operation with these facts touches. A buffer with room for the rows of all
/// tokens of all ranks counts with the rows of evenly loaded experts.
pub(crate) fn touched_elements(facts: &Facts, info: ValueInfo) -> u64 {
    match facts.expert_rows {
        Some(rows) if info.rows == rows.room => (rows.even * info.columns) as u64,
        _ => info.elements() as u64,
    }
}

/// Bytes of a value or gradient that an operation with these facts touches.
pub(crate) fn touched_bytes(facts: &Facts, info: ValueInfo) -> u64 {
    touched_elements(facts, info) * info.dtype.size_bytes() as u64
}
