//! What of a block is trained, and what follows from it: which values need a gradient at all.
//!
//! A gradient that no trained parameter and no earlier block waits for is never computed, and what it alone would
//! need is never saved.

use crate::{ParameterIndex, Value, operation::Operation, recorder::Recorder};

/// Whether an earlier block waits for the gradient of a block's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum InputGradient {
    /// It does.
    #[default]
    Wanted,
    /// Nothing below is trained.
    Unwanted,
}

/// What is trained in a recorded block.
#[derive(Debug, Default)]
pub(crate) struct Training {
    /// By parameter.
    trained: Vec<bool>,
    /// By value: whether its gradient leads to a trained parameter or to the block's input.
    differentiated: Vec<bool>,
}

impl Training {
    pub(crate) fn new(recorder: &Recorder) -> Self {
        let Recorder { values, operations, parameters, input, input_gradient, .. } = recorder;
        let mut training = Self {
            trained: parameters.iter().map(|parameter| parameter.trainable).collect(),
            differentiated: vec![false; values.len()],
        };
        if let (Some(input), InputGradient::Wanted) = (input, input_gradient) {
            training.differentiated[input.0] = true;
        }
        for operation in operations {
            let reached = training.reaches_inputs(operation) || training.reaches_weights(operation);
            training.differentiated[operation.output().0] |= reached;
        }
        training
    }

    /// Whether a parameter is trained.
    pub(crate) fn trains(&self, parameter: ParameterIndex) -> bool {
        self.trained[parameter.0]
    }

    /// Whether the gradient of a value is needed.
    pub(crate) fn differentiates(&self, value: Value) -> bool {
        self.differentiated[value.0]
    }

    /// Whether the gradient of one of an operation's inputs is needed.
    pub(crate) fn reaches_inputs(&self, operation: &Operation) -> bool {
        operation.inputs().into_iter().any(|input| self.differentiates(input))
    }

    /// Whether an operation has an instruction for its inputs: a loss has no other for its weights.
    pub(crate) fn runs_for_inputs(&self, operation: &Operation) -> bool {
        self.reaches_inputs(operation) || (operation.is_loss() && self.reaches_weights(operation))
    }

    /// Whether one of an operation's parameters is trained.
    pub(crate) fn reaches_weights(&self, operation: &Operation) -> bool {
        operation.parameters().any(|parameter| self.trains(parameter))
    }
}
