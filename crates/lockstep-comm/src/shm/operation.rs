//! One operation in flight in shared memory: its next step, and the agreement of all ranks on its call.

use std::sync::{Arc, atomic::Ordering};

use lockstep_tensor::Workers;

use super::{
    buffer_location::BufferLocation,
    layout::Posted,
    members::{Counter, Members},
};
use crate::{
    Call, CommError, OperationContext, record,
    task::{Comparison, Flow, Task},
    transport::Ticket,
};

/// Progress of the group's use of its chunks.
#[derive(Debug, Default)]
pub(crate) struct Chunks {
    /// Number of turns that this rank has taken.
    pub(crate) turn: u32,
    /// Number of windows that all ranks have filled.
    pub(crate) window: u32,
}

/// An operation in flight.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) task: Task,
    pub(crate) sequence: u32,
    pub(crate) step: Step,
    /// Index of the current window, if there are several.
    pub(crate) window: usize,
    /// Number in the flight recorder.
    pub(crate) recorded: u64,
    /// Completion state shared with the caller.
    pub(crate) ticket: Arc<Ticket>,
}

/// Next step of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Wait until all ranks have started the operation.
    Meet,
    /// Copy this rank's part of a window to its chunk.
    Fill,
    /// Wait until all ranks have filled their chunks.
    Filled,
    /// Wait until all ranks have written their results.
    Combined,
    Done,
}

/// Publishes the description of an operation, or of a part of one.
pub(crate) fn post(posted: &Posted, call: Call, source: BufferLocation, target: BufferLocation) {
    for (word, shared) in call.to_words().into_iter().zip(&posted.call) {
        shared.store(word, Ordering::Relaxed);
    }
    posted.source.store(source.to_word(), Ordering::Relaxed);
    posted.target.store(target.to_word(), Ordering::Relaxed);
}

/// Returns the description that a rank has published, as words.
pub(crate) fn posted_words(posted: &Posted) -> [u64; 3] {
    [0, 1, 2].map(|index: usize| posted.call[index].load(Ordering::Relaxed))
}

impl Running {
    pub(crate) fn context(&self, members: &Members) -> OperationContext {
        OperationContext { call: self.task.call, sequence: self.sequence, group: members.name() }
    }

    pub(crate) fn stamp(&self, members: &Members, which: usize) {
        let memory = members.segments.memory(members.ranks[members.own]);
        record::stamp(members.segments.layout.record(memory, self.recorded as usize), self.recorded, which);
    }

    pub(crate) fn complete(self) {
        self.ticket.complete();
    }

    pub(crate) fn advance(
        &mut self,
        members: &Members,
        chunks: &mut Chunks,
        workers: Option<&Workers>,
    ) -> Result<(), CommError> {
        if self.step == Step::Meet {
            if members.behind(Counter::Arrived, self.sequence.wrapping_add(1)).is_some() {
                return Ok(());
            }
            self.compare(members)?;
            self.stamp(members, 0);
        }
        match &self.task.flow {
            Flow::Reduction { op, blocks, receiver } => {
                let (op, blocks, receiver) = (*op, blocks.clone(), *receiver);
                self.advance_reduction(members, chunks, workers, op, &blocks, receiver);
            }
            Flow::Exchange(_) => self.advance_exchange(members, chunks, workers),
            Flow::Barrier | Flow::Unknown { .. } | Flow::Send { .. } | Flow::Receive { .. } => {
                self.step = Step::Done
            }
        }
        Ok(())
    }

    /// Returns true if other ranks may access this rank's memory after its own part is finished.
    pub(crate) fn lingers(&self, members: &Members) -> bool {
        // A target that other ranks write is also the source.
        matches!(members.source_location(members.own, self.sequence), BufferLocation::Shared(_))
    }

    pub(crate) fn comparison<'a>(&self, members: &'a Members) -> Comparison<'a> {
        Comparison { ranks: &members.ranks, context: self.context(members) }
    }

    /// Checks that all ranks made the same call, and completes the plan of an all-to-all with uneven blocks.
    fn compare(&mut self, members: &Members) -> Result<(), CommError> {
        let calls: Vec<[u64; 3]> =
            (0..members.len()).map(|member| posted_words(members.posted(member, self.sequence))).collect();
        self.comparison(members).of_calls(&calls)?;
        if matches!(self.task.flow, Flow::Unknown { .. }) {
            let word = |member: usize, index: usize| {
                let memory = members.segments.memory(members.ranks[member]);
                let table = members.segments.layout.table(memory, members.index, self.sequence, index);
                table.load(Ordering::Relaxed) as usize
            };
            self.task.flow = Flow::Exchange(self.comparison(members).of_tables(word)?);
        }
        Ok(())
    }
}
