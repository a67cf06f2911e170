//! The ranks of an inference: the flags that ask for them, their plan, and their start. A command with several ranks starts itself once
//! for each of them; each loads its shards of the model and runs the command, and the first one prints.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueHint};
use lockstep_config::{PlanFile, RunConfig, Transport, human};
use lockstep_engine::{Groups, Ranks, TimeLimit};
use lockstep_infer::{PlannedWork, check_plan, plan_over};
use lockstep_launch::interrupt::Interrupt;
use lockstep_launch::{is_launched, place, started_group};
use lockstep_model::ModelConfig;
use lockstep_plan::CheckedPlan;
use serde_json::Value;

use crate::exit::{FAILED, Failure, INTERRUPTED};
use crate::launching::variable;
use crate::local_ranks::{Given, start};
use crate::output;
use crate::placement::FoundModel;
use crate::ranks::{join_options, told_by};
use crate::world::World;

/// Keys of `[parallel]` that inference has.
const KEYS: [&str; 11] = [
    "tensor_parallel",
    "pipeline_parallel",
    "pipeline_stages",
    "expert_parallel",
    "expert_tensor_parallel",
    "context_parallel",
    "context_parallel_method",
    "tensor_layout",
    "data_parallel_replicate",
    "transport",
    "timeout_s",
];

/// The ranks of an inference and their plan.
#[derive(Debug, Args)]
pub(crate) struct RankArguments {
    #[command(flatten)]
    given: Given,
    /// Set a degree of the plan, e.g. --set parallel.tensor_parallel=2 --set parallel.pipeline_parallel=2; ranks that are left over are
    /// tensor-parallel
    #[arg(long = "set", value_name = "parallel.KEY=VALUE")]
    settings: Vec<String>,
    /// A plan file, as train and verify take it
    #[arg(long, value_name = "PLAN.json", value_hint = ValueHint::FilePath)]
    plan: Option<PathBuf>,
}

impl RankArguments {
    /// Returns true if the flags ask for more than one rank.
    pub(crate) fn are_several(&self) -> Result<bool, Failure> {
        let launching = self.given.flags.settle(&variable)?;
        let asked = launching.ranks.or(self.configuration()?.plan.mesh.world_size());
        Ok(asked.is_some_and(|ranks| ranks > 1) || self.given.nodes.are_several(&launching))
    }

    /// Starts the ranks, or joins the others as one of them. Breaks with the exit code of the ranks that this process has started, once
    /// they have ended. From now on the first rank alone prints.
    pub(crate) fn join(
        &self,
        found: &FoundModel,
        work: PlannedWork,
    ) -> Result<ControlFlow<ExitCode, Ranks>, Failure> {
        let (config, model) = (self.configuration()?, found.description.config());
        let is_of_mpi = config.parallel.transport == Transport::Mpi;
        let is_rank = is_launched() || is_of_mpi || place()?.is_some();
        let launching = self.given.flags.settle(&variable)?;
        if !is_rank && !self.given.nodes.are_several(&launching) {
            let asked = launching.ranks.or(config.plan.mesh.world_size()).unwrap_or(1);
            // Errors are reported once, before any rank is started.
            let plan = checked(&config, model, asked, work)?;
            if plan.mesh().world_size() == 1 {
                return Ok(ControlFlow::Continue(Ranks::alone()));
            }
            found.check_placement(&plan, work)?;
        }
        if let Some(flag) = self.given.flags.first_given().filter(|_| is_rank && !is_launched()) {
            return Err(Failure::configuration(format!(
                "{flag} asks for ranks to be started, and this process is one that another launcher has started; leave {flag} out"
            )));
        }
        if !is_rank {
            let ranks = config.plan.mesh.world_size().unwrap_or(1);
            let started = start(&self.given, ranks, config.parallel.transport.into());
            if let Some(code) = started.map_err(named_interrupt)? {
                return Ok(ControlFlow::Break(code));
            }
        }
        let group = started_group(join_options(&config)).map_err(|error| told_by(error, 0))?;
        let Some(group) = group.filter(|group| group.size() > 1) else {
            return Ok(ControlFlow::Continue(Ranks::alone()));
        };
        if group.rank() > 0 {
            output::mute();
        }
        let plan = checked(&config, model, group.size(), work)?;
        found.check_placement(&plan, work)?;
        let limit = Duration::from_secs_f64(config.parallel.timeout_s);
        let rank = group.rank();
        let groups = Groups::new(group, plan.rank(rank), limit).map_err(|error| told_by(error, rank))?;
        Ok(ControlFlow::Continue(Ranks::new(groups)))
    }

