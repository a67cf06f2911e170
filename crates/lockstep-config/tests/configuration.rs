//! RUN.toml as users write it: values, origins, `--set`, and all kinds of mistakes.
//!
//! Each file under `tests/broken/` ends with one `# expect: TEXT` line per problem that it must raise.

use std::fs;
use std::path::Path;

use lockstep_config::schedule::Decay;
use lockstep_config::{
    DataSource, Error, ModelSource, OptimizerKind, Origin, Precision, Problems, RunConfig, TokenizerSource,
    configuration_markdown, resolve_model,
};
use lockstep_plan::{Initializer, ParameterRecord, Share};
use proptest::prelude::*;

const NOTHING: [&str; 0] = [];

fn parse(text: &str) -> RunConfig {
    RunConfig::parse(text, "RUN.toml", &NOTHING).unwrap_or_else(|problems| panic!("{problems}"))
}

fn set(arguments: &[&str]) -> RunConfig {
    RunConfig::parse("", "RUN.toml", arguments).unwrap_or_else(|problems| panic!("{problems}"))
}

fn problems_of(text: &str, arguments: &[&str]) -> Vec<String> {
    match RunConfig::parse(text, "RUN.toml", arguments) {
        Ok(config) => panic!("accepted: {config:?}"),
        Err(problems) => problems.iter().map(ToString::to_string).collect(),
    }
}

#[test]
fn every_broken_file_gives_exactly_the_problems_it_expects() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/broken");
    let mut failures = Vec::new();
    let mut files = 0;
    for file in fs::read_dir(directory).unwrap() {
        let path = file.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        let name = path.file_name().unwrap().to_str().unwrap();
        let expected: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("# expect: ")).collect();
        assert!(!expected.is_empty(), "{name} expects nothing");
        let problems: Vec<String> = match RunConfig::parse(&text, name, &NOTHING) {
            Ok(_) => Vec::new(),
            Err(problems) => problems.iter().map(ToString::to_string).collect(),
        };
        let found = |text: &&str| problems.iter().any(|problem| problem.contains(*text));
        let located = |problem: &String| problem.starts_with(&format!("{name}:"));
        if problems.len() != expected.len() || !expected.iter().all(found) || !problems.iter().all(located) {
            let list = problems.iter().map(|problem| problem.chars().take(300).collect::<String>());
            failures.push(format!("{name}: expected {expected:#?}, got {:#?}", list.collect::<Vec<_>>()));
        }
        files += 1;
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(files >= 30, "only {files} broken files found");
}

#[test]
fn an_empty_file_is_a_whole_configuration() {
    let config = parse("");
    assert_eq!(config.to_json(), RunConfig::default().to_json());
    assert_eq!(config.model_source(), ModelSource::Preset("llama-15m"));
    assert_eq!((config.train.global_batch, config.micro_batch(), config.accumulation_steps()), (32, 8, 4));
    assert_eq!(config.origin("train.steps"), Origin::Default);
    assert!(config.settings().iter().all(|setting| setting.origin == Origin::Default));
}

#[test]
fn what_one_rank_does_anyway_may_be_said() {
    let text = "[parallel]\ntensor_parallel = 1\nzero_stage = 0\nsequence_parallel = false\n";
    let config = RunConfig::parse(text, "test", &[] as &[&str]).expect("one rank does all of this");
    assert_eq!(config.to_json(), RunConfig::default().to_json());
}

#[test]
fn a_zero_stage_alone_makes_shards_of_the_ranks_that_no_key_counts() {
    let config = set(&["parallel.zero_stage=2"]);
    assert_eq!(config.setting_for_ranks(4).unwrap(), "parallel.data_parallel_shard=4");
    assert!(config.idle_zero_stage().unwrap().contains("--nproc-per-node"), "one rank has no shards");
    assert_eq!(config.zero_stage().number(), 0);
    let sharded = set(&["parallel.zero_stage=2", "parallel.data_parallel_shard=4"]);
    assert_eq!((sharded.ranks(), sharded.zero_stage().number(), sharded.idle_zero_stage()), (4, 2, None));
    let pipeline = set(&["parallel.zero_stage=1", "parallel.pipeline_parallel=2"]);
    assert_eq!(pipeline.setting_for_ranks(8).unwrap(), "parallel.data_parallel_shard=4");
    let hybrid = set(&["parallel.zero_stage=3", "parallel.data_parallel_shard=2"]);
    assert_eq!(hybrid.setting_for_ranks(8).unwrap(), "parallel.data_parallel_replicate=4");
    let replicas = set(&[]);
    assert_eq!(replicas.setting_for_ranks(4).unwrap(), "parallel.data_parallel_replicate=4");
    let problems = problems_of("", &["parallel.zero_stage=2", "parallel.data_parallel_replicate=4"]);
    assert!(problems[0].contains("parallel.data_parallel_shard = 4 in its place"), "{problems:?}");
    let problems = problems_of("", &["parallel.zero_stage=2", "parallel.data_parallel_shard=1"]);
    assert!(problems[0].contains("has no effect with parallel.data_parallel_shard = 1"), "{problems:?}");
}

