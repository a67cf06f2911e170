//! The queue of the delayed device, a test device that runs kernels as late as events permit: every kernel call becomes a job.

use std::sync::{Arc, Mutex, PoisonError};

use lockstep_plan::{DType, KvCacheType, QuantizedType, exact::ExactSum};

use super::{
    Delayed, Fault,
    list::Point,
    operands::{Late, Operands},
};
use crate::{
    Activation, AdamW, Arena, Attention, AttentionKernels, AttentionWrite, BatchNorm, BatchNormKernels,
    BlockActivations, BlockGemm, BlockKernels, BlockMatrix, CacheShape, Conv2d, ConvolutionKernels,
    CopyKernels, CpuLevel, CpuQueue, Device, DeviceMemory, Dropout, ElementwiseKernels, EmbeddingKernels,
    Event, F32Products, GatedActivation, Gelu, Gemm, GemmKernels, GroupedGemm, HeadKernels, HeadProduct,
    Kernels, LayerNorm, Lion, LossKernels, Muon, NormKernels, OptimizerKernels, PagedCache, Pending,
    Permutation, PermutationKernels, Pool2d, PoolKernels, QuantizationKernels, Queue, RmsNorm, Rotary,
    RotaryKernels, Rotation, Router, RouterGradients, RouterKernels, RouterOutputs, RunningStatistics, Sgd,
    Summation, TensorError, TokenPositions, View, Workers, Write,
};

/// A handle of the device's list, and the CPU queue that runs its jobs.
pub(super) struct DelayedQueue {
    device: Arc<Delayed>,
    cpu: Arc<CpuQueue>,
}

impl DelayedQueue {
    pub(super) fn new(device: Arc<Delayed>, cpu: CpuQueue) -> Self {
        Self { device, cpu: Arc::new(cpu) }
    }

    fn push(&self, name: &'static str, operands: Operands, run: impl FnOnce(&CpuQueue) + 'static) {
        let cpu = Arc::clone(&self.cpu);
        let is_on_host = operands.are_on_host();
        self.device.list.push(name, operands, Box::new(move || run(&cpu)));
        if is_on_host {
            // Otherwise the host could touch or free the memory before the job runs.
            self.device.list.run_all();
        }
    }

    fn compute<T: 'static>(
        &self,
        name: &'static str,
        operands: Operands,
        run: impl FnOnce(&CpuQueue) -> T + 'static,
    ) -> Pending<'static, T> {
        let value = Arc::new(Mutex::new(None));
        let target = Arc::clone(&value);
        self.push(name, operands, move |cpu| {
            let value = run(cpu);
            *target.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
        });
        let done = Point::event(&self.device.list);
        Pending::later(move || {
            done.wait();
            value.lock().unwrap_or_else(PoisonError::into_inner).take().expect("the job has run")
        })
    }
}

impl Drop for DelayedQueue {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.device.list.clear();
        } else {
            self.device.list.run_all();
        }
    }
}

impl Device for Delayed {
    fn queue(self: Arc<Self>, threads: usize, arena: &Arena) -> Result<Box<dyn Queue>, TensorError> {
        Ok(Box::new(DelayedQueue::new(self, CpuQueue::new(threads, arena)?)))
    }
}

impl Kernels for DelayedQueue {}

impl Queue for DelayedQueue {
    fn record(&self) -> Event {
        self.device.record()
    }

    fn wait(&self, event: &Event) {
        // Events of this list are in its order already.
        if self.device.commits(Fault::WaitsSkipped) || Point::is_of(event, &self.device.list) {
            return;
        }
        let event = event.clone();
        self.device.list.push("wait", Operands::of(&*self.device), Box::new(move || event.wait()));
    }

    fn workers(&self) -> Workers {
        self.cpu.workers()
    }

    fn level(&self) -> CpuLevel {
        self.cpu.level()
    }

    fn set_f32_products(&mut self, f32_products: F32Products) {
        self.device.list.run_all();
        Arc::get_mut(&mut self.cpu).expect("all jobs have run").set_f32_products(f32_products);
    }

