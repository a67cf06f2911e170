//! Models with quantized weights under device maps and memory limits: weights stay quantized in memory and on disk, with the same bits
//! as without a limit, and plans count their bytes.

use std::{
    fs,
    path::{Path, PathBuf},
};

use lockstep_checkpoint::{DType, ModelDirectory, WeightQuantization, WeightType, gguf::StoredElements};
use lockstep_infer::{
    Generator, InferError, InferencePlan, LoadOptions, LoadedModel, MapChoice, PlanRequest,
};
use lockstep_plan::{BlockFormat, MemoryCategory};

use super::{
    logits_of,
    placed::{assert_same_bits, limited, request, write_model},
};
use crate::common::{config, random_model};

const INT4: WeightQuantization = WeightQuantization { to: WeightType::Int4, group_size: None };

fn ids() -> Vec<u32> {
    (0..24).map(|at| at * at * 7 % 260).collect()
}

/// Writes a model in the forms in which quantized weights come; the last one is quantized as it is loaded.
fn quantized_models(dir: &Path, model_type: &str) -> Vec<(String, PathBuf, Option<WeightQuantization>)> {
    let hf = dir.join(model_type);
    random_model(&hf, &config(model_type));
    let model = ModelDirectory::open(&hf).unwrap();
    let mut models = Vec::new();
    for format in [BlockFormat::Q8_0, BlockFormat::Q4K] {
        let path = dir.join(format!("{model_type}-{format}.gguf"));
        model.export_gguf(StoredElements::Blocks(format), &path).unwrap();
        models.push((format!("{model_type} {format}"), path, None));
    }
    for to in [WeightType::Int4, WeightType::Nf4] {
        let path = dir.join(format!("{model_type}-{to:?}"));
        model.quantize(WeightQuantization { to, group_size: None }, &path).unwrap();
        models.push((format!("{model_type} {to:?}"), path, None));
    }
    models.push((format!("{model_type}, quantized at load"), hf, Some(INT4)));
    models
}