#[test]
fn what_is_quantized_goes_through_a_plan_and_back() {
    let settings = [
        "parallel.data_parallel_shard=2",
        "parallel.zero_stage=3",
        "parallel.quantize_weights=int8",
        "parallel.quantize_gradients=int4",
        "parallel.quantize_feedback=false",
    ];
    let (config, dir) = (set(&settings), tempfile::tempdir().unwrap());
    let (plan, _) = lockstep_config::plan::check(&config).unwrap();
    let path = dir.path().join("plan.json");
    fs::write(&path, plan.to_json().unwrap()).unwrap();
    let file = lockstep_config::PlanFile::read(&path).unwrap();
    let under =
        |arguments: &[&str]| RunConfig::parse_with("", "RUN.toml", &[], Some(&file), arguments).unwrap();
    assert_eq!(under(&[]).plan.quantization(), config.plan.quantization());
    file.check(&under(&settings)).unwrap();
    let other = file.check(&under(&["parallel.quantize_gradients=int8"])).unwrap_err().to_string();
    assert!(other.contains("quantize_gradients is \"int4\" in the plan"), "{other}");
}

#[test]
fn values_know_their_line_and_arguments_win() {
    let text = "[train]\n# comment\nsteps = 50\nseed = 1\n\n[optimizer]\nlr = 1e-3\n";
    let arguments = ["train.lr=2e-3", "train.seed=5", "train.seed=6"];
    let config = RunConfig::parse(text, "runs/a.toml", &arguments).unwrap();
    assert_eq!((config.train.steps, config.train.seed, config.optimizer.lr), (50, 6, 2e-3));
    assert_eq!(config.origin("train.steps").to_string(), "runs/a.toml:3");
    assert_eq!(config.origin("train.seed").to_string(), "--set train.seed=6");
    assert_eq!(config.origin("optimizer.lr").to_string(), "--set train.lr=2e-3");
    assert_eq!(config.origin("train.seq_len").to_string(), "default");
    let problem = config.problem("train.steps", "is too few for this test", "");
    assert_eq!(problem.to_string(), "runs/a.toml:3: train.steps: is too few for this test");
}

#[test]
fn arguments_take_toml_values_and_bare_words() {
    let config = set(&[
        "data.train=[\"a.txt\", \"b/*.jsonl\"]",
        "train.precision=bf16",
        "model.preset=gpt2-124m",
        "data.tokenizer=some dir/tokenizer.json",
        "checkpoint.dir=2020-01-01",
        "metrics.dir=17",
        "optimizer.betas=[0.9, 0.99]",
        " train.steps = 1_000 ",
        "metrics.jsonl=false",
        "model.rope_scaling.factor=8.0",
        "model.rope_scaling.rope_type=llama3",
        "model.hidden_size=128",
        "model.torch_dtype=bfloat16",
    ]);
    assert!(config.data.train.iter().map(DataSource::path).eq(["a.txt", "b/*.jsonl"]));
    assert_eq!(config.train.precision, Precision::BF16);
    assert_eq!(config.model_source(), ModelSource::Preset("gpt2-124m"));
    assert_eq!(config.data.tokenizer, Some(TokenizerSource::File("some dir/tokenizer.json".into())));
    assert_eq!(config.checkpoint.dir, Path::new("2020-01-01"));
    assert_eq!(config.metrics.dir, Path::new("17"));
    assert_eq!(config.train.steps, 1000);
    assert!(!config.metrics.jsonl);
    let overrides = serde_json::json!({
        "hidden_size": 128, "rope_scaling": {"factor": 8.0, "rope_type": "llama3"}, "torch_dtype": "bfloat16",
    });
    assert_eq!(serde_json::Value::from(config.model.overrides.clone()), overrides);
    assert_eq!(config.origin("model.hidden_size").to_string(), "--set model.hidden_size=128");
}

