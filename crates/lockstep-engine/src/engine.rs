//! One rank's training state and the steps that change it.

use lockstep_graph::{Activity, BlockShape, Cost, Mode, Recompute, Timeline};
use lockstep_model::{HeadOutput, ModelConfig, RecordedModel};
use lockstep_plan::{DType, MemoryCategory, ParameterId, ParameterRecord, exact::ExactSum};
use lockstep_tensor::{AdamW, Arena, CpuQueue, F32Products, Kernels, Sgd, TensorError};

use crate::{EngineError, FlatStore, Gradients, HostBatch, Runner, StateKind, Tied};

const F32_BYTES: u64 = size_of::<f32>() as u64;
/// Floating-point operations per element of an update, as in AdamW.
const UPDATE_FLOPS: u64 = 13;

/// The update rule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Optimizer {
    /// AdamW.
    AdamW {
        /// Decay rates of the moments.
        betas: [f64; 2],
        /// Added to the root of the second moment.
        eps: f64,
    },
    /// Gradient descent.
    Sgd {
        /// Momentum; 0 keeps no state.
        momentum: f32,
    },
}

impl Optimizer {
    /// The state it keeps for each parameter.
    fn state_kinds(self) -> &'static [StateKind] {
        match self {
            Self::AdamW { .. } => &[StateKind::ExpAvg, StateKind::ExpAvgSq],
            Self::Sgd { momentum } if momentum != 0.0 => &[StateKind::MomentumBuffer],
            Self::Sgd { .. } => &[],
        }
    }
}

/// What an [`Engine`] is built for.
#[derive(Debug, Clone, Copy)]
pub struct EngineOptions {
    /// Micro-batch and the type that kernels read.
    pub shape: BlockShape,
    /// What the blocks forget and compute again.
    pub recompute: Recompute,
    /// The update rule.
    pub optimizer: Optimizer,
    /// Seed of the initial weights and of dropout.
    pub seed: u64,
    /// Compute threads.
    pub threads: usize,
}

/// The numbers of one update.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Update {
    /// Step size.
    pub learning_rate: f64,
    /// Weight decay of the parameters whose record says that they decay.
    pub weight_decay: f64,
    /// Factor on the gradients, from clipping.
    pub gradient_scale: f32,
    /// Number of this update, from 1.
    pub step: u64,
}

/// A tensor of a parameter, lent by an [`Engine`].
#[derive(Debug, Clone, Copy)]
pub struct StateTensor<'a> {
    /// The parameter.
    pub record: &'a ParameterRecord,
    /// Which of its tensors.
    pub kind: StateKind,
    /// Its elements.
    pub values: &'a [f32],
}

impl StateTensor<'_> {
    /// The first of `tensors`, if any, that is a parameter with a value that is not finite.
    pub fn first_not_finite<'t>(tensors: &'t [StateTensor<'_>]) -> Option<&'t str> {
        let is_broken = |tensor: &&StateTensor<'_>| {
            // Not finite: all bits of the exponent are set. A maximum vectorizes, a search does not.
            let exponent = |value: &f32| value.to_bits() & 0x7f80_0000;
            tensor.kind == StateKind::Parameter
                && tensor.values.iter().map(exponent).fold(0, u32::max) == 0x7f80_0000
        };
        tensors.iter().find(is_broken).map(|tensor| tensor.record.name.as_str())
    }
}

/// Weights, gradients, optimizer state and the programs that work on them.
pub struct Engine {
    arena: Arena,
    queue: CpuQueue,
    optimizer: Optimizer,
    model: RecordedModel,
    /// The same model without dropout; `None` if it has none.
    evaluation: Option<RecordedModel>,
    runner: Runner,
    records: Vec<ParameterRecord>,
    /// What kernels read.
    weights: FlatStore,
    /// f32 weights, if kernels read another type.
    master: Option<FlatStore>,
    gradients: Gradients,
    optimizer_state: Vec<(StateKind, FlatStore)>,
}

