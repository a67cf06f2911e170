//! Muon against PyTorch's formula in f64.

use lockstep_plan::DType;
use lockstep_tensor::{CpuQueue, Muon, OptimizerKernels, Rounding};

use crate::testing::{assert_close, floats, on_every_queue, random_of, rounded, values};

const SHAPES: [[usize; 2]; 5] = [[24, 40], [40, 24], [33, 33], [1, 7], [130, 300]];
const STEPS: usize = 3;

/// `a [m, k] · b [k, n]`.
fn product(a: &[f64], b: &[f64], [m, k, n]: [usize; 3]) -> Vec<f64> {
    (0..m * n).map(|i| (0..k).map(|l| a[i / n * k + l] * b[l * n + i % n]).sum()).collect()
}

fn transposed(a: &[f64], [rows, columns]: [usize; 2]) -> Vec<f64> {
    (0..rows * columns).map(|i| a[i % rows * columns + i / rows]).collect()
}

/// PyTorch's `_zeropower_via_newtonschulz` in f64.
fn orthogonalized(x: &[f64], shape: [usize; 2]) -> Vec<f64> {
    let [rows, columns] = shape;
    if rows > columns {
        return transposed(&orthogonalized(&transposed(x, shape), [columns, rows]), [columns, rows]);
    }
    let norm = x.iter().map(|x| x * x).sum::<f64>().sqrt().max(1e-7);
    let mut x: Vec<f64> = x.iter().map(|x| x / norm).collect();
    let [a, b, c] = [3.4445, -4.7750, 2.0315_f32].map(f64::from);
    for _ in 0..5 {
        let gram = product(&x, &transposed(&x, shape), [rows, columns, rows]);
        let square = product(&gram, &gram, [rows; 3]);
        let update: Vec<f64> = gram.iter().zip(&square).map(|(g, s)| b * g + c * s).collect();
        let change = product(&update, &x, [rows, rows, columns]);
        x = x.iter().zip(change).map(|(x, change)| a * x + change).collect();
    }
    x
}

/// PyTorch's `_single_tensor_muon` in f64: returns the weights and the momentum.
fn reference(weights: &[f64], gradients: &[Vec<f64>], shape: [usize; 2]) -> [Vec<f64>; 2] {
    let (lr, decay, momentum, scale) = (1e-2, 0.1, f64::from(0.95_f32), f64::from(1.5_f32));
    let (mut p, mut m) = (weights.to_vec(), vec![0.0; weights.len()]);
    for gradient in gradients {
        let g: Vec<f64> = gradient.iter().map(|g| g * 0.75).collect();
        m = m.iter().zip(&g).map(|(m, g)| m + (g - m) * (1.0 - momentum)).collect();
        let direction: Vec<f64> = m.iter().zip(&g).map(|(m, g)| g + (m - g) * momentum).collect();
        let direction = orthogonalized(&direction, shape);
        p = p.iter().zip(direction).map(|(p, d)| p * (1.0 - lr * decay) - lr * scale * d).collect();
    }
    [p, m]
}

fn steps(
    queue: &CpuQueue,
    dtype: DType,
    weights: &[f64],
    gradients: &[Vec<f64>],
    shape: [usize; 2],
) -> Vec<Vec<f64>> {
    let parameter = floats(DType::F32, shape, weights);
    let buffer = floats(DType::F32, shape, &vec![0.0; weights.len()]);
    let copy = floats(DType::BF16, shape, &vec![0.0; weights.len()]);
    for gradient in gradients {
        queue.muon(&Muon {
            parameter: parameter.view(),
            gradient: floats(DType::F32, shape, gradient).view(),
            momentum_buffer: buffer.view(),
            rounded: Some(copy.view()),
            rounding: Rounding::Nearest,
            dtype,
            learning_rate: 1e-2,
            momentum: 0.95,
            weight_decay: 0.1,
            gradient_scale: 0.75,
            scale: 1.5,
        });
    }
    vec![values(parameter.view()), values(buffer.view()), values(copy.view())]
}

#[test]
fn muon_follows_pytorch_for_matrices_of_any_shape_and_rounds_its_copy() {
    for shape in SHAPES {
        let len = shape[0] * shape[1];
        let weights = random_of(DType::F32, 1, len);
        let gradients: Vec<Vec<f64>> =
            (0..STEPS as u64).map(|step| random_of(DType::F32, 100 + step, len)).collect();
        let expected = reference(&weights, &gradients, shape);
        let run = |queue: &CpuQueue| steps(queue, DType::F32, &weights, &gradients, shape);
        on_every_queue(run, |results| {
            assert_close("momentum", &results[1], &expected[1], 2e-6, 1e-6);
            // The direction's elements are about one over the square root of the longer side.
            assert_close("parameter", &results[0], &expected[0], 1e-6, 2e-6);
            assert_eq!(results[2], rounded(DType::BF16, &results[0]), "{shape:?}: the bf16 copy");
        });
    }
}

#[test]
fn a_step_in_bf16_differs_from_one_in_f32_by_its_rounding_only() {
    for shape in SHAPES {
        let len = shape[0] * shape[1];
        let (weights, gradients) = (vec![0.0; len], [random_of(DType::F32, 7, len)]);
        let expected = reference(&weights, &gradients, shape)[0].clone();
        let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
        on_every_queue(
            |queue| steps(queue, DType::BF16, &weights, &gradients, shape),
            |results| {
                let error: Vec<f64> = results[0].iter().zip(&expected).map(|(a, b)| a - b).collect();
                let relative = norm(&error) / norm(&expected);
                assert!(relative < 0.03, "{shape:?}: {relative}");
            },
        );
    }
}

#[test]
fn the_singular_values_of_a_direction_are_about_one_and_nothing_comes_of_nothing() {
    // A matrix of rank one has one singular value, its Frobenius norm.
    let shape = [20, 30];
    let outer: Vec<f64> =
        (0..600).map(|i| 1e-3 * (1.0 + (i / 30) as f64) * (i as f64 % 30.0 - 11.0)).collect();
    let one_step = |gradient: &[f64]| {
        let queue = CpuQueue::new(1, &lockstep_tensor::Arena::new()).unwrap();
        steps(&queue, DType::F32, &vec![0.0; 600], &[gradient.to_vec()], shape)[0].clone()
    };
    let norm = one_step(&outer).iter().map(|x| x * x).sum::<f64>().sqrt() / (1e-2 * 1.5);
    assert!((0.65..1.25).contains(&norm), "{norm}");
    assert_eq!(one_step(&vec![0.0; 600]), vec![0.0; 600]);
}

#[test]
#[should_panic(expected = "is no matrix")]
fn a_vector_is_refused() {
    let queue = CpuQueue::new(1, &lockstep_tensor::Arena::new()).unwrap();
    let [p, g, m] = [(); 3].map(|()| floats(DType::F32, [4], &[1.0; 4]));
    queue.muon(&Muon {
        parameter: p.view(),
        gradient: g.view(),
        momentum_buffer: m.view(),
        rounded: None,
        rounding: Rounding::Nearest,
        dtype: DType::F32,
        learning_rate: 1e-2,
        momentum: 0.95,
        weight_decay: 0.1,
        gradient_scale: 1.0,
        scale: 1.0,
    });
}
