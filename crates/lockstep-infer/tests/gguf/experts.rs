//! Models of GGUF files with experts: their stacks are used, and streamed, where they lie.

use std::{
    fs,
    path::{Path, PathBuf},
};

use lockstep_checkpoint::{CheckpointError, DType, ModelDirectory, gguf::StoredElements};
use lockstep_infer::{InferencePlan, LoadOptions, LoadedModel, PlanRequest};
use lockstep_plan::BlockFormat;
use lockstep_tensor::BlockActivations;

use crate::{
    assert_batches_change_nothing, assert_chunks_change_nothing,
    common::{random_model, with_experts},
    logits_of,
    placed::{assert_same_bits, request},
    quantized_experts::mxfp4_experts,
};

const FAMILIES: [&str; 4] = ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"];

fn ids() -> Vec<u32> {
    (0..24).map(|at| at * at * 7 % 260).collect()
}

/// Writes a directory of Hugging Face, and a file with its matrices as `stored`.
fn written(dir: &Path, family: &str, stored: StoredElements) -> [PathBuf; 2] {
    let (hf, file) = (dir.join(family), dir.join(format!("{family}-{stored}.gguf")));
    if !hf.exists() {
        random_model(&hf, &with_experts(family));
    }
    ModelDirectory::open(&hf).unwrap().export_gguf(stored, &file).unwrap();
    [hf, file]
}

fn loaded(path: &Path, dtype: DType, threads: usize, activations: BlockActivations) -> LoadedModel {
    let options = LoadOptions::new(threads).with_dtype(dtype);
    let options = LoadOptions { activations: Some(activations), ..options };
    LoadedModel::load(&ModelDirectory::open(path).unwrap(), options).unwrap()
}

#[test]
fn a_file_of_numbers_has_the_logits_of_its_directory() {
    let dir = tempfile::tempdir().unwrap();
    for family in FAMILIES {
        let paths = written(dir.path(), family, StoredElements::Dense(DType::F32));
        let [hf, gguf] = paths.each_ref().map(|path| loaded(path, DType::F32, 1, BlockActivations::Float));
        let expected = logits_of(&hf, &ids(), 24);
        assert_same_bits(&logits_of(&gguf, &ids(), 24), &expected, family);
        let [in_place, converted] = gguf.weight_bytes();
        // Queries and keys of `llama` are stored in another order.
        let most = if family == "mixtral" { in_place / 8 } else { in_place / 1000 };
        assert!(converted <= most, "{family}: {in_place} bytes in place, {converted} converted");
    }
}

#[test]
fn a_quantized_file_has_the_logits_of_its_decoded_weights() {
    let dir = tempfile::tempdir().unwrap();
    let ids = ids();
    for (family, formats) in [
        ("qwen3_moe", &[BlockFormat::Q4K, BlockFormat::Q8_0, BlockFormat::Mxfp4][..]),
        ("mixtral", &[BlockFormat::Q6K]),
        ("qwen2_moe", &[BlockFormat::Q4K]),
        ("gpt_oss", &[BlockFormat::Mxfp4]),
    ] {
        for &format in formats {
            let [_, file] = written(dir.path(), family, StoredElements::Blocks(format));
            let decoded = dir.path().join(format!("{family}-{format}"));
            ModelDirectory::open(&file).unwrap().export_hf(DType::F32, &decoded).unwrap();
            for dtype in [DType::F32, DType::BF16] {
                let name = format!("{family} {format} {dtype}");
                let dense = loaded(&decoded, dtype, 1, BlockActivations::Float);
                let whole = logits_of(&dense, &ids, ids.len());
                let [one, two] = [1, 2].map(|threads| loaded(&file, dtype, threads, BlockActivations::Float));
                assert_chunks_change_nothing(&whole, &ids, &[(&one, ids.len()), (&one, 1), (&two, 5)], &name);
                let [in_place, converted] = one.weight_bytes();
                let stored = fs::metadata(&file).unwrap().len() as usize;
                assert!(in_place > stored / 2, "{name}: {in_place} bytes in place, {converted} converted");
                let [one, two] = [1, 2].map(|threads| loaded(&file, dtype, threads, BlockActivations::Int8));
                let rounded = logits_of(&one, &ids, ids.len());
                assert_chunks_change_nothing(&rounded, &ids, &[(&one, 1), (&two, 7)], &name);
                assert_batches_change_nothing(&[&one, &two], &ids, &name);
            }
        }
    }
}

/// No other directory is needed: stacks, and numbers of another type, are read from the file itself.
#[test]
fn experts_are_streamed_from_the_file_with_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let ids = ids();
    for (family, format) in [
        ("mixtral", BlockFormat::Q8_0),
        ("qwen2_moe", BlockFormat::Q4K),
        ("qwen3_moe", BlockFormat::Q4K),
        ("gpt_oss", BlockFormat::Mxfp4),
    ] {
        let [_, file] = written(dir.path(), family, StoredElements::Blocks(format));
        let directory = ModelDirectory::open(&file).unwrap();
        for dtype in [DType::BF16, DType::F32] {
            let model = LoadedModel::load(&directory, LoadOptions::new(1).with_dtype(dtype)).unwrap();
            let whole = logits_of(&model, &ids, ids.len());
            for map in [r#"{"": "disk"}"#, r#"{"": "cpu"}"#, r#"{"": "disk", "model.layers.0": "cpu"}"#] {
                let request = PlanRequest { offload_dir: None, ..request(map, dir.path()) };
                let plan = InferencePlan::new(&directory, dtype, &request).unwrap();
                let what = format!("{family} {format} {dtype} {map}");
                let experts = plan.modules[2]
                    .types
                    .iter()
                    .filter(|(stored, _)| *stored == StoredElements::Blocks(format));
                assert_eq!(experts.count(), 1, "{what}: {:?}", plan.modules[2].types);
                if map == r#"{"": "cpu"}"# {
                    let (found, predicted) = (model.weight_bytes().iter().sum::<usize>(), plan.model_bytes());
                    let off = found as f64 / predicted as f64 - 1.0;
                    assert!(off.abs() < 0.03, "{what}: {found} bytes in memory, {predicted} predicted");
                }
                let placed = LoadedModel::load_placed(&directory, plan).unwrap();
                for chunk in [ids.len(), 1] {
                    assert_same_bits(
                        &logits_of(&placed, &ids, chunk),
                        &whole,
                        &format!("{what}, chunks of {chunk}"),
                    );
                }
            }
        }
    }
}

/// The codes are copied; only the sign of a zero differs between readers of the two forms.
#[test]
fn mxfp4_experts_of_a_directory_keep_their_values() {
    let dir = tempfile::tempdir().unwrap();
    let directory = mxfp4_experts(dir.path());
    let file = dir.path().join("gpt-oss.gguf");
    directory.export_gguf(StoredElements::Blocks(BlockFormat::Mxfp4), &file).unwrap();
    let gguf = ModelDirectory::open(&file).unwrap();
    let mut stacks = 0;
    directory
        .for_each_selected(
            |name| name.contains(".experts."),
            |name, expected| -> Result<(), CheckpointError> {
                let mut found = Vec::new();
                gguf.read(name, &mut found)?;
                let differs = found.iter().zip(expected).position(|(a, b)| a != b);
                assert_eq!(differs, None, "{name}: {:?}", differs.map(|at| (found[at], expected[at])));
                stacks += 1;
                Ok(())
            },
        )
        .unwrap();
    assert_eq!(stacks, 12, "three stacks and their biases in each of two layers");
}
