//! Checkpoints of runs whose replicas span several ranks: written by all of them, complete, and loadable on any other number of
//! ranks. Ranks are threads here, over the same shared memory as processes.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lockstep_checkpoint::{
    Checkpoint, CommitObserver, CommitPoint, ModelDirectory, TensorKind, latest_good, list,
};
use lockstep_comm::{World, WorldOptions};
use lockstep_config::{Resume, RunConfig};
use lockstep_engine::{Engine, Ranks, StateKind};
use lockstep_launch::interrupt::Interrupt;
use lockstep_observe::progress::Progress;
use lockstep_plan::ParameterId;
use lockstep_train::{Error, StepObserver, Summary, ranks_of, train_observed};
use serde_json::Value;

/// A Llama with fewer key/value heads than four ranks, tied embeddings and a vocabulary that is split unevenly.
const LLAMA: &str = r#"
[model]
preset = "llama-15m"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 16

[train]
steps = 6
global_batch = 4
micro_batch = 1
seq_len = 16
threads = 1
eval_every = 0

[schedule]
warmup_steps = 1
decay_steps = 5

[optimizer]
lr = 3e-3

[parallel]
timeout_s = 60.0
"#;

/// A GPT-2 with learned positions, biases and dropout.
const GPT2: &str = r#"
[model]
preset = "baby-gpt"
n_layer = 2
n_embd = 32
n_head = 4
n_positions = 16

[train]
steps = 6
global_batch = 4
micro_batch = 1
seq_len = 16
dropout = 0.1
threads = 1
eval_every = 0

[schedule]
warmup_steps = 1
decay_steps = 5

[parallel]
timeout_s = 60.0
"#;

/// Tensor degree, replica degree, and sequence parallelism.
#[derive(Debug, Clone, Copy)]
struct Plan(usize, usize, bool);

const ONE_RANK: Plan = Plan(1, 1, false);

impl Plan {
    fn settings(self) -> [String; 3] {
        let Self(tensor, replicas, tokens) = self;
        [
            format!("parallel.tensor_parallel={tensor}"),
            format!("parallel.data_parallel_replicate={replicas}"),
            format!("parallel.sequence_parallel={tokens}"),
        ]
    }
}

/// Faults of a rank.
#[derive(Default)]
struct Fate {
    /// This rank's part of the save after the given step fails at this point.
    save_fails: Option<(u64, CommitPoint)>,
    /// This rank's part of the save after each of these steps takes this long.
    saves_slowly: Option<(Vec<u64>, Duration)>,
    /// Steps whose gradients become NaN.
    spoiled: Vec<u64>,
    /// Step after which a weight is infinite.
    overflows_at: Option<u64>,
    /// Step in which the rank is asked to stop.
    stopped_at: Option<u64>,
    interrupt: Interrupt,
}

impl StepObserver for Fate {
    fn gradients_ready(&mut self, step: u64, engine: &mut Engine) -> Result<(), Error> {
        if self.spoiled.contains(&step) {
            let id = split_matrix(engine);
            let mut gradient = engine.gradient(id).unwrap();
            // With sharded gradients this rank may own no element of it.
            gradient.iter_mut().take(1).for_each(|element| *element = f32::NAN);
            engine.write_gradient(id, &gradient).unwrap();
        }
        if self.overflows_at == Some(step) {
            let id = split_matrix(engine);
            let whole = vec![f32::INFINITY; engine.records()[id.0].elements()];
            engine.write_state(id, StateKind::Parameter, &whole)?;
        }
        if self.stopped_at == Some(step) {
            self.interrupt.request();
        }
        Ok(())
    }

    fn saving(&mut self, step: u64) -> Box<dyn CommitObserver + Send + Sync> {
        match (&self.save_fails, &self.saves_slowly) {
            (Some((at, point)), _) if *at == step => Box::new(FailsAt(*point)),
            (_, Some((steps, time))) if steps.contains(&step) => Box::new(Slow(*time)),
            _ => Box::new(()),
        }
    }
}

