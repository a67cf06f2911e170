//! `lockstep doctor`: the resources that this machine offers to a run and those it lacks, and a self-test of the kernels.
//!
//! Every line is a [`Finding`]: a value that was measured or read from the system, with its status. The machine is not changed,
//! and a system file that cannot be read is not an error.

mod finding;
mod libraries;
mod selftest;
pub(crate) mod system;

use std::path::Path;

use lockstep_config::human;
use lockstep_tensor::cpu::Preference;
use lockstep_tensor::{Arena, CpuLevel, CpuQueue};

use crate::roofline::Limits;
use system::threads;

pub use finding::{Finding, Status};

/// Choice whether peak throughput is measured as well, which takes a second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peaks {
    /// Peaks are not measured.
    Skipped,
    /// Peaks are measured.
    Measured,
}

/// Runs all checks; `checkpoint_dir` is the directory for checkpoints.
pub fn examine(checkpoint_dir: &Path, peaks: Peaks) -> Vec<Finding> {
    let mut findings = system::processor();
    findings.extend(kernels());
    findings.extend(system::memory());
    findings.extend(system::disks(checkpoint_dir));
    findings.extend(system::process_limits());
    findings.extend(libraries::all());
    if peaks == Peaks::Measured {
        findings.extend(measured_peaks());
    }
    findings
}

/// Returns the worst status of all findings.
pub fn worst(findings: &[Finding]) -> Status {
    findings.iter().map(|finding| finding.status).max().unwrap_or(Status::Ok)
}

fn kernels() -> Vec<Finding> {
    let Preference { level, reason } = Preference::current();
    let chosen = match level {
        CpuLevel::Portable => "portable code for f32 and bf16",
        CpuLevel::Avx2 => "AVX2 and FMA for f32 and bf16",
        CpuLevel::Avx512 => "AVX-512 for f32 and bf16",
        CpuLevel::Avx512Bf16 => "AVX-512 for f32, AVX-512 BF16 dot products for bf16",
        CpuLevel::AmxBf16 => "AVX-512 for f32, AMX tiles for bf16",
        CpuLevel::Neon => "NEON for f32 and bf16",
        CpuLevel::NeonBf16 => "NEON for f32, NEON BF16 matrix products for bf16",
    };
    let chosen = Finding::ok("kernels", "chosen", format!("{chosen} ({reason})"));
    let chosen = if level == CpuLevel::Portable {
        chosen.with(Status::Warning, "no vector instructions that kernels know; training is slow here")
    } else {
        chosen
    };
    let queue = CpuQueue::new(threads(), &Arena::new());
    let tested = queue.map_err(|error| error.to_string()).and_then(|queue| selftest::run(&queue));
    let self_test = match tested {
        Ok(what) => Finding::ok("kernels", "self-test", what),
        Err(what) => Finding::ok("kernels", "self-test", what).with(
            Status::Missing,
            "do not train on this machine; please report this with the output of lockstep doctor --json",
        ),
    };
    vec![chosen, self_test]
}

fn measured_peaks() -> Vec<Finding> {
    let Limits { f32_gflops, bf16_gflops, memory_gb_per_s } = Limits::measure(CpuLevel::detect(), threads());
    let threads = human::plural(threads(), "thread");
    vec![
        Finding::ok("peaks", "f32", format!("{f32_gflops:.0} GFLOP/s, {threads}")),
        Finding::ok("peaks", "bf16", format!("{bf16_gflops:.0} GFLOP/s, {threads}")),
        Finding::ok("peaks", "memory", format!("{memory_gb_per_s:.1} GB/s, {threads}")),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_can_train_and_every_advice_belongs_to_something_that_is_not_as_it_should_be() {
        let dir = tempfile::tempdir().unwrap();
        let findings = examine(dir.path(), Peaks::Skipped);
        assert!(worst(&findings) < Status::Missing, "{findings:#?}");
        for finding in &findings {
            assert_eq!(finding.advice.is_some(), finding.status != Status::Ok, "{finding:?}");
            assert!(!finding.value.is_empty(), "{finding:?}");
        }
        for section in ["processor", "kernels", "memory", "disk", "limits", "libraries"] {
            assert!(findings.iter().any(|finding| finding.section == section), "{section}");
        }
    }
}
