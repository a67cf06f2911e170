//! Gradient of a convolution's weight in f32, without packing: the micro-kernel reads the pixels of both operands where
//! they lie.
//!
//! For each tap the gradient is a product over the output pixels that see an input pixel through the tap: channels of
//! the input times channels of the output. These pixels are runs, one in each row of the output. Pixels that see the
//! padding are left out, 31 % of the products of a 3 × 3 kernel on images of 4 × 4.
//!
//! A task owns a panel of input channels and one or two panels of output channels, with all taps. It goes through the
//! pixels block by block, so that a block stays in the cache for all taps, and adds the sums of each block to its own.
//! Last it adds these to the gradient, in the layout of the weight.

use std::{marker::PhantomData, ops::Range};

use super::{
    dispatch::with_f32_tiles,
    lanes::Lanes,
    scratch::ROWS_UNITS,
    store::Window,
    transpose::{Block, SIDE},
};
use crate::{Conv2d, CpuQueue, Window2d};

/// Output pixels of a block, unless a row has more: their sums are kept in registers.
const BLOCK_PIXELS: usize = 1024;
/// Largest number of rows of a block.
const BLOCK_ROWS: usize = 64;
/// Fewer input channels are those of [`few_channels`](super::few_channels), or packed with those of neighbouring taps.
pub(super) const FEWEST_CHANNELS: usize = 16;

/// The operands of the gradient.
#[derive(Clone, Copy)]
pub(super) struct Operands<'a> {
    pub(super) conv: Conv2d,
    pub(super) dy: &'a [f32],
    pub(super) x: &'a [f32],
    /// The gradient `[out_channels, in_channels / groups, kernel height, kernel width]`, one element a row.
    pub(super) dweight: Window<f32>,
}

/// Adds the gradient of the weight. Returns false if the shape or the queue's kernels need packed operands.
///
/// # Safety
/// The operands must have the sizes of the convolution, and nothing else may use `dweight` meanwhile.
pub(super) unsafe fn add(queue: &CpuQueue, operands: Operands<'_>) -> bool {
    // SAFETY: the caller's promise; the queue's level has the instructions of the vectors.
    unsafe {
        with_f32_tiles!(queue, |V, ROWS, THIN, VECTORS| Tasks::<V, ROWS, THIN, VECTORS>::run(queue, operands))
    }
}

/// The tasks of a gradient: tiles of `ROWS` input channels by `VECTORS` vectors of output channels, and of `THIN` rows
/// where fewer channels are left.
struct Tasks<'a, V, const ROWS: usize, const THIN: usize, const VECTORS: usize> {
    operands: Operands<'a>,
    /// Input and output channels of a group.
    channels: [usize; 2],
    /// Panels of input and of output channels of a group.
    panels: [usize; 2],
    /// Panels of output channels of a task.
    width: usize,
    vector: PhantomData<fn(V)>,
}

