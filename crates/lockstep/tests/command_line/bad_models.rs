//! Hugging Face directories that are damaged, hostile or not supported, as input of `generate`, `eval`, `checkpoint import` and
//! `train`.

use std::fs;

use serde_json::json;

use crate::workshop::{Outcome, Workshop};

const WEIGHTS: &str = "hf/model.safetensors";
const CONFIG: &str = "hf/config.json";
const INDEX: &str = "hf/model.safetensors.index.json";

fn generate(workshop: &Workshop) -> Outcome {
    workshop.run(&["generate", "--model", "hf", "--prompt", "All", "--max-new-tokens", "2"])
}

/// Returns a file with this header, followed by `data_bytes` zeros.
fn safetensors(header: &str, data_bytes: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data_bytes, 0);
    bytes
}

#[test]
fn gguf_files_that_are_damaged_or_hostile_are_refused_with_code_4() {
    let workshop = Workshop::trained();
    workshop.run(&["checkpoint", "export", "hf", "--gguf", "sound.gguf", "--type", "f16"]).succeeds();
    let sound = workshop.read("sound.gguf");
    let changed = |at: usize, bytes: &[u8]| {
        let mut file = sound.clone();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        file
    };
    let renamed = |from: &[u8], to: &[u8]| {
        changed(sound.windows(from.len()).position(|window| window == from).unwrap(), to)
    };
    let cases: [(&str, Vec<u8>, &str); 6] = [
        ("empty", Vec::new(), "the magic number at byte 0 claims 4 bytes"),
        ("half of it", sound[..sound.len() / 2].to_vec(), "ends beyond the file"),
        ("tensors without end", changed(8, &[0xff; 8]), "it claims 18446744073709551615 tensors"),
        (
            "another architecture",
            renamed(b"llama", b"mamba"),
            "its architecture is \"mamba\"; read here are llama, qwen2",
        ),
        ("another tensor", renamed(b"output_norm", b"outputs_nor"), "outputs_nor.weight"),
        (
            "another size",
            renamed(b"llama.embedding_length", b"llama.embedding_lengtx"),
            "`llama.embedding_length` is missing",
        ),
    ];
    for (what, bytes, part) in cases {
        println!("{what}");
        workshop.write("broken.gguf", bytes);
        workshop
            .run(&["generate", "--model", "broken.gguf", "--prompt", "All"])
            .refuses(4, &["broken.gguf", part]);
    }
}

#[test]
fn weights_that_are_damaged_or_hostile_are_refused_with_code_4() {
    let workshop = Workshop::trained();
    let sound = workshop.read(WEIGHTS);
    let header_bytes = u64::from_le_bytes(sound[..8].try_into().unwrap()) as usize;
    let header = str::from_utf8(&sound[8..8 + header_bytes]).unwrap();
    let data_bytes = sound.len() - 8 - header_bytes;
    let changed = |from: &str, to: &str| {
        assert!(header.contains(from), "{from} in {header}");
        safetensors(&header.replacen(from, to, 1), data_bytes)
    };
    let mut longer_header = sound.clone();
    longer_header[..8].copy_from_slice(&(u64::MAX / 2).to_le_bytes());
    let cases: [(&str, Vec<u8>, &[&str]); 11] = [
        ("empty", Vec::new(), &["0 bytes"]),
        ("half of it", sound[..sound.len() / 2].to_vec(), &["of the data, which has"]),
        ("a huge header", longer_header, &["header claims", "limit is"]),
        ("no JSON", safetensors("{\"a\": {\"dtype\": ", 8), &["tensor `a`", "EOF"]),
        ("a zip", b"PK\x03\x04 pickled weights of some model".to_vec(), &["header claims"]),
        (
            "overlapping",
            safetensors(
                r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#,
                12,
            ),
            &["tensor `b`", "inside another"],
        ),
        (
            "a shape beyond counting",
            safetensors(r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}}"#, 8),
            &["tensor `a`", "overflows"],
        ),
        ("integers", changed("\"F32\"", "\"I32\""), &["I32", "f32, bf16 or f16"]),
        ("an unknown type", changed("\"F32\"", "\"X32\""), &["unknown type `X32`"]),
        (
            "another name",
            changed("model.norm.weight", "model.gnome.weight"),
            &["model.norm.weight", "is missing"],
        ),
        ("trailing bytes", [&sound[..], b"more"].concat(), &["4 bytes follow"]),
    ];
    for (what, bytes, parts) in cases {
        println!("{what}");
        workshop.write(WEIGHTS, bytes);
        generate(&workshop).refuses(4, parts);
    }
    // The other commands read it in the same way.
    workshop.write(WEIGHTS, &sound[..100]);
    workshop.run(&["checkpoint", "import", "hf", "--out", "imported"]).refuses(4, &[WEIGHTS]);
    workshop.run(&["eval", "--model", "hf", "--data", "text.txt", "--json"]).refuses(4, &[WEIGHTS]);
    let model = "[model]\npath = \"hf\"\nfrom_pretrained = true\n[data]\ntrain = [\"text.txt\"]\n[train]\nseq_len = 16";
    workshop.write("from_hf.toml", model);
    workshop.run(&["train", "from_hf.toml"]).refuses(4, &[WEIGHTS]);
    assert!(!workshop.path("imported").exists(), "an import that fails leaves nothing");
}

