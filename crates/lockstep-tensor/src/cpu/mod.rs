//! The CPU's queue: kernels run before their call returns, on a pool of threads whose size the caller sets.
//!
//! Each kernel has its own file, beside its scalar reference and its tests. `level` detects the usable instructions
//! once, by CPUID; an instruction that the CPU lacks is never executed.

mod attention;
mod bandwidth;
mod capacity;
mod cast;
mod dropout;
mod elementwise;
mod embedding;
mod gate;
mod gemm;
mod heads;
mod level;
mod loss;
mod norm;
mod optimizer;
mod permute;
mod pool;
mod quantize;
#[cfg(test)]
mod reference;
mod rope;
mod router;
mod simd;
mod tasks;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, PoisonError};

use lockstep_plan::{QuantizedType, exact::ExactSum};

use crate::{
    AdamW, Arena, Attention, AttentionWrite, Dropout, Event, Gelu, Gemm, GroupedGemm, Kernels, LayerNorm,
    Lion, Muon, Pending, Permutation, Queue, Rotation, Router, RouterGradients, RouterOutputs, Sgd,
    TensorError, TokenPositions, View, Write,
};
pub use bandwidth::measure_bandwidth;
pub use gemm::{Peak, measure_peak, measure_peak_within};
pub use level::CpuLevel;
pub use optimizer::muon_flops;

/// Method of f32 GEMMs on a CPU with AMX.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum F32Products {
    /// Three-way bf16 split on AMX tiles: each operand becomes three bf16 parts, and six products are summed in f32.
    /// The error is no larger than that of FMA.
    #[default]
    SplitBf16,
    /// Vector FMA, as on CPUs without AMX.
    Fma,
}

/// A queue that runs every kernel before it returns.
pub struct CpuQueue {
    pool: Arc<pool::Pool>,
    level: CpuLevel,
    f32_products: F32Products,
    arena: Arena,
    scratch: gemm::Scratch,
}

/// The compute threads of a [`CpuQueue`]. Clones share them; callers take turns.
#[derive(Clone)]
pub struct Workers(Arc<pool::Pool>);

impl std::fmt::Debug for Workers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Workers({} threads)", self.threads())
    }
}

impl Workers {
    /// Returns the bytes that the kernels of a queue with `threads` compute threads book for its lifetime.
    pub const fn booked_bytes(threads: usize) -> usize {
        gemm::Scratch::booked_bytes(threads)
    }

    /// Fills `values` in parallel, part by part. `fill` receives the index of a part's first element.
    pub fn fill(&self, values: &mut [f32], fill: impl Fn(usize, &mut [f32]) + Sync) {
        const PART: usize = 1 << 14;
        let parts: Vec<_> = values.chunks_mut(PART).map(Mutex::new).collect();
        self.run(parts.len(), |part| {
            let mut values = parts[part].lock().unwrap_or_else(PoisonError::into_inner);
            fill(part * PART, &mut values);
        });
    }

    /// Calls `run` once with each of `0..tasks`, and returns when all calls have returned.
    ///
    /// # Panics
    /// If a call panics.
    pub fn run(&self, tasks: usize, run: impl Fn(usize) + Sync) {
        self.0.run(tasks, run);
    }

    /// Number of threads, including the caller's.
    pub fn threads(&self) -> usize {
        self.0.threads()
    }
}

impl CpuQueue {
    /// Creates a queue with `threads` compute threads, including the calling thread, at the best level of this CPU.
    /// Scratch memory of kernels (packed operands) is booked in `arena` as workspace.
    ///
    /// # Errors
    /// As [`CpuQueue::with_level`].
    pub fn new(threads: usize, arena: &Arena) -> Result<Self, TensorError> {
        Self::with_level(threads, arena, CpuLevel::detect())
    }

