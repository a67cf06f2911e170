//! Quantized checkpoints: the values that each method's own package reads, from the numbers and from the repacked blocks.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use half::{bf16, f16};
use lockstep_checkpoint::{
    CheckpointError, DType, ModelDirectory, PackedParameter, QuantizationSummary, WeightQuantization,
    WeightType, safetensors::SafetensorsFile,
};
use lockstep_model::{HfContent, HfMapping};
use lockstep_plan::BlockFormat;

/// Fixture, type to compute in, and format of the blocks of matrices with 64 columns, or of fp8 with 128.
const FIXTURES: [(&str, DType, Option<BlockFormat>); 18] = [
    ("gptq", DType::F16, Some(BlockFormat::Int4G32)),
    ("gptq_act_order", DType::F16, None),
    ("gptq_8_bits", DType::F16, Some(BlockFormat::Int8G32)),
    ("awq", DType::F16, Some(BlockFormat::Int4G64)),
    ("packed_symmetric", DType::BF16, Some(BlockFormat::Int4G32)),
    ("packed_asymmetric", DType::F16, Some(BlockFormat::Int4G64)),
    ("packed_8_bits", DType::BF16, Some(BlockFormat::Int8G32)),
    ("int8_channels", DType::BF16, Some(BlockFormat::Int8G32)),
    ("llm_int8", DType::F16, Some(BlockFormat::Int8G32)),
    ("fp8_channels", DType::BF16, Some(BlockFormat::Fp8G128)),
    ("fp8_small_blocks", DType::BF16, None),
    ("fp8_blocks", DType::BF16, Some(BlockFormat::Fp8G128)),
    ("fp8_tensors", DType::BF16, Some(BlockFormat::Fp8G128)),
    ("nf4", DType::BF16, Some(BlockFormat::Nf4G64)),
    ("nf4_nested", DType::BF16, Some(BlockFormat::Nf4G64)),
    ("fp4", DType::F16, None),
    ("mxfp4", DType::BF16, Some(BlockFormat::Mxfp4)),
    ("mxfp4_experts", DType::BF16, Some(BlockFormat::Mxfp4)),
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
    let mut compared = 0;
    for (name, dtype, _) in FIXTURES {
        let directory = ModelDirectory::open(&fixture(name)).unwrap();
        assert_eq!(directory.stored_dtype(), dtype, "{name}");
        let found = parameters(&directory);
        let expected = SafetensorsFile::open(&fixture(name).join("expected.safetensors")).unwrap();
        let mapping = HfMapping::new(directory.config());
        for tensor in mapping.tensors() {
            let (Ok(stored), HfContent::Parameters(places)) =
                (expected.tensor(&tensor.name), &tensor.content)
            else {
                continue;
            };
            let mut values = vec![0.0; stored.elements()];
            expected.read_f32_at(&tensor.name, 0, &mut values).unwrap();
            compared += 1;
            for place in places {
                let mut expected = vec![0.0; place.part().len()];
                place.read(&values, &mut expected).unwrap();
                let found = &found[&place.parameter][place.part()];
                for (index, (&found, expected)) in found.iter().zip(&expected).enumerate() {
                    let found = rounded(stored.known_dtype().unwrap(), found);
                    let what = format!("{name} {} {index}: {found} for {expected}", tensor.name);
                    assert_eq!(found.to_bits(), expected.to_bits(), "{what}");
                }
            }
        }
    }
    assert_eq!(compared, 3 * (FIXTURES.len() - 1) + 2);
}

