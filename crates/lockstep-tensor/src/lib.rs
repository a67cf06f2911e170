//! Memory and compute: buffers booked in a ledger, typed views of them, and the kernels that work on them.
//!
//! A [`Buffer`] comes from an [`Arena`], which books every byte under a
//! [`MemoryCategory`](lockstep_plan::MemoryCategory) until the buffer is dropped. A [`View`] is a typed, shaped
//! window of a buffer. All arithmetic is a call of the [`Kernels`] trait, which the [`Queue`] of a [`Device`]
//! implements. The CPU's queue runs each kernel before the call returns, on a thread pool whose size the caller sets.
//!
//! A buffer behaves like a [`Cell`](std::cell::Cell): kernels write through shared handles. Three rules make that
//! sound:
//! - Neither buffers nor views can be shared between threads (`Buffer` is `Send` but not `Sync`).
//! - Only methods that take `&mut Buffer` hand out a reference into a buffer's bytes.
//! - Every kernel checks, before it touches memory, that its outputs overlap none of its other operands.

mod arena;
mod block;
mod buffer;
pub mod cpu;
#[cfg(feature = "delayed")]
pub mod delayed;
mod device;
mod disk;
mod error;
mod event;
pub mod host;
mod kernels;
mod mapped;
mod named_tensor;
mod queue;
mod shape;
mod shared;
mod tensor;
pub mod topology;
mod view;

pub use arena::{Arena, Device};
pub use buffer::{Buffer, Loan};
pub use cpu::{CpuLevel, CpuQueue, F32Products, Workers, muon_flops, page_bytes};

pub use disk::{
    Action, DiskBackend, DiskError, DiskIo, DiskQueue, DiskTraffic, ScratchFile, StoredFile, Ticket, Transfer,
};
pub use error::TensorError;
pub use event::{DeviceEvent, Event, Pending};
pub use kernels::{
    Activation, AdamW, Attention, AttentionDirection, AttentionKernels, AttentionVariant, AttentionWrite,
    BatchNorm, BatchNormKernels, BlockActivations, BlockGemm, BlockKernels, BlockLayout, BlockMatrix,
    CacheShape, CachedVectors, Conv2d, ConvolutionKernels, CopyKernels, Dropout, ElementwiseKernels,
    EmbeddingKernels, ExpertGroups, GatedActivation, Gelu, Gemm, GemmKernels, GemmLayout, GroupedGemm,
    HeadKernels, HeadProduct, Kernels, LayerNorm, Lion, LossKernels, Matrix, Muon, NormKernels,
    OptimizerKernels, PAGE_TOKENS, PagedCache, Permutation, PermutationKernels, Pool2d, PoolKernels,
    QuantizationKernels, RmsNorm, Rotary, RotaryKernels, Rotation, Rounding, Router, RouterGradients,
    RouterKernels, RouterOutputs, RouterScores, RouterWeights, RunningStatistics, Sgd, Summation,
    TokenPositions, TokenSpan, Window2d, Write, alibi_slopes, document_ends,
};
pub use mapped::{MappedFile, MappedTensors};
pub use named_tensor::{INPUT_IDS, LABELS, NamedTensor, TensorData, find_tensor, is_name_of};
pub use queue::Queue;
pub use shape::{Element, Shape};
pub use shared::{SharedHeap, SharedMemory};
pub use tensor::Tensor;
pub use view::{DeviceMemory, MemoryLocation, View};
