//! Calibration of a machine file by runs that were made on the machine.
//!
//! The file has the rates of tasks that were timed in isolation. In a step they run back to back, with cold caches and with other
//! ranks on the same machine, so each takes a little longer. A run tells by how much: its measured compute and its measured
//! waiting, each over the predicted one. All rates of a device are divided by the first factor, all rates of a link by the second.

use std::path::{Path, PathBuf};

use lockstep_config::{RunConfig, engine_options};
use lockstep_observe::report::{MedianStep, measured};
use lockstep_plan::{DType, PlannedStep};

use crate::Error;
use crate::cluster::Cluster;
use crate::machine::{for_run, name_of_this};
use crate::planner::predicted_step;

/// Largest factor that is learned; its inverse is the smallest. A larger one means that the run was made on another machine.
const MOST: f64 = 20.0;
/// Least predicted exposed communication, as a fraction of the step, for a run to calibrate the links.
const LEAST_WAIT: f64 = 0.01;
/// Fewest steps that a run must have made.
const FEWEST_STEPS: usize = 3;

/// A finished run to calibrate by.
#[derive(Debug, Clone)]
pub struct FinishedRun {
    /// Directory of its records.
    pub dir: PathBuf,
    /// Configuration of the run.
    pub config: RunConfig,
    /// The run's median step.
    pub step: MedianStep,
}

/// A calibrated cluster, with the factors that were applied.
#[derive(Debug, Clone)]
pub struct Calibrated {
    /// The machine, with rates that predict the runs better.
    pub cluster: Cluster,
    /// Measured over predicted compute time, by type and device.
    pub work: Vec<ComputeFactor>,
    /// Measured over predicted exposed communication; `None` if no run has enough of it.
    pub exchanges: Option<f64>,
    /// The runs, with their predictions before and after the calibration.
    pub runs: Vec<CalibratedRun>,
}

/// Measured over predicted compute time of one kind of work.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ComputeFactor {
    /// True for a single rank that has all cores of a machine which several could share.
    pub is_alone: bool,
    /// Compute type of the run.
    pub dtype: DType,
    /// The factor, measured over predicted.
    pub factor: f64,
    /// Number of runs that the factor is learned from.
    pub runs: usize,
}

/// A run with its predictions.
#[derive(Debug, Clone)]
pub struct CalibratedRun {
    /// The run with its measured step.
    pub run: FinishedRun,
    /// Prediction before the calibration.
    pub before: PlannedStep,
    /// Prediction after the calibration.
    pub after: PlannedStep,
}

impl FinishedRun {
    /// Reads the records of a run.
    ///
    /// # Errors
    /// If the directory has no run; [`Error::UnusableForCalibration`] if the run has made too few steps.
    pub fn read(dir: &Path) -> Result<Self, Error> {
        let (config, step) = measured(dir)?;
        let refuse = |why: String| Error::UnusableForCalibration { dir: dir.to_owned(), why };
        let step = step.filter(|step| step.steps >= FEWEST_STEPS).ok_or_else(|| {
            refuse(format!(
                "it has made too few steps; the first two of a process do not count, and {FEWEST_STEPS} more have to follow"
            ))
        })?;
        Ok(Self { dir: dir.to_owned(), config, step })
    }

    fn dtype(&self) -> DType {
        engine_options(&self.config).dtype
    }

    /// Returns true if the run can calibrate: its times are those of cores and links alone, without transfers to and from a disk.
    fn teaches(&self) -> bool {
        !self.config.plan.residence.use_disk()
    }

    /// Returns true if the run has one rank on a machine that several could share.
    fn is_alone(&self, cluster: &Cluster) -> bool {
        self.config.ranks() == 1 && cluster.nodes.iter().any(|node| node.alone.is_some())
    }
}