impl Engine {
    /// An engine for `config` with all weights zero: call [`Engine::initialize`] or load them.
    ///
    /// # Errors
    /// Out of memory, or the threads cannot be started.
    pub fn new(config: &ModelConfig, options: EngineOptions, arena: &Arena) -> Result<Self, EngineError> {
        let EngineOptions { shape, recompute, optimizer, seed, threads } = options;
        let record = |config: &ModelConfig| {
            RecordedModel::new(config, Mode::Training, shape, recompute, HeadOutput::Losses)
        };
        let model = record(config);
        let evaluation = config.has_dropout().then(|| record(&config.without_dropout()));
        let records = model.records().to_vec();
        let store = |dtype, category, tied| FlatStore::zeros(arena, &records, dtype, category, tied);
        let state = |kind: &StateKind| -> Result<_, TensorError> {
            Ok((*kind, store(DType::F32, MemoryCategory::Optimizer, Tied::Shared)?))
        };
        // Parameters come first: a model that is too large is refused for them before its activations, which
        // nothing can hold either, fill the memory.
        let weights = store(shape.dtype, MemoryCategory::Parameters, Tied::Shared)?;
        Ok(Self {
            queue: CpuQueue::new(threads, arena)?,
            runner: Runner::new(&model, arena, seed)?,
            weights,
            master: (shape.dtype != DType::F32)
                .then(|| store(DType::F32, MemoryCategory::Optimizer, Tied::Shared))
                .transpose()?,
            gradients: Gradients::new(arena, &records)?,
            optimizer_state: optimizer.state_kinds().iter().map(state).collect::<Result<_, _>>()?,
            arena: arena.clone(),
            optimizer,
            model,
            evaluation,
            records,
        })
    }

    /// Fills every parameter by its initializer.
    ///
    /// # Errors
    /// None that a fitting model can cause.
    pub fn initialize(&mut self, seed: u64) -> Result<(), EngineError> {
        let mut values = Vec::new();
        let ids: Vec<_> = self.parameter_ids().collect();
        for id in ids {
            let record = &self.records[id.0];
            values.resize(record.elements(), 0.0);
            self.queue.fill(&mut values, |start, part| {
                record.initializer.fill(seed, &record.name, start as u64, part);
            });
            self.write_state(id, StateKind::Parameter, &values)?;
        }
        Ok(())
    }

    /// The records of all parameters; which of them decay is the caller's to change.
    pub fn records_mut(&mut self) -> &mut [ParameterRecord] {
        &mut self.records
    }

    /// The records of all parameters.
    pub fn records(&self) -> &[ParameterRecord] {
        &self.records
    }

    /// The parameters that own their weights.
    pub fn parameter_ids(&self) -> impl Iterator<Item = ParameterId> {
        (0..self.records.len()).map(ParameterId).filter(|id| self.records[id.0].tie.is_none())
    }

    /// The recorded model.
    pub fn model(&self) -> &RecordedModel {
        &self.model
    }

    /// Where the times of operations are recorded while it is on.
    pub fn timeline(&self) -> &Timeline {
        self.runner.timeline()
    }

    /// The ledger.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// The queue.
    pub fn queue(&self) -> &CpuQueue {
        &self.queue
    }

    /// Chooses how f32 matrices are multiplied; of effect only on a CPU with AMX.
    pub fn set_f32_products(&mut self, f32_products: F32Products) {
        self.queue.set_f32_products(f32_products);
    }

    /// Starts a step.
    pub fn begin_step(&mut self) {
        self.gradients.begin();
    }

    /// Forward and backward of one micro-batch; returns the sum of its losses. `seed_gradient` is `1 / G`.
    pub fn accumulate(&mut self, batch: &HostBatch<'_>, seed_gradient: f32) -> f64 {
        self.runner.forward_for_backward(&self.model, &self.queue, &self.weights, batch);
        self.runner.backward(&self.model, &self.queue, &self.weights, &self.gradients, seed_gradient);
        self.runner.loss_sum(&self.model)
    }

