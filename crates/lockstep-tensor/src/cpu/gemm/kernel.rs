//! The micro-kernels: a tile of C in registers, to which one column of A times one row of B is added at a time.

use std::{hint, marker::PhantomData};

use super::{
    lanes::{self, Lanes},
    operand::Order,
    scratch::MAX_DEPTH,
    store::Tile,
    units::PanelShape,
};
use crate::{
    Write,
    cpu::simd::{CACHE_LINE_BYTES, inlined, prefetch, prefetch_to_l1},
};

/// The product of two packed panels on one CPU level.
///
/// A panel of A holds `ROWS` contiguous units for each unit of depth if `A_ORDER` is [`Order::AcrossDepth`]; otherwise,
/// for each `DEPTH` units of depth, `ROWS` rows of `DEPTH` units. A panel of B holds columns in the same way, by `B_ORDER`.
pub(in crate::cpu) trait MicroKernel {
    /// The vectors of the kernel, which packing uses too.
    type Vector: Lanes;
    /// Rows of the tile.
    const ROWS: usize;
    /// Columns of the tile.
    const COLUMNS: usize;
    /// Smallest number of rows of a task, if there are that many. A panel of B is fetched from the L3 cache once for
    /// all of them, and the fetch must not take longer than their products.
    const TASK_ROWS: usize;
    /// The depth of a packed panel is a multiple of this many units.
    const DEPTH: usize;
    /// Order of the units of A in a panel.
    const A_ORDER: Order;
    /// Order of the units of B in a panel.
    const B_ORDER: Order = Order::AcrossDepth;
    /// Number of units of a later panel of B that the kernel fetches for each unit of depth. A panel that other tasks packed or used lies
    /// in the L3 cache, and all tiles of a task fetch it together.
    const FETCHED_UNITS: usize = 0;
    /// True if the kernel can read rows of A where they lie: [`Rows::Lines`].
    const READS_LINES: bool = Self::IS_IN_PLACE;
    /// True if the kernel can write tiles of C where they belong: [`MicroKernel::finished_tile`].
    const FINISHES_TILES: bool = Self::IS_IN_PLACE;
    /// True if the kernel can do both, adds what is in C after all products, as other code does, and can read segments of lines:
    /// [`MicroKernel::tile_of_lines`].
    const IS_IN_PLACE: bool = false;

    /// Runs `work` with the thread in the state that [`MicroKernel::tile`] needs.
    ///
    /// # Safety
    /// The CPU must have the kernel's instructions.
    unsafe fn prepared<R>(work: impl FnOnce() -> R) -> R {
        work()
    }

    /// Writes the product of rows of A and a panel of B, `ROWS × COLUMNS` with contiguous rows, to `tile`.
    ///
    /// # Safety
    /// The CPU must have the kernel's instructions, the thread must be prepared, and both operands must hold
    /// `depth` units, a multiple of `DEPTH`.
    unsafe fn tile(depth: usize, a: Rows, b: Columns, tile: &mut Tile);

    /// Writes the product of lines of A, which are read where they lie, and a panel of B as [`MicroKernel::tile`] does.
    ///
    /// # Safety
    /// As [`MicroKernel::tile`]. The lines must lie in `elements`, and the panel of B must be as long as they are.
    unsafe fn tile_of_lines(elements: *const u32, lines: &[u64], b: *const u32, tile: &mut Tile) {
        let _ = (elements, lines, b, tile);
        unreachable!("the kernel reads no lines");
    }

    /// Writes the product of rows of A and a panel of B, finished, to its place in C.
    ///
    /// # Safety
    /// As [`MicroKernel::tile`]. Nothing else may use the place in C, which has no bias if the kernel is not in place.
    unsafe fn finished_tile(depth: usize, a: Rows, b: Columns, place: &Place) {
        let _ = (depth, a, b, place);
        unreachable!("the kernel writes no finished tiles");
    }
}

/// The columns of B of a tile: a packed panel, and what is fetched into the L2 cache meanwhile.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Columns {
    pub(super) units: *const u32,
    /// The part of a later panel that is fetched: [`MicroKernel::FETCHED_UNITS`] for each unit of depth.
    pub(super) later: *const u32,
}