    /// Creates a queue limited to `level`, or to the best level of this CPU if that is lower.
    ///
    /// # Errors
    /// If the threads cannot be started, or there is no memory for scratch.
    pub fn with_level(threads: usize, arena: &Arena, level: CpuLevel) -> Result<Self, TensorError> {
        let pool = pool::Pool::new(threads).map_err(|source| TensorError::ThreadPool { threads, source })?;
        let pool = Arc::new(pool);
        let scratch = gemm::Scratch::new(pool.threads(), arena)?;
        let level = level.min(CpuLevel::detect());
        Ok(Self { pool, level, f32_products: F32Products::default(), arena: arena.clone(), scratch })
    }

    /// Returns the instruction set that this queue uses.
    pub fn level(&self) -> CpuLevel {
        self.level
    }

    /// Number of compute threads.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }
}

impl Queue for CpuQueue {
    fn record(&self) -> Event {
        Event::COMPLETE
    }

    fn wait(&self, event: &Event) {
        event.wait();
    }

    fn workers(&self) -> Workers {
        Workers(Arc::clone(&self.pool))
    }

    fn level(&self) -> CpuLevel {
        self.level
    }

    fn set_f32_products(&mut self, f32_products: F32Products) {
        self.f32_products = f32_products;
    }
}

/// Panics if an output shares memory with another operand. This check makes it sound for kernels to write through
/// shared views.
pub(crate) fn check_disjoint(written: &[View<'_>], read: &[View<'_>]) {
    for (i, output) in written.iter().enumerate() {
        for other in written[i + 1..].iter().chain(read) {
            assert!(!output.overlaps(other), "an output ({output:?}) overlaps another operand ({other:?})");
        }
    }
}

/// Checks as [`check_disjoint`] does, for elementwise kernels, whose output may also be exactly one of the inputs.
pub(crate) fn check_elementwise(output: View<'_>, inputs: &[View<'_>]) {
    for input in inputs {
        assert!(
            output.same_memory(input) || !output.overlaps(input),
            "an output ({output:?}) overlaps part of an operand ({input:?})"
        );
    }
}

impl Kernels for CpuQueue {
    fn gemm_rows(&self, gemm: Gemm<'_>, rows: usize) {
        gemm::gemm(self, gemm, rows);
    }

    fn grouped_gemm(&self, gemm: GroupedGemm<'_>) {
        gemm::grouped(self, gemm);
    }

    fn sum_rows(&self, x: View<'_>, out: View<'_>) {
        elementwise::sum_rows(self, x, out);
    }

    fn embedding(&self, ids: View<'_>, table: View<'_>, first_id: u32, out: View<'_>) {
        embedding::forward(self, ids, table, first_id, out);
    }

    fn embedding_backward(&self, ids: View<'_>, dy: View<'_>, first_id: u32, gradient: View<'_>) {
        embedding::backward(self, ids, dy, first_id, gradient);
    }

    fn rms_norm(&self, x: View<'_>, weight: View<'_>, eps: f32, y: View<'_>, rstd: View<'_>) {
        norm::rms_norm(self, x, weight, eps, y, rstd);
    }

    fn rms_norm_backward_input(
        &self,
        dy: View<'_>,
        x: View<'_>,
        weight: View<'_>,
        rstd: View<'_>,
        dx: View<'_>,
        write: Write,
    ) {
        norm::rms_norm_backward_input(self, dy, x, weight, rstd, dx, write);
    }

    fn rms_norm_backward_weight(&self, dy: View<'_>, x: View<'_>, rstd: View<'_>, dweight: View<'_>) {
        norm::rms_norm_backward_weight(self, dy, x, rstd, dweight);
    }

    fn layer_norm(&self, norm: LayerNorm<'_>, bias: Option<View<'_>>, eps: f32, y: View<'_>) {
        norm::layer_norm(self, norm, bias, eps, y);
    }

    fn layer_norm_backward_input(&self, norm: LayerNorm<'_>, dy: View<'_>, dx: View<'_>, write: Write) {
        norm::layer_norm_backward_input(self, norm, dy, dx, write);
    }

    fn layer_norm_backward_weight(
        &self,
        norm: LayerNorm<'_>,
        dy: View<'_>,
        dweight: View<'_>,
        dbias: Option<View<'_>>,
    ) {
        norm::layer_norm_backward_weight(self, norm, dy, dweight, dbias);
    }

