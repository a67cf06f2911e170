//! The output of a model's last unit: losses in training, logits in inference.

use lockstep_tensor::Activation;

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
        let logits = self.linear(x, output_layer);
        soft_cap.map_or(logits, |cap| self.activation(Activation::SoftCap(cap), logits))
    }
}
