//! Muon makes the same steps as PyTorch's (numbers of `tests/fixtures/optimizers.py`), except for the rounding of its
//! iteration, which PyTorch runs in bf16.

use std::path::Path;

use lockstep_plan::{DType, MemoryCategory};
use lockstep_tensor::{Arena, CpuQueue, Muon, OptimizerKernels, Rounding, Tensor};
use safetensors::SafeTensors;

const SHAPES: [[usize; 2]; 3] = [[16, 24], [24, 16], [20, 20]];
const LEARNING_RATE: f64 = 0.02;

fn f32s(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let bytes = file.tensor(name).unwrap().data().to_vec();
    bytes.chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect()
}

/// Returns ‖a − b‖ / ‖b‖.
fn relative(a: &[f64], b: &[f64]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())
}

#[test]
fn muon_makes_the_steps_of_pytorch() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/optimizers.safetensors");
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let queue = CpuQueue::new(2, &Arena::new()).unwrap();
    let tensor = |shape: [usize; 2], values: &[f32]| {
        Tensor::from_slice(&Arena::new(), shape, values, MemoryCategory::Parameters).unwrap()
    };
    for (shape, dtype) in SHAPES.into_iter().flat_map(|shape| [DType::F32, DType::BF16].map(|d| (shape, d))) {
        let [rows, columns] = shape.map(|side| side as f64);
        let name = format!("muon.{}x{}", shape[0], shape[1]);
        let weights = f32s(&file, &format!("{name}.weights"));
        let gradients = f32s(&file, &format!("{name}.gradients"));
        for (variant, scale) in
            [("original", (rows / columns).max(1.0).sqrt()), ("match_adamw", 0.2 * rows.max(columns).sqrt())]
        {
            let expected = f32s(&file, &format!("{name}.{variant}"));
            let (parameter, momentum) = (tensor(shape, &weights), tensor(shape, &vec![0.0; weights.len()]));
            let mut before = weights.clone();
            for (step, gradient) in gradients.chunks(weights.len()).enumerate() {
                queue.muon(&Muon {
                    parameter: parameter.view(),
                    gradient: tensor(shape, gradient).view(),
                    momentum_buffer: momentum.view(),
                    rounded: None,
                    rounding: Rounding::Nearest,
                    dtype,
                    learning_rate: LEARNING_RATE,
                    momentum: 0.95,
                    weight_decay: 0.1,
                    gradient_scale: 1.0,
                    scale: scale as f32,
                });
                let after = &expected[step * weights.len()..][..weights.len()];
                let change = |to: &[f32]| -> Vec<f64> {
                    to.iter().zip(&before).map(|(to, from)| f64::from(*to) - f64::from(*from)).collect()
                };
                let error = relative(&change(&parameter.view().to_vec()), &change(after));
                assert!(error < 0.03, "{name}, {variant}, {dtype}, step {}: {error}", step + 1);
                // Each step is compared from the same weights.
                parameter.view().copy_from(after);
                before = after.to_vec();
            }
        }
    }
}
