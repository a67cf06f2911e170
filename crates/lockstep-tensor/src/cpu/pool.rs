//! The compute threads: they run the tasks of one kernel at a time, and allocate nothing.
//!
//! A kernel is a number of tasks, of which each thread has a share ([`super::shares`]); a thread whose share is empty takes from
//! the others. The caller continues when the last task is done; a thread that wakes too late for a kernel misses it. Kernels
//! follow each other within microseconds, so a waiting thread spins for a while before it sleeps.
//!
//! No lock and no counter is common to all threads, so that a kernel starts and ends as fast on many of them. The caller writes
//! the kernel and its number; threads read the number, and each says in a cache line of its own that it has entered. Sleeping
//! threads are woken as a tree: the caller wakes the first eight, each of these eight more.

use std::{
    any::Any,
    cell::{Cell, UnsafeCell},
    fmt, hint, io,
    panic::{self, AssertUnwindSafe},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::{self, Builder, JoinHandle, Thread},
};

use rustix::thread::{CpuSet, sched_setaffinity};

use super::shares::{STAGES, Stages, Taken, Task, Walk};
use crate::topology::Topology;

/// Spins of a waiting thread before it sleeps: about 20 µs.
const LOOKS: usize = 2000;
/// Number of threads that one thread wakes.
const FAN_OUT: usize = 8;

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
            fill(part * PART, &mut lock(&parts[part]));
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

/// A value in cache lines of its own. Processors fetch lines in pairs, hence twice the size of a line.
#[repr(align(128))]
struct Lines<T>(T);

/// State that all threads share. Each part that some thread writes often is in lines of its own.
struct Shared {
    kernel: Lines<Kernel>,
    /// The threads by number; the caller is thread 0.
    members: Box<[Member]>,
    /// Number of the thread for which the sleeping caller waits; 0 if it does not sleep.
    awaited: Lines<AtomicUsize>,
    /// Guards no data: with `left` it lets the caller sleep.
    sleep: Mutex<()>,
    /// Signals that the awaited thread has left the kernel.
    left: Condvar,
    /// The first panic of another thread than the caller, which looks after every kernel.
    panic: Lines<Mutex<Option<Box<dyn Any + Send>>>>,
}

/// The current kernel.
struct Kernel {
    ticket: AtomicU64,
    /// Written while no thread is in a kernel, read by threads that have entered.
    job: UnsafeCell<Option<Job>>,
}

/// A thread of the pool.
#[derive(Default)]
struct Member {
    work: Lines<Work>,
    rest: Lines<Rest>,
}

/// Lines that a thread writes in every kernel.
#[derive(Default)]
struct Work {
    /// Ticket of the kernel that the thread is in; 0 if it is in none.
    inside: AtomicU64,
    /// Tasks taken from this thread's shares.
    taken: Taken,
}

/// Lines that are written only when a thread sleeps or wakes.
#[derive(Default)]
struct Rest {
    is_asleep: AtomicBool,
    thread: OnceLock<Thread>,
}

impl Default for Lines<Work> {
    fn default() -> Self {
        Self(Work::default())
    }
}

impl Default for Lines<Rest> {
    fn default() -> Self {
        Self(Rest::default())
    }
}

/// A kernel's task function, without its lifetime.
#[derive(Clone, Copy)]
struct Job {
    stages: Stages,
    run: *const (dyn Fn(Task) + Sync),
}

// SAFETY: `Pool::run_stages` keeps the closure of a job alive until no thread uses it, and it is `Sync`. The job itself is written
// only while no thread is in a kernel; see `Shared::enter` and `Shared::close`.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

/// The number of a kernel, from 1, and how many threads may enter it: none once it is closed. One word, so that a
/// thread reads both at once.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Ticket(u64);

impl Ticket {
    /// Tells threads that the pool is over.
    const OVER: Self = Self(u64::MAX);
    /// Bits of the number of threads.
    const BITS: u32 = 16;
    const MOST_THREADS: usize = (1 << Self::BITS) - 1;

    /// Returns the ticket of the kernel after this one.
    fn next(self, threads: usize) -> Self {
        Self(((self.0 >> Self::BITS) + 1) << Self::BITS | threads as u64)
    }

