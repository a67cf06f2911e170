//! The peak FLOP/s of a run's devices, the denominator of MFU.
//!
//! The measurement of `lockstep bench machine` is used if there is one. Otherwise a rank measures its own threads for 50 ms, once, and
//! keeps the result in the user's cache directory. All ranks measure at the same time, so that they share the machine as in a step.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use lockstep_comm::CommError;
use lockstep_config::{F32Products, RunConfig, user_cache_dir};
use lockstep_engine::{Engine, Ranks};
use lockstep_observe::report::DevicePeak;
use lockstep_plan::DType;
use lockstep_planner::machine::{local_ranks, peak_of_rank};
use lockstep_tensor::CpuLevel;
use lockstep_tensor::cpu::measure_peak_within;
use lockstep_tensor::host::{online_cores, processor_name};
use serde::{Deserialize, Serialize};

/// Duration of the measurement of each type.
const TIME: Duration = Duration::from_millis(50);
/// Number of bf16 products in an f32 product on AMX tiles.
const SPLIT_PRODUCTS: f64 = 6.0;

/// The peak of the ranks that call this together; none if one of them has no device whose peak can be known.
///
/// # Errors
/// A lost rank.
pub(crate) fn device_peak(
    config: &RunConfig,
    engine: &Engine,
    ranks: &Ranks,
) -> Result<Option<DevicePeak>, CommError> {
    let dtype = engine.model().program(0).shape().dtype;
    let (level, threads) = (engine.queue().level(), engine.queue().threads());
    let (own, source) = match peak_of_rank(config, dtype) {
        Some(peak) => (peak, "measured by lockstep bench machine"),
        None => {
            let peak = Measured::of(level, threads).flops_per_s(config, level, dtype);
            (peak * share_of_cores(threads), "measured at the start of a run")
        }
    };
    let all = ranks.all_numbers(own.to_bits())?;
    let flops_per_s: f64 = all.into_iter().map(f64::from_bits).sum();
    tracing::debug!(%dtype, own, flops_per_s, source, "the peak of the devices");
    Ok((flops_per_s.is_finite() && flops_per_s > 0.0).then_some(DevicePeak { flops_per_s, source }))
}

/// Measured rates of a rank's threads, in GFLOP/s.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Measured {
    f32_gflops: f64,
    bf16_gflops: f64,
}

impl Measured {
    /// Returns the rates of so many threads on this processor, from the cache or measured now.
    fn of(level: CpuLevel, threads: usize) -> Self {
        let path = cache_file();
        let key = format!("{}, {level}, {threads} threads", processor_name());
        let mut known: BTreeMap<String, Self> =
            fs::read(&path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
        if let Some(found) = known.get(&key).filter(|found| found.is_sound()) {
            return *found;
        }
        let peak = measure_peak_within(level, threads, TIME);
        let found = Self { f32_gflops: peak.f32_gflops, bf16_gflops: peak.bf16_gflops };
        known.insert(key, found);
        // If the result cannot be kept, the next run measures again.
        let _ = keep(&known);
        found
    }

    fn is_sound(&self) -> bool {
        [self.f32_gflops, self.bf16_gflops].into_iter().all(|rate| rate.is_finite() && rate > 0.0)
    }

    /// Returns the FLOP/s in a type: f16 is widened to f32, and f32 may be multiplied as bf16 parts on tiles.
    fn flops_per_s(&self, config: &RunConfig, level: CpuLevel, dtype: DType) -> f64 {
        let on_tiles = level == CpuLevel::AmxBf16 && config.train.f32_products == F32Products::Split;
        let gflops = match dtype {
            DType::BF16 => self.bf16_gflops,
            DType::F32 if on_tiles => self.f32_gflops.max(self.bf16_gflops / SPLIT_PRODUCTS),
            _ => self.f32_gflops,
        };
        gflops * 1e9
    }
}

/// Returns the fraction of CPU time that this rank's threads get when the machine has more threads than cores.
fn share_of_cores(threads: usize) -> f64 {
    let ranks = local_ranks();
    (online_cores() as f64 / (ranks * threads).max(1) as f64).min(1.0)
}

fn cache_file() -> PathBuf {
    user_cache_dir().join("peaks.json")
}

/// Writes the cache file atomically, since ranks of a machine write it at the same time.
fn keep(known: &BTreeMap<String, Measured>) -> std::io::Result<()> {
    let path = cache_file();
    let staged = path.with_extension(format!("{}.tmp", std::process::id()));
    fs::create_dir_all(user_cache_dir())?;
    fs::write(&staged, serde_json::to_vec_pretty(known)?)?;
    fs::rename(&staged, &path).inspect_err(|_| drop(fs::remove_file(&staged)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_type_has_the_rate_of_the_instructions_that_multiply_it() {
        let measured = Measured { f32_gflops: 100.0, bf16_gflops: 900.0 };
        let config = RunConfig::default();
        let rate = |level, dtype| measured.flops_per_s(&config, level, dtype) / 1e9;
        assert_eq!(rate(CpuLevel::Avx512Bf16, DType::BF16), 900.0);
        assert_eq!(rate(CpuLevel::Avx512Bf16, DType::F32), 100.0);
        assert_eq!(rate(CpuLevel::AmxBf16, DType::F16), 100.0);
        assert!(!Measured { f32_gflops: f64::NAN, ..measured }.is_sound());
    }
}
