//! Plans of one rank for the engine's tests.

use lockstep_model::ModelConfig;
use lockstep_plan::{Plan, RankPlan};

/// Returns `plan` on one rank, for steps of `micro_batches` of `[sequences, tokens]`.
pub(crate) fn one_rank(
    model: &ModelConfig,
    plan: Plan,
    [sequences, seq_len]: [usize; 2],
    micro_batches: usize,
) -> RankPlan {
    let plan = Plan { micro_batch: Some(sequences), ..plan };
    model.check_plan(&plan, [sequences * micro_batches, seq_len]).unwrap().rank(0)
}
