//! Layer normalization with a scale and, possibly, a bias.

use lockstep_comm::CommError;
use lockstep_plan::Initializer;
use lockstep_tensor::{LayerNorm as Operands, View};

use crate::{
    block::{Bias, ParameterIndex, Value},
    column_scale::ColumnScale,
    facts::Facts,
    op::Op,
    placement::Placement,
    recorder::Recorder,
    replay::{InputGradients, Run},
};

#[derive(Debug)]
struct LayerNorm {
    x: Value,
    weight: ParameterIndex,
    bias: Option<ParameterIndex>,
    eps: f32,
    y: Value,
    mean: Value,
    rstd: Value,
}

impl Recorder {
    /// Records layer normalization with `NAME.weight` and, with a bias, `NAME.bias`.
    ///
    /// # Panics
    /// If the value is neither replicated nor sharded by tokens.
    #[track_caller]
    pub fn layer_norm(&mut self, x: Value, name: &str, bias: Bias, eps: f32) -> Value {
        let has_rows = |placement| matches!(placement, Placement::Replicate | Placement::ShardTokens);
        self.expect_placement(x, has_rows, &format!("layer norm {name}"));
        let (columns, share) = (self.columns(x), self.whole_share(self.placement(x)));
        let weight = self.parameter(format!("{name}.weight"), &[columns], Initializer::Ones, share);
        let bias = self.bias(bias, name, columns, share);
        let y = self.same_shape(x);
        let (mean, rstd) = (self.statistic(x, 1), self.statistic(x, 1));
        self.push(LayerNorm { x, weight, bias, eps, y, mean, rstd });
        y
    }
}

impl LayerNorm {
    fn operands<'a>(&self, run: &Run<'a>) -> Operands<'a> {
        Operands {
            x: run.value(self.x),
            weight: run.weight(self.weight),
            mean: run.flat(self.mean),
            rstd: run.flat(self.rstd),
        }
    }
}

impl Op for LayerNorm {
    fn facts(&self) -> Facts {
        let Self { x, weight, bias, y, mean, rstd, .. } = *self;
        Facts {
            weights: vec![weight],
            bias,
            saved_for_inputs: vec![x, mean, rstd],
            saved_for_weights: vec![x, mean, rstd],
            accumulates: true,
            is_cheap: true,
            vector_flops: [8, 11, 5],
            ..Facts::of("LayerNorm", [x], [y, mean, rstd])
        }
    }

    fn column_scale(&self) -> Option<ColumnScale> {
        Some(ColumnScale::Parameters { weight: self.weight, bias: self.bias, offset: 0.0 })
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let bias = self.bias.map(|bias| run.weight(bias));
        run.queue().layer_norm(self.operands(run), bias, self.eps, run.value(self.y));
        Ok(())
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        run.queue().layer_norm_backward_input(self.operands(run), dy, dx.view(0), dx.write(0));
        Ok(())
    }

    fn backward_weights(&self, run: &Run<'_>, dy: View<'_>) -> Result<(), CommError> {
        let bias = self.bias.filter(|bias| run.trains(*bias)).map(|bias| run.gradient_of_weight(bias));
        if run.trains(self.weight) {
            let dweight = run.gradient_of_weight(self.weight);
            run.queue().layer_norm_backward_weight(self.operands(run), dy, dweight, bias);
        } else if let Some(bias) = bias {
            run.queue().sum_rows(dy, bias);
        }
        Ok(())
    }
}
