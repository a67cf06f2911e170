//! Dropout, whose mask is a function of (sequence key, position, head, feature, site) and so needs no memory.

use lockstep_plan::{DType, random::Philox};

use super::{
    CpuQueue, check_disjoint, check_elementwise,
    elementwise::{load, store},
    simd::{Float, with_float},
    tasks::{BLOCK, Block, Operand, expect, rows_per_task},
};
use crate::{Dropout, View};

/// What of a [`Dropout`] is the same for every element.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mask {
    /// Words below it drop their element.
    pub(super) threshold: u32,
    /// Factor on the elements that are kept.
    pub(super) scale: f32,
    site: u32,
}

impl Mask {
    /// # Panics
    /// If the probability does not lie in `[0, 1)`.
    pub(super) fn new(dropout: &Dropout<'_>) -> Self {
        let probability = dropout.probability;
        assert!((0.0..1.0).contains(&probability), "dropout probability {probability} must lie in [0, 1)");
        // word >= probability · 2^32, for an integer word; the product is exact in f64.
        let threshold = (f64::from(probability) * f64::from(1 << 16) * f64::from(1 << 16)).ceil() as u32;
        Self { threshold, scale: 1.0 / (1.0 - probability), site: dropout.site }
    }

    /// The random words of features `first_feature ..` at one position of one head; `first_feature` is a
    /// multiple of 4.
    #[inline(always)]
    pub(super) fn words(
        self,
        key: [u32; 2],
        position: u32,
        head: u32,
        first_feature: usize,
        words: &mut [[u32; 4]],
    ) {
        let philox = Philox::new(u64::from(key[0]) | u64::from(key[1]) << 32);
        let first = (first_feature / 4) as u32;
        for (i, words) in words.iter_mut().enumerate() {
            *words = philox.block([position, head, first.wrapping_add(i as u32), self.site]);
        }
    }

    /// `x`, scaled where its word keeps it, else 0.
    #[inline(always)]
    pub(super) fn apply(self, word: u32, x: f32) -> f32 {
        if word >= self.threshold { x * self.scale } else { 0.0 }
    }
}

pub(super) fn dropout(queue: &CpuQueue, dropout: Dropout<'_>, x: View<'_>, y: View<'_>) {
    let mask = Mask::new(&dropout);
    let (rows, width) = x.shape().as_matrix();
    let sequences = dropout.keys.elements() / 2;
    expect("dropout: keys", dropout.keys, DType::U32, sequences * 2);
    expect("dropout: y", y, x.dtype(), x.elements());
    assert!(
        sequences > 0 && rows.is_multiple_of(sequences),
        "dropout: {rows} rows cannot be cut into {sequences} sequences"
    );
    check_elementwise(y, &[x]);
    check_disjoint(&[y], &[dropout.keys]);
    let sequence_len = rows / sequences;
    with_float!(x.dtype(), T => {
        let (x, y) = (Operand::<T>::new(x), Operand::<T>::new(y));
        let keys = Operand::<u32>::new(dropout.keys);
        queue.for_each_range(rows, rows_per_task(rows, width), #[inline(always)] |rows| {
            for row in rows {
                let sequence = row / sequence_len;
                // SAFETY: the keys are only read.
                let key = unsafe { keys.read(2 * sequence..2 * sequence + 2) };
                let position = (row % sequence_len) as u32;
                for column in (0..width).step_by(BLOCK) {
                    let n = BLOCK.min(width - column);
                    let first = row * width + column;
                    // SAFETY: this task alone writes this row, and not while the slice lives.
                    let source = unsafe { x.read(first..first + n) };
                    let result = drop_block(mask, [key[0], key[1]], position, column, source);
                    // SAFETY: this task alone touches this row, and no slice of it lives.
                    store(&result.0[..n], unsafe { y.write(first..first + n) });
                }
            }
        });
    });
}

/// Up to a block of one row, from column `column` on.
#[inline(always)]
fn drop_block<T: Float>(mask: Mask, key: [u32; 2], position: u32, column: usize, x: &[T]) -> Block {
    let mut words = [[0; 4]; BLOCK / 4];
    mask.words(key, position, 0, column, &mut words[..x.len().div_ceil(4)]);
    let mut block = Block::ZERO;
    load(x, &mut block.0[..x.len()]);
    for (x, word) in block.0.iter_mut().zip(words.as_flattened()) {
        *x = mask.apply(*word, *x);
    }
    block
}
