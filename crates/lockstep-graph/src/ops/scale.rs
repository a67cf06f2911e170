//! Scaling by a constant: `y = factor · x`.

use lockstep_comm::CommError;
use lockstep_tensor::View;

use crate::{
    block::Value,
    facts::Facts,
    op::Op,
    recorder::Recorder,
    replay::{InputGradients, Run},
};

#[derive(Debug)]
struct Scale {
    x: Value,
    factor: f32,
    y: Value,
}

impl Recorder {
    /// Records `factor · x`.
    #[track_caller]
    pub fn scale(&mut self, x: Value, factor: f32) -> Value {
        let y = self.same_shape(x);
        self.push(Scale { x, factor, y });
        y
    }
}

impl Op for Scale {
    fn facts(&self) -> Facts {
        Facts { vector_flops: [1, 1, 0], ..Facts::in_place("scale", self.x, self.y) }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        run.queue().scale(self.factor, run.value(self.x), run.value(self.y));
        Ok(())
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        run.queue().scale(self.factor, dy, dx.view(0));
        Ok(())
    }
}
