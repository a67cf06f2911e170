//! The ranks of a run as one of them sees them: its process groups, its place in the mesh, and the control-plane collectives.
//! These agree on whether to go on, token counts, the loss and equal weights. With one rank every operation is local.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lockstep_comm::{
    Call, Collective, CommError, Deadline, Group, Recorded, ReduceOp, Source, Target, now_us,
};
use lockstep_graph::{MAX_REPORTS, Totals};
use lockstep_plan::{Among, Axis, ExpertAxis, MemoryCategory, Mesh, ZeroStage};
use lockstep_tensor::{Arena, Device};

use crate::{Engine, EngineError, Groups};

/// Bytes of a digest of the weights (BLAKE3).
const DIGEST_BYTES: usize = 32;

/// The process groups of a run as seen by one rank. The run has data-parallel replicas, and each replica may span several ranks.
#[derive(Debug, Clone)]
pub struct Ranks {
    groups: Groups,
    /// Device that this rank computes on; `None` for the CPU.
    device: Option<Arc<dyn Device>>,
}

/// Time limit of a wait for other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimeLimit {
    /// The run's `parallel.timeout_s`.
    Limited,
    /// No limit, because other ranks may be waiting for a disk. A rank that has died is detected without a timeout.
    Unlimited,
}

/// A collective or point-to-point operation with its times, as recorded by one rank.
#[derive(Debug, Clone, Copy)]
pub struct TimedOperation {
    /// Operation and its parameters.
    pub call: Call,
    /// Sequence number of the operation in its group.
    pub sequence: u32,
    /// Time at which this rank called it.
    pub start: Duration,
    /// Time at which all ranks had arrived.
    pub met: Duration,
    /// Time at which it completed on this rank.
    pub end: Duration,
}

impl Ranks {
    /// Returns the ranks of a run with one rank.
    pub fn alone() -> Self {
        Self { groups: Groups::alone(), device: None }
    }

    /// Returns the ranks of `groups`.
    pub fn new(groups: Groups) -> Self {
        Self { groups, device: None }
    }

    /// Returns the ranks with `device` as the device on which this rank computes.
    #[must_use]
    pub fn on(self, device: Arc<dyn Device>) -> Self {
        Self { device: Some(device), ..self }
    }

    /// Returns the group of all ranks; `None` for one rank.
    pub fn group(&self) -> Option<&Group> {
        self.groups.world()
    }

    /// Returns the process groups of the mesh.
    pub fn groups(&self) -> &Groups {
        &self.groups
    }

    /// Returns the mesh of the ranks.
    pub fn mesh(&self) -> Mesh {
        self.groups.plan().map_or_else(Mesh::default, |plan| *plan.mesh())
    }

    /// Returns the index of the data-parallel replica to which this rank belongs.
    pub fn replica(&self) -> usize {
        let (view, rank) = (self.mesh().ranks(), self.rank());
        Axis::BATCH.iter().fold(0, |index, axis| index * view.degree(*axis) + view.coordinate(rank, *axis))
    }

    /// Returns the number of data-parallel replicas.
    pub fn replicas(&self) -> usize {
        self.mesh().batch_parts()
    }

    /// Returns this replica's part of `count` items in order: parts of consecutive items, whose sizes differ by one at most.
    pub fn replica_part(&self, count: usize) -> Range<usize> {
        let (replica, replicas) = (self.replica(), self.replicas());
        let start = |replica: usize| (count as u128 * replica as u128 / replicas as u128) as usize;
        start(replica)..start(replica + 1)
    }

    /// Returns true on the first rank of each data-parallel replica.
    pub fn is_first_of_replica(&self) -> bool {
        self.is_first_along(&[Axis::Pipeline, Axis::Context, Axis::Tensor], self.rank())
    }

    /// Returns true if each model replica spans several ranks.
    pub fn has_model_parallelism(&self) -> bool {
        let axes = self.mesh().replicated_axes(self.groups.zero_stage());
        let copies: usize = axes.iter().map(|axis| self.mesh().ranks().degree(*axis)).product();
        copies != self.size()
    }

