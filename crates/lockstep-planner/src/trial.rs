//! A candidate with a given number of blocks that recompute: its stages, lower bounds of its memory, and its step time.

use std::ops::Range;
use std::rc::Rc;

use lockstep_plan::schedule::Kind;
use lockstep_plan::work::UnitElements;
use lockstep_plan::{
    DType, LayerRule, MemoryBytes, MemoryCategory, Mesh, Plan, RankTraffic, Recompute, RecomputeRules,
    StageMemory, StepLayout, ZeroStage,
};

use crate::memory::{Holding, memory_elsewhere, state_of};
use crate::predict::{TimedModel, predict_step_ms, slowest_kind};
use crate::recordings::Uniform;
use crate::search::{Candidate, Rejection};
use crate::{Objective, Planner};

/// Micro-batches per rank after which a schedule is in its steady state, where each further one takes as long as the last.
const ROUNDS: usize = 4;

/// Returns the micro-batches of a schedule shortened to its steady state, with the same remainder by `ranks`. Schedules whose
/// memory grows with the micro-batches keep all.
pub(crate) fn shortened(kind: Kind, ranks: usize, micro_batches: usize) -> usize {
    let grows = matches!(kind, Kind::GPipe | Kind::LoopedBreadthFirst);
    if grows || micro_batches <= ROUNDS * ranks {
        return micro_batches;
    }
    ROUNDS * ranks + micro_batches % ranks
}

/// A candidate with a number of blocks that recompute.
#[derive(Debug)]
pub(crate) struct Trial {
    /// Number of blocks that recompute.
    pub(crate) count: usize,
    pub(crate) layout: StepLayout,
    /// Times and saved activations of its units.
    pub(crate) units: Rc<Uniform>,
    /// Lower bound of the memory of each pipeline rank.
    pub(crate) memory: Vec<MemoryBytes>,
}

/// Returns the ranks whose ledgers are computed: the one with the largest lower bound, and the first.
pub(crate) fn ranks_to_book(memory: &[MemoryBytes]) -> [usize; 2] {
    let totals = memory.iter().map(MemoryBytes::total).enumerate();
    [totals.max_by_key(|(_, total)| *total).map_or(0, |(rank, _)| rank), 0]
}

/// Returns the largest sum of two consecutive values; of a single value, that value. Two consecutive units are in memory at once:
/// one computes while the weights of the next are gathered, and the gradients of two units are in flight to their owners.
fn pairs(mut values: impl Iterator<Item = f64>) -> f64 {
    let Some(mut last) = values.next() else { return 0.0 };
    let mut largest = last;
    for value in values {
        largest = largest.max(last + value);
        last = value;
    }
    largest
}

impl Planner {
    /// Returns the rules by which the first `count` blocks use the candidate's recompute mode.
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

    /// Returns the plan of a candidate as it was tried.
    pub(crate) fn planned(&self, candidate: &Candidate, trial: &Trial) -> Option<Plan> {
        let recompute = self.rules(candidate, trial.count)?;
        let StepLayout { schedule, stages, .. } = &trial.layout;
        let stages = if schedule.is_some() { stages.iter().map(Range::len).collect() } else { Vec::new() };
        Some(Plan { recompute, stages, ..candidate.plan(&self.config.plan) })
    }

    /// Returns a candidate's recording with the same recompute mode in every block.
    fn uniform(&mut self, candidate: &Candidate, mesh: &Mesh, recompute: Recompute) -> Rc<Uniform> {
        let key = (self.pass_key(candidate), recompute);
        if let Some(known) = self.caches.uniforms.get(&key) {
            return Rc::clone(known);
        }
        let recording = self.recordings.uniform(&candidate.plan(&self.config.plan), mesh, recompute);
        let state = self.state_bytes(&recording);
        let uniform = Rc::new(Uniform::new(&recording, state, recompute, &self.cluster, mesh));
        self.caches.uniforms.insert(key, Rc::clone(&uniform));
        uniform
    }

    /// As [`Planner::tried`].
    ///
    /// # Errors
    /// If the candidate is invalid, or a rank does not fit by the lower bounds and nothing is offloaded.
    pub(crate) fn fitting(&mut self, candidate: &Candidate, count: usize) -> Result<Trial, Rejection> {
        let trial = self.tried(candidate, count)?;
        let lacking = self.lacking(&trial.layout, &trial.memory);
        lacking.filter(|_| !self.offloads(&self.config.plan)).map_or(Ok(trial), Err)
    }

