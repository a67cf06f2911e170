//! `lockstep import`: a configuration of another tool becomes a run, or an error gives the reason.

use std::fs;

use crate::workshop::Workshop;

const ZERO_2: &str = r#"{
  "train_batch_size": 4, // of two ranks
  "train_micro_batch_size_per_gpu": 2,
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear"}},
  "zero_optimization": {"stage": 2, "overlap_comm": true},
}"#;

const TINY: &str = "\n[model]\nnum_hidden_layers = 1\nhidden_size = 32\nintermediate_size = 64\n\
                    num_attention_heads = 2\nnum_key_value_heads = 1\n[data]\ntrain = [\"text.txt\"]\n";

#[test]
fn a_deepspeed_configuration_becomes_a_run_that_trains() {
    let workshop = Workshop::new();
    workshop.write("ds.json", ZERO_2);
    let import = workshop.run(&["import", "deepspeed", "ds.json"]).succeeds();
    assert!(import.stderr.contains("8 values translated, 1 default of DeepSpeed"), "{import:?}");
    assert!(import.stdout.contains("betas = [0.9, 0.999]"), "{import:?}");
    assert!(
        import.stdout.contains("zero_optimization.overlap_comm: communication always overlaps"),
        "{import:?}"
    );
    workshop.write("imported.toml", import.stdout + TINY);
    let settings = ["train.steps=2", "train.seq_len=16", "train.threads=1", "train.eval_every=0"];
    let settings = settings.iter().flat_map(|setting| ["--set", setting]);
    let train = ["train", "imported.toml", "--nproc-per-node", "2"].into_iter().chain(settings);
    workshop.run(&train.collect::<Vec<_>>()).succeeds();
    assert!(workshop.path("checkpoints/step-00000002").exists());
}

#[test]
fn a_file_that_is_named_is_looked_for_beside_the_one_that_names_it() {
    let workshop = Workshop::new();
    workshop.write("here/ds.json", ZERO_2);
    let file = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n";
    workshop.write("here/accelerate.yaml", file);
    let import = workshop.run(&["import", "accelerate", "here/accelerate.yaml"]).succeeds();
    assert!(
        import.stdout.contains("data_parallel_shard = 2") && import.stdout.contains("lr = 1e-3"),
        "{import:?}"
    );
}

#[test]
fn values_that_are_auto_stand_in_the_result() {
    let workshop = Workshop::new();
    let text = "{\"fp16\": {\"enabled\": \"auto\"}, \"bf16\": {\"enabled\": \"auto\"}, \"zero_optimization\": {\"stage\": 2,\n\
                \"reduce_bucket_size\": \"auto\", \"stage3_max_live_parameters\": \"auto\"}}";
    workshop.write("ds.json", text);
    let import = workshop.run(&["import", "deepspeed", "ds.json"]).succeeds();
    for part in [
        "precision = \"f32\"  # line 1: fp16.enabled, bf16.enabled = \"auto\", the Trainer's default",
        "zero_optimization.reduce_bucket_size = \"auto\"",
        "# auto: line 2: zero_optimization.stage3_max_live_parameters = \"auto\", left to",
        "parallel.max_live_parameters",
        "(not set)",
    ] {
        assert!(import.stdout.contains(part), "{part}: {import:?}");
    }
    let summary = "\"auto\": 1 default of the Trainer written out, 1 key left to the run";
    assert!(import.stderr.contains(summary), "{import:?}");
    let train = workshop.run(&["train", "run.toml", "--deepspeed", "ds.json", "--steps", "1"]).succeeds();
    for part in [
        "auto: line 1: bf16.enabled = \"auto\", left to train.precision = \"f32\" (default)",
        "auto: line 2: zero_optimization.stage3_max_live_parameters = \"auto\", left to parallel.max_live_parameters (not set)",
        "zero_optimization.reduce_bucket_size = \"auto\"",
    ] {
        assert!(train.stderr.contains(part), "{part}: {train:?}");
    }
}

#[test]
fn the_output_is_written_by_success_alone_and_replaced_by_force_alone() {
    let workshop = Workshop::new();
    workshop.write("ds.json", ZERO_2);
    workshop.write("broken.json", "{\"train_batch_size\": 0}");
    let import = |file: &str, more: &[&str]| {
        workshop.run(&[&["import", "deepspeed", file, "-o", "new.toml"], more].concat())
    };
    import("broken.json", &[]).refuses(2, &["train_batch_size"]);
    assert!(!workshop.path("new.toml").exists(), "a failure leaves no file");
    let outcome = import("ds.json", &[]).succeeds();
    assert_eq!(outcome.stdout, "", "{outcome:?}");
    assert!(outcome.stderr.contains("written to new.toml"), "{outcome:?}");
    let written = workshop.read("new.toml");
    assert!(String::from_utf8_lossy(&written).contains("global_batch = 4"));
    workshop.write("new.toml", "# mine\n");
    import("ds.json", &[]).refuses(2, &["new.toml exists", "--force"]);
    import("broken.json", &["--force"]).refuses(2, &["train_batch_size"]);
    assert_eq!(workshop.read("new.toml"), b"# mine\n", "a failure replaces nothing");
    import("ds.json", &["--force"]).succeeds();
    assert_eq!(workshop.read("new.toml"), written);
    workshop
        .run(&["import", "deepspeed", "ds.json", "--output", "none/new.toml"])
        .refuses(2, &["cannot write none/new.toml"]);
    workshop
        .run(&["import", "deepspeed", "ds.json", "--output", ".", "--force"])
        .refuses(2, &["cannot write ."]);
    workshop.run(&["import", "deepspeed", "ds.json", "--force"]).refuses(2, &["--output"]);
    assert!(workshop.run(&["import", "--help"]).succeeds().stdout.contains("nothing if the import fails"));
}

