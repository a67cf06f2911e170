//! Pooling: all channels of an output pixel at a time. The backwards gather: each pixel of the input sums what the windows
//! over it received, in f32, in the order of the kernel's elements, and rounds once.

use std::ops::Range;

use lockstep_plan::DType;

use super::windows::{Axis, axes, finish, for_each_pixel, windows_over_pixel};
use crate::{
    CpuQueue, Pool2d, PoolKernels, View, Write,
    cpu::{
        operands::{Operand, check_disjoint, expect},
        simd::{BLOCK, Block, Float, inlined, with_float},
    },
};

impl PoolKernels for CpuQueue {
    fn max_pool2d(&self, pool: Pool2d, x: View<'_>, y: View<'_>, indices: View<'_>) {
        check("max_pool2d", pool, x, y, Some(indices));
        check_disjoint(&[y, indices], &[x]);
        let channels = pool.channels();
        let (axes, pixels) = (axes_of(pool), y.elements() / channels.max(1));
        let cost = axes[0].kernel * axes[1].kernel;
        with_float!(x.dtype(), T => {
            let (x, y, indices) = (Operand::<T>::new(x), Operand::<T>::new(y), Operand::<u8>::new(indices));
            let sizes = (pool.output(), pool.input());
            for_each_pixel(self, pixels, sizes, (channels, cost), inlined!(|isa, pixel, [row, column], first, part: Range<usize>| {
                let (mut best, mut places) = (Block::ZERO, [0_u32; BLOCK]);
                let (best, places) = (&mut best.0[..part.len()], &mut places[..part.len()]);
                let mut is_first = true;
                for (tap_row, at_row) in axes[0].seen(row) {
                    for (tap_column, at_column) in axes[1].seen(column) {
                        let at = (first + at_row * axes[1].input + at_column) * channels;
                        // SAFETY: the input is only read.
                        let x = unsafe { x.read(at + part.start..at + part.end) };
                        let place = (tap_row * axes[1].kernel + tap_column) as u32;
                        take_larger(best, places, x, place, is_first);
                        is_first = false;
                    }
                }
                let at = pixel * channels;
                // SAFETY: each output pixel belongs to one task.
                let (y, indices) = unsafe {
                    (y.write(at + part.start..at + part.end), indices.write(at + part.start..at + part.end))
                };
                T::store_all(isa, best, y);
                for (index, place) in indices.iter_mut().zip(places) {
                    *index = *place as u8;
                }
            }));
        });
    }

    fn max_pool2d_backward(&self, pool: Pool2d, dy: View<'_>, indices: View<'_>, dx: View<'_>, write: Write) {
        check("max_pool2d_backward", pool, dx, dy, Some(indices));
        check_disjoint(&[dx], &[dy, indices]);
        let (axes, channels) = (axes_of(pool), pool.channels());
        let pixels = dx.elements() / channels.max(1);
        with_float!(dx.dtype(), T => {
            let (dy, indices, dx) = (Operand::<T>::new(dy), Operand::<u8>::new(indices), Operand::<T>::new(dx));
            let sizes = (pool.input(), pool.output());
            for_each_pixel(self, pixels, sizes, (channels, windows_over_pixel(axes)), inlined!(|isa, pixel, [row, column], first, part: Range<usize>| {
                let mut sums = Block::ZERO;
                let sums = &mut sums.0[..part.len()];
                for (tap_row, window_row) in axes[0].seeing(row) {
                    for (tap_column, window_column) in axes[1].seeing(column) {
                        let at = (first + window_row * axes[1].output + window_column) * channels;
                        // SAFETY: the gradient and the indices are only read.
                        let (dy, indices) = unsafe {
                            (dy.read(at + part.start..at + part.end), indices.read(at + part.start..at + part.end))
                        };
                        let place = (tap_row * axes[1].kernel + tap_column) as u8;
                        for ((sum, dy), index) in sums.iter_mut().zip(dy).zip(indices) {
                            *sum += if *index == place { dy.load() } else { 0.0 };
                        }
                    }
                }
                // SAFETY: each pixel of the input belongs to one task.
                finish(isa, sums, unsafe { dx.write(pixel * channels + part.start..pixel * channels + part.end) }, write);
            }));
        });
    }

