//! Sums of squares of gradients.

use lockstep_plan::DType;
use lockstep_tensor::{Arena, CpuQueue, OptimizerKernels};

use crate::testing::{assert_close, floats, on_every_queue, random_of};

/// Number of elements that shards start at multiples of.
const NORM_BLOCK: usize = 1024;

#[test]
fn the_sum_of_squares_does_not_depend_on_how_shards_are_cut() {
    let len = 300_017;
    let x = random_of(DType::F32, 1, len);
    let expected: f64 = x.iter().map(|x| x * x).sum();
    let run = |queue: &CpuQueue| {
        let tensor = floats(DType::F32, [len], &x);
        let whole = queue.sum_of_squares(tensor.view()).wait();
        let mut cut = queue.sum_of_squares(tensor.view().rows(200 * NORM_BLOCK..len)).wait();
        cut.merge(&queue.sum_of_squares(tensor.view().rows(0..200 * NORM_BLOCK)).wait());
        assert_eq!(whole.value().to_bits(), cut.value().to_bits());
        vec![vec![whole.value()]]
    };
    on_every_queue(run, |results| assert_close("sum", &results[0], &[expected], 1e-12, 0.0));
}

#[test]
fn the_sum_of_squares_is_nan_if_any_element_is_not_finite() {
    let queue = CpuQueue::new(1, &Arena::new()).unwrap();
    for bad in [f64::NAN, f64::INFINITY] {
        let mut x = vec![1.0; 2000];
        x[1999] = bad;
        assert!(queue.sum_of_squares(floats(DType::F32, [2000], &x).view()).wait().value().is_nan());
    }
    // Squares beyond the range of f32 must not give NaN.
    let large = queue.sum_of_squares(floats(DType::F32, [2], &[3e38, 3e38]).view()).wait().value();
    assert!((large / 1.8e77 - 1.0).abs() < 1e-6, "{large}");
}
