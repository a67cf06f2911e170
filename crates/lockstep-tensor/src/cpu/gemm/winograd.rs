//! Convolution of 3 × 3 kernels by Winograd's algorithm F(2 × 2, 3 × 3) (Lavin and Gray, "Fast Algorithms for
//! Convolutional Neural Networks", 2016, section 4.1), in f32. It needs 16 multiplications where the definition has 36,
//! and its factors are 1, 1/2 and 1/4, so rounding errors are those of the definition.
//!
//! For each of the 16 positions of a transformed tile, the output is a product `[tiles, in] · [in, out]`. All threads
//! transform the filters first. A task then owns some tiles of 2 × 2 output pixels: it transforms their 4 × 4 input
//! pixels, and for each panel of output channels computes the 16 products and transforms them back.
//!
//! The gradient of the input is the same convolution of the output's gradient, with turned filters.

use std::{marker::PhantomData, ops::Range};

use super::{
    dispatch::with_f32_tiles,
    kernel::ZEROS,
    lanes::Lanes,
    scratch::{COLUMNS_UNITS, MAX_DEPTH, TASK_UNITS},
    store::Window,
    transpose::{Block, SIDE},
};
use crate::{Conv2d, CpuQueue, Window2d, Write, cpu::simd::inlined};

/// Side of a tile of the output.
const OUT: usize = 2;
/// Side of a tile of the input.
const IN: usize = 4;
/// Elements of a transformed tile.
const POSITIONS: usize = IN * IN;
/// Taps of a filter.
const TAPS: usize = 9;
/// Elements between neighbouring lines of transformed pixels beyond their channels, so that lines of many channels do not
/// share the sets of the cache.
const GAP: usize = 16;
/// Channels whose filters a thread transforms at a time.
const FILTER_CHANNELS: usize = 16;

/// The operands of a convolution of 3 × 3 filters with stride 1.
#[derive(Clone, Copy)]
pub(super) struct Operands<'a> {
    batch: usize,
    /// Rows and columns of the images that are read and written.
    sizes: [[usize; 2]; 2],
    /// Channels that are read and written.
    channels: [usize; 2],
    padding: [usize; 2],
    x: &'a [f32],
    weight: &'a [f32],
    /// Elements of the weight between neighbouring channels that are read and written.
    weight_strides: [usize; 2],
    /// True if the taps are in reverse order.
    is_turned: bool,
    bias: Option<&'a [f32]>,
    /// Pixels of the output.
    y: Window<f32>,
    write: Write,
}

impl<'a> Operands<'a> {
    /// Returns the operands of the output, unless the algorithm does not apply.
    pub(super) fn forward(
        conv: Conv2d,
        x: &'a [f32],
        weight: &'a [f32],
        bias: Option<&'a [f32]>,
        y: &'a mut [f32],
    ) -> Option<Self> {
        applies(conv).then(|| Self {
            batch: conv.batch(),
            sizes: [conv.input(), conv.output()],
            channels: [conv.in_channels(), conv.out_channels()],
            padding: conv.window().padding,
            x,
            weight,
            weight_strides: [TAPS, TAPS * conv.in_channels()],
            is_turned: false,
            bias,
            y: Window::new(y.as_mut_ptr(), conv.out_channels()),
            write: Write::Overwrite,
        })
    }

    /// Returns the operands of the input's gradient, unless the algorithm does not apply.
    pub(super) fn backward_input(
        conv: Conv2d,
        dy: &'a [f32],
        weight: &'a [f32],
        dx: &'a mut [f32],
        write: Write,
    ) -> Option<Self> {
        applies(conv).then(|| Self {
            batch: conv.batch(),
            sizes: [conv.output(), conv.input()],
            channels: [conv.out_channels(), conv.in_channels()],
            padding: conv.window().padding.map(|padding| 2 - padding),
            x: dy,
            weight,
            weight_strides: [TAPS * conv.in_channels(), TAPS],
            is_turned: true,
            bias: None,
            y: Window::new(dx.as_mut_ptr(), conv.in_channels()),
            write,
        })
    }
}

