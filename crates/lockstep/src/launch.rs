//! The start of a user's own program as the ranks of a run.
//!
//! The program that a user starts is the launcher of its ranks: it starts copies of itself and watches them. A process that is
//! a rank already, by our launcher, torchrun, `mpirun`, `srun` or Kubernetes, joins the others and runs the body.

use std::error::Error as StdError;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, CommandFactory, Parser};
use lockstep_comm::{NodeInfo, TcpOptions, TransportKind};
use lockstep_launch::interrupt::Interrupt;
use lockstep_launch::restarts::{Policy, Restarts, Verdict, jitter};
use lockstep_launch::{Elastic, JoinOptions, MEETING_LIMIT, is_launched, place, started_group};

use crate::command::finish;
use crate::error::Error;
use crate::exit::{FAILED, Failure, INTERRUPTED};
use crate::launching::{First, Flags, Launching, variable};
use crate::nodes::Nodes;
use crate::output::{note, warning};
use crate::world::World;
use crate::{instructions, limits, ranks};

/// Time without a failure after which restarts count anew.
const STABLE_AFTER: Duration = Duration::from_secs(600);

/// Any error of a body.
type Problem = Box<dyn StdError + Send + Sync>;

/// torchrun's flags of a program.
#[derive(Debug, Args)]
pub(crate) struct Given {
    #[command(flatten)]
    pub(crate) flags: Flags,
    #[command(flatten)]
    pub(crate) nodes: Nodes,
}

#[derive(Debug, Parser)]
struct Ranks {
    #[command(flatten)]
    given: Given,
}

/// Runs `body` as every rank of this program and returns the exit code of the process.
///
/// Started by hand, the program takes torchrun's flags (`--nproc_per_node=4 --nnodes=2 --node_rank=0
/// --rdzv_endpoint=HOST:PORT`, with `-` or `_`) and starts that many copies of itself on this machine; without flags it is
/// the only rank. Started by torchrun, `mpirun`, `srun` or as a Kubernetes job, it joins the other ranks. [`arguments`]
/// returns the other arguments.
///
/// An error of `body` ends the run with the exit code that `lockstep` has for it, or 1; its text is reported with the rank.
///
/// ```no_run
/// fn main() -> std::process::ExitCode {
///     lockstep::launch(|world| {
///         if world.is_first() {
///             println!("{} ranks", world.size());
///         }
///         Ok::<(), std::io::Error>(())
///     })
/// }
/// ```
pub fn launch<E: Into<Problem>>(body: impl FnOnce(&World) -> Result<(), E>) -> ExitCode {
    finish(prepare().and_then(|()| run(body)))
}

/// Returns the arguments of this process without its name and without the flags that [`launch`] takes.
pub fn arguments() -> Vec<String> {
    split(std::env::args().skip(1)).1
}

fn prepare() -> Result<(), Failure> {
    limits::prepare()?;
    instructions::limit()?;
    instructions::choose();
    Ok(())
}

fn run<E: Into<Problem>>(body: impl FnOnce(&World) -> Result<(), E>) -> Result<ExitCode, Failure> {
    // A rank may be asked to stop at any time from its start.
    let interrupt = is_launched().then(Interrupt::on_signals).transpose()?;
    let is_rank = is_launched() || place()?.is_some_and(|place| place.world_size.is_some());
    if !is_rank {
        let own = split(std::env::args().skip(1)).0;
        let program = std::env::args().take(1);
        let given = Ranks::try_parse_from(program.chain(own)).unwrap_or_else(|error| error.exit()).given;
        if let Some(code) = start(&given, 1, TransportKind::Auto)? {
            return Ok(code);
        }
    }
    let interrupt = interrupt.map_or_else(Interrupt::on_signals, Ok)?;
    let join = JoinOptions { way: TransportKind::Auto, tcp: TcpOptions::default(), mpi: ranks::mpi() };
    let group = started_group(join).map_err(|error| ranks::told_by(error, 0))?;
    let world = World::new(group, interrupt);
    body(&world).map_err(|error| failure_of(error.into(), world.rank()))?;
    Ok(if world.is_interrupted() { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS })
}

/// Returns the failure that a rank reports for an error of its body.
fn failure_of(error: Problem, rank: usize) -> Failure {
    match error.downcast::<Error>() {
        // Every rank finds the same mistake in its settings.
        Ok(error) if rank > 0 && error.is_of_all_ranks() => {
            Failure { message: String::new(), ..Failure::from(*error) }
        }
        Ok(error) => match error.into_train() {
            Ok(error) => ranks::told_by(error, rank),
            Err(error) => labelled(Failure::from(error), rank),
        },
        Err(error) => labelled(Failure { message: error.to_string(), code: FAILED }, rank),
    }
}

fn labelled(failure: Failure, rank: usize) -> Failure {
    let message = if rank > 0 { format!("rank {rank}: {}", failure.message) } else { failure.message };
    Failure { message, ..failure }
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

/// Splits arguments into those of [`launch`], each with its value, and the others.
fn split(arguments: impl Iterator<Item = String>) -> (Vec<String>, Vec<String>) {
    let command = Ranks::command();
    let (mut own, mut others) = (Vec::new(), Vec::new());
    let mut arguments = arguments;
    while let Some(argument) = arguments.next() {
        let name =
            argument.strip_prefix("--").map(|name| name.split_once('=').map_or(name, |(name, _)| name));
        let known = name.and_then(|name| {
            command.get_arguments().find(|known| {
                let aliases = known.get_all_aliases().unwrap_or_default();
                known.get_long() == Some(name) || aliases.contains(&name)
            })
        });
        let Some(known) = known else {
            others.push(argument);
            continue;
        };
        let takes_value = known.get_action().takes_values() && !argument.contains('=');
        own.push(argument);
        own.extend(takes_value.then(|| arguments.next()).flatten());
    }
    (own, others)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flags_of_torchrun_are_taken_and_all_others_are_left() {
        let line = "--nproc_per_node=4 --epochs 3 --nnodes 2 --node_rank=0 --rdzv_id=job --rdzv_backend=c10d \
                    --rdzv_endpoint=host:29400 data --lr=0.1";
        let (own, others) = split(line.split_whitespace().map(str::to_owned));
        assert_eq!(others, ["--epochs", "3", "data", "--lr=0.1"]);
        assert_eq!(own.len(), 7, "{own:?}");
        let given = Ranks::try_parse_from(["program".to_owned()].into_iter().chain(own)).unwrap().given;
        assert_eq!(given.flags.settle(&|_| None).unwrap().ranks, Some(4));
    }
}
