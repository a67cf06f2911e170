//! Ranks as processes of this command: which of them, or their launcher, reports a failure, and the exit code.

use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use lockstep_comm::{CommError, LossCause, NodePlacement, TransportKind, WorldOptions};
use lockstep_config::{PlanFile, RunConfig};
use lockstep_engine::Ranks;
use lockstep_launch::interrupt::Interrupt;
use lockstep_launch::run::{BadEnd, RankProcesses, RunOutcome, run_ranks};
use lockstep_launch::{
    self as launch, Elastic, JoinByMpi, JoinOptions, LaunchError, Output, Pinning, automatic_ranks,
    is_launched,
};
use lockstep_observe::flight::{Dump, Ending, write_records};
use lockstep_planner::Forecast;

use crate::error_file;
use crate::exit::{Failure, INTERRUPTED, PEER_LOST, code_of};
use crate::output::{self, note, warning};
use crate::planned::HandedPlan;

/// Parses the value of `--nproc-per-node`; `auto` is one for each memory node if there are several, otherwise for each core.
pub(crate) fn number(text: &str) -> Result<usize, String> {
    number_or(text, automatic_ranks)
}

/// Parses a number of ranks of which each has a core; `auto` is one for each core.
pub(crate) fn number_of_cores(text: &str) -> Result<usize, String> {
    number_or(text, || std::thread::available_parallelism().map_or(1, usize::from))
}

fn number_or(text: &str, automatic: impl Fn() -> usize) -> Result<usize, String> {
    if text == "auto" {
        return Ok(automatic());
    }
    text.parse().ok().filter(|ranks| *ranks > 0).ok_or_else(|| "a number from 1, or auto".to_owned())
}

/// Description of the local ranks to start.
pub(crate) struct Start {
    /// Number of ranks on this machine.
    pub(crate) ranks: usize,
    /// Position of these ranks among those of other machines.
    pub(crate) placement: NodePlacement,
    /// Additional environment variables.
    pub(crate) environment: Vec<(OsString, OsString)>,
    /// Plan handed over to the ranks, if any.
    pub(crate) plan: Option<HandedPlan>,
    /// CPU affinity of the ranks.
    pub(crate) pinning: Pinning,
    /// Destination of the ranks' output.
    pub(crate) output: Output,
    /// Directory for the flight record after a failure.
    pub(crate) records: Option<PathBuf>,
    /// Settings that ranks receive in torchelastic's environment variables.
    pub(crate) elastic: Elastic,
    /// Time without a heartbeat after which a rank counts as lost.
    pub(crate) silence: Duration,
}

impl Start {
    /// Returns the description of `ranks` ranks on this machine alone, pinned to their shares of its cores, with `way` as
    /// transport.
    pub(crate) fn here(ranks: usize, way: TransportKind) -> Result<Self, Failure> {
        let placement = if way == TransportKind::Tcp {
            NodePlacement::on_loopback(ranks)?
        } else {
            NodePlacement::alone(ranks)
        };
        let (environment, plan) = (Vec::new(), None);
        let (pinning, output) = (Pinning::Share, Output::Labelled);
        let (records, elastic) = (None, Elastic::default());
        let silence = WorldOptions::default().silence;
        Ok(Self { ranks, placement, environment, plan, pinning, output, records, elastic, silence })
    }
}

/// Returns the ranks whose memory this process checks: all of them if it starts them, itself alone under another launcher.
pub(crate) fn seen_to(all: usize) -> Result<Range<usize>, Failure> {
    Ok(launch::place()?.map_or(0..all, |place| place.rank..place.rank + 1))
}

/// Starts this command once per rank of this machine and watches the processes.
pub(crate) fn run(start: Start, interrupt: &Interrupt) -> Result<ExitCode, Failure> {
    attempt(start, interrupt, &mut None)
}

