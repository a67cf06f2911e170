//! Device maps and memory limits: the same tokens as without, what is printed, what is refused, and the memory that is predicted.

use std::process::Command;

use serde_json::{Value, json};

use crate::workshop::{Outcome, Workshop};

/// Writes a Llama over bytes with 64 MiB of bf16 weights in twelve blocks.
fn write_model(workshop: &Workshop, dir: &str) {
    const HIDDEN: usize = 512;
    const INNER: usize = 1280;
    let config = json!({
        "model_type": "llama", "vocab_size": 256, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 12,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096, "tie_word_embeddings": true,
    });
    let mut tensors =
        vec![("model.embed_tokens".to_owned(), vec![256, HIDDEN]), ("model.norm".to_owned(), vec![HIDDEN])];
    for layer in 0..12 {
        let shapes = [
            ("input_layernorm", vec![HIDDEN]),
            ("post_attention_layernorm", vec![HIDDEN]),
            ("self_attn.q_proj", vec![HIDDEN, HIDDEN]),
            ("self_attn.k_proj", vec![HIDDEN / 2, HIDDEN]),
            ("self_attn.v_proj", vec![HIDDEN / 2, HIDDEN]),
            ("self_attn.o_proj", vec![HIDDEN, HIDDEN]),
            ("mlp.gate_proj", vec![INNER, HIDDEN]),
            ("mlp.up_proj", vec![INNER, HIDDEN]),
            ("mlp.down_proj", vec![HIDDEN, INNER]),
        ];
        tensors.extend(shapes.map(|(name, shape)| (format!("model.layers.{layer}.{name}"), shape)));
    }
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, shape) in tensors {
        let start = end;
        end += 2 * shape.iter().product::<usize>();
        let entry = json!({ "dtype": "BF16", "shape": shape, "data_offsets": [start, end] });
        header.insert(format!("{name}.weight"), entry);
    }
    let header = Value::Object(header).to_string();
    let header = format!("{header:width$}", width = header.len().next_multiple_of(8));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes());
    // Small numbers of both signs.
    let element = |at: usize| (0x3c00 | (at * 37 % 101) as u16 | ((at % 2) as u16) << 15).to_le_bytes();
    file.extend((0..end / 2).flat_map(element));
    workshop.write(&format!("{dir}/config.json"), config.to_string());
    workshop.write(&format!("{dir}/model.safetensors"), file);
}

/// Arguments of a greedy generation, without the model.
const GREEDY: [&str; 7] =
    ["generate", "--prompt", "All ranks", "--max-new-tokens", "6", "--temperature", "0"];

fn generate(workshop: &Workshop, model: &str, more: &[&str]) -> Outcome {
    workshop.run(&[&GREEDY[..], &["--model", model], more].concat())
}

