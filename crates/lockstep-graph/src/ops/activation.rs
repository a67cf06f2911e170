//! Activation functions without trained parameters: ReLU, SiLU, tanh, the logistic function and the soft cap.

use lockstep_comm::CommError;
use lockstep_tensor::{Activation, View};

use crate::{
    block::Value,
    column_scale::ColumnScale,
    facts::Facts,
    op::Op,
    recorder::Recorder,
    replay::{InputGradients, Run},
};

impl Recorder {
    /// Records `f(x)` for an activation function.
    #[track_caller]
    pub fn activation(&mut self, kind: Activation, x: Value) -> Value {
        let y = self.same_shape(x);
        self.push(ActivationOperation { kind, x, y });
        y
    }

    /// Records `max(x, 0)`.
    #[track_caller]
    pub fn relu(&mut self, x: Value) -> Value {
        self.activation(Activation::Relu, x)
    }
}

#[derive(Debug)]
struct ActivationOperation {
    kind: Activation,
    x: Value,
    y: Value,
}

impl Op for ActivationOperation {
    fn facts(&self) -> Facts {
        let Self { kind, x, y } = *self;
        let (name, vector_flops) = match kind {
            Activation::Relu => ("ReLU", [1, 1, 0]),
            Activation::Silu => ("SiLU", [4, 8, 0]),
            Activation::Tanh => ("tanh", [8, 3, 0]),
            Activation::Sigmoid => ("sigmoid", [4, 3, 0]),
            Activation::SoftCap(_) => ("soft cap", [10, 4, 0]),
        };
        let (saved, in_place_inputs) = if kind.saves_output() { (y, vec![x]) } else { (x, vec![]) };
        Facts {
            saved_for_inputs: vec![saved],
            in_place_inputs,
            backward_in_place: true,
            is_cheap: true,
            vector_flops,
            ..Facts::of(name, [x], [y])
        }
    }

    fn column_scale(&self) -> Option<ColumnScale> {
        matches!(self.kind, Activation::Relu).then(|| ColumnScale::of_input(self.x))
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        run.queue().activation(self.kind, run.value(self.x), run.value(self.y));
        Ok(())
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        let saved = run.value(if self.kind.saves_output() { self.y } else { self.x });
        run.queue().activation_backward(self.kind, dy, saved, dx.view(0));
        Ok(())
    }
}
