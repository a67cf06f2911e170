//! Fills batches ahead of their use, on several threads.
//!
//! Each thread takes the next range of sample numbers, reads, transforms and stacks its samples, and puts the batch into
//! the slot of its number. The consumer takes slots in order, so neither the number of threads nor their timing changes a
//! batch. Batches that come back are filled again: once every buffer has its size, batches of one shape allocate
//! nothing, apart from what the data set's decoders allocate.

use std::{
    collections::VecDeque,
    ops::Range,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{Builder, JoinHandle},
    time::{Duration, Instant},
};

use super::{
    bad_samples::OnBadSample, batch::Batch, dataset::Dataset, reader::SampleReader, sequence::SampleSequence,
    tensor::Sample, transform::Transforms,
};
use crate::error::{DataError, Result};

/// Options of a [`Loader`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoaderOptions {
    /// Random seed of the transforms.
    pub seed: u64,
    /// Number of threads that decode and transform; 1 or more. Default: 2.
    pub workers: usize,
    /// Batches that are ready or in work, per worker; 1 or more. Default: 2, PyTorch's `prefetch_factor`.
    pub prefetch_batches: usize,
    /// Reaction to a damaged sample. Default: [`OnBadSample::Fail`].
    ///
    /// With [`OnBadSample::Skip`], the sample with the next higher index that is sound takes its place (after the last
    /// one, index 0 follows), so batches keep their size and the order does not depend on ranks.
    pub on_bad_sample: OnBadSample,
}

impl Default for LoaderOptions {
    fn default() -> Self {
        Self { seed: 0, workers: 2, prefetch_batches: 2, on_bad_sample: OnBadSample::Fail }
    }
}

/// Threads that fill batches, and the queue of their results. Dropping it ends the threads.
#[derive(Debug)]
pub struct Loader {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
    waited: Duration,
    skipped: u64,
    failed: bool,
}

impl Loader {
    /// Starts filling one batch for each of `ranges` of sample numbers (see
    /// [`SampleCursor::ranges`](crate::SampleCursor::ranges) and [`one_epoch`](super::one_epoch)).
    ///
    /// # Errors
    /// If a transform does not suit the data set, `sequence` is for another number of samples, `workers` or
    /// `prefetch_batches` is 0, or a thread cannot be started.
    pub fn start(
        dataset: Arc<dyn Dataset>,
        transforms: Transforms,
        sequence: SampleSequence,
        ranges: impl Iterator<Item = Range<u64>> + Send + 'static,
        options: LoaderOptions,
    ) -> Result<Self> {
        for (name, value) in [("workers", options.workers), ("prefetch_batches", options.prefetch_batches)] {
            if value == 0 {
                return Err(DataError::out_of_range(name, 0, "1 or more"));
            }
        }
        let reader = SampleReader::new(dataset, transforms, sequence, options.seed, options.on_bad_sample)?;
        let queue =
            Arc::new(Queue::new(Box::new(ranges), options.workers.saturating_mul(options.prefetch_batches)));
        let reader = Arc::new(reader);
        let mut loader =
            Self { queue, threads: Vec::new(), waited: Duration::ZERO, skipped: 0, failed: false };
        for worker in 0..options.workers {
            let (queue, reader) = (Arc::clone(&loader.queue), Arc::clone(&reader));
            let thread = Builder::new()
                .name(format!("lockstep-load-{worker}"))
                .spawn(move || work(&queue, &reader))
                .map_err(DataError::io("start", "a data thread".as_ref()))?;
            loader.threads.push(thread);
        }
        Ok(loader)
    }

    /// Returns the next batch, or `None` after the last one. Waits until it is filled.
    ///
    /// # Errors
    /// If a sample of the batch failed; the error says which. No batch follows an error.
    pub fn next_batch(&mut self) -> Result<Option<Batch>> {
        if self.failed {
            return Ok(None);
        }
        let start = Instant::now();
        let taken = self.queue.take();
        self.waited += start.elapsed();
        match taken {
            Some(Ok(batch)) => {
                self.skipped += batch.skipped;
                Ok(Some(batch))
            }
            Some(Err(error)) => {
                self.failed = true;
                Err(error)
            }
            None => self.finished(),
        }
    }

    /// Joins the threads after their end and reports a panic outside of a batch as an error.
    fn finished(&mut self) -> Result<Option<Batch>> {
        let panicked = self.threads.drain(..).filter_map(|thread| thread.join().err()).count();
        if panicked == 0 { Ok(None) } else { Err(DataError::LoaderPanicked) }
    }

    /// Returns a batch to the loader, which reuses its memory.
    pub fn recycle(&mut self, batch: Batch) {
        self.queue.lock().used.push(batch);
    }

