//! The first hour with a published model: fine-tuning on own data, export and generation, and the errors about wrong files.

use serde_json::{Value, json};

use crate::workshop::Workshop;

/// A tokenizer with ids up to 255, whose words all occur in the workshop's text.
pub(crate) const TOKENIZER: &str = r#"{"version": "1.0", "added_tokens": [], "normalizer": null, "decoder": null,
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "model": {"type": "WordLevel",
    "vocab": {"All": 0, "ranks": 1, "wait": 2, "[UNK]": 255}, "unk_token": "[UNK]"}}"#;

/// Returns the losses of a run that reads `files` in order.
fn losses(workshop: &Workshop, files: &str, more: &[&str]) -> Vec<Value> {
    let source = format!("data.train=[{files:?}]");
    let mut command = vec!["train", "run.toml", "--resume", "never", "--set", &source];
    command.extend(["--set", "data.order=sequential", "--set", "train.steps=2", "--set", "train.seq_len=60"]);
    command.extend(more.iter().flat_map(|setting| ["--set", setting]));
    workshop.run(&command).succeeds();
    let rows = String::from_utf8(workshop.read("runs/metrics.jsonl")).unwrap();
    rows.lines().map(|row| serde_json::from_str::<Value>(row).unwrap()["loss"].clone()).collect()
}

#[test]
fn every_shape_of_a_sample_trains_alike() {
    let workshop = Workshop::new();
    let chat = json!({"messages": [
        {"role": "user", "content": "q\nx"}, {"role": "assistant", "content": "yes"}]});
    let alpaca = json!({"instruction": "q", "input": "x", "output": "yes"});
    let sharegpt =
        json!({"conversations": [{"from": "human", "value": "q\nx"}, {"from": "gpt", "value": "yes"}]});
    let renamed = json!({"ask": "q", "more": "x", "answer": "yes"});
    let lines = |record: &Value| format!("{record}\n").repeat(20);
    let array = |record: &Value| serde_json::to_string_pretty(&vec![record; 20]).unwrap();
    workshop.write("chat.jsonl", lines(&chat));
    let expected = losses(&workshop, "chat.jsonl", &[]);
    assert_eq!(expected.len(), 2);
    for (file, text) in [
        ("chat.json", array(&chat)),
        ("alpaca.json", array(&alpaca)),
        ("lines.json", lines(&alpaca)),
        ("sharegpt.jsonl", lines(&sharegpt)),
    ] {
        workshop.write(file, text);
        assert_eq!(losses(&workshop, file, &[]), expected, "{file}");
    }
    workshop.write("renamed.json", array(&renamed));
    let columns = r#"data.columns={ instruction = "ask", input = "more", output = "answer" }"#;
    assert_eq!(losses(&workshop, "renamed.json", &[columns]), expected);
    let shown = workshop
        .train(&["data.train=['alpaca.json']", "train.seq_len=60", "checkpoint.dir=other"])
        .succeeds();
    for part in ["records", "alpaca", "ChatML", "tokens are predicted"] {
        assert!(shown.stderr.contains(part), "{part}: {}", shown.stderr);
    }
}

#[test]
fn an_export_keeps_every_file_of_the_tokenizer_and_of_generation() {
    let workshop = Workshop::trained();
    let kept = [
        ("tokenizer.json", TOKENIZER),
        ("tokenizer_config.json", "{}"),
        ("special_tokens_map.json", "{}"),
        ("added_tokens.json", "{}"),
        ("chat_template.jinja", "{% for m in messages %}<s>{{ m.content }}{% endfor %}"),
        ("generation_config.json", "{\"eos_token_id\": [2, 255]}"),
        ("merges.txt", "#version: 0.2\n"),
    ];
    for (name, text) in kept {
        workshop.write(&format!("hf/{name}"), text);
    }
    workshop.write("hf/notes.txt", "not the model's");
    let run = "model.path = \"hf\"\nmodel.from_pretrained = true\n[data]\ntrain = [\"text.txt\"]\n[train]\nsteps = 1\nseq_len = 16\nglobal_batch = 2\nmicro_batch = 2\nthreads = 1\n";
    workshop.write("tune.toml", run);
    workshop.run(&["train", "tune.toml", "--set", "checkpoint.dir=tuned"]).succeeds();
    workshop.run(&["checkpoint", "export", "tuned/step-00000001", "--hf", "out"]).succeeds();
    for (name, text) in kept {
        assert_eq!(String::from_utf8(workshop.read(&format!("out/{name}"))).unwrap(), text, "{name}");
    }
    assert!(!workshop.path("out/notes.txt").exists());
}

