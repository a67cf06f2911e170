use proptest::{prelude::*, sample::select};

use super::*;
use crate::{Feedback, LayerRule, MemoryBytes, MemoryCategory, QuantizedType, Recompute, Residence};

/// A model of 12 layers on 8 ranks.
fn facts() -> Facts {
    Facts {
        model: "a model".to_owned(),
        layers: 12,
        heads: 12,
        key_value_heads: 4,
        hidden: 768,
        intermediate: 3072,
        has_latent_attention: false,
        vocab: 50_257,
        experts: 0,
        expert_intermediate: 0,
        seq_len: 1024,
        global_batch: 32,
        world_size: 8,
    }
}

fn plan() -> Plan {
    Plan {
        version: PLAN_VERSION,
        model: "a model".to_owned(),
        mesh: Degrees { pipeline: 2, shard: 2, tensor: 2, ..Degrees::default() },
        micro_batch: Some(2),
        schedule: PipelineSchedule::published(Kind::ZeroBubbleV, 2),
        stages: vec![4, 3, 3, 4],
        recompute: Recompute::Selective.into(),
        partition_activations: false,
        sequence_parallel: true,
        tensor_layout: TensorDimensions::One,
        tensor_chunks: Some(4),
        context_method: ContextMethod::Ring,
        zero_stage: 1,
        quantize_weights: None,
        quantize_gradients: None,
        quantize_feedback: Feedback::Kept,
        sharding: Sharding::default(),
        residence: Residences::default(),
        bucket_mb: DEFAULT_BUCKET_MB,
        predicted: None,
    }
}

