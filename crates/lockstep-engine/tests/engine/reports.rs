//! A model with several losses and a metric: each has a sum and a count of its own, and the gradient is the derivative of their
//! weighted sum.

use lockstep_engine::{Engine, EngineOptions, HostBatch, StateKind};
use lockstep_graph::{InputDeclaration, Recompute, Recorder, ReportKind, Totals, Value};
use lockstep_model::{Model, ModelConfig, Sizes, Unit};
use lockstep_plan::{DType, ParameterId, Plan};
use lockstep_tensor::{Arena, LABELS, NamedTensor, TensorData};
use serde_json::{Map, Value as Json};

use crate::common;

const SAMPLES: usize = 6;
const WIDTH: usize = 5;
const CLASSES: usize = 3;
const BOX_WEIGHT: f32 = 0.1;
const SECOND_WEIGHT: f32 = 0.5;

/// A classifier of two labelings that share their logits, and a box beside it.
#[derive(Debug)]
struct Heads;

impl Model for Heads {
    fn model_type(&self) -> &str {
        "heads"
    }

    fn units(&self) -> Vec<Unit> {
        (0..2).map(|kind| Unit { prefix: format!("{kind}."), kind, layer: Some(kind) }).collect()
    }

    fn inputs(&self) -> Vec<InputDeclaration> {
        vec![
            InputDeclaration::new("x", DType::F32, &[WIDTH]),
            InputDeclaration::new(LABELS, DType::I32, &[]),
            InputDeclaration::new("second", DType::I32, &[]),
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
        let logits = g.dense(x, "classes", CLASSES);
        let boxes = g.dense(x, "boxes", 2);
        g.accuracy(logits);
        let main = g.cross_entropy(logits, 0.0);
        let second = g.cross_entropy_of(logits, "second", 0.1);
        let boxes = g.squared_error_of(boxes, "boxes");
        g.add_loss("second", second, SECOND_WEIGHT);
        g.add_loss("box_error", boxes, BOX_WEIGHT);
        main
    }

    fn sizes(&self) -> Sizes {
        Sizes { layers: 2, classes: CLASSES, fixed_seq_len: Some(1), ..Sizes::default() }
    }

    fn table(&self) -> Map<String, Json> {
        Map::new()
    }
}

fn engine(recompute: Recompute) -> Engine {
    let model = ModelConfig::from(Heads);
    let plan = Plan { recompute: recompute.into(), ..Plan::default() };
    let plan = common::one_rank(&model, plan, [SAMPLES, 1], 1);
    let options = EngineOptions { threads: 1, ..EngineOptions::default() };
    let mut engine = Engine::builder(&model, plan).options(options).build(&Arena::new()).unwrap();
    engine.initialize(3).unwrap();
    engine
}

/// Returns six samples, of whose labels five count, and four in the second labeling.
fn inputs() -> Vec<NamedTensor> {
    let floats = |count: usize, factor: f32| -> Vec<f32> {
        (0..count).map(|i| ((i * 7919 % 101) as f32 / 50.0 - 1.0) * factor).collect()
    };
    let labels = |name: &str, labels: [i32; SAMPLES]| {
        NamedTensor::new(name, &[SAMPLES], TensorData::I32(labels.to_vec()))
    };
    vec![
        NamedTensor::new("x", &[SAMPLES, WIDTH], TensorData::F32(floats(SAMPLES * WIDTH, 1.0))),
        labels(LABELS, [0, 1, 2, -100, 1, 0]),
        labels("second", [-100, 0, 1, 1, -100, 2]),
        NamedTensor::new("boxes", &[SAMPLES, 2], TensorData::F32(floats(SAMPLES * 2, 2.0))),
    ]
}

fn batch(inputs: &[NamedTensor]) -> HostBatch<'_> {
    HostBatch { sample_numbers: &[0, 1, 2, 3, 4, 5], inputs, ..HostBatch::default() }
}

/// Returns the totals of an evaluation.
fn evaluated(engine: &mut Engine, inputs: &[NamedTensor]) -> Totals {
    engine.take_reported();
    engine.evaluate(&batch(inputs)).unwrap();
    Totals { sums: engine.take_reported(), counts: batch(inputs).counts(engine.model()) }
}

