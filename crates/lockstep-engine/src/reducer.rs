//! The gradient reducer: reduces gradients over ranks, overlapped with the backward.
//!
//! Complete gradients of a unit are lent to the process group in buckets. In a shared arena they are reduced in place,
//! over the group's fixed tree, so that all replicas end with the same bits. With sharded model state ([`Shards`]) a
//! reduce-scatter gives each rank the sum of its own elements; an all-reduce over the data-parallel replicas follows.

use std::ops::Range;
use std::time::{Duration, Instant};

use lockstep_comm::{Collective, CommError, Deadline, Group, LentBuffer, ReduceOp};
use lockstep_plan::{DType, ParameterRecord, ReductionGroup, ZeroStage};
use lockstep_tensor::{Buffer, Workers};

use crate::transfers::{Job, Traffic, Transfers, bytes_sent};
use crate::{EngineError, Groups, groups::ReductionGroups, shards::Shards};

/// Bucket sizes are multiples of this, so that buckets end at block boundaries of the gradient norm.
const BUCKET_GRAIN_BYTES: usize = 4096;
/// Number of buckets in flight for which memory is reserved.
const BUCKETS: usize = 256;

/// Reduces gradients over the ranks that contribute to them.
#[derive(Debug)]
pub(crate) struct Reducer {
    /// See [`Groups::reduction_groups`].
    groups: ReductionGroups,
    /// See [`Groups::shard_groups`].
    shards: ReductionGroups,
    /// Ranks that own the same elements in other data-parallel replicas; `None` unless model state is sharded and there
    /// are several replicas.
    replicas: Option<Group>,
    bucket_bytes: usize,
    limit: Duration,
    /// Reductions in flight, tagged with their round.
    transfers: Transfers<usize>,
    round: usize,
}

impl Reducer {
    /// Returns a reducer of the gradients of `records` over `groups`, sharded by `shards`; `None` if no gradient needs
    /// a reduction. The engine's worker threads take part in reductions.
    ///
    /// # Errors
    /// If a rank is lost, or does not answer in time.
    pub(crate) fn new(
        groups: &Groups,
        records: &[ParameterRecord],
        shards: &Shards,
        workers: Workers,
    ) -> Result<Option<Self>, CommError> {
        let (Some(plan), Some(limit)) = (groups.plan(), groups.limit()) else { return Ok(None) };
        let bucket_bytes = plan.plan().bucket_bytes();
        if let Some(world) = groups.world() {
            world.set_workers(workers);
        }
        let is_sharded = shards.stage > ZeroStage::Nothing;
        let replicas = if is_sharded { groups.replica_group()? } else { None };
        let groups = groups.reduction_groups(records)?;
        let bucket_bytes = bucket_bytes.next_multiple_of(BUCKET_GRAIN_BYTES).max(BUCKET_GRAIN_BYTES);
        let (shards, transfers) = (shards.groups.clone(), Transfers::new(limit, BUCKETS));
        let reducer = Self { groups, shards, replicas, bucket_bytes, limit, transfers, round: 0 };
        Ok((!reducer.groups.is_empty()).then_some(reducer))
    }

    /// Returns a reducer for a rank whose gradients need no reduction.
    pub(crate) fn alone() -> Self {
        Self {
            groups: ReductionGroups::default(),
            shards: ReductionGroups::default(),
            replicas: None,
            bucket_bytes: BUCKET_GRAIN_BYTES,
            limit: Duration::MAX,
            transfers: Transfers::new(Duration::MAX, 0),
            round: 0,
        }
    }

    /// Returns the traffic of gradient reductions since the last call.
    pub(crate) fn take_traffic(&mut self) -> Traffic {
        self.transfers.take_traffic()
    }

    /// All-reduces marks (0 or 1, one for each row) with the maximum over the ranks that reduce the same gradient.
    ///
    /// # Errors
    /// If another rank is lost or does not answer in time.
    pub(crate) fn mark_all(&mut self, marks: &mut [u8], summing: ReductionGroup) -> Result<(), EngineError> {
        let Some(group) = self.groups.get(summing).cloned() else { return Ok(()) };
        let begin = Instant::now();
        let bytes = bytes_sent(&group, 2, marks.len());
        group.all_reduce(marks, ReduceOp::Max, Deadline::after(self.limit))?;
        self.transfers.book(bytes, begin.elapsed());
        Ok(())
    }

    /// Begins to all-reduce complete f32 gradients, a byte range of a buffer, over all ranks that contribute to them.
    ///
    /// # Errors
    /// If another rank is lost or does not answer in time.
    #[track_caller]
    pub(crate) fn sum(
        &mut self,
        memory: (&mut Buffer, Range<usize>),
        summing: ReductionGroup,
    ) -> Result<(), EngineError> {
        let Some(group) = self.groups.get(summing).cloned() else { return Ok(()) };
        self.all_reduce(&group, memory)
    }

