//! The list of jobs that were enqueued on a delayed device and have not run.

use std::{
    any::Any,
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::operands::Operands;
use crate::{DeviceEvent, Event, View};

/// Pending jobs, in the order in which they were enqueued.
#[derive(Default)]
pub(super) struct List(Mutex<Work>);

#[derive(Default)]
struct Work {
    jobs: VecDeque<Job>,
    /// Number of jobs that have left the list.
    passed: u64,
}

struct Job {
    name: &'static str,
    operands: Operands,
    run: Box<dyn FnOnce()>,
}

// SAFETY: a job refers to memory of a device, which belongs to no thread. It is used in the order of the list, by the
// thread that holds the list's lock.
unsafe impl Send for Job {}

impl std::fmt::Debug for List {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("List")
    }
}

impl List {
    fn lock(&self) -> MutexGuard<'_, Work> {
        // A job that panics has left the list already.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a job that uses `operands`.
    pub(super) fn push(&self, name: &'static str, operands: Operands, run: Box<dyn FnOnce()>) {
        self.lock().jobs.push_back(Job { name, operands, run });
    }

    /// Returns the number of jobs that were ever added.
    fn added(&self) -> u64 {
        let work = self.lock();
        work.passed + work.jobs.len() as u64
    }

    /// Runs the first `end` jobs, those excepted that have run.
    fn run_to(&self, end: u64) {
        let mut work = self.lock();
        while work.passed < end
            && let Some(Job { name, operands, run }) = work.jobs.pop_front()
        {
            work.passed += 1;
            operands.touch_foreign(name);
            run();
        }
    }

    /// Runs all jobs.
    pub(super) fn run_all(&self) {
        self.run_to(u64::MAX);
    }

    /// Runs the job if it is the only one in the list: then no earlier job uses any memory.
    pub(super) fn run_if_alone(&self) {
        let is_alone = self.lock().jobs.len() == 1;
        if is_alone {
            self.run_all();
        }
    }

    /// Drops all jobs without running them: after a panic nobody reads their results.
    pub(super) fn clear(&self) {
        let jobs = std::mem::take(&mut self.lock().jobs);
        drop(jobs);
    }

    /// # Panics
    /// If a job that has not run uses any of the memory that `by` uses.
    pub(super) fn expect_passed(&self, operands: &Operands, by: &dyn std::fmt::Display) {
        let work = self.lock();
        let early = work.jobs.iter().find(|job| job.operands.overlap(operands));
        let early = early.map(|job| format!("`{}` on {}", job.name, job.operands));
        drop(work);
        if let Some(early) = early {
            panic!(
                "too early: {by} touches {operands} in a device's memory before {early}, which was called first, has run"
            );
        }
    }
}

/// A point in a list: after its first `end` jobs.
#[derive(Debug)]
pub(super) struct Point {
    list: Arc<List>,
    end: u64,
}

impl Point {
    /// Returns the event that completes after every job now in the list.
    pub(super) fn event(list: &Arc<List>) -> Event {
        Event::new(Arc::new(Self { list: Arc::clone(list), end: list.added() }))
    }

    /// Returns true if the event is a point in `list`.
    pub(super) fn is_of(event: &Event, list: &Arc<List>) -> bool {
        let moment = event.moment().map(|moment| moment as &dyn Any);
        moment
            .and_then(|moment| moment.downcast_ref::<Self>())
            .is_some_and(|point| Arc::ptr_eq(&point.list, list))
    }
}

impl DeviceEvent for Point {
    fn has_come(&self) -> bool {
        self.list.lock().passed >= self.end
    }

    fn wait(&self) {
        self.list.run_to(self.end);
    }
}

/// Sets every byte of a view to `byte`.
pub(super) fn fill(view: &View<'_>, byte: u8) {
    // SAFETY: the bytes belong to the view, and the calling job has its turn to use them.
    unsafe { view.as_ptr().write_bytes(byte, view.elements() * view.dtype().size_bytes()) };
}
