//! Memory of cached experts, and the reads that fill it.

use std::{cell::RefCell, collections::HashMap};

use lockstep_engine::EngineError;
use lockstep_graph::ExpertSource;
use lockstep_plan::{MemoryCategory, ParameterId, aligned_buffer_bytes};
use lockstep_tensor::{Arena, BlockLayout, Buffer, DiskError, DiskTraffic, Matrix, Shape, Ticket};

use super::{
    slots::{ExpertSlots, MatrixId, StackSize},
    stacks::{ExpertRoom, ExpertStack},
};
use crate::{
    stream::{READ_BYTES, WeightFiles},
    weight_form::matrix_of,
};

/// Matrices of experts in memory, and the files that the others are read from.
#[derive(Debug)]
pub(crate) struct ExpertCache {
    state: RefCell<State>,
}

#[derive(Debug)]
struct State {
    files: WeightFiles,
    /// Stacks in the order of their use.
    stacks: Vec<ExpertStack>,
    /// Index of each stack.
    indices: HashMap<ParameterId, usize>,
    slots: ExpertSlots,
    memory: Buffer,
    slot_bytes: usize,
    /// Reads of each slot that nobody has waited for.
    reads: Vec<Vec<Ticket>>,
    /// True if the experts of the unit that runs are known.
    is_routed: bool,
    /// Failure of a read, until the next unit begins.
    failure: Option<DiskError>,
}

impl ExpertCache {
    /// Allocates the memory of a cache of stacks.
    ///
    /// # Errors
    /// If memory runs out.
    pub(crate) fn new(
        files: WeightFiles,
        mut stacks: Vec<ExpertStack>,
        room: ExpertRoom,
        arena: &Arena,
    ) -> Result<Self, EngineError> {
        stacks.sort_by_key(|stack| (stack.unit, stack.id.0));
        let sizes =
            stacks.iter().map(|stack| StackSize { unit: stack.unit, experts: stack.places.len() }).collect();
        let state = State {
            files,
            indices: stacks.iter().enumerate().map(|(index, stack)| (stack.id, index)).collect(),
            stacks,
            slots: ExpertSlots::new(sizes, room.slots, room.window()),
            memory: arena.allocate(aligned_buffer_bytes(room.bytes()), MemoryCategory::Parameters)?,
            slot_bytes: room.slot_bytes,
            reads: (0..room.slots).map(|_| Vec::new()).collect(),
            is_routed: false,
            failure: None,
        };
        Ok(Self { state: RefCell::new(state) })
    }

    /// Begins a unit, whose experts are not known yet.
    ///
    /// # Errors
    /// If a read for the unit before failed.
    pub(crate) fn begin(&self) -> Result<(), EngineError> {
        let mut state = self.state.borrow_mut();
        state.is_routed = false;
        state.failure.take().map_or(Ok(()), |failure| Err(failure.into()))
    }

    /// Returns true if the cache has this stack.
    pub(crate) fn has(&self, stack: ParameterId) -> bool {
        self.state.borrow().indices.contains_key(&stack)
    }

    /// Returns the traffic of the disk since the last call.
    pub(crate) fn take_traffic(&self) -> DiskTraffic {
        self.state.borrow_mut().files.take_traffic()
    }
}

impl ExpertSource for ExpertCache {
    fn for_each(&self, stack: ParameterId, experts: &[usize], multiply: &mut dyn FnMut(usize, Matrix<'_>)) {
        let state = &mut *self.state.borrow_mut();
        let stack = state.indices[&stack];
        if !std::mem::replace(&mut state.is_routed, true) {
            state.slots.route(state.stacks[stack].unit, experts);
        }
        state.start_reads();
        let mut left = experts.to_vec();
        while state.failure.is_none() && !left.is_empty() {
            let expert = left.remove(state.first_to_use(stack, &left));
            match state.fetch((stack, expert)) {
                Ok(slot) => {
                    multiply(expert, state.matrix(slot, (stack, expert)));
                    state.slots.used(slot);
                    state.start_reads();
                }
                Err(failure) => state.failure = Some(failure),
            }
        }
    }
}

impl State {
    /// Returns the index of the expert to use next: one in memory, else one that is being read.
    fn first_to_use(&self, stack: usize, experts: &[usize]) -> usize {
        let slot = |expert: usize| self.slots.slot_of((stack, expert));
        let in_memory = |&expert: &usize| slot(expert).is_some_and(|slot| self.reads[slot].is_empty());
        let in_slot = |&expert: &usize| slot(expert).is_some();
        experts.iter().position(in_memory).or_else(|| experts.iter().position(in_slot)).unwrap_or(0)
    }

    /// Starts the reads for which there are slots.
    fn start_reads(&mut self) {
        while self.failure.is_none()
            && let Some((slot, matrix)) = self.slots.next_read()
        {
            if let Err(failure) = self.start_read(slot, matrix) {
                self.failure = Some(failure);
            }
        }
    }

    /// Starts to read a matrix into a slot, once the reads of the one before have ended.
    fn start_read(&mut self, slot: usize, (stack, expert): MatrixId) -> Result<(), DiskError> {
        let before = self.files.finish(&mut self.reads[slot]);
        let extent = self.stacks[stack].extent(expert);
        self.reads[slot] = self.files.start(&[extent], &mut self.memory, slot * self.slot_bytes, READ_BYTES);
        before
    }

    /// Waits until a matrix is in memory, and returns its slot.
    fn fetch(&mut self, matrix: MatrixId) -> Result<usize, DiskError> {
        let (slot, is_read) = self.slots.slot_for(matrix);
        let started = if is_read { self.start_read(slot, matrix) } else { Ok(()) };
        let read = started.and_then(|()| self.files.finish(&mut self.reads[slot]));
        read.map(|()| slot).inspect_err(|_| self.slots.forget(slot))
    }

    /// Returns the matrix in a slot.
    fn matrix(&self, slot: usize, (stack, expert): MatrixId) -> Matrix<'_> {
        let ExpertStack { elements, shape, .. } = self.stacks[stack];
        let start = slot * self.slot_bytes + self.stacks[stack].start(expert);
        let form = (elements, BlockLayout::Rows);
        let view = |dtype, shape: Shape| Some(self.memory.view(dtype, start, shape));
        matrix_of(form, Shape::from(shape), view).expect("a matrix of whole blocks")
    }
}
