//! Transfers by threads with blocking I/O. Requests and results are in two queues with room for every transfer in
//! flight, so that nothing is allocated during a transfer.

use std::{
    collections::VecDeque,
    io,
    os::unix::fs::FileExt,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{Builder, JoinHandle},
    time::Instant,
};

use super::{Action, DiskBackend, Transfer};

/// Enough threads to keep a disk's queue filled with requests of some MiB each.
const THREADS: usize = 4;

/// Threads that perform the transfers of a queue.
#[derive(Debug)]
pub(super) struct Pool {
    desk: Arc<Desk>,
    threads: Vec<JoinHandle<()>>,
}

/// The queues that the threads share with the caller.
#[derive(Debug)]
struct Desk {
    queues: Mutex<Queues>,
    has_orders: Condvar,
    has_ended: Condvar,
}

#[derive(Debug)]
struct Queues {
    orders: VecDeque<Transfer>,
    ended: VecDeque<(Transfer, io::Result<()>)>,
    /// True once no more requests come: threads finish their transfers and exit.
    is_over: bool,
}

impl Desk {
    fn queues(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Performs requests until there are no more.
    fn work(&self) {
        let mut queues = self.queues();
        loop {
            if let Some(mut transfer) = queues.orders.pop_front() {
                drop(queues);
                let result = run(&mut transfer);
                queues = self.queues();
                queues.ended.push_back((transfer, result));
                self.has_ended.notify_one();
            } else if queues.is_over {
                return;
            } else {
                queues = self.has_orders.wait(queues).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

impl Pool {
    /// Starts threads for up to `depth` transfers in flight.
    ///
    /// # Errors
    /// If the system cannot start a thread.
    pub(super) fn new(depth: usize) -> io::Result<Self> {
        let queues = Queues {
            orders: VecDeque::with_capacity(depth),
            ended: VecDeque::with_capacity(depth),
            is_over: false,
        };
        let (has_orders, has_ended) = (Condvar::new(), Condvar::new());
        let desk = Arc::new(Desk { queues: Mutex::new(queues), has_orders, has_ended });
        let mut pool = Self { desk, threads: Vec::with_capacity(THREADS) };
        for number in 0..THREADS {
            let desk = Arc::clone(&pool.desk);
            let thread = Builder::new().name(format!("disk {number}"));
            pool.threads.push(thread.spawn(move || desk.work())?);
        }
        Ok(pool)
    }
}

fn run(transfer: &mut Transfer) -> io::Result<()> {
    if transfer.action == Action::Write {
        return transfer.file.file.write_all_at(transfer.loan.bytes(), transfer.offset);
    }
    while !transfer.is_complete() {
        let Transfer { offset, loan, done, file, .. } = transfer;
        match file.file.read_at(&mut loan.bytes_mut()[*done..], *offset + *done as u64) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => *done += bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

impl DiskBackend for Pool {
    fn start(&mut self, transfer: Transfer) {
        self.desk.queues().orders.push_back(transfer);
        self.desk.has_orders.notify_one();
    }

    fn next(&mut self, deadline: Instant) -> Option<(Transfer, io::Result<()>)> {
        let mut queues = self.desk.queues();
        loop {
            let ended = queues.ended.pop_front();
            let left = deadline.saturating_duration_since(Instant::now());
            if ended.is_some() || left.is_zero() {
                return ended;
            }
            let waited = self.desk.has_ended.wait_timeout(queues, left);
            queues = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.desk.queues().is_over = true;
        self.desk.has_orders.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked has printed its message.
            let _ = thread.join();
        }
    }
}
