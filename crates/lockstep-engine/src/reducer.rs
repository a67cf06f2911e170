//! Gradients summed over the ranks that have summands of them, while the backward goes on.
//!
//! A unit whose gradients are complete is lent to the group in buckets. Where they lie in the shared arena they are summed
//! in place, over the group's fixed tree: all replicas end with the same bits. Where ranks share out the model's state
//! ([`Shards`]) each gets the sum of what it owns, and adds to it that of the other replicas.

use std::collections::VecDeque;
use std::ops::{Add, Range};
use std::time::{Duration, Instant};

use lockstep_comm::{Collective, CommError, Deadline, Group, Lent, Pending, ReduceOp};
use lockstep_plan::{DType, ParameterRecord, Summing, ZeroStage};
use lockstep_tensor::{Buffer, Workers};

use crate::{Groups, shards::Shards};

/// Buckets end where blocks of the gradient norm do.
const BUCKET_GRAIN_BYTES: usize = 4096;

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
    pending: VecDeque<Bucket>,
    /// Until when sums in the background are in the traffic.
    counted_until: Option<Instant>,
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

impl Add for Traffic {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            bytes: self.bytes + other.bytes,
            busy: self.busy + other.busy,
            exposed: self.exposed + other.exposed,
        }
    }
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
        let (shards, pending, traffic) = (shards.groups().to_vec(), VecDeque::new(), Traffic::default());
        let counted_until = None;
        let reducer = Self { groups, shards, replicas, bucket_bytes, limit, pending, counted_until, traffic };
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
            pending: VecDeque::new(),
            counted_until: None,
            traffic: Traffic::default(),
        }
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
        let Some(group) = group_of(&self.groups, summing) else { return Ok(()) };
        let begin = Instant::now();
        let bytes = bytes_sent(&group, marks.len());
        group.all_reduce(marks, ReduceOp::Max, Deadline::after(self.limit))?;
        self.traffic.bytes += bytes;
        self.traffic.busy += begin.elapsed();
        self.traffic.exposed += begin.elapsed();
        Ok(())
    }

    /// Begins to sum f32 gradients that are complete, over all that have summands: the bytes `range` of `gradients`.
    ///
    /// # Errors
    /// [`CommError`].
    #[track_caller]
    pub(crate) fn sum(
        &mut self,
        gradients: &mut Buffer,
        range: Range<usize>,
        summing: Summing,
    ) -> Result<(), CommError> {
        let Some(group) = group_of(&self.groups, summing) else { return Ok(()) };
        self.all_reduce(&group, gradients, range)
    }

    /// Begins to sum f32 gradients of one stretch that are complete, so that each of those that share it out gets what it owns: the
    /// bytes `range` of `gradients`. Where nobody else owns a part, and so [`Reducer::sum_owned`] has nothing left to do, they are
    /// summed over all that have summands.
    ///
    /// # Errors
    /// [`CommError`].
    #[track_caller]
    pub(crate) fn sum_stretch(
        &mut self,
        gradients: &mut Buffer,
        range: Range<usize>,
        summing: Summing,
    ) -> Result<(), CommError> {
        let Some(group) = group_of(&self.shards, summing) else {
            return self.sum(gradients, range, summing);
        };
        let ranks = group.size() as u64;
        self.traffic.bytes += (ranks - 1) * range.len() as u64 / ranks;
        let (op, counts) = (ReduceOp::Sum, None);
        self.start(&group, |data| Collective::ReduceScatterInPlace { data, op, counts }, (gradients, range))
    }

    /// Begins to exchange the records of a stretch, `len` bytes, with those that share it out.
    ///
    /// # Errors
    /// [`CommError`].
    #[track_caller]
    pub(crate) fn exchange_stretch(
        &mut self,
        collective: Collective<Lent, Lent>,
        len: usize,
        summing: Summing,
    ) -> Result<(), CommError> {
        let Some(group) = group_of(&self.shards, summing) else { return Ok(()) };
        let ranks = group.size() as u64;
        self.traffic.bytes += (ranks - 1) * len as u64 / ranks;
        self.begin(&group, collective)
    }

    /// How many replicas there are, where ranks share anything out, and of which this rank is.
    pub(crate) fn place_among_replicas(&self) -> Option<(usize, usize)> {
        let group = self.replicas.as_ref()?;
        Some((group.size(), group.rank()))
    }

    /// Exchanges records of what this rank owns, `len` bytes, with those that own the same of other replicas, and waits for theirs.
    ///
    /// # Errors
    /// [`CommError`].
    #[track_caller]
    pub(crate) fn exchange_owned(
        &mut self,
        collective: Collective<Lent, Lent>,
        len: usize,
    ) -> Result<(), CommError> {
        let Some(group) = self.replicas.clone() else { return Ok(()) };
        let ranks = group.size() as u64;
        self.traffic.bytes += (ranks - 1) * len as u64 / ranks;
        self.begin(&group, collective)?;
        self.wait_but(0)
    }

    /// Begins to add to what this rank owns of a stretch, of which all summands of its own replica have come, those of the others.
    ///
    /// # Errors
    /// [`CommError`].
    #[track_caller]
    pub(crate) fn sum_owned(
        &mut self,
        gradients: &mut Buffer,
        range: Range<usize>,
        summing: Summing,
    ) -> Result<(), CommError> {
        let is_shared_out = group_of(&self.shards, summing).is_some();
        let Some(group) = self.replicas.clone().filter(|_| is_shared_out) else { return Ok(()) };
        self.all_reduce(&group, gradients, range)
    }

    #[track_caller]
    fn all_reduce(
        &mut self,
        group: &Group,
        gradients: &mut Buffer,
        range: Range<usize>,
    ) -> Result<(), CommError> {
        self.traffic.bytes += bytes_sent(group, range.len());
        for start in range.clone().step_by(self.bucket_bytes) {
            let bucket = start..range.end.min(start + self.bucket_bytes);
            let sum = |data| Collective::AllReduce { data, op: ReduceOp::Sum };
            self.start(group, sum, (&mut *gradients, bucket))?;
        }
        Ok(())
    }

    #[track_caller]
    fn start(
        &mut self,
        group: &Group,
        collective: impl FnOnce(Lent) -> Collective<Lent, Lent>,
        (gradients, range): (&mut Buffer, Range<usize>),
    ) -> Result<(), CommError> {
        let data = Lent::new(gradients.lend(range), DType::F32);
        self.begin(group, collective(data))
    }

    #[track_caller]
    fn begin(&mut self, group: &Group, collective: Collective<Lent, Lent>) -> Result<(), CommError> {
        let started = Instant::now();
        let is_in_background = group.is_in_background();
        let sum = group.start(collective, Deadline::after(self.limit))?;
        self.pending.push_back(Bucket { started, is_in_background, sum });
        group.progress()?;
        if !is_in_background {
            self.traffic.busy += started.elapsed();
        }
        Ok(())
    }

    /// How many sums are under way.
    pub(crate) fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Waits until everything is summed but the last `rest` sums.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn wait_but(&mut self, rest: usize) -> Result<(), CommError> {
        let begin = Instant::now();
        let mut is_own_work = false;
        let done = self.pending.len().saturating_sub(rest);
        for Bucket { started, is_in_background, sum } in self.pending.drain(..done) {
            let (_, done) = sum.wait_with_time(Deadline::after(self.limit))?;
            if is_in_background {
                let from = self.counted_until.map_or(started, |until: Instant| started.max(until));
                self.traffic.busy += done.saturating_duration_since(from);
                self.counted_until = Some(from.max(done));
            }
            is_own_work |= !is_in_background;
        }
        if is_own_work {
            self.traffic.busy += begin.elapsed();
        }
        self.traffic.exposed += begin.elapsed();
        Ok(())
    }
}

/// The group of those that sum so, if there is one.
fn group_of(groups: &[(Summing, Group)], summing: Summing) -> Option<Group> {
    groups.iter().find(|(kind, _)| *kind == summing).map(|(_, group)| group.clone())
}

/// Bytes that a rank sends when `len` are summed over a group.
fn bytes_sent(group: &Group, len: usize) -> u64 {
    let ranks = group.size() as u64;
    2 * (ranks - 1) * len as u64 / ranks
}
