//! The passes of a training step: each replays the programs of a stage's units on its micro-batch.
//!
//! The engine runs a forward and a backward of each micro-batch; with a pipeline, the executor runs the schedule's passes.
//! The reduction of a unit's gradients, if it follows the backward at once, overlaps with the backward of the next unit.

use std::ops::Range;

use lockstep_comm::LentBuffer;
use lockstep_graph::{Seed, Timeline};
use lockstep_model::RecordedModel;
use lockstep_plan::schedule::{Message, Pass, PassKind};
use lockstep_tensor::Kernels;

use crate::passes::{PassLocation, Passes, StageBoundary};
use crate::reducer::Reducer;
use crate::runner::Purpose;
use crate::weights::WeightSource;
use crate::{EngineError, Gradients, HostBatch, Runner};

/// Implementation of [`Passes`] for training.
pub(crate) struct TrainingPasses<'a, B> {
    pub(crate) model: &'a RecordedModel,
    pub(crate) queue: &'a dyn Kernels,
    pub(crate) weights: &'a mut dyn WeightSource,
    pub(crate) runner: &'a mut Runner,
    pub(crate) gradients: &'a mut Gradients,
    pub(crate) reducer: Option<&'a mut Reducer>,
    pub(crate) seed: Seed,
    /// True in the last micro-batch of a step without a pipeline: the reduction of each unit's gradients follows its
    /// backward. With a pipeline, [`Passes::reduce`] does that.
    pub(crate) is_last: bool,
    /// Micro-batches of the step, at least as many as the schedule has.
    pub(crate) batches: B,
}

impl<'b, B: Iterator<Item = HostBatch<'b>> + Clone> TrainingPasses<'_, B> {
    fn batch(&self, micro_batch: usize) -> HostBatch<'b> {
        self.batches.clone().nth(micro_batch).expect("as many batches as the schedule has")
    }
}

impl<'b, B: Iterator<Item = HostBatch<'b>> + Clone> Passes for TrainingPasses<'_, B> {
    fn load(&mut self, place: PassLocation, micro_batch: usize) {
        let batch = self.batch(micro_batch);
        self.runner.load(self.model, place, &batch);
    }

    fn run(&mut self, pass: Pass, place: PassLocation) -> Result<(), EngineError> {
        let (model, queue) = (self.model, self.queue);
        if pass.kind == PassKind::Forward {
            return self.runner.forward_stage(model, place, queue, self.weights, Purpose::Training);
        }
        if pass.kind.makes_weight_gradient() {
            let batch = self.batch(pass.micro_batch);
            self.gradients.begin_micro_batch(queue, self.runner.own_tokens(batch.ids));
        }
        let (weights, gradients, seed) = (&mut *self.weights, &mut *self.gradients, self.seed);
        let is_last = self.is_last;
        let is_reduced = is_last || gradients.reduces_every_micro_batch();
        let mut reducer = self.reducer.as_deref_mut().filter(|_| is_reduced);
        let after_unit = |gradients: &mut Gradients, unit| {
            let Some(reducer) = &mut reducer else { return Ok(()) };
            gradients.sum_unit(queue, unit, reducer)?;
            if !is_last {
                return Ok(());
            }
            gradients.begin_owned(reducer)?;
            gradients.sum_rows(unit, reducer)
        };
        self.runner.backward_stage(model, place, queue, weights, gradients, seed, pass.kind, after_unit)?;
        match reducer {
            Some(reducer) if !is_last => gradients.wait(queue, reducer),
            _ => Ok(()),
        }
    }

    fn hand_over(&mut self, message: Message, from: PassLocation, to: PassLocation) {
        if message.is_activation() {
            self.runner.copy_output_to_next_stage(self.model, self.queue, from, to);
        } else {
            self.runner.copy_gradient_to_previous_stage(self.model, self.queue, from, to);
        }
    }

    fn lend(&mut self, place: PassLocation, border: StageBoundary) -> LentBuffer {
        self.runner.lend(self.model, place, border)
    }

    fn reduce(&mut self, units: Range<usize>) -> Result<(), EngineError> {
        let Some(reducer) = &mut self.reducer else { return Ok(()) };
        let at_once = self.gradients.reduces_every_micro_batch();
        units.rev().try_for_each(|unit| {
            if !at_once {
                self.gradients.sum_unit(self.queue, unit, reducer)?;
            }
            self.gradients.sum_rows(unit, reducer)
        })
    }

    fn loss_sum(&mut self, place: PassLocation) -> f64 {
        self.runner.loss_sum_of(self.model, place)
    }

    fn timeline(&self) -> &Timeline {
        self.runner.timeline()
    }
}