    fn rope(
        &self,
        x: View<'_>,
        positions: View<'_>,
        inverse_frequencies: View<'_>,
        rotation: Rotation,
        y: View<'_>,
    ) {
        rope::rope(self, x, positions, inverse_frequencies, rotation, y);
    }

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
        attention::forward(self, attention, [q, k, v], out, log_sum_exp, write);
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
        let saved = attention::Saved { q, k, v, out, log_sum_exp };
        attention::backward(self, attention, saved, dout, [dq, dk, dv], write);
    }

    fn swiglu(&self, gate: View<'_>, up: View<'_>, y: View<'_>) {
        elementwise::swiglu(self, gate, up, y);
    }

    fn swiglu_backward(&self, dy: View<'_>, gate: View<'_>, up: View<'_>, dgate: View<'_>, dup: View<'_>) {
        elementwise::swiglu_backward(self, dy, gate, up, dgate, dup);
    }

    fn gelu(&self, kind: Gelu, x: View<'_>, y: View<'_>) {
        elementwise::gelu(self, kind, x, y);
    }

    fn gelu_backward(&self, kind: Gelu, dy: View<'_>, x: View<'_>, dx: View<'_>) {
        elementwise::gelu_backward(self, kind, dy, x, dx);
    }

    fn add(&self, a: View<'_>, b: View<'_>, y: View<'_>) {
        elementwise::add(self, a, b, y);
    }

    fn scale(&self, factor: f32, x: View<'_>, y: View<'_>) {
        elementwise::scale(self, factor, x, y);
    }

    fn dropout(
        &self,
        dropout: Dropout<'_>,
        places: TokenPositions,
        first_feature: u32,
        x: View<'_>,
        y: View<'_>,
    ) {
        dropout::dropout(self, dropout, places, first_feature, x, y);
    }

    fn cross_entropy(&self, logits: View<'_>, labels: View<'_>, losses: View<'_>) {
        loss::cross_entropy(self, logits, labels, losses);
    }

    fn cross_entropy_with_gradient(&self, logits: View<'_>, labels: View<'_>, losses: View<'_>, seed: f32) {
        loss::cross_entropy_with_gradient(self, logits, labels, losses, seed);
    }

    fn softmax_statistics(
        &self,
        logits: View<'_>,
        labels: View<'_>,
        first_column: usize,
        statistics: View<'_>,
    ) {
        loss::softmax_statistics(self, logits, labels, first_column, statistics);
    }

    fn merge_softmax(&self, parts: View<'_>, labels: View<'_>, log_sum_exp: View<'_>, losses: View<'_>) {
        loss::merge_softmax(self, parts, labels, log_sum_exp, losses);
    }

    fn softmax_gradient(
        &self,
        logits: View<'_>,
        labels: View<'_>,
        first_column: usize,
        log_sum_exp: View<'_>,
        seed: f32,
    ) {
        loss::softmax_gradient(self, logits, labels, first_column, log_sum_exp, seed);
    }

    fn router_top_k(&self, router: &Router<'_>, logits: View<'_>, routed: RouterOutputs<'_>) {
        router::forward(self, router, logits, routed);
    }

    fn router_margin(&self, router: &Router<'_>, scores: View<'_>) -> Pending<'static, f32> {
        Pending::ready(router::margin(router, scores))
    }

    fn router_top_k_backward(
        &self,
        router: &Router<'_>,
        logits: View<'_>,
        routed: RouterOutputs<'_>,
        gradients: RouterGradients<'_>,
        places: TokenPositions,
        dlogits: View<'_>,
    ) {
        router::backward(self, router, logits, routed, gradients, places, dlogits);
    }

    fn router_load(
        &self,
        routed: RouterOutputs<'_>,
        places: TokenPositions,
        counts: View<'_>,
        probabilities: View<'_>,
    ) {
        router::load(self, routed, places, counts, probabilities);
    }

    fn sort_slots(
        &self,
        experts: View<'_>,
        first_expert: u32,
        permutation: Permutation<'_>,
        offsets: View<'_>,
    ) {
        permute::sort_slots(experts, first_expert, permutation, offsets);
    }

    fn limit_slots(
        &self,
        experts: View<'_>,
        places: TokenPositions,
        capacity: usize,
        before: Option<View<'_>>,
        kept: View<'_>,
    ) {
        capacity::limit_slots(experts, places, capacity, before, kept);
    }

    fn rope_interleaved(
        &self,
        x: View<'_>,
        positions: View<'_>,
        inverse_frequencies: View<'_>,
        rotation: Rotation,
        y: View<'_>,
    ) {
        heads::rope_interleaved(self, x, positions, inverse_frequencies, rotation, y);
    }

    fn join_heads(&self, own: View<'_>, tail: View<'_>, y: View<'_>) {
        heads::join_heads(self, own, tail, y);
    }

    fn join_heads_backward(&self, dy: View<'_>, down: View<'_>, dtail: View<'_>) {
        heads::join_heads_backward(self, dy, [down, dtail]);
    }

    fn resize_heads(&self, x: View<'_>, y: View<'_>) {
        heads::resize_heads(self, x, y);
    }

    fn gate_rows(&self, gate: View<'_>, x: View<'_>, y: View<'_>) {
        gate::gate_rows(self, gate, x, y);
    }

    fn gate_rows_backward(&self, dy: View<'_>, gate: View<'_>, x: View<'_>, dgate: View<'_>, dx: View<'_>) {
        gate::gate_rows_backward(self, dy, gate, x, [dgate, dx]);
    }

    fn part_slots(&self, experts: View<'_>, experts_of_rank: usize, of_parts: View<'_>) {
        permute::part_slots(experts, experts_of_rank, of_parts);
    }

    fn arrived_experts(&self, counts: View<'_>, experts: usize, arrived: View<'_>) {
        permute::arrived_experts(counts, experts, arrived);
    }

    fn permute(&self, permutation: Permutation<'_>, x: View<'_>, rows: View<'_>) {
        permute::permute(self, permutation, x, rows);
    }

    fn unpermute(
        &self,
        permutation: Permutation<'_>,
        rows: View<'_>,
        weights: Option<View<'_>>,
        y: View<'_>,
    ) {
        permute::unpermute(self, permutation, rows, weights, y);
    }

    fn unpermute_backward(
        &self,
        permutation: Permutation<'_>,
        dy: View<'_>,
        rows: View<'_>,
        weights: View<'_>,
        drows: View<'_>,
        dweights: View<'_>,
    ) {
        permute::unpermute_backward(self, permutation, dy, rows, weights, [drows, dweights]);
    }

    fn adamw(&self, step: &AdamW<'_>) {
        optimizer::adamw(self, step);
    }

    fn sgd(&self, step: &Sgd<'_>) {
        optimizer::sgd(self, step);
    }

    fn lion(&self, step: &Lion<'_>) {
        optimizer::lion(self, step);
    }

    fn muon(&self, step: &Muon<'_>) {
        optimizer::muon(self, step);
    }

    fn sum_of_squares(&self, x: View<'_>) -> Pending<'static, ExactSum> {
        Pending::ready(optimizer::sum_of_squares(self, x))
    }

    fn cast(&self, x: View<'_>, y: View<'_>) {
        cast::cast(self, x, y);
    }

    fn quantize(&self, kind: QuantizedType, x: View<'_>, residual: Option<View<'_>>, records: View<'_>) {
        quantize::quantize(self, kind, x, residual, records);
    }

    fn dequantize(&self, kind: QuantizedType, records: View<'_>, y: View<'_>) {
        quantize::dequantize(self, kind, records, y);
    }

    fn dequantize_sum(&self, kind: QuantizedType, parts: usize, records: View<'_>, y: View<'_>) {
        quantize::dequantize_sum(self, kind, parts, records, y);
    }

    fn transpose_blocks(&self, x: View<'_>, y: View<'_>) {
        cast::transpose_blocks(self, x, y);
    }

    fn zero(&self, y: View<'_>) {
        cast::zero(self, y);
    }
}
