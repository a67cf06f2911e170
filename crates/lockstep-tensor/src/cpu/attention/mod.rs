//! Attention in blocks (FlashAttention), forward and backward: memory grows linearly with the sequence length.
//!
//! Work is split into tasks by shape alone. A task reads shared inputs, writes outputs of its own, and adds in a
//! fixed order, so any number of threads gives the same bits. Inside a task, blocks of 64 queries and 64 keys are
//! copied to scratch as f32, and products of blocks run in registers.
//!
//! Context-parallel ranks call it for one span of queries and one of keys at a time; the results of the calls are
//! merged in the output tensors.
//!
//! `dispatch` checks the operands and chooses the algorithm, `worker` runs its tasks on the threads.
//! `geometry` determines the visible keys of each query; `lanes`, `x86` and `aarch64` are vector registers; `product` multiplies
//! blocks; `block` packs and scores them, and `scores` changes the scores for soft-capping and ALiBi. `forward` and
//! `backward` are the algorithms, `sinks` is the gradient of attention sinks, `output` writes the results, and `tiles`
//! runs them on bf16 matrix instructions with the operands of `packed`. `pages` is the key-value cache, `page_codes` are its
//! narrow numbers, and `cached` attends to it. `variant` reads key
//! masks and sinks. `head_product` multiplies heads by matrices of their own, for latent attention.

#[cfg(target_arch = "aarch64")]
mod aarch64;
mod backward;
mod block;
mod cached;
mod dispatch;
mod forward;
mod geometry;
mod head_product;
mod lanes;
mod merge;
mod output;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod packed;
mod page_codes;
mod page_format;
mod page_layout;
mod pages;
mod product;
mod scores;
mod sinks;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod tiles;
mod variant;
mod worker;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(super) use head_product::multiply_heads;
pub use page_layout::page_bytes;