#[test]
fn every_report_has_a_name_a_kind_and_a_count_of_its_own() {
    let mut engine = engine(Recompute::None);
    let found: Vec<(String, ReportKind)> =
        engine.model().reports().iter().map(|report| (report.name.clone(), report.kind)).collect();
    let loss = |weight| ReportKind::Loss { weight };
    let expected = [
        ("cross_entropy", loss(1.0)),
        ("accuracy", ReportKind::Metric),
        ("second", loss(SECOND_WEIGHT)),
        ("box_error", loss(BOX_WEIGHT)),
    ];
    assert_eq!(found, expected.map(|(name, kind)| (name.to_owned(), kind)));
    let totals = evaluated(&mut engine, &inputs());
    assert_eq!(totals.counts[..5], [5, 5, 4, 12, 0]);
    let means: Vec<f64> = (0..4).map(|report| totals.mean(report).unwrap()).collect();
    let weighted = means[0] + f64::from(SECOND_WEIGHT) * means[2] + f64::from(BOX_WEIGHT) * means[3];
    assert!((totals.loss(engine.model().reports()) - weighted).abs() < 1e-12, "{means:?}");
}

#[test]
fn a_label_that_is_no_class_of_its_head_is_refused_with_its_sample() {
    let mut engine = engine(Recompute::None);
    for (input, label) in [(1, CLASSES as i32), (2, -1)] {
        let mut inputs = inputs();
        let TensorData::I32(labels) = &mut inputs[input].data else { panic!() };
        labels[4] = label;
        let error = engine.evaluate(&batch(&inputs)).unwrap_err().to_string();
        assert!(error.contains("sample 4") && error.contains(&label.to_string()), "input {input}: {error}");
    }
}

#[test]
fn each_row_is_correct_for_exactly_one_class() {
    let mut engine = engine(Recompute::None);
    let correct = |engine: &mut Engine, class: usize| {
        let mut inputs = inputs();
        inputs[1].data = TensorData::I32(vec![class as i32; SAMPLES]);
        evaluated(engine, &inputs).sums[1]
    };
    let by_class: Vec<f64> = (0..CLASSES).map(|class| correct(&mut engine, class)).collect();
    assert_eq!(by_class.iter().sum::<f64>(), SAMPLES as f64, "{by_class:?}");
}

#[test]
fn the_gradient_is_the_derivative_of_the_weighted_losses() {
    let inputs = inputs();
    let mut reference: Option<Vec<Vec<f32>>> = None;
    for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
        let mut engine = engine(recompute);
        let counts = batch(&inputs).counts(engine.model());
        let seed = Totals { counts, ..Totals::default() }.seed(engine.model().reports(), SAMPLES as u64, 1.0);
        engine.forward_backward([batch(&inputs)].into_iter(), seed).unwrap();
        // A training step reports what an evaluation of the same weights does.
        let sums = engine.take_reported();
        assert_eq!(sums, evaluated(&mut engine, &inputs).sums, "{recompute:?}");
        let ids: Vec<ParameterId> = engine.trained_ids().collect();
        let gradients: Vec<Vec<f32>> = ids.iter().map(|id| engine.gradient(*id).unwrap()).collect();
        for (id, gradient) in ids.iter().zip(&gradients) {
            let name = engine.records()[id.0].name.clone();
            let weights = engine
                .state_tensors()
                .into_iter()
                .find(|tensor| tensor.kind == StateKind::Parameter && tensor.record.name == name)
                .unwrap()
                .to_vec()
                .unwrap();
            for at in 0..weights.len() {
                let mut loss_at = |step: f32| {
                    let mut moved = weights.clone();
                    moved[at] += step;
                    engine.write_state(*id, StateKind::Parameter, &moved).unwrap();
                    evaluated(&mut engine, &inputs).loss(engine.model().reports())
                };
                let slope = (loss_at(1e-2) - loss_at(-1e-2)) / 2e-2;
                let found = f64::from(gradient[at]);
                assert!((found - slope).abs() < 2e-3 + 1e-2 * slope.abs(), "{name}[{at}]: {found}, {slope}");
            }
            engine.write_state(*id, StateKind::Parameter, &weights).unwrap();
        }
        assert_eq!(reference.get_or_insert(gradients.clone()), &gradients, "{recompute:?}");
    }
}
