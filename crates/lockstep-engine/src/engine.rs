//! The engine of one rank: its training state, and the calls that make up a training step.

use std::cell::Cell;
use std::iter;
use std::ops::Range;

use lockstep_comm::Metered;
use lockstep_graph::{Activity, Cost, MAX_REPORTS, Seed, Timeline};
use lockstep_model::RecordedModel;
use lockstep_plan::gathering::{GatherPlan, Sequence};
use lockstep_plan::schedule::{Pass, PassKind};
use lockstep_plan::{
    MemoryPrediction, OffloadTraffic, ParameterId, ParameterRecord, SharedTable, StateLayout, exact::ExactSum,
};
use lockstep_tensor::{Arena, DiskTraffic, F32Products, Queue};

use crate::model_state::ModelState;
use crate::optimizer::Role;
use crate::passes::{PassLocation, Passes};
use crate::pipeline::Pipeline;
use crate::runner::Purpose;
use crate::state::ResidualNumbers;
use crate::training_passes::TrainingPasses;
use crate::{
    EngineError, ExpertLoad, Gradients, Groups, HostBatch, Optimizer, RoundingMode, Runner, StateKind,
    StepTimes, Traffic, reducer::Reducer,
};

const F32_BYTES: u64 = size_of::<f32>() as u64;

/// Weights, gradients, optimizer state and the programs that work on them.
pub struct Engine {
    pub(crate) arena: Arena,
    pub(crate) queue: Box<dyn Queue>,
    pub(crate) optimizer: Optimizer,
    pub(crate) rounding: RoundingMode,
    pub(crate) seed: u64,
    pub(crate) model: RecordedModel,
    /// The model for evaluation, without dropout and without expert capacity; `None` if `model` has neither.
    pub(crate) evaluation: Option<RecordedModel>,
    pub(crate) runner: Runner,
    /// Layout of this rank's state, with the records of all parameters.
    pub(crate) layout: StateLayout,
    pub(crate) weights: ModelState,
    pub(crate) gradients: Gradients,
    pub(crate) groups: Groups,
    /// Micro-batches per step on this rank; used without a pipeline.
    pub(crate) micro_batches: usize,
    /// Reduces gradients over ranks, and on the way to disk; `None` if gradients are neither reduced nor offloaded.
    pub(crate) reducer: Option<Reducer>,
    /// Pipeline executor of this rank; `None` without pipeline parallelism.
    pub(crate) pipeline: Option<Pipeline>,
    /// Numbers by which checkpoints name this rank's residuals of quantized gradients.
    pub(crate) residual_numbers: ResidualNumbers,
    /// Scratch buffer for the router biases of one layer's experts.
    pub(crate) bias_values: Vec<f32>,
    pub(crate) predicted: MemoryPrediction,
    pub(crate) predicted_traffic: OffloadTraffic,
}

impl Engine {
    /// Returns the records of all parameters for change; a caller may choose which of them decay.
    pub fn records_mut(&mut self) -> &mut [ParameterRecord] {
        &mut self.layout.records
    }

    /// Returns the records of all parameters.
    pub fn records(&self) -> &[ParameterRecord] {
        &self.layout.records
    }

    /// Returns the parameters on this rank that own their weights; a tied parameter reads those of another and is left
    /// out.
    pub fn parameter_ids(&self) -> impl Iterator<Item = ParameterId> {
        let is_owned = |id: &ParameterId| {
            let record = &self.layout.records[id.0];
            record.tie.is_none() && self.layout.is_here[record.unit]
        };
        (0..self.layout.records.len()).map(ParameterId).filter(is_owned)
    }

    /// Returns true if this rank counts and saves its elements of a parameter. Of the ranks of one data-parallel
    /// replica that hold the same elements, exactly one does.
    pub fn is_primary_owner(&self, id: ParameterId) -> bool {
        let is_copy = self.layout.shared_table.is_some_and(|table| table.id == id && table.is_copy);
        !is_copy && self.groups.is_primary_owner(&self.layout.records[id.0].share)
    }

    /// Returns the trainable parameters among [`Engine::parameter_ids`].
    pub fn trained_ids(&self) -> impl Iterator<Item = ParameterId> {
        self.parameter_ids().filter(|id| self.layout.records[id.0].trainable)
    }

    /// Returns the recorded model.
    pub fn model(&self) -> &RecordedModel {
        &self.model
    }

    /// Returns the timeline, which records the times of operations while it is enabled.
    pub fn timeline(&self) -> &Timeline {
        self.runner.timeline()
    }

