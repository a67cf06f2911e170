//! Habits from other tools: their flags and commands, and models by any of their names.

use crate::workshop::Workshop;

#[test]
fn flags_and_commands_of_other_tools_are_answered_with_what_to_write() {
    let workshop = Workshop::new();
    let cases: [(&[&str], &str); 12] = [
        (&["train", "--config", "run.toml"], "`lockstep train RUN.toml`"),
        (&["train", "run.toml", "--lr", "1e-3"], "write --set optimizer.lr=VALUE"),
        (&["train", "run.toml", "--learning-rate=1e-3"], "write --set optimizer.lr=VALUE"),
        (&["train", "run.toml", "--batch_size", "8"], "train.global_batch"),
        (&["train", "run.toml", "--epochs", "3"], "train.steps"),
        (&["train", "run.toml", "--num_processes", "2"], "`--nproc-per-node N`"),
        (&["train", "run.toml", "--bf16"], "train.precision = \"bf16\""),
        (&["export"], "`lockstep checkpoint export CHECKPOINT --hf DIR`"),
        (&["chat"], "`lockstep generate --model DIR"),
        (&["finetune"], "model.from_pretrained = true"),
        (&["launch"], "--nproc-per-node"),
        (&["download"], "`lockstep fetch ORG/NAME`"),
    ];
    for (arguments, part) in cases {
        workshop.run(arguments).refuses(2, &["there is no ", part]);
    }
}

#[test]
fn keys_and_values_of_other_tools_work_in_a_run() {
    let workshop = Workshop::new();
    let text = "[train]\nmax_steps = 1\nlearning_rate = 1e-3\nmixed_precision = \"bfloat16\"\ntrain_batch_size = 4\n\
                block_size = 16\nthreads = 1\neval_every = 0\n[optimizer]\nkind = \"Adam\"\n[data]\ntrain = \"text.txt\"\n\
                [model]\npreset = \"LLaMA-15M\"\nnum_hidden_layers = 1\nhidden_size = 32\nintermediate_size = 64\n\
                num_attention_heads = 2\nnum_key_value_heads = 1\n";
    workshop.write("habits.toml", text);
    workshop.run(&["train", "habits.toml"]).succeeds();
    assert!(workshop.path("checkpoints/step-00000001").exists());
    for (setting, parts) in [
        ("train.epochs=3", ["train.epochs: is no key here", "an epoch has as many"]),
        ("train.gradient_accumulation_steps=3", ["train.global_batch", "micro_batch / ranks"]),
        ("train.precision=fp8", ["train.precision", "fp8 is not available"]),
        ("model.path=org/none", ["model.path", "`lockstep fetch org/none`"]),
        ("model.preset=https://example.org/x", ["model.preset", "only addresses of huggingface.co"]),
    ] {
        let run = if setting.starts_with("model.path") { "bare.toml" } else { "run.toml" };
        workshop.write("bare.toml", "");
        workshop.run(&["train", run, "--set", setting]).refuses(2, &parts);
    }
}

#[test]
fn every_command_takes_a_model_by_any_of_its_names() {
    let workshop = Workshop::trained();
    let snapshot = "hub/models--org--tiny/snapshots/0123";
    for file in ["config.json", "model.safetensors"] {
        let bytes = workshop.read(&format!("hf/{file}"));
        workshop.write(&format!("{snapshot}/{file}"), bytes);
    }
    let cache = workshop.path("hub");
    let cache = [("HF_HUB_CACHE", cache.to_str().unwrap())];
    let program = env!("CARGO_BIN_EXE_lockstep");
    let run = |arguments: &[&str]| workshop.start_in(program, arguments, &cache).finish();
    for model in
        ["hf", "hf/config.json", "checkpoints/step-00000004", "org/tiny", "https://huggingface.co/org/tiny"]
    {
        run(&[
            "bench",
            "step",
            "--model",
            model,
            "--steps",
            "1",
            "--batch",
            "1",
            "--seq-len",
            "8",
            "--threads",
            "1",
        ])
        .succeeds();
        run(&["generate", "--model", model, "--prompt", "a", "--max-new-tokens", "1", "--threads", "1"])
            .succeeds();
        run(&[
            "plan",
            "--model",
            model,
            "--seq-len",
            "16",
            "--global-batch",
            "4",
            "--set",
            "parallel.data_parallel_replicate=1",
        ])
        .succeeds();
        let path = format!("model.path={model}");
        let fresh = ["--resume", "never", "--set", "train.steps=1", "--set", "model.from_pretrained=true"];
        workshop.write("named.toml", "[data]\ntrain = [\"text.txt\"]\n[train]\nseq_len = 16\nglobal_batch = 2\nthreads = 1\neval_every = 0\n[checkpoint]\ndir = \"named\"\n[metrics]\ndir = \"named-runs\"\n");
        run(&[&["train", "named.toml", "--set", &path][..], &fresh].concat()).succeeds();
    }
    run(&["generate", "--model", "llama3-8b", "--prompt", "a"]).refuses(2, &["without weights"]);
    run(&["bench", "step", "--model", "org/none"]).refuses(2, &["`lockstep fetch org/none`"]);
    run(&["eval", "--model", "hf://org/none", "--data", "text.txt"]).refuses(2, &["HF_HUB_OFFLINE"]);
}

#[test]
fn a_deepspeed_file_says_what_a_run_leaves_open() {
    let workshop = Workshop::new();
    let ds = "{\"zero_optimization\": {\"stage\": 2}, \"train_batch_size\": 4, \"gradient_clipping\": 0.5, \"steps_per_print\": \"auto\"}";
    workshop.write("ds.json", ds);
    let both =
        ["train", "run.toml", "--deepspeed", "ds.json", "--nproc-per-node", "2", "--set", "train.steps=1"];
    let outcome = workshop.run(&both).succeeds();
    assert_eq!(outcome.stderr.matches("train.max_grad_norm = 0.5").count(), 1, "told once: {outcome:?}");
    let record: serde_json::Value = serde_json::from_slice(&workshop.read("runs/run.json")).unwrap();
    let settings = record["settings"].as_array().unwrap();
    let setting = |key: &str| settings.iter().find(|setting| setting["key"] == key).unwrap().clone();
    assert_eq!(setting("parallel.data_parallel_shard")["value"], 2);
    assert_eq!(setting("train.max_grad_norm")["origin"], "ds.json:1");
    workshop.write("ds.json", ds.replace("4,", "8,"));
    workshop
        .run(&both)
        .refuses(2, &["ds.json:1: train.global_batch", "8 here and 4 in run.toml", "\"auto\""]);
    workshop.write("ds.json", "{\"fp16\": {\"enabled\": 3}}");
    workshop.run(&both).refuses(2, &["ds.json:1: fp16.enabled"]);
}
