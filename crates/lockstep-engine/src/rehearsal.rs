//! A rehearsal of a pipeline: its ranks follow their lists and send each other messages as in training, but a pass only takes
//! its time, asleep.
//!
//! So a schedule can be held against its simulation on a machine with fewer cores than ranks. Everything that stands between
//! passes is the training's own: slots, messages, and the sum over all ranks before the update of the weights.

use std::{
    ops::Range,
    thread,
    time::{Duration, Instant},
};

use lockstep_comm::{Deadline, Group, Lent};
use lockstep_graph::Timeline;
use lockstep_plan::{
    DType, MemoryCategory,
    exact::ExactSum,
    schedule::{Message, Pass, StageCost},
};
use lockstep_tensor::{Arena, Buffer, TensorError};

use crate::{
    EngineError, Groups, StepTimes,
    passes::{Border, Passes, Place},
    pipeline::Pipeline,
};

/// The end of a pass is awaited awake: a sleeper is woken late.
const AWAKE: Duration = Duration::from_micros(200);

/// A rank of a pipeline that rehearses.
#[derive(Debug)]
pub struct Rehearsal {
    pipeline: Pipeline,
    groups: Groups,
    sleeper: Sleeper,
    limit: Duration,
}

impl Rehearsal {
    /// A rank of the pipeline of `groups`, whose passes cost `costs`, one of each stage, and whose messages have so many bytes.
    ///
    /// # Errors
    /// [`TensorError::OutOfMemory`].
    ///
    /// # Panics
    /// If there is no pipeline, or there are costs of another number of stages.
    pub fn new(
        groups: &Groups,
        costs: &[StageCost],
        message_bytes: usize,
        arena: &Arena,
    ) -> Result<Self, EngineError> {
        let plan = groups.plan().expect("a rehearsal is of several ranks");
        assert_eq!(costs.len(), plan.layout().stages.len(), "costs of another number of stages");
        let border = || arena.allocate_zeroed(message_bytes, MemoryCategory::Activations);
        let slot = || Ok([border()?, border()?, border()?]);
        let stages = &plan.passes.stages;
        let slots = stages.iter().map(|stage| (0..stage.slots).map(|_| slot()).collect());
        let outboxes = stages.iter().map(|stage| (0..stage.outboxes()).map(|_| border()).collect());
        let sleeper = Sleeper {
            costs: costs.to_vec(),
            slots: slots.collect::<Result<_, TensorError>>()?,
            outboxes: outboxes.collect::<Result<_, TensorError>>()?,
            message_bytes,
            timeline: Timeline::default(),
        };
        let pipeline = groups.pipeline().expect("a rehearsal is of a pipeline");
        let limit = groups.limit().unwrap_or(Duration::MAX);
        Ok(Self { pipeline, groups: groups.clone(), sleeper, limit })
    }

    /// Rehearses a step, which all ranks begin and end together.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn step(&mut self) -> Result<&StepTimes, EngineError> {
        self.groups.world().map_or(Ok(()), |group: &Group| group.barrier(Deadline::after(self.limit)))?;
        self.pipeline.run(&mut self.sleeper)?;
        // What clipping and the guard against NaN need before the update.
        self.groups.sum_over_model(&ExactSum::default())?;
        self.pipeline.end_step();
        Ok(self.pipeline.times())
    }
}

/// Takes the time of passes.
#[derive(Debug)]
struct Sleeper {
    costs: Vec<StageCost>,
    /// For each own stage and slot its input, its output and the gradient of that.
    slots: Vec<Vec<[Buffer; 3]>>,
    /// For each own stage gradients of its input.
    outboxes: Vec<Vec<Buffer>>,
    message_bytes: usize,
    timeline: Timeline,
}

impl Passes for Sleeper {
    fn load(&mut self, _: Place, _: usize) {}

    fn run(&mut self, pass: Pass, _: Place) -> Result<(), EngineError> {
        let ms = self.costs[pass.stage].duration_ms(pass.kind);
        sleep_until(Instant::now() + Duration::from_secs_f64(ms / 1e3));
        Ok(())
    }

