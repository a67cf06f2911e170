//! The plan of an inference under a memory limit: the device of every module, the bytes of every category, and the least limit
//! that would do.
//!
//! Everything that the process holds counts: weights, buffers of streamed units, caches of keys and values, activations,
//! workspace, and the process itself as it is before the model is loaded.

use std::{ops::Range, path::PathBuf};

use lockstep_checkpoint::{ModelDirectory, OffloadedWeights, WeightQuantization, WeightType};
use lockstep_config::human;
use lockstep_engine::{EngineError, Ranks};
use lockstep_model::{HeadOutput, ModelConfig};
use lockstep_plan::{DType, KvCacheType, ParameterId, Places};
use lockstep_tensor::{BlockActivations, DiskIo, Workers, host::available_memory_bytes};

use crate::{
    InferError,
    description::causal_config,
    device_map::{
        Device, DeviceMap, Item, MemoryLimits, ModelParts, Module, Order, Placement, Role, WeightPlace,
        least_bytes, no_gpu, place, residences,
    },
    experts::{ExpertReads, ExpertRoom, ExpertStack},
    held::StreamingRoom,
    run_memory::{RankShare, RunMemory, Workload, kv_cache_type, record},
    stream::WeightFiles,
    unit_layout::UnitLayout,
    weight_form::WeightForm,
};

/// Tokens of a prompt that are computed at once, unless memory is scarce or each pass reads weights from disk.
pub(crate) const CHUNK: usize = 512;
/// Tokens of a chunk when each pass reads weights from disk: more tokens share a read.
const STREAMED_CHUNK: usize = 2048;
/// Fewest tokens of a chunk.
const LEAST_CHUNK: usize = 16;
/// Part of the memory limit that longer chunks may take.
const CHUNK_SHARE: f64 = 0.05;
/// Bytes of a page of the system.
const PAGE_BYTES: u64 = 4096;

/// Source of a device map.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum MapChoice {
    /// Solved; resident blocks are spread evenly between streamed ones, so that reads and compute overlap.
    #[default]
    Balanced,
    /// Solved; resident blocks come first.
    Sequential,
    /// A map in Accelerate's form.
    Given {
        /// The map.
        map: DeviceMap,
        /// Path of its file, for messages.
        origin: String,
    },
}

/// Question that a plan answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanRequest {
    /// Source of the device map.
    pub map: MapChoice,
    /// Limits; without one for `cpu`, the memory that is available.
    pub limits: MemoryLimits,
    /// Directory for weights that must be made before they can be read from disk.
    pub offload_dir: Option<PathBuf>,
    /// Type of cached keys and values; `None` takes that of the activations.
    pub kv_cache: Option<KvCacheType>,
    /// Type of the activations in products with quantized weights; `None` takes int8, but the activations' own type if that is f32.
    pub activations: Option<BlockActivations>,
    /// Quantization of the matrices of linear layers that are stored as numbers; `None` leaves them.
    pub quantize: Option<WeightQuantization>,
    /// Work that memory is planned for.
    pub workload: Workload,
    /// Bytes of the process besides the model ([`proportional_bytes`](lockstep_tensor::host::proportional_bytes)), measured when everything else that stays in memory is
    /// there, such as a tokenizer.
    pub process_bytes: u64,
    /// Compute threads; each has memory for packed operands.
    pub threads: usize,
}

/// Predicted bytes of a process, by category.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PredictedMemory {
    /// The process before the model is loaded.
    pub process: u64,
    /// Resident weights.
    pub weights: u64,
    /// Buffers that streamed units pass through.
    pub streaming: u64,
    /// Cache of the experts that are read as they are used.
    pub experts: u64,
    /// Cached keys and values.
    pub kv_cache: u64,
    /// Values between and within blocks.
    pub activations: u64,
    /// Temporary values and packed operands.
    pub workspace: u64,
}

