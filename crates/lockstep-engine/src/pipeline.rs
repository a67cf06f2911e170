//! The pipeline executor: it runs its rank's action list of the schedule in order and makes no decisions.
//!
//! Messages are sent without a copy, from an output's frame or a gradient's buffer. An action in the list only begins a
//! send or receive. A pass waits for the messages that it reads, and before memory is reused the executor waits for
//! sends from it. Between two stages of one rank values are copied.

use std::{ops::Range, sync::Arc, time::Instant};

use lockstep_comm::{Collective, Group, LentBuffer};
use lockstep_graph::{Activity, Cost, Peers};
use lockstep_model::RecordedModel;
use lockstep_plan::StageMemory;
use lockstep_plan::schedule::{Action, Message, Pass, PassKind, Schedule};
use lockstep_tensor::Kernels;

use crate::{
    EngineError, Groups, HostBatch, Runner,
    passes::{PassLocation, PassTime, Passes, StageBoundary, StepTimes},
    runner::Purpose,
    transfers::{Job, Transfers},
    weights::WeightSource,
};

/// Pipeline executor of one rank.
#[derive(Debug)]
pub(crate) struct Pipeline {
    schedule: Arc<Schedule>,
    /// The pipeline-parallel group.
    group: Group,
    transfers: Transfers<InFlight>,
    /// Stages of this rank, in order.
    stages: Vec<OwnStage>,
    /// Loss of each micro-batch on the rank with the head; zeros elsewhere.
    losses: Vec<f64>,
    times: StepTimes,
}

#[derive(Debug)]
struct OwnStage {
    number: usize,
    units: Range<usize>,
    /// Slot of each micro-batch; `None` if it is not in the stage.
    slot_of: Vec<Option<usize>>,
    /// Slot that each micro-batch had last, from which its message is sent after its last pass.
    left: Vec<usize>,
    free: Vec<usize>,
    send_buffers: usize,
}

/// A message in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum InFlight {
    /// A message that this rank sends from `StageBoundary` of `PassLocation`.
    Sent(PassLocation, StageBoundary),
    Received(Message),
}

impl Pipeline {
    /// Returns the executor of this rank; `None` without pipeline parallelism.
    pub(crate) fn of(groups: &Groups) -> Option<Self> {
        let (plan, Peers { group, limit }) = (groups.plan()?, groups.pipeline_peers()?);
        let (schedule, rank) = plan.passes.pipeline.clone()?;
        let micro_batches = schedule.micro_batches();
        let stage = |(number, memory): (usize, &StageMemory)| OwnStage {
            number,
            units: memory.units.clone(),
            slot_of: vec![None; micro_batches],
            left: vec![0; micro_batches],
            free: (0..memory.slots).rev().collect(),
            send_buffers: memory.send_buffers(),
        };
        let stages = schedule.stages_of(rank).zip(&plan.passes.stages).map(stage).collect();
        let (transfers, losses) = (Transfers::new(limit, 2 * micro_batches), vec![0.0; micro_batches]);
        let times = StepTimes::of(schedule.passes(rank).count());
        Some(Self { schedule, group: group.clone(), transfers, stages, losses, times })
    }

    /// Returns the number of micro-batches of a step.
    pub(crate) fn micro_batches(&self) -> usize {
        self.losses.len()
    }

    /// Runs the action list of one step, up to the beginning of gradient reduction. Returns the sum of the losses; 0 on
    /// a rank without the head.
    ///
    /// # Errors
    /// If another rank is lost or does not answer in time, or a pass fails.
    pub(crate) fn run(&mut self, passes: &mut dyn Passes) -> Result<f64, EngineError> {
        self.losses.fill(0.0);
        self.times.start();
        let schedule = Arc::clone(&self.schedule);
        for action in schedule.actions(self.group.rank()) {
            match *action {
                Action::Compute(pass) => self.compute(passes, pass)?,
                Action::Send(message) => self.send(passes, message)?,
                Action::Receive(message) => self.receive(passes, message)?,
                Action::ReduceGradients { stage } => {
                    let own = self.own(stage).expect("a rank reduces gradients of its stages");
                    passes.reduce(self.stages[own].units.clone())?;
                }
                Action::Step => {}
            }
        }
        self.transfers.finish(|_| true)?;
        self.times.passed = Instant::now();
        self.times.end = self.times.passed;
        Ok(self.losses.iter().sum())
    }

