//! The output of a model's last unit: losses in training, with metrics beside them, logits in inference.

use lockstep_plan::DType;
use lockstep_tensor::Activation;

use crate::{
    block::{HeadOutput, Value},
    ops::linear::Linear,
    recorder::Recorder,
    reports::{MAX_REPORTS, Measured, Recorded, Report, ReportKind},
};

impl Recorder {
    /// Sets the output of the model's last unit; by default losses.
    pub fn set_head_output(&mut self, output: HeadOutput) {
        self.head_output = output;
    }

    /// Records the output layer of a language model: with [`HeadOutput::Losses`] the cross-entropy of each token's
    /// logits, else the logits `[tokens, vocabulary]`. A `soft_cap` bounds the logits ([`Activation::SoftCap`]).
    #[track_caller]
    pub fn language_model_head(
        &mut self,
        x: Value,
        output_layer: Linear<'_>,
        soft_cap: Option<f32>,
    ) -> Value {
        if self.head_output == HeadOutput::Losses {
            return self.output_loss(x, output_layer, soft_cap);
        }
        let logits = self.output_logits(x, output_layer);
        soft_cap.map_or(logits, |cap| self.activation(Activation::SoftCap(cap), logits))
    }
}

impl Recorder {
    /// Adds `weight` times the mean of `losses` to the model's loss, beside the loss that the last unit returns. `losses`
    /// are those of an operation such as [`Recorder::squared_error_of`]; `name` names them in the metrics of a run. With
    /// [`HeadOutput::Logits`] nothing is added.
    ///
    /// # Panics
    /// If the weight is not positive and finite, the name is taken, or there are more than [`MAX_REPORTS`].
    #[track_caller]
    pub fn add_loss(&mut self, name: &str, losses: Value, weight: f32) {
        assert!(weight.is_finite() && weight > 0.0, "the loss {name} has the weight {weight}");
        self.add_report(name, losses, ReportKind::Loss { weight });
    }

    /// Reports the mean of `values` (f32 `[rows, 1]`, 0 in rows that do not count) in the metrics of a run and its
    /// evaluations. They have no gradient. With [`HeadOutput::Logits`] nothing is added.
    ///
    /// # Panics
    /// If the name is taken, or there are more than [`MAX_REPORTS`].
    #[track_caller]
    pub fn add_metric(&mut self, name: &str, values: Value) {
        self.add_report(name, values, ReportKind::Metric);
    }

    #[track_caller]
    fn add_report(&mut self, name: &str, values: Value, kind: ReportKind) {
        if self.head_output == HeadOutput::Logits {
            return;
        }
        let info = self.values[values.0];
        let is_column = (info.columns, info.dtype) == (1, DType::F32);
        assert!(is_column, "the report {name} has one f32 number per row, not {}", self.describe(values));
        let Recorded { measured, added } = &mut self.reports;
        assert!(added.iter().all(|report| report.name != name), "two reports are named {name}");
        assert!(added.len() + 1 < MAX_REPORTS, "a model has at most {MAX_REPORTS} losses and metrics");
        let measured = measured.iter().find(|measured| measured.values == values);
        let (target, classes) = (measured.map(|of| of.target.clone()), measured.and_then(|of| of.classes));
        added.push(Report { name: name.to_owned(), kind, target, classes, values });
    }

    /// Notes what the numbers of an operation are, for the report that they may become.
    pub(crate) fn measure(
        &mut self,
        values: Value,
        name: &'static str,
        target: &str,
        classes: Option<usize>,
    ) {
        self.reports.measured.push(Measured { values, name, target: target.to_owned(), classes });
    }
}
