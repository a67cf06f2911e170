//! Low-rank adapters (LoRA) on linear layers whose own weights are frozen: `y = x Wᵀ + b + scale · (dropout(x) Aᵀ) Bᵀ`.

use lockstep_plan::Initializer;

use crate::{
    block::{Bias, LoraAdapters, LoraDown, Value},
    placement::Split,
    recorder::Recorder,
};

impl Recorder {
    /// Adds low-rank adapters to the linear layers that are recorded from now on.
    pub fn adapt(&mut self, low_rank: LoraAdapters) {
        self.low_rank = Some(low_rank);
    }

    /// Returns the output `y` of the linear layer `layer` on `x` plus its adapter's output, or `y` if the layer has no adapter.
    pub(crate) fn adapted(&mut self, layer: &str, x: Value, y: Value) -> Value {
        let Some(low_rank) = &self.low_rank else { return y };
        let Some(name) = low_rank.layers.get(layer).cloned() else { return y };
        let (rank, scale, dropout) = (low_rank.rank, low_rank.scale, low_rank.dropout);
        // `A` follows a row-parallel layer's split of its inputs, `B` a column-parallel layer's split of its outputs.
        let split = self.split_of(layer);
        let by_inputs = split.filter(|split| *split == Split::RowParallel);
        let by_outputs = split.filter(|split| matches!(split, Split::ColumnParallel { .. }));
        let known = self.lora_downs.iter().find(|down| down.name == name);
        let narrow = match known {
            Some(down) => {
                assert_eq!(down.of, x, "{layer} shares {name}.lora_A and reads another value");
                down.value
            }
            None => {
                let dropped = self.dropout(x, dropout);
                // PEFT's default for `A`: Kaiming uniform with a = √5.
                let bound = (self.columns(x) as f32).powf(-0.5);
                let initializer = (Bias::Without, Initializer::Uniform { bound });
                let reduced = self.product(dropped, &format!("{name}.lora_A"), rank, by_inputs, initializer);
                let value = self.scale(reduced, scale);
                self.lora_downs.push(LoraDown { name, of: x, value });
                value
            }
        };
        let module = format!("{layer}.lora_B");
        let initializer = (Bias::Without, Initializer::Zeros);
        let added = self.product(narrow, &module, self.columns(y), by_outputs, initializer);
        self.add(y, added)
    }
}
