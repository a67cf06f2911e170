//! Products of one row of int8 activations and interleaved weights: codes are decoded from memory into registers.
//!
//! Sums have the order of [`integer`](super::integer), so that a row has the bits that it has among others.

use lockstep_plan::{
    block_format::{BlockCodec, PART, RUNS},
    with_block_codec,
};

use super::{
    activations::{GROUP, RowGroup},
    block_lines::{BlockLines, Panel},
    integer_lanes::{GROUP_UNITS, IntegerLanes},
    transpose::SIDE,
};
use crate::cpu::simd::inlined;

/// Computes the products of a row and the 16 lines of each panel from `first` on. A function of its own, so that the formats are compiled
/// once for each level, each by itself.
///
/// # Safety
/// The CPU must have the instructions of `V`.
#[inline(never)]
pub(super) unsafe fn multiply_row<V: IntegerLanes>(
    groups: &[RowGroup<1>],
    lines: &BlockLines<'_>,
    first: usize,
    sums: &mut [[f32; SIDE]],
) {
    with_block_codec!(lines.format, Codec => if Codec::HAS_INTEGER_CODES {
        // SAFETY: the caller's promise.
        unsafe {
            V::compiled(inlined!(|| for (panel, sums) in (first..).zip(sums) {
                multiply_panel::<V, Codec>(groups, &lines.panel(panel), sums);
            }));
        }
    });
}

/// Multiplies a row and a panel.
///
/// # Safety
/// The CPU must have the instructions of `V`.
#[inline(always)]
unsafe fn multiply_panel<V: IntegerLanes, C: BlockCodec>(
    groups: &[RowGroup<1>],
    panel: &Panel<'_>,
    sums: &mut [f32; SIDE],
) {
    const { assert!(PART == GROUP) };
    let runs_of_group = GROUP / C::RUN_ELEMENTS;
    let run_units = GROUP_UNITS / runs_of_group;
    // SAFETY: the caller's promise, here and below.
    unsafe {
        let zero = V::floats(&[0.0; SIDE]);
        let (mut total, mut scales, mut offsets) = (zero, [zero; RUNS], [zero; RUNS]);
        for (block, groups) in groups.chunks_exact(C::ELEMENTS / GROUP).enumerate() {
            let words = panel.block::<C>(block);
            panel.fetch_after::<C>(block);
            C::scales::<V::Words>(
                words,
                inlined!(|run, run_scales, run_offsets| {
                    scales[run] = V::decoded(run_scales);
                    if let Some(run_offsets) = run_offsets {
                        offsets[run] = V::decoded(run_offsets);
                    }
                }),
            );
            for (part, group) in groups.iter().enumerate() {
                for run in 0..runs_of_group {
                    let mut products = V::splat(group.starts[run][0]);
                    for unit in run * run_units..(run + 1) * run_units {
                        let codes = V::unit_of(C::unit(words, part, unit));
                        products = V::dot(products, codes, group.codes[unit][0]);
                    }
                    let of_lines = part * runs_of_group + run;
                    total = V::add_products(total, products, V::scale(scales[of_lines], group.scales[0]));
                    if C::HAS_OFFSETS {
                        total = V::add_scaled(total, offsets[of_lines], group.terms[run][0]);
                    }
                }
            }
        }
        V::store(total, sums);
    }
}
