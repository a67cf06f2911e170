//! Micro-batches filled ahead of their use, on a thread of their own.
//!
//! Batches go around: full ones to the consumer through a bounded queue, empty ones back. Which samples a batch
//! holds was decided before the thread began, so its timing changes nothing but the waiting. Nothing here allocates
//! after the start: a channel of the standard library would, whenever one of its sides first has to wait.

use std::{
    collections::VecDeque,
    ops::Range,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{Builder, JoinHandle},
    time::{Duration, Instant},
};

use crate::{
    batch::MicroBatch,
    dataset::Dataset,
    error::{DataError, Result},
};

/// Room for batches that are not in use; more of them make it grow, once.
const USUAL_BATCHES: usize = 64;

/// Keeps a bounded number of micro-batches ready. Dropping it ends its thread.
#[derive(Debug)]
pub struct Prefetcher {
    belt: Arc<Belt>,
    thread: Option<JoinHandle<()>>,
    waited: Duration,
}

impl Prefetcher {
    /// Starts to fill one micro-batch for each of `ranges` (see [`SampleCursor::ranges`]), up to `depth`
    /// of them ahead.
    ///
    /// [`SampleCursor::ranges`]: crate::SampleCursor::ranges
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(
        dataset: Dataset,
        ranges: impl Iterator<Item = Range<u64>> + Send + 'static,
        depth: usize,
    ) -> Result<Self> {
        let belt = Arc::new(Belt::new(depth));
        let of_thread = FillingSide(Arc::clone(&belt));
        let thread = Builder::new()
            .name("lockstep-data".to_owned())
            .spawn(move || fill_all(&dataset, ranges, &of_thread))
            .map_err(DataError::io("start", "the data thread".as_ref()))?;
        Ok(Self { belt, thread: Some(thread), waited: Duration::ZERO })
    }

    /// The next micro-batch, or `None` after the last. Waits until it is ready.
    ///
    /// # Errors
    /// What went wrong while it was filled. Nothing follows an error.
    pub fn next_batch(&mut self) -> Result<Option<MicroBatch>> {
        let start = Instant::now();
        let taken = self.belt.take();
        self.waited += start.elapsed();
        match taken {
            Some(batch) => batch.map(Some),
            None => self.finished(),
        }
    }

    /// Gives a micro-batch back so that its memory is used for a later one.
    pub fn recycle(&mut self, batch: MicroBatch) {
        self.belt.lock().used.push(batch);
    }

    /// How long [`next_batch`](Self::next_batch) has waited since this was last asked: `data_wait_ms`.
    pub fn take_wait(&mut self) -> Duration {
        std::mem::take(&mut self.waited)
    }

    /// The thread has hung up: because it is done, or because it is broken.
    fn finished(&mut self) -> Result<Option<MicroBatch>> {
        match self.thread.take().map(JoinHandle::join) {
            None | Some(Ok(())) => Ok(None),
            Some(Err(_)) => Err(DataError::PrefetcherLost),
        }
    }
}

impl Drop for Prefetcher {
    fn drop(&mut self) {
        self.belt.lock().consumer_is_gone = true;
        self.belt.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread is reported by `next_batch`; whoever drops this asks no more.
            let _ = thread.join();
        }
    }
}

/// The micro-batches between the two threads.
#[derive(Debug)]
struct Belt {
    state: Mutex<BeltState>,
    /// Signalled after every change that the other side may wait for.
    changed: Condvar,
    /// The most batches that are ready at once.
    depth: usize,
}

#[derive(Debug)]
struct BeltState {
    /// Filled batches in the order of their ranges.
    ready: VecDeque<Result<MicroBatch>>,
    /// Batches whose memory waits to be filled again.
    used: Vec<MicroBatch>,
    /// Set when the thread that fills has ended; nothing follows what is ready.
    is_over: bool,
    /// Set when the prefetcher is dropped; nobody takes what is filled.
    consumer_is_gone: bool,
}

impl Belt {
    fn new(depth: usize) -> Self {
        // A queue of depth 0 would never hand anything over.
        let depth = depth.max(1);
        let state = BeltState {
            ready: VecDeque::with_capacity(depth),
            used: Vec::with_capacity(USUAL_BATCHES),
            is_over: false,
            consumer_is_gone: false,
        };
        Self { state: Mutex::new(state), changed: Condvar::new(), depth }
    }

    fn lock(&self) -> MutexGuard<'_, BeltState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_while(&self, waits: impl FnMut(&mut BeltState) -> bool) -> MutexGuard<'_, BeltState> {
        self.changed.wait_while(self.lock(), waits).unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the oldest batch once there is one, or `None` after the last.
    fn take(&self) -> Option<Result<MicroBatch>> {
        let mut state = self.wait_while(|state| state.ready.is_empty() && !state.is_over);
        let batch = state.ready.pop_front();
        drop(state);
        self.changed.notify_one();
        batch
    }

    /// Adds a batch once there is room; returns whether anybody wants more.
    fn put(&self, batch: Result<MicroBatch>) -> bool {
        let mut state = self.wait_while(|state| state.ready.len() == self.depth && !state.consumer_is_gone);
        if state.consumer_is_gone {
            return false;
        }
        state.ready.push_back(batch);
        drop(state);
        self.changed.notify_one();
        true
    }
}

/// The side of the thread that fills. Its end, by a panic too, is told to the consumer.
struct FillingSide(Arc<Belt>);

impl Drop for FillingSide {
    fn drop(&mut self) {
        self.0.lock().is_over = true;
        self.0.changed.notify_one();
    }
}

fn fill_all(dataset: &Dataset, ranges: impl Iterator<Item = Range<u64>>, FillingSide(belt): &FillingSide) {
    for range in ranges {
        let mut batch = belt.lock().used.pop().unwrap_or_default();
        let filled = dataset.fill(range, &mut batch).map(|()| batch);
        let failed = filled.is_err();
        if !belt.put(filled) || failed {
            return;
        }
    }
}
