//! Sums of products of a run of codes: by the vectors of a CPU level, or of eight rows at once by AMX tiles or the matrices of AArch64
//! (`neon_integers`).
//!
//! Sums of integers are exact, so both ways give the same bits.

#[cfg(target_arch = "x86_64")]
use super::amx;
#[cfg(target_arch = "x86_64")]
use super::integer_lanes::{Avx2Integers, GROUP_UNITS, VnniIntegers};
use super::{
    activations::RowGroup,
    integer_lanes::{IntegerLanes, PlainIntegers},
    transpose::SIDE,
};
use crate::CpuLevel;

/// Rows of a group that tiles multiply.
pub(super) const TILE_ROWS: usize = 8;

/// A way to multiply a run of a group of rows with 16 lines.
pub(super) trait RunProducts<V: IntegerLanes, const ROWS: usize> {
    /// Adds the products of run `run` of a group to the sums of each row. `codes` are the words of the run in a group with the codes of
    /// all rows side by side, and `units` the lines' codes.
    ///
    /// # Safety
    /// The CPU must have the instructions, and the group's codes the order that they read.
    unsafe fn add(
        products: &mut [V::Integers; ROWS],
        group: &RowGroup<ROWS>,
        run: usize,
        codes: &[[i32; ROWS]],
        units: &[[u32; SIDE]],
    );
}

/// Vectors of integers with a way to multiply groups of eight rows, by tiles or matrices.
pub(super) trait TiledLanes: IntegerLanes + Sized {
    /// Products by tiles; by vectors if these have no tiles beside them.
    type Tiles: RunProducts<Self, TILE_ROWS>;

    /// Returns true if a level has tiles.
    fn has_tiles(_: CpuLevel) -> bool {
        false
    }

    /// Runs `work` with the tiles prepared for groups of so many runs.
    ///
    /// # Safety
    /// The CPU must have the tiles.
    unsafe fn with_tiles<R>(_: usize, work: impl FnOnce() -> R) -> R {
        work()
    }
}

/// Products by vectors, whose groups have the codes of all rows side by side.
pub(super) struct ByVectors;

impl<V: IntegerLanes, const ROWS: usize> RunProducts<V, ROWS> for ByVectors {
    #[inline(always)]
    unsafe fn add(
        products: &mut [V::Integers; ROWS],
        _: &RowGroup<ROWS>,
        _: usize,
        codes: &[[i32; ROWS]],
        units: &[[u32; SIDE]],
    ) {
        // SAFETY: the caller's promise.
        unsafe { V::add_run(products, codes, units) };
    }
}

/// Products by AMX tiles, whose groups have the codes of one row after the other.
#[cfg(target_arch = "x86_64")]
pub(super) struct ByTiles;

#[cfg(target_arch = "x86_64")]
impl RunProducts<VnniIntegers, TILE_ROWS> for ByTiles {
    #[inline(always)]
    unsafe fn add(
        products: &mut [<VnniIntegers as IntegerLanes>::Integers; TILE_ROWS],
        group: &RowGroup<TILE_ROWS>,
        run: usize,
        _: &[[i32; TILE_ROWS]],
        units: &[[u32; SIDE]],
    ) {
        let mut sums = amx::CodeSums::ZEROS;
        // SAFETY: eight rows of eight words, of which the run begins at a whole word; the caller's promise.
        unsafe {
            let codes = group.codes.as_flattened().as_ptr().add(run * units.len());
            amx::multiply_codes(codes, units.as_ptr(), &mut sums);
            for (product, sums) in products.iter_mut().zip(&sums.0) {
                *product = VnniIntegers::add(*product, sums);
            }
        }
    }
}

impl TiledLanes for PlainIntegers {
    type Tiles = ByVectors;
}

#[cfg(target_arch = "x86_64")]
impl TiledLanes for Avx2Integers {
    type Tiles = ByVectors;
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
