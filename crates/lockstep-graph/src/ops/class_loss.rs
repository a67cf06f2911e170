//! Losses of named targets: the cross-entropy of classes, and the squared error.

use lockstep_comm::CommError;
use lockstep_plan::DType;
use lockstep_tensor::{LABELS, View};

use crate::{
    block::{HeadOutput, Value},
    facts::Facts,
    op::Op,
    recorder::Recorder,
    replay::{InputGradients, Run},
};

impl Recorder {
    /// Records the cross-entropy of `logits [classes]` against the input `labels`, an i32 per sample (-100 is masked), with
    /// label smoothing as in PyTorch. With [`HeadOutput::Logits`] nothing is recorded, and the logits are the output.
    ///
    /// # Panics
    /// If the model declares no such input.
    #[track_caller]
    pub fn cross_entropy(&mut self, logits: Value, smoothing: f32) -> Value {
        self.cross_entropy_of(logits, LABELS, smoothing)
    }

    /// Records the cross-entropy of `logits [classes]` against the input `target`, as [`Recorder::cross_entropy`] does.
    ///
    /// # Panics
    /// If the model declares no such input.
    #[track_caller]
    pub fn cross_entropy_of(&mut self, logits: Value, target: &str, smoothing: f32) -> Value {
        self.loss_of(logits, target, Kind::CrossEntropy { smoothing })
    }

    /// Records the squared error of `x` against the input `labels`, f32 and shaped as `x`. The loss is its mean over all
    /// elements. Activations of a narrower dtype round the labels to that dtype. With [`HeadOutput::Logits`] nothing is
    /// recorded, and `x` is the output.
    ///
    /// # Panics
    /// If the model declares no such input.
    #[track_caller]
    pub fn squared_error(&mut self, x: Value) -> Value {
        self.squared_error_of(x, LABELS)
    }

    /// Records the squared error of `x` against the input `target`, as [`Recorder::squared_error`] does.
    ///
    /// # Panics
    /// If the model declares no such input.
    #[track_caller]
    pub fn squared_error_of(&mut self, x: Value, target: &str) -> Value {
        self.loss_of(x, target, Kind::SquaredError)
    }

    #[track_caller]
    fn loss_of(&mut self, x: Value, target: &str, kind: Kind) -> Value {
        if self.head_output == HeadOutput::Logits {
            return x;
        }
        let name = match kind {
            Kind::CrossEntropy { .. } => "cross_entropy",
            Kind::SquaredError => "squared_error",
        };
        let of_target = target;
        let target = self.data(of_target);
        let (rows, columns) = (self.local_rows(x), self.local_columns(x));
        let expected = match kind {
            Kind::CrossEntropy { .. } => rows,
            Kind::SquaredError => rows * columns,
        };
        let found = self.local_rows(target) * self.local_columns(target);
        assert_eq!(
            found,
            expected,
            "a loss of {} against labels of {}",
            self.describe(x),
            self.describe(target)
        );
        let losses = self.local(rows, 1, DType::F32);
        self.push(Loss { kind, x, target, losses });
        let classes = matches!(kind, Kind::CrossEntropy { .. }).then_some(columns);
        self.measure(losses, name, of_target, classes);
        losses
    }
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    CrossEntropy { smoothing: f32 },
    SquaredError,
}

#[derive(Debug)]
struct Loss {
    kind: Kind,
    x: Value,
    target: Value,
    losses: Value,
}

impl Op for Loss {
    fn facts(&self) -> Facts {
        let Self { x, target, losses, .. } = *self;
        Facts {
            tables: vec![target],
            saved_for_inputs: vec![x, target],
            is_loss: true,
            vector_flops: [4, 7, 0],
            counted_value: Some(x),
            ..Facts::of("loss", [x], [losses])
        }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let (x, target, losses) = (run.value(self.x), run.flat(self.target), run.flat(self.losses));
        match self.kind {
            Kind::CrossEntropy { smoothing } => {
                run.queue().cross_entropy_smoothed(x, target, smoothing, losses);
            }
            Kind::SquaredError => run.queue().squared_error(x, target.reshape(x.shape()), losses),
        }
        Ok(())
    }

    fn backward_loss(&self, run: &Run<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        let (x, target, losses) = (run.value(self.x), run.flat(self.target), run.flat(self.losses));
        let (dx, seed): (View<'_>, f32) = (dx.view(0), run.seed_of(self.losses));
        run.queue().cast(x, dx);
        match self.kind {
            Kind::CrossEntropy { smoothing } => {
                run.queue().cross_entropy_smoothed_with_gradient(dx, target, smoothing, losses, seed);
            }
            Kind::SquaredError => {
                run.queue().squared_error_with_gradient(dx, target.reshape(x.shape()), losses, seed);
            }
        }
        Ok(())
    }
}
