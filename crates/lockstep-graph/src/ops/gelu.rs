//! The Gaussian error linear unit, exact or by its tanh approximation.

use lockstep_comm::CommError;
use lockstep_tensor::{Gelu as Kind, View};

use crate::{
    block::Value,
    facts::Facts,
    op::Op,
    recorder::Recorder,
    replay::{InputGradients, Run},
};

#[derive(Debug)]
struct Gelu {
    kind: Kind,
    x: Value,
    y: Value,
}

impl Recorder {
    /// Records a Gaussian error linear unit.
    #[track_caller]
    pub fn gelu(&mut self, kind: Kind, x: Value) -> Value {
        let y = self.same_shape(x);
        self.push(Gelu { kind, x, y });
        y
    }
}

impl Op for Gelu {
    fn facts(&self) -> Facts {
        Facts {
            saved_for_inputs: vec![self.x],
            backward_in_place: true,
            is_cheap: true,
            vector_flops: [8, 14, 0],
            ..Facts::of("GELU", [self.x], [self.y])
        }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        run.queue().gelu(self.kind, run.value(self.x), run.value(self.y));
        Ok(())
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        run.queue().gelu_backward(self.kind, dy, run.value(self.x), dx.view(0));
        Ok(())
    }
}
