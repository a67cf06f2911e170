//! The queue of a scratch file or of stored files: asynchronous reads and writes, many in flight at once, and their traffic.

use std::{
    collections::VecDeque,
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use lockstep_plan::DISK_ALIGNMENT_BYTES;

#[cfg(target_os = "linux")]
use super::ring::Ring;
use super::{
    Action, DiskBackend, DiskError, ScratchFile, StoredFile, Transfer,
    open_file::{OpenFile, Place},
    pool::Pool,
};
use crate::Loan;

/// Largest number of requests in flight.
pub(super) const DEPTH: usize = 64;

/// The I/O interface that performs transfers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DiskIo {
    /// io_uring if the kernel has it and lets this process use it, else threads.
    #[default]
    Auto,
    /// io_uring (Axboe, "Efficient IO with io_uring", 2019).
    IoUring,
    /// Threads with blocking reads and writes.
    Threads,
}

/// Handle of a transfer that was started.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Clone, Copy)]
pub struct Ticket(u64);

/// Traffic of a queue since the last [`DiskQueue::take_traffic`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DiskTraffic {
    /// Bytes read from the file.
    pub read_bytes: u64,
    /// Bytes written to the file.
    pub written_bytes: u64,
    /// Time during which at least one transfer was in flight.
    pub busy: Duration,
    /// Time that callers spent waiting for transfers.
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

/// State of a transfer. `Taken` means that its result was returned.
#[derive(Debug)]
enum TransferState {
    InFlight,
    Ended(Result<(), DiskError>),
    Taken,
}

/// Asynchronous reads and writes, many in flight at once.
#[derive(Debug)]
pub struct DiskQueue {
    /// The scratch file; `None` for a queue that only reads stored files.
    scratch: Option<Arc<ScratchFile>>,
    /// The file of the transfer that was started last, for messages.
    recent: Option<Arc<OpenFile>>,
    mover: Box<dyn DiskBackend>,
    /// State of the transfers from number `first_begun` on, the oldest whose result nobody has asked for.
    begun: VecDeque<TransferState>,
    first_begun: u64,
    in_flight: usize,
    /// Transfers that wait because [`DEPTH`] are in flight already.
    waiting: VecDeque<Transfer>,
    /// Start of the current uninterrupted time with transfers in flight.
    busy_since: Instant,
    traffic: DiskTraffic,
}

impl DiskQueue {
    /// Creates a queue for `file`.
    ///
    /// # Errors
    /// If io_uring is requested and unavailable, or threads cannot be started.
    pub fn new(file: ScratchFile, method: DiskIo) -> Result<Self, DiskError> {
        let mover = mover(method)
            .map_err(|source| DiskError::Create { directory: file.directory().to_owned(), source })?;
        Ok(Self::with_backend(Arc::new(file), mover))
    }

    /// Creates a queue that reads stored files ([`DiskQueue::read_stored`]).
    ///
    /// # Errors
    /// If io_uring is requested and unavailable, or threads cannot be started.
    pub fn for_stored(method: DiskIo) -> io::Result<Self> {
        Ok(Self::of(None, mover(method)?))
    }

    /// Wraps the backend by `around`: a test can delay transfers or make them fail.
    pub fn wrap_backend(mut self, around: impl FnOnce(Box<dyn DiskBackend>) -> Box<dyn DiskBackend>) -> Self {
        self.mover = around(self.mover);
        self
    }

    /// Creates a queue that uses `mover` as its backend.
    pub fn with_backend(file: Arc<ScratchFile>, mover: Box<dyn DiskBackend>) -> Self {
        Self::of(Some(file), mover)
    }

    fn of(scratch: Option<Arc<ScratchFile>>, mover: Box<dyn DiskBackend>) -> Self {
        Self {
            scratch,
            recent: None,
            mover,
            begun: VecDeque::with_capacity(DEPTH),
            first_begun: 0,
            in_flight: 0,
            waiting: VecDeque::with_capacity(DEPTH),
            busy_since: Instant::now(),
            traffic: DiskTraffic::default(),
        }
    }

    /// Returns the scratch file of the queue; `None` if it only reads stored files.
    pub fn file(&self) -> Option<&ScratchFile> {
        self.scratch.as_deref()
    }

    /// Starts a read of the scratch file from `offset` on into the lent memory.
    ///
    /// # Panics
    /// If the offset, the memory or its length is not a multiple of [`DISK_ALIGNMENT_BYTES`], the range does not lie in
    /// the file, or the queue has no scratch file.
    pub fn read(&mut self, offset: u64, into: Loan) -> Ticket {
        self.traffic.read_bytes += into.len_bytes() as u64;
        self.start(Action::Read, self.scratch(), offset, into)
    }

    /// Starts a write of the lent memory to the scratch file from `offset` on.
    ///
    /// # Panics
    /// As [`DiskQueue::read`].
    pub fn write(&mut self, offset: u64, from: Loan) -> Ticket {
        self.traffic.written_bytes += from.len_bytes() as u64;
        self.start(Action::Write, self.scratch(), offset, from)
    }

