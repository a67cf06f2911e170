//! The search's way through the candidates: what each can come to at least, in a microsecond; the fewest blocks that have to forget; and the
//! step, looked at in full only where nothing simpler shows that it is worse.

use std::ops::Range;
use std::rc::Rc;

use lockstep_plan::cluster::Software;
use lockstep_plan::predict::{TimedModel, predict_step_ms, slowest_kind};
use lockstep_plan::schedule::Kind;
use lockstep_plan::search::{Candidate, Rejection, Subject};
use lockstep_plan::{
    DType, Degrees, LayerRule, MemoryBytes, MemoryCategory, Mesh, Recompute, RecomputeRules, StageMemory,
    ZeroStage,
};

use crate::RunConfig;
use crate::planner::memory::Holding;
use crate::planner::recordings::Uniform;
use crate::planner::subject::Layout;
use crate::planner::{Objective, Planner};

/// Schedules are looked at with so many times as many micro-batches as ranks: then each further one takes as long as the last.
const ROUNDS: usize = 4;
/// What bounds of memory are held against is this much more than there is: they leave out what is rounded up, and are none of the
/// ledger's sums.
const SLACK: f64 = 1.03;

/// As few micro-batches as show how a schedule of many goes on: as many rounds are left out as there are. All are kept where memory
/// grows with them.
pub(super) fn shortened(kind: Kind, ranks: usize, micro_batches: usize) -> usize {
    let grows = matches!(kind, Kind::GPipe | Kind::LoopedBreadthFirst);
    if grows || micro_batches <= ROUNDS * ranks {
        return micro_batches;
    }
    ROUNDS * ranks + micro_batches % ranks
}

/// What of a candidate the passes of a micro-batch depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct PassKey {
    tensor: usize,
    context: usize,
    expert: usize,
    expert_tensor: usize,
    sequence_parallel: bool,
    micro_batch: usize,
    /// Where they matter: ranks of a host have as many cores as there are for each, stages may be on unlike nodes.
    ranks: usize,
    pipeline: usize,
}

/// What of a candidate the stages of its pipeline depend on: its passes, what forgets and of how many blocks, and how many stages
/// there are.
pub(super) type CutKey = (PassKey, Recompute, usize, usize);

/// What bounds are made of: for each of the three modes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Outline {
    /// Milliseconds of a forward and a backward through all units, and bytes that all blocks keep of a micro-batch.
    of_mode: [(f64, f64); 3],
    /// Elements of all units.
    dense: f64,
    experts: f64,
    dtype: DType,
}

fn index_of(mode: Recompute) -> usize {
    match mode {
        Recompute::None => 0,
        Recompute::Selective => 1,
        Recompute::Full => 2,
    }
}

impl Subject for Planner {
    /// The run with the plan in its keys.
    type Value = RunConfig;

    /// The time of all passes if every stage took as long as each other and nothing else held them up, with what the first micro-batch
    /// waits for in the pipeline, and with as much computed again as memory makes necessary at least.
    fn bound(&mut self, candidate: &Candidate) -> Option<f64> {
        let outline = self.outline(candidate);
        let Degrees { pipeline, shard, context, expert, expert_tensor, tensor, .. } = candidate.degrees;
        let ranks = pipeline as f64;
        let micro_batches = candidate.micro_batches(self.config.train.global_batch) as f64;
        let (kind, chunks) = candidate.schedule;
        let (none_ms, none_bytes) = outline.of_mode[0];
        let (mode_ms, mode_bytes) = outline.of_mode[index_of(candidate.recompute)];
        // State of a mean rank.
        let sharers = (shard * context) as u64;
        let of_experts = (shard * context * tensor / (expert * expert_tensor)).max(1) as u64;
        let state = self.cluster.software.style().state_bytes(outline.dtype);
        let held = |elements: f64, ranks| state.on_rank(elements as u64, ranks, candidate.zero_stage).total();
        let state = (held(outline.dense, sharers) + held(outline.experts, of_experts)) as f64;
        // Without a pipeline there is one micro-batch at a time; the first rank of one has as many as there are ranks, but for a V's.
        let at_once = if kind.is_v_shaped() { ranks / 2.0 } else { ranks.min(micro_batches) };
        let available = self.capacity_bytes(self.ranks_of(candidate)) as f64 * SLACK;
        let is_counted = self.config.offloads_nothing();
        let left = available - 0.9 * state / ranks;
        if is_counted && left < 0.8 * mode_bytes * at_once / ranks {
            return None;
        }
        // The share of the blocks that has to forget.
        let spared = (none_bytes - mode_bytes) * at_once / ranks;
        let missing = 0.8 * none_bytes * at_once / ranks - left;
        let forgets = if is_counted && spared > 0.0 { (missing / spared).clamp(0.0, 1.0) } else { 0.0 };
        if candidate.recompute == Recompute::None && forgets > 0.0 {
            return None;
        }
        let pass_ms = none_ms + forgets * (mode_ms - none_ms).max(0.0);
        // Split backwards fill what others wait.
        let waits = if kind.splits_backward() { 0.0 } else { (ranks - 1.0) / chunks as f64 };
        let step_ms = (micro_batches + waits) * pass_ms / ranks;
        Some(match self.objective {
            Objective::Time => step_ms,
            Objective::Cost => self.price_of(self.ranks_of(candidate), step_ms),
            Objective::Headroom => (0.8 * mode_bytes * at_once + 0.9 * state) / ranks / available,
        })
    }

