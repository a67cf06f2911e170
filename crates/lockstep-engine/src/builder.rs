//! Construction of an engine: records the model for the rank's place in the plan, lays out its state, and allocates
//! that layout.

use lockstep_graph::{BlockShape, Statistics};
use lockstep_model::{ModelConfig, RecordedModel, RecordingOptions, Tuning};
use lockstep_plan::{DType, RankPlan, StateFacts, StateKind, StateLayout, StatePlan};
use lockstep_tensor::{Arena, Workers};

use crate::model_state::ModelState;
use crate::optimizer::Role;
use crate::pipeline::Pipeline;
use crate::reducer::Reducer;
use crate::shards::Shards;
use crate::state::ResidualNumbers;
use crate::{Engine, EngineError, Gradients, Groups, Optimizer, Runner, Storage, WeightStorage};

/// Settings of an engine that are not part of the plan.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineOptions {
    /// Type of weights and activations that kernels read.
    pub dtype: DType,
    /// Optimizer and its hyperparameters.
    pub optimizer: Optimizer,
    /// Precision of weights and optimizer state, and location of offloaded state.
    pub storage: Storage,
    /// Seed of the initial weights and of dropout.
    pub seed: u64,
    /// Number of compute threads, at least 1.
    pub threads: usize,
}

impl Default for EngineOptions {
    /// f32 and AdamW, on one thread.
    fn default() -> Self {
        Self {
            dtype: DType::F32,
            optimizer: Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8 },
            storage: Storage::default(),
            seed: 0,
            threads: 1,
        }
    }
}

impl EngineOptions {
    /// Returns the state of `model` that the optimizer and the precision require.
    pub fn state_facts(&self, model: &RecordedModel) -> StateFacts {
        let kinds = StateKind::OF_OPTIMIZERS.into_iter().map(|kind| {
            let is_kept =
                |record| self.optimizer.state_kinds(Role::of(record, model.units())).contains(&kind);
            (kind, model.records().iter().map(is_kept).collect())
        });
        StateFacts {
            has_master: self.dtype != DType::F32 && self.storage.weights == WeightStorage::Master,
            optimizer_dtype: self.storage.state,
            optimizer_keeps: kinds.collect(),
            window_elements: self.storage.offload.window_elements,
            packed_bytes: Workers::booked_bytes(self.threads),
        }
    }
}

/// Builds an [`Engine`].
#[derive(Debug)]
pub struct EngineBuilder<'a> {
    model: &'a ModelConfig,
    tuning: Tuning,
    plan: RankPlan,
    options: EngineOptions,
    groups: Groups,
}

impl Engine {
    /// Returns a builder of an engine that trains `model` under `plan`.
    pub fn builder(model: &ModelConfig, plan: RankPlan) -> EngineBuilder<'_> {
        let (tuning, options) = (Tuning::default(), EngineOptions::default());
        EngineBuilder { model, tuning, plan, options, groups: Groups::alone() }
    }
}

impl EngineBuilder<'_> {
    /// Sets which parameters are trained, and how; the default is full training.
    #[must_use]
    pub fn tuning(self, tuning: &Tuning) -> Self {
        Self { tuning: tuning.clone(), ..self }
    }

    /// Sets the options that are not part of the plan.
    #[must_use]
    pub fn options(self, options: EngineOptions) -> Self {
        Self { options, ..self }
    }

    /// Sets the process groups. All ranks of the plan build their engines, and call their methods, in the same order.
    #[must_use]
    pub fn groups(self, groups: Groups) -> Self {
        Self { groups, ..self }
    }

    /// Builds the engine in the memory of `arena` with all weights zero: call [`Engine::initialize`] or load weights
    /// afterwards.
    ///
    /// # Errors
    /// If memory or threads run out, the disk has no room for offloaded state, or a rank is lost.
    pub fn build(self, arena: &Arena) -> Result<Engine, EngineError> {
        let Self { model: config, tuning, plan, options, mut groups } = self;
        let (mesh, passes) = (plan.mesh(), &plan.passes);
        let shape = BlockShape::of_plan(plan.checked(), options.dtype);
        let recording = RecordingOptions::training(shape, plan.plan().recompute, groups.places_of(&plan));
        let record = |config: &ModelConfig, tuning: &Tuning| RecordedModel::tuned(config, tuning, recording);
        let model = record(config, &tuning);
        let evaluation = if model.has_running_statistics() {
            let evaluation = RecordingOptions { statistics: Statistics::Running, ..recording };
            Some(RecordedModel::tuned(&config.without_dropout(), &tuning.without_dropout(), evaluation))
        } else {
            (config.has_dropout() || tuning.has_dropout() || config.has_capacity())
                .then(|| record(&config.without_dropout().without_capacity(), &tuning.without_dropout()))
        };
        if model.reads_replicas() {
            groups.join_replicas()?;
        }
        let profile = model.profile();
        let queue = arena.queue(options.threads)?;
        let shards = Shards::new(&groups, model.records())?;
        let reducer = Reducer::new(&groups, model.records(), &shards, queue.workers())?;
        let residual_numbers = ResidualNumbers::new(&groups, &shards);
        let residences = plan.plan().residence.on_cpu();
        let facts = options.state_facts(&model);
        let state = StatePlan::new(plan.plan(), residences, mesh, plan.checked().global_batch(), &facts);
        let place = |summing| mesh.shard_place(plan.rank, summing);
        let layout = StateLayout::new(&profile, &passes.stages, place, &state);
        shards.check(&layout);
        // Gradients that are offloaded to disk use the reducer's path as well.
        let reducer = reducer.or_else(|| layout.plan.hands_gradients_on().then(Reducer::alone));
        let gathers = layout.gathers(&profile, passes)?;
        let predicted = layout.memory(&profile, &passes.stages, gathers.as_ref());
        let [of_state, of_activations] = layout.offload_traffic(&profile, passes, gathers.as_ref());
        let offload = &options.storage.offload;
        let mut weights = ModelState::zeros(arena, &model, &layout, offload, gathers, shards)?;
        weights.all_mut().0.for_each(|store| store.touch_by(&queue.workers()));
        let of_frames = state.has_activations_on_disk.then_some(offload);
        let (seed, stages) = (options.seed, &passes.stages);
        let runner = Runner::in_groups(&model, arena, seed, groups.clone(), stages, of_frames)?;
        let gradients = Gradients::new(arena, &layout, &mut weights, profile.tokens, offload)?;
        tracing::debug!(
            threads = queue.threads(), instructions = %queue.level(), units = model.units(),
            micro_batches = passes.micro_batches, predicted_bytes = predicted.by_category().total(),
            gathers_weights = weights.gathers_of_step().is_some(), reduces_gradients = reducer.is_some(),
            "the engine has its weights and buffers"
        );
        Ok(Engine {
            micro_batches: passes.micro_batches,
            reducer,
            queue,
            runner,
            gradients,
            weights,
            arena: arena.clone(),
            optimizer: options.optimizer,
            rounding: options.storage.rounding,
            seed,
            model,
            evaluation,
            layout,
            pipeline: Pipeline::of(&groups),
            residual_numbers,
            groups,
            bias_values: Vec::new(),
            predicted,
            predicted_traffic: of_state + of_activations,
        })
    }
}
