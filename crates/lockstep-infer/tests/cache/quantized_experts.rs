//! Mixtures of experts whose matrices are packed in their files, or quantized as they are loaded: they stay quantized in memory and on
//! disk.

use std::{collections::BTreeMap, path::Path};

use lockstep_checkpoint::{
    DType, ModelDirectory, WeightQuantization, WeightType,
    hf::{DEFAULT_SHARD_BYTES, ExportData, ExportTensor, HfExport, SINGLE_FILE},
    safetensors::{SafetensorsFile, StoredDtype},
};
use lockstep_infer::{InferencePlan, LoadOptions, LoadedModel, PlanRequest};
use lockstep_model::{HfMapping, ModelConfig};
use lockstep_tensor::BlockActivations;
use serde_json::{Value, json};

use super::{
    assert_batches_change_nothing, assert_chunks_change_nothing, logits_of,
    placed::{assert_same_bits, request},
};
use crate::common::{config, random_model};

fn mixtral() -> Value {
    let mut config = config("mixtral");
    (config["num_local_experts"], config["num_experts_per_tok"]) = (4.into(), 2.into());
    config
}

fn ids() -> Vec<u32> {
    (0..24).map(|at| at * at * 7 % 260).collect()
}

/// Writes a mixture of experts whose experts are int8 with a scale for each row, in the form of compressed-tensors.
fn packed_experts(dir: &Path) -> ModelDirectory {
    let (numbers, out) = (dir.join("numbers"), dir.join("packed"));
    random_model(&numbers, &mixtral());
    let file = SafetensorsFile::open(&numbers.join(SINGLE_FILE)).unwrap();
    let config = ModelConfig::from_file(&numbers.join("config.json")).unwrap();
    let mut tensors: Vec<(String, Vec<usize>, StoredDtype, Vec<u8>)> = Vec::new();
    for tensor in HfMapping::new(&config).tensors() {
        let stored = file.tensor(&tensor.name).unwrap();
        let Some(module) = tensor.name.strip_suffix(".weight").filter(|name| name.contains(".experts."))
        else {
            tensors.push((
                tensor.name.clone(),
                tensor.shape.clone(),
                StoredDtype::F32,
                stored.bytes.to_vec(),
            ));
            continue;
        };
        let values: Vec<f32> =
            stored.bytes.chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect();
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        for row in values.chunks(tensor.shape[1]) {
            let scale = row.iter().fold(0.0_f32, |most, value| most.max(value.abs())) / 127.0;
            codes.extend(row.iter().map(|value| ((value / scale).round() as i8).cast_unsigned()));
            scales.extend(scale.to_le_bytes());
        }
        tensors.push((format!("{module}.weight_scale"), vec![tensor.shape[0], 1], StoredDtype::F32, scales));
        tensors.push((tensor.name.clone(), tensor.shape.clone(), StoredDtype::I8, codes));
    }
    let mut config = mixtral();
    let weights = json!({"num_bits": 8, "type": "int", "symmetric": true, "group_size": null, "strategy": "channel", "dynamic": false});
    config["quantization_config"] = json!({
        "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head", "re:.*self_attn.*"],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": null}},
    });
    let tensor = |(name, shape, dtype, bytes): (String, Vec<usize>, StoredDtype, Vec<u8>)| ExportTensor {
        name,
        shape,
        data: ExportData::Encoded { dtype, bytes: Box::new(move || Ok(bytes.clone())) },
    };
    HfExport {
        tensors: tensors.into_iter().map(tensor).collect(),
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
fn packed_experts_stay_quantized_and_have_the_logits_of_their_decoded_weights() {
    let dir = tempfile::tempdir().unwrap();
    let packed = packed_experts(dir.path());
    let stacks: Vec<_> = packed.packed_parameters().into_iter().map(|packed| packed.shape).collect();
    assert_eq!(stacks.len(), 6, "three stacks in each of two layers: {stacks:?}");
    packed.export_hf(DType::F32, &dir.path().join("decoded")).unwrap();
    let decoded = ModelDirectory::open(&dir.path().join("decoded")).unwrap();
    let ids = ids();
    for dtype in [DType::F32, DType::BF16] {
        let load = |directory: &ModelDirectory, threads, activations| {
            let options = LoadOptions::new(threads).with_dtype(dtype);
            LoadedModel::load(directory, LoadOptions { activations: Some(activations), ..options }).unwrap()
        };
        let dense = load(&decoded, 1, BlockActivations::Float);
        let whole = logits_of(&dense, &ids, ids.len());
        let [one, two] = [1, 2].map(|threads| load(&packed, threads, BlockActivations::Float));
        assert_chunks_change_nothing(&whole, &ids, &[(&one, ids.len()), (&one, 1), (&two, 5)], "float");
        // The experts are most of the model, of which a byte for each weight and scales remain.
        let bytes = |model: &LoadedModel| model.weight_bytes().iter().sum::<usize>() as f64;
        let elements = bytes(&dense) / dtype.size_bytes() as f64;
        let part = bytes(&two) / elements;
        assert!(part < 0.8 * dtype.size_bytes() as f64, "{dtype}: {part} bytes for each weight");
        let [one, two] = [1, 2].map(|threads| load(&packed, threads, BlockActivations::Int8));
        let rounded = logits_of(&one, &ids, ids.len());
        assert_chunks_change_nothing(&rounded, &ids, &[(&one, 1), (&two, 7)], "int8");
        assert_batches_change_nothing(&[&one, &two], &ids, &format!("experts, {dtype}"));
        let energy: f32 = whole.iter().map(|logit| logit * logit).sum();
        let error: f32 = rounded.iter().zip(&whole).map(|(a, b)| (a - b) * (a - b)).sum();
        assert!(error < 2e-3 * energy, "{dtype}: error {:.1e} of the logits' energy", error / energy);
    }
}

#[test]
fn quantized_experts_on_disk_change_no_bit_of_the_logits() {
    let dir = tempfile::tempdir().unwrap();
    let packed = packed_experts(dir.path());
    let numbers = ModelDirectory::open(&dir.path().join("numbers")).unwrap();
    let int4 = WeightQuantization { to: WeightType::Int4, group_size: None };
    let ids = ids();
    for (name, directory, quantize) in [("packed", &packed, None), ("int4 at load", &numbers, Some(int4))] {
        let offload = dir.path().join(name);
        for dtype in [DType::BF16, DType::F32] {
            let options = LoadOptions { quantize, ..LoadOptions::new(1).with_dtype(dtype) };
            let whole = logits_of(&LoadedModel::load(directory, options).unwrap(), &ids, ids.len());
            for map in [r#"{"": "disk"}"#, r#"{"": "cpu"}"#] {
                let request = PlanRequest { quantize, ..request(map, &offload) };
                let plan = InferencePlan::new(directory, dtype, &request).unwrap();
                let experts = plan.modules[1].types[0];
                assert!(experts.0.to_string().starts_with("int"), "{name} {dtype}: {experts:?}");
                let model = LoadedModel::load_placed(directory, plan).unwrap();
                for chunk in [ids.len(), 1] {
                    let what = format!("{name} {dtype} {map}, chunks of {chunk}");
                    assert_same_bits(&logits_of(&model, &ids, chunk), &whole, &what);
                }
            }
        }
    }
}
