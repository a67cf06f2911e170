//! File-system calls that somebody can stop waiting for.
//!
//! A call on a file system that has stopped answering (a frozen volume, a server that is gone) cannot be cancelled. So a save makes each of
//! its calls on a thread that owns all it needs, and waits for that thread only as long as its [`CommitObserver`] lets it. A thread that
//! nobody waits for any more ends when its call returns, and cleans up after itself.

use std::{
    fmt, io,
    path::{Path, PathBuf},
    sync::{
        Arc, Weak,
        mpsc::{Receiver, RecvTimeoutError, channel},
    },
    thread::{Builder, JoinHandle},
    time::{Duration, Instant},
};

use crate::{CommitObserver, CommitPoint, error::CheckpointError};

/// Time between two questions to the observer.
const TICK: Duration = Duration::from_millis(100);

/// Time that [`Briefly`] waits.
const BRIEFLY: Duration = Duration::from_secs(1);

/// Waits for a file system for a second: for what a save or a run leaves behind when it is over.
pub(crate) struct Briefly;

impl CommitObserver for Briefly {
    fn reached(&self, _: CommitPoint) -> io::Result<()> {
        Ok(())
    }

    fn waiting(&self, wait: &Wait<'_>) -> io::Result<()> {
        if wait.idle < BRIEFLY { Ok(()) } else { Err(io::ErrorKind::TimedOut.into()) }
    }
}

/// A part of a save that waits for its file system.
#[derive(Debug, Clone, Copy)]
pub struct Wait<'a> {
    /// The kind of call: "writing", "syncing", ...
    pub doing: &'static str,
    /// The file or directory of the call.
    pub path: &'a Path,
    /// Time since the last progress.
    pub idle: Duration,
}

/// A thread that a save has left behind in a call on its file system.
#[derive(Clone)]
pub struct Abandoned(Weak<()>);

impl Abandoned {
    /// Returns true while the call has not returned.
    pub fn is_stuck(&self) -> bool {
        self.0.strong_count() > 0
    }
}

impl fmt::Debug for Abandoned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Abandoned").field("is_stuck", &self.is_stuck()).finish()
    }
}

/// Runs `work` on a thread of its own and waits for its result as long as `observer` lets it.
///
/// # Errors
/// The errors of `work`; [`CheckpointError::Stalled`] if the observer gives up; [`CheckpointError::Io`] if there is no thread.
///
/// # Panics
/// As `work` does.
pub fn run_on_disk<T: Send + 'static>(
    observer: &dyn CommitObserver,
    doing: &'static str,
    path: &Path,
    work: impl FnOnce() -> Result<T, CheckpointError> + Send + 'static,
) -> Result<T, CheckpointError> {
    let (sender, answers) = channel();
    let thread = DiskThread::start(path, move || {
        // Whoever has given up no longer listens, and the result is dropped here.
        drop(sender.send(work()));
    })?;
    let wait = thread.next_answer(&answers, observer, doing, path)?;
    match wait {
        Some(result) => {
            thread.join();
            result
        }
        None => thread.panicked(),
    }
}

/// A thread that makes file-system calls for another one.
pub(crate) struct DiskThread {
    thread: JoinHandle<()>,
    alive: Weak<()>,
}

impl DiskThread {
    /// Starts it.
    pub(crate) fn start(path: &Path, work: impl FnOnce() + Send + 'static) -> Result<Self, CheckpointError> {
        let token = Arc::new(());
        let alive = Arc::downgrade(&token);
        let thread = Builder::new()
            .name("lockstep-disk".to_owned())
            .spawn(move || {
                let _token = token;
                work();
            })
            .map_err(CheckpointError::io("start a thread for", path))?;
        Ok(Self { thread, alive })
    }

    /// The next of the thread's answers, each of which is progress; `None` if it has ended without one.
    ///
    /// # Errors
    /// [`CheckpointError::Stalled`] if `observer` gives up.
    pub(crate) fn next_answer<T>(
        &self,
        answers: &Receiver<T>,
        observer: &dyn CommitObserver,
        doing: &'static str,
        path: &Path,
    ) -> Result<Option<T>, CheckpointError> {
        let since = Instant::now();
        loop {
            match answers.recv_timeout(TICK) {
                Ok(answer) => return Ok(Some(answer)),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) => {}
            }
            let idle = since.elapsed();
            if observer.waiting(&Wait { doing, path, idle }).is_err() {
                let abandoned = Abandoned(self.alive.clone());
                tracing::debug!(path = %path.display(), doing, ?idle, "a file system does not answer: left a thread behind");
                return Err(CheckpointError::Stalled { doing, path: PathBuf::from(path), idle, abandoned });
            }
        }
    }

    /// Waits for its end, which has come.
    pub(crate) fn join(self) {
        if let Err(payload) = self.thread.join() {
            std::panic::resume_unwind(payload);
        }
    }

    /// Panics as the thread did.
    fn panicked(self) -> ! {
        match self.thread.join() {
            Err(payload) => std::panic::resume_unwind(payload),
            Ok(()) => unreachable!("a thread that ends without a panic has answered"),
        }
    }
}
