//! To be written.
#![expect(unused_imports, reason = "being written")]
use super::{
    CpuQueue, check_disjoint, check_elementwise,
    simd::{Float, exp, with_float},
};
use crate::{AdamW, Attention, Dropout, Gelu, Gemm, GemmLayout, LayerNorm, Rotation, Sgd, View, Write};
pub(super) fn rope(_: &CpuQueue, _: View<'_>, _: View<'_>, _: View<'_>, _: Rotation, _: View<'_>) {
    unimplemented!()
}
