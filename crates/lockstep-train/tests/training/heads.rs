//! Runs of a model with several losses and a metric: what their rows say, and that ranks change nothing. Ranks are threads here.

use std::path::Path;
use std::sync::Arc;

use lockstep_comm::{World, WorldOptions};
use lockstep_config::{Resume, RunConfig};
use lockstep_data::samples::{TensorDataset, Transforms};
use lockstep_engine::Ranks;
use lockstep_graph::{InputDeclaration, Recorder, Value};
use lockstep_launch::interrupt::Interrupt;
use lockstep_model::{Model, ModelConfig, Sizes, Unit, register_given};
use lockstep_observe::progress::Progress;
use lockstep_plan::DType;
use lockstep_tensor::{LABELS, NamedTensor, TensorData};
use lockstep_train::{SampleCorpus, SampleSet, TrainingData, ranks_of, train_on};
use serde_json::{Map, Value as Json};

const SAMPLES: usize = 24;
const WIDTH: usize = 5;

/// A classifier, and a box beside its logits.
#[derive(Debug)]
struct Heads;

impl Model for Heads {
    fn model_type(&self) -> &str {
        "class_and_box"
    }

    fn units(&self) -> Vec<Unit> {
        (0..2).map(|kind| Unit { prefix: format!("{kind}."), kind, layer: Some(kind) }).collect()
    }

    fn inputs(&self) -> Vec<InputDeclaration> {
        vec![
            InputDeclaration::new("x", DType::F32, &[WIDTH]),
            InputDeclaration::new(LABELS, DType::I32, &[]),
            InputDeclaration::new("boxes", DType::F32, &[2]),
        ]
    }

    fn record(&self, unit: usize, g: &mut Recorder) -> Value {
        if unit == 0 {
            let x = g.data("x");
            let y = g.dense(x, "in", 8);
            return g.relu(y);
        }
        let x = g.input_of(&[8]);
        let logits = g.dense(x, "classes", 3);
        let boxes = g.dense(x, "boxes", 2);
        g.accuracy(logits);
        let error = g.squared_error_of(boxes, "boxes");
        g.add_loss("box_error", error, 0.5);
        g.cross_entropy(logits, 0.0)
    }

    fn sizes(&self) -> Sizes {
        Sizes { layers: 2, classes: 3, fixed_seq_len: Some(1), ..Sizes::default() }
    }

    fn table(&self) -> Map<String, Json> {
        Map::new()
    }
}

/// Returns the samples; every sixth label is masked.
fn samples() -> SampleSet {
    let floats = |count: usize| -> TensorData {
        TensorData::F32((0..count).map(|i| (i * 7919 % 101) as f32 / 50.0 - 1.0).collect())
    };
    let labels = (0..SAMPLES).map(|i| if i % 6 == 5 { -100 } else { (i % 3) as i32 }).collect();
    let arrays = vec![
        NamedTensor::new("x", &[SAMPLES, WIDTH], floats(SAMPLES * WIDTH)),
        NamedTensor::new(LABELS, &[SAMPLES], TensorData::I32(labels)),
        NamedTensor::new("boxes", &[SAMPLES, 2], floats(SAMPLES * 2)),
    ];
    SampleSet { dataset: Arc::new(TensorDataset::new(arrays).unwrap()), transforms: Transforms::new() }
}

