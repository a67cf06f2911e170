//! Faults injected between backward and optimizer step: none may reach the weights, and the recovery must not depend on an
//! interruption.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use lockstep_checkpoint::{Checkpoint, TensorKind};
use lockstep_config::{Resume, RunConfig};
use lockstep_engine::{Engine, Ranks};
use lockstep_launch::interrupt::Interrupt;
use lockstep_observe::progress::Progress;
use lockstep_train::{Error, StepObserver, Summary, train_observed};
use serde_json::Value;

const RUN: &str = r#"
[model]
preset = "llama-15m"
hidden_size = 32
intermediate_size = 56
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 16
tie_word_embeddings = false
[train]
global_batch = 4
seq_len = 16
spike_factor = 6
eval_every = 0
[schedule]
kind = "constant"
warmup_steps = 0
"#;

/// Fault in the gradients of a step.
#[derive(Clone, Copy)]
enum Fault {
    Nan,
    Times(f32),
}

/// Observer that injects faults, listed by step.
struct Faults<'a>(&'a [(u64, Fault)]);

impl StepObserver for Faults<'_> {
    fn gradients_ready(&mut self, step: u64, engine: &mut Engine) -> Result<(), Error> {
        let Some((_, fault)) = self.0.iter().find(|(at, _)| *at == step) else { return Ok(()) };
        let ids: Vec<_> = engine.parameter_ids().collect();
        for id in ids {
            let mut gradient = engine.gradient(id).unwrap();
            match fault {
                // One element that is not finite is enough.
                Fault::Nan => gradient[0] = f32::NAN,
                Fault::Times(factor) => gradient.iter_mut().for_each(|g| *g *= factor),
            }
            engine.write_gradient(id, &gradient).unwrap();
        }
        Ok(())
    }
}

