//! The device map and the memory limits of an inference, from the command line, and the table of a placed model.

use std::cmp::Reverse;
use std::path::{Path, PathBuf};

use clap::{Args, ValueHint};
use lockstep_checkpoint::{DType, ModelDirectory, gguf::StoredElements};
use lockstep_config::{NamedModel, find_described, find_weights, human};
use lockstep_engine::Ranks;
use lockstep_infer::{
    DeviceMap, InferError, InferencePlan, LoadOptions, LoadedModel, MapChoice, MemoryLimits,
    ModelDescription, PlanRequest, PlannedWork, Workload, check_placed,
};
use lockstep_model::ModelConfig;
use lockstep_plan::CheckedPlan;
use lockstep_tensor::host::proportional_bytes;
use serde_json::{Map, Value, json};

use crate::exit::{FAILED, Failure};
use crate::output::note;
use crate::quantize::note_decoded;
use crate::ranks::{all_or_none, told_by};

/// Type of the weights of a preset, as almost all published models have it.
const PRESET_DTYPE: DType = DType::BF16;

/// Placement of a model's weights.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct PlacementArguments {
    /// Places of modules: auto or balanced (blocks in memory are spread between those on disk), sequential (they come first),
    /// or a JSON file in the form of Accelerate's hf_device_map
    #[arg(long, value_name = "auto|balanced|sequential|FILE")]
    device_map: Option<String>,
    /// Memory limits of each rank, such as cpu=2GiB,disk=100GiB; cpu is the whole process [default: the memory that is available, in equal
    /// parts]
    #[arg(long, value_name = "LIMITS")]
    pub(crate) max_memory: Option<MemoryLimits>,
    /// Directory for weights that are converted before they are read from disk; they are written once
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    offload_dir: Option<PathBuf>,
}

impl PlacementArguments {
    /// Returns true if the model is placed under limits.
    pub(crate) fn is_given(&self) -> bool {
        self.device_map.is_some() || self.max_memory.is_some() || self.offload_dir.is_some()
    }

    /// Returns the question that these arguments ask. The process's own memory is measured now.
    pub(crate) fn request(&self, workload: Workload, options: LoadOptions) -> Result<PlanRequest, Failure> {
        let map = match self.device_map.as_deref() {
            None | Some("auto" | "balanced") => MapChoice::Balanced,
            Some("sequential") => MapChoice::Sequential,
            Some(file) => MapChoice::Given { map: read_map(Path::new(file))?, origin: file.to_owned() },
        };
        let limits = self.max_memory.clone().unwrap_or_default();
        let offload_dir = self.offload_dir.clone();
        let process_bytes = proportional_bytes();
        let LoadOptions { threads, activations, quantize, kv_cache, .. } = options;
        Ok(PlanRequest {
            map,
            limits,
            offload_dir,
            kv_cache,
            activations,
            quantize,
            workload,
            process_bytes,
            threads,
        })
    }
}

fn read_map(path: &Path) -> Result<DeviceMap, Failure> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).map_err(|error| {
        let allowed = "allowed are auto, balanced, sequential and a JSON file";
        Failure::configuration(format!("cannot read --device-map {shown}: {error}; {allowed}"))
    })?;
    DeviceMap::parse(&text)
        .map_err(|problems| InferError::DeviceMap { origin: shown.to_string(), problems }.into())
}

/// A model that is found and not yet loaded.
pub(crate) struct FoundModel {
    pub(crate) directory: ModelDirectory,
    pub(crate) description: ModelDescription,
    pub(crate) options: LoadOptions,
    placement: PlacementArguments,
}

impl FoundModel {
    /// Finds a model by any of its names, with the adapter if one is given.
    pub(crate) fn new(
        name: &str,
        adapter: Option<&Path>,
        options: LoadOptions,
        placement: &PlacementArguments,
    ) -> Result<Self, Failure> {
        let mut directory = ModelDirectory::open(&find_weights(name)?)?;
        note_decoded(&directory, Path::new(name));
        if let Some(adapter) = adapter {
            directory = directory.with_adapter(adapter)?;
        }
        let description = ModelDescription::of(&directory)?;
        Ok(Self { directory, description, options, placement: placement.clone() })
    }

    /// Finds a model to plan for, of which the configuration is enough: a directory or a repository without weights, or a preset.
    pub(crate) fn described(
        name: &str,
        options: LoadOptions,
        placement: &PlacementArguments,
    ) -> Result<Self, Failure> {
        let directory = match find_described(name)? {
            NamedModel::Directory(path) => ModelDirectory::described(&path)?,
            NamedModel::Preset(preset) => {
                let config = ModelConfig::preset(&preset)?;
                ModelDirectory::of_configuration(Path::new(&preset), config, PRESET_DTYPE)?
            }
        };
        note_decoded(&directory, Path::new(name));
        let description = ModelDescription::of(&directory)?;
        Ok(Self { directory, description, options, placement: placement.clone() })
    }

    /// Returns the type in which the weights are used.
    pub(crate) fn dtype(&self) -> DType {
        self.options.dtype.unwrap_or_else(|| self.directory.stored_dtype())
    }

