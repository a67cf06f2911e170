//! The search's way through the candidates: what each can come to at least, in a microsecond; the fewest blocks that have to forget; and the
//! step, looked at in full only where nothing simpler shows that it is worse.

use std::ops::Range;
use std::rc::Rc;

use lockstep_plan::cluster::Software;
use lockstep_plan::predict::{TimedModel, predict_step_ms, slowest_kind};
use lockstep_plan::schedule::Kind;
use lockstep_plan::search::{Candidate, Rejection, Subject};
use lockstep_plan::work::UnitElements;
use lockstep_plan::{
    ContextMethod, DType, Degrees, FRAME_PLACES, LayerRule, MemoryBytes, MemoryCategory, Mesh, RankTraffic,
    Recompute, RecomputeRules, StageMemory, StateBytes, StateOnRank, ZeroStage,
};

use crate::RunConfig;
use crate::planner::memory::{Holding, memory_elsewhere, state_of, state_of_unit};
use crate::planner::offload::Least;
use crate::planner::recordings::{Recording, Uniform};
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
    context_method: ContextMethod,
    micro_batch: usize,
    /// Where they matter: ranks of a host have as many cores as there are for each, stages may be on unlike nodes.
    ranks: usize,
    pipeline: usize,
}

/// What of a candidate the stages of its pipeline depend on: its passes, what forgets and of how many blocks, and how many stages
/// there are, and whether they lie as a V.
pub(super) type CutKey = (PassKey, Recompute, usize, usize, bool);

/// The inputs of bounds: times and saved activations by recompute mode, each recorded when it is first asked for, and the state.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Outline {
    of_mode: [Option<ModeOutline>; 3],
    /// Elements of all units together.
    elements: UnitElements,
    state: StateBytes,
}

/// Times and saved activations of a recompute mode.
#[derive(Debug, Clone, Copy, PartialEq)]
struct ModeOutline {
    /// Milliseconds of a forward and a backward of a micro-batch through all units.
    pass_ms: f64,
    /// Bytes that all blocks save of a micro-batch.
    saved_bytes: f64,
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
        let outline = self.outline(candidate)?;
        let ranks = candidate.degrees.pipeline as f64;
        let micro_batches = candidate.micro_batches(self.config.train.global_batch) as f64;
        let (kind, chunks) = candidate.schedule;
        // Where state is offloaded memory is scarce, and a ring's buffers decide what fits.
        if candidate.offload.is_nothing() && self.is_dominated_by_ring(candidate)? {
            return None;
        }
        let ModeOutline { pass_ms: none_ms, saved_bytes: none_bytes } =
            self.mode_outline(candidate, Recompute::None)?;
        // State of all pipeline ranks of a replica together.
        let mesh = Mesh::new(candidate.degrees).ok()?;
        let held = state_of_unit(outline.state, &mesh, candidate.zero_stage, outline.elements);
        let state = held.total() as f64;
        // Without a pipeline there is one micro-batch at a time; the first rank of one has as many as there are ranks, but for a V's.
        let at_once = if kind.is_v_shaped() { ranks / 2.0 } else { ranks.min(micro_batches) };
        let available = self.capacity_bytes(self.ranks_of(candidate)) as f64 * SLACK;
        let is_counted = self.config.offloads_nothing();
        let left = available - 0.9 * state / ranks;
        // What fits without recomputation needs none.
        let needs_mode = !candidate.offload.is_nothing()
            || self.objective == Objective::Headroom
            || is_counted && left < 0.8 * none_bytes * at_once / ranks;
        let mode = if needs_mode { candidate.recompute } else { Recompute::None };
        let ModeOutline { pass_ms: mode_ms, saved_bytes: mode_bytes } = self.mode_outline(candidate, mode)?;
        let stretch = bubble_stretch(kind, ranks, chunks as f64, micro_batches);
        if !candidate.offload.is_nothing() {
            let least = self.least_offloaded(held, mode_bytes / ranks, ranks, [at_once, micro_batches]);
            return self.bound_offloaded(candidate, micro_batches * stretch * mode_ms / ranks, least);
        }
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
        let step_ms = micro_batches * stretch * pass_ms / ranks;
        Some(match self.objective {
            Objective::Time => step_ms,
            Objective::Cost => self.price_of(self.ranks_of(candidate), step_ms),
            Objective::Headroom => (0.8 * mode_bytes * at_once + 0.9 * state) / ranks / available,
        })
    }

    fn value(&mut self, candidate: &Candidate, limit: f64) -> Result<(f64, RunConfig), Rejection> {
        if !candidate.offload.is_nothing() {
            return self.value_offloaded(candidate, limit);
        }
        if self.is_needless(candidate)? {
            return Err(Rejection::Invalid);
        }
        let layers = self.model.config.num_hidden_layers();
        let mut trial = self.chosen(candidate)?;
        loop {
            let of_time = self.of_time(candidate, &trial, limit)?;
            if let Some(objective) = of_time
                && trial.count == 1
                && self.without(candidate)?.is_some_and(|without| without <= objective)
            {
                return Err(Rejection::Invalid);
            }
            let config = self.configured(candidate, &trial).ok_or(Rejection::Invalid)?;
            let memory = self.booked(&config, &trial, trial.ranks_to_book())?;
            let objective = of_time.unwrap_or_else(|| self.share_of_memory(candidate, &memory));
            if objective >= limit {
                return Err(Rejection::Worse);
            }
            let Some(lacking) = self.lacking(&trial.layout, &memory) else { return Ok((objective, config)) };
            // What was left out of the quick sums.
            if trial.count == 0 || trial.count == layers {
                return Err(lacking);
            }
            let more = (trial.count + layers.div_ceil(32)).min(layers);
            trial = self.fitting(candidate, more)?;
        }
    }
}

