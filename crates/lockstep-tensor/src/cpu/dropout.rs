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

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;
    use crate::cpu::testing::{
        ACTIVATIONS, assert_close, floats, on_every_queue, random_of, rounded, tensor, values,
    };
    use crate::{Arena, ElementwiseKernels, View};

    const SITE: u32 = 11;

    /// Applies dropout by the definition, element by element.
    fn expected(probability: f32, keys: &[u32], rows: usize, x: &[f64]) -> Vec<f64> {
        let len = rows / (keys.len() / 2);
        let width = x.len() / rows;
        let element = |i: usize| {
            let (row, column) = (i / width, i % width);
            let key = &keys[2 * (row / len)..][..2];
            let philox = Philox::new(u64::from(key[1]) << 32 | u64::from(key[0]));
            let block = philox.block([(row % len) as u32, 0, (column / 4) as u32, SITE]);
            let kept = f64::from(block[column % 4]) >= f64::from(probability) * 2.0_f64.powi(32);
            if kept { f64::from(x[i] as f32 * (1.0 / (1.0 - probability))) } else { 0.0 }
        };
        (0..rows * width).map(element).collect()
    }

    #[test]
    fn the_mask_is_the_documented_function_of_sequence_position_and_feature() {
        for (dtype, (sequences, len, width)) in ACTIVATIONS
            .into_iter()
            .flat_map(|dtype| [(1, 1, 1), (2, 3, 7), (3, 2, 259), (4, 25, 771)].map(|shape| (dtype, shape)))
        {
            let rows = sequences * len;
            let x = random_of(dtype, 1, rows * width);
            let keys: Vec<u32> = (0..2 * sequences as u32).map(|i| i.wrapping_mul(0x9e37_79b9)).collect();
            for probability in [0.0, 0.2, 0.999] {
                let run = |queue: &CpuQueue| {
                    let keys = tensor(&keys);
                    let dropout = Dropout { probability, site: SITE, keys: keys.view() };
                    let shape = [rows, width];
                    let (x, y) = (floats(dtype, shape, &x), floats(dtype, shape, &vec![9.0; rows * width]));
                    let places = TokenPositions::whole(len);
                    queue.dropout(dropout, places, 0, x.view(), y.view());
                    queue.dropout(dropout, places, 0, x.view(), x.view());
                    vec![values(y.view()), values(x.view())]
                };
                let expected = rounded(dtype, &expected(probability, &keys, rows, &x));
                on_every_queue(run, |results| {
                    assert_eq!(results[0], expected, "probability {probability}");
                    assert_eq!(results[1], expected, "in place, probability {probability}");
                });
            }
        }
    }

    #[test]
    fn dropout_is_its_own_backward() {
        let (rows, width, keys) = (4, 5, [1, 2, 3, 4]);
        let dy = random_of(DType::F32, 1, rows * width);
        // Dropout is linear, so a difference over ±1 is its derivative; small steps would vanish in the rounding to
        // f32.
        let loss =
            |x: &[f64]| -> f64 { expected(0.4, &keys, rows, x).iter().zip(&dy).map(|(y, dy)| y * dy).sum() };
        let mut x = vec![0.0; rows * width];
        let gradient: Vec<f64> = (0..rows * width)
            .map(|i| {
                let mut at = |value| {
                    x[i] = value;
                    loss(&x)
                };
                let difference = (at(1.0) - at(-1.0)) / 2.0;
                at(0.0);
                difference
            })
            .collect();
        let backward = |queue: &CpuQueue| {
            let (keys, dx) = (tensor(&keys), floats(DType::F32, [rows, width], &dy));
            let dropout = Dropout { probability: 0.4, site: SITE, keys: keys.view() };
            queue.dropout(dropout, TokenPositions::whole(2), 0, dx.view(), dx.view());
            vec![values(dx.view())]
        };
        on_every_queue(backward, |results| assert_close("dx", &results[0], &gradient, 1e-6, 0.0));
    }

    /// Returns the columns `columns` of some rows.
    fn part_of(x: &[f64], width: usize, rows: &[usize], columns: Range<usize>) -> Vec<f64> {
        rows.iter().flat_map(|row| x[row * width..][columns.clone()].to_vec()).collect()
    }

    #[test]
    fn parts_are_masked_like_the_whole_tensor() {
        let (sequences, len, width) = (3, 12, 531);
        let whole: Vec<usize> = (0..sequences * len).collect();
        // Ranges from both ends of each sequence, as context parallelism shards it: the second of three ranks.
        let zigzag: Vec<usize> =
            (0..sequences).flat_map(|s| [2, 3, 8, 9].map(|position| s * len + position)).collect();
        let places = TokenPositions { first_row: 0, seq_len: 4, halves: [2, 8] };
        // An odd number of tokens: the second half is longer.
        let odd: Vec<usize> =
            (0..sequences).flat_map(|s| [0, 6, 7].map(|position| s * len + position)).collect();
        let odd_places = TokenPositions { first_row: 0, seq_len: 3, halves: [0, 6] };
        let cases = [
            (whole.clone(), TokenPositions::whole(len)),
            (whole[7..25].to_vec(), TokenPositions { first_row: 7, ..TokenPositions::whole(len) }),
            (zigzag.clone(), places),
            (zigzag[5..11].to_vec(), TokenPositions { first_row: 5, ..places }),
            (odd, odd_places),
        ];
        let keys: Vec<u32> = (0..2 * sequences as u32).map(|i| i.wrapping_mul(0x9e37_79b9)).collect();
        for dtype in ACTIVATIONS {
            let x = random_of(dtype, 1, sequences * len * width);
            let masked = rounded(dtype, &expected(0.3, &keys, sequences * len, &x));
            for (rows, places) in &cases {
                for columns in [0..width, 4..261, 1..width, 259..262, 530..531, 7..7] {
                    let part = part_of(&x, width, rows, columns.clone());
                    let run = |queue: &CpuQueue| {
                        let (keys, x) = (tensor(&keys), floats(dtype, [rows.len(), columns.len()], &part));
                        let dropout = Dropout { probability: 0.3, site: SITE, keys: keys.view() };
                        queue.dropout(dropout, *places, columns.start as u32, x.view(), x.view());
                        vec![values(x.view())]
                    };
                    let expected = part_of(&masked, width, rows, columns.clone());
                    on_every_queue(run, |results| {
                        assert_eq!(results[0], expected, "{places:?}, columns {columns:?}");
                    });
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "3 rows from row 2 on are not among those of 1 sequences of 4 tokens")]
    fn rows_beyond_the_last_sequence_are_refused() {
        let queue = CpuQueue::new(1, &Arena::new()).unwrap();
        let (keys, x) = (tensor(&[0_u32, 0]), floats(DType::F32, [3, 2], &[0.0; 6]));
        let dropout = Dropout { probability: 0.5, site: 0, keys: keys.view() };
        let places = TokenPositions { first_row: 2, ..TokenPositions::whole(4) };
        queue.dropout(dropout, places, 0, x.view(), x.view());
    }

    #[test]
    fn the_share_of_dropped_elements_is_the_probability_and_the_mean_stays() {
        let queue = CpuQueue::new(2, &Arena::new()).unwrap();
        let (rows, width) = (200, 1000);
        let keys = tensor(&[1_u32, 2]);
        let x = floats(DType::F32, [rows, width], &vec![1.0; rows * width]);
        let y = floats(DType::F32, [rows, width], &vec![0.0; rows * width]);
        let dropout = Dropout { probability: 0.2, site: 0, keys: keys.view() };
        queue.dropout(dropout, TokenPositions::whole(rows), 0, x.view(), y.view());
        let y = values(y.view());
        let dropped = y.iter().filter(|y| **y == 0.0).count() as f64 / y.len() as f64;
        let mean = y.iter().sum::<f64>() / y.len() as f64;
        // Four standard deviations of 200,000 draws.
        assert!((dropped - 0.2).abs() < 0.0036, "{dropped} of the elements are dropped");
        assert!((mean - 1.0).abs() < 0.0045, "mean {mean}");
    }

    #[test]
    #[should_panic(expected = "dropout probability 1 must lie in [0, 1)")]
    fn a_probability_of_one_is_refused() {
        let keys = tensor(&[0_u32, 0]);
        let view: View<'_> = keys.view();
        Mask::new(&Dropout { probability: 1.0, site: 0, keys: view });
    }
}