/// Calibrates `cluster` by `runs`. Runs that offload to disk are compared with their predictions but change no factor.
///
/// # Errors
/// If the model of a run cannot be resolved or does not fit the machine; [`Error::UnusableForCalibration`] if all runs offload to disk.
pub fn calibrate(cluster: &Cluster, runs: Vec<FinishedRun>) -> Result<Calibrated, Error> {
    if let Some(run) = runs.first().filter(|_| !runs.iter().any(FinishedRun::teaches)) {
        let why = "part of it is on disk, and what it waited there says nothing of the cores".to_owned();
        return Err(Error::UnusableForCalibration { dir: run.dir.clone(), why });
    }
    let predict =
        |cluster: &Cluster, run: &FinishedRun| predicted_step(&run.config, for_run(cluster, &run.config));
    let before: Vec<PlannedStep> =
        runs.iter().map(|run| predict(cluster, run)).collect::<Result<_, Error>>()?;
    let pairs = || runs.iter().zip(&before).filter(|(run, _)| run.teaches());
    let work_of = |is_alone: bool, dtype: DType| {
        let of_kind = pairs().filter(|(run, _)| run.is_alone(cluster) == is_alone && run.dtype() == dtype);
        let factor = |(run, before): (&FinishedRun, &PlannedStep)| {
            (run.step.step_ms - run.step.exposed_ms) / before.compute_ms
        };
        let factors: Vec<f64> = of_kind.map(factor).collect();
        let runs = factors.len();
        middle(factors).map(|factor| ComputeFactor { is_alone, dtype, factor: bounded(factor), runs })
    };
    let kinds = [false, true].into_iter().flat_map(|is_alone| {
        [DType::F32, DType::BF16, DType::F16].into_iter().map(move |dtype| (is_alone, dtype))
    });
    let work: Vec<ComputeFactor> = kinds.filter_map(|(is_alone, dtype)| work_of(is_alone, dtype)).collect();
    // Exposed communication without the pipeline bubble, which grows by the factor of the compute.
    let waits = pairs().filter(|(_, before)| before.exposed_ms > LEAST_WAIT * before.step_ms);
    let factor = |(run, before): (&FinishedRun, &PlannedStep)| {
        let bubble_ms = factor_of(&work, false, run.dtype()) * before.bubble_ms;
        (run.step.exposed_ms - bubble_ms).max(0.0) / before.exposed_ms
    };
    let exchanges = middle(waits.map(factor).collect()).map(bounded);
    let mut learned = cluster.clone();
    for node in &mut learned.nodes {
        node.device.slow_down(|dtype| factor_of(&work, false, dtype));
        if let Some(alone) = &mut node.alone {
            alone.slow_down(|dtype| factor_of(&work, true, dtype));
        }
    }
    if let Some(factor) = exchanges {
        learned.links.iter_mut().for_each(|link| link.slow_down(factor));
    }
    if learned.is_host() {
        learned.name = name_of_this(std::thread::available_parallelism().map_or(1, usize::from));
    }
    let after: Vec<PlannedStep> =
        runs.iter().map(|run| predict(&learned, run)).collect::<Result<_, Error>>()?;
    let compared = |((run, before), after): ((FinishedRun, PlannedStep), PlannedStep)| CalibratedRun {
        run,
        before,
        after,
    };
    let runs = runs.into_iter().zip(before).zip(after).map(compared).collect();
    Ok(Calibrated { cluster: learned, work, exchanges, runs })
}

/// Returns the factor of a kind of work: its own, or that of the most similar kind; 1 if there is none.
fn factor_of(work: &[ComputeFactor], is_alone: bool, dtype: DType) -> f64 {
    let unlike = |known: &&ComputeFactor| (known.is_alone != is_alone, known.dtype != dtype);
    work.iter().min_by_key(unlike).map_or(1.0, |known| known.factor)
}

fn bounded(factor: f64) -> f64 {
    if factor.is_finite() { factor.clamp(1.0 / MOST, MOST) } else { 1.0 }
}

fn middle(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    match values.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(values[half]),
        _ => Some(f64::midpoint(values[half - 1], values[half])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_no_run_has_shown_is_taken_for_what_is_most_like_it() {
        let known =
            |is_alone: bool, dtype: DType, factor: f64| ComputeFactor { is_alone, dtype, factor, runs: 1 };
        let work =
            [known(false, DType::F32, 1.1), known(false, DType::BF16, 1.2), known(true, DType::F32, 0.9)];
        assert_eq!(factor_of(&work, true, DType::F32), 0.9);
        // Sharing the machine changes the factor more than the type does.
        assert_eq!(factor_of(&work, true, DType::BF16), 0.9);
        assert_eq!(factor_of(&work[..2], true, DType::BF16), 1.2);
        assert_eq!(factor_of(&[], true, DType::BF16), 1.0);
    }

    #[test]
    fn a_device_that_is_faster_than_its_peak_allows_gets_a_higher_peak() {
        let mut device = Cluster::local(2, 1 << 30).nodes[0].device.clone();
        let before = device.clone();
        device.slow_down(|_| 0.1);
        let rates = |device: &crate::cluster::Device| {
            let (peak, efficiency) = (device.peak_tflops[&DType::F32], &device.efficiency);
            let stream = device.memory_gb_per_s * efficiency.stream;
            [peak * efficiency.product, peak * efficiency.attention, peak * efficiency.scores, stream]
        };
        for (found, before) in rates(&device).into_iter().zip(rates(&before)) {
            assert!((found / before / 10.0 - 1.0).abs() < 1e-9, "{found} after {before}");
        }
        let mut cluster = Cluster::local(2, 1 << 30);
        cluster.nodes[0].device = device;
        Cluster::parse(&cluster.to_toml(), "machine.toml").unwrap_or_else(|problems| panic!("{problems}"));
    }

    #[test]
    fn each_type_is_slowed_down_by_its_own_factor() {
        let mut device = Cluster::local(2, 1 << 30).nodes[0].device.clone();
        device.efficiency.measured = [("GELU forward", 10.0), ("GELU forward bf16", 20.0)]
            .map(|(name, rate)| (name.to_owned(), rate))
            .into();
        let before = device.clone();
        device.slow_down(|dtype| if dtype == DType::F32 { 2.0 } else { 0.5 });
        let rate = |device: &crate::cluster::Device, dtype: DType| {
            device.peak_tflops[&dtype] * device.efficiency.product
        };
        for (dtype, factor) in [(DType::F32, 2.0), (DType::BF16, 0.5)] {
            let found = rate(&before, dtype) / rate(&device, dtype);
            assert!((found / factor - 1.0).abs() < 1e-9, "{dtype}: {found}");
        }
        let measured = &device.efficiency.measured;
        assert_eq!((measured["GELU forward"], measured["GELU forward bf16"]), (5.0, 40.0));
    }

    #[test]
    fn the_middle_of_an_even_number_lies_between_two() {
        assert_eq!(middle(vec![4.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(middle(vec![4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(middle(Vec::new()), None);
    }
}