    /// Starts a read of a stored file from `offset` on into the lent memory. Memory past the end of the file keeps its
    /// contents.
    ///
    /// # Panics
    /// As [`DiskQueue::read`]; the range may end in the last, incomplete block of the file.
    pub fn read_stored(&mut self, file: &StoredFile, offset: u64, into: Loan) -> Ticket {
        self.traffic.read_bytes += into.len_bytes() as u64;
        self.start(Action::Read, Arc::clone(&file.open), offset, into)
    }

    #[track_caller]
    fn scratch(&self) -> Arc<OpenFile> {
        Arc::clone(&self.scratch.as_ref().expect("a queue with a scratch file").open)
    }

    /// Waits until a transfer has ended, which also ends its loan.
    ///
    /// # Errors
    /// If the transfer failed ([`DiskError::Transfer`]), or no transfer ended within `limit` ([`DiskError::Silent`]).
    ///
    /// # Panics
    /// If it was waited for before.
    pub fn wait(&mut self, ticket: Ticket, limit: Duration) -> Result<(), DiskError> {
        let begin = Instant::now();
        let mut is_silent = false;
        while !is_silent && matches!(self.begun(ticket.0), Some(TransferState::InFlight)) {
            is_silent = !self.take_in(begin + limit);
        }
        let waited = begin.elapsed();
        self.traffic.exposed += waited;
        if is_silent {
            let place = self.recent.as_ref().map(|file| file.place.path().to_owned());
            return Err(DiskError::Silent { directory: place.unwrap_or_default(), waited });
        }
        let begun = self.begun(ticket.0).map(|begun| std::mem::replace(begun, TransferState::Taken));
        while matches!(self.begun.front(), Some(TransferState::Taken)) {
            self.begun.pop_front();
            self.first_begun += 1;
        }
        match begun {
            Some(TransferState::Ended(result)) => result,
            _ => panic!("{ticket:?} was waited for before"),
        }
    }

    fn begun(&mut self, id: u64) -> Option<&mut TransferState> {
        self.begun.get_mut(id.checked_sub(self.first_begun)? as usize)
    }

    /// Returns the traffic since the last call, and resets it.
    pub fn take_traffic(&mut self) -> DiskTraffic {
        if self.in_flight > 0 {
            self.traffic.busy += self.busy_since.elapsed();
            self.busy_since = Instant::now();
        }
        std::mem::take(&mut self.traffic)
    }

    fn start(&mut self, action: Action, file: Arc<OpenFile>, offset: u64, mut loan: Loan) -> Ticket {
        loan.hand_over(&format_args!("a {action} of a disk"));
        let (bytes, alignment) = (loan.len_bytes(), DISK_ALIGNMENT_BYTES);
        assert!(
            offset.is_multiple_of(alignment as u64)
                && bytes.is_multiple_of(alignment)
                && loan.as_ptr().addr().is_multiple_of(alignment)
                && offset + bytes as u64 <= file.end_bytes.next_multiple_of(alignment as u64),
            "{bytes} bytes at {:p} and {offset} of a file of {}, which go in units of {alignment}",
            loan.as_ptr(),
            file.end_bytes
        );
        let id = self.first_begun + self.begun.len() as u64;
        self.begun.push_back(TransferState::InFlight);
        self.recent = Some(Arc::clone(&file));
        self.waiting.push_back(Transfer { id, action, offset, loan, done: 0, file });
        self.start_waiting();
        Ticket(id)
    }

    /// Starts waiting transfers while fewer than [`DEPTH`] are in flight.
    fn start_waiting(&mut self) {
        while self.in_flight < DEPTH
            && let Some(transfer) = self.waiting.pop_front()
        {
            if self.in_flight == 0 {
                self.busy_since = Instant::now();
            }
            self.in_flight += 1;
            self.mover.start(transfer);
        }
    }

    /// Records the end of a transfer; returns false if none ends before `deadline`.
    fn take_in(&mut self, deadline: Instant) -> bool {
        let Some((transfer, result)) = self.mover.next(deadline) else { return false };
        let Transfer { id, action, offset, loan, file, .. } = transfer;
        let bytes = loan.len_bytes();
        drop(loan);
        self.in_flight -= 1;
        if self.in_flight == 0 {
            self.traffic.busy += self.busy_since.elapsed();
        }
        self.start_waiting();
        let result = result.map_err(|source| match &file.place {
            Place::Scratch(directory) => {
                DiskError::Transfer { action, offset, bytes, directory: directory.clone(), source }
            }
            Place::Stored(path) => DiskError::Read { path: path.clone(), offset, bytes, source },
        });
        if let Some(begun) = self.begun(id) {
            *begun = TransferState::Ended(result);
        }
        true
    }
}

/// Creates the backend that `method` selects.
fn mover(method: DiskIo) -> io::Result<Box<dyn DiskBackend>> {
    #[cfg(target_os = "linux")]
    if method != DiskIo::Threads {
        match Ring::new(DEPTH) {
            Ok(ring) => return Ok(Box::new(ring)),
            Err(error) if method == DiskIo::IoUring => return Err(error),
            // An older kernel, or a sandbox that forbids it.
            Err(_) => {}
        }
    }
    #[cfg(not(target_os = "linux"))]
    if method == DiskIo::IoUring {
        return Err(io::ErrorKind::Unsupported.into());
    }
    Ok(Box::new(Pool::new(DEPTH)?))
}
