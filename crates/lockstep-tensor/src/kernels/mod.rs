//! The kernels that every device must supply, with their shapes.
//!
//! Conventions for all of them: `T` is the number of tokens of a micro-batch (sequences × sequence length,
//! sequence-major). Activations and weights are f32, bf16 or f16; all float operands of a call share one type unless said
//! otherwise. Arithmetic is in f32. Weight gradients are f32 and always accumulate. Outputs must not overlap other
//! operands unless a kernel says "may be in place". Shapes that do not fit are a bug in the caller: the kernel panics
//! and names them. Work is split by shape only, so the number of threads changes no bit.

mod attention;
mod attention_variant;
mod batch_norm;
mod blocks;
mod convolution;
mod copies;
mod elementwise;
mod embedding;
mod experts;
mod gemm;
mod heads;
mod loss;
mod norm;
mod optimizer;
mod pool;

pub use attention::{
    Attention, AttentionKernels, AttentionWrite, CacheShape, CachedVectors, PAGE_TOKENS, PagedCache,
    TokenSpan,
};
pub use attention_variant::{AttentionDirection, AttentionVariant, alibi_slopes, document_ends};
pub use batch_norm::{BatchNorm, BatchNormKernels, RunningStatistics};
pub(crate) use blocks::interleaved_bytes;
pub use blocks::{BlockActivations, BlockGemm, BlockKernels, BlockLayout, BlockMatrix, Matrix};
pub use convolution::{Conv2d, ConvolutionKernels, Window2d};
pub use copies::{CopyKernels, QuantizationKernels};
pub use elementwise::{Activation, Dropout, ElementwiseKernels, GatedActivation, Gelu, TokenPositions};
pub use embedding::EmbeddingKernels;
pub use experts::{
    ExpertGroups, Permutation, PermutationKernels, Router, RouterGradients, RouterKernels, RouterOutputs,
    RouterScores, RouterWeights,
};
pub use gemm::{Gemm, GemmKernels, GemmLayout, GroupedGemm, Summation, Write};
pub use heads::{HeadKernels, HeadProduct, Rotary, RotaryKernels, Rotation};
pub use loss::LossKernels;
pub use norm::{LayerNorm, NormKernels, RmsNorm};
pub use optimizer::{AdamW, Lion, Muon, OptimizerKernels, Rounding, Sgd};
pub use pool::{Pool2d, PoolKernels};

/// All kernels of a queue, by family. They run in the order in which they are called.
pub trait Kernels:
    GemmKernels
    + ConvolutionKernels
    + PoolKernels
    + BatchNormKernels
    + EmbeddingKernels
    + BlockKernels
    + NormKernels
    + RotaryKernels
    + HeadKernels
    + AttentionKernels
    + ElementwiseKernels
    + LossKernels
    + RouterKernels
    + PermutationKernels
    + OptimizerKernels
    + CopyKernels
    + QuantizationKernels
{
}
