//! Models with packed weights: repacked blocks give the logits of the decoded weights, and weights are quantized as they are loaded.

use lockstep_checkpoint::{DType, ModelDirectory, WeightQuantization, WeightType};
use lockstep_infer::{LoadOptions, LoadedModel};
use lockstep_tensor::BlockActivations;

use super::{assert_chunks_change_nothing, fixture, logits_of};

/// Fixtures, and whether there are matrices among theirs that are repacked.
const PACKED: [(&str, bool); 12] = [
    ("gptq", true),
    ("gptq_act_order", false),
    ("gptq_8_bits", true),
    ("awq", true),
    ("packed_asymmetric", true),
    ("int8_channels", true),
    ("fp8_blocks", true),
    ("fp8_channels", true),
    ("nf4_nested", true),
    ("fp4", false),
    ("mxfp4", true),
    ("mxfp4_experts", true),
];

fn ids() -> Vec<u32> {
    (0..24).map(|at| at * at * 7 % 64).collect()
}

fn load(
    directory: &ModelDirectory,
    dtype: DType,
    threads: usize,
    quantize: Option<WeightType>,
) -> LoadedModel {
    let quantize = quantize.map(|to| WeightQuantization { to, group_size: None });
    let options = LoadOptions::new(threads).with_dtype(dtype);
    let activations = Some(BlockActivations::Float);
    LoadedModel::load(directory, LoadOptions { activations, quantize, ..options }).unwrap()
}

#[test]
fn a_model_with_packed_weights_has_the_logits_of_its_decoded_weights() {
    let dir = tempfile::tempdir().unwrap();
    let ids = ids();
    for (name, is_repacked) in PACKED {
        let packed = ModelDirectory::open(&fixture("quantized").join(name)).unwrap();
        assert_eq!(packed.packed_parameters().is_empty(), !is_repacked, "{name}");
        let decoded = dir.path().join(name);
        packed.export_hf(DType::F32, &decoded).unwrap();
        let decoded = ModelDirectory::open(&decoded).unwrap();
        for dtype in [packed.stored_dtype(), DType::F32] {
            let whole = logits_of(&load(&decoded, dtype, 1, None), &ids, ids.len());
            let [one, two] = [1, 2].map(|threads| load(&packed, dtype, threads, None));
            assert_chunks_change_nothing(&whole, &ids, &[(&one, ids.len()), (&one, 1), (&two, 5)], name);
        }
    }
}

#[test]
fn weights_are_quantized_as_they_are_loaded() {
    let directory = ModelDirectory::open(&fixture("quantized").join("gptq_8_bits")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    directory.export_hf(DType::F32, &dir.path().join("model")).unwrap();
    let directory = ModelDirectory::open(&dir.path().join("model")).unwrap();
    let ids = ids();
    let whole = logits_of(&load(&directory, DType::F32, 1, None), &ids, ids.len());
    let energy: f32 = whole.iter().map(|logit| logit * logit).sum();
    for (to, limit) in [(WeightType::Int8, 1e-3), (WeightType::Int4, 0.1), (WeightType::Nf4, 0.2)] {
        let [one, two] = [1, 2].map(|threads| load(&directory, DType::F32, threads, Some(to)));
        let found = logits_of(&one, &ids, ids.len());
        assert_chunks_change_nothing(&found, &ids, &[(&one, 1), (&two, 7)], &format!("{to:?}"));
        let error: f32 = found.iter().zip(&whole).map(|(a, b)| (a - b) * (a - b)).sum();
        assert!(error > 0.0 && error < limit * energy, "{to:?}: error {:.1e} of the energy", error / energy);
    }
}
