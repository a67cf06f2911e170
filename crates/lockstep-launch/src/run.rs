//! The local ranks of a run: started as processes of this program, watched, and stopped together.

use std::ffi::OsString;
use std::time::Duration;

use lockstep_comm::{CommError, LossCause, NodePlacement, Recorded, WorldOptions};
use rustix::process::{Pid, Signal, kill_process};

use crate::affinity::Pinning;
use crate::agent::{self, Agent, Failure, Liveness};
use crate::interrupt::Interrupt;
use crate::launch::{Elastic, Launch};
use crate::{LaunchError, Output};

/// Interval at which the launcher checks for a signal to pass on.
const LOOK: Duration = Duration::from_millis(100);
/// Exit code of a rank that has panicked.
const PANICKED: i32 = 101;
/// Cause of death of a rank that received the stop request before its signal handler was installed.
const STOPPED: LossCause = LossCause::Signal(Signal::TERM.as_raw());

/// Description of the rank processes to start.
#[derive(Debug, Clone)]
pub struct RankProcesses {
    /// Number of ranks on this machine.
    pub ranks: usize,
    /// Position of these ranks among those of other machines.
    pub placement: NodePlacement,
    /// Additional environment variables.
    pub environment: Vec<(OsString, OsString)>,
    /// CPU affinity of the ranks.
    pub pinning: Pinning,
    /// Destination of the ranks' output.
    pub output: Output,
    /// Settings that ranks receive in torchelastic's environment variables.
    pub elastic: Elastic,
    /// Exit code of a rank that was asked to stop and has done so.
    pub interrupted: i32,
    /// Exit code of a rank that has lost another.
    pub lost: i32,
    /// Time without a heartbeat after which a rank counts as lost.
    pub silence: Duration,
}

/// End of a set of ranks.
#[derive(Debug)]
pub enum RunOutcome {
    /// All ranks ended normally; the greatest exit code.
    Succeeded(i32),
    /// A rank has failed.
    Failed(Box<BadEnd>),
    /// A stop request ended a rank before it could handle signals.
    BeforeTheyBegan,
}

/// A failed end of a set of ranks.
#[derive(Debug)]
pub struct BadEnd {
    /// The first failure and its rank.
    pub failure: Failure,
    /// True if that rank has reported the reason itself. A reason that all ranks know is reported by none of them.
    pub has_told: bool,
    /// Last operations of each world rank of this machine. Empty if that rank has reported the reason itself and has not
    /// panicked: then the operations explain nothing.
    pub recorded: Vec<(usize, Vec<Recorded>)>,
}

/// Starts this program with its own arguments as each of the ranks, and watches them to their end. A request for a stop is
/// passed on to them; `tell` is given what the user should know while they run.
///
/// # Errors
/// If the processes cannot be started or watched.
pub fn run_ranks(
    processes: RankProcesses,
    interrupt: &Interrupt,
    tell: &mut dyn FnMut(&str),
) -> Result<RunOutcome, LaunchError> {
    let RankProcesses { ranks, placement, environment, pinning, output, elastic, interrupted, lost, silence } =
        processes;
    let launch = Launch {
        program: std::env::current_exe().map_err(LaunchError::Program)?,
        arguments: std::env::args_os().skip(1).collect(),
        environment,
        ranks,
        options: WorldOptions { silence, ..WorldOptions::default() },
        placement,
        pinning,
        output,
        elastic,
        success_codes: vec![0, interrupted],
    };
    let world_size = launch.placement.world_size;
    tracing::info!(ranks, world_size, program = %launch.program.display(), "starting ranks");
    let mut agent = launch.start()?;
    let mut is_passed_on = false;
    loop {
        match agent.watch(LOOK)? {
            None => {}
            Some(agent::RunOutcome::Succeeded(code)) => return Ok(RunOutcome::Succeeded(code)),
            Some(agent::RunOutcome::Failed(failure)) if is_passed_on && failure.cause == STOPPED => {
                return Ok(RunOutcome::BeforeTheyBegan);
            }
            Some(agent::RunOutcome::Failed(failure)) => {
                return Ok(RunOutcome::Failed(Box::new(bad_end(&agent, failure, lost))));
            }
        }
        if let Some(liveness) = agent.liveness() {
            tell(&in_words(liveness));
        }
        if interrupt.is_requested() && !is_passed_on {
            is_passed_on = true;
            tracing::info!("asked to stop: passing it on to the ranks");
            for pid in agent.pids() {
                // A process that has ended needs no signal.
                let _ = Pid::from_raw(pid.cast_signed()).map(|pid| kill_process(pid, Signal::TERM));
            }
        }
    }
}

/// Returns the message about ranks that have all stopped making progress, or continue to.
fn in_words(liveness: Liveness) -> String {
    let Liveness::Silent { silence, pids, are_stopped } = liveness else {
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

fn bad_end(agent: &Agent, failure: Failure, lost: i32) -> BadEnd {
    let is_of_one = matches!(failure.error, CommError::PeerLost { .. } | CommError::Stopped { .. });
    let has_told = is_of_one && matches!(failure.cause, LossCause::Exit(code) if code != lost);
    let explains = !has_told || failure.cause == LossCause::Exit(PANICKED);
    let recorded = if explains { agent.recorded().collect() } else { Vec::new() };
    BadEnd { failure, has_told, recorded }
}
