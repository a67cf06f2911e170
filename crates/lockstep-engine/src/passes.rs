//! The interface between the pipeline executor ([`Pipeline`](crate::pipeline::Pipeline)) and the passes that it runs.
//!
//! An implementation of [`Passes`] runs the passes and owns the memory of messages. In training it replays the model's
//! programs ([`TrainingPasses`](crate::training_passes::TrainingPasses)); in a rehearsal it only sleeps for the time of
//! a pass.

use std::{ops::Range, time::Instant};

use lockstep_comm::LentBuffer;
use lockstep_graph::Timeline;
use lockstep_plan::schedule::{Message, Pass};

use crate::EngineError;

/// Location of a micro-batch on this rank: stage, slot and send buffer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PassLocation {
    /// Index among this rank's stages.
    pub(crate) stage: usize,
    pub(crate) slot: usize,
    /// Index of the stage's buffer for the gradient of its input. It is separate from the slot, because the next
    /// micro-batch may take the slot before the gradient has been sent.
    pub(crate) send_buffer: usize,
}

impl PassLocation {
    /// Returns the first slot of a stage.
    pub(crate) const fn first(stage: usize) -> Self {
        Self { stage, slot: 0, send_buffer: 0 }
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
    fn load(&mut self, place: PassLocation, micro_batch: usize);

    /// Runs a pass whose inputs have all arrived.
    fn run(&mut self, pass: Pass, place: PassLocation) -> Result<(), EngineError>;

    /// Copies a message from one stage of this rank to another.
    fn hand_over(&mut self, message: Message, from: PassLocation, to: PassLocation);

    /// Lends the memory of a message while it is in flight.
    fn lend(&mut self, place: PassLocation, border: StageBoundary) -> LentBuffer;

    /// Begins to reduce the gradients of a stage's units over ranks, once they are complete on this rank.
    fn reduce(&mut self, units: Range<usize>) -> Result<(), EngineError>;

    /// Returns the sum of the losses of a micro-batch, after its backward in the last stage.
    fn loss_sum(&mut self, place: PassLocation) -> f64;

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
