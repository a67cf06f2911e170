//! The AMX micro-kernel: a 32 × 32 tile of C as four tiles of 16 × 16 sums, fed by two tiles of A and two of B (Intel
//! SDM, volume 1, chapter 18, and `TDPBF16PS` in volume 2).
//!
//! A tile of A is 16 rows of 32 bf16. A tile of B is 16 pairs of rows with 16 columns, the elements of a pair
//! interleaved. Products of int8 codes have smaller tiles, of one run of 8 rows and of 16 lines. The code is inline
//! assembly, because Rust has no stable intrinsics for the tiles.

use super::{
    kernel::{Columns, MicroKernel, Place, Rows},
    lanes::Bf16Pairs,
    operand::Order,
    pack::Packing,
    store::Tile,
    thin::{self, Panel, PanelLines, ThinKernel, ThinRows, ThinScratch},
    transpose::{SIDE, Square},
};
use crate::Write;

/// bf16 by AMX tiles.
pub(in crate::cpu) struct Tiles;

/// f32 by AMX tiles, split into three bf16 parts (see `split`).
pub(in crate::cpu) struct SplitTiles;

/// The operand of `ldtilecfg`: palette 1, eight tiles of 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Configuration {
    /// Eight full tiles.
    const FULL: Self = Self::of([[16, 64]; 8]);

    /// Returns the configuration of tiles with these rows and bytes of a row.
    const fn of(sizes: [[u8; 2]; 8]) -> Self {
        let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
        let mut tile = 0;
        while tile < sizes.len() {
            rows[tile] = sizes[tile][0];
            row_bytes[tile] = sizes[tile][1] as u16;
            tile += 1;
        }
        Self { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
    }
}

/// Computes the four products of the tiles of A in `tmm4` and `tmm5` and those of B in `tmm6` and `tmm7`, and fetches the next
/// step of the named panels into the L1 cache meanwhile. Without that, loads of tiles wait for the L2 cache half of the time.
macro_rules! products {
    ($($next:literal)*) => {
        concat!(
            "tdpbf16ps tmm0, tmm4, tmm6\n",
            $(fetch!($next, 2048 2112 2176 2240 2304 2368 2432 2496),)*
            "tdpbf16ps tmm1, tmm4, tmm7\n",
            $(fetch!($next, 2560 2624 2688 2752 2816 2880 2944 3008),)*
            "tdpbf16ps tmm2, tmm5, tmm6\n",
            $(fetch!($next, 3072 3136 3200 3264 3328 3392 3456 3520),)*
            "tdpbf16ps tmm3, tmm5, tmm7\n",
            $(fetch!($next, 3584 3648 3712 3776 3840 3904 3968 4032),)*
        )
    };
}

/// Fetches lines of a panel, whose address is in the named operand, into the L1 cache. Any address is allowed.
macro_rules! fetch {
    ($panel:literal, $($offset:literal)*) => {
        concat!($("prefetcht0 [{", $panel, "} + ", $offset, "]\n"),*)
    };
}

/// Fetches twelve lines of a later panel of B into the L2 cache: three tiles of a task fetch it all.
macro_rules! fetch_later {
    () => {
        concat!(
            "prefetcht1 [{later}]\n prefetcht1 [{later} + 64]\n prefetcht1 [{later} + 128]\n",
            "prefetcht1 [{later} + 192]\n prefetcht1 [{later} + 256]\n prefetcht1 [{later} + 320]\n",
            "prefetcht1 [{later} + 384]\n prefetcht1 [{later} + 448]\n prefetcht1 [{later} + 512]\n",
            "prefetcht1 [{later} + 576]\n prefetcht1 [{later} + 640]\n prefetcht1 [{later} + 704]\n",
            "add {later}, 768\n",
        )
    };
}

/// Fetches a line of each of the next eight rows of A into the L1 cache.
macro_rules! fetch_rows {
    () => {
        concat!(fetch_four_rows!(), fetch_four_rows!())
    };
}

/// Fetches a line of each of the next four rows of A, and moves on to the row after them.
macro_rules! fetch_four_rows {
    () => {
        concat!(
            "prefetcht0 [{row}]\n prefetcht0 [{row} + {a_stride}]\n prefetcht0 [{row} + 2*{a_stride}]\n",
            "prefetcht0 [{row} + {three_strides}]\n lea {row}, [{row} + 4*{a_stride}]\n",
        )
    };
}