/// All problems of a plan, as text.
fn problems(plan: &Plan, facts: &Facts) -> Vec<String> {
    match plan.check(facts) {
        Err(PlanError::Invalid(problems)) => problems.iter().map(PlanProblem::to_string).collect(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_plan_that_fits_gives_its_mesh_schedule_and_stages() {
    let valid = plan().check(&facts()).unwrap();
    let StepLayout { mesh, schedule, stages, micro_batches } = valid.layout();
    assert_eq!((mesh.world_size(), *micro_batches), (8, 8));
    let schedule = schedule.as_ref().unwrap();
    assert_eq!((schedule.stages(), schedule.micro_batches()), (4, 8));
    assert_eq!(stages, &[0..4, 4..7, 7..10, 10..14]);
}

#[test]
fn a_file_leads_back_to_its_plan_and_what_is_not_said_has_its_default() {
    let rows = Plan { schedule: PipelineSchedule::rows(vec!["F0,B0".to_owned()]), ..plan() };
    let sharding = Sharding { max_live_parameters: Some(7), ..Sharding::default() };
    let shared_out = Plan { zero_stage: 3, sharding, ..plan() };
    let residence = Residences { optimizer: Residence::Disk, fraction: 0.3, ..Residences::default() };
    let on_disk = Plan { residence, bucket_mb: 4.0, ..plan() };
    for plan in [plan(), rows, shared_out, on_disk] {
        assert_eq!(Plan::from_json(&plan.to_json().unwrap()).unwrap(), plan);
    }
    let short = r#"{"version": 1, "model": "m", "micro_batch": 3, "stages": [14]}"#;
    let expected = Plan { model: "m".to_owned(), micro_batch: Some(3), stages: vec![14], ..Plan::default() };
    assert_eq!(Plan::from_json(short).unwrap(), expected);
}

fn memory(ranks: &str, parameters: usize) -> RanksMemory {
    let mut bytes = MemoryBytes::default();
    bytes[MemoryCategory::Parameters] = parameters;
    RanksMemory { ranks: ranks.to_owned().try_into().unwrap(), bytes }
}

#[test]
fn what_was_predicted_goes_through_a_file_and_says_one_thing_of_a_rank() {
    let predicted =
        PlanPrediction { memory: vec![memory("0-2,5", 4096), memory("3-4,6-7", 2048)], step: None };
    assert_eq!([0, 2, 4, 5, 7].map(|rank| predicted.of_rank(rank).map(|bytes| bytes.total())), {
        [4096, 4096, 2048, 4096, 2048].map(Some)
    });
    assert_eq!(predicted.of_rank(8), None);
    let plan = Plan { predicted: Some(predicted), ..plan() };
    assert_eq!(Plan::from_json(&plan.to_json().unwrap()).unwrap(), plan);
    assert!(plan.check(&facts()).is_ok(), "{:?}", plan.check(&facts()));
    let twice =
        PlanPrediction { memory: vec![memory("0-5", 1), memory("2,7", 1), memory("0", 1)], step: None };
    assert_eq!(
        problems(&Plan { predicted: Some(twice), ..plan }, &facts()),
        ["predicted.memory has rank 0 more than once", "predicted.memory has rank 2 more than once"]
    );
    assert_eq!(RankList::from_iter([0, 1, 2, 4, 6, 7]).to_string(), "0-2,4,6-7");
}

#[test]
fn chunks_of_less_than_a_token_are_refused() {
    // Two sequences of 1,024 tokens, shared out among two ranks or not.
    let limit = |sequence_parallel: bool, chunks: usize| {
        let plan = Plan { sequence_parallel, tensor_chunks: Some(chunks), ..plan() };
        plan.check(&facts()).map(drop).map_err(|error| error.to_string())
    };
    assert_eq!((limit(true, 1024), limit(false, 2048)), (Ok(()), Ok(())));
    let message = "tensor_chunks 1025 cuts the 1024 tokens that a rank has of a micro-batch into less than one each; \
                   at most: 1024";
    assert_eq!(limit(true, 1025), Err(message.to_owned()));
    assert_eq!(limit(false, 0), Err("tensor_chunks is 0; it is at least 1".to_owned()));
}

#[test]
fn a_text_that_is_no_plan_is_refused_with_the_reason() {
    let message = |text: &str| Plan::from_json(text).unwrap_err().to_string();
    let with =
        |field: &str| format!(r#"{{"version": 1, "model": "", "micro_batch": 1, "stages": [], {field}}}"#);
    let of_memory = |ranks: &str, category: &str, bytes: &str| {
        with(&format!(
            r#""predicted": {{"memory": [{{"ranks": "{ranks}", "bytes": {{"{category}": {bytes}}}}}]}}"#
        ))
    };
    for (text, expected) in [
        ("{".to_owned(), "EOF while parsing"),
        (with(r#""mesch": {}"#), "unknown field `mesch`, expected one of `version`, `model`, `mesh`"),
        (with(r#""mesh": {"tensors": 2}"#), "unknown field `tensors`"),
        (with(r#""schedule": {"kind": "2f2b"}"#), "unknown variant `2f2b`, expected one of `gpipe`, `1f1b`"),
        (
            with(r#""schedule": {"kind": "1f1b", "rows": []}"#),
            "either a kind, with its number of chunks, or rows",
        ),
        (with(r#""zero_stage": -1"#), "invalid value: integer `-1`, expected u8"),
        (with(r#""predicted": {"step_ms": 1}"#), "unknown field `step_ms`, expected `memory`"),
        (
            of_memory("3-1", "parameters", "1"),
            "the ranks \"3-1\" are no ascending list of numbers and ranges",
        ),
        (of_memory("0,0", "parameters", "1"), "the ranks \"0,0\" are no ascending"),
        (of_memory("+1", "parameters", "1"), "the ranks \"+1\" are no ascending"),
        (of_memory("", "parameters", "1"), "the ranks \"\" are no ascending"),
        (
            of_memory("0", "weights", "1"),
            "unknown variant `weights`, expected one of `parameters`, `gradients`",
        ),
        (of_memory("0", "cached", "1"), "what is cached is not predicted"),
        (of_memory("0", "parameters", "-1"), "invalid value: integer `-1`, expected usize"),
    ] {
        let message = message(&text);
        assert!(message.starts_with("this is no plan: ") && message.contains(expected), "{message}");
    }
    // A later version is told as such, not by its first unknown field.
    assert_eq!(
        message(r#"{"version": 2, "news": 1}"#),
        "the plan's format has version 2; this program reads version 1"
    );
}

#[test]
fn every_problem_is_told_at_once_with_its_numbers_and_the_nearest_valid_choice() {
    let wrong = Plan {
        model: "another".to_owned(),
        mesh: Degrees { pipeline: 2, replicate: 3, tensor: 5, expert: 3, ..Degrees::default() },
        micro_batch: Some(3),
        schedule: PipelineSchedule::published(Kind::Interleaved, 1),
        stages: vec![5, 0, 4],
        zero_stage: 4,
        ..plan()
    };
    assert_eq!(
        problems(&wrong, &facts()),
        [
            "the plan is for the model another, and this one is a model",
            "zero_stage 4 does not exist; it is 0, 1, 2 or 3",
            "expert 3 does not divide shard x context x tensor / expert_tensor = 5; nearest: 1 or 5",
            "the mesh has 30 ranks and the world 8; its other axes have 10, so it can have any multiple of that; \
             nearest: 10",
            "tensor 5 does not divide the 12 attention heads; nearest: 4 or 12",
            "tensor 5 is neither a divisor nor a multiple of the 4 key/value heads; nearest: 4 or 12",
            "tensor 5 does not divide the 3072 columns of the feed-forward layers; nearest: 4 or 12",
            "expert 3 needs a model with experts, and this one has none; nearest: 1",
            "seq_len 1024 is not a multiple of context x tensor = 5; nearest: 1020 or 1025",
            "global_batch 32 is not a multiple of replicate x shard x micro_batch = 9; nearest: 27 or 36",
            "the plan splits the model into 3 stages and its schedule has 2, 1 on each of 2 ranks",
            "stage 1 has no unit; it has at least 1",
            "the stages have 9 units and the model 14: embedding, 12 blocks and head",
            "schedule of 4 micro-batches: interleaved_1f1b cannot have 1 stages on each rank; nearest: 2",
        ]
    );
}

#[test]
fn a_world_of_another_size_is_told_with_the_replicas_that_would_fill_it() {
    assert_eq!(
        problems(&plan(), &Facts { world_size: 24, ..facts() }),
        ["the mesh has 8 ranks and the world 24; with replicate 3 it would have as many"]
    );
}

#[test]
fn context_parallel_splits_sequences_and_for_all_to_all_heads() {
    let mesh = Degrees { context: 4, tensor: 2, ..Degrees::default() };
    let plan = Plan { mesh, schedule: PipelineSchedule::default(), stages: vec![14], ..plan() };
    let short = Facts { seq_len: 1004, ..facts() };
    assert_eq!(
        problems(&plan, &short),
        ["seq_len 1004 is not a multiple of 2 x context and context x tensor = 8; nearest: 1000 or 1008"]
    );
    let plan = Plan { sequence_parallel: false, context_method: ContextMethod::AllToAll, ..plan };
    assert_eq!(
        problems(&plan, &short),
        ["context x tensor 8 does not divide the 12 attention heads; nearest: 4 or 12"]
    );
    let fewer = Facts { heads: 16, key_value_heads: 4, ..short };
    assert!(plan.check(&fewer).is_ok(), "{:?}", plan.check(&fewer));
}

#[test]
fn key_value_heads_may_be_fewer_than_tensor_ranks_if_they_divide_them() {
    let mesh = Degrees { tensor: 8, ..Degrees::default() };
    let plan = Plan { mesh, schedule: PipelineSchedule::default(), stages: vec![14], ..plan() };
    let fits = |heads, key_value_heads| plan.check(&Facts { heads, key_value_heads, ..facts() }).is_ok();
    assert!(fits(16, 4) && fits(16, 8) && fits(16, 16) && fits(8, 1));
    assert!(!fits(24, 6) && !fits(12, 4));
}

#[test]
fn only_what_is_sent_can_be_quantized() {
    let both = Plan {
        quantize_weights: Some(QuantizedType::Int8),
        quantize_gradients: Some(QuantizedType::Int4),
        ..plan()
    };
    let of_stage = |zero_stage| Plan { zero_stage, ..both.clone() };
    assert!(of_stage(3).check(&facts()).is_ok());
    let of_weights =
        |stage| format!("quantize_weights is for what zero_stage 3 and more send, and zero_stage is {stage}");
    assert_eq!(problems(&of_stage(2), &facts()), [of_weights(2)]);
    let of_gradients =
        "quantize_gradients is for what zero_stage 1 and more send, and zero_stage is 0".to_owned();
    assert_eq!(problems(&of_stage(0), &facts()), [of_weights(0), of_gradients]);
    let narrow = Plan { quantize_weights: Some(QuantizedType::Int4), ..of_stage(3) };
    assert_eq!(
        problems(&narrow, &facts()),
        ["quantize_weights is int4; it is int8 or left out, for weights of 4 bits are too coarse to train"]
    );
    let text = of_stage(3).to_json().unwrap();
    assert!(
        text.contains("\"quantize_weights\": \"int8\"") && text.contains("\"quantize_gradients\": \"int4\""),
        "{text}"
    );
    assert_eq!(Plan::from_json(&text).unwrap(), of_stage(3));
    assert!(!plan().to_json().unwrap().contains("quantize"));
}

#[test]
fn what_is_recomputed_by_layer_is_of_layers_that_there_are() {
    let rule = |from, to| LayerRule { from, to, every: 1, mode: Recompute::Full };
    let of = |rules: &[LayerRule]| {
        let recompute = RecomputeRules::new(Recompute::Selective, rules).unwrap();
        Plan { recompute, ..plan() }
    };
    let text = of(&[rule(2, Some(5))]).to_json().unwrap();
    assert_eq!(Plan::from_json(&text).unwrap(), of(&[rule(2, Some(5))]));
    assert!(of(&[rule(11, None), rule(0, Some(11))]).check(&facts()).is_ok());
    assert_eq!(
        problems(&of(&[rule(12, None), rule(3, Some(14))]), &facts()),
        [
            "recompute has a rule for layer 12, and the model's layers are 0 to 11",
            "recompute has a rule for layer 14, and the model's layers are 0 to 11",
        ]
    );
}

/// A plan whose tensor ranks are in two dimensions.
fn in_two_dimensions(tensor: usize) -> Plan {
    let mesh = Degrees { tensor, ..Degrees::default() };
    let schedule = PipelineSchedule::default();
    let (tensor_layout, sequence_parallel) = (TensorDimensions::Two, false);
    Plan { mesh, schedule, stages: vec![14], tensor_layout, sequence_parallel, ..plan() }
}

#[test]
fn two_dimensions_need_a_square_that_divides_what_it_splits_and_whole_sequences_for_each_row() {
    let facts = |tensor| Facts { world_size: tensor, ..facts() };
    let valid = in_two_dimensions(4).check(&facts(4));
    assert!(valid.is_ok(), "{valid:?}");
    assert_eq!(
        problems(&in_two_dimensions(8), &facts(8)),
        ["tensor 8 is no square of 2 or more, which two dimensions need; nearest: 4 or 16"]
    );
    let other = Facts { heads: 15, hidden: 770, intermediate: 3073, seq_len: 1001, ..facts(9) };
    assert_eq!(
        problems(&Plan { micro_batch: Some(4), ..in_two_dimensions(9) }, &other),
        [
            "tensor's side 3 does not divide the 4 key/value heads; no number would do",
            "tensor's side 3 does not divide the 770 columns between blocks; no number would do",
            "tensor's side 3 does not divide the 3073 columns of the feed-forward layers; no number would do",
            "micro_batch 4 is not a multiple of tensor's side = 3; nearest: 3 or 6",
            "seq_len 1001 is not a multiple of tensor's side = 3; nearest: 999 or 1002",
        ]
    );
}

#[test]
fn two_dimensions_go_with_neither_context_parallelism_nor_experts_nor_latent_attention() {
    let mesh = Degrees { context: 2, tensor: 4, ..Degrees::default() };
    let facts = Facts { experts: 8, expert_intermediate: 8, has_latent_attention: true, ..facts() };
    let what = ["context parallelism", "experts", "latent attention"];
    let expected = what.map(|with| {
        format!("tensor ranks in two dimensions do not go together with {with}; nearest: tensor_layout 1d")
    });
    assert_eq!(problems(&Plan { mesh, ..in_two_dimensions(4) }, &facts), expected);
}

#[test]
fn a_square_is_written_as_such_and_a_file_that_does_not_say_means_a_row() {
    let text = in_two_dimensions(4).to_json().unwrap();
    assert!(text.contains("\"tensor_layout\": \"2d\""), "{text}");
    assert_eq!(Plan::from_json(&text).unwrap(), in_two_dimensions(4));
    let without = plan().to_json().unwrap().replace("  \"tensor_layout\": \"1d\",\n", "");
    assert!(!without.contains("tensor_layout"), "{without}");
    assert_eq!(Plan::from_json(&without).unwrap(), plan());
}

#[test]
fn experts_are_split_evenly() {
    let mesh = Degrees { shard: 2, tensor: 4, expert: 4, expert_tensor: 2, ..Degrees::default() };
    let plan = Plan { mesh, schedule: PipelineSchedule::default(), stages: vec![14], ..plan() };
    let facts = Facts { experts: 6, expert_intermediate: 1023, ..facts() };
    assert_eq!(
        problems(&plan, &facts),
        [
            "expert 4 does not divide the 6 experts; nearest: 3 or 6",
            "expert_tensor 2 does not divide the 1023 columns of an expert; nearest: 1 or 3",
        ]
    );
    assert!(plan.check(&Facts { experts: 8, expert_intermediate: 1024, ..facts }).is_ok());
}

#[test]
fn a_users_schedule_is_checked_with_the_plan() {
    let rows = |rows: &[&str]| PipelineSchedule::rows(rows.iter().map(|row| (*row).to_owned()).collect());
    let mesh = Degrees { pipeline: 2, replicate: 4, ..Degrees::default() };
    let facts = Facts { global_batch: 16, ..facts() };
    let schedule = rows(&["F0,F1,B0,B1", ",F0,B0,F1,B1"]);
    let plan = Plan { mesh, schedule, stages: vec![7, 7], sequence_parallel: false, ..plan() };
    assert!(plan.check(&facts).is_ok(), "{:?}", plan.check(&facts));
    let wrong = Plan { schedule: rows(&["F0,B0,F1,B1", "F0,F1,B0"]), ..plan.clone() };
    assert_eq!(
        problems(&wrong, &facts),
        [
            "schedule of 2 micro-batches: rank 1 forgets 1B1",
            "schedule of 2 micro-batches: deadlock: rank 0 waits before 0B0 for 1SEND_B0 of rank 1; \
             rank 1 waits before 1F1 for 0SEND_F1 of rank 0",
        ]
    );
    let wrong = Plan { schedule: rows(&["F0"]), ..plan };
    assert_eq!(
        problems(&wrong, &facts),
        ["schedule of 2 micro-batches: the schedule has 1 rows for 2 pipeline ranks; it needs one for each"]
    );
}

proptest! {
    #[test]
    fn no_numbers_whatever_make_validation_panic(
        degrees in prop::array::uniform7(select(vec![0, 1, 2, 3, 4, 6, 8, 1 << 20, usize::MAX])),
        numbers in prop::array::uniform11(select(vec![0, 1, 2, 3, 4, 5, 8, 12, 100])),
        tensor_layout in select(vec![TensorDimensions::One, TensorDimensions::Two]),
        stages in prop::collection::vec(select(vec![0, 1, 2, 7, usize::MAX]), 0..5),
        kind in select(Kind::ALL.to_vec()), chunks in select(vec![0, 1, 2, usize::MAX]),
        context_method in select(vec![ContextMethod::Ring, ContextMethod::AllToAll]),
        micro_batch in select(vec![0, 1, 2, usize::MAX]),
    ) {
        let [pipeline, replicate, shard, context, tensor, expert, expert_tensor] = degrees;
        let [layers, heads, key_value_heads, hidden, intermediate, vocab, experts, expert_intermediate, seq_len,
            global_batch, world_size] = numbers;
        let facts = Facts {
            model: "a model".to_owned(), layers, heads, key_value_heads, hidden, intermediate,
            has_latent_attention: false, vocab, experts, expert_intermediate, seq_len, global_batch, world_size,
        };
        let plan = Plan {
            mesh: Degrees { pipeline, replicate, shard, context, tensor, expert, expert_tensor },
            schedule: PipelineSchedule::published(kind, chunks),
            stages, tensor_layout, context_method, micro_batch: Some(micro_batch), ..plan()
        };
        if let Ok(valid) = plan.check(&facts) {
            prop_assert_eq!(valid.mesh().world_size(), world_size);
            prop_assert_eq!(valid.layout().stages.last().unwrap().end, layers + 2);
        }
    }
}
