//! Transfers between a file and lent memory, and the backend that performs them.

use std::{fmt, io, sync::Arc, time::Instant};

use super::open_file::OpenFile;
use crate::Loan;

/// Direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// From the file to memory.
    Read,
    /// From memory to the file.
    Write,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
        })
    }
}

/// A transfer in flight between a file and memory.
#[derive(Debug)]
pub struct Transfer {
    /// Number of the transfer in its queue.
    pub id: u64,
    /// Direction of the transfer.
    pub action: Action,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// The lent memory.
    pub loan: Loan,
    /// Number of bytes transferred so far.
    pub done: usize,
    pub(super) file: Arc<OpenFile>,
}

impl Transfer {
    /// Returns true if every byte is transferred; a read also ends at the end of the file.
    pub(super) fn is_complete(&self) -> bool {
        self.done == self.loan.len_bytes()
            || self.action == Action::Read && self.offset + self.done as u64 >= self.file.end_bytes
    }
}

/// The backend that performs transfers; a test can stand between a queue and the disk.
pub trait DiskBackend: fmt::Debug {
    /// Starts a transfer.
    fn start(&mut self, transfer: Transfer);

    /// Waits until a transfer has ended, and returns it with its result; `None` if no transfer ends before
    /// `deadline`.
    fn next(&mut self, deadline: Instant) -> Option<(Transfer, io::Result<()>)>;
}
