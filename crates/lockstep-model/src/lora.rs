//! LoRA adapters of a model: the adapted linear layers, their parameter names, and their tensors in PEFT's format.
//!
//! Layers are named by Hugging Face's modules, as in PEFT. A module that consists of several layers here (GPT-2's
//! `c_attn` is q, k and v) has one `A`, which these layers read, and one `B`, of which each layer holds a range of
//! rows. So our adapters and PEFT's hold the same numbers.

use std::collections::BTreeMap;

use lockstep_graph::LoraAdapters;
use serde::{Deserialize, Serialize};

/// Formula of an adapter's scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LoraScaling {
    /// Scale `alpha / rank`.
    #[default]
    Standard,
    /// Scale `alpha / sqrt(rank)` (Kalajdzievski, 2023).
    RankStabilized,
}

/// Hyperparameters of an adapter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LoraConfig {
    /// Rank of the adapter: rows of `A`, columns of `B`.
    pub rank: usize,
    /// Numerator of the scale.
    pub alpha: f64,
    /// Dropout probability on the inputs of adapted layers.
    pub dropout: f64,
    /// Formula of the scale.
    pub scaling: LoraScaling,
    /// Target modules, each by its full name or a suffix of it; or [`ALL_LINEAR`](crate::ALL_LINEAR).
    pub targets: Vec<String>,
}

impl LoraConfig {
    /// Returns the factor on the adapter's output.
    pub fn scale(&self) -> f64 {
        match self.scaling {
            LoraScaling::Standard => self.alpha / self.rank as f64,
            LoraScaling::RankStabilized => self.alpha / (self.rank as f64).sqrt(),
        }
    }
}

/// The adapter of one model.
#[derive(Debug, Clone, PartialEq)]
pub struct Adapter {
    pub(crate) config: LoraConfig,
    /// Hugging Face module of each adapted layer, both by their full names.
    pub(crate) layers: BTreeMap<String, String>,
    /// True if modules store their weights as `[in, out]`.
    pub(crate) fan_in_fan_out: bool,
    pub(crate) tensors: Vec<AdapterTensor>,
}

/// A tensor of an adapter in PEFT's format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterTensor {
    /// Name, without PEFT's prefix.
    pub name: String,
    /// Shape as PEFT stores it.
    pub shape: Vec<usize>,
    /// Names of the parameters that make up the tensor, in order, with their numbers of elements.
    pub parameters: Vec<(String, usize)>,
}

impl Adapter {
    /// Returns the hyperparameters.
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// Returns the adapter with dropout 0.
    pub fn without_dropout(&self) -> Self {
        let mut changed = self.clone();
        changed.config.dropout = 0.0;
        changed
    }

    /// Returns the tensors in PEFT's format.
    pub fn tensors(&self) -> &[AdapterTensor] {
        &self.tensors
    }

    /// Returns true if modules store their weights as `[in, out]`: PEFT's `fan_in_fan_out`.
    pub fn fan_in_fan_out(&self) -> bool {
        self.fan_in_fan_out
    }

    /// Returns the names of the `A` and `B` that adapt the parameter called `parameter`; `None` if it is not adapted.
    pub fn factors_of(&self, parameter: &str) -> Option<[String; 2]> {
        let layer = parameter.strip_suffix(".weight")?;
        let module = self.layers.get(layer)?;
        Some([format!("{module}.lora_A.weight"), format!("{layer}.lora_B.weight")])
    }

    /// Returns true if `name` is a parameter of an adapter.
    pub fn owns(name: &str) -> bool {
        name.ends_with(".lora_A.weight") || name.ends_with(".lora_B.weight")
    }

    /// Returns the part of the adapter in the unit whose parameter names begin with `prefix`.
    pub(crate) fn within(&self, prefix: &str) -> LoraAdapters {
        let within = |(layer, module): (&String, &String)| {
            Some((layer.strip_prefix(prefix)?.to_owned(), module.strip_prefix(prefix)?.to_owned()))
        };
        LoraAdapters {
            rank: self.config.rank,
            scale: self.config.scale() as f32,
            dropout: self.config.dropout as f32,
            layers: self.layers.iter().filter_map(within).collect(),
        }
    }
}
