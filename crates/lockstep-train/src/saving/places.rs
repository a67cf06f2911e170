//! The directories that a save may go to, in the order in which they are tried, and how long each is waited for.

use std::cell::Cell;
use std::io;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lockstep_checkpoint::{
    Abandoned, CheckpointError, CommitObserver, CommitPoint, Manifest, Pruned, Standing, Wait, make_room,
    prune,
};
use lockstep_config::RunConfig;
use lockstep_observe::progress::Voice;

use super::part::Observer;
use crate::interrupt::Interrupt;

/// A stall is told after this long, and again each time that twice as much has passed.
const TOLD_AFTER: Duration = Duration::from_secs(5);
/// Time since the last progress within which a save is not given up after a stop was asked for.
const MOVES: Duration = Duration::from_secs(1);
/// Share of the grace after which a directory is given up while there is another one, and while there is none.
const SHARES_OF_GRACE: [f64; 2] = [0.4, 0.8];

/// A directory of checkpoints.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) path: PathBuf,
    /// Number of checkpoints that stay; `None` for all.
    pub(super) keep: Option<NonZeroUsize>,
    /// Keeps the checkpoint with the lowest evaluation loss as well.
    keep_best: bool,
    /// The thread that the last save here has left behind, if it has stalled, and since when it has.
    stalled: Mutex<Option<(Abandoned, Instant)>>,
}

impl Place {
    /// The places of a run, the first of which is its `checkpoint.dir`.
    pub(super) fn of_run(config: &RunConfig) -> Arc<[Self]> {
        let place = |path: &Path| Self {
            path: path.to_owned(),
            keep: NonZeroUsize::new(config.checkpoint.keep),
            keep_best: config.checkpoint.keep_best,
            stalled: Mutex::new(None),
        };
        config.checkpoint_dirs().into_iter().map(place).collect()
    }

    /// Removes the checkpoints beyond `keep` after one of step `newest` was saved; returns what went wrong.
    pub(super) fn prune(&self, newest: u64, watch: &dyn CommitObserver) -> Vec<String> {
        let Some(keep) = self.keep else { return Vec::new() };
        let (dir, standing) = (self.path.clone(), self.standing());
        let pruned = lockstep_checkpoint::run_on_disk(watch, "pruning", &self.path, move || {
            prune(&dir, keep, &[newest], standing)
        });
        let failed = match pruned {
            Ok(pruned) => pruned.failed,
            Err(error) => vec![self.note(error)],
        };
        failed.into_iter().map(|error| format!("an old checkpoint is not removed: {error}")).collect()
    }

    /// Removes checkpoints beyond the newest `keep` before a save that finds no room.
    pub(super) fn make_room(
        &self,
        keep: usize,
        watch: &dyn CommitObserver,
    ) -> Result<Pruned, CheckpointError> {
        let Some(keep) = NonZeroUsize::new(keep) else { return Ok(Pruned::default()) };
        let (dir, standing) = (self.path.clone(), self.standing());
        lockstep_checkpoint::run_on_disk(watch, "pruning", &self.path, move || {
            make_room(&dir, keep, standing)
        })
        .map_err(|error| self.note(error))
    }

    fn standing(&self) -> impl Fn(&Manifest) -> Standing + Send + 'static {
        let keep_best = self.keep_best;
        move |manifest| Standing {
            is_doubtful: manifest.state["is_doubtful"] == true,
            loss: manifest.state["eval_loss"].as_f64().filter(|_| keep_best),
        }
    }

    /// Remembers a stall.
    pub(super) fn note(&self, error: CheckpointError) -> CheckpointError {
        if let CheckpointError::Stalled { abandoned, idle, .. } = &error {
            let now = Instant::now();
            *self.stalled() = Some((abandoned.clone(), now.checked_sub(*idle).unwrap_or(now)));
        }
        error
    }

    /// Forgets earlier stalls after a save.
    pub(super) fn has_saved(&self) {
        *self.stalled() = None;
    }

    /// Returns true if the last save here has stalled.
    fn has_stalled(&self) -> bool {
        self.stalled().is_some()
    }

    /// An error where the thread of the last save here is still in its call: another one would be stuck as well.
    ///
    /// # Errors
    /// [`CheckpointError::Stalled`].
    pub(super) fn check(&self) -> Result<(), CheckpointError> {
        match self.stalled().clone() {
            Some((abandoned, since)) if abandoned.is_stuck() => {
                let (path, idle) = (self.path.clone(), since.elapsed());
                Err(CheckpointError::Stalled { doing: "an earlier save in", path, idle, abandoned })
            }
            _ => Ok(()),
        }
    }

    fn stalled(&self) -> MutexGuard<'_, Option<(Abandoned, Instant)>> {
        self.stalled.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The times that saves of a run wait for.
