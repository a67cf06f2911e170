//! Checks the operands of attention, and chooses its algorithm by their type and the queue's level.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use half::bf16;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use lockstep_plan::DType;

#[cfg(target_arch = "aarch64")]
use super::aarch64;
#[cfg(target_arch = "x86_64")]
use super::tiles::DotProducts;
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{
    backward::Backward,
    cached::{Append, Batch, NewVectors, Sequences},
    forward::Forward,
    geometry::Geometry,
    merge::Merge,
    output::Output,
    sinks::SinksBackward,
    worker::run,
};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::{
    packed,
    tiles::Tiled,
    worker::{Worker, run_lanes},
};
#[cfg(target_arch = "aarch64")]
use crate::cpu::gemm::panels::NeonBf16;
use crate::{
    Attention, AttentionKernels, AttentionVariant, AttentionWrite, CpuQueue, PagedCache, Summation, View,
    Write,
    cpu::{
        operands::{Operand, check_disjoint},
        simd::with_float,
    },
};
#[cfg(target_arch = "x86_64")]
use crate::{
    CpuLevel,
    cpu::gemm::panels::{Avx512DotBlock, Tiles},
};

/// Smallest number of rows of a key head for which bf16 uses the matrix instructions in training; fewer rows do not fill them.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const TILED_ROWS: usize = 16;

impl AttentionKernels for CpuQueue {
    fn attention(
        &self,
        attention: &Attention<'_>,
        q: View<'_>,
        k: View<'_>,
        v: View<'_>,
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
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        if is_tiled(self, q.dtype(), &geometry) {
            return run_tiled(self, work!(bf16));
        }
        with_float!(q.dtype(), T => run(self, &work!(T)));
    }

    fn attention_backward(
        &self,
        attention: &Attention<'_>,
        q: View<'_>,
        k: View<'_>,
        v: View<'_>,
        out: View<'_>,
        log_sum_exp: View<'_>,
        dout: View<'_>,
        dq: View<'_>,
        dk: View<'_>,
        dv: View<'_>,
        write: AttentionWrite,
    ) {
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
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        if is_tiled(self, q.dtype(), &geometry) {
            return run_tiled(self, work!(bf16));
        }
        with_float!(q.dtype(), T => run(self, &work!(T)));
    }

    fn append_to_cache(
        &self,
        cache: PagedCache<'_>,
        key_value_heads: usize,
        k: View<'_>,
        v: Option<View<'_>>,
    ) {
        let PagedCache { keys, values, row_starts, cached, pages, .. } = cache;
        assert_eq!(values.is_some(), v.is_some(), "a cache with values gets new ones, and no other does");
        let (value_pages, new_values) = (values.unwrap_or(keys), v.unwrap_or(k));
        check_disjoint(&[keys], &[k, new_values, row_starts, cached, pages]);
        check_disjoint(&[value_pages], &[k, new_values, row_starts, cached, pages]);
        values.into_iter().for_each(|values| check_disjoint(&[keys, values], &[]));
        let [rows, _, head_dim] = heads_of("keys", k);
        let sequences = Sequences::new((self.level, k.dtype()), &cache, [key_value_heads, head_dim], rows);
        expect_elements(rows * key_value_heads * head_dim, &[("k", k), ("v", new_values)]);
        with_float!(k.dtype(), T => {
            let operands = [Some((k, keys)), v.zip(values)].map(|new| {
                // SAFETY: the pages overlap no other operand, as just checked.
                new.map(|(vectors, pages)| unsafe {
                    NewVectors::<T> { vectors: vectors.slice(), pages: Operand::new(pages) }
                })
            });
            run(self, &Append::<T> { sequences, head_dim, operands });
        });
    }

    fn cached_attention(
        &self,
        attention: &Attention<'_>,
        cache: PagedCache<'_>,
        q: View<'_>,
        out: View<'_>,
        log_sum_exp: View<'_>,
    ) {
        let PagedCache { keys, values, row_starts, cached, pages, .. } = cache;
        let values = values.unwrap_or(keys);
        check_operands(attention, &[out, log_sum_exp], &[q, keys, values, row_starts, cached, pages]);
        let AttentionVariant { document_ends, key_mask, .. } = attention.variant;
        assert!(
            document_ends.is_none() && key_mask.is_none() && attention.document_starts.is_none(),
            "attention to a cache has neither documents nor a key mask"
        );
        assert!(attention.dropout.is_none(), "attention to a cache has no dropout");
        let [rows, heads, head_dim] = heads_of("queries", q);
        assert_eq!(
            [heads, head_dim],
            [attention.heads, attention.head_dim],
            "queries of attention are {q:?}"
        );
        expect_elements(q.elements(), &[("out", out)]);
        expect_elements(rows * heads, &[("log_sum_exp", log_sum_exp)]);
        let of_keys = [attention.key_value_heads, head_dim];
        let sequences = Sequences::new((self.level, q.dtype()), &cache, of_keys, rows);
        // SAFETY: outputs overlap no other operand, as just checked.
        let bytes = unsafe { [keys.slice::<u8>(), values.slice::<u8>()] };
        macro_rules! works {
            ($T:ty) => {
                sequences.geometries(attention, rows, bytes).map(|(geometry, pages)| {
                    let [k, v] = pages.vectors();
                    // SAFETY: as above.
                    unsafe {
                        Forward::<$T> {
                            geometry,
                            q: q.slice(),
                            k,
                            v,
                            out: Output::new("out", out, Write::Overwrite),
                            log_sum_exp: Operand::new(log_sum_exp),
                        }
                    }
                })
            };
        }
        #[cfg(target_arch = "x86_64")]
        if q.dtype() == DType::BF16 && self.level >= packed::LEVEL {
            return match self.level {
                CpuLevel::AmxBf16 => {
                    let works = works!(bf16).map(Tiled::<_, Tiles>::new);
                    run_lanes::<x86::Avx512>(self, &Batch::new(works))
                }
                _ => run_lanes::<x86::Avx512>(self, &Batch::new(works!(bf16).map(DotProducts::new))),
            };
        }
        #[cfg(target_arch = "aarch64")]
        if q.dtype() == DType::BF16 && self.level >= packed::LEVEL {
            let works = works!(bf16).map(Tiled::<_, NeonBf16>::new);
            return run_lanes::<aarch64::Neon>(self, &Batch::new(works));
        }
        with_float!(q.dtype(), T => run(self, &Batch::new(works!(T))));
    }

