//! Convolution of images with few channels in f32, as in the first layer of a network: forward and gradient of the weight.
//!
//! A panel of so few channels would be mostly padding. Rows of the input are copied once, with zeros for the padding, so that
//! what a pixel sees of a row, `kernel width · channels` elements, is contiguous and neighbouring pixels are a constant
//! distance apart. The micro-kernels read that copy.

use std::{marker::PhantomData, ops::Range};

use super::{
    dispatch::with_f32_tiles,
    lanes::Lanes,
    scratch::{COLUMNS_UNITS, PARTIAL_COLUMNS, PARTIAL_ROWS, TASK_UNITS},
    store::Window,
    weight_gradient::{FEWEST_CHANNELS, Operands, Pixels, outer_products},
};
use crate::{Conv2d, CpuQueue, cpu::simd::inlined};

/// Output pixels of a task, unless a row has more.
const TASK_PIXELS: usize = 512;
/// Largest number of output rows of a task.
const MOST_ROWS: usize = 64;
/// Parts of the pixels whose sums of the weight's gradient are made apart.
const PARTS: usize = 16;

/// Computes the convolution. Returns false if the shape or the queue's kernels are others.
///
/// # Safety
/// The operands must have the sizes of the convolution, and nothing else may use `y` meanwhile.
pub(super) unsafe fn forward(
    queue: &CpuQueue,
    conv: Conv2d,
    x: &[f32],
    weight: &[f32],
    bias: Option<&[f32]>,
    y: &mut [f32],
) -> bool {
    // SAFETY: the caller's promise; the queue's level has the instructions of the vectors.
    unsafe {
        with_f32_tiles!(queue, |V, ROWS, THIN, VECTORS| FewChannels::<V, ROWS, THIN, VECTORS>::forward(
            queue, conv, x, weight, bias, y
        ))
    }
}

/// Adds the gradient of the weight. Returns false if the shape or the queue's kernels are others.
///
/// # Safety
/// As [`weight_gradient::add`](super::weight_gradient::add).
pub(super) unsafe fn add_weight_gradient(queue: &CpuQueue, operands: Operands<'_>) -> bool {
    // SAFETY: as above.
    unsafe {
        with_f32_tiles!(queue, |V, ROWS, THIN, VECTORS| {
            FewChannels::<V, ROWS, THIN, VECTORS>::add_weight_gradient(queue, operands)
        })
    }
}

/// The kernels: tiles of `ROWS` pixels or elements of a patch by `VECTORS` vectors of output channels, and of `THIN` rows where
/// fewer are left.
struct FewChannels<V, const ROWS: usize, const THIN: usize, const VECTORS: usize> {
    conv: Conv2d,
    /// Output rows of a task.
    task_rows: usize,
    /// Elements of a copied row.
    line: usize,
    /// Elements that a pixel sees of a row.
    seen: usize,
    vector: PhantomData<fn(V)>,
}

