//! The segments of all ranks as one of them, or their launcher, has them mapped: who is here, bells, and why a run ended.

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
use crate::{CommError, error::ERROR_WORDS, recorder};

/// For how long the one who writes why a run ended is waited for.
const ENDING_TIME: Duration = Duration::from_millis(20);

/// A mapping of every rank's segment.
#[derive(Debug, Clone)]
pub(crate) struct Segments {
    pub(crate) layout: Layout,
    memories: Arc<[Arc<SharedMemory>]>,
    /// Rank of the first of these in the world.
    first_rank: usize,
}

impl Segments {
    /// New segments for `ranks` ranks, each with room for `arena_bytes` of buffers.
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

    /// Maps the segments that somebody created.
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

    /// The same segments, of ranks of a larger world.
    pub(crate) fn beginning_at(self, first_rank: usize) -> Self {
        Self { first_rank, ..self }
    }

    /// The rank in the world of rank `local` of this machine.
    pub(crate) fn world_rank(&self, local: usize) -> usize {
        self.first_rank + local
    }

    /// The rank on this machine of rank `rank` of the world, if it is here.
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

    /// Wakes a rank that sleeps, after something that it may be waiting for has been written.
    pub(crate) fn ring(&self, rank: usize) {
        let header = self.header(rank);
        // Sequentially consistent, as the words that are waited for: either we see that it is about to sleep, or it sees
        // what we wrote.
        if header.asleep.0.load(Ordering::SeqCst) > 0 {
            header.bell.0.fetch_add(1, Ordering::SeqCst);
            // There is nothing to be done about a refusal; sleepers look up every few milliseconds.
            let _ = futex::wake(&header.bell.0, futex::Flags::empty(), u32::MAX >> 1);
        }
    }

    /// Sleeps until the own bell rings after it was at `heard`, or for `limit`.
    pub(crate) fn sleep(&self, rank: usize, heard: u32, limit: Duration) {
        let timeout =
            futex::Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        // It ends by a ring, by the limit, by a signal, or because the bell has rung already: all the same to callers.
        let _ = futex::wait(&self.header(rank).bell.0, futex::Flags::empty(), heard, Some(&timeout));
    }

    /// Whether the run has ended by an error.
    pub(crate) fn has_ended(&self) -> bool {
        self.ending_state().load(Ordering::Acquire) != 0
    }

    /// Why the run has ended, if it has.
    pub(crate) fn ending(&self) -> Option<CommError> {
        if !self.has_ended() {
            return None;
        }
        let begin = Instant::now();
        while self.ending_state().load(Ordering::Acquire) == 1 && begin.elapsed() < ENDING_TIME {
            std::thread::yield_now();
        }
        if self.ending_state().load(Ordering::Acquire) == 1 {
            // Whoever was writing it died.
            return Some(CommError::Stopped { by: None });
        }
        let mut words = [0; ERROR_WORDS];
        for (word, shared) in words.iter_mut().zip(&self.header(0).ending_words) {
            *word = shared.load(Ordering::Relaxed);
        }
        Some(CommError::from_words(words))
    }

    /// Ends the run on all ranks, unless it has ended already. Returns why it ended.
    pub(crate) fn end(&self, error: &CommError, own_rank: usize) -> CommError {
        let state = self.ending_state();
        if state.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            for (word, shared) in error.to_words(own_rank).into_iter().zip(&self.header(0).ending_words) {
                shared.store(word, Ordering::Relaxed);
            }
            state.store(2, Ordering::SeqCst);
            (0..self.ranks()).for_each(|rank| self.ring(rank));
        }
        self.ending().unwrap_or(CommError::Stopped { by: None })
    }

    fn ending_state(&self) -> &AtomicU32 {
        &self.header(0).ending.0
    }

    /// The last operations of a rank, oldest first.
    pub(crate) fn records(&self, rank: usize) -> Vec<recorder::Recorded> {
        recorder::read(&self.layout, &self.memories[rank], self.header(rank).recorded.load(Ordering::Acquire))
    }
}
