//! Kernels of vision models against their definitions and against numbers of PyTorch.

mod activation;
mod batch_norm;
mod fixtures;
mod loss;
mod pool;
mod rows;