    fn set_summation(&mut self, summation: Summation) {
        self.device.list.run_all();
        Arc::get_mut(&mut self.cpu).expect("all jobs have run").set_summation(summation);
    }

    fn set_block_activations(&mut self, activations: BlockActivations) {
        self.device.list.run_all();
        Arc::get_mut(&mut self.cpu).expect("all jobs have run").set_block_activations(activations);
    }

    fn page_bytes(&self, dtype: DType, stored: KvCacheType, shape: CacheShape) -> [usize; 2] {
        self.cpu.page_bytes(dtype, stored, shape)
    }
}

/// Implements a kernel as a job; the argument in brackets is borrowed. A returned value is pending until the job has run.
macro_rules! job {
    ($name:ident $([$borrowed:ident: $of:ty])? ($($argument:ident: $type:ty),*)) => {
        fn $name(&self, $($borrowed: &$of,)? $($argument: $type),*) {
            let mut operands = Operands::of(&*self.device);
            $(let $borrowed = (*$borrowed).late(&mut operands);)?
            $(let $argument = $argument.late(&mut operands);)*
            self.push(stringify!($name), operands, move |cpu| cpu.$name($(&$borrowed,)? $($argument),*));
        }
    };
    ($name:ident $([$borrowed:ident: $of:ty])? ($($argument:ident: $type:ty),*) -> $value:ty) => {
        fn $name(&self, $($borrowed: &$of,)? $($argument: $type),*) -> Pending<'static, $value> {
            let mut operands = Operands::of(&*self.device);
            $(let $borrowed = (*$borrowed).late(&mut operands);)?
            $(let $argument = $argument.late(&mut operands);)*
            self.compute(stringify!($name), operands, move |cpu| cpu.$name($(&$borrowed,)? $($argument),*).wait())
        }
    };
}

/// Implements families of kernels.
macro_rules! families {
    ($($Family:ident {
        $($name:ident $([$borrowed:ident: $of:ty])? ($($argument:ident: $type:ty),* $(,)?) $(-> $value:ty)?;)*
    })*) => {$(
        impl $Family for DelayedQueue {
            $(job! { $name $([$borrowed: $of])? ($($argument: $type),*) $(-> $value)? })*
        }
    )*};
}

