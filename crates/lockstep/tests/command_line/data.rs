//! Runs on every kind of data, and errors about data that is missing, damaged or made for another model.

use crate::workshop::Workshop;

/// Returns the token ids of the text in nanoGPT's format.
fn raw_tokens(text: &[u8]) -> Vec<u8> {
    text.iter().flat_map(|&byte| u16::from(byte).to_le_bytes()).collect()
}

/// Returns an index in which the tokens are one sequence, for a `.bin` with ids of two bytes.
fn index_of(tokens: usize) -> Vec<u8> {
    let mut bytes = b"MMIDIDX\0\0".to_vec();
    bytes.extend(1_u64.to_le_bytes());
    bytes.push(8);
    bytes.extend([1_u64, 2].map(u64::to_le_bytes).concat());
    bytes.extend((tokens as u32).to_le_bytes());
    bytes.extend([0_u64, 0, 1].map(u64::to_le_bytes).concat());
    bytes
}

/// Returns the losses of a run.
fn losses(workshop: &Workshop) -> Vec<String> {
    let rows = String::from_utf8(workshop.read("runs/metrics.jsonl")).unwrap();
    rows.lines()
        .map(|row| serde_json::from_str::<serde_json::Value>(row).unwrap()["loss"].to_string())
        .collect()
}

#[test]
fn the_same_tokens_give_the_same_losses_in_every_format() {
    let workshop = Workshop::new();
    let text = workshop.read("text.txt");
    workshop.write("raw.bin", raw_tokens(&text));
    workshop.write("megatron.bin", raw_tokens(&text));
    workshop.write("megatron.idx", index_of(text.len()));
    let lines = format!("{{\"text\": {:?}}}\n", String::from_utf8(text).unwrap());
    workshop.write("text.jsonl", lines);
    workshop.train(&["train.steps=2"]).succeeds();
    let expected = losses(&workshop);
    assert_eq!(expected.len(), 2);
    for name in ["raw.bin", "megatron.bin", "megatron.idx", "megatron", "text.jsonl", "*.jsonl"] {
        let source = format!("data.train=[{name:?}]");
        workshop
            .run(&["train", "run.toml", "--resume", "never", "--set", "train.steps=2", "--set", &source])
            .succeeds();
        assert_eq!(losses(&workshop), expected, "{name}");
    }
}

#[test]
fn a_blend_resumes_bit_for_bit_and_shows_its_shares() {
    let whole = Workshop::new();
    whole.write("other.txt", "Ranks that wait are ranks that talk.\n".repeat(30));
    let blend = r#"data.train=["text.txt", { path = "other.txt", weight = 0.25 }]"#;
    let train = ["train", "run.toml", "-v", "--set", blend, "--set", "train.steps=6"];
    let shown = whole.run(&train).succeeds();
    for part in ["75.0000 % from text.txt", "25.0000 % from other.txt"] {
        assert!(shown.stderr.contains(part), "{part}: {shown:?}");
    }
    let halves = Workshop::new();
    halves.write("other.txt", whole.read("other.txt"));
    halves.train(&[blend, "train.steps=3"]).succeeds();
    halves.train(&[blend, "train.steps=6"]).succeeds();
    assert_eq!(losses(&halves), losses(&whole));
    let other = blend.replace("0.25", "0.5");
    halves.train(&[&other, "train.steps=8"]).refuses(2, &["data.train was", "--resume never"]);
}

#[test]
fn sources_that_are_missing_or_too_short_are_named_together() {
    let workshop = Workshop::new();
    workshop.write("short.txt", "too short");
    let blend = |entries: &str| format!("data.train=[{entries}]");
    let missing =
        blend("'text.txt', { path = 'gone/*.txt', weight = 0.1 }, { path = 'lost.txt', weight = 0.1 }");
    workshop.train(&[&missing]).refuses(2, &["2 sources", "gone/*.txt", "lost.txt"]);
    let short = blend("{ path = 'text.txt', weight = 1 }, { path = 'short.txt', weight = 2 }");
    workshop.train(&[&short]).refuses(2, &["the training set of short.txt", "8 tokens", "needs 17"]);
    for (entries, parts) in [
        ("'text.txt', { path = 'b', weight = 1.5 }", &["weights sum to 1.5", "nothing is left"][..]),
        ("{ path = 'b', weight = -1 }", &["entry 1", "weight -1"]),
        ("{ path = 'b', weight = 'x' }", &["entry 1", "no number above 0"]),
        ("'text.txt', { weight = 1.0 }", &["entry 2", "no path"]),
        ("{ path = 'b', wieght = 1 }", &["unknown key \"wieght\""]),
        ("{ path = '', weight = 1 }", &["entry 1", "path that is"]),
    ] {
        workshop.train(&[&blend(entries)]).refuses(2, parts);
    }
}