    /// Forward of one micro-batch without dropout; returns the sum of its losses.
    pub fn evaluate(&mut self, batch: &HostBatch<'_>) -> f64 {
        let model = self.evaluation.as_ref().unwrap_or(&self.model);
        self.runner.forward(model, &self.queue, &self.weights, batch);
        self.runner.loss_sum(model)
    }

    /// Sums the gradients of tied parameters and returns the global L2 norm, each element counted once. NaN if
    /// any gradient is not finite.
    pub fn finish_gradients(&mut self) -> f64 {
        self.gradients.end(&self.queue);
        for (index, record) in self.records.iter().enumerate() {
            if let Some(target) = record.tie {
                let (head, embedding) =
                    (self.gradients.view(ParameterId(index)), self.gradients.view(target));
                let elements = head.elements() as u64;
                let cost = Cost { vector_flops: elements, ..Cost::of_bytes(3 * F32_BYTES * elements) };
                let what = || (Activity::of_step("add tied gradients"), cost);
                self.timeline().span(what, || self.queue.add(head, embedding, embedding));
            }
        }
        let begin = self.timeline().begin();
        let mut sum = ExactSum::default();
        for id in self.parameter_ids() {
            sum.merge(&self.queue.sum_of_squares(self.gradients.view(id)).wait());
        }
        self.timeline().end(begin, || {
            let elements = self.owned_elements();
            let cost = Cost { vector_flops: 2 * elements, ..Cost::of_bytes(F32_BYTES * elements) };
            (Activity::of_step("gradient norm"), cost)
        });
        sum.value().sqrt()
    }

    /// The gradient of a parameter; that of a tied one is whole after [`Engine::finish_gradients`].
    pub fn gradient(&self, id: ParameterId) -> Vec<f32> {
        self.gradients.view(id).to_vec()
    }

    /// Replaces the gradient of a parameter.
    ///
    /// # Panics
    /// If the number of elements is not the parameter's.
    pub fn write_gradient(&mut self, id: ParameterId, values: &[f32]) {
        self.gradients.view(id).copy_from(values);
    }

    /// Updates the weights.
    pub fn update(&mut self, update: &Update) {
        for id in self.parameter_ids() {
            let record = &self.records[id.0];
            let learning_rate = update.learning_rate * f64::from(record.learning_rate_multiplier);
            let weight_decay = if record.decay { update.weight_decay } else { 0.0 };
            let rounded = self.master.is_some().then(|| self.weights.view(id));
            let parameter = self.master.as_ref().unwrap_or(&self.weights).view(id);
            let gradient = self.gradients.view(id);
            let state = |kind| self.state_store(kind).map(|store| store.view(id));
            let begin = self.timeline().begin();
            match self.optimizer {
                Optimizer::AdamW { betas, eps } => self.queue.adamw(&AdamW {
                    parameter,
                    gradient,
                    exp_avg: state(StateKind::ExpAvg).expect("AdamW keeps its first moment"),
                    exp_avg_sq: state(StateKind::ExpAvgSq).expect("AdamW keeps its second moment"),
                    rounded,
                    learning_rate,
                    betas,
                    eps,
                    weight_decay,
                    gradient_scale: update.gradient_scale,
                    step: update.step,
                }),
                Optimizer::Sgd { momentum } => self.queue.sgd(&Sgd {
                    parameter,
                    gradient,
                    momentum_buffer: state(StateKind::MomentumBuffer),
                    rounded,
                    learning_rate: learning_rate as f32,
                    momentum,
                    weight_decay: weight_decay as f32,
                    gradient_scale: update.gradient_scale,
                    step: update.step,
                }),
            }
            self.timeline().end(begin, || {
                let activity = Activity { unit: Some(record.unit), ..Activity::of_step("optimizer") };
                (activity, self.update_cost(id))
            });
        }
    }

