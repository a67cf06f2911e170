//! A rank's part in a pipeline: it does what its list of the schedule says, in that order and nothing else.
//!
//! Messages are lent to the transport where they lie: an output in its frame, a gradient in its slot. Sends and receives
//! only begin where they stand in the list; a pass waits for what it needs, and memory that is used again for what was sent
//! from it. Between two stages of one rank values are copied.

use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use lockstep_comm::{Collective, Group, Lent};
use lockstep_graph::{Activity, Cost};
use lockstep_model::RecordedModel;
use lockstep_plan::schedule::{Action, Message, Pass, PassKind, Schedule};
use lockstep_plan::{RankPlan, StageMemory};
use lockstep_tensor::Kernels;

use crate::{
    EngineError, HostBatch, Runner,
    passes::{Border, PassTime, Passes, Place, StepTimes},
    runner::Purpose,
    transfers::{Job, Transfers},
    weights::WeightSource,
};

/// A rank of a pipeline.
#[derive(Debug)]
pub(crate) struct Pipeline {
    schedule: Arc<Schedule>,
    /// The ranks of the pipeline.
    group: Group,
    transfers: Transfers<InFlight>,
    /// The own stages, in their order.
    stages: Vec<OwnStage>,
    /// The loss of each micro-batch, where the head is.
    losses: Vec<f64>,
    times: StepTimes,
}

#[derive(Debug)]
struct OwnStage {
    number: usize,
    units: Range<usize>,
    /// The slot of each micro-batch that is in the stage.
    slot_of: Vec<Option<usize>>,
    /// The slot that each was in last: what it left there is sent right after its last pass.
    left: Vec<usize>,
    free: Vec<usize>,
    outboxes: usize,
}

/// A message in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum InFlight {
    /// It is sent from here.
    Sent(Place, Border),
    Received(Message),
}

impl Pipeline {
    /// The rank of `plan` in `group`, the pipeline-parallel group; no wait is longer than `limit`.
    ///
    /// # Panics
    /// If the plan has no pipeline.
    pub(crate) fn new(plan: &RankPlan, group: Group, limit: Duration) -> Self {
        let (schedule, rank) = plan.passes.pipeline.clone().expect("a plan with a pipeline");
        let micro_batches = schedule.micro_batches();
        let stage = |(number, memory): (usize, &StageMemory)| OwnStage {
            number,
            units: memory.units.clone(),
            slot_of: vec![None; micro_batches],
            left: vec![0; micro_batches],
            free: (0..memory.slots).rev().collect(),
            outboxes: memory.outboxes(),
        };
        let stages = schedule.stages_of(rank).zip(&plan.passes.stages).map(stage).collect();
        let (transfers, losses) = (Transfers::new(limit, 2 * micro_batches), vec![0.0; micro_batches]);
        let times = StepTimes::of(schedule.passes(rank).count());
        Self { schedule, group, transfers, stages, losses, times }
    }

    /// The micro-batches of a step.
    pub(crate) fn micro_batches(&self) -> usize {
        self.losses.len()
    }

    /// Does what the list says for one step, until gradients are on their way to be summed; returns the sum of the losses, which is
    /// zero where the head is not.
    ///
    /// # Errors
    /// [`EngineError`].
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

    /// The step that was [`run`](Self::run) is over.
    pub(crate) fn end_step(&mut self) {
        self.times.end = Instant::now();
    }

    /// When what was done in the last step.
    pub(crate) fn times(&self) -> &StepTimes {
        &self.times
    }

    /// The forward alone of a micro-batch, on all ranks; returns the sum of its losses, which is zero where the head is not.
    ///
    /// # Errors
    /// [`EngineError`].
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
            let place = Place::first(own);
            runner.load(place, batch);
            if number > 0 {
                let from = self.schedule.rank_of(number - 1);
                match self.own(number - 1) {
                    Some(before) => runner.hand_on(model, queue, Place::first(before), place),
                    None => {
                        let output = runner.lend(model, place, Border::Input);
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
                let input = runner.lend(model, place, Border::Output);
                self.begin(InFlight::Sent(place, Border::Output), Collective::Send { input, to })?;
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
            self.transfers.finish(|transfer| transfer.is_in_outbox(place))?;
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

    /// Waits until what a pass needs of another stage is in its slot.
    fn await_message(
        &mut self,
        passes: &mut dyn Passes,
        message: Message,
        place: Place,
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
        let (place, border) = (self.stages[own].place(own, slot, message.micro_batch), Border::sent(message));
        let input = passes.lend(place, border);
        self.begin(InFlight::Sent(place, border), Collective::Send { input, to })
    }

    fn receive(&mut self, passes: &mut dyn Passes, message: Message) -> Result<(), EngineError> {
        let own = self.own(message.to).expect("a rank's list has receives of its stages");
        let place = self.place(own, message.micro_batch)?;
        let from = self.schedule.rank_of(message.from);
        let output = passes.lend(place, Border::received(message));
        self.begin(InFlight::Received(message), Collective::Receive { output, from })
    }

    /// Begins to send or receive a message. The group's meter counts its bytes.
    fn begin(&mut self, tag: InFlight, collective: Collective<Lent, Lent>) -> Result<(), EngineError> {
        self.transfers.begin(tag, Job::Collective { group: &self.group, collective, bytes: 0 })
    }

    /// The place of a stage among the own ones.
    fn own(&self, stage: usize) -> Option<usize> {
        self.stages.iter().position(|own| own.number == stage)
    }

    /// Where a micro-batch is in an own stage: in a free slot if it comes only now. What was sent from there has left.
    fn place(&mut self, own: usize, micro_batch: usize) -> Result<Place, EngineError> {
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
    /// The place of a micro-batch that is in a slot of this stage, the own one of this number.
    fn place(&self, own: usize, slot: usize, micro_batch: usize) -> Place {
        Place { stage: own, slot, outbox: micro_batch % self.outboxes.max(1) }
    }
}

impl InFlight {
    /// True if the message is sent from the output of a slot.
    fn is_in_slot(&self, at: Place) -> bool {
        matches!(self, Self::Sent(place, Border::Output) if (place.stage, place.slot) == (at.stage, at.slot))
    }

    /// True if the message is sent from an outbox.
    fn is_in_outbox(&self, at: Place) -> bool {
        matches!(self, Self::Sent(place, Border::InputGradient)
            if (place.stage, place.outbox) == (at.stage, at.outbox))
    }
}
