//! `verify`: a plan yields the numbers of one rank, and errors explain why a plan cannot be verified.

use serde_json::Value;

use crate::workshop::{Outcome, Workshop};

fn verify(workshop: &Workshop, settings: &[&str], more: &[&str]) -> Outcome {
    let sets = settings.iter().flat_map(|setting| ["--set", setting]);
    workshop.run(&["verify"].into_iter().chain(sets).chain(more.iter().copied()).collect::<Vec<_>>())
}

#[test]
fn a_built_in_run_agrees_with_one_rank_under_every_plan() {
    let workshop = Workshop::new();
    let plans: [(&[&str], &str); 6] = [
        (&[], "one rank, recompute none, f32; 2 steps"),
        (&["parallel.tensor_parallel=2"], "2 tensor-parallel ranks, recompute none"),
        (
            &["parallel.pipeline_parallel=2", "parallel.tensor_parallel=2"],
            "2 pipeline ranks (1f1b) of 2 tensor-parallel ranks",
        ),
        (
            &[
                "parallel.tensor_parallel=2",
                "parallel.sequence_parallel=true",
                "parallel.data_parallel_replicate=2",
            ],
            "2 replicas of 2 tensor-parallel ranks with sequence parallelism",
        ),
        (
            &["parallel.context_parallel=2", "parallel.tensor_parallel=2"],
            "2 context-parallel ranks (ring) of 2 tensor-parallel ranks",
        ),
        // Keys travel around the ring, carried by the transport's own thread.
        (&["parallel.context_parallel=4", "parallel.transport=tcp"], "4 context-parallel ranks (ring)"),
    ];
    for (settings, words) in plans {
        let outcome = verify(&workshop, settings, &[]).succeeds();
        assert!(outcome.stdout.contains(words), "{outcome:?}");
        assert!(
            outcome.stdout.contains("verdict    the plan computes what one rank computes"),
            "{outcome:?}"
        );
        assert_eq!(outcome.stderr, "", "{outcome:?}");
    }
    for left in ["runs", "checkpoints", "cache"] {
        assert!(!workshop.path(left).exists(), "{left} is left behind");
    }
}

#[test]
fn a_plan_that_quantizes_is_said_to_be_lossy_and_held_to_what_its_codes_may_lose() {
    let workshop = Workshop::new();
    let plan = [
        "parallel.data_parallel_shard=2",
        "parallel.zero_stage=3",
        "parallel.quantize_weights=int8",
        "parallel.quantize_gradients=int8",
    ];
    let outcome = verify(&workshop, &plan, &[]).succeeds();
    for words in [
        "ZeRO stage 3, weights sent as int8, gradients sent as int8",
        "the plan is lossy by choice",
        "verdict    the plan computes what one rank computes, but for what its codes lose",
    ] {
        assert!(outcome.stdout.contains(words), "{words:?} is not in {outcome:?}");
    }
}

#[test]
fn what_is_compared_is_told_as_json_as_well() {
    let workshop = Workshop::new();
    let found = verify(&workshop, &["parallel.tensor_parallel=2"], &["--steps", "1", "--json"]).json();
    assert_eq!(
        (&found["within"], &found["ranks"], &found["mesh"]["tensor"]),
        (&true.into(), &2.into(), &2.into())
    );
    let steps = found["steps"].as_array().unwrap();
    assert_eq!(steps.len(), 2, "loss and gradient norm of one step: {steps:?}");
    let relative = steps[0]["difference"].as_f64().unwrap();
    assert!(relative <= 1e-5 && steps[0]["allowed"] == 1e-5, "{steps:?}");
    let gradients = found["gradients"].as_array().unwrap();
    assert!(gradients.len() > 30 && gradients[0]["difference"].as_f64() > Some(0.0), "{gradients:?}");
    assert_eq!(found["failures"], Value::Array(Vec::new()));
}

#[test]
fn a_run_of_ones_own_is_verified_and_left_alone() {
    let workshop = Workshop::new();
    let arguments = ["verify", "run.toml", "--set", "parallel.tensor_parallel=2", "--steps", "3"];
    let outcome = workshop.run(&arguments).succeeds();
    assert!(outcome.stdout.contains("   3  loss"), "{outcome:?}");
    assert!(!workshop.path("runs").exists() && !workshop.path("checkpoints").exists());
}

#[test]
fn bf16_plans_are_held_against_f32() {
    let workshop = Workshop::new();
    for plan in [
        &["parallel.tensor_parallel=2"][..],
        &["parallel.tensor_parallel=2", "parallel.sequence_parallel=true"],
        &["parallel.tensor_parallel=4", "parallel.tensor_layout=2d"],
        &["parallel.context_parallel=4"],
        &["parallel.context_parallel=2", "parallel.context_parallel_method=all_gather"],
        &["parallel.context_parallel=4", "parallel.context_parallel_method=all_to_all"],
    ] {
        let settings = [&["train.precision=bf16"], plan].concat();
        let outcome = verify(&workshop, &settings, &[]).succeeds();
        assert!(outcome.stdout.contains("1.5 times as far as one rank in bf16"), "{outcome:?}");
        assert!(outcome.stdout.contains("all parameters"), "{outcome:?}");
    }
}

