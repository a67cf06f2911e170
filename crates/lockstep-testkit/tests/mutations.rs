//! Mutation test of the parity matrix: each injected communication, recording or data fault must be noticed by some
//! plan.
//!
//! `cargo xtask mutations` runs it. Faults are injected from outside: into the messages between ranks, at every call
//! site that any of the plans reaches ([`Faults`]); into recorded blocks ([`Fault`]); and into the configuration of a
//! rank.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

use std::collections::BTreeMap;
use std::path::Path;

use lockstep_comm::faults::{Damage, Faults, Seen, Site};
use lockstep_engine::Ranks;
use lockstep_graph::faults::{Fault, record_with};
use lockstep_launch::interrupt::Interrupt;
use lockstep_plan::{Axis, Feedback, Mesh, Quantization, QuantizedType, ZeroStage};
use lockstep_testkit::parity::{GPT2, LLAMA, MIXTRAL, TinyModel, Workbench, on_ranks_of};
use lockstep_testkit::quantized::{Case, what_one_step_loses_the_next_one_says};
use lockstep_train::verify::{Tolerance, numbers};
use lockstep_train::{Error, ranks_of};

/// Biases start at zero and differ only after a step. Plain gradient descent keeps rounding errors small.
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

const QUANTIZED: [&str; 5] = [
    SHARD_2,
    ZERO_3,
    "parallel.data_parallel_replicate=2",
    "parallel.quantize_weights=int8",
    "parallel.quantize_gradients=int8",
];

/// Returns a few plans of the matrix, the most general first.
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
        (GPT2, [&[CONTEXT_2, "parallel.context_parallel_method=ring"], &STEPS[..]].concat()),
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
        (
            MIXTRAL,
            vec!["parallel.tensor_parallel=2", "parallel.expert_tensor_parallel=2", "train.micro_batch=2"],
        ),
        // Few tokens, so that the replicas look up different embedding rows.
        (LLAMA, vec!["parallel.data_parallel_replicate=2", "train.global_batch=2"]),
        (LLAMA, QUANTIZED.to_vec()),
    ]
}

/// Plans in which ranks other than the first may read wrong samples, by the mesh axis of these ranks.
const SAMPLES: [(&str, usize); 3] = [("replicate", 0), ("tensor", 3), ("context", 7)];

/// Minimum number of injected faults; fewer would mean that some are no longer injected.
const LEAST: usize = 150;

/// Call site of communication between ranks, comparable across plans.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    file: String,
    line: u32,
    /// Kind of collective, element type, and the mesh axes that the group spans.
    operation: String,
}

/// Trials of one fault, each with the index of its plan.
type Trials = Vec<(usize, Trial)>;

/// Faults, possibly none, with which the ranks of a plan start.
struct Trial {
    /// Faults in messages between ranks.
    faults: std::sync::Arc<Faults>,
    /// Fault in recorded blocks.
    recording: Option<Fault>,
    /// Setting that all ranks but the first get in addition.
    setting: Option<&'static str>,
}

impl Trial {
    fn sound() -> Self {
        Self { faults: Faults::none(), recording: None, setting: None }
    }