#[test]
fn a_model_on_disk_says_the_same_and_its_map_is_printed() {
    let workshop = Workshop::trained();
    let mut expected = generate(&workshop, "hf", &["--json"]).json();
    let layers = json!({"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu"});
    workshop.write("map.json", layers.to_string());
    let placed = generate(&workshop, "hf", &["--device-map", "map.json", "--json"]).succeeds();
    for part in ["module", "model.layers.0 to 1", "disk", "KV cache", "each pass reads", "2 buffers"] {
        assert!(placed.stderr.contains(part), "{part}: {placed:?}");
    }
    let found = placed.json();
    expected["hf_device_map"] = json!({
        "model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "disk", "model.norm": "cpu", "lm_head": "cpu",
    });
    assert_eq!(found, expected);
    // The printed map is read again.
    workshop.write("map.json", found["hf_device_map"].to_string());
    assert_eq!(generate(&workshop, "hf", &["--device-map", "map.json", "--json"]).json(), expected);
    let eval = |more: &[&str]| {
        workshop
            .run(
                &[&["eval", "--model", "hf", "--data", "text.txt", "--seq-len", "16", "--json"], more]
                    .concat(),
            )
            .json()
    };
    assert_eq!(eval(&["--device-map", "map.json"]), eval(&[]));
    // Weights that are fused in the file, or merged with an adapter, are written once.
    let checkpoint = "checkpoints/step-00000004";
    workshop.write("map.json", r#"{"": "disk"}"#);
    generate(&workshop, checkpoint, &["--device-map", "map.json"])
        .refuses(2, &["map.json", "cannot be read from disk as they are stored", "--offload-dir"]);
    let offloaded = ["--device-map", "map.json", "--offload-dir", "offload", "--json"];
    for _ in 0..2 {
        let found = generate(&workshop, checkpoint, &offloaded).json();
        assert_eq!(found["tokens"], expected["tokens"]);
        assert_eq!(std::fs::read_dir(workshop.path("offload")).unwrap().count(), 1, "written once");
    }
}

#[test]
fn ranks_with_whole_layers_keep_limits_of_their_own() {
    let workshop = Workshop::trained();
    let layers = json!({"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu"});
    workshop.write("map.json", layers.to_string());
    let mapped = ["--device-map", "map.json", "--json"];
    let expected = generate(&workshop, "hf", &mapped).json();
    for plan in ["parallel.pipeline_parallel=2", "parallel.data_parallel_replicate=2"] {
        let found = generate(&workshop, "hf", &[&mapped[..], &["--set", plan]].concat()).succeeds();
        let told = found.stderr.clone();
        assert_eq!(found.json(), expected, "{plan}");
        assert!(told.contains("rank 0:") && told.contains("each pass reads"), "{told}");
        assert_eq!(told.contains("rank 1:"), plan.contains("pipeline"), "{told}");
    }
    // The first rank reports what each could not place.
    let refused = ["--max-memory", "cpu=1MiB", "--set", "parallel.pipeline_parallel=2"];
    let refused = generate(&workshop, "hf", &refused);
    assert_eq!(refused.code, Some(2), "{refused:?}");
    // If all have the same problem, it does so once.
    assert_eq!(refused.stderr.matches("error: ").count(), 1, "{refused:?}");
    assert!(refused.stderr.contains("too small: the least that would do is cpu="), "{refused:?}");
    let timed = ["bench", "generate", "--model", "hf", "--prompt-tokens", "8", "--new-tokens", "4", "--json"];
    let timed = workshop
        .run(&[&timed[..], &["--device-map", "map.json", "--set", "parallel.pipeline_parallel=2"]].concat());
    assert!(timed.json()["predicted_bytes"].as_u64() > Some(0));
}

#[test]
fn maps_and_limits_that_do_not_fit_are_refused_with_what_would() {
    let workshop = Workshop::trained();
    let refused = |flags: &[&str], parts: &[&str]| generate(&workshop, "hf", flags).refuses(2, parts);
    workshop.write("map.json", r#"{"model.layer.0": "cpu", "model.layers.1": 0}"#);
    refused(
        &["--device-map", "map.json"],
        &["map.json", "no module model.layer.0", "no GPU 0", "no entry covers model.embed_tokens.weight"],
    );
    workshop.write("map.json", r#"{"": "tape"}"#);
    refused(&["--device-map", "map.json"], &["map.json", "tape", "\"cpu\", \"disk\""]);
    workshop.write("map.json", "cpu");
    refused(&["--device-map", "map.json"], &["map.json", "no JSON object"]);
    refused(&["--device-map", "balansed"], &["balansed", "auto, balanced, sequential"]);
    refused(&["--max-memory", "gpu:0=1GiB"], &["no GPU 0", "cpu and disk"]);
    refused(&["--max-memory", "cpu=1MiB"], &["cpu=1.0 MiB is too small", "the least that would do is cpu="]);
    workshop.run(&["plan", "--max-memory", "cpu=1GiB"]).refuses(2, &["--inference"]);
    let error = generate(&workshop, "hf", &["--max-memory", "cpu=much"]);
    assert_eq!(error.code, Some(2), "{error:?}");
    assert!(error.stderr.contains("`much` of cpu is no size"), "{error:?}");
}

#[test]
fn a_limit_is_predicted_and_kept() {
    let workshop = Workshop::new();
    write_model(&workshop, "model");
    // Of the usual program's pages a process counts a part that changes as other tests start and end theirs.
    // `cp` copies, as a program that is still open for writing anywhere cannot be run.
    let program = workshop.path("program");
    assert!(Command::new("cp").arg(env!("CARGO_BIN_EXE_lockstep")).arg(&program).status().unwrap().success());
    let program = program.to_str().unwrap();
    let run = |arguments: &[&str]| workshop.start(program, arguments).finish();
    let generate = |more: &[&str]| run(&[&GREEDY[..], &["--model", "model"], more].concat());
    let refused = generate(&["--max-memory", "cpu=1MiB"]);
    let least =
        refused.stderr.split("would do is cpu=").nth(1).and_then(|rest| rest.split("MiB").next()).unwrap();
    let least: u64 = least.parse().unwrap_or_else(|error| panic!("{error}: {refused:?}"));
    let limit = format!("cpu={}MiB", least + 20);
    let limited = ["--max-memory", &limit, "--threads", "2", "--json"];
    let expected = generate(&["--json"]).json();
    let found = generate(&limited).json();
    assert_eq!(found["tokens"], expected["tokens"]);
    let devices = found["hf_device_map"].as_object().unwrap();
    let blocks = devices.iter().filter(|(module, _)| module.starts_with("model.layers."));
    let on_disk = blocks.clone().filter(|(_, device)| *device == "disk").count();
    assert!(blocks.count() == 12 && (1..12).contains(&on_disk), "{devices:?}");
    let timed = ["bench", "generate", "--model", "model", "--prompt-tokens", "100", "--new-tokens", "4"];
    let timed = run(&[&timed[..], &limited].concat()).json();
    let [measured, predicted] = ["pss_bytes", "predicted_bytes"].map(|key| timed[key].as_f64().unwrap());
    assert!((measured / predicted - 1.0).abs() < 0.1, "{timed}");
    assert!(measured < ((least + 20) << 20) as f64, "{timed}");
    assert!(timed["disk_gb_per_s"].as_f64().unwrap() > 0.0, "{timed}");
    let plan = ["plan", "--inference", "--model", "model", "--context", "104", "--threads", "2"];
    let plan = |more: &[&str]| run(&[&plan[..], more].concat());
    let planned = plan(&["--max-memory", &limit, "--json"]).json();
    let sum: f64 = planned["memory"].as_object().unwrap().values().map(|bytes| bytes.as_f64().unwrap()).sum();
    assert_eq!(sum, planned["total_bytes"].as_f64().unwrap());
    assert!((sum / predicted - 1.0).abs() < 0.1, "{planned}, {timed}");
    for key in ["prefill_tokens_per_s", "decode_tokens_per_s", "disk_gb_per_s"] {
        assert!(planned[key].as_f64().unwrap() > 0.0, "{key}: {planned}");
    }
    assert!(planned["longest_context"].as_u64().unwrap() >= 104, "{planned}");
    assert!(planned["all_resident_bytes"].as_u64() > planned["limit_bytes"].as_u64(), "{planned}");
    let text = plan(&["--max-memory", "cpu=1GiB"]).succeeds().stdout;
    for part in ["module", "decode", "what would fit", "4,096 tokens"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn a_model_is_planned_before_it_is_downloaded() {
    let workshop = Workshop::trained();
    let plan = |model: &str, more: &[&str]| {
        workshop.run(&[&["plan", "--inference", "--model", model, "--context", "64"], more].concat())
    };
    let expected = plan("hf", &["--json"]).json();
    std::fs::create_dir(workshop.path("configuration")).unwrap();
    std::fs::copy(workshop.path("hf/config.json"), workshop.path("configuration/config.json")).unwrap();
    let found = plan("configuration", &["--json"]).json();
    for key in ["model_bytes", "modules", "dtype", "hf_device_map"] {
        assert_eq!(found[key], expected[key], "{key}");
    }
    let shown = plan("configuration", &[]).succeeds();
    assert!(shown.stderr.contains("weights: none on this machine"), "{shown:?}");
    // A shape of 16 GB in bf16, under 4 GiB.
    let preset = plan("llama3-8b", &["--max-memory", "cpu=4GiB", "--json"]).json();
    assert_eq!(preset["model_bytes"], 2 * 8_030_261_248_u64, "{preset}");
    assert!(preset["disk_bytes"].as_u64() > Some(12 << 30), "{preset}");
    generate(&workshop, "configuration", &[]).refuses(2, &["holds neither model.safetensors nor"]);
}
