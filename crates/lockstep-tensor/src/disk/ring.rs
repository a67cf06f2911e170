//! Transfers by io_uring: the kernel works on many at once, and only the caller that needs a result waits.

use std::{
    collections::HashMap,
    io,
    ops::Range,
    os::fd::AsRawFd,
    time::{Duration, Instant},
};

use io_uring::{IoUring, opcode, squeue, types};
use rustix::io::Errno;

use super::{Action, DiskBackend, Transfer};

/// Time limit for the trial request on a new ring.
const PATIENCE_AT_START: Duration = Duration::from_secs(1);

/// Time limit for the transfers in flight when a queue is dropped.
const PATIENCE_AT_END: Duration = Duration::from_secs(10);

/// Pauses after the kernel refuses a request: the first, and the longest.
const PAUSES: Range<Duration> = Duration::from_millis(1)..Duration::from_millis(64);

/// A ring of requests, and the transfers they belong to.
pub(super) struct Ring {
    ring: IoUring,
    /// Transfers that the kernel works on, by id. Their memory stays lent, and so alive, until they end.
    in_flight: HashMap<u64, Transfer>,
}

impl Ring {
    /// Creates a ring for up to `depth` requests in flight.
    ///
    /// # Errors
    /// If the kernel has no io_uring, has one that is too old, or does not let this process use it.
    pub(super) fn new(depth: usize) -> io::Result<Self> {
        let mut ring = IoUring::new(depth as u32)?;
        // A wait with a deadline needs Linux 5.11.
        if !ring.params().is_feature_ext_arg() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        try_out(&mut ring)?;
        Ok(Self { ring, in_flight: HashMap::with_capacity(depth) })
    }

    /// Submits the rest of a transfer to the kernel.
    fn submit(&mut self, transfer: Transfer) -> Result<(), (Transfer, io::Error)> {
        let entry = entry_of(&transfer);
        // SAFETY: the memory is lent to the transfer, which stays in `in_flight` until the kernel is done with it,
        // and is never freed before that (see `drop`). The transfer keeps its file open as well.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        if pushed.is_err() {
            return Err((transfer, io::ErrorKind::ResourceBusy.into()));
        }
        self.in_flight.insert(transfer.id, transfer);
        loop {
            match self.ring.submit() {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The kernel is short of memory: the entry stays in the ring and is submitted by the next call.
                Err(_) => return Ok(()),
            }
        }
    }

    /// Returns a transfer that has ended, if there is one. A partly completed transfer is submitted again.
    fn ended(&mut self) -> Option<(Transfer, io::Result<()>)> {
        loop {
            let end = self.ring.completion().next()?;
            let Some(mut transfer) = self.in_flight.remove(&end.user_data()) else { continue };
            let result = match end.result() {
                code if code < 0 => match io::Error::from_raw_os_error(-code) {
                    error if is_passing(&error) => Ok(0),
                    error => Err(error),
                },
                0 => Err(io::ErrorKind::UnexpectedEof.into()),
                bytes => Ok(bytes as usize),
            };
            match result {
                Err(error) => return Some((transfer, Err(error))),
                Ok(bytes) => {
                    transfer.done += bytes;
                    if transfer.is_complete() {
                        return Some((transfer, Ok(())));
                    }
                    if let Err((transfer, error)) = self.submit(transfer) {
                        return Some((transfer, Err(error)));
                    }
                }
            }
        }
    }
}

/// Tests a ring with a no-op request: a sandbox may allow the creation of a ring and refuse every use of it.
///
/// # Errors
/// If the kernel refuses, or does not answer within [`PATIENCE_AT_START`].
fn try_out(ring: &mut IoUring) -> io::Result<()> {
    // SAFETY: an entry that does nothing names no memory.
    let pushed = unsafe { ring.submission().push(&opcode::Nop::new().build()) };
    pushed.map_err(|_| io::ErrorKind::ResourceBusy)?;
    let deadline = Instant::now() + PATIENCE_AT_START;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let limit = types::Timespec::new().sec(left.as_secs()).nsec(left.subsec_nanos());
        let waited = ring.submitter().submit_with_args(1, &types::SubmitArgs::new().timespec(&limit));
        match (ring.completion().next(), waited) {
            (Some(end), _) if end.result() >= 0 => return Ok(()),
            (Some(end), _) => return Err(io::Error::from_raw_os_error(-end.result())),
            (None, Err(error)) if !is_end_of_wait(&error) => return Err(error),
            (None, _) if left.is_zero() => return Err(io::ErrorKind::TimedOut.into()),
            (None, _) => {}
        }
    }
}