struct Bench(tempfile::TempDir);

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let text: String =
            (0..1500).map(|i| ["rank ", "mesh ", "tape\n", "block "][i * i % 13 % 4]).collect();
        std::fs::write(dir.path().join("text.txt"), text).unwrap();
        Self(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn step(&self, run: &str, step: u64) -> PathBuf {
        self.path(run).join(format!("step-{step:08}"))
    }

    fn run(&self, run: &str, settings: &[&str], faults: &[(u64, Fault)]) -> (Result<Summary, Error>, String) {
        let paths = format!(
            "\n[data]\ntrain = [{:?}]\ncache_dir = {:?}\n[checkpoint]\ndir = {:?}\nevery = 0\n[metrics]\ndir = {:?}\n",
            self.path("text.txt"),
            self.path("cache"),
            self.path(run),
            self.path(run),
        );
        let config = RunConfig::parse(&format!("{RUN}{paths}"), "test", settings).unwrap();
        let shown = Arc::new(Mutex::new(Vec::new()));
        let writer = Shown(shown.clone());
        let show = |steps| Progress::as_lines(steps, Box::new(writer));
        let ended = train_observed(
            &config,
            &Resume::Auto,
            &Ranks::alone(),
            &Interrupt::default(),
            show,
            &mut Faults(faults),
        );
        (ended, String::from_utf8(shown.lock().unwrap().clone()).unwrap())
    }

    fn rows(&self, run: &str) -> Vec<Value> {
        let text = std::fs::read_to_string(self.path(run).join("metrics.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

struct Shown(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Shown {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Returns all tensors of a checkpoint, as bits.
fn tensors(path: &Path) -> Vec<(String, TensorKind, Vec<u32>)> {
    let checkpoint = Checkpoint::open(path).unwrap();
    let read = |entry: &lockstep_checkpoint::TensorEntry| {
        let mut values = vec![0.0_f32; entry.elements()];
        checkpoint.read(&entry.name, &entry.kind, 0, &mut values).unwrap();
        (entry.name.clone(), entry.kind.clone(), values.into_iter().map(f32::to_bits).collect())
    };
    checkpoint.manifest().tensors.iter().map(read).collect()
}

#[test]
fn a_nan_and_a_gradient_times_ten_thousand_leave_weights_and_moments_as_they_were() {
    for (name, fault) in [("nan", Fault::Nan), ("spike", Fault::Times(1e4))] {
        let bench = Bench::new();
        bench.run("run", &["train.steps=24"], &[]).0.unwrap();
        let before = tensors(&bench.step("run", 24));
        let (summary, shown) = bench.run("run", &["train.steps=25"], &[(25, fault)]);
        let summary = summary.unwrap();
        assert!(tensors(&bench.step("run", 25)) == before, "{name}: the state has changed");
        assert_eq!((summary.skipped, summary.rollbacks), (1, 0), "{name}");
        assert_eq!(summary.loss, None, "{name}: a skipped step has no loss to report");
        assert!(shown.contains("step 25: ") && shown.contains("step skipped"), "{name}: {shown}");
        assert!(shown.contains("  1 skipped"), "{name}: the line of progress counts it: {shown}");
        let row = bench.rows("run").pop().unwrap();
        let (skipped, count) = (row["skipped"].as_bool(), row["skipped_steps"].as_u64());
        assert_eq!((skipped, count), (Some(true), Some(1)), "{name}: {row}");
    }
}

#[test]
fn without_a_factor_a_spike_is_a_step_like_any_other() {
    let bench = Bench::new();
    let settings = ["train.steps=25", "train.spike_factor=0"];
    let (summary, _) = bench.run("run", &settings, &[(25, Fault::Times(1e4))]);
    assert_eq!(summary.unwrap().skipped, 0);
}

#[test]
fn three_bad_steps_in_a_row_take_the_run_back_and_its_data_go_on() {
    let bench = Bench::new();
    let faults = [(27, Fault::Times(1e4)), (28, Fault::Nan), (29, Fault::Times(1e4))];
    let settings = ["train.rollback_every=20"];
    bench.run("run", &[&settings[..], &["train.steps=20"]].concat(), &[]).0.unwrap();
    let copied = tensors(&bench.step("run", 20));
    let (summary, shown) = bench.run("run", &[&settings[..], &["train.steps=29"]].concat(), &faults);
    let summary = summary.unwrap();
    assert_eq!((summary.skipped, summary.rollbacks), (3, 1), "{shown}");
    assert_eq!(summary.loss, bench.rows("run")[25]["loss"].as_f64(), "that of step 26, the last sound one");
    assert!(shown.contains("step 29: back to the weights after update 20"), "{shown}");
    assert!(tensors(&bench.step("run", 29)) == copied, "the run is not back where step 20 left it");
    let manifest = Checkpoint::open(&bench.step("run", 29)).unwrap();
    let state = &manifest.manifest().state;
    assert_eq!(manifest.manifest().samples_consumed, 29 * 4, "the data go on");
    assert_eq!(state["updates"].as_u64(), Some(20), "Adam's count belongs to its moments");
    let (summary, _) = bench.run("run", &[&settings[..], &["train.steps=40"]].concat(), &[]);
    let summary = summary.unwrap();
    assert_eq!((summary.step, summary.skipped, summary.rollbacks), (40, 3, 1));
    assert!(tensors(&bench.step("run", 40)) != copied);
}

#[test]
fn a_run_that_resumes_gets_over_faults_like_one_that_was_never_stopped() {
    // One checkpoint lies between two copies of the state, the other within a row of skipped steps.
    let faults: Vec<(u64, Fault)> = (38..=40).chain(52..=53).map(|step| (step, Fault::Times(1e4))).collect();
    let settings = ["train.steps=70", "train.rollback_every=25", "checkpoint.keep=0"];
    for every in ["checkpoint.every=35", "checkpoint.every=39"] {
        let bench = Bench::new();
        let settings = [&settings[..], &[every]].concat();
        let step: u64 = every.split_once('=').unwrap().1.parse().unwrap();
        let (whole, _) = bench.run("whole", &settings, &faults);
        assert_eq!((whole.as_ref().unwrap().skipped, whole.unwrap().rollbacks), (5, 1), "{every}");
        std::fs::create_dir_all(bench.path("resumed")).unwrap();
        std::fs::rename(bench.step("whole", step), bench.step("resumed", step)).unwrap();
        let (resumed, shown) = bench.run("resumed", &settings, &faults);
        assert_eq!(
            (resumed.as_ref().unwrap().skipped, resumed.unwrap().rollbacks),
            (5, 1),
            "{every}: {shown}"
        );
        assert!(tensors(&bench.step("whole", 70)) == tensors(&bench.step("resumed", 70)), "{every}");
    }
}

#[test]
fn a_run_that_meets_nothing_but_spikes_ends_with_what_to_do() {
    let bench = Bench::new();
    let faults: Vec<(u64, Fault)> = (30..60).map(|step| (step, Fault::Times(1e4))).collect();
    let (ended, _) = bench.run("run", &["train.steps=60"], &faults);
    let error = ended.unwrap_err();
    assert!(
        matches!(error, Error::TooManySkipped { step: 39, consecutive: 10, last_good: 29, .. }),
        "{error}"
    );
    assert_eq!(bench.rows("run").last().unwrap()["step"], 39, "the last step has its row");
    assert!(!bench.step("run", 39).exists());
}