#[derive(Debug, Clone)]
pub(super) struct Limits {
    /// Time without progress after which a directory is given up.
    pub(super) stall: Duration,
    /// Time from a request to stop to the end of the process.
    pub(super) grace: Duration,
    pub(super) interrupt: Interrupt,
}

/// Tells of a save that stalls, and ends it after a while.
pub(super) struct Watch<'a> {
    pub(super) inner: &'a Observer,
    pub(super) voice: &'a Voice,
    pub(super) step: u64,
    pub(super) place: &'a Place,
    /// Returns true if there is another place to go to.
    pub(super) has_other: bool,
    pub(super) limits: &'a Limits,
    /// Set while the file system does not answer.
    pub(super) stalls: &'a AtomicBool,
    /// Time of the stall that was told last; zero before.
    pub(super) told: Cell<Duration>,
}

impl CommitObserver for Watch<'_> {
    fn reached(&self, point: CommitPoint) -> io::Result<()> {
        self.stalls.store(false, Ordering::Relaxed);
        self.inner.reached(point)
    }

    fn waiting(&self, wait: &Wait<'_>) -> io::Result<()> {
        self.inner.waiting(wait)?;
        self.stalls.store(wait.idle >= TOLD_AFTER, Ordering::Relaxed);
        if is_told_now(&self.told, wait.idle) {
            self.voice.message(&format!("saving step {}: {}", self.step, told_of(wait, &self.place.path)));
        }
        let limit = if self.place.has_stalled() { TOLD_AFTER } else { self.limits.stall };
        let grace_ends = self.limits.interrupt.requested_since().is_some_and(|since| {
            let share = SHARES_OF_GRACE[usize::from(!self.has_other)];
            wait.idle >= MOVES && since.elapsed() >= self.limits.grace.mul_f64(share)
        });
        if wait.idle >= limit || grace_ends { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
    }
}

/// Tells of a directory that does not answer when a run begins, and gives up after a while.
pub(crate) struct Beginning<'a> {
    dir: &'a Path,
    limit: Duration,
    told: Cell<Duration>,
}

impl<'a> Beginning<'a> {
    /// Returns the observer for a directory of `config`'s checkpoints.
    pub(crate) fn of(config: &RunConfig, dir: &'a Path) -> Self {
        Self { dir, limit: Duration::from_secs_f64(config.checkpoint.stall_s), told: Cell::default() }
    }
}

impl CommitObserver for Beginning<'_> {
    fn reached(&self, _: CommitPoint) -> io::Result<()> {
        Ok(())
    }

    fn waiting(&self, wait: &Wait<'_>) -> io::Result<()> {
        if is_told_now(&self.told, wait.idle) {
            Voice::on_stderr().message(&told_of(wait, self.dir));
        }
        if wait.idle >= self.limit { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
    }
}

/// Returns true if a stall of `idle` is to be told; `told` is the time of the stall that was told last, zero before.
fn is_told_now(told: &Cell<Duration>, idle: Duration) -> bool {
    if idle < told.get() {
        told.set(Duration::ZERO);
    }
    let is_due = idle >= TOLD_AFTER.max(2 * told.get());
    if is_due {
        told.set(idle);
    }
    is_due
}

/// Message: `writing rank-00000.safetensors has made no progress for 5 s (DIR)`.
fn told_of(wait: &Wait<'_>, dir: &Path) -> String {
    let seconds = wait.idle.as_secs();
    let name = wait.path.file_name().filter(|_| wait.path != dir);
    match name {
        Some(name) => format!(
            "{} {} has made no progress for {seconds} s ({})",
            wait.doing,
            name.to_string_lossy(),
            dir.display()
        ),
        None => format!("{} {} has made no progress for {seconds} s", wait.doing, dir.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_is_told_after_five_seconds_and_each_time_that_it_has_doubled() {
        let told = Cell::default();
        let at = |seconds: f64| is_told_now(&told, Duration::from_secs_f64(seconds));
        let first: Vec<u32> = (0..420).filter(|tenth| at(f64::from(*tenth) / 10.0)).collect();
        assert_eq!(first, [50, 100, 200, 400], "tenths of a second");
        // Another wait begins anew.
        assert!(!at(0.1));
        assert!(at(5.0));
    }

    #[test]
    fn a_wait_names_what_is_done_the_file_and_the_directory() {
        let wait = |path| Wait { doing: "writing", path, idle: Duration::from_millis(5100) };
        let dir = Path::new("runs/a");
        let file = dir.join(".tmp-step-00000040/rank-00000.safetensors");
        assert_eq!(
            told_of(&wait(&file), dir),
            "writing rank-00000.safetensors has made no progress for 5 s (runs/a)"
        );
        assert_eq!(told_of(&wait(dir), dir), "writing runs/a has made no progress for 5 s");
    }
}