    fn value(&mut self, candidate: &Candidate, limit: f64) -> Result<(f64, RunConfig), Rejection> {
        let layers = self.model.config.num_hidden_layers();
        let forgets = candidate.recompute != Recompute::None;
        let mut least = if forgets { layers } else { 0 };
        let mut trial = self.tried(candidate, least)?;
        // The fewest blocks that forget; what needs none of them is another candidate.
        let mut too_few = 0;
        while least > too_few + 1 {
            let middle = too_few.midpoint(least);
            match self.tried(candidate, middle) {
                Ok(fits) => (least, trial) = (middle, fits),
                Err(_) => too_few = middle,
            }
        }
        if least == 1 && self.tried(candidate, 0).is_ok() {
            return Err(Rejection::Invalid);
        }
        loop {
            let step_ms = self.step_ms(candidate, &trial, limit)?;
            let of_time = match self.objective {
                Objective::Time => Some(step_ms),
                Objective::Cost => Some(self.price_of(self.ranks_of(candidate), step_ms)),
                Objective::Headroom => None,
            };
            if of_time.is_some_and(|objective| objective >= limit) {
                return Err(Rejection::Worse);
            }
            let config = self.configured(candidate, &trial).ok_or(Rejection::Invalid)?;
            let memory = self.booked(&config, &trial)?;
            let largest = memory.iter().map(|memory| memory.total()).max().unwrap_or(0);
            let capacity = self.capacity_bytes(self.ranks_of(candidate)).max(1);
            let objective = of_time.unwrap_or(largest as f64 / capacity as f64);
            if objective >= limit {
                return Err(Rejection::Worse);
            }
            let Some(lacking) = self.lacking(&trial.layout, &memory) else { return Ok((objective, config)) };
            // What was left out of the quick sums.
            if !forgets || least == layers {
                return Err(lacking);
            }
            least = (least + layers.div_ceil(32)).min(layers);
            trial = self.tried(candidate, least)?;
        }
    }
}

/// A candidate of which so many blocks forget, and that fits by the quick sums.
#[derive(Debug)]
struct Trial {
    /// How many.
    count: usize,
    layout: Layout,
    /// What its units take and keep.
    units: Rc<Uniform>,
    memory: Vec<MemoryBytes>,
}

impl Planner {
    /// What the ledgers of the ranks book that by the quick sums book most, and the first; of all others that they book as much as
    /// these say.
    fn booked(&mut self, config: &RunConfig, trial: &Trial) -> Result<Vec<MemoryBytes>, Rejection> {
        let mut memory = trial.memory.clone();
        let largest =
            memory.iter().enumerate().max_by_key(|(_, bytes)| bytes.total()).map_or(0, |(rank, _)| rank);
        let (rules, software) = (config.parallel.recompute, self.cluster.software);
        let recording = self.recordings.by_layer(config, &self.model, &trial.layout.mesh, &rules, software);
        for rank in [0, largest] {
            memory[rank] = self.memory_of(config, &trial.layout, &recording, rank)?;
        }
        Ok(memory)
    }

    /// What a step costs, in whatever its nodes cost in an hour; where nobody says, as much as there are devices.
    fn price_of(&self, devices: usize, step_ms: f64) -> f64 {
        self.price_per_hour(devices).unwrap_or(devices as f64) * step_ms
    }

