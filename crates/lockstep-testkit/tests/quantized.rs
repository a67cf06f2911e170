//! Tests of plans with quantized gradients or weights: their error, their traffic, and bit-exact resume.

use lockstep_plan::{Feedback, Quantization, QuantizedType, ZeroStage};
use lockstep_testkit::parity::{GPT2, LLAMA, MIXTRAL, TinyModel, Workbench};
use lockstep_testkit::quantized::{
    Case, lost, ranks_work_with_the_same_weights, sums_are_within_their_bound, traffic,
    what_one_step_loses_the_next_one_says,
};
use lockstep_train::verify::{Numbers, Tolerance};

const KINDS: [QuantizedType; 2] = [QuantizedType::Int8, QuantizedType::Int4];
const STAGES: [ZeroStage; 3] = [ZeroStage::Optimizer, ZeroStage::Gradients, ZeroStage::Parameters];

fn of_gradients(kind: QuantizedType) -> Quantization {
    Quantization { gradients: Some(kind), ..Quantization::default() }
}

fn case(replicate: usize, shard: usize, zero_stage: ZeroStage, kind: QuantizedType) -> Case {
    Case { replicate, shard, zero_stage, quantization: of_gradients(kind) }
}

#[test]
fn all_ranks_work_with_the_bits_that_codes_say() {
    ranks_work_with_the_same_weights().unwrap();
}

#[test]
fn sums_are_off_by_no_more_than_half_of_each_summands_scale_and_the_same_on_all_replicas() {
    for kind in KINDS {
        for stage in STAGES {
            sums_are_within_their_bound(case(1, 2, stage, kind)).unwrap();
        }
        sums_are_within_their_bound(case(1, 4, ZeroStage::Gradients, kind)).unwrap();
        sums_are_within_their_bound(case(2, 2, ZeroStage::Optimizer, kind)).unwrap();
        // Pieces of unequal length.
        sums_are_within_their_bound(case(3, 2, ZeroStage::Parameters, kind)).unwrap();
    }
}

#[test]
fn with_feedback_nothing_is_lost_over_steps_and_without_as_much_in_each() {
    for (replicate, shard, stage) in
        [(1, 2, ZeroStage::Optimizer), (1, 3, ZeroStage::Parameters), (2, 2, ZeroStage::Gradients)]
    {
        for kind in KINDS {
            let kept = case(replicate, shard, stage, kind);
            what_one_step_loses_the_next_one_says(kept).unwrap();
            let quantization = Quantization { feedback: Feedback::Dropped, ..kept.quantization };
            let lost = lost(Case { quantization, ..kept }, 6).unwrap();
            assert!((lost[5] / lost[0] - 6.0).abs() < 1e-3, "{kept:?}, without feedback: {lost:?}");
        }
    }
}

#[test]
fn ranks_send_what_their_codes_and_scales_take() {
    let bytes = |case: Case| traffic(case).unwrap().bytes as f64;
    // The embedding and the output layer are not tied, so only gradients and weights are sent.
    for (replicate, shard, stage) in
        [(1, 2, ZeroStage::Optimizer), (1, 4, ZeroStage::Gradients), (2, 2, ZeroStage::Gradients)]
    {
        let exact =
            bytes(Case { quantization: Quantization::default(), ..case(replicate, shard, stage, KINDS[0]) });
        for (kind, of_f32) in [(QuantizedType::Int8, 260.0 / 1024.0), (QuantizedType::Int4, 132.0 / 1024.0)] {
            let found = bytes(case(replicate, shard, stage, kind)) / exact;
            assert!(
                (found / of_f32 - 1.0).abs() < 1e-9,
                "{replicate} x {shard}, {stage:?}, {kind}: {found} of f32's, not {of_f32}"
            );
        }
    }
    let weights = Quantization { weights: Some(QuantizedType::Int8), ..Quantization::default() };
    let case =
        |quantization| Case { replicate: 1, shard: 2, zero_stage: ZeroStage::Parameters, quantization };
    let (exact, found) = (bytes(case(Quantization::default())), bytes(case(weights)));
    // Gradients are a third of the traffic; weights are gathered once for forward and once for backward.
    assert!(
        found < 0.67 * exact && found > 0.33 * exact,
        "{found} bytes with weights as int8, {exact} without"
    );
    let both = Quantization { gradients: Some(QuantizedType::Int8), ..weights };
    let found = bytes(case(both)) / exact;
    assert!((found / (260.0 / 1024.0) - 1.0).abs() < 1e-9, "weights and gradients as int8: {found} of f32's");
}

