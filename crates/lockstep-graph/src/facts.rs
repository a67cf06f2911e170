//! Facts of an operation, for the passes over a recording that treat all operations alike: differentiation, memory
//! planning, overlap and cost estimates.

use lockstep_plan::work::Pass;

use crate::{
    block::{ParameterIndex, RunningUpdate, Value},
    placement::Transfer,
};

/// The operands of an operation, and what planning, differentiation and cost estimates may assume about it.
///
/// An operation states what differs from the default: `Facts { accumulates: true, ..Facts::of("name", [x], [y]) }`.
#[derive(Debug, Clone, Default)]
pub struct Facts {
    /// Name in tables and traces.
    pub name: &'static str,
    /// Values that the forward reads and that can have gradients.
    pub inputs: Vec<Value>,
    /// Other values that the forward reads.
    pub tables: Vec<Value>,
    /// Values that the forward writes for others to read: the output, then statistics for the backward.
    pub outputs: Vec<Value>,
    /// Scratch of the forward or the input gradients.
    pub scratch: Vec<Value>,
    /// Scratch of the weight gradients.
    pub scratch_for_weights: Vec<Value>,
    /// Matrices, scales or tables, whose gradients may need saved activations.
    pub weights: Vec<ParameterIndex>,
    /// Bias, whose gradient needs no saved activation.
    pub bias: Option<ParameterIndex>,
    /// Saved activations that the input gradients need.
    pub saved_for_inputs: Vec<Value>,
    /// Saved activations that the weight gradients need.
    pub saved_for_weights: Vec<Value>,
    /// Inputs whose storage the output may take over once nothing else needs them.
    pub in_place_inputs: Vec<Value>,
    /// True if the gradient of the input may overwrite the gradient of the output.
    pub backward_in_place: bool,
    /// True if the backward kernel can add to the gradient of the input. Otherwise a second gradient is written to a
    /// buffer of its own, which is then added.
    pub accumulates: bool,
    /// True if its inputs have the gradient of its output.
    pub passes_gradient_on: bool,
    /// True for a loss: it seeds the backward, and its instruction for the input gradients computes the weight gradient as well.
    pub is_loss: bool,
    /// Value that the output is an alias of; only their gradients differ.
    pub alias_of: Option<Value>,
    /// True if its output is never saved but gathered again, because other ranks save their shards of it.
    pub is_gathered: bool,
    /// True if its output is the keys or values of whole sequences; those of the local tokens are saved instead.
    pub gathers_sequences: bool,
    /// True if selective recomputation drops its output: it is cheap to recompute, and as wide as an activation.
    pub is_cheap: bool,
    /// Tensor-parallel data movement of a redistribution: from the input to the output, and from the gradient of the
    /// output to that of the input. Overlap may run it in chunks.
    pub transfers: Option<[Transfer; 2]>,
    /// True if the operation computes each row of its output from the same row of its only input and in the backward
    /// likewise, so that overlap may compute a range of rows: see [`Op::forward_rows`](crate::Op::forward_rows).
    pub is_row_product: bool,
    /// True if the operation takes long enough to hide a collective behind.
    pub is_long: bool,
    /// Parameters that it reads and that have no gradient: see [`Facts::running`] and [`Facts::selection_bias`].
    pub buffers: Vec<ParameterIndex>,
    /// Running statistics that the engine moves after the step; what they move by is saved in any case.
    pub running: Option<RunningUpdate>,
    /// True if it runs collectives over the data-parallel ranks ([`Replay::replicas`](crate::Replay::replicas)).
    pub reads_replicas: bool,
    /// True if the backward of the inputs leaves values in its scratch that the backward of the weights reads.
    pub keeps_scratch: bool,
    /// Parameter that biases the choice of experts. It has no gradient; the load of the experts updates it.
    pub selection_bias: Option<ParameterIndex>,
    /// Slots that chose each expert, f32 `[sequences, experts]`. They are saved in any case, because the engine reads them.
    pub slot_counts: Option<Value>,
    /// Expected use of buffers that have room for the rows of all tokens of all ranks.
    pub expert_rows: Option<ExpertRows>,
    /// Floating-point operations per element outside matrix products: of the forward, the input gradients and the
    /// weight gradients. They are counted in the kernels' formulas; attention's softmax is not counted.
    pub vector_flops: [u64; 3],
    /// Value whose elements `vector_flops` counts; `None` means the output.
    pub counted_value: Option<Value>,
    /// True if only the rows of the table that the batch names are read and trained.
    pub looks_up_rows: bool,
    /// Outputs besides the first that are as wide as an activation, so that a framework without memory planning saves
    /// them as well.
    pub wide_outputs: Vec<Value>,
}

/// Rows of an operation on the rows of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertRows {
    /// Rows of its buffers: enough for any choice of experts.
    pub room: usize,
    /// Rows in use if the experts are evenly loaded.
    pub even: usize,
}

impl Facts {
    /// Returns the facts of an operation without parameters, scratch and saved activations.
    pub fn of(name: &'static str, inputs: impl Into<Vec<Value>>, outputs: impl Into<Vec<Value>>) -> Self {
        Self { name, inputs: inputs.into(), outputs: outputs.into(), ..Self::default() }
    }

    /// Returns the facts of an elementwise operation whose output may overwrite its input, in both passes.
    pub fn in_place(name: &'static str, x: Value, y: Value) -> Self {
        Self { in_place_inputs: vec![x], backward_in_place: true, ..Self::of(name, [x], [y]) }
    }

    /// Returns the value that the rest of the block uses.
    ///
    /// # Panics
    /// If the operation has no output.
    pub fn output(&self) -> Value {
        self.outputs[0]
    }

    /// Returns the values that the forward reads.
    pub fn reads(&self) -> impl Iterator<Item = Value> {
        self.inputs.iter().chain(&self.tables).copied()
    }

    /// Returns its parameters: the matrices, scales or tables first, then the bias.
    pub fn parameters(&self) -> impl Iterator<Item = ParameterIndex> {
        self.weights.iter().copied().chain(self.bias)
    }

    /// Returns the floating-point operations per element outside matrix products.
    pub fn vector_flops(&self, pass: Pass) -> u64 {
        let [forward, inputs, weights] = self.vector_flops;
        match pass {
            Pass::Forward | Pass::Recompute => forward,
            Pass::BackwardInputs => inputs,
            Pass::BackwardWeights => weights,
        }
    }
}
