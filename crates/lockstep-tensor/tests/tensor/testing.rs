//! Helpers of the kernels' tests: operands from f64 values, comparisons, and runs on every kind of queue.

use std::{
    io::Write as _,
    sync::{Mutex, PoisonError},
};

use half::{bf16, f16};
use lockstep_plan::{DType, MemoryCategory, random::Philox};
use lockstep_tensor::{AdamW, Arena, CpuLevel, CpuQueue, Element, Rounding, Shape, Tensor, View};

/// Returns numbers between -2 and 2 that depend on the seed only.
pub(crate) fn random(seed: u64, elements: usize) -> Vec<f64> {
    let philox = Philox::new(seed);
    (0..elements as u64).map(|i| 4.0 * philox.uniform(i) - 2.0).collect()
}

/// Returns the first standard normal numbers of a generator.
pub(crate) fn normals(philox: Philox, elements: usize) -> impl Iterator<Item = f32> {
    (0..elements.div_ceil(2) as u64).flat_map(move |pair| philox.normals(pair)).take(elements)
}

/// Returns the values, rounded to `dtype`.
pub(crate) fn rounded(dtype: DType, values: &[f64]) -> Vec<f64> {
    let round = |x: f64| match dtype {
        DType::F32 => f64::from(x as f32),
        DType::BF16 => bf16::from_f32(x as f32).to_f64(),
        DType::F16 => f16::from_f32(x as f32).to_f64(),
        other => panic!("{other} is not a float"),
    };
    values.iter().copied().map(round).collect()
}

/// Returns random numbers that `dtype` represents exactly.
pub(crate) fn random_of(dtype: DType, seed: u64, elements: usize) -> Vec<f64> {
    rounded(dtype, &random(seed, elements))
}

/// Creates a tensor of floats.
pub(crate) fn floats(dtype: DType, shape: impl Into<Shape>, values: &[f64]) -> Tensor {
    let arena = Arena::new();
    let category = MemoryCategory::Activations;
    let values = values.iter().map(|x| *x as f32);
    match dtype {
        DType::F32 => Tensor::from_slice(&arena, shape, &values.collect::<Vec<f32>>(), category),
        DType::BF16 => {
            Tensor::from_slice(&arena, shape, &values.map(bf16::from_f32).collect::<Vec<_>>(), category)
        }
        DType::F16 => {
            Tensor::from_slice(&arena, shape, &values.map(f16::from_f32).collect::<Vec<_>>(), category)
        }
        other => panic!("{other} is not a float"),
    }
    .unwrap()
}

/// Creates a one-dimensional tensor of any element type.
pub(crate) fn tensor<T: Element>(elements: &[T]) -> Tensor {
    Tensor::from_slice(&Arena::new(), [elements.len()], elements, MemoryCategory::Activations).unwrap()
}

/// Returns the elements as f64, which represents each of them exactly.
pub(crate) fn values(view: View<'_>) -> Vec<f64> {
    match view.dtype() {
        DType::F32 => view.to_vec::<f32>().into_iter().map(f64::from).collect(),
        DType::BF16 => view.to_vec::<bf16>().into_iter().map(f64::from).collect(),
        DType::F16 => view.to_vec::<f16>().into_iter().map(f64::from).collect(),
        other => panic!("{other} is not a float"),
    }
}

/// Returns the relative rounding error of a result: f32 kernels may round several times, bf16 ones only at the store.
pub(crate) fn tolerance(dtype: DType) -> f64 {
    if dtype == DType::F32 { 2e-6 } else { 1.0 / 256.0 + 1e-5 }
}

/// Panics with the worst pair unless `|actual - expected| <= relative · |expected| + absolute` everywhere.
#[track_caller]
pub(crate) fn assert_close(name: &str, actual: &[f64], expected: &[f64], relative: f64, absolute: f64) {
    assert_eq!(actual.len(), expected.len(), "{name}: lengths differ");
    let excess = |i: usize| {
        let excess = (actual[i] - expected[i]).abs() - relative * expected[i].abs() - absolute;
        if excess.is_nan() { f64::INFINITY } else { excess }
    };
    let Some(worst) = (0..actual.len()).max_by(|a, b| excess(*a).total_cmp(&excess(*b))) else { return };
    assert!(
        excess(worst) <= 0.0,
        "{name}[{worst}] is {:e}, not {:e} (± {relative:e} relative, {absolute:e} absolute)",
        actual[worst],
        expected[worst]
    );
}

