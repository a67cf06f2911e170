use proptest::{prelude::*, sample::select};

use super::*;
use crate::{
    ContextMethod, Degrees, LayerRule, MemoryBytes, MemoryCategory, QuantizedType, Recompute, RecomputeRules,
    Residence, Residences, Sharding, TensorDimensions, gathering::ReshardAfterForward, schedule::Kind,
};

/// A model of 12 layers on 8 ranks.
fn facts() -> Facts {
    Facts {
        model: "a model".to_owned(),
        units: 14,
        layers: 12,
        heads: 12,
        key_value_heads: 4,
        hidden: 768,
        intermediate: 3072,
        has_latent_attention: false,
        has_inputs: false,
        fixed_seq_len: None,
        norms_span_heads: false,
        experts_have_biases: false,
        vocab: 50_257,
        experts: 0,
        expert_intermediate: 0,
        adapter_rank: None,
        has_quantized_weights: false,
        step: StepFacts { global_batch: 32, seq_len: 1024, ..StepFacts::default() },
        world_size: 8,
    }
}

/// Facts with another global batch size.
fn facts_of(global_batch: usize, seq_len: usize) -> Facts {
    Facts { step: StepFacts { global_batch, seq_len, ..StepFacts::default() }, ..facts() }
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
        sequence_parallel: true,
        tensor_chunks: Some(4),
        zero_stage: 1,
        ..Plan::default()
    }
}

/// A problem as text, with the plan's own field names.
fn text(problem: &PlanProblem) -> String {
    problem.in_terms_of(|field| {
        assert!(PlanProblem::all_fields().any(|known| known == field), "{field} is no field");
        None
    });
    problem.to_string()
}

