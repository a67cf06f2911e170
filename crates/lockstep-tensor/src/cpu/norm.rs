//! To be written.
#![expect(unused_imports, reason = "being written")]
use super::{
    CpuQueue, check_disjoint, check_elementwise,
    simd::{Float, exp, with_float},
};
use crate::{AdamW, Attention, Dropout, Gelu, Gemm, GemmLayout, LayerNorm, Rotation, Sgd, View, Write};
pub(super) fn rms_norm(_: &CpuQueue, _: View<'_>, _: View<'_>, _: f32, _: View<'_>, _: View<'_>) {
    unimplemented!()
}
pub(super) fn rms_norm_backward_input(
    _: &CpuQueue,
    _: View<'_>,
    _: View<'_>,
    _: View<'_>,
    _: View<'_>,
    _: View<'_>,
    _: Write,
) {
    unimplemented!()
}
pub(super) fn rms_norm_backward_weight(_: &CpuQueue, _: View<'_>, _: View<'_>, _: View<'_>, _: View<'_>) {
    unimplemented!()
}
pub(super) fn layer_norm(_: &CpuQueue, _: LayerNorm<'_>, _: Option<View<'_>>, _: f32, _: View<'_>) {
    unimplemented!()
}
pub(super) fn layer_norm_backward_input(_: &CpuQueue, _: LayerNorm<'_>, _: View<'_>, _: View<'_>, _: Write) {
    unimplemented!()
}
pub(super) fn layer_norm_backward_weight(
    _: &CpuQueue,
    _: LayerNorm<'_>,
    _: View<'_>,
    _: View<'_>,
    _: Option<View<'_>>,
) {
    unimplemented!()
}
