//! Tests of the parity matrix: under any plan, a model's numbers are those of one rank.
//!
//! `LOCKSTEP_PLANS` sets the number of random plans, `LOCKSTEP_SEED` their seed.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

use std::env;

use lockstep_plan::schedule::Kind;
use lockstep_testkit::parity::{
    DEEPSEEK, GEMMA2, GEMMA3, GPT_OSS, GPT2, LLAMA, MISTRAL, MIXTRAL, MIXTURES, MODELS, OLMO2, PHI3, QWEN2,
    QWEN2_MOE, QWEN3, Split, TinyModel, Workbench, expert_splits, pairs, splits, square,
};
use lockstep_testkit::random_plan::random_plans;
use lockstep_train::verify::{Numbers, ROUTER_MARGIN, Tolerance};
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
fn schedules_stages_and_recomputation_change_no_bit() {
    let bench = Workbench::new().unwrap();
    let numbers = |settings: &[&str]| -> Numbers {
        let settings: Vec<&str> = settings.iter().copied().chain(["train.steps=3"]).collect();
        bench.numbers(&bench.config(GPT2, &settings).unwrap()).unwrap()
    };
    let expected = numbers(&[]);
    let same = |plan: &[&str]| {
        let found = numbers(plan);
        assert!(found == expected, "{}: {:?}, one rank {:?}", plan.join(" "), found.steps, expected.steps);
    };
    for schedule in Kind::ALL.map(Kind::name) {
        let schedule = format!("parallel.pipeline_schedule={schedule}");
        for recompute in ["none", "selective", "full"] {
            same(&[PIPELINE_2, &schedule, &format!("parallel.recompute={recompute}")]);
        }
    }
    for stages in ["[1, 5]", "[4, 2]", "[5, 1]"] {
        same(&[PIPELINE_2, &format!("parallel.pipeline_stages={stages}")]);
    }
}

#[test]
fn sharing_out_the_state_changes_no_bit() {
    let bench = Workbench::new().unwrap();
    let models = [
        (GPT2, &[][..]),
        (LLAMA, &["train.precision=bf16"]),
        (DEEPSEEK, &["train.precision=bf16"]),
        (QWEN3, &[TENSOR_2, SEQUENCE]),
    ];
    for (model, more) in models {
        let numbers = |settings: &[&str]| -> Numbers {
            // One micro-batch per rank: with more, stage 2 sums over ranks first, and the others over micro-batches
            // first.
            let all = settings.iter().chain(more).copied().chain(["train.steps=4", "train.global_batch=4"]);
            let config = bench.config(model, &all.collect::<Vec<_>>()).unwrap();
            bench.numbers(&config).unwrap()
        };
        let copies = numbers(&["parallel.data_parallel_replicate=4", "train.micro_batch=1"]);
        for [replicate, shard] in [[1, 4], [2, 2]] {
            for stage in [0, 1, 2, 3] {
                let degrees = [
                    format!("parallel.data_parallel_replicate={replicate}"),
                    format!("parallel.data_parallel_shard={shard}"),
                    format!("parallel.zero_stage={stage}"),
                ];
                let [replicate, shard, zero] = degrees.each_ref().map(String::as_str);
                let found = numbers(&[replicate, shard, zero, "train.micro_batch=1"]);
                assert!(
                    found == copies,
                    "{}, {degrees:?}: {:?}, copies {:?}",
                    model.name,
                    found.steps,
                    copies.steps
                );
            }
        }
    }
}

