//! Batch normalization over channels, with running statistics for evaluation (Ioffe and Szegedy, 2015).
//!
//! Training normalizes with the statistics of the micro-batch on this rank, like `torch.nn.BatchNorm2d` under DDP. The engine moves the running statistics after the step, by the mean of what its micro-batches saved, so that recomputation
//! counts nothing twice and all ranks keep the same ones.

use lockstep_comm::CommError;
use lockstep_plan::{DType, Initializer};
use lockstep_tensor::{BatchNorm, View};

use crate::{
    block::{ParameterIndex, RunningUpdate, Statistics, Value},
    facts::Facts,
    op::Op,
    placement::Placement,
    recorder::Recorder,
    replay::{InputGradients, Run, rows_of},
};

/// Settings of a batch normalization.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchNormOptions {
    /// Number added to the variance.
    pub eps: f32,
    /// Weight of the newest batch in the running statistics.
    pub momentum: f32,
}

impl Default for BatchNormOptions {
    fn default() -> Self {
        Self { eps: 1e-5, momentum: 0.1 }
    }
}

impl Recorder {
    /// Records batch normalization of each channel of `x [.., channels]`, with the parameters `NAME.weight`, `NAME.bias` and
    /// the buffers `NAME.running_mean` and `NAME.running_var`, all `[channels]`.
    ///
    /// # Panics
    /// If ranks hold parts of `x`.
    #[track_caller]
    pub fn batch_norm(&mut self, x: Value, name: &str, options: BatchNormOptions) -> Value {
        let BatchNormOptions { eps, momentum } = options;
        self.expect_placement(x, |placement| placement == Placement::Replicate, name);
        let channels = *self.dims(x).last().expect("a value has a dimension");
        let share = self.whole_share(Placement::Replicate);
        let mut parameter = |part: &str, initializer| {
            self.parameter(format!("{name}.{part}"), &[channels], initializer, share)
        };
        let (weight, bias) = (parameter("weight", Initializer::Ones), parameter("bias", Initializer::Zeros));
        let running =
            [parameter("running_mean", Initializer::Zeros), parameter("running_var", Initializer::Ones)];
        let y = self.same_shape(x);
        let [mean, rstd] = [(); 2].map(|()| self.local(1, channels, DType::F32));
        let [statistics, sums] = [3, 2].map(|rows| self.local(rows, channels, DType::F32));
        let source = match self.statistics {
            Statistics::Batch => Source::Batch { statistics, momentum },
            Statistics::Running => Source::Running,
        };
        self.push(BatchNormOperation { x, weight, bias, running, eps, y, mean, rstd, sums, source });
        y
    }
}

/// Source of the statistics that a batch normalization uses.
#[derive(Debug, Clone, Copy)]
enum Source {
    /// Statistics of the micro-batch.
    Batch {
        /// f32 `[3, channels]`: rows, mean, and sum of squared differences of the micro-batch.
        statistics: Value,
        momentum: f32,
    },
    /// The running statistics.
    Running,
}

#[derive(Debug)]
struct BatchNormOperation {
    x: Value,
    weight: ParameterIndex,
    bias: ParameterIndex,
    /// Running mean and variance.
    running: [ParameterIndex; 2],
    eps: f32,
    y: Value,
    mean: Value,
    rstd: Value,
    /// f32 `[2, channels]`: gradients of bias and weight, which the gradient of the input needs as well.
    sums: Value,
    source: Source,
}

impl BatchNormOperation {
    fn norm<'r>(&self, run: &Run<'r>) -> BatchNorm<'r> {
        let weight = run.weight(self.weight);
        let x = rows_of(run.value(self.x), weight.elements());
        BatchNorm { x, weight, mean: run.flat(self.mean), rstd: run.flat(self.rstd) }
    }

    /// Computes the sums over rows that the gradients of bias, weight and input need.
    fn sums<'r>(&self, run: &Run<'r>, dy: View<'_>) -> View<'r> {
        let (norm, sums) = (self.norm(run), run.value(self.sums));
        run.queue().batch_norm_backward_sums(norm, rows_of(dy, norm.weight.elements()), sums);
        sums
    }
}

impl Op for BatchNormOperation {
    fn facts(&self) -> Facts {
        let Self { x, weight, bias, y, mean, rstd, sums, source, .. } = *self;
        let facts = Facts {
            weights: vec![weight],
            bias: Some(bias),
            buffers: self.running.to_vec(),
            scratch: vec![sums],
            scratch_for_weights: vec![sums],
            keeps_scratch: true,
            saved_for_inputs: vec![x, mean, rstd],
            saved_for_weights: vec![x, mean, rstd],
            accumulates: true,
            is_cheap: true,
            vector_flops: [6, 9, 0],
            ..Facts::of("batch norm", [x], [y, mean, rstd])
        };
        match source {
            Source::Running => facts,
            Source::Batch { statistics, momentum } => Facts {
                outputs: vec![y, mean, rstd, statistics],
                running: Some(RunningUpdate { parameters: self.running, statistics, momentum }),
                ..facts
            },
        }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let (queue, mean, rstd) = (run.queue(), run.flat(self.mean), run.flat(self.rstd));
        let channels = mean.elements();
        let [x, y] = [self.x, self.y].map(|value| rows_of(run.value(value), channels));
        match self.source {
            Source::Batch { statistics, .. } => {
                let statistics = run.value(statistics);
                queue.batch_norm_statistics(x, statistics);
                let parts = statistics.reshape([1, 3, channels]);
                queue.merge_batch_norm(parts, self.eps, None, mean, rstd);
            }
            Source::Running => {
                let [running_mean, running_variance] = self.running.map(|index| run.exact(index));
                let variance = run.value(self.sums).rows(0..1).reshape([channels]);
                queue.cast(running_mean, mean);
                queue.cast(running_variance, variance);
                queue.reciprocal_deviation(variance, self.eps, rstd);
            }
        }
        queue.batch_norm(self.norm(run), run.weight(self.bias), y);
        Ok(())
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        let (sums, norm) = (self.sums(run, dy), self.norm(run));
        // Constant statistics have no gradient.
        if let Source::Running = self.source {
            run.queue().zero(sums);
        }
        let channels = norm.weight.elements();
        let [dy, target] = [dy, dx.view(0)].map(|view| rows_of(view, channels));
        let rows = norm.x.shape().as_matrix().0;
        run.queue().batch_norm_backward_input(norm, dy, sums, rows, target, dx.write(0));
        Ok(())
    }

    fn backward_weights(&self, run: &Run<'_>, dy: View<'_>) -> Result<(), CommError> {
        if !run.trains(self.weight) {
            // A bias alone: nothing that the statistics or the input would be needed for has been saved.
            let gradient = run.gradient_of_weight(self.bias);
            run.queue().sum_rows(rows_of(dy, gradient.elements()), gradient);
            return Ok(());
        }
        // The gradient of the input has left the sums, unless nothing needed it or it zeroed them.
        let has_sums = matches!(self.source, Source::Batch { .. }) && run.shapes().differentiates(self.x);
        let sums = if has_sums { run.value(self.sums) } else { self.sums(run, dy) };
        for (row, parameter) in [self.bias, self.weight].into_iter().enumerate() {
            if run.trains(parameter) {
                let gradient = run.gradient_of_weight(parameter);
                run.queue().add(gradient, sums.rows(row..row + 1).reshape(gradient.shape()), gradient);
            }
        }
        Ok(())
    }
}
