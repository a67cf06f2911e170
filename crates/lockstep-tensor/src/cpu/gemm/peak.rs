//! Measurement of peak compute: the multiply-add rate of a level when nothing is read from memory.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use lockstep_plan::DType;

use super::lanes::{Lanes, Plain};
#[cfg(target_arch = "aarch64")]
use super::{
    aarch64::{F32x4, NeonBf16},
    kernel::{Columns, MicroKernel, Rows},
    store::Tile,
};
#[cfg(target_arch = "x86_64")]
use super::{
    amx,
    kernel::{Columns, MicroKernel, Rows},
    lanes::{Bf16Pairs, F32x8, F32x16},
    store::Tile,
};
use crate::CpuLevel;

/// The highest measured rates, in 10⁹ floating-point operations per second; a multiply-add counts as two.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Peak {
    /// Rate of f32 multiply-adds.
    pub f32_gflops: f64,
    /// Rate of bf16 products summed in f32, by the level's bf16 instructions; the f32 rate if it has none.
    pub bf16_gflops: f64,
}

impl Peak {
    /// Returns the rate for operands of a type. f16 is widened to f32.
    pub fn gflops(&self, dtype: DType) -> f64 {
        if dtype == DType::BF16 { self.bf16_gflops } else { self.f32_gflops }
    }
}

/// Measures `threads` threads that run register-only loops simultaneously at `level` (or the best level that the CPU
/// has), in about a third of a second.
pub fn measure_peak(level: CpuLevel, threads: usize) -> Peak {
    measure_peak_within(level, threads, Duration::from_millis(150))
}

/// Measures as [`measure_peak`] does, in about `time` for each type.
pub fn measure_peak_within(level: CpuLevel, threads: usize, time: Duration) -> Peak {
    let level = level.on_this_cpu();
    let measure = |threads, run: &(dyn Fn() -> f64 + Sync)| measure(threads, time, run);
    let f32_gflops = measure(threads, &|| match level {
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx2 => vector_loop::<F32x8, 12>(1),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx512 | CpuLevel::Avx512Bf16 | CpuLevel::AmxBf16 => vector_loop::<F32x16, 12>(1),
        #[cfg(target_arch = "aarch64")]
        CpuLevel::Neon | CpuLevel::NeonBf16 => vector_loop::<F32x4, 24>(1),
        _ => vector_loop::<Plain, 4>(1),
    });
    let bf16_gflops = match level {
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx512Bf16 => measure(threads, &|| vector_loop::<Bf16Pairs, 12>(2)),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::AmxBf16 => measure(threads, &tile_loop::<amx::Tiles>),
        #[cfg(target_arch = "aarch64")]
        CpuLevel::NeonBf16 => measure(threads, &tile_loop::<NeonBf16>),
        _ => f32_gflops,
    };
    Peak { f32_gflops, bf16_gflops }
}

/// Returns the sum over threads of each one's best rate; `run` returns the number of operations it did.
fn measure(threads: usize, time: Duration, run: &(dyn Fn() -> f64 + Sync)) -> f64 {
    let best = || {
        let (start, mut best) = (Instant::now(), 0.0_f64);
        while start.elapsed() < time {
            let begin = Instant::now();
            let operations = run();
            best = best.max(operations / begin.elapsed().as_secs_f64());
        }
        best
    };
    let total: f64 = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(best)).collect();
        threads.into_iter().map(|thread| thread.join().expect("a measuring thread does not panic")).sum()
    });
    total / 1e9
}

/// Runs multiply-adds into `SUMS` independent sums, `products` products at a time in each lane. Returns the number of
/// operations.
fn vector_loop<V: Lanes, const SUMS: usize>(products: usize) -> f64 {
    const ROUNDS: usize = 1 << 16;
    let unit = black_box(0x3f80_3f80);
    // SAFETY: `V` was chosen because the level has its instructions.
    unsafe {
        V::compiled(|| {
            let (x, y) = (V::splat(unit), V::splat(unit));
            let mut sums = [V::zero(); SUMS];
            for _ in 0..ROUNDS {
                for sum in &mut sums {
                    *sum = V::multiply_add(x, y, *sum);
                }
            }
            black_box(sums.map(|sum| sum.total()));
        });
    }
    (2 * products * V::COUNT * SUMS * ROUNDS) as f64
}

/// Runs a micro-kernel of bf16 pairs repeatedly on the same panels, so that all loads hit the L1 cache. Returns the number of
/// operations.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn tile_loop<K: MicroKernel>() -> f64 {
    const UNITS: usize = 128;
    const ROUNDS: usize = 1 << 9;
    let panel = vec![0_u32; UNITS * K::ROWS.max(K::COLUMNS)];
    let mut tile = Tile::zeros();
    // SAFETY: the level has the kernel's instructions, and the panel holds `UNITS`, a multiple of any kernel's depth.
    unsafe {
        K::prepared(|| {
            for _ in 0..ROUNDS {
                K::tile(UNITS, Rows::Packed(panel.as_ptr()), Columns::cached(panel.as_ptr()), &mut tile);
            }
        });
    }
    (2 * 2 * UNITS * ROUNDS * K::ROWS * K::COLUMNS) as f64
}