/// Returns true if the convolution has 3 × 3 filters with stride 1 over all channels.
fn applies(conv: Conv2d) -> bool {
    let Window2d { kernel, stride, padding, dilation } = conv.window();
    conv.groups() == 1
        && kernel == [3; 2]
        && stride == [1; 2]
        && dilation == [1; 2]
        && padding.iter().all(|p| *p <= 2)
}

/// Computes the convolution. Returns false if the channels do not fill the tiles or do not fit the scratch memory, or the
/// queue multiplies f32 by other kernels.
///
/// # Safety
/// The operands must have the sizes of the convolution, and nothing else may use the output meanwhile.
pub(super) unsafe fn convolve(queue: &CpuQueue, operands: Operands<'_>) -> bool {
    // SAFETY: the caller's promise; the queue's level has the instructions of the vectors.
    unsafe {
        with_f32_tiles!(queue, |V, ROWS, _THIN, VECTORS| Winograd::<V, ROWS, VECTORS>::run(queue, operands))
    }
}

/// The algorithm with products of `ROWS` tiles by `VECTORS` vectors of output channels.
struct Winograd<'a, V, const ROWS: usize, const VECTORS: usize> {
    operands: Operands<'a>,
    /// Rows and columns of tiles of an image.
    tiles: [usize; 2],
    vector: PhantomData<fn(V)>,
}

impl<'a, V: Lanes, const ROWS: usize, const VECTORS: usize> Winograd<'a, V, ROWS, VECTORS> {
    /// Output channels of a panel.
    const COLUMNS: usize = VECTORS * V::COUNT;

    /// Computes the convolution, as [`convolve`].
    ///
    /// # Safety
    /// As [`convolve`], and the CPU must have the instructions of `V`.
    unsafe fn run(queue: &CpuQueue, operands: Operands<'a>) -> bool {
        let [inputs, outputs] = operands.channels;
        let tiles = operands.sizes[1].map(|size| size.div_ceil(OUT));
        let all_tiles = operands.batch * tiles[0] * tiles[1];
        // Transformed pixels and the 16 products of a panel.
        let tile_units = POSITIONS * (inputs + GAP + Self::COLUMNS);
        let tiles_of_task = TASK_UNITS / tile_units / ROWS * ROWS;
        // The transformed filters of one panel, and the number of panels that fit the scratch memory.
        let panel_units = POSITIONS * inputs * Self::COLUMNS;
        let panels_of_chunk = COLUMNS_UNITS / panel_units.max(1);
        let fills_vectors = inputs.is_multiple_of(V::COUNT) && outputs.is_multiple_of(Self::COLUMNS);
        if !fills_vectors || inputs > MAX_DEPTH || panels_of_chunk == 0 || tiles_of_task == 0 {
            return false;
        }
        let own = Winograd::<V, ROWS, VECTORS> { operands, tiles, vector: PhantomData };
        let mut filters = queue.scratch.columns();
        let all_panels = outputs / Self::COLUMNS;
        for first_panel in (0..all_panels).step_by(panels_of_chunk) {
            let panels = first_panel..all_panels.min(first_panel + panels_of_chunk);
            let filters = &mut filters.elements_mut::<f32>()[..panels.len() * panel_units];
            let window = Window::new(filters.as_mut_ptr(), panel_units);
            let parts = inputs.div_ceil(FILTER_CHANNELS);
            queue.pool.run(panels.len() * parts, |task| {
                let (panel, channel) = (task / parts, task % parts * FILTER_CHANNELS);
                // SAFETY: the caller's promise; the panel lies in the filters, and each task writes its own channels.
                unsafe {
                    let window = window.at(panel, 0);
                    V::compiled(inlined!(|| own.transform_filters(first_panel + panel, channel, window)));
                }
            });
            queue.pool.run(all_tiles.div_ceil(tiles_of_task), |task| {
                let mut scratch = queue.scratch.rows();
                let first = task * tiles_of_task;
                let range = first..all_tiles.min(first + tiles_of_task);
                // SAFETY: the caller's promise; each task writes its own tiles.
                unsafe { own.task(range, panels.clone(), filters, scratch.elements_mut()) };
            });
        }
        true
    }

