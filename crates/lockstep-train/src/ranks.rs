//! The join of a run's ranks, laid out as its configuration says, and the collective by which they share
//! losses, metrics and memory after each step.

use std::time::Duration;

use lockstep_comm::{CommError, Group};
use lockstep_config::plan::checked_plan;
use lockstep_config::{Problems, RunConfig, human, resolve_model};
use lockstep_engine::{Groups, Ranks, TOTALS_WORDS, words_of};
use lockstep_graph::Totals;
use lockstep_model::{ModelConfig, Tuning};
use lockstep_observe::metrics::MemoryUse;

use crate::Error;

/// Returns the ranks of `group`, laid out as `config` says for its model. Collective: every rank calls it.
///
/// # Errors
/// If the group has another size than the configuration, the plan does not fit the model, or a rank is lost.
pub fn ranks_of(group: Group, config: &RunConfig) -> Result<Ranks, Error> {
    let model = resolve_model(config)?;
    ranks_of_model(group, config, &model.config, &model.tuning)
}

/// Returns the ranks of `group`, laid out as `config` says for a model other than its own. Collective: every rank calls it.
///
/// # Errors
/// In the cases of [`ranks_of`].
pub fn ranks_of_model(
    group: Group,
    config: &RunConfig,
    model: &ModelConfig,
    tuning: &Tuning,
) -> Result<Ranks, Error> {
    let (ranks, replicas) = (group.size(), config.plan.mesh.replicate);
    let of_each = config.ranks_of_a_replica();
    if ranks != replicas * of_each {
        let key = "parallel.data_parallel_replicate";
        let shared = if of_each == 1 { String::new() } else { format!(" replicas of {of_each} ranks each") };
        let what = format!("is {replicas}{shared}, and {} were started", human::plural(ranks, "rank"));
        let fits = if ranks.is_multiple_of(of_each) { ranks / of_each } else { replicas };
        let needed =
            if fits == replicas { format!("{} ranks", replicas * of_each) } else { format!("{fits}") };
        let problem = config.problem(
            key,
            what,
            format!("{needed}, or another number of ranks (--nproc-per-node, srun -n, mpirun -n)"),
        );
        return Err(Problems::from(problem).into());
    }
    let group = group.with_algorithm(config.parallel.all_reduce.into());
    let limit = Duration::from_secs_f64(config.parallel.timeout_s);
    let plan = checked_plan(config, model, tuning)?.rank(group.rank());
    Ok(Ranks::new(Groups::new(group, plan, limit)?))
}

/// Numbers of a rank that it tells the others after each step, in one message.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StepShare {
    /// Losses and metrics.
    pub(crate) totals: Totals,
    /// Tokens, or samples, of the micro-batches.
    pub(crate) amount: u64,
    /// Damaged samples that were skipped.
    pub(crate) skipped_samples: u64,
    /// Memory of the rank.
    pub(crate) memory: MemoryUse,
}

/// Words of a [`StepShare`].
const STEP_WORDS: usize = TOTALS_WORDS + 2 + MemoryUse::WORDS;

/// Returns the sums of totals, amounts and skipped samples over the replicas, and the memory of each of several ranks, in the
/// order of the ranks.
///
/// # Errors
/// If a rank is lost or does not answer in time.
#[track_caller]
pub(crate) fn sum_of_step(ranks: &Ranks, own: StepShare) -> Result<(StepShare, Vec<MemoryUse>), CommError> {
    if ranks.size() == 1 {
        return Ok((own, Vec::new()));
    }
    let mut words = [0; STEP_WORDS];
    words[..TOTALS_WORDS].copy_from_slice(&words_of(&own.totals));
    words[TOTALS_WORDS..][..2].copy_from_slice(&[own.amount, own.skipped_samples]);
    words[TOTALS_WORDS + 2..].copy_from_slice(&own.memory.to_words());
    let shares = ranks.numbers(words)?;
    let memory_by_rank =
        shares.iter().map(|share| MemoryUse::from_words(&share[TOTALS_WORDS + 2..])).collect();
    let sums = StepShare {
        totals: ranks.totals_of(&shares),
        amount: ranks.count_of(&shares, TOTALS_WORDS),
        skipped_samples: ranks.count_of(&shares, TOTALS_WORDS + 1),
        ..own
    };
    Ok((sums, memory_by_rank))
}
