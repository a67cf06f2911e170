//! Disks as memory: a file without a name, and reads and writes of buffers that go on while others compute.
//!
//! A [`ScratchFile`] has its whole space reserved before anything is written, and passes the page cache by where the file system
//! allows that. It never has a name: when the process ends, however it ends, the system takes the space back, and nobody can ever
//! read what a dead run left half-written. A [`DiskQueue`] moves what an [`Arena`](crate::Arena) lent between buffers and the file, by
//! io_uring where the kernel has it, else by threads that wait for the disk.
//!
//! ```text
//! let ticket = queue.read(offset, buffer.lend(range))?;     the disk works, the caller computes
//! queue.wait(ticket, deadline)?;                            the bytes are there and the loan is over
//! ```

mod file;
mod pool;
#[cfg(target_os = "linux")]
mod ring;
#[cfg(test)]
mod tests;

use std::{
    collections::VecDeque,
    io,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

pub use file::ScratchFile;

use lockstep_plan::DISK_ALIGNMENT_BYTES;

use crate::Loan;

/// Requests that are on their way at once, at most.
const DEPTH: usize = 64;

/// An error of a file that stands for memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// The directory cannot hold a file for this.
    #[error("cannot make a file for offloaded state in {}: {source}", directory.display())]
    Create {
        /// Where.
        directory: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// There is not enough room.
    #[error(
        "{needed_bytes} bytes of offloaded state do not fit in {}, which has {available_bytes} left",
        directory.display()
    )]
    Full {
        /// Where.
        directory: PathBuf,
        /// What the file needs.
        needed_bytes: u64,
        /// What the file system has.
        available_bytes: u64,
    },
    /// A read or a write failed.
    #[error("cannot {action} {bytes} bytes at {offset} of the offloaded state in {}: {source}", directory.display())]
    Transfer {
        /// `read` or `write`.
        action: Action,
        /// The first byte.
        offset: u64,
        /// How many.
        bytes: usize,
        /// Where the file is.
        directory: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The disk has not answered in time.
    #[error("the disk of {} has not answered for {:.0} s", directory.display(), waited.as_secs_f64())]
    Silent {
        /// Where the file is.
        directory: PathBuf,
        /// How long it was waited for.
        waited: Duration,
    },
}

/// What is done with bytes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// From the file to memory.
    Read,
    /// From memory to the file.
    Write,
}

impl std::fmt::Display for Action {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
        })
    }
}

/// By what reads and writes are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DiskMethod {
    /// io_uring where the kernel has it and lets this process use it, else threads.
    #[default]
    Auto,
    /// io_uring (Axboe, "Efficient IO with io_uring", 2019).
    IoUring,
    /// Threads that read and write.
    Threads,
}

/// A read or a write that was begun.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Clone, Copy)]
pub struct Ticket(u64);

/// What a queue has moved.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DiskTraffic {
    /// Bytes from the file.
    pub read_bytes: u64,
    /// Bytes to the file.
    pub written_bytes: u64,
    /// Time in which anything was on its way.
    pub busy: Duration,
    /// Time in which it was waited for.
    pub exposed: Duration,
}

impl std::ops::Add for DiskTraffic {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            read_bytes: self.read_bytes + other.read_bytes,
            written_bytes: self.written_bytes + other.written_bytes,
            busy: self.busy + other.busy,
            exposed: self.exposed + other.exposed,
        }
    }
}

/// Bytes on their way between a file and memory.
#[derive(Debug)]
pub struct Transfer {
    /// Its number.
    pub id: u64,
    /// To or from the file.
    pub action: Action,
    /// The first byte in the file.
    pub offset: u64,
    /// The memory.
    pub loan: Loan,
    /// How many of its bytes are done.
    pub done: usize,
}

/// What moves bytes; a test can stand between a queue and the disk by it.
pub trait Mover: std::fmt::Debug {
    /// Begins a transfer.
    fn start(&mut self, transfer: Transfer);

    /// The next transfer that has ended, and how; none if none has until `deadline`.
    fn next(&mut self, deadline: Instant) -> Option<(Transfer, io::Result<()>)>;
}

/// What has become of a transfer.
#[derive(Debug)]
enum Begun {
    OnItsWay,
    Ended(Result<(), DiskError>),
    AskedFor,
}

/// Reads and writes of one file, many at once.
#[derive(Debug)]
pub struct DiskQueue {
    file: Arc<ScratchFile>,
    mover: Box<dyn Mover>,
    /// What has become of the transfers from number `first_begun` on, the first that nobody has asked for.
    begun: VecDeque<Begun>,
    first_begun: u64,
    on_their_way: usize,
    /// What was begun while as many were on their way as may be.
    waiting: VecDeque<Transfer>,
    /// Since when anything has been on its way without a break.
    busy_since: Instant,
    traffic: DiskTraffic,
}

impl DiskQueue {
    /// A queue for `file`.
    ///
    /// # Errors
    /// [`DiskError::Create`] if io_uring is asked for and not there, or threads cannot be started.
    pub fn new(file: ScratchFile, method: DiskMethod) -> Result<Self, DiskError> {
        let file = Arc::new(file);
        let mover = mover(&file, method)
            .map_err(|source| DiskError::Create { directory: file.directory().to_owned(), source })?;
        Ok(Self::with_mover(file, mover))
    }

    /// Has what `around` makes of what moves the bytes move them: a test can slow it down, or break it.
    pub fn wrap_mover(mut self, around: impl FnOnce(Box<dyn Mover>) -> Box<dyn Mover>) -> Self {
        self.mover = around(self.mover);
        self
    }