/// Lower bound of the time of a pipeline without split backwards as a multiple of what its ranks work on average.
///
/// Rank `s` waits for one forward and one backward of a chunk of each rank before it, so that with `M` micro-batches and `v` chunks of `t[r] / v`
/// on rank `r` the step takes `M t[s] + (t[0] + … + t[s - 1]) / v` at least. Stages are whole units, of which the last ranks may have fewer; the
/// largest of these sums is smallest where all are equal: `t[s + 1] = t[s] (1 - 1 / (v M))`. Split backwards fill the wait.
fn bubble_stretch(kind: Kind, ranks: f64, chunks: f64, micro_batches: f64) -> f64 {
    if kind.splits_backward() {
        return 1.0;
    }
    let passes = chunks * micro_batches;
    ranks / (passes * (1.0 - (1.0 - 1.0 / passes).powf(ranks)))
}

/// The largest sum of two values that follow each other: the weights of a unit at work and of the next one are whole at once, and the gradients
/// of two units are on their way to their owners. Of a single value, that value.
fn pairs(mut values: impl Iterator<Item = f64>) -> f64 {
    let Some(mut last) = values.next() else { return 0.0 };
    let mut largest = last;
    for value in values {
        largest = largest.max(last + value);
        last = value;
    }
    largest
}

/// A candidate of which so many blocks forget.
#[derive(Debug)]
pub(super) struct Trial {
    /// Number of blocks that recompute.
    count: usize,
    pub(super) layout: Layout,
    /// Times and saved activations of its units.
    pub(super) units: Rc<Uniform>,
    /// Lower bound of the memory of each pipeline rank.
    pub(super) memory: Vec<MemoryBytes>,
}

/// The ranks whose ledgers are asked: the one that by the quick sums books most, and the first.
pub(super) fn ranks_to_book(memory: &[MemoryBytes]) -> [usize; 2] {
    let totals = memory.iter().map(MemoryBytes::total).enumerate();
    [totals.max_by_key(|(_, total)| *total).map_or(0, |(rank, _)| rank), 0]
}

impl Trial {
    pub(super) fn ranks_to_book(&self) -> [usize; 2] {
        ranks_to_book(&self.memory)
    }
}

