//! One rank's training state and the steps that change it.

use std::ops::Range;

use lockstep_comm::Metered;
use lockstep_graph::{Activity, Cost, Seed, Timeline};
use lockstep_model::{ModelConfig, RecordedModel};
use lockstep_plan::gathering::{GatherPlan, Sequence};
use lockstep_plan::{
    MemoryPrediction, OffloadTraffic, ParameterId, ParameterRecord, RankPlan, SharedTable, StoreKind,
    exact::ExactSum,
};
use lockstep_tensor::{Arena, DiskTraffic, F32Products, Queue};

use crate::model_state::ModelState;
use crate::optimizer::Role;
use crate::passes::{Place, Work};
use crate::pipeline::Pipeline;
use crate::runner::{Half, Purpose};
use crate::state::ResidualNumbers;
use crate::{
    EngineBuilder, EngineError, ExpertLoad, Gradients, Groups, HostBatch, Optimizer, RoundingMode, Runner,
    StateKind, StepTimes, Traffic, reducer::Reducer,
};

const F32_BYTES: u64 = size_of::<f32>() as u64;

/// Where a micro-batch stands in its step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    Earlier,
    Last,
}

/// Weights, gradients, optimizer state and the programs that work on them.
pub struct Engine {
    pub(crate) arena: Arena,
    pub(crate) queue: Box<dyn Queue>,
    pub(crate) optimizer: Optimizer,
    pub(crate) rounding: RoundingMode,
    pub(crate) seed: u64,
    pub(crate) model: RecordedModel,
    /// The same model without dropout, with experts that take all tokens; `None` if that is the model itself.
    pub(crate) evaluation: Option<RecordedModel>,
    pub(crate) runner: Runner,
    pub(crate) records: Vec<ParameterRecord>,
    pub(crate) weights: ModelState,
    pub(crate) gradients: Gradients,
    /// The stores that a checkpoint or a copy of the state holds.
    pub(crate) saved: Vec<StoreKind>,
    pub(crate) groups: Groups,
    /// Those of a step of this rank, without a pipeline.
    pub(crate) micro_batches: usize,
    /// None if all gradients are whole.
    pub(crate) reducer: Option<Reducer>,
    /// The rank's part in a pipeline, if there is one.
    pub(crate) pipeline: Option<Pipeline>,
    /// Which units are on this rank.
    pub(crate) is_here: Vec<bool>,
    /// What checkpoints call the residuals of its gradients.
    pub(crate) residual_numbers: ResidualNumbers,
    /// Room for the biases by which the experts of a layer are chosen.
    pub(crate) bias_values: Vec<f32>,
    /// The table of the embedding, where the output layer that shares it is on another rank, or the other way round.
    pub(crate) shared_table: Option<SharedTable>,
    pub(crate) predicted: MemoryPrediction,
    pub(crate) predicted_traffic: OffloadTraffic,
}

