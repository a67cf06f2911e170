//! The compute threads: they run the tasks of one kernel at a time, and allocate nothing.
//!
//! A kernel is a number of tasks. The caller and the threads take the next task from a counter until none is left.
//! The caller continues when the last task is done; a thread that wakes too late for a kernel misses it. Kernels
//! follow each other within microseconds, so a waiting thread spins for a while before it sleeps.

use std::{
    any::Any,
    cell::Cell,
    fmt, hint, io,
    panic::{self, AssertUnwindSafe},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread::{Builder, JoinHandle},
};

/// Spins of a waiting thread before it sleeps: about 20 µs.
const LOOKS: usize = 2000;

thread_local! {
    /// Index of this thread in the pool whose task it runs; `None` outside of tasks.
    static WORKER: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Returns the index of the thread that runs a task, below [`Pool::threads`]; 0 outside of tasks.
pub(super) fn worker() -> usize {
    WORKER.get().unwrap_or(0)
}

/// A pool of compute threads, of which the calling one is the first.
pub(super) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Locked by the caller whose kernel runs.
    turn: Mutex<()>,
}

/// The compute threads of a [`CpuQueue`](super::CpuQueue). Clones share them; callers take turns.
#[derive(Clone)]
pub struct Workers(pub(super) Arc<Pool>);

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Workers({} threads)", self.threads())
    }
}

impl Workers {
    /// Fills `values` in parallel, part by part. `fill` receives the index of a part's first element.
    pub fn fill(&self, values: &mut [f32], fill: impl Fn(usize, &mut [f32]) + Sync) {
        const PART: usize = 1 << 14;
        let parts: Vec<_> = values.chunks_mut(PART).map(Mutex::new).collect();
        self.run(parts.len(), |part| {
            let mut values = parts[part].lock().unwrap_or_else(PoisonError::into_inner);
            fill(part * PART, &mut values);
        });
    }

    /// Calls `run` once with each of `0..tasks`, and returns when all calls have returned.
    ///
    /// # Panics
    /// If a call panics.
    pub fn run(&self, tasks: usize, run: impl Fn(usize) + Sync) {
        self.0.run(tasks, run);
    }

    /// Number of threads, including the caller's.
    pub fn threads(&self) -> usize {
        self.0.threads()
    }
}

struct Shared {
    /// Number of the current kernel, from 1; 0 before the first.
    kernel: AtomicU64,
    /// Number of threads in the current kernel, the caller not counted.
    at_work: AtomicUsize,
    next_task: AtomicUsize,
    state: Mutex<State>,
    /// Signals a new kernel, or the end of the pool.
    begin: Condvar,
    /// Signals that `at_work` is 0.
    done: Condvar,
}

struct State {
    /// The current kernel. `None` once no task is left: a thread that has not entered by then has nothing to do.
    job: Option<Job>,
    panic: Option<Box<dyn Any + Send>>,
    /// Number of threads that sleep until `begin`.
    asleep: usize,
    is_over: bool,
}

/// A kernel's task function, without its lifetime.
#[derive(Clone, Copy)]
struct Job {
    tasks: usize,
    run: *const (dyn Fn(usize) + Sync),
}

// SAFETY: the closure is `Sync`, and `Pool::run` keeps it alive until no thread uses it.
unsafe impl Send for Job {}