    /// Returns the ticket of the same kernel when nobody may enter any more.
    fn closed(self) -> Self {
        Self(self.0 >> Self::BITS << Self::BITS)
    }

    /// Number of threads that may enter.
    fn threads(self) -> usize {
        self.0 as usize & Self::MOST_THREADS
    }
}

impl Pool {
    /// Creates a pool of `threads` threads, including the caller's. If they fill several memory nodes, each is bound to a
    /// CPU, except the caller's: threads that it starts later would inherit that.
    ///
    /// # Errors
    /// If the system cannot start a thread.
    pub(super) fn new(threads: usize) -> io::Result<Self> {
        let cpus = if threads > 1 { Topology::current().cpus_of_threads(threads) } else { None };
        Self::on_cpus(threads, cpus.as_deref())
    }

    /// Creates a pool as [`Pool::new`] does, thread `i` bound to CPU `i` of `cpus`.
    fn on_cpus(threads: usize, cpus: Option<&[usize]>) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            kernel: Lines(Kernel { ticket: AtomicU64::new(0), job: UnsafeCell::new(None) }),
            members: (0..threads.max(1)).map(|_| Member::default()).collect(),
            awaited: Lines(AtomicUsize::new(0)),
            sleep: Mutex::new(()),
            left: Condvar::new(),
            panic: Lines(Mutex::new(None)),
        });
        let mut pool = Self { shared, threads: Vec::new(), turn: Mutex::new(()) };
        for number in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let builder = Builder::new().name(format!("lockstep-{number}"));
            let cpu = cpus.map(|cpus| cpus[number]);
            pool.threads.push(builder.spawn(move || {
                cpu.into_iter().for_each(bind_to);
                shared.work(number);
            })?);
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
        self.run_stages([tasks, 0, 0], &|task| run(task.index));
    }

    /// Runs tasks as [`Pool::run`] does, numbered through the stages of the given lengths. All tasks of a stage have been taken by
    /// threads before any of the next is, so a task may wait for one of an earlier stage. Not
    /// generic, so that a task's code is compiled once, and not for each way of running it.
    ///
    /// # Panics
    /// If a call panics.
    pub(super) fn run_stages(&self, tasks: [usize; STAGES], run: &(dyn Fn(Task) + Sync)) {
        let stages = Stages::new(tasks, self.threads().min(Ticket::MOST_THREADS));
        if stages.threads() == 1 || WORKER.get().is_some() {
            let next = |index| Some(index + 1).filter(|next| *next < stages.tasks());
            return (0..stages.tasks()).for_each(|index| run(Task { index, next: next(index) }));
        }
        let _turn = lock(&self.turn);
        // SAFETY: only the lifetime changes. No thread enters a kernel that is closed. This function does not
        // return, nor unwind, before the kernel is closed and all threads that entered it have left.
        let run = unsafe {
            std::mem::transmute::<*const (dyn Fn(Task) + Sync + '_), *const (dyn Fn(Task) + Sync + 'static)>(
                run,
            )
        };
        let (shared, job) = (&self.shared, Job { stages, run });
        let ticket = shared.open(job);
        let own = shared.take_tasks(job, 0);
        shared.close(ticket);
        let panic = own.err().or(lock(&shared.panic.0).take());
        if let Some(payload) = panic {
            panic::resume_unwind(payload);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.kernel.0.ticket.store(Ticket::OVER.0, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            // A task's panic was passed on to the caller of that kernel.
            let _ = thread.join();
        }
    }
}

// Entering and leaving. A thread writes `inside`, then reads `ticket`; the caller that closes a kernel writes `ticket`, then reads
// `inside`. These accesses are sequentially consistent, so at least one of the two sees the other: either the thread
// finds the kernel closed, or the caller waits for it. Sleeping follows the same pattern, with `is_asleep` and `awaited`.
impl Shared {
    fn ticket(&self, order: Ordering) -> Ticket {
        Ticket(self.kernel.0.ticket.load(order))
    }

    /// Starts a kernel, and wakes threads for it. The caller has its turn, and all threads have left the kernel before.
    fn open(&self, job: Job) -> Ticket {
        for member in &self.members[..job.stages.threads()] {
            member.work.0.taken.reset();
        }
        // SAFETY: no thread is in a kernel, and none enters before it sees the new ticket.
        unsafe { *self.kernel.0.job.get() = Some(job) };
        let ticket = self.ticket(Ordering::Relaxed).next(job.stages.threads());
        self.kernel.0.ticket.store(ticket.0, Ordering::SeqCst);
        self.wake_children(0, ticket);
        ticket
    }