#[test]
fn tokens_of_another_model_or_type_are_found_before_the_first_step() {
    let workshop = Workshop::new();
    let text = workshop.read("text.txt");
    let mut tokens = raw_tokens(&text);
    tokens[2 * 100 + 1] = 1;
    workshop.write("other.bin", &tokens);
    let source = "data.train=['other.bin']";
    let value = (256 + u32::from(text[100])).to_string();
    workshop.train(&[source]).refuses(4, &["other.bin", "token 100", &value, "read as u16", "256 entries"]);
    workshop.write("odd.bin", &tokens[..101]);
    workshop
        .train(&["data.train=['odd.bin']"])
        .refuses(4, &["odd.bin", "101 bytes", "u16", "data.token_type"]);
    workshop.write("empty.bin", "");
    workshop.train(&["data.train=['empty.bin']"]).refuses(4, &["empty.bin", "0 bytes"]);
    workshop.write("raw.bin", raw_tokens(&text));
    workshop
        .train(&["data.train=['raw.bin']", "data.token_type=u32"])
        .refuses(4, &["raw.bin", "read as u32"]);
    workshop
        .train(&["data.train=['raw.bin']", "data.packing=documents"])
        .refuses(2, &["data.packing", "data.tokenizer"]);
    workshop.train(&["data.train=['raw.bin']", "data.format=indexed"]).refuses(2, &["raw.idx"]);
}

#[test]
fn an_index_that_does_not_fit_its_tokens_is_refused() {
    let workshop = Workshop::new();
    let text = workshop.read("text.txt");
    workshop.write("m.bin", raw_tokens(&text));
    let sound = index_of(text.len());
    for (change, parts) in [
        (Box::new(|bytes: &mut Vec<u8>| bytes[0] = b'X') as Box<dyn Fn(&mut Vec<u8>)>, &["MMIDIDX"][..]),
        (Box::new(|bytes| bytes.truncate(20)), &["20 bytes"]),
        (Box::new(|bytes| bytes[25] = 0x7F), &["does not fit its", "sequences"]),
        (Box::new(|bytes| bytes[34] ^= 1), &["ask for", "the .bin has"]),
        (Box::new(|bytes| bytes[17] = 7), &["type code is 7"]),
    ] {
        let mut bytes = sound.clone();
        change(&mut bytes);
        workshop.write("m.idx", bytes);
        let parts = [&["m.idx", "not a valid index"][..], parts].concat();
        workshop.train(&["data.train=['m']"]).refuses(4, &parts);
    }
}

