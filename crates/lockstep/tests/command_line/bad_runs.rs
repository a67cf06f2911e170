//! Unusable arguments, RUN.toml and text: nothing is trained, and the message gives the reason.

use crate::workshop::Workshop;

#[test]
fn a_configuration_that_cannot_be_used_is_refused_with_code_2() {
    let workshop = Workshop::new();
    let cases: [(&str, &[u8], &[&str]); 8] = [
        ("broken.toml", b"[train\nsteps = 4", &["broken.toml:1"]),
        ("unknown_key.toml", b"[train]\nsetps = 4", &["unknown_key.toml:2", "train.setps", "train.steps"]),
        ("unknown_section.toml", b"[trian]\nsteps = 4", &["[trian]", "[train]"]),
        ("wrong_type.toml", b"[train]\nsteps = \"many\"", &["wrong_type.toml:2", "train.steps", "many"]),
        ("two.toml", b"[train]\nsteps = 0\nseq_len = 0", &["2 problems", "two.toml:2", "two.toml:3"]),
        ("latin1.toml", b"# caf\xe9\n[train]\nsteps = 4", &["latin1.toml", "UTF-8"]),
        ("preset.toml", b"[model]\npreset = \"llama-15n\"", &["llama-15n", "did you mean `llama-15m`"]),
        ("binary.toml", &[0; 64], &["binary.toml:1"]),
    ];
    for (name, bytes, parts) in cases {
        workshop.write(name, bytes);
        workshop.run(&["train", name]).refuses(2, parts);
    }
    workshop.run(&["train", "nowhere.toml"]).refuses(2, &["nowhere.toml", "No such file"]);
    workshop.run(&["train", "."]).refuses(2, &["cannot read", "directory"]);
    assert!(!workshop.path("checkpoints").exists(), "a run that is refused leaves nothing");
}

#[test]
fn a_set_argument_that_cannot_be_used_is_refused_with_code_2() {
    let workshop = Workshop::new();
    let cases: [(&str, &[&str]); 19] = [
        ("train.steps", &["--set train.steps", "no '='"]),
        ("steps=4", &["steps", "--set train.steps=VALUE"]),
        ("train.stepz=4", &["train.stepz", "train.steps"]),
        ("train.steps=many", &["train.steps", "many"]),
        ("train.steps=-1", &["train.steps", "-1"]),
        ("train.precision=f8", &["train.precision", "f32", "bf16"]),
        ("model.preset=gpt5", &["gpt5", "lockstep models"]),
        ("model.hidden_sise=32", &["hidden_sise", "hidden_size"]),
        ("model.hidden_size=33", &["hidden_size", "33"]),
        ("model.vocab_size=99999999999", &["vocab_size", "99999999999", "1 to"]),
        ("train.seq_len=65", &["train.seq_len", "65", "1 to 64", "max_position_embeddings"]),
        ("train.micro_batch=3", &["train.micro_batch", "3", "train.global_batch = 4", "1, 2, 4"]),
        ("parallel.zero_stage=4", &["parallel.zero_stage", "<= 3"]),
        ("parallel.max_live_parameters=9", &["parallel.max_live_parameters", "parallel.zero_stage = 0"]),
        ("parallel.secondary_shard=2", &["parallel.secondary_shard", "parallel.zero_stage = 0"]),
        ("parallel.reshard_after_forward=often", &["\"always\", \"auto\", \"never\""]),
        ("data.train=[]]", &["data.train", "broken TOML"]),
        ("data.tokenizer=nowhere.json", &["nowhere.json", "No such file"]),
        ("model.vocab_size=1000", &["data.tokenizer", "1000", "tokenizer.json"]),
    ];
    for (setting, parts) in cases {
        workshop.train(&[setting]).refuses(2, parts);
    }
    // Each number is allowed by itself, and their combination is not.
    let settings = ["train.micro_batch=1000000", "train.global_batch=1000000", "train.seq_len=100000"];
    workshop.train(&settings).refuses(2, &["train.micro_batch", "100000000000 tokens", "at most 2147483648"]);
    assert!(!workshop.path("checkpoints").exists(), "a run that is refused leaves nothing");
}

