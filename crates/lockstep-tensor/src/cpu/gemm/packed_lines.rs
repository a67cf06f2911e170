//! Lines of quantized weights, packed for integer products: the codes of 16 lines in units, and the scales and offsets of their runs.

use std::ops::Range;

use lockstep_plan::{
    BlockFormat,
    block_format::{BlockCodec, BlockSource, PART, RUN},
    with_block_codec,
};

use super::{
    activations::{CodeForm, GROUP},
    block_lines::{BlockLines, CHUNK, WordBuffer},
    integer_lanes::{GROUP_UNITS, IntegerLanes},
    transpose::SIDE,
    word_lanes::WordLanes,
};
use crate::{BlockLayout, cpu::simd::inlined};

/// Elements of depth of the packed lines.
pub(super) const DEPTH: usize = 2 * CHUNK;
/// Runs of the packed lines with a scale each, at most.
const RUNS: usize = DEPTH / RUN;

/// 16 lines of codes at a block of depth.
#[repr(C, align(64))]
pub(super) struct PackedLines {
    pub(super) units: [[[u32; SIDE]; GROUP_UNITS]; DEPTH / GROUP],
    pub(super) scales: [[f32; SIDE]; RUNS],
    pub(super) offsets: [[f32; SIDE]; RUNS],
}

/// Returns the form of the codes of a format for the vectors `V`; `by_rows` is that of [`CodeForm`].
pub(super) fn code_form<V: IntegerLanes>(format: BlockFormat, by_rows: bool) -> CodeForm {
    let (run, zero) = with_block_codec!(format, Codec => (Codec::RUN_ELEMENTS, i32::from(Codec::ZERO)));
    CodeForm { zero: zero - V::SHIFT, runs: GROUP / run.min(GROUP), by_rows }
}

/// Packs the codes, scales and offsets of up to 16 lines at a block of depth, which begins with a chunk. Of fewer lines the last one is
/// repeated.
///
/// # Safety
/// The CPU must have the instructions of `V`.
#[inline(never)]
pub(super) unsafe fn pack_codes<V: IntegerLanes>(
    of: &BlockLines<'_>,
    lines: Range<usize>,
    depth: Range<usize>,
    buffer: &mut WordBuffer,
    packed: &mut PackedLines,
) {
    // A function for each format and layout: one for all takes the compiler several times as long.
    with_block_codec!(of.format, Codec => match of.layout {
        // SAFETY: the caller's promise, here and below.
        BlockLayout::Rows => unsafe {
            V::compiled(inlined!(|| {
                for start in depth.clone().step_by(CHUNK) {
                    let chunk = of.rows_chunk(lines.clone(), start);
                    of.fetch_after(&chunk, start);
                    for block in 0..chunk.bytes / Codec::BYTES {
                        let words = buffer.transpose::<V::Words, Codec>(&chunk, block);
                        pack_block::<V, Codec>(words, start - depth.start + block * Codec::ELEMENTS, packed);
                    }
                }
            }));
        },
        // SAFETY: as above. Each block is decoded where it lies.
        BlockLayout::Interleaved => unsafe {
            V::compiled(inlined!(|| {
                let panel = of.panel(lines.start / SIDE);
                for block in depth.start / Codec::ELEMENTS..depth.end / Codec::ELEMENTS {
                    panel.fetch_after::<Codec>(block);
                    let words = panel.block::<Codec>(block);
                    pack_block::<V, Codec>(words, block * Codec::ELEMENTS - depth.start, packed);
                }
            }));
        },
    });
}

/// Packs a block whose first element is `element` of the packed lines.
///
/// # Safety
/// The CPU must have the instructions of `V`.
#[inline(always)]
unsafe fn pack_block<V: IntegerLanes, C: BlockCodec>(
    words: impl BlockSource<V::Words>,
    element: usize,
    packed: &mut PackedLines,
) {
    for (part, units) in packed.units[element / GROUP..][..C::ELEMENTS / PART].iter_mut().enumerate() {
        for (unit, codes) in units.iter_mut().enumerate() {
            // SAFETY: the caller's promise, here and below.
            unsafe { C::unit(words, part, unit).store(codes) };
        }
    }
    let first_run = element / C::RUN_ELEMENTS;
    C::scales(
        words,
        inlined!(|run, scales, offsets| {
            // SAFETY: as above.
            unsafe {
                V::Words::store_floats(scales, &mut packed.scales[first_run + run]);
                if let Some(offsets) = offsets {
                    V::Words::store_floats(offsets, &mut packed.offsets[first_run + run]);
                }
            }
        }),
    );
}
