//! The plan of a run whose configuration says nothing about parallelism: that of the checkpoint which it resumes from, so that no
//! bit changes; or the best one for this machine, which is the simplest of those whose predicted times cannot be told apart.

use std::path::PathBuf;

use lockstep_checkpoint::{Checkpoint, newest_of};
use lockstep_config::{PlanFile, Resume, RunConfig};
use lockstep_plan::{Degrees, Plan, Recompute};
use lockstep_tensor::topology::Topology;

use crate::machine::LocalMachine;
use crate::{Error, Evaluated, Objective, Planner, Searched};

/// Plans among which the simplest is chosen.
const RIVALS: usize = 16;
/// Relative error of the difference between two predictions for a measured machine.
const MARGIN: f64 = 0.02;
/// Relative error of the difference between two predictions for a machine with default rates.
const MARGIN_OF_GUESSES: f64 = 0.1;
/// Name in messages of a plan that was not written by a user.
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
    /// The run resumes from this checkpoint, which was made by the plan.
    Checkpoint(PathBuf),
    /// The best of a search, as far as predictions can tell.
    Search {
        /// The chosen plan.
        chosen: Box<Evaluated>,
        /// The fastest plan with another mesh; if there is none, the fastest of the others.
        rival: Option<Box<Evaluated>>,
        /// Number of memory nodes (NUMA), if the plan has a rank for each because the user left the number of ranks open.
        by_node: Option<usize>,
        /// Number of candidates.
        candidates: usize,
        /// Duration of the search, in milliseconds.
        ms: f64,
        /// Reason why default rates are used instead of measured ones; `None` if the machine was measured.
        doubt: Option<String>,
    },
}

/// Chooses a plan on this machine for `config`, which says nothing about parallelism: for `ranks` ranks; if that is `None` for one
/// on each memory node, or for the best number of them if there is a single node, or nothing fits the nodes. `None` if nothing fits.
///
/// # Errors
/// If the model cannot be resolved.
pub fn choose(config: &RunConfig, resume: &Resume, ranks: Option<usize>) -> Result<Option<Choice>, Error> {
    choose_on(&Topology::current(), config, resume, ranks)
}

fn choose_on(
    topology: &Topology,
    config: &RunConfig,
    resume: &Resume,
    ranks: Option<usize>,
) -> Result<Option<Choice>, Error> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    // `train.threads` fixes the cores of a rank, so that without a number of ranks there is one.
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
    if ranks.is_none()
        && let by_node @ Some(_) = topology.ranks_by_node()
        && let chosen @ Some(_) = search(config, by_node, by_node)?
    {
        return Ok(chosen);
    }
    search(config, ranks, None)
}

/// Returns the best plan for `ranks` ranks, or for the best number of them. `by_node` is for the reason.
fn search(config: &RunConfig, ranks: Option<usize>, by_node: Option<usize>) -> Result<Option<Choice>, Error> {
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
    // A plan with another mesh is a more useful comparison than the same mesh with another ZeRO stage.
    let other = found.iter().position(|other| other.plan.mesh != chosen.plan.mesh).unwrap_or(0);
    let rival = found.into_iter().nth(other).map(Box::new);
    let plan = PlanFile::unwritten(chosen.plan.clone(), NAME);
    Ok(Some(Choice { plan, reason: Reason::Search { chosen, rival, by_node, candidates, ms, doubt } }))
}

/// Returns the index of the simplest plan that takes at most `margin` longer than the fastest; `found` is sorted by step time.
fn simplest(found: &[Evaluated], margin: f64) -> Option<usize> {
    let limit_ms = found.first()?.step.step_ms * (1.0 + margin);
    let near = found.iter().enumerate().take_while(|(_, found)| found.step.step_ms <= limit_ms);
    near.min_by_key(|(index, found)| (cuts(&found.plan), *index)).map(|(index, _)| index)
}

/// Returns a measure of a plan's complexity: axes that split the model or its sequences, sharding and its ZeRO stage,
/// recomputation, disk offload.
fn cuts(plan: &Plan) -> usize {
    let Degrees { pipeline, replicate: _, shard, context, tensor, expert, expert_tensor } = plan.mesh;
    let axes = [pipeline, context, tensor, expert, expert_tensor].into_iter().filter(|degree| *degree > 1);
    axes.count()
        + usize::from(shard > 1)
        + usize::from(plan.zero_stage)
        + usize::from(plan.recompute != Recompute::None.into())
        + usize::from(plan.residence.use_disk())
}

/// Returns the newest checkpoint that the run could resume from, with its plan. The checkpoint's integrity is checked only when it is read.
fn plan_of_checkpoint(config: &RunConfig, resume: &Resume) -> Option<(PathBuf, Plan)> {
    let checkpoint = match resume {
        Resume::Never => None,
        Resume::From(path) => Checkpoint::open(path).ok(),
        Resume::Auto => newest_of(&config.checkpoint_dirs()),
    }?;
    let plan = serde_json::from_value(checkpoint.manifest().plan.clone()).ok()?;
    Some((checkpoint.path().to_owned(), plan))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_are_left_open_are_as_many_as_memory_nodes() {
        let dir = tempfile::tempdir().unwrap();
        for node in 0..2 {
            let path = dir.path().join(format!("node/node{node}"));
            std::fs::create_dir_all(&path).unwrap();
            std::fs::write(path.join("cpulist"), format!("{node}\n")).unwrap();
        }
        std::fs::write(dir.path().join("node/online"), "0-1\n").unwrap();
        let [two, one] = [&[0, 1][..], &[1]].map(|cpus| Topology::read(dir.path(), cpus));
        let settings = ["model.preset=baby-gpt", "data.train=[\"a.txt\"]", "train.global_batch=8"];
        let parse = |settings: &[&str]| RunConfig::parse("", "RUN.toml", settings).unwrap();
        let of_threads = parse(&[&settings[..], &["train.threads=1"]].concat());
        let open = parse(&settings);
        for (topology, config, ranks, by_node, expected) in [
            (&two, &open, None, Some(2), Some(2)),
            (&two, &open, Some(1), None, Some(1)),
            (&two, &of_threads, None, None, Some(1)),
            (&one, &open, None, None, None),
        ] {
            let choice = choose_on(topology, config, &Resume::Never, ranks).unwrap().unwrap();
            let Reason::Search { chosen, by_node: found, .. } = choice.reason else {
                panic!("{:?}", choice.reason)
            };
            assert_eq!(found, by_node);
            assert!(
                expected.is_none_or(|ranks| chosen.plan.mesh.world_size() == Some(ranks)),
                "{:?}",
                chosen.plan
            );
        }
    }
}