#[test]
fn keeping_slices_of_what_blocks_were_given_changes_no_bit() {
    let bench = Workbench::new().unwrap();
    const FULL: &str = "parallel.recompute=full";
    const BF16: &str = "train.precision=bf16";
    const SOME: &str =
        "parallel.recompute={ default = \"selective\", layers = [{ from = 1, every = 2, mode = \"full\" }] }";
    // With three ranks no value splits evenly.
    let thirds = ["model.n_head=6", "model.n_embd=36", "train.seq_len=14", "train.micro_batch=1"];
    let mut plans: Vec<(TinyModel, Vec<&str>)> = vec![
        (GPT2, vec![TENSOR_2, FULL, "train.dropout=0.1"]),
        (LLAMA, vec!["parallel.tensor_parallel=4", FULL, BF16]),
        (GPT2, [&["parallel.tensor_parallel=3", FULL, BF16], &thirds[..]].concat()),
        (LLAMA, vec![TENSOR_2, FULL, "parallel.tensor_chunks=3", REPLICAS_2]),
        (LLAMA, vec![TENSOR_2, FULL, SHARD_2, "parallel.zero_stage=3", BF16]),
        (QWEN3, vec![TENSOR_2, SOME, CONTEXT_2]),
        (GPT2, vec![TENSOR_2, SOME, PIPELINE_2, "parallel.pipeline_stages=[1, 5]"]),
        (MIXTRAL, vec![TENSOR_2, FULL, EXPERT_2]),
        (DEEPSEEK, vec![TENSOR_2, FULL, SHARD_2, EXPERT_4]),
        (MIXTRAL, vec![TENSOR_2, FULL, PARTS_2, PIPELINE_2]),
    ];
    let schedules = Kind::ALL.map(|kind| format!("parallel.pipeline_schedule={}", kind.name()));
    plans.extend(schedules.iter().map(|schedule| (GPT2, vec![TENSOR_2, FULL, PIPELINE_2, schedule])));
    for (model, plan) in plans {
        let numbers = |more: &[&str]| -> Numbers {
            let config = bench.config(model, &[&plan[..], more, &["train.steps=3"]].concat()).unwrap();
            bench.numbers(&config).unwrap()
        };
        let (found, whole) = (numbers(&["parallel.partition_activations=true"]), numbers(&[]));
        assert!(found == whole, "{}, {plan:?}: {:?}, whole {:?}", model.name, found.steps, whole.steps);
    }
}

#[test]
fn activations_on_disk_change_no_bit() {
    let bench = Workbench::new().unwrap();
    let disk = tempfile::tempdir().unwrap();
    let disk = format!("parallel.offload.dir={}", disk.path().display());
    const ON_DISK: &str = "parallel.offload.activations=disk";
    const FULL: &str = "parallel.recompute=full";
    const BF16: &str = "train.precision=bf16";
    const SLICES: &str = "parallel.partition_activations=true";
    const SOME: &str =
        "parallel.recompute={ default = \"selective\", layers = [{ from = 1, every = 2, mode = \"full\" }] }";
    let mut plans: Vec<(TinyModel, Vec<&str>)> = vec![
        (GPT2, vec!["train.dropout=0.1"]),
        (LLAMA, vec![FULL, BF16]),
        (GPT2, vec![REPLICAS_2, SOME]),
        (LLAMA, vec![SHARD_2, "parallel.zero_stage=3", BF16]),
        (LLAMA, vec![TENSOR_2, FULL, SLICES]),
        (QWEN3, vec![TENSOR_2, SEQUENCE, CONTEXT_2]),
        (GPT2, vec![PIPELINE_2, TENSOR_2, FULL, SLICES, "parallel.pipeline_stages=[1, 5]"]),
        (GPT2, vec![PIPELINE_2, SHARD_2, "parallel.zero_stage=2", SOME]),
        (MIXTRAL, vec![SHARD_2, EXPERT_2, BF16]),
        (DEEPSEEK, vec![TENSOR_2, SHARD_2, EXPERT_4, "parallel.recompute=selective"]),
        (GPT2, vec![OPTIMIZER_ON_DISK, PARAMETERS_ON_DISK]),
    ];
    let schedules = Kind::ALL.map(|kind| format!("parallel.pipeline_schedule={}", kind.name()));
    let batch = ["train.global_batch=8", "train.micro_batch=1"];
    for recompute in ["parallel.recompute=none", FULL] {
        let of = |schedule| (GPT2, [&[PIPELINE_2, recompute, schedule][..], &batch].concat());
        plans.extend(schedules.iter().map(String::as_str).map(of));
    }
    for (model, plan) in plans {
        let numbers = |more: &[&str]| -> Numbers {
            let config = bench.config(model, &[&plan[..], more, &["train.steps=3"]].concat()).unwrap();
            bench.numbers(&config).unwrap()
        };
        let (found, in_memory) = (numbers(&[ON_DISK, &disk]), numbers(&[]));
        let (name, steps) = (model.name, &found.steps);
        assert!(found == in_memory, "{name}, {plan:?}: {steps:?}, in memory {:?}", in_memory.steps);
    }
}