    /// Places this rank's part of the model for a workload; `None` if there are no limits. All ranks call this.
    pub(crate) fn plan(&self, workload: Workload, ranks: &Ranks) -> Result<Option<InferencePlan>, Failure> {
        if !self.placement.is_given() {
            return Ok(None);
        }
        let request = self.placement.request(workload, self.options);
        let plan = request
            .and_then(|request| Ok(InferencePlan::on_rank(&self.directory, self.dtype(), &request, ranks)?));
        let mut plan = all_or_none(ranks, plan)?;
        plan.agree(ranks)?;
        Ok(Some(plan))
    }

    /// Refuses limits on memory on ranks of a plan that cannot keep them.
    pub(crate) fn check_placement(&self, plan: &CheckedPlan, work: PlannedWork) -> Result<(), Failure> {
        if self.placement.is_given() {
            check_placed(plan, work)?;
        }
        Ok(())
    }

    /// Loads the model or this rank's part of it, and prints its map if it is placed.
    pub(crate) fn load(&self, workload: Workload, ranks: Ranks) -> Result<PlacedModel, Failure> {
        let Some(plan) = self.plan(workload, &ranks)? else {
            let model = LoadedModel::load_on(&self.directory, self.options, ranks)?;
            return Ok(PlacedModel { model, placed: None });
        };
        let placed = Placed::of(&plan, &ranks)?;
        let model = LoadedModel::load_placed_on(&self.directory, plan, ranks)?;
        Ok(PlacedModel { model, placed: Some(placed) })
    }
}

/// A loaded model, and the map by which it was placed.
pub(crate) struct PlacedModel {
    pub(crate) model: LoadedModel,
    pub(crate) placed: Option<Placed>,
}

/// The map of a placed model, in Accelerate's form, and its predicted memory.
pub(crate) struct Placed {
    /// The map of all stages, on the first rank.
    pub(crate) map: Value,
    /// Predicted memory of this rank.
    pub(crate) predicted_bytes: u64,
    /// Bytes of the weights in memory, and of those on disk, of the ranks of the first replica.
    pub(crate) weights: [u64; 2],
}

impl Placed {
    /// Prints the maps of the first replica's ranks, and returns what is reported of them. All ranks call this.
    fn of(plan: &InferencePlan, ranks: &Ranks) -> Result<Self, Failure> {
        let lost = |error| told_by(error, ranks.rank());
        let own = json!({ "map": plan.map.to_json(), "table": table(plan) });
        let sent = if ranks.is_in_first_replica() { own.to_string() } else { String::new() };
        let of_ranks = ranks.gather(sent.as_bytes()).map_err(lost)?;
        let mut map = serde_json::Map::new();
        for (rank, sent) in of_ranks.iter().enumerate().filter(|(_, sent)| !sent.is_empty()) {
            let damaged = |error: serde_json::Error| Failure {
                message: format!("the map of rank {rank} is damaged: {error}"),
                code: FAILED,
            };
            let mut sent: Value = serde_json::from_slice(sent).map_err(damaged)?;
            if let Value::Object(of_rank) = sent["map"].take() {
                map.extend(of_rank);
            }
            if ranks.size() > 1 {
                note!("rank {rank}:");
            }
            for line in sent["table"].as_array().into_iter().flatten().filter_map(Value::as_str) {
                note!("{line}");
            }
        }
        let sum = |own: u64| ranks.sum_of_all(if ranks.is_in_first_replica() { own } else { 0 });
        let weights = [plan.model_bytes() - plan.disk_bytes, plan.disk_bytes];
        let weights = [sum(weights[0]).map_err(lost)?, sum(weights[1]).map_err(lost)?];
        Ok(Self { map: Value::Object(map), predicted_bytes: plan.memory.total(), weights })
    }
}

impl PlacedModel {
    /// Adds the map to a JSON document.
    pub(crate) fn add_map(&self, document: &mut Value) {
        if let Some(placed) = &self.placed {
            document["hf_device_map"] = placed.map.clone();
        }
    }
}

/// Returns the lines of a plan's table: the modules, with consecutive blocks on one device in one line, and the memory.
pub(crate) fn table(plan: &InferencePlan) -> Vec<String> {
    let mut rows: Vec<Row> = Vec::new();
    for ((name, device), module) in plan.map.entries().iter().zip(&plan.modules) {
        let note = module.tied_to.as_ref().map_or(String::new(), |other| format!("tied to {other}"));
        let path = BlockPath::of(name);
        let row = Row {
            last: path.as_ref().map(|path| path.number),
            path,
            name: name.clone(),
            device: device.to_string(),
            bytes: module.bytes,
            types: module.types.clone(),
            note,
        };
        match rows.iter_mut().rev().find(|before| before.continues_with(&row)) {
            Some(before) => before.extend(&row),
            None => rows.push(row),
        }
    }
    let names: Vec<String> = rows.iter().map(Row::title).collect();
    let width = names.iter().map(String::len).max().unwrap_or(0).max("module".len());
    let heading = format!("{:width$}  {:6}  {:>9}  type", "module", "device", "bytes");
    let line = |(name, row): (&String, &Row)| {
        let (bytes, note) = (human::bytes(row.bytes).to_string(), &row.note);
        let kind = if row.bytes == 0 && !note.is_empty() { note.clone() } else { row.types() };
        format!("{name:width$}  {:6}  {bytes:>9}  {kind}", row.device)
    };
    let mut lines = vec![heading];
    lines.extend(names.iter().zip(&rows).map(line));
    lines.push(memory_line(plan));
    lines.extend(reads_line(plan));
    lines
}

