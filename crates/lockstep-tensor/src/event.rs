//! Points in the order of a queue, and values that a queue computes later.
//!
//! The CPU runs every kernel before its call returns, so its events are always complete and its pending values ready.

use std::{any::Any, fmt, sync::Arc};

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
