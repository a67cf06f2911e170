//! Measurement of the memory bandwidth of all threads together.

use std::{hint::black_box, time::Instant};

use super::{CpuLevel, simd::inlined};

/// Number of floats in each of the two arrays: 64 MiB, more than the threads' part of any cache.
const FLOATS: usize = 16 << 20;
/// Runs of each access pattern; the fastest counts.
const ROUNDS: usize = 6;

/// Measures the highest rate, in 10⁹ bytes per second, at which `threads` threads read an array, or read one and
/// write another. Takes about a quarter of a second.
///
/// A write counts once, although a CPU may read a line before it writes it: kernels are measured the same way.
pub fn measure_bandwidth(level: CpuLevel, threads: usize) -> f64 {
    let level = level.on_this_cpu();
    let source = vec![1.0_f32; FLOATS];
    let mut target = vec![0.0_f32; FLOATS];
    let part = FLOATS.div_ceil(threads.max(1));
    let array_bytes = size_of_val(source.as_slice()) as f64;
    let mut best = 0.0_f64;
    for _ in 0..ROUNDS {
        let begin = Instant::now();
        std::thread::scope(|scope| {
            for source in source.chunks(part) {
                scope.spawn(move || black_box(sum(level, source)));
            }
        });
        best = best.max(array_bytes / begin.elapsed().as_secs_f64());
        let begin = Instant::now();
        std::thread::scope(|scope| {
            for (source, target) in source.chunks(part).zip(target.chunks_mut(part)) {
                scope.spawn(move || double(level, source, target));
            }
        });
        best = best.max(2.0 * array_bytes / begin.elapsed().as_secs_f64());
        black_box(&mut target);
    }
    best / 1e9
}

/// Sums the array in enough independent parts that memory, not the addition latency, is the limit.
fn sum(level: CpuLevel, source: &[f32]) -> f32 {
    const PARTS: usize = 128;
    level.run(inlined!(|| {
        let mut sums = [0.0_f32; PARTS];
        for chunk in source.chunks_exact(PARTS) {
            for (sum, x) in sums.iter_mut().zip(chunk) {
                *sum += x;
            }
        }
        sums.iter().sum()
    }))
}

fn double(level: CpuLevel, source: &[f32], target: &mut [f32]) {
    level.run(inlined!(|| {
        for (y, x) in target.iter_mut().zip(source) {
            *y = x + x;
        }
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_is_read_and_written() {
        let source: Vec<f32> = (0..1280).map(|i| (i % 7) as f32).collect();
        let mut target = vec![0.0; source.len()];
        for level in CpuLevel::available() {
            assert_eq!(sum(level, &source), source.iter().sum::<f32>(), "{level}");
            double(level, &source, &mut target);
            assert!(target.iter().zip(&source).all(|(y, x)| *y == 2.0 * x), "{level}");
        }
    }
}
