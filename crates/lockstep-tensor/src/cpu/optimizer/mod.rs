//! Optimizer steps, each one pass over its operands.
//!
//! Weights and state are f32, or bf16 that is widened block by block, updated in f32 and rounded again. Rounding is
//! to nearest or stochastic, so that changes smaller than a rounding step accumulate. An optimizer is a loop over a
//! block of f32 ([`update`] does the rest), in a file of its own with its reference.

mod adamw;
mod lion;
mod muon;
mod norm;
mod rounding;
mod sgd;
mod steps;

use std::ops::Range;

use half::{bf16, f16};
use lockstep_plan::DType;

pub use self::muon::muon_flops;
use self::rounding::Rounder;
use super::{
    CpuQueue,
    operands::{Operand, check_disjoint, expect},
    simd::{BLOCK, Block, Float, Isa, inlined},
    tasks::elements_per_task,
};
use crate::{Rounding, View};

/// Weights or optimizer state: f32, or bf16 with its rounding.
enum Stored<'a> {
    F32(Operand<'a, f32>),
    Bf16(Operand<'a, bf16>, Rounder),
}

impl<'a> Stored<'a> {
    /// # Panics
    /// If the view is neither f32 nor bf16.
    fn new(view: View<'a>, rounding: Rounding, number: usize) -> Self {
        match view.dtype() {
            DType::F32 => Self::F32(Operand::new(view)),
            DType::BF16 => Self::Bf16(Operand::new(view), Rounder::new(rounding, number)),
            other => panic!("optimizer: weights and state are f32 or bf16, not {other}"),
        }
    }

    /// Returns the elements of a block as f32: in place if they are f32 in memory, else converted in `block`.
    ///
    /// # Safety
    /// Nothing else may access these elements while the slice lives.
    #[inline(always)]
    unsafe fn load<'b>(&self, range: Range<usize>, block: &'b mut Block) -> &'b mut [f32]
    where
        'a: 'b,
    {
        match self {
            // SAFETY: promised by the caller.
            Self::F32(operand) => unsafe { operand.write(range) },
            Self::Bf16(operand, _) => {
                let block = &mut block.0[..range.len()];
                // SAFETY: promised by the caller.
                for (x, stored) in block.iter_mut().zip(unsafe { operand.read(range) }) {
                    *x = stored.load();
                }
                block
            }
        }
    }

    /// Rounds the elements of a block back to memory; does nothing if they are f32 there.
    ///
    /// # Safety
    /// As for [`Stored::load`].
    #[inline(always)]
    unsafe fn store(&self, isa: Isa, range: Range<usize>, values: &[f32]) {
        if let Self::Bf16(operand, rounder) = self {
            let start = range.start;
            // SAFETY: promised by the caller.
            rounder.round(isa, start, values, unsafe { operand.write(range) });
        }
    }
}

/// The copy of the weights that kernels read, if they read another precision.
enum Rounded<'a> {
    None,
    Bf16(Operand<'a, bf16>),
    F16(Operand<'a, f16>),
}

impl<'a> Rounded<'a> {
    /// # Panics
    /// If the view is not bf16 or f16, has another number of elements than the gradient, or overlaps an operand.
    fn new(view: Option<View<'a>>, gradient: View<'_>, stored: &[View<'_>]) -> Self {
        let Some(view) = view else { return Self::None };
        expect("optimizer: rounded weights", view, view.dtype(), gradient.elements());
        check_disjoint(&[view, gradient], stored);
        match view.dtype() {
            DType::BF16 => Self::Bf16(Operand::new(view)),
            DType::F16 => Self::F16(Operand::new(view)),
            other => panic!("weights are rounded to bf16 or f16, not to {other}"),
        }
    }

    /// Rounds the weights from element `start` on.
    ///
    /// # Safety
    /// Nothing else may access these elements of the copy.
    #[inline(always)]
    unsafe fn store(&self, isa: Isa, start: usize, weights: &[f32]) {
        let range = start..start + weights.len();
        match self {
            Self::None => {}
            // SAFETY: promised by the caller.
            Self::Bf16(copy) => Float::store_all(isa, weights, unsafe { copy.write(range) }),
            // SAFETY: promised by the caller.
            Self::F16(copy) => Float::store_all(isa, weights, unsafe { copy.write(range) }),
        }
    }
}

/// Operands of an elementwise step: the weights first, then the optimizer state.
struct Operands<'a, const N: usize> {
    names: [&'static str; N],
    stored: [View<'a>; N],
    gradient: View<'a>,
    rounded: Option<View<'a>>,
    rounding: Rounding,
}

/// Calls `rule` with the blocks of all operands as f32, the gradient last; `rule` updates the others, and they are
/// stored. It must be `inlined!`, or it is compiled for the lowest level.
///
/// # Panics
/// If the operands' types or sizes do not fit, or they overlap.
#[inline(always)]
fn update<const N: usize>(
    queue: &CpuQueue,
    operands: &Operands<'_, N>,
    rule: impl Fn([&mut [f32]; N], &[f32]) + Sync,
) {
    let Operands { names, stored, gradient, rounded, rounding } = *operands;
    let elements = gradient.elements();
    expect("optimizer: gradient", gradient, DType::F32, elements);
    for (name, view) in names.into_iter().zip(stored) {
        expect(name, view, view.dtype(), elements);
    }
    check_disjoint(&stored, &[gradient]);
    let rounded = Rounded::new(rounded, gradient, &stored);
    let stored: [Stored<'_>; N] = std::array::from_fn(|i| Stored::new(stored[i], rounding, i));
    let gradient = Operand::<f32>::new(gradient);
    queue.for_each_range(
        elements,
        elements_per_task(elements),
        inlined!(|range, isa| {
            let mut blocks = [Block::ZERO; N];
            for start in range.clone().step_by(BLOCK) {
                let block = start..range.end.min(start + BLOCK);
                // SAFETY: the operands do not overlap, and each range of them belongs to one task.
                unsafe {
                    let mut blocks = blocks.each_mut().map(Some);
                    let mut values: [&mut [f32]; N] = std::array::from_fn(inlined!(
                        |i| stored[i].load(block.clone(), blocks[i].take().expect("taken once"))
                    ));
                    rule(values.each_mut().map(|values| &mut **values), gradient.read(block.clone()));
                    for (stored, values) in stored.iter().zip(&values) {
                        stored.store(isa, block.clone(), values);
                    }
                    rounded.store(isa, start, values[0]);
                }
            }
        }),
    );
}