#[test]
fn numbers_at_the_end_of_their_range_do_what_they_say() {
    let workshop = Workshop::new();
    let most = i64::MAX;
    let settings = [
        &format!("train.eval_steps={most}")[..],
        &format!("train.eval_every={most}"),
        &format!("checkpoint.every={most}"),
        &format!("checkpoint.keep={most}"),
        &format!("train.log_every={most}"),
        &format!("train.seed={most}"),
        "train.eval_every=2",
    ];
    workshop.train(&settings).succeeds();
}

#[test]
fn a_model_that_no_machine_holds_is_refused_before_memory_is_taken() {
    let workshop = Workshop::new();
    let settings =
        ["model.hidden_size=4194304", "model.num_attention_heads=4096", "model.num_hidden_layers=4096"];
    workshop
        .train(&settings)
        .refuses(2, &["does not fit the memory of this machine", "needed     parameters"]);
    let settings = ["train.micro_batch=1000000", "train.global_batch=1000000"];
    let told = ["activations", "would fit  --set train.micro_batch="];
    workshop.train(&settings).refuses(2, &told);
}

#[test]
fn a_benchmark_that_no_machine_holds_is_told_what_would_make_it_smaller() {
    let workshop = Workshop::new();
    let wide = ["--set", "model.hidden_size=65536", "--set", "model.num_attention_heads=1024"];
    let step =
        ["bench", "step", "--model", "llama-15m", "--nproc-per-node", "2", "--batch", "1", "--seq-len", "16"];
    workshop.run(&[&step[..], &wide].concat()).refuses(
        2,
        &[
            "does not fit the memory of this machine",
            "parallel.zero_stage=",
            "parallel.offload.optimizer=disk",
        ],
    );
}

#[test]
fn text_that_cannot_be_read_is_refused_with_its_path() {
    let workshop = Workshop::new();
    std::fs::create_dir(workshop.path("empty_directory")).unwrap();
    workshop.write("empty.txt", b"");
    workshop.write("short.txt", b"too short");
    workshop.write("latin1.txt", b"caf\xe9 au lait");
    workshop.write("array.jsonl", b"{\"text\": \"fine\"}\n[1, 2]\n");
    workshop.write("other_field.jsonl", b"{\"content\": \"fine\"}\n");
    workshop.write("cut.jsonl", b"{\"text\": \"fi");
    workshop.write("corpus.parquet", b"PAR1");
    let cases: [(&str, i32, &[&str]); 10] = [
        ("nowhere.txt", 2, &["nowhere.txt", "no file matches"]),
        ("*.nothing", 2, &["*.nothing", "searched from"]),
        ("empty_directory", 2, &["empty_directory"]),
        ("empty.txt", 2, &["no text in empty.txt"]),
        ("short.txt", 2, &["tokens", "17", "seq_len 16"]),
        ("latin1.txt", 4, &["latin1.txt", "UTF-8", "offset 3"]),
        ("array.jsonl", 4, &["array.jsonl line 2", "field \"text\""]),
        ("other_field.jsonl", 4, &["other_field.jsonl line 1", "content", "data.text_field"]),
        ("cut.jsonl", 4, &["cut.jsonl line 1"]),
        ("corpus.parquet", 4, &["corpus.parquet", "not a Parquet file"]),
    ];
    for (file, code, parts) in cases {
        workshop.train(&[&format!("data.train=[{file:?}]")]).refuses(code, parts);
    }
    // A valid file in the list does not make the bad one acceptable.
    workshop.train(&["data.train=['text.txt', 'latin1.txt']"]).refuses(4, &["latin1.txt", "offset 3"]);
    workshop.train(&["data.valid=['latin1.txt']"]).refuses(4, &["latin1.txt", "offset 3"]);
}

