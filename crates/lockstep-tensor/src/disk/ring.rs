//! Transfers by io_uring: the kernel works on many at once, and nobody waits for one but who needs it.

use std::{
    collections::HashMap,
    io,
    ops::Range,
    os::fd::AsRawFd,
    sync::Arc,
    time::{Duration, Instant},
};

use io_uring::{IoUring, opcode, squeue, types};
use rustix::io::Errno;

use super::{Action, Mover, ScratchFile, Transfer};

/// Longest time in which a new ring does nothing.
const PATIENCE_AT_START: Duration = Duration::from_secs(1);

/// How long a queue that is dropped waits for what is on its way.
const PATIENCE_AT_END: Duration = Duration::from_secs(10);

/// How long nothing is tried after the kernel has refused to take what is asked of it: first, and at most.
const PAUSES: Range<Duration> = Duration::from_millis(1)..Duration::from_millis(64);

/// A ring of requests, and what they are about.
pub(super) struct Ring {
    ring: IoUring,
    file: Arc<ScratchFile>,
    /// What the kernel works on. The memory stays lent, and so alive, until it is done.
    on_their_way: HashMap<u64, Transfer>,
}

impl Ring {
    /// A ring for up to `depth` requests of `file` at once.
    ///
    /// # Errors
    /// The kernel has none, one that is too old, or does not let this process use it.
    pub(super) fn new(file: Arc<ScratchFile>, depth: usize) -> io::Result<Self> {
        let mut ring = IoUring::new(depth as u32)?;
        // Waiting with a deadline came with Linux 5.11.
        if !ring.params().is_feature_ext_arg() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        try_out(&mut ring)?;
        Ok(Self { ring, file, on_their_way: HashMap::with_capacity(depth) })
    }

    /// Hands the rest of a transfer to the kernel.
    fn submit(&mut self, transfer: Transfer) -> Result<(), (Transfer, io::Error)> {
        let entry = entry_of(&self.file, &transfer);
        // SAFETY: the memory is lent to the transfer, which stays in `on_their_way` until the kernel is done with it, and is never
        // freed before that (see `drop`); the file is open as long as the ring.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        if pushed.is_err() {
            return Err((transfer, io::ErrorKind::ResourceBusy.into()));
        }
        self.on_their_way.insert(transfer.id, transfer);
        loop {
            match self.ring.submit() {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The kernel is short of memory: the entry stays in the ring and goes with the next call.
                Err(_) => return Ok(()),
            }
        }
    }

    /// A transfer that has ended, if there is one. What was done in part goes on.
    fn ended(&mut self) -> Option<(Transfer, io::Result<()>)> {
        loop {
            let end = self.ring.completion().next()?;
            let Some(mut transfer) = self.on_their_way.remove(&end.user_data()) else { continue };
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
                    if transfer.done == transfer.loan.bytes().len() {
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

/// Tries a ring out with a request that does nothing: a sandbox may allow a ring to be made and refuse every use of it.
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

/// Whether a wait has ended as it may: by a signal, or because its time is up.
fn is_end_of_wait(error: &io::Error) -> bool {
    [Some(Errno::INTR), Some(Errno::TIME)].contains(&Errno::from_io_error(error))
}

/// The pause after a pause that did not help.
fn longer(pause: Duration) -> Duration {
    (2 * pause).min(PAUSES.end)
}

fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}

fn entry_of(file: &ScratchFile, transfer: &Transfer) -> squeue::Entry {
    let Transfer { id, action, offset, loan, done } = transfer;
    let descriptor = types::Fd(file.file().as_raw_fd());
    let memory = loan.as_ptr().wrapping_add(*done);
    // What is longer goes on when the first part is done.
    let bytes = (loan.bytes().len() - done).min(1 << 30) as u32;
    let offset = offset + *done as u64;
    let entry = match action {
        Action::Read => opcode::Read::new(descriptor, memory, bytes).offset(offset).build(),
        Action::Write => opcode::Write::new(descriptor, memory, bytes).offset(offset).build(),
    };
    entry.user_data(*id)
}

impl Mover for Ring {
    fn start(&mut self, transfer: Transfer) {
        if let Err((transfer, _)) = self.submit(transfer) {
            // As many entries as a queue has on their way: there is always one.
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
            if left.is_zero() || self.on_their_way.is_empty() {
                return None;
            }
            let limit = types::Timespec::new().sec(left.as_secs()).nsec(left.subsec_nanos());
            let wait = types::SubmitArgs::new().timespec(&limit);
            match self.ring.submitter().submit_with_args(1, &wait) {
                // Whether anything has ended, or time is up, is looked at above.
                Ok(_) => pause = PAUSES.start,
                Err(error) if is_end_of_wait(&error) => {}
                // It is short of memory, say, and answers at once: other work may free some.
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
        while !self.on_their_way.is_empty() && self.next(deadline).is_some() {}
        // The kernel may still write there: that memory is never used again.
        self.on_their_way.drain().for_each(|(_, transfer)| std::mem::forget(transfer));
    }
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ring({} transfers on their way)", self.on_their_way.len())
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
        // A ring that was made disabled refuses every call until it is enabled.
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
