//! State that the callers of the MPI transport share with its thread: jobs, the error that ended the run, and the flight
//! recorder.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lockstep_comm::CommError;
use lockstep_comm::transport::{ERROR_WORDS, Recorder, Task, Ticket};

/// Time for the rank that detected an error to report it, and before that for MPI to release memory, until other ranks abort.
pub(crate) const REPORTING_TIME: Duration = Duration::from_secs(2);

/// State shared by callers and the MPI thread.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) state: Mutex<CallerState>,
    /// Notified when the thread has a job.
    pub(crate) jobs_queued: Condvar,
    /// Notified when callers should check again.
    pub(crate) progressed: Condvar,
}

#[derive(Debug)]
pub(crate) struct CallerState {
    /// Jobs for the thread.
    pub(crate) jobs: VecDeque<Job>,
    /// Error that ended the run, as words; `None` while it goes on.
    pub(crate) ending: Option<[u64; ERROR_WORDS]>,
    /// Details of that error, if it is local to this rank.
    pub(crate) details: Option<CommError>,
    /// True once MPI has released all borrowed memory after the end of the run.
    pub(crate) is_settled: bool,
    /// Number of waiting callers.
    pub(crate) callers: usize,
    pub(crate) recorder: Recorder,
}

/// Job for the MPI thread.
#[derive(Debug)]
pub(crate) enum Job {
    Begin {
        group: usize,
        sequence: u32,
        recorded: u64,
        task: Task,
        ticket: Arc<Ticket>,
    },
    AddGroup {
        ranks: Vec<usize>,
    },
    /// Deadline of an operation that has passed.
    Expire {
        group: usize,
        ticket: Arc<Ticket>,
        limit: Duration,
    },
    Fail(CommError),
    Leave,
    Abort(i32),
}

impl Shared {
    pub(crate) fn lock(&self) -> MutexGuard<'_, CallerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn ask(&self, job: Job) {
        self.lock().jobs.push_back(job);
        self.jobs_queued.notify_one();
    }

    /// Wakes the waiting callers.
    pub(crate) fn notify_callers(&self) {
        // A caller that has already checked holds the lock until it sleeps.
        drop(self.lock());
        self.progressed.notify_all();
    }
}

impl CallerState {
    /// Returns the error that ended the run, for another caller; `None` while it goes on.
    pub(crate) fn ending(&mut self, rank: usize) -> Option<CommError> {
        match CommError::from_words(self.ending?) {
            CommError::Stopped { by: Some(by) } if by == rank => {
                self.details.take().or(Some(CommError::Stopped { by: Some(by) }))
            }
            ending => Some(ending),
        }
    }
}