impl Columns {
    /// Returns the columns of a panel whose next ones lie in a near cache: nothing else is fetched.
    pub(in crate::cpu) fn cached(units: *const u32) -> Self {
        Self { units, later: units }
    }
}

/// The rows of A of a tile.
#[derive(Clone, Copy)]
pub(in crate::cpu) enum Rows {
    /// A packed panel, in the kernel's order.
    Packed(*const u32),
    /// Lines of units along the depth, read where they lie: the first one, and the bytes from one to the next.
    Lines(*const u32, usize),
}

impl Rows {
    /// Returns the packed panel, for a kernel that reads no lines.
    #[inline(always)]
    pub(super) fn panel(self) -> *const u32 {
        match self {
            Self::Packed(panel) => panel,
            Self::Lines(..) => unreachable!("the kernel reads no lines"),
        }
    }
}

/// The place of a tile in an f32 matrix, and the terms that are added to its sums: first the bias, then what is there.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Place {
    pub(super) first: *mut f32,
    /// Elements from one row to the next.
    pub(super) stride: usize,
    /// The bias of the tile's columns.
    pub(super) bias: Option<*const f32>,
    pub(super) write: Write,
}

impl Place {
    /// Returns a place whose rows are `stride` elements apart, without a bias.
    pub(in crate::cpu) fn new(first: *mut f32, stride: usize, write: Write) -> Self {
        Self { first, stride, bias: None, write }
    }

    /// Returns the rows of a buffer, which are `columns` wide, as a place to overwrite.
    pub(in crate::cpu) fn whole(tile: &mut Tile, columns: usize) -> Self {
        Self::new(tile.as_mut_ptr(), columns, Write::Overwrite)
    }
}

/// The offset of a line of zeros.
pub(super) const ZERO_LINE: u64 = u64::MAX;
/// The line of zeros, as long as the longest segment.
pub(super) static ZEROS: [u32; MAX_DEPTH] = [0; MAX_DEPTH];

/// Computes the product of lines and a panel as a sum of outer products. For each segment of the depth, `lines` holds
/// the offset of each row's elements, then the number of elements of the segment.
///
/// # Safety
/// As [`MicroKernel::tile_of_lines`].
#[inline(always)]
pub(super) unsafe fn outer_products_of_lines<V: Lanes, const ROWS: usize, const VECTORS: usize>(
    elements: *const u32,
    lines: &[u64],
    mut b: *const u32,
    tile: &mut Tile,
) {
    const { assert!(ROWS * VECTORS * V::COUNT <= Tile::ELEMENTS) };
    // SAFETY: the lines and the panel hold the elements of all segments, and the tile is large enough, as just checked;
    // the caller promises the instructions.
    unsafe {
        let mut sums = [[V::zero(); VECTORS]; ROWS];
        for segment in lines.chunks_exact(ROWS + 1) {
            let rows: [*const u32; ROWS] = std::array::from_fn(|i| match segment[i] {
                ZERO_LINE => ZEROS.as_ptr(),
                offset => elements.add(offset as usize),
            });
            for index in 0..segment[ROWS] as usize {
                let columns: [V; VECTORS] = load_step(b);
                add_products(&mut sums, columns, |i| *rows[i].add(index));
                b = b.add(VECTORS * V::COUNT);
            }
        }
        finish(sums, &Place::whole(tile, VECTORS * V::COUNT));
    }
}

/// Fetches the rows of a place, `columns` wide, into the cache: they are read or written when the sums are complete.
#[inline(always)]
pub(super) fn fetch<const ROWS: usize>(place: &Place, columns: usize) {
    for row in 0..ROWS {
        for column in (0..columns).step_by(CACHE_LINE_BYTES / size_of::<f32>()) {
            prefetch(place.first.wrapping_add(row * place.stride + column));
        }
    }
}

/// Units of a cache line.
const LINE_UNITS: usize = CACHE_LINE_BYTES / size_of::<u32>();
/// Distance, in steps of depth, at which a panel of B is fetched into the L1 cache. A panel lies in the L2 cache, whose latency is hidden
/// badly on a core whose other hardware thread is busy.
const STEPS_AHEAD: usize = 8;