    /// Ends a kernel: nobody enters it from now on, and all threads that did have left when this returns.
    fn close(&self, ticket: Ticket) {
        self.kernel.0.ticket.store(ticket.closed().0, Ordering::SeqCst);
        for (number, member) in self.members[..ticket.threads()].iter().enumerate().skip(1) {
            let has_left = || member.work.0.inside.load(Ordering::SeqCst) != ticket.0;
            if has_come(has_left) {
                continue;
            }
            self.awaited.0.store(number, Ordering::SeqCst);
            let mut sleep = lock(&self.sleep);
            while !has_left() {
                sleep = self.left.wait(sleep).unwrap_or_else(PoisonError::into_inner);
            }
            self.awaited.0.store(0, Ordering::Relaxed);
        }
    }

    /// Runs thread `number` until the pool ends.
    fn work(&self, number: usize) {
        // Only this thread sets its handle.
        let _ = self.members[number].rest.0.thread.set(thread::current());
        let mut seen = Ticket(0);
        while let Some(job) = self.enter(number, &mut seen) {
            if let Err(payload) = self.take_tasks(job, number) {
                lock(&self.panic.0).get_or_insert(payload);
            }
            self.leave(number);
        }
    }

    /// Waits for a kernel after the one that was `seen`, and enters it; `None` at the end of the pool.
    fn enter(&self, number: usize, seen: &mut Ticket) -> Option<Job> {
        loop {
            self.wait_for_ticket(number, seen);
            if *seen == Ticket::OVER {
                return None;
            }
            self.wake_children(number, *seen);
            self.members[number].work.0.inside.store(seen.0, Ordering::SeqCst);
            if self.ticket(Ordering::SeqCst) == *seen {
                // SAFETY: this thread is inside, so the caller does not write the job before it has left.
                return unsafe { *self.kernel.0.job.get() };
            }
            self.leave(number);
        }
    }

    fn leave(&self, number: usize) {
        self.members[number].work.0.inside.store(0, Ordering::SeqCst);
        if self.awaited.0.load(Ordering::SeqCst) == number {
            // The lock is needed: otherwise the caller could check, miss this, and sleep.
            let _sleep = lock(&self.sleep);
            self.left.notify_one();
        }
    }

    /// Waits for a ticket that thread `number` has not `seen`, of a kernel that it may enter, or of the pool's end.
    fn wait_for_ticket(&self, number: usize, seen: &mut Ticket) {
        let rest = &self.members[number].rest.0;
        let mut is_new = |order| {
            let ticket = self.ticket(order);
            let is_new = ticket != *seen && (ticket == Ticket::OVER || ticket.threads() > number);
            *seen = ticket;
            is_new
        };
        loop {
            for _ in 0..LOOKS {
                if is_new(Ordering::Acquire) {
                    return;
                }
                hint::spin_loop();
            }
            rest.is_asleep.store(true, Ordering::SeqCst);
            let has_come = is_new(Ordering::SeqCst);
            if !has_come {
                thread::park();
            }
            rest.is_asleep.store(false, Ordering::Relaxed);
            if has_come {
                return;
            }
        }
    }

    /// Wakes the threads below `number` in the tree, if they sleep and the kernel has tasks for them.
    fn wake_children(&self, number: usize, ticket: Ticket) {
        let end = ticket.threads().min(self.members.len());
        for child in (FAN_OUT * number + 1..end).take(FAN_OUT) {
            let rest = &self.members[child].rest.0;
            if rest.is_asleep.load(Ordering::SeqCst)
                && rest.is_asleep.swap(false, Ordering::SeqCst)
                && let Some(thread) = rest.thread.get()
            {
                thread.unpark();
            }
        }
    }

