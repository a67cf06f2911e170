//! A rank's part in a pipeline: it does what its list of the schedule says, in that order and nothing else.
//!
//! Messages are lent to the transport where they lie: an output in its frame, a gradient in its slot. Sends and receives
//! only begin where they stand in the list; a pass waits for what it needs, and memory that is used again for what was sent
//! from it. Between two stages of one rank values are copied.

use std::{ops::Range, sync::Arc, time::Duration};

use lockstep_comm::{Collective, CommError, Deadline, Group, Lent, Pending};
use lockstep_graph::{Activity, Cost, Program};
use lockstep_model::RecordedModel;
use lockstep_plan::{
    DType,
    schedule::{Action, Message, Pass, PassKind, Schedule},
};
use lockstep_tensor::CpuQueue;

use crate::{
    Gradients, HostBatch, Runner, Weights,
    reducer::Reducer,
    runner::{Half, StageMemory, boundary_bytes},
};

/// How a model is cut into stages, and what each rank of the pipeline does with them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PipelinePlan {
    /// What each rank does in a step.
    pub schedule: Schedule,
    /// How many units each stage has, from the model's first one on.
    pub stages: Vec<usize>,
}

impl PipelinePlan {
    /// The units of a stage.
    pub fn units_of(&self, stage: usize) -> Range<usize> {
        let start = self.stages[..stage].iter().sum();
        start..start + self.stages[stage]
    }

    /// What a rank needs for its stages.
    pub(crate) fn memory_of(&self, rank: usize) -> Vec<StageMemory> {
        let passes = || self.schedule.passes(rank);
        let stage = |stage: usize| StageMemory {
            units: self.units_of(stage),
            slots: self.slots_of(rank, stage),
            splits_backward: passes()
                .any(|pass| pass.stage == stage && pass.kind == PassKind::BackwardWeight),
        };
        self.schedule.stages_of(rank).map(stage).collect()
    }

    /// How many micro-batches are in a stage at once: from the receive, or the forward, to the last pass.
    fn slots_of(&self, rank: usize, stage: usize) -> usize {
        let (mut taken, mut most) = (vec![false; self.schedule.micro_batches()], 0);
        for action in self.schedule.actions(rank) {
            match *action {
                Action::Receive(message) if message.is_activation() && message.to == stage => {
                    taken[message.micro_batch] = true;
                }
                Action::Compute(pass) if pass.stage == stage => match pass.kind {
                    PassKind::Forward => taken[pass.micro_batch] = true,
                    kind => taken[pass.micro_batch] = !kind.makes_weight_gradient(),
                },
                _ => {}
            }
            most = most.max(taken.iter().filter(|taken| **taken).count());
        }
        most
    }
}

/// Everything a pass works with, beside the runner.
pub(crate) struct Work<'a> {
    pub(crate) model: &'a RecordedModel,
    pub(crate) queue: &'a CpuQueue,
    pub(crate) weights: Weights<'a>,
    pub(crate) runner: &'a mut Runner,
    pub(crate) gradients: &'a mut Gradients,
    pub(crate) reducer: Option<&'a mut Reducer>,
    pub(crate) seed_gradient: f32,
}

/// A rank of a pipeline.
#[derive(Debug)]
pub(crate) struct Pipeline {
    plan: Arc<PipelinePlan>,
    /// The ranks of the pipeline.
    group: Group,
    limit: Duration,
    /// The own stages, in their order.
    stages: Vec<OwnStage>,
    sends: Vec<Sent>,
    receives: Vec<(Message, Pending)>,
    /// The loss of each micro-batch, where the head is.
    losses: Vec<f64>,
}

#[derive(Debug)]
struct OwnStage {
    number: usize,
    /// The slot of each micro-batch that is in the stage.
    slot_of: Vec<Option<usize>>,
    /// The slot that each was in last: what it left there is sent right after its last pass.
    left: Vec<usize>,
    free: Vec<usize>,
}

/// A message that may still be on its way, and the memory that it is in: own stage and slot.
#[derive(Debug)]
struct Sent {
    place: (usize, usize),
    pending: Pending,
}

impl Pipeline {
    /// A rank of `group`, whose ranks are those of the pipeline; no wait is longer than `limit`.
    pub(crate) fn new(plan: Arc<PipelinePlan>, group: Group, limit: Duration) -> Self {
        let micro_batches = plan.schedule.micro_batches();
        let rank = group.rank();
        let memory = plan.memory_of(rank);
        let stage = |(number, memory): (usize, &StageMemory)| OwnStage {
            number,
            slot_of: vec![None; micro_batches],
            left: vec![0; micro_batches],
            free: (0..memory.slots).rev().collect(),
        };
        let stages = plan.schedule.stages_of(rank).zip(&memory).map(stage).collect();
        let (sends, receives, losses) = (Vec::new(), Vec::new(), vec![0.0; micro_batches]);
        Self { plan, group, limit, stages, sends, receives, losses }
    }