impl Engine {
    /// An engine that trains `model` as `plan` says, to be built.
    pub fn builder(model: &ModelConfig, plan: RankPlan) -> EngineBuilder<'_> {
        EngineBuilder::new(model, plan)
    }

    /// The records of all parameters; which of them decay is the caller's to change.
    pub fn records_mut(&mut self) -> &mut [ParameterRecord] {
        &mut self.records
    }

    /// The records of all parameters.
    pub fn records(&self) -> &[ParameterRecord] {
        &self.records
    }

    /// The parameters that own their weights and are on this rank.
    pub fn parameter_ids(&self) -> impl Iterator<Item = ParameterId> {
        let is_owned = |id: &ParameterId| {
            let record = &self.records[id.0];
            record.tie.is_none() && self.is_here[record.unit]
        };
        (0..self.records.len()).map(ParameterId).filter(is_owned)
    }

    /// Whether this rank is the one, of those that hold the same of a parameter of one copy of the model, that counts it and
    /// saves it.
    pub fn speaks_for(&self, id: ParameterId) -> bool {
        let is_copy = self.shared_table.is_some_and(|table| table.id == id && table.is_copy);
        !is_copy && self.groups.speaks_for(&self.records[id.0].share)
    }

    /// Those of them that are trained.
    pub fn trained_ids(&self) -> impl Iterator<Item = ParameterId> {
        self.parameter_ids().filter(|id| self.records[id.0].trainable)
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

    /// What this rank was predicted to hold beside copies of its state, before anything was allocated.
    pub fn predicted_memory(&self) -> &MemoryPrediction {
        &self.predicted
    }

    /// What this rank was predicted to move to and from its disk in each step but the first.
    pub fn predicted_disk_traffic(&self) -> &OffloadTraffic {
        &self.predicted_traffic
    }

    /// The queue.
    pub fn queue(&self) -> &dyn Queue {
        &*self.queue
    }

    /// Chooses how f32 matrices are multiplied; of effect only on a CPU with AMX.
    pub fn set_f32_products(&mut self, f32_products: F32Products) {
        self.queue.set_f32_products(f32_products);
    }

    /// How many tokens of all ranks have chosen each expert in the step that [`Engine::forward_backward`] has made.
    pub fn expert_load(&self) -> &ExpertLoad {
        self.runner.expert_load()
    }

    /// From now on [`Engine::router_margin`] is kept, which takes a look at all scores.
    pub fn watch_router_margin(&mut self) {
        self.runner.watch_router_margin();
    }

    /// How near any token that was routed here has been to choosing other experts
    /// ([`Kernels::router_margin`](lockstep_tensor::Kernels::router_margin)); infinite in a model without any, none where it
    /// is not watched.
    pub fn router_margin(&self) -> Option<f32> {
        self.runner.router_margin()
    }

    /// Starts a step.
    pub fn begin_step(&mut self) {
        self.gradients.begin();
        self.runner.expert_load_mut().clear();
    }

    /// Asks `is_asked` before each unit of a forward or backward, which ends with [`EngineError::Abandoned`] when the answer is yes. Weights
    /// and optimizer state are then those before the step, and may be saved; no further step may follow. For one rank: others would wait.
    pub fn abandon_if(&mut self, is_asked: impl Fn() -> bool + Send + Sync + 'static) {
        self.runner.abandon_if(Box::new(is_asked));
    }

    /// Forward and backward of one micro-batch; returns the sum of its losses.
    ///
    /// # Errors
    /// [`EngineError`]: none on one rank.
    ///
    /// # Panics
    /// If a step has more micro-batches than the plan.
    pub fn accumulate(&mut self, batch: &HostBatch<'_>, seed: Seed) -> Result<f64, EngineError> {
        self.weights.begin(Sequence::MicroBatch);
        self.micro_batch(batch, seed, Turn::Earlier)
    }

    /// Forward and backward of all micro-batches of a step; returns the sum of their losses.
    /// Gradients are summed over the ranks that have summands of them, those of each unit as soon as the last micro-batch has
    /// contributed to them.
    ///
    /// # Errors
    /// [`EngineError`].
    ///
    /// # Panics
    /// As [`Engine::accumulate`].
    pub fn forward_backward<'a>(
        &mut self,
        batches: impl Iterator<Item = HostBatch<'a>> + Clone,
        seed: Seed,
    ) -> Result<f64, EngineError> {
        self.begin_step();
        if let Some(reducer) = &mut self.reducer {
            self.gradients.share(&*self.queue, batches.clone().map(|batch| batch.ids), reducer)?;
        }
        if self.pipeline.is_some() {
            self.weights.begin(Sequence::Step);
            let loss_sum = self.run_pipeline(batches, seed)?;
            self.complete_gradients()?;
            self.runner.expert_load_mut().sum(&self.groups)?;
            return Ok(loss_sum);
        }
        let is_planned = batches.clone().count() == self.micro_batches;
        self.weights.begin(Sequence::Step);
        let mut batches = batches.peekable();
        let mut loss_sum = 0.0;
        while let Some(batch) = batches.next() {
            if !is_planned {
                self.weights.begin(Sequence::MicroBatch);
            }
            let turn = if batches.peek().is_some() { Turn::Earlier } else { Turn::Last };
            loss_sum += self.micro_batch(&batch, seed, turn)?;
        }
        self.complete_gradients()?;
        self.runner.expert_load_mut().sum(&self.groups)?;
        Ok(loss_sum)
    }

    /// The rank's part of a step in a pipeline.
    fn run_pipeline<'a>(
        &mut self,
        batches: impl Iterator<Item = HostBatch<'a>> + Clone,
        seed: Seed,
    ) -> Result<f64, EngineError> {
        let Self { pipeline, model, queue, weights, runner, gradients, reducer, .. } = self;
        let Some(pipeline) = pipeline else { return Ok(0.0) };
        let queue = &**queue;
        assert_eq!(
            batches.clone().count(),
            pipeline.micro_batches(),
            "a step has the micro-batches of its schedule"
        );
        let reducer = reducer.as_mut();
        let mut work = Work { model, queue, weights, runner, gradients, reducer, seed, batches };
        let loss_sum = pipeline.run(&mut work)?;
        self.await_gradients()?;
        if let Some(SharedTable { id, .. }) = self.shared_table
            && let Some(part) = self.gradients.part(id)
        {
            self.groups.sum_over_ends(part.view)?;
        }
        Ok(loss_sum)
    }

    /// Waits for what was summed after the last micro-batch.
    fn await_gradients(&mut self) -> Result<(), EngineError> {
        let Self { queue, runner, gradients, reducer: Some(reducer), .. } = self else { return Ok(()) };
        let queue = &**queue;
        let begin = runner.timeline().begin();
        gradients.wait(queue, reducer)?;
        gradients.sum_owned(queue, reducer)?;
        runner.timeline().end(begin, || (Activity::of_step("wait for gradients"), Cost::default()));
        Ok(())
    }

    /// What sums of gradients, gathered weights, and exchanges with the ranks that share the model have cost since this was last
    /// asked.
    pub fn take_traffic(&mut self) -> Traffic {
        let sums = self.reducer.as_mut().map_or_else(Traffic::default, Reducer::take_traffic);
        let Metered { bytes, busy, exposed } = self.groups.take_metered();
        sums + self.weights.take_traffic() + Traffic { bytes, busy, exposed }
    }

    /// Forward and backward of one micro-batch; returns the sum of its losses. After the last of a step the gradients are summed
    /// over ranks.
    fn micro_batch(&mut self, batch: &HostBatch<'_>, seed: Seed, turn: Turn) -> Result<f64, EngineError> {
        let Self { model, queue, weights, runner, gradients, reducer, .. } = self;
        let only = Place::default();
        let queue = &**queue;
        runner.load(only, batch);
        runner.forward_stage(model, only, queue, weights, Purpose::Training)?;
        gradients.begin_micro_batch(queue, runner.own_tokens(batch.ids));
        let is_last = turn == Turn::Last;
        let at_once = gradients.are_summed_at_once();
        let mut reducer = reducer.as_mut().filter(|_| is_last || at_once);
        let after_unit = |gradients: &mut Gradients, unit| {
            let Some(reducer) = &mut reducer else { return Ok(()) };
            gradients.sum_unit(queue, unit, reducer)?;
            if !is_last {
                return Ok(());
            }
            gradients.begin_owned(reducer)?;
            gradients.sum_rows(unit, reducer)
        };
        let half = Half::Both;
        runner.backward_stage(model, only, queue, weights, gradients, seed, half, after_unit)?;
        match reducer {
            Some(_) if is_last => self.await_gradients()?,
            Some(reducer) => gradients.wait(queue, reducer)?,
            None => {}
        }
        let Self { model, runner, .. } = self;
        Ok(runner.loss_sum(model))
    }

    /// Forward of one micro-batch without dropout; returns the sum of its losses.
    ///
    /// # Errors
    /// [`EngineError`]: none on one rank.
    pub fn evaluate(&mut self, batch: &HostBatch<'_>) -> Result<f64, EngineError> {
        self.weights.begin(Sequence::Evaluation);
        let Self { evaluation, model, pipeline, queue, weights, runner, .. } = self;
        let queue = &**queue;
        let model = evaluation.as_ref().unwrap_or(model);
        if let Some(pipeline) = pipeline {
            return pipeline.evaluate((model, queue, weights), runner, batch);
        }
        runner.load(Place::default(), batch);
        runner.forward_stage(model, Place::default(), queue, weights, Purpose::Evaluation)?;
        Ok(runner.loss_sum(model))
    }

    /// Completes the gradients of a step after its last micro-batch: those that nothing contributed to, and tied ones.
    fn complete_gradients(&mut self) -> Result<(), EngineError> {
        let begin = self.timeline().begin();
        let elements = self.gradients.tied_elements() as u64;
        for unit in (0..self.model.units()).filter(|unit| self.is_here[*unit]) {
            self.gradients.end_unit(&*self.queue, unit)?;
        }
        self.timeline().end(begin, || {
            let cost = Cost { vector_flops: elements, ..Cost::of_bytes(3 * F32_BYTES * elements) };
            (Activity::of_step("add tied gradients"), cost)
        });
        Ok(())
    }

    /// Waits until the weights are what the last update has made them, also those that other ranks have updated, which are on their
    /// way during the forward that follows. Whoever reads or replaces weights otherwise calls this before.
    ///
    /// # Errors
    /// [`EngineError`]: none on one rank.
    pub fn settle_weights(&mut self) -> Result<(), EngineError> {
        self.weights.settle()
    }

    /// Completes the gradients if they are not, and returns the global L2 norm over all ranks that share the model, each
    /// element counted once. NaN if any gradient is not finite.
    ///
    /// # Errors
    /// [`EngineError`]: none on one rank.
    pub fn finish_gradients(&mut self) -> Result<f64, EngineError> {
        self.complete_gradients()?;
        let begin = self.timeline().begin();
        let mut sum = ExactSum::default();
        for id in self.trained_ids() {
            if self.speaks_for(id) {
                self.gradients.add_squares(&*self.queue, id, &mut sum);
            }
        }
        let sum = self.groups.sum_over_model(&sum)?;
        self.timeline().end(begin, || {
            let elements = self.trained_elements();
            let cost = Cost { vector_flops: 2 * elements, ..Cost::of_bytes(F32_BYTES * elements) };
            (Activity::of_step("gradient norm"), cost)
        });
        Ok(sum.value().sqrt())
    }

    /// Which elements of what its model holds of a trained parameter this rank owns.
    pub fn owned_range(&self, id: ParameterId) -> Range<usize> {
        self.gradients.owned_range(id)
    }

    /// The gradient of what this rank owns of a trained parameter, after [`Engine::forward_backward`] or
    /// [`Engine::finish_gradients`].
    ///
    /// # Errors
    /// [`EngineError::Disk`], if it is there.
    pub fn gradient(&self, id: ParameterId) -> Result<Vec<f32>, EngineError> {
        self.gradients.read(id)
    }

    /// Replaces the gradient of what this rank owns of a parameter.
    ///
    /// # Errors
    /// [`EngineError::Disk`], if it is there.
    ///
    /// # Panics
    /// If the number of elements is another.
    pub fn write_gradient(&mut self, id: ParameterId, values: &[f32]) -> Result<(), EngineError> {
        self.gradients.write(&*self.queue, id, values)
    }

    /// What has been read from and written to disk since this was last asked.
    pub fn take_disk_traffic(&mut self) -> DiskTraffic {
        let of_state = self.weights.take_disk_traffic() + self.gradients.take_disk_traffic();
        of_state + self.runner.take_disk_traffic()
    }

    /// Whether any gradients are on disk.
    pub fn has_gradients_on_disk(&self) -> bool {
        self.gradients.disk_bytes() > 0
    }

    /// Bytes of model state and activations that are on disk.
    pub fn disk_bytes(&self) -> u64 {
        self.weights.disk_bytes() + self.gradients.disk_bytes() + self.runner.disk_bytes()
    }

    /// When this rank did what in the last step, if it is one of a pipeline.
    pub fn pipeline_times(&self) -> Option<&StepTimes> {
        self.pipeline.as_ref().map(Pipeline::times)
    }

    /// When weights are gathered in a step, and how many of them are whole at once, where they are shared out.
    pub fn gathers_of_step(&self) -> Option<&GatherPlan> {
        self.weights.gathers_of_step()
    }

    /// Elements of the parameters that are trained.
    fn trained_elements(&self) -> u64 {
        self.trained_ids().map(|id| self.records[id.0].local_elements() as u64).sum()
    }

    pub(crate) fn role(&self, id: ParameterId) -> Role {
        Role::of(&self.records[id.0], self.model.units())
    }

    /// The kinds of tensors that a checkpoint holds for a parameter.
    pub fn state_kinds(&self, id: ParameterId) -> impl Iterator<Item = StateKind> + use<> {
        std::iter::once(StateKind::Parameter).chain(self.optimizer.state_kinds(self.role(id)).iter().copied())
    }

    /// The update rule.
    pub fn optimizer(&self) -> Optimizer {
        self.optimizer
    }
}
