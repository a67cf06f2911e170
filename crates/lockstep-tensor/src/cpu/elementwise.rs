//! To be written.
#![expect(unused_imports, reason = "being written")]
use super::{
    CpuQueue, check_disjoint, check_elementwise,
    simd::{Float, exp, with_float},
};
use crate::{AdamW, Attention, Dropout, Gelu, Gemm, GemmLayout, LayerNorm, Rotation, Sgd, View, Write};
pub(super) fn sum_rows(_: &CpuQueue, _: View<'_>, _: View<'_>) {
    unimplemented!()
}
pub(super) fn swiglu(_: &CpuQueue, _: View<'_>, _: View<'_>, _: View<'_>) {
    unimplemented!()
}
pub(super) fn swiglu_backward(_: &CpuQueue, _: View<'_>, _: View<'_>, _: View<'_>, _: View<'_>, _: View<'_>) {
    unimplemented!()
}
pub(super) fn gelu(_: &CpuQueue, _: Gelu, _: View<'_>, _: View<'_>) {
    unimplemented!()
}
pub(super) fn gelu_backward(_: &CpuQueue, _: Gelu, _: View<'_>, _: View<'_>, _: View<'_>) {
    unimplemented!()
}
pub(super) fn add(_: &CpuQueue, _: View<'_>, _: View<'_>, _: View<'_>) {
    unimplemented!()
}
pub(super) fn dropout(_: &CpuQueue, _: Dropout<'_>, _: View<'_>, _: View<'_>) {
    unimplemented!()
}
pub(super) fn cast(_: &CpuQueue, _: View<'_>, _: View<'_>) {
    unimplemented!()
}
pub(super) fn zero(_: &CpuQueue, _: View<'_>) {
    unimplemented!()
}