/// Loads a step of a panel of B, and fetches a later one.
///
/// # Safety
/// The CPU must have the instructions of `V`, and the step must lie in the panel.
#[inline(always)]
unsafe fn load_step<V: Lanes, const VECTORS: usize>(b: *const u32) -> [V; VECTORS] {
    let step = VECTORS * V::COUNT;
    for unit in (0..step).step_by(LINE_UNITS) {
        prefetch_to_l1(b.wrapping_add(STEPS_AHEAD * step + unit));
    }
    // SAFETY: the caller's promise.
    std::array::from_fn(|j| unsafe { V::load(b.add(j * V::COUNT)) })
}

/// Steps of depth that the loops of a product unroll. Counting and addresses take every tenth of the instructions otherwise.
const STEPS_AT_ONCE: usize = 4;

/// Returns the cache lines of a later panel of B, so many vectors wide, that those steps fetch: all tiles of a task together fetch the
/// panel.
const fn later_lines(vectors: usize) -> usize {
    vectors.div_ceil(2)
}

/// Adds the products of a column of A, whose unit in a row is `x`, and a step of B to the sums.
///
/// # Safety
/// The CPU must have the instructions of `V`.
#[inline(always)]
unsafe fn add_products<V: Lanes, const ROWS: usize, const VECTORS: usize>(
    sums: &mut [[V; VECTORS]; ROWS],
    columns: [V; VECTORS],
    x: impl Fn(usize) -> u32,
) {
    for (i, row) in sums.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            let x = V::splat(x(i));
            for (sum, y) in row.iter_mut().zip(columns) {
                *sum = V::multiply_add(x, y, *sum);
            }
        }
    }
}

/// Adds the terms of a place to the sums and writes them there.
///
/// # Safety
/// The CPU must have the instructions of `V`, and the place must have room for the sums.
#[inline(always)]
pub(super) unsafe fn finish<V: Lanes, const ROWS: usize, const VECTORS: usize>(
    mut sums: [[V; VECTORS]; ROWS],
    place: &Place,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if let Some(bias) = place.bias {
            let bias: [V; VECTORS] = std::array::from_fn(|j| V::load(bias.add(j * V::COUNT).cast()));
            for row in &mut sums {
                for (sum, bias) in row.iter_mut().zip(bias) {
                    *sum = sum.add(bias);
                }
            }
        }
        for (i, row) in sums.into_iter().enumerate() {
            for (j, mut sum) in row.into_iter().enumerate() {
                let out = place.first.add(i * place.stride + j * V::COUNT);
                if place.write == Write::Accumulate {
                    sum = sum.add(V::load(out.cast_const().cast()));
                }
                sum.store(out);
            }
        }
    }
}

/// The panels of A of a micro-kernel.
pub(in crate::cpu) struct RowPanels<K>(PhantomData<K>);

impl<K: MicroKernel> PanelShape for RowPanels<K> {
    const WIDTH: usize = K::ROWS;
    const ORDER: Order = K::A_ORDER;
    const DEPTH: usize = K::DEPTH;
}

/// The panels of B of a micro-kernel.
pub(in crate::cpu) struct ColumnPanels<K>(PhantomData<K>);

impl<K: MicroKernel> PanelShape for ColumnPanels<K> {
    const WIDTH: usize = K::COLUMNS;
    const ORDER: Order = K::B_ORDER;
    const DEPTH: usize = K::DEPTH;
}

/// The rows of A of a tile, of which each step of depth takes a unit.
trait RowUnits {
    /// Returns the unit of row `row`, `step` steps from here.
    ///
    /// # Safety
    /// The rows must hold the unit.
    unsafe fn unit(&self, step: usize, row: usize) -> u32;

    /// Goes on by some steps.
    fn advance(&mut self, steps: usize);
}

/// Rows of a packed panel, side by side.
struct PanelUnits<const ROWS: usize>(*const u32);

