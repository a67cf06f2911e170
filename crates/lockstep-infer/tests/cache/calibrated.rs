//! Scales from activations: they leave the function of a model as it is, and quantized weights lose no more with them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use lockstep_checkpoint::{
    DType, ModelDirectory, QuantizedForm, QuantizedMatrices, WeightQuantization, WeightType, is_quantizable,
};
use lockstep_infer::{Calibration, InferError, LoadOptions, LoadedModel, calibrate, calibration_window};
use lockstep_model::parameter_records;

use super::{FAMILIES, SEQ_LEN, assert_close, common, expected, fixture, logits_of};

/// Layers whose inputs are scaled, by what precedes them, in families of fixtures.
const NORMS: &str = "norm";
const VALUES: &str = "values";
const UP: &str = "up";

/// Returns what the inputs of a family's scaled layers come from.
fn scaled_inputs(family: &str) -> &'static [&'static str] {
    match family {
        // A rectifier has the sign of its input.
        "opt" => &[NORMS, VALUES, UP],
        "gpt2"
        | "gpt_neox"
        | "gpt_neox_sequential"
        | "falcon"
        | "falcon_grouped"
        | "falcon_one_norm"
        | "falcon_alibi"
        | "bloom" => &[NORMS, VALUES],
        // Norms are on the residual stream, which sums read as well.
        "opt_post_norm" => &[VALUES, UP],
        "bloom_post_norm" => &[VALUES],
        "olmo2" => &[VALUES, UP],
        // Experts and their router read the norm before them.
        "mixtral" | "qwen3_moe" | "gpt_oss" => &[NORMS, VALUES],
        "deepseek_v3" | "deepseek_v3_yarn" => &[NORMS, UP],
        _ => &[NORMS, VALUES, UP],
    }
}

/// Returns what the input of a module comes from.
fn producer_of(module: &str) -> &'static str {
    match module.rsplit('.').next().unwrap_or_default() {
        "o_proj" | "out_proj" | "dense" | "c_proj" if !module.contains("mlp") => VALUES,
        "down_proj" | "fc2" | "dense_4h_to_h" | "c_proj" => UP,
        _ => NORMS,
    }
}

fn load(directory: &ModelDirectory, threads: usize) -> LoadedModel {
    LoadedModel::load(directory, LoadOptions::new(threads).with_dtype(DType::F32)).unwrap()
}

/// Returns tokens of two windows and a rest that is not read.
fn text(model: &LoadedModel) -> Vec<u32> {
    let vocabulary = model.config().vocab_size() as u32;
    (0..2 * calibration_window(model) as u32 + 5).map(|at| (at * at * 7 + at / 3) % vocabulary).collect()
}

fn calibrated(directory: &ModelDirectory, matrices: &QuantizedMatrices, threads: usize) -> Calibration {
    let model = load(directory, threads);
    calibrate((&model, directory), matrices, &text(&model), || ()).unwrap()
}

/// Returns all matrices of a fixture's linear layers, whose rows are whole groups of 8 at most.
fn all_matrices(directory: &ModelDirectory) -> QuantizedMatrices {
    let records = parameter_records(directory.config()).into_iter();
    let parameters = records.filter(|record| is_quantizable(&record.name, &record.shape));
    QuantizedMatrices {
        form: QuantizedForm { to: WeightType::Int4, group_size: 8, dtype: DType::F32 },
        parameters: parameters.map(|record| record.name).collect(),
        kept: Vec::new(),
        tensors: BTreeSet::new(),
    }
}

#[test]
fn scales_leave_the_logits_of_every_family_as_they_are() {
    for family in FAMILIES {
        let directory = ModelDirectory::open(&fixture(family)).unwrap();
        let matrices = all_matrices(&directory);
        let found = calibrated(&directory, &matrices, 1);
        let mut changed: BTreeMap<&str, usize> = BTreeMap::new();
        for layer in &found.layers {
            let [plain, scaled] = layer.errors;
            assert!(layer.energy > 0.0 && plain > 0.0 && scaled > 0.0, "{family}: {layer:?}");
            *changed.entry(producer_of(&layer.module)).or_default() += usize::from(layer.exponent > 0.0);
        }
        let expected_inputs: BTreeSet<&str> = scaled_inputs(family).iter().copied().collect();
        let found_inputs: BTreeSet<&str> = changed.keys().copied().collect();
        assert_eq!(found_inputs, expected_inputs, "{family}: {:?} are not scaled", found.unscaled);
        assert!(changed.values().all(|layers| *layers > 0), "{family}: layers with scales {changed:?}");
        assert_eq!(found.layers.len() + found.unscaled.len(), matrices.parameters.len(), "{family}");
        let (ids, logits) = expected(family);
        let scaled = directory.with_scales(found.scales);
        assert_close(&logits_of(&load(&scaled, 1), &ids, SEQ_LEN), &logits[SEQ_LEN - 1], family);
    }
}