#[test]
fn an_argument_that_chooses_otherwise_sets_aside_what_the_file_says_of_the_old_choice() {
    let text = "[model]\npath = \"dir\"\n[optimizer]\nbetas = [0.9, 0.99]\n[schedule]\nmin_lr_ratio = 0.2\n";
    let arguments = ["model.preset=gpt2-124m", "optimizer.kind=sgd", "schedule.kind=constant"];
    let config = RunConfig::parse(text, "RUN.toml", &arguments).unwrap();
    assert_eq!(config.model_source(), ModelSource::Preset("gpt2-124m"));
    assert_eq!(config.learning_rate().at(999), 3e-4);
    let problems =
        problems_of("", &["model.preset=a", "model.path=b", "optimizer.kind=sgd", "optimizer.eps=1e-6"]);
    assert_eq!(problems.len(), 2, "{problems:#?}");
}

#[test]
fn broken_arguments_are_named_with_what_is_allowed() {
    let cases = [
        ("train.steps", "--set train.steps: has no '='; allowed: --set section.key=VALUE"),
        ("lr=3", "--set lr=3: lr: is not the name of a key; the nearest is optimizer.lr"),
        (
            "train..steps=3",
            "--set train..steps=3: train..steps: is not the name of a key; the nearest is train.steps",
        ),
        ("=3", "is not the name of a key"),
        ("optim.lr=3", "--set optim.lr=3: [optim]: unknown section; the nearest is [optimizer]"),
        ("train.stpes=3", "--set train.stpes=3: train.stpes: unknown key; the nearest is train.steps"),
        ("train.steps.more=3", "train.steps.more: unknown key; the nearest is train.steps"),
        ("train.steps=many", "train.steps: is the string \"many\"; allowed: an integer"),
        ("train.steps=", "train.steps: broken TOML value"),
        ("data.train=[\"a.txt\"", "data.train: broken TOML value"),
        ("data.train=7", "data.train: is the number 7; allowed: a list of strings"),
        ("train.epochs=3", "train.epochs: is no key here; allowed: train.steps; an epoch has as many as"),
        (
            "train.precision=fp8",
            "train.precision: is the string \"fp8\"; allowed: \"bf16\"; fp8 is not available",
        ),
        ("learning_rate=1", "lr, below the line [optimizer]; as an argument --set optimizer.lr=VALUE"),
        ("train.precision=f8", "train.precision: is the string \"f8\"; allowed: \"f32\", \"bf16\", \"f16\""),
        ("parallel.offload=1", "parallel.offload: unknown key; the nearest is parallel.offload."),
        (
            "parallel.offload={ optimiser = \"disk\" }",
            "parallel.offload.optimiser: unknown key; the nearest is parallel.offload.optimizer",
        ),
        ("elastic.min_nodes=1", "elastic.min_nodes: is not supported yet"),
        ("optimizer.lr=1e999", "optimizer.lr: 1e999 is not a finite number"),
        ("train.steps=3\ntrain.seed=4", "train.steps: broken TOML value"),
    ];
    for (argument, expected) in cases {
        let problems = problems_of("", &[argument]);
        assert!(problems.len() == 1 && problems[0].contains(expected), "{argument}: {problems:#?}");
    }
    let problems = problems_of("", &["model.x=1", "model.x.y=2"]);
    assert!(problems[0].contains("model.x.y: 1 is set there, which is not a table"), "{problems:?}");
}

#[test]
fn problems_come_in_the_order_of_the_text_and_spare_refused_values_their_consequences() {
    let text = "[optimizer]\nlr = -1\n[train]\nglobal_batch = 0\nmicro_batch = 7\nstpes = 1\n[zzz]\n";
    let problems = problems_of(text, &["metrics.dirr=x"]);
    let starts: Vec<&str> = problems.iter().map(|problem| problem.split(": ").next().unwrap()).collect();
    let expected = ["RUN.toml:2", "RUN.toml:4", "RUN.toml:6", "RUN.toml:7", "--set metrics.dirr=x"];
    assert_eq!(starts, expected, "{problems:#?}");
}

