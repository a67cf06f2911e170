//! Chooses the micro-kernel and the packing of a product by its types and the queue's level.

use half::{bf16, f16};
use lockstep_plan::DType;

#[cfg(target_arch = "aarch64")]
use super::{
    aarch64::{Bf16Dots, F32x4, Neon, NeonBf16},
    units::BfloatPair,
};
#[cfg(target_arch = "x86_64")]
use super::{
    amx,
    kernel::{Avx2, Avx512, Avx512Dot, Avx512Wide, MicroKernel},
    lanes::{Bf16Pairs, Dot, F32x8, F32x16},
    pack::Packing,
    split,
    units::BfloatPair,
};
use super::{
    driver, grouped, integer,
    kernel::Portable,
    lanes::Plain,
    problem::{Problem, block_problem, problem},
    units::{Single, Widened},
};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::CpuLevel;
use crate::{
    BlockActivations, BlockGemm, CpuQueue, Gemm, GemmKernels, GemmLayout, GroupedGemm, Write,
    cpu::{operands::check_disjoint, simd::Float},
};
#[cfg(target_arch = "x86_64")]
use crate::{F32Products, Summation};

impl GemmKernels for CpuQueue {
    fn gemm_rows(&self, gemm: Gemm<'_>, rows: usize) {
        gemms(self, (gemm.a.dtype(), gemm.c.dtype()), std::iter::once((gemm, rows)));
    }

    fn grouped_gemm(&self, gemm: GroupedGemm<'_>) {
        gemms(self, (gemm.a.dtype(), gemm.c.dtype()), grouped::products(gemm));
    }
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

/// Computes a product with quantized weights.
pub(in crate::cpu) fn block_gemm(queue: &CpuQueue, gemm: BlockGemm<'_>) {
    check_disjoint(&[gemm.c], &[gemm.a, gemm.b.bytes()]);
    gemm.bias.into_iter().for_each(|bias| check_disjoint(&[gemm.c], &[bias]));
    match (gemm.a.dtype(), gemm.c.dtype()) {
        (DType::F32, DType::F32) => multiply_blocks::<f32, f32>(queue, gemm),
        (DType::BF16, DType::F32) => multiply_blocks::<bf16, f32>(queue, gemm),
        (DType::BF16, DType::BF16) => multiply_blocks::<bf16, bf16>(queue, gemm),
        (DType::F16, DType::F32) => multiply_blocks::<f16, f32>(queue, gemm),
        (DType::F16, DType::F16) => multiply_blocks::<f16, f16>(queue, gemm),
        (a, c) => panic!("no product of {a} operands and quantized weights into {c}"),
    }
}

/// Runs `$work` with `$V` bound to the vectors of integers that a CPU level has.
macro_rules! with_integer_lanes {
    ($level:expr, $V:ident => $work:expr) => {
        match $level {
            #[cfg(target_arch = "x86_64")]
            $crate::CpuLevel::Avx512 | $crate::CpuLevel::Avx512Bf16 | $crate::CpuLevel::AmxBf16
                if std::arch::is_x86_feature_detected!("avx512vnni") =>
            {
                type $V = $crate::cpu::gemm::integer_lanes::VnniIntegers;
                $work
            }
            #[cfg(target_arch = "x86_64")]
            $crate::CpuLevel::Avx2
            | $crate::CpuLevel::Avx512
            | $crate::CpuLevel::Avx512Bf16
            | $crate::CpuLevel::AmxBf16 => {
                type $V = $crate::cpu::gemm::integer_lanes::Avx2Integers;
                $work
            }
            #[cfg(target_arch = "aarch64")]
            $crate::CpuLevel::Neon | $crate::CpuLevel::NeonBf16
                if std::arch::is_aarch64_feature_detected!("dotprod") =>
            {
                type $V = $crate::cpu::gemm::neon_integers::NeonIntegers<true>;
                $work
            }
            #[cfg(target_arch = "aarch64")]
            $crate::CpuLevel::Neon | $crate::CpuLevel::NeonBf16 => {
                type $V = $crate::cpu::gemm::neon_integers::NeonIntegers<false>;
                $work
            }
            _ => {
                type $V = $crate::cpu::gemm::integer_lanes::PlainIntegers;
                $work
            }
        }
    };
}
pub(super) use with_integer_lanes;

/// Computes a product with quantized weights, a linear layer by the queue's type of activations. Rows of more than
/// [`integer::MOST_DEPTH`] elements stay as they are, and so do all with weights whose codes are no integers.
fn multiply_blocks<T: Multiply<C>, C: Float>(queue: &CpuQueue, gemm: BlockGemm<'_>) {
    let problem = block_problem::<T, C>(gemm);
    let are_integers = gemm.layout == GemmLayout::NT
        && gemm.write == Write::Overwrite
        && gemm.b.format().has_integer_codes()
        && problem.k <= integer::MOST_DEPTH;
    if queue.block_activations == BlockActivations::Float || !are_integers {
        return T::multiply(queue, std::iter::once(problem));
    }
    with_integer_lanes!(queue.level, V => integer::multiply::<V, T, C>(queue, &problem));
}

/// A type of operands that can be multiplied into outputs of type `C`.
pub(super) trait Multiply<C: Float>: Float {
    /// Computes `problems` at the queue's level. No output may overlap an operand.
    fn multiply<'a>(queue: &CpuQueue, problems: impl Iterator<Item = Problem<'a, Self, C>>);
}