    /// Returns true if this rank holds the first model replica, or a part of it. The other replicas are equal to it.
    pub fn is_in_first_replica(&self) -> bool {
        self.mesh().is_in_first_replica(self.rank(), self.groups.zero_stage())
    }

    /// Returns true if the coordinate of `rank` along each of `axes` is 0.
    fn is_first_along(&self, axes: &[Axis], rank: usize) -> bool {
        axes.iter().all(|axis| self.mesh().ranks().coordinate(rank, *axis) == 0)
    }

    /// Ends all ranks with exit code `code`, if the transport cannot end them otherwise (MPI).
    pub fn abort(&self, code: u8) {
        if let Some(group) = self.group() {
            group.abort(code.into());
        }
    }

    /// Returns the rank of this process; 0 without a group.
    pub fn rank(&self) -> usize {
        self.group().map_or(0, Group::rank)
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.group().map_or(1, Group::size)
    }

    /// Returns true on rank 0, which writes files and messages.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// Returns the arena of this rank. Its shared categories hold the gradients, the parameters of a sharded optimizer, and the
    /// buffers of collectives within a replica, so that other ranks can reach them.
    pub fn arena(&self) -> Arena {
        if let Some(device) = &self.device {
            return Arena::on(Arc::clone(device));
        }
        let mut shared = vec![MemoryCategory::Gradients];
        if self.replicas() != self.size() {
            let exchanged =
                [MemoryCategory::Activations, MemoryCategory::Workspace, MemoryCategory::Communication];
            shared.extend(exchanged);
        }
        if self.groups.zero_stage() > ZeroStage::Nothing {
            shared.extend([MemoryCategory::Parameters, MemoryCategory::Communication]);
        }
        self.group().map_or_else(Arena::new, |group| group.arena(&shared))
    }

    /// Runs `work` on the first rank and then on the others, which can use the files that the first has written.
    pub fn first_then_others<T, E: From<CommError>>(
        &self,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        if self.is_first() {
            let done = work()?;
            self.barrier()?;
            Ok(done)
        } else {
            self.barrier()?;
            work()
        }
    }

    /// Waits until all ranks have arrived, at most `parallel.timeout_s`.
    pub fn barrier(&self) -> Result<(), CommError> {
        self.group().map_or(Ok(()), |group| group.barrier(self.deadline()))
    }

    /// Waits until all ranks have saved, without a time limit.
    pub fn meet(&self) -> Result<(), CommError> {
        self.group().map_or(Ok(()), |group| group.barrier(self.deadline_of(TimeLimit::Unlimited)))
    }

    /// Returns true if `here` is true on any rank.
    #[track_caller]
    pub fn any(&self, here: bool) -> Result<bool, CommError> {
        self.any_in_time(here, TimeLimit::Limited)
    }

    /// As [`Ranks::any`], with the time limit `limit`.
    #[track_caller]
    pub fn any_in_time(&self, here: bool, limit: TimeLimit) -> Result<bool, CommError> {
        Ok(self.maximum(u8::from(here), limit)? != 0)
    }

    /// Returns the maximum of `own` over all ranks.
    #[track_caller]
    pub fn maximum(&self, own: u8, limit: TimeLimit) -> Result<u8, CommError> {
        let mut answer = [own];
        if let Some(group) = self.group() {
            group.all_reduce(&mut answer[..], ReduceOp::Max, self.deadline_of(limit))?;
        }
        Ok(answer[0])
    }

    /// Returns the totals of all replicas, added in rank order.
    #[track_caller]
    pub fn totals(&self, own: Totals) -> Result<Totals, CommError> {
        // A step of one rank allocates nothing.
        if self.size() == 1 {
            return Ok(own);
        }
        Ok(self.totals_of(&self.numbers(words_of(&own))?))
    }

    /// Returns the totals of the replicas from the numbers of each rank, which begin with [`words_of`] its own. Counts are
    /// those of the first rank of each replica. Sums are known to the ranks of the last pipeline stage and zero on others.
    pub fn totals_of<const N: usize>(&self, shares: &[[u64; N]]) -> Totals {
        let mut totals = Totals::default();
        for (report, sum) in totals.sums.iter_mut().enumerate() {
            *sum = self.counted(&[Axis::Tensor], shares).map(|share| f64::from_bits(share[report])).sum();
        }
        for (report, count) in totals.counts.iter_mut().enumerate() {
            *count = self.count_of(shares, MAX_REPORTS + report);
        }
        totals
    }