#[test]
fn a_tokenizer_that_is_none_or_does_not_fit_is_refused() {
    let workshop = Workshop::new();
    let with_model = |normalizer: &str, id: u32| {
        format!(
            r#"{{"version": "1.0", "added_tokens": [], "normalizer": {normalizer}, "decoder": null,
                "pre_tokenizer": {{"type": "Whitespace"}}, "post_processor": null, "model": {{"type": "WordLevel",
                "vocab": {{"all": 0, "[UNK]": {id}}}, "unk_token": "[UNK]"}}}}"#
        )
    };
    workshop.write("fits.json", with_model("null", 255));
    workshop.write("too_large.json", with_model("null", 256));
    // Tables on which the tokenizer library panics.
    workshop
        .write("bad_table.json", with_model(r#"{"type": "Precompiled", "precompiled_charsmap": "AAAA"}"#, 1));
    workshop.write("cut.json", &with_model("null", 1)[..100]);
    workshop.write("empty.json", "");
    workshop.write("other.json", "{\"model_type\": \"llama\"}");
    workshop.train(&["data.tokenizer=fits.json"]).succeeds();
    let not_usable = "is not a usable tokenizer.json";
    let cases: [(&str, i32, &[&str]); 5] = [
        ("too_large.json", 2, &["ids up to 256", "256 entries", "vocab_size to at least 257"]),
        ("bad_table.json", 4, &[not_usable]),
        ("cut.json", 4, &[not_usable]),
        ("empty.json", 4, &[not_usable]),
        ("other.json", 4, &[not_usable]),
    ];
    for (file, code, parts) in cases {
        let outcome = workshop.train(&[&format!("data.tokenizer={file}")]);
        outcome.refuses(code, &[parts, &[file]].concat());
    }
}

#[test]
fn a_token_file_that_was_damaged_in_the_cache_is_refused_or_made_again() {
    let workshop = Workshop::new();
    workshop.train(&[]).succeeds();
    let cached = std::fs::read_dir(workshop.path("cache/lockstep")).unwrap();
    let names: Vec<String> = cached
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".tokens"))
        .collect();
    assert_eq!(names.len(), 1, "{names:?}");
    let name = format!("cache/lockstep/{}", names[0]);
    let sound = workshop.read(&name);
    for bytes in [&sound[..sound.len() / 2], &sound[..10], b""] {
        workshop.write(&name, bytes);
        let outcome = workshop.run(&["train", "run.toml", "--resume", "never"]);
        if outcome.code != Some(0) {
            outcome.refuses(4, &["not a valid token file", "delete it"]);
            workshop.write(&name, &sound);
        }
        assert_eq!(workshop.read(&name), sound);
    }
}

#[test]
fn arguments_that_cannot_be_used_are_refused_with_code_2() {
    let workshop = Workshop::new();
    let cases: [(&[&str], &[&str]); 11] = [
        (&["trian"], &["trian", "train"]),
        (&["train", "--sett", "a=b"], &["--sett", "--set"]),
        (&["checkpoint", "verifi", "x"], &["verifi", "verify"]),
        (&["generate", "--prompt", "a"], &["--model"]),
        (&["eval", "--model", "hf"], &["--data"]),
        (&["bench", "step", "--model", "gpt2-124n"], &["gpt2-124n", "did you mean `gpt2-124m`"]),
        (
            &["bench", "step", "--model", "baby-gpt", "--batch", "18446744073709551615"],
            &["--batch", "allowed is 1 to"],
        ),
        (&["bench", "step", "--model", "baby-gpt", "--seq-len", "257"], &["--seq-len 257", "1 to 256"]),
        (&["bench", "gemm", "--threads", "100000"], &["--threads 100000", "0 to 4096"]),
        (&["bench", "collectives", "--nproc-per-node", "65"], &["number of ranks 65", "1 to 64"]),
        (&["bench", "collectives", "--sizes", "4XB"], &["4XB", "64MiB"]),
    ];
    for (arguments, parts) in cases {
        workshop.run(arguments).refuses(2, parts);
    }
}
