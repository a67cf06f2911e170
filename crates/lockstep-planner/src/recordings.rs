//! Recordings of a model, one for each sharding of it that a search visits.

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

use lockstep_config::{ResolvedModel, RunConfig, engine_options};
use lockstep_engine::EngineOptions;
use lockstep_graph::BlockShape;
use lockstep_model::{Flops, ModelConfig, RecordedModel, RecordingOptions, Tuning};
use lockstep_plan::work::{ModelWork, SavedExtent, TaskKind};
use lockstep_plan::{Mesh, ModelProfile, Places, Plan, Recompute, StateBytes, StateFacts};

use crate::cluster::{Cluster, Software};
use crate::predict::TimedModel;

/// The recorded model, as one of its ranks runs it.
#[derive(Debug, Clone)]
pub(crate) struct Recording {
    /// Work of a micro-batch.
    pub(crate) work: ModelWork,
    /// Memory of its units.
    pub(crate) profile: ModelProfile,
    /// Facts of the state that optimizer and precision need.
    pub(crate) facts: StateFacts,
}

/// A recording whose blocks all use the same recompute mode, with the figures that a search needs thousands of times.
#[derive(Debug, Clone)]
pub(crate) struct Uniform {
    /// Times of its tasks on each kind of node.
    pub(crate) times: TimedModel,
    /// Memory of its units, without the parameter records so that it is cheap to clone.
    pub(crate) profile: ModelProfile,
    /// Bytes of state per element.
    pub(crate) state: StateBytes,
    /// Bytes of activations that systems other than Lockstep save in each unit.
    pub(crate) kept_elsewhere: Vec<u64>,
}

impl Uniform {
    pub(crate) fn new(
        recording: &Recording,
        state: StateBytes,
        recompute: Recompute,
        cluster: &Cluster,
        mesh: &Mesh,
    ) -> Self {
        let mut profile = recording.profile.clone();
        profile.records = Vec::new();
        profile.units.iter_mut().for_each(|unit| unit.parameters = Vec::new());
        let units = 0..recording.work.units();
        let kept = |unit| kept_elsewhere(&recording.work, unit, recompute, cluster.software);
        Self {
            times: TimedModel::new(cluster, &recording.work, mesh),
            profile,
            state,
            kept_elsewhere: units.map(kept).collect(),
        }
    }

    /// Returns a copy with some of its units replaced by those of `other`.
    pub(crate) fn with(&self, units: Range<usize>, other: &Self) -> Self {
        let mut mixed = Self { times: self.times.with(units.clone(), &other.times), ..self.clone() };
        mixed.profile.units[units.clone()].clone_from_slice(&other.profile.units[units.clone()]);
        mixed.kept_elsewhere[units.clone()].copy_from_slice(&other.kept_elsewhere[units]);
        mixed
    }
}

/// Returns the bytes of activations that a system other than Lockstep saves in a unit. Selective recomputation saves everything but
/// the attention scores.
pub(crate) fn kept_elsewhere(work: &ModelWork, unit: usize, recompute: Recompute, software: Software) -> u64 {
    let is_block = unit > 0 && unit + 1 < work.units();
    let keeping = match recompute {
        Recompute::Full if is_block => SavedExtent::InputAlone,
        Recompute::Selective if is_block => SavedExtent::WithoutScores,
        _ if !software.style().unfused_attention => SavedExtent::WithoutScores,
        _ => SavedExtent::Everything,
    };
    work.unit(unit).kept.bytes(keeping, work.dtype)
}

/// Recordings of a run's model, cached by block shape, places of the rank on the mesh, and recompute mode.
#[derive(Debug)]
pub(crate) struct Recordings {
    model: ModelConfig,
    tuning: Tuning,
    options: EngineOptions,
    seq_len: usize,
    software: Software,
    known: HashMap<(BlockShape, Places, Recompute), Rc<Recording>>,
    /// FLOPs of all ranks together, which do not depend on the sharding.
    flops: HashMap<(BlockShape, Recompute), Flops>,
}

impl Recordings {
    /// Returns an empty cache for a run's model under `software`.
    pub(crate) fn new(config: &RunConfig, model: &ResolvedModel, software: Software) -> Self {
        Self {
            model: model.config.clone(),
            tuning: model.tuning.clone(),
            options: engine_options(config),
            seq_len: config.train.seq_len,
            software,
            known: HashMap::new(),
            flops: HashMap::new(),
        }
    }

