//! Causal attention in blocks (FlashAttention), forward and backward: memory grows linearly with the sequence length.
//!
//! Work is split into tasks by shape alone. A task reads shared inputs, writes outputs of its own, and adds in a
//! fixed order, so any number of threads gives the same bits. Inside a task, blocks of 64 queries and 64 keys are
//! copied to scratch as f32, and products of blocks run in registers.
//!
//! Context-parallel ranks call it for one span of queries and one of keys at a time; the results of the calls are
//! merged in the output tensors.
//!
//! `dispatch` checks the operands and chooses the algorithm, `worker` runs its tasks on the threads.
//! `geometry` determines the visible keys of each query; `lanes` and `x86` are vector registers; `product` multiplies
//! blocks; `block` packs and scores them. `forward` and `backward` are the algorithms, `output` writes their results,
//! and `tiles` runs them on bf16 matrix instructions.

mod backward;
mod block;
mod dispatch;
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
mod worker;
#[cfg(target_arch = "x86_64")]
mod x86;