impl PredictedMemory {
    /// Returns the categories by name.
    pub fn by_name(&self) -> [(&'static str, u64); 7] {
        [
            ("weights", self.weights),
            ("streaming buffers", self.streaming),
            ("expert cache", self.experts),
            ("KV cache", self.kv_cache),
            ("activations", self.activations),
            ("workspace", self.workspace),
            ("process", self.process),
        ]
    }

    /// Returns the sum.
    pub fn total(&self) -> u64 {
        self.by_name().iter().map(|(_, bytes)| bytes).sum()
    }
}

/// A solved or checked placement of a model.
#[derive(Debug)]
pub struct InferencePlan {
    pub(crate) parts: ModelParts,
    /// For each parameter, true if it stays in memory.
    pub(crate) resident: Vec<bool>,
    pub(crate) room: StreamingRoom,
    pub(crate) threads: usize,
    /// True if a pass reads weights from disk, on any rank.
    pub(crate) reads_disk: bool,
    /// Type of cached keys and values.
    pub kv_cache: KvCacheType,
    /// Tokens of a prompt that are computed at once.
    pub chunk_tokens: usize,
    /// The device of every module.
    pub map: DeviceMap,
    /// The modules of the map, in its order.
    pub modules: Vec<Module>,
    /// Predicted memory.
    pub memory: PredictedMemory,
    /// Memory limit of the process, in bytes.
    pub limit_bytes: u64,
    /// Least limit that would do, in bytes.
    pub least_bytes: u64,
    /// Bytes of weights whose device is the disk.
    pub disk_bytes: u64,
    /// Bytes that each pass reads of streamed units.
    streamed_bytes: u64,
    expert_reads: ExpertReads,
    offload_dir: Option<PathBuf>,
}

impl InferencePlan {
    /// Places a model whose weights are used in type `dtype`, or in quantized blocks.
    ///
    /// # Errors
    /// If the model is no causal language model, a limit is too small, a device does not exist, or a given map does not fit the model.
    pub fn new(directory: &ModelDirectory, dtype: DType, request: &PlanRequest) -> Result<Self, InferError> {
        Self::on_rank(directory, dtype, request, &Ranks::alone())
    }

    /// Places this rank's part of a model, as [`InferencePlan::new`] does: the units of its stage, and its shard of the key-value cache.
    /// Limits are those of each rank; without one for `cpu`, ranks get equal parts of the available memory. The plan of the ranks is one
    /// that [`check_placed`](crate::check_placed) has checked. If all ranks have got a plan, they call [`InferencePlan::agree`].
    ///
    /// # Errors
    /// As for [`InferencePlan::new`]. Weights that must be made can be on disk only if one rank has written them before.
    pub fn on_rank(
        directory: &ModelDirectory,
        dtype: DType,
        request: &PlanRequest,
        ranks: &Ranks,
    ) -> Result<Self, InferError> {
        let gpus: Vec<String> = request.limits.gpus.iter().map(|&(number, _)| no_gpu(number)).collect();
        if !gpus.is_empty() {
            return Err(InferError::DeviceMap { origin: "--max-memory".to_owned(), problems: gpus });
        }
        let config = causal_config(directory)?;
        let mut parts = parts(directory, &config, dtype, request);
        if let Some(dir) = &request.offload_dir {
            match OffloadedWeights::find(dir, directory, dtype, &parts.made_weights())? {
                Some(written) => parts.add_stored(written.stored_parameters()),
                // Several ranks would write the same files.
                None if ranks.size() > 1 => {}
                None => parts.assume_written(),
            }
        }
        // A map is for the whole model.
        let stage = ranks.groups().stage(parts.units.len());
        let given = match &request.map {
            MapChoice::Given { map, origin } => Some((map, origin)),
            MapChoice::Balanced | MapChoice::Sequential => None,
        };
        let given = given.map(|(map, origin)| given_residences(map, origin, &parts, &stage)).transpose()?;
        let parts = parts.of_stage(stage.clone());
        let kv_cache = kv_cache_type(request.kv_cache, dtype)?;
        let share = RankShare { stage, places: ranks.groups().places() };
        let question = Question { config: &config, request, kv_cache, share: &share };
        let available = || available_memory_bytes().map(|bytes| bytes / ranks.size() as u64);
        let limit = request.limits.cpu.or_else(available).unwrap_or(u64::MAX);
        let least = question.least(&parts);
        let Solution { resident, room, chunk } = match given {
            Some(resident) => question.given(&parts, resident, limit),
            None => {
                let is_in_order = request.map == MapChoice::Sequential;
                let order = if is_in_order { Order::Sequential } else { Order::Spread };
                let solved = question.solve(&parts, order, limit);
                let refused =
                    || question.too_small(&parts, limit, least, &question.remedies(directory, &parts, least));
                solved.ok_or_else(refused)?
            }
        };
        let memory = question.memory(&parts, &resident, room, chunk);
        if memory.total() > limit {
            return Err(question.too_small(&parts, limit, memory.total(), ""));
        }
        let per_token = question.experts_per_token();
        let plan = Self::assemble(parts, Solution { resident, room, chunk }, (memory, kv_cache), per_token);
        if let Some(disk) = request.limits.disk.filter(|&disk| disk < plan.disk_bytes) {
            return Err(InferError::DiskLimit { limit_bytes: disk, needed_bytes: plan.disk_bytes });
        }
        let offload_dir = request.offload_dir.clone();
        let (threads, longest) = (request.threads, request.workload.tokens());
        let chunk_tokens = plan.chunk_tokens.min(longest).max(1);
        Ok(Self { limit_bytes: limit, least_bytes: least, offload_dir, threads, chunk_tokens, ..plan })
    }