/// Describes the reads of a plan whose weights are not all in memory.
fn reads_line(plan: &InferencePlan) -> Option<String> {
    let buffers = || format!(" through {}", human::plural(plan.buffers(), "buffer"));
    let of_units = (plan.buffers() > 0).then(buffers).unwrap_or_default();
    let chunk = plan.chunk_tokens;
    match plan.cached_experts() {
        Some(cached) => Some(format!(
            "a pass of 1 token reads about {} from disk{of_units}, one of {chunk} tokens {}: the cache has room for {:.0} % of the experts",
            human::bytes(plan.read_bytes(1)),
            human::bytes(plan.read_bytes(chunk)),
            100.0 * cached,
        )),
        None if plan.buffers() > 0 => Some(format!(
            "each pass reads {} from disk{of_units}; prompts are read {chunk} tokens at a time",
            human::bytes(plan.read_bytes(chunk)),
        )),
        None => None,
    }
}

fn memory_line(plan: &InferencePlan) -> String {
    let parts = plan.memory.by_name().into_iter().filter(|(_, bytes)| *bytes > 0);
    let shown = |(name, bytes)| match name {
        "KV cache" => format!("{name} ({}) {}", plan.kv_cache, human::bytes(bytes)),
        _ => format!("{name} {}", human::bytes(bytes)),
    };
    let parts: Vec<String> = parts.map(shown).collect();
    let (total, limit) = (human::bytes(plan.memory.total()), human::bytes(plan.limit_bytes));
    format!("memory {total} of {limit}: {}", parts.join(", "))
}

/// Path of a numbered module, or of a module within it: `model.layers.3`, `model.layers.3.mlp.experts`.
#[derive(Clone, PartialEq, Eq)]
struct BlockPath {
    stem: String,
    number: usize,
    /// Module within the block; empty for the block.
    module: String,
}

impl BlockPath {
    fn of(name: &str) -> Option<Self> {
        let parts: Vec<&str> = name.split('.').collect();
        let (at, number) = parts.iter().enumerate().find_map(|(at, part)| Some((at, part.parse().ok()?)))?;
        Some(Self { stem: parts[..at].join("."), number, module: parts[at + 1..].join(".") })
    }
}

/// A line of the table.
struct Row {
    name: String,
    /// Path of the first module, if the line is of numbered ones.
    path: Option<BlockPath>,
    /// Number of the last block.
    last: Option<usize>,
    device: String,
    bytes: u64,
    /// Types of the weights with their bytes.
    types: Vec<(StoredElements, u64)>,
    note: String,
}

impl Row {
    fn continues_with(&self, next: &Self) -> bool {
        let (Some(path), Some(last), Some(found)) = (&self.path, self.last, &next.path) else { return false };
        found.number == last + 1
            && (&found.stem, &found.module, &next.device) == (&path.stem, &path.module, &self.device)
    }

    fn extend(&mut self, next: &Self) {
        (self.last, self.bytes) = (next.last, self.bytes + next.bytes);
        for &(of, bytes) in &next.types {
            match self.types.iter_mut().find(|(found, _)| *found == of) {
                Some((_, sum)) => *sum += bytes,
                None => self.types.push((of, bytes)),
            }
        }
        self.types.sort_by_key(|&(_, bytes)| Reverse(bytes));
    }

    /// Returns the types of the weights, the one with the most bytes first.
    fn types(&self) -> String {
        self.types.iter().map(|(of, _)| of.to_string()).collect::<Vec<_>>().join(", ")
    }

    fn title(&self) -> String {
        match (&self.path, self.last) {
            (Some(BlockPath { stem, number, module }), Some(last)) if last > *number => {
                let within = if module.is_empty() { String::new() } else { format!(": {module}") };
                format!("{stem}.{number} to {last}{within}")
            }
            _ => self.name.clone(),
        }
    }
}

/// Returns the modules of a plan as JSON.
pub(crate) fn modules_json(plan: &InferencePlan) -> Value {
    let rows = plan.map.entries().iter().zip(&plan.modules).map(|((name, device), module)| {
        let types: Map<String, Value> =
            module.types.iter().map(|(of, bytes)| (of.to_string(), json!(bytes))).collect();
        let most = module.types.first().map_or_else(|| plan.dtype().to_string(), |(of, _)| of.to_string());
        json!({
            "module": name, "device": device.to_string(), "bytes": module.bytes, "dtype": most, "bytes_by_type": types,
            "tied_to": module.tied_to,
        })
    });
    rows.collect()
}
