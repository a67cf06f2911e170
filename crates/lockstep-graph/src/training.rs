//! Selection of the values of a block that need a gradient, given its trainable parameters.
//!
//! A gradient that leads to no trained parameter and no earlier block is never computed, and activations that only it
//! would read are never saved.

use crate::{
    block::{ParameterDeclaration, ParameterIndex, Value},
    facts::Facts,
};

/// Tells the recorder if an earlier block needs the gradient of this block's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum InputGradient {
    /// The gradient of the block's input is computed.
    #[default]
    Wanted,
    /// The gradient of the block's input is skipped: nothing in earlier blocks is trained.
    Unwanted,
}

/// The trained parameters of a recorded block, and the values whose gradients they need.
#[derive(Debug)]
pub(crate) struct Training {
    /// Trained flag of each parameter.
    trained: Vec<bool>,
    /// Per value, true if its gradient leads to a trained parameter or to the block's input.
    differentiated: Vec<bool>,
}

impl Training {
    /// Returns the values of a block of `values` values that need a gradient; `input` is the block's input, if its
    /// gradient is wanted.
    pub(crate) fn new(
        values: usize,
        facts: &[Facts],
        parameters: &[ParameterDeclaration],
        input: Option<Value>,
    ) -> Self {
        let mut training = Self {
            trained: parameters.iter().map(|parameter| parameter.trainable).collect(),
            differentiated: vec![false; values],
        };
        if let Some(input) = input {
            training.differentiated[input.0] = true;
        }
        for facts in facts {
            let reached = training.reaches_inputs(facts) || training.reaches_weights(facts);
            training.differentiated[facts.output().0] |= reached;
        }
        training
    }

    /// Returns true if the parameter is trained.
    pub(crate) fn trains(&self, parameter: ParameterIndex) -> bool {
        self.trained[parameter.0]
    }

    /// Returns true if one of the operation's matrices, scales or tables is trained.
    pub(crate) fn trains_weight(&self, facts: &Facts) -> bool {
        facts.weights.iter().any(|weight| self.trains(*weight))
    }

    /// Returns true if the gradient of the value is needed.
    pub(crate) fn differentiates(&self, value: Value) -> bool {
        self.differentiated[value.0]
    }

    /// Returns true if the gradient of any of the operation's inputs is needed.
    pub(crate) fn reaches_inputs(&self, facts: &Facts) -> bool {
        facts.inputs.iter().any(|input| self.differentiates(*input))
    }

    /// Returns true if the operation gets a `BackwardInputs` instruction. A loss computes its weight gradient in that
    /// instruction as well.
    pub(crate) fn runs_for_inputs(&self, facts: &Facts) -> bool {
        self.reaches_inputs(facts) || (facts.is_loss && self.reaches_weights(facts))
    }

    /// Returns true if any of the operation's parameters is trained.
    pub(crate) fn reaches_weights(&self, facts: &Facts) -> bool {
        facts.parameters().any(|parameter| self.trains(parameter))
    }

    /// Returns the saved activations that the operation's backward needs.
    pub(crate) fn needs(&self, facts: &Facts) -> impl Iterator<Item = Value> {
        let for_inputs: &[Value] = if self.runs_for_inputs(facts) { &facts.saved_for_inputs } else { &[] };
        for_inputs.iter().chain(self.needs_for_weights(facts)).copied()
    }

    /// Returns the saved activations that the operation's weight gradient needs, if it has one.
    pub(crate) fn needs_for_weights<'f>(&self, facts: &'f Facts) -> &'f [Value] {
        if self.trains_weight(facts) { &facts.saved_for_weights } else { &[] }
    }
}
