//! Runs of a tiny model under fifteen plans, and their results without faults.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use serde_json::Value;

use crate::workshop::{Outcome, Started, Workshop};

/// Steps of a run. A checkpoint is saved after every second one, and all of them are kept.
pub(crate) const STEPS: u64 = 24;

/// Settings on top of the workshop's run: as many layers, heads and sequences as the plans split.
const SIZES: [&str; 9] = [
    "model.num_hidden_layers=4",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=4",
    "train.steps=24",
    "train.global_batch=8",
    "train.micro_batch=1",
    "train.seq_len=32",
    "checkpoint.keep=0",
    "metrics.tensorboard=false",
];

/// A model with experts, for the plans with expert parallelism.
const EXPERTS: [&str; 3] =
    ["model.preset=mixtral-20m", "model.intermediate_size=24", "model.num_local_experts=4"];

/// A plan of a run, by its settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Plan {
    pub(crate) name: &'static str,
    pub(crate) ranks: usize,
    settings: &'static [&'static str],
    has_experts: bool,
}

const fn plan(name: &'static str, ranks: usize, settings: &'static [&'static str]) -> Plan {
    Plan { name, ranks, settings, has_experts: false }
}

pub(crate) const PLANS: [Plan; 15] = [
    plan("one rank", 1, &["parallel.data_parallel_replicate=1"]),
    plan("one rank, saves in the foreground", 1, &["checkpoint.async=false"]),
    plan("two replicas", 2, &["parallel.data_parallel_replicate=2"]),
    plan("four replicas", 4, &["parallel.data_parallel_replicate=4"]),
    plan("ZeRO 1", 2, &["parallel.data_parallel_shard=2", "parallel.zero_stage=1"]),
    plan("ZeRO 3", 2, &["parallel.data_parallel_shard=2", "parallel.zero_stage=3"]),
    plan(
        "hybrid sharding",
        4,
        &["parallel.data_parallel_replicate=2", "parallel.data_parallel_shard=2", "parallel.zero_stage=3"],
    ),
    plan("tensor", 2, &["parallel.tensor_parallel=2", "parallel.sequence_parallel=true"]),
    plan("tensor and replicas", 4, &["parallel.tensor_parallel=2", "parallel.data_parallel_replicate=2"]),
    plan("pipeline 1F1B", 2, &["parallel.pipeline_parallel=2", "parallel.pipeline_schedule=1f1b"]),
    plan("pipeline ZB-H1 of four", 4, &["parallel.pipeline_parallel=4", "parallel.pipeline_schedule=zb_h1"]),
    plan("context", 2, &["parallel.context_parallel=2"]),
    Plan {
        name: "experts",
        ranks: 2,
        settings: &["parallel.data_parallel_shard=2", "parallel.expert_parallel=2"],
        has_experts: true,
    },
    plan("optimizer on disk", 1, &["parallel.offload.optimizer=disk"]),
    plan(
        "ZeRO 2 over TCP, bf16",
        2,
        &[
            "parallel.data_parallel_shard=2",
            "parallel.zero_stage=2",
            "parallel.transport=tcp",
            "train.precision=bf16",
        ],
    ),
];

/// Plans with more ranks than a small machine has cores.
pub(crate) const CROWDS: [Plan; 3] = [
    plan("eight replicas", 8, &["parallel.data_parallel_replicate=8"]),
    plan(
        "tensor, pipeline, ZeRO 1",
        8,
        &[
            "parallel.tensor_parallel=2",
            "parallel.pipeline_parallel=2",
            "parallel.data_parallel_shard=2",
            "parallel.zero_stage=1",
        ],
    ),
    plan(
        "sixteen ranks",
        16,
        &[
            "parallel.tensor_parallel=2",
            "parallel.pipeline_parallel=2",
            "parallel.data_parallel_replicate=2",
            "parallel.data_parallel_shard=2",
            "parallel.zero_stage=3",
        ],
    ),
];

impl Plan {
    /// Returns the arguments of `train run.toml` under this plan.
    pub(crate) fn arguments(&self) -> Vec<&'static str> {
        let experts = if self.has_experts { &EXPERTS[..] } else { &[] };
        let sets = SIZES.iter().chain(experts).chain(self.settings).flat_map(|setting| ["--set", setting]);
        ["train", "run.toml"].into_iter().chain(sets).collect()
    }
}

