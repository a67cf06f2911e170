//! The kernels against their references, at every level that this CPU has.
//!
//! One program holds all tests that call kernels, and links the crate that the rest of the workspace links. Unit tests in
//! `src` call no kernel, because their program would compile all kernels again.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

mod all_kernels;
mod attention;
mod capacity;
mod cast;
mod device;
mod dropout;
mod elementwise;
mod embedding;
mod gate;
mod gated;
mod gemm;
mod heads;
mod loss;
mod norm;
mod optimizer;
mod permute;
mod quantize;
mod reference;
mod rope;
mod router;
mod tasks;
mod testing;
mod vision;
