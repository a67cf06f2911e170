//! Low-rank adapters (LoRA) on linear layers whose own weights are frozen. `linear` records them.

use std::collections::BTreeMap;

use crate::block::Value;

/// Low-rank adapters of some linear layers of a block: `y = x Wᵀ + b + scale · (dropout(x) Aᵀ) Bᵀ` with
/// `A [rank, in]` and `B [out, rank]` (Hu et al., 2021, section 4.1).
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LoraAdapters {
    /// Rank of the adapters: rows of `A`.
    pub rank: usize,
    /// Factor on the adapter's output.
    pub scale: f32,
    /// Dropout probability on the adapter's input.
    pub dropout: f32,
    /// Adapted layers by name within the block, each with the name of its `A`; layers that read the same value may
    /// use one `A`. The parameters are `NAME.lora_A.weight` and `LAYER.lora_B.weight`.
    pub layers: BTreeMap<String, String>,
}

/// The scaled output of an `A`, which several layers may read.
#[derive(Debug)]
pub(crate) struct LoraDown {
    pub(crate) name: String,
    pub(crate) of: Value,
    pub(crate) value: Value,
}
