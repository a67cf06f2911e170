//! The model families, each written forward-only for one micro-batch on one device.

mod bert;
mod encoder;
mod experts;
mod gpt2;
mod latent;
mod llama;
mod resnet;
mod vit;
