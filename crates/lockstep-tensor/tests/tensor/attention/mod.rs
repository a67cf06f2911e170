//! Attention against its definition and against numbers of PyTorch.

mod fixtures;
mod head_product;
mod kernels;
mod pages;
mod reference;
mod spans;
mod variants;
