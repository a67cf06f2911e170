//! A rehearsal of a pipeline: its ranks run their action lists and send each other messages as in training, but each
//! pass only sleeps for its duration.
//!
//! A schedule can thus be compared with its simulation on a machine with fewer cores than ranks. All but the passes is
//! as in training: slots, messages, and the all-reduce before the optimizer step.

use std::{
    ops::Range,
    thread,
    time::{Duration, Instant},
};

use lockstep_comm::{Deadline, Group, LentBuffer};
use lockstep_graph::Timeline;
use lockstep_plan::{
    DType, MemoryCategory,
    exact::ExactSum,
    schedule::{Message, Pass, StageCost},
};
use lockstep_tensor::{Arena, Buffer, TensorError};

use crate::{
    EngineError, Groups, StepTimes,
    passes::{PassLocation, Passes, StageBoundary},
    pipeline::Pipeline,
};

/// Time before the end of a pass that is spent in a spin loop, because a sleeping thread wakes late.
const AWAKE: Duration = Duration::from_micros(200);

/// One rank of a pipeline rehearsal.
#[derive(Debug)]
pub struct Rehearsal {
    pipeline: Pipeline,
    groups: Groups,
    sleeper: Sleeper,
    limit: Duration,
}

impl Rehearsal {
    /// Returns a rank of the pipeline of `groups`. `costs` are the costs of each stage's passes; each message has
    /// `message_bytes`.
    ///
    /// # Errors
    /// If memory runs out.
    ///
    /// # Panics
    /// If `groups` has no pipeline, or `costs` has not one entry for each stage.
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
        let send_buffers = stages.iter().map(|stage| (0..stage.send_buffers()).map(|_| border()).collect());
        let sleeper = Sleeper {
            costs: costs.to_vec(),
            slots: slots.collect::<Result<_, TensorError>>()?,
            send_buffers: send_buffers.collect::<Result<_, TensorError>>()?,
            message_bytes,
            timeline: Timeline::default(),
        };
        let pipeline = Pipeline::of(groups).expect("a rehearsal is of a pipeline");
        let limit = groups.limit().unwrap_or(Duration::MAX);
        Ok(Self { pipeline, groups: groups.clone(), sleeper, limit })
    }

    /// Rehearses a step, which all ranks begin and end together, and returns its times on this rank.
    ///
    /// # Errors
    /// If another rank is lost or does not answer in time.
    pub fn step(&mut self) -> Result<&StepTimes, EngineError> {
        self.groups.world().map_or(Ok(()), |group: &Group| group.barrier(Deadline::after(self.limit)))?;
        self.pipeline.run(&mut self.sleeper)?;
        // Clipping and the NaN guard need this all-reduce before the optimizer step.
        self.groups.sum_over_model(&ExactSum::default())?;
        self.pipeline.end_step();
        Ok(self.pipeline.times())
    }
}

/// Implementation of [`Passes`] that sleeps for the duration of each pass.
#[derive(Debug)]
struct Sleeper {
    costs: Vec<StageCost>,
    /// Input, output and output gradient, for each stage of this rank and each slot.
    slots: Vec<Vec<[Buffer; 3]>>,
    /// Input gradients, for each stage of this rank and each send buffer.
    send_buffers: Vec<Vec<Buffer>>,
    message_bytes: usize,
    timeline: Timeline,
}

impl Passes for Sleeper {
    fn load(&mut self, _: PassLocation, _: usize) {}

    fn run(&mut self, pass: Pass, _: PassLocation) -> Result<(), EngineError> {
        let ms = self.costs[pass.stage].duration_ms(pass.kind);
        sleep_until(Instant::now() + Duration::from_secs_f64(ms / 1e3));
        Ok(())
    }

    fn hand_over(&mut self, _: Message, _: PassLocation, _: PassLocation) {}

    fn lend(
        &mut self,
        PassLocation { stage, slot, send_buffer }: PassLocation,
        border: StageBoundary,
    ) -> LentBuffer {
        let [input, output, output_gradient] = &mut self.slots[stage][slot];
        let buffer = match border {
            StageBoundary::Input => input,
            StageBoundary::InputGradient => &mut self.send_buffers[stage][send_buffer],
            StageBoundary::Output => output,
            StageBoundary::OutputGradient => output_gradient,
        };
        LentBuffer::new(buffer.lend(0..self.message_bytes), DType::U8)
    }

    fn reduce(&mut self, _: Range<usize>) -> Result<(), EngineError> {
        Ok(())
    }

    fn loss_sum(&mut self, _: PassLocation) -> f64 {
        0.0
    }

    fn timeline(&self) -> &Timeline {
        &self.timeline
    }
}

/// Sleeps until shortly before `end`, then spins.
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

    /// Returns the times of each of four ranks in one step of `kind`, with passes of `pass_ms`.
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