    fn ranks_of(&self, candidate: &Candidate) -> usize {
        candidate.degrees.world_size().unwrap_or(usize::MAX)
    }

    /// What the passes of a candidate's micro-batches depend on.
    pub(super) fn pass_key(&self, candidate: &Candidate) -> PassKey {
        let Degrees { tensor, context, expert, expert_tensor, pipeline, .. } = candidate.degrees;
        let is_even = self.cluster.nodes.len() == 1;
        PassKey {
            tensor,
            context,
            expert,
            expert_tensor,
            sequence_parallel: candidate.sequence_parallel,
            micro_batch: candidate.micro_batch,
            ranks: if self.is_host() { self.ranks_of(candidate) } else { 0 },
            pipeline: if is_even { 0 } else { pipeline },
        }
    }

    /// What bounds of a candidate are made of.
    fn outline(&mut self, candidate: &Candidate) -> Outline {
        let key = self.pass_key(candidate);
        if let Some(known) = self.outlines.get(&key) {
            return *known;
        }
        let config = self.keys_of(candidate);
        let mut outline = Outline { of_mode: [(0.0, 0.0); 3], dense: 0.0, experts: 0.0, dtype: DType::F32 };
        let Ok(mesh) = Mesh::new(candidate.degrees) else { return outline };
        for mode in [Recompute::None, Recompute::Selective, Recompute::Full] {
            let (work, kept_bytes) =
                self.recordings.sketch(&config, &self.model, &mesh, mode, self.cluster.software);
            let kind = slowest_kind(&self.cluster, &mesh, work.dtype, 0);
            let seconds = TimedModel::new(&self.cluster, &work, &mesh).unit_seconds(kind);
            let ms = 1e3 * seconds.iter().flatten().sum::<f64>();
            outline.of_mode[index_of(mode)] = (ms, kept_bytes);
            let units = || (0..work.units()).map(|unit| work.unit(unit));
            outline.experts = units().map(|unit| unit.expert_elements as f64).sum();
            outline.dense = units().map(|unit| unit.parameter_elements as f64).sum::<f64>() - outline.experts;
            if self.model.config.tie_word_embeddings() {
                outline.dense -= work.unit(0).parameter_elements as f64;
            }
            outline.dtype = work.dtype;
        }
        self.outlines.insert(key, outline);
        outline
    }

    /// The rules by which the first `count` blocks forget what a candidate says.
    fn rules(&self, candidate: &Candidate, count: usize) -> Option<RecomputeRules> {
        let layers = self.model.config.num_hidden_layers();
        match count {
            0 => Some(Recompute::None.into()),
            count if count == layers => Some(candidate.recompute.into()),
            count => {
                let first = LayerRule { from: 0, to: Some(count - 1), every: 1, mode: candidate.recompute };
                RecomputeRules::new(Recompute::None, &[first]).ok()
            }
        }
    }

    /// The keys of a candidate as it was tried.
    fn configured(&self, candidate: &Candidate, trial: &Trial) -> Option<RunConfig> {
        let mut config = self.keys_of(candidate);
        config.parallel.recompute = self.rules(candidate, trial.count)?;
        let Layout { schedule, stages, .. } = &trial.layout;
        config.parallel.pipeline_stages = schedule.is_some().then(|| stages.iter().map(Range::len).collect());
        Some(config)
    }

    /// A candidate whose blocks all forget the same.
    fn uniform(&mut self, candidate: &Candidate, mesh: &Mesh, recompute: Recompute) -> Rc<Uniform> {
        let key = (self.pass_key(candidate), recompute);
        if let Some(known) = self.uniforms.get(&key) {
            return Rc::clone(known);
        }
        let (config, software) = (self.keys_of(candidate), self.cluster.software);
        let recording = self.recordings.uniform(&config, &self.model, mesh, recompute, software);
        let uniform = Rc::new(Uniform::new(&recording, recompute, &self.cluster, mesh));
        self.uniforms.insert(key, Rc::clone(&uniform));
        uniform
    }

