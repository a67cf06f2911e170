//! Gradients summed over the ranks that have summands of them, while the backward goes on.
//!
//! A unit whose gradients are complete is lent to the group in buckets. Where they lie in the shared arena they are summed
//! in place, over the group's fixed tree: all replicas end with the same bits. Where ranks share out the model's state
//! ([`Shards`]) each gets the sum of what it owns, and adds to it that of the other replicas.

use std::ops::Range;
use std::time::{Duration, Instant};

use lockstep_comm::{Collective, CommError, Deadline, Group, Lent, ReduceOp};
use lockstep_plan::{DType, ParameterRecord, Summing, ZeroStage};
use lockstep_tensor::{Buffer, Workers};

use crate::transfers::{Job, Traffic, Transfers, bytes_sent};
use crate::{EngineError, Groups, shards::Shards};

/// Buckets end where blocks of the gradient norm do.
const BUCKET_GRAIN_BYTES: usize = 4096;
/// Buckets in flight for which there is room beforehand.
const BUCKETS: usize = 256;

/// Sums gradients over the ranks that have summands of them.
#[derive(Debug)]
pub(crate) struct Reducer {
    /// See [`Groups::of_gradients`].
    groups: Vec<(Summing, Group)>,
    /// Those that share out what is summed so, where that are several.
    shards: Vec<(Summing, Group)>,
    /// Those that own the same of other replicas, where ranks share out anything.
    replicas: Option<Group>,
    bucket_bytes: usize,
    limit: Duration,
    /// Sums in flight, by round.
    transfers: Transfers<usize>,
    round: usize,
}