impl Multiply<Self> for f32 {
    fn multiply<'a>(queue: &CpuQueue, problems: impl Iterator<Item = Problem<'a, Self, Self>>) {
        multiply_f32(queue, problems);
    }
}

impl<C: Float> Multiply<C> for bf16 {
    fn multiply<'a>(queue: &CpuQueue, problems: impl Iterator<Item = Problem<'a, Self, C>>) {
        multiply_bf16(queue, problems);
    }
}

impl<C: Float> Multiply<C> for f16 {
    fn multiply<'a>(queue: &CpuQueue, problems: impl Iterator<Item = Problem<'a, Self, C>>) {
        multiply_f16(queue, problems);
    }
}

/// Evaluates an expression with the f32 vector `$vector` of the queue's level and the sizes of its tiles: the rows of a tile, of a
/// thin one, and its vectors.
///
/// The expression may use the instructions of the vector.
macro_rules! with_f32_tiles {
    ($queue:expr, |$vector:ident, $rows:ident, $thin:ident, $vectors:ident| $work:expr) => {{
        macro_rules! with {
            ($lanes:ty, $r:literal, $t:literal, $v:literal) => {{
                type $vector = $lanes;
                const $rows: usize = $r;
                const $thin: usize = $t;
                const $vectors: usize = $v;
                $work
            }};
        }
        match $queue.level {
            #[cfg(target_arch = "x86_64")]
            crate::CpuLevel::Avx2 => with!(super::lanes::F32x8, 6, 2, 2),
            #[cfg(target_arch = "x86_64")]
            crate::CpuLevel::Avx512 | crate::CpuLevel::Avx512Bf16 | crate::CpuLevel::AmxBf16 => {
                with!(super::lanes::F32x16, 12, 4, 2)
            }
            #[cfg(target_arch = "aarch64")]
            crate::CpuLevel::Neon | crate::CpuLevel::NeonBf16 => with!(super::aarch64::F32x4, 12, 4, 2),
            _ => with!(super::lanes::Plain, 4, 1, 1),
        }
    }};
}
pub(super) use with_f32_tiles;

/// Returns true if wide tiles waste little of a product of `n` columns: at most 4 % more than others. Both give the same bits.
/// Products that are made together have equally many columns.
#[cfg(target_arch = "x86_64")]
fn is_wide(n: usize) -> bool {
    25 * n.next_multiple_of(Avx512Wide::COLUMNS) <= 26 * n.next_multiple_of(Avx512::COLUMNS)
}

