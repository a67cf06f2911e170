//! A group's operations on one rank: started immediately, carried out in order, each as far as the other ranks permit.
//!
//! Nothing here blocks. A step that must wait returns, and is retried when something may have changed.
//!
//! Small data is copied to the rank's small slot when its operation starts, and all ranks read it there. For larger data the
//! rank publishes its location. Data in shared memory is read in place, and reductions write it in place; such an operation
//! completes when all ranks have finished. Other data goes through chunks, turn by turn.

use std::{
    collections::VecDeque,
    sync::{Arc, atomic::Ordering},
};

use lockstep_tensor::Workers;

use super::{
    buffer_location::BufferLocation,
    layout::{RING, SMALL_BYTES, SMALL_SLOTS},
    members::{Counter, Members, has_reached},
    operation::{Chunks, Running, Step, post},
    point_to_point::PointToPoint,
};
use crate::{
    CommError, OperationContext,
    sequence::{Lane, SequenceNumbers},
    task::{Flow, Task},
    transport::Ticket,
};

/// Operations of one group.
#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) members: Members,
    numbers: SequenceNumbers,
    /// Number of operations finished, as far as this rank's part is concerned.
    finished: u32,
    /// Number of operations that every member has finished.
    finished_by_all: u32,
    /// Operations started and not yet complete. Finished ones come first.
    tasks: VecDeque<Running>,
    pub(crate) chunks: Chunks,
    pub(crate) point_to_point: PointToPoint,
}

impl Queue {
    pub(crate) fn new(members: Members) -> Self {
        let point_to_point = PointToPoint::new(members.len());
        Self {
            members,
            numbers: SequenceNumbers::default(),
            finished: 0,
            finished_by_all: 0,
            tasks: VecDeque::new(),
            chunks: Chunks::default(),
            point_to_point,
        }
    }

    /// Returns true if `task` can start: no rank still reads the slots that it reuses.
    pub(crate) fn has_room(&mut self, task: &Task) -> bool {
        match task.flow {
            Flow::Send { .. } | Flow::Receive { .. } => return true,
            _ => {}
        }
        let slots = if self.is_small(task) { SMALL_SLOTS } else { RING };
        let goal = self.begun().wrapping_add(1).wrapping_sub(slots);
        if !has_reached(self.finished_by_all, goal) {
            self.update_finished_by_all();
        }
        has_reached(self.finished_by_all, goal)
    }

    /// Returns the sequence number of an operation if it started now.
    pub(crate) fn next(&self, task: &Task) -> u32 {
        self.numbers.next(Lane::of(&task.flow))
    }

