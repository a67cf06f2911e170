//! To be written.
#![expect(unused_imports, reason = "being written")]
use super::{
    CpuQueue, check_disjoint, check_elementwise,
    simd::{Float, exp, with_float},
};
use crate::{AdamW, Attention, Dropout, Gelu, Gemm, GemmLayout, LayerNorm, Rotation, Sgd, View, Write};

/// What the forward left for the backward.
pub(super) struct Saved<'a> {
    pub(super) q: View<'a>,
    pub(super) k: View<'a>,
    pub(super) v: View<'a>,
    pub(super) out: View<'a>,
    pub(super) log_sum_exp: View<'a>,
}
pub(super) fn forward(
    _: &CpuQueue,
    _: &Attention<'_>,
    _: View<'_>,
    _: View<'_>,
    _: View<'_>,
    _: View<'_>,
    _: View<'_>,
) {
    unimplemented!()
}
pub(super) fn backward(
    _: &CpuQueue,
    _: &Attention<'_>,
    _: Saved<'_>,
    _: View<'_>,
    _: View<'_>,
    _: View<'_>,
    _: View<'_>,
) {
    unimplemented!()
}
