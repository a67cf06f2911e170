//! SwiGLU: `y = silu(gate) · up`, on all rows or on the used rows of experts.

use lockstep_comm::CommError;
use lockstep_tensor::View;

use crate::{
    block::Value,
    facts::{ExpertRows, Facts},
    op::Op,
    recorder::Recorder,
    replay::{InputGradients, Run},
};

#[derive(Debug)]
struct SwiGlu {
    gate: Value,
    up: Value,
    y: Value,
    experts: Option<UsedRows>,
}

/// Rows of experts: only the rows before the last offset are computed.
#[derive(Debug, Clone, Copy)]
struct UsedRows {
    offsets: Value,
    rows: ExpertRows,
}

impl Recorder {
    /// Records `silu(gate) · up`.
    ///
    /// # Panics
    /// If the two have unlike columns or placements, or are partial sums.
    #[track_caller]
    pub fn swiglu(&mut self, gate: Value, up: Value) -> Value {
        self.expect_same(gate, up, "SwiGLU");
        let y = self.same_shape(gate);
        self.push(SwiGlu { gate, up, y, experts: None });
        y
    }

    /// Records `silu(gate) · up` on the rows of experts that begin at `offsets`.
    pub(crate) fn swiglu_of_experts(
        &mut self,
        gate: Value,
        up: Value,
        offsets: Value,
        rows: ExpertRows,
    ) -> Value {
        let y = self.local(self.local_rows(gate), self.local_columns(gate), self.shape.dtype);
        self.push(SwiGlu { gate, up, y, experts: Some(UsedRows { offsets, rows }) });
        y
    }
}

impl SwiGlu {
    fn offsets(&self) -> Option<Value> {
        self.experts.map(|experts| experts.offsets)
    }

    /// Reads back the number of rows in use; `None` if all are.
    fn used_rows(&self, run: &Run<'_>) -> Option<usize> {
        let offsets = run.flat(self.offsets()?);
        let (last, mut rows) = (offsets.elements() - 1, [0_u32]);
        Some(offsets.rows(last..last + 1).read(&mut rows).wait()[0] as usize)
    }
}

impl Op for SwiGlu {
    fn facts(&self) -> Facts {
        let Self { gate, up, y, experts } = *self;
        Facts {
            tables: self.offsets().into_iter().collect(),
            saved_for_inputs: [gate, up].into_iter().chain(self.offsets()).collect(),
            is_cheap: true,
            expert_rows: experts.map(|experts| experts.rows),
            vector_flops: [5, 12, 0],
            ..Facts::of("SwiGLU", [gate, up], [y])
        }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let rows = self.used_rows(run);
        let [gate, up, y] = [self.gate, self.up, self.y].map(|value| used(run.value(value), rows));
        run.queue().swiglu(gate, up, y);
        Ok(())
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        let rows = self.used_rows(run);
        let operands = [dy, run.value(self.gate), run.value(self.up), dx.view(0), dx.view(1)];
        let [dy, gate, up, dgate, dup] = operands.map(|view| used(view, rows));
        run.queue().swiglu_backward(dy, gate, up, dgate, dup);
        Ok(())
    }
}

/// Returns the first `rows` rows, or all.
fn used(view: View<'_>, rows: Option<usize>) -> View<'_> {
    rows.map_or(view, |rows| view.rows(0..rows))
}