#[test]
fn broken_syntax_shows_the_line_it_is_in() {
    let problems = RunConfig::parse("[train]\nsteps = = 3\n", "RUN.toml", &NOTHING).unwrap_err();
    let text = problems.to_string();
    assert!(text.starts_with("the configuration has a problem:\n  RUN.toml:2: TOML parse error"), "{text}");
    assert!(text.contains("2 | steps = = 3"), "{text}");
}

#[test]
fn files_that_cannot_be_read_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let binary = dir.path().join("binary.toml");
    fs::write(&binary, [0xff, 0xfe, 0x00]).unwrap();
    let huge = dir.path().join("huge.toml");
    fs::write(&huge, "#".repeat(2 << 20)).unwrap();
    let missing = dir.path().join("missing.toml");
    for path in [binary.as_path(), &huge, &missing, dir.path()] {
        let message = RunConfig::load(Some(path), &NOTHING).unwrap_err().to_string();
        let expected = format!("cannot read the configuration {}: ", path.display());
        assert!(message.starts_with(&expected), "{message}");
    }
    let file = dir.path().join("run.toml");
    fs::write(&file, "\u{feff}[train]\r\nsteps = 7\r\n").unwrap();
    assert_eq!(RunConfig::load(Some(&file), &NOTHING).unwrap().train.steps, 7);
    assert_eq!(RunConfig::load(None, &["train.steps=8"]).unwrap().train.steps, 8);
}

#[test]
fn derived_values_follow_from_the_given_ones() {
    let rate = |text: &str| parse(text).learning_rate();
    let default = rate("");
    assert_eq!((default.warmup_steps, default.decay_steps, default.decay), (100, 900, Decay::Cosine));
    let short = rate("[train]\nsteps = 100\n[schedule]\nkind = \"wsd\"");
    assert_eq!((short.warmup_steps, short.decay_steps, short.decay), (10, 20, Decay::Sqrt));
    let constant = rate("[schedule]\nkind = \"constant\"\nwarmup_steps = 0");
    assert_eq!((constant.at(0), constant.at(999)), (3e-4, 3e-4));
    for (steps, warmup) in [(1, 0), (8, 0), (40, 10), (100, 10), (500, 50), (1000, 100), (100_000, 100)] {
        assert_eq!(rate(&format!("[train]\nsteps = {steps}")).warmup_steps, warmup, "{steps} steps");
    }
    let one = rate("[train]\nsteps = 1");
    assert_eq!(one.at(0), 3e-4);
    for (global_batch, micro_batch) in [(1, 1), (7, 7), (12, 6), (13, 1), (64, 8)] {
        assert_eq!(set(&[&format!("train.global_batch={global_batch}")]).micro_batch(), micro_batch);
    }
    assert_eq!(parse("").tokens_per_step(), 32 * 256);
    assert_eq!(set(&["data.cache_dir=here"]).cache_dir(), Path::new("here"));
    assert!(parse("").cache_dir().ends_with("lockstep"));
}

#[test]
fn patterns_choose_which_parameters_decay() {
    let record = |name: &str, decay| ParameterRecord {
        share: Share::default(),
        name: name.to_owned(),
        shape: vec![4, 4],
        initializer: Initializer::Zeros,
        tie: None,
        unit: 0,
        buffer: lockstep_plan::BufferUnit::alone(0),
        trainable: true,
        block_format: None,
        decay,
        learning_rate_multiplier: 1.0,
    };
    let (matrix, norm) =
        (record("model.layers.0.mlp.up_proj.weight", true), record("model.norm.weight", false));
    let decays = |patterns: &str| {
        let config = parse(&format!("[optimizer]\n{patterns}"));
        (config.optimizer.decays(&matrix), config.optimizer.decays(&norm))
    };
    assert_eq!(decays(""), (true, false));
    assert_eq!(decays("decay = []"), (false, false));
    assert_eq!(decays("decay = [\"*\"]"), (true, true));
    assert_eq!(decays("decay = [\"*.mlp.*\"]"), (true, false));
    assert_eq!(decays("decay = [\"*norm*\", \"lm_head.weight\"]"), (false, true));
    assert_eq!(decays("decay = [\"model.norm\", \"*.mlp\", \"norm.*\"]"), (false, false));
    assert_eq!(decays("decay = [\"model.layers.*.mlp.*_proj.weight\"]"), (true, false));
    assert_eq!(decays("decay = [\"model.norm.weight*weight\"]"), (false, false));
}

