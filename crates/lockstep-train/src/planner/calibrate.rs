//! What a machine's file learns from runs that were made on it.
//!
//! The file has the rates of tasks that were timed by themselves. In a step they come one after another, with other data in the caches
//! and other ranks beside them, and each takes a little longer. A run says by how much: what its ranks worked and what they waited for each
//! other, beside what was predicted of both. All rates of a device are divided by the one factor, all of a link by the other.

use std::path::{Path, PathBuf};

use lockstep_plan::PlannedStep;
use lockstep_plan::cluster::Cluster;

use crate::planner::machine::{for_run, name_of_this};
use crate::planner::predicted_step;
use crate::report::{UsualStep, measured};
use crate::{Error, RunConfig};

/// No factor that is learned is beyond this, or below its inverse: a run that says more is of another machine.
const MOST: f64 = 20.0;
/// A run says something of links if it waits for them for this share of its step at least.
const LEAST_WAIT: f64 = 0.01;
/// Steps that a run has to have made.
const FEWEST_STEPS: usize = 3;

/// A run that was made.
#[derive(Debug, Clone)]
pub struct MadeRun {
    /// Where its records are.
    pub dir: PathBuf,
    /// What it was told.
    pub config: RunConfig,
    /// What its steps came to.
    pub step: UsualStep,
}

/// What a machine's file has learned.
#[derive(Debug, Clone)]
pub struct Calibrated {
    /// The machine, by rates that predict the runs better.
    pub cluster: Cluster,
    /// How many times as long work takes as was predicted: on a rank of several, and on one that has all cores.
    pub work: [f64; 2],
    /// The same of exchanges; none if no run says anything of them.
    pub exchanges: Option<f64>,
    /// The runs, beside what was and now is predicted of them.
    pub runs: Vec<CalibratedRun>,
}

/// A run beside its predictions.
#[derive(Debug, Clone)]
pub struct CalibratedRun {
    /// The run.
    pub run: MadeRun,
    /// What was predicted.
    pub before: PlannedStep,
    /// What is predicted now.
    pub after: PlannedStep,
}

impl MadeRun {
    /// Reads the records of a run.
    ///
    /// # Errors
    /// No run, or [`Error::TeachesNothing`].
    pub fn read(dir: &Path) -> Result<Self, Error> {
        let (config, step) = measured(dir)?;
        let refuse = |why: String| Error::TeachesNothing { dir: dir.to_owned(), why };
        if !config.offloads_nothing() {
            return Err(refuse("part of it is on disk, whose time is not predicted".to_owned()));
        }
        let step = step.filter(|step| step.steps >= FEWEST_STEPS).ok_or_else(|| {
            refuse(format!(
                "it has made too few steps; the first two of a process do not count, and {FEWEST_STEPS} more have to follow"
            ))
        })?;
        Ok(Self { dir: dir.to_owned(), config, step })
    }

    /// Whether it has one rank on a machine that several could share.
    fn is_alone(&self, cluster: &Cluster) -> bool {
        self.config.ranks() == 1 && cluster.nodes.iter().any(|node| node.alone.is_some())
    }
}

/// The machine of `cluster` as `runs` show it.
///
/// # Errors
/// A run whose model cannot be had, or that does not fit the machine.
pub fn calibrate(cluster: &Cluster, runs: Vec<MadeRun>) -> Result<Calibrated, Error> {
    let predict =
        |cluster: &Cluster, run: &MadeRun| predicted_step(&run.config, for_run(cluster, &run.config));
    let before: Vec<PlannedStep> =
        runs.iter().map(|run| predict(cluster, run)).collect::<Result<_, Error>>()?;
    let pairs = || runs.iter().zip(&before);
    let work_of = |is_alone: bool| {
        let of_kind = pairs().filter(|(run, _)| run.is_alone(cluster) == is_alone);
        let factor = |(run, before): (&MadeRun, &PlannedStep)| {
            (run.step.step_ms - run.step.exposed_ms) / before.compute_ms
        };
        middle(of_kind.map(factor).collect())
    };
    let (shared, alone) = (work_of(false), work_of(true));
    let work = [shared.or(alone), alone.or(shared)].map(|factor| bounded(factor.unwrap_or(1.0)));
    // Waits for links, without those for other stages, which take as much longer as these do.
    let waits = pairs().filter(|(_, before)| before.exposed_ms > LEAST_WAIT * before.step_ms);
    let factor = |(run, before): (&MadeRun, &PlannedStep)| {
        (run.step.exposed_ms - work[0] * before.bubble_ms).max(0.0) / before.exposed_ms
    };
    let exchanges = middle(waits.map(factor).collect()).map(bounded);
    let mut learned = cluster.clone();
    for node in &mut learned.nodes {
        node.device.efficiency.slow_down(work[0]);
        if let Some(alone) = &mut node.alone {
            alone.efficiency.slow_down(work[1]);
        }
    }
    if let Some(factor) = exchanges {
        learned.links.iter_mut().for_each(|link| link.slow_down(factor));
    }
    if learned.nodes.iter().any(|node| node.device.is_host) {
        learned.name = name_of_this(std::thread::available_parallelism().map_or(1, usize::from));
    }
    let after: Vec<PlannedStep> =
        runs.iter().map(|run| predict(&learned, run)).collect::<Result<_, Error>>()?;
    let compared =
        |((run, before), after): ((MadeRun, PlannedStep), PlannedStep)| CalibratedRun { run, before, after };
    let runs = runs.into_iter().zip(before).zip(after).map(compared).collect();
    Ok(Calibrated { cluster: learned, work, exchanges, runs })
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
