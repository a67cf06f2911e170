//! Self-test of the kernels: a few matrix products, compared with plain loops in f64.

use half::bf16;
use lockstep_plan::random::Philox;
use lockstep_plan::{DType, MemoryCategory};
use lockstep_tensor::{
    Arena, CopyKernels, CpuQueue, Gemm, GemmKernels, GemmLayout, Tensor, TensorError, Write,
};

/// Rows, columns and depth; none is a multiple of any kernel's block.
const SHAPE: [usize; 3] = [67, 129, 259];

/// Returns the tested types with their errors, or the reason of the failure.
pub(super) fn run(queue: &CpuQueue) -> Result<String, String> {
    let mut said = Vec::new();
    // The error of a sum of `depth` rounded products is a few units in the last place of its largest term.
    for (dtype, allowed) in [(DType::F32, 1e-5), (DType::BF16, 1e-2)] {
        let error = error_of_product(queue, dtype).map_err(|error| error.to_string())?;
        // A NaN counts as a failure.
        if error.is_nan() || error > allowed {
            return Err(format!(
                "{dtype} products are off by {error:.1e} of their size; {allowed:.0e} is allowed"
            ));
        }
        said.push(format!("{dtype} within {error:.0e}"));
    }
    Ok(format!("products against plain loops: {}", said.join(", ")))
}

/// Returns the maximum of `|Δ| / (|A| |B|)` over the elements of a product.
fn error_of_product(queue: &CpuQueue, dtype: DType) -> Result<f64, TensorError> {
    let [m, n, k] = SHAPE;
    let arena = Arena::new();
    let (a, b) = (random(1, m * k), random(2, n * k));
    let tensor = |shape: [usize; 2], values: &[f32]| -> Result<Tensor, TensorError> {
        let exact = Tensor::from_slice(&arena, shape, values, MemoryCategory::Workspace)?;
        let rounded = Tensor::zeros(&arena, dtype, shape, MemoryCategory::Workspace)?;
        queue.cast(exact.view(), rounded.view());
        Ok(rounded)
    };
    let c = Tensor::zeros(&arena, DType::F32, [m, n], MemoryCategory::Workspace)?;
    let (left, right) = (tensor([m, k], &a)?, tensor([n, k], &b)?);
    queue.gemm(Gemm {
        layout: GemmLayout::NT,
        a: left.view(),
        b: right.view(),
        c: c.view(),
        bias: None,
        write: Write::Overwrite,
    });
    let computed = c.view().to_vec::<f32>();
    let mut worst = 0.0_f64;
    for (i, row) in a.chunks(k).enumerate() {
        for (j, column) in b.chunks(k).enumerate() {
            let products = || row.iter().zip(column).map(|(&x, &y)| f64::from(x) * f64::from(y));
            let size: f64 = products().map(f64::abs).sum();
            let error = (f64::from(computed[i * n + j]) - products().sum::<f64>()).abs() / size;
            worst = if error.is_nan() { error } else { worst.max(error) };
            if worst.is_nan() {
                return Ok(worst);
            }
        }
    }
    Ok(worst)
}

/// Returns values in -1..1 that are exact in bf16, so that rounding the operands contributes no error.
fn random(seed: u64, elements: usize) -> Vec<f32> {
    let random = Philox::new(seed);
    let number = |i| random.at(i)[0] as i32 as f32 / i32::MAX as f32;
    (0..elements as u64).map(|i| bf16::from_f32(number(i)).to_f32()).collect()
}

#[cfg(test)]
mod tests {
    use lockstep_tensor::CpuLevel;

    use super::*;

    #[test]
    fn every_level_of_this_machine_passes() {
        for level in CpuLevel::available() {
            let queue = CpuQueue::with_level(2, &Arena::new(), level).unwrap();
            let said = run(&queue).unwrap_or_else(|error| panic!("{level}: {error}"));
            assert!(said.contains("f32 within") && said.contains("bf16 within"), "{said}");
        }
    }
}
