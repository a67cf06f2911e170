//! The join of a run's ranks, laid out as its configuration says, and the collective by which they share loss and memory after each step.

use std::time::Duration;

use lockstep_comm::{CommError, Group};
use lockstep_config::plan::checked_plan;
use lockstep_config::{Problems, RunConfig, human, resolve_model};
use lockstep_engine::{Groups, Ranks};
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

/// Sums the losses and tokens of the replicas, and returns with them the memory of each of several ranks, in the order of the ranks: one
/// message for all three.
///
/// # Errors
/// If a rank is lost or does not answer in time.
#[track_caller]
pub(crate) fn sum_and_memory(
    ranks: &Ranks,
    loss: f64,
    tokens: u64,
    memory: MemoryUse,
) -> Result<(f64, u64, Vec<MemoryUse>), CommError> {
    if ranks.size() == 1 {
        return Ok((loss, tokens, Vec::new()));
    }
    let mut own = [0; 2 + MemoryUse::WORDS];
    own[..2].copy_from_slice(&[loss.to_bits(), tokens]);
    own[2..].copy_from_slice(&memory.to_words());
    let shares = ranks.numbers(own)?;
    let (loss, tokens) = ranks.sum_of(&shares);
    Ok((loss, tokens, shares.iter().map(|share| MemoryUse::from_words(&share[2..])).collect()))
}