#[test]
fn the_fingerprint_changes_with_what_decides_the_numbers_and_with_nothing_else() {
    let base = parse("").fingerprint();
    assert_eq!(base.len(), 64);
    for same in [
        "train.micro_batch=4",
        "train.threads=1",
        "train.log_every=3",
        "train.eval_every=0",
        "checkpoint.dir=elsewhere",
        "metrics.jsonl=false",
        "parallel.recompute=full",
        "data.cache_dir=x",
        "model.preset=llama-15m",
        "schedule.warmup_steps=100",
        "train.lr=0.0003",
    ] {
        assert_eq!(set(&[same]).fingerprint(), base, "{same}");
    }
    for other in [
        "train.seed=1",
        "train.steps=999",
        "train.global_batch=16",
        "train.seq_len=128",
        "train.precision=bf16",
        "train.lr=0.0004",
        "model.hidden_size=64",
        "model.rope_scaling.factor=8.0",
        "optimizer.kind=sgd",
        "optimizer.decay=[]",
        "schedule.kind=linear",
        "data.order=sequential",
        "data.train=[\"x\"]",
    ] {
        assert_ne!(set(&[other]).fingerprint(), base, "{other}");
    }
    let constant =
        |steps: &str| set(&["schedule.kind=constant", "schedule.warmup_steps=5", steps]).fingerprint();
    assert_eq!(constant("train.steps=10"), constant("train.steps=20"), "more steps at a constant rate");
}

/// A run records its settings; parsing the record, with further arguments, yields the same run.
#[test]
fn what_a_run_records_of_itself_is_the_run() {
    const TEXT: &str = r#"
        [model]
        preset = "llama-15m"
        hidden_size = 64
        rope_scaling = { rope_type = "linear", factor = 2.0 }
        [data]
        train = ["a.txt", { path = "b/*.txt", weight = 0.3 }]
        [optimizer]
        kind = "lion"
        decay = ["*.weight"]
        lr_multipliers = { "lm_head.*" = 0.5 }
        [parallel]
        recompute = { default = "none", layers = [{ from = 1, to = 2, every = 1, mode = "full" }] }
        offload = { optimizer = "disk" }
        [checkpoint]
        dir = "elsewhere"
    "#;
    let configs = [
        parse(""),
        parse(TEXT),
        set(&["train.seed=9007199254740993", "train.lr=3e-4", "data.tokenizer=a/tokenizer.json"]),
        set(&[
            "parallel.wrap=[\"model.layers.*\"]",
            "parallel.data_parallel_shard=2",
            "parallel.zero_stage=3",
            "parallel.pipeline_parallel=2",
            "train.micro_batch=4",
        ]),
    ];
    for config in configs {
        let recorded = RunConfig::recorded(&config.recorded_settings(), "run.json");
        let recorded = recorded.unwrap_or_else(|problems| panic!("{problems}"));
        assert_eq!(recorded.to_json(), config.to_json());
        let more = config.with_settings(&["train.steps=77"]).unwrap_or_else(|problems| panic!("{problems}"));
        let mut expected = config.to_json();
        expected["train"]["steps"] = 77.into();
        assert_eq!(more.to_json()["train"]["steps"], expected["train"]["steps"]);
        assert_eq!(more.origin("model.hidden_size"), config.origin("model.hidden_size"));
        assert_eq!(more.to_json()["parallel"], expected["parallel"]);
    }
}

#[test]
fn differences_from_a_stored_configuration_are_listed() {
    let stored = set(&["train.seed=1", "train.micro_batch=2", "model.hidden_size=64"]).to_json();
    let differences = set(&["optimizer.lr=0.5"]).differences(&stored);
    let lines: Vec<String> = differences.iter().map(ToString::to_string).collect();
    let expected = [
        "model.hidden_size was 64, is not set",
        "optimizer.lr was 0.0003, is 0.5",
        "train.seed was 1, is 1337",
    ];
    assert_eq!(lines, expected);
    assert!(parse("").differences(&parse("").to_json()).is_empty());
    assert!(!parse("").differences(&serde_json::Value::Null).is_empty());
}

