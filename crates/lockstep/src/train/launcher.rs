//! The command as the launcher of its own ranks: the flags that it refuses, and the ranks that an attempt starts.

use std::path::PathBuf;
use std::time::Duration;

use lockstep_comm::{NodePlacement, TransportKind};
use lockstep_config::{PlanFile, ResolvedModel, Resume, RunConfig};
use lockstep_launch::environment::{self, ProcessPlace};
use lockstep_launch::restarts::Policy;
use lockstep_launch::{Elastic, Output};
use lockstep_planner::fit::require;
use lockstep_tensor::CpuLevel;

use super::arguments::{Arguments, CHOSEN_VARIABLE};
use crate::exit::{FAILED, Failure};
use crate::launching::{First, Launching};
use crate::planned::HandedPlan;
use crate::{error_file, instructions, ranks};

/// The command as the launcher of its own ranks.
pub(super) struct Launcher<'a> {
    pub(super) arguments: &'a Arguments,
    pub(super) launching: &'a Launching,
    pub(super) config: &'a RunConfig,
    pub(super) plan: Option<&'a PlanFile>,
    /// Description of the plan that the planner has chosen.
    pub(super) chosen: Option<&'a str>,
    /// Level of the kernels that computed the checkpoint from which the run resumes.
    pub(super) recorded: Option<CpuLevel>,
}

impl Launcher<'_> {
    /// Refuses flags that contradict each other or the launcher that has started this process as a rank.
    pub(super) fn check(&self, resume: &Resume, place: Option<ProcessPlace>) -> Result<(), Failure> {
        if self.policy().max_restarts > 0 && *resume != Resume::Auto {
            return Err(Failure::configuration(
                "restarts (--max-restarts, elastic.max_restarts) go on from the newest checkpoint: leave --resume out, make it auto, or give \
                 --max-restarts 0",
            ));
        }
        let Some(place) = place else { return Ok(()) };
        // Each process of SLURM and mpirun may be the launcher of a machine.
        let nodes = self.arguments.nodes.first_given();
        let is_of_torchrun = place.launcher == environment::Launcher::Torchrun;
        let is_one_of_nodes = !is_of_torchrun && nodes.is_some();
        let flag = self.arguments.flags.first_given().or(nodes).filter(|_| !is_one_of_nodes);
        match flag {
            None => Ok(()),
            Some(flag) => Err(Failure::configuration(format!(
                "{flag} asks for ranks to be started, and this process is one: rank {} of {}, started by {}; leave {flag} out, or unset its variables",
                place.rank,
                place.world_size.unwrap_or(0),
                place.launcher,
            ))),
        }
    }

    /// Returns the limits on restarts: those of the flags, or of `[elastic]` for flags that are not given.
    pub(super) fn policy(&self) -> Policy {
        let elastic = &self.config.elastic;
        Policy {
            max_restarts: self.launching.max_restarts.unwrap_or(elastic.max_restarts as usize),
            stable_after: Duration::from_secs_f64(elastic.stable_after_s),
            max_futile: elastic.max_futile_restarts as usize,
        }
    }

    /// Returns the number of ranks that this machine starts.
    pub(super) fn ranks_here(&self) -> usize {
        let several = self.arguments.nodes.are_several(self.launching);
        self.launching.ranks.unwrap_or(if several { 1 } else { self.config.ranks() })
    }

    /// Returns the ranks of this machine for attempt `attempt`, at `placement` if there are several machines; `None` if this
    /// process is to be the only rank.
    pub(super) fn start(
        &self,
        model: &ResolvedModel,
        is_started: bool,
        attempt: usize,
        placement: Option<NodePlacement>,
    ) -> Result<Option<ranks::Start>, Failure> {
        let Self { launching, config, plan, chosen, recorded, .. } = self;
        let (all, here) = (config.ranks(), self.ranks_here());
        let records = launching.log_dir.clone().unwrap_or_else(|| config.metrics.dir.clone());
        // Output files without a given directory are in that of the metrics.
        let output = |ranks, first| launching.output(ranks, first, &records.join("ranks"));
        let max_restarts = self.policy().max_restarts;
        let (start, output) = match placement {
            Some(placement) => {
                require(config, model, placement.first_rank..placement.first_rank + here)?;
                let first = if placement.first_rank == 0 { First::Here } else { First::Elsewhere };
                (
                    ranks::Start { placement, ..ranks::Start::here(here, TransportKind::Auto)? },
                    output(here, first)?,
                )
            }
            None if is_started => {
                require(config, model, ranks::seen_to(all)?)?;
                return Ok(None);
            }
            None => {
                require(config, model, 0..all)?;
                let output = output(all, First::Here)?;
                let is_watched = max_restarts > 0 || launching.role.is_some();
                if all == 1 && output == Output::Labelled && !is_watched {
                    return Ok(None);
                }
                (ranks::Start::here(all, config.parallel.transport.into())?, output)
            }
        };
        // Ranks that are handed a plan do not choose one.
        let plan = plan.map(HandedPlan::new).transpose().map_err(|error| Failure {
            message: format!("cannot hand the plan to the ranks: {error}"),
            code: FAILED,
        })?;
        Ok(Some(ranks::Start {
            environment: chosen
                .map(|chosen| (CHOSEN_VARIABLE.into(), chosen.into()))
                .into_iter()
                .chain(instructions::handed_to_ranks(*recorded))
                .collect(),
            plan,
            output,
            records: Some(records),
            elastic: Elastic {
                role: launching.role.clone().unwrap_or(Elastic::default().role),
                restart_count: attempt,
                max_restarts,
                errors: self.errors(),
            },
            silence: config.heartbeat(),
            ..start
        }))
    }

    /// Returns the directory for the error files of ranks: the log directory, or one next to this process's own error file.
    fn errors(&self) -> Option<PathBuf> {
        let own = || error_file::path().map(|path| path.with_extension("ranks"));
        self.launching.log_dir.clone().or_else(own)
    }
}