    /// Returns the arena that all buffers of this engine come from, with the memory ledger.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Returns the memory that was predicted for this rank before anything was allocated; snapshots of its state are
    /// not included.
    pub fn predicted_memory(&self) -> &MemoryPrediction {
        &self.predicted
    }

    /// Returns the predicted disk traffic of this rank in each step but the first.
    pub fn predicted_disk_traffic(&self) -> &OffloadTraffic {
        &self.predicted_traffic
    }

    /// Returns the compute queue.
    pub fn queue(&self) -> &dyn Queue {
        &*self.queue
    }

    /// Sets how f32 matrices are multiplied; has an effect only on a CPU with AMX.
    pub fn set_f32_products(&mut self, f32_products: F32Products) {
        self.queue.set_f32_products(f32_products);
    }

    /// Returns the number of tokens routed to each expert, over all ranks, in the last [`Engine::forward_backward`].
    pub fn expert_load(&self) -> &ExpertLoad {
        &self.runner.expert_load
    }

    /// Enables [`Engine::router_margin`], which reads all router scores of every micro-batch.
    pub fn watch_router_margin(&mut self) {
        self.runner.router_margin = Some(Cell::new(f32::INFINITY));
    }

    /// Returns the smallest margin by which any token routed on this rank kept its experts
    /// ([`RouterKernels::router_margin`](lockstep_tensor::RouterKernels::router_margin)). It is infinite for a model without
    /// experts, and `None` unless [`Engine::watch_router_margin`] was called.
    pub fn router_margin(&self) -> Option<f32> {
        self.runner.router_margin.as_ref().map(Cell::get)
    }

    /// Starts a step: later contributions replace the gradients and expert counts of the last one.
    pub fn begin_step(&mut self) {
        self.gradients.begin();
        self.runner.expert_load.clear();
        self.runner.running.clear();
    }

    /// Calls `is_asked` before each unit of a forward or backward; once it returns true, the one in progress ends with
    /// [`EngineError::Abandoned`]. Weights and optimizer state are then those before the step and may be saved; no further step may
    /// follow. Only for a world of one rank, because other ranks would wait for the abandoned collectives.
    pub fn abandon_if(&mut self, is_asked: impl Fn() -> bool + Send + Sync + 'static) {
        self.runner.abandons = Some(Box::new(is_asked));
    }

    /// Runs forward and backward of one micro-batch and returns the sum of its losses.
    ///
    /// # Errors
    /// If another rank is lost or does not answer in time, the disk of offloaded state fails, or the step is abandoned.
    ///
    /// # Panics
    /// If a step has more micro-batches than the plan.
    pub fn accumulate(&mut self, batch: &HostBatch<'_>, seed: Seed) -> Result<f64, EngineError> {
        batch.check(&self.model)?;
        self.weights.begin(Sequence::MicroBatch);
        self.micro_batch(batch, seed, false)
    }