    fn merge_attention(&self, parts: View<'_>, log_sum_exp: View<'_>, out: View<'_>) {
        check_disjoint(&[out], &[parts, log_sum_exp]);
        let [rows, heads, head_dim] = heads_of("outputs", out);
        let count = log_sum_exp.elements() / (rows * heads).max(1);
        expect_elements(count * rows * heads, &[("log_sum_exp", log_sum_exp)]);
        expect_elements(count * out.elements(), &[("parts", parts)]);
        with_float!(out.dtype(), T => {
            // SAFETY: the output overlaps no other operand, as just checked.
            let work = unsafe {
                Merge::<T> {
                    parts: parts.slice(),
                    log_sum_exp: log_sum_exp.slice(),
                    out: Operand::new(out),
                    rows,
                    heads,
                    head_dim,
                }
            };
            work.run(self);
        });
    }

    fn attention_sinks_backward(
        &self,
        attention: &Attention<'_>,
        out: View<'_>,
        log_sum_exp: View<'_>,
        dout: View<'_>,
        dsinks: View<'_>,
    ) {
        check_operands(attention, &[dsinks], &[out, log_sum_exp, dout]);
        let geometry = Geometry::new(attention);
        let sinks = geometry.sinks.expect("the gradient of sinks needs an attention that has them");
        expect_elements(geometry.query_elements(), &[("out", out), ("dout", dout)]);
        expect_elements(geometry.statistic_elements(), &[("log_sum_exp", log_sum_exp)]);
        expect_elements(attention.heads, &[("dsinks", dsinks)]);
        with_float!(dout.dtype(), T => {
            // SAFETY: as in the forward.
            let work = unsafe {
                SinksBackward::<T> {
                    geometry,
                    sinks,
                    out: out.slice(),
                    log_sum_exp: log_sum_exp.slice(),
                    dout: dout.slice(),
                    dsinks: Operand::new(dsinks),
                }
            };
            work.run(self);
        });
    }
}

/// Returns true if the queue's level has bf16 matrix instructions, and there are enough rows to fill them or the bits of a row
/// must not depend on their number.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn is_tiled(queue: &CpuQueue, dtype: DType, geometry: &Geometry<'_>) -> bool {
    let is_worth_it = geometry.rows() >= TILED_ROWS || queue.summation == Summation::ByDepth;
    dtype == DType::BF16 && is_worth_it && queue.level >= packed::LEVEL
}

/// Runs a forward or a backward on the bf16 matrix instructions of the queue's level.
#[cfg(target_arch = "x86_64")]
fn run_tiled<W>(queue: &CpuQueue, work: W)
where
    Tiled<W, Tiles>: Worker,
    Tiled<W, Avx512DotBlock>: Worker,
{
    match queue.level {
        CpuLevel::AmxBf16 => run_lanes::<x86::Avx512>(queue, &Tiled::<_, Tiles>::new(work)),
        _ => run_lanes::<x86::Avx512>(queue, &Tiled::<_, Avx512DotBlock>::new(work)),
    }
}

/// Runs a forward or a backward on the bf16 matrix instructions.
#[cfg(target_arch = "aarch64")]
fn run_tiled<W>(queue: &CpuQueue, work: W)
where
    Tiled<W, NeonBf16>: Worker,
{
    run_lanes::<aarch64::Neon>(queue, &Tiled::<_, NeonBf16>::new(work));
}

/// Panics if an output overlaps an input or one of the attention's own tensors.
fn check_operands(attention: &Attention<'_>, outputs: &[View<'_>], inputs: &[View<'_>]) {
    check_disjoint(outputs, inputs);
    let AttentionVariant { document_ends, key_mask, alibi_slopes, sinks, .. } = attention.variant;
    let dropout_keys = attention.dropout.map(|dropout| dropout.keys);
    let own = [dropout_keys, attention.document_starts, document_ends, key_mask, alibi_slopes, sinks];
    for own in own.into_iter().flatten() {
        check_disjoint(outputs, &[own]);
    }
}

/// Returns the rows, heads and elements per head of a view.
fn heads_of(name: &str, view: View<'_>) -> [usize; 3] {
    let &[rows, heads, head_dim] = view.shape().dims() else {
        panic!("{name} of attention are {view:?}; allowed: [rows, heads, elements of a head]")
    };
    [rows, heads, head_dim]
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
