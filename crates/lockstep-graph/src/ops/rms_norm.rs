//! Root-mean-square normalization with a scale, over the whole row or over each head.

use lockstep_comm::CommError;
use lockstep_plan::Initializer;
use lockstep_tensor::View;

use crate::{
    block::{ParameterIndex, Value},
    facts::Facts,
    op::Op,
    recorder::Recorder,
    replay::{InputGradients, Run, rows_of},
};

#[derive(Debug)]
struct RmsNorm {
    x: Value,
    weight: ParameterIndex,
    eps: f32,
    y: Value,
    rstd: Value,
}

impl Recorder {
    /// Records root-mean-square normalization with the scale `NAME.weight [width]`, over each group of `width`
    /// columns: the whole row, or each head.
    ///
    /// # Panics
    /// If `width` does not divide the local columns.
    #[track_caller]
    pub fn rms_norm(&mut self, x: Value, name: &str, width: usize, eps: f32) -> Value {
        let held = self.local_columns(x);
        let fits = held.is_multiple_of(width);
        assert!(fits, "{name}: a norm over {width} of {held} local columns of {}", self.describe(x));
        let share = self.whole_share(self.placement(x));
        let weight = self.parameter(format!("{name}.weight"), &[width], Initializer::Ones, share);
        let y = self.same_shape(x);
        let rstd = self.statistic(x, held / width);
        self.push(RmsNorm { x, weight, eps, y, rstd });
        y
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

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let weight = run.weight(self.weight);
        let [x, y] = [self.x, self.y].map(|value| rows_of(run.value(value), weight.elements()));
        run.queue().rms_norm(x, weight, self.eps, y, run.flat(self.rstd));
        Ok(())
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        let (weight, rstd) = (run.weight(self.weight), run.flat(self.rstd));
        let [dy, x, target] =
            [dy, run.value(self.x), dx.view(0)].map(|view| rows_of(view, weight.elements()));
        run.queue().rms_norm_backward_input(dy, x, weight, rstd, target, dx.write(0));
        Ok(())
    }

    fn backward_weights(&self, run: &Run<'_>, dy: View<'_>) -> Result<(), CommError> {
        let dweight = run.gradient_of_weight(self.weight);
        let [dy, x] = [dy, run.value(self.x)].map(|view| rows_of(view, dweight.elements()));
        run.queue().rms_norm_backward_weight(dy, x, run.flat(self.rstd), dweight);
        Ok(())
    }
}
