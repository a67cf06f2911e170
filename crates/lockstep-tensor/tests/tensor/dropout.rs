//! Dropout against its definition.

use std::ops::Range;

use lockstep_plan::{DType, random::Philox};
use lockstep_tensor::{Arena, CpuQueue, Dropout, ElementwiseKernels, TokenPositions};

use crate::testing::{ACTIVATIONS, assert_close, floats, on_every_queue, random_of, rounded, tensor, values};

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
    let odd: Vec<usize> = (0..sequences).flat_map(|s| [0, 6, 7].map(|position| s * len + position)).collect();
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
    let [x, y] = [(); 2].map(|()| floats(DType::F32, [1, 4], &[1.0; 4]));
    let dropout = Dropout { probability: 1.0, site: 0, keys: keys.view() };
    let queue = CpuQueue::new(1, &Arena::new()).unwrap();
    queue.dropout(dropout, TokenPositions::whole(1), 0, x.view(), y.view());
}