    /// Begins to reduce-scatter the complete f32 gradients of one flat parameter, a byte range of a buffer, over its
    /// shard group. Without a shard group they are all-reduced over all ranks that contribute, and
    /// [`Reducer::sum_owned`] has nothing to do.
    ///
    /// # Errors
    /// If another rank is lost or does not answer in time.
    #[track_caller]
    pub(crate) fn reduce_scatter(
        &mut self,
        memory: (&mut Buffer, Range<usize>),
        summing: ReductionGroup,
    ) -> Result<(), EngineError> {
        let Some(group) = self.shards.get(summing).cloned() else {
            return self.sum(memory, summing);
        };
        let (gradients, range) = memory;
        let (op, counts, bytes) = (ReduceOp::Sum, None, range.len());
        let data = LentBuffer::new(gradients.lend(range), DType::F32);
        self.begin(&group, Collective::ReduceScatterInPlace { data, op, counts }, bytes)
    }

    /// Begins a collective over the shard group with the quantized records of a flat parameter, `len` bytes.
    ///
    /// # Errors
    /// If another rank is lost or does not answer in time.
    #[track_caller]
    pub(crate) fn run_over_shards(
        &mut self,
        collective: Collective<LentBuffer, LentBuffer>,
        len: usize,
        summing: ReductionGroup,
    ) -> Result<(), EngineError> {
        let Some(group) = self.shards.get(summing).cloned() else { return Ok(()) };
        self.begin(&group, collective, len)
    }

    /// Returns the number of data-parallel replicas and this rank's index among them; `None` unless model state is
    /// sharded and there are several.
    pub(crate) fn place_among_replicas(&self) -> Option<(usize, usize)> {
        let group = self.replicas.as_ref()?;
        Some((group.size(), group.rank()))
    }

    /// Runs a collective over the data-parallel replicas with the quantized records of this rank's own elements, `len`
    /// bytes, and waits for it.
    ///
    /// # Errors
    /// If another rank is lost or does not answer in time.
    #[track_caller]
    pub(crate) fn run_over_replicas(
        &mut self,
        collective: Collective<LentBuffer, LentBuffer>,
        len: usize,
    ) -> Result<(), EngineError> {
        let Some(group) = self.replicas.clone() else { return Ok(()) };
        self.begin(&group, collective, len)?;
        self.finish()
    }

    /// Begins to all-reduce this rank's own elements of a flat parameter, a byte range of a buffer, over the
    /// data-parallel replicas. Call it after the reduce-scatter within the replica.
    ///
    /// # Errors
    /// If another rank is lost or does not answer in time.
    #[track_caller]
    pub(crate) fn sum_owned(
        &mut self,
        memory: (&mut Buffer, Range<usize>),
        summing: ReductionGroup,
    ) -> Result<(), EngineError> {
        let is_sharded = self.shards.get(summing).is_some();
        let Some(group) = self.replicas.clone().filter(|_| is_sharded) else { return Ok(()) };
        self.all_reduce(&group, memory)
    }

    #[track_caller]
    fn all_reduce(
        &mut self,
        group: &Group,
        (gradients, range): (&mut Buffer, Range<usize>),
    ) -> Result<(), EngineError> {
        // Traffic is booked once for all buckets, because booking each could lose a fraction of its bytes to rounding.
        let mut bytes = range.len();
        for start in range.clone().step_by(self.bucket_bytes) {
            let bucket = start..range.end.min(start + self.bucket_bytes);
            let data = LentBuffer::new(gradients.lend(bucket), DType::F32);
            let sum = Collective::AllReduce { data, op: ReduceOp::Sum };
            self.begin(group, sum, std::mem::take(&mut bytes))?;
        }
        Ok(())
    }

    #[track_caller]
    fn begin(
        &mut self,
        group: &Group,
        collective: Collective<LentBuffer, LentBuffer>,
        bytes: usize,
    ) -> Result<(), EngineError> {
        self.transfers.begin(self.round, Job::Collective { group, collective, bytes })
    }

    /// Begins a round of reductions.
    pub(crate) fn begin_round(&mut self) {
        self.round += 1;
    }

    /// Waits for the reductions of earlier rounds.
    ///
    /// # Errors
    /// If another rank is lost or does not answer in time.
    pub(crate) fn finish_earlier_rounds(&mut self) -> Result<(), EngineError> {
        self.transfers.finish(|round| *round != self.round)
    }

    /// Waits for all reductions.
    ///
    /// # Errors
    /// If another rank is lost or does not answer in time.
    pub(crate) fn finish(&mut self) -> Result<(), EngineError> {
        self.transfers.finish(|_| true)
    }
}
