//! Pooling of images: maximum and average.

use lockstep_comm::CommError;
use lockstep_plan::DType;
use lockstep_tensor::{Pool2d, View, Window2d};

use crate::{
    block::Value,
    facts::Facts,
    op::Op,
    recorder::Recorder,
    replay::{InputGradients, Run},
};

impl Recorder {
    /// Records the maximum of each window of `x [height, width, channels]`.
    ///
    /// # Panics
    /// If `x` is no image, or the window does not fit it.
    #[track_caller]
    pub fn max_pool2d(&mut self, x: Value, window: Window2d) -> Value {
        let pool = self.pool(x, window);
        let most = Pool2d::MAX_KERNEL_ELEMENTS;
        assert!(window.taps() <= most, "a maximum over {:?}, of at most {most} elements", window.kernel);
        let y = self.image_like(x, pool.output(), pool.channels());
        let indices = self.local(self.local_rows(y), self.local_columns(y), DType::U8);
        self.push(MaxPool { pool, x, y, indices });
        y
    }

    /// Records the average of each window of `x [height, width, channels]`; padding counts as zeros.
    ///
    /// # Panics
    /// If `x` is no image, or the window does not fit it.
    #[track_caller]
    pub fn avg_pool2d(&mut self, x: Value, window: Window2d) -> Value {
        let pool = self.pool(x, window);
        let y = self.image_like(x, pool.output(), pool.channels());
        self.push(AveragePool { pool, x, y });
        y
    }

    /// Records the average of each channel of `x [height, width, channels]`, `[channels]`.
    ///
    /// # Panics
    /// If `x` is no image.
    #[track_caller]
    pub fn global_avg_pool2d(&mut self, x: Value) -> Value {
        let [_, height, width, channels] = self.image(x, "global average");
        let y = self.avg_pool2d(x, Window2d::whole([height, width]));
        self.set_dims(y, &[channels]);
        y
    }

    #[track_caller]
    fn pool(&self, x: Value, window: Window2d) -> Pool2d {
        let pool = Pool2d::new(self.image(x, "pooling"), window);
        pool.unwrap_or_else(|why| panic!("pooling of {}: {why}", self.describe(x)))
    }
}

#[derive(Debug)]
struct MaxPool {
    pool: Pool2d,
    x: Value,
    y: Value,
    /// Place of the maximum in each window, u8, shaped as `y`.
    indices: Value,
}

impl Op for MaxPool {
    fn facts(&self) -> Facts {
        let Self { x, y, indices, .. } = *self;
        Facts {
            saved_for_inputs: vec![indices],
            accumulates: true,
            is_cheap: true,
            vector_flops: [self.pool.window().taps() as u64, 1, 0],
            ..Facts::of("maximum pooling", [x], [y, indices])
        }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let output = self.pool.output_shape();
        let [y, indices] = [self.y, self.indices].map(|value| run.value(value).reshape(output));
        run.queue().max_pool2d(self.pool, run.value(self.x).reshape(self.pool.input_shape()), y, indices);
        Ok(())
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        let output = self.pool.output_shape();
        let (dy, indices) = (dy.reshape(output), run.value(self.indices).reshape(output));
        let target = dx.view(0).reshape(self.pool.input_shape());
        run.queue().max_pool2d_backward(self.pool, dy, indices, target, dx.write(0));
        Ok(())
    }
}

#[derive(Debug)]
struct AveragePool {
    pool: Pool2d,
    x: Value,
    y: Value,
}

impl Op for AveragePool {
    fn facts(&self) -> Facts {
        let taps = self.pool.window().taps() as u64;
        Facts {
            accumulates: true,
            is_cheap: true,
            vector_flops: [taps, taps, 0],
            ..Facts::of("average pooling", [self.x], [self.y])
        }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let x = run.value(self.x).reshape(self.pool.input_shape());
        run.queue().avg_pool2d(self.pool, x, run.value(self.y).reshape(self.pool.output_shape()));
        Ok(())
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        let target = dx.view(0).reshape(self.pool.input_shape());
        let dy = dy.reshape(self.pool.output_shape());
        run.queue().avg_pool2d_backward(self.pool, dy, target, dx.write(0));
        Ok(())
    }
}
