//! Correct predictions of a classifier: a metric, without a gradient.

use lockstep_comm::CommError;
use lockstep_plan::DType;
use lockstep_tensor::LABELS;

use crate::{
    block::{HeadOutput, Value},
    facts::Facts,
    op::Op,
    recorder::Recorder,
    replay::Run,
};

/// 1 for each row whose largest logit is that of its label, else 0.
#[derive(Debug)]
struct Correct {
    logits: Value,
    labels: Value,
    correct: Value,
}

impl Recorder {
    /// Reports the metric `accuracy`: the fraction of rows of `logits [classes]` whose largest element is that of the input
    /// `labels`, an i32 per sample (-100 is masked). With [`HeadOutput::Logits`] nothing is recorded.
    ///
    /// # Panics
    /// If the model declares no such input, or reports an accuracy already.
    #[track_caller]
    pub fn accuracy(&mut self, logits: Value) {
        if self.head_output == HeadOutput::Logits {
            return;
        }
        let labels = self.data(LABELS);
        let (rows, found) = (self.local_rows(logits), self.local_rows(labels) * self.local_columns(labels));
        assert_eq!(
            found,
            rows,
            "an accuracy of {} against labels of {}",
            self.describe(logits),
            self.describe(labels)
        );
        let correct = self.local(rows, 1, DType::F32);
        self.push(Correct { logits, labels, correct });
        let classes = self.local_columns(logits);
        self.measure(correct, "accuracy", LABELS, Some(classes));
        self.add_metric("accuracy", correct);
    }
}

impl Op for Correct {
    fn facts(&self) -> Facts {
        let Self { logits, labels, correct } = *self;
        Facts {
            // The logits are read as a table is: nothing flows back to them.
            tables: vec![logits, labels],
            vector_flops: [1, 0, 0],
            counted_value: Some(logits),
            ..Facts::of("accuracy", [], [correct])
        }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let (labels, correct) = (run.flat(self.labels), run.flat(self.correct));
        run.queue().correct(run.value(self.logits), labels, correct);
        Ok(())
    }
}