#[test]
fn a_stored_configuration_is_the_same_again_and_what_follows_goes_on_to_follow() {
    for arguments in [
        &[][..],
        &["train.global_batch=12", "optimizer.kind=lion", "model.hidden_size=64"],
        &["train.steps=40", "schedule.kind=wsd", "parallel.data_parallel_replicate=2"],
        &[
            "schedule.warmup_steps=7",
            "schedule.decay_steps=30",
            "train.micro_batch=2",
            "train.spike_factor=3",
        ],
        &["parallel.offload.optimizer=disk", "data.train=[{path='a', weight=0.5}, 'b']"],
        &["schedule.scale_lr=sqrt", "schedule.scale_lr_batch=8"],
    ] {
        let config = set(arguments);
        let stored = RunConfig::stored(&config.to_json(), "a checkpoint").unwrap();
        assert_eq!(stored.to_json(), config.to_json(), "{arguments:?}");
        let more = |config: &RunConfig| config.with_settings(&["train.steps=2000"]).unwrap().to_json();
        assert_eq!(more(&stored), more(&config), "{arguments:?}");
        let printed = parse(&config.to_toml());
        assert_eq!(printed.to_json(), config.to_json(), "{arguments:?}: {}", config.to_toml());
    }
}

#[test]
fn the_learning_rate_grows_with_the_batch_as_asked() {
    let peak = |arguments: &[&str]| set(arguments).learning_rate().peak;
    let batch = ["train.global_batch=64", "optimizer.lr=1e-3"];
    assert_eq!(peak(&batch), 1e-3);
    for (rule, of_16, of_256) in [("linear", 4e-3, 0.25e-3), ("sqrt", 2e-3, 0.5e-3)] {
        let rule = format!("schedule.scale_lr={rule}");
        let of = |more: &[&str]| peak(&[&batch[..], &[&rule], more].concat());
        assert!((of(&["schedule.scale_lr_batch=16"]) - of_16).abs() < 1e-12, "{rule}");
        assert!((of(&[]) - of_256).abs() < 1e-12, "{rule}");
    }
}

#[test]
fn the_stored_configuration_is_resolved() {
    let config = set(&["train.global_batch=12", "optimizer.kind=sgd", "model.hidden_size=64"]);
    assert_eq!(config.optimizer.kind, OptimizerKind::Sgd);
    let json = config.to_json();
    for (pointer, value) in [
        ("/train/micro_batch", serde_json::json!(6)),
        ("/train/precision", "f32".into()),
        ("/optimizer/kind", "sgd".into()),
        ("/model/preset", "llama-15m".into()),
        ("/model/hidden_size", 64.into()),
        ("/schedule/warmup_steps", 100.into()),
        ("/schedule/decay_steps", 900.into()),
        ("/derived/accumulation_steps", 2.into()),
        ("/derived/tokens_per_step", 3072.into()),
    ] {
        assert_eq!(json.pointer(pointer), Some(&value), "{pointer}");
    }
}

#[test]
fn ranks_that_cannot_share_the_model_are_refused_all_at_once_where_they_were_set() {
    let text = "[model]\npreset = \"llama-15m\"\nnum_attention_heads = 8\nhidden_size = 64\nnum_key_value_heads = 4\n\
                intermediate_size = 100\n[train]\nseq_len = 32\n[parallel]\ntensor_parallel = 3\nsequence_parallel = true\n";
    let problems = |arguments: &[&str]| -> Vec<String> {
        let config =
            RunConfig::parse(text, "RUN.toml", arguments).unwrap_or_else(|problems| panic!("{problems}"));
        match resolve_model(&config) {
            Ok(_) => Vec::new(),
            Err(Error::Configuration(problems)) => problems.iter().map(ToString::to_string).collect(),
            Err(error) => panic!("{error}"),
        }
    };
    assert_eq!(
        problems(&[]),
        [
            "RUN.toml:10: parallel.tensor_parallel: tensor 3 does not divide the 8 attention heads; nearest: 2 or 4",
            "RUN.toml:10: parallel.tensor_parallel: tensor 3 is neither a divisor nor a multiple of the 4 key/value heads; \
             nearest: 2 or 4",
            "RUN.toml:10: parallel.tensor_parallel: tensor 3 does not divide the 100 columns of the feed-forward layers; \
             nearest: 2 or 4",
            "RUN.toml:8: train.seq_len: seq_len 32 is not a multiple of context x tensor = 3; nearest: 30 or 33",
        ]
    );
    assert_eq!(problems(&["parallel.tensor_parallel=4"]), NOTHING);
    assert_eq!(
        problems(&[
            "parallel.tensor_parallel=4",
            "model.vocab_size=3",
            "train.seq_len=10",
            "train.micro_batch=1"
        ]),
        [
            "--set parallel.tensor_parallel=4: parallel.tensor_parallel: tensor 4 leaves ranks without a token of the \
             vocabulary of 3; nearest: 3",
            "--set train.seq_len=10: train.seq_len: seq_len 10 is not a multiple of context x tensor = 4; nearest: 8 or 12",
        ]
    );
    assert_eq!(
        problems(&["parallel.tensor_parallel=1"]),
        NOTHING,
        "an argument sets aside what depends on the file's choice"
    );
}

