//! The launcher's watch over its ranks: a rank that fails ends the run on all others, and is named with the cause of its end; ranks that
//! have all stopped to move are told of.

use std::{
    os::fd::OwnedFd,
    os::unix::process::ExitStatusExt,
    path::PathBuf,
    process::{Child, ExitStatus},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{
    CommError, LossCause, Output, Recorded, World, WorldOptions,
    output::Relay,
    stillness::{OomKills, Stillness},
};

/// Time for the ranks that are left to end by themselves after one has failed.
const GRACE: Duration = Duration::from_secs(2);
/// The signal that the kernel sends for want of memory.
const SIGKILL: i32 = 9;

/// Ranks that were started. Dropped, it kills those that are left.
#[derive(Debug)]
pub struct Agent {
    world: World,
    first_rank: usize,
    pub(crate) ranks: Vec<Rank>,
    output: Output,
    /// Carrier of the ranks' output; `None` once all of it has come.
    pub(crate) relay: Option<Relay>,
    sound_codes: Vec<i32>,
    /// The greatest exit code so far.
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
pub enum Movement {
    /// Silence: no rank that is left has shown a sign of life for `silence`.
    Still {
        /// Time without a sign of life.
        silence: Duration,
        /// Process ids of the ranks.
        pids: Vec<u32>,
        /// True if a signal (SIGSTOP, SIGTSTP) or a debugger has stopped all of them.
        are_stopped: bool,
    },
    /// Recovery: ranks move again.
    Moves,
}

/// The end of a run.
#[derive(Debug)]
pub enum Ended {
    /// Success of all ranks, with the greatest of their exit codes.
    Well(i32),
    /// Failure of a rank.
    Badly(Failure),
}

/// The first failure of a run.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Failure {
    /// The rank that failed first.
    pub rank: usize,
    /// The end of its process.
    pub cause: LossCause,
    /// The reason why the run ended: the rank's loss, or an error that ranks found before it.
    pub error: CommError,
    /// The file with what the rank wrote to standard error, if there is one.
    pub log: Option<PathBuf>,
    /// True if the launcher has shown the content of that file.
    pub is_shown: bool,
}

impl Agent {
    /// An agent for ranks that come into `world`.
    pub(crate) fn new(world: World, options: WorldOptions, output: Output, sound_codes: Vec<i32>) -> Self {
        Self {
            world,
            first_rank: options.first_rank,
            ranks: Vec::new(),
            output,
            relay: None,
            sound_codes,
            code: 0,
            failure: None,
            kill_at: None,
            oom_kills: OomKills::now(),
            stillness: Stillness::new(options.silence),
        }
    }

    /// Process ids, by rank.
    pub fn pids(&self) -> Vec<u32> {
        self.ranks.iter().map(|rank| rank.child.id()).collect()
    }

    /// Ranks of the world, each with what it called last.
    pub fn recorded(&self) -> impl Iterator<Item = (usize, Vec<Recorded>)> {
        (0..self.ranks.len()).map(|rank| (self.first_rank + rank, self.world.recorded(rank)))
    }

    /// The ranks' world on this machine.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// Watches for at most `limit`. Returns how the run ended once all ranks have.
    ///
    /// # Errors
    /// What the system says.
    pub fn watch(&mut self, limit: Duration) -> Result<Option<Ended>, CommError> {
        let what = "watch the ranks";
        let limit = self.kill_at.map_or(limit, |at| limit.min(at.saturating_duration_since(Instant::now())));
        let timeout = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        let alive = self.ranks.iter().filter(|rank| !rank.has_ended);
        let mut polled: Vec<_> = alive.map(|rank| PollFd::new(&rank.process, PollFlags::IN)).collect();
        match poll(&mut polled, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(CommError::io(what)(error.into())),
        }
        self.oom_kills.look();
        for rank in 0..self.ranks.len() {
            if !self.ranks[rank].has_ended
                && let Some(status) = self.ranks[rank].child.try_wait().map_err(CommError::io(what))?
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
        // What the ranks said comes before what is said of them.
        self.relay = None;
        Ok(Some(self.failure.take().map_or(Ended::Well(self.code), Ended::Badly)))
    }

    /// Returns whether the ranks have all stopped to move, or move again, since the last call.
    pub fn movement(&mut self) -> Option<Movement> {
        let alive = || self.ranks.iter().enumerate().filter(|(_, rank)| !rank.has_ended);
        let beats: Vec<Option<u32>> = alive().map(|(rank, _)| self.world.beat(rank)).collect();
        let has_changed = self.stillness.look(&beats, Instant::now())?;
        let pids: Vec<u32> = alive().map(|(_, rank)| rank.child.id()).collect();
        Some(match has_changed {
            Some(silence) => {
                let are_stopped = pids.iter().all(|pid| crate::stillness::is_stopped(*pid));
                Movement::Still { silence, pids, are_stopped }
            }
            None => Movement::Moves,
        })
    }

    /// The cause of an end with `status`.
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
            && self.sound_codes.contains(&code)
            && self.world.has_left(rank)
        {
            self.code = self.code.max(code);
            return;
        }
        let numbers = (rank, self.first_rank + rank);
        let rank = numbers.1;
        let error = match self.world.end(&CommError::PeerLost { rank, cause, occasion: None }) {
            // A rank that was quicker knows the end alone.
            CommError::PeerLost {
                rank: lost,
                cause: LossCause::Died | LossCause::Disconnected,
                occasion,
            } if lost == rank => CommError::PeerLost { rank, cause, occasion },
            error => error,
        };
        // Others may have found out and ended before the one that they lost.
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
