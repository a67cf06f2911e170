//! Buffers of communication that runs while a rank computes: blocks of ring attention, and chunks of overlapped
//! collectives.

use std::cell::RefCell;

use lockstep_comm::Pending;
use lockstep_plan::{MemoryCategory, RingSizes};
use lockstep_tensor::{Arena, Buffer, TensorError};

use crate::{
    operation::{AttentionOperation, KeySource, Operation},
    program::Program,
};

/// Send and receive buffers of ring attention for keys and values, and for their gradients.
#[derive(Debug)]
pub struct Ring {
    /// A send buffer, a receive buffer, and a copy of the block in flight for the kernels to read.
    pub(crate) blocks: RefCell<[Buffer; 3]>,
    /// f32: two buffers that are alternately added to and sent, and a receive buffer.
    pub(crate) gradients: RefCell<[Buffer; 3]>,
}

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
        let sizes = RingSizes::new(elements, program.shape.dtype, program.context.ranks, has_gradients);
        Ok(Some(Self { blocks: slots(sizes.blocks_bytes)?, gradients: slots(sizes.gradients_bytes)? }))
    }
}

impl Program {
    /// Elements of the largest block of keys and values that travels around the context-parallel group; 0 without ring attention.
    pub fn ring_elements(&self) -> usize {
        let of = |operation: &Operation| match operation {
            Operation::Attention(AttentionOperation { key_source: KeySource::Ring { .. }, k, v, .. }) => {
                self.values[k.0].elements() + self.values[v.0].elements()
            }
            _ => 0,
        };
        self.operations.iter().map(of).max().unwrap_or(0)
    }
}

/// The communication buffer and the handles of collectives that overlap with matrix products.
#[derive(Debug)]
pub struct CommunicationBuffer {
    pub(crate) memory: RefCell<Buffer>,
    pub(crate) pending: RefCell<Vec<Option<Pending>>>,
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