    /// Records the end of the step that was [`run`](Self::run).
    pub(crate) fn end_step(&mut self) {
        self.times.end = Instant::now();
    }

    /// Returns the times of the last step.
    pub(crate) fn times(&self) -> &StepTimes {
        &self.times
    }

    /// Runs only the forward of a micro-batch through all stages; a collective call. Returns the sum of its losses; 0
    /// on a rank without the head.
    ///
    /// # Errors
    /// If another rank is lost or does not answer in time, or a pass fails.
    pub(crate) fn evaluate(
        &mut self,
        (model, queue, weights): (&RecordedModel, &dyn Kernels, &mut dyn WeightSource),
        runner: &mut Runner,
        batch: &HostBatch<'_>,
    ) -> Result<f64, EngineError> {
        let stages = self.schedule.stages();
        let mut loss_sum = 0.0;
        for own in 0..self.stages.len() {
            let number = self.stages[own].number;
            let place = PassLocation::first(own);
            runner.load(model, place, batch);
            if number > 0 {
                let from = self.schedule.rank_of(number - 1);
                match self.own(number - 1) {
                    Some(before) => {
                        runner.copy_output_to_next_stage(model, queue, PassLocation::first(before), place)
                    }
                    None => {
                        let output = runner.lend(model, place, StageBoundary::Input);
                        let message = Message { from: number - 1, to: number, micro_batch: 0 };
                        self.begin(InFlight::Received(message), Collective::Receive { output, from })?;
                        self.transfers.finish(|_| true)?;
                    }
                }
            }
            runner.forward_stage(model, place, queue, weights, Purpose::Evaluation)?;
            if number + 1 == stages {
                loss_sum = runner.loss_sum_of(model, place);
            } else if self.own(number + 1).is_none() {
                let to = self.schedule.rank_of(number + 1);
                let input = runner.lend(model, place, StageBoundary::Output);
                self.begin(InFlight::Sent(place, StageBoundary::Output), Collective::Send { input, to })?;
                self.transfers.finish(|_| true)?;
            }
        }
        Ok(loss_sum)
    }

    fn compute(&mut self, passes: &mut dyn Passes, pass: Pass) -> Result<(), EngineError> {
        let Pass { kind, stage, micro_batch } = pass;
        let own = self.own(stage).expect("a rank's list has passes of its stages");
        let place = self.place(own, micro_batch)?;
        let last = self.schedule.stages() - 1;
        if kind == PassKind::Forward {
            passes.load(place, micro_batch);
            if stage > 0 {
                self.await_message(passes, Message { from: stage - 1, to: stage, micro_batch }, place)?;
            }
        } else if kind.makes_input_gradient() && stage < last {
            self.await_message(passes, Message { from: stage + 1, to: stage, micro_batch }, place)?;
        }
        if kind.makes_input_gradient() {
            // A backward may read the stage's output, or compute it again. The next stage has received it.
            self.transfers
                .finish(|transfer| transfer.is_in_send_buffer(place) || transfer.is_in_slot(place))?;
        }
        let begin = Instant::now();
        passes.run(pass, place)?;
        self.times.passes.push(PassTime { pass, begin, end: Instant::now() });
        if kind.makes_input_gradient() {
            if stage == last {
                self.losses[micro_batch] = passes.loss_sum(place);
            }
            if stage > 0
                && let Some(before) = self.own(stage - 1)
            {
                let to = self.place(before, micro_batch)?;
                passes.hand_over(Message { from: stage, to: stage - 1, micro_batch }, place, to);
            }
        }
        if kind.makes_weight_gradient() {
            let stage = &mut self.stages[own];
            stage.slot_of[micro_batch] = None;
            stage.left[micro_batch] = place.slot;
            stage.free.push(place.slot);
        }
        Ok(())
    }

