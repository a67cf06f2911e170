//! Models with experts under plans that share them out: the numbers are those of one rank.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

use lockstep_testkit::parity::{DEEPSEEK, MIXTRAL, MIXTURES, QWEN2_MOE, Workbench};
use lockstep_train::verify::Tolerance;

/// Checks the models with experts under plans, and tells all that differ at once.
fn check(plans: &[&[&str]]) {
    let bench = Workbench::new().unwrap();
    let mut failures = Vec::new();
    for model in MIXTURES {
        for plan in plans {
            let lines = match bench.differences(model, plan, Tolerance::F32) {
                Ok(lines) => lines,
                Err(error) => vec![error.to_string()],
            };
            if !lines.is_empty() {
                failures.push(format!("{}, {}:\n  {}", model.name, plan.join(" "), lines.join("\n  ")));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

const SHARD_2: &str = "parallel.data_parallel_shard=2";
const EXPERT_2: &str = "parallel.expert_parallel=2";
const EXPERT_4: &str = "parallel.expert_parallel=4";
const PARTS_2: &str = "parallel.expert_tensor_parallel=2";
const TENSOR_2: &str = "parallel.tensor_parallel=2";
const SEQUENCE: &str = "parallel.sequence_parallel=true";
const PIPELINE_2: &str = "parallel.pipeline_parallel=2";
const REPLICAS_2: &str = "parallel.data_parallel_replicate=2";

#[test]
fn experts_that_every_rank_holds_have_the_numbers_of_one_rank() {
    check(&[&[REPLICAS_2], &[SHARD_2], &[PIPELINE_2], &[TENSOR_2], &[TENSOR_2, SEQUENCE]]);
}

#[test]
fn experts_on_several_ranks_have_the_numbers_of_one() {
    check(&[
        &[SHARD_2, EXPERT_2],
        &[SHARD_2, EXPERT_2, REPLICAS_2],
        &[TENSOR_2, EXPERT_2],
        &[TENSOR_2, EXPERT_2, SEQUENCE],
        &[TENSOR_2, SHARD_2, EXPERT_2],
        &[TENSOR_2, SHARD_2, EXPERT_4],
        &[SHARD_2, EXPERT_2, PIPELINE_2],
        &[SHARD_2, EXPERT_2, PIPELINE_2, "parallel.pipeline_schedule=zb_h1"],
    ]);
}

#[test]
fn so_have_experts_whose_matrices_are_split() {
    check(&[
        &[TENSOR_2, PARTS_2],
        &[TENSOR_2, PARTS_2, SEQUENCE],
        &[TENSOR_2, PARTS_2, SHARD_2, EXPERT_2],
        &[TENSOR_2, PARTS_2, SHARD_2, EXPERT_2, PIPELINE_2],
    ]);
}

#[test]
fn so_have_experts_of_ranks_that_share_sequences() {
    let bench = Workbench::new().unwrap();
    let context = "parallel.context_parallel=2";
    for plan in [&[context, EXPERT_2][..], &[context, TENSOR_2, EXPERT_4]] {
        let lines = bench.differences(QWEN2_MOE, plan, Tolerance::F32).unwrap();
        assert!(lines.is_empty(), "{}:\n  {}", plan.join(" "), lines.join("\n  "));
    }
}

#[test]
fn whatever_is_computed_again_tokens_find_their_experts() {
    for recompute in ["selective", "full"] {
        let recompute = format!("parallel.recompute={recompute}");
        check(&[&[SHARD_2, EXPERT_2, &recompute], &[TENSOR_2, EXPERT_2, SEQUENCE, &recompute]]);
    }
}

#[test]
fn runs_of_twenty_steps_stay_together() {
    check(&[&["train.steps=20", SHARD_2, EXPERT_2], &["train.steps=20", TENSOR_2, EXPERT_2, SEQUENCE]]);
}

#[test]
fn any_plan_goes_on_from_the_checkpoint_of_any_other() {
    let bench = Workbench::new().unwrap();
    let parts = [TENSOR_2, PARTS_2, SHARD_2, EXPERT_2];
    let plans: [&[&str]; 4] = [&[], &[SHARD_2, EXPERT_2], &parts, &[PIPELINE_2, SHARD_2, EXPERT_2]];
    for model in [MIXTRAL, DEEPSEEK] {
        let expected = bench.losses_of_both(model, [&[], &[]], 6).unwrap();
        for (first, second) in plans.iter().zip(plans.iter().cycle().skip(1)) {
            let found = bench.losses_of_both(model, [first, second], 6).unwrap();
            let is_near = |(found, expected): (&f64, &f64)| (found - expected).abs() <= 1e-4 * expected;
            assert!(
                found.len() == expected.len() && found.iter().zip(&expected).all(is_near),
                "{}, {first:?}, then {second:?}: {found:?}, one rank {expected:?}",
                model.name
            );
        }
    }
}