#[test]
fn a_plan_file_says_what_the_keys_would() {
    let workshop = Workshop::new();
    let plan = |mesh: &str, more: &str| {
        let text = format!("{{\"version\": 1, \"mesh\": {mesh}, \"micro_batch\": 2, \"stages\": [6]{more}}}");
        workshop.write("plan.json", text);
        verify(&workshop, &[], &["--plan", "plan.json"])
    };
    let outcome = plan("{\"tensor\": 2, \"replicate\": 2}", ", \"recompute\": \"full\"").succeeds();
    assert!(outcome.stdout.contains("2 replicas of 2 tensor-parallel ranks, recompute full"), "{outcome:?}");
    let slices = ", \"recompute\": \"full\", \"partition_activations\": true";
    let outcome = plan("{\"tensor\": 2}", slices).succeeds();
    assert!(outcome.stdout.contains("2 tensor-parallel ranks keeping slices, recompute full"), "{outcome:?}");
    plan("{\"tensor\": 2}", ", \"partition_activations\": true").refuses(
        2,
        &["plan.json", "parallel.partition_activations", "parallel.recompute = \"none\" has none"],
    );
    let outcome = plan("{\"tensor\": 4}", ", \"tensor_layout\": \"2d\"").succeeds();
    assert!(outcome.stdout.contains("4 tensor-parallel ranks in two dimensions"), "{outcome:?}");
    let outcome = plan("{\"context\": 2}", ", \"context_method\": \"all_gather\"").succeeds();
    assert!(outcome.stdout.contains("2 context-parallel ranks (all_gather)"), "{outcome:?}");
    let outcome = plan("{\"shard\": 2}", ", \"zero_stage\": 3").succeeds();
    assert!(outcome.stdout.contains("2 data-parallel ranks, ZeRO stage 3"), "{outcome:?}");
    let most = |number: usize| {
        let sharding = format!(", \"zero_stage\": 3, \"sharding\": {{\"max_live_parameters\": {number}}}");
        plan("{\"shard\": 2}", &sharding)
    };
    most(60_000).succeeds();
    // The number of parameters that a unit reads is known to the ranks alone.
    let outcome = most(9);
    let message = "max_live_parameters: unit 0 reads 8192 parameters at once, and 9 may be whole; allowed: 8192 or more";
    assert!(outcome.code == Some(2) && outcome.stderr.contains(message), "{outcome:?}");
    plan("{\"shard\": 2}", ", \"zero_stage\": 4").refuses(2, &["zero_stage", "4", "<= 3"]);
    plan("{\"pipeline\": 2}", "").refuses(2, &["plan.json", "1 stages and its schedule has 2"]);
    plan("{\"tensor\": 3}", "")
        .refuses(2, &["tensor 3 does not divide the 8 attention heads; nearest: 2 or 4"]);
    plan("{\"tensor\": 2}", ", \"tensr\": 2").refuses(2, &["plan.json", "tensr"]);
    plan("{\"tensor\": 2}", ", \"schedule\": {\"kind\": \"zb_v\", \"chunks\": 3}")
        .refuses(2, &["plan.json", "zb_v"]);
    verify(&workshop, &[], &["--plan", "none.json"]).refuses(2, &["none.json", "No such file"]);
}

#[test]
fn degrees_that_do_not_fit_are_refused_before_any_rank_starts() {
    let workshop = Workshop::new();
    verify(&workshop, &["parallel.tensor_parallel=5"], &[]).refuses(
        2,
        &[
            "tensor 5 does not divide the 8 attention heads; nearest: 4 or 8",
            "neither a divisor nor a multiple of the 2 key/value heads",
            "48 columns",
        ],
    );
    verify(
        &workshop,
        &["parallel.context_parallel=3", "parallel.context_parallel_method=all_to_all", "train.seq_len=14"],
        &[],
    )
    .refuses(
        2,
        &[
            "train.seq_len: seq_len 14 is not a multiple of context = 3; nearest: 12 or 15",
            "parallel.context_parallel: context x tensor 3 does not divide the 8 attention heads; nearest: 2 or 4",
            "parallel.context_parallel: context x tensor 3 is neither a divisor nor a multiple of the 2 key/value heads",
        ],
    );
    verify(&workshop, &["parallel.data_parallel_replicate=3"], &[]).refuses(2, &["3 ranks cannot share"]);
    verify(&workshop, &[], &["--steps", "0"]).refuses(2, &["--steps"]);
}
