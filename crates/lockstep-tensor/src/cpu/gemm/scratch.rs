//! Scratch memory for packed operands: allocated once with the queue, the same for every product.

use std::sync::{Mutex, MutexGuard, PoisonError};

use lockstep_plan::MemoryCategory;

use crate::cpu::pool::worker;
use crate::{Arena, Buffer, TensorError};

/// Largest number of units of depth that are packed at a time.
pub(super) const MAX_DEPTH: usize = 1024;
/// Units of a task's packed rows of A; with a panel of B they fit a core's L2 cache.
pub(super) const ROWS_UNITS: usize = 96 * MAX_DEPTH;
/// Additional units for the marks of panels.
const MARKS_UNITS: usize = 1 << 15;
/// All units of a task's scratch memory.
pub(super) const TASK_UNITS: usize = ROWS_UNITS + MARKS_UNITS;
/// Units of the packed columns of B, which all tasks share in the L3 cache.
pub(super) const COLUMNS_UNITS: usize = 3 << 19;
/// Rows of the f32 partial sums of a bf16 product whose depth has several blocks.
pub(super) const PARTIAL_ROWS: usize = 1024;
/// Columns of these partial sums; see [`PARTIAL_ROWS`].
pub(super) const PARTIAL_COLUMNS: usize = 1024;

/// The scratch memory of a queue.
pub(in crate::cpu) struct Scratch {
    columns: Mutex<Buffer>,
    partial: Mutex<Buffer>,
    rows: Vec<Mutex<Buffer>>,
}

impl Scratch {
    /// Returns the bytes that a queue's scratch books.
    pub(in crate::cpu) const fn booked_bytes(threads: usize) -> usize {
        let all = Arena::booked_bytes(4 * (COLUMNS_UNITS + MARKS_UNITS));
        let partial = Arena::booked_bytes(4 * PARTIAL_ROWS * PARTIAL_COLUMNS);
        all + partial + threads * Arena::booked_bytes(4 * TASK_UNITS)
    }

    /// Allocates scratch for products on `threads` threads.
    pub(in crate::cpu) fn new(threads: usize, arena: &Arena) -> Result<Self, TensorError> {
        let buffer = |units| arena.allocate(4 * units, MemoryCategory::Workspace).map(Mutex::new);
        Ok(Self {
            columns: buffer(COLUMNS_UNITS + MARKS_UNITS)?,
            partial: buffer(PARTIAL_ROWS * PARTIAL_COLUMNS)?,
            rows: (0..threads).map(|_| buffer(TASK_UNITS)).collect::<Result<_, _>>()?,
        })
    }

    /// Returns the buffer of the packed columns of B.
    pub(super) fn columns(&self) -> MutexGuard<'_, Buffer> {
        lock(&self.columns)
    }

    /// Returns the buffer of the partial sums.
    pub(super) fn partial(&self) -> MutexGuard<'_, Buffer> {
        lock(&self.partial)
    }

    /// Returns the buffer of the packed rows of A for the task of this thread.
    pub(super) fn rows(&self) -> MutexGuard<'_, Buffer> {
        lock(&self.rows[worker() % self.rows.len()])
    }
}

/// Locks a buffer, poisoned or not: packed data that a panic left is never read.
fn lock(buffer: &Mutex<Buffer>) -> MutexGuard<'_, Buffer> {
    buffer.lock().unwrap_or_else(PoisonError::into_inner)
}
