//! Models with random weights whose matrices are whole blocks of every quantized format.

use std::{collections::BTreeMap, path::Path};

use lockstep_checkpoint::{
    DType,
    hf::{DEFAULT_SHARD_BYTES, ExportData, ExportTensor, HfExport, SINGLE_FILE},
};
use lockstep_model::{HfMapping, ModelConfig};
use lockstep_plan::random::{Philox, key_from_name};
use serde_json::{Value, json};

/// Writes a directory of Hugging Face with random weights.
pub(crate) fn random_model(out: &Path, config: &Value) {
    let model = ModelConfig::from_table(config.as_object().unwrap(), "test").unwrap();
    let mapping = HfMapping::new(&model);
    let values = |name: &str, shape: &[usize]| -> Vec<f32> {
        let philox = Philox::new(key_from_name(name));
        let size = if shape.len() == 1 { 1.0 } else { 0.05 };
        (0..shape.iter().product::<usize>() as u64).map(|index| philox.normal(index) * size).collect()
    };
    let tensors: Vec<_> = mapping
        .tensors()
        .iter()
        .map(|tensor| (tensor.name.clone(), tensor.shape.clone(), values(&tensor.name, &tensor.shape)))
        .collect();
    let tensors = tensors.iter().map(|(name, shape, values)| ExportTensor {
        name: name.clone(),
        shape: shape.clone(),
        data: ExportData::Bytes { dtype: DType::F32, bytes: bytemuck::cast_slice(values) },
    });
    HfExport {
        tensors: tensors.collect(),
        dtype: None,
        file: SINGLE_FILE,
        texts: BTreeMap::from([("config.json".to_owned(), config.to_string())]),
        copies: BTreeMap::new(),
        shard_bytes: DEFAULT_SHARD_BYTES,
    }
    .write(out)
    .unwrap();
}

/// Returns a configuration whose matrices are whole blocks of 256.
pub(crate) fn config(model_type: &str) -> Value {
    json!({
        "model_type": model_type, "vocab_size": 260, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 64,
        "tie_word_embeddings": model_type == "qwen3", "bos_token_id": 257, "eos_token_id": 256, "pad_token_id": null,
    })
}

/// Returns a configuration with four experts in a layer, whose matrices are whole blocks of 256.
pub(crate) fn with_experts(family: &str) -> Value {
    let mut config = config(family);
    (config["num_local_experts"], config["num_experts_per_tok"]) = (4.into(), 2.into());
    if family.contains("moe") {
        config["moe_intermediate_size"] = 256.into();
        config["norm_topk_prob"] = (family == "qwen3_moe").into();
    }
    if family == "qwen2_moe" {
        config["shared_expert_intermediate_size"] = 512.into();
    }
    config
}
