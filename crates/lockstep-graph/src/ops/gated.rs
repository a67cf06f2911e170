//! Gated activations `y = f(gate) · up`, on all rows or on the used rows of experts.

use lockstep_comm::CommError;
use lockstep_tensor::{GatedActivation, View};

use crate::{
    block::Value,
    column_scale::ColumnScale,
    facts::{ExpertRows, Facts},
    op::Op,
    recorder::Recorder,
    replay::{InputGradients, Run},
};

#[derive(Debug)]
struct Gated {
    kind: GatedActivation,
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
    /// Records a gated activation.
    ///
    /// # Panics
    /// If the two have unlike columns or placements, or are partial sums.
    #[track_caller]
    pub fn gated(&mut self, kind: GatedActivation, gate: Value, up: Value) -> Value {
        self.expect_same(gate, up, name_of(kind));
        let y = self.same_shape(gate);
        self.push(Gated { kind, gate, up, y, experts: None });
        y
    }

    /// Records a gated activation on the rows of experts that begin at `offsets`.
    pub(crate) fn gated_of_experts(
        &mut self,
        kind: GatedActivation,
        [gate, up]: [Value; 2],
        offsets: Value,
        rows: ExpertRows,
    ) -> Value {
        let y = self.local(self.local_rows(gate), self.local_columns(gate), self.shape.dtype);
        self.push(Gated { kind, gate, up, y, experts: Some(UsedRows { offsets, rows }) });
        y
    }
}

fn name_of(kind: GatedActivation) -> &'static str {
    match kind {
        GatedActivation::Silu => "SwiGLU",
        GatedActivation::Gelu(_) => "GeGLU",
        GatedActivation::Clamped { .. } => "clamped SwiGLU",
    }
}

impl Gated {
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

impl Op for Gated {
    fn facts(&self) -> Facts {
        let Self { kind, gate, up, y, experts } = *self;
        Facts {
            tables: self.offsets().into_iter().collect(),
            saved_for_inputs: [gate, up].into_iter().chain(self.offsets()).collect(),
            is_cheap: true,
            expert_rows: experts.map(|experts| experts.rows),
            vector_flops: match kind {
                GatedActivation::Silu => [5, 12, 0],
                GatedActivation::Gelu(_) => [9, 16, 0],
                GatedActivation::Clamped { .. } => [9, 17, 0],
            },
            ..Facts::of(name_of(kind), [gate, up], [y])
        }
    }

    fn column_scale(&self) -> Option<ColumnScale> {
        match self.kind {
            GatedActivation::Silu | GatedActivation::Gelu(_) => Some(ColumnScale::of_input(self.up)),
            // A clamp is not linear.
            GatedActivation::Clamped { .. } => None,
        }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let rows = self.used_rows(run);
        let [gate, up, y] = [self.gate, self.up, self.y].map(|value| used(run.value(value), rows));
        run.queue().gated(self.kind, gate, up, y);
        Ok(())
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        let rows = self.used_rows(run);
        let operands = [dy, run.value(self.gate), run.value(self.up), dx.view(0), dx.view(1)];
        let [dy, gate, up, dgate, dup] = operands.map(|view| used(view, rows));
        run.queue().gated_backward(self.kind, dy, gate, up, dgate, dup);
        Ok(())
    }
}

/// Returns the first `rows` rows, or all.
fn used(view: View<'_>, rows: Option<usize>) -> View<'_> {
    rows.map_or(view, |rows| view.rows(0..rows))
}
