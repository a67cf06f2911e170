//! Elementwise kernels against the reference.

use lockstep_plan::DType;
use lockstep_tensor::{Arena, CpuQueue, ElementwiseKernels, GatedActivation, Gelu};
use proptest::prelude::*;

use crate::reference;
use crate::testing::{
    ACTIVATIONS, assert_close, floats, on_every_queue, random, random_of, tolerance, values,
};

const GELUS: [Gelu; 2] = [Gelu::Exact, Gelu::Tanh];

/// Lengths around block boundaries, and lengths that several tasks share.
fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![1usize..600, 70_000usize..90_000]
}

fn map2(a: &[f64], b: &[f64], f: impl Fn(f64, f64) -> f64) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| f(*a, *b)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn gelu_and_its_gradient_match_the_reference_also_in_place(len in lengths()) {
        for (dtype, kind) in ACTIVATIONS.into_iter().flat_map(|dtype| GELUS.map(|kind| (dtype, kind))) {
            let x = random_of(dtype, 1, len).iter().map(|x| 4.0 * x).collect::<Vec<_>>();
            let dy = random_of(dtype, 2, len);
            let run = |queue: &CpuQueue| {
                let [x, dy, in_place] = [&x, &dy, &dy].map(|values| floats(dtype, [len], values));
                let [y, dx] = [(); 2].map(|()| floats(dtype, [len], &vec![0.0; len]));
                queue.gelu(kind, x.view(), y.view());
                queue.gelu_backward(kind, dy.view(), x.view(), dx.view());
                queue.gelu_backward(kind, in_place.view(), x.view(), in_place.view());
                [y, dx, in_place].map(|tensor| values(tensor.view())).to_vec()
            };
            let y: Vec<f64> = x.iter().map(|x| reference::gelu(kind, *x)).collect();
            let dx = map2(&dy, &x, |dy, x| dy * reference::gelu_derivative(kind, x));
            on_every_queue(run, |results| {
                assert_close("y", &results[0], &y, tolerance(dtype), 1e-6);
                assert_close("dx", &results[1], &dx, tolerance(dtype), 1e-6);
                assert_eq!(results[1], results[2], "in place");
            });
        }
    }

    #[test]
    fn add_matches_the_reference_also_in_place_of_either_operand(len in lengths()) {
        for dtype in ACTIVATIONS {
            let [a, b] = [1, 2].map(|seed| random_of(dtype, seed, len));
            let run = |queue: &CpuQueue| {
                let [left, right] = [&a, &b].map(|values| floats(dtype, [len], values));
                let y = floats(dtype, [len], &vec![0.0; len]);
                queue.add(left.view(), right.view(), y.view());
                let sum = values(y.view());
                let [first, second] = [&a, &b].map(|values| floats(dtype, [len], values));
                queue.add(first.view(), right.view(), first.view());
                queue.add(left.view(), second.view(), second.view());
                queue.add(left.view(), left.view(), left.view());
                let [first, second, twice] = [first, second, left].map(|tensor| values(tensor.view()));
                vec![sum, first, second, twice]
            };
            let expected = crate::testing::rounded(dtype, &map2(&a, &b, |a, b| a + b));
            on_every_queue(run, |results| {
                for result in &results[..3] {
                    assert_eq!(*result, expected);
                }
                assert_eq!(results[3], map2(&a, &a, |a, b| a + b));
            });
        }
    }

    #[test]
    fn scale_matches_the_reference_also_in_place(len in lengths(), factor in -4.0_f32..4.0) {
        for dtype in ACTIVATIONS {
            let x = random_of(dtype, 1, len);
            let run = |queue: &CpuQueue| {
                let (x, y) = (floats(dtype, [len], &x), floats(dtype, [len], &vec![0.0; len]));
                queue.scale(factor, x.view(), y.view());
                queue.scale(factor, x.view(), x.view());
                vec![values(y.view()), values(x.view())]
            };
            let exact: Vec<f64> = x.iter().map(|x| f64::from(factor) * x).collect();
            // Rounded first to f32, as the kernel computes, then to the storage type.
            let product = crate::testing::rounded(DType::F32, &exact);
            let expected = crate::testing::rounded(dtype, &product);
            on_every_queue(run, |results| {
                assert_eq!(results[0], expected);
                assert_eq!(results[1], expected, "in place");
            });
        }
    }

    #[test]
    fn sum_rows_adds_every_row_to_what_was_there(
        (rows, width) in prop_oneof![(1usize..10, 1usize..70), (60usize..300, 500usize..1200)]
    ) {
        for dtype in ACTIVATIONS {
            let x = random_of(dtype, 1, rows * width);
            let before = random_of(dtype, 2, width);
            let run = |queue: &CpuQueue| {
                let (x, out) = (floats(dtype, [rows, width], &x), floats(DType::F32, [width], &before));
                queue.sum_rows(x.view(), out.view());
                vec![values(out.view())]
            };
            let expected: Vec<f64> = (0..width)
                .map(|i| before[i] + x.iter().skip(i).step_by(width).sum::<f64>())
                .collect();
            on_every_queue(run, |results| {
                assert_close("out", &results[0], &expected, 1e-6, 1e-6 * (rows as f64).sqrt());
            });
        }
    }
}

#[test]
fn a_bias_has_the_sum_of_the_rows_as_its_gradient() {
    let (rows, width) = (3, 5);
    let dy = random_of(DType::F32, 1, rows * width);
    let loss = |bias: &[f64]| -> f64 {
        dy.iter().enumerate().map(|(i, dy)| dy * (f64::from(i as u32) + bias[i % width])).sum()
    };
    let expected = reference::finite_differences(&random(2, width), loss);
    let run = |queue: &CpuQueue| {
        let (dy, out) = (floats(DType::F32, [rows, width], &dy), floats(DType::F32, [width], &[0.0; 5]));
        queue.sum_rows(dy.view(), out.view());
        vec![values(out.view())]
    };
    on_every_queue(run, |results| assert_close("dbias", &results[0], &expected, 1e-6, 1e-6));
}

#[test]
fn activations_saturate_at_extremes_and_keep_nan() {
    let queue = CpuQueue::new(1, &Arena::new()).unwrap();
    let x = [-1e30, -1000.0, -100.0, 0.0, 100.0, 1000.0, 1e30, f64::NAN];
    let expected = [0.0, 0.0, 0.0, 0.0, 100.0, 1000.0, f64::from(1e30_f32)];
    let (input, ones) = (floats(DType::F32, [8], &x), floats(DType::F32, [8], &[1.0; 8]));
    let y = floats(DType::F32, [8], &[5.0; 8]);
    for kind in GELUS {
        queue.gelu(kind, input.view(), y.view());
        assert_eq!(values(y.view())[..7], expected, "{kind:?}");
        assert!(values(y.view())[7].is_nan(), "{kind:?}");
        queue.gelu_backward(kind, ones.view(), input.view(), y.view());
        assert_eq!(values(y.view())[1..6], [0.0, 0.0, 0.5, 1.0, 1.0], "{kind:?}");
    }
    queue.gated(GatedActivation::Silu, input.view(), ones.view(), y.view());
    assert_eq!(values(y.view())[..7], expected);
}

#[test]
#[should_panic(expected = "overlaps part of an operand")]
fn a_sum_may_not_overlap_part_of_an_operand() {
    let queue = CpuQueue::new(1, &Arena::new()).unwrap();
    let x = floats(DType::F32, [8], &random(1, 8));
    queue.add(x.view().rows(0..4), x.view().rows(4..8), x.view().rows(2..6));
}