const OPTIMIZER_ON_DISK: &str = "parallel.offload.optimizer=disk";
const GRADIENTS_ON_DISK: &str = "parallel.offload.gradients=disk";
const PARAMETERS_ON_DISK: &str = "parallel.offload.parameters=disk";

#[test]
fn moving_state_to_the_disk_changes_no_bit() {
    let bench = Workbench::new().unwrap();
    let disk = tempfile::tempdir().unwrap();
    let disk = format!("parallel.offload.dir={}", disk.path().display());
    const BF16: &str = "train.precision=bf16";
    let plans: [(TinyModel, &[&str]); 9] = [
        // One micro-batch: with gradients in memory, further ones would accumulate within the matrix products.
        (GPT2, &["train.global_batch=1", "train.micro_batch=1", BF16]),
        (LLAMA, &[SHARD_2, "parallel.zero_stage=2", BF16]),
        (LLAMA, &[SHARD_2, "parallel.zero_stage=3"]),
        (GPT2, &["parallel.data_parallel_shard=4", "parallel.zero_stage=3", "train.micro_batch=1"]),
        // One micro-batch: gradients of norms are partial sums, which on disk are reduced after each micro-batch.
        (QWEN3, &[TENSOR_2, SEQUENCE, BF16, "train.global_batch=2", "train.micro_batch=2"]),
        (GPT2, &[PIPELINE_2, "parallel.pipeline_schedule=zb_h1", SHARD_2, "parallel.zero_stage=2"]),
        (LLAMA, &[PIPELINE_2, SHARD_2, "parallel.zero_stage=2"]),
        (DEEPSEEK, &[SHARD_2, "parallel.zero_stage=3", BF16]),
        (QWEN2_MOE, &[SHARD_2, EXPERT_2, "parallel.zero_stage=2"]),
    ];
    for (model, plan) in plans {
        let numbers = |more: &[&str]| -> Numbers {
            let config = bench.config(model, &[plan, more, &["train.steps=4"]].concat()).unwrap();
            bench.numbers(&config).unwrap()
        };
        let in_memory = numbers(&[]);
        for share in ["1", "0.5"] {
            let share = format!("parallel.offload.fraction={share}");
            let all = [OPTIMIZER_ON_DISK, GRADIENTS_ON_DISK, PARAMETERS_ON_DISK];
            // With stage 2 every rank holds all parameters.
            let most = if plan.contains(&"parallel.zero_stage=2") { 2 } else { 3 };
            for more in (1..=most).map(|count| &all[..count]) {
                let found = numbers(&[more, &[disk.as_str(), share.as_str()]].concat());
                let (name, steps) = (model.name, &found.steps);
                assert!(found == in_memory, "{name}, {plan:?}, {more:?}: {steps:?}, {:?}", in_memory.steps);
            }
        }
    }
    // Replicas hold the same state and reduce their gradients in memory.
    let replicas = |more: &[&str]| {
        let config = bench.config(LLAMA, &[&[REPLICAS_2, "train.steps=4"], more].concat()).unwrap();
        bench.numbers(&config).unwrap()
    };
    assert!(replicas(&[OPTIMIZER_ON_DISK, &disk]) == replicas(&[]));
    assert!(replicas(&[OPTIMIZER_ON_DISK, PARAMETERS_ON_DISK, &disk]) == replicas(&[]));
}

