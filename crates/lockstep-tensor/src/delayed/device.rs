//! The memory of a delayed device: its accesses are jobs of the list.

use std::{
    alloc::{self, Layout},
    fmt,
    ptr::NonNull,
    sync::{Arc, Mutex, PoisonError},
};

use lockstep_plan::DISK_ALIGNMENT_BYTES;

use super::{
    list::{List, Point, fill},
    operands::Operands,
};
use crate::{DeviceMemory, Event, Pending, View};

/// The byte that fills new and freed memory.
const POISON: u8 = 0xff;

/// An ordering fault that a [`Delayed`] device commits, to test that tests detect it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Events are complete as soon as they are recorded.
    EventsComplete,
    /// The queue does not wait for events of other queues.
    WaitsSkipped,
    /// Buffers are freed before the queue has passed their last use.
    FreesAtOnce,
    /// Reads by the host are not enqueued.
    ReadsAtOnce,
    /// Writes by the host are not enqueued.
    WritesAtOnce,
}

/// The delayed device. All its work is ordered by one list.
pub struct Delayed {
    pub(super) list: Arc<List>,
    fault: Option<Fault>,
}

impl fmt::Debug for Delayed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delayed").field("fault", &self.fault).finish_non_exhaustive()
    }
}

impl Delayed {
    /// Creates a device with an empty list, which commits the given fault, if any.
    pub fn new(fault: Option<Fault>) -> Arc<Self> {
        Arc::new(Self { list: Arc::default(), fault })
    }

    pub(super) fn commits(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    /// Enqueues `run` with a view of the device, or runs it at once if the device commits that `fault`.
    fn copy(
        &self,
        name: &'static str,
        view: View<'_>,
        fault: Option<Fault>,
        run: impl FnOnce(View<'static>) + 'static,
    ) {
        let mut operands = Operands::of(self);
        let view = operands.take(view);
        if fault.is_some_and(|fault| self.commits(fault)) {
            self.list.expect_passed(&operands, &name);
            return run(view);
        }
        self.list.push(name, operands, Box::new(move || run(view)));
    }
}

impl DeviceMemory for Delayed {
    fn allocate(&self, bytes: usize) -> Option<NonNull<u8>> {
        let layout = Layout::from_size_align(bytes, DISK_ALIGNMENT_BYTES).ok()?;
        // SAFETY: the layout has a non-zero size: capacities are at least one cache line.
        let memory = NonNull::new(unsafe { alloc::alloc(layout) })?;
        // SAFETY: the bytes have just been allocated.
        unsafe { memory.write_bytes(POISON, bytes) };
        Some(memory)
    }

    unsafe fn free(&self, memory: NonNull<u8>, bytes: usize) {
        let layout = Layout::from_size_align(bytes, DISK_ALIGNMENT_BYTES);
        // SAFETY: `allocate` returned the memory with this very layout, as the caller promises.
        unsafe {
            alloc::dealloc(memory.as_ptr(), layout.expect("the layout was valid when it was allocated"))
        };
    }

    fn record(&self) -> Event {
        if self.commits(Fault::EventsComplete) { Event::COMPLETE } else { Point::event(&self.list) }
    }

    fn write(&self, to: View<'_>, bytes: &[u8]) {
        let bytes = bytes.to_vec();
        self.copy("a write of the host", to, Some(Fault::WritesAtOnce), move |to| {
            // SAFETY: the view has as many bytes, and this job has its turn to use them.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
        });
    }

    fn read(&self, from: View<'_>) -> Pending<'static, Vec<u8>> {
        let bytes = from.elements() * from.dtype().size_bytes();
        let read: Arc<Mutex<Vec<u8>>> = Arc::default();
        let target = Arc::clone(&read);
        self.copy("a read of the host", from, Some(Fault::ReadsAtOnce), move |from| {
            // SAFETY: the view has as many bytes, which are initialized, and this job has its turn to use them.
            let found = unsafe { std::slice::from_raw_parts(from.as_ptr(), bytes) };
            *target.lock().unwrap_or_else(PoisonError::into_inner) = found.to_vec();
        });
        let done = Point::event(&self.list);
        Pending::later(move || {
            done.wait();
            std::mem::take(&mut *read.lock().unwrap_or_else(PoisonError::into_inner))
        })
    }

    fn zero(&self, view: View<'_>) {
        self.copy("zeros of a new buffer", view, None, |view| fill(&view, 0));
    }

    fn retire(&self, memory: View<'_>, give_back: Box<dyn FnOnce() + Send>) {
        let fault = if std::thread::panicking() { None } else { self.fault };
        let mut operands = Operands::of(self);
        let view = operands.take(memory);
        let run = move || {
            fill(&view, POISON);
            give_back();
        };
        if fault == Some(Fault::FreesAtOnce) {
            self.list.expect_passed(&operands, &"the free of a buffer");
        }
        // Nobody waits for the last job of a list, so a free without jobs before it runs at once.
        self.list.push("the free of a buffer", operands, Box::new(run));
        self.list.run_if_alone();
    }

    fn touch(&self, memory: View<'_>, by: &dyn fmt::Display) {
        let mut operands = Operands::of(self);
        operands.take(memory);
        self.list.expect_passed(&operands, by);
    }
}