    /// Starts an operation. [`Queue::has_room`] must be true for it.
    pub(crate) fn begin(&mut self, task: Task, recorded: u64, ticket: Arc<Ticket>) {
        let sequence = self.numbers.start(Lane::of(&task.flow));
        let running = Running { task, sequence, step: Step::Meet, window: 0, recorded, ticket };
        if matches!(running.task.flow, Flow::Send { .. } | Flow::Receive { .. }) {
            return self.point_to_point.begin(running);
        }
        let (source, target) = self.places(&running.task);
        let posted = self.members.posted(self.members.own, sequence);
        post(posted, running.task.call, source, target);
        if source == BufferLocation::Small {
            let slot = self.members.segments.layout.small_slot(self.members.index, sequence);
            let from = running.task.source;
            // SAFETY: the source is the caller's for the duration of the operation. The slot is this rank's, and `has_room` has
            // established that no rank reads it any more.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    from.pointer,
                    self.members.at(self.members.own, slot),
                    from.bytes(),
                )
            };
        }
        if let Flow::Unknown { sends, receives } = &running.task.flow {
            let memory = self.members.segments.memory(self.members.ranks[self.members.own]);
            for (index, bytes) in sends.iter().chain(receives).enumerate() {
                let word = self.members.segments.layout.table(memory, self.members.index, sequence, index);
                word.store(*bytes as u64, Ordering::Relaxed);
            }
        }
        self.members.publish(Counter::Arrived, self.begun());
        self.tasks.push_back(running);
    }

    /// Returns the locations of the task's source and target for the other ranks.
    fn places(&self, task: &Task) -> (BufferLocation, BufferLocation) {
        let source =
            if self.is_small(task) { BufferLocation::Small } else { self.members.location_of(&task.source) };
        (source, self.members.location_of(&task.target))
    }

    /// Returns true if the task's source goes through the small slot.
    fn is_small(&self, task: &Task) -> bool {
        task.source.bytes() <= SMALL_BYTES
    }

    /// Advances all operations. Returns true if any made progress.
    ///
    /// # Errors
    /// If ranks called different operations.
    pub(crate) fn advance(&mut self, workers: Option<&Workers>) -> Result<bool, CommError> {
        let mut has_moved = self.point_to_point.advance(&self.members, workers)?;
        while let Some(running) =
            self.tasks.get_mut(self.finished.wrapping_sub(first(&self.tasks, self.finished)) as usize)
        {
            let before = (running.step, running.window);
            running.advance(&self.members, &mut self.chunks, workers)?;
            has_moved |= before != (running.step, running.window);
            if running.step != Step::Done {
                break;
            }
            running.stamp(&self.members, 1);
            self.finished = self.finished.wrapping_add(1);
            self.members.publish(Counter::Finished, self.finished);
        }
        while let Some(running) = self.tasks.front()
            && running.step == Step::Done
        {
            let goal = running.sequence.wrapping_add(1);
            if running.lingers(&self.members) && !has_reached(self.finished_by_all, goal) {
                self.update_finished_by_all();
                if !has_reached(self.finished_by_all, goal) {
                    break;
                }
            }
            if let Some(running) = self.tasks.pop_front() {
                running.complete();
            }
            has_moved = true;
        }
        Ok(has_moved)
    }

    /// Returns the number of collectives started.
    pub(crate) fn begun(&self) -> u32 {
        self.numbers.next(Lane::Collective)
    }

    /// Returns true if no operation is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.tasks.is_empty() && self.point_to_point.is_idle()
    }

    /// Drops all operations in flight.
    pub(crate) fn abandon(&mut self) {
        self.tasks.clear();
        self.point_to_point.abandon();
    }

    /// Returns the world rank that the first incomplete operation waits for, and the operation.
    pub(crate) fn awaited(&self) -> Option<(usize, OperationContext)> {
        let running = self.tasks.iter().find(|running| running.step != Step::Done).or(self.tasks.front());
        let Some(running) = running else { return self.point_to_point.awaited(&self.members) };
        let behind = match running.step {
            Step::Meet => self.members.behind(Counter::Arrived, running.sequence.wrapping_add(1)),
            Step::Done => self.members.behind(Counter::Finished, running.sequence.wrapping_add(1)),
            Step::Fill | Step::Filled | Step::Combined => {
                self.members.behind(Counter::Turn, self.chunks.turn)
            }
        };
        Some((self.members.ranks[behind.unwrap_or(self.members.own)], running.context(&self.members)))
    }

    /// Returns the world rank that the start of another operation waits for: the first with too few finished operations.
    pub(crate) fn slowest(&self) -> usize {
        let behind = self.members.behind(Counter::Finished, self.finished_by_all.wrapping_add(1));
        self.members.ranks[behind.unwrap_or(self.members.own)]
    }

    fn update_finished_by_all(&mut self) {
        let members = 0..self.members.len();
        let counts = members.map(|member| self.members.count(member, Counter::Finished));
        let least = counts.reduce(|least, count| if has_reached(least, count) { count } else { least });
        self.finished_by_all = least.unwrap_or(self.finished);
    }
}

/// Returns the sequence number of the first of `tasks`; `next` if there is none.
fn first(tasks: &VecDeque<Running>, next: u32) -> u32 {
    tasks.front().map_or(next, |running| running.sequence)
}
