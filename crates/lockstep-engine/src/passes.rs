//! The seam between a rank's list, which [`Pipeline`](crate::pipeline::Pipeline) follows, and what is done in its passes.
//!
//! Whoever is [`Passes`] runs them and has the memory in which messages are. In training that is [`Work`], which replays the
//! model's programs; in a rehearsal it is somebody who only takes the time.

use std::{ops::Range, time::Instant};

use lockstep_comm::Lent;
use lockstep_graph::{Seed, Timeline};
use lockstep_model::RecordedModel;
use lockstep_plan::schedule::{Message, Pass, PassKind};
use lockstep_tensor::Kernels;

use crate::{
    EngineError, Gradients, HostBatch, Runner,
    reducer::Reducer,
    runner::{Half, Purpose},
    weights::WeightSource,
};

/// Where a micro-batch is in a stage of this rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Place {
    /// Which of the own stages.
    pub(crate) stage: usize,
    pub(crate) slot: usize,
    /// Which of the stage's buffers takes the gradient of its input. It is not of the slot, which the next micro-batch may have
    /// long before the stage before has come to fetch the gradient.
    pub(crate) outbox: usize,
}

impl Place {
    /// The first slot of a stage.
    pub(crate) const fn first(stage: usize) -> Self {
        Self { stage, slot: 0, outbox: 0 }
    }
}

/// What crosses a border of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Border {
    Input,
    InputGradient,
    Output,
    OutputGradient,
}

impl Border {
    /// What a message is to the stage that sends it.
    pub(crate) const fn sent(message: Message) -> Self {
        if message.is_activation() { Self::Output } else { Self::InputGradient }
    }

    /// What it is to the stage that receives it.
    pub(crate) const fn received(message: Message) -> Self {
        if message.is_activation() { Self::Input } else { Self::OutputGradient }
    }
}

/// Runs the passes of a rank's stages.
pub(crate) trait Passes {
    /// Takes in a micro-batch, before what its forward needs of another stage is there.
    fn load(&mut self, place: Place, micro_batch: usize);

    /// Runs a pass, for which everything is there.
    fn run(&mut self, pass: Pass, place: Place) -> Result<(), EngineError>;

    /// Copies a message from one own stage to another.
    fn hand_over(&mut self, message: Message, from: Place, to: Place);

    /// Lends memory to a message on its way.
    fn lend(&mut self, place: Place, border: Border) -> Lent;

    /// Begins to sum the gradients of a stage's units, which are complete here, over the ranks that have summands of them.
    fn reduce(&mut self, units: Range<usize>) -> Result<(), EngineError>;

    /// The sum of the losses of a micro-batch, after its backward in the last stage.
    fn loss_sum(&mut self, place: Place) -> f64;

    /// Where waits are recorded.
    fn timeline(&self) -> &Timeline;
}

/// When a pass ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PassTime {
    /// Which.
    pub pass: Pass,
    /// From when on everything that it needs was there.
    pub begin: Instant,
    /// When it was done.
    pub end: Instant,
}

/// When a rank of a pipeline did what in a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepTimes {
    /// When it began to follow its list.
    pub begin: Instant,
    /// Its passes, in their order.
    pub passes: Vec<PassTime>,
    /// When the last pass was done, and what was sent had left.
    pub passed: Instant,
    /// When the step was over: the weights were updated, if they were.
    pub end: Instant,
}

impl StepTimes {
    /// Before the first step of a rank with so many passes.
    pub(crate) fn of(passes: usize) -> Self {
        let now = Instant::now();
        Self { begin: now, passes: Vec::with_capacity(passes), passed: now, end: now }
    }

    pub(crate) fn start(&mut self) {
        self.passes.clear();
        self.begin = Instant::now();
    }
}

/// The passes of training.
pub(crate) struct Work<'a, B> {
    pub(crate) model: &'a RecordedModel,
    pub(crate) queue: &'a dyn Kernels,
    pub(crate) weights: &'a mut dyn WeightSource,
    pub(crate) runner: &'a mut Runner,
    pub(crate) gradients: &'a mut Gradients,
    pub(crate) reducer: Option<&'a mut Reducer>,
    pub(crate) seed: Seed,
    /// Those of the step, at least as many as the schedule has.
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
        let mut reducer = self.reducer.as_deref_mut().filter(|_| gradients.are_summed_at_once());
        let after_unit = |gradients: &mut Gradients, unit| match &mut reducer {
            Some(reducer) => gradients.sum_unit(queue, unit, reducer),
            None => Ok(()),
        };
        if pass.kind == PassKind::BackwardWeight {
            self.runner.weights_stage(model, place, queue, weights, gradients, after_unit)?;
        } else {
            let half = if pass.kind == PassKind::BackwardInput { Half::Inputs } else { Half::Both };
            self.runner.backward_stage(model, place, queue, weights, gradients, seed, half, after_unit)?;
        }
        match reducer {
            Some(reducer) => gradients.wait(queue, reducer),
            None => Ok(()),
        }
    }

    fn hand_over(&mut self, message: Message, from: Place, to: Place) {
        if message.is_activation() {
            self.runner.hand_on(self.model, self.queue, from, to);
        } else {
            self.runner.hand_back(self.model, self.queue, from, to);
        }
    }

    fn lend(&mut self, place: Place, border: Border) -> Lent {
        self.runner.lend(self.model, place, border)
    }

    fn reduce(&mut self, units: Range<usize>) -> Result<(), EngineError> {
        let Some(reducer) = &mut self.reducer else { return Ok(()) };
        let at_once = self.gradients.are_summed_at_once();
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
