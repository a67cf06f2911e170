//! Tests of the parity matrix: under any plan, a model's numbers are those of one rank.
//!
//! `LOCKSTEP_PLANS` sets the number of random plans, `LOCKSTEP_SEED` their seed.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

mod bits;
mod resume;

use std::env;

use lockstep_testkit::parity::{
    DEEPSEEK, GEMMA2, GEMMA3, GPT_OSS, GPT2, LLAMA, MISTRAL, MIXTRAL, MIXTURES, MODELS, OLMO2, PHI3, QWEN2,
    QWEN2_MOE, QWEN3, Split, TinyModel, Workbench, expert_splits, pairs, splits, square,
};
use lockstep_testkit::random_plan::random_plans;
use lockstep_train::verify::{ROUTER_MARGIN, Tolerance};
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

/// Number of random plans in an ordinary test run.
const PLANS: u32 = 50;

const TENSOR_2: &str = "parallel.tensor_parallel=2";
const SEQUENCE: &str = "parallel.sequence_parallel=true";
const PIPELINE_2: &str = "parallel.pipeline_parallel=2";
const REPLICAS_2: &str = "parallel.data_parallel_replicate=2";

const SHARD_2: &str = "parallel.data_parallel_shard=2";
const EXPERT_2: &str = "parallel.expert_parallel=2";
const EXPERT_4: &str = "parallel.expert_parallel=4";
const PARTS_2: &str = "parallel.expert_tensor_parallel=2";

const CONTEXT_2: &str = "parallel.context_parallel=2";
const METHODS: [&str; 3] = [
    "parallel.context_parallel_method=ring",
    "parallel.context_parallel_method=all_gather",
    "parallel.context_parallel_method=all_to_all",
];

const OPTIMIZER_ON_DISK: &str = "parallel.offload.optimizer=disk";
const GRADIENTS_ON_DISK: &str = "parallel.offload.gradients=disk";

/// Returns all differences between the models' numbers under the plans and on one rank.
fn differences<Setting: AsRef<str>>(
    bench: &Workbench,
    models: &[TinyModel],
    plans: &[Vec<Setting>],
) -> Vec<String> {
    let mut failures = Vec::new();
    for model in models {
        for plan in plans {
            let plan: Vec<&str> = plan.iter().map(AsRef::as_ref).collect();
            let is_narrow = plan.iter().any(|setting| setting.starts_with("train.precision="));
            let lines = if is_narrow {
                bench.narrow_differences(*model, &plan)
            } else {
                bench.differences(*model, &plan, Tolerance::F32)
            };
            let lines = lines.unwrap_or_else(|error| vec![error.to_string()]);
            if !lines.is_empty() {
                failures.push(format!("{}, {}:\n  {}", model.name, plan.join(" "), lines.join("\n  ")));
            }
        }
    }
    failures
}