/// Returns the first AdamW step on (parameter, gradient, first and second moment), with a learning rate large enough
/// to see.
pub(crate) fn adamw_step<'a>([parameter, gradient, exp_avg, exp_avg_sq]: [View<'a>; 4]) -> AdamW<'a> {
    AdamW {
        parameter,
        gradient,
        exp_avg,
        exp_avg_sq,
        rounded: None,
        rounding: Rounding::Nearest,
        learning_rate: 1e-2,
        betas: [0.9, 0.95],
        eps: 1e-8,
        weight_decay: 0.1,
        gradient_scale: 1.0,
        step: 1,
    }
}

/// Reports what tests skip, once for each message. It writes to standard error directly, because the output of
/// `eprintln!` in a passing test is hidden.
pub(crate) fn report_skipped(what: &str) {
    static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if !said.iter().any(|earlier| earlier == what) {
        said.push(what.to_owned());
        // One write, so that the line stays whole among those of other tests. An error means that standard error is
        // closed.
        let _ = std::io::stderr().write_all(format!("\nskipped: {what}\n").as_bytes());
    }
}

/// Returns the levels that this CPU can run, lowest first, and reports the missing ones.
pub(crate) fn levels() -> impl Iterator<Item = CpuLevel> {
    CpuLevel::ALL.into_iter().filter(|level| {
        let present = *level <= CpuLevel::detect();
        if !present {
            report_skipped(&format!("kernels at level {level}, which this CPU lacks"));
        }
        present
    })
}

/// Creates a queue of a level that the CPU lacks, if its instructions can be emulated.
#[cfg(target_arch = "x86_64")]
pub(crate) fn emulated(level: CpuLevel, threads: usize, arena: &Arena) -> Option<CpuQueue> {
    crate::gemm::amx_emulator::queue(level, threads, arena)
}

#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn emulated(_: CpuLevel, _: usize, _: &Arena) -> Option<CpuQueue> {
    None
}

/// Runs a kernel on queues of every level that this CPU has, with one, two and three threads. The results must have
/// the same bits for any number of threads. `check` receives the results of each level.
#[track_caller]
pub(crate) fn on_every_queue(run: impl Fn(&CpuQueue) -> Vec<Vec<f64>>, check: impl Fn(&[Vec<f64>])) {
    let bits = |results: &[Vec<f64>]| -> Vec<Vec<u64>> {
        results.iter().map(|result| result.iter().map(|x| x.to_bits()).collect()).collect()
    };
    for level in levels() {
        let on = |threads| run(&CpuQueue::with_level(threads, &Arena::new(), level).unwrap());
        let first = on(1);
        for threads in [2, 3] {
            let other = on(threads);
            assert!(
                bits(&first) == bits(&other),
                "{level}: {threads} threads give {:?}, one gives {:?}",
                first_difference(&other, &first),
                first_difference(&first, &other)
            );
        }
        check(&first);
    }
}

/// Returns (result, element, value) of the first place where `a` differs from `b`.
fn first_difference(a: &[Vec<f64>], b: &[Vec<f64>]) -> Option<(usize, usize, f64)> {
    a.iter().zip(b).enumerate().find_map(|(result, (a, b))| {
        let at = a.iter().zip(b).position(|(a, b)| a.to_bits() != b.to_bits())?;
        Some((result, at, a[at]))
    })
}

/// The types of activations.
pub(crate) const ACTIVATIONS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// A float storage type.
pub(crate) trait Float: Element {
    /// Returns the value as f32.
    fn load(self) -> f32;
    /// Returns the value nearest to `x`, ties to even.
    fn store(x: f32) -> Self;
}

impl Float for f32 {
    fn load(self) -> f32 {
        self
    }

    fn store(x: f32) -> Self {
        x
    }
}

impl Float for bf16 {
    fn load(self) -> f32 {
        self.to_f32()
    }

    fn store(x: f32) -> Self {
        Self::from_f32(x)
    }
}

impl Float for f16 {
    fn load(self) -> f32 {
        self.to_f32()
    }

    fn store(x: f32) -> Self {
        Self::from_f32(x)
    }
}
