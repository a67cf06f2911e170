//! What a rank of a run knows of the others, and what they agree on: whether to go on, how many tokens count, the loss, and
//! that all hold the same weights. A run on one rank has nobody to ask.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lockstep_comm::{
    Call, Collective, CommError, Deadline, Group, Recorded, ReduceOp, Source, Target, now_us,
};
use lockstep_engine::{Engine, Reducer, StateKind};
use lockstep_plan::MemoryCategory;
use lockstep_tensor::Arena;

use crate::config::RunConfig;
use crate::flight::{Dump, Ending};
use crate::metrics::MemoryUse;
use crate::progress::{Progress, Steps};
use crate::{Error, human};

/// Bytes of a digest of the weights.
const DIGEST_BYTES: usize = 32;

/// The ranks of a run: replicas of one model, each with its share of every global batch.
#[derive(Debug, Clone)]
pub struct Ranks {
    group: Option<Group>,
    limit: Duration,
}

/// An operation between ranks, as one of them saw it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Called {
    pub(crate) call: Call,
    pub(crate) sequence: u32,
    pub(crate) start: Duration,
    /// When all ranks had come.
    pub(crate) met: Duration,
    pub(crate) end: Duration,
}

impl Ranks {
    /// One rank.
    pub fn alone() -> Self {
        Self { group: None, limit: Duration::ZERO }
    }

    /// The ranks of `group`, none of which waits longer than `config` says.
    ///
    /// # Errors
    /// A group of another size than the configuration's.
    pub fn of(group: Group, config: &RunConfig) -> Result<Self, Error> {
        let (ranks, replicas) = (group.size(), config.parallel.data_parallel_replicate);
        if ranks != replicas {
            let key = "parallel.data_parallel_replicate";
            let what = format!("is {replicas}, and {} were started", human::plural(ranks, "rank"));
            let problem = config.problem(
                key,
                what,
                format!("{ranks}, or another number of ranks (--nproc-per-node, srun -n, mpirun -n)"),
            );
            return Err(Error::Configuration(problem.into()));
        }
        let group = group.with_algorithm(config.parallel.all_reduce.into());
        Ok(Self::in_group(group, Duration::from_secs_f64(config.parallel.timeout_s)))
    }

    /// The ranks of `group`, none of which waits longer than `limit`.
    pub fn in_group(group: Group, limit: Duration) -> Self {
        Self { group: Some(group), limit }
    }

    /// Ends all ranks with this exit code, where one that fails leaves the others no way to end by themselves (MPI).
    pub fn abort(&self, code: u8) {
        if let Some(group) = &self.group {
            group.abort(code.into());
        }
    }

    /// The own rank.
    pub fn rank(&self) -> usize {
        self.group.as_ref().map_or(0, Group::rank)
    }

    /// How many there are.
    pub fn size(&self) -> usize {
        self.group.as_ref().map_or(1, Group::size)
    }

    /// Whether this is the rank that writes and speaks.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// An arena from which the others can reach the gradients.
    pub(crate) fn arena(&self) -> Arena {
        self.group.as_ref().map_or_else(Arena::new, |group| group.arena(&[MemoryCategory::Gradients]))
    }

    /// What sums gradients over the ranks, with the help of the engine's threads; none for one rank.
    pub(crate) fn reducer(&self, engine: &Engine, bucket_bytes: usize) -> Option<Reducer> {
        let group = self.group.as_ref()?;
        group.set_workers(engine.queue().workers());
        Some(Reducer::new(group.clone(), bucket_bytes, self.limit))
    }

    /// What shows the run: the first rank's is seen.
    pub(crate) fn progress(&self, steps: Steps, show: impl FnOnce(Steps) -> Progress) -> Progress {
        if self.is_first() { show(steps) } else { Progress::as_lines(steps, Box::new(io::sink())) }
    }

    /// Does `work` on the first rank, and then on the others, which find what it has left.
    pub(crate) fn first_then_others<T>(&self, work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        if self.is_first() {
            let done = work()?;
            self.barrier()?;
            Ok(done)
        } else {
            self.barrier()?;
            work()
        }
    }

    /// Waits until all ranks have come.
    pub(crate) fn barrier(&self) -> Result<(), CommError> {
        self.group.as_ref().map_or(Ok(()), |group| group.barrier(self.deadline()))
    }

    /// Waits until the first rank has saved, however long that takes: some launchers end all ranks when one ends.
    pub(crate) fn leave_together(&self) -> Result<(), CommError> {
        self.group.as_ref().map_or(Ok(()), |group| group.barrier(Deadline::after(Duration::MAX)))
    }

    /// Whether it is so on any rank.
    pub(crate) fn any(&self, here: bool) -> Result<bool, CommError> {
        let mut answer = [u8::from(here)];
        if let Some(group) = &self.group {
            group.all_reduce(&mut answer[..], ReduceOp::Max, self.deadline())?;
        }
        Ok(answer[0] != 0)
    }

    /// Sums of what each rank has, added in the order of the ranks.
    pub(crate) fn sum(&self, loss: f64, tokens: u64) -> Result<(f64, u64), CommError> {
        let Some(group) = &self.group else { return Ok((loss, tokens)) };
        let shares = self.exchange(group, [loss.to_bits(), tokens])?;
        let loss = shares.iter().map(|[loss, _]| f64::from_bits(*loss)).sum();
        Ok((loss, shares.iter().map(|[_, tokens]| tokens).sum()))
    }