impl Reducer {
    /// Sums the gradients of `records` over `groups`, of which `shards` says who owns what; none where nothing is to be summed. The
    /// engine's threads help.
    ///
    /// # Errors
    /// [`CommError`].
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
        let is_shared_out = shards.stage() > ZeroStage::Nothing;
        let replicas = if is_shared_out { groups.of_replicas()? } else { None };
        let groups = groups.of_gradients(records)?;
        let bucket_bytes = bucket_bytes.next_multiple_of(BUCKET_GRAIN_BYTES).max(BUCKET_GRAIN_BYTES);
        let (shards, transfers) = (shards.groups().to_vec(), Transfers::new(limit, BUCKETS));
        let reducer = Self { groups, shards, replicas, bucket_bytes, limit, transfers, round: 0 };
        Ok((!reducer.groups.is_empty()).then_some(reducer))
    }

    /// Sums nothing: nobody else has summands.
    pub(crate) fn alone() -> Self {
        Self {
            groups: Vec::new(),
            shards: Vec::new(),
            replicas: None,
            bucket_bytes: BUCKET_GRAIN_BYTES,
            limit: Duration::MAX,
            transfers: Transfers::new(Duration::MAX, 0),
            round: 0,
        }
    }

    /// The cost of sums since this was last asked.
    pub(crate) fn take_traffic(&mut self) -> Traffic {
        self.transfers.take_traffic()
    }

    /// Adds to the marks, which are not 0, those of all ranks that have summands of what they mark.
    ///
    /// # Errors
    /// [`EngineError::Comm`].
    pub(crate) fn mark_all(&mut self, marks: &mut [u8], summing: Summing) -> Result<(), EngineError> {
        let Some(group) = group_of(&self.groups, summing) else { return Ok(()) };
        let begin = Instant::now();
        let bytes = bytes_sent(&group, 2, marks.len());
        group.all_reduce(marks, ReduceOp::Max, Deadline::after(self.limit))?;
        self.transfers.book(bytes, begin.elapsed());
        Ok(())
    }

    /// Begins to sum complete f32 gradients, bytes of a buffer, over all that have summands.
    ///
    /// # Errors
    /// [`EngineError::Comm`].
    #[track_caller]
    pub(crate) fn sum(
        &mut self,
        memory: (&mut Buffer, Range<usize>),
        summing: Summing,
    ) -> Result<(), EngineError> {
        let Some(group) = group_of(&self.groups, summing) else { return Ok(()) };
        self.all_reduce(&group, memory)
    }

    /// Begins to sum complete f32 gradients of one stretch, bytes of a buffer, so that each rank of its shard group gets its own elements.
    /// Without a shard group, where [`Reducer::sum_owned`] has nothing left to do, they are summed over all that have summands.
    ///
    /// # Errors
    /// [`EngineError::Comm`].
    #[track_caller]
    pub(crate) fn sum_stretch(
        &mut self,
        memory: (&mut Buffer, Range<usize>),
        summing: Summing,
    ) -> Result<(), EngineError> {
        let Some(group) = group_of(&self.shards, summing) else {
            return self.sum(memory, summing);
        };
        let (gradients, range) = memory;
        let (op, counts, bytes) = (ReduceOp::Sum, None, range.len());
        let data = Lent::new(gradients.lend(range), DType::F32);
        self.begin(&group, Collective::ReduceScatterInPlace { data, op, counts }, bytes)
    }

    /// Begins to exchange the records of a stretch, `len` bytes, with those that share it out.
    ///
    /// # Errors
    /// [`EngineError::Comm`].
    #[track_caller]
    pub(crate) fn exchange_stretch(
        &mut self,
        collective: Collective<Lent, Lent>,
        len: usize,
        summing: Summing,
    ) -> Result<(), EngineError> {
        let Some(group) = group_of(&self.shards, summing) else { return Ok(()) };
        self.begin(&group, collective, len)
    }

    /// How many replicas there are, where ranks share anything out, and of which this rank is.
    pub(crate) fn place_among_replicas(&self) -> Option<(usize, usize)> {
        let group = self.replicas.as_ref()?;
        Some((group.size(), group.rank()))
    }

    /// Exchanges records of what this rank owns, `len` bytes, with those that own the same of other replicas, and waits for theirs.
    ///
    /// # Errors
    /// [`EngineError::Comm`].
    #[track_caller]
    pub(crate) fn exchange_owned(
        &mut self,
        collective: Collective<Lent, Lent>,
        len: usize,
    ) -> Result<(), EngineError> {
        let Some(group) = self.replicas.clone() else { return Ok(()) };
        self.begin(&group, collective, len)?;
        self.finish()
    }

    /// Begins to sum the own elements of a stretch, bytes of a buffer, over the replicas, when those of its own replica are summed.
    ///
    /// # Errors
    /// [`EngineError::Comm`].
    #[track_caller]
    pub(crate) fn sum_owned(
        &mut self,
        memory: (&mut Buffer, Range<usize>),
        summing: Summing,
    ) -> Result<(), EngineError> {
        let is_shared_out = group_of(&self.shards, summing).is_some();
        let Some(group) = self.replicas.clone().filter(|_| is_shared_out) else { return Ok(()) };
        self.all_reduce(&group, memory)
    }

    #[track_caller]
    fn all_reduce(
        &mut self,
        group: &Group,
        (gradients, range): (&mut Buffer, Range<usize>),
    ) -> Result<(), EngineError> {
        // Booked once: a part of each bucket's bytes may be rounded off.
        let mut bytes = range.len();
        for start in range.clone().step_by(self.bucket_bytes) {
            let bucket = start..range.end.min(start + self.bucket_bytes);
            let data = Lent::new(gradients.lend(bucket), DType::F32);
            let sum = Collective::AllReduce { data, op: ReduceOp::Sum };
            self.begin(group, sum, std::mem::take(&mut bytes))?;
        }
        Ok(())
    }

    #[track_caller]
    fn begin(
        &mut self,
        group: &Group,
        collective: Collective<Lent, Lent>,
        bytes: usize,
    ) -> Result<(), EngineError> {
        self.transfers.begin(self.round, Job::Collective { group, collective, bytes })
    }

    /// Begins a round of sums.
    pub(crate) fn begin_round(&mut self) {
        self.round += 1;
    }

    /// Waits for the sums of earlier rounds.
    ///
    /// # Errors
    /// [`EngineError::Comm`].
    pub(crate) fn finish_earlier_rounds(&mut self) -> Result<(), EngineError> {
        self.transfers.finish(|round| *round != self.round)
    }

    /// Waits for all sums.
    ///
    /// # Errors
    /// [`EngineError::Comm`].
    pub(crate) fn finish(&mut self) -> Result<(), EngineError> {
        self.transfers.finish(|_| true)
    }
}

/// The group of those that sum so, if there is one.
fn group_of(groups: &[(Summing, Group)], summing: Summing) -> Option<Group> {
    groups.iter().find(|(kind, _)| *kind == summing).map(|(_, group)| group.clone())
}
