//! Gradients summed over the replicas of a model, while the backward goes on.
//!
//! A unit whose gradients are complete is lent to the group in buckets. Where they lie in the shared arena they are summed
//! in place, over the group's fixed tree: all replicas end with the same bits.

use std::ops::Range;
use std::time::{Duration, Instant};

use lockstep_comm::{Collective, CommError, Deadline, Group, Lent, Pending, ReduceOp};
use lockstep_plan::DType;
use lockstep_tensor::Buffer;

/// Buckets end where blocks of the gradient norm do.
const BUCKET_GRAIN_BYTES: usize = 4096;

/// Sums gradients over a group of replicas.
#[derive(Debug)]
pub struct Reducer {
    group: Group,
    bucket_bytes: usize,
    limit: Duration,
    /// Each with the moment at which it began.
    pending: Vec<(Instant, Pending)>,
    traffic: Traffic,
}

/// What sums over replicas cost.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Traffic {
    /// Bytes that this rank sent: of S bytes that are summed over P ranks, 2 (P-1)/P S.
    pub bytes: u64,
    /// Time in which this rank worked on them, or, where that is not the work of its compute threads, they were under way.
    pub busy: Duration,
    /// The part of it before and after the backward.
    pub exposed: Duration,
}

impl Reducer {
    /// Sums over `group` in buckets of up to `bucket_bytes`; no wait is longer than `limit`.
    pub fn new(group: Group, bucket_bytes: usize, limit: Duration) -> Self {
        let bucket_bytes = bucket_bytes.next_multiple_of(BUCKET_GRAIN_BYTES).max(BUCKET_GRAIN_BYTES);
        Self { group, bucket_bytes, limit, pending: Vec::new(), traffic: Traffic::default() }
    }

    /// What has been summed since this was last asked.
    pub fn take_traffic(&mut self) -> Traffic {
        std::mem::take(&mut self.traffic)
    }

    /// Adds to the marks, which are not 0, those of all replicas.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn mark_all(&mut self, marks: &mut [u8]) -> Result<(), CommError> {
        let begin = Instant::now();
        let bytes = marks.len();
        self.group.all_reduce(marks, ReduceOp::Max, Deadline::after(self.limit))?;
        self.traffic.bytes += self.bytes_sent(bytes);
        self.traffic.busy += begin.elapsed();
        self.traffic.exposed += begin.elapsed();
        Ok(())
    }

    /// Begins to sum f32 gradients that are complete: the bytes `range` of `gradients`.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn start(&mut self, gradients: &mut Buffer, range: Range<usize>) -> Result<(), CommError> {
        let begin = Instant::now();
        for start in range.clone().step_by(self.bucket_bytes) {
            let loan = gradients.lend(start..range.end.min(start + self.bucket_bytes));
            let data = Lent::new(loan, DType::F32);
            let sum = Collective::AllReduce { data, op: ReduceOp::Sum };
            let started = Instant::now();
            self.pending.push((started, self.group.start(sum, Deadline::after(self.limit))?));
        }
        self.group.progress()?;
        self.traffic.bytes += self.bytes_sent(range.len());
        if !self.group.is_in_background() {
            self.traffic.busy += begin.elapsed();
        }
        Ok(())
    }

    /// Bytes that a rank sends when `len` are summed.
    fn bytes_sent(&self, len: usize) -> u64 {
        let ranks = self.group.size() as u64;
        2 * (ranks - 1) * len as u64 / ranks
    }

    /// Waits until everything is summed.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn wait(&mut self) -> Result<(), CommError> {
        let begin = Instant::now();
        let mut counted_until = None;
        for (started, pending) in self.pending.drain(..) {
            let (_, done) = pending.wait_with_time(Deadline::after(self.limit))?;
            if self.group.is_in_background() {
                let from = counted_until.map_or(started, |until| started.max(until));
                self.traffic.busy += done.saturating_duration_since(from);
                counted_until = Some(from.max(done));
            }
        }
        if !self.group.is_in_background() {
            self.traffic.busy += begin.elapsed();
        }
        self.traffic.exposed += begin.elapsed();
        Ok(())
    }
}