    /// [`Ranks::sum`], and with it what each of several ranks uses of its memory, in their order.
    pub(crate) fn sum_and_memory(
        &self,
        loss: f64,
        tokens: u64,
        arena: &Arena,
    ) -> Result<(f64, u64, Vec<MemoryUse>), CommError> {
        let Some(group) = &self.group else { return Ok((loss, tokens, Vec::new())) };
        let mut own = [0; 2 + MemoryUse::WORDS];
        own[..2].copy_from_slice(&[loss.to_bits(), tokens]);
        own[2..].copy_from_slice(&MemoryUse::of(arena).to_words());
        let shares = self.exchange(group, own)?;
        let loss = shares.iter().map(|share| f64::from_bits(share[0])).sum();
        let memory = shares.iter().map(|share| MemoryUse::from_words(&share[2..])).collect();
        Ok((loss, shares.iter().map(|share| share[1]).sum(), memory))
    }

    /// The number of every rank, in the order of the ranks.
    pub(crate) fn all_numbers(&self, own: u64) -> Result<Vec<u64>, CommError> {
        let Some(group) = &self.group else { return Ok(vec![own]) };
        Ok(self.exchange(group, [own])?.into_iter().map(|[number]| number).collect())
    }

    /// The numbers of every rank, in the order of the ranks.
    fn exchange<const N: usize>(&self, group: &Group, own: [u64; N]) -> Result<Vec<[u64; N]>, CommError> {
        let mut all = vec![0_i64; N * group.size()];
        group.all_gather(&own.map(u64::cast_signed)[..], &mut all[..], self.deadline())?;
        let (all, _) = all.as_chunks::<N>();
        Ok(all.iter().map(|numbers| numbers.map(i64::cast_unsigned)).collect())
    }

    /// Everybody's `bytes` for the first rank, in the order of the ranks; nothing for the others.
    pub(crate) fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let Some(group) = &self.group else { return Ok(vec![bytes.to_vec()]) };
        let lengths = self.all_numbers(bytes.len() as u64)?;
        let counts: Vec<usize> = lengths.iter().map(|length| *length as usize).collect();
        let mut all = vec![0_u8; if self.is_first() { counts.iter().sum() } else { 0 }];
        let output = self.is_first().then(|| Target::from(&mut all[..]));
        let (input, counts) = (Source::from(bytes), Some(counts));
        group.run(&mut Collective::Gather { input, output, root: 0, counts }, self.deadline())?;
        let mut rest = all.as_slice();
        let part = |length: u64| rest.split_off(..length as usize).map(<[u8]>::to_vec);
        Ok(lengths.into_iter().map_while(part).collect())
    }

    /// What this rank has called of the others, and been done with, since `begin`; when, counted from there.
    pub(crate) fn called_since(&self, begin: Instant) -> Vec<Called> {
        let Some(group) = &self.group else { return Vec::new() };
        let begin_us = now_us().saturating_sub(begin.elapsed().as_micros() as u64);
        let since = |us: u64| Duration::from_micros(us.saturating_sub(begin_us));
        let called = |recorded: Recorded| {
            let Recorded { call, sequence, posted_us, met_us, done_us, .. } = recorded;
            let end = since(done_us?);
            (posted_us >= begin_us).then(|| Called {
                call,
                sequence,
                start: since(posted_us),
                met: met_us.map_or(end, since),
                end,
            })
        };
        group.recorded(group.rank()).into_iter().filter_map(called).collect()
    }

    /// Writes what this rank called last to a file in `dir`, for ranks that no launcher of ours watches; returns where, or nothing
    /// for one rank.
    ///
    /// # Errors
    /// [`Error::Metrics`].
    pub fn write_records(&self, error: &CommError, dir: &Path) -> Result<Option<PathBuf>, Error> {
        let Some(group) = &self.group else { return Ok(None) };
        let own = (group.rank(), group.recorded(group.rank()));
        Dump::new(group.size(), Some(Ending::by(error)), [own]).write(dir).map(Some)
    }

    /// Checks that all ranks hold the same weights after `step` steps.
    ///
    /// # Errors
    /// [`Error::WeightsDiffer`], which names the odd one.
    pub(crate) fn check_weights(&self, engine: &mut Engine, step: u64) -> Result<(), Error> {
        let Some(group) = &self.group else { return Ok(()) };
        let mut hasher = blake3::Hasher::new();
        for tensor in engine.state_tensors() {
            if tensor.kind == StateKind::Parameter {
                hasher.update(tensor.bytes);
            }
        }
        let mut digests = vec![0_u8; DIGEST_BYTES * group.size()];
        group.all_gather(&hasher.finalize().as_bytes()[..], &mut digests[..], self.deadline())?;
        let (digests, _) = digests.as_chunks::<DIGEST_BYTES>();
        match odd_one(digests) {
            Some((rank, reference)) => Err(Error::WeightsDiffer { step, rank, reference }),
            None => Ok(()),
        }
    }

    fn deadline(&self) -> Deadline {
        Deadline::after(self.limit)
    }
}

/// The first that differs from what most have, and the first that has that.
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