    /// Waits until the message that a pass reads is in its slot; copies the message if a stage of this rank sends it.
    fn await_message(
        &mut self,
        passes: &mut dyn Passes,
        message: Message,
        place: PassLocation,
    ) -> Result<(), EngineError> {
        if let Some(from) = self.own(message.from) {
            if message.is_activation() {
                let from = self.place(from, message.micro_batch)?;
                passes.hand_over(message, from, place);
            }
            return Ok(());
        }
        let begin = passes.timeline().begin();
        let is_message = |transfer: &InFlight| *transfer == InFlight::Received(message);
        assert!(self.transfers.has(is_message), "a receive stands before what needs it");
        self.transfers.finish(is_message)?;
        passes.timeline().end(begin, || (Activity::of_step("wait for a stage"), Cost::default()));
        Ok(())
    }

    fn send(&mut self, passes: &mut dyn Passes, message: Message) -> Result<(), EngineError> {
        let own = self.own(message.from).expect("a rank's list has sends of its stages");
        let to = self.schedule.rank_of(message.to);
        let OwnStage { slot_of, left, .. } = &self.stages[own];
        let slot = slot_of[message.micro_batch].unwrap_or(left[message.micro_batch]);
        let (place, border) =
            (self.stages[own].place(own, slot, message.micro_batch), StageBoundary::sent(message));
        let input = passes.lend(place, border);
        self.begin(InFlight::Sent(place, border), Collective::Send { input, to })
    }

    fn receive(&mut self, passes: &mut dyn Passes, message: Message) -> Result<(), EngineError> {
        let own = self.own(message.to).expect("a rank's list has receives of its stages");
        let place = self.place(own, message.micro_batch)?;
        let from = self.schedule.rank_of(message.from);
        let output = passes.lend(place, StageBoundary::received(message));
        self.begin(InFlight::Received(message), Collective::Receive { output, from })
    }

    /// Begins to send or receive a message. Its bytes are counted by the group's meter and not by `transfers`.
    fn begin(
        &mut self,
        tag: InFlight,
        collective: Collective<LentBuffer, LentBuffer>,
    ) -> Result<(), EngineError> {
        self.transfers.begin(tag, Job::Collective { group: &self.group, collective, bytes: 0 })
    }

    /// Returns the index of a stage among this rank's stages; `None` if it is on another rank.
    fn own(&self, stage: usize) -> Option<usize> {
        self.stages.iter().position(|own| own.number == stage)
    }

    /// Returns the place of a micro-batch in a stage of this rank. A new micro-batch takes a free slot, after sends
    /// from that slot are done.
    fn place(&mut self, own: usize, micro_batch: usize) -> Result<PassLocation, EngineError> {
        let stage = &mut self.stages[own];
        if let Some(slot) = stage.slot_of[micro_batch] {
            return Ok(stage.place(own, slot, micro_batch));
        }
        let slot = stage.free.pop().expect("as many slots as the schedule needs");
        stage.slot_of[micro_batch] = Some(slot);
        let place = stage.place(own, slot, micro_batch);
        self.transfers.finish(|transfer| transfer.is_in_slot(place))?;
        Ok(place)
    }
}

impl OwnStage {
    /// Returns the place of a micro-batch in a slot of this stage; `own` is the stage's index on this rank.
    fn place(&self, own: usize, slot: usize, micro_batch: usize) -> PassLocation {
        PassLocation { stage: own, slot, send_buffer: micro_batch % self.send_buffers.max(1) }
    }
}

impl InFlight {
    /// True if the message is sent from the output of a slot.
    fn is_in_slot(&self, at: PassLocation) -> bool {
        matches!(self, Self::Sent(place, StageBoundary::Output) if (place.stage, place.slot) == (at.stage, at.slot))
    }

    /// True if the message is sent from a send buffer.
    fn is_in_send_buffer(&self, at: PassLocation) -> bool {
        matches!(self, Self::Sent(place, StageBoundary::InputGradient)
            if (place.stage, place.send_buffer) == (at.stage, at.send_buffer))
    }
}
