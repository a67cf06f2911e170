//! Encoders, classifiers and networks of convolutions have the numbers of one rank under every plan that applies to them.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

use lockstep_config::resolve_model;
use lockstep_testkit::encoders::{BERT, BERT_CLASSIFIER, ENCODERS, LLAMA_CLASSIFIER, RESNET, VIT};
use lockstep_testkit::parity::{Split, TinyModel, Workbench, pairs, splits, square};
use lockstep_train::verify::{Numbers, Tolerance};

const TENSOR_2: &str = "parallel.tensor_parallel=2";
const SEQUENCE: &str = "parallel.sequence_parallel=true";
const PIPELINE_2: &str = "parallel.pipeline_parallel=2";
const SHARD_2: &str = "parallel.data_parallel_shard=2";

/// Returns the splits over `ranks` ranks that go with named inputs.
fn splits_of_inputs(ranks: usize) -> Vec<Split> {
    splits(ranks).into_iter().filter(|split| split.kind != "context").collect()
}

fn check<Setting: AsRef<str>>(models: &[TinyModel], plans: &[Vec<Setting>]) {
    let bench = Workbench::new().unwrap();
    let mut failures = Vec::new();
    for (model, plan) in models.iter().flat_map(|model| plans.iter().map(move |plan| (model, plan))) {
        let plan: Vec<&str> = plan.iter().map(AsRef::as_ref).collect();
        let is_narrow = plan.iter().any(|setting| setting.starts_with("train.precision="));
        let lines = match is_narrow {
            true => bench.narrow_differences(*model, &plan),
            false => bench.differences(*model, &plan, Tolerance::F32),
        };
        let lines = lines.unwrap_or_else(|error| vec![error.to_string()]);
        if !lines.is_empty() {
            failures.push(format!("{}, {}:\n  {}", model.name, plan.join(" "), lines.join("\n  ")));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

fn with(splits: &[Split], more: &[&str]) -> Vec<Vec<String>> {
    let more = more.iter().map(ToString::to_string);
    splits.iter().map(|split| split.settings.iter().cloned().chain(more.clone()).collect()).collect()
}

#[test]
fn every_split_of_an_encoder_has_the_numbers_of_one_rank_for_twenty_steps() {
    check(&ENCODERS, &with(&splits_of_inputs(2), &["train.steps=20"]));
}

#[test]
fn so_has_every_pair_of_splits_and_a_square_of_ranks() {
    check(&[BERT_CLASSIFIER, VIT], &pairs(&splits_of_inputs(2)));
    check(&ENCODERS, &with(&[square(2)], &["train.steps=3"]));
}

#[test]
fn so_has_an_encoder_whatever_it_recomputes() {
    let tensor = [TENSOR_2, SEQUENCE];
    for recompute in ["none", "selective", "full"] {
        let recompute = format!("parallel.recompute={recompute}");
        let plans = [&tensor[..], &[PIPELINE_2], &[SHARD_2, "parallel.zero_stage=3"]];
        check(&ENCODERS, &plans.map(|plan| [plan, &[&*recompute]].concat()));
    }
}

#[test]
fn so_have_convolutions_under_every_plan_that_does_not_shard_blocks() {
    let of_convolutions = |split: &Split| split.kind != "tensor";
    let all: Vec<Split> = splits_of_inputs(2).into_iter().filter(of_convolutions).collect();
    check(&[RESNET], &with(&all, &["train.steps=20"]));
    check(&[RESNET], &pairs(&all));
}

#[test]
fn tokens_of_a_micro_batch_are_sharded_even_where_those_of_a_sequence_are_not() {
    // Four patches and a class token: five tokens on two ranks.
    let small = ["model.image_size=8", "train.seq_len=5", "train.micro_batch=2"];
    check(&[VIT], &[[&[TENSOR_2, SEQUENCE][..], &small].concat()]);
}

#[test]
fn encoders_in_bf16_lose_no_more_than_one_rank() {
    let plans = [&[SHARD_2, "parallel.zero_stage=3"][..], &[TENSOR_2, SEQUENCE], &[PIPELINE_2]];
    check(&[BERT, VIT], &plans.map(|plan| [plan, &["train.precision=bf16"]].concat()));
}

#[test]
fn moving_the_state_of_an_encoder_to_the_disk_changes_no_bit() {
    let bench = Workbench::new().unwrap();
    let disk = tempfile::tempdir().unwrap();
    let disk = format!("parallel.offload.dir={}", disk.path().display());
    let of_state = [
        "parallel.offload.optimizer=disk",
        "parallel.offload.gradients=disk",
        "parallel.offload.parameters=disk",
    ];
    for model in [BERT, VIT, LLAMA_CLASSIFIER, RESNET] {
        // One micro-batch a step: with gradients in memory, further ones would accumulate within the matrix products.
        let alone = ["parallel.recompute=full", "train.global_batch=1"];
        let sharded = [SHARD_2, "parallel.zero_stage=3", "train.global_batch=2"];
        for plan in [&alone[..], &sharded] {
            let numbers = |more: &[&str]| -> Numbers {
                let common = ["train.steps=3", "train.micro_batch=1"];
                let config = bench.config(model, &[plan, more, &common].concat()).unwrap();
                bench.numbers(&config).unwrap()
            };
            let in_memory = numbers(&[]);
            for offload in [&of_state[..], &["parallel.offload.activations=disk"]] {
                let found = numbers(&[offload, &[&*disk]].concat());
                let (name, steps) = (model.name, &found.steps);
                assert!(
                    found == in_memory,
                    "{name}, {plan:?}, {offload:?}: {steps:?}, {:?}",
                    in_memory.steps
                );
            }
        }
    }
}

#[test]
fn a_run_of_an_encoder_goes_on_under_another_plan() {
    let bench = Workbench::new().unwrap();
    let plans: [&[&str]; 4] =
        [&[], &[TENSOR_2, SEQUENCE], &[PIPELINE_2], &[SHARD_2, "parallel.zero_stage=3"]];
    for model in [BERT, VIT] {
        let expected = bench.losses_of_both(model, [plans[0], plans[0]], 4).unwrap();
        for (first, second) in plans.into_iter().zip(plans.into_iter().cycle().skip(1)) {
            let found = bench.losses_of_both(model, [first, second], 4).unwrap();
            let is_near = |(found, expected): (&f64, &f64)| (found - expected).abs() <= 1e-4 * expected;
            assert!(
                found.len() == expected.len() && found.iter().zip(&expected).all(is_near),
                "{}, {first:?}, then {second:?}: {found:?}, one rank {expected:?}",
                model.name
            );
        }
    }
}

#[test]
fn a_plan_that_shards_the_sequences_of_named_inputs_is_refused_with_the_reason() {
    let bench = Workbench::new().unwrap();
    for model in ENCODERS {
        let config = bench.config(model, &["parallel.context_parallel=2"]).unwrap();
        let message = resolve_model(&config).unwrap_err().to_string();
        let parts =
            ["parallel.context_parallel", "this model reads inputs of whole sequences beside its tokens"];
        assert!(parts.iter().all(|part| message.contains(part)), "{}: {message}", model.name);
    }
    let config = bench.config(RESNET, &["parallel.tensor_parallel=2"]).unwrap();
    let message = resolve_model(&config).unwrap_err().to_string();
    assert!(message.contains("this model has none"), "{message}");
}
