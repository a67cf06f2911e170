//! The interface between the pipeline executor ([`Pipeline`](crate::pipeline::Pipeline)) and the passes that it runs.
//!
//! An implementation of [`Passes`] runs the passes and owns the memory of messages. In training that is [`Work`], which
//! replays the model's programs; in a rehearsal it is one that only sleeps for the time of a pass.

use std::{ops::Range, time::Instant};

use lockstep_comm::Lent;
use lockstep_graph::{Seed, Timeline};
use lockstep_model::RecordedModel;
use lockstep_plan::schedule::{Message, Pass, PassKind};
use lockstep_tensor::Kernels;

use crate::{
    EngineError, Gradients, HostBatch, Runner,
    reducer::Reducer,
    runner::{BackwardPart, Purpose},
    weights::WeightSource,
};

/// Location of a micro-batch on this rank: stage, slot and outbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Place {
    /// Index among this rank's stages.
    pub(crate) stage: usize,
    pub(crate) slot: usize,
    /// Index of the stage's buffer for the gradient of its input. It is separate from the slot, because the next
    /// micro-batch may take the slot before the gradient has been sent.
    pub(crate) outbox: usize,
}

impl Place {
    /// Returns the first slot of a stage.
    pub(crate) const fn first(stage: usize) -> Self {
        Self { stage, slot: 0, outbox: 0 }
    }
}

/// A value that crosses a border of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StageBoundary {
    Input,
    InputGradient,
    Output,
    OutputGradient,
}

impl StageBoundary {
    /// Returns what a message is for the stage that sends it.
    pub(crate) const fn sent(message: Message) -> Self {
        if message.is_activation() { Self::Output } else { Self::InputGradient }
    }

    /// Returns what a message is for the stage that receives it.
    pub(crate) const fn received(message: Message) -> Self {
        if message.is_activation() { Self::Input } else { Self::OutputGradient }
    }
}

/// Runs the passes of a rank's stages.
pub(crate) trait Passes {
    /// Loads a micro-batch into its slot; the input from another stage may not have arrived yet.
    fn load(&mut self, place: Place, micro_batch: usize);

    /// Runs a pass whose inputs have all arrived.
    fn run(&mut self, pass: Pass, place: Place) -> Result<(), EngineError>;

    /// Copies a message from one stage of this rank to another.
    fn hand_over(&mut self, message: Message, from: Place, to: Place);

    /// Lends the memory of a message while it is in flight.
    fn lend(&mut self, place: Place, border: StageBoundary) -> Lent;

    /// Begins to reduce the gradients of a stage's units over ranks, once they are complete on this rank.
    fn reduce(&mut self, units: Range<usize>) -> Result<(), EngineError>;

    /// Returns the sum of the losses of a micro-batch, after its backward in the last stage.
    fn loss_sum(&mut self, place: Place) -> f64;

    /// Returns the timeline in which waits are recorded.
    fn timeline(&self) -> &Timeline;
}

/// Begin and end of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PassTime {
    /// The pass that ran.
    pub pass: Pass,
    /// When the pass began, after all of its inputs had arrived.
    pub begin: Instant,
    /// When the pass ended.
    pub end: Instant,
}

/// Times of a pipeline rank's passes in one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepTimes {
    /// When the rank began its action list.
    pub begin: Instant,
    /// Passes in the order in which they ran.
    pub passes: Vec<PassTime>,
    /// When the last pass and all sends were done.
    pub passed: Instant,
    /// When the step ended, including the optimizer step if there was one.
    pub end: Instant,
}

impl StepTimes {
    /// Returns empty times with room for `passes`.
    pub(crate) fn of(passes: usize) -> Self {
        let now = Instant::now();
        Self { begin: now, passes: Vec::with_capacity(passes), passed: now, end: now }
    }

    pub(crate) fn start(&mut self) {
        self.passes.clear();
        self.begin = Instant::now();
    }
}

/// Implementation of [`Passes`] for training.
pub(crate) struct Work<'a, B> {
    pub(crate) model: &'a RecordedModel,
    pub(crate) queue: &'a dyn Kernels,
    pub(crate) weights: &'a mut dyn WeightSource,
    pub(crate) runner: &'a mut Runner,
    pub(crate) gradients: &'a mut Gradients,
    pub(crate) reducer: Option<&'a mut Reducer>,
    pub(crate) seed: Seed,
    /// Micro-batches of the step, at least as many as the schedule has.
    pub(crate) batches: B,
}

impl<'b, B: Iterator<Item = HostBatch<'b>> + Clone> Work<'_, B> {
    fn batch(&self, micro_batch: usize) -> HostBatch<'b> {
        self.batches.clone().nth(micro_batch).expect("as many batches as the schedule has")
    }
}

impl<'b, B: Iterator<Item = HostBatch<'b>> + Clone> Passes for Work<'_, B> {
    fn load(&mut self, place: Place, micro_batch: usize) {
        let batch = self.batch(micro_batch);
        self.runner.load(place, &batch);
    }

    fn run(&mut self, pass: Pass, place: Place) -> Result<(), EngineError> {
        let (model, queue) = (self.model, self.queue);
        if pass.kind == PassKind::Forward {
            return self.runner.forward_stage(model, place, queue, self.weights, Purpose::Training);
        }
        if pass.kind.makes_weight_gradient() {
            let batch = self.batch(pass.micro_batch);
            self.gradients.begin_micro_batch(queue, self.runner.own_tokens(batch.ids));
        }
        let (weights, gradients, seed) = (&mut *self.weights, &mut *self.gradients, self.seed);
        let mut reducer = self.reducer.as_deref_mut().filter(|_| gradients.reduces_every_micro_batch());
        let after_unit = |gradients: &mut Gradients, unit| match &mut reducer {
            Some(reducer) => gradients.sum_unit(queue, unit, reducer),
            None => Ok(()),
        };
        if pass.kind == PassKind::BackwardWeight {
            self.runner.weights_stage(model, place, queue, weights, gradients, after_unit)?;
        } else {
            let half =
                if pass.kind == PassKind::BackwardInput { BackwardPart::Inputs } else { BackwardPart::Both };
            self.runner.backward_stage(model, place, queue, weights, gradients, seed, half, after_unit)?;
        }
        match reducer {
            Some(reducer) => gradients.wait(queue, reducer),
            None => Ok(()),
        }
    }

    fn hand_over(&mut self, message: Message, from: Place, to: Place) {
        if message.is_activation() {
            self.runner.copy_output_to_next_stage(self.model, self.queue, from, to);
        } else {
            self.runner.copy_gradient_to_previous_stage(self.model, self.queue, from, to);
        }
    }

    fn lend(&mut self, place: Place, border: StageBoundary) -> Lent {
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

    fn loss_sum(&mut self, place: Place) -> f64 {
        self.runner.loss_sum_of(self.model, place)
    }

    fn timeline(&self) -> &Timeline {
        self.runner.timeline()
    }
}
