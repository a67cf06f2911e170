//! Images as vectors in PyTorch's order of elements: channels, then rows, then columns.

use lockstep_comm::CommError;
use lockstep_tensor::View;

use crate::{
    block::Value,
    facts::Facts,
    op::Op,
    recorder::Recorder,
    replay::{InputGradients, Run},
};

impl Recorder {
    /// Records `x [height, width, channels]` as a vector `[channels · height · width]`, as `torch.flatten` orders images.
    ///
    /// # Panics
    /// If `x` is no image.
    #[track_caller]
    pub fn flatten(&mut self, x: Value) -> Value {
        let [_, height, width, channels] = self.image(x, "flatten");
        let y = self.same_shape(x);
        self.set_dims(y, &[height * width * channels]);
        self.push(Flatten { pixels: height * width, channels, x, y });
        y
    }
}

#[derive(Debug)]
struct Flatten {
    pixels: usize,
    channels: usize,
    x: Value,
    y: Value,
}

impl Flatten {
    /// Transposes `[rows, columns]` of each sample.
    fn transpose(run: &Run<'_>, [rows, columns]: [usize; 2], from: View<'_>, to: View<'_>) {
        for sample in 0..from.shape().as_matrix().0 {
            let one = sample..sample + 1;
            run.queue().transpose_blocks(
                from.rows(one.clone()).reshape([rows, columns, 1]),
                to.rows(one).reshape([columns, rows, 1]),
            );
        }
    }
}

impl Op for Flatten {
    fn facts(&self) -> Facts {
        Facts { is_cheap: true, ..Facts::of("flatten", [self.x], [self.y]) }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        Self::transpose(run, [self.pixels, self.channels], run.value(self.x), run.value(self.y));
        Ok(())
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        Self::transpose(run, [self.channels, self.pixels], dy, dx.view(0));
        Ok(())
    }
}