#[test]
fn an_import_without_its_format_names_the_command() {
    let workshop = Workshop::new();
    workshop.write("ds.json", ZERO_2);
    workshop.write("a.yaml", "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n");
    workshop.write("other.json", "{\"a\": 1}");
    for (file, parts) in [
        ("ds.json", &["the format is missing", "lockstep import deepspeed ds.json"][..]),
        ("a.yaml", &["the format is missing", "lockstep import accelerate a.yaml"]),
        ("other.json", &["import deepspeed other.json", "import accelerate other.json"]),
        ("none.json", &["none.json", "deepspeed, accelerate"]),
    ] {
        workshop.run(&["import", file]).refuses(2, parts);
    }
    workshop.run(&["import", "ds.json", "--ranks", "2"]).refuses(2, &["lockstep import deepspeed ds.json"]);
}

#[test]
fn a_run_wins_over_what_a_deepspeed_file_says_of_the_display() {
    let workshop = Workshop::new();
    workshop.write("ds.json", "{\"steps_per_print\": 2000, \"train_batch_size\": 4}");
    let text = String::from_utf8(workshop.read("run.toml")).unwrap();
    workshop.write("run.toml", text.replace("steps = 4", "steps = 1\nlog_every = 3"));
    let train = workshop.run(&["train", "run.toml", "--deepspeed", "ds.json"]).succeeds();
    let line = text.lines().position(|line| line == "steps = 4").unwrap() + 2;
    let row = format!("run.toml:{line} wins over line 1: steps_per_print = 2000");
    let row = train.stderr.lines().find(|shown| shown.ends_with(&row));
    assert!(row.is_some_and(|row| row.starts_with("train.log_every = 3 ")), "{train:?}");
}

#[test]
fn a_precision_that_contradicts_the_run_is_one_mistake() {
    let workshop = Workshop::new();
    workshop.write("ds.json", "{\"fp16\": {\"enabled\": true, \"loss_scale\": 128, \"hysteresis\": 2}}");
    let text = String::from_utf8(workshop.read("run.toml")).unwrap();
    workshop.write("run.toml", text.replace("steps = 4", "steps = 1\nprecision = \"bf16\""));
    let outcome = workshop.run(&["train", "run.toml", "--deepspeed", "ds.json"]);
    for part in ["scale", "hysteresis", "problems"] {
        assert!(!outcome.stderr.contains(part), "{part}: {outcome:?}");
    }
    outcome.refuses(2, &["ds.json:1: train.precision: is \"f16\" here and \"bf16\" in run.toml:"]);
}