    fn assemble(
        parts: ModelParts,
        Solution { resident, room, chunk: chunk_tokens }: Solution,
        (memory, kv_cache): (PredictedMemory, KvCacheType),
        experts_per_token: usize,
    ) -> Self {
        let layouts = UnitLayout::of_units(&parts, &resident);
        let streamed_bytes = layouts.iter().map(|[_, streamed]| streamed.bytes as u64).sum();
        let stacks = parts.expert_stacks_on_disk(&resident);
        let expert_reads = ExpertReads::new(&stacks, room.experts, experts_per_token);
        let on_disk = parts.owned().filter(|id| !resident[id.0]);
        let disk_bytes = on_disk.map(|id| parts.bytes(id)).sum();
        let modules = parts.rows();
        let device = |ids: &[ParameterId]| match ids.iter().all(|&id| resident[parts.owner(id).0]) {
            true => Device::Cpu,
            false => Device::Disk,
        };
        let map = DeviceMap::new(
            parts.modules.iter().map(|module| (module.name.clone(), device(&module.parameters))),
        );
        let (limit_bytes, least_bytes, offload_dir, threads) = (0, 0, None, 1);
        let reads_disk = room != StreamingRoom::default();
        Self {
            parts,
            resident,
            room,
            threads,
            reads_disk,
            kv_cache,
            chunk_tokens,
            map,
            modules,
            memory,
            limit_bytes,
            least_bytes,
            disk_bytes,
            streamed_bytes,
            expert_reads,
            offload_dir,
        }
    }

    /// Makes the plans of all ranks agree on the length of chunks, the least of all, and on whether a pass reads weights from disk.
    ///
    /// # Errors
    /// If a rank is lost or does not answer in time.
    pub fn agree(&mut self, ranks: &Ranks) -> Result<(), InferError> {
        let chunks = ranks.all_numbers(self.chunk_tokens as u64)?;
        self.chunk_tokens = chunks.into_iter().min().unwrap_or_default() as usize;
        self.reads_disk = ranks.any(self.reads_disk)?;
        Ok(())
    }

    /// Writes the weights that must be made before they are streamed, if there are any.
    ///
    /// # Errors
    /// If a file of the model is damaged, or the disk is full.
    pub(crate) fn write_offloaded(&mut self, directory: &ModelDirectory) -> Result<(), InferError> {
        let Some(dir) = self.offload_dir.as_ref().filter(|_| !self.parts.assumed().is_empty()) else {
            return Ok(());
        };
        let is_streamed = self.parts.assumed().iter().any(|id| !self.resident[id.0]);
        self.parts.forget_assumed();
        if is_streamed {
            let weights = self.parts.made_weights();
            let written = OffloadedWeights::write(dir, directory, self.parts.dtype(), &weights)?;
            self.parts.add_stored(written.stored_parameters());
        }
        Ok(())
    }

