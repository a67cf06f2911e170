//! Supervision of the ranks by their launcher. A rank that fails ends the run on all others, and is reported with the cause of
//! its end. The agent also reports when no rank shows any sign of life.

use std::{
    os::fd::OwnedFd,
    os::unix::process::ExitStatusExt,
    path::PathBuf,
    process::{Child, ExitStatus},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use lockstep_comm::{CommError, LossCause, Recorded, World, WorldOptions};

use crate::{
    LaunchError, Output,
    output::Relay,
    stillness::{OomKills, Stillness},
};

/// Time for the surviving ranks to end by themselves after a failure.
const GRACE: Duration = Duration::from_secs(2);
/// Number of the signal with which the kernel's out-of-memory killer ends a process.
const SIGKILL: i32 = 9;

/// The started ranks of one launcher. Dropping it kills the surviving ones.
#[derive(Debug)]
pub struct Agent {
    world: World,
    first_rank: usize,
    pub(crate) ranks: Vec<Rank>,
    output: Output,
    /// Relay of the ranks' output; `None` once all of it has been relayed.
    pub(crate) relay: Option<Relay>,
    success_codes: Vec<i32>,
    /// Greatest exit code so far.
    code: i32,
    failure: Option<Failure>,
    kill_at: Option<Instant>,
    oom_kills: OomKills,
    stillness: Stillness,
}

#[derive(Debug)]
pub(crate) struct Rank {
    pub(crate) child: Child,
    pub(crate) process: OwnedFd,
    pub(crate) has_ended: bool,
}

/// A change in whether the ranks move.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Liveness {
    /// Silence: no surviving rank has shown a sign of life for `silence`.
    Silent {
        /// Time without a sign of life.
        silence: Duration,
        /// Process ids of the surviving ranks.
        pids: Vec<u32>,
        /// True if a signal (SIGSTOP, SIGTSTP) or a debugger has stopped all of them.
        are_stopped: bool,
    },
    /// Recovery: ranks show signs of life again.
    Recovered,
}

/// Outcome of a run.
#[derive(Debug)]
pub enum RunOutcome {
    /// Success of all ranks, with the greatest of their exit codes.
    Succeeded(i32),
    /// Failure of a rank.
    Failed(Failure),
}

/// The first failure of a run.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Failure {
    /// The rank that failed first.
    pub rank: usize,
    /// Cause of the end of its process.
    pub cause: LossCause,
    /// Error that ended the run: the loss of this rank, or an error that ranks detected before it.
    pub error: CommError,
    /// File with the rank's standard error, if there is one.
    pub log: Option<PathBuf>,
    /// True if the launcher has shown the content of that file.
    pub is_shown: bool,
}

impl Agent {
    /// Creates an agent for ranks that join `world`.
    pub(crate) fn new(world: World, options: WorldOptions, output: Output, success_codes: Vec<i32>) -> Self {
        Self {
            world,
            first_rank: options.first_rank,
            ranks: Vec::new(),
            output,
            relay: None,
            success_codes,
            code: 0,
            failure: None,
            kill_at: None,
            oom_kills: OomKills::now(),
            stillness: Stillness::new(options.silence),
        }
    }

    /// Returns the process ids, by local rank.
    pub fn pids(&self) -> Vec<u32> {
        self.ranks.iter().map(|rank| rank.child.id()).collect()
    }

    /// Returns each world rank of this machine with the last operations that it called.
    pub fn recorded(&self) -> impl Iterator<Item = (usize, Vec<Recorded>)> {
        (0..self.ranks.len()).map(|rank| (self.first_rank + rank, self.world.recorded(rank)))
    }

