//! Whole runs of a tiny model: the effects of resuming, threads, recomputation and values that are not finite.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use lockstep_checkpoint::hf::HfCheckpoint;
use lockstep_checkpoint::{Checkpoint, CheckpointError, ModelDirectory, RunLock, TensorKind};
use lockstep_config::{Resume, RunConfig};
use lockstep_engine::{Engine, Ranks};
use lockstep_launch::interrupt::Interrupt;
use lockstep_observe::metrics::StepMetrics;
use lockstep_observe::progress::Progress;
use lockstep_plan::DType;
use lockstep_train::{Error, StepObserver, Summary, train, train_observed};
use serde_json::Value;

/// A GPT-2 with dropout, two micro-batches per step and matrices of odd sizes.
const GPT2: &str = r#"
[model]
preset = "baby-gpt"
n_layer = 2
n_embd = 36
n_head = 3
n_positions = 24

[train]
global_batch = 4
micro_batch = 2
seq_len = 24
dropout = 0.1
"#;

/// A Llama with grouped-query attention and an untied output layer.
const LLAMA: &str = r#"
[model]
preset = "llama-15m"
hidden_size = 32
intermediate_size = 56
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 24
tie_word_embeddings = false

[train]
global_batch = 4
micro_batch = 4
seq_len = 24
"#;

