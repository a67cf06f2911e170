//! The mappings of all ranks' segments, in a rank or in the launcher: presence, wake-up bells, and the error that ended the
//! run.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use lockstep_tensor::SharedMemory;
use rustix::thread::futex;

use super::layout::{Header, Layout, MAGIC, Status, VERSION};
use crate::{
    CommError,
    error::ERROR_WORDS,
    record::{self, Recorded},
};

/// Time limit for another process to finish writing the error that ended the run.
const ENDING_TIME: Duration = Duration::from_millis(20);

/// Mapping of every rank's segment.
#[derive(Debug, Clone)]
pub(crate) struct Segments {
    pub(crate) layout: Layout,
    memories: Arc<[Arc<SharedMemory>]>,
    /// World rank of the first of these ranks.
    first_rank: usize,
}

impl Segments {
    /// Creates segments for `ranks` ranks, each with room for `arena_bytes` of buffers.
    pub(crate) fn create(ranks: usize, arena_bytes: usize) -> io::Result<Self> {
        let layout = Layout::new(ranks);
        let bytes = layout.heap_at().saturating_add(arena_bytes);
        let memories: Vec<_> =
            (0..ranks).map(|_| SharedMemory::create(bytes).map(Arc::new)).collect::<Result<_, _>>()?;
        let segments = Self { layout, memories: memories.into(), first_rank: 0 };
        for rank in 0..ranks {
            segments.header(rank).version.store(VERSION, Ordering::Relaxed);
            segments.header(rank).magic.store(MAGIC, Ordering::Release);
        }
        Ok(segments)
    }

    /// Maps segments that another process created.
    ///
    /// # Errors
    /// If a segment cannot be mapped, or was not created by this version of the program.
    pub(crate) fn open(files: Vec<OwnedFd>) -> io::Result<Self> {
        let layout = Layout::new(files.len());
        let memories: Vec<_> =
            files.into_iter().map(|file| SharedMemory::open(file).map(Arc::new)).collect::<Result<_, _>>()?;
        let are_ours = |memory: &Arc<SharedMemory>| {
            memory.len_bytes() >= layout.heap_at() && {
                let header = layout.header(memory);
                header.magic.load(Ordering::Acquire) == MAGIC
                    && header.version.load(Ordering::Relaxed) == VERSION
            }
        };
        if !memories.iter().all(are_ours) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "shared memory of another program"));
        }
        Ok(Self { layout, memories: memories.into(), first_rank: 0 })
    }

    /// Returns the segments with `first_rank` as the world rank of their first rank.
    pub(crate) fn beginning_at(self, first_rank: usize) -> Self {
        Self { first_rank, ..self }
    }

    /// Returns the world rank of rank `local` of this machine.
    pub(crate) fn world_rank(&self, local: usize) -> usize {
        self.first_rank + local
    }

    /// Returns the local rank of world rank `rank`; `None` if it is on another machine.
    pub(crate) fn local_rank(&self, rank: usize) -> Option<usize> {
        rank.checked_sub(self.first_rank).filter(|local| *local < self.ranks())
    }

    pub(crate) fn ranks(&self) -> usize {
        self.memories.len()
    }

    pub(crate) fn memory(&self, rank: usize) -> &Arc<SharedMemory> {
        &self.memories[rank]
    }

    pub(crate) fn header(&self, rank: usize) -> &Header {
        self.layout.header(&self.memories[rank])
    }

    pub(crate) fn status(&self, rank: usize) -> Status {
        match self.header(rank).status.load(Ordering::Acquire) {
            0 => Status::Absent,
            1 => Status::Here,
            2 => Status::Left,
            _ => Status::Panicked,
        }
    }

    /// Wakes a rank if it sleeps. Call it after writing a word that the rank may be waiting for.
    pub(crate) fn wake(&self, rank: usize) {
        let header = self.header(rank);
        // Sequentially consistent, like the words that are waited for: either this rank sees that the other is about to
        // sleep, or the other sees the new value.
        if header.asleep.0.load(Ordering::SeqCst) > 0 {
            header.wakeups.0.fetch_add(1, Ordering::SeqCst);
            // A failed wake-up is harmless: sleepers wake up every few milliseconds anyway.
            let _ = futex::wake(&header.wakeups.0, futex::Flags::empty(), u32::MAX >> 1);
        }
    }

    /// Sleeps until the rank's count of wake-ups differs from `seen`, for at most `limit`.
    pub(crate) fn sleep(&self, rank: usize, seen: u32, limit: Duration) {
        let timeout =
            futex::Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        // The reason of waking does not matter to callers: a wake-up, the limit, a signal, or an earlier wake-up.
        let _ = futex::wait(&self.header(rank).wakeups.0, futex::Flags::empty(), seen, Some(&timeout));
    }

    /// Returns true if an error has ended the run.
    pub(crate) fn has_ended(&self) -> bool {
        self.ending_state().load(Ordering::Acquire) != 0
    }

    /// Returns the error that ended the run; `None` while it goes on.
    pub(crate) fn ending(&self) -> Option<CommError> {
        if !self.has_ended() {
            return None;
        }
        let begin = Instant::now();
        while self.ending_state().load(Ordering::Acquire) == 1 && begin.elapsed() < ENDING_TIME {
            std::thread::yield_now();
        }
        if self.ending_state().load(Ordering::Acquire) == 1 {
            // The process that was writing it has died.
            return Some(CommError::Stopped { by: None });
        }
        let mut words = [0; ERROR_WORDS];
        for (word, shared) in words.iter_mut().zip(&self.header(0).ending_words) {
            *word = shared.load(Ordering::Relaxed);
        }
        Some(CommError::from_words(words))
    }

    /// Ends the run on all ranks with `error`, unless it has ended already. Returns the error that ended it.
    pub(crate) fn end(&self, error: &CommError, own_rank: usize) -> CommError {
        let state = self.ending_state();
        if state.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            for (word, shared) in error.to_words(own_rank).into_iter().zip(&self.header(0).ending_words) {
                shared.store(word, Ordering::Relaxed);
            }
            state.store(2, Ordering::SeqCst);
            (0..self.ranks()).for_each(|rank| self.wake(rank));
        }
        self.ending().unwrap_or(CommError::Stopped { by: None })
    }

    fn ending_state(&self) -> &AtomicU32 {
        &self.header(0).ending.0
    }

    /// Returns the last operations of a rank, oldest first.
    pub(crate) fn records(&self, rank: usize) -> Vec<Recorded> {
        let count = self.header(rank).recorded.load(Ordering::Acquire);
        record::read(count, |number| self.layout.record(self.memory(rank), number as usize))
    }
}
