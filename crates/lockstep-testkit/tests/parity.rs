//! One model, any plan: the numbers are those of one rank.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

use lockstep_testkit::parity::{GPT2, LLAMA, MISTRAL, MODELS, QWEN3, TinyModel, Workbench};
use lockstep_train::verify::{Numbers, Tolerance};

/// Checks models under plans, and tells all that differ at once.
fn check(models: &[TinyModel], plans: &[&[&str]]) {
    let bench = Workbench::new().unwrap();
    let mut failures = Vec::new();
    for model in models {
        for plan in plans {
            let lines = match bench.differences(*model, plan, Tolerance::F32) {
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

const TENSOR_2: &str = "parallel.tensor_parallel=2";
const TENSOR_4: &str = "parallel.tensor_parallel=4";
const SEQUENCE: &str = "parallel.sequence_parallel=true";
const PIPELINE_2: &str = "parallel.pipeline_parallel=2";
const PIPELINE_4: &str = "parallel.pipeline_parallel=4";
const REPLICAS_2: &str = "parallel.data_parallel_replicate=2";

const CONTEXT_2: &str = "parallel.context_parallel=2";
const CONTEXT_4: &str = "parallel.context_parallel=4";
const MICRO_BATCH_2: &str = "train.micro_batch=2";
const METHODS: [&str; 3] = [
    "parallel.context_parallel_method=ring",
    "parallel.context_parallel_method=all_gather",
    "parallel.context_parallel_method=all_to_all",
];

const SCHEDULES: [&str; 7] =
    ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zb_h1", "zb_v", "dualpipe_v"];

#[test]
fn tensor_parallel_ranks_have_the_numbers_of_one() {
    check(&MODELS, &[&[TENSOR_2], &[TENSOR_4], &[TENSOR_2, REPLICAS_2]]);
}

#[test]
fn so_have_ranks_that_split_tokens_between_products_whatever_they_recompute() {
    for recompute in ["none", "selective", "full"] {
        let recompute = format!("parallel.recompute={recompute}");
        check(&MODELS, &[&[TENSOR_2, SEQUENCE, &recompute], &[TENSOR_4, SEQUENCE, &recompute]]);
    }
    check(&MODELS, &[&[TENSOR_2, SEQUENCE, REPLICAS_2]]);
}

#[test]
fn a_pipeline_has_the_numbers_of_one_rank_under_every_schedule() {
    for schedule in SCHEDULES {
        let schedule = format!("parallel.pipeline_schedule={schedule}");
        check(&MODELS, &[&[PIPELINE_2, &schedule]]);
    }
    check(&[GPT2, LLAMA], &[&[PIPELINE_4], &[PIPELINE_4, "parallel.pipeline_schedule=zb_h1"]]);
}

#[test]
fn pipelines_compose_with_tensor_parallel_and_replicas() {
    let h1 = "parallel.pipeline_schedule=zb_h1";
    let v = "parallel.pipeline_schedule=zb_v";
    check(
        &MODELS,
        &[
            &[PIPELINE_2, REPLICAS_2],
            &[PIPELINE_2, REPLICAS_2, v],
            &[PIPELINE_2, TENSOR_2],
            &[PIPELINE_2, TENSOR_2, SEQUENCE, h1],
            &[PIPELINE_2, TENSOR_2, SEQUENCE, REPLICAS_2, v],
        ],
    );
}

#[test]
fn schedules_and_recomputation_change_no_bit() {
    let bench = Workbench::new().unwrap();
    let numbers = |settings: &[&str]| -> Numbers {
        let settings: Vec<&str> = settings.iter().copied().chain(["train.steps=3"]).collect();
        bench.numbers(&bench.config(GPT2, &settings).unwrap()).unwrap()
    };
    let expected = numbers(&[]);
    for schedule in SCHEDULES {
        for recompute in ["none", "full"] {
            let [schedule, recompute] =
                [format!("pipeline_schedule={schedule}"), format!("recompute={recompute}")]
                    .map(|setting| format!("parallel.{setting}"));
            let found = numbers(&[PIPELINE_2, &schedule, &recompute]);
            assert!(
                found == expected,
                "{schedule}, {recompute}: {:?}, one rank {:?}",
                found.steps,
                expected.steps
            );
        }
    }
}

#[test]
fn ranks_that_share_sequences_have_the_numbers_of_one_by_every_method() {
    for method in METHODS {
        check(&MODELS, &[&[CONTEXT_2, method, MICRO_BATCH_2], &[CONTEXT_4, method]]);
    }
    // More ranks than key/value heads, and one token in each half.
    check(
        &[LLAMA, QWEN3],
        &METHODS.map(|method| ["parallel.context_parallel=8", method]).each_ref().map(|plan| &plan[..]),
    );
}

#[test]
fn so_they_have_with_packed_documents_and_sliding_windows() {
    for method in METHODS {
        for packing in ["data.packing=documents", "data.packing=whole_documents"] {
            check(&[GPT2, LLAMA], &[&[CONTEXT_2, method, packing, MICRO_BATCH_2]]);
        }
        check(&[MISTRAL], &[&[CONTEXT_2, method], &[CONTEXT_4, method, "data.packing=documents"]]);
    }
}

#[test]
fn so_they_have_whatever_they_recompute() {
    for method in METHODS {
        check(
            &[GPT2, LLAMA],
            &[
                &[CONTEXT_2, method, "parallel.recompute=selective"],
                &[CONTEXT_2, method, MICRO_BATCH_2, "parallel.recompute=full"],
            ],
        );
    }
}

#[test]
fn context_composes_with_tensor_parallel_pipelines_and_replicas() {
    for method in METHODS {
        check(
            &MODELS,
            &[
                &[CONTEXT_2, method, REPLICAS_2],
                &[CONTEXT_2, method, TENSOR_2],
                &[CONTEXT_2, method, TENSOR_2, SEQUENCE, REPLICAS_2],
                &[CONTEXT_2, method, PIPELINE_2, "parallel.pipeline_schedule=zb_h1"],
                &[CONTEXT_2, method, PIPELINE_2, TENSOR_2, SEQUENCE],
            ],
        );
    }
}

#[test]
fn runs_of_twenty_steps_stay_together() {
    check(
        &[LLAMA],
        &[
            &["train.steps=20", TENSOR_2, SEQUENCE],
            &["train.steps=20", PIPELINE_2],
            &["train.steps=20", PIPELINE_2, TENSOR_2, REPLICAS_2],
            &["train.steps=20", CONTEXT_2, METHODS[0]],
            &["train.steps=20", CONTEXT_2, METHODS[1]],
            &["train.steps=20", CONTEXT_2, METHODS[2]],
        ],
    );
}
