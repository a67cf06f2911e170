//! Mixtures of experts whose matrices are packed in their files, or quantized as they are loaded: they stay quantized in memory and on
//! disk.

use std::{collections::BTreeMap, path::Path};

use lockstep_checkpoint::{
    DType, ModelDirectory, WeightQuantization, WeightType,
    gguf::StoredElements,
    hf::{DEFAULT_SHARD_BYTES, ExportData, ExportTensor, HfExport, SINGLE_FILE},
    safetensors::{SafetensorsFile, StoredDtype},
};
use lockstep_infer::{InferencePlan, LoadOptions, LoadedModel, PlanRequest};
use lockstep_model::{HfMapping, ModelConfig};
use lockstep_plan::{
    BlockFormat,
    random::{Philox, key_from_name},
};
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

/// Name, shape, type and bytes of a tensor.
type EncodedTensor = (String, Vec<usize>, StoredDtype, Vec<u8>);

/// Writes a directory of tensors, and opens it.
fn write(out: &Path, tensors: Vec<EncodedTensor>, config: &Value) -> ModelDirectory {
    let tensor = |(name, shape, dtype, bytes): EncodedTensor| ExportTensor {
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
    .write(out)
    .unwrap();
    ModelDirectory::open(out).unwrap()
}

/// Writes a mixture of experts whose experts are int8 with a scale for each row, in the form of compressed-tensors.
fn packed_experts(dir: &Path) -> ModelDirectory {
    let (numbers, out) = (dir.join("numbers"), dir.join("packed"));
    random_model(&numbers, &mixtral());
    let file = SafetensorsFile::open(&numbers.join(SINGLE_FILE)).unwrap();
    let config = ModelConfig::from_file(&numbers.join("config.json")).unwrap();
    let mut tensors: Vec<EncodedTensor> = Vec::new();
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
    write(&out, tensors, &config)
}

/// Writes a model whose experts have biases and are in MXFP4, as in the files of gpt-oss.
pub(crate) fn mxfp4_experts(dir: &Path) -> ModelDirectory {
    let (numbers, out) = (dir.join("gpt-oss-numbers"), dir.join("gpt-oss"));
    let mut config = config("gpt_oss");
    (config["num_local_experts"], config["num_experts_per_tok"]) = (4.into(), 2.into());
    random_model(&numbers, &config);
    let file = SafetensorsFile::open(&numbers.join(SINGLE_FILE)).unwrap();
    let mut tensors: Vec<EncodedTensor> = Vec::new();
    for name in file.names() {
        let stored = file.tensor(name).unwrap();
        let [experts, inputs, outputs] = *stored.shape else {
            tensors.push((name.to_owned(), stored.shape.to_vec(), StoredDtype::F32, stored.bytes.to_vec()));
            continue;
        };
        let words = Philox::new(key_from_name(name));
        let bytes = |len: usize| (0..len as u64).map(|at| words.at(at)[0] as u8);
        let blocks = vec![experts, outputs, inputs / 32, 16];
        let codes = bytes(blocks.iter().product()).collect();
        tensors.push((format!("{name}_blocks"), blocks.clone(), StoredDtype::U8, codes));
        let scales = bytes(blocks[..3].iter().product()).map(|byte| 119 + byte % 4).collect();
        tensors.push((format!("{name}_scales"), blocks[..3].to_vec(), StoredDtype::U8, scales));
    }
    config["quantization_config"] = json!({"quant_method": "mxfp4"});
    write(&out, tensors, &config)
}

/// Compares a model of `stacks` packed stacks of experts with its decoded weights.
fn compare_with_decoded(packed: &ModelDirectory, stacks: usize, dir: &Path) {
    let found = packed.packed_parameters().into_iter().map(|packed| packed.shape);
    let found: Vec<_> = found.filter(|shape| shape.len() == 3).collect();
    assert_eq!(found.len(), stacks, "three stacks in each layer: {found:?}");
    packed.export_hf(DType::F32, &dir.join("decoded")).unwrap();
    let decoded = ModelDirectory::open(&dir.join("decoded")).unwrap();
    let ids = ids();
    for dtype in [DType::F32, DType::BF16] {
        let load = |directory: &ModelDirectory, threads, activations| {
            let options = LoadOptions::new(threads).with_dtype(dtype);
            LoadedModel::load(directory, LoadOptions { activations: Some(activations), ..options }).unwrap()
        };
        let dense = load(&decoded, 1, BlockActivations::Float);
        let whole = logits_of(&dense, &ids, ids.len());
        let [one, two] = [1, 2].map(|threads| load(packed, threads, BlockActivations::Float));
        assert_chunks_change_nothing(&whole, &ids, &[(&one, ids.len()), (&one, 1), (&two, 5)], "float");
        // The experts are most of the model, of which a byte or less for each weight and scales remain.
        let bytes = |model: &LoadedModel| model.weight_bytes().iter().sum::<usize>() as f64;
        let elements = bytes(&dense) / dtype.size_bytes() as f64;
        let part = bytes(&two) / elements;
        assert!(part < 0.8 * dtype.size_bytes() as f64, "{dtype}: {part} bytes for each weight");
        let [one, two] = [1, 2].map(|threads| load(packed, threads, BlockActivations::Int8));
        let rounded = logits_of(&one, &ids, ids.len());
        assert_chunks_change_nothing(&rounded, &ids, &[(&one, 1), (&two, 7)], "int8");
        assert_batches_change_nothing(&[&one, &two], &ids, &format!("experts, {dtype}"));
        let energy: f32 = whole.iter().map(|logit| logit * logit).sum();
        let error: f32 = rounded.iter().zip(&whole).map(|(a, b)| (a - b) * (a - b)).sum();
        let relative = error / energy;
        assert!(error > 0.0 && relative < 2e-3, "{dtype}: error {relative:.1e} of the logits' energy");
    }
}

#[test]
fn packed_experts_stay_quantized_and_have_the_logits_of_their_decoded_weights() {
    let dir = tempfile::tempdir().unwrap();
    compare_with_decoded(&packed_experts(dir.path()), 6, dir.path());
}

#[test]
fn mxfp4_experts_stay_quantized_and_have_the_logits_of_their_decoded_weights() {
    let dir = tempfile::tempdir().unwrap();
    compare_with_decoded(&mxfp4_experts(dir.path()), 6, dir.path());
}

#[test]
fn experts_of_a_quantized_directory_stay_quantized_but_for_those_of_bitsandbytes() {
    let dir = tempfile::tempdir().unwrap();
    random_model(&dir.path().join("numbers"), &mixtral());
    let numbers = ModelDirectory::open(&dir.path().join("numbers")).unwrap();
    for (to, packed, stacks) in
        [(WeightType::Int8, 32, 6), (WeightType::Int4, 32, 6), (WeightType::Nf4, 8, 0)]
    {
        let out = dir.path().join(format!("{to:?}"));
        let done = numbers.quantize(WeightQuantization { to, group_size: None }, &out).unwrap();
        assert_eq!((done.matrices, done.kept), (packed, Vec::new()), "{to:?}: 4 of attention, 12 of experts");
        let written = ModelDirectory::open(&out).unwrap();
        if stacks > 0 {
            compare_with_decoded(&written, stacks, &out);
        } else {
            let shapes = written.packed_parameters().into_iter().map(|packed| packed.shape);
            assert_eq!(shapes.filter(|shape| shape.len() == 3).count(), 0, "{to:?}");
        }
    }
}

#[test]
fn quantized_experts_on_disk_change_no_bit_of_the_logits() {
    let dir = tempfile::tempdir().unwrap();
    let packed = packed_experts(dir.path());
    let numbers = ModelDirectory::open(&dir.path().join("numbers")).unwrap();
    let int4 = WeightQuantization { to: WeightType::Int4, group_size: None };
    let ids = ids();
    for (name, directory, quantize) in [
        ("packed", &packed, None),
        ("int4 at load", &numbers, Some(int4)),
        ("mxfp4", &mxfp4_experts(dir.path()), None),
    ] {
        let offload = dir.path().join(name);
        for dtype in [DType::BF16, DType::F32] {
            let options = LoadOptions { quantize, ..LoadOptions::new(1).with_dtype(dtype) };
            let whole = logits_of(&LoadedModel::load(directory, options).unwrap(), &ids, ids.len());
            for map in [r#"{"": "disk"}"#, r#"{"": "cpu"}"#] {
                let request = PlanRequest { quantize, ..request(map, &offload) };
                let plan = InferencePlan::new(directory, dtype, &request).unwrap();
                let types = &plan.modules[2].types;
                let is_quantized = |elements| matches!(elements, StoredElements::Blocks(_));
                assert!(
                    types.iter().any(|&(elements, _)| is_quantized(elements)),
                    "{name} {dtype}: {types:?}"
                );
                let model = LoadedModel::load_placed(directory, plan).unwrap();
                for chunk in [ids.len(), 1] {
                    let what = format!("{name} {dtype} {map}, chunks of {chunk}");
                    assert_same_bits(&logits_of(&model, &ids, chunk), &whole, &what);
                }
            }
        }
    }
}

/// A block has 17 bytes, and 18 if its rows are interleaved for products with int8 activations.
#[test]
fn plans_count_the_bytes_of_mxfp4_experts() {
    let dir = tempfile::tempdir().unwrap();
    let directory = mxfp4_experts(dir.path());
    let blocks = 4 * 3 * 512 * 256 / 32;
    for (dtype, block_bytes) in [(DType::F32, 17), (DType::BF16, 18)] {
        let request = request(r#"{"": "cpu"}"#, dir.path());
        let plan = InferencePlan::new(&directory, dtype, &request).unwrap();
        let is_mxfp4 = |elements| elements == StoredElements::Blocks(BlockFormat::Mxfp4);
        let experts = plan.modules[2].types.iter().filter(|&&(elements, _)| is_mxfp4(elements));
        let experts: u64 = experts.map(|&(_, bytes)| bytes).sum();
        assert_eq!(experts, blocks * block_bytes, "{dtype}: {:?}", plan.modules);
        let model = LoadedModel::load(&directory, LoadOptions::new(1).with_dtype(dtype)).unwrap();
        let (found, predicted) = (model.weight_bytes().iter().sum::<usize>(), plan.model_bytes());
        let off = found as f64 / predicted as f64 - 1.0;
        assert!(off.abs() < 0.03, "{dtype}: {found} bytes in memory, {predicted} predicted");
    }
}
