//! Parts that BERT and ViT have in common: bidirectional attention and a plain feed-forward layer.

use lockstep_graph::{AttentionOptions, AttentionShape, Linear, Recorder, Split, Value};
use lockstep_tensor::AttentionDirection;

use crate::config::{Activation, EncoderSizes};
use crate::model::Sizes;

/// Settings of the blocks of an encoder.
pub(super) struct Encoder {
    pub(super) sizes: EncoderSizes,
    pub(super) activation: Activation,
    /// Names of the projections of queries, keys and values.
    pub(super) projections: [&'static str; 3],
    pub(super) qkv_bias: bool,
    /// Dropout probability on each output that a block adds to the residual stream.
    pub(super) dropout: f32,
    pub(super) attention_dropout: f32,
    pub(super) std: f32,
}

/// Output projection of the attention.
const ATTENTION_OUTPUT: &str = "attention.output.dense";
/// The two layers of the feed-forward layer.
const FEED_FORWARD: [&str; 2] = ["intermediate.dense", "output.dense"];

impl Encoder {
    pub(super) fn linear(
        &self,
        g: &mut Recorder,
        x: Value,
        name: &str,
        out_features: usize,
        bias: bool,
    ) -> Value {
        g.linear(x, Linear { name, out_features, bias: bias.into(), std: self.std })
    }

    /// Records attention in both directions, with its projections; `key_mask` hides padding.
    pub(super) fn attention(&self, g: &mut Recorder, x: Value, key_mask: Option<Value>) -> Value {
        let EncoderSizes { hidden_size, num_attention_heads: heads, .. } = self.sizes;
        let [q, k, v] = self.projections.map(|name| self.linear(g, x, name, hidden_size, self.qkv_bias));
        let shape = AttentionShape {
            direction: AttentionDirection::Bidirectional,
            ..AttentionShape::new(heads, heads, self.sizes.head_dim())
        };
        let options =
            AttentionOptions { dropout: self.attention_dropout, key_mask, ..AttentionOptions::default() };
        let attended = g.attention(q, k, v, shape, options);
        let projected = self.linear(g, attended, ATTENTION_OUTPUT, hidden_size, true);
        g.dropout(projected, self.dropout)
    }

    pub(super) fn feed_forward(&self, g: &mut Recorder, x: Value) -> Value {
        let [wide, narrow] = FEED_FORWARD;
        let x = self.linear(g, x, wide, self.sizes.intermediate_size, true);
        let x = self.activation.record(g, x);
        let x = self.linear(g, x, narrow, self.sizes.hidden_size, true);
        g.dropout(x, self.dropout)
    }

    /// Returns the tensor-parallel sharding of a block.
    pub(super) fn splits(&self) -> impl Iterator<Item = (&'static str, Split)> + use<> {
        let heads = Split::ColumnParallel { pieces: self.sizes.num_attention_heads };
        let features = Split::ColumnParallel { pieces: self.sizes.intermediate_size };
        let [wide, narrow] = FEED_FORWARD;
        let others = [(ATTENTION_OUTPUT, Split::RowParallel), (wide, features), (narrow, Split::RowParallel)];
        self.projections.map(|name| (name, heads)).into_iter().chain(others)
    }
}

/// Returns the sizes of an encoder's blocks that plans are checked against.
pub(super) fn sizes_of(sizes: EncoderSizes) -> Sizes {
    Sizes {
        layers: sizes.num_hidden_layers,
        hidden: sizes.hidden_size,
        intermediate: sizes.intermediate_size,
        heads: sizes.num_attention_heads,
        key_value_heads: sizes.num_attention_heads,
        head_dim: sizes.head_dim(),
        ..Sizes::default()
    }
}
