//! Runs the tasks of attention on the queue's threads, with the widest registers that its level allows.

use std::sync::atomic::{AtomicUsize, Ordering};

use lockstep_plan::{DType, MemoryCategory};

#[cfg(target_arch = "aarch64")]
use super::aarch64;
use super::lanes::{Lanes, Portable};
#[cfg(target_arch = "x86_64")]
use super::x86;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::CpuLevel;
use crate::{CpuQueue, cpu::operands::Operand};

/// A kernel as a set of independent tasks, which share only their inputs.
pub(super) trait Worker: Sync {
    /// Number of tasks.
    fn tasks(&self) -> usize;
    /// f32 elements of scratch for each worker thread; a multiple of a cache line. Its contents are unspecified at
    /// the start of a task.
    fn scratch_elements(&self) -> usize;
    /// Runs one task.
    fn run<V: Lanes>(&self, task: usize, scratch: &mut [f32]);
}

/// Runs all tasks on the queue's threads, with the widest registers that its level allows.
pub(super) fn run(queue: &CpuQueue, work: &impl Worker) {
    #[cfg(target_arch = "x86_64")]
    {
        if queue.level >= CpuLevel::Avx512 {
            return run_lanes::<x86::Avx512>(queue, work);
        }
        if queue.level >= CpuLevel::Avx2 {
            return run_lanes::<x86::Avx2>(queue, work);
        }
    }
    #[cfg(target_arch = "aarch64")]
    if queue.level >= CpuLevel::Neon {
        return run_lanes::<aarch64::Neon>(queue, work);
    }
    run_lanes::<Portable>(queue, work);
}

/// Runs all tasks: each worker thread takes the next one until none is left. The assignment changes no result.
pub(super) fn run_lanes<V: Lanes>(queue: &CpuQueue, work: &impl Worker) {
    let tasks = work.tasks();
    let workers = queue.threads().min(tasks);
    if workers == 0 {
        return;
    }
    let elements = work.scratch_elements();
    let scratch = queue
        .arena
        .allocate(workers * elements * size_of::<f32>(), MemoryCategory::Workspace)
        .unwrap_or_else(|error| panic!("no memory for the blocks of attention: {error}"));
    let next = AtomicUsize::new(0);
    let scratch = Operand::<f32>::new(scratch.view(DType::F32, 0, [workers * elements]));
    queue.pool.run(workers, |worker| {
        // SAFETY: each worker has a part of its own.
        let scratch = unsafe { scratch.write(worker * elements..(worker + 1) * elements) };
        loop {
            let task = next.fetch_add(1, Ordering::Relaxed);
            if task >= tasks {
                break;
            }
            work.run::<V>(task, scratch);
        }
    });
}
