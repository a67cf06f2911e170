use std::collections::HashMap;

use lockstep_model::{ModelConfig, parameter_records};
use lockstep_plan::random::{Philox, key_from_name};
use serde_json::json;

use super::*;
use crate::hf::{DEFAULT_SHARD_BYTES, ExportData, ExportTensor, HfExport, SINGLE_FILE};

pub(super) fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
}

/// Returns all parameters by name.
pub(super) fn parameters(model: &ModelDirectory) -> HashMap<String, Vec<f32>> {
    let mut parameters = HashMap::new();
    model
        .for_each_parameter(|name, values| -> Result<(), CheckpointError> {
            parameters.insert(name.to_owned(), values.to_vec());
            Ok(())
        })
        .unwrap();
    parameters
}

#[track_caller]
pub(super) fn assert_same(found: &HashMap<String, Vec<f32>>, expected: &HashMap<String, Vec<f32>>, of: &str) {
    assert_eq!(found.len(), expected.len(), "parameters of {of}");
    for (name, expected) in expected {
        let found = &found[name];
        assert_eq!(found.len(), expected.len(), "{of}: {name}");
        for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
            assert_eq!(found.to_bits(), expected.to_bits(), "{of}: {name}[{index}]: {found} for {expected}");
        }
    }
}

/// Rounds matrices as files of type f16 do.
fn as_f16(mut parameters: HashMap<String, Vec<f32>>, config: &ModelConfig) -> HashMap<String, Vec<f32>> {
    for record in parameter_records(config).iter().filter(|record| record.shape.len() == 2) {
        for x in parameters.get_mut(&record.name).into_iter().flatten() {
            *x = half::f16::from_f32(*x).to_f32();
        }
    }
    parameters
}

const READ: [&str; 6] = ["llama", "mistral", "qwen2", "qwen3", "phi3", "phi3_long"];

#[test]
fn files_of_gguf_py_hold_the_model_that_they_were_made_of() {
    for family in READ {
        let hf = ModelDirectory::open(&fixtures().join(family)).unwrap();
        let gguf = ModelDirectory::open(&fixtures().join(format!("gguf/{family}.gguf"))).unwrap();
        assert_eq!(gguf.config().to_json(DType::F32), hf.config().to_json(DType::F32), "{family}");
        assert_same(&parameters(&gguf), &as_f16(parameters(&hf), hf.config()), family);
        assert_eq!(gguf.stored_dtype(), DType::F16, "{family}");
    }
}

#[test]
fn every_family_that_is_written_is_read_back() {
    let dir = tempfile::tempdir().unwrap();
    for family in READ.into_iter().chain(["gemma", "gemma2", "gemma3", "llama_bias", "olmo2"]) {
        let mut hf = ModelDirectory::open(&fixtures().join(family)).unwrap();
        if ["gemma2", "gemma3"].contains(&family) {
            // Files do not store this number.
            let changed = json!({"query_pre_attn_scalar": 16});
            hf.config = hf.config.with_overrides(changed.as_object().unwrap(), "test").unwrap();
        }
        let path = dir.path().join(format!("{family}.gguf"));
        let notes = hf.export_gguf(StoredElements::Dense(DType::F32), &path).unwrap();
        assert!(notes.other_types.is_empty() && notes.lacks_tokenizer, "{family}: {notes:?}");
        let gguf = ModelDirectory::open(&path).unwrap();
        assert_eq!(gguf.config().to_json(DType::F32), hf.config().to_json(DType::F32), "{family}");
        let mut expected = parameters(&hf);
        if family.starts_with("gemma") {
            // One is added to norms, and subtracted again.
            for (_, values) in expected.iter_mut().filter(|(name, _)| name.ends_with("norm.weight")) {
                values.iter_mut().for_each(|x| *x = (*x + 1.0) - 1.0);
            }
        }
        assert_same(&parameters(&gguf), &expected, family);
    }
}

