//! A run on several ranks equals the run on one rank: losses, gradients and weights agree within the rounding of sums, with the
//! same bits on every rank. Ranks are threads here, over the same shared memory as processes.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use lockstep_comm::{World, WorldOptions};
use lockstep_config::{Resume, RunConfig};
use lockstep_engine::{Engine, EngineError, Ranks};
use lockstep_launch::interrupt::Interrupt;
use lockstep_observe::flight::{analyse, read_all, write_records};
use lockstep_observe::progress::Progress;
use lockstep_plan::ParameterId;
use lockstep_train::{Error, StepObserver, Summary, ranks_of, train_observed};
use serde_json::Value;

/// A GPT-2 with tied embeddings, learned positions and dropout. Prompts are masked, so ranks differ in their valid tokens.
const GPT2: &str = r#"
[model]
preset = "baby-gpt"
n_layer = 2
n_embd = 36
n_head = 3
n_positions = 24

[train]
steps = 20
global_batch = 8
micro_batch = 2
seq_len = 24
dropout = 0.1
threads = 1
"#;

/// A Llama with rotary positions, grouped-query attention and an untied output layer.
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
steps = 20
global_batch = 8
micro_batch = 1
seq_len = 24
threads = 1
"#;

/// The gradients of each step, by name.
type Gradients = Vec<BTreeMap<String, Vec<f32>>>;

/// Observer that records the gradients of one rank, and may corrupt its weights or request a stop.
#[derive(Default)]
struct Watch {
    gradients: Gradients,
    spoil_weights_at: Option<u64>,
    stop_at: Option<(u64, Interrupt)>,
}

impl StepObserver for Watch {
    fn gradients_ready(&mut self, step: u64, engine: &mut Engine) -> Result<(), Error> {
        let ids: Vec<ParameterId> = engine.trained_ids().collect();
        let named = ids.iter().map(|&id| (engine.records()[id.0].name.clone(), engine.gradient(id).unwrap()));
        self.gradients.push(named.collect());
        if self.spoil_weights_at == Some(step) {
            engine.initialize_parameter(ids[0], 12345).unwrap();
        }
        if let Some((_, interrupt)) = self.stop_at.as_ref().filter(|(at, _)| *at == step) {
            interrupt.request();
        }
        Ok(())
    }
}