    /// Returns the default run with the plan and the settings of the command line.
    fn configuration(&self) -> Result<RunConfig, Failure> {
        let key = |setting: &str| setting.split_once('=').map_or(setting, |(key, _)| key).trim().to_owned();
        let is_known = |key: &str| key.strip_prefix("parallel.").is_some_and(|key| KEYS.contains(&key));
        if let Some(key) = self.settings.iter().map(|setting| key(setting)).find(|key| !is_known(key)) {
            return Err(Failure::configuration(format!(
                "--set {key}: inference has no such setting; allowed: parallel.{}",
                KEYS.join(", parallel.")
            )));
        }
        let plan = self.plan.as_deref().map(PlanFile::read).transpose()?;
        Ok(RunConfig::of_inference(plan.as_ref(), &self.settings).map_err(lockstep_config::Error::from)?)
    }
}

/// Returns the failure of the ranks; a signal ends them at once, since an inference has nothing to save.
fn named_interrupt(failure: Failure) -> Failure {
    match failure.code {
        INTERRUPTED => Failure { message: "interrupted".to_owned(), ..failure },
        _ => failure,
    }
}

/// Returns the plan of `ranks` ranks, checked.
fn checked(
    config: &RunConfig,
    model: &ModelConfig,
    ranks: usize,
    work: PlannedWork,
) -> Result<CheckedPlan, Failure> {
    let plan = plan_over(model, &config.plan, ranks);
    let found = plan.mesh.world_size().unwrap_or(0);
    if found != ranks {
        return Err(Failure::configuration(format!(
            "the plan has {} and the run {}: give --nproc-per-node {found}, or other degrees of parallel.*",
            human::plural(found, "rank"),
            human::plural(ranks, "rank"),
        )));
    }
    Ok(check_plan(model, &plan, work)?)
}

/// Returns on the first rank the results of all replicas, in order: each replica's `own` are alike on its ranks. Replicas may take
/// unlike long, so the wait has no time limit; a lost rank ends it.
pub(crate) fn results_of_replicas(ranks: &Ranks, own: Vec<Value>) -> Result<Vec<Value>, Failure> {
    if ranks.replicas() == 1 {
        return Ok(own);
    }
    let sent = if ranks.is_first_of_replica() { Value::Array(own).to_string() } else { String::new() };
    let gathered = ranks
        .gather_in_time(sent.as_bytes(), TimeLimit::Unlimited)
        .map_err(|error| told_by(error, ranks.rank()))?;
    let mut all = Vec::new();
    for (rank, results) in gathered.iter().enumerate().filter(|(_, results)| !results.is_empty()) {
        let damaged = |error: serde_json::Error| Failure {
            message: format!("the results of rank {rank} are damaged: {error}"),
            code: FAILED,
        };
        all.extend(serde_json::from_slice::<Vec<Value>>(results).map_err(damaged)?);
    }
    Ok(all)
}

/// Returns on all ranks the text that `make` returns on the first one.
pub(crate) fn shared_text(
    ranks: &Ranks,
    make: impl FnOnce() -> Result<String, Failure>,
) -> Result<String, Failure> {
    match ranks.group() {
        None => make(),
        Some(group) => World::new(Some(group.clone()), Interrupt::default()).made_by_first(make),
    }
}
