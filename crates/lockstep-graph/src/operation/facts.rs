//! Facts of an operation, for the passes over a recording that treat all operations alike.

use lockstep_plan::work::Pass;

use crate::block::{ParameterIndex, Value};

/// The operands of an operation, and what planning, differentiation and cost estimates may assume about it.
#[derive(Debug, Default)]
pub(crate) struct Facts {
    /// Name in tables and traces.
    pub(crate) name: &'static str,
    /// Values that the forward reads and that can have gradients.
    pub(crate) inputs: Vec<Value>,
    /// Other values that the forward reads.
    pub(crate) tables: Vec<Value>,
    /// Values that the forward writes for others to read: the output, then statistics for the backward.
    pub(crate) outputs: Vec<Value>,
    /// Scratch of the forward or the input gradients.
    pub(crate) scratch: Vec<Value>,
    /// Scratch of the weight gradient.
    pub(crate) scratch_for_weights: Vec<Value>,
    /// Matrix, scale or table.
    pub(crate) weight: Option<ParameterIndex>,
    /// Bias, whose gradient needs no saved activation.
    pub(crate) bias: Option<ParameterIndex>,
    /// Saved activations that the input gradients need.
    pub(crate) saved_for_inputs: Vec<Value>,
    /// Saved activations that the weight gradient needs.
    pub(crate) saved_for_weights: Vec<Value>,
    /// Inputs whose storage the output may take over once nothing else needs them.
    pub(crate) in_place_inputs: Vec<Value>,
    /// True if the gradient of the input may overwrite the gradient of the output.
    pub(crate) backward_in_place: bool,
    /// True if the backward kernel can add to the gradient of the input. Otherwise a second gradient is written to a
    /// buffer of its own, which is then added.
    pub(crate) accumulates: bool,
    /// True if its inputs have the gradient of its output.
    pub(crate) passes_gradient_on: bool,
    /// True for a loss: it seeds the backward, and its instruction for the input gradients computes the weight gradient as well.
    pub(crate) is_loss: bool,
    /// Value that the output is an alias of; only their gradients differ.
    pub(crate) alias_of: Option<Value>,
    /// True if its output is never saved but gathered again, because other ranks save their shards of it.
    pub(crate) is_gathered: bool,
    /// True if its output is the keys or values of whole sequences; those of the local tokens are saved instead.
    pub(crate) gathers_sequences: bool,
    /// True if selective recomputation drops its output: it is cheap to recompute, and as wide as an activation.
    pub(crate) is_cheap: bool,
    /// Floating-point operations per element outside matrix products: of the forward, the input gradients and the
    /// weight gradient. They are counted in the kernels' formulas; attention's softmax is not counted.
    pub(crate) vector_flops: [u64; 3],
}

impl Facts {
    /// Returns the facts of an operation without parameters, scratch and saved activations.
    pub(crate) fn of(
        name: &'static str,
        inputs: impl Into<Vec<Value>>,
        outputs: impl Into<Vec<Value>>,
    ) -> Self {
        Self { name, inputs: inputs.into(), outputs: outputs.into(), ..Self::default() }
    }

    /// Returns the facts of an elementwise operation whose output may overwrite its input, in both passes.
    pub(crate) fn in_place(name: &'static str, x: Value, y: Value) -> Self {
        Self { in_place_inputs: vec![x], backward_in_place: true, ..Self::of(name, [x], [y]) }
    }

    /// Returns the value that the rest of the block uses.
    pub(crate) fn output(&self) -> Value {
        self.outputs[0]
    }

    /// Returns the values that the forward reads.
    pub(crate) fn reads(&self) -> impl Iterator<Item = Value> {
        self.inputs.iter().chain(&self.tables).copied()
    }

    /// Returns its parameters: the matrix or the scale first, then the bias.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = ParameterIndex> {
        self.weight.into_iter().chain(self.bias)
    }

    /// Returns the floating-point operations per element outside matrix products.
    pub(crate) fn vector_flops(&self, pass: Pass) -> u64 {
        let [forward, inputs, weights] = self.vector_flops;
        match pass {
            Pass::Forward | Pass::Recompute => forward,
            Pass::BackwardInputs => inputs,
            Pass::BackwardWeights => weights,
        }
    }
}