#[test]
fn an_index_that_leaves_its_directory_or_names_what_is_not_there_is_refused_with_code_4() {
    let workshop = Workshop::trained();
    fs::rename(workshop.path(WEIGHTS), workshop.path("hf/model-00001-of-00001.safetensors")).unwrap();
    let name = "model.norm.weight";
    let cases: [(&str, &[&str]); 7] = [
        (
            r#"{"weight_map": {"model.norm.weight": "../checkpoints/x.safetensors"}}"#,
            &["not a plain file name"],
        ),
        (
            r#"{"weight_map": {"model.norm.weight": "/etc/passwd"}}"#,
            &["/etc/passwd", "not a plain file name"],
        ),
        (
            r#"{"weight_map": {"model.norm.weight": "model-2.safetensors"}}"#,
            &["hf/model-2.safetensors is missing", INDEX],
        ),
        (
            r#"{"weight_map": {"model.gnome.weight": "model-00001-of-00001.safetensors"}}"#,
            &["model.gnome.weight"],
        ),
        (
            r#"{"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}"#,
            &["hf: ", "model.embed_tokens.weight` is missing"],
        ),
        (r#"{"weight_map": 7}"#, &["not a valid index"]),
        ("", &["not a valid index"]),
    ];
    for (index, parts) in cases {
        println!("{index}");
        workshop.write(INDEX, index);
        generate(&workshop).refuses(4, parts);
    }
    // A correct index makes the same file a valid model.
    let show = workshop.run(&["checkpoint", "show", "checkpoints/step-00000004", "--json"]).json();
    let names = show["tensors"].as_array().unwrap().iter().filter(|tensor| tensor["kind"] == "parameter");
    let map: serde_json::Map<_, _> = names
        .map(|tensor| {
            (tensor["name"].as_str().unwrap().to_owned(), json!("model-00001-of-00001.safetensors"))
        })
        .collect();
    assert!(map.contains_key(name), "{map:?}");
    workshop.write(INDEX, json!({ "weight_map": map }).to_string());
    generate(&workshop).succeeds();
}

#[test]
fn a_model_that_is_not_supported_is_refused_with_code_2_and_names_the_option() {
    let workshop = Workshop::trained();
    let sound = workshop.read(CONFIG);
    let cases: [(&str, serde_json::Value, &[&str]); 9] = [
        ("model_type", json!("mamba"), &["mamba", "\"llama\""]),
        ("model_type", json!(7), &["model_type", "7", "\"llama\""]),
        ("hidden_act", json!("relu"), &["hidden_act", "relu", "silu"]),
        ("rope_scaling", json!({"rope_type": "longrope"}), &["short_factor", "a list of numbers"]),
        ("hidden_size", json!("wide"), &["hidden_size", "wide", "a whole number"]),
        ("hidden_size", json!(-32), &["hidden_size", "-32"]),
        ("vocab_size", json!(1_u64 << 60), &["vocab_size", "1 to"]),
        ("num_hidden_layers", json!(u64::MAX), &["num_hidden_layers", "1 to"]),
        ("hiden_size", json!(32), &["hiden_size", "hidden_size"]),
    ];
    for (key, value, parts) in cases {
        println!("{key} = {value}");
        workshop.write(CONFIG, &sound);
        workshop.edit_json(CONFIG, |config| config[key] = value);
        generate(&workshop).refuses(2, &[&[CONFIG], parts].concat());
    }
    // A value that the weights contradict means a damaged directory, not a wrong option.
    workshop.write(CONFIG, &sound);
    workshop.edit_json(CONFIG, |config| config["intermediate_size"] = json!(128));
    generate(&workshop).refuses(4, &["mlp", "[128, 32]", "[64, 32]"]);
}

#[test]
fn a_config_json_that_is_no_json_is_corrupt_and_one_that_is_not_there_a_mistake() {
    let workshop = Workshop::trained();
    let sound = workshop.read(CONFIG);
    for bytes in [b"", &sound[..sound.len() / 2], b"\xff\xfe", b"model_type: llama"] {
        workshop.write(CONFIG, bytes);
        generate(&workshop).refuses(4, &[CONFIG]);
    }
    workshop.write(CONFIG, b"[1, 2]");
    generate(&workshop).refuses(2, &[CONFIG, "a table"]);
    fs::remove_file(workshop.path(CONFIG)).unwrap();
    generate(&workshop).refuses(2, &[CONFIG, "No such file"]);
    workshop.write(CONFIG, &sound);
    fs::remove_file(workshop.path(WEIGHTS)).unwrap();
    generate(&workshop).refuses(2, &["hf holds neither model.safetensors nor"]);
    fs::create_dir(workshop.path("nothing")).unwrap();
    workshop.run(&["generate", "--model", "nothing", "--prompt", "a"]).refuses(2, &["nothing/config.json"]);
    workshop
        .run(&["generate", "--model", "nowhere", "--prompt", "a"])
        .refuses(2, &["nowhere", "`lockstep models` lists them"]);
    workshop.run(&["generate", "--model", "text.txt", "--prompt", "a"]).refuses(2, &["text.txt"]);
}

#[test]
fn what_a_model_cannot_do_is_refused_with_code_2_and_the_limit() {
    let workshop = Workshop::trained();
    let cases: [(&[&str], &[&str]); 8] = [
        (&["--max-new-tokens", "62"], &["65 tokens", "64 positions"]),
        (&["--max-new-tokens", "18446744073709551615"], &["64 positions"]),
        (&["--temperature", "nan"], &["temperature", "NaN", "0 or more"]),
        (&["--temperature=-1"], &["temperature", "-1", "0 or more"]),
        (&["--top-p", "0"], &["top-p", "0"]),
        (&["--top-p", "1.5"], &["top-p", "1.5"]),
        (&["--threads", "100000"], &["--threads 100000", "0 to 4096"]),
        (&["--top-k", "many"], &["--top-k", "many"]),
    ];
    for (arguments, parts) in cases {
        let command = ["generate", "--model", "hf", "--prompt", "All"];
        let few = if arguments.contains(&"--max-new-tokens") { &[][..] } else { &["--max-new-tokens", "2"] };
        workshop.run(&[&command, few, arguments].concat()).refuses(2, parts);
    }
    workshop
        .run(&["generate", "--model", "hf", "--prompt", "", "--max-new-tokens", "2"])
        .refuses(2, &["prompt is empty"]);
    workshop.write("latin1.txt", b"caf\xe9");
    let eval = ["eval", "--model", "hf", "--json", "--data"];
    workshop
        .run(&[&eval[..], &["text.txt", "--seq-len", "65"]].concat())
        .refuses(2, &["--seq-len 65", "1 to 64"]);
    workshop.run(&[&eval[..], &["nowhere.txt"]].concat()).refuses(2, &["nowhere.txt"]);
    workshop.run(&[&eval[..], &["latin1.txt"]].concat()).refuses(4, &["latin1.txt", "offset 3"]);
    // A vocabulary other than that of bytes needs its tokenizer.
    workshop.write("hf/tokenizer.json", "{}");
    generate(&workshop).refuses(4, &["hf/tokenizer.json"]);
}
