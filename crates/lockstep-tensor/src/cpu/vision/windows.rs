//! Windows that slide over images, for pooling and depthwise convolution: all channels of a pixel at a time.

use std::ops::Range;

use crate::{
    CpuQueue, Window2d, Write,
    cpu::{
        simd::{BLOCK, Float, Isa, inlined},
        tasks::rows_per_task,
    },
};

/// The windows along one axis.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct Axis {
    pub(super) input: usize,
    pub(super) output: usize,
    pub(super) kernel: usize,
    stride: usize,
    padding: usize,
    dilation: usize,
}

impl Axis {
    /// Returns (element of the kernel, input position) of the part of window `out` that lies in the image.
    #[inline(always)]
    pub(super) fn seen(self, out: usize) -> impl Iterator<Item = (usize, usize)> + Clone {
        (0..self.kernel).filter_map(move |tap| Some((tap, self.position(out, tap)?)))
    }

    /// Returns the input position of an element of the kernel in window `out`; `None` if it lies beyond the border.
    #[inline(always)]
    pub(super) fn position(self, out: usize, tap: usize) -> Option<usize> {
        let at = (out * self.stride + tap * self.dilation).checked_sub(self.padding)?;
        (at < self.input).then_some(at)
    }

    /// Returns (element of the kernel, window) of the windows that see input position `at`.
    #[inline(always)]
    pub(super) fn seeing(self, at: usize) -> impl Iterator<Item = (usize, usize)> + Clone {
        (0..self.kernel).filter_map(move |tap| {
            let start = (at + self.padding).checked_sub(tap * self.dilation)?;
            let out = start / self.stride;
            (start.is_multiple_of(self.stride) && out < self.output).then_some((tap, out))
        })
    }
}

/// Returns the axes of a window: rows, then columns.
pub(in crate::cpu) fn axes(window: Window2d, input: [usize; 2], output: [usize; 2]) -> [Axis; 2] {
    let Window2d { kernel, stride, padding, dilation } = window;
    std::array::from_fn(|axis| Axis {
        input: input[axis],
        output: output[axis],
        kernel: kernel[axis],
        stride: stride[axis],
        padding: padding[axis],
        dilation: dilation[axis],
    })
}

/// Calls `work(isa, pixel, row and column of the pixel in its image, first pixel of the other image of the same batch
/// index, range of channels)` for all pixels of images of `own` size, in tasks by shape. `cost` is the number of pixels
/// that the work on one pixel reads.
#[inline(always)]
pub(super) fn for_each_pixel(
    queue: &CpuQueue,
    pixels: usize,
    (own, other): ([usize; 2], [usize; 2]),
    (channels, cost): (usize, usize),
    work: impl Fn(Isa, usize, [usize; 2], usize, Range<usize>) + Sync,
) {
    let per_task = rows_per_task(pixels, channels.saturating_mul(cost.max(1)));
    queue.for_each_range(
        pixels,
        per_task,
        inlined!(|range, isa| {
            for pixel in range {
                let (line, column) = (pixel / own[1], pixel % own[1]);
                let (image, row) = (line / own[0], line % own[0]);
                for first in (0..channels).step_by(BLOCK) {
                    let part = first..channels.min(first + BLOCK);
                    work(isa, pixel, [row, column], image * other[0] * other[1], part);
                }
            }
        }),
    );
}

/// Returns the approximate number of windows over a pixel of the input.
pub(super) fn windows_over_pixel(axes: [Axis; 2]) -> usize {
    axes.iter().map(|axis| axis.kernel.div_ceil(axis.stride)).product()
}

/// Stores sums, or adds them to the earlier values.
#[inline(always)]
pub(super) fn finish<T: Float>(isa: Isa, sums: &mut [f32], to: &mut [T], write: Write) {
    if write == Write::Accumulate {
        sums.iter_mut().zip(&*to).for_each(|(sum, earlier)| *sum += earlier.load());
    }
    T::store_all(isa, sums, to);
}