    fn avg_pool2d(&self, pool: Pool2d, x: View<'_>, y: View<'_>) {
        check("avg_pool2d", pool, x, y, None);
        check_disjoint(&[y], &[x]);
        let channels = pool.channels();
        let (axes, pixels) = (axes_of(pool), y.elements() / channels.max(1));
        let cost = axes[0].kernel * axes[1].kernel;
        let factor = 1.0 / cost as f32;
        with_float!(x.dtype(), T => {
            let (x, y) = (Operand::<T>::new(x), Operand::<T>::new(y));
            let sizes = (pool.output(), pool.input());
            for_each_pixel(self, pixels, sizes, (channels, cost), inlined!(|isa, pixel, [row, column], first, part: Range<usize>| {
                let mut sums = Block::ZERO;
                let sums = &mut sums.0[..part.len()];
                for (_, at_row) in axes[0].seen(row) {
                    // A sum for each row of the window, for less rounding error in large windows.
                    let mut of_row = Block::ZERO;
                    let of_row = &mut of_row.0[..part.len()];
                    for (_, at_column) in axes[1].seen(column) {
                        let at = (first + at_row * axes[1].input + at_column) * channels;
                        // SAFETY: the input is only read.
                        let x = unsafe { x.read(at + part.start..at + part.end) };
                        of_row.iter_mut().zip(x).for_each(|(sum, x)| *sum += x.load());
                    }
                    sums.iter_mut().zip(of_row).for_each(|(sum, of_row)| *sum += *of_row);
                }
                sums.iter_mut().for_each(|sum| *sum *= factor);
                let at = pixel * channels;
                // SAFETY: each output pixel belongs to one task.
                T::store_all(isa, sums, unsafe { y.write(at + part.start..at + part.end) });
            }));
        });
    }

    fn avg_pool2d_backward(&self, pool: Pool2d, dy: View<'_>, dx: View<'_>, write: Write) {
        check("avg_pool2d_backward", pool, dx, dy, None);
        check_disjoint(&[dx], &[dy]);
        let (axes, channels) = (axes_of(pool), pool.channels());
        let pixels = dx.elements() / channels.max(1);
        let factor = 1.0 / (axes[0].kernel * axes[1].kernel) as f32;
        with_float!(dx.dtype(), T => {
            let (dy, dx) = (Operand::<T>::new(dy), Operand::<T>::new(dx));
            let sizes = (pool.input(), pool.output());
            for_each_pixel(self, pixels, sizes, (channels, windows_over_pixel(axes)), inlined!(|isa, pixel, [row, column], first, part: Range<usize>| {
                let mut sums = Block::ZERO;
                let sums = &mut sums.0[..part.len()];
                for (_, window_row) in axes[0].seeing(row) {
                    for (_, window_column) in axes[1].seeing(column) {
                        let at = (first + window_row * axes[1].output + window_column) * channels;
                        // SAFETY: the gradient is only read.
                        let dy = unsafe { dy.read(at + part.start..at + part.end) };
                        sums.iter_mut().zip(dy).for_each(|(sum, dy)| *sum += dy.load());
                    }
                }
                sums.iter_mut().for_each(|sum| *sum *= factor);
                // SAFETY: each pixel of the input belongs to one task.
                finish(isa, sums, unsafe { dx.write(pixel * channels + part.start..pixel * channels + part.end) }, write);
            }));
        });
    }
}

/// Returns the axes: rows, then columns.
fn axes_of(pool: Pool2d) -> [Axis; 2] {
    axes(pool.window(), pool.input(), pool.output())
}

/// Checks the operands of a pooling.
fn check(kernel: &str, pool: Pool2d, x: View<'_>, y: View<'_>, indices: Option<View<'_>>) {
    let outputs = pool.output_shape().elements();
    expect(format_args!("{kernel}: the input"), x, y.dtype(), pool.input_shape().elements());
    expect(format_args!("{kernel}: the output"), y, x.dtype(), outputs);
    if let Some(indices) = indices {
        expect(format_args!("{kernel}: the indices"), indices, DType::U8, outputs);
        let elements = pool.window().taps();
        assert!(
            elements <= Pool2d::MAX_KERNEL_ELEMENTS,
            "{kernel}: a kernel of {elements} elements, of at most {}",
            Pool2d::MAX_KERNEL_ELEMENTS
        );
    }
}

/// Replaces those elements of `best` that are smaller than the ones of `x`, and their places; all if `x` is the first.
#[inline(always)]
fn take_larger<T: Float>(best: &mut [f32], places: &mut [u32], x: &[T], place: u32, is_first: bool) {
    for ((best, kept), x) in best.iter_mut().zip(places).zip(x) {
        let x = x.load();
        let is_larger = is_first | (x > *best) | x.is_nan();
        *best = if is_larger { x } else { *best };
        *kept = if is_larger { place } else { *kept };
    }
}