/// Loads a step of a panel of A, whose address is in the named operand.
macro_rules! load_a {
    ($panel:literal) => {
        concat!(
            "tileloadd tmm4, [{",
            $panel,
            "} + {a_stride}]\n",
            "tileloadd tmm5, [{",
            $panel,
            "} + {a_stride} + 1024]\n",
        )
    };
}

/// Loads a step of a panel of B, whose address is in the named operand.
macro_rules! load_b {
    ($panel:literal) => {
        concat!(
            "tileloadd tmm6, [{",
            $panel,
            "} + {b_stride}]\n",
            "tileloadd tmm7, [{",
            $panel,
            "} + {b_stride} + 64]\n",
        )
    };
}

/// Bytes between the rows of a tile of A, which are contiguous.
const A_STRIDE: usize = 64;
/// Bytes between the rows of a tile of B, and of a [`Tile`].
const B_STRIDE: usize = 128;
/// Bytes of a panel, of A or of B, that a step reads.
const STEP_BYTES: usize = 2048;

/// Runs `work` with the tiles configured.
///
/// # Safety
/// The CPU must have tiles.
unsafe fn with_tiles<R>(configuration: &Configuration, work: impl FnOnce() -> R) -> R {
    // SAFETY: the CPU has tiles (the caller's promise); the configuration is a valid one, and nothing
    // else on this thread uses tiles.
    unsafe {
        std::arch::asm!("ldtilecfg [{0}]", in(reg) configuration, options(nostack, readonly));
    }
    let result = work();
    // SAFETY: as above.
    unsafe { std::arch::asm!("tilerelease", options(nostack, nomem)) };
    result
}

/// Sets the sums, `tmm0` to `tmm3`, to zero.
///
/// # Safety
/// The tiles must be those of [`Configuration::FULL`]. No tile register is live outside this file: the compiler uses none.
#[inline(always)]
unsafe fn clear_sums() {
    // SAFETY: the caller's promise.
    unsafe {
        std::arch::asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            options(nostack, nomem)
        )
    };
}

/// Loads the sums from 32 rows of 32 numbers, which are `stride` bytes apart.
///
/// # Safety
/// As [`clear_sums`], and the numbers must be there.
#[inline(always)]
unsafe fn load_sums(first: *const f32, stride: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        std::arch::asm!(
            "tileloadd tmm0, [{upper} + {stride}]",
            "tileloadd tmm1, [{upper} + {stride} + 64]",
            "tileloadd tmm2, [{lower} + {stride}]",
            "tileloadd tmm3, [{lower} + {stride} + 64]",
            upper = in(reg) first,
            lower = in(reg) first.wrapping_byte_add(SIDE * stride),
            stride = in(reg) stride,
            options(nostack, readonly),
        );
    }
}

/// Stores the sums to 32 rows of 32 numbers, which are `stride` bytes apart.
///
/// # Safety
/// As [`clear_sums`], and nothing else may use the numbers.
#[inline(always)]
unsafe fn store_sums(first: *mut f32, stride: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        std::arch::asm!(
            "tilestored [{upper} + {stride}], tmm0",
            "tilestored [{upper} + {stride} + 64], tmm1",
            "tilestored [{lower} + {stride}], tmm2",
            "tilestored [{lower} + {stride} + 64], tmm3",
            upper = in(reg) first,
            lower = in(reg) first.wrapping_byte_add(SIDE * stride),
            stride = in(reg) stride,
            options(nostack),
        );
    }
}

impl MicroKernel for Tiles {
    type Vector = Bf16Pairs;
    const ROWS: usize = 32;
    const COLUMNS: usize = 32;
    const TASK_ROWS: usize = 96;
    const DEPTH: usize = 16;
    const A_ORDER: Order = Order::AlongDepth;
    // A step, 16 units deep, fetches twelve lines of 16 units: see `fetch_later`.
    const FETCHED_UNITS: usize = 12;
    const READS_LINES: bool = true;
    const FINISHES_TILES: bool = true;

    unsafe fn prepared<R>(work: impl FnOnce() -> R) -> R {
        // SAFETY: the caller's promise.
        unsafe { with_tiles(&Configuration::FULL, work) }
    }

    unsafe fn tile(depth: usize, a: Rows, b: Columns, tile: &mut Tile) {
        // SAFETY: the tiles are configured (the caller's promise), and the operands hold the depth.
        unsafe {
            clear_sums();
            add_products(depth / Self::DEPTH, a, b);
            store_sums(tile.as_mut_ptr(), B_STRIDE);
        }
    }