    /// Returns the ranks' world on this machine.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// Watches the ranks for at most `limit`. Returns the outcome once all ranks have ended, `None` before.
    ///
    /// # Errors
    /// If the ranks cannot be watched.
    pub fn watch(&mut self, limit: Duration) -> Result<Option<RunOutcome>, LaunchError> {
        let what = "watch the ranks";
        let limit = self.kill_at.map_or(limit, |at| limit.min(at.saturating_duration_since(Instant::now())));
        let timeout = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        let alive = self.ranks.iter().filter(|rank| !rank.has_ended);
        let mut polled: Vec<_> = alive.map(|rank| PollFd::new(&rank.process, PollFlags::IN)).collect();
        match poll(&mut polled, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(LaunchError::io(what)(error.into())),
        }
        self.oom_kills.look();
        for rank in 0..self.ranks.len() {
            if !self.ranks[rank].has_ended
                && let Some(status) = self.ranks[rank].child.try_wait().map_err(LaunchError::io(what))?
            {
                self.ranks[rank].has_ended = true;
                self.note_end(rank, status);
            }
        }
        if self.kill_at.is_some_and(|at| Instant::now() >= at) {
            self.kill();
        }
        if !self.ranks.iter().all(|rank| rank.has_ended) {
            return Ok(None);
        }
        // All output of the ranks is relayed before the outcome is reported.
        self.relay = None;
        Ok(Some(self.failure.take().map_or(RunOutcome::Succeeded(self.code), RunOutcome::Failed)))
    }

    /// Returns the change since the last call: all ranks have gone silent, or show signs of life again. `None` without
    /// a change.
    pub fn liveness(&mut self) -> Option<Liveness> {
        let alive = || self.ranks.iter().enumerate().filter(|(_, rank)| !rank.has_ended);
        let beats: Vec<Option<u32>> = alive().map(|(rank, _)| self.world.beat(rank)).collect();
        let has_changed = self.stillness.look(&beats, Instant::now())?;
        let pids: Vec<u32> = alive().map(|(_, rank)| rank.child.id()).collect();
        Some(match has_changed {
            Some(silence) => {
                let are_stopped = pids.iter().all(|pid| crate::stillness::is_stopped(*pid));
                Liveness::Silent { silence, pids, are_stopped }
            }
            None => Liveness::Recovered,
        })
    }

    /// Returns the cause of loss for an exit with `status`.
    fn cause(&self, status: ExitStatus) -> LossCause {
        match (status.code(), status.signal()) {
            (Some(code), _) => LossCause::Exit(code),
            (None, Some(SIGKILL)) => match self.oom_kills.have_risen() {
                Some(true) => LossCause::OutOfMemory,
                Some(false) => LossCause::Signal(SIGKILL),
                None => LossCause::PerhapsOutOfMemory,
            },
            (None, Some(signal)) => LossCause::Signal(signal),
            (None, None) => LossCause::Died,
        }
    }

    fn note_end(&mut self, rank: usize, status: ExitStatus) {
        let cause = self.cause(status);
        tracing::debug!(rank = self.first_rank + rank, %cause, has_left = self.world.has_left(rank), "a rank has ended");
        if let LossCause::Exit(code) = cause
            && self.success_codes.contains(&code)
            && self.world.has_left(rank)
        {
            self.code = self.code.max(code);
            return;
        }
        let numbers = (rank, self.first_rank + rank);
        let rank = numbers.1;
        let error = match self.world.end(&CommError::PeerLost { rank, cause, context: None }) {
            // A rank that detected the loss first knows only that the process ended.
            CommError::PeerLost { rank: lost, cause: LossCause::Died | LossCause::Disconnected, context }
                if lost == rank =>
            {
                CommError::PeerLost { rank, cause, context }
            }
            error => error,
        };
        // Other ranks may have detected the loss and ended before the rank that they lost.
        let is_to_blame = matches!(error, CommError::PeerLost { rank: lost, .. } if lost == rank);
        if is_to_blame || self.failure.is_none() {
            let (log, is_shown) = (self.output.error_log(numbers), self.output.shows_errors(numbers));
            self.failure = Some(Failure { rank, cause, error, log, is_shown });
        }
        self.kill_at.get_or_insert(Instant::now() + GRACE);
    }

    fn kill(&mut self) {
        for rank in self.ranks.iter_mut().filter(|rank| !rank.has_ended) {
            // It may have ended just now.
            let _ = rank.child.kill();
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.kill();
        for rank in &mut self.ranks {
            let _ = rank.child.wait();
        }
    }
}
