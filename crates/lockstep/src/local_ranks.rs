//! The start of the ranks of a program or of an inference: torchrun's flags, and the processes of this machine, with restarts.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use lockstep_comm::{NodeInfo, TransportKind};
use lockstep_launch::interrupt::Interrupt;
use lockstep_launch::restarts::{Policy, Restarts, Verdict, jitter};
use lockstep_launch::{Elastic, MEETING_LIMIT};

use crate::exit::Failure;
use crate::launching::{First, Flags, Launching, variable};
use crate::nodes::Nodes;
use crate::output::{note, warning};
use crate::ranks;

/// Time without a failure after which restarts count anew.
const STABLE_AFTER: Duration = Duration::from_secs(600);

/// torchrun's flags of a program.
#[derive(Debug, Args)]
pub(crate) struct Given {
    #[command(flatten)]
    pub(crate) flags: Flags,
    #[command(flatten)]
    pub(crate) nodes: Nodes,
}

/// Starts the ranks of this machine, `ranks` if no flag says how many, and watches them to their end, with restarts after failures;
/// `None` if this process is to be the only rank.
pub(crate) fn start(given: &Given, ranks: usize, way: TransportKind) -> Result<Option<ExitCode>, Failure> {
    let launching = given.flags.settle(&variable)?;
    let mut rendezvous = given.nodes.rendezvous(&launching)?;
    let several = given.nodes.are_several(&launching);
    let here = launching.ranks.unwrap_or(if several { 1 } else { ranks });
    let max_restarts = launching.max_restarts.unwrap_or(0);
    if here == 1 && rendezvous.is_none() && max_restarts == 0 {
        return Ok(None);
    }
    launching.without_effect().iter().for_each(|text| note!("{text}"));
    let policy = Policy { max_restarts, stable_after: STABLE_AFTER, max_futile: usize::MAX };
    let mut restarts = Restarts::new(policy, None);
    let interrupt = Interrupt::on_signals()?;
    for attempt in 0.. {
        let start = match &mut rendezvous {
            None => ranks::Start::here(here, way)?,
            Some(rendezvous) => {
                let info = NodeInfo { attempt, max_restarts, ..NodeInfo::first(here) };
                let limit = launching.limit.unwrap_or(MEETING_LIMIT);
                let met = rendezvous.meet(info, limit, Some(&interrupt), &|text| note!("{text}"))?;
                ranks::Start { placement: met.placement, ..ranks::Start::here(here, TransportKind::Auto)? }
            }
        };
        let elastic = Elastic { restart_count: attempt, max_restarts, ..Elastic::default() };
        let output = output(&launching, here, start.placement.first_rank)?;
        let begin = std::time::Instant::now();
        let failure = match ranks::run(ranks::Start { elastic, output, ..start }, &interrupt) {
            Ok(code) => return Ok(Some(code)),
            Err(failure) => failure,
        };
        if interrupt.is_requested() || !failure.may_restart() {
            return Err(failure);
        }
        match restarts.after_failure(begin.elapsed(), None, jitter()) {
            Verdict::Again(pause) => {
                warning(&format!("{}; restart {} of {max_restarts}", failure.cause(), attempt + 1));
                if !interrupt.sleeps(pause) {
                    return Err(ranks::interrupted());
                }
            }
            Verdict::UsedUp | Verdict::Futile(_) => return Err(failure),
        }
    }
    Ok(None)
}

/// Returns the destinations of the output of this machine's ranks.
fn output(launching: &Launching, here: usize, first_rank: usize) -> Result<lockstep_launch::Output, Failure> {
    let first = if first_rank == 0 { First::Here } else { First::Elsewhere };
    launching.output(here, first, std::path::Path::new("ranks"))
}
