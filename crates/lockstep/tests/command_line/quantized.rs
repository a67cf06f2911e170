//! Quantized models: `lockstep quantize`, `--quantize`, packed checkpoints, and those that are refused.

use serde_json::json;

use crate::workshop::Workshop;

const PROMPT: [&str; 7] = ["--prompt", "All ranks", "--max-new-tokens", "8", "--temperature", "0", "--json"];

#[test]
fn a_model_is_quantized_ahead_or_as_it_is_loaded_with_the_same_result() {
    let workshop = Workshop::trained();
    let generate = |more: &[&str]| workshop.run(&[&["generate"], more, &PROMPT].concat()).json();
    for (to, group) in [("int8", 32), ("int4", 32), ("nf4", 64)] {
        let out = format!("model-{to}");
        let done = workshop.run(&["quantize", "--model", "hf", "--to", to, "--out", &out, "--json"]).json();
        // Only the down projections have rows of 64.
        let matrices = if to == "nf4" { 2 } else { 14 };
        assert_eq!((&done["matrices"], &done["group_size"]), (&json!(matrices), &json!(group)), "{to}");
        assert_eq!(done["kept"].as_array().unwrap().len(), 14 - matrices, "{to}");
        let ahead = generate(&["--model", &out]);
        assert_eq!(ahead["tokens"].as_array().unwrap().len(), 8, "{to}");
        if to != "int4" {
            // In memory, int4 has larger groups where they fit.
            assert_eq!(generate(&["--model", "hf", "--quantize", to]), ahead, "{to}");
        }
        let on_disk = ["--device-map", "map.json", "--offload-dir", "offload"];
        workshop.write("map.json", r#"{"": "disk"}"#);
        let placed = generate(&[&["--model", &out][..], &on_disk].concat());
        assert_eq!(placed["tokens"], ahead["tokens"], "{to} on disk");
        let plan =
            [&["plan", "--inference", "--model", "hf", "--quantize", to, "--json"], &on_disk[..]].concat();
        let types = &workshop.run(&plan).json()["modules"][1]["bytes_by_type"];
        let names: Vec<&str> = types.as_object().unwrap().keys().map(String::as_str).collect();
        assert!(names.iter().any(|name| name.starts_with(to)) && names.contains(&"f32"), "{to}: {types}");
        let evaluated = workshop.run(&["eval", "--model", &out, "--data", "text.txt", "--json"]).json();
        assert!(evaluated["perplexity"].as_f64().unwrap().is_finite(), "{to}");
    }
    let text =
        workshop.run(&["quantize", "--model", "hf", "--to", "int8", "--group-size", "64", "--out", "coarse"]);
    assert!(text.succeeds().stdout.starts_with("wrote coarse: 14 matrices in groups of 32, "));
}

#[test]
fn quantizations_that_cannot_be_are_refused_with_code_2() {
    let workshop = Workshop::trained();
    let quantize =
        |more: &[&str]| workshop.run(&[&["quantize", "--model", "hf", "--out", "out"], more].concat());
    quantize(&["--to", "int3"]).refuses(2, &["int3", "int8", "int4", "nf4"]);
    quantize(&["--to", "int4", "--group-size", "48"]).refuses(2, &["48", "32, 64, 128"]);
    quantize(&["--to", "nf4", "--group-size", "128"]).refuses(2, &["nf4 has groups of 64"]);
    workshop.write("out/file", "");
    quantize(&["--to", "int8"]).refuses(2, &["out"]);
}

#[test]
fn scales_of_a_text_are_chosen_and_what_they_change_is_said() {
    let workshop = Workshop::trained();
    let quantize = |more: &[&str]| workshop.run(&[&["quantize", "--model", "hf"], more].concat());
    let text = ["--calibration", "text.txt", "--calibration-tokens", "1000"];
    let (to, out) = (["--to", "int4"], ["--out", "scaled"]);
    let done = quantize(&[&to[..], &out, &text, &["--json"]].concat()).json();
    let calibration = &done["calibration"];
    assert_eq!((&calibration["tokens"], &calibration["unscaled"]), (&json!(960), &json!({})), "{done}");
    let projections = calibration["projections"].as_array().unwrap();
    let names: Vec<&str> = projections.iter().map(|of| of["name"].as_str().unwrap()).collect();
    let attention = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"];
    assert_eq!(names, [&attention[..], &["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]].concat());
    let [plain, scaled] = ["error_without_scales", "error"].map(|key| calibration[key].as_f64().unwrap());
    assert!(0.0 < scaled && scaled < plain && plain < 0.2, "{scaled} with scales, {plain} without");
    let evaluated = workshop.run(&["eval", "--model", "scaled", "--data", "text.txt", "--json"]).json();
    assert!(evaluated["perplexity"].as_f64().unwrap().is_finite(), "{evaluated}");
    // One thread gives the same bits.
    quantize(&[&to[..], &["--out", "single"], &text, &["--threads", "1"]].concat()).succeeds();
    assert!(workshop.read("scaled/model.safetensors") == workshop.read("single/model.safetensors"));
    // Rows of 32 are no groups of NF4, and the down projections alone are quantized.
    let table = quantize(&[&["--to", "nf4", "--out", "nf4"][..], &text].concat()).succeeds().stdout;
    for words in ["relative error of outputs", "mlp.down_proj", " of 2", "mean", "wrote nf4: 2 matrices"] {
        assert!(table.contains(words), "{words:?} is not in {table}");
    }
}

#[test]
fn calibrations_that_cannot_be_are_refused_with_code_2() {
    let workshop = Workshop::trained();
    workshop.write("short.txt", "All ranks wait.");
    let quantize = |more: &[&str]| {
        workshop.run(&[&["quantize", "--model", "hf", "--to", "int4", "--out", "out"], more].concat())
    };
    quantize(&["--calibration", "no.txt"]).refuses(2, &["cannot read --calibration no.txt"]);
    quantize(&["--calibration", "short.txt"]).refuses(2, &["15 tokens", "at least 64", "give a longer text"]);
    quantize(&["--calibration", "text.txt", "--calibration-tokens", "63"])
        .refuses(2, &["--calibration-tokens 63", "64"]);
    quantize(&["--calibration-tokens", "64"]).refuses(2, &["--calibration <FILE>"]);
}

#[test]
fn packed_models_that_are_not_read_have_code_2_and_damaged_ones_code_4() {
    let workshop = Workshop::trained();
    workshop.run(&["quantize", "--model", "hf", "--to", "int4", "--out", "packed"]).succeeds();
    let sound = workshop.read("packed/config.json");
    let generate = || workshop.run(&[&["generate", "--model", "packed"], &PROMPT[..]].concat());
    generate().succeeds();
    workshop.edit_json("packed/config.json", |config| {
        config["quantization_config"]["quant_method"] = "hqq".into()
    });
    generate()
        .refuses(2, &["packed/config.json", "quant_method is `hqq`; read are gptq, awq", "dequantize=True"]);
    workshop.write("packed/config.json", &sound);
    workshop.edit_json("packed/config.json", |config| {
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 8.into();
    });
    generate().refuses(4, &["packed: packed tensor `model.layers.0.", "8 words a row"]);
    workshop.write("packed/config.json", &sound);
    let weights = workshop.read("packed/model.safetensors");
    workshop.write("packed/model.safetensors", &weights[..weights.len() / 2]);
    generate().refuses(4, &["packed/model.safetensors"]);
}
