//! The CPU's queue: it runs every kernel before the call returns.

use std::sync::Arc;

use lockstep_plan::{DType, KvCacheType};

use super::{
    attention::page_bytes,
    gemm::Scratch,
    pool::{Pool, Workers},
};
use crate::{
    Arena, BlockActivations, CacheShape, CpuLevel, Event, F32Products, Kernels, Queue, Summation, TensorError,
};

/// A queue that runs every kernel before it returns.
pub struct CpuQueue {
    pub(super) pool: Arc<Pool>,
    pub(super) level: CpuLevel,
    pub(super) f32_products: F32Products,
    pub(super) summation: Summation,
    pub(super) block_activations: BlockActivations,
    pub(super) arena: Arena,
    pub(super) scratch: Scratch,
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
        // SAFETY: the CPU has the level.
        unsafe { Self::with_emulated_level(threads, arena, level.on_this_cpu()) }
    }

    /// Creates a queue at a level that the CPU may lack, for tests that emulate its instructions.
    ///
    /// # Errors
    /// As [`CpuQueue::with_level`].
    ///
    /// # Safety
    /// The CPU or a handler of illegal instructions must execute every instruction of the level.
    #[doc(hidden)]
    pub unsafe fn with_emulated_level(
        threads: usize,
        arena: &Arena,
        level: CpuLevel,
    ) -> Result<Self, TensorError> {
        let pool = Pool::new(threads).map_err(|source| TensorError::ThreadPool { threads, source })?;
        let pool = Arc::new(pool);
        let scratch = Scratch::new(pool.threads(), arena)?;
        Ok(Self {
            pool,
            level,
            f32_products: F32Products::default(),
            summation: Summation::default(),
            block_activations: BlockActivations::default(),
            arena: arena.clone(),
            scratch,
        })
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

impl Kernels for CpuQueue {}

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

    fn set_summation(&mut self, summation: Summation) {
        self.summation = summation;
    }

    fn set_block_activations(&mut self, activations: BlockActivations) {
        self.block_activations = activations;
    }

    fn page_bytes(&self, dtype: DType, stored: KvCacheType, shape: CacheShape) -> [usize; 2] {
        page_bytes(self.level, dtype, stored, shape)
    }
}

impl Workers {
    /// Returns the bytes that the kernels of a queue with `threads` compute threads book for its lifetime.
    pub const fn booked_bytes(threads: usize) -> usize {
        Scratch::booked_bytes(threads)
    }
}
