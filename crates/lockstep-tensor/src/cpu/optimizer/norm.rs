//! The sum of squares for gradient clipping.

use std::sync::{Mutex, PoisonError};

use lockstep_plan::{DType, exact::ExactSum};

use super::super::{CpuQueue, operands::expect, tasks::is_parallel};
use crate::{View, cpu::simd::inlined};

/// Number of elements whose squares are summed before they enter the exact sum; shards start at multiples of it.
const NORM_BLOCK: usize = 1024;
/// Blocks of squares of one task.
const NORM_BLOCKS_PER_TASK: usize = 64;

pub(super) fn sum_of_squares(queue: &CpuQueue, x: View<'_>) -> ExactSum {
    let elements = x.elements();
    expect("sum_of_squares: x", x, DType::F32, elements);
    // SAFETY: this kernel writes nothing.
    let x = unsafe { x.slice::<f32>() };
    let sum = |part: &[f32]| {
        queue.level.run(inlined!(|| {
            let mut sum = ExactSum::default();
            for block in part.chunks(NORM_BLOCK) {
                sum.add(squares_of_block(block));
            }
            sum
        }))
    };
    // The sum is exact, so the order of the merges does not matter.
    let total = Mutex::new(ExactSum::default());
    let part = if is_parallel(elements) { NORM_BLOCK * NORM_BLOCKS_PER_TASK } else { elements.max(1) };
    queue.pool.run(elements.div_ceil(part), |task| {
        let sum = sum(&x[task * part..elements.min((task + 1) * part)]);
        total.lock().unwrap_or_else(PoisonError::into_inner).merge(&sum);
    });
    total.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Sums the squares of a block. Each square is exact in f64, and the order of the additions is part of the
/// definition.
#[inline(always)]
fn squares_of_block(block: &[f32]) -> f64 {
    const LANES: usize = 16;
    let mut lanes = [0.0_f64; LANES];
    let mut chunks = block.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(*x) * f64::from(*x);
        }
    }
    for (lane, x) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane += f64::from(*x) * f64::from(*x);
    }
    lanes.into_iter().sum()
}
