//! The start of a user's own program as the ranks of a run.
//!
//! The program that a user starts is the launcher of its ranks: it starts copies of itself and watches them. A process that is
//! a rank already, by our launcher, torchrun, `mpirun`, `srun` or Kubernetes, joins the others and runs the body.

use std::error::Error as StdError;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use lockstep_comm::{TcpOptions, TransportKind};
use lockstep_launch::interrupt::Interrupt;
use lockstep_launch::{JoinOptions, is_launched, place, started_group};

use crate::command::finish;
use crate::error::Error;
use crate::exit::{FAILED, Failure, INTERRUPTED};
use crate::local_ranks::{Given, start};
use crate::world::World;
use crate::{instructions, limits, ranks};

/// Any error of a body.
type Problem = Box<dyn StdError + Send + Sync>;

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