    /// The micro-batches of a step.
    pub(crate) fn micro_batches(&self) -> usize {
        self.losses.len()
    }

    /// Does what the list says for one step, until gradients are on their way to be summed; returns the sum of the losses, which is
    /// zero where the head is not.
    ///
    /// # Errors
    /// [`CommError`].
    ///
    /// # Panics
    /// If there are fewer batches than the schedule has micro-batches.
    pub(crate) fn run<'b>(
        &mut self,
        work: &mut Work<'_>,
        batches: impl Iterator<Item = HostBatch<'b>> + Clone,
    ) -> Result<f64, CommError> {
        self.losses.fill(0.0);
        let plan = Arc::clone(&self.plan);
        for action in plan.schedule.actions(self.group.rank()) {
            match *action {
                Action::Compute(pass) => {
                    let batch = batches.clone().nth(pass.micro_batch);
                    self.compute(work, pass, &batch.expect("as many batches as the schedule has"))?;
                }
                Action::Send(message) => self.send(work, message)?,
                Action::Receive(message) => self.receive(work, message)?,
                Action::ReduceGradients { stage } => {
                    for unit in plan.units_of(stage).rev() {
                        if let Some(reducer) = &mut work.reducer {
                            work.gradients.reduce_unit(work.queue, unit, reducer)?;
                        }
                    }
                }
                Action::Step => {}
            }
        }
        for Sent { pending, .. } in self.sends.drain(..) {
            pending.wait(Deadline::after(self.limit))?;
        }
        Ok(self.losses.iter().sum())
    }

    /// The forward alone of a micro-batch, on all ranks; returns the sum of its losses, which is zero where the head is not.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn evaluate(
        &mut self,
        (model, queue, weights): (&RecordedModel, &CpuQueue, Weights<'_>),
        runner: &mut Runner,
        batch: &HostBatch<'_>,
    ) -> Result<f64, CommError> {
        let stages = self.plan.schedule.stages();
        let mut loss_sum = 0.0;
        for own in 0..self.stages.len() {
            let number = self.stages[own].number;
            let bytes = boundary_bytes(model);
            runner.load(own, 0, batch);
            if number > 0 {
                let from = self.plan.schedule.rank_of(number - 1);
                match self.own(number - 1) {
                    Some(before) => runner.hand_on(model, queue, (before, 0), (own, 0)),
                    None => {
                        let input = runner.slot_mut(own, 0).input.as_mut();
                        let loan = input.expect("a stage that follows another").lend(0..bytes);
                        let receive = Collective::Receive { output: Lent::new(loan, DType::U8), from };
                        self.start(receive)?.wait(Deadline::after(self.limit))?;
                    }
                }
            }
            runner.forward_stage(model, (own, 0), queue, weights, Program::forward)?;
            if number + 1 == stages {
                loss_sum = runner.loss_sum_of(model, own, 0);
            } else if self.own(number + 1).is_none() {
                let to = self.plan.schedule.rank_of(number + 1);
                let loan = self.lend_output(model, runner, (own, 0));
                self.start(Collective::Send { input: loan, to })?.wait(Deadline::after(self.limit))?;
            }
        }
        Ok(loss_sum)
    }

    fn compute(&mut self, work: &mut Work<'_>, pass: Pass, batch: &HostBatch<'_>) -> Result<(), CommError> {
        let Pass { kind, stage, micro_batch } = pass;
        let own = self.own(stage).expect("a rank's list has passes of its stages");
        let (model, queue, weights) = (work.model, work.queue, work.weights);
        if kind == PassKind::Forward {
            let place = (own, self.slot(own, micro_batch)?);
            work.runner.load(place.0, place.1, batch);
            if stage > 0 {
                self.await_message(work, Message { from: stage - 1, to: stage, micro_batch }, place)?;
            }
            let forward = Program::forward_for_backward;
            return work.runner.forward_stage(model, place, queue, weights, forward);
        }
        let place = (own, self.slot(own, micro_batch)?);
        if kind.makes_input_gradient() && stage + 1 < self.plan.schedule.stages() {
            self.await_message(work, Message { from: stage + 1, to: stage, micro_batch }, place)?;
        }
        if kind.makes_weight_gradient() {
            work.gradients.begin_micro_batch(queue, work.runner.own_tokens(batch.ids));
        }
        let half = if kind == PassKind::BackwardInput { Half::Inputs } else { Half::Both };
        if kind.makes_input_gradient() {
            let (gradients, seed) = (&mut *work.gradients, work.seed_gradient);
            work.runner.backward_stage(model, place, queue, weights, gradients, seed, half, |_, _| Ok(()))?;
            if stage + 1 == self.plan.schedule.stages() {
                self.losses[micro_batch] = work.runner.loss_sum_of(model, place.0, place.1);
            }
            if stage > 0
                && let Some(before) = self.own(stage - 1)
            {
                let to = (before, self.slot(before, micro_batch)?);
                work.runner.hand_back(model, queue, place, to);
            }
        } else {
            work.runner.weights_stage(model, place, queue, weights, work.gradients)?;
        }
        if kind.makes_weight_gradient() {
            let stage = &mut self.stages[own];
            stage.slot_of[micro_batch] = None;
            stage.left[micro_batch] = place.1;
            stage.free.push(place.1);
        }
        Ok(())
    }

    /// Waits until what a pass needs of another stage is in its slot.
    fn await_message(
        &mut self,
        work: &mut Work<'_>,
        message: Message,
        place: (usize, usize),
    ) -> Result<(), CommError> {
        if let Some(from) = self.own(message.from) {
            if message.is_activation() {
                let from = (from, self.slot(from, message.micro_batch)?);
                work.runner.hand_on(work.model, work.queue, from, place);
            }
            return Ok(());
        }
        let begin = work.runner.timeline().begin();
        let index = self.receives.iter().position(|(other, _)| *other == message);
        let (_, pending) = self.receives.swap_remove(index.expect("a receive stands before what needs it"));
        pending.wait(Deadline::after(self.limit))?;
        work.runner.timeline().end(begin, || (Activity::of_step("wait for a stage"), Cost::default()));
        Ok(())
    }

    fn send(&mut self, work: &mut Work<'_>, message: Message) -> Result<(), CommError> {
        let own = self.own(message.from).expect("a rank's list has sends of its stages");
        let to = self.plan.schedule.rank_of(message.to);
        let OwnStage { slot_of, left, .. } = &self.stages[own];
        let slot = slot_of[message.micro_batch].unwrap_or(left[message.micro_batch]);
        let place = (own, slot);
        let input = if message.is_activation() {
            self.lend_output(work.model, work.runner, place)
        } else {
            let bytes = boundary_bytes(work.model);
            let gradient = work.runner.slot_mut(own, slot).input_gradient.as_mut();
            let loan = gradient.expect("a stage that follows another").lend(0..bytes);
            Lent::new(loan, DType::U8)
        };
        let pending = self.start(Collective::Send { input, to })?;
        self.sends.push(Sent { place, pending });
        Ok(())
    }

    fn receive(&mut self, work: &mut Work<'_>, message: Message) -> Result<(), CommError> {
        let own = self.own(message.to).expect("a rank's list has receives of its stages");
        let slot = self.slot(own, message.micro_batch)?;
        let bytes = boundary_bytes(work.model);
        let slot = work.runner.slot_mut(own, slot);
        let buffer = if message.is_activation() { &mut slot.input } else { &mut slot.output_gradient };
        let loan = buffer.as_mut().expect("a stage has memory for what others send it").lend(0..bytes);
        let from = self.plan.schedule.rank_of(message.from);
        let pending = self.start(Collective::Receive { output: Lent::new(loan, DType::U8), from })?;
        self.receives.push((message, pending));
        Ok(())
    }

    fn start(&self, collective: Collective<Lent, Lent>) -> Result<Pending, CommError> {
        let pending = self.group.start(collective, Deadline::after(self.limit))?;
        self.group.progress()?;
        Ok(pending)
    }

    fn lend_output(&self, model: &RecordedModel, runner: &mut Runner, (own, slot): (usize, usize)) -> Lent {
        let last = self.plan.units_of(self.stages[own].number).end - 1;
        let frames = &mut runner.slot_mut(own, slot).frames;
        let frame = frames.last_mut().expect("a stage has units");
        Lent::new(frame.lend(model.program(last).output_bytes()), DType::U8)
    }

    /// The place of a stage among the own ones.
    fn own(&self, stage: usize) -> Option<usize> {
        self.stages.iter().position(|own| own.number == stage)
    }

    /// The slot of a micro-batch in an own stage: a free one if it comes only now. What was sent from there has left.
    fn slot(&mut self, own: usize, micro_batch: usize) -> Result<usize, CommError> {
        if let Some(slot) = self.stages[own].slot_of[micro_batch] {
            return Ok(slot);
        }
        let slot = self.stages[own].free.pop().expect("as many slots as the schedule needs");
        self.stages[own].slot_of[micro_batch] = Some(slot);
        while let Some(index) = self.sends.iter().position(|sent| sent.place == (own, slot)) {
            self.sends.swap_remove(index).pending.wait(Deadline::after(self.limit))?;
        }
        Ok(slot)
    }
}