    /// Transforms the filters of a panel of output channels and of some input channels to `G · g · Gᵀ`, and writes them to
    /// `filters [positions, in, COLUMNS]`.
    ///
    /// # Safety
    /// As [`Winograd::run`], and nothing else may use these filters.
    #[inline(always)]
    unsafe fn transform_filters(&self, panel: usize, first: usize, filters: Window<f32>) {
        let Operands { channels: [inputs, _], weight, weight_strides, is_turned, .. } = self.operands;
        let lanes = SIDE.min(Self::COLUMNS);
        for channel in first..inputs.min(first + FILTER_CHANNELS) {
            for lane in (0..Self::COLUMNS).step_by(lanes) {
                let start = channel * weight_strides[0] + (panel * Self::COLUMNS + lane) * weight_strides[1];
                let mut block: Block = [[0; SIDE]; SIDE];
                for (index, row) in block[..lanes].iter_mut().enumerate() {
                    let line = &weight[start + index * weight_strides[1]..];
                    // What follows the taps may be read too, and is not used.
                    match line.first_chunk::<SIDE>() {
                        Some(line) => *row = line.map(f32::to_bits),
                        None => row[..TAPS].copy_from_slice(bytemuck::cast_slice(&line[..TAPS])),
                    }
                }
                // SAFETY: the caller's promise; the panel lies in the filters.
                unsafe {
                    V::transpose(&mut block);
                    for vector in (0..lanes).step_by(V::COUNT) {
                        let mut taps = [[V::zero(); 3]; 3];
                        for (index, tap) in taps.as_flattened_mut().iter_mut().enumerate() {
                            let stored = if is_turned { TAPS - 1 - index } else { index };
                            *tap = V::load(block[stored][vector..].as_ptr());
                        }
                        for (position, value) in filter_transform(&taps).as_flattened().iter().enumerate() {
                            let at = (position * inputs + channel) * Self::COLUMNS + lane + vector;
                            value.store(filters.at(0, at).row(0, V::COUNT).as_mut_ptr());
                        }
                    }
                }
            }
        }
    }

    /// Computes some tiles of some panels of the output. `filters` starts at the first panel.
    ///
    /// # Safety
    /// As [`Winograd::run`], and nothing else may use these tiles.
    unsafe fn task(&self, tiles: Range<usize>, panels: Range<usize>, filters: &[f32], scratch: &mut [f32]) {
        let inputs = self.operands.channels[0];
        let line = inputs + GAP;
        let padded = tiles.len().next_multiple_of(ROWS);
        let (pixels, products) = scratch.split_at_mut(POSITIONS * padded * line);
        let products = &mut products[..POSITIONS * padded * Self::COLUMNS];
        // SAFETY: the caller's promise; the panels hold what is read of them.
        unsafe {
            V::compiled(inlined!(|| self.transform_pixels(tiles.clone(), padded, pixels)));
            for (index, panel) in panels.enumerate() {
                for position in 0..POSITIONS {
                    let filters = &filters[(index * POSITIONS + position) * inputs * Self::COLUMNS..];
                    let filters = &filters[..inputs * Self::COLUMNS];
                    for row in (0..padded).step_by(ROWS) {
                        let pixels = &pixels[(position * padded + row) * line..][..ROWS * line];
                        let products = &mut products[(position * padded + row) * Self::COLUMNS..];
                        V::compiled(inlined!(|| {
                            multiply::<V, ROWS, VECTORS>(
                                inputs,
                                pixels,
                                filters,
                                &mut products[..ROWS * Self::COLUMNS],
                            );
                        }));
                    }
                }
                V::compiled(inlined!(|| self.finish(tiles.clone(), padded, panel * Self::COLUMNS, products)));
            }
        }
    }

    /// Returns the image of a tile, and its first row and column of pixels of the output.
    #[inline(always)]
    fn place(&self, tile: usize) -> (usize, [usize; 2]) {
        let (row, column) = (tile / self.tiles[1], tile % self.tiles[1]);
        (row / self.tiles[0], [row % self.tiles[0] * OUT, column * OUT])
    }

