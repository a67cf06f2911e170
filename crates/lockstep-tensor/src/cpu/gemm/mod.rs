//! GEMM, by the method of BLIS (Van Zee and van de Geijn, "BLIS: A Framework for Rapidly Instantiating BLAS
//! Functionality", 2015). Operands are packed into small panels in the order in which a micro-kernel reads them, and
//! the micro-kernel keeps a tile of C in registers.
//!
//! `pack` converts the three layouts and all types to panels. `kernel` and `amx` hold one micro-kernel for each CPU
//! level. `driver` splits the product into blocks and tasks. `store` finishes a tile (bias, accumulation, rounding).
//! `rows` computes products with few rows, as in generation, and reads the weights in place. `grouped` makes one
//! product for each expert of a mixture.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(all(test, target_arch = "x86_64"))]
pub(super) mod amx_emulator;
mod blocks;
mod driver;
mod grouped;
mod kernel;
mod lanes;
mod pack;
mod peak;
#[cfg(test)]
mod reference;
mod rows;
mod scratch;
#[cfg(target_arch = "x86_64")]
mod split;
mod store;
#[cfg(test)]
mod tests;
mod transpose;

use half::{bf16, f16};
use lockstep_plan::DType;

#[cfg(target_arch = "x86_64")]
use super::F32Products;
use super::{CpuLevel, CpuQueue, check_disjoint, simd::Float};
use crate::{Gemm, GemmLayout, View, Write};
pub(super) use grouped::grouped;
use kernel::Portable;
#[cfg(target_arch = "x86_64")]
use kernel::{Avx2, Avx512, Avx512Dot};
use lanes::Plain;
#[cfg(target_arch = "x86_64")]
use lanes::{Bf16Pairs, F32x8, F32x16};
#[cfg(target_arch = "x86_64")]
use pack::BfloatPair;
use pack::{Operand, Order, Single, Widened, WidenedHalf};
pub use peak::{Peak, measure_peak, measure_peak_within};

/// Building blocks for products of blocks in other modules.
pub(super) mod panels {
    #[cfg(target_arch = "x86_64")]
    pub(in crate::cpu) use super::{
        amx::Tiles,
        kernel::{Avx512Dot, ColumnPanels, MicroKernel, RowPanels},
        pack::{BfloatPair, Operand, Order, pack},
        store::Tile,
    };
}
pub(super) use scratch::Scratch;
use store::Window;

/// A product whose operands are slices: `C [m, n] (+)= A [m, k] · B [k, n] (+ bias [n])`.
#[derive(Clone, Copy)]
struct Problem<'a, T, C> {
    m: usize,
    /// Rows of the whole product, of which these `m` are a part; they select the algorithm and so the bits.
    of_rows: usize,
    n: usize,
    k: usize,
    a: Operand<'a, T>,
    b: Operand<'a, T>,
    c: Window<C>,
    bias: Option<&'a [T]>,
    write: Write,
}

/// Runs a product, or a part of one with `rows` rows; see [`Gemm`].
pub(super) fn gemm(queue: &CpuQueue, gemm: Gemm<'_>, rows: usize) {
    let types = (gemm.a.dtype(), gemm.c.dtype());
    gemms(queue, types, std::iter::once((gemm, rows)));
}

/// Runs products of operands of the first type into outputs of the second. Each comes with the rows of the product
/// that it is a part of. No output may overlap any operand of another product.
fn gemms<'a>(queue: &CpuQueue, types: (DType, DType), gemms: impl Iterator<Item = (Gemm<'a>, usize)>) {
    let gemms = gemms.inspect(|(gemm, _)| {
        check_disjoint(&[gemm.c], &[gemm.a, gemm.b]);
        gemm.bias.into_iter().for_each(|bias| check_disjoint(&[gemm.c], &[bias]));
    });
    match types {
        (DType::F32, DType::F32) => multiply_f32(queue, gemms.map(problem)),
        (DType::BF16, DType::F32) => multiply_bf16::<f32>(queue, gemms.map(problem)),
        (DType::BF16, DType::BF16) => multiply_bf16::<bf16>(queue, gemms.map(problem)),
        (DType::F16, DType::F32) => multiply_f16::<f32>(queue, gemms.map(problem)),
        (DType::F16, DType::F16) => multiply_f16::<f16>(queue, gemms.map(problem)),
        (a, c) => panic!("no product of {a} operands into {c}"),
    }
}

