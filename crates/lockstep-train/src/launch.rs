//! The ranks of a run on this machine: started as processes of the program itself, watched, and asked to stop together.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lockstep_comm::{
    self as comm, Agent, CommError, Deadline, Elastic, Failure, Group, JoinOptions, Launch, LossCause,
    MEETING_LIMIT, Movement, Output, Pinning, Placement, WorldOptions, is_launched, join_from_environment,
};
use lockstep_observe::flight::{Dump, Ending};
use rustix::process::{Pid, Signal, kill_process};

use crate::Error;
use crate::interrupt::Interrupt;

/// How often the launcher looks for a signal to pass on.
const LOOK: Duration = Duration::from_millis(100);
/// How long the first rank waits for the last one to start.
const JOIN_LIMIT: Duration = Duration::from_secs(60);
/// The exit code of a rank that has panicked.
const PANICKED: i32 = 101;
/// The end of a rank that a request for a stop has found without a handler for it.
const STOPPED: LossCause = LossCause::Signal(Signal::TERM.as_raw());

/// How this program is started once for each rank.
#[derive(Debug, Clone)]
pub struct RankProcesses {
    /// How many.
    pub ranks: usize,
    /// Their place among those of other machines.
    pub placement: Placement,
    /// Variables for them.
    pub environment: Vec<(OsString, OsString)>,
    /// Where they run.
    pub pinning: Pinning,
    /// Where what they print goes.
    pub output: Output,
    /// Where the records of the flight recorder go after a bad end, if anywhere.
    pub records: Option<PathBuf>,
    /// What they are told as torchelastic tells its workers.
    pub elastic: Elastic,
    /// The exit code of a rank that has stopped because it was asked to.
    pub interrupted: i32,
    /// The exit code of a rank that has lost another.
    pub lost: i32,
    /// Time without a sign of life after which a rank counts as lost.
    pub silence: Duration,
}

/// How the ranks ended.
#[derive(Debug)]
pub enum Ended {
    /// As they should, with the greatest of their exit codes.
    Well(i32),
    /// One of them has failed.
    Badly(Box<BadEnd>),
    /// The request for a stop ended one that could not take it yet: the ranks had not begun.
    BeforeTheyBegan,
}

/// How a run of ranks ended that did not end well.
#[derive(Debug)]
pub struct BadEnd {
    /// Who failed first, and how.
    pub failure: Failure,
    /// Whether that rank has said why; what all ranks know none of them says.
    pub has_told: bool,
    /// The file with what the ranks called last, if there is something to be learned from it.
    pub records: Option<Result<PathBuf, lockstep_observe::Error>>,
}

/// The group of the ranks that this process was started with; none if nobody started any.
///
/// # Errors
/// What kept the ranks from coming together.
pub fn started_group(options: JoinOptions) -> Result<Option<Group>, Error> {
    let limit = if is_launched() { JOIN_LIMIT } else { MEETING_LIMIT };
    Ok(join_from_environment(options, Deadline::after(limit))?)
}

/// Starts this program with its own arguments as each of the ranks, and watches them to their end. A request for a stop is
/// passed on to them; `tell` is given what the user should know while they run.
///
/// # Errors
/// What kept them from being started.
pub fn run_ranks(
    processes: RankProcesses,
    interrupt: &Interrupt,
    tell: &mut dyn FnMut(&str),
) -> Result<Ended, Error> {
    let RankProcesses {
        ranks,
        placement,
        environment,
        pinning,
        output,
        records,
        elastic,
        interrupted,
        lost,
        silence,
    } = processes;
    let launch = Launch {
        program: std::env::current_exe().map_err(Error::Program)?,
        arguments: std::env::args_os().skip(1).collect(),
        environment,
        ranks,
        options: WorldOptions { silence, ..WorldOptions::default() },
        placement,
        pinning,
        output,
        elastic,
        sound_codes: vec![0, interrupted],
    };
    let world_size = launch.placement.world_size;
    tracing::info!(ranks, world_size, program = %launch.program.display(), "starting ranks");
    let mut agent = launch.start()?;
    let mut is_passed_on = false;
    loop {
        match agent.watch(LOOK)? {
            None => {}
            Some(comm::Ended::Well(code)) => return Ok(Ended::Well(code)),
            Some(comm::Ended::Badly(failure)) if is_passed_on && failure.cause == STOPPED => {
                return Ok(Ended::BeforeTheyBegan);
            }
            Some(comm::Ended::Badly(failure)) => {
                return Ok(Ended::Badly(Box::new(bad_end(
                    &agent,
                    world_size,
                    failure,
                    records.as_deref(),
                    lost,
                ))));
            }
        }
        if let Some(movement) = agent.movement() {
            tell(&in_words(movement));
        }
        if interrupt.is_requested() && !is_passed_on {
            is_passed_on = true;
            tracing::info!("asked to stop: passing it on to the ranks");
            for pid in agent.pids() {
                // One that has ended needs no signal.
                let _ = Pid::from_raw(pid.cast_signed()).map(|pid| kill_process(pid, Signal::TERM));
            }
        }
    }
}

/// Message on ranks that have all stopped to move, or move again.
fn in_words(movement: Movement) -> String {
    let Movement::Still { silence, pids, are_stopped } = movement else {
        return "the ranks move again".to_owned();
    };
    let seconds = silence.as_secs_f64();
    let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
    let pids = pids.join(" ");
    if are_stopped {
        format!(
            "no rank has moved for {seconds:.1} s: all of them are stopped; kill -CONT {pids} lets them go on"
        )
    } else {
        format!("no rank has moved for {seconds:.1} s: the system does not run processes {pids}")
    }
}

fn bad_end(agent: &Agent, world_size: usize, failure: Failure, records: Option<&Path>, lost: i32) -> BadEnd {
    let is_of_one = matches!(failure.error, CommError::PeerLost { .. } | CommError::Stopped { .. });
    let has_told = is_of_one && matches!(failure.cause, LossCause::Exit(code) if code != lost);
    let records = records.filter(|_| !has_told || failure.cause == LossCause::Exit(PANICKED));
    let written = records.and_then(|dir| {
        let dump = Dump::new(world_size, Some(Ending::by(&failure.error)), agent.recorded());
        (!dump.is_empty()).then(|| dump.write(dir))
    });
    BadEnd { failure, has_told, records: written }
}
