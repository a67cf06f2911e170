//! Gradients summed over the replicas of a model, while the backward goes on.
//!
//! A unit whose gradients are complete is lent to the group in buckets. Where they lie in the shared arena they are summed
//! in place, over the group's fixed tree: all replicas end with the same bits.

use std::ops::Range;
use std::time::{Duration, Instant};

use lockstep_comm::{Collective, CommError, Deadline, Group, Lent, Pending, ReduceOp};
use lockstep_graph::mutation::{Mutation, active};
use lockstep_plan::{DType, ParameterRecord};
use lockstep_tensor::{Buffer, Workers};

use crate::{GroupOptions, Groups, groups::Summing};

/// Buckets end where blocks of the gradient norm do.
const BUCKET_GRAIN_BYTES: usize = 4096;

/// Sums gradients over the ranks that have summands of them.
#[derive(Debug)]
pub(crate) struct Reducer {
    /// See [`Groups::of_gradients`].
    groups: Vec<(Summing, Group)>,
    bucket_bytes: usize,
    limit: Duration,
    pending: Vec<Bucket>,
    traffic: Traffic,
}

/// A sum that is under way.
#[derive(Debug)]
struct Bucket {
    started: Instant,
    is_in_background: bool,
    sum: Pending,
}

/// What talking to other ranks costs.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Traffic {
    /// Bytes that this rank sent, by the best of algorithms: of S bytes that are summed over P ranks, 2 (P-1)/P S.
    pub bytes: u64,
    /// Time in which this rank worked on them, or, where that is not the work of its compute threads, they were under way.
    pub busy: Duration,
    /// The part of it in which nothing was computed: of sums of gradients that before and after the backward.
    pub exposed: Duration,
}

impl Reducer {
    /// Sums the gradients of `records` over `groups`; none where nothing is to be summed. The engine's threads help.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn new(
        groups: &Groups,
        records: &[ParameterRecord],
        workers: Workers,
    ) -> Result<Option<Self>, CommError> {
        let Some(GroupOptions { bucket_bytes, limit, .. }) = groups.options() else { return Ok(None) };
        if let Some(world) = groups.world() {
            world.set_workers(workers);
        }
        let groups = groups.of_gradients(records)?;
        let bucket_bytes = bucket_bytes.next_multiple_of(BUCKET_GRAIN_BYTES).max(BUCKET_GRAIN_BYTES);
        let (pending, traffic) = (Vec::new(), Traffic::default());
        Ok((!groups.is_empty()).then_some(Self { groups, bucket_bytes, limit, pending, traffic }))
    }

    /// What has been summed since this was last asked.
    pub(crate) fn take_traffic(&mut self) -> Traffic {
        std::mem::take(&mut self.traffic)
    }

    /// Adds to the marks, which are not 0, those of all ranks that have summands of what they mark.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn mark_all(&mut self, marks: &mut [u8], summing: Summing) -> Result<(), CommError> {
        let group = self.group(summing).filter(|_| !active(Mutation::MarksNotAgreed));
        let Some(group) = group else { return Ok(()) };
        let begin = Instant::now();
        let bytes = bytes_sent(&group, marks.len());
        group.all_reduce(marks, ReduceOp::Max, Deadline::after(self.limit))?;
        self.traffic.bytes += bytes;
        self.traffic.busy += begin.elapsed();
        self.traffic.exposed += begin.elapsed();
        Ok(())
    }

    /// Begins to sum f32 gradients that are complete: the bytes `range` of `gradients`.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn start(
        &mut self,
        gradients: &mut Buffer,
        range: Range<usize>,
        summing: Summing,
    ) -> Result<(), CommError> {
        let Some(group) = self.group(summing).filter(|_| !active(summing.left_out())) else { return Ok(()) };
        let begin = Instant::now();
        let is_in_background = group.is_in_background();
        for start in range.clone().step_by(self.bucket_bytes) {
            let loan = gradients.lend(start..range.end.min(start + self.bucket_bytes));
            let data = Lent::new(loan, DType::F32);
            let sum = Collective::AllReduce { data, op: ReduceOp::Sum };
            let started = Instant::now();
            let sum = group.start(sum, Deadline::after(self.limit))?;
            self.pending.push(Bucket { started, is_in_background, sum });
        }
        group.progress()?;
        self.traffic.bytes += bytes_sent(&group, range.len());
        if !is_in_background {
            self.traffic.busy += begin.elapsed();
        }
        Ok(())
    }

    /// Waits until everything is summed.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn wait(&mut self) -> Result<(), CommError> {
        let begin = Instant::now();
        let (mut counted_until, mut is_own_work) = (None, false);
        for Bucket { started, is_in_background, sum } in self.pending.drain(..) {
            let (_, done) = sum.wait_with_time(Deadline::after(self.limit))?;
            if is_in_background {
                let from = counted_until.map_or(started, |until| started.max(until));
                self.traffic.busy += done.saturating_duration_since(from);
                counted_until = Some(from.max(done));
            }
            is_own_work |= !is_in_background;
        }
        if is_own_work {
            self.traffic.busy += begin.elapsed();
        }
        self.traffic.exposed += begin.elapsed();
        Ok(())
    }

    fn group(&self, summing: Summing) -> Option<Group> {
        self.groups.iter().find(|(kind, _)| *kind == summing).map(|(_, group)| group.clone())
    }
}

/// Bytes that a rank sends when `len` are summed over a group.
fn bytes_sent(group: &Group, len: usize) -> u64 {
    let ranks = group.size() as u64;
    2 * (ranks - 1) * len as u64 / ranks
}