#[test]
fn presets_are_listed_with_their_sizes() {
    let workshop = Workshop::new();
    let models = workshop.run(&["models", "--json"]).json();
    let all = models["models"].as_array().unwrap();
    assert!(all.len() >= 60, "{}", all.len());
    let llama = all.iter().find(|model| model["name"] == "llama3-8b").unwrap();
    assert_eq!((&llama["parameters"], &llama["hidden_size"]), (&json!(8_030_261_248_u64), &json!(4096)));
    let listed = workshop.run(&["models", "qwen3"]).succeeds().stdout;
    assert!(listed.contains("qwen3-30b-a3b") && listed.contains("48 × 2048"), "{listed}");
    assert!(!listed.contains("llama"), "{listed}");
}

/// Returns the names in the directory, without caches and the workshop's own files.
pub(crate) fn names(workshop: &Workshop) -> Vec<String> {
    let entries = std::fs::read_dir(workshop.path("")).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| !name.starts_with('.') && name != "cache");
    names.sort();
    names
}

#[test]
fn mistakes_with_data_have_one_message_that_names_the_way_out() {
    let workshop = Workshop::new();
    let files: [(&str, &[u8], i32, &[&str]); 14] = [
        ("empty.json", b"", 2, &["no text in", "empty.json"]),
        ("empty_array.json", b"[]", 2, &["no text in"]),
        ("cut.json", br#"[{"text": "a"}, {"te"#, 4, &["cut.json element 2", "cut short"]),
        ("numbers.json", b"[1, 2]", 4, &["numbers.json element 1", "[{...}, {...}]"]),
        ("strings.json", br#"["a"]"#, 4, &["strings.json element 1", "no object"]),
        ("no_comma.json", br#"[{"text": "a"} {"text": "b"}]"#, 4, &["no_comma.json element 2"]),
        ("pretty.json", b"{\n  \"text\": \"a\"\n}\n", 4, &["pretty.json line 1"]),
        ("latin1.json", b"[{\"text\": \"caf\xe9\"}]", 4, &["latin1.json", "UTF-8", "offset 14"]),
        ("columns.jsonl", br#"{"question": "a", "answer": "b"}"#, 4, &["question, answer", "data.columns"]),
        ("content.jsonl", br#"{"messages": [{"role": "user"}]}"#, 4, &["message 1", "\"content\""]),
        ("list.jsonl", br#"{"conversations": "hello"}"#, 4, &["\"conversations\" is no list"]),
        ("input.jsonl", br#"{"instruction": ["a"], "output": "b"}"#, 4, &["\"instruction\" is no string"]),
        ("user.jsonl", br#"{"messages": [{"role": "user", "content": "a"}]}"#, 2, &["1 have no answer"]),
        (
            "long.jsonl",
            br#"{"prompt": "All ranks wait until", "completion": "x"}"#,
            2,
            &["train.seq_len = 20 holds"],
        ),
    ];
    for (name, bytes, ..) in files {
        workshop.write(name, bytes);
    }
    let before = names(&workshop);
    for (name, _, code, parts) in files {
        workshop.train(&[&format!("data.train=[{name:?}]")]).fails(code, parts);
    }
    workshop.train(&["data.train=['gone.json']"]).fails(2, &["gone.json", "no file matches"]);
    workshop
        .train(&["data.columns={ promt = 'a' }"])
        .fails(2, &["data.columns", "promt", "prompt, completion"]);
    workshop.train(&["data.columns={ prompt = 1 }"]).fails(2, &["data.columns", "a table of strings"]);
    workshop.train(&["data.columns=prompt"]).fails(2, &["data.columns", "a table of strings"]);
    assert_eq!(names(&workshop), before);
}
