//! The CPU's queue: kernels run before their call returns, on a pool of threads whose size the caller sets.
//!
//! Each kernel has its own file. Its scalar reference and its tests are in `tests/tensor`. `level` detects the usable
//! instructions once, by CPUID; an instruction that the CPU lacks is never executed.

mod attention;
mod bandwidth;
mod blocks;
mod capacity;
mod cast;
mod dropout;
mod elementwise;
mod embedding;
mod gate;
mod gated;
mod gemm;
mod heads;
mod level;
mod loss;
mod map;
mod norm;
mod operands;
mod optimizer;
mod permute;
mod pool;
mod preference;
mod quantize;
mod queue;
mod rope;
mod router;
mod shares;
mod simd;
mod softmax;
mod tasks;
mod vision;

pub use attention::page_bytes;
pub use bandwidth::measure_bandwidth;
pub use gemm::{Peak, measure_peak, measure_peak_within};
pub use level::{CpuLevel, F32Products};
pub use optimizer::muon_flops;
pub use pool::Workers;
pub use preference::{Preference, Reason};
pub use queue::CpuQueue;