/// All problems of a plan, as text.
fn problems(plan: &Plan, facts: &Facts) -> Vec<String> {
    match plan.check(facts) {
        Err(PlanProblems(problems)) => problems.iter().map(text).collect(),
        Ok(_) => Vec::new(),
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
    // Two sequences of 1,024 tokens, on one rank or on two.
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
    // A later version is reported as such, not by its first unknown field.
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
            "3 ranks cannot share `global_batch` = 32; nearest: 30 or 33, or another number of ranks",
            "zero_stage 4 does not exist; it is 0, 1, 2 or 3",
            "zero_stage 4 shards nothing over `mesh.replicate` = 3, which are whole copies; \
             allowed: `mesh.shard` = 3 in its place, or neither with --nproc-per-node 3",
            "the plan is for the model another, and this one is a model",
            "the mesh has 30 ranks and the world 8; its other axes have 10, so it can have any multiple of that; \
             nearest: 10",
            "expert 3 does not divide shard x context x tensor / expert_tensor = 5; nearest: 1 or 5",
            "tensor 5 does not divide the 12 attention heads; nearest: 4 or 12",
            "tensor 5 is neither a divisor nor a multiple of the 4 key/value heads; nearest: 4 or 12",
            "tensor 5 does not divide the 3072 columns of the feed-forward layers; nearest: 4 or 12",
            "expert 3 needs a model with experts, and this one has none; nearest: 1",
            "seq_len 1024 is not a multiple of context x tensor = 5; nearest: 1020 or 1025",
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
    let short = facts_of(32, 1004);
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
fn sequences_with_inputs_beside_their_tokens_are_not_split_and_need_no_vocabulary() {
    let mesh = |context, tensor| Degrees { context, tensor, ..Degrees::default() };
    let on = |mesh| Plan { mesh, schedule: PipelineSchedule::default(), stages: vec![14], ..plan() };
    let with_inputs = |world_size| Facts { has_inputs: true, vocab: 0, world_size, ..facts() };
    assert_eq!(
        problems(&on(mesh(2, 1)), &with_inputs(2)),
        [
            "context 2 shards sequences, and this model reads inputs of whole sequences beside its tokens; nearest: 1"
        ]
    );
    assert!(on(mesh(2, 1)).check(&Facts { world_size: 2, ..facts() }).is_ok());
    assert!(on(mesh(1, 4)).check(&with_inputs(4)).is_ok());
    let of_images = Facts { fixed_seq_len: Some(196), ..with_inputs(4) };
    assert_eq!(
        problems(&on(mesh(1, 4)), &of_images),
        ["seq_len 1024, and every sample of this model has 196; nearest: 196"]
    );
    assert_eq!(
        problems(&on(mesh(1, 5)), &Facts { intermediate: 15, key_value_heads: 12, ..with_inputs(5) })[..1],
        ["tensor 5 does not divide the 12 attention heads; nearest: 3"]
    );
}

#[test]
fn tokens_of_a_micro_batch_are_sharded_where_those_of_a_sequence_are_odd() {
    let mesh = Degrees { tensor: 4, ..Degrees::default() };
    let plan = Plan { mesh, schedule: PipelineSchedule::default(), stages: vec![14], ..plan() };
    let of = |micro_batch| Plan { micro_batch: Some(micro_batch), ..plan.clone() };
    let odd = Facts { world_size: 4, ..facts_of(32, 197) };
    assert!(of(4).check(&odd).is_ok(), "{:?}", of(4).check(&odd));
    let message = "seq_len 197 is not a multiple of context x tensor = 4; nearest: 196 or 200";
    assert_eq!(problems(&of(2), &odd), [message]);
    let of_experts = Facts { experts: 4, expert_intermediate: 8, ..odd };
    assert_eq!(problems(&of(4), &of_experts), [message]);
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
fn norms_over_all_heads_need_a_key_value_head_for_each_tensor_rank() {
    let mesh = Degrees { tensor: 8, ..Degrees::default() };
    let plan = Plan { mesh, schedule: PipelineSchedule::default(), stages: vec![14], ..plan() };
    let facts = |key_value_heads| Facts { heads: 16, key_value_heads, norms_span_heads: true, ..facts() };
    assert!(plan.check(&facts(16)).is_ok() && plan.check(&facts(8)).is_ok());
    let found = problems(&plan, &facts(4));
    let expected = "tensor 8 does not divide the 4 key/value heads, whose norm spans them all; nearest: 4";
    assert_eq!(found, [expected]);
}

#[test]
fn experts_with_biases_are_not_split_into_parts() {
    let mesh = Degrees { tensor: 8, expert_tensor: 2, ..Degrees::default() };
    let plan = Plan { mesh, schedule: PipelineSchedule::default(), stages: vec![14], ..plan() };
    let facts = |experts_have_biases| Facts {
        heads: 16,
        key_value_heads: 8,
        experts: 8,
        expert_intermediate: 8,
        experts_have_biases,
        ..facts()
    };
    assert!(plan.check(&facts(false)).is_ok());
    let expected = "expert_tensor 2 splits experts, and these have biases; nearest: 1";
    assert_eq!(problems(&plan, &facts(true)), [expected]);
}

/// Problems of a plan that need no model: the field at fault, and the text.
fn problems_alone(plan: &Plan, step: StepFacts) -> Vec<(&'static str, String)> {
    plan.check_alone(&step).iter().map(|problem| (problem.fields()[0], text(problem))).collect()
}

#[test]
fn a_micro_batch_divides_its_part_of_the_batch_and_is_not_too_long() {
    let of = |size, global_batch, seq_len| {
        let plan = Plan { micro_batch: Some(size), ..plan() };
        problems_alone(&plan, facts_of(global_batch, seq_len).step)
    };
    assert_eq!(of(3, 18, 1024), []);
    let message = "micro_batch 4 does not divide `global_batch` = 12 / 2 ranks; allowed: 1, 2, 3, 6";
    assert_eq!(of(4, 12, 1024), [("micro_batch", message.to_owned())]);
    let message = "micro_batch 256 with `seq_len` = 16777216 makes 4294967296 tokens; \
                   allowed: at most 2147483648 tokens in a micro-batch";
    assert_eq!(of(256, 512, 1 << 24), [("micro_batch", message.to_owned())]);
}

#[test]
fn what_an_optimizer_of_whole_matrices_is_not_given_parts_of() {
    let muon = StepFacts { updates_whole_matrices: true, ..facts().step };
    let residence = Residences { optimizer: Residence::Disk, ..Residences::default() };
    let of =
        |plan: &Plan, step| problems_alone(plan, step).into_iter().map(|(_, what)| what).collect::<Vec<_>>();
    let plan = Plan { residence, ..plan() };
    assert!(of(&plan, facts().step).is_empty());
    let others = "allowed: \"adamw\", \"sgd\", \"lion\", or";
    assert_eq!(
        of(&plan, muon),
        [
            format!(
                "\"muon\" needs whole matrices, and `mesh.tensor` = 2 splits them; {others} `mesh.tensor` = 1"
            ),
            format!(
                "\"muon\" needs whole matrices, and `zero_stage` = 1 cuts them; {others} `zero_stage` = 0"
            ),
            format!(
                "\"muon\" needs whole matrices, and on disk they are cut into windows; {others} \
                 `residence.optimizer` = \"none\""
            ),
        ]
    );
}

#[test]
fn only_what_a_rank_updates_and_with_the_optimizer_can_be_on_disk() {
    let of = |mesh, zero_stage, residence| {
        let plan = Plan { mesh, zero_stage, residence, ..Plan::default() };
        let problems = problems_alone(&plan, facts().step);
        problems
            .into_iter()
            .map(|(field, what)| (field, what.split([';', ',']).next().unwrap().to_owned()))
            .collect::<Vec<_>>()
    };
    let on_disk = |optimizer, gradients, parameters| Residences {
        optimizer,
        gradients,
        parameters,
        ..Residences::default()
    };
    let (memory, disk) = (Residence::Memory, Residence::Disk);
    let (all, shards) = (on_disk(disk, disk, disk), Degrees { shard: 2, ..Degrees::default() });
    for zero_stage in [0, 3] {
        let mesh = if zero_stage == 0 { Degrees::default() } else { shards };
        assert_eq!(of(mesh, zero_stage, all), []);
    }
    let alone = "on disk need the optimizer's state there too";
    assert_eq!(
        of(shards, 3, on_disk(memory, disk, disk)),
        [
            ("residence.gradients", format!("gradients {alone}")),
            ("residence.parameters", format!("parameters {alone}"))
        ]
    );
    let parameters = ("residence.parameters", "parameters on disk are those that a rank updates".to_owned());
    let gradients = ("residence.gradients", "gradients on disk are those that a rank owns".to_owned());
    assert_eq!(of(shards, 2, all), std::slice::from_ref(&parameters));
    assert_eq!(of(shards, 1, all), [parameters, gradients.clone()]);
    assert_eq!(of(shards, 0, all), [gradients]);
    let replicas = ("residence.gradients", "gradients on disk are not summed over replicas".to_owned());
    assert_eq!(of(Degrees { replicate: 2, ..Degrees::default() }, 0, all), std::slice::from_ref(&replicas));
    let quantized = Plan {
        mesh: Degrees { replicate: 2, ..shards },
        zero_stage: 2,
        residence: on_disk(disk, disk, memory),
        quantize_gradients: Some(QuantizedType::Int8),
        ..Plan::default()
    };
    let small = (
        "residence.gradients",
        "gradients on disk do not travel as small integers; allowed: one of the two".to_owned(),
    );
    let found = problems_alone(&quantized, facts().step);
    assert_eq!((found.len(), &found[0], found[1].1.starts_with(&replicas.1)), (2, &small, true));
}

#[test]
fn neighbours_divide_the_ranks_that_shard_parameters_into_several_groups() {
    let of = |neighbours, shard, reshard_after_forward| {
        let mesh = Degrees { shard, context: 2, ..Degrees::default() };
        let sharding =
            Sharding { secondary_shard: Some(neighbours), reshard_after_forward, ..Sharding::default() };
        problems_alone(&Plan { mesh, zero_stage: 3, sharding, ..Plan::default() }, facts_of(16, 8).step)
    };
    let auto = ReshardAfterForward::Auto;
    assert_eq!((of(4, 4, auto), of(3, 4, ReshardAfterForward::Never)), (Vec::new(), Vec::new()));
    for (neighbours, nearest) in [(3, "2 or 4"), (8, "4")] {
        let message = format!(
            "{neighbours} neighbours do not divide the 8 ranks that shard parameters (`mesh.shard` x `mesh.context`) \
             into several groups; nearest: {nearest}, or leave it out"
        );
        assert_eq!(of(neighbours, 4, auto), [("sharding.secondary_shard", message)]);
    }
}

#[test]
fn a_text_can_have_other_names_for_fields() {
    let problems =
        Plan { zero_stage: 1, mesh: Degrees { replicate: 2, ..Degrees::default() }, ..Plan::default() }
            .check_alone(&facts().step);
    let names = |field: &str| (field == "mesh.shard").then_some("--shards");
    assert_eq!(
        problems[0].in_terms_of(names),
        "zero_stage 1 shards nothing over mesh.replicate = 2, which are whole copies; \
         allowed: --shards = 2 in its place, or neither with --nproc-per-node 2"
    );
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
    let of_weights = |stage| {
        format!(
            "quantize_weights \"int8\" is for weights that are gathered before each use, and `zero_stage` = {stage} keeps \
             them whole; allowed: \"none\", or `zero_stage` = 3"
        )
    };
    assert_eq!(problems(&of_stage(2), &facts()), [of_weights(2)]);
    let of_gradients =
        "quantize_gradients \"int4\" is for gradients that go to their owners, and with `zero_stage` = 0 nobody owns \
         any; allowed: \"none\", or `zero_stage` = 1, 2 or 3 with `mesh.shard`"
            .to_owned();
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
fn a_plan_is_extended_to_a_world_by_data_parallelism() {
    let of = |zero_stage, tensor, ranks| {
        let mesh = Degrees { tensor, ..Degrees::default() };
        let mesh = Plan { zero_stage, mesh, ..Plan::default() }.over(ranks).mesh;
        [mesh.replicate, mesh.shard, mesh.tensor]
    };
    assert_eq!(of(0, 1, 4), [4, 1, 1]);
    assert_eq!(of(3, 1, 4), [1, 4, 1]);
    assert_eq!(of(0, 2, 4), [2, 1, 2]);
    // A mesh that does not divide the world stays, and the check of the plan names both.
    assert_eq!(of(0, 3, 4), [1, 1, 3]);
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

/// A plan with a 2D tensor layout.
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
    let step = facts_of(32, 1001).step;
    let other = Facts { heads: 15, hidden: 770, intermediate: 3073, step, ..facts(9) };
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
fn the_side_of_a_square_divides_the_rank_of_an_adapter() {
    let of_rank = |rank| Facts { world_size: 4, adapter_rank: Some(rank), ..facts() };
    assert!(in_two_dimensions(4).check(&of_rank(6)).is_ok());
    let message = "tensor's side 2 does not divide the 3 columns of the adapter; \
                   allowed: \"1d\", or a rank that is a multiple of 2";
    assert_eq!(problems(&in_two_dimensions(4), &of_rank(3)), [message]);
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
    let facts = facts_of(16, 1024);
    let schedule = rows(&["F0,F1,B0,B1", ",F0,B0,F1,B1"]);
    let plan = Plan { mesh, schedule, stages: vec![7, 7], zero_stage: 0, sequence_parallel: false, ..plan() };
    assert!(plan.check(&facts).is_ok(), "{:?}", plan.check(&facts));
    let wrong = Plan { schedule: rows(&["F0,B0,F1,B1", "F0,F1,B0"]), ..plan.clone() };
    assert_eq!(
        problems(&wrong, &facts),
        [
            "schedule of 2 micro-batches: rank 1 lacks 1B1",
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
        has_inputs: bool,
    ) {
        let [pipeline, replicate, shard, context, tensor, expert, expert_tensor] = degrees;
        let [layers, heads, key_value_heads, hidden, intermediate, vocab, experts, expert_intermediate, seq_len,
            global_batch, world_size] = numbers;
        let facts = Facts {
            model: "a model".to_owned(), units: layers + 2, layers, heads, key_value_heads, hidden, intermediate,
            has_latent_attention: false, norms_span_heads: false, experts_have_biases: false, has_inputs, fixed_seq_len: None, vocab, experts, expert_intermediate, adapter_rank: None, has_quantized_weights: false, world_size,
            step: facts_of(global_batch, seq_len).step,
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
