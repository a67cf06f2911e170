//! Files of models with experts: the way there and back, files of older converters, and files that contradict themselves.

use lockstep_model::parameter_records;
use serde_json::{Value as Json, json};

use super::{
    tests::{assert_same, fixtures, parameters, random_model},
    *,
};

/// Opens a fixture with changes of its configuration: settings that files do not store are as readers take them.
fn opened(family: &str) -> ModelDirectory {
    let mut model = ModelDirectory::open(&fixtures().join(family)).unwrap();
    let mut changed = json!({"router_aux_loss_coef": 0.001, "router_z_loss_coef": 0.0});
    if family == "gpt_oss" {
        changed["swiglu_limit"] = json!(7.0);
    }
    model.config = model.config.with_overrides(changed.as_object().unwrap(), "test").unwrap();
    model
}

fn f32() -> StoredElements {
    StoredElements::Dense(DType::F32)
}

#[test]
fn models_with_experts_are_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let random = random_model(dir.path(), "qwen2_moe");
    for (family, hf) in [
        ("mixtral", opened("mixtral")),
        ("qwen3_moe", opened("qwen3_moe")),
        ("gpt_oss", opened("gpt_oss")),
        ("qwen2_moe", random),
    ] {
        let path = dir.path().join(format!("{family}.gguf"));
        let notes = hf.export_gguf(f32(), &path).unwrap();
        assert!(notes.other_types.is_empty(), "{family}: {notes:?}");
        let gguf = ModelDirectory::open(&path).unwrap();
        assert_eq!(gguf.config().to_json(DType::F32), hf.config().to_json(DType::F32), "{family}");
        assert_same(&parameters(&gguf), &parameters(&hf), family);
        // A file of a file is the same.
        let again = dir.path().join(format!("again/{family}.gguf"));
        fs::create_dir_all(again.parent().unwrap()).unwrap();
        gguf.export_gguf(f32(), &again).unwrap();
        assert_eq!(fs::read(&again).unwrap(), fs::read(&path).unwrap(), "{family}");
    }
}

#[test]
fn files_of_gguf_py_hold_the_experts_that_they_were_made_of() {
    for family in ["mixtral", "qwen3_moe", "gpt_oss"] {
        let hf = opened(family);
        let gguf = ModelDirectory::open(&fixtures().join(format!("gguf/{family}.gguf"))).unwrap();
        assert_eq!(gguf.config().to_json(DType::F32), hf.config().to_json(DType::F32), "{family}");
        let mut expected = parameters(&hf);
        for (name, values) in &mut expected {
            let is_vector = name.ends_with("norm.weight") || !name.ends_with(".weight");
            if !is_vector && Architecture::is_matrix(name) {
                values.iter_mut().for_each(|x| *x = half::f16::from_f32(*x).to_f32());
            }
        }
        assert_same(&parameters(&gguf), &expected, family);
    }
}

#[test]
fn stacks_of_experts_lie_in_blocks_where_they_are_used() {
    let dir = tempfile::tempdir().unwrap();
    for family in ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"] {
        let hf = random_model(dir.path(), family);
        let original = parameters(&hf);
        let records = parameter_records(hf.config());
        for format in [BlockFormat::Q4K, BlockFormat::Q8_0, BlockFormat::Mxfp4] {
            let of = format!("{family}, {format}");
            let path = dir.path().join(format!("{family}-{format}.gguf"));
            let notes = hf.export_gguf(StoredElements::Blocks(format), &path).unwrap();
            assert!(notes.other_types.is_empty(), "{of}: {notes:?}");
            let gguf = ModelDirectory::open(&path).unwrap();
            let format_of = |name: &str| match name.contains(".experts.") {
                false if format == BlockFormat::Mxfp4 => BlockFormat::Q8_0,
                _ => format,
            };
            let mut expected = original.clone();
            let mut stacks = 0;
            for record in records.iter().filter(|record| record.shape.len() > 1) {
                let name = record.name.as_str();
                let numbers = ["gate.weight", "router.weight", ".bias"];
                if numbers.iter().any(|end| name.ends_with(end)) || record.tie.is_some() {
                    continue;
                }
                let format = format_of(name);
                let values = expected.get_mut(name).unwrap();
                let mut bytes = vec![0; format.bytes(values.len()).unwrap()];
                format.quantize(values, &mut bytes);
                format.dequantize(&bytes, values);
                let stored = gguf.stored_parameters().into_iter().find(|stored| stored.name == name).unwrap();
                assert_eq!(stored.stored, StoredElements::Blocks(format), "{of}: {name}");
                stacks += usize::from(record.shape.len() == 3);
            }
            assert_eq!(stacks, 6, "{of}: three stacks in each layer");
            assert_same(&parameters(&gguf), &expected, &of);
            // A directory has a tensor for each expert, which is read alone.
            let decoded = dir.path().join(format!("{family}-{format}"));
            gguf.export_hf(DType::F32, &decoded).unwrap();
            assert_same(&parameters(&ModelDirectory::open(&decoded).unwrap()), &expected, &of);
        }
    }
}

