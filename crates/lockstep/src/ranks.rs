//! Ranks as processes of the command at hand: who of them, or of their launcher, tells what went wrong, and with which code.

use std::path::PathBuf;
use std::process::ExitCode;

use lockstep_comm::{self as comm, LossCause, Output, Pinning};
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
    match end.records {
        Some(Ok(path)) => eprintln!("lockstep doctor --trace {} tells who called what last", path.display()),
        Some(Err(error)) => eprintln!("no records of what ranks called last: {error}"),
        None => {}
    }
    failure
}

/// What a rank tells of its failure: nothing of what all ranks know, for that is the launcher's to say.
pub(crate) fn told_by(error: lockstep_train::Error, rank: usize) -> Failure {
    let is_known = matches!(&error, lockstep_train::Error::Comm(error) if error.is_known_to_all());
    let failure = Failure::from(error);
    let message = match rank {
        _ if is_known => String::new(),
        0 => failure.message,
        rank => format!("rank {rank}: {}", failure.message),
    };
    Failure { message, ..failure }
}