/// Returns a matrix that is split over the tensor-parallel ranks.
fn split_matrix(engine: &Engine) -> ParameterId {
    let is_split = |id: &ParameterId| engine.records()[id.0].name.ends_with("q_proj.weight");
    engine.trained_ids().find(is_split).unwrap()
}

struct FailsAt(CommitPoint);

impl CommitObserver for FailsAt {
    fn reached(&self, point: CommitPoint) -> io::Result<()> {
        if point == self.0 { Err(io::Error::other("no disk today")) } else { Ok(()) }
    }
}

/// A disk that delays each write.
struct Slow(Duration);

impl CommitObserver for Slow {
    fn reached(&self, point: CommitPoint) -> io::Result<()> {
        if point == CommitPoint::ShardHalfWritten {
            std::thread::sleep(self.0);
        }
        Ok(())
    }
}

/// A directory with a text, in which runs keep all their files.
struct Bench(tempfile::TempDir);

/// Results of all ranks of a run, and the output of the first.
struct Ended {
    summaries: Vec<Result<Summary, Error>>,
    shown: String,
}

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

    fn run_with(
        &self,
        (run, model): (&str, &str),
        plan: Plan,
        settings: &[&str],
        fate: impl Fn(usize) -> Fate + Sync,
    ) -> Ended {
        let text = format!(
            "{model}\n[data]\ntrain = [{:?}]\ncache_dir = {:?}\n[checkpoint]\ndir = {:?}\n[metrics]\ndir = {:?}\n",
            self.path("text.txt"),
            self.path("cache"),
            self.path(run),
            self.path(run),
        );
        let of_plan = plan.settings();
        let of_plan: Vec<&str> = of_plan.iter().map(String::as_str).collect();
        let config = RunConfig::parse(&text, "test", &[settings, &of_plan].concat()).unwrap();
        let groups = World::in_process(
            config.ranks(),
            WorldOptions { arena_bytes: 1 << 28, ..WorldOptions::default() },
        );
        let shown = Arc::new(Mutex::new(Vec::new()));
        let summaries = std::thread::scope(|scope| {
            let rank = |(rank, group)| {
                let (config, fate, shown) = (&config, &fate, Shown(shown.clone()));
                scope.spawn(move || {
                    let ranks =
                        if config.ranks() == 1 { Ranks::alone() } else { ranks_of(group, config).unwrap() };
                    let mut fate = fate(rank);
                    let interrupt = fate.interrupt.clone();
                    let show = |steps| Progress::as_lines(steps, Box::new(shown));
                    train_observed(config, &Resume::Auto, &ranks, &interrupt, show, &mut fate)
                })
            };
            let threads: Vec<_> = groups.unwrap().into_iter().enumerate().map(rank).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let shown = String::from_utf8(shown.lock().unwrap().clone()).unwrap();
        Ended { summaries, shown }
    }

    fn run(&self, run: (&str, &str), plan: Plan, settings: &[&str]) {
        let ended = self.run_with(run, plan, settings, |_| Fate::default());
        for (rank, summary) in ended.summaries.iter().enumerate() {
            assert!(summary.is_ok(), "{run:?}, {plan:?}: rank {rank} ended with {summary:?}");
        }
    }

    fn losses(&self, run: &str) -> Vec<f64> {
        self.measured(run, "loss")
    }

    /// Returns a value of each row of a run's metrics that has it.
    fn measured(&self, run: &str, what: &str) -> Vec<f64> {
        let text = std::fs::read_to_string(self.path(run).join("metrics.jsonl")).unwrap();
        let rows = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        rows.filter_map(|row| row.get(what)?.as_f64()).collect()
    }

    /// Returns all tensors of a checkpoint, by name and kind.
    fn tensors(&self, run: &str, step: u64) -> BTreeMap<(String, TensorKind), Vec<f32>> {
        tensors_of(&self.step(run, step))
    }

    /// Returns the steps with a complete checkpoint, and asserts that nothing incomplete is left.
    fn saved_steps(&self, run: &str) -> Vec<u64> {
        let dir = self.path(run);
        let left: Vec<_> = std::fs::read_dir(&dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| {
                name.starts_with(".tmp-") || name.starts_with(".old-") || name.starts_with(".trash-")
            })
            .collect();
        assert!(left.is_empty(), "{run}: left over are {left:?}");
        let listed = list(&dir).unwrap();
        for checkpoint in &listed {
            Checkpoint::open(&checkpoint.path).and_then(|checkpoint| checkpoint.verify()).unwrap();
        }
        listed.iter().map(|checkpoint| checkpoint.step).collect()
    }
}

fn tensors_of(path: &Path) -> BTreeMap<(String, TensorKind), Vec<f32>> {
    let checkpoint = Checkpoint::open(path).unwrap();
    let entries = checkpoint.manifest().tensors.iter();
    let read = |entry: &lockstep_checkpoint::TensorEntry| {
        let mut values = vec![0.0; entry.shape.iter().product()];
        checkpoint.read(&entry.name, &entry.kind, 0, &mut values).unwrap();
        ((entry.name.clone(), entry.kind.clone()), values)
    };
    entries.map(read).collect()
}

struct Shown(Arc<Mutex<Vec<u8>>>);

impl io::Write for Shown {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Asserts that both have the same tensors, and that each differs by at most `allowed` of its norm.
fn assert_near(
    found: &BTreeMap<(String, TensorKind), Vec<f32>>,
    expected: &BTreeMap<(String, TensorKind), Vec<f32>>,
    allowed: f64,
    what: &str,
) {
    assert!(found.keys().eq(expected.keys()), "{what}: other tensors");
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    for ((name, kind), expected) in expected {
        let found = &found[&(name.clone(), kind.clone())];
        let distance = norm(&mut found.iter().zip(expected).map(|(a, b)| f64::from(*a) - f64::from(*b)));
        let own = norm(&mut expected.iter().map(|value| f64::from(*value)));
        assert!(
            distance <= allowed * own,
            "{what}: {kind} of {name} differs by {distance:e}, its norm is {own:e}"
        );
    }
}

#[test]
fn a_run_that_goes_on_has_the_bits_of_one_that_was_never_stopped_saved_beside_it_or_not() {
    let bench = Bench::new();
    let plan = Plan(2, 2, true);
    for (name, model) in [("llama", LLAMA), ("gpt2", GPT2)] {
        let runs = ["whole", "resumed", "waits"].map(|run| format!("{name}-{run}"));
        let [whole, resumed, waits] = &runs;
        bench.run((whole, model), plan, &["checkpoint.every=3"]);
        bench.run((resumed, model), plan, &["train.steps=3"]);
        bench.run((resumed, model), plan, &[]);
        bench.run((waits, model), plan, &["checkpoint.every=3", "checkpoint.async=false"]);
        assert_eq!(bench.losses(whole).len(), 6);
        for run in [resumed, waits] {
            assert_eq!(bench.losses(whole), bench.losses(run), "{run}");
            assert_eq!(bench.saved_steps(run), [3, 6], "{run}");
            for step in [3, 6] {
                assert_near(&bench.tensors(run, step), &bench.tensors(whole, step), 0.0, run);
            }
        }
    }
}

#[test]
fn a_checkpoint_of_ranks_that_share_the_model_is_that_of_one_rank_and_goes_on_on_any_number() {
    let bench = Bench::new();
    bench.run(("alone", LLAMA), ONE_RANK, &["checkpoint.every=3"]);
    let plans = [
        (Plan(2, 1, true), ONE_RANK),
        (Plan(2, 1, false), Plan(4, 1, true)),
        (Plan(2, 2, false), Plan(1, 2, false)),
        (ONE_RANK, Plan(2, 2, true)),
        (Plan(4, 1, true), Plan(2, 1, false)),
        (Plan(1, 2, false), Plan(2, 1, true)),
    ];
    for (from, to) in plans {
        let run = format!("{from:?} to {to:?}").replace(' ', "-");
        bench.run((&run, LLAMA), from, &["train.steps=3"]);
        bench.run((&run, LLAMA), to, &[]);
        for (step, (found, expected)) in bench.losses(&run).iter().zip(bench.losses("alone")).enumerate() {
            let is_near = (found - expected).abs() <= 1e-5 * expected;
            assert!(is_near, "{run}, step {}: {found}, on one rank {expected}", step + 1);
        }
        assert_eq!(bench.losses(&run).len(), 6, "{run}");
        for step in [3, 6] {
            assert_near(&bench.tensors(&run, step), &bench.tensors("alone", step), 1e-3, &run);
        }
    }
}

#[test]
fn the_stages_of_a_pipeline_save_together_too() {
    let bench = Bench::new();
    // The first and the last stage both hold the tied embedding.
    let pipeline = ["parallel.pipeline_parallel=2", "parallel.pipeline_schedule=1f1b"];
    let with = |settings: &[&'static str]| [&pipeline[..], settings].concat();
    bench.run(("alone", LLAMA), ONE_RANK, &["checkpoint.every=3"]);
    for plan in [ONE_RANK, Plan(2, 1, true)] {
        let runs = ["whole", "resumed", "one-rank", "from-one-rank"].map(|run| format!("{run}-{plan:?}"));
        let [whole, resumed, to_one, from_one] = &runs;
        bench.run((whole, LLAMA), plan, &with(&["checkpoint.every=3"]));
        bench.run((resumed, LLAMA), plan, &with(&["train.steps=3"]));
        bench.run((resumed, LLAMA), plan, &with(&[]));
        assert_eq!(bench.losses(whole), bench.losses(resumed), "{resumed}");
        bench.run((to_one, LLAMA), plan, &with(&["train.steps=3"]));
        bench.run((to_one, LLAMA), ONE_RANK, &[]);
        bench.run((from_one, LLAMA), ONE_RANK, &["train.steps=3"]);
        bench.run((from_one, LLAMA), plan, &with(&[]));
        for run in &runs {
            assert_eq!(bench.losses(run).len(), 6, "{run}");
            for (found, expected) in bench.losses(run).iter().zip(bench.losses("alone")) {
                assert!(
                    (found - expected).abs() <= 1e-5 * expected,
                    "{run}: {found}, on one rank {expected}"
                );
            }
            assert_eq!(bench.saved_steps(run), [3, 6], "{run}");
            assert_near(&bench.tensors(run, 6), &bench.tensors("alone", 6), 1e-3, run);
        }
        assert_near(&bench.tensors(resumed, 6), &bench.tensors(whole, 6), 0.0, resumed);
    }
}

#[test]
fn ranks_that_share_sequences_save_and_evaluate_as_one_and_go_on_under_any_plan() {
    let bench = Bench::new();
    let evaluated = ["train.eval_every=3", "train.eval_steps=2", "checkpoint.every=3"];
    bench.run(("alone", GPT2), ONE_RANK, &evaluated);
    for method in ["ring", "all_gather", "all_to_all"] {
        let method_key = format!("parallel.context_parallel_method={method}");
        let context = ["parallel.context_parallel=2", &method_key, evaluated[0], evaluated[1]];
        let half = [&context[..], &["train.steps=3"]].concat();
        let runs = ["whole", "resumed", "one-rank", "shared"].map(|run| format!("{method}-{run}"));
        let [whole, resumed, to_one, shared] = &runs;
        bench.run((whole, GPT2), ONE_RANK, &[&context[..], &evaluated[2..]].concat());
        bench.run((resumed, GPT2), ONE_RANK, &half);
        bench.run((resumed, GPT2), ONE_RANK, &context);
        bench.run((to_one, GPT2), ONE_RANK, &half);
        bench.run((to_one, GPT2), ONE_RANK, &evaluated[..2]);
        bench.run((shared, GPT2), Plan(2, 2, true), &[&evaluated[..2], &["train.steps=3"]].concat());
        bench.run((shared, GPT2), Plan(2, 1, true), &context);
        for run in &runs {
            for what in ["loss", "eval_loss"] {
                let (found, expected) = (bench.measured(run, what), bench.measured("alone", what));
                assert_eq!(found.len(), expected.len(), "{run}: {what} {found:?}, on one rank {expected:?}");
                for (found, expected) in found.iter().zip(expected) {
                    let is_near = (found - expected).abs() <= 1e-5 * expected;
                    assert!(is_near, "{run}: {what} {found}, on one rank {expected}");
                }
            }
            assert_eq!(bench.saved_steps(run), [3, 6], "{run}");
            assert_near(&bench.tensors(run, 6), &bench.tensors("alone", 6), 1e-3, run);
        }
        assert_eq!(bench.losses(whole), bench.losses(resumed), "{resumed}");
        assert_near(&bench.tensors(resumed, 6), &bench.tensors(whole, 6), 0.0, resumed);
        // Both ranks hold the complete tensors, and one of them writes.
        let checkpoint = Checkpoint::open(&bench.step(whole, 6)).unwrap();
        assert_eq!(checkpoint.manifest().files.len(), 1, "{whole}: {:?}", checkpoint.manifest().files);
    }
}

#[test]
fn each_element_is_written_once_by_the_first_rank_that_holds_it() {
    let bench = Bench::new();
    bench.run(("four", LLAMA), Plan(4, 2, false), &["train.steps=1"]);
    let checkpoint = Checkpoint::open(&bench.step("four", 1)).unwrap();
    let files: Vec<_> = checkpoint.manifest().files.keys().map(String::as_str).collect();
    let of_replica = [
        "rank-00000.safetensors",
        "rank-00001.safetensors",
        "rank-00002.safetensors",
        "rank-00003.safetensors",
    ];
    assert_eq!(files, of_replica);
    let files_of = |name: &str| -> Vec<String> {
        let entry = checkpoint.tensor(name, &TensorKind::ExpAvg).unwrap();
        entry.slices.iter().map(|slice| slice.file.clone()).collect()
    };
    assert_eq!(files_of("model.layers.0.self_attn.q_proj.weight"), of_replica);
    // Two key/value heads on four ranks: each pair of ranks holds the same shard.
    assert_eq!(files_of("model.layers.0.self_attn.k_proj.weight"), [of_replica[0], of_replica[2]]);
    assert_eq!(files_of("model.norm.weight"), [of_replica[0]]);
}

#[test]
fn a_checkpoint_of_ranks_that_share_the_model_is_exported_as_that_of_one_rank() {
    let bench = Bench::new();
    bench.run(("two", LLAMA), Plan(2, 1, true), &["train.steps=2"]);
    let exported = bench.path("exported");
    let directory = ModelDirectory::of_checkpoint(Checkpoint::open(&bench.step("two", 2)).unwrap()).unwrap();
    directory.export_hf(lockstep_checkpoint::DType::F32, &exported).unwrap();
    let stored = bench.tensors("two", 2);
    let mut seen = 0;
    ModelDirectory::open(&exported)
        .unwrap()
        .for_each_parameter(|name: &str, values: &[f32]| {
            assert_eq!(values, stored[&(name.to_owned(), TensorKind::Parameter)], "{name}");
            seen += 1;
            Ok::<_, Error>(())
        })
        .unwrap();
    assert_eq!(seen, stored.keys().filter(|(_, kind)| *kind == TensorKind::Parameter).count());
}

#[test]
fn pretrained_weights_are_read_by_ranks_that_share_the_model() {
    let bench = Bench::new();
    bench.run(("two", LLAMA), Plan(2, 1, false), &["train.steps=2"]);
    let exported = bench.path("exported");
    let checkpoint = Checkpoint::open(&bench.step("two", 2)).unwrap();
    let directory = ModelDirectory::of_checkpoint(checkpoint).unwrap();
    directory.export_hf(lockstep_checkpoint::DType::F32, &exported).unwrap();
    let run = LLAMA.split_once("[train]").unwrap().1;
    let model = format!("[model]\npath = {exported:?}\nfrom_pretrained = true\n[train]{run}");
    let two = ["parallel.pipeline_parallel=2", "parallel.pipeline_stages=[2, 2]"];
    let four = ["parallel.pipeline_parallel=4", "parallel.pipeline_schedule=zb_h1"];
    let square = ["parallel.tensor_layout=2d", "train.micro_batch=2"];
    // Any choice of trained parameters: none in the first stage, none in the last, or neither embedding nor head.
    let tunings: [(&str, &[&str]); 4] = [
        ("whole", &[]),
        ("late", &[r#"fine_tune.freeze=["model.embed_tokens.*", "model.layers.0.*"]"#]),
        ("early", &[r#"fine_tune.freeze=["model.embed_tokens.*", "model.layers.1.*", "model.norm.*"]"#]),
        ("lora", &["fine_tune.lora_rank=2", "fine_tune.lora_dropout=0.1"]),
    ];
    for (tuning, settings) in tunings {
        let run = |name: &str, plan: Plan, more: &[&str]| {
            let name = format!("{tuning}-{name}");
            bench.run((&name, &model), plan, &[settings, more].concat());
            bench.losses(&name)
        };
        let alone = run("alone", ONE_RANK, &[]);
        let plans: [(&str, Plan, &[&str]); 5] = [
            ("square", Plan(4, 1, false), &square),
            ("tensor", Plan(2, 1, true), &[]),
            ("replicas", Plan(2, 2, false), &[]),
            ("pipeline", ONE_RANK, &two),
            ("four", ONE_RANK, &four),
        ];
        for (name, plan, more) in plans {
            let losses = run(name, plan, more);
            for (found, expected) in losses.iter().zip(&alone) {
                let is_near = (found - expected).abs() <= 1e-5 * expected;
                assert!(is_near, "{tuning}, {name}: {losses:?}, on one rank {alone:?}");
            }
            assert_eq!(losses.len(), 6, "{tuning}, {name}");
        }
    }
}

#[test]
fn a_rank_that_cannot_write_costs_the_checkpoint_and_not_the_run() {
    let bench = Bench::new();
    let cases = [
        (1, CommitPoint::ShardStarted, "not saved: rank 1: save stopped"),
        (1, CommitPoint::ShardSynced, "not saved: rank 1: save stopped"),
        (0, CommitPoint::StagingCreated, "not saved: save stopped"),
        (0, CommitPoint::ShardHalfWritten, "not saved: save stopped"),
        (0, CommitPoint::ManifestSynced, "not saved: save stopped"),
    ];
    for beside in [true, false] {
        for (odd, point, message) in cases {
            let run = format!("{point:?}-of-{odd}-{beside}");
            let beside = format!("checkpoint.async={beside}");
            let settings = ["checkpoint.every=2", &beside];
            let ended = bench.run_with((&run, LLAMA), Plan(2, 2, false), &settings, |rank| Fate {
                save_fails: (rank == odd).then_some((4, point)),
                ..Fate::default()
            });
            for summary in &ended.summaries {
                assert_eq!(summary.as_ref().unwrap().step, 6, "{run}");
            }
            assert!(ended.shown.contains(message), "{run}: {}", ended.shown);
            assert_eq!(bench.saved_steps(&run), [2, 6], "{run}");
        }
    }
}

#[test]
fn a_save_may_take_longer_than_ranks_wait_for_each_other_in_a_step() {
    let bench = Bench::new();
    for beside in [true, false] {
        let run = format!("slow-{beside}");
        let beside = format!("checkpoint.async={beside}");
        let settings = ["checkpoint.every=4", "parallel.timeout_s=1", &beside];
        let ended = bench.run_with((&run, LLAMA), Plan(2, 1, false), &settings, |rank| Fate {
            saves_slowly: (rank == 1).then(|| (vec![4, 6], Duration::from_millis(1500))),
            ..Fate::default()
        });
        for summary in &ended.summaries {
            assert!(summary.is_ok(), "{run}: {summary:?}");
        }
        assert_eq!(bench.saved_steps(&run), [4, 6], "{run}");
    }
}

#[test]
fn a_rank_that_cannot_write_at_the_end_ends_all_with_the_last_good_checkpoint() {
    let bench = Bench::new();
    let ended = bench.run_with(("end", LLAMA), Plan(2, 2, true), &["checkpoint.every=4"], |rank| Fate {
        save_fails: (rank == 1).then_some((6, CommitPoint::ShardWritten)),
        ..Fate::default()
    });
    let said = ended.summaries[0].as_ref().unwrap_err().to_string();
    assert!(said.starts_with("rank 1: save stopped"), "{said}");
    assert!(ended.summaries.iter().all(Result::is_err), "{:?}", ended.summaries);
    assert_eq!(bench.saved_steps("end"), [4]);
    let found = latest_good(&bench.path("end")).unwrap();
    assert!(found.skipped.is_empty() && found.checkpoint.unwrap().manifest().step == 4);
    bench.run(("end", LLAMA), Plan(2, 2, true), &[]);
    assert_eq!(bench.saved_steps("end"), [4, 6]);
}

#[test]
fn weights_that_are_not_finite_on_one_rank_are_not_saved() {
    let bench = Bench::new();
    for beside in [true, false] {
        let run = format!("overflow-{beside}");
        let beside = format!("checkpoint.async={beside}");
        let settings = ["checkpoint.every=2", &beside];
        let ended = bench.run_with((&run, LLAMA), Plan(2, 1, false), &settings, |rank| Fate {
            overflows_at: (rank == 1).then_some(4),
            ..Fate::default()
        });
        for summary in &ended.summaries {
            assert!(
                matches!(summary, Err(Error::WeightsNotFinite { step: 4, name }) if name.ends_with("q_proj.weight")),
                "{run}: {summary:?}"
            );
        }
        assert_eq!(bench.saved_steps(&run), [2], "{run}");
    }
}

#[test]
fn a_stop_that_one_rank_is_asked_for_is_saved_by_all() {
    let bench = Bench::new();
    let plan = Plan(2, 2, true);
    let ended = bench.run_with(("stopped", LLAMA), plan, &[], |rank| Fate {
        stopped_at: (rank == 3).then_some(4),
        ..Fate::default()
    });
    for summary in &ended.summaries {
        let summary = summary.as_ref().unwrap();
        assert_eq!((summary.step, summary.interrupted), (4, true));
    }
    assert_eq!(bench.saved_steps("stopped"), [4]);
    bench.run(("stopped", LLAMA), plan, &[]);
    bench.run(("undisturbed", LLAMA), plan, &[]);
    assert_eq!(bench.losses("stopped"), bench.losses("undisturbed"));
}

#[test]
fn all_ranks_go_back_when_the_gradients_of_one_are_not_numbers() {
    let bench = Bench::new();
    let settings =
        ["train.steps=8", "train.rollback_after=2", "train.rollback_every=3", "parallel.check_every=1"];
    let sharing = |stage| ["parallel.data_parallel_shard=2", stage];
    let plans: [(&str, Plan, &[&str]); 3] = [
        ("copies", Plan(2, 2, true), &[]),
        ("zero 1", Plan(2, 1, true), &sharing("parallel.zero_stage=1")),
        ("zero 3", Plan(2, 1, true), &sharing("parallel.zero_stage=3")),
    ];
    for (name, plan, more) in plans {
        let settings = [&settings[..], more].concat();
        let ended = bench.run_with((name, LLAMA), plan, &settings, |rank| Fate {
            // Both replicas have the same sum.
            spoiled: if rank % 2 == 1 { vec![5, 6] } else { Vec::new() },
            ..Fate::default()
        });
        for summary in &ended.summaries {
            let summary = summary.as_ref().unwrap();
            assert_eq!((summary.step, summary.skipped, summary.rollbacks), (8, 2, 1), "{name}");
        }
        assert!(ended.shown.contains("back to the weights after update 3"), "{name}: {}", ended.shown);
        let tensors = bench.tensors(name, 8);
        assert!(tensors.values().flatten().all(|value| value.is_finite()), "{name}: a weight is not finite");
    }
}
