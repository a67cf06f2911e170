//! A disk with troubles of its own, for the tests of what lives on one: slow, silent, or with a transfer that fails.

use std::io;
use std::thread::sleep;
use std::time::{Duration, Instant};

use lockstep_tensor::{Action, DiskBackend, DiskQueue, Transfer};

/// What is wrong with a disk.
#[derive(Debug, Default)]
pub(crate) struct Trouble {
    /// How long it takes to say that anything has ended.
    pub(crate) delay: Duration,
    /// The transfer with this number fails, counted from 0; of one action only, if one is said.
    pub(crate) fails_at: Option<(usize, Option<Action>)>,
    /// Nothing that is started ever ends.
    pub(crate) is_silent: bool,
}

/// Stands between a queue and its disk.
#[derive(Debug)]
struct Troubled {
    disk: Box<dyn DiskBackend>,
    trouble: Trouble,
    /// Transfers of the action that is counted.
    counted: usize,
    failed: Vec<Transfer>,
}

impl Trouble {
    /// The queue, with this trouble.
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