    /// Returns the sum over the replicas of number `index` of each rank, which all ranks of a replica have alike.
    pub fn count_of<const N: usize>(&self, shares: &[[u64; N]], index: usize) -> u64 {
        let axes = &[Axis::Pipeline, Axis::Context, Axis::Tensor];
        self.counted(axes, shares).map(|share| share[index]).sum()
    }

    /// Returns the numbers of the ranks that come first along each of `axes`.
    fn counted<'s, const N: usize>(
        &self,
        axes: &'static [Axis],
        shares: &'s [[u64; N]],
    ) -> impl Iterator<Item = &'s [u64; N]> {
        let shares = shares.iter().enumerate();
        shares.filter(move |(rank, _)| self.is_first_along(axes, *rank)).map(|(_, share)| share)
    }

    /// Returns the sum of `own` over all ranks.
    #[track_caller]
    pub fn sum_of_all(&self, own: u64) -> Result<u64, CommError> {
        Ok(self.all_numbers(own)?.into_iter().sum())
    }

    /// Returns the value of each rank, in rank order.
    #[track_caller]
    pub fn all_numbers(&self, own: u64) -> Result<Vec<u64>, CommError> {
        Ok(self.numbers([own])?.into_iter().map(|[number]| number).collect())
    }

    /// Returns the numbers of every rank, in the order of the ranks; on one rank its own.
    ///
    /// # Errors
    /// If a rank is lost or does not answer in time.
    #[track_caller]
    pub fn numbers<const N: usize>(&self, own: [u64; N]) -> Result<Vec<[u64; N]>, CommError> {
        self.numbers_in_time(own, TimeLimit::Limited)
    }

    #[track_caller]
    fn numbers_in_time<const N: usize>(
        &self,
        own: [u64; N],
        limit: TimeLimit,
    ) -> Result<Vec<[u64; N]>, CommError> {
        let Some(group) = self.group() else { return Ok(vec![own]) };
        let mut all = vec![0_i64; N * group.size()];
        group.all_gather(&own.map(u64::cast_signed)[..], &mut all[..], self.deadline_of(limit))?;
        let (all, _) = all.as_chunks::<N>();
        Ok(all.iter().map(|numbers| numbers.map(i64::cast_unsigned)).collect())
    }

    /// Gathers the bytes of every rank on the first rank, in rank order; returns nothing on the others.
    #[track_caller]
    pub fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        self.gather_in_time(bytes, TimeLimit::Limited)
    }

    /// As [`Ranks::gather`], with the time limit `limit` until all ranks have arrived.
    #[track_caller]
    pub fn gather_in_time(&self, bytes: &[u8], limit: TimeLimit) -> Result<Vec<Vec<u8>>, CommError> {
        let Some(group) = self.group() else { return Ok(vec![bytes.to_vec()]) };
        let lengths = self.numbers_in_time([bytes.len() as u64], limit)?;
        let counts: Vec<usize> = lengths.iter().map(|[length]| *length as usize).collect();
        let mut all = vec![0_u8; if self.is_first() { counts.iter().sum() } else { 0 }];
        let output = self.is_first().then(|| Target::from(&mut all[..]));
        let (input, counts) = (Source::from(bytes), Some(counts));
        group.run(&mut Collective::Gather { input, output, root: 0, counts }, self.deadline())?;
        let mut rest = all.as_slice();
        let part = |[length]: [u64; 1]| rest.split_off(..length as usize).map(<[u8]>::to_vec);
        Ok(lengths.into_iter().map_while(part).collect())
    }

    /// Returns the operations that this rank has posted since `begin` and completed; their times count from `begin`.
    pub fn called_since(&self, begin: Instant) -> Vec<TimedOperation> {
        let Some(group) = self.group() else { return Vec::new() };
        let begin_us = now_us().saturating_sub(begin.elapsed().as_micros() as u64);
        let since = |us: u64| Duration::from_micros(us.saturating_sub(begin_us));
        let called = |recorded: Recorded| {
            let Recorded { call, sequence, posted_us, met_us, done_us, .. } = recorded;
            let end = since(done_us?);
            (posted_us >= begin_us).then(|| TimedOperation {
                call,
                sequence,
                start: since(posted_us),
                met: met_us.map_or(end, since),
                end,
            })
        };
        group.recorded(group.rank()).into_iter().filter_map(called).collect()
    }

    /// Checks that all model replicas have the same weights after `step` steps.
    ///
    /// # Errors
    /// If the weights of a rank differ from those of most ranks (the error names it), or a rank is lost or does not
    /// answer in time.
    pub fn check_weights(&self, engine: &mut Engine, step: u64) -> Result<(), EngineError> {
        let Some(group) = self.group() else { return Ok(()) };
        engine.wait_for_weights()?;
        // With sharded parameters (ZeRO-3) only other replicas hold what this rank holds.
        let (axes, of_experts) = match self.groups.zero_stage() {
            ZeroStage::Parameters => (&Axis::TOKENS[..1], &[ExpertAxis::Replicate][..]),
            _ => (&Axis::TOKENS[..], &[ExpertAxis::Replicate, ExpertAxis::ExpertShard][..]),
        };
        let experts = self.mesh().experts().groups(of_experts);
        for (is_of_experts, groups) in [(false, self.mesh().ranks().groups(axes)), (true, experts)] {
            let mut hasher = blake3::Hasher::new();
            for tensor in engine.replicated_weights() {
                if (tensor.record.share.among == Among::Experts) == is_of_experts {
                    hasher.update(tensor.in_memory().unwrap_or_default());
                }
            }
            let mut digests = vec![0_u8; DIGEST_BYTES * group.size()];
            group.all_gather(&hasher.finalize().as_bytes()[..], &mut digests[..], self.deadline())?;
            let (digests, _) = digests.as_chunks::<DIGEST_BYTES>();
            for ranks in groups {
                let digests: Vec<_> = ranks.iter().map(|rank| digests[*rank]).collect();
                if let Some((rank, reference)) = odd_one(&digests) {
                    let (rank, reference) = (ranks[rank], ranks[reference]);
                    return Err(EngineError::WeightsDiffer { step, rank, reference });
                }
            }
        }
        Ok(())
    }

    fn deadline(&self) -> Deadline {
        self.deadline_of(TimeLimit::Limited)
    }

    fn deadline_of(&self, limit: TimeLimit) -> Deadline {
        Deadline::after(match limit {
            TimeLimit::Limited => self.groups.limit().unwrap_or_default(),
            TimeLimit::Unlimited => Duration::MAX,
        })
    }
}

