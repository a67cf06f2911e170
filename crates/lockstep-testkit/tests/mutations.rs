//! A test of the parity matrix: whatever sum is left out or number is taken from the wrong place, some plan notices.
//!
//! `cargo xtask mutations` runs it; the faults are compiled in with the feature `mutations` only.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

use lockstep_graph::mutation::{Mutation, activate};
use lockstep_plan::{Quantization, QuantizedType, ZeroStage};
use lockstep_testkit::parity::{GPT2, LLAMA, MIXTRAL, TinyModel, Workbench};
use lockstep_testkit::quantized::{
    Case, Found, ranks_work_with_the_same_weights, what_one_step_loses_the_next_one_says,
};
use lockstep_train::verify::Tolerance;

/// Biases are zero at first: only after a step do they differ. Plain gradient descent keeps rounding small.
const STEPS: [&str; 5] = [
    "train.steps=3",
    "optimizer.kind=sgd",
    "optimizer.lr=0.5",
    "schedule.kind=constant",
    "schedule.warmup_steps=0",
];

const ZERO_1: [&str; 2] = ["parallel.data_parallel_shard=2", "parallel.zero_stage=1"];
const SHARD_2: &str = "parallel.data_parallel_shard=2";
const ZERO_3: &str = "parallel.zero_stage=3";
const SECONDARY: [&str; 4] = [
    "parallel.data_parallel_shard=4",
    ZERO_3,
    "parallel.reshard_after_forward=always",
    "parallel.secondary_shard=2",
];
const CONTEXT_2: &str = "parallel.context_parallel=2";

const SQUARE: [&str; 3] = ["parallel.tensor_parallel=4", "parallel.tensor_layout=2d", "train.micro_batch=2"];

/// A few of the matrix, the most general first.
fn plans() -> Vec<(TinyModel, Vec<&'static str>)> {
    let all = [
        "parallel.tensor_parallel=2",
        "parallel.sequence_parallel=true",
        "parallel.data_parallel_replicate=2",
    ];
    vec![
        (GPT2, all.to_vec()),
        (LLAMA, all.to_vec()),
        (
            LLAMA,
            vec!["parallel.tensor_parallel=2", "parallel.sequence_parallel=true", "parallel.tensor_chunks=2"],
        ),
        (GPT2, vec!["parallel.tensor_parallel=2"]),
        (LLAMA, vec!["parallel.tensor_parallel=4"]),
        (
            LLAMA,
            vec![
                "parallel.tensor_parallel=2",
                "parallel.recompute=full",
                "parallel.partition_activations=true",
            ],
        ),
        (GPT2, [&["parallel.tensor_parallel=2"], &STEPS[..]].concat()),
        (GPT2, vec![CONTEXT_2, "parallel.context_parallel_method=ring"]),
        (LLAMA, vec![CONTEXT_2, "parallel.context_parallel_method=all_gather"]),
        (GPT2, vec![CONTEXT_2, "parallel.context_parallel_method=all_to_all"]),
        (LLAMA, vec!["parallel.pipeline_parallel=2"]),
        (LLAMA, vec![SHARD_2, ZERO_3]),
        (GPT2, vec![SHARD_2, ZERO_3, "parallel.reshard_after_forward=always"]),
        (GPT2, [&SECONDARY[..], &STEPS].concat()),
        (GPT2, [&ZERO_1[..], &["parallel.data_parallel_replicate=2"], &STEPS[..]].concat()),
        (GPT2, SQUARE.to_vec()),
        (
            MIXTRAL,
            vec![
                "parallel.tensor_parallel=2",
                "parallel.data_parallel_shard=2",
                "parallel.expert_parallel=2",
            ],
        ),
        (MIXTRAL, vec!["parallel.tensor_parallel=2", "parallel.expert_tensor_parallel=2"]),
        // Few tokens, so that the replicas look up different rows.
        (LLAMA, vec!["parallel.data_parallel_replicate=2", "train.global_batch=2"]),
    ]
}

/// What no plan of the matrix does, for it loses something.
fn noticed_by_quantized_sums() -> Found {
    let gradients = Some(QuantizedType::Int4);
    let quantization = Quantization { gradients, ..Quantization::default() };
    let case = Case { replicate: 2, shard: 2, zero_stage: ZeroStage::Gradients, quantization };
    ranks_work_with_the_same_weights()?;
    what_one_step_loses_the_next_one_says(case)
}

#[test]
fn every_fault_is_noticed_by_a_plan() {
    let bench = Workbench::new().unwrap();
    // The numbers of one rank are computed here, once and without a fault.
    for (model, plan) in plans() {
        let lines = bench.differences(model, &plan, Tolerance::F32).unwrap();
        assert!(
            lines.is_empty(),
            "without a fault: {}, {}: {}",
            model.name,
            plan.join(" "),
            lines.join("\n")
        );
    }
    noticed_by_quantized_sums().unwrap();
    let mut unnoticed = Vec::new();
    for mutation in Mutation::ALL {
        activate(Some(mutation));
        let noticed = plans().into_iter().find_map(|(model, plan)| {
            let words = match bench.differences(model, &plan, Tolerance::F32) {
                Ok(lines) => lines.into_iter().next()?,
                Err(error) => error.to_string(),
            };
            Some(format!("{}, {}: {words}", model.name, plan.join(" ")))
        });
        let noticed = noticed.or_else(|| noticed_by_quantized_sums().err().map(|error| error.to_string()));
        activate(None);
        match noticed {
            Some(how) => println!("{mutation:?}: {how}"),
            None => unnoticed.push(mutation),
        }
    }
    assert!(unnoticed.is_empty(), "no plan notices {unnoticed:?}");
}