#[test]
fn documents_are_kept_apart_and_prompts_are_not_predicted() {
    let workshop = Workshop::new();
    let line = r#"{"prompt": "all ranks", "completion": " wait"}"#;
    workshop.write("pairs.jsonl", format!("{line}\n").repeat(60));
    let source = "data.train=['pairs.jsonl']";
    for packing in ["stream", "documents", "whole_documents"] {
        let packing = format!("data.packing={packing}");
        workshop
            .run(&["train", "run.toml", "--resume", "never", "--set", source, "--set", &packing])
            .succeeds();
        assert_eq!(losses(&workshop).len(), 4);
    }
    workshop.write("pairs.jsonl", r#"{"messages": [{"role": "user", "content": "alone"}]}"#);
    workshop.train(&[source]).refuses(2, &["no answer to learn from", "1 have no answer"]);
}

#[test]
fn samples_whose_answers_do_not_fit_are_left_out_and_the_run_goes_on() {
    let workshop = Workshop::new();
    let fits = r#"{"prompt": "all ranks", "completion": " wait"}"#;
    let long = format!(r#"{{"prompt": "{}", "completion": "x"}}"#, "p".repeat(40));
    let none = r#"{"prompt": "a", "completion": ""}"#;
    // Enough records that do not fit to fill whole batches.
    let lines = [vec![fits; 8], vec![long.as_str(); 30], vec![none; 3], vec![fits; 8]].concat();
    workshop.write("pairs.jsonl", lines.join("\n"));
    let settings = ["data.train=['pairs.jsonl']", "data.order=sequential", "data.valid_fraction=0"];
    let shown = workshop.train(&settings).succeeds();
    for part in [
        "80 of 1,457 tokens are predicted",
        "33 of 49 samples are left out",
        "train.seq_len = 40 would keep the shortest",
        "3 without an answer",
    ] {
        let said = shown.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(said.contains(part), "{part}: {said}");
    }
    workshop.write("pairs.jsonl", long);
    workshop.train(&["data.train=['pairs.jsonl']"]).refuses(2, &["train.seq_len = 40 holds"]);
}

#[test]
fn a_tokenization_that_is_killed_goes_on_to_the_same_bytes() {
    let workshop = Workshop::new();
    let line =
        format!("{{\"text\": {:?}}}\n", "All ranks wait until the last gradient is reduced. ".repeat(20));
    workshop.write("long.jsonl", line.repeat(48 << 10));
    workshop.run(&["data", "tokenize", "long.jsonl", "-o", "whole"]).succeeds();
    let lockstep = env!("CARGO_BIN_EXE_lockstep");
    let mut started = workshop.start(lockstep, &["data", "tokenize", "long.jsonl", "-o", "out"]);
    let journal = workshop.path("out.partial/journal.jsonl");
    started.wait_until("a step", |_| {
        std::fs::read_to_string(&journal).is_ok_and(|text| text.lines().count() > 1)
    });
    started.child.kill().unwrap();
    started.child.wait().unwrap();
    assert!(!workshop.path("out.idx").exists());
    let resumed = workshop.run(&["data", "tokenize", "long.jsonl", "-o", "out", "--json"]).json();
    assert!(resumed["resumed_tokens"].as_u64() > Some(0), "{resumed}");
    assert_eq!(resumed["documents"], 48 << 10);
    for extension in ["bin", "idx"] {
        let read = |name: &str| workshop.read(&format!("{name}.{extension}"));
        assert!(read("out") == read("whole"), "the .{extension} differs");
    }
    assert!(!workshop.path("out.partial").exists());
}

#[test]
fn what_was_tokenized_is_shown_and_trained_on() {
    let workshop = Workshop::new();
    workshop.run(&["data", "tokenize", "text.txt", "--output", "out"]).succeeds();
    let shown = workshop.run(&["data", "show", "out", "--tokenizer", "bytes", "--verify", "--json"]).json();
    assert_eq!((&shown["documents"], &shown["tokens"]), (&1.into(), &(51 * 40).into()));
    assert!(shown["sample"].as_str().unwrap().starts_with("All ranks wait"), "{shown}");
    let set = [
        "--set",
        "data.train=['text.txt', { path = 'out', weight = 0.5 }]",
        "--set",
        "data.packing=documents",
    ];
    let of_run = workshop.run(&[&["data", "show", "run.toml", "--json"][..], &set].concat()).json();
    assert_eq!(of_run["sources"][1]["share"], 0.5);
    assert_eq!(of_run["sources"][1]["source"], "out");
    let text = workshop.run(&[&["data", "show", "run.toml"][..], &set].concat()).succeeds().stdout;
    for part in ["50.0000 % of the samples", "sequences of 16 tokens", "All ranks wait"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    workshop.run(&[&["train", "run.toml"][..], &set].concat()).succeeds();
}

#[test]
fn mistakes_with_tokenize_and_show_have_one_message_each() {
    let workshop = Workshop::new();
    workshop.run(&["data", "tokenize", "gone.txt", "-o", "out"]).refuses(2, &["gone.txt"]);
    workshop.run(&["data", "tokenize", "text.txt", "-o", "no/such/dir/out"]).succeeds();
    workshop
        .run(&["data", "tokenize", "text.txt", "-o", "no/such/dir/out"])
        .refuses(2, &["out.bin", "already"]);
    workshop
        .run(&["data", "tokenize", "text.txt", "-o", "text.txt/out"])
        .refuses(2, &["text.txt/out.partial"]);
    workshop
        .run(&["data", "tokenize", "no/such/dir/out.bin", "-o", "b"])
        .refuses(2, &["holds tokens already"]);
    workshop
        .run(&["data", "tokenize", "text.txt", "-o", "b", "--format", "csv"])
        .refuses(2, &["csv", "jsonl"]);
    workshop.write("bad.jsonl", "{\"text\": 1}");
    workshop.run(&["data", "tokenize", "bad.jsonl", "-o", "b"]).refuses(4, &["bad.jsonl line 1"]);
    workshop.write("bad.parquet", "PAR1PAR1");
    workshop.run(&["data", "show", "bad.parquet"]).refuses(4, &["bad.parquet", "not a Parquet file"]);
    workshop.train(&["data.train=['bad.parquet']"]).refuses(4, &["bad.parquet"]);
    workshop.run(&["data", "show", "text.txt", "--set", "train.steps=1"]).refuses(2, &["--set", ".toml"]);
    workshop.write("raw.bin", [1, 0, 0, 1]);
    workshop.run(&["data", "show", "raw.bin", "--tokenizer", "bytes"]).refuses(4, &["token 1 is 256"]);
    workshop.run(&["data", "show", "raw.bin", "--token-type", "u8"]).refuses(2, &["u16, u32"]);
}
