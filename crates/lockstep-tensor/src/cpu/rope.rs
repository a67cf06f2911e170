//! Rotary position embedding (Su et al., 2021) in the half-split form.
//!
//! Sines and cosines of a token are computed once, for a block of frequencies, and applied to all its heads.

use lockstep_plan::DType;

use super::{
    CpuQueue, check_disjoint, check_elementwise,
    elementwise::{load, store},
    simd::{Float, sin_cos, with_float},
    tasks::{BLOCK, Block, Operand, expect, rows_per_task},
};
use crate::{Rotation, View};

pub(super) fn rope(
    queue: &CpuQueue,
    x: View<'_>,
    positions: View<'_>,
    inverse_frequencies: View<'_>,
    rotation: Rotation,
    y: View<'_>,
) {
    let half = inverse_frequencies.elements();
    let tokens = positions.elements();
    expect("rope: positions", positions, DType::U32, tokens);
    expect("rope: inverse frequencies", inverse_frequencies, DType::F32, half);
    expect("rope: y", y, x.dtype(), x.elements());
    if x.elements() == 0 {
        return;
    }
    let width = x.elements() / tokens.max(1);
    assert!(
        half > 0 && width * tokens == x.elements() && width.is_multiple_of(2 * half),
        "rope: {x:?} is not [{tokens} tokens, heads, {} elements]",
        2 * half
    );
    check_elementwise(y, &[x]);
    check_disjoint(&[y], &[positions, inverse_frequencies]);
    let sign = match rotation {
        Rotation::Forward => 1.0,
        Rotation::Backward => -1.0,
    };
    with_float!(x.dtype(), T => {
        let (x, y) = (Operand::<T>::new(x), Operand::<T>::new(y));
        let positions = Operand::<u32>::new(positions);
        let frequencies = Operand::<f32>::new(inverse_frequencies);
        queue.for_each_range(tokens, rows_per_task(tokens, width), #[inline(always)] |tokens| {
            for token in tokens {
                for start in (0..half).step_by(BLOCK) {
                    let n = BLOCK.min(half - start);
                    // SAFETY: positions and frequencies are only read.
                    let (position, frequencies) = unsafe {
                        (positions.read(token..token + 1)[0], frequencies.read(start..start + n))
                    };
                    let turn = Turn::new(position, frequencies, sign);
                    for head in (token * width..(token + 1) * width).step_by(2 * half) {
                        let first = head + start;
                        let second = first + half;
                        // SAFETY: this task alone writes this token, and not while the slices live.
                        let (a, b) = unsafe { (x.read(first..first + n), x.read(second..second + n)) };
                        let [a, b] = turn.apply(a, b);
                        // SAFETY: this task alone touches this token, and the two halves do not overlap.
                        unsafe {
                            store(&a.0[..n], y.write(first..first + n));
                            store(&b.0[..n], y.write(second..second + n));
                        }
                    }
                }
            }
        });
    });
}

/// The rotations of up to a block of pairs.
struct Turn {
    sin: Block,
    cos: Block,
}

impl Turn {
    /// The angles are rounded to f32 before the sine is taken, as models were trained with.
    #[inline(always)]
    fn new(position: u32, frequencies: &[f32], sign: f32) -> Self {
        let mut turn = Self { sin: Block::ZERO, cos: Block::ZERO };
        let position = position as f32;
        for ((sin, cos), frequency) in turn.sin.0.iter_mut().zip(&mut turn.cos.0).zip(frequencies) {
            let (s, c) = sin_cos(position * frequency);
            *sin = sign * s;
            *cos = c;
        }
        turn
    }

    #[inline(always)]
    fn apply<T: Float>(&self, a: &[T], b: &[T]) -> [Block; 2] {
        let n = a.len();
        let (mut first, mut second) = (Block::ZERO, Block::ZERO);
        load(a, &mut first.0[..n]);
        load(b, &mut second.0[..n]);
        let pairs = first.0[..n].iter_mut().zip(&mut second.0[..n]);
        for ((a, b), (sin, cos)) in pairs.zip(self.sin.0.iter().zip(&self.cos.0)) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
        [first, second]
    }
}
