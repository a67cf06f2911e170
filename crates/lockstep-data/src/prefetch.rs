//! Micro-batches filled ahead of their use, on a thread of their own.
//!
//! Batches go around: full ones to the consumer through a bounded queue, empty ones back. Which samples a batch
//! holds was decided before the thread began, so its timing changes nothing but the waiting.

use std::{
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
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
    /// Gone as soon as the prefetcher is dropped, which is how the thread hears of it.
    ready: Option<Receiver<Result<MicroBatch>>>,
    used: Used,
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
        let (ready_sender, ready) = sync_channel(depth);
        let used = Used(Arc::new(Mutex::new(Vec::with_capacity(USUAL_BATCHES))));
        let to_fill = used.clone();
        let thread = Builder::new()
            .name("lockstep-data".to_owned())
            .spawn(move || fill_all(&dataset, ranges, &ready_sender, &to_fill))
            .map_err(DataError::io("start", "the data thread".as_ref()))?;
        Ok(Self { ready: Some(ready), used, thread: Some(thread), waited: Duration::ZERO })
    }

    /// The next micro-batch, or `None` after the last. Waits until it is ready.
    ///
    /// # Errors
    /// What went wrong while it was filled. Nothing follows an error.
    pub fn next_batch(&mut self) -> Result<Option<MicroBatch>> {
        let start = Instant::now();
        let received = self.ready.as_ref().and_then(|ready| ready.recv().ok());
        self.waited += start.elapsed();
        match received {
            Some(batch) => batch.map(Some),
            None => self.finished(),
        }
    }

    /// Gives a micro-batch back so that its memory is used for a later one.
    pub fn recycle(&mut self, batch: MicroBatch) {
        self.used.lock().push(batch);
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

/// Batches whose memory waits to be filled again. A list and not a queue, which would allocate now and then.
#[derive(Debug, Clone)]
struct Used(Arc<Mutex<Vec<MicroBatch>>>);

impl Used {
    fn lock(&self) -> MutexGuard<'_, Vec<MicroBatch>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Prefetcher {
    fn drop(&mut self) {
        self.ready = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread is reported by `next_batch`; whoever drops this asks no more.
            let _ = thread.join();
        }
    }
}

fn fill_all(
    dataset: &Dataset,
    ranges: impl Iterator<Item = Range<u64>>,
    ready: &SyncSender<Result<MicroBatch>>,
    used: &Used,
) {
    for range in ranges {
        let mut batch = used.lock().pop().unwrap_or_default();
        let filled = dataset.fill(range, &mut batch).map(|()| batch);
        let failed = filled.is_err();
        // A consumer that hung up wants no more.
        if ready.send(filled).is_err() || failed {
            return;
        }
    }
}