/// A DeepSpeed file, and parts of its error message.
const DEEPSPEED: &[(&str, &[&str])] = &[
    ("", &["is empty"]),
    ("[1, 2]", &["not a table of keys"]),
    ("{\"train_batch_size\": 4", &["broken JSON"]),
    ("{\"a\": \u{0}}", &["NUL"]),
    ("{\"train_batch_size\": 4, \"train_batch_size\": 8}", &["ds.json:1", "stands twice"]),
    (
        "{\"train_batch_sizes\": 4}",
        &[
            "ds.json:1: train_batch_sizes: unknown key; the nearest is train_batch_size",
            "docs/coming-from-deepspeed.md",
        ],
    ),
    ("{\"qqqqqqq\": 4}", &["ds.json:1: qqqqqqq: unknown key", "docs/coming-from-deepspeed.md"]),
    ("{\"a\": *b}", &["ds.json:1: broken JSON"]),
    (
        "distributed_type: FSDP\nnum_processes: 2\nnum_machines: 1\nmixed_precision: bf16\n",
        &["no configuration of DeepSpeed", "lockstep import accelerate ds.json"],
    ),
    ("{\"train_batch_size\": \"many\"}", &["train_batch_size: is \"many\"", "an integer"]),
    ("{\"train_batch_size\": -4}", &["train_batch_size", "-4"]),
    ("{\"train_batch_size\": 0}", &["train_batch_size", "1 or more"]),
    (
        "{\"train_batch_size\": 10, \"train_micro_batch_size_per_gpu\": 4}",
        &["is 10, and 4 sequences", "leave one of the three out"],
    ),
    ("{\"zero_optimization\": {\"stage\": 4}}", &["zero_optimization.stage: is 4", "0, 1, 2 or 3"]),
    ("{\"zero_optimization\": {\"stagee\": 2}}", &["zero_optimization.stagee", "zero_optimization.stage"]),
    ("{\"fp16\": {\"enabled\": true}, \"bf16\": {\"enabled\": true}}", &["fp16.enabled", "one of the two"]),
    (
        "{\"fp16\": {\"enabled\": true, \"initial_scale_power\": 64}}",
        &["ds.json:1: fp16.initial_scale_power", "<= 32"],
    ),
    ("{\"fp16\": {\"enabled\": \"maybe\"}}", &["fp16.enabled", "true or false"]),
    ("{\"optimizer\": {\"type\": \"OneBitAdam\"}}", &["optimizer.type", "zero_quantized_gradients"]),
    ("{\"optimizer\": {\"type\": \"Adafactor\"}}", &["optimizer.type", "Adam, AdamW, SGD, Lion or Muon"]),
    (
        "{\"optimizer\": {\"type\": \"SGD\", \"params\": {\"betas\": [0.9, 0.99]}}}",
        &["optimizer.params.betas", "leave it out"],
    ),
    ("{\"scheduler\": {\"type\": \"OneCycle\"}}", &["scheduler.type", "WarmupDecayLR"]),
    ("{\"gradient_allreduce_op\": \"sum\"}", &["gradient_allreduce_op", "optimizer.params.lr"]),
    ("{\"sparse_attention\": {\"mode\": \"fixed\"}}", &["sparse_attention", "leave the section out"]),
    (
        "{\"zero_optimization\": {\"stage\": 3, \"offload_param\": {\"device\": \"nvme\"}}}",
        &["offload_param.device", "offload_optimizer.device = nvme"],
    ),
    (
        "{\"zero_optimization\": {\"stage\": 1, \"offload_optimizer\": {\"device\": \"gpu\"}}}",
        &["offload_optimizer.device", "none, cpu or nvme"],
    ),
    (
        "{\"optimizer\": {\"type\": \"Muon\"}, \"zero_optimization\": {\"stage\": 2}}",
        &["optimizer.type", "AdamW"],
    ),
    (
        "{\"hidden_size\": 1, \"num_layers\": 1, \"vocab\": 1, \"heads\": 2}",
        &["no configuration of DeepSpeed"],
    ),
];

/// An Accelerate file, and parts of its error message.
const ACCELERATE: &[(&str, &[&str])] = &[
    ("num_processes: 2\n", &["distributed_type: is missing", "MULTI_GPU"]),
    ("distributed_type: TPUS\n", &["distributed_type", "FSDP"]),
    ("distributed_type: NO\nmixed_precision: fp8\n", &["mixed_precision: is fp8", "bf16"]),
    (
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: SOME\n",
        &["fsdp_sharding_strategy", "FULL_SHARD"],
    ),
    (
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_offload_param: true\n",
        &["fsdp_offload_param", "fsdp_config.fsdp_offload_params"],
    ),
    ("distributed_type: MULTI_GPU\nnum_processes: 0.5\n", &["num_processes", "a number of ranks"]),
    (
        "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: NO\n",
        &["compute_environment", "LOCAL_MACHINE"],
    ),
    (
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: none.json\n",
        &["cannot read", "none.json"],
    ),
    ("a: &x [1]\nb: *x\n", &["alias"]),
    ("distributed_type: [", &["broken YAML"]),
    ("{\"distributed_type\": [", &["broken JSON"]),
    (
        "{\"train_batch_size\": 4, \"zero_optimization\": {\"stage\": 2}}",
        &["lockstep import deepspeed a.yaml"],
    ),
    ("distributed_type: NO\nnum_machines: 012\n", &["num_machines", "012"]),
];

#[test]
fn a_file_that_cannot_be_translated_says_where_and_what_to_write() {
    let workshop = Workshop::new();
    let files = || {
        fs::read_dir(workshop.path(""))
            .unwrap()
            .filter(|file| !file.as_ref().unwrap().file_name().to_string_lossy().starts_with('.'))
            .count()
    };
    for (format, name, cases) in [("deepspeed", "ds.json", DEEPSPEED), ("accelerate", "a.yaml", ACCELERATE)] {
        for (text, parts) in cases {
            workshop.write(name, text);
            let before = files();
            workshop.run(&["import", format, name]).refuses(2, parts);
            assert_eq!(files(), before, "{text} leaves nothing");
        }
    }
    workshop.run(&["import", "deepspeed", "nowhere.json"]).refuses(2, &["cannot read nowhere.json"]);
    workshop.run(&["import", "deepspeed", "."]).refuses(2, &["a directory"]);
    workshop.write("latin.json", b"{\"a\": \"\xe9\"}");
    workshop.run(&["import", "deepspeed", "latin.json"]).refuses(2, &["latin.json", "not text"]);
    workshop.write("long.json", " ".repeat(2 << 20));
    workshop.run(&["import", "deepspeed", "long.json"]).refuses(2, &["long.json", "longer than 1024 KiB"]);
    workshop.run(&["import", "megatron", "ds.json"]).refuses(2, &["megatron", "deepspeed, accelerate"]);
}
