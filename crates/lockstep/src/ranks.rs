//! Ranks as processes of the command at hand: who of them, or of their launcher, tells what went wrong, and with which code.

use std::process::ExitCode;

use lockstep_comm::{self as comm, CommError, Ended, LossCause, Output, Pinning};
use lockstep_train::interrupt::Interrupt;
use lockstep_train::launch::{RankProcesses, run_ranks};

use crate::exit::{Failure, INTERRUPTED, PEER_LOST};

/// Starts this command once for each of `ranks` ranks, and watches them.
pub(crate) fn run(
    ranks: usize,
    pinning: Pinning,
    output: Output,
    interrupt: &Interrupt,
) -> Result<ExitCode, Failure> {
    let processes = RankProcesses { ranks, pinning, output, interrupted: INTERRUPTED.into() };
    match run_ranks(processes, interrupt)? {
        Ended::Well(code) => Ok(ExitCode::from(code as u8)),
        Ended::Badly(failure) => Err(judge(failure)),
    }
}

/// What the launcher tells: what no rank has told where the user sees it.
fn judge(failure: comm::Failure) -> Failure {
    let comm::Failure { rank, cause, error, log } = failure;
    let log = log.map_or(String::new(), |log| format!("; what it said is in {}", log.display()));
    match (error, cause) {
        (CommError::PeerLost { .. } | CommError::Stopped { .. }, LossCause::Exit(code))
            if code != i32::from(PEER_LOST) =>
        {
            // It has said why; the first rank's words are shown.
            let message = format!("rank {rank} ended with exit code {code}{log}");
            let message = if log.is_empty() || rank == 0 { String::new() } else { message };
            Failure { message, code: code as u8 }
        }
        (error, _) => {
            let Failure { message, code } = error.into();
            Failure { message: message + &log, code }
        }
    }
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