/// A directory with a text, in which runs keep all their files.
struct Bench(tempfile::TempDir);

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let words = ["tape", "shard", "mesh", "rank", "block", "\n"];
        let text: String = (0..1500).map(|i| format!("{} ", words[i * i % 17 % 6])).collect();
        std::fs::write(dir.path().join("text.txt"), text).unwrap();
        Self(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn config(&self, run: &str, model: &str, settings: &[&str]) -> RunConfig {
        let text = format!(
            "{model}\n[data]\ntrain = [{:?}]\ncache_dir = {:?}\n[checkpoint]\ndir = {:?}\n[metrics]\ndir = {:?}\n",
            self.path("text.txt"),
            self.path("cache"),
            self.path(run),
            self.path(run),
        );
        RunConfig::parse(&text, "test", settings).unwrap()
    }

    fn train(&self, run: &str, model: &str, settings: &[&str]) -> Summary {
        self.resume(run, model, settings, &Resume::Never)
    }

    fn resume(&self, run: &str, model: &str, settings: &[&str], resume: &Resume) -> Summary {
        quietly(&self.config(run, model, settings), resume, &Interrupt::default()).unwrap()
    }

    fn step(&self, run: &str, step: u64) -> PathBuf {
        self.path(run).join(format!("step-{step:08}"))
    }

    fn rows(&self, run: &str) -> Vec<Value> {
        let text = std::fs::read_to_string(self.path(run).join("metrics.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn losses(&self, run: &str) -> Vec<f64> {
        self.rows(run).iter().filter_map(|row| row.get("loss")?.as_f64()).collect()
    }
}

/// Runs [`train`] without output.
fn quietly(config: &RunConfig, resume: &Resume, interrupt: &Interrupt) -> Result<Summary, Error> {
    train(config, resume, &Ranks::alone(), interrupt, |steps| {
        Progress::as_lines(steps, Box::new(std::io::sink()))
    })
}

/// A writer whose content the test can read.
#[derive(Clone, Default)]
struct Shown(Arc<Mutex<Vec<u8>>>);

impl Shown {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl Write for Shown {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Asserts that two checkpoints hold the same tensors, bit for bit.
#[track_caller]
fn assert_same_state(left: &Path, right: &Path) {
    let (left, right) = (Checkpoint::open(left).unwrap(), Checkpoint::open(right).unwrap());
    assert_eq!(left.manifest().tensors.len(), right.manifest().tensors.len());
    for entry in &left.manifest().tensors {
        let read = |checkpoint: &Checkpoint| {
            let mut values = vec![0.0_f32; entry.elements()];
            checkpoint.read(&entry.name, &entry.kind, 0, &mut values).unwrap();
            values
        };
        let (a, b) = (read(&left), read(&right));
        let differing = a.iter().zip(&b).position(|(a, b)| a.to_bits() != b.to_bits());
        if let Some(at) = differing {
            panic!("{} {:?}, element {at}: {} and {}", entry.name, entry.kind, a[at], b[at]);
        }
    }
}

#[test]
fn a_resumed_run_equals_the_uninterrupted_one_bit_for_bit() {
    let sgd = ["optimizer.kind=\"sgd\"", "optimizer.momentum=0.9", "optimizer.lr=0.1"];
    let muon = ["optimizer.kind=\"muon\"", "optimizer.lr=1e-3"];
    let narrow = [
        "train.precision=\"bf16\"",
        "train.master_weights=false",
        "optimizer.state_precision=\"bf16\"",
        "optimizer.rounding=\"stochastic\"",
    ];
    let cases: [(&str, &str, &[&str]); 8] = [
        ("gpt2", GPT2, &[]),
        ("llama", LLAMA, &[]),
        ("bf16", GPT2, &["train.precision=\"bf16\""]),
        ("sgd", LLAMA, &sgd),
        ("lion", GPT2, &["optimizer.kind=\"lion\"", "optimizer.lr=1e-4"]),
        ("muon", LLAMA, &muon),
        ("narrow", GPT2, &narrow),
        // The loss scale grows and overflows before the checkpoint and after it.
        ("f16", GPT2, &["train.precision=\"f16\"", "train.loss_scale_window=2", "train.hysteresis=1"]),
    ];
    for (name, model, settings) in cases {
        let bench = Bench::new();
        let settings =
            [settings, &["train.steps=20", "checkpoint.every=10", "schedule.warmup_steps=4"]].concat();
        bench.train("whole", model, &settings);
        bench.resume("resumed", model, &settings, &Resume::From(bench.step("whole", 10)));
        assert_same_state(&bench.step("whole", 20), &bench.step("resumed", 20));
        let (whole, resumed) = (bench.losses("whole"), bench.losses("resumed"));
        assert_eq!(whole[10..], resumed[..], "{name}");
        assert!(whole[19] < whole[0], "{name} learned nothing: {whole:?}");
    }
}

#[test]
fn a_run_asked_to_stop_saves_and_goes_on_without_a_seam() {
    let bench = Bench::new();
    let settings = ["train.steps=6", "checkpoint.every=2"];
    bench.train("whole", GPT2, &settings);
    let config = bench.config("stopped", GPT2, &settings);
    let interrupt = Interrupt::default();
    interrupt.request();
    let summary = quietly(&config, &Resume::Auto, &interrupt).unwrap();
    assert!(summary.interrupted);
    assert_eq!((summary.step, summary.checkpoint), (0, bench.step("stopped", 0)));
    let summary = bench.resume("stopped", GPT2, &settings, &Resume::Auto);
    assert_eq!((summary.step, summary.interrupted), (6, false));
    assert_same_state(&bench.step("whole", 6), &bench.step("stopped", 6));
    assert_eq!(bench.losses("whole"), bench.losses("stopped"));

    // The run is complete: resuming changes nothing and writes nothing twice.
    let rows = bench.rows("stopped").len();
    let summary = bench.resume("stopped", GPT2, &settings, &Resume::Auto);
    assert_eq!((summary.step, summary.loss), (6, None));
    assert_eq!(bench.rows("stopped").len(), rows);
}

#[test]
fn a_save_in_the_background_has_the_bytes_of_one_in_the_foreground() {
    let bench = Bench::new();
    for (name, setting) in [("beside", "checkpoint.async=true"), ("before", "checkpoint.async=false")] {
        bench.train(name, GPT2, &["train.steps=5", "checkpoint.every=1", "checkpoint.keep=0", setting]);
    }
    for step in 1..=5 {
        let tensors = |run| std::fs::read(bench.step(run, step).join("rank-00000.safetensors")).unwrap();
        assert!(tensors("beside") == tensors("before"), "step {step}");
    }
    let memory = &bench.rows("beside")[4]["memory"];
    assert!(memory["snapshot"].as_u64() > Some(0), "the copy is in the ledger: {memory}");
}

#[test]
fn a_save_that_fails_in_the_background_is_told_and_costs_nothing_but_itself() {
    let bench = Bench::new();
    let settings = ["train.steps=6", "checkpoint.every=2"];
    bench.train("whole", GPT2, &settings);
    std::fs::create_dir(bench.path("hindered")).unwrap();
    // Every name under which a save would write is taken and cannot be removed.
    let hindrances =
        [2, 4, 6].map(|step| bench.path("hindered").join(format!(".tmp-step-0000000{step}.{}", u32::MAX)));
    hindrances.iter().for_each(|path| std::fs::write(path, "").unwrap());
    let shown = Shown::default();
    let config = bench.config("hindered", GPT2, &settings);
    let lines = shown.clone();
    let ended = train(&config, &Resume::Never, &Ranks::alone(), &Interrupt::default(), |steps| {
        Progress::as_lines(steps, Box::new(lines))
    });
    let text = shown.text();
    assert!(matches!(ended, Err(Error::Checkpoint(_))), "the last save is not optional: {ended:?}");
    assert_eq!(text.matches("not saved: ").count(), 2, "{text}");
    assert_eq!(bench.losses("hindered"), bench.losses("whole"));
    hindrances.iter().for_each(|path| std::fs::remove_file(path).unwrap());
    bench.resume("hindered", GPT2, &settings, &Resume::Auto);
    assert_same_state(&bench.step("whole", 6), &bench.step("hindered", 6));
}

#[test]
fn threads_and_recomputation_change_no_bit() {
    let bench = Bench::new();
    for (model_name, model) in [("gpt2", GPT2), ("llama", LLAMA)] {
        for precision in ["f32", "bf16", "f16"] {
            let base = ["train.steps=3".to_owned(), format!("train.precision=\"{precision}\"")];
            let run = |name: &str, setting: &str| {
                let run = format!("{model_name}-{precision}-{name}");
                let settings: Vec<&str> = base.iter().map(String::as_str).chain([setting]).collect();
                bench.train(&run, model, &settings);
                bench.step(&run, 3)
            };
            let expected = run("one-thread", "train.threads=1");
            for (name, setting) in [
                ("three-threads", "train.threads=3"),
                ("selective", "parallel.recompute=\"selective\""),
                ("full", "parallel.recompute=\"full\""),
            ] {
                assert_same_state(&expected, &run(name, setting));
            }
        }
    }
}

#[test]
fn a_loss_scale_that_is_too_large_comes_down_without_a_trace_in_the_weights() {
    let bench = Bench::new();
    let f16 = "train.precision=\"f16\"";
    let scaled = |run: &str, settings: &[&str]| {
        bench.train(run, GPT2, &[&["train.steps=24", "schedule.kind=constant", f16], settings].concat())
    };
    let summary = scaled("high", &["train.initial_scale_power=32", "train.hysteresis=1"]);
    let mut rows = bench.rows("high");
    rows.retain(|row| row.get("loss").is_some());
    let skipped = rows.iter().filter(|row| row["skipped"] == true).count() as u64;
    assert!((4..16).contains(&skipped) && summary.skipped == skipped, "{skipped} of {}", summary.skipped);
    let mut expected = 4_294_967_296.0;
    for row in &rows {
        assert_eq!(row["loss_scale"], expected, "{row}");
        expected /= if row["skipped"] == true { 2.0 } else { 1.0 };
    }
    let (losses, last) = (bench.losses("high"), rows.len() - 1);
    assert!(losses[last] < losses[0] && losses.iter().all(|loss| loss.is_finite()), "{losses:?}");
    // A power of two on the loss changes no bit of a gradient without overflow or underflow.
    scaled("fixed", &["train.loss_scale=1024", "train.steps=2"]);
    scaled("other", &["train.loss_scale=2048", "train.steps=2"]);
    for (a, b) in bench.rows("fixed").iter().zip(bench.rows("other")).take(1) {
        let (a, b) = (a["grad_norm"].as_f64().unwrap(), b["grad_norm"].as_f64().unwrap());
        assert!((a - b).abs() <= 1e-3 * a, "{a} and {b}");
    }
    bench.train("exact", GPT2, &["train.steps=24", "schedule.kind=constant"]);
    let (half, exact) = (bench.losses("fixed")[0], bench.losses("exact")[0]);
    assert!((half - exact).abs() <= 2e-3 * exact, "f16 {half}, f32 {exact}");
}

#[test]
fn a_model_that_overflows_at_the_least_scale_ends_the_run() {
    let bench = Bench::new();
    let settings = ["train.steps=40", "train.precision=\"f16\"", "train.loss_scale=4294967296"];
    let config = bench.config("run", GPT2, &settings);
    let error = quietly(&config, &Resume::Never, &Interrupt::default()).unwrap_err();
    assert!(matches!(error, Error::TooManySkipped { step: 10, .. }), "{error}");
}

#[test]
fn kernels_that_share_their_work_among_threads_give_the_same_bits_too() {
    // Large enough that every kernel is split into several tasks.
    let bench = Bench::new();
    let large = ["model.n_embd=144", "train.micro_batch=4", "train.global_batch=4", "model.n_positions=128"];
    let steps = |threads| {
        let run = format!("by-{threads}");
        let threads = format!("train.threads={threads}");
        bench.train(&run, GPT2, &[&large[..], &["train.seq_len=128", "train.steps=2", &threads]].concat());
        bench.step(&run, 2)
    };
    assert_same_state(&steps(1), &steps(3));
}

#[test]
fn cutting_the_global_batch_otherwise_changes_only_rounding() {
    let bench = Bench::new();
    for micro_batch in [1, 2, 4] {
        let setting = format!("train.micro_batch={micro_batch}");
        bench.train(&format!("by-{micro_batch}"), GPT2, &["train.steps=8", &setting]);
    }
    let expected = bench.losses("by-4");
    for run in ["by-1", "by-2"] {
        for (step, (loss, expected)) in bench.losses(run).iter().zip(&expected).enumerate() {
            assert!(
                (loss - expected).abs() <= 1e-4 * expected,
                "{run}, step {}: {loss}, {expected}",
                step + 1
            );
        }
    }
}

/// Exports the weights of `step` as a Hugging Face directory, modified by `change`.
fn export(bench: &Bench, step: &Path, change: impl Fn(&str, &mut [f32])) -> PathBuf {
    let out = bench.path("exported");
    ModelDirectory::open(step).unwrap().export_hf(DType::F32, &out).unwrap();
    let file = out.join("model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let changed: Vec<(String, Vec<usize>, Vec<u8>)> = tensors
        .iter()
        .map(|(name, tensor)| {
            let words =
                tensor.data().chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap()));
            let mut values: Vec<f32> = words.collect();
            change(name, &mut values);
            let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            (name.to_owned(), tensor.shape().to_vec(), bytes)
        })
        .collect();
    let views = changed.iter().map(|(name, shape, bytes)| {
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes);
        (name.as_str(), view.unwrap())
    });
    safetensors::serialize_to_file(views, None, &file).unwrap();
    out
}

/// Returns a configuration that starts from the pretrained model in `exported`.
fn pretrained(exported: &Path) -> String {
    format!(
        "[model]\npath = {exported:?}\nfrom_pretrained = true\n[train]\nglobal_batch = 1\nseq_len = 24\n\
         [optimizer]\nweight_decay = 0.0\n[schedule]\nwarmup_steps = 0\n"
    )
}

#[test]
fn a_step_that_is_not_finite_is_skipped_and_broken_weights_are_not_saved() {
    let bench = Bench::new();
    bench.train("first", LLAMA, &["train.steps=1"]);
    // The embedding of one byte is NaN, and that byte occurs in the third step's window only.
    let hidden = 32;
    let exported = export(&bench, &bench.step("first", 1), |name, values| {
        if name == "model.embed_tokens.weight" {
            values[usize::from(b'#') * hidden..][..hidden].fill(f32::NAN);
        }
    });
    let mut text = std::fs::read(bench.path("text.txt")).unwrap();
    text[2 * 24 + 5] = b'#';
    std::fs::write(bench.path("text.txt"), text).unwrap();
    let model = pretrained(&exported);
    let config = bench.config("guarded", &model, &["data.order=\"sequential\"", "train.steps=4"]);
    let error = quietly(&config, &Resume::Never, &Interrupt::default()).unwrap_err();
    let rows = bench.rows("guarded");
    let skipped: Vec<bool> = rows.iter().filter_map(|row| row.get("skipped")?.as_bool()).collect();
    assert_eq!(skipped, [false, false, true, false]);
    // The fourth loss is finite: the third step has changed no other weight. The NaN that was there from the start prevents the
    // save.
    let loss = rows.iter().rev().find_map(|row| row.get("loss")?.as_f64()).unwrap();
    assert!(loss.is_finite(), "{loss}");
    assert!(matches!(error, Error::WeightsNotFinite { step: 4, .. }), "{error}");
    assert!(!bench.step("guarded", 4).exists());
}

#[test]
fn a_model_that_gives_no_finite_loss_ends_the_run_and_saves_nothing() {
    let bench = Bench::new();
    bench.train("first", LLAMA, &["train.steps=1"]);
    let exported = export(&bench, &bench.step("first", 1), |name, values| {
        if name == "model.norm.weight" {
            values[0] = f32::INFINITY;
        }
    });
    let config = bench.config("broken", &pretrained(&exported), &["train.steps=50"]);
    let error = quietly(&config, &Resume::Never, &Interrupt::default()).unwrap_err();
    assert!(
        matches!(error, Error::TooManySkipped { step: 10, consecutive: 10, last_good: 0, .. }),
        "{error}"
    );
    assert!(!bench.step("broken", 10).exists());
}

#[test]
fn an_exported_model_holds_the_bits_of_the_checkpoint() {
    for (model, fused) in [(GPT2, true), (LLAMA, false)] {
        let bench = Bench::new();
        bench.train("run", model, &["train.steps=2"]);
        let checkpoint = Checkpoint::open(&bench.step("run", 2)).unwrap();
        let exported = export(&bench, &bench.step("run", 2), |_, _| ());
        let names: Vec<String> = HfCheckpoint::open(&exported).unwrap().names().map(str::to_owned).collect();
        assert_eq!(names.iter().any(|name| name.contains("c_attn")), fused, "{names:?}");
        let directory = ModelDirectory::open(&exported).unwrap();
        let mut parameters = 0;
        directory
            .for_each_parameter(|name, values| -> Result<(), Error> {
                let mut expected = vec![0.0; values.len()];
                checkpoint.read(name, &TensorKind::Parameter, 0, &mut expected)?;
                let same = values.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{name}");
                parameters += 1;
                Ok(())
            })
            .unwrap();
        let kept = checkpoint.manifest().tensors.iter().filter(|entry| entry.kind == TensorKind::Parameter);
        assert_eq!(parameters, kept.count());
    }
}

#[test]
fn a_directory_of_checkpoints_serves_one_run_at_a_time() {
    let bench = Bench::new();
    std::fs::create_dir(bench.path("run")).unwrap();
    let lock = RunLock::take(&bench.path("run")).unwrap();
    let config = bench.config("run", LLAMA, &["train.steps=1"]);
    let error = quietly(&config, &Resume::Auto, &Interrupt::default()).unwrap_err();
    assert!(matches!(error, Error::Checkpoint(CheckpointError::Busy { .. })), "{error}");
    drop(lock);
    bench.train("run", LLAMA, &["train.steps=1"]);
}

#[test]
fn a_run_begun_anew_keeps_its_checkpoints_and_those_of_the_run_before() {
    let bench = Bench::new();
    let settings = ["train.steps=6", "checkpoint.every=1", "checkpoint.keep=2"];
    bench.train("run", LLAMA, &settings);
    bench.train("run", LLAMA, &["train.steps=2", "checkpoint.every=1", "checkpoint.keep=2"]);
    let kept = |dir: &str, step: u64| bench.path(dir).join(format!("step-{step:08}")).is_dir();
    assert!(kept("run", 1) && kept("run", 2) && !kept("run", 6));
    assert!(kept("run/earlier-1", 5) && kept("run/earlier-1", 6));
    let rows = std::fs::read_to_string(bench.path("run/earlier-1/metrics.jsonl")).unwrap();
    assert_eq!(rows.lines().filter(|row| row.contains("\"loss\"")).count(), 6);
}

#[test]
fn an_edited_model_is_another_run() {
    let bench = Bench::new();
    bench.train("first", LLAMA, &["train.steps=1"]);
    let exported = export(&bench, &bench.step("first", 1), |_, _| ());
    let model = pretrained(&exported);
    bench.train("run", &model, &["train.steps=1"]);
    let file = exported.join("config.json");
    let text = std::fs::read_to_string(&file).unwrap();
    let edited = text.replace("\"rms_norm_eps\": 0.00001", "\"rms_norm_eps\": 1e-3");
    assert!(edited != text, "{text}");
    std::fs::write(&file, edited).unwrap();
    let config = bench.config("run", &model, &["train.steps=2"]);
    let error = quietly(&config, &Resume::Auto, &Interrupt::default()).unwrap_err();
    assert!(error.to_string().contains("model.rms_norm_eps"), "{error}");
}

#[test]
fn pretrained_weights_must_be_those_of_the_model() {
    let bench = Bench::new();
    bench.train("first", LLAMA, &["train.steps=1"]);
    let exported = export(&bench, &bench.step("first", 1), |_, _| ());
    for (setting, parameter) in [
        ("model.num_hidden_layers=3", "model.layers.2."),
        ("model.tie_word_embeddings=true", "lm_head.weight"),
    ] {
        let config = bench.config("run", &pretrained(&exported), &["train.steps=1", setting]);
        let error = quietly(&config, &Resume::Never, &Interrupt::default()).unwrap_err();
        assert!(matches!(error, Error::OtherParameters { .. }), "{setting}: {error}");
        assert!(error.to_string().contains(parameter), "{setting}: {error}");
    }
}

#[test]
fn other_settings_are_resumed_only_where_the_user_names_the_checkpoint() {
    let bench = Bench::new();
    bench.train("run", LLAMA, &["train.steps=2"]);
    let named = Resume::From(bench.step("run", 2));
    for (setting, fits) in [
        ("train.seed=7", true),
        ("optimizer.lr=1e-4", true),
        ("schedule.kind=\"linear\"", true),
        ("model.hidden_size=64", false),
        ("optimizer.kind=\"sgd\"", false),
    ] {
        let settings = ["train.steps=4", setting];
        let config = bench.config("run", LLAMA, &settings);
        let refused = |resume: &Resume| {
            let error = quietly(&config, resume, &Interrupt::default()).unwrap_err();
            let Error::OtherRun { differences, .. } = &error else { panic!("{setting}: {error}") };
            let key = setting.split('=').next().unwrap();
            assert!(differences.iter().any(|difference| difference.key == key), "{setting}: {error}");
        };
        refused(&Resume::Auto);
        if fits {
            let config = bench.config("continued", LLAMA, &settings);
            let summary = quietly(&config, &named, &Interrupt::default()).unwrap();
            assert_eq!((summary.step, summary.steps_made), (4, 2), "{setting}");
        } else {
            refused(&named);
        }
    }
}

/// Observer that requests a stop a while after the first step.
struct StopsInTheSecondStep(Interrupt);

impl StepObserver for StopsInTheSecondStep {
    fn gradients_ready(&mut self, _: u64, _: &mut Engine) -> Result<(), Error> {
        Ok(())
    }

    fn step_ended(&mut self, row: &StepMetrics) {
        if row.step == 1 {
            let (interrupt, pause) = (self.0.clone(), Duration::from_secs_f64(row.step_ms / 1e3 / 8.0));
            thread::spawn(move || {
                thread::sleep(pause);
                interrupt.request();
            });
        }
    }
}

#[test]
fn a_step_longer_than_the_grace_is_abandoned_and_the_state_before_it_is_saved() {
    let bench = Bench::new();
    // Some hundred micro-batches per step; half of the grace period is much less than the rest of the second step.
    let settings = [
        "train.steps=3",
        "train.global_batch=1024",
        "train.dropout=0.1",
        "train.eval_every=0",
        "checkpoint.grace_s=0.1",
    ];
    bench.train("undisturbed", GPT2, &settings);
    let interrupt = Interrupt::default();
    let shown = Shown::default();
    let out = shown.clone();
    let config = bench.config("stopped", GPT2, &settings);
    let stopped = train_observed(
        &config,
        &Resume::Auto,
        &Ranks::alone(),
        &interrupt,
        |steps| Progress::as_lines(steps, Box::new(out)),
        &mut StopsInTheSecondStep(interrupt.clone()),
    )
    .unwrap();
    assert_eq!((stopped.step, stopped.interrupted), (1, true), "{}", shown.text());
    assert_eq!(stopped.checkpoint, bench.step("stopped", 1));
    let told = "step 2 would take longer than checkpoint.grace_s (0.1 s) allows: abandoned; the state after step 1 is saved";
    assert!(shown.text().contains(told), "{}", shown.text());
    let resumed = bench.resume("stopped", GPT2, &settings, &Resume::Auto);
    assert_eq!((resumed.step, resumed.steps_made), (3, 2));
    assert_same_state(&bench.step("undisturbed", 3), &bench.step("stopped", 3));
    assert_eq!(bench.losses("undisturbed"), bench.losses("stopped"));
}