    /// The gradient and the rounded weights go through memory once, everything else is read and written.
    fn update_cost(&self, id: ParameterId) -> Cost {
        let elements = self.records[id.0].elements() as u64;
        let rounded = self.master.as_ref().map_or(0, |_| self.weights.dtype().size_bytes() as u64);
        let kept: u64 = self.optimizer_state.iter().map(|(_, store)| store.dtype().size_bytes() as u64).sum();
        Cost {
            vector_flops: UPDATE_FLOPS * elements,
            ..Cost::of_bytes((F32_BYTES + rounded + 2 * (F32_BYTES + kept)) * elements)
        }
    }

    /// Elements of the parameters that own their weights.
    fn owned_elements(&self) -> u64 {
        self.parameter_ids().map(|id| self.records[id.0].elements() as u64).sum()
    }

    /// The kinds of tensors that a checkpoint holds for each parameter.
    pub fn state_kinds(&self) -> Vec<StateKind> {
        let kept = self.optimizer_state.iter().map(|(kind, _)| *kind);
        std::iter::once(StateKind::Parameter).chain(kept).collect()
    }

    /// Everything that a checkpoint holds, in full precision and without a copy.
    pub fn state_tensors(&mut self) -> Vec<StateTensor<'_>> {
        let weights = (StateKind::Parameter, self.master.as_mut().unwrap_or(&mut self.weights));
        let kept = self.optimizer_state.iter_mut().map(|(kind, store)| (*kind, store));
        tensors_of(&self.records, std::iter::once(weights).chain(kept))
    }

    /// The stores of what a checkpoint holds, in its order.
    pub(crate) fn state_stores(&self) -> impl Iterator<Item = (StateKind, &FlatStore)> {
        let weights = (StateKind::Parameter, self.master.as_ref().unwrap_or(&self.weights));
        std::iter::once(weights).chain(self.optimizer_state.iter().map(|(kind, store)| (*kind, store)))
    }

    /// Rounds the master weights, if there are any, to what kernels read.
    pub(crate) fn round_weights(&mut self) {
        let Some(master) = &self.master else { return };
        for id in self.parameter_ids() {
            self.queue.cast(master.view(id), self.weights.view(id));
        }
    }

    /// Replaces a tensor of a parameter.
    ///
    /// # Errors
    /// [`EngineError::WrongSize`].
    pub fn write_state(
        &mut self,
        id: ParameterId,
        kind: StateKind,
        values: &[f32],
    ) -> Result<(), EngineError> {
        let record = &self.records[id.0];
        if values.len() != record.elements() {
            return Err(EngineError::WrongSize {
                name: record.name.clone(),
                kind,
                found: values.len(),
                expected: record.elements(),
            });
        }
        let Some(store) = self.state_store(kind) else { return Ok(()) };
        store.view(id).copy_from(values);
        if let (StateKind::Parameter, Some(master)) = (kind, &self.master) {
            self.queue.cast(master.view(id), self.weights.view(id));
        }
        Ok(())
    }

    fn state_store(&self, kind: StateKind) -> Option<&FlatStore> {
        match kind {
            StateKind::Parameter => Some(self.master.as_ref().unwrap_or(&self.weights)),
            kind => self.optimizer_state.iter().find(|(kept, _)| *kept == kind).map(|(_, store)| store),
        }
    }
}

/// The tensors of all parameters in `stores`.
pub(crate) fn tensors_of<'a>(
    records: &'a [ParameterRecord],
    stores: impl Iterator<Item = (StateKind, &'a mut FlatStore)>,
) -> Vec<StateTensor<'a>> {
    stores
        .flat_map(|(kind, store)| {
            let tensors = store.tensors().into_iter();
            tensors.map(move |(id, values)| StateTensor { record: &records[id.0], kind, values })
        })
        .collect()
}
