//! Micro-batches filled ahead of their use, on a thread of their own.
//!
//! Two bounded queues go around: full batches to the consumer, empty ones back. Which samples a batch
//! holds was decided before the thread began, so its timing changes nothing but the waiting.

use std::{
    ops::Range,
    sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel},
    thread::{Builder, JoinHandle},
    time::{Duration, Instant},
};

use crate::{
    batch::MicroBatch,
    dataset::Dataset,
    error::{DataError, Result},
};

/// Keeps a bounded number of micro-batches ready. Dropping it ends its thread.
#[derive(Debug)]
pub struct Prefetcher {
    /// Gone as soon as the prefetcher is dropped, which is how the thread hears of it.
    ready: Option<Receiver<Result<MicroBatch>>>,
    used: Sender<MicroBatch>,
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
        let (used, used_receiver) = channel();
        let thread = Builder::new()
            .name("lockstep-data".to_owned())
            .spawn(move || fill_all(&dataset, ranges, &ready_sender, &used_receiver))
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
        // The thread may have filled its last batch already and be gone.
        let _ = self.used.send(batch);
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
    used: &Receiver<MicroBatch>,
) {
    for range in ranges {
        let mut batch = used.try_recv().unwrap_or_default();
        let filled = dataset.fill(range, &mut batch).map(|()| batch);
        let failed = filled.is_err();
        // A consumer that hung up wants no more.
        if ready.send(filled).is_err() || failed {
            return;
        }
    }
}
