//! Rows scaled by the sigmoid of one number each: `y = sigmoid(gate) · x`.

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
struct GateRows {
    gate: Value,
    x: Value,
    y: Value,
}

impl Recorder {
    /// Records `sigmoid(gate) · x`, with one number of `gate` per row.
    ///
    /// # Panics
    /// If the two do not have the same rows.
    #[track_caller]
    pub fn gate_rows(&mut self, gate: Value, x: Value) -> Value {
        let kind = |value: Value| (self.local_rows(value), self.placement(value));
        let fits = (self.columns(gate), kind(gate)) == (1, kind(x));
        let describe = |value| self.describe(value);
        assert!(fits, "gate rows: {} for {}: one number for each row", describe(gate), describe(x));
        let y = self.same_shape(x);
        self.push(GateRows { gate, x, y });
        y
    }
}

impl Op for GateRows {
    fn facts(&self) -> Facts {
        let Self { gate, x, y } = *self;
        Facts {
            saved_for_inputs: vec![gate, x],
            vector_flops: [1, 3, 0],
            ..Facts::of("gate rows", [gate, x], [y])
        }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        run.queue().gate_rows(run.value(self.gate), run.value(self.x), run.value(self.y));
        Ok(())
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        let (gate, x) = (run.value(self.gate), run.value(self.x));
        run.queue().gate_rows_backward(dy, gate, x, dx.view(0), dx.view(1));
        Ok(())
    }
}