/// Writes the model of a fixture as converters did before experts were stacked: with a tensor for each.
fn with_single_experts(model: &ModelDirectory, out: &Path) {
    let config = model.config().get::<LlamaConfig>().unwrap();
    let architecture = Architecture::of(config.family).unwrap();
    let mut metadata = model_metadata(config, architecture, f32()).unwrap();
    metadata.push(("tokenizer.ggml.model".to_owned(), Value::Text("none".to_owned())));
    let mapping = HfMapping::new(model.config());
    let name_of = |name: &str| match name.split_once(".block_sparse_moe.experts.") {
        None => architecture.gguf_name(name).unwrap(),
        Some((layer, rest)) => {
            let (expert, projection) = rest.split_once('.').unwrap();
            let projection = match projection {
                "w1.weight" => "ffn_gate",
                "w2.weight" => "ffn_down",
                "w3.weight" => "ffn_up",
                other => panic!("{other}"),
            };
            let layer = layer.strip_prefix("model.layers.").unwrap();
            format!("blk.{layer}.{projection}.{expert}.weight")
        }
    };
    let spec = |tensor: &HfTensor| TensorSpec {
        name: name_of(&tensor.name),
        shape: tensor.shape.clone(),
        stored: f32(),
    };
    let specs: Vec<TensorSpec> = mapping.tensors().iter().map(spec).collect();
    write(out, &metadata, &specs, |index| {
        let values = model.stored_values(&mapping.tensors()[index], architecture, config)?;
        Ok(encode(&values, f32()))
    })
    .unwrap();
}

#[test]
fn files_with_a_tensor_for_each_expert_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let (hf, path) = (opened("mixtral"), dir.path().join("old.gguf"));
    with_single_experts(&hf, &path);
    let gguf = ModelDirectory::open(&path).unwrap();
    assert_eq!(gguf.config().to_json(DType::F32), hf.config().to_json(DType::F32));
    assert_same(&parameters(&gguf), &parameters(&hf), "old file");
    let again = dir.path().join("new.gguf");
    gguf.export_gguf(f32(), &again).unwrap();
    let again = ModelDirectory::open(&again).unwrap();
    assert_same(&parameters(&again), &parameters(&hf), "new file");
    let stacks = again.stored_parameters().iter().filter(|stored| stored.name.contains(".experts.")).count();
    assert_eq!(stacks, 6, "three stacks in each layer");
}

/// Replaces some bytes of a file with as many others, at their first place.
fn replaced(file: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let at = file.windows(from.len()).position(|window| window == from).unwrap();
    let mut file = file.to_vec();
    file[at..at + to.len()].copy_from_slice(to);
    file
}