/// A directory with conversations, in which runs keep all their files.
struct Bench(tempfile::TempDir);

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let words = ["tape", "shard", "mesh", "rank", "block"];
        let say = |i: usize, count: usize| -> String {
            (0..count).map(|j| format!("{} ", words[(i * i + j * 7) % 5])).collect()
        };
        let lines: String = (0..200)
            .map(|i| {
                let (prompt, completion) = (say(i, 1 + i % 7), say(i + 3, 1 + i % 5));
                format!("{{\"prompt\": \"{prompt}\", \"completion\": \"{completion}\"}}\n")
            })
            .collect();
        std::fs::write(dir.path().join("text.jsonl"), lines).unwrap();
        Self(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn config(&self, run: &str, model: &str, settings: &[&str]) -> RunConfig {
        let text = format!(
            "{model}\n[data]\ntrain = [{:?}]\ncache_dir = {:?}\n[checkpoint]\ndir = {:?}\n[metrics]\ndir = {:?}\n",
            self.path("text.jsonl"),
            self.path("cache"),
            self.path(run),
            self.path(run),
        );
        RunConfig::parse(&text, "test", settings).unwrap()
    }

    /// Runs on `ranks` ranks, each with the observer that `watch` returns for it.
    fn run(
        &self,
        run: &str,
        model: &str,
        ranks: usize,
        settings: &[&str],
        watch: impl Fn(usize, &Interrupt) -> Watch + Sync,
    ) -> Vec<(Result<Summary, Error>, Watch)> {
        let replicas = format!("parallel.data_parallel_replicate={ranks}");
        let config = self.config(run, model, &[settings, &[&replicas, "parallel.timeout_s=60"]].concat());
        let options = WorldOptions { arena_bytes: 1 << 28, ..WorldOptions::default() };
        let groups = World::in_process(ranks, options).unwrap();
        std::thread::scope(|scope| {
            let rank = |(rank, group)| {
                let (config, watch) = (&config, &watch);
                scope.spawn(move || {
                    let ranks = if config.plan.mesh.replicate == 1 {
                        Ranks::alone()
                    } else {
                        ranks_of(group, config).unwrap()
                    };
                    let interrupt = Interrupt::default();
                    let mut watch = watch(rank, &interrupt);
                    let show = |steps| Progress::as_lines(steps, Box::new(std::io::sink()));
                    let ended = train_observed(config, &Resume::Auto, &ranks, &interrupt, show, &mut watch);
                    (ended, watch)
                })
            };
            let threads: Vec<_> = groups.into_iter().enumerate().map(rank).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn rows(&self, run: &str) -> Vec<Value> {
        let text = std::fs::read_to_string(self.path(run).join("metrics.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn column(&self, run: &str, key: &str) -> Vec<f64> {
        self.rows(run).iter().filter_map(|row| row.get(key)?.as_f64()).collect()
    }
}

fn plain(_: usize, _: &Interrupt) -> Watch {
    Watch::default()
}

fn gradients(ended: Vec<(Result<Summary, Error>, Watch)>) -> Vec<Gradients> {
    ended.into_iter().map(|(summary, watch)| summary.map(|_| watch.gradients).unwrap()).collect()
}

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|value| value * value).sum::<f64>().sqrt()
}

#[test]
fn losses_and_gradients_are_those_of_one_rank_and_the_same_bits_on_all() {
    let bench = Bench::new();
    for (name, model) in [("gpt2", GPT2), ("llama", LLAMA)] {
        let alone = format!("{name}-1");
        let expected = gradients(bench.run(&alone, model, 1, &[], plain)).remove(0);
        for ranks in [2, 4] {
            let run = format!("{name}-{ranks}");
            let found = gradients(bench.run(&run, model, ranks, &[], plain));
            assert!(found.iter().all(|gradients| *gradients == found[0]), "{run}: ranks differ");
            let first = (&expected[0], &found[0][0]);
            let of_model = norm(first.0.values().flatten().map(|&g| f64::from(g)));
            for (parameter, expected) in first.0 {
                let pairs = expected.iter().zip(&first.1[parameter]);
                let difference = norm(pairs.map(|(a, b)| f64::from(*a) - f64::from(*b)));
                let allowed = 1e-5 * norm(expected.iter().map(|&g| f64::from(g))) + 1e-7 * of_model;
                assert!(
                    difference <= allowed,
                    "{run}: {parameter} differs by {difference:e}, allowed {allowed:e}"
                );
            }
            let losses = bench.column(&alone, "loss").into_iter().zip(bench.column(&run, "loss"));
            for (step, (expected, found)) in losses.enumerate() {
                let allowed = if step == 0 { 1e-5 } else { 1e-4 };
                let difference = (found - expected).abs() / expected;
                assert!(difference <= allowed, "{run}, step {}: {found}, on one rank {expected}", step + 1);
            }
            assert_eq!(bench.column(&alone, "tokens_seen"), bench.column(&run, "tokens_seen"), "{run}");
            assert_eq!(bench.column(&alone, "loss").len(), 20);
        }
    }
}

#[test]
fn a_run_on_ranks_gives_the_same_bits_again_whatever_the_buckets() {
    let bench = Bench::new();
    let once = gradients(bench.run("once", GPT2, 3, &["train.global_batch=6"], plain));
    let small = ["train.global_batch=6", "parallel.bucket_mb=0.01"];
    assert_eq!(once, gradients(bench.run("again", GPT2, 3, &small, plain)));
    assert_eq!(bench.column("once", "loss"), bench.column("again", "loss"));
}

#[test]
fn a_checkpoint_goes_on_under_another_number_of_ranks() {
    let bench = Bench::new();
    let half = &["train.steps=10", "schedule.decay_steps=18", "schedule.warmup_steps=2"];
    let rest = &["schedule.decay_steps=18", "schedule.warmup_steps=2"];
    gradients(bench.run("whole", LLAMA, 1, rest, plain));
    for (from, to) in [(1, 2), (2, 4), (4, 1)] {
        let run = format!("{from}-to-{to}");
        for (ranks, settings) in [(from, &half[..]), (to, &rest[..])] {
            gradients(bench.run(&run, LLAMA, ranks, settings, plain));
        }
        let losses = bench.column(&run, "loss");
        assert_eq!(losses.len(), 20, "{run}");
        for (found, expected) in losses.into_iter().zip(bench.column("whole", "loss")) {
            assert!((found - expected).abs() <= 1e-4 * expected, "{run}: {found}, on one rank {expected}");
        }
    }
}

#[test]
fn a_rank_whose_weights_went_astray_is_named() {
    let bench = Bench::new();
    let settings = ["parallel.check_every=3", "train.global_batch=6"];
    let ended = bench.run("astray", GPT2, 3, &settings, |rank, _| Watch {
        spoil_weights_at: (rank == 1).then_some(2),
        ..Watch::default()
    });
    for (summary, _) in ended {
        assert!(
            matches!(
                summary,
                Err(Error::Engine(EngineError::WeightsDiffer { step: 3, rank: 1, reference: 0 }))
            ),
            "{summary:?}"
        );
    }
}

#[test]
fn a_stop_that_one_rank_is_asked_for_ends_all_after_the_same_step() {
    let bench = Bench::new();
    let ended = bench.run("stopped", LLAMA, 2, &[], |rank, interrupt| Watch {
        stop_at: (rank == 1).then(|| (7, interrupt.clone())),
        ..Watch::default()
    });
    for (summary, _) in &ended {
        let summary = summary.as_ref().unwrap();
        assert_eq!((summary.step, summary.interrupted), (7, true));
    }
    assert!(ended[0].0.as_ref().unwrap().checkpoint.ends_with("step-00000007"));
    gradients(bench.run("stopped", LLAMA, 2, &[], plain));
    gradients(bench.run("undisturbed", LLAMA, 2, &[], plain));
    assert_eq!(bench.column("stopped", "loss"), bench.column("undisturbed", "loss"));
}

#[test]
fn a_rank_that_does_not_come_is_named_after_the_time_given() {
    let bench = Bench::new();
    let config =
        bench.config("late", LLAMA, &["parallel.data_parallel_replicate=2", "parallel.timeout_s=0.3"]);
    let options = WorldOptions { silence: Duration::from_secs(30), ..WorldOptions::default() };
    let mut groups = World::in_process(2, options).unwrap();
    let late = groups.pop().unwrap();
    let ranks = ranks_of(groups.pop().unwrap(), &config).unwrap();
    let show = |steps| Progress::as_lines(steps, Box::new(std::io::sink()));
    let ended = train_observed(&config, &Resume::Never, &ranks, &Interrupt::default(), show, &mut ());
    let Error::Comm(error) = ended.unwrap_err() else { panic!("it is the other rank's fault") };
    assert!(error.to_string().contains("rank 1"), "{error}");
    // Ranks without a launcher of ours write their own flight records.
    let own = write_records(&ranks, &error, &bench.path("late")).unwrap().unwrap();
    assert!(own.ends_with("flight-00000.json"), "{}", own.display());
    let late = ranks_of(late, &config).unwrap();
    let other = write_records(&late, &error, &bench.path("late")).unwrap().unwrap();
    let analysis = analyse(&read_all(&[own, other]).unwrap());
    assert_eq!((&analysis.culprits[..], &analysis.ended), (&[1][..], &vec![error.to_string()]), "{analysis}");
}

#[test]
fn metrics_tell_what_the_sums_cost() {
    let bench = Bench::new();
    gradients(bench.run("two", LLAMA, 2, &[], plain));
    for row in bench.rows("two").iter().filter(|row| row.get("loss").is_some()) {
        let comm = &row["comm"];
        assert!(comm["bytes"].as_u64().unwrap() > 4 * 10_000, "{comm}");
        assert!(comm["busy_ms"].as_f64().unwrap() >= comm["exposed_ms"].as_f64().unwrap(), "{comm}");
        let by_rank = row["memory_by_rank"].as_array().unwrap();
        assert_eq!(by_rank.len(), 2, "{row}");
        for category in ["parameters", "gradients", "activations", "peak"] {
            let bytes = |memory: &Value| memory[category].as_u64().unwrap();
            let most = by_rank.iter().map(bytes).max();
            assert!(most > Some(0) && most == Some(bytes(&row["memory"])), "{category}: {row}");
        }
        let predicted = row["memory_predicted_by_rank"].as_array().unwrap();
        for category in ["parameters", "gradients", "optimizer", "activations", "communication", "workspace"]
        {
            for (predicted, booked) in predicted.iter().zip(by_rank) {
                assert_eq!(predicted[category], booked[category], "{category}: {row}");
            }
            assert_eq!(row["memory_predicted"][category], row["memory"][category], "{category}: {row}");
        }
    }
}
