//! Convolution of images, and the windows that it shares with pooling.
//!
//! Images are NHWC: `[batch, height, width, channels]`. Weights have PyTorch's layout
//! `[out_channels, in_channels / groups, kernel_height, kernel_width]`. Pairs of sizes are (vertical, horizontal).

use crate::{Shape, View, Write};

/// A window that slides over an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Window2d {
    /// Rows and columns of the kernel.
    pub kernel: [usize; 2],
    /// Distance between neighbouring positions of the window, at least 1.
    pub stride: [usize; 2],
    /// Rows above and below, and columns left and right of the image, that the window may reach.
    pub padding: [usize; 2],
    /// Distance between neighbouring elements of the kernel, at least 1.
    pub dilation: [usize; 2],
}

impl Window2d {
    /// Creates a square window without dilation.
    pub const fn square(kernel: usize, stride: usize, padding: usize) -> Self {
        Self { kernel: [kernel; 2], stride: [stride; 2], padding: [padding; 2], dilation: [1; 2] }
    }

    /// Creates a window that covers an image of `input` rows and columns.
    pub const fn whole(input: [usize; 2]) -> Self {
        Self { kernel: input, stride: [1; 2], padding: [0; 2], dilation: [1; 2] }
    }

    /// Returns the elements of the kernel.
    pub const fn taps(&self) -> usize {
        self.kernel[0] * self.kernel[1]
    }

    /// Returns the rows and columns of the output for an image of `input` rows and columns:
    /// `(input + 2 padding - dilation (kernel - 1) - 1) / stride + 1`, rounded down.
    ///
    /// # Errors
    /// If the kernel, the stride or the dilation is 0, a size exceeds 2^31, or the window is larger than the padded
    /// image.
    pub fn output(&self, input: [usize; 2]) -> Result<[usize; 2], String> {
        const LARGEST: usize = 1 << 31;
        let mut output = [0; 2];
        for (axis, name) in ["height", "width"].into_iter().enumerate() {
            let [size, kernel, stride, padding, dilation] =
                [&input, &self.kernel, &self.stride, &self.padding, &self.dilation].map(|sizes| sizes[axis]);
            if kernel == 0 || stride == 0 || dilation == 0 {
                return Err(format!(
                    "{name}: kernel {kernel}, stride {stride} and dilation {dilation} must be at least 1"
                ));
            }
            if [size, kernel, stride, padding, dilation].into_iter().any(|size| size > LARGEST) {
                return Err(format!("{name}: sizes are at most {LARGEST}: image {size}, {self:?}"));
            }
            let (padded, window) = (size as u64 + 2 * padding as u64, window_size(kernel, dilation));
            if window > padded {
                return Err(format!(
                    "{name}: a window of {window} (kernel {kernel}, dilation {dilation}) is larger than an image of \
                     {size} with padding {padding} on each side"
                ));
            }
            output[axis] = ((padded - window) / stride as u64) as usize + 1;
        }
        Ok(output)
    }
}

/// Returns the rows or columns that a kernel spans.
fn window_size(kernel: usize, dilation: usize) -> u64 {
    dilation as u64 * (kernel as u64 - 1) + 1
}

/// The shapes of a convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Conv2d {
    batch: usize,
    input: [usize; 2],
    output: [usize; 2],
    in_channels: usize,
    out_channels: usize,
    window: Window2d,
    groups: usize,
}

impl Conv2d {
    /// Creates the shapes of a convolution of images `[batch, height, width, channels]` (`input`) to `out_channels`
    /// channels. Each of `groups` groups of input channels yields the group of output channels of the same number.
    ///
    /// # Errors
    /// If the groups do not divide the channels, or as [`Window2d::output`].
    pub fn new(
        input: [usize; 4],
        out_channels: usize,
        window: Window2d,
        groups: usize,
    ) -> Result<Self, String> {
        let [batch, height, width, in_channels] = input;
        let divides = |channels: usize| groups > 0 && channels.is_multiple_of(groups);
        if !divides(in_channels) || !divides(out_channels) {
            return Err(format!(
                "{groups} groups must divide {in_channels} input channels and {out_channels} output channels"
            ));
        }
        let input = [height, width];
        Ok(Self { batch, input, output: window.output(input)?, in_channels, out_channels, window, groups })
    }

    /// Shape of the input, `[batch, height, width, in_channels]`.
    pub fn input_shape(&self) -> Shape {
        [self.batch, self.input[0], self.input[1], self.in_channels].into()
    }

