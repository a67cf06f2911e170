//! Choice of the layout of pages: that of the algorithm which attends to them.

use lockstep_plan::DType;

use super::pages::PageLayout;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::pages::PanelLayout;
use crate::CpuLevel;
#[cfg(target_arch = "aarch64")]
use crate::cpu::gemm::panels::NeonBf16;
#[cfg(target_arch = "x86_64")]
use crate::cpu::gemm::panels::{Avx512DotBlock, Tiles};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::cpu::gemm::panels::{MicroKernel, Order};

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

/// Returns the layout of pages that a queue of `level` uses.
pub(super) fn page_layout(level: CpuLevel, dtype: DType, head_dim: usize) -> PageLayout {
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
    if dtype == DType::F32 { PageLayout::Transposed { head_dim } } else { PageLayout::Rows { head_dim } }
}

/// Returns the elements of a page of keys and of a page of values, of [`PAGE_TOKENS`](crate::PAGE_TOKENS) tokens, on a CPU queue of
/// `level`.
pub fn page_elements(level: CpuLevel, dtype: DType, key_value_heads: usize, head_dim: usize) -> [usize; 2] {
    page_layout(level, dtype, head_dim).head_elements().map(|elements| key_value_heads * elements)
}