    /// Returns the number of damaged samples that were skipped in the batches taken so far.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Returns the time that [`next_batch`](Self::next_batch) has waited since the previous call: the metric
    /// `data_wait_ms`.
    pub fn take_wait(&mut self) -> Duration {
        std::mem::take(&mut self.waited)
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.queue.lock().is_over = true;
        self.queue.changed.notify_all();
        for thread in self.threads.drain(..) {
            // A panic of the thread has been reported as the error of its batch.
            let _ = thread.join();
        }
    }
}

/// Batches between the threads and the consumer.
struct Queue {
    state: Mutex<QueueState>,
    /// Signalled after every change that a thread or the consumer may wait for.
    changed: Condvar,
    /// Maximum number of slots.
    depth: usize,
}

struct QueueState {
    /// Ranges that no thread has taken; `None` after the last one.
    ranges: Option<Box<dyn Iterator<Item = Range<u64>> + Send>>,
    /// Slots of the batches from number `first` on; `None` while a thread fills it.
    slots: VecDeque<Option<Result<Batch>>>,
    /// Number of the batch in the first slot.
    first: u64,
    /// Batches whose memory is reused.
    used: Vec<Batch>,
    /// True once the consumer is gone: threads end.
    is_over: bool,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").field("depth", &self.depth).finish_non_exhaustive()
    }
}

impl Queue {
    fn new(ranges: Box<dyn Iterator<Item = Range<u64>> + Send>, depth: usize) -> Self {
        let state = QueueState {
            ranges: Some(ranges),
            slots: VecDeque::new(),
            first: 0,
            used: Vec::new(),
            is_over: false,
        };
        Self { state: Mutex::new(state), changed: Condvar::new(), depth }
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_over(&self) -> bool {
        self.lock().is_over
    }

    /// Waits for room and takes the next range, with its batch number and memory for it. `None` if there is nothing left
    /// to do.
    fn claim(&self) -> Option<(u64, Range<u64>, Batch)> {
        let waits = |state: &mut QueueState| state.slots.len() >= self.depth && !state.is_over;
        let mut state = self.changed.wait_while(self.lock(), waits).unwrap_or_else(PoisonError::into_inner);
        if state.is_over {
            return None;
        }
        // It is put back unless it ends or panics.
        let mut ranges = state.ranges.take()?;
        let range = ranges.next()?;
        state.ranges = Some(ranges);
        let number = state.first + state.slots.len() as u64;
        state.slots.push_back(None);
        let batch = state.used.pop().unwrap_or_default();
        Some((number, range, batch))
    }

    /// Puts a batch into its slot. After an error no further range is taken.
    fn put(&self, number: u64, batch: Result<Batch>) {
        let mut state = self.lock();
        if batch.is_err() {
            state.ranges = None;
        }
        let slot = (number - state.first) as usize;
        if let Some(slot) = state.slots.get_mut(slot) {
            *slot = Some(batch);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Waits for the batch in the first slot and removes it; `None` after the last one.
    fn take(&self) -> Option<Result<Batch>> {
        let waits = |state: &mut QueueState| match state.slots.front() {
            Some(slot) => slot.is_none(),
            None => state.ranges.is_some(),
        };
        let mut state = self.changed.wait_while(self.lock(), waits).unwrap_or_else(PoisonError::into_inner);
        let batch = state.slots.pop_front()??;
        state.first += 1;
        drop(state);
        self.changed.notify_all();
        Some(batch)
    }
}

/// Claimed slot of a thread. If the thread panics, the slot gets an error, so that the consumer does not wait forever.
struct Claim<'a> {
    queue: &'a Queue,
    number: u64,
    is_filled: bool,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if !self.is_filled {
            self.queue.put(self.number, Err(DataError::LoaderPanicked));
        }
    }
}

/// Wakes the consumer when a thread ends, also by a panic.
struct Ended<'a>(&'a Queue);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.changed.notify_all();
    }
}

fn work(queue: &Queue, reader: &SampleReader) {
    let _ended = Ended(queue);
    let mut sample = Sample::default();
    while let Some((number, range, mut batch)) = queue.claim() {
        let mut claim = Claim { queue, number, is_filled: false };
        let filled = fill(reader, range, &mut batch, &mut sample, || queue.is_over());
        claim.is_filled = true;
        queue.put(number, filled.map(|()| batch));
    }
}

/// Fills `batch` with a range of samples. Stops early if `is_over` says that nobody wants it.
fn fill(
    reader: &SampleReader,
    range: Range<u64>,
    batch: &mut Batch,
    sample: &mut Sample,
    is_over: impl Fn() -> bool,
) -> Result<()> {
    batch.clear();
    for number in range {
        if is_over() {
            return Ok(());
        }
        batch.skipped += reader.read(number, sample)?;
        batch.push(sample, number).map_err(|problem| reader.unlike_its_batch(number, problem))?;
    }
    Ok(())
}
