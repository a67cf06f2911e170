//! Allocation of communication buffers that suffice for all programs of a rank.

use std::cell::RefCell;

use lockstep_plan::{MemoryCategory, RingSizes};
use lockstep_tensor::{Arena, TensorError};

use crate::{
    buffers::{CommunicationBuffer, Ring},
    program::Program,
};

impl Ring {
    /// Allocates buffers that suffice for any of `programs`; `None` if none of them uses ring attention.
    ///
    /// # Errors
    /// If the arena is out of memory.
    pub fn new<'a>(
        mut programs: impl Iterator<Item = &'a Program> + Clone,
        arena: &Arena,
    ) -> Result<Option<Self>, TensorError> {
        let Some(program) = programs.clone().max_by_key(|program| program.ring_elements()) else {
            return Ok(None);
        };
        let elements = program.ring_elements();
        if elements == 0 {
            return Ok(None);
        }
        let slots = |bytes: [usize; 3]| -> Result<_, TensorError> {
            let [a, b, c] = bytes.map(|bytes| arena.allocate_zeroed(bytes, MemoryCategory::Communication));
            Ok(RefCell::new([a?, b?, c?]))
        };
        let has_gradients = programs.any(Program::has_backward);
        let sizes =
            RingSizes::new(elements, program.shapes.block.dtype, program.shapes.context.ranks, has_gradients);
        Ok(Some(Self { blocks: slots(sizes.blocks_bytes)?, gradients: slots(sizes.gradients_bytes)? }))
    }
}

impl CommunicationBuffer {
    /// Allocates memory that suffices for any of `programs`; `None` if none of them overlaps collectives with products.
    ///
    /// # Errors
    /// If the arena is out of memory.
    pub fn new<'a>(
        programs: impl Iterator<Item = &'a Program>,
        arena: &Arena,
    ) -> Result<Option<Self>, TensorError> {
        let (bytes, chunks) = programs.fold((0, 0), |(bytes, chunks), program| {
            (bytes.max(program.overlap_buffer_bytes()), chunks.max(program.transit_chunks()))
        });
        if chunks == 0 {
            return Ok(None);
        }
        let memory = RefCell::new(arena.allocate(bytes, MemoryCategory::Communication)?);
        Ok(Some(Self { memory, pending: RefCell::new((0..chunks).map(|_| None).collect()) }))
    }
}
