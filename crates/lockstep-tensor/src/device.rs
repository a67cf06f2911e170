//! Devices with memory of their own, and the order in which work is done on them.
//!
//! The CPU runs every kernel before its call returns, so an [`Event`] of its queue is always complete and a
//! [`Pending`] value is ready. Any other [`Device`] runs its [`Queue`] asynchronously, as a CUDA stream does.
//! Everything other than that queue reaches the device's memory in one of three ways:
//!
//! ```text
//! the host                   View::write, View::read          copies that are enqueued
//! a collective, a disk       Buffer::lend, View::hand_over    after an event recorded at that call
//! the allocator              drop of a Buffer                 once the queue has passed the drop
//! ```

use std::{any::Any, fmt, ptr::NonNull, sync::Arc};

use crate::{Arena, CpuLevel, F32Products, Kernels, TensorError, View, Workers};

/// The memory that holds a buffer or a view.
#[derive(Debug, Clone, Copy)]
pub enum Place<'a> {
    /// Host memory, which any code may touch.
    Host,
    /// Memory of a device.
    Device(&'a Arc<dyn Device>),
}

/// A device with memory and a queue of its own.
///
/// Every method that takes a view is enqueued: its work runs in the order of the device's queue. The view's memory
/// stays valid until the queue has passed the call, because buffers are freed in queue order ([`Device::retire`]).
pub trait Device: fmt::Debug + Send + Sync {
    /// Allocates device memory, aligned for direct disk transfers; `None` if the device is out of memory. The
    /// contents are unspecified.
    fn allocate(&self, bytes: usize) -> Option<NonNull<u8>>;

    /// Frees memory that [`Device::allocate`] returned.
    ///
    /// # Safety
    /// The memory must come from this device with the same `bytes`, and must not be used again.
    unsafe fn free(&self, memory: NonNull<u8>, bytes: usize);

    /// Returns a handle of the queue, with `threads` host threads. Host memory that the queue needs is booked in
    /// `arena`.
    ///
    /// # Errors
    /// As [`Arena::queue`].
    fn queue(self: Arc<Self>, threads: usize, arena: &Arena) -> Result<Box<dyn Queue>, TensorError>;

    /// Returns an event that completes when everything enqueued so far has run.
    fn record(&self) -> Event;

    /// Enqueues a copy of `bytes` from the host to a view of the same size.
    fn write(&self, to: View<'_>, bytes: &[u8]);

    /// Enqueues a copy of a view's bytes to the host.
    fn read(&self, from: View<'_>) -> Pending<'static, Vec<u8>>;

    /// Enqueues a fill of a view with zero bytes.
    fn zero(&self, view: View<'_>);

    /// Calls `give_back`, which returns the memory to its next owner, once the queue has passed everything enqueued
    /// so far.
    fn retire(&self, memory: View<'_>, give_back: Box<dyn FnOnce() + Send>);

    /// Records that `by`, which is not the queue, uses this memory from now on.
    ///
    /// # Panics
    /// May panic if the queue has not passed every use of the memory.
    fn touch(&self, memory: View<'_>, by: &dyn fmt::Display);
}

/// A queue of a device: kernels run in the order in which they are called.
pub trait Queue: Kernels {
    /// Returns an event that completes when everything enqueued so far has run.
    fn record(&self) -> Event;

    /// Makes everything enqueued from now on run after `event`.
    fn wait(&self, event: &Event);

    /// Blocks the host until everything enqueued so far has run.
    fn finish(&self) {
        self.record().wait();
    }

    /// Returns the compute threads of the host, for work that is not a kernel.
    fn workers(&self) -> Workers;

    /// Returns the instruction set that the host's kernels use.
    fn level(&self) -> CpuLevel;

    /// Sets how f32 matrices are multiplied; has an effect only on a CPU with AMX.
    fn set_f32_products(&mut self, f32_products: F32Products);

    /// Returns the number of compute threads of the host.
    fn threads(&self) -> usize {
        self.workers().threads()
    }
}

/// A point in the order of a queue, or of a transfer that is overlapped with it; as a CUDA event.
#[derive(Debug, Clone, Default)]
pub struct Event(Option<Arc<dyn DeviceEvent>>);

/// The device's side of an [`Event`].
pub trait DeviceEvent: Any + fmt::Debug + Send + Sync {
    /// Returns true once the point has been reached.
    fn has_come(&self) -> bool;

    /// Blocks until the point has been reached.
    fn wait(&self);
}

impl Event {
    /// An event that is already complete, as every event of the CPU is.
    pub const COMPLETE: Self = Self(None);

    /// Wraps a device's `moment`.
    pub fn new(moment: Arc<dyn DeviceEvent>) -> Self {
        Self(Some(moment))
    }

    /// Returns true if everything before the event has run.
    pub fn is_complete(&self) -> bool {
        self.0.as_ref().is_none_or(|moment| moment.has_come())
    }

    /// Blocks until everything before the event has run.
    pub fn wait(&self) {
        if let Some(moment) = &self.0 {
            moment.wait();
        }
    }

    /// Returns the device's side of the event; `None` for [`Event::COMPLETE`].
    pub fn moment(&self) -> Option<&dyn DeviceEvent> {
        self.0.as_deref()
    }
}

/// A value that a queue computes later.
#[must_use = "the value is there once it has been waited for"]
pub struct Pending<'h, T>(Value<'h, T>);

enum Value<'h, T> {
    Ready(T),
    Later(Box<dyn FnOnce() -> T + 'h>),
}

impl<'h, T: 'h> Pending<'h, T> {
    /// Wraps a value that is already known.
    pub fn ready(value: T) -> Self {
        Self(Value::Ready(value))
    }

    /// Wraps a value that `wait` returns once it is computed.
    pub fn later(wait: impl FnOnce() -> T + 'h) -> Self {
        Self(Value::Later(Box::new(wait)))
    }

    /// Blocks until the queue has computed the value, and returns it.
    pub fn wait(self) -> T {
        match self.0 {
            Value::Ready(value) => value,
            Value::Later(wait) => wait(),
        }
    }
}

impl<T> fmt::Debug for Pending<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if matches!(self.0, Value::Ready(_)) { "Pending(ready)" } else { "Pending(later)" })
    }
}

#[cfg(test)]
mod tests {
    use lockstep_plan::{DType, MemoryCategory};

    use super::*;
    use crate::Tensor;

    #[test]
    fn on_the_cpu_events_are_complete_and_values_ready() {
        let arena = Arena::new();
        let queue = arena.queue(1).unwrap();
        let tensor = Tensor::zeros(&arena, DType::U32, [3], MemoryCategory::Workspace).unwrap();
        tensor.view().write(&[1_u32, 2, 3]);
        assert!(queue.record().is_complete());
        queue.wait(&Event::COMPLETE);
        let mut host = [0_u32; 3];
        let pending = tensor.view().read(&mut host);
        assert_eq!(format!("{pending:?}"), "Pending(ready)");
        assert_eq!(pending.wait(), &[1, 2, 3]);
        assert!(matches!(tensor.view().place(), Place::Host));
    }
}