#[test]
fn which_units_stand_together_changes_no_bit() {
    let bench = Workbench::new().unwrap();
    let disk = tempfile::tempdir().unwrap();
    let disk = format!("parallel.offload.dir={}", disk.path().display());
    let stage = ["parallel.zero_stage=1", "parallel.zero_stage=2", "parallel.zero_stage=3"];
    let plans: [(TinyModel, &[&str]); 9] = [
        (GPT2, &[SHARD_2, stage[0], "train.precision=bf16"]),
        (LLAMA, &[SHARD_2, stage[1], REPLICAS_2]),
        (LLAMA, &[SHARD_2, stage[2], "parallel.recompute=full"]),
        (GPT2, &[SHARD_2, stage[1], PIPELINE_2, "parallel.pipeline_schedule=zb_h1"]),
        (QWEN3, &[SHARD_2, stage[2], PIPELINE_2, "parallel.pipeline_schedule=interleaved_1f1b"]),
        (MIXTRAL, &[SHARD_2, stage[2], EXPERT_2]),
        (GPT2, &[SHARD_2, stage[1], TENSOR_2, SEQUENCE]),
        (
            QWEN2_MOE,
            &[
                SHARD_2,
                stage[1],
                "fine_tune.freeze=[\"model.embed_tokens.*\", \"model.layers.1.*\", \"*norm*\"]",
            ],
        ),
        (LLAMA, &[OPTIMIZER_ON_DISK, GRADIENTS_ON_DISK, PARAMETERS_ON_DISK, &disk]),
    ];
    let wraps = ["{ min_parameters = 40000 }", "{ min_parameters = 1000000 }", "[\"model.layers.*\"]"];
    for (model, plan) in plans {
        let numbers = |more: &[&str]| -> Numbers {
            let common = ["train.steps=3", "train.global_batch=8", "train.micro_batch=1"];
            bench.numbers(&bench.config(model, &[plan, &common, more].concat()).unwrap()).unwrap()
        };
        let by_block = numbers(&[]);
        for wrap in wraps {
            let found = numbers(&[&format!("parallel.wrap={wrap}")]);
            let (name, steps) = (model.name, &found.steps);
            assert!(found == by_block, "{name}, {plan:?}, {wrap}: {steps:?}, {:?}", by_block.steps);
        }
    }
}

