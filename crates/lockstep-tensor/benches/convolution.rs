//! Convolutions of ResNet-18 (CIFAR shapes, batch 32) and the stem for ImageNet: forward, gradient of the input, gradient
//! of the weight. Prints one JSON object a line, with the fastest time of several runs.
//!
//! `benches/peers/compare_convolution.py` runs it by turns with PyTorch. Arguments: `--dtype f32|bf16`, `--threads N`, `--only PART-OF-A-NAME`.
#![expect(clippy::print_stdout, reason = "a bench prints its results")]

use std::time::{Duration, Instant};

use lockstep_plan::{DType, MemoryCategory};
use lockstep_tensor::cpu::Preference;
use lockstep_tensor::{
    Arena, Conv2d, ConvolutionKernels, CopyKernels, CpuQueue, Shape, Tensor, Window2d, Write,
};

/// Time spent on one kernel.
const TIME: Duration = Duration::from_millis(300);
/// Smallest number of runs of one kernel.
const RUNS: usize = 5;

/// A convolution: name, `[batch, height, width, channels]` of the input, output channels, and (kernel, stride, padding).
type Case = (&'static str, [usize; 4], usize, [usize; 3]);

const CASES: [Case; 12] = [
    ("3-64 32x32 k3", [32, 32, 32, 3], 64, [3, 1, 1]),
    ("64-64 32x32 k3", [32, 32, 32, 64], 64, [3, 1, 1]),
    ("64-128 32x32 k3 s2", [32, 32, 32, 64], 128, [3, 2, 1]),
    ("128-128 16x16 k3", [32, 16, 16, 128], 128, [3, 1, 1]),
    ("128-256 16x16 k3 s2", [32, 16, 16, 128], 256, [3, 2, 1]),
    ("256-256 8x8 k3", [32, 8, 8, 256], 256, [3, 1, 1]),
    ("256-512 8x8 k3 s2", [32, 8, 8, 256], 512, [3, 2, 1]),
    ("512-512 4x4 k3", [32, 4, 4, 512], 512, [3, 1, 1]),
    ("64-128 32x32 k1 s2", [32, 32, 32, 64], 128, [1, 2, 0]),
    ("128-256 16x16 k1 s2", [32, 16, 16, 128], 256, [1, 2, 0]),
    ("256-512 8x8 k1 s2", [32, 8, 8, 256], 512, [1, 2, 0]),
    ("stem 3-64 224x224 k7 s2", [32, 224, 224, 3], 64, [7, 2, 3]),
];

/// Creates a tensor of small numbers that vary.
fn tensor(arena: &Arena, queue: &CpuQueue, dtype: DType, shape: Shape) -> Tensor {
    let values: Vec<f32> = (0..shape.elements()).map(|i| ((i * 7919) % 1009) as f32 / 505.0 - 1.0).collect();
    let category = MemoryCategory::Activations;
    let source = Tensor::from_slice(arena, shape, &values, category).expect("memory for a bench");
    let target = Tensor::zeros(arena, dtype, shape, category).expect("memory for a bench");
    queue.cast(source.view(), target.view());
    target
}

/// Returns the fastest time of `kernel`, in seconds.
fn fastest(kernel: impl Fn()) -> f64 {
    kernel();
    let (start, mut runs, mut best) = (Instant::now(), 0, f64::INFINITY);
    while runs < RUNS || start.elapsed() < TIME {
        let begin = Instant::now();
        kernel();
        best = best.min(begin.elapsed().as_secs_f64());
        runs += 1;
    }
    best
}

fn argument(name: &str, default: &str) -> String {
    let mut arguments = std::env::args().skip_while(|argument| argument != name);
    arguments.nth(1).unwrap_or_else(|| default.to_owned())
}

fn main() {
    let threads = argument("--threads", "2").parse().expect("a number of threads");
    let dtype = match argument("--dtype", "f32").as_str() {
        "f32" => DType::F32,
        "bf16" => DType::BF16,
        other => panic!("--dtype is f32 or bf16, not {other}"),
    };
    let only = argument("--only", "");
    let arena = Arena::new();
    // The level that the program takes, which is not always the highest.
    let chosen = Preference::of_this_cpu(|| None);
    chosen.apply();
    let kernels = format!("{} ({})", chosen.level, chosen.reason);
    let queue = CpuQueue::new(threads, &arena).expect("threads for a bench");
    for (name, input, outputs, [kernel, stride, padding]) in CASES {
        if !name.contains(&only) {
            continue;
        }
        let window = Window2d::square(kernel, stride, padding);
        let conv = Conv2d::new(input, outputs, window, 1).expect("the shapes fit");
        let of = |dtype, shape| tensor(&arena, &queue, dtype, shape);
        let [x, dx] = [(); 2].map(|()| of(dtype, conv.input_shape()));
        let [y, dy] = [(); 2].map(|()| of(dtype, conv.output_shape()));
        let (weight, dweight) = (of(dtype, conv.weight_shape()), of(DType::F32, conv.weight_shape()));
        let [x, dx, y, dy, weight, dweight] = [&x, &dx, &y, &dy, &weight, &dweight].map(Tensor::view);
        let times = [
            ("forward", fastest(|| queue.conv2d(conv, x, weight, None, y))),
            ("dx", fastest(|| queue.conv2d_backward_input(conv, dy, weight, dx, Write::Overwrite))),
            ("dw", fastest(|| queue.conv2d_backward_weight(conv, dy, x, dweight))),
        ];
        for (pass, seconds) in times {
            let gflops = 2.0 * conv.multiplications() as f64 / seconds / 1e9;
            println!(
                r#"{{"level": "{kernels}", "name": "{name}", "pass": "{pass}", "input": {input:?}, "outputs": {outputs}, "kernel": {kernel}, "stride": {stride}, "padding": {padding}, "ms": {:.4}, "gflops": {gflops:.1}}}"#,
                1e3 * seconds
            );
        }
    }
}