    /// A queue whose bytes `mover` moves.
    pub fn with_mover(file: Arc<ScratchFile>, mover: Box<dyn Mover>) -> Self {
        Self {
            file,
            mover,
            begun: VecDeque::with_capacity(DEPTH),
            first_begun: 0,
            on_their_way: 0,
            waiting: VecDeque::with_capacity(DEPTH),
            busy_since: Instant::now(),
            traffic: DiskTraffic::default(),
        }
    }

    /// The file.
    pub fn file(&self) -> &ScratchFile {
        &self.file
    }

    /// Begins to fill what was lent with what the file has from `offset` on.
    ///
    /// # Panics
    /// If the offset, the memory or its length is not a multiple of [`DISK_ALIGNMENT_BYTES`], or they do not lie in the file.
    pub fn read(&mut self, offset: u64, into: Loan) -> Ticket {
        self.traffic.read_bytes += into.len_bytes() as u64;
        self.start(Action::Read, offset, into)
    }

    /// Begins to write what was lent to the file from `offset` on.
    ///
    /// # Panics
    /// As [`DiskQueue::read`].
    pub fn write(&mut self, offset: u64, from: Loan) -> Ticket {
        self.traffic.written_bytes += from.len_bytes() as u64;
        self.start(Action::Write, offset, from)
    }

    /// Waits until a transfer has ended. Its loan is over then.
    ///
    /// # Errors
    /// [`DiskError::Transfer`], [`DiskError::Silent`] after `limit`.
    ///
    /// # Panics
    /// If it was waited for before.
    pub fn wait(&mut self, ticket: Ticket, limit: Duration) -> Result<(), DiskError> {
        let begin = Instant::now();
        while matches!(self.begun(ticket.0), Some(Begun::OnItsWay)) {
            if !self.take_in(begin + limit) {
                let directory = self.file.directory().to_owned();
                return Err(DiskError::Silent { directory, waited: begin.elapsed() });
            }
        }
        self.traffic.exposed += begin.elapsed();
        let begun = self.begun(ticket.0).map(|begun| std::mem::replace(begun, Begun::AskedFor));
        while matches!(self.begun.front(), Some(Begun::AskedFor)) {
            self.begun.pop_front();
            self.first_begun += 1;
        }
        match begun {
            Some(Begun::Ended(result)) => result,
            _ => panic!("{ticket:?} was waited for before"),
        }
    }

    fn begun(&mut self, id: u64) -> Option<&mut Begun> {
        self.begun.get_mut(id.checked_sub(self.first_begun)? as usize)
    }

    /// What has been moved since this was last asked.
    pub fn take_traffic(&mut self) -> DiskTraffic {
        if self.on_their_way > 0 {
            self.traffic.busy += self.busy_since.elapsed();
            self.busy_since = Instant::now();
        }
        std::mem::take(&mut self.traffic)
    }

    fn start(&mut self, action: Action, offset: u64, mut loan: Loan) -> Ticket {
        loan.hand_over(&format_args!("a {action} of a disk"));
        let (bytes, alignment) = (loan.len_bytes(), DISK_ALIGNMENT_BYTES);
        assert!(
            offset.is_multiple_of(alignment as u64)
                && bytes.is_multiple_of(alignment)
                && loan.as_ptr().addr().is_multiple_of(alignment)
                && offset + bytes as u64 <= self.file.len_bytes(),
            "{bytes} bytes at {:p} and {offset} of a file of {}, which go in units of {alignment}",
            loan.as_ptr(),
            self.file.len_bytes()
        );
        let id = self.first_begun + self.begun.len() as u64;
        self.begun.push_back(Begun::OnItsWay);
        self.waiting.push_back(Transfer { id, action, offset, loan, done: 0 });
        self.start_waiting();
        Ticket(id)
    }

    /// Hands on what is waiting, as far as there is room for it.
    fn start_waiting(&mut self) {
        while self.on_their_way < DEPTH
            && let Some(transfer) = self.waiting.pop_front()
        {
            if self.on_their_way == 0 {
                self.busy_since = Instant::now();
            }
            self.on_their_way += 1;
            self.mover.start(transfer);
        }
    }

    /// Notes the end of a transfer, if one ends before `deadline`.
    fn take_in(&mut self, deadline: Instant) -> bool {
        let Some((transfer, result)) = self.mover.next(deadline) else { return false };
        let Transfer { id, action, offset, loan, .. } = transfer;
        let bytes = loan.len_bytes();
        drop(loan);
        self.on_their_way -= 1;
        if self.on_their_way == 0 {
            self.traffic.busy += self.busy_since.elapsed();
        }
        self.start_waiting();
        let directory = || self.file.directory().to_owned();
        let result = result.map_err(|source| DiskError::Transfer {
            action,
            offset,
            bytes,
            directory: directory(),
            source,
        });
        if let Some(begun) = self.begun(id) {
            *begun = Begun::Ended(result);
        }
        true
    }
}

/// What moves bytes of `file` by `method`.
fn mover(file: &Arc<ScratchFile>, method: DiskMethod) -> io::Result<Box<dyn Mover>> {
    #[cfg(target_os = "linux")]
    if method != DiskMethod::Threads {
        match ring::Ring::new(Arc::clone(file), DEPTH) {
            Ok(ring) => return Ok(Box::new(ring)),
            Err(error) if method == DiskMethod::IoUring => return Err(error),
            // An older kernel, or a sandbox that forbids it.
            Err(_) => {}
        }
    }
    #[cfg(not(target_os = "linux"))]
    if method == DiskMethod::IoUring {
        return Err(io::ErrorKind::Unsupported.into());
    }
    Ok(Box::new(pool::Pool::new(file, DEPTH)?))
}
