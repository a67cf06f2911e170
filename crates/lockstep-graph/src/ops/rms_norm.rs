//! Root-mean-square normalization with a scale, over the whole row or over each head.

use lockstep_comm::CommError;
use lockstep_plan::Initializer;
use lockstep_tensor::{RmsNorm as Operands, View};

use crate::{
    block::{ParameterIndex, Value},
    column_scale::ColumnScale,
    facts::Facts,
    op::Op,
    recorder::Recorder,
    replay::{InputGradients, Run, rows_of},
};

#[derive(Debug)]
struct RmsNorm {
    x: Value,
    weight: ParameterIndex,
    /// Added to the weight.
    offset: f32,
    eps: f32,
    y: Value,
    rstd: Value,
}

impl Recorder {
    /// Records root-mean-square normalization with the scale `NAME.weight [width]`, over each group of `width`
    /// columns: the whole row, or each head. A row whose columns are sharded is gathered and split again.
    ///
    /// # Panics
    /// If `width` is less than a row and does not divide the local columns.
    #[track_caller]
    pub fn rms_norm(&mut self, x: Value, name: &str, width: usize, eps: f32) -> Value {
        self.rms_norm_with(x, name, width, eps, 0.0)
    }

    /// Records [`Recorder::rms_norm`] with the scale `1 + NAME.weight`, so that weights start at zero (Gemma).
    ///
    /// # Panics
    /// If `width` is less than a row and does not divide the local columns.
    #[track_caller]
    pub fn rms_norm_around_one(&mut self, x: Value, name: &str, width: usize, eps: f32) -> Value {
        self.rms_norm_with(x, name, width, eps, 1.0)
    }

    #[track_caller]
    fn rms_norm_with(&mut self, x: Value, name: &str, width: usize, eps: f32, offset: f32) -> Value {
        let of_row = width == self.columns(x) && width > self.local_columns(x);
        let record = |g: &mut Self, x: Value| g.rms_norm_of_local(x, name, width, eps, offset);
        if of_row { self.on_whole_columns(x, record) } else { record(self, x) }
    }

    #[track_caller]
    fn rms_norm_of_local(&mut self, x: Value, name: &str, width: usize, eps: f32, offset: f32) -> Value {
        let held = self.local_columns(x);
        let fits = held.is_multiple_of(width);
        assert!(fits, "{name}: a norm over {width} of {held} local columns of {}", self.describe(x));
        let share = self.whole_share(self.placement(x));
        let initializer = if offset == 0.0 { Initializer::Ones } else { Initializer::Zeros };
        let weight = self.parameter(format!("{name}.weight"), &[width], initializer, share);
        let y = self.same_shape(x);
        let rstd = self.statistic(x, held / width);
        self.push(RmsNorm { x, weight, offset, eps, y, rstd });
        y
    }
}

impl RmsNorm {
    fn operands<'a>(&self, run: &Run<'a>) -> Operands<'a> {
        let weight = run.weight(self.weight);
        let x = rows_of(run.value(self.x), weight.elements());
        Operands { x, weight, offset: self.offset, rstd: run.flat(self.rstd) }
    }
}

impl Op for RmsNorm {
    fn facts(&self) -> Facts {
        let Self { x, weight, y, rstd, .. } = *self;
        Facts {
            weights: vec![weight],
            saved_for_inputs: vec![x, rstd],
            saved_for_weights: vec![x, rstd],
            accumulates: true,
            is_cheap: true,
            vector_flops: [4, 8, 3],
            ..Facts::of("RMSNorm", [x], [y, rstd])
        }
    }

    fn column_scale(&self) -> Option<ColumnScale> {
        Some(ColumnScale::Parameters { weight: self.weight, bias: None, offset: self.offset })
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let norm = self.operands(run);
        run.queue().rms_norm(norm, self.eps, rows_of(run.value(self.y), norm.weight.elements()));
        Ok(())
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        let norm = self.operands(run);
        let [dy, target] = [dy, dx.view(0)].map(|view| rows_of(view, norm.weight.elements()));
        run.queue().rms_norm_backward_input(norm, dy, target, dx.write(0));
        Ok(())
    }

    fn backward_weights(&self, run: &Run<'_>, dy: View<'_>) -> Result<(), CommError> {
        let (norm, dweight) = (self.operands(run), run.gradient_of_weight(self.weight));
        let dy = rows_of(dy, dweight.elements());
        run.queue().rms_norm_backward_weight(norm, dy, dweight);
        Ok(())
    }
}
