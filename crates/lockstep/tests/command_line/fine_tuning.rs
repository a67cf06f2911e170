//! The first hour with a published model: fine-tuning on own data, export and generation, and the errors about wrong files.

use serde_json::{Value, json};

use crate::workshop::{Outcome, Workshop};

/// A tokenizer with ids up to 255, whose words all occur in the workshop's text.
const TOKENIZER: &str = r#"{"version": "1.0", "added_tokens": [], "normalizer": null, "decoder": null,
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

/// Runs `generate` with the exported model.
fn generate(workshop: &Workshop, more: &[&str]) -> Outcome {
    workshop.run(&[&["generate", "--model", "hf"], more].concat())
}

#[test]
fn generation_follows_the_models_own_configuration_unless_told_otherwise() {
    let workshop = Workshop::trained();
    let prompt = ["--prompt", "All ranks", "--json"];
    let told = [&prompt[..], &["--temperature", "0", "--max-new-tokens", "6"]].concat();
    let greedy = generate(&workshop, &told).json();
    assert_eq!((greedy["tokens"].as_array().unwrap().len(), &greedy["finish_reason"]), (6, &json!("length")));
    workshop.write("hf/generation_config.json", r#"{"do_sample": false, "max_new_tokens": 6}"#);
    assert_eq!(generate(&workshop, &prompt).json(), greedy);
    let shorter = generate(&workshop, &[&prompt[..], &["--max-new-tokens", "2"]].concat()).json();
    assert_eq!(shorter["tokens"].as_array().unwrap(), &greedy["tokens"].as_array().unwrap()[..2]);
    // The last of its end-of-text tokens is the first that it would generate.
    let ends = json!({"do_sample": false, "eos_token_id": [999, greedy["tokens"][0]]}).to_string();
    workshop.write("hf/generation_config.json", ends);
    let ended = generate(&workshop, &told).json();
    assert_eq!((&ended["tokens"], &ended["finish_reason"]), (&json!([]), &json!("stop")));
}

#[test]
fn prompts_come_from_files_and_standard_input_and_in_samples() {
    let workshop = Workshop::trained();
    workshop.write("prompts.txt", "All\n\nranks\n");
    let several = ["--prompts", "prompts.txt", "-n", "2", "--max-new-tokens", "3", "--seed", "5", "--json"];
    let all = generate(&workshop, &several).json();
    let results = all["results"].as_array().unwrap();
    let prompts: Vec<&str> = results.iter().map(|result| result["prompt"].as_str().unwrap()).collect();
    assert_eq!(prompts, ["All", "All", "ranks", "ranks"]);
    let one = ["--prompt", "All", "--max-new-tokens", "3", "--seed", "6", "--json"];
    assert_eq!(generate(&workshop, &one).json(), results[1]);
    let piped = format!(
        "printf 'All\\n' | '{}' generate --model hf --max-new-tokens 3 --seed 6 --json",
        env!("CARGO_BIN_EXE_lockstep")
    );
    assert_eq!(workshop.start("sh", &["-c", &piped]).finish().json(), results[1]);
    let text = generate(&workshop, &several[..6]).succeeds().stdout;
    assert!(text.contains("--- prompt 2, sample 2\nranks"), "{text}");
    let chat = ["--chat", "--system", "s", "--prompt", "q", "--max-new-tokens", "1", "--json"];
    let template = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n";
    workshop.edit_json("hf/config.json", |config| config["max_position_embeddings"] = 128.into());
    assert_eq!(generate(&workshop, &chat).json()["prompt_tokens"], template.len());
}

#[test]
fn a_window_slides_over_what_the_context_does_not_hold() {
    let workshop = Workshop::trained();
    let long = ["--prompt", "All ranks wait", "--max-new-tokens", "100", "--json"];
    generate(&workshop, &long).refuses(2, &["114 tokens", "64 positions", "--sliding-window 32"]);
    let slid = generate(&workshop, &[&long[..], &["--sliding-window", "32"]].concat()).json();
    assert_eq!(slid["tokens"].as_array().unwrap().len(), 100);
    // Nothing differs until the context is full.
    let within = ["--prompt", "All ranks wait", "--max-new-tokens", "50", "--json"];
    let within = generate(&workshop, &within).json();
    assert_eq!(slid["tokens"].as_array().unwrap()[..50], within["tokens"].as_array().unwrap()[..]);
}

/// Returns the names in the directory, without caches and the workshop's own files.
fn names(workshop: &Workshop) -> Vec<String> {
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

#[test]
fn mistakes_with_models_and_generation_have_one_message_that_names_the_way_out() {
    let workshop = Workshop::trained();
    workshop.write("empty.txt", "\n\n");
    workshop.write("latin1.txt", b"caf\xe9");
    std::fs::create_dir(workshop.path("nothing")).unwrap();
    let before = names(&workshop);
    let cases: [(&[&str], i32, &[&str]); 13] = [
        (&[], 2, &["there is no prompt", "--prompts FILE"]),
        (&["--prompt", "-"], 2, &["there is no prompt"]),
        (&["--prompts", "gone.txt"], 2, &["--prompts gone.txt", "No such file"]),
        (&["--prompts", "empty.txt"], 2, &["--prompts empty.txt has no prompt"]),
        (&["--prompts", "latin1.txt"], 4, &["latin1.txt is not UTF-8"]),
        (&["--prompts", "empty.txt", "--prompt", "a"], 2, &["cannot be used with"]),
        (&["--prompt", "a", "--system", "b"], 2, &["--chat"]),
        (&["--prompt", "a", "-n", "0"], 2, &["0"]),
        (&["--prompt", "a", "--sliding-window", "0"], 2, &["--sliding-window 0", "1 to 63"]),
        (&["--prompt", "a", "--sliding-window", "64"], 2, &["--sliding-window 64", "1 to 63"]),
        (&["--prompt", "a", "--temperature", "-1"], 2, &["temperature", "0 or more"]),
        (&["--prompt", "a", "--max-new-tokens", "64"], 2, &["--sliding-window"]),
        (&["--prompt", "a", "--adapter", "nothing"], 2, &["nothing"]),
    ];
    for (arguments, code, parts) in cases {
        generate(&workshop, arguments).fails(code, parts);
    }
    for (text, parts) in [
        ("{", &["generation_config.json"][..]),
        (r#"{"eos_token_id": "</s>"}"#, &["generation_config.json", "eos_token_id", "a token id or a list"]),
        (r#"{"temperature": "hot"}"#, &["temperature", "a number"]),
    ] {
        workshop.write("hf/generation_config.json", text);
        generate(&workshop, &["--prompt", "a"]).fails(4, parts);
    }
    workshop.write("hf/generation_config.json", "{}");
    workshop.run(&["generate", "--model", "nothing", "--prompt", "a"]).fails(2, &["nothing/config.json"]);
    workshop.run(&["models", "llama9"]).fails(2, &["llama9", "lockstep models"]);
    workshop.write("hf/tokenizer.json", TOKENIZER);
    workshop.write("hf/chat_template.jinja", "{{ raise_exception('roles must alternate') }}");
    generate(&workshop, &["--chat", "--prompt", "a"]).fails(2, &["tokenizer.json", "roles must alternate"]);
    workshop.write("hf/chat_template.jinja", "{% for %}");
    generate(&workshop, &["--chat", "--prompt", "a"]).fails(4, &["chat_template.jinja", "line 1"]);
    assert_eq!(names(&workshop), before);
}