const ZERO_1: &str = "parallel.zero_stage=1";
const ZERO_2: &str = "parallel.zero_stage=2";
const ZERO_3: &str = "parallel.zero_stage=3";
const SHARD_2: &str = "parallel.data_parallel_shard=2";
const INT4: &str = "parallel.quantize_gradients=int4";
const INT8: &str = "parallel.quantize_gradients=int8";
const WEIGHTS: &str = "parallel.quantize_weights=int8";

#[test]
fn plans_that_quantize_compute_what_one_rank_computes_but_for_what_codes_lose() {
    let bench = Workbench::new().unwrap();
    let plans: [(TinyModel, &[&str]); 8] = [
        (GPT2, &[SHARD_2, ZERO_1, INT8]),
        (LLAMA, &[SHARD_2, ZERO_2, INT8, "parallel.data_parallel_replicate=2"]),
        (LLAMA, &[SHARD_2, ZERO_3, INT8, WEIGHTS]),
        (GPT2, &[SHARD_2, ZERO_3, WEIGHTS, "train.precision=bf16"]),
        (LLAMA, &["parallel.context_parallel=2", ZERO_2, INT8]),
        (GPT2, &[SHARD_2, ZERO_2, INT8, "parallel.tensor_parallel=2", "parallel.sequence_parallel=true"]),
        // The gradient of the tied embedding is all-reduced between the first and the last stage without quantization.
        (LLAMA, &[SHARD_2, ZERO_1, INT8, "parallel.pipeline_parallel=2"]),
        (MIXTRAL, &["parallel.data_parallel_shard=4", ZERO_3, INT8, "parallel.expert_parallel=2"]),
    ];
    for (model, plan) in plans {
        let config = bench.config(model, plan).unwrap();
        let lines = bench.differences(model, plan, Tolerance::of(config.plan.quantization())).unwrap();
        assert!(lines.is_empty(), "{}: {}", model.name, lines.join("\n"));
    }
}

#[test]
fn a_run_goes_on_with_every_bit_of_what_codes_have_lost() {
    let bench = Workbench::new().unwrap();
    let batch = ["train.global_batch=4", "train.micro_batch=1"];
    let plans: [(TinyModel, &[&str]); 3] = [
        (LLAMA, &[SHARD_2, "parallel.data_parallel_replicate=2", ZERO_2, INT4]),
        (
            GPT2,
            &[
                SHARD_2,
                ZERO_3,
                INT8,
                WEIGHTS,
                "parallel.tensor_parallel=2",
                "parallel.sequence_parallel=true",
            ],
        ),
        (LLAMA, &[SHARD_2, ZERO_1, INT4, "parallel.pipeline_parallel=2"]),
    ];
    for (model, plan) in plans {
        let plan: Vec<&str> = plan.iter().chain(&batch).copied().collect();
        let whole = bench.config(model, &[&plan[..], &["train.steps=6"]].concat()).unwrap();
        let whole: Vec<f64> = bench.numbers(&whole).unwrap().steps.iter().map(|step| step[0]).collect();
        let found = bench.losses_of_both(model, [&plan, &plan], 6).unwrap();
        assert_eq!(found, whole, "{}, {plan:?}", model.name);
    }
    // With another number of ranks the saved residuals do not apply, so error feedback starts from zero.
    let plan: Vec<&str> = [SHARD_2, ZERO_2, INT8].into_iter().chain(batch).collect();
    let other: Vec<&str> =
        ["parallel.data_parallel_shard=4", ZERO_2, INT8].into_iter().chain(batch).collect();
    let found = bench.losses_of_both(LLAMA, [&plan, &other], 4).unwrap();
    assert_eq!(found.len(), 4, "{found:?}");
}

#[test]
fn a_short_run_learns_as_well_with_quantized_gradients() {
    let bench = Workbench::new().unwrap();
    let losses = |more: &[&str]| -> Numbers {
        let run = [SHARD_2, ZERO_3, "train.steps=40", "optimizer.lr=3e-3", "schedule.warmup_steps=4"];
        let config = bench.config(LLAMA, &[&run[..], more].concat()).unwrap();
        bench.numbers(&config).unwrap()
    };
    let last = |numbers: &Numbers| numbers.steps[30..].iter().map(|step| step[0]).sum::<f64>() / 10.0;
    let exact = losses(&[]);
    let learned = exact.steps[0][0] - last(&exact);
    for (settings, allowed) in [(&[INT8][..], 0.01), (&[INT8, WEIGHTS], 0.03), (&[INT4], 0.05)] {
        let found = last(&losses(settings)) - last(&exact);
        assert!(
            found.abs() < allowed * learned,
            "{settings:?}: {found} above the loss of {}, of {learned} learned",
            last(&exact)
        );
    }
}