families! {
    GemmKernels {
        gemm_rows(gemm: Gemm<'_>, rows: usize);
        grouped_gemm(gemm: GroupedGemm<'_>);
    }
    ConvolutionKernels {
        conv2d(conv: Conv2d, x: View<'_>, weight: View<'_>, bias: Option<View<'_>>, y: View<'_>);
        conv2d_backward_input(conv: Conv2d, dy: View<'_>, weight: View<'_>, dx: View<'_>, write: Write);
        conv2d_backward_weight(conv: Conv2d, dy: View<'_>, x: View<'_>, dweight: View<'_>);
    }
    PoolKernels {
        max_pool2d(pool: Pool2d, x: View<'_>, y: View<'_>, indices: View<'_>);
        max_pool2d_backward(pool: Pool2d, dy: View<'_>, indices: View<'_>, dx: View<'_>, write: Write);
        avg_pool2d(pool: Pool2d, x: View<'_>, y: View<'_>);
        avg_pool2d_backward(pool: Pool2d, dy: View<'_>, dx: View<'_>, write: Write);
    }
    BatchNormKernels {
        batch_norm_statistics(x: View<'_>, statistics: View<'_>);
        merge_batch_norm(
            parts: View<'_>, eps: f32, running: Option<RunningStatistics<'_>>, mean: View<'_>, rstd: View<'_>
        );
        batch_norm_totals(statistics: View<'_>, totals: View<'_>);
        recentre_batch_norm(totals: View<'_>, statistics: View<'_>);
        reciprocal_deviation(variance: View<'_>, eps: f32, rstd: View<'_>);
        batch_norm(norm: BatchNorm<'_>, bias: View<'_>, y: View<'_>);
        batch_norm_backward_sums(norm: BatchNorm<'_>, dy: View<'_>, sums: View<'_>);
        batch_norm_backward_input(
            norm: BatchNorm<'_>, dy: View<'_>, sums: View<'_>, rows: usize, dx: View<'_>, write: Write
        );
    }
    BlockKernels {
        block_gemm(gemm: BlockGemm<'_>);
        interleave_blocks(from: BlockMatrix<'_>, to: BlockMatrix<'_>);
        block_embedding(ids: View<'_>, table: BlockMatrix<'_>, first_id: u32, out: View<'_>);
    }
    EmbeddingKernels {
        embedding(ids: View<'_>, table: View<'_>, first_id: u32, out: View<'_>);
        embedding_backward(ids: View<'_>, dy: View<'_>, first_id: u32, gradient: View<'_>);
    }
    NormKernels {
        rms_norm(norm: RmsNorm<'_>, eps: f32, y: View<'_>);
        rms_norm_backward_input(norm: RmsNorm<'_>, dy: View<'_>, dx: View<'_>, write: Write);
        rms_norm_backward_weight(norm: RmsNorm<'_>, dy: View<'_>, dweight: View<'_>);
        layer_norm(norm: LayerNorm<'_>, bias: Option<View<'_>>, eps: f32, y: View<'_>);
        layer_norm_backward_input(norm: LayerNorm<'_>, dy: View<'_>, dx: View<'_>, write: Write);
        layer_norm_backward_weight(
            norm: LayerNorm<'_>, dy: View<'_>, dweight: View<'_>, dbias: Option<View<'_>>
        );
    }
    RotaryKernels {
        rope(x: View<'_>, rotary: Rotary<'_>, rotation: Rotation, y: View<'_>);
        rope_interleaved(x: View<'_>, rotary: Rotary<'_>, rotation: Rotation, y: View<'_>);
    }
    HeadKernels {
        join_heads(own: View<'_>, tail: View<'_>, y: View<'_>);
        join_heads_backward(dy: View<'_>, down: View<'_>, dtail: View<'_>);
        resize_heads(x: View<'_>, y: View<'_>);
        multiply_heads(product: HeadProduct<'_>);
    }
    AttentionKernels {
        attention[attention: Attention<'_>](
            q: View<'_>, k: View<'_>, v: View<'_>, out: View<'_>, log_sum_exp: View<'_>, write: Write
        );
        attention_backward[attention: Attention<'_>](
            q: View<'_>, k: View<'_>, v: View<'_>, out: View<'_>, log_sum_exp: View<'_>, dout: View<'_>,
            dq: View<'_>, dk: View<'_>, dv: View<'_>, write: AttentionWrite
        );
        attention_sinks_backward[attention: Attention<'_>](
            out: View<'_>, log_sum_exp: View<'_>, dout: View<'_>, dsinks: View<'_>
        );
        append_to_cache(cache: PagedCache<'_>, key_value_heads: usize, k: View<'_>, v: Option<View<'_>>);
        cached_attention[attention: Attention<'_>](
            cache: PagedCache<'_>, q: View<'_>, out: View<'_>, log_sum_exp: View<'_>
        );
        merge_attention(parts: View<'_>, log_sum_exp: View<'_>, out: View<'_>);
    }
    ElementwiseKernels {
        gated(kind: GatedActivation, gate: View<'_>, up: View<'_>, y: View<'_>);
        gated_backward(
            kind: GatedActivation, dy: View<'_>, gate: View<'_>, up: View<'_>, dgate: View<'_>, dup: View<'_>
        );
        gelu(kind: Gelu, x: View<'_>, y: View<'_>);
        gelu_backward(kind: Gelu, dy: View<'_>, x: View<'_>, dx: View<'_>);
        activation(kind: Activation, x: View<'_>, y: View<'_>);
        activation_backward(kind: Activation, dy: View<'_>, saved: View<'_>, dx: View<'_>);
        add(a: View<'_>, b: View<'_>, y: View<'_>);
        scale(factor: f32, x: View<'_>, y: View<'_>);
        dropout(dropout: Dropout<'_>, places: TokenPositions, first_feature: u32, x: View<'_>, y: View<'_>);
        gate_rows(gate: View<'_>, x: View<'_>, y: View<'_>);
        gate_rows_backward(dy: View<'_>, gate: View<'_>, x: View<'_>, dgate: View<'_>, dx: View<'_>);
        sum_rows(x: View<'_>, out: View<'_>);
    }
    LossKernels {
        cross_entropy(logits: View<'_>, labels: View<'_>, losses: View<'_>);
        cross_entropy_with_gradient(logits: View<'_>, labels: View<'_>, losses: View<'_>, seed: f32);
        cross_entropy_smoothed(logits: View<'_>, labels: View<'_>, smoothing: f32, losses: View<'_>);
        cross_entropy_smoothed_with_gradient(
            logits: View<'_>, labels: View<'_>, smoothing: f32, losses: View<'_>, seed: f32
        );
        squared_error(x: View<'_>, target: View<'_>, losses: View<'_>);
        squared_error_with_gradient(x: View<'_>, target: View<'_>, losses: View<'_>, seed: f32);
        correct(logits: View<'_>, labels: View<'_>, correct: View<'_>);
        softmax_statistics(logits: View<'_>, labels: View<'_>, first_column: usize, statistics: View<'_>);
        merge_softmax(parts: View<'_>, labels: View<'_>, log_sum_exp: View<'_>, losses: View<'_>);
        softmax_gradient(
            logits: View<'_>, labels: View<'_>, first_column: usize, log_sum_exp: View<'_>, seed: f32
        );
    }
    RouterKernels {
        router_top_k[router: Router<'_>](logits: View<'_>, routed: RouterOutputs<'_>);
        router_top_k_backward[router: Router<'_>](
            logits: View<'_>, routed: RouterOutputs<'_>, gradients: RouterGradients<'_>, places: TokenPositions,
            dlogits: View<'_>
        );
        router_load(routed: RouterOutputs<'_>, places: TokenPositions, counts: View<'_>, probabilities: View<'_>);
        router_margin[router: Router<'_>](scores: View<'_>) -> f32;
    }
    PermutationKernels {
        sort_slots(experts: View<'_>, first_expert: u32, permutation: Permutation<'_>, offsets: View<'_>);
        limit_slots(
            experts: View<'_>, places: TokenPositions, capacity: usize, before: Option<View<'_>>, kept: View<'_>
        );
        part_slots(experts: View<'_>, experts_of_rank: usize, of_parts: View<'_>);
        arrived_experts(counts: View<'_>, experts: usize, arrived: View<'_>);
        permute(permutation: Permutation<'_>, x: View<'_>, rows: View<'_>);
        unpermute(permutation: Permutation<'_>, rows: View<'_>, weights: Option<View<'_>>, y: View<'_>);
        unpermute_backward(
            permutation: Permutation<'_>, dy: View<'_>, rows: View<'_>, weights: View<'_>, drows: View<'_>,
            dweights: View<'_>
        );
    }
    OptimizerKernels {
        adamw[step: AdamW<'_>]();
        sgd[step: Sgd<'_>]();
        lion[step: Lion<'_>]();
        muon[step: Muon<'_>]();
        sum_of_squares(x: View<'_>) -> ExactSum;
    }
    CopyKernels {
        cast(x: View<'_>, y: View<'_>);
        transpose_blocks(x: View<'_>, y: View<'_>);
        prepend_row(row: View<'_>, x: View<'_>, y: View<'_>);
        prepend_row_backward_input(dy: View<'_>, dx: View<'_>, write: Write);
        prepend_row_backward_row(dy: View<'_>, drow: View<'_>);
        select_row(x: View<'_>, index: usize, y: View<'_>);
        select_row_backward(dy: View<'_>, index: usize, dx: View<'_>, write: Write);
        select_rows(x: View<'_>, indices: View<'_>, y: View<'_>);
        select_rows_backward(dy: View<'_>, indices: View<'_>, dx: View<'_>, write: Write);
        zero(y: View<'_>);
    }
    QuantizationKernels {
        quantize(kind: QuantizedType, x: View<'_>, residual: Option<View<'_>>, records: View<'_>);
        dequantize(kind: QuantizedType, records: View<'_>, y: View<'_>);
        dequantize_sum(kind: QuantizedType, parts: usize, records: View<'_>, y: View<'_>);
    }
}