#[test]
fn repacked_blocks_have_the_values_of_the_packed_tensors() {
    for (name, _, format) in FIXTURES {
        let directory = ModelDirectory::open(&fixture(name)).unwrap();
        let expected = parameters(&directory);
        let packed = directory.packed_parameters();
        let matrices = match format {
            None => 0,
            Some(BlockFormat::Fp8G128) => 1,
            // Stacks of gates, linear halves and the layers after them.
            Some(_) if name == "mxfp4_experts" => 3,
            Some(_) => 7,
        };
        assert_eq!(packed.len(), matrices, "{name}");
        for parameter in packed {
            let [.., columns] = parameter.shape[..] else { panic!("{name}: {:?}", parameter.shape) };
            let long = match format {
                Some(BlockFormat::Int8G32) if columns == 128 => Some(BlockFormat::Int8G128),
                other => other,
            };
            assert_eq!(Some(parameter.format), long, "{name} {}", parameter.name);
            let mut blocks = vec![0; parameter.bytes()];
            parameter.pack(&mut blocks).unwrap();
            let mut values = vec![0.0; parameter.shape.iter().product()];
            parameter.format.dequantize(&blocks, &mut values);
            let expected = &expected[parameter.name];
            if name == "llm_int8" {
                // A block has one factor where bitsandbytes multiplies twice.
                let is_near = |(a, b): (&f32, &f32)| (a - b).abs() <= f32::EPSILON * b.abs();
                assert!(values.iter().zip(expected).all(is_near), "{name} {}", parameter.name);
                continue;
            }
            assert_eq!(&values, expected, "{name} {}", parameter.name);
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

#[test]
fn a_quantized_directory_is_near_the_model_it_was_made_of() {
    let dir = tempfile::tempdir().unwrap();
    let source = ModelDirectory::open(&fixture("gptq_8_bits")).unwrap();
    let expected = parameters(&source);
    for (to, group, limit) in [
        (WeightType::Int8, 32, 0.01),
        (WeightType::Int4, 32, 0.12),
        (WeightType::Int4, 64, 0.16),
        (WeightType::Nf4, 64, 0.16),
    ] {
        let name = format!("{to:?}-{group}");
        let out = dir.path().join(&name);
        let quantization = WeightQuantization { to, group_size: Some(group) };
        let done = source.quantize(quantization, &out).unwrap();
        assert_eq!((done.matrices, done.group_size, done.kept), (7, group, Vec::<String>::new()), "{name}");
        let written = ModelDirectory::open(&out).unwrap();
        assert_eq!((written.packed_parameters().len(), written.stored_dtype()), (7, DType::F16), "{name}");
        for (parameter, values) in parameters(&written) {
            let expected = &expected[&parameter];
            if !parameter.ends_with("proj.weight") {
                assert_eq!(&values, expected, "{name} {parameter}");
                continue;
            }
            let energy: f32 = expected.iter().map(|value| value * value).sum();
            let error: f32 = values.iter().zip(expected).map(|(a, b)| (a - b) * (a - b)).sum();
            let relative = (error / energy).sqrt();
            assert!(
                relative > 0.0 && relative < limit,
                "{name} {parameter}: {relative:.4} of the weights' size"
            );
        }
    }
}

/// Returns the error of a model whose files a function has changed.
fn refused(name: &str, change: impl FnOnce(&Path)) -> CheckpointError {
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(fixture(name).join(file), dir.path().join(file)).unwrap();
    }
    change(dir.path());
    match ModelDirectory::open(dir.path()) {
        Ok(model) => model.for_each_parameter(|_, _| Ok::<_, CheckpointError>(())).unwrap_err(),
        Err(error) => error,
    }
}

/// Replaces text in a file. Both texts have the same length in a file of tensors.
fn replace(path: &Path, from: &str, to: &str) {
    let bytes = fs::read(path).unwrap();
    let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
    fs::write(path, [&bytes[..at], to.as_bytes(), &bytes[at + from.len()..]].concat()).unwrap();
}

#[test]
fn methods_that_are_not_read_are_refused_by_name() {
    let cases = [
        ("gptq", "\"quant_method\": \"gptq\"", "\"quant_method\": \"aqlm\"", "read are gptq, awq"),
        ("gptq", "\"quant_method\": \"gptq\",", "", "has no quant_method"),
        ("gptq", "\"bits\": 4", "\"bits\": 3", "bits is 3; read are weights of 4 and 8 bits"),
        ("gptq", "\"bits\": 4", "\"bits\": \"4\"", "bits is \"4\""),
        ("gptq", "\"group_size\": 32", "\"group_size\": 0", "group_size is 0"),
        ("gptq", "\"group_size\": 32", "\"group_size\": 99999999999999999999", "group_size is"),
        ("gptq_act_order", "gptq_v2", "marlin", "`gptq` and `gptq_v2` are read"),
        ("awq", "\"gemm\"", "\"gemv\"", "of AWQ, `gemm` is read"),
        (
            "int8_channels",
            "\"format\": \"int-quantized\"",
            "\"format\": \"sparse-bitmask\"",
            "format is `sparse-bitmask`",
        ),
        ("fp8_blocks", "[\n      128", "[\n      0", "weight_block_size"),
    ];
    for (name, from, to, reason) in cases {
        let error = refused(name, |dir| replace(&dir.join("config.json"), from, to));
        assert!(matches!(error, CheckpointError::Quantization { .. }), "{name}, {to}: {error}");
        assert!(error.to_string().contains(reason) && !error.is_corrupt(), "{name}, {to}: {error}");
    }
}

#[test]
fn packed_tensors_that_contradict_each_other_are_refused() {
    let config =
        |from: &'static str, to: &'static str| move |dir: &Path| replace(&dir.join("config.json"), from, to);
    let tensors = |from: &'static str, to: &'static str| {
        move |dir: &Path| replace(&dir.join("model.safetensors"), from, to)
    };
    let module = "model.layers.0.mlp.down_proj";
    let cases: Vec<(&str, CheckpointError, String)> = vec![
        (
            "group size",
            refused("gptq", config("\"group_size\": 32", "\"group_size\": 64")),
            format!("{module}.qzeros"),
        ),
        (
            "huge group",
            refused("awq", config("\"group_size\": 64", "\"group_size\": 1048576")),
            format!("{module}.qzeros"),
        ),
        ("bits", refused("gptq", config("\"bits\": 4", "\"bits\": 8")), format!("{module}.qzeros")),
        (
            "missing",
            refused("gptq", tensors("down_proj.scales", "down_proj.scalez")),
            format!("`{module}.scales` is missing"),
        ),
        (
            "type",
            refused(
                "gptq",
                tensors("\"dtype\":\"I32\",\"shape\":[128]", "\"dtype\":\"U32\",\"shape\":[128]"),
            ),
            format!("{module}.g_idx"),
        ),
        (
            "shape",
            refused("packed_symmetric", tensors("weight_shape", "weight_shapo")),
            format!("`{module}.weight_shape` is missing"),
        ),
        (
            "state",
            refused("nf4", tensors("\"blocksize\": 64", "\"blocksize\": 00")),
            format!("{module}.weight.quant_state"),
        ),
        (
            "overflow",
            refused("nf4", tensors("\"shape\": [64, 128]", "\"shape\": [-4, 128]")),
            format!("{module}.weight.quant_state"),
        ),
        ("rows", refused("llm_int8", tensors("down_proj.SCB", "down_proj.SCA")), "down_proj".to_owned()),
    ];
    for (name, error, reason) in cases {
        assert!(error.is_corrupt(), "{name}: {error}");
        assert!(error.to_string().contains(&reason), "{name}: {error}");
    }
}

#[test]
fn a_file_that_ends_early_and_numbers_that_are_none_are_refused() {
    let error = refused("awq", |dir| {
        let path = dir.join("model.safetensors");
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() - 100]).unwrap();
    });
    assert!(error.is_corrupt(), "{error}");
    let error = refused("fp8_blocks", |dir| {
        let path = dir.join("model.safetensors");
        let file = SafetensorsFile::open(&path).unwrap();
        let offset = file.header().tensor("model.layers.0.mlp.up_proj.weight").unwrap().offset;
        let mut bytes = fs::read(&path).unwrap();
        bytes[offset + 3 * 64 + 5] = 0xff;
        fs::write(&path, bytes).unwrap();
    });
    assert!(error.is_corrupt() && error.to_string().contains("row 3 of `weight` has a NaN"), "{error}");
    let scale_of_255 = |dir: &Path| {
        let path = dir.join("model.safetensors");
        let file = SafetensorsFile::open(&path).unwrap();
        let scales = "model.layers.0.mlp.experts.gate_up_proj_scales";
        let offset = file.header().tensor(scales).unwrap().offset;
        let mut bytes = fs::read(&path).unwrap();
        bytes[offset + 5] = 0xff;
        fs::write(path, bytes).unwrap();
    };
    let error = refused("mxfp4_experts", scale_of_255);
    assert!(error.is_corrupt() && error.to_string().contains("a scale is 255"), "{error}");
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(fixture("mxfp4_experts").join(file), dir.path().join(file)).unwrap();
    }
    scale_of_255(dir.path());
    let model = ModelDirectory::open(dir.path()).unwrap();
    let pack = |parameter: &PackedParameter<'_>| parameter.pack(&mut vec![0; parameter.bytes()]);
    // The fifth of the stored rows is a linear half.
    let damaged = model.packed_parameters().into_iter().filter(|parameter| pack(parameter).is_err());
    let damaged: Vec<&str> = damaged.map(|parameter| parameter.name).collect();
    assert_eq!(damaged, ["model.layers.0.mlp.experts.up_proj.weight"]);
    let error = refused("gptq", |dir| {
        let path = dir.join("model.safetensors");
        let file = SafetensorsFile::open(&path).unwrap();
        let offset = file.header().tensor("model.layers.0.mlp.up_proj.g_idx").unwrap().offset;
        let mut bytes = fs::read(&path).unwrap();
        bytes[offset..offset + 4].copy_from_slice(&(-1_i32).to_le_bytes());
        fs::write(&path, bytes).unwrap();
    });
    assert!(error.is_corrupt() && error.to_string().contains("names a group that is not below 2"), "{error}");
}