    /// Returns the differences between the plan's numbers and those of one rank.
    fn differences(
        &self,
        bench: &Workbench,
        model: TinyModel,
        plan: &[&'static str],
    ) -> Result<Vec<String>, Error> {
        let config = bench.config(model, plan)?;
        let others = bench.config(model, &[plan, self.setting.as_slice()].concat())?;
        let join = |group| {
            record_with(self.recording);
            ranks_of(self.faults.put_into(group), &config)
        };
        let run = |ranks: &Ranks| {
            let config = if ranks.is_first() { &config } else { &others };
            numbers(config, ranks, &Interrupt::default())
        };
        let found = on_ranks_of(&config, join, run)?.into_iter().flatten().next().unwrap_or_default();
        bench.differences_of(&found, model, plan, Tolerance::of(config.plan.quantization()))
    }
}

/// Call sites at which no plan can notice faults: file, operation, the damage if only one is exempt, and the reason.
const EXEMPT: &[(&str, &str, Option<Damage>, &str)] = &[
    ("kernels.rs", "all_gather of i64", None, "levels of the kernels, which are only shown and recorded"),
    ("predicted.rs", "all_gather of i64", None, "predicted memory, which is only shown"),
    ("ranks.rs", "all_gather of u8", None, "digests of weights, which are only compared"),
    ("reducer.rs", "all_reduce of u8", Some(Damage::OwnOnly), "the rows to sum: the run ends at their sum"),
    ("reducer.rs", "all_reduce of u8 over replicate·shard", Some(Damage::Zeros), "the same"),
    ("expert_rows.rs", "all_to_all of i64", None, "the rows that come: the run ends at the exchange"),
    // Their inputs are on the stack: whether a later call has the address of an earlier one differs from run to run.
    ("trainer.rs", "all_gather of i64", Some(Damage::LateAgain), "the numbers of a step"),
    ("trainer.rs", "all_gather of i64", Some(Damage::Repeated), "the numbers of a step"),
    ("trainer.rs", "all_reduce of u8", None, "whether a rank wants to stop, which none does"),
    (
        "transit.rs",
        "all_gather of f32",
        Some(Damage::OwnLost),
        "the own rows are read where they were before",
    ),
    ("verify.rs", "all_gather of i64", None, "the lengths of what this test reads"),
    ("verify.rs", "gather of u8", None, "what this test reads"),
];

fn is_exempt(place: &Place, damage: Damage) -> bool {
    EXEMPT.iter().any(|(file, operation, only, _)| {
        place.file == *file
            && place.operation.starts_with(operation)
            && only.is_none_or(|only| only == damage)
    })
}

/// Returns the plan-independent description of a call site that a plan has reached.
fn place_of(Seen { site, ranks, .. }: &Seen, mesh: &Mesh) -> Place {
    let Site { file, line, kind, number, sender, .. } = site;
    let path = Path::new(file);
    let is_along = |axis: &&Axis| {
        let coordinate = |rank: &usize| mesh.ranks().coordinate(*rank, **axis);
        ranks.iter().any(|rank| coordinate(rank) != coordinate(&ranks[0]))
    };
    let axes: Vec<Axis> = Axis::ALL.iter().filter(is_along).copied().collect();
    let size: usize = axes.iter().map(|axis| mesh.ranks().degree(*axis)).product();
    let names: Vec<String> = axes.iter().map(|axis| format!("{axis:?}").to_lowercase()).collect();
    let part = if ranks.len() < size { "part of " } else { "" };
    // Communication of the training loop is among all ranks in any plan.
    let is_of_run = path.components().any(|part| part.as_os_str() == "lockstep-train");
    let sender = sender.map_or(String::new(), |sender| format!(" from rank {sender}"));
    let axes = if is_of_run { "all".to_owned() } else { format!("{part}{}", names.join("·")) };
    Place {
        file: path.file_name().unwrap().to_string_lossy().into_owned(),
        line: *line,
        operation: format!("{} of {number}{sender} over {axes}", kind.name()),
    }
}

/// Returns trials of every kind of damage at every call site that fault-free runs of the plans reach.
fn of_communication(bench: &Workbench, plans: &[(TinyModel, Vec<&'static str>)]) -> Vec<(String, Trials)> {
    let mut places: BTreeMap<Place, Vec<(usize, Seen)>> = BTreeMap::new();
    for (index, (model, plan)) in plans.iter().enumerate() {
        let sound = Trial::sound();
        // This first run, without a fault, also computes and caches the numbers of one rank.
        let lines = sound.differences(bench, *model, plan).unwrap();
        let plan_name = plan.join(" ");
        assert!(lines.is_empty(), "without a fault: {}, {plan_name}: {}", model.name, lines.join("\n"));
        let mesh = Mesh::new(bench.config(*model, plan).unwrap().degrees()).unwrap();
        for seen in sound.faults.seen() {
            places.entry(place_of(&seen, &mesh)).or_default().push((index, seen));
        }
    }
    for (file, operation, ..) in EXEMPT {
        let is_it = |place: &Place| place.file == *file && place.operation.starts_with(operation);
        assert!(places.keys().any(is_it), "no plan reaches {operation} in {file}");
    }
    let mut trials = Vec::new();
    for (place, seen) in &places {
        let is_repeated = seen.iter().any(|(_, seen)| seen.is_repeated);
        let all = Damage::of(seen[0].1.site.kind, is_repeated);
        for damage in all.into_iter().filter(|damage| !is_exempt(place, *damage)) {
            let of_plan = |(index, seen): &(usize, Seen)| {
                (*index, Trial { faults: Faults::at(seen.site.clone(), damage), ..Trial::sound() })
            };
            let Place { file, line, operation } = place;
            let name = format!("{damage:?} of {operation} ({file}:{line})");
            trials.push((name, seen.iter().map(of_plan).collect()));
        }
    }
    trials
}

/// Returns the plan and its first differing number, if a trial causes a difference. A run that fails by itself does not
/// count.
fn noticed(
    bench: &Workbench,
    (model, plan): &(TinyModel, Vec<&'static str>),
    trial: &Trial,
) -> Option<String> {
    let lines = trial.differences(bench, *model, plan).ok()?;
    Some(format!("{}, {}: {}", model.name, plan.join(" "), lines.first()?))
}

#[test]
fn every_fault_is_noticed_by_a_plan() {
    let (bench, plans) = (Workbench::new().unwrap(), plans());
    let mut trials = of_communication(&bench, &plans);
    for fault in Fault::ALL {
        let of_plan = |index| (index, Trial { recording: Some(fault), ..Trial::sound() });
        trials.push((format!("{fault:?}"), (0..plans.len()).map(of_plan).collect()));
    }
    for (axis, index) in SAMPLES {
        let trial = Trial { setting: Some("data.order=sequential"), ..Trial::sound() };
        trials.push((format!("other samples along the {axis} axis"), vec![(index, trial)]));
    }
    println!("{} faults", trials.len());
    assert!(trials.len() >= LEAST, "only {} faults", trials.len());
    let mut unnoticed = Vec::new();
    for (name, of_plans) in trials {
        match of_plans.iter().find_map(|(index, trial)| noticed(&bench, &plans[*index], trial)) {
            Some(how) => println!("{name}: {how}"),
            None => unnoticed.push(name),
        }
    }
    assert!(unnoticed.is_empty(), "no plan notices {unnoticed:#?}");
}

#[test]
fn what_gradients_lose_to_their_codes_is_noticed_where_it_is_dropped() {
    let quantization = Quantization {
        gradients: Some(QuantizedType::Int4),
        feedback: Feedback::Dropped,
        ..Quantization::default()
    };
    let case = Case { replicate: 2, shard: 2, zero_stage: ZeroStage::Gradients, quantization };
    let found = what_one_step_loses_the_next_one_says(case).unwrap_err();
    println!("feedback dropped: {found}");
}
