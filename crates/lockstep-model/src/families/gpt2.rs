//! GPT-2: learned positions, LayerNorm before attention and feed-forward, GELU, dropout after the embedding and
//! after each projection into the residual stream (Radford et al., 2019).

use std::collections::HashMap;
use std::sync::Arc;

use lockstep_graph::{AttentionOptions, AttentionShape, BatchInput, Linear, Recorder, Split, Value};
use lockstep_plan::ParameterRecord;
use serde_json::{Map, Value as Json};

use crate::config::{Gpt2Config, SpecialTokens, canonical_key};
use crate::error::ConfigProblem;
use crate::hf_tensor::{HfContent, HfPlace, HfTensor};
use crate::hf_transform::HfTransform;
use crate::model::{Model, Sizes, Tie, Unit};

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
        let q = self.linear(g, x, "attn.q", self.hidden_size);
        let k = self.linear(g, x, "attn.k", self.hidden_size);
        let v = self.linear(g, x, "attn.v", self.hidden_size);
        let heads = self.num_attention_heads;
        let shape = AttentionShape::new(heads, heads, self.hidden_size / heads);
        let dropout = self.attention_dropout as f32;
        let attended =
            g.attention(q, k, v, shape, AttentionOptions { dropout, ..AttentionOptions::default() });
        self.residual(g, attended, "attn.c_proj")
    }

    fn feed_forward(&self, g: &mut Recorder, x: Value) -> Value {
        let wide = self.linear(g, x, "mlp.c_fc", self.intermediate_size);
        let active = self.activation.record(g, wide);
        self.residual(g, active, "mlp.c_proj")
    }

    fn embedding(&self, g: &mut Recorder) -> Value {
        let std = self.initializer_range as f32;
        let (hidden, positions) = (self.hidden_size, self.max_position_embeddings);
        let token = g.embedding(BatchInput::Ids, "wte", self.vocab_size, hidden, std);
        let position = g.embedding(BatchInput::Positions, "wpe", positions, hidden, std);
        let x = g.add(token, position);
        g.dropout(x, self.embedding_dropout as f32)
    }

    fn block(&self, g: &mut Recorder) -> Value {
        let x = g.input(self.hidden_size);
        let normed = self.norm(g, x, "ln_1");
        let attended = self.attention(g, normed);
        let x = g.add(x, attended);
        let normed = self.norm(g, x, "ln_2");
        let fed = self.feed_forward(g, normed);
        g.add(x, fed)
    }

    fn head(&self, g: &mut Recorder) -> Value {
        let x = g.input(self.hidden_size);
        let normed = self.norm(g, x, "transformer.ln_f");
        let (out_features, std) = (self.vocab_size, self.initializer_range as f32);
        let output_layer = Linear { name: "lm_head", out_features, bias: false.into(), std };
        g.language_model_head(normed, output_layer, None)
    }
}

impl Model for Gpt2Config {
    fn model_type(&self) -> &str {
        "gpt2"
    }

    fn units(&self) -> Vec<Unit> {
        Unit::decoder("transformer.", self.num_hidden_layers, |layer| (format!("transformer.h.{layer}."), 0))
    }

    fn record(&self, unit: usize, g: &mut Recorder) -> Value {
        match unit {
            0 => self.embedding(g),
            unit if unit <= self.num_hidden_layers => self.block(g),
            _ => self.head(g),
        }
    }

    fn placements(&self) -> Vec<(&'static str, Split)> {
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

    fn ties(&self) -> Vec<Tie> {
        let head = self.num_hidden_layers + 1;
        Tie::output_layer(self.tie_word_embeddings, head, "transformer.wte.weight")
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            layers: self.num_hidden_layers,
            vocab: self.vocab_size,
            hidden: self.hidden_size,
            intermediate: self.intermediate_size,
            heads: self.num_attention_heads,
            key_value_heads: self.num_attention_heads,
            head_dim: self.head_dim(),
            positions: self.max_position_embeddings,
            ..Sizes::default()
        }
    }

