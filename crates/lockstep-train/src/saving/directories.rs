//! The directories to which a save may go, in the order of attempts, and the time limit on each.

use std::cell::Cell;
use std::io;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lockstep_checkpoint::{
    Abandoned, CheckpointError, CheckpointQuality, CommitObserver, CommitPoint, Manifest, Pruned, Wait,
    make_room, prune,
};
use lockstep_config::RunConfig;
use lockstep_launch::interrupt::Interrupt;
use lockstep_observe::progress::MessagePrinter;

use super::part::Observer;

/// Duration of a stall before it is reported; each further report follows when that time has doubled.
const TOLD_AFTER: Duration = Duration::from_secs(5);
/// Time since the last progress within which a save is not abandoned after a stop request.
const MOVES: Duration = Duration::from_secs(1);
/// Fraction of the grace period after which a directory is abandoned: with another directory left, and with none.
const SHARES_OF_GRACE: [f64; 2] = [0.4, 0.8];

/// A directory of checkpoints.
#[derive(Debug)]
pub(super) struct CheckpointDir {
    pub(super) path: PathBuf,
    /// Number of checkpoints to keep; `None` for all.
    pub(super) keep: Option<NonZeroUsize>,
    /// True if the checkpoint with the lowest evaluation loss is kept as well.
    keep_best: bool,
    /// Thread that the last save in this directory has left in a stalled system call, and the time since which it has stalled.
    stalled: Mutex<Option<(Abandoned, Instant)>>,
}

impl CheckpointDir {
    /// Returns the directories of a run, `checkpoint.dir` first.
    pub(super) fn of_run(config: &RunConfig) -> Arc<[Self]> {
        let place = |path: &Path| Self {
            path: path.to_owned(),
            keep: NonZeroUsize::new(config.checkpoint.keep),
            keep_best: config.checkpoint.keep_best,
            stalled: Mutex::new(None),
        };
        config.checkpoint_dirs().into_iter().map(place).collect()
    }

    /// Removes the checkpoints beyond `keep` after the save of step `newest`; returns the failures.
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

    /// Removes the checkpoints beyond the newest `keep`, before a save for which the disk is too full.
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

    fn standing(&self) -> impl Fn(&Manifest) -> CheckpointQuality + Send + 'static {
        let keep_best = self.keep_best;
        move |manifest| CheckpointQuality {
            is_doubtful: manifest.state["is_doubtful"] == true,
            loss: manifest.state["eval_loss"].as_f64().filter(|_| keep_best),
        }
    }

    /// Records the stall, if `error` is one, and returns the error.
    pub(super) fn note(&self, error: CheckpointError) -> CheckpointError {
        if let CheckpointError::Stalled { abandoned, idle, .. } = &error {
            let now = Instant::now();
            *self.stalled() = Some((abandoned.clone(), now.checked_sub(*idle).unwrap_or(now)));
        }
        error
    }

    /// Clears an earlier stall after a successful save.
    pub(super) fn has_saved(&self) {
        *self.stalled() = None;
    }

    /// Returns true if the last save in this directory has stalled.
    fn has_stalled(&self) -> bool {
        self.stalled().is_some()
    }

    /// Checks that the thread of the last save is not stuck in its system call, where a new one would get stuck as well.
    ///
    /// # Errors
    /// If that thread is still stuck.
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

/// Time limits of a run's saves.
#[derive(Debug, Clone)]
pub(super) struct Limits {
    /// Time without progress after which a directory is abandoned.
    pub(super) stall: Duration,
    /// Time from a stop request to the end of the process.
    pub(super) grace: Duration,
    pub(super) interrupt: Interrupt,
}

/// Observer that reports a stalled save and abandons it at its time limit.
pub(super) struct Watch<'a> {
    pub(super) inner: &'a Observer,
    pub(super) voice: &'a MessagePrinter,
    pub(super) step: u64,
    pub(super) place: &'a CheckpointDir,
    /// True if another directory is left to try.
    pub(super) has_other: bool,
    pub(super) limits: &'a Limits,
    /// Set to true while the file system does not answer.
    pub(super) stalls: &'a AtomicBool,
    /// Duration of the stall at its last report; zero before the first one.
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

/// Observer of the directory reads at the beginning of a run: reports a stall and gives up at its time limit.
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
            MessagePrinter::on_stderr().message(&told_of(wait, self.dir));
        }
        if wait.idle >= self.limit { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
    }
}

/// Returns true if a stall of duration `idle` is due to be reported. `told` is the duration at the last report, zero before the
/// first.
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

/// Returns a message such as `writing rank-00000.safetensors has made no progress for 5 s (DIR)`.
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
        // The doubling begins anew with another wait.
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