    /// Measures the bandwidth at which the disk is read, in bytes per second, by reads of up to `bytes` of the model's files.
    /// `None` if they are too short for it.
    ///
    /// # Errors
    /// If a file cannot be read or memory runs out.
    pub fn measure_disk(&self, bytes: usize) -> Result<Option<f64>, InferError> {
        let files: Vec<PathBuf> = self.parts.files.iter().filter(|path| path.is_file()).cloned().collect();
        let mut files = WeightFiles::open(&files, DiskIo::Auto).map_err(EngineError::from)?;
        Ok(files.measure(bytes)?)
    }

    /// Returns the number of streaming buffers; 0 if no unit is streamed.
    pub fn buffers(&self) -> usize {
        self.room.buffers
    }

    /// Returns the bytes that a pass of `tokens` tokens reads from disk. Of experts that are on disk they are an estimate: every expert
    /// is as probable as any other, and the cache holds as many as it has room for.
    pub fn read_bytes(&self, tokens: usize) -> u64 {
        self.streamed_bytes + self.expert_reads.of_pass(tokens)
    }

    /// Returns the fraction of the experts on disk that their cache has room for; `None` if no experts are on disk.
    pub fn cached_experts(&self) -> Option<f64> {
        (self.expert_reads.bytes > 0).then_some(self.expert_reads.cached)
    }

    /// Returns the type of activations, and of weights that are numbers.
    pub fn dtype(&self) -> DType {
        self.parts.dtype()
    }

    /// Returns the bytes of all weights in memory, tied ones once.
    pub fn model_bytes(&self) -> u64 {
        self.modules.iter().map(|module| module.bytes).sum()
    }

    /// Returns the bytes of a weight in memory, on average.
    pub(crate) fn bytes_per_weight(&self) -> f64 {
        let elements = self.parts.owned().map(|id| self.parts.records[id.0].elements()).sum::<usize>();
        self.model_bytes() as f64 / elements.max(1) as f64
    }
}

/// Placement of the weights, and the length of chunks.
struct Solution {
    /// For each parameter, true if it stays in memory.
    resident: Vec<bool>,
    room: StreamingRoom,
    /// Tokens of a prompt that are computed at once.
    chunk: usize,
}

/// Returns the parts of a model in the form that a request asks for.
fn parts(
    directory: &ModelDirectory,
    config: &ModelConfig,
    dtype: DType,
    request: &PlanRequest,
) -> ModelParts {
    let recorded = record(config, dtype, [1, 1], HeadOutput::Logits, Places::default());
    ModelParts::new(directory, &recorded, WeightForm::new(dtype, request.quantize, request.activations))
}

/// Inputs of a plan besides the parts of the model.
#[derive(Clone, Copy)]
struct Question<'q> {
    config: &'q ModelConfig,
    request: &'q PlanRequest,
    kv_cache: KvCacheType,
    /// Part of the model on this rank.
    share: &'q RankShare,
}

