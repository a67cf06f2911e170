//! Pooling of images.

use crate::{Shape, View, Window2d, Write};

/// The shapes of a pooling.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pool2d {
    batch: usize,
    input: [usize; 2],
    output: [usize; 2],
    channels: usize,
    window: Window2d,
}

impl Pool2d {
    /// Largest number of elements of a kernel for [`PoolKernels::max_pool2d`], whose indices are bytes.
    pub const MAX_KERNEL_ELEMENTS: usize = 256;

    /// Creates the shapes of a pooling of images `[batch, height, width, channels]`.
    ///
    /// # Errors
    /// If the padding exceeds half the kernel, some window sees padding only, or as [`Window2d::output`].
    pub fn new(input: [usize; 4], window: Window2d) -> Result<Self, String> {
        let [batch, height, width, channels] = input;
        let Window2d { kernel, padding, .. } = window;
        if padding[0] > kernel[0] / 2 || padding[1] > kernel[1] / 2 {
            return Err(format!(
                "the padding {padding:?} of a pooling is at most half its kernel {kernel:?}"
            ));
        }
        let input = [height, width];
        let output = window.output(input)?;
        if (0..2).any(|axis| has_blind_window(window, axis, input[axis], output[axis])) {
            return Err(format!("a window sees only padding of an image of {height} x {width}: {window:?}"));
        }
        Ok(Self { batch, input, output, channels, window })
    }

    /// Shape of the input, `[batch, height, width, channels]`.
    pub fn input_shape(&self) -> Shape {
        [self.batch, self.input[0], self.input[1], self.channels].into()
    }

    /// Shape of the output, `[batch, height, width, channels]`.
    pub fn output_shape(&self) -> Shape {
        [self.batch, self.output[0], self.output[1], self.channels].into()
    }

    /// Rows and columns of an input image.
    pub fn input(&self) -> [usize; 2] {
        self.input
    }

    /// Rows and columns of an output image.
    pub fn output(&self) -> [usize; 2] {
        self.output
    }

    /// Number of channels.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// Kernel, stride, padding and dilation.
    pub fn window(&self) -> Window2d {
        self.window
    }
}

/// Returns true if some window lies in the padding as a whole along an axis. Without dilation, only an empty image has
/// such windows: the padding is at most half the kernel.
fn has_blind_window(window: Window2d, axis: usize, input: usize, output: usize) -> bool {
    let Window2d { kernel, stride, padding, dilation } = window;
    if dilation[axis] == 1 {
        return input == 0;
    }
    let sees = |start: usize| {
        let mut positions = (0..kernel[axis]).map(|tap| start + tap * dilation[axis]);
        positions.any(|at| (padding[axis]..padding[axis] + input).contains(&at))
    };
    (0..output).any(|out| !sees(out * stride[axis]))
}

/// Pooling. Part of [`Kernels`](crate::Kernels).
pub trait PoolKernels {
    /// Computes the maximum of each window, and its place: `indices` (u8, shaped as `y`) holds the row-major index in
    /// the kernel of the first maximum, or of the last NaN. NaN is larger than all numbers, as in PyTorch.
    fn max_pool2d(&self, pool: Pool2d, x: View<'_>, y: View<'_>, indices: View<'_>);

    /// Computes the gradient with respect to [`PoolKernels::max_pool2d`]'s input.
    fn max_pool2d_backward(&self, pool: Pool2d, dy: View<'_>, indices: View<'_>, dx: View<'_>, write: Write);

    /// Computes the average of each window. Padding counts as zeros (PyTorch's `count_include_pad=True`). With
    /// [`Window2d::whole`] it is the global average.
    fn avg_pool2d(&self, pool: Pool2d, x: View<'_>, y: View<'_>);

    /// Computes the gradient with respect to [`PoolKernels::avg_pool2d`]'s input.
    fn avg_pool2d_backward(&self, pool: Pool2d, dy: View<'_>, dx: View<'_>, write: Write);
}
