//! Tests of Hugging Face model directories: files as `transformers` expects them, and no path out of the directory.
#![expect(clippy::unwrap_used, reason = "a test whose set-up fails has failed")]

use std::{collections::BTreeMap, fs, os::unix::fs::symlink, path::Path};

use lockstep_checkpoint::{
    CheckpointError, DType,
    hf::{DEFAULT_SHARD_BYTES, ExportData, ExportTensor, HfCheckpoint, HfExport, SINGLE_FILE},
};

fn values(seed: usize, elements: usize) -> Vec<f32> {
    // Multiples of 1/8 below 16: exact in all three float types.
    (0..elements).map(|i| ((i * 7 + seed) % 128) as f32 / 8.0 - 4.0).collect()
}

fn tensors(data: &[(String, Vec<usize>, Vec<f32>)]) -> Vec<ExportTensor<'_>> {
    data.iter()
        .map(|(name, shape, values)| ExportTensor {
            name: name.clone(),
            shape: shape.clone(),
            data: ExportData::Bytes { dtype: DType::F32, bytes: bytemuck::cast_slice(values) },
        })
        .collect()
}

fn model() -> Vec<(String, Vec<usize>, Vec<f32>)> {
    (0..6).map(|i| (format!("model.layers.{i}.weight"), vec![5, 4 + i], values(i, 5 * (4 + i)))).collect()
}

fn export<'a>(tensors: Vec<ExportTensor<'a>>, dtype: Option<DType>, shard_bytes: u64) -> HfExport<'a> {
    let texts = BTreeMap::from([("config.json".to_owned(), "{\"model_type\": \"llama\"}\n".to_owned())]);
    HfExport { tensors, dtype, file: SINGLE_FILE, texts, copies: BTreeMap::new(), shard_bytes }
}

fn files_in(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn assert_holds(dir: &Path, model: &[(String, Vec<usize>, Vec<f32>)], dtype: DType) {
    let read = HfCheckpoint::open(dir).unwrap();
    assert_eq!(read.names().count(), model.len());
    for (name, shape, expected) in model {
        let tensor = read.tensor(name).unwrap();
        assert_eq!((tensor.known_dtype(), tensor.shape), (Some(dtype), &shape[..]), "{name}");
        let mut values = vec![f32::NAN; expected.len()];
        read.read_f32(name, &mut values).unwrap();
        assert_eq!(&values, expected, "{name}");
    }
}

#[test]
fn a_directory_may_have_the_longest_name_that_the_file_system_allows() {
    let dir = tempfile::tempdir().unwrap();
    let model = model();
    let out = dir.path().join("e".repeat(255));
    export(tensors(&model), None, DEFAULT_SHARD_BYTES).write(&out).unwrap();
    assert_holds(&out, &model, DType::F32);
    assert_eq!(files_in(dir.path()).len(), 1, "{:?}", files_in(dir.path()));
}

#[test]
fn a_small_model_is_one_file_beside_its_config_and_tokenizer() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = dir.path().join("tokenizer.json");
    fs::write(&tokenizer, "{}").unwrap();
    let model = model();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let out = dir.path().join(format!("deep/er/{dtype}"));
        let mut export = export(tensors(&model), Some(dtype), DEFAULT_SHARD_BYTES);
        export.copies.insert("tokenizer.json".to_owned(), tokenizer.clone());
        export.write(&out).unwrap();
        assert_eq!(files_in(&out), ["config.json", "model.safetensors", "tokenizer.json"]);
        assert_eq!(fs::read_to_string(out.join("config.json")).unwrap(), "{\"model_type\": \"llama\"}\n");
        assert_holds(&out, &model, dtype);
        let bytes = fs::read(out.join("model.safetensors")).unwrap();
        let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
    }
    assert_eq!(
        files_in(&dir.path().join("deep/er")),
        ["bf16", "f16", "f32"],
        "no temporary directory is left"
    );
}

