//! Low-rank adaptation: what is added to a linear layer whose own weights stay as they are.

use std::collections::BTreeMap;

use lockstep_plan::Initializer;

use crate::{Bias, Recorder, Split, Value, operation::Operation};

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
        // Where ranks share the layer, `A` is split as it is by inputs, and `B` by outputs.
        let split = self.split_of(layer);
        let by_inputs = split.filter(|split| *split == Split::Inputs);
        let by_outputs = split.filter(|split| matches!(split, Split::Outputs { .. }));
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
                let initializer = (Bias::Without, Initializer::Uniform { bound });
                let reduced = self.product(dropped, &format!("{name}.lora_A"), rank, by_inputs, initializer);
                let value = self.scale(reduced, scale);
                self.narrow.push(Narrow { name, of: x, value });
                value
            }
        };
        let module = format!("{layer}.lora_B");
        let initializer = (Bias::Without, Initializer::Zeros);
        let added = self.product(narrow, &module, self.columns(y), by_outputs, initializer);
        self.add(y, added)
    }

    /// `factor · x`.
    pub fn scale(&mut self, x: Value, factor: f32) -> Value {
        let y = self.value_like(x, self.columns(x));
        self.operations.push(Operation::Scale { x, factor, y });
        y
    }
}
