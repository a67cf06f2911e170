//! Low-rank adaptation: what is added to a linear layer whose own weights stay as they are.

use std::collections::BTreeMap;

use lockstep_plan::Initializer;

use crate::{Recorder, Value, operation::Operation};

/// Additions to some linear layers of a block: `y = x Wᵀ + b + scale · (dropout(x) Aᵀ) Bᵀ` with `A [rank, in]` and
/// `B [out, rank]` (Hu et al., 2021, section 4.1).
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LowRank {
    /// Columns of the narrow value.
    pub rank: usize,
    /// Factor on what is added.
    pub scale: f32,
    /// Dropout of the layer's input.
    pub dropout: f32,
    /// The layers by name within the block, each with the name under which its `A` stands: layers that read the same
    /// value may share one. The parameters are `NAME.lora_A.weight` and `LAYER.lora_B.weight`.
    pub layers: BTreeMap<String, String>,
}

/// A narrow value that layers share.
#[derive(Debug)]
pub(crate) struct Narrow {
    name: String,
    of: Value,
    value: Value,
}

impl Recorder {
    /// Records what is to be added to the linear layers that are still to come.
    pub fn adapt(&mut self, low_rank: LowRank) {
        self.low_rank = Some(low_rank);
    }

    /// The output `y` of the linear layer `layer` on `x`, with what is added to it.
    pub(crate) fn adapted(&mut self, layer: &str, x: Value, y: Value) -> Value {
        let Some(low_rank) = &self.low_rank else { return y };
        let Some(name) = low_rank.layers.get(layer).cloned() else { return y };
        let (rank, scale, dropout) = (low_rank.rank, low_rank.scale, low_rank.dropout);
        let known = self.narrow.iter().find(|narrow| narrow.name == name);
        let narrow = match known {
            Some(narrow) => {
                assert_eq!(narrow.of, x, "{layer} shares {name}.lora_A and reads another value");
                narrow.value
            }
            None => {
                let dropped = self.dropout(x, dropout);
                // What PEFT starts from: Kaiming's uniform with a = √5.
                let bound = (self.columns(x) as f32).powf(-0.5);
                let weight = format!("{name}.lora_A.weight");
                let reduced = self.product(dropped, weight, rank, Initializer::Uniform { bound });
                let value = self.scale(reduced, scale);
                self.narrow.push(Narrow { name, of: x, value });
                value
            }
        };
        let weight = format!("{layer}.lora_B.weight");
        let added = self.product(narrow, weight, self.columns(y), Initializer::Zeros);
        self.add(y, added)
    }

    /// `factor · x`.
    pub fn scale(&mut self, x: Value, factor: f32) -> Value {
        let y = self.value(self.columns(x));
        self.operations.push(Operation::Scale { x, factor, y });
        y
    }

    /// `x Wᵀ` with a weight of this name.
    fn product(&mut self, x: Value, weight: String, out_features: usize, initializer: Initializer) -> Value {
        let weight = self.parameter(weight, &[out_features, self.columns(x)], initializer);
        let y = self.value(out_features);
        self.operations.push(Operation::Linear { x, weight, bias: None, y });
        y
    }
}
