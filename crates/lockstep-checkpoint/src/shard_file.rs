//! Writer of a rank's file, on a thread that can be abandoned.
//!
//! The thread owns the file and copies of the pieces that it has yet to write. So a save can give up without waiting if
//! the file system does not answer ([`crate::disk`]). The thread syncs at intervals, since a single sync after many
//! gigabytes would look like a stall.

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
    sync::mpsc::{Receiver, Sender, channel},
};

use crate::{disk::DiskThread, error::CheckpointError, files::create_file, observer::CommitObserver};

/// Bytes per write and per hash update: large enough for the disk, small enough to stay in a cache.
pub(crate) const PIECE_BYTES: usize = 4 << 20;

/// Maximum number of pieces that are queued for writing.
const QUEUED_PIECES: usize = 8;

/// Bytes between two syncs during the write.
const SYNC_BYTES: usize = 64 << 20;

/// Command to the writer thread, which answers each one.
enum Order {
    Write(Vec<u8>),
    /// Writes the remaining small pieces.
    Flush,
    Sync,
}

/// Answer of the thread to a command: the memory of the piece, for reuse.
type Answer = Result<Vec<u8>, CheckpointError>;

/// File that is being written by a thread.
pub(crate) struct ShardFile<'a> {
    path: PathBuf,
    observer: &'a dyn CommitObserver,
    /// Channel to the thread; `None` once the thread is to end.
    orders: Option<Sender<Order>>,
    answers: Receiver<Answer>,
    /// Writer thread; `None` once it was abandoned.
    thread: Option<DiskThread>,
    /// Number of commands without an answer.
    queued: usize,
    /// Memory of pieces that have been written, for reuse.
    free: Vec<Vec<u8>>,
}

impl<'a> ShardFile<'a> {
    /// Creates the file, which must not exist, and reserves `bytes` for it.
    pub(crate) fn create(
        path: &Path,
        bytes: u64,
        observer: &'a dyn CommitObserver,
    ) -> Result<Self, CheckpointError> {
        let (orders, received) = channel();
        let (sender, answers) = channel();
        let own_path = path.to_owned();
        let thread = DiskThread::start(path, move || write_file(&own_path, bytes, &received, &sender))?;
        let (path, orders, thread) = (path.to_owned(), Some(orders), Some(thread));
        let mut file = Self { path, observer, orders, answers, thread, queued: 1, free: Vec::new() };
        file.await_answers(0, "creating")?;
        Ok(file)
    }

    /// Queues a copy of `bytes` to be written after all earlier ones.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        self.await_answers(QUEUED_PIECES - 1, "writing")?;
        let mut piece = self.free.pop().unwrap_or_default();
        piece.clear();
        piece.extend_from_slice(bytes);
        self.order(Order::Write(piece));
        Ok(())
    }

    /// Waits until all queued bytes have been passed to the file system.
    pub(crate) fn await_writes(&mut self) -> Result<(), CheckpointError> {
        self.order(Order::Flush);
        self.await_answers(0, "writing")
    }

    /// Waits until all written bytes are durable.
    pub(crate) fn sync(&mut self) -> Result<(), CheckpointError> {
        self.order(Order::Sync);
        self.await_answers(0, "syncing")
    }

    fn order(&mut self, order: Order) {
        // A thread that has failed has answered with its error, and accepts no more commands.
        if self.orders.as_ref().is_some_and(|orders| orders.send(order).is_ok()) {
            self.queued += 1;
        }
    }

    /// Waits until at most `left` commands have no answer.
    fn await_answers(&mut self, left: usize, doing: &'static str) -> Result<(), CheckpointError> {
        while self.queued > left {
            let Some(thread) = &self.thread else { break };
            match thread.next_answer(&self.answers, self.observer, doing, &self.path) {
                Ok(Some(Ok(piece))) => {
                    self.queued -= 1;
                    self.free.push(piece);
                }
                Ok(Some(Err(error))) => return Err(error),
                // The thread has panicked.
                Ok(None) => break,
                Err(stalled) => {
                    self.thread = None;
                    return Err(stalled);
                }
            }
        }
        if self.queued > left {
            return Err(CheckpointError::io("write", &self.path)(io::Error::other("the writer has failed")));
        }
        Ok(())
    }
}

impl Drop for ShardFile<'_> {
    fn drop(&mut self) {
        self.orders = None;
        // If commands are still queued, the thread is not joined: it may be blocked in the file system, and otherwise
        // ends soon.
        let wait = self.queued;
        if let Some(thread) = self.thread.take().filter(|_| wait == 0) {
            thread.join();
        }
    }
}

/// Runs the thread: creates the file and executes the commands until one fails.
fn write_file(path: &Path, bytes: u64, orders: &Receiver<Order>, answers: &Sender<Answer>) {
    let result = (|| {
        let mut file = create_file(path, bytes)?;
        let mut small = Vec::with_capacity(PIECE_BYTES);
        let mut unsynced = 0;
        // A caller that has given up receives no answer.
        if answers.send(Ok(Vec::new())).is_err() {
            return Ok(());
        }
        for order in orders {
            let piece = match order {
                Order::Write(piece) => {
                    if small.len() + piece.len() > PIECE_BYTES {
                        write(&mut file, &small, path)?;
                        unsynced += small.len();
                        small.clear();
                    }
                    if piece.len() >= PIECE_BYTES {
                        write(&mut file, &piece, path)?;
                        unsynced += piece.len();
                    } else {
                        small.extend_from_slice(&piece);
                    }
                    if unsynced >= SYNC_BYTES {
                        file.sync_data().map_err(CheckpointError::io("sync", path))?;
                        unsynced = 0;
                    }
                    piece
                }
                Order::Flush => {
                    write(&mut file, &small, path)?;
                    small.clear();
                    Vec::new()
                }
                Order::Sync => {
                    file.sync_all().map_err(CheckpointError::io("sync", path))?;
                    Vec::new()
                }
            };
            if answers.send(Ok(piece)).is_err() {
                return Ok(());
            }
        }
        Ok(())
    })();
    if let Err(error) = result {
        drop(answers.send(Err(error)));
    }
}

fn write(file: &mut impl Write, bytes: &[u8], path: &Path) -> Result<(), CheckpointError> {
    file.write_all(bytes).map_err(CheckpointError::io("write", path))
}
