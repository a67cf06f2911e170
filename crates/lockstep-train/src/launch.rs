//! The ranks of a run on this machine: started as processes of the program itself, watched, and asked to stop together.

use std::ffi::OsString;
use std::time::Duration;

use lockstep_comm::{
    self as comm, CommError, Deadline, Group, Launch, LossCause, Pinning, WorldOptions, join_from_environment,
};
use rustix::process::{Pid, Signal, kill_process};

use crate::Error;
use crate::interrupt::Interrupt;

/// How often the launcher looks for a signal to pass on.
const LOOK: Duration = Duration::from_millis(100);
/// How long the first rank waits for the last one to start.
const JOIN_LIMIT: Duration = Duration::from_secs(60);

/// Exit codes of ranks that are known here.
#[derive(Debug, Clone, Copy)]
pub struct RankCodes {
    /// Of a rank that has stopped because it was asked to.
    pub interrupted: i32,
    /// Of a rank that has lost another.
    pub lost: i32,
}

/// How the ranks ended.
#[derive(Debug)]
pub enum Ended {
    /// With this exit code; a rank that failed has said why.
    With(i32),
    /// By an error that all ranks know, and none has told.
    Lost(CommError),
}

/// The group of the ranks that this process was started with; none if nobody started any.
///
/// # Errors
/// What kept the ranks from coming together.
pub fn started_group() -> Result<Option<Group>, Error> {
    Ok(join_from_environment(Deadline::after(JOIN_LIMIT))?)
}

/// Starts `ranks` processes of this program with `arguments`, and watches them to their end.
///
/// # Errors
/// What kept them from being started.
pub fn run_ranks(
    ranks: usize,
    arguments: Vec<OsString>,
    codes: RankCodes,
    interrupt: &Interrupt,
) -> Result<Ended, Error> {
    let program = std::env::current_exe().map_err(Error::Program)?;
    let launch = Launch {
        program,
        arguments,
        environment: Vec::new(),
        ranks,
        options: WorldOptions::default(),
        pinning: Pinning::Share,
        sound_codes: vec![0, codes.interrupted],
    };
    let mut agent = launch.start()?;
    let mut is_passed_on = false;
    loop {
        match agent.watch(LOOK)? {
            None => {}
            Some(comm::Ended::Well(code)) => return Ok(Ended::With(code)),
            Some(comm::Ended::Badly(failure)) => {
                return Ok(match failure.cause {
                    LossCause::Exit(code) if code != codes.lost => Ended::With(code),
                    _ => Ended::Lost(failure.error),
                });
            }
        }
        if interrupt.is_requested() && !is_passed_on {
            is_passed_on = true;
            for pid in agent.pids() {
                // One that has ended needs no signal.
                let _ = Pid::from_raw(pid.cast_signed()).map(|pid| kill_process(pid, Signal::TERM));
            }
        }
    }
}