impl Planner {
    /// What a candidate comes to of which the first `count` blocks forget, no more and no fewer, with every rank's ledger: what a search
    /// is held against. What comes to `limit` or more is not looked at to the end.
    ///
    /// # Errors
    /// Why it is no choice.
    pub fn value_of(
        &mut self,
        candidate: &Candidate,
        count: usize,
        limit: f64,
    ) -> Result<(f64, RunConfig), Rejection> {
        let trial = self.tried(candidate, count)?;
        let of_time = self.of_time(candidate, &trial, limit)?;
        let config = self.configured(candidate, &trial).ok_or(Rejection::Invalid)?;
        let memory = self.booked(&config, &trial, 0..trial.memory.len())?;
        let objective = of_time.unwrap_or_else(|| self.share_of_memory(candidate, &memory));
        match self.lacking(&trial.layout, &memory) {
            Some(lacking) => Err(lacking),
            None if objective >= limit => Err(Rejection::Worse),
            None => Ok((objective, config)),
        }
    }

    /// A candidate with as many blocks that forget as are best: each takes time, so the fewest with which every rank fits; where memory
    /// is what counts, as many as leave most of it.
    fn chosen(&mut self, candidate: &Candidate) -> Result<Trial, Rejection> {
        if candidate.recompute == Recompute::None {
            return self.fitting(candidate, 0);
        }
        let layers = self.model.config.num_hidden_layers();
        let mut trial = self.fitting(candidate, layers)?;
        if self.objective == Objective::Headroom {
            return Ok(trial);
        }
        let mut too_few = 0;
        while trial.count > too_few + 1 {
            let middle = too_few.midpoint(trial.count);
            match self.fitting(candidate, middle) {
                Ok(fits) => trial = fits,
                Err(_) => too_few = middle,
            }
        }
        Ok(trial)
    }

    /// Whether a candidate recomputes although it fits without. In a pipeline recomputation may still even out its stages.
    fn is_needless(&mut self, candidate: &Candidate) -> Result<bool, Rejection> {
        let is_open = candidate.recompute == Recompute::None || candidate.degrees.pipeline > 1;
        if is_open || self.objective == Objective::Headroom {
            return Ok(false);
        }
        let Ok(trial) = self.fitting(candidate, 0) else { return Ok(false) };
        let config = self.configured(candidate, &trial).ok_or(Rejection::Invalid)?;
        let memory = self.booked(&config, &trial, trial.ranks_to_book())?;
        Ok(self.lacking(&trial.layout, &memory).is_none())
    }

    /// What a candidate of which one block is to forget comes to without that, if it fits so by the ledgers: then it is another candidate,
    /// unless what one block forgets has the stages cut so that the step is shorter.
    fn without(&mut self, candidate: &Candidate) -> Result<Option<f64>, Rejection> {
        let Ok(trial) = self.fitting(candidate, 0) else { return Ok(None) };
        let config = self.configured(candidate, &trial).ok_or(Rejection::Invalid)?;
        let memory = self.booked(&config, &trial, trial.ranks_to_book())?;
        if self.lacking(&trial.layout, &memory).is_some() {
            return Ok(None);
        }
        self.of_time(candidate, &trial, f64::INFINITY)
    }

    /// The objective where it is time or its price; none where it is memory.
    fn of_time(
        &mut self,
        candidate: &Candidate,
        trial: &Trial,
        limit: f64,
    ) -> Result<Option<f64>, Rejection> {
        if self.objective == Objective::Headroom {
            return Ok(None);
        }
        let step_ms = self.step_ms(candidate, trial, |_| Vec::new(), limit)?;
        let objective = self.objective_of_time(candidate, step_ms);
        if objective < limit { Ok(Some(objective)) } else { Err(Rejection::Worse) }
    }

    /// The objective of a candidate whose step takes so long, where it is time or its price.
    pub(super) fn objective_of_time(&self, candidate: &Candidate, step_ms: f64) -> f64 {
        match self.objective {
            Objective::Time | Objective::Headroom => step_ms,
            Objective::Cost => self.price_of(self.ranks_of(candidate), step_ms),
        }
    }

