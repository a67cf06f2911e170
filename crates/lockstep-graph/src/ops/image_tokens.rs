//! Images as sequences: the pixels of an image, row by row, behind a learned class token (Dosovitskiy et al., 2021).

use lockstep_comm::CommError;
use lockstep_plan::Initializer;
use lockstep_tensor::View;

use crate::{
    block::{ParameterIndex, Value},
    facts::Facts,
    op::Op,
    placement::Placement,
    recorder::Recorder,
    replay::{InputGradients, Run},
};

impl Recorder {
    /// Records the tokens of an image `x [height, width, channels]` per sequence: the class token, a parameter
    /// `NAME [1, 1, channels]` with initial values of deviation `std`, then the pixels row by row. The output is
    /// `[tokens, channels]` in the placement of the residual stream.
    ///
    /// # Panics
    /// If `x` is no image, or a sequence has not `height · width + 1` tokens.
    #[track_caller]
    pub fn image_tokens(&mut self, x: Value, name: &str, std: f32) -> Value {
        let [samples, height, width, channels] = self.image(x, name);
        let (sequences, seq_len) = (self.shape.sequences, self.shape.seq_len);
        assert!(
            (samples, height * width + 1) == (sequences, seq_len),
            "{name}: {samples} images of {height} × {width} and a class token for {sequences} sequences of {seq_len}"
        );
        let share = self.whole_share(Placement::Replicate);
        let initializer = Initializer::Normal { std };
        let class_token = self.parameter(name.to_owned(), &[1, 1, channels], initializer, share);
        let y = self.value_in(channels, Placement::Replicate);
        self.push(ImageTokens { pixels: height * width, channels, class_token, x, y });
        self.redistribute_to_stream(y)
    }
}

#[derive(Debug)]
struct ImageTokens {
    pixels: usize,
    channels: usize,
    class_token: ParameterIndex,
    x: Value,
    y: Value,
}

impl ImageTokens {
    /// Returns a value as `[sequences, rows, channels]`.
    fn sequences<'r>(&self, view: View<'r>, rows: usize) -> View<'r> {
        view.reshape([view.elements() / (rows * self.channels), rows, self.channels])
    }
}

impl Op for ImageTokens {
    fn facts(&self) -> Facts {
        Facts {
            weights: vec![self.class_token],
            accumulates: true,
            is_cheap: true,
            ..Facts::of("image tokens", [self.x], [self.y])
        }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let (x, y) = (run.value(self.x), run.value(self.y));
        let row = run.weight(self.class_token).reshape([self.channels]);
        run.queue().prepend_row(row, self.sequences(x, self.pixels), self.sequences(y, self.pixels + 1));
        Ok(())
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        let (dy, target) = (self.sequences(dy, self.pixels + 1), self.sequences(dx.view(0), self.pixels));
        run.queue().prepend_row_backward_input(dy, target, dx.write(0));
        Ok(())
    }

    fn backward_weights(&self, run: &Run<'_>, dy: View<'_>) -> Result<(), CommError> {
        let gradient = run.gradient_of_weight(self.class_token).reshape([self.channels]);
        run.queue().prepend_row_backward_row(self.sequences(dy, self.pixels + 1), gradient);
        Ok(())
    }
}