impl<V: Lanes, const ROWS: usize, const THIN: usize, const VECTORS: usize> Tasks<'_, V, ROWS, THIN, VECTORS> {
    /// Output channels of a panel.
    const COLUMNS: usize = VECTORS * V::COUNT;
    /// Elements of a tile.
    const TILE: usize = ROWS * Self::COLUMNS;

    /// Runs all tasks. Returns false if the channels do not fill the tiles or the sums of a task exceed its scratch memory.
    ///
    /// # Safety
    /// As [`add`], and the CPU must have the instructions of `V`.
    unsafe fn run(queue: &CpuQueue, operands: Operands<'_>) -> bool {
        let conv = operands.conv;
        let channels = [conv.in_channels(), conv.out_channels()].map(|channels| channels / conv.groups());
        let [inputs, outputs] = channels;
        let panels = [inputs.div_ceil(ROWS), outputs / Self::COLUMNS];
        let width = if panels[1].is_multiple_of(2) { 2 } else { 1 };
        if inputs < FEWEST_CHANNELS
            || !inputs.is_multiple_of(THIN)
            || !outputs.is_multiple_of(Self::COLUMNS)
            || conv.window().taps() * width * Self::TILE > ROWS_UNITS
        {
            return false;
        }
        let tasks =
            Tasks::<V, ROWS, THIN, VECTORS> { operands, channels, panels, width, vector: PhantomData };
        queue.pool.run(conv.groups() * panels[0] * panels[1] / width, |index| {
            let mut scratch = queue.scratch.rows();
            let sums = &mut scratch.elements_mut()[..conv.window().taps() * width * Self::TILE];
            // SAFETY: the caller's promise; each task owns its part of the gradient.
            unsafe { tasks.task(index, sums) };
        });
        true
    }

    /// Computes one task's part of the gradient.
    ///
    /// # Safety
    /// As [`Tasks::run`].
    unsafe fn task(&self, index: usize, sums: &mut [f32]) {
        let Self { operands, channels: [inputs, outputs], panels, width, .. } = *self;
        let column_tasks = panels[1] / width;
        let (group, index) = (index / (panels[0] * column_tasks), index % (panels[0] * column_tasks));
        let input = index / column_tasks * ROWS;
        let output = index % column_tasks * width * Self::COLUMNS;
        let rows = ROWS.min(inputs - input);
        let first = [group * inputs + input, group * outputs + output];
        sums.fill(0.0);
        // SAFETY: the caller's promise; the channels lie in the operands, and their filters in the gradient.
        unsafe {
            self.add_pixels(first, rows, sums);
            let taps = operands.conv.window().taps();
            let window = operands.dweight.at((first[1] * inputs + input) * taps, 0);
            V::compiled(|| self.finish(rows, sums, window));
        }
    }

    /// Adds the products of all pixels to `sums [taps, width, ROWS, COLUMNS]`. `first` are the first channels of the input
    /// and of the output.
    ///
    /// # Safety
    /// As [`Tasks::run`], and the channels must exist.
    unsafe fn add_pixels(&self, first: [usize; 2], rows: usize, sums: &mut [f32]) {
        let Operands { conv, dy, x, .. } = self.operands;
        let Window2d { kernel, stride, dilation, padding } = conv.window();
        let ([height, width], [out_height, out_width]) = (conv.input(), conv.output());
        let pixel = [conv.in_channels(), conv.out_channels()];
        let all_rows = conv.batch() * out_height;
        let rows_of_block = (BLOCK_PIXELS / out_width.max(1)).clamp(1, BLOCK_ROWS);
        let mut runs = [[0; 2]; BLOCK_ROWS];
        for block in (0..all_rows).step_by(rows_of_block) {
            for tap_row in 0..kernel[0] {
                let mut count = 0;
                for row in block..all_rows.min(block + rows_of_block) {
                    let (image, row_of_image) = (row / out_height, row % out_height);
                    let seen = (row_of_image * stride[0] + tap_row * dilation[0]).wrapping_sub(padding[0]);
                    if seen < height {
                        let start = (image * height + seen) * width * pixel[0];
                        runs[count] = [start + first[0], row * out_width * pixel[1] + first[1]];
                        count += 1;
                    }
                }
                for tap_column in 0..kernel[1] {
                    let columns = columns_that_see(conv, tap_column);
                    if columns.is_empty() {
                        continue;
                    }
                    let seen = columns.start * stride[1] + tap_column * dilation[1] - padding[1];
                    let tap = tap_row * kernel[1] + tap_column;
                    let tiles = &mut sums[tap * self.width * Self::TILE..][..self.width * Self::TILE];
                    for (index, tile) in tiles.chunks_exact_mut(Self::TILE).enumerate() {
                        let pixels = Pixels {
                            x: x[seen * pixel[0]..].as_ptr(),
                            dy: dy[columns.start * pixel[1] + index * Self::COLUMNS..].as_ptr(),
                            steps: [stride[1] * pixel[0], pixel[1]],
                            runs: &runs[..count],
                            len: columns.len(),
                        };
                        // SAFETY: the caller's promise; the runs lie in the images.
                        unsafe { self.add_tile(pixels, rows, tile) };
                    }
                }
            }
        }
    }

    /// Adds the products of `pixels` to the first `rows` rows of a tile.
    ///
    /// # Safety
    /// As [`Tasks::run`], and the runs must lie in the operands.
    unsafe fn add_tile(&self, pixels: Pixels<'_>, rows: usize, tile: &mut [f32]) {
        assert_eq!(tile.len(), Self::TILE);
        // SAFETY: the caller's promise; the tile holds `ROWS` rows, of which the thin ones are a part.
        unsafe {
            V::compiled(|| {
                if rows == ROWS {
                    return outer_products::<V, ROWS, VECTORS>(pixels, tile.as_mut_ptr());
                }
                for row in (0..rows).step_by(THIN) {
                    let pixels = Pixels { x: pixels.x.wrapping_add(row), ..pixels };
                    outer_products::<V, THIN, VECTORS>(pixels, tile.as_mut_ptr().add(row * Self::COLUMNS));
                }
            });
        }
    }

    /// Adds the sums to the gradient. `window` starts at the first of the task's filters.
    ///
    /// # Safety
    /// As [`Tasks::run`].
    #[inline(always)]
    unsafe fn finish(&self, rows: usize, sums: &[f32], window: Window<f32>) {
        let taps = self.operands.conv.window().taps();
        let lanes = SIDE.min(Self::COLUMNS);
        for column in (0..self.width * Self::COLUMNS).step_by(lanes) {
            let (panel, lane) = (column / Self::COLUMNS, column % Self::COLUMNS);
            let (mut channel, mut tap) = (0, 0);
            for start in (0..rows * taps).step_by(SIDE) {
                let len = SIDE.min(rows * taps - start);
                let mut block: Block = [[0; SIDE]; SIDE];
                for line in &mut block[..len] {
                    let tile = &sums[(tap * self.width + panel) * Self::TILE..][..Self::TILE];
                    let values = &tile[channel * Self::COLUMNS + lane..][..lanes];
                    line[..lanes].copy_from_slice(bytemuck::cast_slice(values));
                    tap += 1;
                    if tap == taps {
                        (channel, tap) = (channel + 1, 0);
                    }
                }
                // SAFETY: the caller's promise; the filters lie in the gradient, and belong to this task.
                unsafe {
                    V::transpose(&mut block);
                    for (index, values) in block[..lanes].iter().enumerate() {
                        let filter = (column + index) * self.channels[0] * taps;
                        let gradient = window.at(filter + start, 0).row(0, len);
                        for (sum, value) in gradient.iter_mut().zip(values) {
                            *sum += f32::from_bits(*value);
                        }
                    }
                }
            }
        }
    }
}

