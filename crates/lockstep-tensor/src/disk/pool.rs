//! Transfers by threads that read and write.

use std::{
    io,
    os::unix::fs::FileExt,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, Sender, channel},
    },
    thread::{Builder, JoinHandle},
    time::Instant,
};

use super::{Action, Mover, ScratchFile, Transfer};

/// Enough to keep a disk's queue filled by requests of some MiB each.
const THREADS: usize = 4;

/// Threads that move the bytes of a file.
#[derive(Debug)]
pub(super) struct Pool {
    /// Gone when the pool is dropped: the threads end what they have begun, and then themselves.
    orders: Option<Sender<Transfer>>,
    ended: Receiver<(Transfer, io::Result<()>)>,
    threads: Vec<JoinHandle<()>>,
}

impl Pool {
    pub(super) fn new(file: &Arc<ScratchFile>) -> io::Result<Self> {
        let (orders, taken) = channel::<Transfer>();
        let (end, ended) = channel();
        let taken = Arc::new(Mutex::new(taken));
        let start = |number| {
            let (file, taken, end) = (Arc::clone(file), Arc::clone(&taken), end.clone());
            let work = move || {
                loop {
                    let next = taken.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok(mut transfer) = next else { return };
                    let result = run(&file, &mut transfer);
                    // Nobody waits any more: the queue is gone.
                    let _ = end.send((transfer, result));
                }
            };
            Builder::new().name(format!("disk {number}")).spawn(work)
        };
        let threads = (0..THREADS).map(start).collect::<io::Result<_>>()?;
        Ok(Self { orders: Some(orders), ended, threads })
    }
}

fn run(file: &ScratchFile, transfer: &mut Transfer) -> io::Result<()> {
    let Transfer { action, offset, loan, .. } = transfer;
    match action {
        Action::Read => file.file().read_exact_at(loan.bytes_mut(), *offset),
        Action::Write => file.file().write_all_at(loan.bytes(), *offset),
    }
}

impl Mover for Pool {
    fn start(&mut self, transfer: Transfer) {
        let orders = self.orders.as_ref().expect("a pool has its threads until it is dropped");
        orders.send(transfer).expect("the threads live as long as the pool");
    }

    fn next(&mut self, deadline: Instant) -> Option<(Transfer, io::Result<()>)> {
        self.ended.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.orders = None;
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}
