//! Overhead of the compute threads: time of a kernel whose tasks do nothing, or a known number of steps of arithmetic.
//!
//! Every case runs on 1 to 128 threads, so that most of them have more threads than cores. Kernels follow each other at once, or
//! after a pause in which the threads fall asleep; the pause is not counted. `empty` kernels have a task for each thread.
#![expect(missing_docs, reason = "the function that criterion's macro makes has none")]

use std::{
    hint::black_box,
    thread,
    time::{Duration, Instant},
};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use lockstep_tensor::{Arena, CpuQueue, Queue, Workers};

const THREADS: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
/// Tasks of a kernel that computes, as many as a matrix product of medium size has.
const TASKS: usize = 256;
/// Dependent multiplications of such a task: about 12 µs on Zen 5.
const STEPS: usize = 4096;
/// Long enough for threads to stop spinning.
const PAUSE: Duration = Duration::from_millis(1);

/// Runs kernels, and returns their time without the pauses before them.
fn time(kernels: u64, pause: Duration, kernel: impl Fn()) -> Duration {
    let mut total = Duration::ZERO;
    for _ in 0..kernels {
        if !pause.is_zero() {
            thread::sleep(pause);
        }
        let start = Instant::now();
        kernel();
        total += start.elapsed();
    }
    total
}

fn compute(task: usize) {
    let mut x = 1.0 + task as f32;
    for _ in 0..STEPS {
        x = black_box(x) * 0.999;
    }
    black_box(x);
}

fn pool(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("pool");
    group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(2)).sample_size(20);
    for threads in THREADS {
        let arena = Arena::new();
        let queue = CpuQueue::new(threads, &arena).expect("the machine has the memory");
        let workers: Workers = queue.workers();
        let empty = || workers.run(threads, |task| _ = black_box(task));
        let computing = || workers.run(TASKS, compute);
        group.bench_function(BenchmarkId::new("empty", threads), |bencher| {
            bencher.iter_custom(|kernels| time(kernels, Duration::ZERO, empty));
        });
        group.bench_function(BenchmarkId::new("empty after sleep", threads), |bencher| {
            bencher.iter_custom(|kernels| time(kernels, PAUSE, empty));
        });
        group.bench_function(BenchmarkId::new(format!("{TASKS} tasks"), threads), |bencher| {
            bencher.iter_custom(|kernels| time(kernels, Duration::ZERO, computing));
        });
    }
    group.finish();
}

criterion_group!(benches, pool);
criterion_main!(benches);