    /// Adds to what is there product by product, where other kernels add the whole sum.
    unsafe fn finished_tile(depth: usize, a: Rows, b: Columns, place: &Place) {
        let stride = place.stride * size_of::<f32>();
        // SAFETY: as above; the caller promises the place.
        unsafe {
            match place.write {
                Write::Overwrite => clear_sums(),
                Write::Accumulate => load_sums(place.first, stride),
            }
            add_products(depth / Self::DEPTH, a, b);
            store_sums(place.first, stride);
        }
    }
}

/// Adds the products of rows of A and a panel of B to the sums.
///
/// # Safety
/// As [`clear_sums`], and both operands must hold the steps.
#[inline(always)]
unsafe fn add_products(steps: usize, a: Rows, b: Columns) {
    // SAFETY: the caller's promise.
    unsafe {
        match a {
            _ if steps == 0 => {}
            Rows::Packed(a) => multiply_panel(steps, a, b),
            Rows::Lines(first, stride) => multiply_rows(steps, (first, stride), b),
        }
    }
}

/// Adds the products of packed panels to the sums.
///
/// # Safety
/// As [`add_products`], of at least one step.
#[inline(always)]
unsafe fn multiply_panel(steps: usize, a: *const u32, b: Columns) {
    // SAFETY: a step reads 2 KiB of each panel.
    unsafe {
        std::arch::asm!(
            "2:",
            load_a!("a"),
            load_b!("b"),
            products!("a" "b"),
            fetch_later!(),
            "add {a}, 2048",
            "add {b}, 2048",
            "dec {steps}",
            "jnz 2b",
            a = inout(reg) a => _,
            b = inout(reg) b.units => _,
            later = inout(reg) b.later => _,
            steps = inout(reg) steps => _,
            a_stride = in(reg) A_STRIDE,
            b_stride = in(reg) B_STRIDE,
            options(nostack, readonly),
        );
    }
}

/// Adds the products of 32 rows of A, which are read where they lie, and a packed panel to the sums.
///
/// # Safety
/// As [`multiply_panel`].
#[inline(always)]
unsafe fn multiply_rows(steps: usize, (first, stride): (*const u32, usize), b: Columns) {
    // SAFETY: a step reads 64 bytes of each row and 2 KiB of the panel.
    unsafe {
        std::arch::asm!(
            "2:",
            "tileloadd tmm4, [{a} + {a_stride}]",
            load_b!("b"),
            "tileloadd tmm5, [{lower} + {a_stride}]",
            "lea {row}, [{a} + 64]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            fetch!("b", 2048 2112 2176 2240 2304 2368 2432 2496),
            fetch_rows!(),
            "tdpbf16ps tmm1, tmm4, tmm7",
            fetch!("b", 2560 2624 2688 2752 2816 2880 2944 3008),
            fetch_rows!(),
            "tdpbf16ps tmm2, tmm5, tmm6",
            fetch!("b", 3072 3136 3200 3264 3328 3392 3456 3520),
            fetch_rows!(),
            "tdpbf16ps tmm3, tmm5, tmm7",
            fetch!("b", 3584 3648 3712 3776 3840 3904 3968 4032),
            fetch_rows!(),
            fetch_later!(),
            "add {a}, 64",
            "add {lower}, 64",
            "add {b}, 2048",
            "dec {steps}",
            "jnz 2b",
            a = inout(reg) first => _,
            lower = inout(reg) first.wrapping_byte_add(SIDE * stride) => _,
            row = out(reg) _,
            a_stride = in(reg) stride,
            three_strides = in(reg) 3 * stride,
            b = inout(reg) b.units => _,
            later = inout(reg) b.later => _,
            steps = inout(reg) steps => _,
            b_stride = in(reg) B_STRIDE,
            options(nostack, readonly),
        );
    }
}

impl ThinKernel for Tiles {
    const MOST_ROWS: usize = SIDE;
    const INTERLEAVES_ROWS: bool = true;

    unsafe fn prepared_for_rows<R>(rows: usize, work: impl FnOnce() -> R) -> R {
        let row_bytes = 4 * rows.max(1) as u8;
        let sizes = [[16, row_bytes], [16, 64], [16, row_bytes], [0; 2], [0; 2], [0; 2], [0; 2], [0; 2]];
        // SAFETY: the caller's promise.
        unsafe { with_tiles(&Configuration::of(sizes), work) }
    }