    /// What the rank that books most books of what it may.
    pub(super) fn share_of_memory(&self, candidate: &Candidate, memory: &[MemoryBytes]) -> f64 {
        let largest = memory.iter().map(MemoryBytes::total).max().unwrap_or(0);
        largest as f64 / self.capacity_bytes(self.ranks_of(candidate)).max(1) as f64
    }

    /// What the ledgers of some ranks book; of all others that they book as much as the quick sums say.
    pub(super) fn booked(
        &mut self,
        config: &RunConfig,
        trial: &Trial,
        ranks: impl IntoIterator<Item = usize>,
    ) -> Result<Vec<MemoryBytes>, Rejection> {
        self.booked_instead(config, &trial.layout, trial.memory.clone(), ranks)
    }

    /// The same with quick sums of other ranks than a trial's.
    pub(super) fn booked_instead(
        &mut self,
        config: &RunConfig,
        layout: &Layout,
        mut memory: Vec<MemoryBytes>,
        ranks: impl IntoIterator<Item = usize>,
    ) -> Result<Vec<MemoryBytes>, Rejection> {
        let recording = self.recording_of(config, &layout.mesh);
        for rank in ranks {
            self.ledgers += 1;
            memory[rank] = self.memory_of(config, layout, &recording, rank)?;
        }
        Ok(memory)
    }

    /// What a step costs, in whatever its nodes cost in an hour; where nobody says, as much as there are devices.
    pub(super) fn price_of(&self, devices: usize, step_ms: f64) -> f64 {
        self.price_per_hour(devices).unwrap_or(devices as f64) * step_ms
    }

