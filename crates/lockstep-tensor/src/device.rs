//! Devices with memory of their own, and the order of what is done there.
//!
//! The host's CPU runs every kernel before its call returns, so that an [`Event`] of its queue is always complete and a [`Pending`] value is
//! ready. Another [`Device`] runs its [`Queue`] later. Whoever is not that queue reaches its memory in one of three ways:
//!
//! ```text
//! the host                   View::write, View::read          copies that take their turn in the queue
//! a collective, a disk       Buffer::lend, View::hand_over    after the event that is recorded with it
//! the allocator              drop of a Buffer                 once the queue has passed that point
//! ```

use std::{any::Any, fmt, ptr::NonNull, sync::Arc};

use crate::{Arena, CpuLevel, F32Products, Kernels, TensorError, View, Workers};

/// The memory that a buffer or a view lies in.
#[derive(Debug, Clone, Copy)]
pub enum Place<'a> {
    /// The host's, which any code may touch.
    Host,
    /// That of a device.
    Device(&'a Arc<dyn Device>),
}

/// A device with memory and a queue of its own.
///
/// Whatever is given a view does its work in the order of the device's queue. The memory of a view lasts until the queue has passed
/// the call, since buffers are freed in queue order ([`Device::retire`]).
pub trait Device: fmt::Debug + Send + Sync {
    /// Takes memory at a multiple of what disks transfer at once; `None` if there is no more. Its contents are unspecified.
    fn allocate(&self, bytes: usize) -> Option<NonNull<u8>>;

    /// Frees what [`Device::allocate`] gave.
    ///
    /// # Safety
    /// The memory came from this device with the same `bytes`, and nothing will use it.
    unsafe fn free(&self, memory: NonNull<u8>, bytes: usize);

    /// A handle of the queue, with `threads` host threads; memory that it needs on the host is booked in `arena`.
    ///
    /// # Errors
    /// As [`Arena::queue`].
    fn queue(self: Arc<Self>, threads: usize, arena: &Arena) -> Result<Box<dyn Queue>, TensorError>;

    /// The event of everything called so far.
    fn record(&self) -> Event;

    /// Copies `bytes` to a view, which has as many.
    fn write(&self, to: View<'_>, bytes: &[u8]);

    /// Copies the bytes of a view.
    fn read(&self, from: View<'_>) -> Pending<'static, Vec<u8>>;

    /// Sets every byte of a view to zero.
    fn zero(&self, view: View<'_>);

    /// Has `give_back` called, which gives memory of the device to its next owner, when the queue has passed everything called so far.
    fn retire(&self, memory: View<'_>, give_back: Box<dyn FnOnce() + Send>);

    /// Notes that `by`, which is not the queue, uses some memory from now on.
    ///
    /// # Panics
    /// May panic if the queue has not passed everything that uses it.
    fn touch(&self, memory: View<'_>, by: &dyn fmt::Display);
}

/// A queue of a device: kernels run in the order in which they are called.
pub trait Queue: Kernels {
    /// The event of everything called so far.
    fn record(&self) -> Event;

    /// Has what is called from now on run after `event`.
    fn wait(&self, event: &Event);

    /// Waits until everything called so far has run.
    fn finish(&self) {
        self.record().wait();
    }

    /// The compute threads of the host, for work that is no kernel.
    fn workers(&self) -> Workers;

    /// The instructions that the host's kernels use.
    fn level(&self) -> CpuLevel;

    /// Chooses how f32 matrices are multiplied; of effect only on a CPU with AMX.
    fn set_f32_products(&mut self, f32_products: F32Products);

    /// Number of compute threads of the host.
    fn threads(&self) -> usize {
        self.workers().threads()
    }
}

/// A point in the order of a queue, or of whoever works beside it.
#[derive(Debug, Clone, Default)]
pub struct Event(Option<Arc<dyn Moment>>);

/// What an [`Event`] of a device stands for.
pub trait Moment: Any + fmt::Debug + Send + Sync {
    /// Whether it has come.
    fn has_come(&self) -> bool;

    /// Waits until it has come.
    fn wait(&self);
}

impl Event {
    /// The event of what has run before it was called, as all of a CPU's are.
    pub const COMPLETE: Self = Self(None);

    /// The event that `moment` stands for.
    pub fn new(moment: Arc<dyn Moment>) -> Self {
        Self(Some(moment))
    }

    /// Whether everything before it has run.
    pub fn is_complete(&self) -> bool {
        self.0.as_ref().is_none_or(|moment| moment.has_come())
    }

    /// Waits until everything before it has run.
    pub fn wait(&self) {
        if let Some(moment) = &self.0 {
            moment.wait();
        }
    }

    /// What it stands for, if it was made of one.
    pub fn moment(&self) -> Option<&dyn Moment> {
        self.0.as_deref()
    }
}

/// A value that a queue will have computed once it gets there.
#[must_use = "the value is there once it has been waited for"]
pub struct Pending<'h, T>(Value<'h, T>);

enum Value<'h, T> {
    Ready(T),
    Later(Box<dyn FnOnce() -> T + 'h>),
}

impl<'h, T: 'h> Pending<'h, T> {
    /// A value that is already there.
    pub fn ready(value: T) -> Self {
        Self(Value::Ready(value))
    }

    /// A value that `wait` waits for.
    pub fn later(wait: impl FnOnce() -> T + 'h) -> Self {
        Self(Value::Later(Box::new(wait)))
    }

    /// Waits for the queue to reach the value.
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