    /// Transforms the pixels that tiles see to `Bᵀ · d · B`, and writes them to `pixels [positions, padded, in + GAP]`.
    ///
    /// # Safety
    /// As [`Winograd::run`], and the tiles must exist.
    #[inline(always)]
    unsafe fn transform_pixels(&self, tiles: Range<usize>, padded: usize, pixels: &mut [f32]) {
        let Operands { channels: [inputs, _], sizes: [[height, width], _], padding, x, .. } = self.operands;
        let line = inputs + GAP;
        assert!(inputs <= ZEROS.len() && pixels.len() >= POSITIONS * padded * line);
        for (index, tile) in tiles.enumerate() {
            let (image, first) = self.place(tile);
            // SAFETY: the pixels of a tile lie in the image, or are zeros; the lines lie in `pixels`, as just checked.
            unsafe {
                let mut sources = [[ZEROS.as_ptr(); IN]; IN];
                for (position, source) in sources.as_flattened_mut().iter_mut().enumerate() {
                    let row = (first[0] + position / IN).wrapping_sub(padding[0]);
                    let column = (first[1] + position % IN).wrapping_sub(padding[1]);
                    if row < height && column < width {
                        let start = ((image * height + row) * width + column) * inputs;
                        *source = x[start..][..inputs].as_ptr().cast();
                    }
                }
                for channel in (0..inputs).step_by(V::COUNT) {
                    let mut d = [[V::zero(); IN]; IN];
                    for (pixel, source) in d.as_flattened_mut().iter_mut().zip(sources.as_flattened()) {
                        *pixel = V::load(source.add(channel));
                    }
                    for (position, value) in pixel_transform(&d).as_flattened().iter().enumerate() {
                        value.store(pixels.as_mut_ptr().add((position * padded + index) * line + channel));
                    }
                }
            }
        }
    }

    /// Transforms the products of a panel of output channels back to `Aᵀ · m · A`, and writes them to the output.
    ///
    /// # Safety
    /// As [`Winograd::task`].
    #[inline(always)]
    unsafe fn finish(&self, tiles: Range<usize>, padded: usize, column: usize, products: &[f32]) {
        let Operands { sizes: [_, [height, width]], bias, y, write, .. } = self.operands;
        assert!(products.len() >= POSITIONS * padded * Self::COLUMNS);
        for (index, tile) in tiles.enumerate() {
            let (image, first) = self.place(tile);
            for lane in (0..Self::COLUMNS).step_by(V::COUNT) {
                // SAFETY: the caller's promise; the products hold all positions of the tile.
                unsafe {
                    let mut m = [[V::zero(); IN]; IN];
                    for (position, product) in m.as_flattened_mut().iter_mut().enumerate() {
                        let at = (position * padded + index) * Self::COLUMNS + lane;
                        *product = V::load(products.as_ptr().add(at).cast());
                    }
                    let pixels = product_transform(&m);
                    for (row, pixels) in (first[0]..height).zip(pixels) {
                        for (pixel, mut value) in (first[1]..width).zip(pixels) {
                            let at = (image * height + row) * width + pixel;
                            let target = y.at(at, column + lane).row(0, V::COUNT);
                            if let Some(bias) = bias {
                                value =
                                    add(value, V::load(bias[column + lane..][..V::COUNT].as_ptr().cast()));
                            }
                            if write == Write::Accumulate {
                                value = add(value, V::load(target.as_ptr().cast()));
                            }
                            value.store(target.as_mut_ptr());
                        }
                    }
                }
            }
        }
    }
}

/// Multiplies `ROWS` lines of transformed pixels and a panel of transformed filters `[depth, VECTORS vectors]`.
///
/// # Safety
/// The CPU must have the instructions of `V`.
#[inline(always)]
unsafe fn multiply<V: Lanes, const ROWS: usize, const VECTORS: usize>(
    depth: usize,
    pixels: &[f32],
    filters: &[f32],
    products: &mut [f32],
) {
    let (line, columns) = (depth + GAP, VECTORS * V::COUNT);
    assert!(
        pixels.len() == ROWS * line && filters.len() == depth * columns && products.len() == ROWS * columns
    );
    let (pixels, mut filters) = (pixels.as_ptr(), filters.as_ptr());
    // SAFETY: the lines, the panel and the products have these sizes, as just checked; the caller promises the
    // instructions.
    unsafe {
        let mut sums = [[V::zero(); VECTORS]; ROWS];
        for index in 0..depth {
            let columns: [V; VECTORS] = std::array::from_fn(|j| V::load(filters.add(j * V::COUNT).cast()));
            for (i, row) in sums.iter_mut().enumerate() {
                let x = V::splat((*pixels.add(i * line + index)).to_bits());
                for (sum, y) in row.iter_mut().zip(columns) {
                    *sum = V::multiply_add(x, y, *sum);
                }
            }
            filters = filters.add(VECTORS * V::COUNT);
        }
        for (index, sum) in sums.as_flattened().iter().enumerate() {
            sum.store(products.as_mut_ptr().add(index * V::COUNT));
        }
    }
}