#[test]
fn quantized_weights_on_disk_change_no_bit_of_the_logits() {
    let dir = tempfile::tempdir().unwrap();
    let ids = ids();
    for (name, path, quantize) in ["llama", "qwen3"].iter().flat_map(|of| quantized_models(dir.path(), of)) {
        let directory = ModelDirectory::open(&path).unwrap();
        let offload = tempfile::tempdir().unwrap();
        // Activations of bf16 are rounded to int8, those of f32 are not.
        for dtype in [DType::BF16, DType::F32] {
            let options = LoadOptions { quantize, ..LoadOptions::new(1).with_dtype(dtype) };
            let whole = logits_of(&LoadedModel::load(&directory, options).unwrap(), &ids, ids.len());
            for (map, threads) in [
                (r#"{"": "disk"}"#, 1),
                (r#"{"": "disk"}"#, 2),
                (r#"{"": "cpu"}"#, 2),
                (r#"{"": "disk", "model.layers.0": "cpu"}"#, 2),
            ] {
                let request = PlanRequest { threads, quantize, ..request(map, offload.path()) };
                let plan = InferencePlan::new(&directory, dtype, &request).unwrap();
                let model = LoadedModel::load_placed(&directory, plan).unwrap();
                for chunk in [ids.len(), 5, 1] {
                    let found = logits_of(&model, &ids, chunk);
                    let what = format!("{name} {dtype} {map}, {threads} threads, chunks of {chunk}");
                    assert_same_bits(&found, &whole, &what);
                }
            }
        }
    }
}

/// A GGUF file needs no other directory: rows of `llama` that are stored in another order are put in order after each read.
#[test]
fn blocks_of_a_gguf_file_are_read_from_the_file_itself() {
    let dir = tempfile::tempdir().unwrap();
    for model_type in ["llama", "qwen3"] {
        let (name, path, _) = quantized_models(dir.path(), model_type).swap_remove(1);
        let directory = ModelDirectory::open(&path).unwrap();
        let request = PlanRequest { offload_dir: None, ..request(r#"{"": "disk"}"#, dir.path()) };
        let plan = InferencePlan::new(&directory, DType::BF16, &request).unwrap();
        let model = LoadedModel::load_placed(&directory, plan).unwrap();
        let options = LoadOptions::new(1).with_dtype(DType::BF16);
        let whole = logits_of(&LoadedModel::load(&directory, options).unwrap(), &ids(), 24);
        assert_same_bits(&logits_of(&model, &ids(), 24), &whole, &name);
    }
}

#[test]
fn packed_weights_are_written_once_as_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let (name, path, _) = quantized_models(dir.path(), "qwen3").swap_remove(2);
    let directory = ModelDirectory::open(&path).unwrap();
    let offload = dir.path().join("offload");
    let request = |offload_dir| PlanRequest { offload_dir, ..request(r#"{"": "disk"}"#, dir.path()) };
    let error = InferencePlan::new(&directory, DType::F32, &request(None)).unwrap_err().to_string();
    assert!(error.contains("--offload-dir"), "{name}: {error}");
    for _ in 0..2 {
        let plan = InferencePlan::new(&directory, DType::F32, &request(Some(offload.clone()))).unwrap();
        LoadedModel::load_placed(&directory, plan).unwrap();
    }
    let written: Vec<_> = fs::read_dir(&offload).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(written.len(), 1, "{name}: {written:?}");
    let weights = fs::metadata(written[0].join("model.safetensors")).unwrap().len();
    let elements: usize =
        directory.packed_parameters().iter().map(|packed| packed.shape.iter().product::<usize>()).sum();
    let bits = 8.0 * weights as f64 / elements as f64;
    assert!((4.6..4.9).contains(&bits), "{name}: {bits} bits for each weight, {weights} bytes");
}

#[test]
fn a_limit_counts_quantized_bytes_and_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let dense = write_model(&dir.path().join("model"), 512);
    let path = dir.path().join("model.gguf");
    dense.export_gguf(StoredElements::Blocks(BlockFormat::Q4K), &path).unwrap();
    let directory = ModelDirectory::open(&path).unwrap();
    let ids: Vec<u32> = (0..600).map(|at| at * 7 % 9000).collect();
    for dtype in [DType::BF16, DType::F32] {
        let plan =
            |directory, limit| InferencePlan::new(directory, dtype, &limited(MapChoice::Balanced, limit));
        let roomy = plan(&directory, 1 << 40).unwrap();
        let (quantized, numbers) = (roomy.model_bytes(), plan(&dense, 1 << 40).unwrap().model_bytes());
        let ratio = quantized as f64 / (numbers / dtype.size_bytes() as u64) as f64 * 8.0;
        assert!((4.4..4.7).contains(&ratio), "{dtype}: {ratio} bits for each weight");
        let block = &roomy.modules[1];
        assert_eq!(block.types[0].0, StoredElements::Blocks(BlockFormat::Q4K), "{block:?}");
        let least = roomy.least_bytes;
        let error = plan(&directory, least - 1).unwrap_err();
        assert!(matches!(error, InferError::LimitTooSmall { .. }), "{dtype}: {error}");
        plan(&directory, least).expect("the least that would do");
        let options = LoadOptions::new(2).with_dtype(dtype);
        let whole = logits_of(&LoadedModel::load(&directory, options).unwrap(), &ids, 600);
        let limit = roomy.memory.total() - quantized / 5;
        let plan = plan(&directory, limit).unwrap();
        let (memory, disk, read) = (plan.memory, plan.disk_bytes, plan.read_bytes(1));
        assert!(memory.total() <= limit && plan.buffers() == 3 && disk < quantized, "{dtype}: {memory:?}");
        // Blocks are read as they are stored, in whole blocks of the disk.
        assert!(read >= disk && (read as f64) < 1.1 * disk as f64, "{dtype}: {read} bytes for {disk}");
        let model = LoadedModel::load_placed(&directory, plan).unwrap();
        let mut generator = Generator::new(&model, 601).unwrap();
        generator.read(&ids).unwrap();
        assert_same_bits(generator.logits(), &whole, &format!("{dtype}"));
        model.take_disk_traffic();
        generator.step(ids[0]).unwrap();
        assert_eq!(model.take_disk_traffic().read_bytes, read, "{dtype}: bytes that a pass reads");
        let (peak, total) = model.peak_memory();
        let weights = memory.weights + memory.streaming;
        let run = memory.activations + memory.kv_cache + memory.workspace;
        for (what, found, predicted) in [
            ("weights", peak[MemoryCategory::Parameters] as u64, weights),
            ("all", total as u64, weights + run),
        ] {
            let off = found as f64 / predicted as f64 - 1.0;
            assert!(off.abs() < 0.03, "{dtype}: {what} take {found} bytes, {predicted} predicted; {peak:?}");
        }
    }
}
