//! Heads whose queries, keys and values share one linear layer in files: for each key/value head the rows of its query
//! heads, then its own rows as a key, then as a value. GPT-NeoX, Falcon and BLOOM store them so.
//!
//! Models have three parameters instead, each of which tensor-parallel ranks shard by heads.

use lockstep_graph::{AttentionShape, Recorder, Value};
use lockstep_plan::ParameterRecord;

use crate::hf_tensor::{HfPlace, HfTensor};
use crate::hf_transform::HfTransform;

/// Names of the three layers, in the order of their rows in the fused one.
const PARTS: [&str; 3] = ["query", "key", "value"];

/// Numbers of heads, and elements of one.
#[derive(Debug, Clone, Copy)]
pub(super) struct FusedHeads {
    pub(super) heads: usize,
    pub(super) key_value_heads: usize,
    pub(super) head_dim: usize,
}

impl FusedHeads {
    /// Records queries, keys and values of the attention `module`; `linear` records the layer of a name and a number of
    /// columns.
    pub(super) fn project(
        &self,
        g: &mut Recorder,
        linear: impl Fn(&mut Recorder, &str, usize) -> Value,
        module: &str,
    ) -> [Value; 3] {
        let heads = [self.heads, self.key_value_heads, self.key_value_heads];
        [0, 1, 2].map(|i| linear(g, &format!("{module}.{}", PARTS[i]), heads[i] * self.head_dim))
    }

    /// Returns causal attention of these heads.
    pub(super) fn shape(&self) -> AttentionShape {
        AttentionShape::new(self.heads, self.key_value_heads, self.head_dim)
    }

    /// Returns the tensors of a checkpoint: the three parameters of each layer share one, all others have their own.
    pub(super) fn tensors(&self, records: &[ParameterRecord]) -> Vec<HfTensor> {
        let queries = self.heads / self.key_value_heads;
        let rows = [0..queries, queries..queries + 1, queries + 1..queries + 2];
        let mut tensors = Vec::new();
        for record in records.iter().filter(|record| record.tie.is_none()) {
            let own = |part: usize| format!("attention.{}.", PARTS[part]);
            let Some(part) = (0..PARTS.len()).find(|part| record.name.contains(&own(*part))) else {
                tensors.push(HfTensor::same(record));
                continue;
            };
            let rows = rows[part].start * self.head_dim..rows[part].end * self.head_dim;
            let (of, blocks) = ((queries + 2) * self.head_dim, self.key_value_heads);
            let name = record.name.replace(&own(part), "attention.query_key_value.");
            let shape = [&[of * blocks], &record.shape[1..]].concat();
            let transform = HfTransform::Rows { rows, of, blocks };
            HfTensor::add_place(&mut tensors, HfPlace::new(record, name, shape, transform));
        }
        tensors
    }
}