    /// Multiplies 16 lines of W, which are a tile as they lie, and the units of all rows. Both operands of a product have changed
    /// sides, which changes no bit.
    unsafe fn panel<U: Packing>(
        panel: &Panel<'_, '_, U::Source>,
        rows: &ThinRows,
        _: &mut ThinScratch<'_>,
        tile: &mut Tile,
    ) {
        let width = thin::width::<Self::Vector>(rows.count());
        for column in (0..panel.columns.len()).step_by(SIDE) {
            let lines = panel.lines::<U>(column);
            let mut sums = LineSums([[0; SIDE]; SIDE]);
            // SAFETY: the tiles are configured for the rows (the caller's promise), and the lines and rows hold the depth.
            unsafe { multiply_lines(&lines, rows, &mut sums) };
            for (line, sums) in sums.0.iter().take(lines.count).enumerate() {
                for (row, sum) in sums.iter().take(rows.count()).enumerate() {
                    *tile.element_mut(row * width + column + line) = f32::from_bits(*sum);
                }
            }
        }
    }
}

impl ThinKernel for SplitTiles {}

impl MicroKernel for SplitTiles {
    type Vector = Bf16Pairs;
    const ROWS: usize = 32;
    const COLUMNS: usize = 32;
    const TASK_ROWS: usize = 96;
    const DEPTH: usize = 16;
    const A_ORDER: Order = Order::AlongDepth;

    unsafe fn prepared<R>(work: impl FnOnce() -> R) -> R {
        // SAFETY: the caller's promise.
        unsafe { with_tiles(&Configuration::FULL, work) }
    }

    /// Sums the six products of parts whose ranks, counted from 0, add up to 2 at most. The small products come
    /// first, so that the sum is rounded at its full size as rarely as possible.
    unsafe fn tile(depth: usize, a: Rows, b: Columns, tile: &mut Tile) {
        let steps = depth / Self::DEPTH;
        let plane_bytes = steps * STEP_BYTES;
        let parts = |panel: *const u32| [0, 1, 2].map(|part| panel.wrapping_byte_add(part * plane_bytes));
        let ([a0, a1, a2], [b0, b1, b2]) = (parts(a.panel()), parts(b.units));
        // SAFETY: as for `Tiles`; each panel holds three planes of `depth / 16` steps.
        unsafe {
            clear_sums();
            std::arch::asm!(
                "test {steps}, {steps}",
                "jz 4f",
                "xor {offset:e}, {offset:e}",
                "2:",
                load_a!("a2"),
                load_b!("b0"),
                products!("a2"),
                load_a!("a1"),
                products!("b0" "a1"),
                load_b!("b1"),
                products!("b1"),
                load_a!("a0"),
                products!("a0"),
                load_b!("b2"),
                products!("b2"),
                "add {a0}, 2048",
                "add {a1}, 2048",
                "add {a2}, 2048",
                "add {b0}, 2048",
                "add {b1}, 2048",
                "add {b2}, 2048",
                "add {offset}, 2048",
                "cmp {offset}, {plane}",
                "jne 2b",
                "sub {a0}, {plane}",
                "sub {b0}, {plane}",
                "3:",
                load_a!("a0"),
                load_b!("b0"),
                products!("a0" "b0"),
                "add {a0}, 2048",
                "add {b0}, 2048",
                "dec {steps}",
                "jnz 3b",
                "4:",
                a0 = inout(reg) a0 => _,
                a1 = inout(reg) a1 => _,
                a2 = inout(reg) a2 => _,
                b0 = inout(reg) b0 => _,
                b1 = inout(reg) b1 => _,
                b2 = inout(reg) b2 => _,
                steps = inout(reg) steps => _,
                offset = out(reg) _,
                plane = in(reg) plane_bytes,
                a_stride = in(reg) A_STRIDE,
                b_stride = in(reg) B_STRIDE,
                options(nostack, readonly),
            );
            store_sums(tile.as_mut_ptr(), B_STRIDE);
        }
    }
}

/// Sums of the products of 16 lines and up to 16 rows, as bits.
#[repr(C, align(64))]
struct LineSums([[u32; SIDE]; SIDE]);