impl<const ROWS: usize> RowUnits for PanelUnits<ROWS> {
    #[inline(always)]
    unsafe fn unit(&self, step: usize, row: usize) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { *self.0.add(step * ROWS + row) }
    }

    #[inline(always)]
    fn advance(&mut self, steps: usize) {
        self.0 = self.0.wrapping_add(steps * ROWS);
    }
}

/// Rows of A that share a register for their address: the others are one and two strides further.
const ROWS_OF_ADDRESS: usize = 3;

/// Rows that are read where they lie, `stride` bytes apart.
struct LineUnits<const ROWS: usize> {
    /// Every third row; only the first ones are used.
    lines: [*const u32; ROWS],
    stride: usize,
}

impl<const ROWS: usize> LineUnits<ROWS> {
    #[inline(always)]
    fn new(first: *const u32, stride: usize) -> Self {
        let mut lines = [first; ROWS];
        for (i, line) in lines.iter_mut().take(ROWS.div_ceil(ROWS_OF_ADDRESS)).enumerate() {
            // Opaque, or the compiler adds up all addresses anew in each step.
            *line = hint::black_box(first.wrapping_byte_add(i * ROWS_OF_ADDRESS * stride));
        }
        Self { lines, stride }
    }
}

impl<const ROWS: usize> RowUnits for LineUnits<ROWS> {
    #[inline(always)]
    unsafe fn unit(&self, step: usize, row: usize) -> u32 {
        let line = self.lines[row / ROWS_OF_ADDRESS].wrapping_byte_add(row % ROWS_OF_ADDRESS * self.stride);
        // SAFETY: the caller's promise.
        unsafe { line.wrapping_add(step).read_unaligned() }
    }

    #[inline(always)]
    fn advance(&mut self, steps: usize) {
        for line in &mut self.lines[..ROWS.div_ceil(ROWS_OF_ADDRESS)] {
            *line = line.wrapping_add(steps);
        }
    }
}

/// Computes the product as a sum of outer products, `VECTORS` vectors wide.
///
/// # Safety
/// As [`MicroKernel::finished_tile`]. The rows must hold `depth` units.
#[inline(always)]
unsafe fn outer_products<V: Lanes, const ROWS: usize, const VECTORS: usize>(
    depth: usize,
    mut a: impl RowUnits,
    Columns { units: mut b, mut later }: Columns,
    place: &Place,
) {
    fetch::<ROWS>(place, VECTORS * V::COUNT);
    // SAFETY: the rows hold `depth` units, and the panel as many steps of `VECTORS · COUNT` units; the caller promises the instructions
    // and room for the sums.
    unsafe {
        let mut sums = [[V::zero(); VECTORS]; ROWS];
        let mut add_steps = inlined!(|steps: usize| {
            for step in 0..steps {
                let columns: [V; VECTORS] = load_step(b.add(step * VECTORS * V::COUNT));
                add_products(&mut sums, columns, |row| a.unit(step, row));
            }
            a.advance(steps);
            b = b.add(steps * VECTORS * V::COUNT);
        });
        for _ in 0..depth / STEPS_AT_ONCE {
            add_steps(STEPS_AT_ONCE);
            for line in 0..later_lines(VECTORS) {
                prefetch(later.wrapping_add(line * LINE_UNITS));
            }
            later = later.wrapping_add(later_lines(VECTORS) * LINE_UNITS);
        }
        for _ in 0..depth % STEPS_AT_ONCE {
            add_steps(1);
        }
        finish(sums, place);
    }
}

/// Computes the product of lines of A, `stride` bytes apart and read where they lie, and a panel of B.
///
/// # Safety
/// As [`MicroKernel::finished_tile`].
#[inline(always)]
pub(super) unsafe fn outer_products_in_place<V: Lanes, const ROWS: usize, const VECTORS: usize>(
    depth: usize,
    (first, stride): (*const u32, usize),
    b: Columns,
    place: &Place,
) {
    // SAFETY: the caller's promise.
    unsafe { outer_products::<V, ROWS, VECTORS>(depth, LineUnits::<ROWS>::new(first, stride), b, place) };
}