#[test]
fn a_large_model_is_sharded_as_transformers_does_it() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    // f32 sizes 80, 100, 120, 140, 160, 180 with a limit of 170. [80], [100], [120], [140] and [160] each fill a shard;
    // the last tensor exceeds the limit and gets its own.
    let model = model();
    export(tensors(&model), None, 170).write(&out).unwrap();
    let shard = |i: usize| format!("model-{i:05}-of-00006.safetensors");
    let mut expected: Vec<_> = (1..=6).map(shard).collect();
    expected.insert(0, "config.json".to_owned());
    expected.push("model.safetensors.index.json".to_owned());
    assert_eq!(files_in(&out), expected);

    let index: serde_json::Value =
        serde_json::from_slice(&fs::read(out.join("model.safetensors.index.json")).unwrap()).unwrap();
    assert_eq!(index["metadata"]["total_size"], 80 + 100 + 120 + 140 + 160 + 180);
    for (i, (name, ..)) in model.iter().enumerate() {
        let expected = if i == 5 {
            shard(5)
        } else if i == 4 {
            shard(6)
        } else {
            shard(i + 1)
        };
        assert_eq!(index["weight_map"][name], expected, "{name}");
    }
    assert_holds(&out, &model, DType::F32);

    let pairs = dir.path().join("pairs");
    export(tensors(&model), Some(DType::BF16), 170).write(&pairs).unwrap();
    assert_holds(&pairs, &model, DType::BF16);
    assert_eq!(files_in(&pairs).len(), 2 + 3, "bf16 sizes 40+50+60, 70+80, 90 in 170 each");
}

#[test]
fn values_may_come_from_a_function_and_integers_keep_their_type() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    // Exceeds one conversion buffer, so that the function is called with several starts.
    let elements = (1 << 20) + 3;
    let positions = [1u32, 2, 3];
    let made = vec![
        ExportTensor {
            name: "made".to_owned(),
            shape: vec![elements],
            data: ExportData::Values(Box::new(|start, out| {
                out.iter_mut().zip(start..).for_each(|(value, i)| *value = (i % 256) as f32);
                Ok(())
            })),
        },
        ExportTensor {
            name: "positions".to_owned(),
            shape: vec![3],
            data: ExportData::Bytes { dtype: DType::U32, bytes: bytemuck::cast_slice(&positions) },
        },
    ];
    export(made, Some(DType::BF16), DEFAULT_SHARD_BYTES).write(&out).unwrap();
    let read = HfCheckpoint::open(&out).unwrap();
    assert_eq!(read.tensor("positions").unwrap().bytes, bytemuck::cast_slice::<u32, u8>(&positions));
    let mut values = vec![0.0; elements];
    read.read_f32("made", &mut values).unwrap();
    let wrong = values.iter().enumerate().find(|&(i, &value)| value != (i % 256) as f32);
    assert_eq!(wrong, None);
    let short = read.read_f32("made", &mut values[1..]);
    assert!(matches!(short, Err(CheckpointError::Range { .. })), "{short:?}");
}

#[test]
fn bf16_bytes_pass_through_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    for dtype in [DType::BF16, DType::F16] {
        let bits: Vec<u16> = (0..=u16::MAX).collect();
        let tensor = ExportTensor {
            name: "all".to_owned(),
            shape: vec![256, 256],
            data: ExportData::Bytes { dtype, bytes: bytemuck::cast_slice(&bits) },
        };
        let out = dir.path().join(dtype.to_string());
        export(vec![tensor], Some(dtype), DEFAULT_SHARD_BYTES).write(&out).unwrap();
        let read = HfCheckpoint::open(&out).unwrap();
        assert!(read.tensor("all").unwrap().bytes == bytemuck::cast_slice::<u16, u8>(&bits), "{dtype}");
    }
}

#[test]
fn a_failed_export_leaves_nothing_and_an_occupied_directory_is_not_touched() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let model = model();
    let failing = vec![ExportTensor {
        name: "x".to_owned(),
        shape: vec![2],
        data: ExportData::Values(Box::new(|_, _| {
            Err(CheckpointError::NoSuchTensor { path: "source".into(), tensor: "x".to_owned() })
        })),
    }];
    let error = export(failing, None, DEFAULT_SHARD_BYTES).write(&out).unwrap_err();
    assert!(matches!(error, CheckpointError::NoSuchTensor { .. }), "{error}");
    assert!(files_in(dir.path()).is_empty(), "{:?}", files_in(dir.path()));

    fs::create_dir(&out).unwrap();
    export(tensors(&model), None, DEFAULT_SHARD_BYTES).write(&out).unwrap();
    let error = export(tensors(&model), None, DEFAULT_SHARD_BYTES).write(&out).unwrap_err();
    assert!(matches!(error, CheckpointError::OutputExists { .. }), "{error}");
    assert_holds(&out, &model, DType::F32);

    for name in ["../escape", "a/b", "", ".."] {
        let mut bad = export(tensors(&model), None, DEFAULT_SHARD_BYTES);
        bad.texts.insert(name.to_owned(), String::new());
        let error = bad.write(&dir.path().join("bad")).unwrap_err();
        assert!(matches!(error, CheckpointError::UnsafeName { .. }), "{name:?}: {error}");
    }
}