/// Trains with these settings and returns the rows of the metrics.
fn rows(dir: &Path, settings: &[&str]) -> Vec<Json> {
    let model = ModelConfig::from(Heads);
    let own = [
        format!("model.model_type={:?}", register_given(model.handle())),
        format!("checkpoint.dir={dir:?}"),
        format!("metrics.dir={dir:?}"),
    ];
    let fixed = ["train.steps=4", "train.global_batch=8", "train.micro_batch=4", "train.eval_every=4"];
    let fixed = fixed.iter().chain(&["train.threads=1", "optimizer.lr=0.05", "metrics.tensorboard=false"]);
    let settings: Vec<&str> =
        own.iter().map(String::as_str).chain(fixed.copied()).chain(settings.iter().copied()).collect();
    let config = RunConfig::parse("", "test", &settings).unwrap_or_else(|problems| panic!("{problems}"));
    let run = |ranks: &Ranks| {
        let corpus = SampleCorpus {
            train: samples(),
            valid: Some(samples()),
            digest: "samples".to_owned(),
            damages: Vec::new(),
        };
        let data = TrainingData::of_samples(&config, &model, corpus).unwrap();
        let show = |steps| Progress::as_lines(steps, Box::new(std::io::sink()));
        train_on(data, &config, &Resume::Never, ranks, &Interrupt::default(), show).unwrap();
    };
    if config.ranks() == 1 {
        run(&Ranks::alone());
    } else {
        let options = WorldOptions { arena_bytes: 1 << 26, ..WorldOptions::default() };
        let groups = World::in_process(config.ranks(), options).unwrap();
        std::thread::scope(|scope| {
            for group in groups {
                let (run, config) = (&run, &config);
                scope.spawn(move || run(&ranks_of(group, config).unwrap()));
            }
        });
    }
    let rows = std::fs::read_to_string(dir.join("metrics.jsonl")).unwrap();
    rows.lines().map(|row| serde_json::from_str(row).unwrap()).collect()
}

#[test]
fn rows_name_each_loss_and_the_loss_is_their_weighted_sum() {
    let dir = tempfile::tempdir().unwrap();
    let rows = rows(dir.path(), &[]);
    assert_eq!(rows.len(), 5);
    for (prefix, rows) in [("", &rows[..4]), ("eval_", &rows[4..])] {
        for row in rows {
            let losses = &row[format!("{prefix}losses")];
            let [classes, boxes] = ["cross_entropy", "box_error"].map(|name| losses[name].as_f64().unwrap());
            let loss = row[format!("{prefix}loss")].as_f64().unwrap();
            assert!((loss - classes - 0.5 * boxes).abs() < 1e-12 * loss, "{row}");
            let accuracy = row[format!("{prefix}accuracy")].as_f64().unwrap();
            assert!((0.0..=1.0).contains(&accuracy), "{row}");
        }
    }
    // Twenty of the labels count.
    let accuracy = rows[4]["eval_accuracy"].as_f64().unwrap() * 20.0;
    assert!((accuracy - accuracy.round()).abs() < 1e-9 && rows[4]["eval_samples"] == 20, "{}", rows[4]);
    assert!(rows[3]["loss"].as_f64() < rows[0]["loss"].as_f64(), "it learns: {rows:?}");
}

#[test]
fn ranks_report_what_one_rank_does() {
    let dir = tempfile::tempdir().unwrap();
    let alone = rows(dir.path(), &[]);
    for plan in [
        &["parallel.data_parallel_replicate=2"][..],
        &["parallel.data_parallel_shard=2", "parallel.zero_stage=3"],
        &["parallel.pipeline_parallel=2"],
        &["parallel.pipeline_parallel=2", "parallel.pipeline_schedule=zb_h1"],
        &["parallel.recompute=full"],
    ] {
        let dir = tempfile::tempdir().unwrap();
        let found = rows(dir.path(), plan);
        assert_eq!(found.len(), alone.len(), "{plan:?}");
        for (row, expected) in found.iter().zip(&alone) {
            let numbers = |row: &Json| -> Vec<f64> {
                [
                    "/loss",
                    "/accuracy",
                    "/losses/box_error",
                    "/grad_norm",
                    "/eval_loss",
                    "/eval_accuracy",
                    "/eval_losses/box_error",
                ]
                .iter()
                .filter_map(|key| row.pointer(key)?.as_f64())
                .collect()
            };
            let (found, expected) = (numbers(row), numbers(expected));
            assert!(found.len() == expected.len() && found.len() >= 3, "{plan:?}: {row}");
            let is_close = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-5 * b.abs();
            assert!(found.iter().zip(&expected).all(is_close), "{plan:?}: {found:?}, alone {expected:?}");
        }
    }
}
