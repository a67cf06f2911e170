//! A faulty disk for tests of offloading: slow, silent, or with a failing transfer.

use std::io;
use std::thread::sleep;
use std::time::{Duration, Instant};

use lockstep_tensor::{Action, DiskBackend, DiskQueue, Transfer};

/// Faults of a test disk.
#[derive(Debug, Default)]
pub(crate) struct DiskFaults {
    /// Delay before the end of a transfer is reported.
    pub(crate) delay: Duration,
    /// Index of the transfer that fails, from 0; with an action, only transfers of that action count.
    pub(crate) fails_at: Option<(usize, Option<Action>)>,
    /// True if no transfer ever ends.
    pub(crate) is_silent: bool,
}

/// Wraps the backend of a queue and injects faults.
#[derive(Debug)]
struct Troubled {
    disk: Box<dyn DiskBackend>,
    trouble: DiskFaults,
    /// Number of transfers so far that count for `fails_at`.
    counted: usize,
    failed: Vec<Transfer>,
}

impl DiskFaults {
    /// Returns the queue with these faults.
    pub(crate) fn of(self, queue: DiskQueue) -> DiskQueue {
        queue.wrap_backend(|disk| Box::new(Troubled { disk, trouble: self, counted: 0, failed: Vec::new() }))
    }
}

impl Troubled {
    fn fails(&mut self, action: Action) -> bool {
        let Some((number, only)) = self.trouble.fails_at else { return false };
        let is_counted = only.is_none_or(|only| only == action);
        self.counted += usize::from(is_counted);
        is_counted && self.counted == number + 1
    }
}

impl DiskBackend for Troubled {
    fn start(&mut self, transfer: Transfer) {
        if self.fails(transfer.action) || self.trouble.is_silent {
            self.failed.push(transfer);
        } else {
            self.disk.start(transfer);
        }
    }

    fn next(&mut self, deadline: Instant) -> Option<(Transfer, io::Result<()>)> {
        sleep(self.trouble.delay);
        match self.failed.pop() {
            Some(transfer) if !self.trouble.is_silent => {
                Some((transfer, Err(io::ErrorKind::StorageFull.into())))
            }
            _ => self.disk.next(deadline),
        }
    }
}
