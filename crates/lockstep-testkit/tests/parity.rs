//! One model, any plan: the numbers are those of one rank.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

use lockstep_testkit::parity::{GPT2, LLAMA, MODELS, TinyModel, Workbench};
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
fn runs_of_twenty_steps_stay_together() {
    check(
        &[LLAMA],
        &[
            &["train.steps=20", TENSOR_2, SEQUENCE],
            &["train.steps=20", PIPELINE_2],
            &["train.steps=20", PIPELINE_2, TENSOR_2, REPLICAS_2],
        ],
    );
}
