//! Dropout with a stateless mask: a function of (sequence key, position, head, feature, site), which is recomputed
//! and never stored.

use lockstep_plan::{DType, random::Philox};

use super::{
    CpuQueue,
    operands::{Operand, check_disjoint, check_elementwise, expect},
    simd::{BLOCK, Block, Float, inlined, with_float},
    tasks::rows_per_task,
};
use crate::{Dropout, TokenPositions, View};

/// The fields of a [`Dropout`] that are the same for every element, prepared for use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mask {
    /// Random words below this threshold drop their element.
    pub(super) threshold: u32,
    /// Factor on kept elements.
    pub(super) scale: f32,
    pub(super) site: u32,
}

impl Mask {
    /// # Panics
    /// If the probability does not lie in `[0, 1)`.
    pub(super) fn new(dropout: &Dropout<'_>) -> Self {
        let probability = dropout.probability;
        assert!((0.0..1.0).contains(&probability), "dropout probability {probability} must lie in [0, 1)");
        // word >= probability · 2^32, for an integer word; the product is exact in f64.
        let threshold = (f64::from(probability) * 2.0_f64.powi(32)).ceil() as u32;
        Self { threshold, scale: 1.0 / (1.0 - probability), site: dropout.site }
    }

    /// Returns the random words of the features from `first_feature` on, a multiple of 4, at one position of one
    /// head.
    #[inline(always)]
    fn words(self, key: [u32; 2], position: u32, head: u32, first_feature: usize) -> [u32; BLOCK] {
        let philox = Philox::new(u64::from(key[0]) | u64::from(key[1]) << 32);
        let first = (first_feature / 4) as u32;
        // One array for each word of a Philox block, so that the loop over blocks vectorizes.
        let mut columns = [[0; BLOCK / 4]; 4];
        for i in 0..BLOCK / 4 {
            let words = philox.block([position, head, first.wrapping_add(i as u32), self.site]);
            for (column, word) in columns.iter_mut().zip(words) {
                column[i] = word;
            }
        }
        let mut words = [0; BLOCK];
        for (i, four) in words.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            *four = [columns[0][i], columns[1][i], columns[2][i], columns[3][i]];
        }
        words
    }

    /// Returns `x`, scaled, if its word keeps it, else 0.
    #[inline(always)]
    pub(super) fn apply(self, word: u32, x: f32) -> f32 {
        if word >= self.threshold { x * self.scale } else { 0.0 }
    }
}

pub(super) fn dropout(
    queue: &CpuQueue,
    dropout: Dropout<'_>,
    places: TokenPositions,
    first_feature: u32,
    x: View<'_>,
    y: View<'_>,
) {
    let mask = Mask::new(&dropout);
    let (rows, width) = x.shape().as_matrix();
    let sequences = dropout.keys.elements() / 2;
    expect("dropout: keys", dropout.keys, DType::U32, sequences * 2);
    expect("dropout: y", y, x.dtype(), x.elements());
    assert!(
        places.first_row + rows <= sequences * places.seq_len,
        "dropout: {rows} rows from row {} on are not among those of {sequences} sequences of {} tokens",
        places.first_row,
        places.seq_len
    );
    check_elementwise(y, &[x]);
    check_disjoint(&[y], &[dropout.keys]);
    // Words come in fours, and the first feature may be any of the four.
    let unused = first_feature as usize % 4;
    with_float!(x.dtype(), T => {
        let (x, y) = (Operand::<T>::new(x), Operand::<T>::new(y));
        let keys = Operand::<u32>::new(dropout.keys);
        queue.for_each_range(rows, rows_per_task(rows, width), inlined!(|rows, isa| {
            let mut results = Block::ZERO;
            for row in rows {
                let (sequence, position) = places.of(row);
                // SAFETY: the keys are only read.
                let key = unsafe { keys.read(2 * sequence..2 * sequence + 2) };
                let (mut column, mut unused) = (0, unused);
                while column < width {
                    let feature = first_feature as usize + column - unused;
                    let words = mask.words([key[0], key[1]], position as u32, 0, feature);
                    let words = &words[unused..];
                    let first = row * width + column;
                    let block = first..first + words.len().min(width - column);
                    (column, unused) = (column + words.len(), 0);
                    // SAFETY: this task alone writes this row, and not while the slice lives.
                    let source = unsafe { x.read(block.clone()) };
                    for ((result, x), word) in results.0.iter_mut().zip(source).zip(words.iter().copied()) {
                        *result = mask.apply(word, x.load());
                    }
                    // SAFETY: this task alone accesses this row, and no slice of it is used any more.
                    let target = unsafe { y.write(block) };
                    T::store_all(isa, &results.0[..target.len()], target);
                }
            }
        }));
    });
}
