//! The plan of a run that says nothing of how to split it: that of the checkpoint which it goes on from, so that no bit of it changes,
//! or the best that there is for this machine: the fastest, or the simplest of those that are as fast as far as predictions can tell.

use std::path::PathBuf;

use lockstep_checkpoint::Checkpoint;
use lockstep_config::{PlanFile, Resume, RunConfig};
use lockstep_plan::{Degrees, Plan, Recompute};

use crate::machine::LocalMachine;
use crate::{Error, Evaluated, Objective, Planner, Searched};

/// Plans that a choice is made of.
const RIVALS: usize = 16;
/// Relative error between two predictions for a machine that was measured.
const MARGIN: f64 = 0.02;
/// The same of guesses.
const MARGIN_OF_GUESSES: f64 = 0.1;
/// Name in messages of a plan that no user has written.
const NAME: &str = "that was chosen";

/// A plan for a run that had none.
#[derive(Debug)]
pub struct Choice {
    /// The plan, with the keys that it sets.
    pub plan: PlanFile,
    /// Reason for the choice.
    pub reason: Reason,
}

/// The reason for the choice of a plan.
#[derive(Debug)]
pub enum Reason {
    /// The run goes on from this checkpoint, which was made by it.
    Checkpoint(PathBuf),
    /// The best of a search, as far as predictions can tell.
    Search {
        /// The chosen plan.
        chosen: Box<Evaluated>,
        /// The fastest of those with another layout, or else of all others.
        rival: Option<Box<Evaluated>>,
        /// Number of candidates.
        candidates: usize,
        /// Milliseconds that it took.
        ms: f64,
        /// Reason why the machine is known by guesses alone; `None` if it was measured.
        doubt: Option<String>,
    },
}

/// A plan for `config`, which says nothing of how to split it, on this machine: for `ranks` ranks, or for as many as are best. None where
/// nothing fits.
///
/// # Errors
/// A model that cannot be had.
pub fn choose(config: &RunConfig, resume: &Resume, ranks: Option<usize>) -> Result<Option<Choice>, Error> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    // Who says how many threads a rank has says how many cores the run has.
    let ranks = ranks.or((config.train.threads > 0).then_some(1));
    let is_wanted = |plan: &Plan| match (plan.mesh.world_size(), ranks) {
        (Some(of_plan), Some(ranks)) => of_plan == ranks,
        (Some(of_plan), None) => of_plan <= cores,
        (None, _) => false,
    };
    if let Some((path, plan)) = plan_of_checkpoint(config, resume).filter(|(_, plan)| is_wanted(plan))
        && let plan = PlanFile::unwritten(Plan { predicted: None, ..plan }, NAME)
        && plan.fits(config)
    {
        tracing::info!(path = %path.display(), "the plan is that of the checkpoint");
        return Ok(Some(Choice { plan, reason: Reason::Checkpoint(path) }));
    }
    let machine = LocalMachine::for_ranks(ranks.unwrap_or(1), config.train.threads).with_disk_of(config);
    let LocalMachine { cluster, doubt } = machine;
    let planner = Planner::new(config.clone(), cluster, Objective::Time)?;
    let mut planner = match ranks {
        Some(ranks) => planner.with_ranks(ranks),
        None => planner,
    };
    let Searched { ranking, ms } = planner.find(RIVALS);
    let candidates = ranking.candidates;
    let mut found: Vec<Evaluated> = ranking.best.into_iter().map(|found| found.value).collect();
    let margin = if doubt.is_some() { MARGIN_OF_GUESSES } else { MARGIN };
    let Some(chosen) = simplest(&found, margin) else { return Ok(None) };
    let chosen = Box::new(found.remove(chosen));
    tracing::info!(
        candidates, ms, step_ms = chosen.step.step_ms, mesh = ?chosen.plan.mesh, zero_stage = chosen.plan.zero_stage,
        guessed = doubt.is_some(), "chose a plan"
    );
    // Another layout says more than the same with another stage of ZeRO.
    let other = found.iter().position(|other| other.plan.mesh != chosen.plan.mesh).unwrap_or(0);
    let rival = found.into_iter().nth(other).map(Box::new);
    let plan = PlanFile::unwritten(chosen.plan.clone(), NAME);
    Ok(Some(Choice { plan, reason: Reason::Search { chosen, rival, candidates, ms, doubt } }))
}

/// Returns the index of the simplest plan that takes at most `margin` longer than the fastest; plans are sorted by their step.
fn simplest(found: &[Evaluated], margin: f64) -> Option<usize> {
    let limit_ms = found.first()?.step.step_ms * (1.0 + margin);
    let near = found.iter().enumerate().take_while(|(_, found)| found.step.step_ms <= limit_ms);
    near.min_by_key(|(index, found)| (cuts(&found.plan), *index)).map(|(index, _)| index)
}

/// Counts what a plan does that one rank need not: axes that cut the model or its sequences, sharding and its stage, recomputation, disk.
fn cuts(plan: &Plan) -> usize {
    let Degrees { pipeline, replicate: _, shard, context, tensor, expert, expert_tensor } = plan.mesh;
    let axes = [pipeline, context, tensor, expert, expert_tensor].into_iter().filter(|degree| *degree > 1);
    axes.count()
        + usize::from(shard > 1)
        + usize::from(plan.zero_stage)
        + usize::from(plan.recompute != Recompute::None.into())
        + usize::from(plan.residence.use_disk())
}

/// The plan of the newest checkpoint that the run could go on from. Whether the checkpoint is whole is found out when it is read.
fn plan_of_checkpoint(config: &RunConfig, resume: &Resume) -> Option<(PathBuf, Plan)> {
    let checkpoint = match resume {
        Resume::Never => None,
        Resume::From(path) => Checkpoint::open(path).ok(),
        Resume::Auto => {
            let dirs = config.checkpoint_dirs();
            let mut listed: Vec<_> =
                dirs.into_iter().filter_map(|dir| lockstep_checkpoint::list(dir).ok()).flatten().collect();
            listed.sort_by_key(|listed| listed.step);
            listed.into_iter().rev().find_map(|listed| Checkpoint::open(&listed.path).ok())
        }
    }?;
    let plan = serde_json::from_value(checkpoint.manifest().plan.clone()).ok()?;
    Some((checkpoint.path().to_owned(), plan))
}
