//! Grouped GEMM: groups of rows with a matrix for each, as tasks of one kernel.
//!
//! A group's product has the bits of a product of its rows alone, so the other groups on a rank do not matter.

use lockstep_plan::DType;

use crate::{
    Gemm, GemmLayout, GroupedGemm, Write,
    cpu::operands::{check_disjoint, expect},
};

/// Returns the product of each group, with the rows of its output; see [`GroupedGemm`].
pub(super) fn products(grouped: GroupedGemm<'_>) -> impl Iterator<Item = (Gemm<'_>, usize)> {
    let GroupedGemm { layout, a, b, c, bias, offsets, write } = grouped;
    check_disjoint(&[c], &[a, b, offsets, bias.unwrap_or(offsets)]);
    let groups = offsets.elements().checked_sub(1).expect("offsets of groups have at least one element");
    expect("offsets of grouped products", offsets, DType::U32, groups + 1);
    let stacked = if layout == GemmLayout::TN { c } else { b };
    let rows = a.shape().as_matrix().0;
    if let Some(bias) = bias {
        assert!(layout != GemmLayout::TN, "a {layout:?} product of groups has no bias");
        expect("biases of grouped products", bias, b.dtype(), groups * c.shape().as_matrix().1);
    }
    assert!(
        stacked.shape().dims().len() == 3 && stacked.shape().dims()[0] == groups,
        "{groups} groups of a {layout:?} product need a matrix each: a {a:?}, b {b:?}, c {c:?}"
    );
    // SAFETY: no output overlaps the offsets, and kernels write only their outputs.
    let offsets = unsafe { offsets.slice::<u32>() };
    assert!(
        offsets.is_sorted() && offsets[groups] as usize <= rows,
        "groups of {rows} rows must follow each other: offsets {offsets:?}"
    );
    let [a, b, c] = [a, b, c].map(|view| view.reshape(<[usize; 2]>::from(view.shape().as_matrix())));
    let height = stacked.shape().dims()[1];
    offsets.windows(2).enumerate().filter_map(move |(group, ends)| {
        let rows = ends[0] as usize..ends[1] as usize;
        if rows.is_empty() && (layout != GemmLayout::TN || write == Write::Accumulate) {
            return None;
        }
        let own = group * height..(group + 1) * height;
        let (b, c) = match layout {
            GemmLayout::TN => (b.rows(rows.clone()), c.rows(own)),
            GemmLayout::NN | GemmLayout::NT => (b.rows(own), c.rows(rows.clone())),
        };
        let rows_of_c = c.shape().as_matrix().0;
        let bias = bias.map(|bias| bias.rows(group..group + 1));
        Some((Gemm { layout, a: a.rows(rows), b, c, bias, write }, rows_of_c))
    })
}