    /// Returns the shape of a block's input in a micro-batch of `plan`.
    fn shape_of(&self, plan: &Plan) -> BlockShape {
        let sequences = plan.micro_batch.expect("a plan that leaves nothing open");
        BlockShape { sequences, seq_len: self.seq_len, dtype: self.options.dtype }
    }

    /// Returns the model as the first rank of `mesh` runs it under `plan`, with the same recompute mode in every block. "Selective"
    /// is what the software means by it: where attention scores are written to memory, they alone are recomputed.
    pub(crate) fn uniform(&mut self, plan: &Plan, mesh: &Mesh, recompute: Recompute) -> Rc<Recording> {
        let key = (self.shape_of(plan), Places::of(mesh, 0, plan), recompute);
        if let Some(known) = self.known.get(&key) {
            return Rc::clone(known);
        }
        let recording = Rc::new(self.make(plan, mesh, recompute));
        self.known.insert(key, Rc::clone(&recording));
        recording
    }

    /// As [`Recordings::uniform`] without caching the recording; also returns the bytes that its blocks save for a micro-batch.
    pub(crate) fn sketch(&mut self, plan: &Plan, mesh: &Mesh, recompute: Recompute) -> (Recording, f64) {
        let made = self.make(plan, mesh, recompute);
        let blocks = 1..made.work.units() - 1;
        let kept = |unit: usize| match self.software {
            Software::Lockstep => made.profile.units[unit].frame_bytes as f64,
            _ => kept_elsewhere(&made.work, unit, recompute, self.software) as f64,
        };
        let kept_bytes = blocks.map(kept).sum();
        (made, kept_bytes)
    }

    /// Returns the recording where each block recomputes by the plan's rules.
    pub(crate) fn by_layer(&mut self, plan: &Plan, mesh: &Mesh) -> Rc<Recording> {
        let (layers, rules) = (self.model.num_hidden_layers(), plan.recompute);
        let first = self.uniform(plan, mesh, rules.of(0));
        if (0..layers).all(|layer| rules.of(layer) == rules.of(0)) {
            return first;
        }
        let mut mixed = (*first).clone();
        for mode in [Recompute::None, Recompute::Selective, Recompute::Full] {
            let of_mode: Vec<usize> = (0..layers).filter(|layer| rules.of(*layer) == mode).collect();
            if of_mode.is_empty() || mode == rules.of(0) {
                continue;
            }
            let other = self.uniform(plan, mesh, mode);
            let offset = mixed.work.distinct.len();
            mixed.work.distinct.extend(other.work.distinct.iter().cloned());
            for layer in of_mode {
                let unit = layer + 1;
                mixed.work.of_unit[unit] = offset + other.work.of_unit[unit];
                mixed.profile.units[unit] = other.profile.units[unit].clone();
            }
        }
        Rc::new(mixed)
    }

    /// Records the model. Recomputation in Lockstep repeats the operations whose outputs the backward reads; in other systems it
    /// repeats the whole forward, or attention alone.
    fn make(&mut self, plan: &Plan, mesh: &Mesh, recompute: Recompute) -> Recording {
        let repeats = match recompute {
            Recompute::Selective if self.software.style().unfused_attention => Some(recompute),
            Recompute::Full if self.software != Software::Lockstep => Some(recompute),
            _ => None,
        };
        let (shape, places) = (self.shape_of(plan), Places::of(mesh, 0, plan));
        let rules = if repeats.is_some() { Recompute::None } else { recompute }.into();
        let options = RecordingOptions::training(shape, rules, places);
        let flops = self.flops.get(&(shape, recompute)).copied();
        let recorded = RecordedModel::tuned_with_flops(&self.model, &self.tuning, options, flops);
        self.flops.insert((shape, recompute), recorded.flops());
        let mut work = recorded.work();
        match repeats {
            Some(Recompute::Selective) => work.repeat(|task| matches!(task.kind, TaskKind::Attention(_))),
            Some(_) => work.repeat(|_| true),
            None => {}
        }
        Recording { work, profile: recorded.profile(), facts: self.options.state_facts(&recorded) }
    }
}