    /// Runs tasks until none is left. A panic ends this thread's part in the kernel.
    fn take_tasks(&self, job: Job, number: usize) -> Result<(), Box<dyn Any + Send>> {
        WORKER.set(Some(number));
        let ended = panic::catch_unwind(AssertUnwindSafe(|| {
            let mut walk = Walk::new(job.stages, number);
            while let Some(task) = walk.take(|thread| &self.members[thread].work.0.taken) {
                // SAFETY: `Pool::run_stages` keeps the closure alive until this thread, which entered in time, has left.
                unsafe { (*job.run)(task) }
            }
        }));
        WORKER.set(None);
        ended
    }
}

/// Binds this thread to a CPU. A thread that may not set its affinity runs all the same.
fn bind_to(cpu: usize) {
    if cpu < CpuSet::MAX_CPU {
        let mut set = CpuSet::new();
        set.set(cpu);
        let _ = sched_setaffinity(None, &set);
    }
}

/// Spins for an event that is expected soon; returns true if it has come.
fn has_come(event: impl Fn() -> bool) -> bool {
    for _ in 0..LOOKS {
        if event() {
            return true;
        }
        hint::spin_loop();
    }
    event()
}

/// Locks a mutex, poisoned or not: no state is left half changed while a lock is held.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::AtomicU32,
        time::{Duration, Instant},
    };

    use super::*;
    use crate::topology::allowed_cpus;

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
    fn bound_threads_run_on_their_cpus() {
        let cpus = allowed_cpus();
        let of_thread = [cpus[0], cpus[0], cpus[cpus.len() - 1]];
        let pool = Pool::on_cpus(3, Some(&of_thread)).unwrap();
        // Each thread waits for the others, so that each has one task.
        let began = AtomicUsize::new(0);
        pool.run(3, |_| {
            began.fetch_add(1, Ordering::Relaxed);
            while began.load(Ordering::Relaxed) < 3 {
                thread::yield_now();
            }
            let allowed = if worker() == 0 { cpus.clone() } else { vec![of_thread[worker()]] };
            assert_eq!(allowed_cpus(), allowed, "thread {}", worker());
        });
    }

    #[test]
    fn a_task_may_wait_for_those_of_an_earlier_stage() {
        for threads in [1, 2, 3, 16] {
            let pool = Pool::new(threads).unwrap();
            for kernel in 0..200 {
                let tasks = [1 + kernel % 7, kernel % 40, kernel % 3];
                let done = [const { AtomicUsize::new(0) }; STAGES];
                pool.run_stages(tasks, &|task| {
                    let later = task.index.checked_sub(tasks[0]);
                    let stage = later.map_or(0, |index| 1 + usize::from(index >= tasks[1]));
                    let before = stage.saturating_sub(1);
                    while stage > 0 && done[before].load(Ordering::Acquire) < tasks[before] {
                        thread::yield_now();
                    }
                    done[stage].fetch_add(1, Ordering::Release);
                });
                assert_eq!(done.map(AtomicUsize::into_inner), tasks, "{threads} threads, kernel {kernel}");
            }
        }
    }

    /// Kernels with fewer tasks than threads, pauses in which threads fall asleep, far more threads than cores: the result of each
    /// kernel is complete when it returns, and its closure is gone afterwards.
    #[test]
    fn many_threads_that_sleep_and_wake_lose_no_kernel() {
        let pool = Pool::new(64).unwrap();
        let start = Instant::now();
        for kernel in 0..2000_usize {
            if start.elapsed() > Duration::from_secs(10) {
                break;
            }
            if kernel.is_multiple_of(100) {
                thread::sleep(Duration::from_micros(300));
            }
            let tasks = [2, 3, 70, 500][kernel % 4];
            let mut results = vec![0; tasks];
            let places: Vec<_> = results.iter_mut().map(Mutex::new).collect();
            pool.run(tasks, |task| **lock(&places[task]) += kernel + task + 1);
            drop(places);
            let expected = (0..tasks).map(|task| kernel + task + 1);
            assert!(results.iter().copied().eq(expected), "kernel {kernel}: {results:?}");
        }
    }

    #[test]
    fn tickets_hold_a_number_and_the_threads_that_may_enter() {
        let first = Ticket(0).next(2);
        assert_eq!((first.threads(), first.closed().threads(), first == first.closed()), (2, 0, false));
        let second = first.closed().next(Ticket::MOST_THREADS);
        assert_eq!((second.threads(), second.0 >> Ticket::BITS), (Ticket::MOST_THREADS, 2));
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