impl Question<'_> {
    fn run(&self, parts: &ModelParts, chunk: usize) -> RunMemory {
        let types = (parts.dtype(), self.kv_cache);
        let run = RunMemory::of(self.config, self.share, types, self.request.workload, chunk);
        RunMemory { workspace: run.workspace + Workers::booked_bytes(self.request.threads) as u64, ..run }
    }

    fn experts_per_token(&self) -> usize {
        self.config.experts().map_or(0, |experts| experts.per_token)
    }

    /// Returns the least limit that would do.
    fn least(&self, parts: &ModelParts) -> u64 {
        let stacks = parts.expert_stacks();
        let cache = ExpertRoom::least(&stacks, self.experts_per_token()).bytes() as u64;
        let [(all, _), (others, _)] = self.all_and_others(parts, &stacks);
        let weights = all_resident(&all).min(least_bytes(&others) + cache);
        self.request.process_bytes + self.run(parts, LEAST_CHUNK).total() + weights
    }

    /// Returns the items of a model, and those without stacks of experts.
    fn all_and_others(
        &self,
        parts: &ModelParts,
        stacks: &[ExpertStack],
    ) -> [(Vec<Item>, Vec<Vec<ParameterId>>); 2] {
        let rows = self.looked_up_rows();
        let is_other = |id: ParameterId| stacks.iter().all(|stack| stack.id != id);
        [items(parts, rows, |_| true), items(parts, rows, is_other)]
    }

    /// Returns the most rows of a table that a run looks up.
    fn looked_up_rows(&self) -> usize {
        match self.request.workload {
            Workload::Generation { sequences, context } => self.config.vocab_size().min(sequences * context),
            Workload::Evaluation { .. } => self.config.vocab_size(),
        }
    }

    /// Returns the best placement; `None` if the limit is too small. Unless all experts fit, they get what the other weights leave:
    /// every token uses those, but a few of the experts.
    fn solve(&self, parts: &ModelParts, order: Order, limit: u64) -> Option<Solution> {
        let stacks = parts.expert_stacks();
        let [(all, _), (others, parameters)] = self.all_and_others(parts, &stacks);
        let least = ExpertRoom::least(&stacks, self.experts_per_token()).bytes() as u64;
        let solve = |chunk: usize| {
            let room = limit.checked_sub(self.request.process_bytes + self.run(parts, chunk).total())?;
            if stacks.is_empty() || all_resident(&all) <= room {
                return Some((place(&all, room, order)?, ExpertRoom::default(), chunk));
            }
            let found = place(&others, room.checked_sub(least)?, order)?.without_lookups(&others);
            let experts = ExpertRoom::for_all(&stacks).within(room - found.total_bytes(&others));
            Some((found, experts, chunk))
        };
        let shorter = std::iter::successors(Some(CHUNK), |chunk| Some(chunk / 2));
        let (mut placement, mut experts, mut chunk) =
            shorter.take_while(|&chunk| chunk >= LEAST_CHUNK).find_map(solve)?;
        let more = self.run(parts, STREAMED_CHUNK).total() - self.run(parts, chunk).total();
        // Another stage may read, and all have chunks of one length.
        let is_stage = self.share.stage.len() < parts.units.len();
        let reads = is_stage || placement.buffers > 0 || experts.slots > 0;
        if reads && chunk == CHUNK && (more as f64) < CHUNK_SHARE * limit as f64 {
            (placement, experts, chunk) = solve(STREAMED_CHUNK).unwrap_or((placement, experts, chunk));
        }
        let Placement { resident: are_resident, buffers } = placement;
        let mut resident = vec![true; parts.records.len()];
        for (ids, _) in parameters.iter().zip(are_resident).filter(|(_, is_resident)| !is_resident) {
            ids.iter().for_each(|id| resident[id.0] = false);
        }
        if experts.slots > 0 {
            stacks.iter().for_each(|stack| resident[stack.id.0] = false);
        }
        Some(Solution { resident, room: StreamingRoom { buffers, experts }, chunk })
    }

    /// Returns what [`Question::solve`] does, for given places.
    fn given(&self, parts: &ModelParts, resident: Vec<bool>, limit: u64) -> Solution {
        let streamed = UnitLayout::of_units(parts, &resident);
        let streamed = streamed.iter().filter(|[_, streamed]| !streamed.weights.is_empty()).count();
        let stacks = parts.expert_stacks_on_disk(&resident);
        let experts = ExpertRoom::least(&stacks, self.experts_per_token());
        let choices = [(3, CHUNK), (2, CHUNK), (3, LEAST_CHUNK), (2, LEAST_CHUNK)];
        let choices = choices
            .map(|(buffers, chunk)| (StreamingRoom { buffers: buffers.min(streamed), experts }, chunk));
        let bytes = |room, chunk| self.memory(parts, &resident, room, chunk).total();
        let fitting = choices.into_iter().find(|&(room, chunk)| bytes(room, chunk) <= limit);
        let (mut room, chunk) = fitting.unwrap_or(choices[choices.len() - 1]);
        let left = limit.saturating_sub(bytes(room, chunk)) + experts.bytes() as u64;
        room.experts = ExpertRoom::for_all(&stacks).within(left.max(experts.bytes() as u64));
        Solution { resident, room, chunk }
    }

    fn memory(
        &self,
        parts: &ModelParts,
        resident: &[bool],
        StreamingRoom { buffers, experts }: StreamingRoom,
        chunk: usize,
    ) -> PredictedMemory {
        let layouts = UnitLayout::of_units(parts, resident);
        let stored: usize = layouts.iter().map(|[layout, _]| layout.resident_bytes(parts)).sum();
        let one_by_one = parts.one_by_one().filter(|id| resident[id.0]);
        let made: u64 = parts.made().chain(one_by_one).map(|id| parts.bytes(id)).sum();
        let looked_up = parts.units[0].iter().filter(|id| !resident[id.0]);
        let touched: u64 = looked_up.map(|&id| touched_bytes(parts, id, self.looked_up_rows())).sum();
        let most = |bytes: fn(&UnitLayout) -> usize| {
            layouts.iter().map(|[_, layout]| bytes(layout)).max().unwrap_or(0)
        };
        let streaming = buffers * most(|layout| layout.bytes) + most(|layout| layout.converted_bytes);
        let RunMemory { kv_cache, activations, workspace } = self.run(parts, chunk);
        let (process, weights) = (self.request.process_bytes, stored as u64 + made + touched);
        let (streaming, experts) = (streaming as u64, experts.bytes() as u64);
        PredictedMemory { process, weights, streaming, experts, kv_cache, activations, workspace }
    }

    /// Names the options with which a limit below `least` bytes would do, each with its least limit.
    fn remedies(&self, directory: &ModelDirectory, parts: &ModelParts, least: u64) -> String {
        let mut found = Vec::new();
        if let Workload::Generation { .. } = self.request.workload {
            let narrow = Self { kv_cache: KvCacheType::Int8, ..*self };
            found.push(("--kv-cache int8".to_owned(), narrow.least(parts)));
        }
        if self.request.quantize.is_none() {
            let int4 = WeightQuantization { to: WeightType::Int4, group_size: None };
            let request = PlanRequest { quantize: Some(int4), ..self.request.clone() };
            let quantized = self::parts(directory, self.config, parts.dtype(), &request);
            let mut quantized = quantized.of_stage(parts.stage.clone());
            // Quantized matrices are written once, else all of them stay in memory.
            quantized.assume_written();
            let offload = if request.offload_dir.is_none() { " --offload-dir DIR" } else { "" };
            found.push((format!("--quantize int4{offload}"), self.least(&quantized)));
        }
        let helps = found.into_iter().filter(|(_, with)| least_mib(*with) < least_mib(least));
        helps.map(|(option, with)| format!("; with {option} cpu={}MiB would do", least_mib(with))).collect()
    }

    /// Describes a limit below `least` bytes.
    fn too_small(&self, parts: &ModelParts, limit_bytes: u64, least: u64, remedies: &str) -> InferError {
        let made = parts.made_weights();
        let hint = match made.first().filter(|_| self.request.offload_dir.is_none()) {
            Some(first) => format!(
                "; {} (the first is {}) cannot be read from disk as they are stored: give --offload-dir DIR, where they are \
                 written once",
                human::plural(made.len(), "weight"),
                first.record.name
            ),
            None => String::new(),
        };
        let (least_mib, run) = (least_mib(least), self.run(parts, LEAST_CHUNK).total());
        InferError::LimitTooSmall { limit_bytes, least_mib, hint: hint + remedies, run }
    }
}

