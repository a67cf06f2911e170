//! Sums of products of a run of codes: by the vectors of a CPU level, a row after the other, or of eight rows at once by AMX tiles.
//!
//! Sums of integers are exact, so both ways give the same bits.

#[cfg(target_arch = "x86_64")]
use super::amx;
#[cfg(target_arch = "x86_64")]
use super::integer_lanes::{Avx2Integers, VnniIntegers};
use super::{
    activations::RowGroup,
    integer_lanes::{GROUP_UNITS, IntegerLanes, PlainIntegers},
    transpose::SIDE,
};
use crate::CpuLevel;

/// Rows of a group that tiles multiply.
pub(super) const TILE_ROWS: usize = 8;

/// A way to multiply a run of a group of rows with 16 lines.
pub(super) trait RunProducts<V: IntegerLanes, const ROWS: usize> {
    /// Returns the sums of run `run` of `RUNS` in each row of a group, begun with the run's starts. `units` are the lines' codes of the run.
    ///
    /// # Safety
    /// The CPU must have the instructions, and the group's codes the order that they read.
    unsafe fn products<const RUNS: usize>(
        group: &RowGroup<ROWS>,
        run: usize,
        units: &[[u32; SIDE]],
    ) -> [V::Integers; ROWS];
}

/// Vectors of integers with a way to multiply groups of eight rows.
pub(super) trait TiledLanes: IntegerLanes + Sized {
    /// Products by tiles; by vectors if these have no tiles beside them.
    type Tiles: RunProducts<Self, TILE_ROWS>;

    /// Returns true if a level has tiles.
    fn has_tiles(level: CpuLevel) -> bool;

    /// Runs `work` with the tiles prepared for groups of `runs` runs.
    ///
    /// # Safety
    /// The CPU must have tiles.
    unsafe fn with_tiles<R>(runs: usize, work: impl FnOnce() -> R) -> R;
}

/// Products by vectors, whose groups have the codes of all rows side by side.
pub(super) struct ByVectors;

impl<V: IntegerLanes, const ROWS: usize> RunProducts<V, ROWS> for ByVectors {
    #[inline(always)]
    unsafe fn products<const RUNS: usize>(
        group: &RowGroup<ROWS>,
        run: usize,
        units: &[[u32; SIDE]],
    ) -> [V::Integers; ROWS] {
        // SAFETY: the caller's promise.
        unsafe {
            let mut products = [V::splat(0); ROWS];
            for (product, start) in products.iter_mut().zip(&group.starts[run]) {
                *product = V::splat(*start);
            }
            let run_units = GROUP_UNITS / RUNS;
            let codes = group.codes[run * run_units..][..run_units].iter();
            for (codes, unit) in codes.zip(units) {
                let unit = V::unit(unit);
                for (product, codes) in products.iter_mut().zip(codes) {
                    *product = V::dot(*product, unit, *codes);
                }
            }
            products
        }
    }
}

/// Products by AMX tiles, whose groups have the codes of one row after the other.
#[cfg(target_arch = "x86_64")]
pub(super) struct ByTiles;

#[cfg(target_arch = "x86_64")]
impl RunProducts<VnniIntegers, TILE_ROWS> for ByTiles {
    #[inline(always)]
    unsafe fn products<const RUNS: usize>(
        group: &RowGroup<TILE_ROWS>,
        run: usize,
        units: &[[u32; SIDE]],
    ) -> [<VnniIntegers as IntegerLanes>::Integers; TILE_ROWS] {
        debug_assert_eq!(units.len(), GROUP_UNITS / RUNS, "units of a run");
        let mut sums = amx::CodeSums::ZEROS;
        // SAFETY: eight rows of eight words, of which the run begins at a whole word; the caller's promise.
        unsafe {
            let codes = group.codes.as_flattened().as_ptr().add(run * (GROUP_UNITS / RUNS));
            amx::multiply_codes(codes, units.as_ptr(), &mut sums);
            let mut products = [VnniIntegers::splat(0); TILE_ROWS];
            let rows = sums.0.iter().zip(&group.starts[run]);
            for (product, (sums, start)) in products.iter_mut().zip(rows) {
                *product = VnniIntegers::sums_from(*start, sums);
            }
            products
        }
    }
}

impl TiledLanes for PlainIntegers {
    type Tiles = ByVectors;

    fn has_tiles(_: CpuLevel) -> bool {
        false
    }

    unsafe fn with_tiles<R>(_: usize, work: impl FnOnce() -> R) -> R {
        work()
    }
}

#[cfg(target_arch = "x86_64")]
impl TiledLanes for Avx2Integers {
    type Tiles = ByVectors;

    fn has_tiles(_: CpuLevel) -> bool {
        false
    }

    unsafe fn with_tiles<R>(_: usize, work: impl FnOnce() -> R) -> R {
        work()
    }
}

#[cfg(target_arch = "x86_64")]
impl TiledLanes for VnniIntegers {
    type Tiles = ByTiles;

    fn has_tiles(level: CpuLevel) -> bool {
        level == CpuLevel::AmxBf16
    }

    unsafe fn with_tiles<R>(runs: usize, work: impl FnOnce() -> R) -> R {
        // SAFETY: the caller's promise.
        unsafe { amx::with_code_tiles(GROUP_UNITS / runs, work) }
    }
}
