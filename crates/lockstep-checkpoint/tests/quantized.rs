//! Quantized checkpoints: the values that each method's own package reads, from the numbers and from the repacked blocks.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

use std::{collections::BTreeMap, path::PathBuf};

use half::{bf16, f16};
use lockstep_checkpoint::{
    CheckpointError, DType, ModelDirectory, QuantizationSummary, safetensors::SafetensorsFile,
};
use lockstep_plan::BlockFormat;

/// Fixture, type of its scales, and format of its blocks.
const FIXTURES: [(&str, DType, Option<BlockFormat>); 8] = [
    ("gptq", DType::F16, Some(BlockFormat::Int4G32)),
    ("gptq_act_order", DType::F16, None),
    ("gptq_8_bits", DType::F16, Some(BlockFormat::Int8G32)),
    ("awq", DType::F16, Some(BlockFormat::Int4G64)),
    ("packed_symmetric", DType::BF16, Some(BlockFormat::Int4G32)),
    ("packed_asymmetric", DType::F16, Some(BlockFormat::Int4G64)),
    ("packed_8_bits", DType::BF16, Some(BlockFormat::Int8G32)),
    ("int8_channels", DType::BF16, Some(BlockFormat::Int8G32)),
];

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/quantized").join(name)
}

/// Returns the parameters of a model by name.
fn parameters(directory: &ModelDirectory) -> BTreeMap<String, Vec<f32>> {
    let mut found = BTreeMap::new();
    directory
        .for_each_parameter(|name, values| {
            found.insert(name.to_owned(), values.to_vec());
            Ok::<_, CheckpointError>(())
        })
        .unwrap();
    found
}

fn rounded(dtype: DType, value: f32) -> f32 {
    match dtype {
        DType::BF16 => bf16::from_f32(value).to_f32(),
        DType::F16 => f16::from_f32(value).to_f32(),
        _ => value,
    }
}

#[test]
fn every_method_has_the_bits_of_its_own_package() {
    for (name, dtype, _) in FIXTURES {
        let directory = ModelDirectory::open(&fixture(name)).unwrap();
        assert_eq!(directory.stored_dtype(), dtype, "{name}");
        let found = parameters(&directory);
        let expected = SafetensorsFile::open(&fixture(name).join("expected.safetensors")).unwrap();
        for parameter in expected.names() {
            let mut values = vec![0.0; expected.tensor(parameter).unwrap().elements()];
            expected.read_f32_at(parameter, 0, &mut values).unwrap();
            for (index, (&found, expected)) in found[parameter].iter().zip(&values).enumerate() {
                let found = rounded(dtype, found);
                assert_eq!(
                    found.to_bits(),
                    expected.to_bits(),
                    "{name} {parameter} {index}: {found} for {expected}"
                );
            }
        }
    }
}

#[test]
fn repacked_blocks_have_the_values_of_the_packed_tensors() {
    for (name, _, format) in FIXTURES {
        let directory = ModelDirectory::open(&fixture(name)).unwrap();
        let expected = parameters(&directory);
        let packed = directory.packed_parameters();
        assert_eq!(packed.len(), if format.is_some() { 7 } else { 0 }, "{name}");
        for parameter in packed {
            let [rows, columns] = parameter.shape;
            let long = match format {
                Some(BlockFormat::Int8G32) if columns == 128 => Some(BlockFormat::Int8G128),
                other => other,
            };
            assert_eq!(Some(parameter.format), long, "{name} {}", parameter.name);
            let mut blocks = vec![0; parameter.bytes()];
            parameter.pack(&mut blocks).unwrap();
            let mut values = vec![0.0; rows * columns];
            parameter.format.dequantize(&blocks, &mut values);
            assert_eq!(values, expected[parameter.name], "{name} {}", parameter.name);
        }
    }
}

#[test]
fn a_summary_counts_repacked_and_decoded_matrices() {
    let summary = |name: &str| ModelDirectory::open(&fixture(name)).unwrap().quantization().unwrap();
    let expected = QuantizationSummary { method: "awq", packed: 7, decoded: BTreeMap::new() };
    assert_eq!(summary("awq"), expected);
    let decoded = BTreeMap::from([("its groups are not contiguous (act-order)", 7)]);
    assert_eq!(summary("gptq_act_order"), QuantizationSummary { method: "gptq", packed: 0, decoded });
}