    /// A candidate of which the first `count` blocks forget, with the stages that then take as long as each other; an error if a rank
    /// lacks memory.
    fn tried(&mut self, candidate: &Candidate, count: usize) -> Result<Trial, Rejection> {
        let layers = self.model.config.num_hidden_layers();
        let mesh = Mesh::new(candidate.degrees).map_err(|_| Rejection::Invalid)?;
        let units = if count == 0 {
            self.uniform(candidate, &mesh, Recompute::None)
        } else {
            let forgetting = self.uniform(candidate, &mesh, candidate.recompute);
            if count == layers {
                forgetting
            } else {
                let others = self.uniform(candidate, &mesh, Recompute::None);
                // The embedding is before the first block.
                Rc::new(forgetting.with(1 + count..1 + layers, &others))
            }
        };
        let layout = self.laid_out(candidate, count, &units.times).ok_or(Rejection::Invalid)?;
        let of_rank = |rank: usize| {
            let stages = layout.of_rank(rank, units.times.units());
            self.quick_memory(candidate, &layout, &units, &stages)
        };
        let memory: Vec<MemoryBytes> = (0..layout.pipeline_ranks()).map(of_rank).collect();
        if self.config.offloads_nothing() {
            self.lacking(&layout, &memory).map_or(Ok(()), Err)?;
        }
        Ok(Trial { count, layout, units, memory })
    }

    /// What a rank books but for padding and small buffers: the ledger's sums of activations, and its state by the elements.
    fn quick_memory(
        &self,
        candidate: &Candidate,
        layout: &Layout,
        units: &Uniform,
        stages: &[StageMemory],
    ) -> MemoryBytes {
        let Uniform { times, profile, kept_elsewhere } = units;
        let (mesh, zero_stage, dtype) = (&layout.mesh, candidate.zero_stage, times.dtype());
        let holding = Holding { mesh, zero_stage, dtype, stages };
        let elements = |unit| times.elements(unit);
        if self.cluster.software != Software::Lockstep {
            return self.memory_elsewhere(holding, elements, |unit| kept_elsewhere[unit]);
        }
        let mut bytes = self.state_elsewhere(holding, elements);
        bytes[MemoryCategory::Activations] = profile.activation_bytes(stages, false);
        bytes[MemoryCategory::Workspace] = profile.workspace_bytes(stages);
        let here = stages.iter().flat_map(|stage| stage.units.clone());
        let largest = here.map(|unit| times.elements(unit).iter().sum::<f64>()).fold(0.0, f64::max) as usize;
        let of_two = |bytes: usize| 2 * largest * bytes;
        if zero_stage == ZeroStage::Parameters {
            bytes[MemoryCategory::Communication] += of_two(dtype.size_bytes());
        }
        if zero_stage >= ZeroStage::Gradients {
            bytes[MemoryCategory::Communication] += of_two(4);
        }
        bytes
    }

    /// Milliseconds of a candidate's step. Of a long schedule two short ones say what each micro-batch takes once the pipeline is full.
    ///
    /// # Errors
    /// [`Rejection::Worse`] where the stages alone take `limit`.
    fn step_ms(&mut self, candidate: &Candidate, trial: &Trial, limit: f64) -> Result<f64, Rejection> {
        let Trial { layout, units, .. } = trial;
        let micro_batches = candidate.micro_batches(self.config.train.global_batch);
        if layout.schedule.is_some() && self.objective == Objective::Time {
            let kind = slowest_kind(&self.cluster, &layout.mesh, units.times.dtype(), 0);
            let seconds = units.times.unit_seconds(kind);
            let of_rank = |rank: usize| -> f64 {
                let stages =
                    layout.stages_of(rank).into_iter().flat_map(|stage| layout.stages[stage].clone());
                stages.flat_map(|unit| seconds[unit]).sum()
            };
            let slowest = (0..layout.pipeline_ranks()).map(of_rank).fold(0.0, f64::max);
            if slowest * 1e3 * micro_batches as f64 >= limit {
                return Err(Rejection::Worse);
            }
        }
        let step = |planner: &Self, layout: &Layout| {
            let shape = planner.shape(candidate.zero_stage, layout);
            predict_step_ms(&planner.cluster, &units.times, shape).map_err(|_| Rejection::Invalid)
        };
        let short = step(self, layout)?;
        if layout.micro_batches == micro_batches {
            return Ok(short);
        }
        let (kind, chunks) = candidate.schedule;
        let ranks = candidate.degrees.pipeline;
        let fewer = layout.micro_batches - ranks;
        let schedule = self.schedule(kind, ranks, fewer, chunks).ok_or(Rejection::Invalid)?;
        let shorter = Layout { schedule: Some(schedule), micro_batches: fewer, ..layout.clone() };
        let each = (short - step(self, &shorter)?) / ranks as f64;
        Ok(short + each * (micro_batches - layout.micro_batches) as f64)
    }
}
