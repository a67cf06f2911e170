//! The command as the launcher of its own ranks: it starts them, watches them, and starts them again.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use lockstep_comm::environment::{self, ProcessPlace};
use lockstep_comm::{Elastic, Output, Way};
use lockstep_train::config::Transport;
use lockstep_train::fit::require;
use lockstep_train::interrupt::Interrupt;
use lockstep_train::plan::check;
use lockstep_train::{Forecast, PlanFile, ResolvedModel, Resume, RunConfig};

use super::{Arguments, CHOSEN_VARIABLE};
use crate::error_file;
use crate::exit::{self, Failure, PEER_LOST};
use crate::launching::{First, Launching};
use crate::nodes::Met;
use crate::output::{note, warning};
use crate::ranks;

/// The command as the launcher of its own ranks.
pub(super) struct Launcher<'a> {
    pub(super) arguments: &'a Arguments,
    pub(super) launching: &'a Launching,
    pub(super) config: &'a RunConfig,
    pub(super) plan: Option<&'a PlanFile>,
    /// The words on the plan that the planner has chosen.
    pub(super) chosen: Option<&'a str>,
}

/// Longest pause before ranks are started again.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

impl Launcher<'_> {
    /// Refuses flags that contradict each other, or whoever has started this process as a rank.
    pub(super) fn check(&self, resume: &Resume, place: Option<ProcessPlace>) -> Result<(), Failure> {
        if self.launching.max_restarts > 0 && *resume != Resume::Auto {
            return Err(Failure::configuration(
                "--max-restarts goes on from the newest checkpoint: leave --resume out, or make it auto",
            ));
        }
        let Some(place) = place else { return Ok(()) };
        // Of SLURM's and mpirun's processes each may be the launcher of a machine.
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

    /// Starts this command once for each rank of this machine, if there are to be several and nobody else has started them; again
    /// after a failure, as often as that is wanted.
    pub(super) fn run(&self, is_started: bool) -> Result<Option<ExitCode>, Failure> {
        // One message before anything is started, and not one of each rank.
        if let Some(plan) = self.plan {
            plan.check(self.config)?;
        }
        let (_, model) = check(self.config)?;
        if self.plan.is_some() {
            ranks::warn_if_outdated(self.plan, &Forecast::of(self.config, &model)?);
        }
        // mpirun has started them, or there is one.
        if self.config.parallel.transport == Transport::Mpi {
            return Ok(None);
        }
        let mut interrupt = None;
        let mut restarts = 0;
        loop {
            let Some((start, met)) = self.start(&model, is_started, restarts)? else { return Ok(None) };
            let interrupt = match &interrupt {
                Some(interrupt) => interrupt,
                None => {
                    self.launching.without_effect().iter().for_each(|text| note!("{text}"));
                    interrupt.insert(Interrupt::on_signals()?)
                }
            };
            let ended = ranks::run(start, interrupt);
            drop(met);
            match ended {
                Err(failure) if self.may_restart(&failure, restarts) && !interrupt.is_requested() => {
                    restarts += 1;
                    say_restart(&failure, restarts, self.launching.max_restarts);
                    std::thread::sleep(LONGEST_PAUSE.min(Duration::from_millis(100 << restarts.min(10))));
                }
                ended => {
                    let dir = &self.config.checkpoint.dir;
                    return ended.map(Some).map_err(|failure| resumable(failure, dir));
                }
            }
        }
    }

    /// The ranks of this machine and the keeper of their secret, once all machines have met; `None` if this process is to be the
    /// only one.
    fn start(
        &self,
        model: &ResolvedModel,
        is_started: bool,
        restarts: usize,
    ) -> Result<Option<(ranks::Start, Option<Met>)>, Failure> {
        let Self { arguments, launching, config, plan, chosen } = self;
        let all = config.ranks();
        let several = arguments.nodes.are_several(launching);
        let here = launching.ranks.unwrap_or(if several { 1 } else { all });
        let records = launching.log_dir.clone().unwrap_or_else(|| config.metrics.dir.clone());
        // What ranks print to files without a directory goes beside the metrics.
        let output = |ranks, first| launching.output(ranks, first, &records.join("ranks"));
        let met = arguments.nodes.meet(here, launching)?;
        let (start, output) = match &met {
            Some(Met { placement, .. }) => {
                require(config, model, placement.first_rank..placement.first_rank + here)?;
                let first = if placement.first_rank == 0 { First::Here } else { First::Elsewhere };
                let placement = placement.clone();
                (ranks::Start { placement, ..ranks::Start::here(here, Way::Auto)? }, output(here, first)?)
            }
            None if is_started => {
                require(config, model, ranks::seen_to(all)?)?;
                return Ok(None);
            }
            None => {
                require(config, model, 0..all)?;
                let output = output(all, First::Here)?;
                let is_watched = launching.max_restarts > 0 || launching.role.is_some();
                if all == 1 && output == Output::Labelled && !is_watched {
                    return Ok(None);
                }
                (ranks::Start::here(all, config.parallel.transport.into())?, output)
            }
        };
        // A rank that is given the keys of a plan chooses none.
        let keys = plan.map_or(&[][..], PlanFile::settings);
        let told = chosen.map(|chosen| (CHOSEN_VARIABLE.into(), chosen.into()));
        let of_nodes = met.as_ref().map_or(&[][..], |met| &met.environment);
        let start = ranks::Start {
            environment: of_nodes.iter().cloned().chain(told).collect(),
            arguments: keys.iter().flat_map(|key| ["--set".into(), key.into()]).collect(),
            output,
            records: Some(records.clone()),
            elastic: Elastic {
                role: launching.role.clone().unwrap_or(Elastic::default().role),
                restart_count: restarts,
                max_restarts: launching.max_restarts,
                errors: self.errors(),
            },
            ..start
        };
        Ok(Some((start, met)))
    }

    /// The directory where ranks say why they fail: beside what they print, or, where only this process is asked to say it, beside its own file.
    fn errors(&self) -> Option<PathBuf> {
        let own = || error_file::path().map(|path| path.with_extension("ranks"));
        self.launching.log_dir.clone().or_else(own)
    }

    /// Returns true if another try may end better: not where the configuration is wrong or something is missing.
    fn may_restart(&self, failure: &Failure, restarts: usize) -> bool {
        restarts < self.launching.max_restarts
            && !matches!(failure.code, exit::CONFIGURATION | exit::MISSING | exit::CORRUPT_INPUT)
    }
}

fn say_restart(failure: &Failure, restart: usize, most: usize) {
    let message = match failure.message.as_str() {
        "" => "a rank failed",
        message => message,
    };
    warning(&format!("{message}; restart {restart} of {most} goes on from the last checkpoint"));
}

/// A loss is no fault of the run's: it can go on.
fn resumable(failure: Failure, checkpoints: &Path) -> Failure {
    let saved = lockstep_checkpoint::list(checkpoints).unwrap_or_default();
    let how = match saved.last() {
        Some(last) => format!("; the same command goes on from {}", last.path.display()),
        None => "; no checkpoint was saved, so that the same command begins anew".to_owned(),
    };
    match failure {
        Failure { message, code: PEER_LOST } if !message.is_empty() => {
            Failure { message: message + &how, code: PEER_LOST }
        }
        failure => failure,
    }
}