/// Adds the products of lines and rows: tile 0 holds the sums of each line, tile 1 a step of the lines, tile 2 one of the rows.
///
/// # Safety
/// The tiles must be those of [`ThinKernel::prepared_for_rows`] for the rows, which must hold the depth of the lines.
#[inline(always)]
unsafe fn multiply_lines(lines: &PanelLines, rows: &ThinRows, sums: &mut LineSums) {
    let row_stride = 4 * rows.count();
    let add = |line: *const u32, line_stride: usize, units: *const u32| {
        // SAFETY: 16 lines and 16 units of all rows lie there. No tile register is used by anything else.
        unsafe {
            std::arch::asm!(
                "tileloadd tmm1, [{lines} + {line_stride}]",
                "tileloadd tmm2, [{rows} + {row_stride}]",
                "tdpbf16ps tmm0, tmm1, tmm2",
                lines = in(reg) line,
                line_stride = in(reg) line_stride,
                rows = in(reg) units,
                row_stride = in(reg) row_stride,
                options(nostack, readonly),
            );
        }
    };
    // SAFETY: the tiles are configured.
    unsafe { std::arch::asm!("tilezero tmm0", options(nostack, nomem)) };
    let whole_steps = if lines.count == SIDE { lines.units / SIDE } else { 0 };
    for step in 0..whole_steps {
        let first = lines.first.wrapping_add(step * SIDE);
        let square = Square { first, stride: lines.stride / size_of::<u32>() };
        square.fetch(lines.ahead_bytes(step * STEP_LINE_BYTES));
        add(first, lines.stride, rows.interleaved(lines.first_unit + step * SIDE));
    }
    for unit in (whole_steps * SIDE..lines.units).step_by(SIDE) {
        let count = SIDE.min(lines.units - unit);
        let (mut padded_lines, mut padded_rows) = ([[0_u32; SIDE]; SIDE], [0_u32; SIDE * SIDE]);
        for (index, padded) in padded_lines.iter_mut().enumerate().take(lines.count) {
            let skipped = unit * size_of::<u32>();
            let bytes = (count * size_of::<u32>()).min(lines.bytes - skipped);
            // SAFETY: each line holds `bytes`.
            unsafe {
                let line = lines.first.cast::<u8>().add(index * lines.stride + skipped);
                line.copy_to_nonoverlapping(padded.as_mut_ptr().cast(), bytes);
            }
        }
        let units = rows.interleaved(lines.first_unit + unit);
        // SAFETY: the rows hold `count` units from there on.
        unsafe { units.copy_to_nonoverlapping(padded_rows.as_mut_ptr(), count * rows.count()) };
        add(padded_lines.as_ptr().cast(), size_of_val(&padded_lines[0]), padded_rows.as_ptr());
    }
    // SAFETY: the tile of sums has 16 rows of at most 64 bytes.
    unsafe {
        std::arch::asm!(
            "tilestored [{sums} + {stride}], tmm0",
            sums = in(reg) sums,
            stride = in(reg) 4 * SIDE,
            options(nostack),
        );
    }
}

/// Bytes of a line that a step reads.
const STEP_LINE_BYTES: usize = 64;

/// Sums of the products of 8 rows and 16 lines of codes.
#[repr(C, align(64))]
pub(super) struct CodeSums(pub(super) [[i32; SIDE]; TILE_ROWS]);

impl CodeSums {
    /// Zeros.
    pub(super) const ZEROS: Self = Self([[0; SIDE]; TILE_ROWS]);
}

/// Rows of a tile of sums of codes.
const TILE_ROWS: usize = 8;
/// Bytes between the rows of codes of a group of 32.
const CODES_STRIDE: usize = 32;

/// Runs `work` with tiles for [`multiply_codes`] of runs of `units` words of four codes.
///
/// # Safety
/// The CPU must have tiles.
pub(super) unsafe fn with_code_tiles<R>(units: usize, work: impl FnOnce() -> R) -> R {
    let (rows, units) = (TILE_ROWS as u8, units as u8);
    let sizes = [[rows, 64], [rows, 4 * units], [units, 64], [0; 2], [0; 2], [0; 2], [0; 2], [0; 2]];
    // SAFETY: the caller's promise.
    unsafe { with_tiles(&Configuration::of(sizes), work) }
}

/// Computes the sums of products of a run of 8 rows of signed codes, which are 32 bytes apart, and of 16 lines of unsigned ones, four of
/// each line in a unit.
///
/// # Safety
/// The tiles must be those of [`with_code_tiles`] for the run, all of which must be at both addresses.
#[inline(always)]
pub(super) unsafe fn multiply_codes(codes: *const i32, units: *const [u32; SIDE], sums: &mut CodeSums) {
    // SAFETY: the tiles are configured, and the memory is there (the caller's promises). No tile register is live outside.
    unsafe {
        std::arch::asm!(
            "tilezero tmm0",
            "tileloadd tmm1, [{codes} + {codes_stride}]",
            "tileloadd tmm2, [{units} + {stride}]",
            "tdpbsud tmm0, tmm1, tmm2",
            "tilestored [{sums} + {stride}], tmm0",
            codes = in(reg) codes,
            units = in(reg) units,
            sums = in(reg) sums,
            codes_stride = in(reg) CODES_STRIDE,
            stride = in(reg) 4 * SIDE,
            options(nostack),
        );
    }
}
