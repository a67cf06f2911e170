//! Queues: kernels run in the order in which they are called.

use lockstep_plan::{DType, KvCacheType};

use crate::{BlockActivations, CacheShape, CpuLevel, Event, F32Products, Kernels, Summation, Workers};

/// A queue of a device: kernels run in the order in which they are called.
pub trait Queue: Kernels {
    /// Returns an event that completes when everything enqueued so far has run.
    fn record(&self) -> Event;

    /// Makes everything enqueued from now on run after `event`.
    fn wait(&self, event: &Event);

    /// Blocks the host until everything enqueued so far has run.
    fn finish(&self) {
        self.record().wait();
    }

    /// Returns the compute threads of the host, for work that is not a kernel.
    fn workers(&self) -> Workers;

    /// Returns the instruction set that the host's kernels use.
    fn level(&self) -> CpuLevel;

    /// Sets how f32 matrices are multiplied; has an effect only on a CPU with AMX.
    fn set_f32_products(&mut self, f32_products: F32Products);

    /// Sets the order of additions of linear layers' products and of attention.
    fn set_summation(&mut self, summation: Summation);

    /// Sets the type of the activations in products with quantized weights.
    fn set_block_activations(&mut self, activations: BlockActivations);

    /// Returns the bytes of a page of keys and of a page of values, of [`PAGE_TOKENS`](crate::PAGE_TOKENS) tokens, for a
    /// computation in `dtype` and a cache of type `stored`; 0 bytes of values if the keys are the values as well.
    fn page_bytes(&self, dtype: DType, stored: KvCacheType, shape: CacheShape) -> [usize; 2];

    /// Returns the number of compute threads of the host.
    fn threads(&self) -> usize {
        self.workers().threads()
    }
}