fn multiply_f32<'a>(queue: &CpuQueue, problems: impl Iterator<Item = Problem<'a, f32, f32>>) {
    #[cfg(target_arch = "x86_64")]
    match queue.level {
        CpuLevel::Portable => {}
        CpuLevel::Avx2 => return driver::multiply::<Avx2, Single, F32x8, _>(queue, problems),
        CpuLevel::AmxBf16 if queue.f32_products == F32Products::SplitBf16 => {
            return driver::multiply::<amx::SplitTiles, split::ThreeParts, F32x16, _>(queue, problems);
        }
        _ => return driver::multiply::<Avx512, Single, F32x16, _>(queue, problems),
    }
    driver::multiply::<Portable, Single, Plain, _>(queue, problems);
}

fn multiply_bf16<'a, C: Float>(queue: &CpuQueue, problems: impl Iterator<Item = Problem<'a, bf16, C>>) {
    #[cfg(target_arch = "x86_64")]
    match queue.level {
        CpuLevel::Portable => {}
        CpuLevel::Avx2 => return driver::multiply::<Avx2, Widened, F32x8, _>(queue, problems),
        CpuLevel::Avx512 => return driver::multiply::<Avx512, Widened, F32x16, _>(queue, problems),
        CpuLevel::Avx512Bf16 => {
            return driver::multiply::<Avx512Dot, BfloatPair, Bf16Pairs, _>(queue, problems);
        }
        CpuLevel::AmxBf16 => {
            return driver::multiply::<amx::Tiles, BfloatPair, Bf16Pairs, _>(queue, problems);
        }
    }
    driver::multiply::<Portable, Widened, Plain, _>(queue, problems);
}

fn multiply_f16<'a, C: Float>(queue: &CpuQueue, problems: impl Iterator<Item = Problem<'a, f16, C>>) {
    #[cfg(target_arch = "x86_64")]
    match queue.level {
        CpuLevel::Portable => {}
        CpuLevel::Avx2 => return driver::multiply::<Avx2, WidenedHalf, F32x8, _>(queue, problems),
        _ => return driver::multiply::<Avx512, WidenedHalf, F32x16, _>(queue, problems),
    }
    driver::multiply::<Portable, WidenedHalf, Plain, _>(queue, problems);
}

/// Checks the shapes of a part of a product, and forms the slices.
fn problem<'a, T: Float, C: Float>((gemm, of_rows): (Gemm<'a>, usize)) -> Problem<'a, T, C> {
    let Gemm { layout, a, b, c, bias, write } = gemm;
    let (m, n) = c.shape().as_matrix();
    let (a_rows, a_columns) = a.shape().as_matrix();
    let (b_rows, b_columns) = b.shape().as_matrix();
    let (a_order, k) = match layout {
        GemmLayout::NN | GemmLayout::NT => (Order::AlongDepth, a_columns),
        GemmLayout::TN => (Order::AcrossDepth, a_rows),
    };
    let b_order = match layout {
        GemmLayout::NT => Order::AlongDepth,
        GemmLayout::NN | GemmLayout::TN => Order::AcrossDepth,
    };
    let expected = |order, outer| if order == Order::AlongDepth { (outer, k) } else { (k, outer) };
    assert!(
        (a_rows, a_columns) == expected(a_order, m)
            && (b_rows, b_columns) == expected(b_order, n)
            && bias.is_none_or(|bias| bias.elements() == n),
        "the shapes of a {layout:?} product do not fit: a {a:?}, b {b:?}, c {c:?}, bias {bias:?}"
    );
    assert!(
        of_rows == m || (of_rows > m && layout != GemmLayout::TN),
        "{m} rows are no part of a {layout:?} product of {of_rows}"
    );
    // SAFETY: `c` overlaps no other operand (checked by the caller), and no other kernel runs meanwhile: a queue runs
    // one kernel at a time, and views cannot be sent to another thread.
    let (a, b, bias, c) = unsafe {
        (a.slice::<T>(), b.slice::<T>(), bias.map(|bias: View<'a>| bias.slice::<T>()), c.slice_mut::<C>())
    };
    Problem {
        m,
        of_rows,
        n,
        k,
        a: Operand::new(a, a_columns, a_order),
        b: Operand::new(b, b_columns, b_order),
        c: Window::new(c.as_mut_ptr(), n),
        bias,
        write,
    }
}