/// With LOCKSTEP_WRITE_DOCS set, writes the file instead; `cargo xtask docs` does so.
#[test]
fn the_manual_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/configuration.md");
    let expected = configuration_markdown();
    if std::env::var_os("LOCKSTEP_WRITE_DOCS").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, &expected).unwrap();
    }
    let written = fs::read_to_string(&path).unwrap_or_default();
    let line = written.lines().zip(expected.lines()).position(|(a, b)| a != b);
    assert!(
        written == expected,
        "docs/configuration.md is out of date (from line {}); run `cargo xtask docs`",
        line.map_or(1, |line| line + 1)
    );
}

#[test]
fn the_schema_knows_every_key() {
    let schema = lockstep_config::configuration_schema();
    for key in lockstep_config::KEYS.iter() {
        let pointer: String = key.name.split('.').map(|part| format!("/properties/{part}")).collect();
        let found = schema.pointer(&pointer).unwrap_or_else(|| panic!("{} is not in the schema", key.name));
        assert!(found["description"].as_str().is_some_and(|text| text.starts_with(&key.doc)), "{}", key.name);
    }
    assert_eq!(schema["properties"]["train"]["properties"]["steps"]["minimum"], 1);
    assert_eq!(schema["properties"]["optimizer"]["properties"]["lr"]["exclusiveMinimum"], 0.0);
}

#[test]
fn the_first_example_of_the_manual_is_accepted() {
    let line =
        configuration_markdown().lines().find(|line| line.contains("--set")).unwrap().replace('\'', "");
    let arguments: Vec<&str> = line.split(" --set ").skip(1).map(str::trim).collect();
    assert_eq!(arguments.len(), 3);
    assert_eq!(set(&arguments).optimizer.lr, 3e-4);
}

fn accepted_or_located(result: Result<RunConfig, Problems>) -> Result<(), TestCaseError> {
    if let Err(problems) = result {
        prop_assert!(problems.iter().count() > 0);
        prop_assert!(problems.iter().all(|problem| problem.origin != Origin::Default), "{problems}");
    }
    Ok(())
}

proptest! {
    #[test]
    fn no_text_makes_it_panic(text in "\\PC{0,80}|[\\[\\]a-z=\".{}\n, 0-9-]{0,80}", argument in "\\PC{0,40}") {
        accepted_or_located(RunConfig::parse(&text, "RUN.toml", &NOTHING))?;
        accepted_or_located(RunConfig::parse("", "RUN.toml", &[argument]))?;
    }

    #[test]
    fn any_value_of_any_key_is_accepted_or_refused_at_its_line(
        key in prop::sample::select(lockstep_config::KEYS.iter().map(|key| key.name).collect::<Vec<_>>()),
        value in "-?[0-9]{1,20}|-?[0-9]\\.[0-9]e-?[0-9]{1,3}|true|\"[a-z0-9]{0,9}\"|\\[([0-9],){0,3}\\]|\\{\\}",
    ) {
        let (section, name) = key.split_once('.').unwrap();
        let text = format!("[{section}]\n{name} = {value}\n");
        let result = RunConfig::parse(&text, "RUN.toml", &NOTHING);
        if let Ok(config) = &result {
            prop_assert_eq!(config.origin(key).to_string(), "RUN.toml:2");
            let rate = config.learning_rate();
            for step in [0, config.train.steps / 2, config.train.steps - 1] {
                prop_assert!(rate.at(step).is_finite() && rate.at(step) >= 0.0);
            }
            let of_replica = config.micro_batch() * config.accumulation_steps();
            prop_assert_eq!(of_replica * config.plan.mesh.replicate, config.train.global_batch);
        }
        accepted_or_located(result)?;
    }
}