/// Runs the ranks as [`run`] does; sets `lost` to the rank of this machine whose loss has ended the run, if there is one.
pub(crate) fn attempt(
    start: Start,
    interrupt: &Interrupt,
    lost: &mut Option<(usize, LossCause)>,
) -> Result<ExitCode, Failure> {
    let Start { ranks, placement, mut environment, plan, pinning, output, records, elastic, silence } = start;
    environment.extend(plan.as_ref().map(HandedPlan::variable));
    let errors = elastic.clone();
    let world_size = placement.world_size;
    let processes = RankProcesses {
        ranks,
        placement,
        environment,
        pinning,
        output,
        elastic,
        interrupted: INTERRUPTED.into(),
        lost: PEER_LOST.into(),
        silence,
    };
    match run_ranks(processes, interrupt, &mut |text| warning(text))? {
        RunOutcome::Succeeded(code) => Ok(ExitCode::from(code as u8)),
        RunOutcome::BeforeTheyBegan => Err(interrupted()),
        RunOutcome::Failed(mut end) => {
            let launch::Failure { rank, cause, error, .. } = &end.failure;
            let is_to_blame = matches!(error, CommError::PeerLost { rank: found, .. } if found == rank);
            *lost = is_to_blame.then_some((*rank, *cause));
            let written = records.and_then(|dir| {
                let dump = Dump::new(world_size, Some(Ending::by(error)), std::mem::take(&mut end.recorded));
                (!dump.is_empty()).then(|| dump.write(&dir))
            });
            let failure = judge(*end, &errors);
            if let Some(written) = written {
                hint(written);
            }
            Err(failure)
        }
    }
}

/// Returns the failure for a signal while no rank was running.
pub(crate) fn interrupted() -> Failure {
    LaunchError::Interrupted.into()
}

/// Returns the failure that the launcher reports: only what no rank has reported to the user.
fn judge(end: BadEnd, elastic: &Elastic) -> Failure {
    let launch::Failure { rank, cause, error, log, is_shown } = end.failure;
    let of_rank = elastic.error_file(rank);
    let all = Failure { message: error.to_string(), code: code_of(&error) };
    error_file::pass_on(of_rank.as_deref(), &all, exit_code(&cause));
    let mut failure = match cause {
        // The output of the first rank is shown anyway.
        LossCause::Exit(code) if end.has_told => {
            let message = if is_shown { String::new() } else { format!("rank {rank} {cause}") };
            Failure { message, code: code as u8 }
        }
        _ => error.into(),
    };
    if let Some(log) = log.filter(|_| !failure.message.is_empty()) {
        failure.message += &format!("; what it said is in {}", log.display());
    }
    failure
}

/// Returns an exit code in Python's convention: negative for a signal.
fn exit_code(cause: &LossCause) -> i32 {
    match cause {
        LossCause::Exit(code) => *code,
        LossCause::Signal(signal) => -signal,
        LossCause::OutOfMemory | LossCause::PerhapsOutOfMemory => -9,
        _ => 1,
    }
}

/// Prints how to read the flight record.
fn hint(records: Result<PathBuf, lockstep_observe::Error>) {
    match records {
        Ok(path) => note!("lockstep doctor --trace {} tells who called what last", path.display()),
        Err(error) => note!("no records of what ranks called last: {error}"),
    }
}

/// Writes the flight record of a rank without a launcher of ours to `dir`, if `error` concerns all ranks.
pub(crate) fn leave_records(ranks: &Ranks, error: &lockstep_train::Error, dir: &Path) {
    if let lockstep_train::Error::Comm(error) = error
        && error.is_known_to_all()
        && !is_launched()
        && let Some(records) = write_records(ranks, error, dir).transpose()
    {
        hint(records);
    }
}

/// Returns the error, attributed to the plan file if there is one and it is the cause.
pub(crate) fn blamed(
    plan: Option<&PlanFile>,
    error: impl Into<lockstep_train::Error>,
) -> lockstep_train::Error {
    match (plan, error.into()) {
        (Some(plan), lockstep_train::Error::Config(error)) => plan.blamed(error).into(),
        (_, error) => error,
    }
}

