//! Buffers of communication that runs while a rank computes: blocks of ring attention, and chunks of overlapped
//! collectives. `allocation` sizes them for programs.

use std::cell::RefCell;

use lockstep_comm::Pending;
use lockstep_tensor::Buffer;

/// Send and receive buffers of ring attention for keys and values, and for their gradients.
#[derive(Debug)]
pub struct Ring {
    /// A send buffer, a receive buffer, and a copy of the block in flight for the kernels to read.
    pub(crate) blocks: RefCell<[Buffer; 3]>,
    /// f32: two buffers that are alternately added to and sent, and a receive buffer.
    pub(crate) gradients: RefCell<[Buffer; 3]>,
}

/// The communication buffer and the handles of collectives that overlap with matrix products.
#[derive(Debug)]
pub struct CommunicationBuffer {
    pub(crate) memory: RefCell<Buffer>,
    pub(crate) pending: RefCell<Vec<Option<Pending>>>,
}