/// Returns `x + y`.
///
/// # Safety
/// The CPU must have the instructions of `V`, here and below.
#[inline(always)]
unsafe fn add<V: Lanes>(x: V, y: V) -> V {
    // SAFETY: the caller's promise.
    unsafe { V::multiply_add(V::splat(1.0_f32.to_bits()), x, y) }
}

/// Returns `x - y`.
#[inline(always)]
unsafe fn subtract<V: Lanes>(x: V, y: V) -> V {
    // SAFETY: the caller's promise.
    unsafe { V::multiply_add(V::splat((-1.0_f32).to_bits()), y, x) }
}

/// Returns `M · x` for a matrix `M` whose product with a column is `column`. The closure must be `inlined!`, here and below.
#[inline(always)]
fn by_columns<V: Copy, const FROM: usize, const TO: usize, const N: usize>(
    x: &[[V; N]; FROM],
    zero: V,
    column: impl Fn([V; FROM]) -> [V; TO],
) -> [[V; N]; TO] {
    let mut product = [[zero; N]; TO];
    for j in 0..N {
        let mut from = [zero; FROM];
        for (element, row) in from.iter_mut().zip(x) {
            *element = row[j];
        }
        for (row, element) in product.iter_mut().zip(column(from)) {
            row[j] = element;
        }
    }
    product
}

/// Returns `x · Mᵀ`, as [`by_columns`].
#[inline(always)]
fn by_rows<V: Copy, const FROM: usize, const TO: usize, const N: usize>(
    x: &[[V; FROM]; N],
    zero: V,
    column: impl Fn([V; FROM]) -> [V; TO],
) -> [[V; TO]; N] {
    let mut product = [[zero; TO]; N];
    for (to, from) in product.iter_mut().zip(x) {
        *to = column(*from);
    }
    product
}

/// Returns `G · g · Gᵀ`.
///
/// # Safety
/// The CPU must have the instructions of `V`, here and below.
#[inline(always)]
unsafe fn filter_transform<V: Lanes>(taps: &[[V; 3]; 3]) -> [[V; IN]; IN] {
    // SAFETY: the caller's promise.
    unsafe {
        let (zero, half) = (V::zero(), V::splat(0.5_f32.to_bits()));
        let transform = inlined!(|[a, b, c]: [V; 3]| {
            let ends = V::multiply_add(half, add(a, c), zero);
            let middle = V::multiply_add(half, b, zero);
            [a, add(ends, middle), subtract(ends, middle), c]
        });
        by_rows(&by_columns(taps, zero, transform), zero, transform)
    }
}

/// Returns `Bᵀ · d · B`.
#[inline(always)]
unsafe fn pixel_transform<V: Lanes>(d: &[[V; IN]; IN]) -> [[V; IN]; IN] {
    // SAFETY: the caller's promise.
    unsafe {
        let transform =
            inlined!(|[a, b, c, d]: [V; IN]| [subtract(a, c), add(b, c), subtract(c, b), subtract(b, d)]);
        by_rows(&by_columns(d, V::zero(), transform), V::zero(), transform)
    }
}

/// Returns `Aᵀ · m · A`.
#[inline(always)]
unsafe fn product_transform<V: Lanes>(m: &[[V; IN]; IN]) -> [[V; OUT]; OUT] {
    // SAFETY: the caller's promise.
    unsafe {
        let transform = inlined!(|[a, b, c, d]: [V; IN]| [add(add(a, b), c), subtract(subtract(b, c), d)]);
        by_rows(&by_columns(m, V::zero(), transform), V::zero(), transform)
    }
}