/// Returns, for each parameter of a model, whether a given map keeps it in memory on a rank that has the units of `stage`.
fn given_residences(
    map: &DeviceMap,
    origin: &str,
    parts: &ModelParts,
    stage: &Range<usize>,
) -> Result<Vec<bool>, InferError> {
    let refuse = |problems| InferError::DeviceMap { origin: origin.to_owned(), problems };
    let resident = residences(map, parts, stage).map_err(refuse)?;
    let made = parts.made().filter(|id| !resident[id.0]);
    let made: Vec<String> = made.map(|id| parts.tensors[id.0][0].clone()).collect();
    match made.first() {
        None => Ok(resident),
        Some(first) => Err(refuse(vec![format!(
            "{} (the first is {first}) cannot be read from disk as they are stored; give --offload-dir DIR, where {}",
            human::plural(made.len(), "weight"),
            if stage.len() < parts.units.len() {
                "a run of one rank has written them"
            } else {
                "they are written once"
            },
        )])),
    }
}

/// Returns a limit in MiB that `bytes` fit. The process may be larger by a little next time.
fn least_mib(bytes: u64) -> u64 {
    (bytes >> 20) + 2
}

/// Returns the bytes of all items if all are resident.
fn all_resident(items: &[Item]) -> u64 {
    items.iter().map(|item| item.resident_bytes).sum()
}

