//! Runs that go on from the checkpoint of another plan.

use lockstep_testkit::parity::{
    DEEPSEEK, GPT2, LLAMA, MIXTRAL, QWEN2_MOE, TinyModel, Workbench, splits, square,
};

use crate::{EXPERT_2, GRADIENTS_ON_DISK, OPTIMIZER_ON_DISK, PARTS_2, PIPELINE_2, SHARD_2, TENSOR_2};

#[test]
fn a_run_goes_on_with_its_state_on_disk_or_in_memory_with_every_bit() {
    let bench = Workbench::new().unwrap();
    let disk = tempfile::tempdir().unwrap();
    let disk = format!("parallel.offload.dir={}", disk.path().display());
    let shard = [SHARD_2, "parallel.zero_stage=2", "train.precision=bf16", "train.global_batch=4"];
    let on_disk = [&shard[..], &[OPTIMIZER_ON_DISK, GRADIENTS_ON_DISK, &disk]].concat();
    let alone = ["train.precision=bf16", "train.global_batch=4", OPTIMIZER_ON_DISK, &disk];
    for model in [GPT2, DEEPSEEK] {
        let expected = bench.losses_of_both(model, [&shard, &shard], 6).unwrap();
        for plans in [[&shard[..], &on_disk], [&on_disk, &shard], [&on_disk, &on_disk]] {
            assert_eq!(bench.losses_of_both(model, plans, 6).unwrap(), expected, "{}: {plans:?}", model.name);
        }
        // Other ranks reduce in another order, but resume from the same state.
        let found = bench.losses_of_both(model, [&on_disk, &alone], 6).unwrap();
        assert_eq!(found[..3], expected[..3], "{}", model.name);
        assert!(
            found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-3 * b),
            "{found:?}, {expected:?}"
        );
    }
}

#[test]
fn a_run_goes_on_under_another_zero_stage_with_every_bit() {
    let bench = Workbench::new().unwrap();
    let sequence = ["train.global_batch=2", "train.micro_batch=1"];
    let stages =
        ["parallel.zero_stage=0", "parallel.zero_stage=1", "parallel.zero_stage=2", "parallel.zero_stage=3"];
    let plan = |stage: &'static str| [&["parallel.data_parallel_shard=2", stage], &sequence[..]].concat();
    for model in [GPT2, QWEN2_MOE] {
        let expected = bench.losses_of_both(model, [&plan(stages[0]), &plan(stages[0])], 6).unwrap();
        for (first, second) in stages.into_iter().zip(stages.into_iter().cycle().skip(1)) {
            let found = bench.losses_of_both(model, [&plan(first), &plan(second)], 6).unwrap();
            assert_eq!(found, expected, "{}: {first}, then {second}", model.name);
        }
    }
}

#[test]
fn any_split_goes_on_from_the_checkpoint_of_any_other() {
    let mut all = splits(2);
    all.insert(1, square(2));
    let all: Vec<Vec<String>> = all.into_iter().map(|split| split.settings).collect();
    check_checkpoints(LLAMA, &all);
}

#[test]
fn so_does_any_split_of_a_mixture() {
    // Starts from random weights, to check that a rank draws the same values for its experts as a single rank.
    let random = ["model.from_pretrained=false", "model.router_bias_update_rate=0.05"];
    let plans = [
        &[][..],
        &[SHARD_2, EXPERT_2],
        &[TENSOR_2, PARTS_2, SHARD_2, EXPERT_2],
        &[PIPELINE_2, SHARD_2, EXPERT_2],
    ];
    for (model, of_model) in [(MIXTRAL, &random[..1]), (DEEPSEEK, &random)] {
        check_checkpoints(model, &plans.map(|plan| [plan, of_model].concat()));
    }
}

/// Checks that the losses equal those of one rank when each plan resumes from a checkpoint of the one before.
fn check_checkpoints<Setting: AsRef<str>>(model: TinyModel, plans: &[Vec<Setting>]) {
    let bench = Workbench::new().unwrap();
    let plans: Vec<Vec<&str>> = plans.iter().map(|plan| plan.iter().map(AsRef::as_ref).collect()).collect();
    let alone: Vec<&str> =
        plans[0].iter().copied().filter(|setting| !setting.starts_with("parallel.")).collect();
    let expected = bench.losses_of_both(model, [&alone, &alone], 6).unwrap();
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