/// Writes a model with random weights, of which those of norms have unlike magnitudes.
fn random_model(out: &Path, model_type: &str) -> ModelDirectory {
    let plain = out.join("plain");
    common::random_model(&plain, &common::config(model_type));
    ModelDirectory::open(&plain).unwrap()
}

#[test]
fn quantized_weights_lose_no_more_with_scales_and_load() {
    let dir = tempfile::tempdir().unwrap();
    let directory = random_model(dir.path(), "llama");
    let model = load(&directory, 1);
    let ids: Vec<u32> = (0..24).map(|at| at * at * 7 % 64).collect();
    let exact = logits_of(&model, &ids, ids.len());
    let energy: f32 = exact.iter().map(|logit| logit * logit).sum();
    for (to, limit) in [(WeightType::Int8, 1e-3), (WeightType::Int4, 0.1), (WeightType::Nf4, 0.2)] {
        let quantization = WeightQuantization { to, group_size: None };
        let matrices = directory.quantized_matrices(quantization).unwrap();
        let found = calibrated(&directory, &matrices, 1);
        assert_eq!((found.layers.len(), &found.unscaled), (14, &Vec::new()), "{to:?}");
        // Layers that read one input have one error.
        let sums = found.layers.chunk_by(|a, b| producer_of(&a.module) == producer_of(&b.module));
        for layers in sums {
            let [plain, scaled] = [0, 1].map(|at| layers.iter().map(|layer| layer.errors[at]).sum::<f64>());
            assert!(scaled <= plain, "{to:?}: {scaled} with scales, {plain} without, of {layers:?}");
        }
        assert_eq!(found, calibrated(&directory, &matrices, 2), "{to:?} on one thread and on two");
        let out = dir.path().join(format!("{to:?}"));
        let scaled = ModelDirectory::open(directory.path()).unwrap().with_scales(found.scales);
        let done = scaled.quantize(quantization, &out).unwrap();
        assert_eq!((done.matrices, done.kept.len()), (14, 0), "{to:?}");
        let written = ModelDirectory::open(&out).unwrap();
        assert_eq!(written.packed_parameters().len(), 14, "{to:?}");
        let logits = logits_of(&load(&written, 1), &ids, ids.len());
        let error: f32 = logits.iter().zip(&exact).map(|(a, b)| (a - b) * (a - b)).sum();
        assert!(error > 0.0 && error < limit * energy, "{to:?}: error {:.1e} of the energy", error / energy);
    }
}

#[test]
fn a_model_without_scales_is_written_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let directory = random_model(dir.path(), "qwen3");
    let quantization = WeightQuantization { to: WeightType::Int4, group_size: None };
    let [plain, scaled] = ["a", "b"].map(|name| dir.path().join(name));
    directory.quantize(quantization, &plain).unwrap();
    directory.with_scales(Default::default()).quantize(quantization, &scaled).unwrap();
    for file in ["config.json", "model.safetensors"] {
        let [plain, scaled] = [&plain, &scaled].map(|out| fs::read(out.join(file)).unwrap());
        assert!(plain == scaled, "{file} differs");
    }
}

#[test]
fn a_text_shorter_than_a_window_is_refused() {
    let directory = ModelDirectory::open(&fixture("llama")).unwrap();
    let model = load(&directory, 1);
    let refused = calibrate((&model, &directory), &all_matrices(&directory), &[1; 63], || ());
    assert!(matches!(refused, Err(InferError::CalibrationText { tokens: 63, window: 64 })), "{refused:?}");
}
