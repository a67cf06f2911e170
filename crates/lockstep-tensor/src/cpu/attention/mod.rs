//! Causal attention in blocks (FlashAttention), forward and backward: memory grows linearly with the sequence length.
//!
//! Work is split into tasks by shape alone. A task reads shared inputs, writes outputs of its own, and adds in a
//! fixed order, so any number of threads gives the same bits. Inside a task, blocks of 64 queries and 64 keys are
//! copied to scratch as f32, and products of blocks run in registers.
//!
//! Context-parallel ranks call it for one span of queries and one of keys at a time; the results of the calls are
//! merged in the output tensors.
//!
//! `geometry` determines the visible keys of each query; `lanes` and `x86` are vector registers; `product` multiplies
//! blocks; `block` packs and scores them. `forward` and `backward` are the algorithms, `output` writes their results,
//! and `tiles` runs them on bf16 matrix instructions.

mod backward;
mod block;
mod forward;
mod geometry;
mod lanes;
mod output;
mod product;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod span_tests;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod tiles;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "x86_64")]
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};

#[cfg(target_arch = "x86_64")]
use half::bf16;
use lockstep_plan::{DType, MemoryCategory};

#[cfg(target_arch = "x86_64")]
use self::tiles::{TileBackward, TileForward};
use self::{backward::Backward, forward::Forward, geometry::Geometry, lanes::Lanes, output::Output};
#[cfg(target_arch = "x86_64")]
use super::gemm::panels::{Avx512Dot, Tiles};
use super::{CpuQueue, check_disjoint, simd::with_float, tasks::Operand};
#[cfg(target_arch = "x86_64")]
use crate::CpuLevel;
use crate::{Attention, AttentionWrite, View, Write};

/// Rows and keys of a block of scores; also the number of bits in the mask of a row.
const BLOCK: usize = 64;

/// Smallest number of rows of a key head for which bf16 uses the matrix instructions; fewer rows do not fill them.
#[cfg(target_arch = "x86_64")]
const TILED_ROWS: usize = 16;

/// Tensors that the forward saved for the backward.
pub(super) struct Saved<'a> {
    pub(super) q: View<'a>,
    pub(super) k: View<'a>,
    pub(super) v: View<'a>,
    pub(super) out: View<'a>,
    pub(super) log_sum_exp: View<'a>,
}

