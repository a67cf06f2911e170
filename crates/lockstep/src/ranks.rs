//! Ranks as processes of the command at hand: who of them, or of their launcher, tells what went wrong, and with which code.

use std::env;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use lockstep_comm::{self as comm, LossCause, Output, Pinning, SOCKET_VARIABLE};
use lockstep_train::Ranks;
use lockstep_train::interrupt::Interrupt;
use lockstep_train::launch::{BadEnd, Ended, RankProcesses, run_ranks};

use crate::exit::{Failure, INTERRUPTED, PEER_LOST};

/// What `--nproc-per-node` takes.
pub(crate) fn number(text: &str) -> Result<usize, String> {
    if text == "auto" {
        return Ok(std::thread::available_parallelism().map_or(1, usize::from));
    }
    text.parse().ok().filter(|ranks| *ranks > 0).ok_or_else(|| "a number from 1, or auto".to_owned())
}

/// Starts this command once for each of `ranks` ranks, and watches them. What they called last is written to `records` if
/// they end badly.
pub(crate) fn run(
    ranks: usize,
    pinning: Pinning,
    output: Output,
    records: Option<PathBuf>,
    interrupt: &Interrupt,
) -> Result<ExitCode, Failure> {
    let (interrupted, lost) = (INTERRUPTED.into(), PEER_LOST.into());
    let processes = RankProcesses { ranks, pinning, output, records, interrupted, lost };
    match run_ranks(processes, interrupt)? {
        Ended::Well(code) => Ok(ExitCode::from(code as u8)),
        Ended::Badly(end) => Err(judge(*end)),
    }
}

/// What the launcher tells: what no rank has told where the user sees it.
fn judge(end: BadEnd) -> Failure {
    let comm::Failure { rank, cause, error, log } = end.failure;
    let mut failure = match cause {
        // The first rank's words are shown.
        LossCause::Exit(code) if end.has_told => {
            let is_shown = log.is_none() || rank == 0;
            let message = if is_shown { String::new() } else { format!("rank {rank} {cause}") };
            Failure { message, code: code as u8 }
        }
        _ => error.into(),
    };
    if let Some(log) = log.filter(|_| !failure.message.is_empty()) {
        failure.message += &format!("; what it said is in {}", log.display());
    }
    if let Some(records) = end.records {
        hint(records);
    }
    failure
}

/// Where to read who called what last.
fn hint(records: Result<PathBuf, lockstep_train::Error>) {
    match records {
        Ok(path) => eprintln!("lockstep doctor --trace {} tells who called what last", path.display()),
        Err(error) => eprintln!("no records of what ranks called last: {error}"),
    }
}

/// A rank without a launcher of ours leaves what it called last in `dir` itself, if `error` is one of all ranks.
pub(crate) fn leave_records(ranks: &Ranks, error: &lockstep_train::Error, dir: &Path) {
    if let lockstep_train::Error::Comm(error) = error
        && error.is_known_to_all()
        && !is_launched()
        && let Some(records) = ranks.write_records(error, dir).transpose()
    {
        hint(records);
    }
}

/// Whether our own launcher has started this process.
fn is_launched() -> bool {
    env::var_os(SOCKET_VARIABLE).is_some()
}

/// What a rank tells of its failure: nothing of what all ranks know, for that is our launcher's to say, if there is one.
pub(crate) fn told_by(error: lockstep_train::Error, rank: usize) -> Failure {
    let is_known = matches!(&error, lockstep_train::Error::Comm(error) if error.is_known_to_all());
    let failure = Failure::from(error);
    let message = match rank {
        _ if is_known && is_launched() => String::new(),
        0 => failure.message,
        rank => format!("rank {rank}: {}", failure.message),
    };
    Failure { message, ..failure }
}
