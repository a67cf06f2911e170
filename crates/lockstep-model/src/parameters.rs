//! The parameters of a model, as records: names, shapes, initial values, units, ties.
//!
//! This list is the one place that says which parameters a configuration has. Names are Hugging Face's; a
//! GPT-2's fused `c_attn` is three parameters here (`attn.q`, `attn.k`, `attn.v`), and every linear
//! weight is `[out, in]`.

use lockstep_plan::{Initializer, ParameterId, ParameterRecord};

use crate::config::{Gpt2Config, LlamaConfig, ModelConfig};

/// Every parameter of the model, embedding first, then block by block, then the head.
///
/// Unit 0 is the embedding, unit `1 + n` block `n`, the last unit the final norm and the output layer. A tied
/// output layer is a record whose `tie` points to the embedding. Matrices decay, vectors do not. Initial
/// weights follow transformers: normal, with GPT-2's projections into the residual stream scaled by
/// 1/√(2 × blocks); biases zero; norms one.
pub fn parameter_records(config: &ModelConfig) -> Vec<ParameterRecord> {
    match config {
        ModelConfig::Gpt2(config) => gpt2_records(config),
        ModelConfig::Llama(config) => llama_records(config),
    }
}

fn gpt2_records(config: &Gpt2Config) -> Vec<ParameterRecord> {
    let (hidden, inner, layers) = (config.hidden_size, config.intermediate_size, config.num_hidden_layers);
    let std = config.initializer_range as f32;
    let residual_std = (config.initializer_range / (2.0 * layers as f64).sqrt()) as f32;
    let mut list = RecordList::new(std);
    let embedding = list.matrix("transformer.wte.weight", [config.vocab_size, hidden], std);
    list.matrix("transformer.wpe.weight", [config.max_position_embeddings, hidden], std);
    for layer in 0..layers {
        list.unit = layer + 1;
        let block = format!("transformer.h.{layer}");
        list.norm(&format!("{block}.ln_1"), hidden, config.bias);
        for part in ["q", "k", "v"] {
            list.linear(&format!("{block}.attn.{part}"), [hidden, hidden], config.bias);
        }
        list.linear_with_std(&format!("{block}.attn.c_proj"), [hidden, hidden], config.bias, residual_std);
        list.norm(&format!("{block}.ln_2"), hidden, config.bias);
        list.linear(&format!("{block}.mlp.c_fc"), [inner, hidden], config.bias);
        list.linear_with_std(&format!("{block}.mlp.c_proj"), [hidden, inner], config.bias, residual_std);
    }
    list.unit = layers + 1;
    list.norm("transformer.ln_f", hidden, config.bias);
    list.head([config.vocab_size, hidden], config.tie_word_embeddings.then_some(embedding));
    list.records
}

fn llama_records(config: &LlamaConfig) -> Vec<ParameterRecord> {
    let (hidden, inner, layers) = (config.hidden_size, config.intermediate_size, config.num_hidden_layers);
    let query_rows = config.num_attention_heads * config.head_dim;
    let key_value_rows = config.num_key_value_heads * config.head_dim;
    let std = config.initializer_range as f32;
    let mut list = RecordList::new(std);
    let embedding = list.matrix("model.embed_tokens.weight", [config.vocab_size, hidden], std);
    for layer in 0..layers {
        list.unit = layer + 1;
        let block = format!("model.layers.{layer}");
        list.norm(&format!("{block}.input_layernorm"), hidden, false);
        list.linear(&format!("{block}.self_attn.q_proj"), [query_rows, hidden], config.qkv_bias);
        list.linear(&format!("{block}.self_attn.k_proj"), [key_value_rows, hidden], config.qkv_bias);
        list.linear(&format!("{block}.self_attn.v_proj"), [key_value_rows, hidden], config.qkv_bias);
        list.linear(&format!("{block}.self_attn.o_proj"), [hidden, query_rows], config.output_bias);
        if config.qk_norm {
            list.norm(&format!("{block}.self_attn.q_norm"), config.head_dim, false);
            list.norm(&format!("{block}.self_attn.k_norm"), config.head_dim, false);
        }
        list.norm(&format!("{block}.post_attention_layernorm"), hidden, false);
        list.linear(&format!("{block}.mlp.gate_proj"), [inner, hidden], config.mlp_bias);
        list.linear(&format!("{block}.mlp.up_proj"), [inner, hidden], config.mlp_bias);
        list.linear(&format!("{block}.mlp.down_proj"), [hidden, inner], config.mlp_bias);
    }
    list.unit = layers + 1;
    list.norm("model.norm", hidden, false);
    list.head([config.vocab_size, hidden], config.tie_word_embeddings.then_some(embedding));
    list.records
}