fn check<Setting: AsRef<str>>(models: &[TinyModel], plans: &[Vec<Setting>]) {
    let failures = differences(&Workbench::new().unwrap(), models, plans);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

fn with(splits: &[Split], more: &[&str]) -> Vec<Vec<String>> {
    let more = more.iter().map(ToString::to_string);
    splits.iter().map(|split| split.settings.iter().cloned().chain(more.clone()).collect()).collect()
}

#[test]
fn every_split_has_the_numbers_of_one_rank_for_twenty_steps() {
    check(&MODELS, &with(&splits(2), &["train.steps=20"]));
}

#[test]
fn so_has_every_split_over_four_ranks_whatever_it_recomputes() {
    for recompute in ["none", "selective", "full"] {
        check(&MODELS, &with(&splits(4), &[&format!("parallel.recompute={recompute}")]));
    }
}

#[test]
fn a_square_of_ranks_has_the_numbers_of_one_rank_for_twenty_steps_alone_and_in_pairs() {
    check(&[GPT2, LLAMA, QWEN2, QWEN3], &with(&[square(2)], &["train.steps=20"]));
    let is_no_tensor_axis = |split: &Split| split.kind != "tensor" && split.kind != "context";
    let mut others: Vec<Split> = splits(2).into_iter().filter(is_no_tensor_axis).collect();
    let settings = vec!["parallel.data_parallel_shard=2".to_owned()];
    others.push(Split { kind: "shard", ranks: 2, settings });
    for other in others {
        check(&MODELS, &pairs(&[square(2), other]));
    }
}

#[test]
fn nine_ranks_are_no_square_of_two() {
    // With a 2 × 2 square, swapping rows and columns might go unnoticed.
    let model = ["model.n_head=6", "model.n_embd=36"];
    let batch = ["train.seq_len=15", "train.global_batch=6", "train.steps=3"];
    check(&[GPT2], &with(&[square(3)], &[&model[..], &batch].concat()));
}

#[test]
fn the_rows_of_a_square_respect_packed_documents_and_sliding_windows() {
    for packing in ["data.packing=documents", "data.packing=whole_documents"] {
        check(&[GPT2, LLAMA, MISTRAL], &with(&[square(2)], &[packing]));
    }
}

#[test]
fn so_have_the_families_whose_layers_norms_or_heads_differ() {
    let plans = [
        vec![TENSOR_2],
        vec![TENSOR_2, SEQUENCE],
        vec![TENSOR_2, SEQUENCE, "parallel.tensor_chunks=3", "parallel.recompute=full"],
        vec![PIPELINE_2, SHARD_2, "parallel.recompute=selective"],
        vec![TENSOR_2, SEQUENCE, CONTEXT_2],
        vec!["train.steps=20", TENSOR_2, SEQUENCE],
    ];
    check(&[GEMMA2, GEMMA3, OLMO2, PHI3], &plans);
    check(&[GEMMA2, GEMMA3, PHI3], &with(&[square(2)], &[]));
}

#[test]
fn soft_caps_sinks_and_windows_of_some_layers_hold_over_shared_sequences() {
    let plans: Vec<_> = METHODS.into_iter().map(|method| vec![CONTEXT_2, method]).collect();
    check(&[GEMMA2, GEMMA3, OLMO2, GPT_OSS], &plans);
}

#[test]
fn every_pair_of_splits_has_the_numbers_of_one_rank() {
    check(&MODELS, &pairs(&splits(2)));
}

#[test]
fn so_has_every_split_of_a_mixture_and_every_pair_of_them() {
    let all: Vec<Split> = expert_splits(2).into_iter().chain(splits(2)).collect();
    check(&[MIXTRAL, QWEN2_MOE], &with(&all, &["train.steps=20"]));
    check(&[MIXTRAL, QWEN2_MOE], &pairs(&all));
}

#[test]
fn no_router_of_the_mixtures_is_ever_in_doubt() {
    let bench = Workbench::new().unwrap();
    for model in MIXTURES {
        let numbers = bench.numbers(&bench.config(model, &["train.steps=20"]).unwrap()).unwrap();
        let margin = numbers.router_margin.unwrap();
        println!("{}: the smallest margin of 20 steps is {margin}", model.name);
        assert!(margin > ROUTER_MARGIN, "{}: a token's last expert is {margin} ahead", model.name);
    }
}

#[test]
fn experts_that_every_rank_holds_have_the_numbers_of_one_rank() {
    let plans = [&[REPLICAS_2][..], &[SHARD_2], &[PIPELINE_2], &[TENSOR_2], &[TENSOR_2, SEQUENCE]];
    check(&MIXTURES, &plans.map(<[&str]>::to_vec));
}

#[test]
fn so_have_experts_on_several_ranks() {
    let plans = [
        &[SHARD_2, EXPERT_2][..],
        &[SHARD_2, EXPERT_2, REPLICAS_2],
        &[TENSOR_2, EXPERT_2],
        &[TENSOR_2, EXPERT_2, SEQUENCE],
        &[TENSOR_2, SHARD_2, EXPERT_2],
        &[TENSOR_2, SHARD_2, EXPERT_4],
        &[SHARD_2, EXPERT_2, PIPELINE_2],
        &[SHARD_2, EXPERT_2, PIPELINE_2, "parallel.pipeline_schedule=zb_h1"],
        &["train.steps=20", SHARD_2, EXPERT_2],
        &["train.steps=20", TENSOR_2, EXPERT_2, SEQUENCE],
    ];
    check(&MIXTURES, &plans.map(<[&str]>::to_vec));
}

#[test]
fn so_have_experts_whose_matrices_are_split() {
    let plans = [
        &[TENSOR_2, PARTS_2][..],
        &[TENSOR_2, PARTS_2, SEQUENCE],
        &[TENSOR_2, PARTS_2, SHARD_2, EXPERT_2],
        &[TENSOR_2, PARTS_2, SHARD_2, EXPERT_2, PIPELINE_2],
    ];
    check(&[MIXTRAL, QWEN2_MOE, DEEPSEEK], &plans.map(<[&str]>::to_vec));
}

#[test]
fn so_have_experts_of_ranks_that_share_sequences() {
    check(&MIXTURES, &[vec![CONTEXT_2, EXPERT_2], vec![CONTEXT_2, TENSOR_2, EXPERT_4]]);
    // Experts take the first capacity slots of a sequence wherever its parts are: at both ends of the rank order, or
    // alternating.
    for method in METHODS {
        let plans = [
            vec!["parallel.context_parallel=4", method],
            vec![CONTEXT_2, method, TENSOR_2, SEQUENCE, "train.micro_batch=2"],
        ];
        check(&[MIXTRAL], &plans);
    }
}

#[test]
fn whatever_is_computed_again_tokens_find_their_experts() {
    for recompute in ["parallel.recompute=selective", "parallel.recompute=full"] {
        let plans = [vec![SHARD_2, EXPERT_2, recompute], vec![TENSOR_2, EXPERT_2, SEQUENCE, recompute]];
        check(&MIXTURES, &plans);
    }
}

#[test]
fn plans_in_bf16_and_f16_lose_no_more_than_one_rank() {
    for precision in ["train.precision=bf16", "train.precision=f16"] {
        let with_precision = |plans: &[&[&'static str]]| {
            plans.iter().map(|plan| [plan, &[precision][..]].concat()).collect::<Vec<_>>()
        };
        check(
            &[GPT2, LLAMA],
            &with_precision(&[&[REPLICAS_2], &[TENSOR_2], &[TENSOR_2, SEQUENCE], &[PIPELINE_2]]),
        );
        check(&MIXTURES, &with_precision(&[&[REPLICAS_2], &[SHARD_2, EXPERT_2], &[PIPELINE_2]]));
        // With tensor-parallel latent attention the low-rank values are rounded once more, which exceeds this
        // tolerance.
        check(
            &[MIXTRAL, QWEN2_MOE],
            &with_precision(&[&[TENSOR_2], &[TENSOR_2, EXPERT_2], &[TENSOR_2, PARTS_2]]),
        );
        // Fewer key/value heads than ranks: each rank has a part of their gradients.
        check(&[LLAMA], &with_precision(&[&["parallel.context_parallel=4", METHODS[2]]]));
    }
}

#[test]
fn eight_ranks_are_split_in_three_ways_at_once() {
    let schedules =
        ["1f1b", "interleaved_1f1b", "zb_v"].map(|name| format!("parallel.pipeline_schedule={name}"));
    let mut plans = schedules
        .each_ref()
        .map(|schedule| vec![PIPELINE_2, TENSOR_2, SEQUENCE, REPLICAS_2, schedule])
        .to_vec();
    plans.extend(METHODS.map(|method| vec![CONTEXT_2, method, TENSOR_2, SEQUENCE, REPLICAS_2]));
    plans.extend(METHODS.map(|method| vec![CONTEXT_2, method, TENSOR_2, SEQUENCE, PIPELINE_2]));
    check(&MODELS, &plans);
}

#[test]
fn more_ranks_than_key_value_heads_share_sequences_down_to_two_tokens_each() {
    let plans = METHODS.map(|method| vec!["parallel.context_parallel=8", method]);
    check(&[LLAMA, QWEN3], &plans);
}

#[test]
fn ranks_that_share_sequences_respect_packed_documents_and_sliding_windows() {
    for method in METHODS {
        for packing in ["data.packing=documents", "data.packing=whole_documents"] {
            check(&[GPT2, LLAMA], &[vec![CONTEXT_2, method, packing, "train.micro_batch=2"]]);
        }
        let over_four = vec!["parallel.context_parallel=4", method, "data.packing=documents"];
        check(&[MISTRAL], &[vec![CONTEXT_2, method], over_four]);
    }
}

#[test]
fn random_plans_have_the_numbers_of_one_rank() {
    let number = |name: &str| env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let cases = number("LOCKSTEP_PLANS").map_or(PLANS, |plans| plans.try_into().unwrap());
    let mut seed = [0; 32];
    seed[..8].copy_from_slice(&number("LOCKSTEP_SEED").unwrap_or(1).to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
    let mut runner =
        TestRunner::new_with_rng(Config { cases, failure_persistence: None, ..Config::default() }, rng);
    let bench = Workbench::new().unwrap();
    let plans = random_plans(|model, settings| bench.config(model, settings).ok());
    let outcome = runner.run(&plans, |plan| {
        let failures = differences(&bench, &[plan.model], &[plan.settings]);
        if failures.is_empty() { Ok(()) } else { Err(TestCaseError::fail(failures.join("\n"))) }
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn adapters_over_quantized_matrices_have_the_numbers_of_one_rank() {
    let plans: [&[&str]; 6] = [
        &[REPLICAS_2],
        &[SHARD_2, "parallel.zero_stage=1"],
        &[SHARD_2, "parallel.zero_stage=2", REPLICAS_2],
        &[PIPELINE_2, "parallel.pipeline_schedule=interleaved_1f1b"],
        &[CONTEXT_2, "parallel.recompute=full"],
        &[EXPERT_2, SHARD_2],
    ];
    // Matrices with rows of 32 are quantized, others stay numbers.
    let of = |quantize: &'static str| plans.map(|plan| [plan, &["fine_tune.lora_rank=2", quantize]].concat());
    check(&[MIXTRAL, QWEN2_MOE], &of("fine_tune.quantize=int8"));
    check(&[MIXTRAL], &of("fine_tune.quantize=int4"));
}
