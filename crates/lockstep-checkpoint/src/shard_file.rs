//! The file of a rank while it is written, by a thread that can be left behind.
//!
//! The thread owns the file and copies of the pieces that it has still to write, so that a save on a file system which has stopped answering
//! can give up without waiting ([`crate::disk`]). It syncs as it goes on: a file of many gigabytes has no sync at its end during which nothing
//! seems to happen.

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
    sync::mpsc::{Receiver, Sender, channel},
};

use crate::{
    disk::DiskThread, error::CheckpointError, files::create_file, save::CommitObserver, shard::PIECE_BYTES,
};

/// Pieces that the hash may be ahead of the disk.
const QUEUED_PIECES: usize = 8;

/// Bytes between two syncs of a file that is being written.
const SYNC_BYTES: usize = 64 << 20;

/// An order for the writer thread, which answers each.
enum Order {
    Write(Vec<u8>),
    /// Writes what is left of the small pieces.
    Flush,
    Sync,
}

/// The thread's answer to an order: the memory of the piece, to be filled again.
type Answer = Result<Vec<u8>, CheckpointError>;

/// A file that is being written.
pub(crate) struct ShardFile<'a> {
    path: PathBuf,
    observer: &'a dyn CommitObserver,
    /// The way to the thread; `None` once it is to end.
    orders: Option<Sender<Order>>,
    answers: Receiver<Answer>,
    /// The thread; `None` once it was left behind.
    thread: Option<DiskThread>,
    /// Orders without an answer.
    queued: usize,
    /// Memory of pieces that are written.
    free: Vec<Vec<u8>>,
}

impl<'a> ShardFile<'a> {
    /// Creates the file, which must not be there, with `bytes` reserved for it.
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

    /// Has `bytes` written after what was given before.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        self.await_answers(QUEUED_PIECES - 1, "writing")?;
        let mut piece = self.free.pop().unwrap_or_default();
        piece.clear();
        piece.extend_from_slice(bytes);
        self.order(Order::Write(piece));
        Ok(())
    }

    /// Waits until everything has been handed to the file system.
    pub(crate) fn await_writes(&mut self) -> Result<(), CheckpointError> {
        self.order(Order::Flush);
        self.await_answers(0, "writing")
    }

    /// Makes everything durable.
    pub(crate) fn sync(&mut self) -> Result<(), CheckpointError> {
        self.order(Order::Sync);
        self.await_answers(0, "syncing")
    }

    fn order(&mut self, order: Order) {
        // A thread that has failed has said why, and takes no more.
        if self.orders.as_ref().is_some_and(|orders| orders.send(order).is_ok()) {
            self.queued += 1;
        }
    }

    /// Waits until at most `left` orders have no answer.
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
        // What is queued of a file that nobody wants is soon written, unless the file system has stopped.
        let wait = self.queued;
        if let Some(thread) = self.thread.take().filter(|_| wait == 0) {
            thread.join();
        }
    }
}

/// The thread: creates the file and carries out the orders until one fails.
fn write_file(path: &Path, bytes: u64, orders: &Receiver<Order>, answers: &Sender<Answer>) {
    let result = (|| {
        let mut file = create_file(path, bytes)?;
        let mut small = Vec::with_capacity(PIECE_BYTES);
        let mut unsynced = 0;
        // Whoever has given up takes no answer.
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
