//! The output of a model's last unit: losses in training, logits in inference.

use crate::{
    block::{HeadOutput, Value},
    ops::linear::Linear,
    recorder::Recorder,
};

impl Recorder {
    /// Sets the output of the model's last unit; by default losses.
    pub fn set_head_output(&mut self, output: HeadOutput) {
        self.head_output = output;
    }

    /// Records the output layer of a language model: with [`HeadOutput::Losses`] the cross-entropy of each token's
    /// logits, else the logits `[tokens, vocabulary]`.
    pub fn language_model_head(&mut self, x: Value, output_layer: Linear<'_>) -> Value {
        match self.head_output {
            HeadOutput::Losses => self.output_loss(x, output_layer),
            HeadOutput::Logits => self.linear(x, output_layer),
        }
    }
}
