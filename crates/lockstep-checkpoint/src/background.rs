//! Thread that saves checkpoints in the background, overlapped with training.
//!
//! The thread has the lowest scheduling priority: it uses idle cores, and a few percent of a busy one. Hashing would
//! use the threads of the current pool, so the thread has a pool of its own with just itself.

use std::{
    any::Any,
    panic::{self, AssertUnwindSafe},
    sync::mpsc::{Receiver, RecvError, RecvTimeoutError, channel},
    thread::{Builder, JoinHandle},
    time::Duration,
};

use rayon::{ThreadPool, ThreadPoolBuilder};
use rustix::process::setpriority_process;

use crate::error::CheckpointError;

/// Nice value of the lowest priority.
const LOWEST: i32 = 19;

/// Background thread for saves. Dropping this ends the thread.
#[derive(Debug)]
pub struct SaveThread {
    /// Pool of one thread; `None` while the thread is being ended.
    pool: Option<ThreadPool>,
    thread: Option<JoinHandle<()>>,
}

impl SaveThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the operating system cannot start a thread.
    pub fn start() -> Result<Self, CheckpointError> {
        let mut thread = None;
        let pool = ThreadPoolBuilder::new()
            .num_threads(1)
            // On Linux each thread has its own priority. If lowering it fails, the thread still saves.
            .start_handler(|_| {
                let _ = setpriority_process(None, LOWEST);
            })
            .spawn_handler(|of_pool| {
                thread = Some(Builder::new().name("lockstep-save".to_owned()).spawn(|| of_pool.run())?);
                Ok(())
            })
            .build()
            .map_err(CheckpointError::Thread)?;
        Ok(Self { pool: Some(pool), thread })
    }

    /// Runs `save` on the thread, after all saves that were submitted earlier.
    pub fn run<T: Send + 'static>(&self, save: impl FnOnce() -> T + Send + 'static) -> PendingSave<T> {
        let (sender, receiver) = channel();
        let save = move || {
            // `PendingSave` waits for this message before it drops the receiver.
            drop(sender.send(panic::catch_unwind(AssertUnwindSafe(save))));
        };
        if let Some(pool) = &self.pool {
            pool.spawn(save);
        }
        PendingSave(Some(receiver))
    }
}

/// Waits for the thread to end, so that none of its work or allocations continue after the drop.
impl Drop for SaveThread {
    fn drop(&mut self) {
        self.pool = None;
        if let Some(thread) = self.thread.take() {
            // A save that panicked has passed the panic to its `PendingSave`.
            let _ = thread.join();
        }
    }
}

/// Save in flight. Dropping it waits for its end.
#[derive(Debug)]
pub struct PendingSave<T>(Option<Receiver<Outcome<T>>>);

/// Result of a save, or the payload of its panic.
type Outcome<T> = Result<T, Box<dyn Any + Send>>;

impl<T> PendingSave<T> {
    /// Returns the result if the save has ended, and otherwise `self`.
    ///
    /// # Panics
    /// If the save panicked.
    pub fn poll(self) -> Result<T, Self> {
        self.poll_for(Duration::ZERO)
    }

    /// Waits at most `time`, then returns as [`PendingSave::poll`].
    ///
    /// # Panics
    /// If the save panicked.
    pub fn poll_for(mut self, time: Duration) -> Result<T, Self> {
        match self.0.as_ref().map(|receiver| receiver.recv_timeout(time)) {
            Some(Err(RecvTimeoutError::Timeout)) => Err(self),
            Some(Err(RecvTimeoutError::Disconnected)) | None => Self::lost(),
            Some(Ok(outcome)) => {
                self.0 = None;
                Ok(outcome.unwrap_or_else(|payload| panic::resume_unwind(payload)))
            }
        }
    }

    /// Waits for the save to end and returns its result.
    ///
    /// # Panics
    /// If the save panicked.
    pub fn wait(mut self) -> T {
        match self.0.take().map(|receiver| receiver.recv()) {
            Some(Ok(outcome)) => outcome.unwrap_or_else(|payload| panic::resume_unwind(payload)),
            Some(Err(RecvError)) | None => Self::lost(),
        }
    }

    fn lost<R>() -> R {
        unreachable!("the thread answers each save once, even if it panics")
    }
}

impl<T> Drop for PendingSave<T> {
    fn drop(&mut self) {
        if let Some(receiver) = self.0.take() {
            drop(receiver.recv());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc::sync_channel, thread};

    use super::*;

    #[test]
    fn a_save_runs_beside_its_caller_on_one_thread_of_low_priority() {
        let saver = SaveThread::start().unwrap();
        let (go, wait) = sync_channel(0);
        let pending = saver.run(move || {
            wait.recv().unwrap();
            let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
            let after_name = stat.rsplit_once(')').unwrap().1.to_owned();
            (rayon::current_num_threads(), after_name.split_whitespace().nth(16).unwrap().to_owned())
        });
        let pending = pending.poll().unwrap_err();
        go.send(()).unwrap();
        assert_eq!(pending.wait(), (1, "19".to_owned()));
    }

    #[test]
    fn a_save_that_panics_panics_where_it_is_waited_for_and_the_next_one_runs() {
        let saver = SaveThread::start().unwrap();
        let pending = saver.run(|| panic!("injected"));
        let payload = panic::catch_unwind(AssertUnwindSafe(|| pending.wait())).unwrap_err();
        assert_eq!(payload.downcast_ref(), Some(&"injected"));
        assert_eq!(saver.run(|| 7).wait(), 7);
    }

    #[test]
    fn dropping_a_save_waits_for_its_end() {
        let saver = SaveThread::start().unwrap();
        let (sender, receiver) = channel();
        drop(saver.run(move || {
            thread::sleep(std::time::Duration::from_millis(50));
            sender.send(()).unwrap();
        }));
        receiver.try_recv().unwrap();
    }
}