    /// Runs forward and backward of all micro-batches of a step and returns the sum of their losses. Gradients are
    /// reduced over ranks, each unit's as soon as the last micro-batch has contributed to it, overlapped with the rest
    /// of the backward.
    ///
    /// # Errors
    /// As [`Engine::accumulate`].
    ///
    /// # Panics
    /// As [`Engine::accumulate`].
    pub fn forward_backward<'a>(
        &mut self,
        batches: impl Iterator<Item = HostBatch<'a>> + Clone,
        seed: Seed,
    ) -> Result<f64, EngineError> {
        batches.clone().try_for_each(|batch| batch.check(&self.model))?;
        self.begin_step();
        if let Some(reducer) = &mut self.reducer {
            self.gradients.share(&*self.queue, batches.clone().map(|batch| batch.ids), reducer)?;
        }
        self.weights.begin(Sequence::Step);
        let loss_sum = match self.pipeline {
            Some(_) => self.run_pipeline(batches, seed)?,
            None => self.run_micro_batches(batches, seed)?,
        };
        self.complete_gradients()?;
        self.runner.expert_load.sum(&self.groups)?;
        self.runner.running.sum(&self.groups)?;
        Ok(loss_sum)
    }

    /// Runs the micro-batches of a step without a pipeline and returns the sum of their losses.
    fn run_micro_batches<'a>(
        &mut self,
        batches: impl Iterator<Item = HostBatch<'a>> + Clone,
        seed: Seed,
    ) -> Result<f64, EngineError> {
        let is_planned = batches.clone().count() == self.micro_batches;
        let mut batches = batches.peekable();
        let mut loss_sum = 0.0;
        while let Some(batch) = batches.next() {
            if !is_planned {
                self.weights.begin(Sequence::MicroBatch);
            }
            let is_last = batches.peek().is_none();
            loss_sum += self.micro_batch(&batch, seed, is_last)?;
        }
        Ok(loss_sum)
    }

    /// Runs this rank's actions of a pipelined step and returns the sum of the losses it computed.
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
        let (reducer, is_last) = (reducer.as_mut(), false);
        let mut passes =
            TrainingPasses { model, queue, weights, runner, gradients, reducer, seed, is_last, batches };
        let loss_sum = pipeline.run(&mut passes)?;
        self.await_gradients()?;
        if let Some(SharedTable { id, .. }) = self.layout.shared_table
            && let Some(part) = self.gradients.part(id)
        {
            self.groups.all_reduce_over_first_and_last_stage(part.view)?;
        }
        Ok(loss_sum)
    }

    /// Waits for the gradient reduction that follows the last micro-batch.
    fn await_gradients(&mut self) -> Result<(), EngineError> {
        let Self { queue, runner, gradients, reducer: Some(reducer), .. } = self else { return Ok(()) };
        let queue = &**queue;
        let begin = runner.timeline().begin();
        gradients.wait(queue, reducer)?;
        gradients.sum_owned(queue, reducer)?;
        runner.timeline().end(begin, || (Activity::of_step("wait for gradients"), Cost::default()));
        Ok(())
    }

    /// Returns the communication since the last call: gradient reduction, parameter gathers, and collectives between
    /// the ranks of one model replica.
    pub fn take_traffic(&mut self) -> Traffic {
        let sums = self.reducer.as_mut().map_or_else(Traffic::default, Reducer::take_traffic);
        let Metered { bytes, busy, exposed } = self.groups.take_metered();
        sums + self.weights.take_traffic() + Traffic { bytes, busy, exposed }
    }

    /// Returns the sums of the model's reports ([`RecordedModel::reports`]) over the micro-batches that were trained or
    /// evaluated on this rank since the last call; zeros on a rank without the head.
    pub fn take_reported(&mut self) -> [f64; MAX_REPORTS] {
        self.runner.take_reported()
    }

    /// Runs forward and backward of one micro-batch and returns the sum of its losses. With the last of a step,
    /// gradients are reduced over ranks.
    fn micro_batch(&mut self, batch: &HostBatch<'_>, seed: Seed, is_last: bool) -> Result<f64, EngineError> {
        let Self { model, queue, weights, runner, gradients, reducer, .. } = self;
        let (queue, reducer, batches) = (&**queue, reducer.as_mut(), iter::once(*batch));
        let mut passes =
            TrainingPasses { model, queue, weights, runner, gradients, reducer, seed, is_last, batches };
        let only = PassLocation::default();
        passes.load(only, 0);
        for kind in [PassKind::Forward, PassKind::Backward] {
            passes.run(Pass { kind, stage: 0, micro_batch: 0 }, only)?;
        }
        if is_last {
            self.await_gradients()?;
        }
        Ok(self.runner.loss_sum(&self.model))
    }

    /// Runs the forward of one micro-batch without dropout and returns the sum of its losses.
    ///
    /// # Errors
    /// If another rank is lost or does not answer in time, the disk of offloaded state fails, or the step is abandoned.
    pub fn evaluate(&mut self, batch: &HostBatch<'_>) -> Result<f64, EngineError> {
        batch.check(&self.model)?;
        self.weights.begin(Sequence::Evaluation);
        let Self { evaluation, model, pipeline, queue, weights, runner, .. } = self;
        let queue = &**queue;
        let model = evaluation.as_ref().unwrap_or(model);
        if let Some(pipeline) = pipeline {
            return pipeline.evaluate((model, queue, weights), runner, batch);
        }
        runner.load(model, PassLocation::default(), batch);
        runner.forward_stage(model, PassLocation::default(), queue, weights, Purpose::Evaluation)?;
        Ok(runner.loss_sum(model))
    }

    /// Completes the gradients of a step after its last micro-batch: untouched ones become zero, tied ones are added
    /// up.
    fn complete_gradients(&mut self) -> Result<(), EngineError> {
        let begin = self.timeline().begin();
        let elements = self.gradients.tied_elements() as u64;
        for unit in (0..self.model.units()).filter(|unit| self.layout.is_here[*unit]) {
            self.gradients.end_unit(&*self.queue, unit)?;
        }
        self.timeline().end(begin, || {
            let cost = Cost { vector_flops: elements, ..Cost::of_bytes(3 * F32_BYTES * elements) };
            (Activity::of_step("add tied gradients"), cost)
        });
        Ok(())
    }

    /// Waits until all weights are those of the last optimizer step. The all-gather of weights that other ranks updated
    /// overlaps with the next forward, so call this before you read or replace weights by other means.
    ///
    /// # Errors
    /// If another rank is lost or does not answer in time.
    pub fn wait_for_weights(&mut self) -> Result<(), EngineError> {
        self.weights.wait_for_gathers()
    }

    /// Completes the gradients if necessary and returns their global L2 norm over all ranks of the model, each element
    /// counted once. The norm is NaN if any gradient is not finite.
    ///
    /// # Errors
    /// If another rank is lost or does not answer in time, or the disk of offloaded gradients fails.
    pub fn finish_gradients(&mut self) -> Result<f64, EngineError> {
        self.complete_gradients()?;
        let begin = self.timeline().begin();
        let mut sum = ExactSum::default();
        for id in self.trained_ids() {
            if self.is_primary_owner(id) {
                self.gradients.add_squares(&*self.queue, id, &mut sum);
            }
        }
        let sum = self.groups.sum_over_model(&sum)?;
        self.timeline().end(begin, || {
            let elements: u64 =
                self.trained_ids().map(|id| self.layout.records[id.0].local_elements() as u64).sum();
            let cost = Cost { vector_flops: 2 * elements, ..Cost::of_bytes(F32_BYTES * elements) };
            (Activity::of_step("gradient norm"), cost)
        });
        Ok(sum.value().sqrt())
    }

    /// Returns the elements of a trained parameter that this rank owns, as a range of the elements that its model
    /// replica holds on this rank.
    pub fn owned_range(&self, id: ParameterId) -> Range<usize> {
        self.gradients.owned_range(id)
    }

    /// Returns the gradient of the elements of a trained parameter that this rank owns; call it after
    /// [`Engine::forward_backward`] or [`Engine::finish_gradients`].
    ///
    /// # Errors
    /// If the gradient is offloaded to disk and the disk fails.
    pub fn gradient(&self, id: ParameterId) -> Result<Vec<f32>, EngineError> {
        self.gradients.read(id)
    }

    /// Replaces the gradient of the elements of a parameter that this rank owns.
    ///
    /// # Errors
    /// If the gradient is offloaded to disk and the disk fails.
    ///
    /// # Panics
    /// If `values` does not have as many elements as the gradient.
    pub fn write_gradient(&mut self, id: ParameterId, values: &[f32]) -> Result<(), EngineError> {
        self.gradients.write(&*self.queue, id, values)
    }

    /// Returns the reads from and writes to disk since the last call.
    pub fn take_disk_traffic(&mut self) -> DiskTraffic {
        let of_state = self.weights.take_disk_traffic() + self.gradients.take_disk_traffic();
        of_state + self.runner.take_disk_traffic()
    }

    /// Returns true if any gradients are offloaded to disk.
    pub fn has_gradients_on_disk(&self) -> bool {
        self.gradients.disk_bytes() > 0
    }

    /// Returns the bytes of model state and activations on disk.
    pub fn disk_bytes(&self) -> u64 {
        self.weights.disk_bytes() + self.gradients.disk_bytes() + self.runner.disk_bytes()
    }

    /// Returns the times of this rank's actions in the last step; `None` without a pipeline.
    pub fn pipeline_times(&self) -> Option<&StepTimes> {
        self.pipeline.as_ref().map(Pipeline::times)
    }

    /// Returns when sharded weights are gathered in a step, and how many are unsharded at once; `None` if weights are
    /// not sharded.
    pub fn gathers_of_step(&self) -> Option<&GatherPlan> {
        self.weights.gathers_of_step()
    }

    pub(crate) fn role(&self, id: ParameterId) -> Role {
        Role::of(&self.layout.records[id.0], self.model.units())
    }

    /// Returns the kinds of tensors that a checkpoint holds for a parameter.
    pub fn state_kinds(&self, id: ParameterId) -> impl Iterator<Item = StateKind> + use<> {
        iter::once(StateKind::Parameter).chain(self.optimizer.state_kinds(self.role(id)).iter().copied())
    }

    /// Returns the optimizer.
    pub fn optimizer(&self) -> Optimizer {
        self.optimizer
    }
}
