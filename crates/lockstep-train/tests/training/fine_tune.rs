//! Runs that train a part of a pretrained model.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use lockstep_checkpoint::{Checkpoint, CheckpointError, DType, ModelDirectory, TensorKind};
use lockstep_config::{Resume, RunConfig, resolve_model};
use lockstep_engine::Ranks;
use lockstep_launch::interrupt::Interrupt;
use lockstep_observe::progress::Progress;
use lockstep_train::{Error, Summary, train};

/// Configuration of the model that is fine-tuned.
const BASE: &str = r#"
[model]
preset = "llama-15m"
hidden_size = 32
intermediate_size = 56
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 24
"#;

/// A model whose fused `c_attn` is split into three layers here.
const GPT2: &str = r#"
[model]
preset = "baby-gpt"
n_layer = 2
n_embd = 36
n_head = 3
n_positions = 24
"#;

/// A directory with a text and a pretrained model, in which runs keep all their files.
pub(crate) struct Bench(tempfile::TempDir);

impl Bench {
    fn new() -> Self {
        Self::of(BASE)
    }

    pub(crate) fn of(base: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let words = ["tape", "shard", "mesh", "rank", "block", "\n"];
        let text: String = (0..1500).map(|i| format!("{} ", words[i * i % 17 % 6])).collect();
        std::fs::write(dir.path().join("text.txt"), text).unwrap();
        let bench = Self(dir);
        bench.run("base", base, &["train.steps=2"], &Resume::Never).unwrap();
        let base = ModelDirectory::open(&bench.step("base", 2)).unwrap();
        base.export_hf(DType::F32, &bench.path("hf")).unwrap();
        bench
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn config(&self, run: &str, model: &str, settings: &[&str]) -> RunConfig {
        let text = format!(
            "{model}\n[data]\ntrain = [{:?}]\ncache_dir = {:?}\n[train]\nglobal_batch = 4\nmicro_batch = 2\n\
             seq_len = 24\n[checkpoint]\ndir = {:?}\n[metrics]\ndir = {:?}\n",
            self.path("text.txt"),
            self.path("cache"),
            self.path(run),
            self.path(run),
        );
        RunConfig::parse(&text, "test", settings).unwrap_or_else(|problems| panic!("{problems}"))
    }

    pub(crate) fn run(
        &self,
        run: &str,
        model: &str,
        settings: &[&str],
        resume: &Resume,
    ) -> Result<Summary, Error> {
        let show = |steps| Progress::as_lines(steps, Box::new(std::io::sink()));
        train(&self.config(run, model, settings), resume, &Ranks::alone(), &Interrupt::default(), show)
    }

    /// Runs training from the pretrained model.
    pub(crate) fn tune(&self, run: &str, settings: &[&str], resume: &Resume) -> Result<Summary, Error> {
        self.run(run, &self.pretrained(), settings, resume)
    }

    pub(crate) fn pretrained(&self) -> String {
        format!("[model]\npath = {:?}\nfrom_pretrained = true\n", self.path("hf"))
    }

    pub(crate) fn step(&self, run: &str, step: u64) -> PathBuf {
        self.path(run).join(format!("step-{step:08}"))
    }
}

pub(crate) fn weights(dir: &Path) -> BTreeMap<String, Vec<u32>> {
    let mut weights = BTreeMap::new();
    let add = |name: &str, values: &[f32]| -> Result<(), CheckpointError> {
        weights.insert(name.to_owned(), values.iter().map(|value| value.to_bits()).collect());
        Ok(())
    };
    ModelDirectory::open(dir).unwrap().for_each_parameter(add).unwrap();
    weights
}

/// Freezes everything except the second layer and the last norm; the output layer is tied to the embedding.
const FREEZE: &str = r#"fine_tune.freeze=["model.layers.0.*", "*embed_tokens*"]"#;

#[test]
fn a_run_that_trains_a_part_changes_and_saves_that_part_and_its_checkpoint_is_the_whole_model() {
    for precision in ["train.precision=f32", "train.precision=bf16"] {
        let bench = Bench::new();
        bench.tune("run", &[FREEZE, precision, "train.steps=3"], &Resume::Never).unwrap();
        let checkpoint = Checkpoint::open(&bench.step("run", 3)).unwrap();
        let is_frozen = |name: &str| name.contains("layers.0.") || name.contains("embed_tokens");
        let saved = &checkpoint.manifest().tensors;
        assert!(!saved.is_empty() && saved.iter().all(|entry| !is_frozen(&entry.name)), "{saved:?}");
        let (before, after) = (weights(&bench.path("hf")), weights(&bench.step("run", 3)));
        assert!(before.keys().eq(after.keys()));
        for (name, values) in &after {
            assert_eq!(*values == before[name], is_frozen(name), "{name}, {precision}");
        }
        // The exported directory is the same complete model.
        let exported = bench.path("out");
        ModelDirectory::open(&bench.step("run", 3)).unwrap().export_hf(DType::F32, &exported).unwrap();
        assert!(weights(&exported) == after, "{precision}");
    }
}

#[test]
fn a_run_that_trains_a_part_resumes_bit_for_bit() {
    for precision in ["train.precision=f32", "train.precision=bf16"] {
        let bench = Bench::new();
        let factors = r#"optimizer.lr_multipliers={ "*.mlp.*" = 0.5 }"#;
        let settings = |steps| [FREEZE, factors, precision, "schedule.kind=constant", steps];
        bench.tune("whole", &settings("train.steps=6"), &Resume::Never).unwrap();
        bench.tune("parts", &settings("train.steps=3"), &Resume::Never).unwrap();
        bench.tune("parts", &settings("train.steps=6"), &Resume::Auto).unwrap();
        assert!(weights(&bench.step("whole", 6)) == weights(&bench.step("parts", 6)), "{precision}");
        let read = |run: &str| {
            let checkpoint = Checkpoint::open(&bench.step(run, 6)).unwrap();
            let mut values = vec![0.0; 32];
            checkpoint.read("model.norm.weight", &TensorKind::ExpAvgSq, 0, &mut values).unwrap();
            values
        };
        assert_eq!(read("whole"), read("parts"), "{precision}");
    }
}

#[test]
fn a_checkpoint_of_a_part_is_refused_with_another_base_or_none() {
    let bench = Bench::new();
    let settings = [FREEZE, "train.steps=2"];
    bench.tune("run", &settings, &Resume::Never).unwrap();
    let file = bench.path("hf/model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let reading = ModelDirectory::open(&bench.step("run", 2))
        .unwrap()
        .for_each_parameter(|_, _| Ok::<(), CheckpointError>(()));
    assert!(matches!(reading, Err(CheckpointError::BaseModelChanged { .. })), "{reading:?}");
    let resuming = bench.tune("run", &[FREEZE, "train.steps=4"], &Resume::From(bench.step("run", 2)));
    let changed =
        |error: &Error| matches!(error, Error::Checkpoint(CheckpointError::BaseModelChanged { .. }));
    assert!(resuming.as_ref().is_err_and(changed), "{resuming:?}");
    std::fs::remove_dir_all(bench.path("hf")).unwrap();
    let missing = ModelDirectory::open(&bench.step("run", 2)).unwrap_err().to_string();
    assert!(missing.contains("hf") && missing.contains("step-00000002"), "{missing}");
}

#[test]
fn factors_on_the_learning_rate_follow_the_longest_pattern() {
    let bench = Bench::new();
    let factors = r#"optimizer.lr_multipliers={ "*" = 1e-12, "*.mlp.*" = 1.0, "*.mlp.up_proj.*" = 1e-12 }"#;
    bench.tune("run", &[factors, "optimizer.weight_decay=0.0", "train.steps=1"], &Resume::Never).unwrap();
    let (before, after) = (weights(&bench.path("hf")), weights(&bench.step("run", 1)));
    for (name, values) in &after {
        let moves = name.contains(".mlp.") && !name.contains("up_proj");
        let moved = values
            .iter()
            .zip(&before[name])
            .any(|(a, b)| (f32::from_bits(*a) - f32::from_bits(*b)).abs() > 1e-7);
        assert_eq!(moved, moves, "{name}");
    }
}

#[test]
fn a_pattern_that_describes_nothing_is_refused_with_names_that_are_near() {
    let bench = Bench::new();
    for (setting, expected) in [
        (r#"fine_tune.freeze=["*.mpl.*"]"#, &["fine_tune.freeze", "*.mpl.*", "model.layers.0.mlp."][..]),
        (r#"fine_tune.freeze=["model.layer.0.*"]"#, &["model.layers.0."]),
        (r#"fine_tune.freeze=["*"]"#, &["nothing to train"]),
        (r#"optimizer.decay=["model.norm"]"#, &["optimizer.decay", "model.norm.weight"]),
        (r#"optimizer.lr_multipliers={ "lm_had*" = 0.5 }"#, &["optimizer.lr_multipliers", "lm_had*"]),
        (r#"optimizer.lr_multipliers={ "*" = -1.0 }"#, &["> 0"]),
        (r#"optimizer.lr_multipliers={ "*" = "a" }"#, &["a table of numbers"]),
        ("optimizer.lr_multipliers=0.5", &["a table of numbers"]),
    ] {
        let text = format!("{}[train]\nseq_len = 24\n", bench.pretrained());
        let problem = match RunConfig::parse(&text, "test", &[setting]) {
            Ok(config) => resolve_model(&config).unwrap_err().to_string(),
            Err(problems) => problems.to_string(),
        };
        for part in expected {
            assert!(problem.contains(part), "{setting}: `{part}` is not in: {problem}");
        }
    }
    let without = RunConfig::parse(BASE, "test", &[FREEZE]).unwrap_err().to_string();
    assert!(without.contains("from_pretrained"), "{without}");
}

/// Returns settings for an adapter with dropout on an attention and a feed-forward projection, by the family's names.
fn lora(model: &str) -> [&'static str; 3] {
    let targets = if model == GPT2 {
        r#"fine_tune.lora_targets=["c_attn", "mlp.c_proj"]"#
    } else {
        r#"fine_tune.lora_targets=["q_proj", "down_proj"]"#
    };
    ["fine_tune.lora_rank=3", "fine_tune.lora_dropout=0.2", targets]
}

fn is_adapted(name: &str) -> bool {
    let ends = ["attn.q", "attn.k", "attn.v", "mlp.c_proj", "self_attn.q_proj", "mlp.down_proj"];
    name.strip_suffix(".weight").is_some_and(|layer| ends.iter().any(|end| layer.ends_with(end)))
}

fn values(weights: &[u32]) -> impl Iterator<Item = f32> + '_ {
    weights.iter().map(|bits| f32::from_bits(*bits))
}

#[test]
fn an_adapter_trains_resumes_bit_for_bit_and_is_all_that_a_checkpoint_holds() {
    for model in [BASE, GPT2] {
        for precision in ["train.precision=f32", "train.precision=bf16"] {
            let bench = Bench::of(model);
            let settings = |steps| [&lora(model)[..], &[precision, "schedule.kind=constant", steps]].concat();
            bench.tune("whole", &settings("train.steps=6"), &Resume::Never).unwrap();
            bench.tune("parts", &settings("train.steps=3"), &Resume::Never).unwrap();
            bench.tune("parts", &settings("train.steps=6"), &Resume::Auto).unwrap();
            let checkpoint = Checkpoint::open(&bench.step("whole", 6)).unwrap();
            assert!(checkpoint.manifest().tensors.iter().all(|entry| entry.name.contains(".lora_")));
            let (before, after) = (weights(&bench.path("hf")), weights(&bench.step("whole", 6)));
            assert!(after == weights(&bench.step("parts", 6)), "{precision}");
            for (name, values) in &after {
                assert_eq!(*values != before[name], is_adapted(name), "{name}, {precision}");
            }
        }
    }
}

#[test]
fn an_exported_adapter_is_the_merged_model_and_training_goes_on_from_it() {
    for model in [BASE, GPT2] {
        let bench = Bench::of(model);
        let steps = ["train.steps=4", "fine_tune.lora_scaling=rank_stabilized"];
        bench.tune("run", &[&lora(model)[..], &steps].concat(), &Resume::Never).unwrap();
        let run = ModelDirectory::open(&bench.step("run", 4)).unwrap();
        run.export_adapter(DType::F32, &bench.path("adapter")).unwrap();
        run.export_hf(DType::F32, &bench.path("merged")).unwrap();
        let merged = weights(&bench.path("merged"));
        assert!(merged == weights(&bench.step("run", 4)));
        let hf = ModelDirectory::open(&bench.path("hf")).unwrap();
        let beside = hf.with_adapter(&bench.path("adapter")).unwrap();
        beside
            .for_each_parameter(|name, found| -> Result<(), CheckpointError> {
                for (found, expected) in found.iter().zip(values(&merged[name])) {
                    assert!((found - expected).abs() <= 1e-6, "{name}: {found}, merged {expected}");
                }
                Ok(())
            })
            .unwrap();
        // A negligible learning rate leaves the adapter unchanged.
        let adapter = format!("fine_tune.adapter={:?}", bench.path("adapter"));
        let settings = [adapter.as_str(), "train.steps=1", "optimizer.lr=1e-12"];
        bench.tune("on", &settings, &Resume::Never).unwrap();
        for (name, found) in weights(&bench.step("on", 1)) {
            for (found, expected) in values(&found).zip(values(&merged[&name])) {
                assert!((found - expected).abs() <= 1e-6, "{name}: {found}, merged {expected}");
            }
        }
        let base = ModelDirectory::open(&bench.step("base", 2)).unwrap();
        let error = base.export_adapter(DType::F32, &bench.path("none")).unwrap_err();
        assert!(matches!(error, CheckpointError::NoAdapter { .. }), "{error}");
    }
}

#[test]
fn an_adapter_costs_little_memory() {
    let bench = Bench::new();
    let memory = |run: &str, settings: &[&str]| {
        bench.tune(run, &[settings, &["train.steps=1"]].concat(), &Resume::Never).unwrap();
        let text = std::fs::read_to_string(bench.path(run).join("metrics.jsonl")).unwrap();
        let row: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
        ["gradients", "optimizer"].map(|category| row["memory"][category].as_u64().unwrap())
    };
    // A parameter takes at least one row of 1,024 elements, so in a model this small a single layer is adapted.
    let lora = ["fine_tune.lora_rank=1", r#"fine_tune.lora_targets=["q_proj"]"#];
    let (whole, adapter) = (memory("whole", &[]), memory("adapter", &lora));
    assert!(
        adapter.iter().zip(whole).all(|(adapter, whole)| 2 * adapter < whole),
        "{adapter:?} of {whole:?}"
    );
}

#[test]
fn keys_of_an_adapter_that_contradict_each_other_are_refused() {
    for (settings, expected) in [
        (&["fine_tune.lora_alpha=2.0"][..], "no fine_tune.lora_rank"),
        (&["fine_tune.lora_rank=2", r#"fine_tune.freeze=["*norm*"]"#], "fine_tune.freeze"),
        (&["fine_tune.lora_rank=2", "fine_tune.adapter=there"], "fine_tune.adapter, which has its own"),
        (&["fine_tune.lora_rank=0"], "fine_tune.lora_rank"),
        (&["fine_tune.lora_rank=2", "fine_tune.lora_targets=[]"], "names no layer"),
        (&["fine_tune.lora_rank=2", "fine_tune.lora_scaling=\"loud\""], "rank_stabilized"),
        (&["fine_tune.lora_rank=2", r#"fine_tune.lora_targets=["q_poj"]"#], "q_proj"),
    ] {
        let bench = Bench::new();
        let text = format!("{}[train]\nseq_len = 24\n", bench.pretrained());
        let problem = match RunConfig::parse(&text, "test", settings) {
            Ok(config) => resolve_model(&config).unwrap_err().to_string(),
            Err(problems) => problems.to_string(),
        };
        assert!(problem.contains(expected), "{settings:?}: {problem}");
    }
}