/// Multiplies f32, or what is widened to it, by FMA of AVX-512.
#[cfg(target_arch = "x86_64")]
fn multiply_by_fma<'a, U: Packing, C: Float>(
    queue: &CpuQueue,
    problems: impl Iterator<Item = Problem<'a, U::Source, C>>,
) where
    F32x16: Dot<U::Source>,
    U::Source: 'a,
{
    let mut problems = problems.peekable();
    if problems.peek().is_some_and(|problem| is_wide(problem.n)) {
        driver::multiply::<Avx512Wide, U, F32x16, _>(queue, problems);
    } else {
        driver::multiply::<Avx512, U, F32x16, _>(queue, problems);
    }
}

/// Returns true if f32 is multiplied by bf16 tiles: products of stored matrices whose bits may depend on the shape. Products that are
/// made together have operands of the same form.
#[cfg(target_arch = "x86_64")]
fn is_split(queue: &CpuQueue, problem: &Problem<'_, f32, f32>) -> bool {
    queue.level == CpuLevel::AmxBf16
        && queue.f32_products == F32Products::SplitBf16
        && queue.summation == Summation::ByShape
        && problem.a.is_stored()
        && problem.b.is_stored()
}

fn multiply_f32<'a>(queue: &CpuQueue, problems: impl Iterator<Item = Problem<'a, f32, f32>>) {
    match queue.level {
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx2 => driver::multiply::<Avx2, Single, F32x8, _>(queue, problems),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx512 | CpuLevel::Avx512Bf16 | CpuLevel::AmxBf16 => {
            let mut problems = problems.peekable();
            match problems.peek() {
                Some(problem) if is_split(queue, problem) => {
                    driver::multiply::<amx::SplitTiles, split::ThreeParts, F32x16, _>(queue, problems);
                }
                _ => multiply_by_fma::<Single, _>(queue, problems),
            }
        }
        #[cfg(target_arch = "aarch64")]
        CpuLevel::Neon | CpuLevel::NeonBf16 => driver::multiply::<Neon, Single, F32x4, _>(queue, problems),
        _ => driver::multiply::<Portable, Single, Plain, _>(queue, problems),
    }
}

fn multiply_bf16<'a, C: Float>(queue: &CpuQueue, problems: impl Iterator<Item = Problem<'a, bf16, C>>) {
    match queue.level {
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx2 => driver::multiply::<Avx2, Widened<bf16>, F32x8, _>(queue, problems),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx512 => multiply_by_fma::<Widened<bf16>, _>(queue, problems),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx512Bf16 => driver::multiply::<Avx512Dot, BfloatPair, Bf16Pairs, _>(queue, problems),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::AmxBf16 => driver::multiply::<amx::Tiles, BfloatPair, Bf16Pairs, _>(queue, problems),
        #[cfg(target_arch = "aarch64")]
        CpuLevel::Neon => driver::multiply::<Neon, Widened<bf16>, F32x4, _>(queue, problems),
        #[cfg(target_arch = "aarch64")]
        CpuLevel::NeonBf16 => driver::multiply::<NeonBf16, BfloatPair, Bf16Dots, _>(queue, problems),
        _ => driver::multiply::<Portable, Widened<bf16>, Plain, _>(queue, problems),
    }
}

fn multiply_f16<'a, C: Float>(queue: &CpuQueue, problems: impl Iterator<Item = Problem<'a, f16, C>>) {
    match queue.level {
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx2 => driver::multiply::<Avx2, Widened<f16>, F32x8, _>(queue, problems),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx512 | CpuLevel::Avx512Bf16 | CpuLevel::AmxBf16 => {
            driver::multiply::<Avx512, Widened<f16>, F32x16, _>(queue, problems);
        }
        #[cfg(target_arch = "aarch64")]
        CpuLevel::Neon | CpuLevel::NeonBf16 => {
            driver::multiply::<Neon, Widened<f16>, F32x4, _>(queue, problems);
        }
        _ => driver::multiply::<Portable, Widened<f16>, Plain, _>(queue, problems),
    }
}