/// Records in the making, and the unit that the next one belongs to.
struct RecordList {
    records: Vec<ParameterRecord>,
    unit: usize,
    std: f32,
}

impl RecordList {
    fn new(std: f32) -> Self {
        Self { records: Vec::new(), unit: 0, std }
    }

    fn push(&mut self, name: String, shape: Vec<usize>, initializer: Initializer) -> ParameterId {
        let id = ParameterId(self.records.len());
        let decay = shape.len() >= 2;
        self.records.push(ParameterRecord {
            name,
            shape,
            initializer,
            tie: None,
            unit: self.unit,
            trainable: true,
            decay,
            learning_rate_multiplier: 1.0,
        });
        id
    }

    fn matrix(&mut self, name: &str, shape: [usize; 2], std: f32) -> ParameterId {
        self.push(name.to_owned(), shape.to_vec(), Initializer::Normal { std })
    }

    fn linear(&mut self, layer: &str, shape: [usize; 2], bias: bool) {
        self.linear_with_std(layer, shape, bias, self.std);
    }

    fn linear_with_std(&mut self, layer: &str, shape: [usize; 2], bias: bool, std: f32) {
        self.matrix(&format!("{layer}.weight"), shape, std);
        if bias {
            self.push(format!("{layer}.bias"), vec![shape[0]], Initializer::Zeros);
        }
    }

    fn norm(&mut self, layer: &str, width: usize, bias: bool) {
        self.push(format!("{layer}.weight"), vec![width], Initializer::Ones);
        if bias {
            self.push(format!("{layer}.bias"), vec![width], Initializer::Zeros);
        }
    }

    fn head(&mut self, shape: [usize; 2], tie: Option<ParameterId>) {
        let id = self.matrix("lm_head.weight", shape, self.std);
        self.records[id.0].tie = tie;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_are_unique_and_units_ascend() {
        for name in crate::PRESETS {
            let config = ModelConfig::preset(name).expect("a preset");
            let records = parameter_records(&config);
            let names: HashSet<_> = records.iter().map(|record| &record.name).collect();
            assert_eq!(names.len(), records.len(), "{name}");
            assert!(records.is_sorted_by_key(|record| record.unit), "{name}");
            assert_eq!(
                records.last().map(|record| record.unit),
                Some(config.num_hidden_layers() + 1),
                "{name}"
            );
        }
    }

    #[test]
    fn a_tied_head_points_to_the_embedding() {
        for (name, tied) in [("baby-gpt", true), ("llama3-8b", false), ("qwen3-0.6b", true)] {
            let records = parameter_records(&ModelConfig::preset(name).expect("a preset"));
            let head = records.last().expect("a model has parameters");
            assert_eq!(
                (head.name.as_str(), head.tie),
                ("lm_head.weight", tied.then_some(ParameterId(0))),
                "{name}"
            );
            assert_eq!(head.shape, records[0].shape, "{name}");
        }
    }

    #[test]
    fn only_matrices_decay() {
        let records = parameter_records(&ModelConfig::preset("gpt2-124m").expect("a preset"));
        for record in records {
            assert_eq!(record.decay, record.shape.len() == 2, "{}", record.name);
        }
    }
}
