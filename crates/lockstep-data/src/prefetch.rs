//! Fills micro-batches ahead of their use, on a separate thread.
//!
//! Batches circulate: full ones reach the consumer through a bounded queue, empty ones go back to be refilled. The
//! samples of each batch are fixed before the thread starts, so timing affects only the waiting. After the start
//! nothing here allocates. A channel of the standard library would, the first time one of its sides waits.

use std::{
    collections::VecDeque,
    ops::Range,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{Builder, JoinHandle},
    time::{Duration, Instant},
};

use crate::{
    batch::MicroBatch,
    batch_source::BatchSource,
    error::{DataError, Result},
};

/// Initial capacity for recycled batches; more of them grow it once.
const USUAL_BATCHES: usize = 64;

/// Producer thread with a bounded queue of filled micro-batches. Dropping it ends the thread.
#[derive(Debug)]
pub struct Prefetcher {
    belt: Arc<Belt>,
    thread: Option<JoinHandle<()>>,
    waited: Duration,
}

impl Prefetcher {
    /// Starts filling one micro-batch for each of `ranges` (see [`SampleCursor::ranges`]), up to `depth` of them ahead.
    ///
    /// [`SampleCursor::ranges`]: crate::SampleCursor::ranges
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(
        source: Arc<dyn BatchSource>,
        ranges: impl Iterator<Item = Range<u64>> + Send + 'static,
        depth: usize,
    ) -> Result<Self> {
        let belt = Arc::new(Belt::new(depth));
        let of_thread = FillingSide(Arc::clone(&belt));
        let thread = Builder::new()
            .name("lockstep-data".to_owned())
            .spawn(move || fill_all(&*source, ranges, &of_thread))
            .map_err(DataError::io("start", "the data thread".as_ref()))?;
        Ok(Self { belt, thread: Some(thread), waited: Duration::ZERO })
    }

    /// Returns the next micro-batch, or `None` after the last one. Waits until it is filled.
    ///
    /// # Errors
    /// If the batch could not be filled. No batch follows an error.
    pub fn next_batch(&mut self) -> Result<Option<MicroBatch>> {
        let start = Instant::now();
        let taken = self.belt.take();
        self.waited += start.elapsed();
        match taken {
            Some(batch) => batch.map(Some),
            None => self.finished(),
        }
    }

    /// Returns a micro-batch to the prefetcher, which reuses its memory.
    pub fn recycle(&mut self, batch: MicroBatch) {
        self.belt.lock().used.push(batch);
    }

    /// Returns the time that [`next_batch`](Self::next_batch) has waited since the previous call: the metric
    /// `data_wait_ms`.
    pub fn take_wait(&mut self) -> Duration {
        std::mem::take(&mut self.waited)
    }

    /// Joins the thread after its end and reports a panic as an error.
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
            // `next_batch` reports a panic of the thread; after the drop there is no caller to report it to.
            let _ = thread.join();
        }
    }
}

/// Queue of micro-batches between the two threads.
#[derive(Debug)]
struct Belt {
    state: Mutex<BeltState>,
    /// Signalled after every change that the other side may wait for.
    changed: Condvar,
    /// Maximum number of filled batches.
    depth: usize,
}

#[derive(Debug)]
struct BeltState {
    /// Filled batches in the order of their ranges.
    ready: VecDeque<Result<MicroBatch>>,
    /// Empty batches whose memory is reused.
    used: Vec<MicroBatch>,
    /// True once the filling thread has ended; no batch is added after that.
    is_over: bool,
    /// True once the prefetcher is dropped; no batch is taken after that.
    consumer_is_gone: bool,
}

impl Belt {
    fn new(depth: usize) -> Self {
        // A queue of depth 0 could not hand over any batch.
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

    /// Waits for the oldest batch and removes it; returns `None` after the last one.
    fn take(&self) -> Option<Result<MicroBatch>> {
        let mut state = self.wait_while(|state| state.ready.is_empty() && !state.is_over);
        let batch = state.ready.pop_front();
        drop(state);
        self.changed.notify_one();
        batch
    }

    /// Adds a batch once there is room. Returns false if the consumer is gone.
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

/// Producer side of the queue. Dropping it, also by a panic, tells the consumer that no batch follows.
struct FillingSide(Arc<Belt>);

impl Drop for FillingSide {
    fn drop(&mut self) {
        self.0.lock().is_over = true;
        self.0.changed.notify_one();
    }
}

fn fill_all(
    source: &dyn BatchSource,
    ranges: impl Iterator<Item = Range<u64>>,
    FillingSide(belt): &FillingSide,
) {
    for range in ranges {
        let mut batch = belt.lock().used.pop().unwrap_or_default();
        let filled = source.fill(range, &mut batch).map(|()| batch);
        let failed = filled.is_err();
        if !belt.put(filled) || failed {
            return;
        }
    }
}