/// Returns the columns of the output that see a pixel of the input through a tap.
fn columns_that_see(conv: Conv2d, tap: usize) -> Range<usize> {
    let Window2d { stride, dilation, padding, .. } = conv.window();
    let (width, offset) = (conv.input()[1] + padding[1], tap * dilation[1]);
    let first = padding[1].saturating_sub(offset).div_ceil(stride[1]);
    let end = width.saturating_sub(offset).div_ceil(stride[1]).min(conv.output()[1]);
    first.min(end)..end
}

/// Pixels whose channels are multiplied: runs of `len` pixels of the input and of the output's gradient.
#[derive(Clone, Copy)]
pub(super) struct Pixels<'a> {
    pub(super) x: *const f32,
    pub(super) dy: *const f32,
    /// Elements between neighbouring pixels of the two operands.
    pub(super) steps: [usize; 2],
    /// Offsets of the first pixels in the two operands.
    pub(super) runs: &'a [[usize; 2]],
    pub(super) len: usize,
}

/// Adds the outer products of `ROWS` channels of the input and `VECTORS` vectors of channels of the output's gradient.
///
/// # Safety
/// The CPU must have the instructions of `V`, the pixels must lie in the operands, and `sums` must have room for
/// `ROWS · VECTORS` vectors.
#[inline(always)]
pub(super) unsafe fn outer_products<V: Lanes, const ROWS: usize, const VECTORS: usize>(
    pixels: Pixels<'_>,
    sums: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut totals = [[V::zero(); VECTORS]; ROWS];
        for [x, dy] in pixels.runs {
            let (mut x, mut dy) = (pixels.x.add(*x), pixels.dy.add(*dy));
            for _ in 0..pixels.len {
                let columns: [V; VECTORS] = std::array::from_fn(|j| V::load(dy.add(j * V::COUNT).cast()));
                for (i, row) in totals.iter_mut().enumerate() {
                    let x = V::splat((*x.add(i)).to_bits());
                    for (total, y) in row.iter_mut().zip(columns) {
                        *total = V::multiply_add(x, y, *total);
                    }
                }
                (x, dy) = (x.wrapping_add(pixels.steps[0]), dy.wrapping_add(pixels.steps[1]));
            }
        }
        let one = V::splat(1.0_f32.to_bits());
        for (index, total) in totals.as_flattened().iter().enumerate() {
            let sums = sums.add(index * V::COUNT);
            V::multiply_add(one, *total, V::load(sums.cast())).store(sums);
        }
    }
}
