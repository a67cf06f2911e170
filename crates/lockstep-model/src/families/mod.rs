//! The model families, each written forward-only for one micro-batch on one device.

mod experts;
mod gpt2;
mod latent;
mod llama;
mod llama_files;
mod resnet;