    /// Tries a candidate whose first `count` blocks recompute, with the stages that are balanced then.
    ///
    /// # Errors
    /// [`Rejection::Invalid`] if there is no such mesh, schedule or split into stages.
    pub(crate) fn tried(&mut self, candidate: &Candidate, count: usize) -> Result<Trial, Rejection> {
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
                // An embedding or a stem may come before the blocks.
                let units = self.model.config.model().units();
                let first = units.iter().position(|unit| unit.layer.is_some()).unwrap_or(0);
                Rc::new(forgetting.with(first + count..first + layers, &others))
            }
        };
        let layout = self.laid_out(candidate, count, &units.times).ok_or(Rejection::Invalid)?;
        let of_rank = |rank: usize| {
            let stages = layout.stages_on(rank);
            self.quick_memory(candidate, &layout, &units, &stages)
        };
        let memory: Vec<MemoryBytes> = (0..layout.pipeline_ranks()).map(of_rank).collect();
        Ok(Trial { count, layout, units, memory })
    }

    /// Returns a lower bound of the bytes that a rank books: activations as in the ledger, state by its elements, and the buffers of one
    /// unit for all-gathers and reductions. Padding and smaller buffers are ignored, so the ledger rejects all that this rejects.
    fn quick_memory(
        &self,
        candidate: &Candidate,
        layout: &StepLayout,
        units: &Uniform,
        stages: &[StageMemory],
    ) -> MemoryBytes {
        let Uniform { times, profile, state, kept_elsewhere } = units;
        let (mesh, zero_stage, dtype) = (&layout.mesh, candidate.zero_stage, times.dtype());
        let holding = Holding { state: *state, mesh, zero_stage, stages };
        if !self.traits().has_ledger {
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
            let live = self.config.plan.sharding.max_live_parameters.map_or(live, |limit| limit.min(live));
            bytes[MemoryCategory::Communication] += live * dtype.size_bytes();
        }
        if zero_stage >= ZeroStage::Gradients {
            let summed = at_once(|elements| elements.trained);
            bytes[MemoryCategory::Communication] += summed * DType::F32.size_bytes();
        }
        bytes
    }

    /// Returns the elements of each unit of these stages. Tied embeddings count once if both ends of the model are among them.
    pub(crate) fn elements_of<'t>(
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

    /// Returns the booked bytes of every rank: of `ranks` by their ledgers, of all others by the lower bounds.
    pub(crate) fn booked(
        &mut self,
        plan: &Plan,
        trial: &Trial,
        ranks: impl IntoIterator<Item = usize>,
    ) -> Result<Vec<MemoryBytes>, Rejection> {
        self.booked_instead(plan, &trial.layout, trial.memory.clone(), ranks)
    }

    /// As [`Planner::booked`], with the lower bounds of the other ranks in `memory`.
    pub(crate) fn booked_instead(
        &mut self,
        plan: &Plan,
        layout: &StepLayout,
        mut memory: Vec<MemoryBytes>,
        ranks: impl IntoIterator<Item = usize>,
    ) -> Result<Vec<MemoryBytes>, Rejection> {
        let recording = self.recording_of(plan, &layout.mesh);
        for rank in ranks {
            self.ledgers += 1;
            memory[rank] = self.memory_of(plan, layout, &recording, rank)?;
        }
        Ok(memory)
    }

    /// Returns the milliseconds of a candidate's step with this traffic of offloaded state. A long schedule is extrapolated from
    /// two short ones, whose difference is the time of a micro-batch in the steady state.
    ///
    /// # Errors
    /// [`Rejection::Worse`] if the stages alone take `limit` or more; [`Rejection::Invalid`] if the step cannot be predicted.
    pub(crate) fn step_ms(
        &mut self,
        candidate: &Candidate,
        trial: &Trial,
        traffic: impl Fn(&StepLayout) -> Vec<RankTraffic>,
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
        let step = |planner: &Self, layout: &StepLayout| {
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
        let shorter = StepLayout { schedule: Some(schedule), micro_batches: fewer, ..layout.clone() };
        let each = (short - step(self, &shorter)?) / ranks as f64;
        Ok(short + each * (micro_batches - layout.micro_batches) as f64)
    }

    /// Returns a lower bound of the seconds of a pipeline's passes: each rank's own work and its wait for the first micro-batch.
    /// Times of stages with the same kinds of units are computed once.
    fn pipeline_s(&self, candidate: &Candidate, layout: &StepLayout, times: &TimedModel) -> f64 {
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
                // Other ranks wait for the first or the last chunk of this rank.
                before_s += stages.iter().copied().fold(f64::INFINITY, f64::min);
            }
        }
        longest_s
    }
}