impl Pool {
    /// Creates a pool of `threads` threads, including the caller's.
    ///
    /// # Errors
    /// If the system cannot start a thread.
    pub(super) fn new(threads: usize) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            kernel: AtomicU64::new(0),
            at_work: AtomicUsize::new(0),
            next_task: AtomicUsize::new(0),
            state: Mutex::new(State { job: None, panic: None, asleep: 0, is_over: false }),
            begin: Condvar::new(),
            done: Condvar::new(),
        });
        let mut pool = Self { shared, threads: Vec::new(), turn: Mutex::new(()) };
        for number in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let builder = Builder::new().name(format!("lockstep-{number}"));
            pool.threads.push(builder.spawn(move || shared.work(number))?);
        }
        Ok(pool)
    }

    /// Number of threads, including the caller's.
    pub(super) fn threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Calls `run` once with each of `0..tasks`, and returns when all calls have returned. Within a task, it
    /// runs them one after the other on the calling thread.
    ///
    /// # Panics
    /// If a call panics.
    pub(super) fn run(&self, tasks: usize, run: impl Fn(usize) + Sync) {
        if tasks <= 1 || self.threads.is_empty() || WORKER.get().is_some() {
            return (0..tasks).for_each(run);
        }
        let _turn = lock(&self.turn);
        let run: &(dyn Fn(usize) + Sync) = &run;
        // SAFETY: only the lifetime changes. No thread enters a kernel whose job is gone. This function does not
        // return, nor unwind, before the job is gone and all threads that entered it have left.
        let run = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync + 'static)>(
                run,
            )
        };
        let shared = &self.shared;
        let job = Job { tasks, run };
        let mut state = lock(&shared.state);
        shared.next_task.store(0, Ordering::Relaxed);
        state.job = Some(job);
        shared.kernel.fetch_add(1, Ordering::Release);
        let are_asleep = state.asleep > 0;
        drop(state);
        if are_asleep {
            shared.begin.notify_all();
        }
        let own = shared.take_tasks(job, 0);
        lock(&shared.state).job = None;
        shared.wait_for_others();
        let panic = own.err().or(lock(&shared.state).panic.take());
        if let Some(payload) = panic {
            panic::resume_unwind(payload);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        lock(&self.shared.state).is_over = true;
        self.shared.begin.notify_all();
        for thread in self.threads.drain(..) {
            // A task's panic was passed on to the caller of that kernel.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Runs thread `number` until the pool ends.
    fn work(&self, number: usize) {
        let mut seen = 0;
        while let Some(job) = self.enter(&mut seen) {
            if let Err(payload) = self.take_tasks(job, number) {
                lock(&self.state).panic.get_or_insert(payload);
            }
            if self.at_work.fetch_sub(1, Ordering::AcqRel) == 1 {
                // The lock is needed: otherwise the caller could check, miss this, and sleep.
                let _state = lock(&self.state);
                self.done.notify_one();
            }
        }
    }

    /// Waits for a kernel after the one that was `seen`, and enters it; `None` at the end of the pool.
    fn enter(&self, seen: &mut u64) -> Option<Job> {
        loop {
            watch(|| self.kernel.load(Ordering::Acquire) != *seen);
            let mut state = lock(&self.state);
            while self.kernel.load(Ordering::Acquire) == *seen {
                if state.is_over {
                    return None;
                }
                state.asleep += 1;
                state = self.begin.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.asleep -= 1;
            }
            *seen = self.kernel.load(Ordering::Acquire);
            if let Some(job) = state.job {
                self.at_work.fetch_add(1, Ordering::Relaxed);
                return Some(job);
            }
        }
    }

    /// Runs tasks until none is left. A panic ends this thread's share of the kernel.
    fn take_tasks(&self, job: Job, number: usize) -> Result<(), Box<dyn Any + Send>> {
        WORKER.set(Some(number));
        let ended = panic::catch_unwind(AssertUnwindSafe(|| {
            loop {
                let task = self.next_task.fetch_add(1, Ordering::Relaxed);
                if task >= job.tasks {
                    break;
                }
                // SAFETY: `Pool::run` keeps the closure alive until this thread, which entered in time, has left.
                unsafe { (*job.run)(task) }
            }
        }));
        WORKER.set(None);
        ended
    }

    /// Waits until no other thread runs a task.
    fn wait_for_others(&self) {
        let are_done = || self.at_work.load(Ordering::Acquire) == 0;
        watch(are_done);
        if are_done() {
            return;
        }
        let mut state = lock(&self.state);
        while !are_done() {
            state = self.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Spins for an event that is expected soon.
fn watch(has_come: impl Fn() -> bool) {
    for _ in 0..LOOKS {
        if has_come() {
            return;
        }
        hint::spin_loop();
    }
}

/// Locks a mutex, poisoned or not: no state is left half changed while a lock is held.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn every_task_runs_once_on_any_number_of_threads_kernel_after_kernel() {
        for threads in [1, 2, 3, 7] {
            let pool = Pool::new(threads).unwrap();
            assert_eq!(pool.threads(), threads);
            for kernel in 0..300 {
                let counts: Vec<AtomicU32> = (0..kernel % 40).map(|_| AtomicU32::new(0)).collect();
                pool.run(counts.len(), |task| {
                    assert!(worker() < threads);
                    counts[task].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1), "kernel {kernel}");
            }
        }
    }

    #[test]
    fn a_task_that_panics_panics_at_the_caller_and_the_pool_goes_on() {
        let pool = Pool::new(3).unwrap();
        for bad in 0..20 {
            let run = || pool.run(20, |task| assert!(task != bad, "task {task} fails"));
            let payload = panic::catch_unwind(AssertUnwindSafe(run)).unwrap_err();
            assert_eq!(*payload.downcast::<String>().unwrap(), format!("task {bad} fails"));
            let sum = AtomicUsize::new(0);
            pool.run(20, |task| {
                sum.fetch_add(task, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 190);
        }
    }

    #[test]
    fn tasks_may_run_tasks_and_callers_take_turns() {
        let pool = Pool::new(2).unwrap();
        let sum = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        pool.run(4, |_| {
                            pool.run(5, |task| {
                                sum.fetch_add(task, Ordering::Relaxed);
                            })
                        });
                    }
                });
            }
        });
        assert_eq!(sum.into_inner(), 3 * 50 * 4 * 10);
    }
}
