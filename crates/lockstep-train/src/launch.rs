//! The ranks of a run on this machine: started as processes of the program itself, watched, and asked to stop together.

use std::time::Duration;

use lockstep_comm::{Deadline, Ended, Group, Launch, Output, Pinning, WorldOptions, join_from_environment};
use rustix::process::{Pid, Signal, kill_process};

use crate::Error;
use crate::interrupt::Interrupt;

/// How often the launcher looks for a signal to pass on.
const LOOK: Duration = Duration::from_millis(100);
/// How long the first rank waits for the last one to start.
const JOIN_LIMIT: Duration = Duration::from_secs(60);

/// How this program is started once for each rank.
#[derive(Debug, Clone)]
pub struct RankProcesses {
    /// How many.
    pub ranks: usize,
    /// Where they run.
    pub pinning: Pinning,
    /// Where what they print goes.
    pub output: Output,
    /// The exit code of a rank that has stopped because it was asked to.
    pub interrupted: i32,
}

/// The group of the ranks that this process was started with; none if nobody started any.
///
/// # Errors
/// What kept the ranks from coming together.
pub fn started_group() -> Result<Option<Group>, Error> {
    Ok(join_from_environment(Deadline::after(JOIN_LIMIT))?)
}

/// Starts this program with its own arguments as each of the ranks, and watches them to their end. A request for a stop is
/// passed on to them.
///
/// # Errors
/// What kept them from being started.
pub fn run_ranks(processes: RankProcesses, interrupt: &Interrupt) -> Result<Ended, Error> {
    let RankProcesses { ranks, pinning, output, interrupted } = processes;
    let launch = Launch {
        program: std::env::current_exe().map_err(Error::Program)?,
        arguments: std::env::args_os().skip(1).collect(),
        environment: Vec::new(),
        ranks,
        options: WorldOptions::default(),
        pinning,
        output,
        sound_codes: vec![0, interrupted],
    };
    let mut agent = launch.start()?;
    let mut is_passed_on = false;
    loop {
        if let Some(ended) = agent.watch(LOOK)? {
            return Ok(ended);
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
