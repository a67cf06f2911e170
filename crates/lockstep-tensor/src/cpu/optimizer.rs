//! To be written.
#![expect(unused_imports, reason = "being written")]
use super::{
    CpuQueue, check_disjoint, check_elementwise,
    simd::{Float, exp, with_float},
};
use crate::{AdamW, Attention, Dropout, Gelu, Gemm, GemmLayout, LayerNorm, Rotation, Sgd, View, Write};
pub(super) fn adamw(_: &CpuQueue, _: &AdamW<'_>) {
    unimplemented!()
}
pub(super) fn sgd(_: &CpuQueue, _: &Sgd<'_>) {
    unimplemented!()
}
pub(super) fn sum_of_squares(_: &CpuQueue, _: View<'_>) -> lockstep_plan::exact::ExactSum {
    unimplemented!()
}
