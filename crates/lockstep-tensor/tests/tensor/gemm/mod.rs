//! Products and convolutions against their definitions.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx_emulator;
mod convolutions;
mod grouped;
mod products;
mod quantized;
mod reference;
