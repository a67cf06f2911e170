//! Helpers of the elementwise kernels: storage types as f32, vectorizable functions, and loops compiled for the
//! instructions of a [`CpuLevel`](super::CpuLevel).
//!
//! Kernels are plain loops over slices. `CpuLevel::run` calls a closure inside a function that is compiled for the
//! level's instructions, and all code inlined into it is vectorized for them. So helpers are `#[inline(always)]`, and
//! closures `inlined!`.

mod float;
mod functions;
mod isa;
mod loops;

pub(crate) use float::{Float, with_float};
pub(crate) use functions::{ROUND, exp, normal_distribution, sigmoid, sin_cos, tanh_gate};
pub(crate) use isa::{CACHE_LINE_BYTES, Isa, inlined, prefetch, prefetch_to_l1};
#[cfg(target_arch = "x86_64")]
pub(crate) use isa::{avx2, avx512};
pub(crate) use loops::{BLOCK, Block, add_to, map_block, map_slices, max, sum};
