//! Depthwise convolution: each channel has one filter of its own. As matrix products these would have one column each, so
//! here a vector holds channels.

use std::ops::Range;

use lockstep_plan::{DType, MemoryCategory};

use super::windows::{Axis, axes, finish, for_each_pixel, windows_over_pixel};
use crate::{
    Buffer, Conv2d, CpuQueue, View, Write,
    cpu::{
        operands::Operand,
        simd::{BLOCK, Block, Float, Isa, inlined, with_float},
    },
};

/// Returns true if each output channel depends on the input channel of the same number alone.
pub(in crate::cpu) fn is_depthwise(conv: Conv2d) -> bool {
    conv.groups() == conv.in_channels() && conv.groups() == conv.out_channels()
}

/// Returns the axes: rows, then columns.
fn axes_of(conv: Conv2d) -> [Axis; 2] {
    axes(conv.window(), conv.input(), conv.output())
}

/// Returns the weight `[channels, taps]` transposed, f32 `[taps, channels]`.
fn transposed<T: Float>(queue: &CpuQueue, conv: Conv2d, weight: View<'_>) -> Buffer {
    let (channels, taps) = (conv.out_channels(), conv.window().taps());
    let mut buffer = queue
        .arena
        .allocate(channels * taps * size_of::<f32>(), MemoryCategory::Workspace)
        .unwrap_or_else(|error| panic!("depthwise filters of {channels} channels: {error}"));
    // SAFETY: the weight is only read.
    let weight = unsafe { weight.slice::<T>() };
    for (tap, line) in buffer.elements_mut::<f32>().chunks_exact_mut(channels.max(1)).take(taps).enumerate() {
        for (channel, element) in line.iter_mut().enumerate() {
            *element = weight[channel * taps + tap].load();
        }
    }
    buffer
}

pub(in crate::cpu) fn depthwise(
    queue: &CpuQueue,
    conv: Conv2d,
    x: View<'_>,
    weight: View<'_>,
    bias: Option<View<'_>>,
    y: View<'_>,
) {
    let channels = conv.out_channels();
    let (axes, pixels) = (axes_of(conv), y.elements() / channels.max(1));
    let cost = axes[0].kernel * axes[1].kernel;
    with_float!(x.dtype(), T => {
        let filters = transposed::<T>(queue, conv, weight);
        let filters = Operand::<f32>::new(filters.view(DType::F32, 0, [cost * channels]));
        let (x, y, bias) = (Operand::<T>::new(x), Operand::<T>::new(y), bias.map(Operand::<T>::new));
        let sizes = (conv.output(), conv.input());
        for_each_pixel(queue, pixels, sizes, (channels, cost), inlined!(|isa, pixel, [row, column], first, part: Range<usize>| {
            let mut sums = Block::ZERO;
            let sums = &mut sums.0[..part.len()];
            if let Some(bias) = &bias {
                // SAFETY: the bias is only read.
                let bias = unsafe { bias.read(part.clone()) };
                sums.iter_mut().zip(bias).for_each(|(sum, bias)| *sum = bias.load());
            }
            for (tap_row, at_row) in axes[0].seen(row) {
                for (tap_column, at_column) in axes[1].seen(column) {
                    let at = (first + at_row * axes[1].input + at_column) * channels;
                    let tap = (tap_row * axes[1].kernel + tap_column) * channels;
                    // SAFETY: the input and the filters are only read.
                    let (x, filter) = unsafe {
                        (x.read(at + part.start..at + part.end), filters.read(tap + part.start..tap + part.end))
                    };
                    add_products(isa, sums, x, filter);
                }
            }
            let at = pixel * channels;
            // SAFETY: each output pixel belongs to one task.
            T::store_all(isa, sums, unsafe { y.write(at + part.start..at + part.end) });
        }));
    });
}

