//! Batch normalization over channels, with running statistics for evaluation (Ioffe and Szegedy, 2015).
//!
//! Training normalizes with the statistics of the micro-batch on this rank, like `torch.nn.BatchNorm2d` under DDP, or on all
//! data-parallel ranks, like `torch.nn.SyncBatchNorm`. The engine moves the running statistics after the step, by the mean of what its micro-batches saved, so that recomputation
//! counts nothing twice and all ranks keep the same ones.

use lockstep_comm::CommError;
use lockstep_plan::{
    DType, Initializer,
    work::{Collective, Pass, Peers as Ranks},
};
use lockstep_tensor::{BatchNorm, View};

use crate::{
    block::{ParameterIndex, RunningUpdate, Statistics, Value},
    facts::Facts,
    op::Op,
    placement::Placement,
    recorder::Recorder,
    replay::{InputGradients, Run, rows_of},
    work_context::{Work, WorkContext},
};

/// Settings of a batch normalization.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchNormOptions {
    /// Number added to the variance.
    pub eps: f32,
    /// Weight of the newest batch in the running statistics.
    pub momentum: f32,
    /// Ranks whose micro-batches share their statistics.
    pub synchronization: Synchronization,
}

/// Ranks whose micro-batches share the statistics of batch normalization.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Synchronization {
    /// Each rank uses those of its own micro-batch.
    #[default]
    Off,
    /// All data-parallel ranks use those of their micro-batches together.
    DataParallel,
}

impl Default for BatchNormOptions {
    fn default() -> Self {
        Self { eps: 1e-5, momentum: 0.1, synchronization: Synchronization::Off }
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
        let BatchNormOptions { eps, momentum, synchronization } = options;
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
            Statistics::Batch => {
                let shared = || Shared { totals: self.local(2, channels, DType::F32) };
                let shared = (synchronization == Synchronization::DataParallel).then(shared);
                Source::Batch { statistics, momentum, shared }
            }
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
        /// Scratch for statistics that data-parallel ranks share; `None` if they do not.
        shared: Option<Shared>,
    },
    /// The running statistics.
    Running,
}

/// Scratch of statistics that data-parallel ranks share.
#[derive(Debug, Clone, Copy)]
struct Shared {
    /// f32 `[2, channels]`: totals over ranks, of the statistics or of the backward.
    totals: Value,
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

    fn shared(&self) -> Option<Shared> {
        match self.source {
            Source::Batch { shared, .. } => shared,
            Source::Running => None,
        }
    }

    /// Changes the statistics of this rank's micro-batch to those of all data-parallel ranks.
    fn synchronize(run: &Run<'_>, statistics: View<'_>, totals: View<'_>) -> Result<(), CommError> {
        let Some(replicas) = run.replay().replicas else { return Ok(()) };
        run.queue().batch_norm_totals(statistics, totals);
        replicas.all_reduce(totals)?;
        run.queue().recentre_batch_norm(totals, statistics);
        replicas.all_reduce(statistics.rows(2..3))
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
        let totals = self.shared().map(|shared| shared.totals);
        let facts = Facts {
            weights: vec![weight],
            bias: Some(bias),
            buffers: self.running.to_vec(),
            scratch: [sums].into_iter().chain(totals).collect(),
            reads_replicas: totals.is_some(),
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
            Source::Batch { statistics, momentum, .. } => Facts {
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
            Source::Batch { statistics, shared, .. } => {
                let statistics = run.value(statistics);
                queue.batch_norm_statistics(x, statistics);
                if let Some(Shared { totals }) = shared {
                    Self::synchronize(run, statistics, run.value(totals))?;
                }
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
        let (mut sums, norm) = (self.sums(run, dy), self.norm(run));
        let mut ranks = 1;
        // The gradients of weight and bias are the rank's own sums, which the reducer adds up.
        if let (Some(Shared { totals }), Some(replicas)) = (self.shared(), run.replay().replicas) {
            let totals = run.value(totals);
            run.queue().cast(sums, totals);
            replicas.all_reduce(totals)?;
            (sums, ranks) = (totals, replicas.group.size());
        }
        // Constant statistics have no gradient.
        if let Source::Running = self.source {
            run.queue().zero(sums);
        }
        let channels = norm.weight.elements();
        let [dy, target] = [dy, dx.view(0)].map(|view| rows_of(view, channels));
        let rows = ranks * norm.x.shape().as_matrix().0;
        run.queue().batch_norm_backward_input(norm, dy, sums, rows, target, dx.write(0));
        Ok(())
    }

    fn work(&self, context: &WorkContext<'_>) -> Vec<Work> {
        let mut work = vec![context.stream()];
        if let Some(Shared { totals }) = self.shared() {
            let bytes = context.shapes.bytes(totals);
            let all_reduce = |bytes| Work::exchange(Ranks::Replicas, Collective::AllReduce, bytes);
            match context.pass {
                Pass::Forward | Pass::Recompute => work.extend([bytes, bytes / 2].map(all_reduce)),
                Pass::BackwardInputs => work.push(all_reduce(bytes)),
                Pass::BackwardWeights => {}
            }
        }
        work
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