    /// Shape of the output, `[batch, height, width, out_channels]`.
    pub fn output_shape(&self) -> Shape {
        [self.batch, self.output[0], self.output[1], self.out_channels].into()
    }

    /// Shape of the weight, `[out_channels, in_channels / groups, kernel_height, kernel_width]`.
    pub fn weight_shape(&self) -> Shape {
        let [height, width] = self.window.kernel;
        [self.out_channels, self.in_channels / self.groups, height, width].into()
    }

    /// Number of images.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Rows and columns of an input image.
    pub fn input(&self) -> [usize; 2] {
        self.input
    }

    /// Rows and columns of an output image.
    pub fn output(&self) -> [usize; 2] {
        self.output
    }

    /// Channels of the input.
    pub fn in_channels(&self) -> usize {
        self.in_channels
    }

    /// Channels of the output.
    pub fn out_channels(&self) -> usize {
        self.out_channels
    }

    /// Kernel, stride, padding and dilation.
    pub fn window(&self) -> Window2d {
        self.window
    }

    /// Number of groups of channels.
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// Multiplications of the forward pass; each gradient has as many. Taps that see only padding are included.
    pub fn multiplications(&self) -> u64 {
        let pixels = self.output_shape().elements() as u64;
        let taps = self.window.kernel[0] as u64 * self.window.kernel[1] as u64;
        pixels.saturating_mul(taps.saturating_mul((self.in_channels / self.groups) as u64))
    }
}

/// Convolution. Part of [`Kernels`](crate::Kernels).
pub trait ConvolutionKernels {
    /// Computes the convolution `y` of `x` with `weight` (a cross-correlation, as in PyTorch). `bias [out_channels]` is
    /// added to every pixel; its gradient is [`sum_rows`](crate::ElementwiseKernels::sum_rows) of the gradient of `y`.
    fn conv2d(&self, conv: Conv2d, x: View<'_>, weight: View<'_>, bias: Option<View<'_>>, y: View<'_>);

    /// Computes the gradient with respect to [`ConvolutionKernels::conv2d`]'s input.
    fn conv2d_backward_input(&self, conv: Conv2d, dy: View<'_>, weight: View<'_>, dx: View<'_>, write: Write);

    /// Adds the gradient of [`ConvolutionKernels::conv2d`]'s weight to `dweight`, which is f32 and has the layout of the
    /// weight.
    fn conv2d_backward_weight(&self, conv: Conv2d, dy: View<'_>, x: View<'_>, dweight: View<'_>);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_sizes_are_those_of_pytorch() {
        let stem = Window2d::square(7, 2, 3);
        assert_eq!(stem.output([224, 224]), Ok([112, 112]));
        assert_eq!(Window2d::square(3, 1, 1).output([32, 7]), Ok([32, 7]));
        assert_eq!(Window2d::square(1, 2, 0).output([8, 7]), Ok([4, 4]));
        let dilated = Window2d { dilation: [2, 3], ..Window2d::square(3, 1, 0) };
        assert_eq!(dilated.output([5, 7]), Ok([1, 1]));
        assert_eq!(Window2d::whole([4, 9]).output([4, 9]), Ok([1, 1]));
    }

    #[test]
    fn shapes_that_do_not_fit_are_named() {
        let message = |result: Result<Conv2d, String>| result.unwrap_err();
        let conv = |input, groups, window| Conv2d::new(input, 6, window, groups);
        let small = message(conv([1, 4, 2, 4], 1, Window2d::square(5, 1, 1)));
        assert_eq!(
            small,
            "width: a window of 5 (kernel 5, dilation 1) is larger than an image of 2 with padding 1 on each side"
        );
        let groups = message(conv([1, 8, 8, 4], 4, Window2d::square(3, 1, 1)));
        assert_eq!(groups, "4 groups must divide 4 input channels and 6 output channels");
        assert!(message(conv([1, 8, 8, 4], 0, Window2d::square(3, 1, 1))).starts_with("0 groups"));
        let zero = message(conv([1, 8, 8, 4], 1, Window2d::square(3, 0, 1)));
        assert_eq!(zero, "height: kernel 3, stride 0 and dilation 1 must be at least 1");
        let huge = Window2d { dilation: [usize::MAX; 2], ..Window2d::square(3, 1, 1) };
        assert!(message(conv([1, 8, 8, 4], 1, huge)).starts_with("height: sizes are at most"));
    }
}