/// Number of words of [`Totals`] in a message between ranks.
pub const TOTALS_WORDS: usize = 2 * MAX_REPORTS;

/// Returns totals as words for other ranks: the bits of the sums, then the counts.
pub fn words_of(totals: &Totals) -> [u64; TOTALS_WORDS] {
    std::array::from_fn(|word| match word.checked_sub(MAX_REPORTS) {
        None => totals.sums[word].to_bits(),
        Some(report) => totals.counts[report],
    })
}

/// Returns the index of the first value that differs from the most frequent one, and the first index of that one.
fn odd_one<T: PartialEq>(values: &[T]) -> Option<(usize, usize)> {
    let votes = |value: &T| values.iter().filter(|other| *other == value).count();
    let most = values.iter().map(votes).max()?;
    let reference = values.iter().position(|value| votes(value) == most)?;
    let odd = values.iter().position(|value| *value != values[reference])?;
    Some((odd, reference))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_odd_one_is_the_one_that_most_differ_from() {
        assert_eq!(odd_one(&[1, 1, 1]), None);
        assert_eq!(odd_one(&[7]), None);
        assert_eq!(odd_one(&[1, 2, 1]), Some((1, 0)));
        assert_eq!(odd_one(&[3, 1, 1, 1]), Some((0, 1)));
        assert_eq!(odd_one(&[1, 2]), Some((1, 0)));
    }
}
