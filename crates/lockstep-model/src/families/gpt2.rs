//! GPT-2: learned positions, LayerNorm before attention and feed-forward, GELU, dropout after the embedding and
//! after each projection into the residual stream (Radford et al., 2019).

use lockstep_graph::{AttentionShape, BatchInput, Linear, Recorder, Split, Value};
use lockstep_tensor::Gelu;

use super::Family;
use crate::{Activation, Gpt2Config};

impl Gpt2Config {
    fn linear(&self, g: &mut Recorder, x: Value, name: &str, out_features: usize) -> Value {
        let std = self.initializer_range as f32;
        g.linear(x, Linear { name, out_features, bias: self.bias.into(), std })
    }

    /// Records a projection into the residual stream, with dropout. Its initial weights are smaller in deeper models.
    fn residual(&self, g: &mut Recorder, x: Value, name: &str) -> Value {
        let std = (self.initializer_range / (2.0 * self.num_hidden_layers as f64).sqrt()) as f32;
        let y = g.linear(x, Linear { name, out_features: self.hidden_size, bias: self.bias.into(), std });
        g.dropout(y, self.residual_dropout as f32)
    }

    fn norm(&self, g: &mut Recorder, x: Value, name: &str) -> Value {
        g.layer_norm(x, name, self.bias.into(), self.layer_norm_epsilon as f32)
    }

    fn attention(&self, g: &mut Recorder, x: Value) -> Value {
        let head_dim = self.hidden_size / self.num_attention_heads;
        let q = self.linear(g, x, "attn.q", self.hidden_size);
        let k = self.linear(g, x, "attn.k", self.hidden_size);
        let v = self.linear(g, x, "attn.v", self.hidden_size);
        let shape = AttentionShape {
            heads: self.num_attention_heads,
            key_value_heads: self.num_attention_heads,
            head_dim,
            scale: (head_dim as f32).powf(-0.5),
            window: None,
        };
        let attended = g.attention(q, k, v, shape, self.attention_dropout as f32);
        self.residual(g, attended, "attn.c_proj")
    }

    fn feed_forward(&self, g: &mut Recorder, x: Value) -> Value {
        let kind = match self.activation {
            Activation::GeluExact => Gelu::Exact,
            Activation::GeluTanh => Gelu::Tanh,
        };
        let wide = self.linear(g, x, "mlp.c_fc", self.intermediate_size);
        let active = g.gelu(kind, wide);
        self.residual(g, active, "mlp.c_proj")
    }
}

impl Family for Gpt2Config {
    fn embedding_prefix(&self) -> String {
        "transformer.".into()
    }

    fn block_prefix(&self, layer: usize) -> String {
        format!("transformer.h.{layer}.")
    }

    fn embedding(&self, g: &mut Recorder) -> Value {
        let std = self.initializer_range as f32;
        let (hidden, positions) = (self.hidden_size, self.max_position_embeddings);
        let token = g.embedding(BatchInput::Ids, "wte", self.vocab_size, hidden, std);
        let position = g.embedding(BatchInput::Positions, "wpe", positions, hidden, std);
        let x = g.add(token, position);
        g.dropout(x, self.embedding_dropout as f32)
    }

    fn block(&self, _: usize, g: &mut Recorder) -> Value {
        let x = g.input(self.hidden_size);
        let normed = self.norm(g, x, "ln_1");
        let attended = self.attention(g, normed);
        let x = g.add(x, attended);
        let normed = self.norm(g, x, "ln_2");
        let fed = self.feed_forward(g, normed);
        g.add(x, fed)
    }

    fn head(&self, g: &mut Recorder) -> (Value, Linear<'static>) {
        let x = g.input(self.hidden_size);
        let normed = self.norm(g, x, "transformer.ln_f");
        let std = self.initializer_range as f32;
        (normed, Linear { name: "lm_head", out_features: self.vocab_size, bias: false.into(), std })
    }

    fn embedding_table(&self) -> &'static str {
        "transformer.wte.weight"
    }

    fn inverse_frequencies(&self) -> Option<Vec<f32>> {
        None
    }

    fn tensor_splits(&self) -> Vec<(&'static str, Split)> {
        let heads = Split::ColumnParallel { pieces: self.num_attention_heads };
        let features = Split::ColumnParallel { pieces: self.intermediate_size };
        vec![
            ("wte", Split::VocabularyParallel),
            ("attn.q", heads),
            ("attn.k", heads),
            ("attn.v", heads),
            ("attn.c_proj", Split::RowParallel),
            ("mlp.c_fc", features),
            ("mlp.c_proj", Split::RowParallel),
            ("lm_head", Split::VocabularyParallel),
        ]
    }
}