/// Creates a directory with one shard that holds the tensor `present`, and with the given index.
fn with_index(index: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let data = [("present".to_owned(), vec![1], vec![1.0f32])];
    export(tensors(&data), None, DEFAULT_SHARD_BYTES).write(&dir.path().join("model")).unwrap();
    let model = dir.path().join("model");
    fs::rename(model.join("model.safetensors"), model.join("shard.safetensors")).unwrap();
    fs::copy(model.join("shard.safetensors"), dir.path().join("outside.safetensors")).unwrap();
    fs::write(model.join("model.safetensors.index.json"), index).unwrap();
    dir
}

#[test]
fn an_index_names_only_plain_files_and_only_tensors_they_hold() {
    for (index, expected) in [
        (r#"{"weight_map": {"present": "../outside.safetensors"}}"#, "not a plain file name"),
        (r#"{"weight_map": {"present": "/etc/passwd"}}"#, "not a plain file name"),
        (r#"{"weight_map": {"present": "./shard.safetensors"}}"#, "not a plain file name"),
        (r#"{"weight_map": {"present": "x/../shard.safetensors"}}"#, "not a plain file name"),
        (r#"{"weight_map": {"present": ""}}"#, "not a plain file name"),
        (r#"{"weight_map": {"present": ".."}}"#, "not a plain file name"),
        (r#"{"weight_map": {"present": "shard.safetensors\u0000"}}"#, "not a plain file name"),
        (
            r#"{"weight_map": {"absent": "shard.safetensors"}}"#,
            "`absent` is in shard.safetensors, which does not",
        ),
        (r#"{"weight_map": {"present": "gone.safetensors"}}"#, "gone.safetensors"),
        (r#"{"weight_map": {"present": "model.safetensors.index.json"}}"#, "not a valid safetensors file"),
        (
            r#"{"weight_map": {"present": "shard.safetensors", "present": "shard.safetensors"}}"#,
            "`present` stands twice",
        ),
        (r#"{"weight_map": {"present": 1}}"#, "not a valid index"),
        (r#"{"weight_map": []}"#, "not a valid index"),
        (r#"{}"#, "missing field `weight_map`"),
        (r#"{"weight_map": {"present": "shard.saf"#, "not a valid index"),
        ("", "not a valid index"),
    ] {
        let dir = with_index(index);
        let opened = HfCheckpoint::open(&dir.path().join("model"));
        let error = opened.err().unwrap_or_else(|| panic!("accepted {index}"));
        assert!(error.to_string().contains(expected), "{index}: {error}");
    }
    let good =
        with_index(r#"{"metadata": {"total_size": 4}, "weight_map": {"present": "shard.safetensors"}}"#);
    assert!(HfCheckpoint::open(&good.path().join("model")).unwrap().contains("present"));
}

#[test]
fn links_of_the_download_cache_are_followed_and_missing_weights_are_said() {
    let dir = tempfile::tempdir().unwrap();
    let model = model();
    export(tensors(&model), None, DEFAULT_SHARD_BYTES).write(&dir.path().join("blobs")).unwrap();
    let snapshot = dir.path().join("snapshot");
    fs::create_dir(&snapshot).unwrap();
    let error = HfCheckpoint::open(&snapshot).unwrap_err();
    assert!(matches!(error, CheckpointError::NoWeights { .. }), "{error}");
    symlink("../blobs/model.safetensors", snapshot.join("model.safetensors")).unwrap();
    assert_holds(&snapshot, &model, DType::F32);
}