/// Declares a micro-kernel of outer products.
macro_rules! outer_product_kernel {
    ($(#[$doc:meta])* $name:ident: $vector:ident, $rows:literal x $vectors:literal, tasks of $task_rows:literal rows) => {
        $(#[$doc])*
        pub(in crate::cpu) struct $name;

        impl MicroKernel for $name {
            type Vector = lanes::$vector;
            const ROWS: usize = $rows;
            const COLUMNS: usize = $vectors * Self::Vector::COUNT;
            const TASK_ROWS: usize = $task_rows;
            const DEPTH: usize = 1;
            const A_ORDER: Order = Order::AcrossDepth;
            const FETCHED_UNITS: usize = later_lines($vectors) * LINE_UNITS / STEPS_AT_ONCE;
            const IS_IN_PLACE: bool = true;

            unsafe fn tile_of_lines(elements: *const u32, lines: &[u64], b: *const u32, tile: &mut Tile) {
                // SAFETY: the caller's promise.
                unsafe {
                    Self::Vector::compiled(|| {
                        outer_products_of_lines::<Self::Vector, $rows, $vectors>(elements, lines, b, tile);
                    });
                }
            }

            unsafe fn tile(depth: usize, a: Rows, b: Columns, tile: &mut Tile) {
                const { assert!($rows * Self::COLUMNS <= Tile::ELEMENTS) };
                // SAFETY: the caller's promise; the tile has room for the sums, as just checked.
                unsafe { Self::finished_tile(depth, a, b, &Place::whole(tile, Self::COLUMNS)) };
            }

            unsafe fn finished_tile(depth: usize, a: Rows, b: Columns, place: &Place) {
                // SAFETY: the caller's promise.
                unsafe {
                    Self::Vector::compiled(|| match a {
                        Rows::Packed(a) => {
                            let a = PanelUnits::<$rows>(a);
                            outer_products::<Self::Vector, $rows, $vectors>(depth, a, b, place);
                        }
                        Rows::Lines(first, stride) => {
                            let lines = (first, stride);
                            outer_products_in_place::<Self::Vector, $rows, $vectors>(depth, lines, b, place);
                        }
                    });
                }
            }
        }
    };
}

outer_product_kernel!(
    /// f32 in portable code.
    Portable: Plain, 4 x 1, tasks of 8 rows
);

#[cfg(target_arch = "x86_64")]
outer_product_kernel!(
    /// f32 by AVX2 and FMA: 12 of 16 registers hold sums.
    Avx2: F32x8, 6 x 2, tasks of 12 rows
);

#[cfg(target_arch = "x86_64")]
outer_product_kernel!(
    /// f32 by AVX-512: 24 of 32 registers hold sums.
    Avx512: F32x16, 12 x 2, tasks of 24 rows
);

#[cfg(target_arch = "x86_64")]
outer_product_kernel!(
    /// As [`Avx512`], in tiles with more columns than rows: a step of depth loads 11 values in place of 14, which counts where two
    /// hardware threads share a core's load ports. Columns that 48 does not divide waste more.
    Avx512Wide: F32x16, 8 x 3, tasks of 24 rows
);

#[cfg(target_arch = "x86_64")]
outer_product_kernel!(
    /// bf16 by the pairwise dot products of AVX512-BF16.
    Avx512Dot: Bf16Pairs, 12 x 2, tasks of 24 rows
);

#[cfg(target_arch = "x86_64")]
outer_product_kernel!(
    /// As [`Avx512Dot`], for products of the 64 rows of a block of attention, which 12 do not divide.
    Avx512DotBlock: Bf16Pairs, 8 x 2, tasks of 16 rows
);

#[cfg(target_arch = "x86_64")]
outer_product_kernel!(
    /// As [`Avx512DotBlock`], for up to two rows: those of a token that attends to a cache.
    Avx512DotTwo: Bf16Pairs, 2 x 2, tasks of 4 rows
);

#[cfg(target_arch = "x86_64")]
outer_product_kernel!(
    /// As [`Avx512DotTwo`], for up to four rows.
    Avx512DotFour: Bf16Pairs, 4 x 2, tasks of 8 rows
);
