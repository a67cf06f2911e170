//! Devices with memory of their own, and the order in which work is done on them.
//!
//! The CPU runs every kernel before its call returns, so an [`Event`](crate::Event) of its queue is always complete and a
//! [`Pending`](crate::Pending) value is ready. Any other [`Device`](crate::Device) runs its [`Queue`] asynchronously, as a CUDA stream does.
//! Everything other than that queue reaches the device's memory in one of three ways:
//!
//! ```text
//! the host                   View::write, View::read          copies that are enqueued
//! a collective, a disk       Buffer::lend, View::hand_over    after an event recorded at that call
//! the allocator              drop of a Buffer                 once the queue has passed the drop
//! ```

use crate::{Arena, CpuQueue, Queue, TensorError};

impl Arena {
    /// Creates a queue of the device that holds the buffers, with `threads` host threads including the calling one.
    /// Host memory that kernels need is booked here as workspace.
    ///
    /// # Errors
    /// If the threads cannot be started ([`TensorError::ThreadPool`]) or there is not enough memory
    /// ([`TensorError::OutOfMemory`]).
    pub fn queue(&self, threads: usize) -> Result<Box<dyn Queue>, TensorError> {
        match self.device() {
            Some(device) => device.queue(threads, &self.on_host()),
            None => Ok(Box::new(CpuQueue::new(threads, self)?)),
        }
    }
}
