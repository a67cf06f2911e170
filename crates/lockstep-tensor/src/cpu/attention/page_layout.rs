//! Choice of the layout of pages: that of the algorithm which attends to them.

use lockstep_plan::{DType, KvCacheType};

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::page_format::PanelLayout;
use super::page_format::{PageFormat, PageLayout};
#[cfg(target_arch = "aarch64")]
use crate::cpu::gemm::panels::NeonBf16;
#[cfg(target_arch = "x86_64")]
use crate::cpu::gemm::panels::{Avx512DotBlock, Tiles};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::cpu::gemm::panels::{MicroKernel, Order};
use crate::{CacheShape, CachedVectors, CpuLevel};

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
/// The lowest level with bf16 matrix instructions; it rounds vectors to bf16.
pub(super) const LEVEL: CpuLevel =
    if cfg!(target_arch = "aarch64") { CpuLevel::NeonBf16 } else { CpuLevel::Avx512Bf16 };

/// Returns the units of depth of a head's vector in an operand of the micro-kernel `K`.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) fn head_units<K: MicroKernel>(head_dim: usize) -> usize {
    // Four units of every row make whole cache lines of a block.
    head_dim.div_ceil(2).next_multiple_of(K::DEPTH.max(4))
}

/// Returns the layout of the right operands of the micro-kernel `K`.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn panels<K: MicroKernel>(head_dim: usize) -> PageLayout {
    let line = match K::B_ORDER {
        Order::AcrossDepth => 1,
        Order::AlongDepth => K::DEPTH,
    };
    let head_units = head_units::<K>(head_dim);
    PageLayout::Panels(PanelLayout { head_dim, head_units, width: K::COLUMNS, line })
}

/// Returns the order of elements in the pages that a queue of `level` uses for a computation in `dtype`.
fn page_layout(level: CpuLevel, dtype: DType, stored: KvCacheType, head_dim: usize) -> PageLayout {
    #[cfg(target_arch = "x86_64")]
    if dtype == DType::BF16 && level >= LEVEL {
        return match level {
            CpuLevel::AmxBf16 => panels::<Tiles>(head_dim),
            _ => panels::<Avx512DotBlock>(head_dim),
        };
    }
    #[cfg(target_arch = "aarch64")]
    if dtype == DType::BF16 && level >= LEVEL {
        return panels::<NeonBf16>(head_dim);
    }
    // Elements of another type are decoded to f32, in the order of the product; there is nothing to convert after that.
    let is_own_narrow_type = dtype != DType::F32 && KvCacheType::of(dtype) == Some(stored);
    if is_own_narrow_type { PageLayout::Rows { head_dim } } else { PageLayout::Transposed { head_dim } }
}

/// Returns the format of the pages that a queue of `level` uses for a computation in `dtype` and a cache of type `stored`.
///
/// # Panics
/// If such a cache does not hold numbers of `dtype`.
pub(super) fn page_format(
    level: CpuLevel,
    dtype: DType,
    stored: KvCacheType,
    CacheShape { head_dim, vectors, .. }: CacheShape,
) -> PageFormat {
    assert!(stored.holds(dtype), "a cache of {stored} does not hold numbers of {dtype}");
    let layout = match vectors {
        CachedVectors::KeyAndValue => page_layout(level, dtype, stored, head_dim),
        // The products with keys and with values need the same elements in two orders.
        CachedVectors::Shared => PageLayout::Rows { head_dim },
    };
    PageFormat { layout, vectors, stored, is_encoded: KvCacheType::of(dtype) != Some(stored) }
}

/// Returns the bytes of a page of keys and of a page of values, of [`PAGE_TOKENS`](crate::PAGE_TOKENS) tokens, on a CPU queue of
/// `level`, for a computation in `dtype` and a cache of type `stored`; 0 bytes of values if the keys are the values as well.
///
/// # Panics
/// If such a cache does not hold numbers of `dtype` ([`KvCacheType::holds`]).
pub fn page_bytes(level: CpuLevel, dtype: DType, stored: KvCacheType, shape: CacheShape) -> [usize; 2] {
    page_format(level, dtype, stored, shape).head_bytes().map(|bytes| shape.key_value_heads * bytes)
}
