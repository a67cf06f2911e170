//! The model families, each written forward-only for one micro-batch on one device.

mod bert;
mod bloom;
mod encoder;
mod experts;
mod falcon;
mod feed_forward;
mod fused;
mod gpt2;
mod gpt_neox;
mod latent;
mod llama;
mod llama_files;
mod opt;
mod resnet;
mod vit;

pub(crate) use experts::EXPERTS;