    fn hand_over(&mut self, _: Message, _: Place, _: Place) {}

    fn lend(&mut self, Place { stage, slot, outbox }: Place, border: Border) -> Lent {
        let [input, output, output_gradient] = &mut self.slots[stage][slot];
        let buffer = match border {
            Border::Input => input,
            Border::InputGradient => &mut self.outboxes[stage][outbox],
            Border::Output => output,
            Border::OutputGradient => output_gradient,
        };
        Lent::new(buffer.lend(0..self.message_bytes), DType::U8)
    }

    fn reduce(&mut self, _: Range<usize>) -> Result<(), EngineError> {
        Ok(())
    }

    fn loss_sum(&mut self, _: Place) -> f64 {
        0.0
    }

    fn timeline(&self) -> &Timeline {
        &self.timeline
    }
}

/// Sleeps, and is awake in time.
fn sleep_until(end: Instant) {
    let left = end.saturating_duration_since(Instant::now());
    if left > AWAKE {
        thread::sleep(left - AWAKE);
    }
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}

#[cfg(test)]
mod tests {
    use lockstep_comm::{World, WorldOptions};
    use lockstep_plan::{
        CheckedPlan,
        schedule::{Kind, Schedule},
    };

    use super::*;

    /// What each of four ranks did in one step of `kind`, with passes of `pass_ms`.
    fn rehearse(kind: Kind, micro_batches: usize, pass_ms: f64) -> (Schedule, Vec<StepTimes>) {
        const RANKS: usize = 4;
        let schedule = Schedule::new(kind, RANKS, micro_batches, kind.chunks().0).unwrap();
        let plan = CheckedPlan::of_schedule(schedule.clone());
        let cost = StageCost {
            forward_ms: pass_ms,
            backward_input_ms: pass_ms,
            backward_weight_ms: pass_ms,
            ..StageCost::default()
        };
        let costs = vec![cost; schedule.stages()];
        let world = WorldOptions { arena_bytes: 1 << 26, ..WorldOptions::default() };
        let groups = World::in_process(RANKS, world).unwrap();
        let times = thread::scope(|scope| {
            let rank = |group: Group| {
                let (plan, costs) = (&plan, &costs);
                scope.spawn(move || {
                    let arena = group.arena(&[MemoryCategory::Activations]);
                    let plan = plan.rank(group.rank());
                    let groups = Groups::new(group, plan, Duration::from_secs(60)).unwrap();
                    let mut rehearsal = Rehearsal::new(&groups, costs, 1 << 20, &arena).unwrap();
                    rehearsal.step().unwrap();
                    rehearsal.step().unwrap().clone()
                })
            };
            let threads: Vec<_> = groups.into_iter().map(rank).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        (schedule, times)
    }

    #[test]
    fn a_pass_begins_when_what_it_needs_is_there_and_all_end_together() {
        for kind in Kind::ALL {
            let (schedule, times) = rehearse(kind, 8, 0.5);
            let when = |pass: Pass| {
                let mut all = times.iter().flat_map(|times| &times.passes);
                *all.find(|time| time.pass == pass).unwrap_or_else(|| panic!("{kind}: {pass} never ran"))
            };
            for (rank, times) in times.iter().enumerate() {
                let ran: Vec<Pass> = times.passes.iter().map(|time| time.pass).collect();
                assert_eq!(ran, schedule.passes(rank).collect::<Vec<_>>(), "{kind}, rank {rank}");
                for time in &times.passes {
                    assert!(time.end - time.begin >= Duration::from_micros(500), "{kind}: {time:?}");
                    let Pass { kind: pass_kind, stage, micro_batch } = time.pass;
                    if pass_kind == lockstep_plan::schedule::PassKind::Forward && stage > 0 {
                        let before = when(Pass { stage: stage - 1, ..time.pass });
                        assert!(before.end <= time.begin, "{kind}: {micro_batch} {before:?} {time:?}");
                    }
                }
            }
            let last_passed = times.iter().map(|times| times.passed).max().unwrap();
            assert!(times.iter().all(|times| times.end >= last_passed), "{kind}: {times:?}");
        }
    }
}