impl<V: Lanes, const ROWS: usize, const THIN: usize, const VECTORS: usize>
    FewChannels<V, ROWS, THIN, VECTORS>
{
    /// Output channels of a panel.
    const COLUMNS: usize = VECTORS * V::COUNT;
    /// Elements of a tile.
    const TILE: usize = ROWS * Self::COLUMNS;

    /// Returns the kernels for a shape, unless they do not apply.
    fn new(conv: Conv2d) -> Option<Self> {
        let (window, channels) = (conv.window(), conv.in_channels());
        let [rows, columns] = conv.output();
        let (seen, step) = (window.kernel[1] * channels, window.stride[1] * channels);
        // A tile of pixels may reach beyond the last one, and a tile of a patch beyond its elements.
        let line = columns.next_multiple_of(ROWS) * step + seen.next_multiple_of(ROWS);
        let task_rows = (TASK_PIXELS / columns.max(1)).clamp(1, rows.clamp(1, MOST_ROWS));
        let own = Self { conv, task_rows, line, seen, vector: PhantomData };
        let fits = conv.groups() == 1
            && channels < FEWEST_CHANNELS
            && window.dilation[1] == 1
            && conv.out_channels().is_multiple_of(Self::COLUMNS)
            && own.copied_rows(task_rows) * line <= TASK_UNITS
            && window.kernel[0] * seen * conv.out_channels() <= COLUMNS_UNITS;
        fits.then_some(own)
    }

    /// Returns the number of input rows that some neighbouring output rows see.
    fn copied_rows(&self, rows: usize) -> usize {
        let window = self.conv.window();
        (rows.max(1) - 1) * window.stride[0] + (window.kernel[0] - 1) * window.dilation[0] + 1
    }

    /// Returns the number of tasks, and the image and the output rows of each.
    fn tasks(&self) -> (usize, impl Fn(usize) -> (usize, Range<usize>)) {
        let (rows, task_rows) = (self.conv.output()[0], self.task_rows);
        let of_image = rows.div_ceil(task_rows);
        let task = move |index: usize| {
            let first = index % of_image * task_rows;
            (index / of_image, first..rows.min(first + task_rows))
        };
        (self.conv.batch() * of_image, task)
    }

    /// Copies the input rows that some output rows see, with zeros for the padding.
    fn copy_rows(&self, x: &[f32], image: usize, rows: &Range<usize>, copy: &mut [f32]) {
        let (window, channels, [height, width]) =
            (self.conv.window(), self.conv.in_channels(), self.conv.input());
        let before = window.padding[1] * channels;
        for (index, line) in copy.chunks_exact_mut(self.line).take(self.copied_rows(rows.len())).enumerate() {
            let row = (rows.start * window.stride[0] + index).wrapping_sub(window.padding[0]);
            if row >= height || before >= self.line {
                line.fill(0.0);
                continue;
            }
            let source = &x[(image * height + row) * width * channels..][..width * channels];
            let len = source.len().min(self.line - before);
            line[..before].fill(0.0);
            line[before..before + len].copy_from_slice(&source[..len]);
            line[before + len..].fill(0.0);
        }
    }

    /// Computes the convolution, as [`forward`].
    ///
    /// # Safety
    /// As [`forward`], and the CPU must have the instructions of `V`.
    unsafe fn forward(
        queue: &CpuQueue,
        conv: Conv2d,
        x: &[f32],
        weight: &[f32],
        bias: Option<&[f32]>,
        y: &mut [f32],
    ) -> bool {
        let Some(own) = Self::new(conv) else { return false };
        let outputs = conv.out_channels();
        let mut scratch = queue.scratch.columns();
        let filters = &mut scratch.elements_mut::<f32>()[..conv.window().kernel[0] * own.seen * outputs];
        own.arrange_filters(weight, filters);
        let filters = &*filters;
        let y = Window::new(y.as_mut_ptr(), outputs);
        let (tasks, task) = own.tasks();
        queue.pool.run(tasks, |index| {
            let (image, rows) = task(index);
            let mut scratch = queue.scratch.rows();
            let copy = &mut scratch.elements_mut()[..own.copied_rows(rows.len()) * own.line];
            own.copy_rows(x, image, &rows, copy);
            // SAFETY: the caller's promise; each task writes its own pixels.
            unsafe {
                V::compiled(inlined!(|| {
                    for (index, row) in rows.enumerate() {
                        let first = (image * conv.output()[0] + row) * conv.output()[1];
                        own.row(&copy[index * conv.window().stride[0] * own.line..], filters, bias, y, first);
                    }
                }));
            }
        });
        true
    }

    /// Writes the filters as `[panels, kernel height, seen, COLUMNS]`.
    fn arrange_filters(&self, weight: &[f32], filters: &mut [f32]) {
        let ([height, width], channels) = (self.conv.window().kernel, self.conv.in_channels());
        let depth = height * self.seen;
        for (output, filter) in weight.chunks_exact(channels * height * width).enumerate() {
            let panel = output / Self::COLUMNS * depth * Self::COLUMNS + output % Self::COLUMNS;
            for (index, value) in filter.iter().enumerate() {
                let (channel, tap) = (index / (height * width), index % (height * width));
                let at = tap / width * self.seen + tap % width * channels + channel;
                filters[panel + at * Self::COLUMNS] = *value;
            }
        }
    }

    /// Computes a row of the output, whose first pixel is `first`. `copy` starts at the first copied row that it sees.
    ///
    /// # Safety
    /// As [`FewChannels::forward`], and nothing else may use these pixels.
    #[inline(always)]
    unsafe fn row(&self, copy: &[f32], filters: &[f32], bias: Option<&[f32]>, y: Window<f32>, first: usize) {
        let panel_len = self.conv.window().kernel[0] * self.seen * Self::COLUMNS;
        let width = self.conv.output()[1];
        for (panel, filters) in filters.chunks_exact(panel_len).enumerate() {
            let column = panel * Self::COLUMNS;
            let bias = bias.map(|bias| bias[column..][..Self::COLUMNS].as_ptr());
            let mut pixel = 0;
            while pixel < width {
                let left = width - pixel;
                // SAFETY: the caller's promise; the pixels exist and the copy has what they see.
                unsafe {
                    let y = y.at(first + pixel, column);
                    if left >= ROWS {
                        self.tile::<ROWS>(copy, pixel, filters, bias, y, ROWS);
                        pixel += ROWS;
                    } else {
                        self.tile::<THIN>(copy, pixel, filters, bias, y, left.min(THIN));
                        pixel += THIN;
                    }
                }
            }
        }
    }

    /// Computes `pixels` of `N` neighbouring pixels for a panel of output channels, and writes them to `y`.
    ///
    /// # Safety
    /// As [`FewChannels::row`].
    #[inline(always)]
    unsafe fn tile<const N: usize>(
        &self,
        copy: &[f32],
        first: usize,
        filters: &[f32],
        bias: Option<*const f32>,
        y: Window<f32>,
        pixels: usize,
    ) {
        let (window, channels) = (self.conv.window(), self.conv.in_channels());
        let step = window.stride[1] * channels;
        let start = first * step;
        let last_row = (window.kernel[0] - 1) * window.dilation[0] * self.line;
        assert!(last_row + start + (N - 1) * step + self.seen <= copy.len());
        assert!(filters.len() == window.kernel[0] * self.seen * Self::COLUMNS && pixels <= N);
        // SAFETY: the copy and the filters have these elements, as just checked; the caller's promise.
        unsafe {
            let mut sums = [[V::zero(); VECTORS]; N];
            let mut filters = filters.as_ptr();
            for row in 0..window.kernel[0] {
                let line = copy.as_ptr().add(row * window.dilation[0] * self.line + start);
                for element in 0..self.seen {
                    let columns: [V; VECTORS] =
                        std::array::from_fn(|j| V::load(filters.add(j * V::COUNT).cast()));
                    for (i, row) in sums.iter_mut().enumerate() {
                        let x = V::splat((*line.add(i * step + element)).to_bits());
                        for (sum, w) in row.iter_mut().zip(columns) {
                            *sum = V::multiply_add(x, w, *sum);
                        }
                    }
                    filters = filters.add(Self::COLUMNS);
                }
            }
            let one = V::splat(1.0_f32.to_bits());
            for (i, row) in sums.iter().enumerate().take(pixels) {
                let pixel = y.row(i, Self::COLUMNS).as_mut_ptr();
                for (j, sum) in row.iter().enumerate() {
                    let sum = match bias {
                        Some(bias) => V::multiply_add(one, *sum, V::load(bias.add(j * V::COUNT).cast())),
                        None => *sum,
                    };
                    sum.store(pixel.add(j * V::COUNT));
                }
            }
        }
    }

    /// Adds the gradient of the weight, as [`add_weight_gradient`].
    ///
    /// # Safety
    /// As [`add_weight_gradient`], and the CPU must have the instructions of `V`.
    unsafe fn add_weight_gradient(queue: &CpuQueue, operands: Operands<'_>) -> bool {
        let Operands { conv, dy, x, dweight } = operands;
        let Some(own) = Self::new(conv) else { return false };
        let (height, outputs) = (conv.window().kernel[0], conv.out_channels());
        let [row_tiles, panels] = [own.seen.div_ceil(ROWS), outputs / Self::COLUMNS];
        let part_len = height * row_tiles * panels * Self::TILE;
        let (tasks, task) = own.tasks();
        let parts = tasks.min(PARTS);
        // By the most parts, so that the choice does not depend on the number of images.
        if PARTS * part_len > PARTIAL_ROWS * PARTIAL_COLUMNS {
            return false;
        }
        let mut partial = queue.scratch.partial();
        let sums = &mut partial.elements_mut::<f32>()[..parts * part_len];
        let window = Window::new(sums.as_mut_ptr(), part_len);
        queue.pool.run(parts, |part| {
            // SAFETY: each part has its own sums.
            let sums = unsafe { window.row(part, part_len) };
            sums.fill(0.0);
            let mut scratch = queue.scratch.rows();
            for index in tasks * part / parts..tasks * (part + 1) / parts {
                let (image, rows) = task(index);
                let copy = &mut scratch.elements_mut()[..own.copied_rows(rows.len()) * own.line];
                own.copy_rows(x, image, &rows, copy);
                let first = (image * conv.output()[0] + rows.start) * conv.output()[1];
                // SAFETY: the caller's promise; the copy has what the rows see.
                unsafe { own.add_rows(copy, &dy[first * outputs..], rows.len(), sums) };
            }
        });
        // Few numbers: the calling thread adds the parts.
        let len = own.seen * height;
        for (output, at) in (0..outputs).flat_map(|output| (0..len).map(move |at| (output, at))) {
            let (row, element) = (at / own.seen, at % own.seen);
            let tile = (row * row_tiles + element / ROWS) * panels + output / Self::COLUMNS;
            let place = tile * Self::TILE + element % ROWS * Self::COLUMNS + output % Self::COLUMNS;
            let total: f32 = (0..parts).map(|part| sums[part * part_len + place]).sum();
            let (column, channel) = (element / conv.in_channels(), element % conv.in_channels());
            let [_, width] = conv.window().kernel;
            let filter = (output * conv.in_channels() + channel) * height * width + row * width + column;
            // SAFETY: the element lies in the gradient, which nothing else uses.
            unsafe { dweight.at(filter, 0).row(0, 1)[0] += total };
        }
        true
    }

    /// Adds the products of some output rows to `sums [kernel height, tiles of seen, panels, ROWS, COLUMNS]`. `copy` and `dy` start
    /// at the first of them.
    ///
    /// # Safety
    /// As [`FewChannels::add_weight_gradient`].
    unsafe fn add_rows(&self, copy: &[f32], dy: &[f32], rows: usize, sums: &mut [f32]) {
        let (window, outputs, width) = (self.conv.window(), self.conv.out_channels(), self.conv.output()[1]);
        let panels = outputs / Self::COLUMNS;
        let mut tiles = sums.chunks_exact_mut(Self::TILE);
        let mut runs = [[0; 2]; MOST_ROWS];
        let runs = &mut runs[..rows];
        for (row, run) in runs.iter_mut().enumerate() {
            *run = [row * window.stride[0] * self.line, row * width * outputs];
        }
        for kernel_row in 0..window.kernel[0] {
            for element in (0..self.seen).step_by(ROWS) {
                for (panel, tile) in (0..panels).zip(&mut tiles) {
                    let pixels = Pixels {
                        x: copy[kernel_row * window.dilation[0] * self.line + element..].as_ptr(),
                        dy: dy[panel * Self::COLUMNS..].as_ptr(),
                        steps: [window.stride[1] * self.conv.in_channels(), outputs],
                        runs,
                        len: width,
                    };
                    // SAFETY: the caller's promise; a line has a whole tile for each pixel.
                    unsafe {
                        V::compiled(inlined!(|| outer_products::<V, ROWS, VECTORS>(
                            pixels,
                            tile.as_mut_ptr()
                        )));
                    }
                }
            }
        }
    }
}