/// Warns if a plan file predicts something else than `forecast`. The run goes on, because predictions are not part of a plan.
pub(crate) fn warn_if_outdated(plan: Option<&PlanFile>, forecast: &Forecast) {
    let is_first = launch::place().is_ok_and(|place| place.is_none_or(|place| place.rank == 0));
    if is_first && let Some(difference) = plan.and_then(|plan| forecast.outdated(plan)) {
        warning(&difference);
    }
}

/// Returns the failure that a rank reports. An error that all ranks know is reported by our launcher, or by a single rank if
/// there is no launcher.
pub(crate) fn told_by(error: impl Into<lockstep_train::Error>, rank: usize) -> Failure {
    use lockstep_train::Error;
    let error = error.into();
    let is_first_here =
        || launch::place().is_ok_and(|place| place.is_none_or(|place| place.local_rank == Some(0)));
    let is_told_elsewhere = match &error {
        Error::Comm(error) if error.is_known_to_all() => is_launched() || error.teller() != Some(rank),
        // All ranks of a machine end in the same way, and one reports it.
        Error::OtherRun { .. } | Error::TooManySkipped { .. } | Error::NothingToPredict { .. } => {
            is_launched() && !is_first_here()
        }
        _ => false,
    };
    let failure = Failure::from(error);
    let message = match rank {
        _ if is_told_elsewhere => String::new(),
        0 => failure.message,
        rank => format!("rank {rank}: {}", failure.message),
    };
    Failure { message, ..failure }
}

/// Returns this rank's result if all ranks have one. Else the first rank reports all failures, and the others none. All ranks call this.
pub(crate) fn all_or_none<T>(ranks: &Ranks, own: Result<T, Failure>) -> Result<T, Failure> {
    if ranks.size() == 1 {
        return own;
    }
    let lost = |error| told_by(error, ranks.rank());
    let (message, code) = own.as_ref().err().map_or(("", 0), |failure| (&*failure.message, failure.code));
    let codes = ranks.all_numbers(code.into()).map_err(lost)?;
    let messages = ranks.gather(message.as_bytes()).map_err(lost)?;
    let Some(code) = codes.into_iter().find(|code| *code != 0) else { return own };
    let messages: Vec<_> = messages.iter().map(|message| String::from_utf8_lossy(message)).collect();
    let message = match messages.first() {
        Some(first) if messages.iter().all(|message| message == first) => first.clone().into_owned(),
        _ => {
            let failed = messages.iter().enumerate().filter(|(_, message)| !message.is_empty());
            failed.map(|(rank, message)| format!("rank {rank}: {message}")).collect::<Vec<_>>().join("; ")
        }
    };
    Err(Failure { message, code: code as u8 })
}

/// Reports a rank's failure and ends all ranks by `abort`, which returns if they end by themselves.
pub(crate) fn ended_by(error: lockstep_train::Error, rank: usize, abort: impl FnOnce(u8)) -> Failure {
    let text = error.to_string();
    let told = told_by(error, rank);
    error_file::write(&Failure { message: text, code: told.code });
    let Failure { message, code } = told;
    if !message.is_empty() {
        output::error(&message);
    }
    abort(code);
    Failure { message: String::new(), code }
}

/// Returns the options with which the ranks of a run join.
pub(crate) fn join_options(config: &RunConfig) -> JoinOptions {
    JoinOptions { way: config.parallel.transport.into(), tcp: config.tcp_options(), mpi: mpi() }
}

/// Returns the function that joins ranks over MPI; `None` in a program built without the feature `mpi`.
#[cfg(feature = "mpi")]
pub(crate) fn mpi() -> Option<JoinByMpi> {
    use lockstep_mpi::{MpiOptions, join_mpi};
    Some(|| join_mpi(MpiOptions { exit_code: |error| code_of(error).into(), ..MpiOptions::default() }))
}

/// Returns the function that joins ranks over MPI: `None`, since this program was built without the feature `mpi`.
#[cfg(not(feature = "mpi"))]
pub(crate) fn mpi() -> Option<JoinByMpi> {
    None
}
