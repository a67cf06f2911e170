//! File-system calls with a wait that can be given up.
//!
//! A call on a file system that does not answer (a frozen volume, an unreachable server) cannot be cancelled. So a save
//! makes each of its calls on a thread that owns all data of the call. It waits for that thread only as long as its
//! [`CommitObserver`] allows. An abandoned thread ends when its call returns, and cleans up after itself.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Weak,
        mpsc::{Receiver, RecvTimeoutError, channel},
    },
    thread::{Builder, JoinHandle},
    time::{Duration, Instant},
};

use crate::{
    error::CheckpointError,
    observer::{Abandoned, CommitObserver, CommitPoint, Wait},
};

/// Time between two calls of the observer while waiting.
const TICK: Duration = Duration::from_millis(100);

/// Time that [`OneSecondTimeout`] waits.
const BRIEFLY: Duration = Duration::from_secs(1);

/// Observer that waits for a file system for one second. Used for the clean-up after a save or run.
pub(crate) struct OneSecondTimeout;

impl CommitObserver for OneSecondTimeout {
    fn reached(&self, _: CommitPoint) -> io::Result<()> {
        Ok(())
    }

    fn waiting(&self, wait: &Wait<'_>) -> io::Result<()> {
        if wait.idle < BRIEFLY { Ok(()) } else { Err(io::ErrorKind::TimedOut.into()) }
    }
}

/// Tells `observer` that a save has reached `point`.
pub(crate) fn notify(observer: &dyn CommitObserver, point: CommitPoint) -> Result<(), CheckpointError> {
    observer.reached(point).map_err(|source| CheckpointError::Stopped { point, source })
}

/// Runs `work` on a new thread and waits for its result as long as `observer` allows.
///
/// # Errors
/// If `work` fails, `observer` gives up the wait, or no thread can be started.
///
/// # Panics
/// If `work` panics.
pub fn run_on_disk<T: Send + 'static>(
    observer: &dyn CommitObserver,
    doing: &'static str,
    path: &Path,
    work: impl FnOnce() -> Result<T, CheckpointError> + Send + 'static,
) -> Result<T, CheckpointError> {
    let (sender, answers) = channel();
    let thread = DiskThread::start(path, move || {
        // If the caller has given up, nobody receives the result, and it is dropped here.
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

/// Thread that makes file-system calls for another thread.
pub(crate) struct DiskThread {
    thread: JoinHandle<()>,
    alive: Weak<()>,
}

impl DiskThread {
    /// Starts the thread. `path` is used only in messages.
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

    /// Waits for the next answer of the thread; each answer counts as progress. Returns `None` if the thread has ended
    /// without one.
    ///
    /// # Errors
    /// If `observer` gives up the wait.
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

    /// Joins the thread, which is about to end, and passes its panic on.
    pub(crate) fn join(self) {
        if let Err(payload) = self.thread.join() {
            std::panic::resume_unwind(payload);
        }
    }

    /// Joins the thread and panics with its payload.
    fn panicked(self) -> ! {
        match self.thread.join() {
            Err(payload) => std::panic::resume_unwind(payload),
            Ok(()) => unreachable!("a thread that ends without a panic has answered"),
        }
    }
}