    fn table(&self) -> Map<String, Json> {
        self.keys()
    }

    fn architecture(&self) -> Option<&str> {
        Some("GPT2LMHeadModel")
    }

    fn problems(&self) -> Vec<ConfigProblem> {
        self.checked()
    }

    fn canonical_key<'k>(&self, key: &'k str) -> &'k str {
        canonical_key(key)
    }

    fn tokens(&self) -> &SpecialTokens {
        &self.tokens
    }

    fn has_dropout(&self) -> bool {
        self.embedding_dropout + self.residual_dropout + self.attention_dropout > 0.0
    }

    fn with_dropout(&self, probability: f64) -> Option<Arc<dyn Model>> {
        Some(Arc::new(self.clone().with_dropout(probability)))
    }

    fn checkpoint_prefix(&self) -> &'static str {
        "transformer."
    }

    /// Linear weights are `[in, out]`; queries, keys and values are side by side in `c_attn`; biases are there in any case.
    fn checkpoint_tensors(&self, records: &[ParameterRecord]) -> Vec<HfTensor> {
        let mut tensors = Tensors::default();
        for record in records.iter().filter(|record| record.tie.is_none()) {
            tensors.add(&record.name, &record.shape, Some(record));
            let module = record.name.strip_suffix(".weight");
            let has_bias =
                |module: &&str| !["wte", "wpe", "lm_head"].iter().any(|name| module.ends_with(name));
            if let Some(module) = module.filter(has_bias).filter(|_| !self.bias) {
                tensors.add(&format!("{module}.bias"), &record.shape[..1], None);
            }
        }
        tensors.list
    }
}

/// The tensors of a GPT-2 checkpoint, in the order of the parameters.
#[derive(Default)]
struct Tensors {
    list: Vec<HfTensor>,
    index_of: HashMap<String, usize>,
}

impl Tensors {
    /// Adds a parameter of transformers' model; `record` is `None` for a bias that this model does not have.
    fn add(&mut self, parameter: &str, shape: &[usize], record: Option<&ParameterRecord>) {
        let zeros = |name: &str, shape: &[usize]| HfTensor {
            name: name.to_owned(),
            shape: shape.to_vec(),
            content: HfContent::Zeros,
        };
        let Some((name, third)) = gpt2_linear(parameter) else {
            self.list.push(record.map_or_else(|| zeros(parameter, shape), HfTensor::same));
            return;
        };
        let outputs = shape[0];
        let (columns, stored_columns) = match third {
            Some(third) => (third * outputs..(third + 1) * outputs, 3 * outputs),
            None => (0..outputs, outputs),
        };
        let stored: Vec<usize> = shape[1..].iter().copied().chain([stored_columns]).collect();
        let index = *self.index_of.entry(name.clone()).or_insert_with(|| {
            self.list.push(zeros(&name, &stored));
            self.list.len() - 1
        });
        let Some(record) = record else { return };
        let place = HfPlace::new(record, name, stored, HfTransform::Columns { columns, stored_columns });
        match &mut self.list[index].content {
            HfContent::Parameters(places) => places.push(place),
            content @ HfContent::Zeros => *content = HfContent::Parameters(vec![place]),
        }
    }
}

/// Returns the tensor of a parameter of GPT-2's linear layers, and the parameter's third of it if it is the fused
/// one; `None` for other parameters.
fn gpt2_linear(parameter: &str) -> Option<(String, Option<usize>)> {
    const FUSED: [&str; 3] = [".attn.q.", ".attn.k.", ".attn.v."];
    const PLAIN: [&str; 3] = [".attn.c_proj.", ".mlp.c_fc.", ".mlp.c_proj."];
    if let Some(third) = FUSED.iter().position(|part| parameter.contains(part)) {
        return Some((parameter.replace(FUSED[third], ".attn.c_attn."), Some(third)));
    }
    PLAIN.iter().any(|part| parameter.contains(part)).then(|| (parameter.to_owned(), None))
}