#[test]
fn weights_that_come_from_the_disk_are_those_that_were_left_there() {
    let bench = Workbench::new().unwrap();
    let disk = tempfile::tempdir().unwrap();
    let disk = format!("parallel.offload.dir={}", disk.path().display());
    let offload = [OPTIMIZER_ON_DISK, PARAMETERS_ON_DISK, &disk];
    let stage_3 = [SHARD_2, "parallel.zero_stage=3"];
    let plans: [(TinyModel, &[&str]); 5] = [
        // Frozen parameters are also on disk, and are never written again.
        (QWEN2_MOE, &["fine_tune.lora_rank=2", "train.precision=bf16"]),
        (
            MIXTRAL,
            &[
                SHARD_2,
                "parallel.zero_stage=3",
                "fine_tune.lora_rank=2",
                "fine_tune.lora_targets=[\"q_proj\"]",
            ],
        ),
        // Weights are quantized after they are read from disk.
        (GPT2, &[SHARD_2, "parallel.zero_stage=3", "parallel.quantize_weights=int8"]),
        (GPT2, &["parallel.data_parallel_shard=4", "parallel.zero_stage=3", "parallel.secondary_shard=2"]),
        (LLAMA, &[PIPELINE_2, "parallel.pipeline_schedule=interleaved_1f1b", "train.precision=bf16"]),
    ];
    for (model, plan) in plans {
        let numbers = |more: &[&str]| -> Numbers {
            let common = ["train.steps=3", "train.global_batch=8", "train.micro_batch=1"];
            bench.numbers(&bench.config(model, &[plan, &common, more].concat()).unwrap()).unwrap()
        };
        let in_memory = numbers(&[]);
        let pools: [&[&str]; 3] =
            [&[], &["parallel.reshard_after_forward=always"], &["parallel.max_live_parameters=80000"]];
        for pool in pools {
            let found = numbers(&[&offload[..], pool].concat());
            assert!(
                found == in_memory,
                "{}, {plan:?}, {pool:?}: {:?}, {:?}",
                model.name,
                found.steps,
                in_memory.steps
            );
        }
    }
    // Evaluation and checkpoints read parameters from disk.
    let alone = [&["train.global_batch=4", "train.precision=bf16"][..], &offload].concat();
    let apart = [&stage_3[..], &["train.global_batch=4", "train.precision=bf16"], &offload].concat();
    let in_memory = ["train.global_batch=4", "train.precision=bf16"];
    let expected = bench.losses_of_both(LLAMA, [&in_memory, &in_memory], 6).unwrap();
    for plans in [[&alone[..], &in_memory], [&in_memory, &alone], [&alone, &alone]] {
        assert_eq!(bench.losses_of_both(LLAMA, plans, 6).unwrap(), expected, "{plans:?}");
    }
    let found = bench.losses_of_both(LLAMA, [&alone, &apart], 6).unwrap();
    assert_eq!(found[..3], expected[..3]);
    assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-3 * b), "{found:?}, {expected:?}");
}

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
fn when_weights_are_gathered_changes_no_bit() {
    let bench = Workbench::new().unwrap();
    let zb_v = ["parallel.pipeline_schedule=zb_v", "parallel.recompute=full"];
    let layouts: [(TinyModel, &[&str]); 8] = [
        (GPT2, &[]),
        (LLAMA, &["train.precision=bf16", "parallel.recompute=selective"]),
        // The vocabulary shards differ in size.
        (GPT2, &[TENSOR_2, SEQUENCE, "model.vocab_size=300", "data.tokenizer=bytes"]),
        (LLAMA, &[PIPELINE_2, "parallel.pipeline_schedule=interleaved_1f1b"]),
        (QWEN3, &[&[PIPELINE_2], &zb_v[..]].concat()),
        (MIXTRAL, &[EXPERT_2, REPLICAS_2]),
        // Frozen parameters are sharded and gathered as well.
        (MIXTRAL, &["fine_tune.lora_rank=2"]),
        (
            QWEN2_MOE,
            &["fine_tune.freeze=[\"model.embed_tokens.*\", \"model.layers.1.*\", \"*norm*\"]", TENSOR_2],
        ),
    ];
    let settings: [&[&str]; 6] = [
        &["parallel.reshard_after_forward=always"],
        &["parallel.reshard_after_forward=always", "parallel.max_live_parameters=60000"],
        &["parallel.reshard_after_forward=auto"],
        &["parallel.max_live_parameters=60000"],
        &["parallel.max_live_parameters=80000"],
        &["parallel.reshard_after_forward=never"],
    ];
    for (model, layout) in layouts {
        let numbers = |settings: &[&str]| -> Numbers {
            let common = [SHARD_2, "train.steps=3", "train.global_batch=8", "train.micro_batch=1"];
            let all: Vec<&str> = common.iter().chain(layout).chain(settings).copied().collect();
            bench.numbers(&bench.config(model, &all).unwrap()).unwrap()
        };
        let expected = numbers(&["parallel.zero_stage=2"]);
        for setting in settings {
            let found = numbers(&[&["parallel.zero_stage=3"], setting].concat());
            assert!(
                found == expected,
                "{}, {layout:?}, {setting:?}: {:?}, stage 2 {:?}",
                model.name,
                found.steps,
                expected.steps
            );
        }
    }
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

#[test]
fn weights_that_neighbours_keep_have_the_bits_of_their_owners() {
    let bench = Workbench::new().unwrap();
    let always = "parallel.reshard_after_forward=always";
    let layouts: [(TinyModel, &[&str]); 4] = [
        (GPT2, &["parallel.data_parallel_shard=4"]),
        (LLAMA, &["parallel.data_parallel_shard=4", "train.precision=bf16", "parallel.recompute=full"]),
        (GPT2, &[SHARD_2, CONTEXT_2, TENSOR_2, SEQUENCE]),
        // Experts of a parallel degree of 2 are sharded over two ranks only, so they have no secondary shard.
        (MIXTRAL, &["parallel.data_parallel_shard=4", EXPERT_2]),
    ];
    for (model, layout) in layouts {
        let numbers = |settings: &[&str]| -> Numbers {
            let common = ["train.steps=3", "train.global_batch=8", "train.micro_batch=1"];
            let all: Vec<&str> = common.iter().chain(layout).chain(settings).copied().collect();
            bench.numbers(&bench.config(model, &all).unwrap()).unwrap()
        };
        let expected = numbers(&["parallel.zero_stage=2"]);
        for settings in [&[always][..], &["parallel.max_live_parameters=60000"]] {
            let found =
                numbers(&[&["parallel.zero_stage=3", "parallel.secondary_shard=2"], settings].concat());
            assert!(
                found == expected,
                "{}, {layout:?}, {settings:?}: {:?}, stage 2 {:?}",
                model.name,
                found.steps,
                expected.steps
            );
        }
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