/// A workshop with a run under a plan.
pub(crate) struct Run {
    pub(crate) workshop: Workshop,
    pub(crate) plan: Plan,
}

impl Run {
    pub(crate) fn new(plan: Plan) -> Self {
        Self { workshop: Workshop::new(), plan }
    }

    pub(crate) fn start(&self) -> Started {
        self.workshop.start(env!("CARGO_BIN_EXE_lockstep"), &self.plan.arguments())
    }

    pub(crate) fn finish(&self) -> Outcome {
        self.start().finish()
    }

    /// Returns the steps of the checkpoints, ascending.
    pub(crate) fn saved(&self) -> Vec<u64> {
        let Ok(entries) = fs::read_dir(self.workshop.path("checkpoints")) else { return Vec::new() };
        let step = |name: String| name.strip_prefix("step-")?.parse().ok();
        let mut steps: Vec<u64> =
            entries.filter_map(|entry| step(entry.unwrap().file_name().into_string().unwrap())).collect();
        steps.sort_unstable();
        steps
    }

    /// Returns the results of a run that must not depend on faults.
    pub(crate) fn end(&self) -> End {
        let dir = |step: u64| self.workshop.path(&format!("checkpoints/step-{step:08}"));
        let rows = self.workshop.read("runs/metrics.jsonl");
        let rows = String::from_utf8(rows).unwrap();
        End {
            files: self.saved().into_iter().map(|step| (step, tensor_files(&dir(step)))).collect(),
            losses: rows.lines().map(loss_of).collect(),
        }
    }
}

/// Returns step and loss of a row of metrics.
fn loss_of(row: &str) -> (u64, String) {
    let row: Value = serde_json::from_str(row).unwrap_or_else(|error| panic!("{error}: {row:?}"));
    (row["step"].as_u64().unwrap(), row["loss"].to_string())
}

/// Returns name and digest of each tensor file in a checkpoint.
fn tensor_files(dir: &Path) -> Vec<(String, blake3::Hash)> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if name.ends_with(".safetensors") {
            files.push((name, blake3::hash(&fs::read(&path).unwrap())));
        }
    }
    files.sort_by(|one, other| one.0.cmp(&other.0));
    files
}

/// Results of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct End {
    /// Tensor files by the step of their checkpoint.
    pub(crate) files: BTreeMap<u64, Vec<(String, blake3::Hash)>>,
    /// Loss by step, as printed in the rows.
    pub(crate) losses: Vec<(u64, String)>,
}

/// Results of a run without faults, and its duration in seconds.
type Undisturbed = Arc<(End, f64)>;

/// Runs `plan` undisturbed, once, and returns its end and its seconds.
pub(crate) fn undisturbed(plan: Plan) -> Undisturbed {
    static KNOWN: OnceLock<Mutex<HashMap<Plan, Undisturbed>>> = OnceLock::new();
    let known = KNOWN.get_or_init(Mutex::default);
    if let Some(end) = known.lock().unwrap_or_else(PoisonError::into_inner).get(&plan) {
        return Arc::clone(end);
    }
    let run = Run::new(plan);
    let begin = std::time::Instant::now();
    run.finish().succeeds();
    let end = Arc::new((run.end(), begin.elapsed().as_secs_f64()));
    assert_eq!(end.0.losses.len() as u64, STEPS, "{}: one row a step: {:?}", plan.name, end.0.losses);
    known.lock().unwrap_or_else(PoisonError::into_inner).insert(plan, Arc::clone(&end));
    end
}