#[test]
fn files_that_contradict_themselves_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    opened("qwen3_moe").export_gguf(f32(), &path).unwrap();
    let file = fs::read(&path).unwrap();
    let broken = dir.path().join("broken.gguf");
    let message = |bytes: Vec<u8>| {
        fs::write(&broken, bytes).unwrap();
        ModelDirectory::open(&broken).map(drop).unwrap_err().to_string()
    };
    // Key, type 4 (u32) and value.
    let pair = |key: &str, value: u32| [key.as_bytes(), &4_u32.to_le_bytes(), &value.to_le_bytes()].concat();
    let number = |key: &str, from: u32, to: u32| message(replaced(&file, &pair(key, from), &pair(key, to)));
    let text = |from: &str, to: &str| message(replaced(&file, from.as_bytes(), to.as_bytes()));
    for (message, expected) in [
        (
            number("expert_count", 6, 4),
            "`qwen3moe.expert_count` is 4, and tensor `blk.0.ffn_gate_exps.weight` has the matrices of 6 experts",
        ),
        (number("expert_count", 6, u32::MAX), "is 4294967295, and tensor"),
        (
            number("expert_count", 6, 0),
            "`qwen3moe.expert_count` is missing or 0, and models of \"qwen3moe\" have experts",
        ),
        (text("expert_count", "expert_cOunt"), "`qwen3moe.expert_count` is missing or 0"),
        (number("expert_used_count", 3, 7), "num_experts_per_tok"),
        (number("expert_used_count", 3, 0), "num_experts_per_tok"),
        (
            text("expert_used_count", "expert_used_cOunt"),
            "`qwen3moe.expert_used_count` is missing or no number",
        ),
        (
            number("expert_feed_forward_length", 16, 17),
            "`blk.0.ffn_gate_exps.weight` has shape [6, 16, 48], the configuration demands [6, 17, 48]",
        ),
        (
            text("blk.1.ffn_up_exps.weight", "blk.1.ffn_up_exps.weighs"),
            "`blk.1.ffn_up_exps.weight` is missing",
        ),
        (
            text("blk.1.ffn_gate_inp.weight", "blk.1.ffn_gate_inp.weighs"),
            "`blk.1.ffn_gate_inp.weight` is missing",
        ),
    ] {
        assert!(message.contains(expected), "{message}; expected {expected}");
    }
    let fused = text("blk.0.ffn_gate_exps.weight", "k.0.ffn_gate_up_exps.weight".trim_start_matches('k'));
    assert!(fused.contains("gates and linear halves of experts in one tensor"), "{fused}");
    let dense = ModelDirectory::open(&fixtures().join("qwen3")).unwrap();
    let config = dense.config().get::<LlamaConfig>().unwrap();
    let mut metadata = model_metadata(config, Architecture::of(config.family).unwrap(), f32()).unwrap();
    metadata.push(("qwen3.expert_count".to_owned(), Value::U32(8)));
    fs::remove_file(&path).unwrap();
    write(&path, &metadata, &[], |_| Ok(Vec::new())).unwrap();
    let message = message(fs::read(&path).unwrap());
    assert!(
        message.contains("`qwen3.expert_count` is set, and models of \"qwen3\" have no experts"),
        "{message}"
    );
}

#[test]
fn models_that_files_cannot_express_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |family: &str, changed: Json| {
        let mut model = ModelDirectory::open(&fixtures().join(family)).unwrap();
        model.config = model.config.with_overrides(changed.as_object().unwrap(), "test").unwrap();
        model.export_gguf(f32(), &dir.path().join("x.gguf")).unwrap_err().to_string()
    };
    for (message, expected) in [
        (refused("qwen2_moe", json!({})), "layer 0 is dense; all layers of files of qwen2_moe have experts"),
        (
            refused("qwen3_moe", json!({"norm_topk_prob": false})),
            "norm_topk_prob is false; readers of files of qwen3_moe take true",
        ),
        (
            refused("gpt_oss", json!({})),
            "swiglu_alpha is 1.702 and swiglu_limit 0.75; readers of files take 1.702 and 7",
        ),
        (refused("mixtral", json!({"sliding_window": 16})), "it has a sliding window"),
        (refused("deepseek_v3", json!({})), "its model type is deepseek_v3"),
    ] {
        assert!(message.contains(expected), "{message}; expected {expected}");
    }
}