/// Writes a directory of a model with random weights of two layers, whose matrices are whole blocks. Families with experts have four in a
/// layer.
pub(super) fn random_model(dir: &Path, model_type: &str) -> ModelDirectory {
    let mut config = json!({
        "model_type": model_type, "vocab_size": 96, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 64,
        "tie_word_embeddings": model_type == "qwen3",
    });
    if model_type.contains("moe") || ["mixtral", "gpt_oss"].contains(&model_type) {
        (config["num_local_experts"], config["num_experts_per_tok"]) = (4.into(), 2.into());
    }
    if model_type.contains("moe") {
        config["moe_intermediate_size"] = 256.into();
        config["norm_topk_prob"] = (model_type == "qwen3_moe").into();
    }
    if model_type == "qwen2_moe" {
        config["shared_expert_intermediate_size"] = 512.into();
    }
    let mapping = HfMapping::new(&ModelConfig::from_table(config.as_object().unwrap(), "test").unwrap());
    let values = |name: &str, shape: &[usize]| -> Vec<f32> {
        let philox = Philox::new(key_from_name(name));
        (0..shape.iter().product::<usize>() as u64).map(|index| philox.normal(index) * 0.02).collect()
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
    let out = dir.join(model_type);
    HfExport {
        tensors: tensors.collect(),
        dtype: None,
        file: SINGLE_FILE,
        texts: BTreeMap::from([("config.json".to_owned(), config.to_string())]),
        copies: BTreeMap::new(),
        shard_bytes: DEFAULT_SHARD_BYTES,
    }
    .write(&out)
    .unwrap();
    ModelDirectory::open(&out).unwrap()
}

#[test]
fn a_quantized_file_holds_the_rounded_matrices_of_the_model() {
    let dir = tempfile::tempdir().unwrap();
    for model_type in ["llama", "qwen3"] {
        let hf = random_model(dir.path(), model_type);
        let original = parameters(&hf);
        for format in BlockFormat::OF_GGUF {
            let path = dir.path().join(format!("{model_type}-{format}.gguf"));
            let notes = hf.export_gguf(StoredElements::Blocks(format), &path).unwrap();
            assert!(notes.other_types.is_empty(), "{model_type} {format}: {notes:?}");
            let gguf = ModelDirectory::open(&path).unwrap();
            assert_eq!(gguf.stored_dtype(), DType::BF16);
            let mut expected = original.clone();
            for values in expected.values_mut().filter(|values| values.len() > 256) {
                let mut bytes = vec![0; format.bytes(values.len()).unwrap()];
                format.quantize(values, &mut bytes);
                format.dequantize(&bytes, values);
            }
            assert_same(&parameters(&gguf), &expected, &format!("{model_type} {format}"));
            let in_place = gguf.stored_parameters();
            let is_quantized = |name: &str| {
                in_place
                    .iter()
                    .any(|stored| stored.name == name && stored.stored == StoredElements::Blocks(format))
            };
            assert!(is_quantized("model.layers.1.mlp.down_proj.weight"), "{in_place:?}");
        }
    }
}

#[test]
fn a_matrix_without_whole_blocks_has_another_type() {
    let dir = tempfile::tempdir().unwrap();
    let hf = ModelDirectory::open(&fixtures().join("llama")).unwrap();
    let path = dir.path().join("llama.gguf");
    let notes = hf.export_gguf(StoredElements::Blocks(BlockFormat::Q4K), &path).unwrap();
    // Rows of 48 and of 88 elements.
    assert_eq!(notes.other_types, BTreeMap::from([("f16".to_owned(), 16)]));
    let again = hf.export_gguf(StoredElements::Blocks(BlockFormat::Q4K), &path).unwrap_err();
    assert!(again.to_string().contains("llama.gguf exists"), "{again}");
}

#[test]
fn families_without_an_architecture_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let hf = ModelDirectory::open(&fixtures().join("gpt2")).unwrap();
    let error = hf.export_gguf(StoredElements::Dense(DType::F32), &dir.path().join("x.gguf")).unwrap_err();
    assert!(
        error.to_string().contains("its model type is gpt2; written are language models of llama"),
        "{error}"
    );
}

#[test]
fn a_directory_is_a_model_if_it_has_one_file() {
    let dir = tempfile::tempdir().unwrap();
    let fixture = fixtures().join("gguf/qwen2.gguf");
    fs::copy(&fixture, dir.path().join("a.gguf")).unwrap();
    assert_eq!(ModelDirectory::open(dir.path()).unwrap().config().model_type(), "qwen2");
    fs::copy(&fixture, dir.path().join("b.gguf")).unwrap();
    let error = ModelDirectory::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("b.gguf lies beside it; name one of the files"), "{error}");
}