/// Runs the forward; see [`Kernels::attention`](crate::Kernels::attention).
pub(super) fn forward(
    queue: &CpuQueue,
    attention: &Attention<'_>,
    [q, k, v]: [View<'_>; 3],
    out: View<'_>,
    log_sum_exp: View<'_>,
    write: Write,
) {
    check_operands(attention, &[out, log_sum_exp], &[q, k, v]);
    let geometry = Geometry::new(attention);
    expect_elements(geometry.query_elements(), &[("q", q), ("out", out)]);
    expect_elements(geometry.key_elements(), &[("k", k), ("v", v)]);
    expect_elements(geometry.statistic_elements(), &[("log_sum_exp", log_sum_exp)]);
    macro_rules! work {
        ($T:ty) => {
            // SAFETY: outputs overlap no other operand, as just checked, so nothing writes to the inputs during this
            // call.
            unsafe {
                Forward::<$T> {
                    geometry,
                    q: q.slice(),
                    k: k.slice(),
                    v: v.slice(),
                    out: Output::new("out", out, write),
                    log_sum_exp: Operand::new(log_sum_exp),
                }
            }
        };
    }
    #[cfg(target_arch = "x86_64")]
    if q.dtype() == DType::BF16 && geometry.rows() >= TILED_ROWS {
        match queue.level {
            CpuLevel::AmxBf16 => {
                let work = TileForward::<Tiles> { forward: work!(bf16), kernel: PhantomData };
                return run_lanes::<x86::Avx512>(queue, &work);
            }
            CpuLevel::Avx512Bf16 => {
                let work = TileForward::<Avx512Dot> { forward: work!(bf16), kernel: PhantomData };
                return run_lanes::<x86::Avx512>(queue, &work);
            }
            _ => {}
        }
    }
    with_float!(q.dtype(), T => run(queue, &work!(T)));
}

/// Runs the backward; see [`Kernels::attention_backward`](crate::Kernels::attention_backward).
pub(super) fn backward(
    queue: &CpuQueue,
    attention: &Attention<'_>,
    saved: Saved<'_>,
    dout: View<'_>,
    [dq, dk, dv]: [View<'_>; 3],
    write: AttentionWrite,
) {
    let Saved { q, k, v, out, log_sum_exp } = saved;
    check_operands(attention, &[dq, dk, dv], &[q, k, v, out, log_sum_exp, dout]);
    let geometry = Geometry::new(attention);
    expect_elements(geometry.query_elements(), &[("q", q), ("out", out), ("dout", dout), ("dq", dq)]);
    expect_elements(geometry.key_elements(), &[("k", k), ("v", v), ("dk", dk), ("dv", dv)]);
    expect_elements(geometry.statistic_elements(), &[("log_sum_exp", log_sum_exp)]);
    macro_rules! work {
        ($T:ty) => {
            // SAFETY: as in the forward.
            unsafe {
                Backward::<$T> {
                    geometry,
                    q: q.slice(),
                    k: k.slice(),
                    v: v.slice(),
                    out: out.slice(),
                    log_sum_exp: log_sum_exp.slice(),
                    dout: dout.slice(),
                    dq: Output::new("dq", dq, write.queries),
                    dk: Output::new("dk", dk, write.keys),
                    dv: Output::new("dv", dv, write.keys),
                }
            }
        };
    }
    #[cfg(target_arch = "x86_64")]
    if q.dtype() == DType::BF16 && geometry.rows() >= TILED_ROWS {
        match queue.level {
            CpuLevel::AmxBf16 => {
                let work = TileBackward::<Tiles> { backward: work!(bf16), kernel: PhantomData };
                return run_lanes::<x86::Avx512>(queue, &work);
            }
            CpuLevel::Avx512Bf16 => {
                let work = TileBackward::<Avx512Dot> { backward: work!(bf16), kernel: PhantomData };
                return run_lanes::<x86::Avx512>(queue, &work);
            }
            _ => {}
        }
    }
    with_float!(q.dtype(), T => run(queue, &work!(T)));
}

/// Panics if an output overlaps an input or one of the attention's own tensors.
fn check_operands(attention: &Attention<'_>, outputs: &[View<'_>], inputs: &[View<'_>]) {
    check_disjoint(outputs, inputs);
    for own in attention.dropout.map(|dropout| dropout.keys).into_iter().chain(attention.document_starts) {
        check_disjoint(outputs, &[own]);
    }
}

fn expect_elements(expected: usize, operands: &[(&str, View<'_>)]) {
    for (name, view) in operands {
        assert_eq!(
            view.elements(),
            expected,
            "{name} of attention is {view:?}; the geometry says {expected} elements"
        );
    }
}

/// A kernel as a set of independent tasks, which share only their inputs.
trait Worker: Sync {
    /// Number of tasks.
    fn tasks(&self) -> usize;
    /// f32 elements of scratch for each worker thread; a multiple of a cache line. Its contents are unspecified at
    /// the start of a task.
    fn scratch_elements(&self) -> usize;
    /// Runs one task.
    fn run<V: Lanes>(&self, task: usize, scratch: &mut [f32]);
}

/// Runs all tasks on the queue's threads, with the widest registers that its level allows.
fn run(queue: &CpuQueue, work: &impl Worker) {
    #[cfg(target_arch = "x86_64")]
    {
        if queue.level >= CpuLevel::Avx512 {
            return run_lanes::<x86::Avx512>(queue, work);
        }
        if queue.level >= CpuLevel::Avx2 {
            return run_lanes::<x86::Avx2>(queue, work);
        }
    }
    run_lanes::<lanes::Portable>(queue, work);
}

/// Runs all tasks: each worker thread takes the next one until none is left. The assignment changes no result.
fn run_lanes<V: Lanes>(queue: &CpuQueue, work: &impl Worker) {
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