    pub(super) fn ranks_of(&self, candidate: &Candidate) -> usize {
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
            context_method: candidate.context_method,
            micro_batch: candidate.micro_batch,
            ranks: if self.is_host() { self.ranks_of(candidate) } else { 0 },
            pipeline: if is_even { 0 } else { pipeline },
        }
    }

    /// Whether another context-parallel method than the ring takes as long as it and saves as much: then it is no better anywhere. `None` if
    /// there is no such mesh.
    fn is_dominated_by_ring(&mut self, candidate: &Candidate) -> Option<bool> {
        if candidate.context_method == ContextMethod::Ring || !self.leaves_ring_open() {
            return Some(false);
        }
        let ring = Candidate { context_method: ContextMethod::Ring, ..*candidate };
        for mode in [Recompute::None, candidate.recompute] {
            let [own, ring] = [self.mode_outline(candidate, mode)?, self.mode_outline(&ring, mode)?];
            if own.pass_ms < ring.pass_ms || own.saved_bytes < ring.saved_bytes {
                return Some(false);
            }
        }
        Some(true)
    }

    /// The inputs of the bound of a candidate that offloads: the state of all pipeline ranks, and the bytes that the blocks of a mean rank save of
    /// each micro-batch, of which so many are alive at once and so many belong to a step.
    fn least_offloaded(
        &self,
        state: StateOnRank,
        saved_bytes: f64,
        ranks: f64,
        [at_once, micro_batches]: [f64; 2],
    ) -> Least {
        let of_rank = |bytes: u64| 0.9 * bytes as f64 / ranks;
        let kept = 0.8 * saved_bytes;
        let blocks = self.model.config.num_hidden_layers() as f64 / ranks;
        let moved = (1.0 - FRAME_PLACES as f64 / blocks).max(0.0);
        Least {
            state: [state.weights, state.gradients, state.optimizer].map(of_rank),
            kept: kept * at_once,
            kept_of_all: kept * moved * micro_batches,
            micro_batches,
        }
    }

    /// The inputs of a candidate's bound; `None` if there is no such mesh.
    fn outline(&mut self, candidate: &Candidate) -> Option<Outline> {
        let key = self.pass_key(candidate);
        if let Some(known) = self.outlines.get(&key) {
            return Some(*known);
        }
        let (sketch, of_none) = self.sketch(candidate, Recompute::None)?;
        let mut elements = UnitElements::default();
        for unit in 0..sketch.work.units() {
            elements += sketch.work.unit(unit).elements();
        }
        if self.model.config.tie_word_embeddings() {
            elements = elements.without(sketch.work.unit(0).elements());
        }
        let mut of_mode = [None; 3];
        of_mode[index_of(Recompute::None)] = Some(of_none);
        let outline = Outline { of_mode, elements, state: self.state_bytes(&sketch) };
        self.outlines.insert(key, outline);
        Some(outline)
    }

    /// Times and saved activations of a candidate whose blocks all recompute so much.
    fn mode_outline(&mut self, candidate: &Candidate, mode: Recompute) -> Option<ModeOutline> {
        if let Some(known) = self.outline(candidate)?.of_mode[index_of(mode)] {
            return Some(known);
        }
        let (_, of_mode) = self.sketch(candidate, mode)?;
        let key = self.pass_key(candidate);
        if let Some(outline) = self.outlines.get_mut(&key) {
            outline.of_mode[index_of(mode)] = Some(of_mode);
        }
        Some(of_mode)
    }

    /// A recording of a candidate whose blocks all recompute so much, which is not kept, and what it says.
    fn sketch(&mut self, candidate: &Candidate, mode: Recompute) -> Option<(Recording, ModeOutline)> {
        let config = self.keys_of(candidate);
        let mesh = Mesh::new(candidate.degrees).ok()?;
        let (recording, saved_bytes) =
            self.recordings.sketch(&config, &self.model, &mesh, mode, self.cluster.software);
        // Of unlike nodes the fastest: a bound may not be above what any of them takes.
        let times = TimedModel::new(&self.cluster, &recording.work, &mesh);
        let on = |kind: usize| times.pass_seconds(0..times.units(), kind);
        let pass_ms = 1e3 * (0..self.cluster.nodes.len()).map(on).fold(f64::INFINITY, f64::min);
        Some((recording, ModeOutline { pass_ms, saved_bytes }))
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
    pub(super) fn configured(&self, candidate: &Candidate, trial: &Trial) -> Option<RunConfig> {
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
        let state = self.state_bytes(&recording);
        let uniform = Rc::new(Uniform::new(&recording, state, recompute, &self.cluster, mesh));
        self.uniforms.insert(key, Rc::clone(&uniform));
        uniform
    }

    /// The same where every rank fits by the quick sums; else what lacks.
    fn fitting(&mut self, candidate: &Candidate, count: usize) -> Result<Trial, Rejection> {
        let trial = self.tried(candidate, count)?;
        let lacking = self.lacking(&trial.layout, &trial.memory);
        lacking.filter(|_| self.config.offloads_nothing()).map_or(Ok(trial), Err)
    }

    /// A candidate of which the first `count` blocks forget, with the stages that then take as long as each other.
    pub(super) fn tried(&mut self, candidate: &Candidate, count: usize) -> Result<Trial, Rejection> {
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
        Ok(Trial { count, layout, units, memory })
    }

    /// What a rank books at least: the ledger's sums of activations, its state by the elements, and of what is on its way one unit. Padding
    /// and smaller buffers come to that. Who is turned away by this would be turned away by the ledger.
    fn quick_memory(
        &self,
        candidate: &Candidate,
        layout: &Layout,
        units: &Uniform,
        stages: &[StageMemory],
    ) -> MemoryBytes {
        let Uniform { times, profile, state, kept_elsewhere } = units;
        let (mesh, zero_stage, dtype) = (&layout.mesh, candidate.zero_stage, times.dtype());
        let holding = Holding { state: *state, mesh, zero_stage, stages };
        if self.cluster.software != Software::Lockstep {
            return memory_elsewhere(holding, |unit| times.elements(unit), |unit| kept_elsewhere[unit]);
        }
        let elements = self.elements_of(times, stages);
        let mut bytes = state_of(holding, elements);
        bytes[MemoryCategory::Activations] = profile.activation_bytes(stages, false);
        bytes[MemoryCategory::Workspace] = profile.workspace_bytes(stages);
        let at_once = |elements: fn(UnitElements) -> [f64; 2]| {
            let of_unit = |unit: usize| elements(times.elements(unit)).iter().sum::<f64>();
            let of_stage = |stage: &StageMemory| pairs(stage.units.clone().map(of_unit));
            stages.iter().map(of_stage).fold(0.0, f64::max) as usize
        };
        if zero_stage == ZeroStage::Parameters {
            let live = at_once(|elements| elements.all);
            let live = self.config.parallel.max_live_parameters.map_or(live, |limit| limit.min(live));
            bytes[MemoryCategory::Communication] += live * dtype.size_bytes();
        }
        if zero_stage >= ZeroStage::Gradients {
            let summed = at_once(|elements| elements.trained);
            bytes[MemoryCategory::Communication] += summed * DType::F32.size_bytes();
        }
        bytes
    }

    /// Elements of each unit of these stages. A table that both ends of the model share is there once.
    pub(super) fn elements_of<'t>(
        &self,
        times: &'t TimedModel,
        stages: &[StageMemory],
    ) -> impl Fn(usize) -> UnitElements + use<'t> {
        let last = times.units() - 1;
        let has = |unit: usize| stages.iter().any(|stage| stage.units.contains(&unit));
        let shares_table = self.model.config.tie_word_embeddings() && has(0) && has(last);
        move |unit: usize| match times.elements(unit) {
            elements if unit == last && shares_table => elements.without(times.elements(0)),
            elements => elements,
        }
    }

    /// Milliseconds of a candidate's step with this traffic of offloaded state. Of a long schedule two short ones say what each micro-batch takes
    /// once the pipeline is full.
    ///
    /// # Errors
    /// [`Rejection::Worse`] where the stages alone take `limit`.
    pub(super) fn step_ms(
        &mut self,
        candidate: &Candidate,
        trial: &Trial,
        traffic: impl Fn(&Layout) -> Vec<RankTraffic>,
        limit: f64,
    ) -> Result<f64, Rejection> {
        let Trial { layout, units, .. } = trial;
        let micro_batches = candidate.micro_batches(self.config.train.global_batch);
        if layout.schedule.is_some()
            && self.objective == Objective::Time
            && self.pipeline_s(candidate, layout, &units.times) * 1e3 >= limit
        {
            return Err(Rejection::Worse);
        }
        let step = |planner: &Self, layout: &Layout| {
            let traffic = traffic(layout);
            let shape = planner.shape(candidate.zero_stage, layout, &traffic);
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

    /// Lower bound of the seconds of a step's passes in a pipeline: each rank's own work with its wait for the first micro-batch. Stages of
    /// the same units take as long.
    fn pipeline_s(&self, candidate: &Candidate, layout: &Layout, times: &TimedModel) -> f64 {
        let mut known: Vec<(&[usize], usize, f64)> = Vec::new();
        let mut of_stage = |units: Range<usize>, kind: usize| {
            let same = times.kinds_of_units(units.clone());
            if let Some((.., seconds)) = known.iter().find(|(of, on, _)| *of == same && *on == kind) {
                return *seconds;
            }
            let seconds = times.pass_seconds(units, kind);
            known.push((same, kind, seconds));
            seconds
        };
        let micro_batches = candidate.micro_batches(self.config.train.global_batch) as f64;
        let (kind, _) = candidate.schedule;
        let (mut before_s, mut longest_s) = (0.0, 0.0_f64);
        for rank in 0..layout.pipeline_ranks() {
            let node = slowest_kind(&self.cluster, &layout.mesh, times.dtype(), rank);
            let stages: Vec<f64> = layout
                .stages_of(rank)
                .into_iter()
                .map(|stage| of_stage(layout.stages[stage].clone(), node))
                .collect();
            longest_s = longest_s.max(before_s + micro_batches * stages.iter().sum::<f64>());
            if !kind.splits_backward() {
                // The first and the last chunk of a rank are those that others wait for.
                before_s += stages.iter().copied().fold(f64::INFINITY, f64::min);
            }
        }
        longest_s
    }
}
