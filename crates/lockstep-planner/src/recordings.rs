//! Recordings of a model, one for each sharding of it that a search visits.

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

use lockstep_config::{ResolvedModel, RunConfig, engine_options};
use lockstep_engine::EngineOptions;
use lockstep_graph::BlockShape;
use lockstep_model::{Flops, ModelConfig, RecordedModel, RecordingOptions, Tuning};
use lockstep_plan::work::ModelWork;
use lockstep_plan::{Mesh, ModelProfile, Places, Plan, Recompute, StateBytes, StateFacts};

use crate::cluster::Cluster;
use crate::predict::TimedModel;
use crate::system::SystemTraits;

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
        let kept = |unit| cluster.software.traits().saved_bytes(&recording.work, unit, recompute);
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

/// Recordings of a run's model, cached by block shape, places of the rank on the mesh, and recompute mode.
#[derive(Debug)]
pub(crate) struct Recordings {
    model: ModelConfig,
    tuning: Tuning,
    options: EngineOptions,
    seq_len: usize,
    style: SystemTraits,
    known: HashMap<(BlockShape, Places, Recompute), Rc<Recording>>,
    /// FLOPs of all ranks together, which do not depend on the sharding.
    flops: HashMap<(BlockShape, Recompute), Flops>,
}

impl Recordings {
    /// Returns an empty cache for a run's model under a system.
    pub(crate) fn new(config: &RunConfig, model: &ResolvedModel, style: SystemTraits) -> Self {
        Self {
            model: model.config.clone(),
            tuning: model.tuning.clone(),
            options: engine_options(config),
            seq_len: config.train.seq_len,
            style,
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
    /// is what the system means by it.
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
        let kept = |unit: usize| match self.style.has_ledger {
            true => made.profile.units[unit].frame_bytes as f64,
            false => self.style.saved_bytes(&made.work, unit, recompute) as f64,
        };
        let saved_bytes = blocks.map(kept).sum();
        (made, saved_bytes)
    }

    /// Returns the recording where each block recomputes by the plan's rules.
    pub(crate) fn by_layer(&mut self, plan: &Plan, mesh: &Mesh) -> Rc<Recording> {
        let (units, rules) = (self.model.model().units(), plan.recompute);
        let layers = || units.iter().enumerate().filter_map(|(unit, declared)| Some((unit, declared.layer?)));
        let first = self.uniform(plan, mesh, rules.of(0));
        if layers().all(|(_, layer)| rules.of(layer) == rules.of(0)) {
            return first;
        }
        let mut mixed = (*first).clone();
        for mode in [Recompute::None, Recompute::Selective, Recompute::Full] {
            let of_mode: Vec<usize> =
                layers().filter(|(_, layer)| rules.of(*layer) == mode).map(|(unit, _)| unit).collect();
            if of_mode.is_empty() || mode == rules.of(0) {
                continue;
            }
            let other = self.uniform(plan, mesh, mode);
            let offset = mixed.work.distinct.len();
            mixed.work.distinct.extend(other.work.distinct.iter().cloned());
            for unit in of_mode {
                mixed.work.of_unit[unit] = offset + other.work.of_unit[unit];
                mixed.profile.units[unit] = other.profile.units[unit].clone();
            }
        }
        Rc::new(mixed)
    }

    /// Records the model, with the recomputation of the system.
    fn make(&mut self, plan: &Plan, mesh: &Mesh, recompute: Recompute) -> Recording {
        let repeats = self.style.repeats(recompute);
        let (shape, places) = (self.shape_of(plan), Places::of(mesh, 0, plan));
        let rules = if repeats.is_some() { Recompute::None } else { recompute }.into();
        let options = RecordingOptions::training(shape, rules, places);
        let flops = self.flops.get(&(shape, recompute)).copied();
        let recorded = RecordedModel::tuned_with_flops(&self.model, &self.tuning, options, flops);
        self.flops.insert((shape, recompute), recorded.flops());
        let mut work = recorded.work();
        if let Some(is_repeated) = repeats {
            work.repeat(is_repeated);
        }
        Recording { work, profile: recorded.profile(), facts: self.options.state_facts(&recorded) }
    }
}
