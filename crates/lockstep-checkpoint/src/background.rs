//! A thread that saves while the training goes on.
//!
//! It has the lowest priority that the system gives: it takes the cores when they idle and a share of a few
//! percent when they do not. Hashing, which uses the threads of its pool, stays on this one.

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

/// The lowest priority of a thread.
const LOWEST: i32 = 19;

/// The thread. It ends when this is dropped.
#[derive(Debug)]
pub struct SaveThread {
    /// `None` once it is to end.
    pool: Option<ThreadPool>,
    thread: Option<JoinHandle<()>>,
}

impl SaveThread {
    /// Starts it.
    ///
    /// # Errors
    /// [`CheckpointError::Thread`] if the system gives no thread.
    pub fn start() -> Result<Self, CheckpointError> {
        let mut thread = None;
        let pool = ThreadPoolBuilder::new()
            .num_threads(1)
            // On Linux a thread has a priority of its own. One that cannot give way saves all the same.
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

    /// Runs `save` on the thread, after those that were given to it before.
    pub fn run<T: Send + 'static>(&self, save: impl FnOnce() -> T + Send + 'static) -> PendingSave<T> {
        let (sender, receiver) = channel();
        let save = move || {
            // Whoever dropped the other end has waited for the end of this one.
            drop(sender.send(panic::catch_unwind(AssertUnwindSafe(save))));
        };
        if let Some(pool) = &self.pool {
            pool.spawn(save);
        }
        PendingSave(Some(receiver))
    }
}

/// Waits for the end of the thread: nothing of it runs, or allocates, beside what comes after.
impl Drop for SaveThread {
    fn drop(&mut self) {
        self.pool = None;
        if let Some(thread) = self.thread.take() {
            // A save that panicked has told whoever waited for it.
            let _ = thread.join();
        }
    }
}

/// A save under way. Dropping it waits for its end.
#[derive(Debug)]
pub struct PendingSave<T>(Option<Receiver<Outcome<T>>>);

/// What came of a save, or what it panicked with.
type Outcome<T> = Result<T, Box<dyn Any + Send>>;

impl<T> PendingSave<T> {
    /// What came of it, if it is over; otherwise itself.
    ///
    /// # Panics
    /// As the save did.
    pub fn poll(self) -> Result<T, Self> {
        self.poll_for(Duration::ZERO)
    }

    /// [`PendingSave::poll`] after at most `time`.
    ///
    /// # Panics
    /// As the save did.
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

    /// Waits for what comes of it.
    ///
    /// # Panics
    /// As the save did.
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