/// Returns true if a wait ended normally: by a signal, or at its deadline.
fn is_end_of_wait(error: &io::Error) -> bool {
    [Some(Errno::INTR), Some(Errno::TIME)].contains(&Errno::from_io_error(error))
}

/// Returns the pause that follows an unsuccessful one: twice as long, with an upper limit.
fn longer(pause: Duration) -> Duration {
    (2 * pause).min(PAUSES.end)
}

fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}

fn entry_of(transfer: &Transfer) -> squeue::Entry {
    let Transfer { id, action, offset, loan, done, file } = transfer;
    let descriptor = types::Fd(file.file.as_raw_fd());
    let memory = loan.as_ptr().wrapping_add(*done);
    // A longer transfer continues when this part has ended.
    let bytes = (loan.bytes().len() - done).min(1 << 30) as u32;
    let offset = offset + *done as u64;
    let entry = match action {
        Action::Read => opcode::Read::new(descriptor, memory, bytes).offset(offset).build(),
        Action::Write => opcode::Write::new(descriptor, memory, bytes).offset(offset).build(),
    };
    entry.user_data(*id)
}

impl DiskBackend for Ring {
    fn start(&mut self, transfer: Transfer) {
        if let Err((transfer, _)) = self.submit(transfer) {
            // A queue has at most as many transfers in flight as the ring has entries, so one is always free.
            unreachable!("no entry of the ring for transfer {}", transfer.id);
        }
    }

    fn next(&mut self, deadline: Instant) -> Option<(Transfer, io::Result<()>)> {
        let mut pause = PAUSES.start;
        loop {
            if let Some(ended) = self.ended() {
                return Some(ended);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.in_flight.is_empty() {
                return None;
            }
            let limit = types::Timespec::new().sec(left.as_secs()).nsec(left.subsec_nanos());
            let wait = types::SubmitArgs::new().timespec(&limit);
            match self.ring.submitter().submit_with_args(1, &wait) {
                // The top of the loop checks for ended transfers and for the deadline.
                Ok(_) => pause = PAUSES.start,
                Err(error) if is_end_of_wait(&error) => {}
                // The kernel is short of memory, for example, and returns at once: other work may free some.
                Err(_) => {
                    std::thread::sleep(pause.min(left));
                    pause = longer(pause);
                }
            }
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        let deadline = Instant::now() + PATIENCE_AT_END;
        while !self.in_flight.is_empty() && self.next(deadline).is_some() {}
        // The kernel may still write to this memory, so it is leaked and never used again.
        self.in_flight.drain().for_each(|(_, transfer)| std::mem::forget(transfer));
    }
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ring({} transfers in flight)", self.in_flight.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_takes_nothing_is_asked_ever_less_often() {
        let pauses: Vec<Duration> =
            std::iter::successors(Some(PAUSES.start), |pause| Some(longer(*pause))).take(10).collect();
        assert!(pauses.is_sorted() && pauses[9] == PAUSES.end, "{pauses:?}");
        assert!(pauses.iter().sum::<Duration>() < Duration::from_secs(1), "{pauses:?}");
    }

    #[test]
    fn a_ring_that_the_kernel_refuses_to_enter_is_none() {
        // A ring that is created disabled refuses every call until it is enabled.
        let made = IoUring::builder().setup_r_disabled().build(4);
        let Ok(mut refused) = made else {
            println!("SKIPPED: io_uring: {made:?}", made = made.err());
            return;
        };
        assert!(try_out(&mut refused).is_err());
        refused.submitter().register_enable_rings().unwrap();
        try_out(&mut refused).unwrap();
    }

    #[test]
    fn the_end_of_a_wait_is_no_refusal() {
        let is_end = |errno: Errno| is_end_of_wait(&errno.into());
        assert!(is_end(Errno::TIME) && is_end(Errno::INTR));
        assert!(!is_end(Errno::AGAIN) && !is_end(Errno::BUSY) && !is_end(Errno::NOMEM));
    }
}