/// Returns the parts of a stage as the solver sees them, with the parameters of each: one for each unit, of the parameters that
/// `is_part` selects. A table that an output layer is tied to belongs to the unit of that layer, which reads all of it.
fn items(
    parts: &ModelParts,
    rows: usize,
    is_part: impl Fn(ParameterId) -> bool,
) -> (Vec<Item>, Vec<Vec<ParameterId>>) {
    let reads =
        |unit: usize, owner: ParameterId| parts.units[unit].iter().any(|&id| parts.owner(id) == owner);
    let mut of_unit = vec![Vec::new(); parts.units.len()];
    for id in parts.owned().filter(|&id| is_part(id)) {
        let last = parts.stage.clone().rev().find(|&unit| reads(unit, id));
        of_unit[last.expect("a unit of the stage reads it")].push(id);
    }
    let item = |(unit, ids): (usize, &Vec<ParameterId>)| {
        let layout = UnitLayout::new(parts, ids.iter().copied());
        let made = ids.iter().filter(|&&id| parts.place(id) == WeightPlace::Made);
        let one_by_one = ids.iter().filter(|&&id| parts.place(id) == WeightPlace::OneByOne);
        let made_bytes: u64 = made.clone().chain(one_by_one).map(|&id| parts.bytes(id)).sum();
        let tables = ids.iter().filter(|id| parts.units[0].contains(id));
        // A resident table lies with its own unit.
        let of_one_unit = ids.chunk_by(|a, b| parts.records[a.0].unit == parts.records[b.0].unit);
        let resident =
            of_one_unit.map(|ids| UnitLayout::new(parts, ids.iter().copied()).resident_bytes(parts));
        Item {
            resident_bytes: resident.sum::<usize>() as u64 + made_bytes,
            slot_bytes: layout.bytes as u64,
            converted_bytes: layout.converted_bytes as u64,
            touched_bytes: tables.map(|&id| touched_bytes(parts, id, rows)).sum(),
            role: match (made.count(), unit) {
                (0, 0) => Role::LookedUp,
                (0, _) => Role::Streamed,
                _ => Role::Resident,
            },
        }
    };
    let of_stage = of_unit.into_iter().enumerate().filter(|(unit, _)| parts.stage.contains(unit));
    of_stage.map(|(unit, ids)| (item((unit, &ids)), ids)).unzip()
}

/// Returns the bytes of a mapped table that lookups of `rows` rows touch: whole pages.
fn touched_bytes(parts: &ModelParts, table: ParameterId, rows: usize) -> u64 {
    let row_bytes = parts.bytes(table) / parts.records[table.0].shape[0].max(1) as u64;
    (rows as u64 * (row_bytes.next_multiple_of(PAGE_BYTES) + PAGE_BYTES)).min(parts.bytes(table))
}