pub(in crate::cpu) fn depthwise_backward_input(
    queue: &CpuQueue,
    conv: Conv2d,
    dy: View<'_>,
    weight: View<'_>,
    dx: View<'_>,
    write: Write,
) {
    let channels = conv.out_channels();
    let (axes, pixels) = (axes_of(conv), dx.elements() / channels.max(1));
    let taps = axes[0].kernel * axes[1].kernel;
    with_float!(dx.dtype(), T => {
        let filters = transposed::<T>(queue, conv, weight);
        let filters = Operand::<f32>::new(filters.view(DType::F32, 0, [taps * channels]));
        let (dy, dx) = (Operand::<T>::new(dy), Operand::<T>::new(dx));
        let sizes = (conv.input(), conv.output());
        let cost = windows_over_pixel(axes);
        for_each_pixel(queue, pixels, sizes, (channels, cost), inlined!(|isa, pixel, [row, column], first, part: Range<usize>| {
            let mut sums = Block::ZERO;
            let sums = &mut sums.0[..part.len()];
            for (tap_row, window_row) in axes[0].seeing(row) {
                for (tap_column, window_column) in axes[1].seeing(column) {
                    let at = (first + window_row * axes[1].output + window_column) * channels;
                    let tap = (tap_row * axes[1].kernel + tap_column) * channels;
                    // SAFETY: the gradient and the filters are only read.
                    let (dy, filter) = unsafe {
                        (dy.read(at + part.start..at + part.end), filters.read(tap + part.start..tap + part.end))
                    };
                    add_products(isa, sums, dy, filter);
                }
            }
            let at = pixel * channels;
            // SAFETY: each pixel of the input belongs to one task.
            finish(isa, sums, unsafe { dx.write(at + part.start..at + part.end) }, write);
        }));
    });
}

/// Computes `sums += x · filter`.
#[inline(always)]
fn add_products<T: Float>(isa: Isa, sums: &mut [f32], x: &[T], filter: &[f32]) {
    for ((sum, x), w) in sums.iter_mut().zip(x).zip(filter) {
        *sum = isa.mul_add(x.load(), *w, *sum);
    }
}

/// Adds the gradient of the weight to `dweight`. The rows of all output images are summed in fixed groups.
pub(in crate::cpu) fn depthwise_backward_weight(
    queue: &CpuQueue,
    conv: Conv2d,
    dy: View<'_>,
    x: View<'_>,
    dweight: View<'_>,
) {
    let (channels, axes, [rows, columns]) = (conv.out_channels(), axes_of(conv), conv.output());
    let taps = axes[0].kernel * axes[1].kernel;
    with_float!(x.dtype(), T => {
        let (dy, x) = (Operand::<T>::new(dy), Operand::<T>::new(x));
        queue.add_sum_over_rows(conv.batch() * rows, [dweight], inlined!(|range, [dweight]| {
            for line in range {
                let image = line / rows * axes[0].input;
                for (tap_row, at_row) in axes[0].seen(line % rows) {
                    let input = (image + at_row) * axes[1].input;
                    for (tap_column, first) in (0..axes[1].kernel)
                        .flat_map(|tap| (0..channels).step_by(BLOCK).map(move |first| (tap, first)))
                    {
                        let n = BLOCK.min(channels - first);
                        let mut sums = Block::ZERO;
                        let sums = &mut sums.0[..n];
                        for column in 0..columns {
                            let Some(at_column) = axes[1].position(column, tap_column) else { continue };
                            let (at, out) = (
                                (input + at_column) * channels + first,
                                (line * columns + column) * channels + first,
                            );
                            // SAFETY: both are only read, and overlap no output.
                            let (x, dy) = unsafe { (x.read(at..at + n), dy.read(out..out + n)) };
                            for ((sum, x), dy) in sums.iter_mut().zip(x).zip(dy) {
                                *sum += x.load() * dy.load();
                            }
                        }
                        let tap = tap_row * axes[1].kernel + tap_column;
                        for (channel, sum) in sums.iter().enumerate() {
                            dweight[(first + channel) * taps + tap] += sum;
                        }
                    }
                }
            }
        }));
    });
}
