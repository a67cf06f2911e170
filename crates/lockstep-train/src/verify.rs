//! A plan's numbers against those of one rank: loss, gradient norm and every parameter's gradient, step by step.
//!
//! Both are ordinary runs that leave nothing behind. How far they may lie apart is in [`Tolerance`]: sums are made of other
//! summands, and that is all that a plan may change. [`Comparison`] is what a person is shown, and the verdict.

use std::collections::BTreeMap;

use lockstep_engine::Engine;
use lockstep_plan::Share;
use serde::{Deserialize, Serialize};

use crate::config::{Precision, Rounding, StatePrecision};
use crate::interrupt::Interrupt;
use crate::metrics::StepMetrics;
use crate::progress::Progress;
use crate::trainer::{Leaves, run};
use crate::{Error, Ranks, Resume, RunConfig, StepObserver};

pub use crate::comparison::{ComparedGradient, ComparedStep, Comparison, NARROW_FACTOR};

/// What a run computed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Numbers {
    /// Loss and gradient norm of each step.
    pub steps: Vec<[f64; 2]>,
    /// The gradients of the first step by parameter, whole.
    pub gradients: BTreeMap<String, Vec<f32>>,
}

/// How far a plan's numbers may lie from one rank's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tolerance {
    /// Of the first loss and the first gradient norm, relative.
    pub first: f64,
    /// Of later losses, relative, however many steps have been made.
    pub later: f64,
    /// Of each gradient: `‖Δg‖ ≤ gradient ‖g‖ + model ‖g of the model‖`.
    pub gradient: f64,
    /// See there.
    pub model: f64,
}

impl Tolerance {
    /// What f32 plans keep to.
    pub const F32: Self = Self { first: 1e-5, later: 1e-4, gradient: 1e-5, model: 1e-7 };
}

/// A number that lies too far from one rank's.
#[derive(Debug, Clone, PartialEq)]
pub enum Difference {
    /// Of a step.
    Step {
        /// Its number, from 1.
        step: usize,
        /// `loss` or `gradient norm`.
        what: &'static str,
        /// The plan's and one rank's.
        found: [f64; 2],
    },
    /// The gradient of a parameter in the first step.
    Gradient {
        /// The parameter.
        name: String,
        /// Norm of the difference, and how large it may be.
        norm: [f64; 2],
        /// The element that differs most, with the plan's and one rank's value.
        element: usize,
        /// See there.
        found: [f32; 2],
    },
    /// A parameter that only one of both has, or in another size.
    Parameter {
        /// Its name.
        name: String,
    },
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Step { step, what, found: [plan, alone] } => {
                write!(f, "step {step}: {what} {plan}, on one rank {alone}")
            }
            Self::Gradient { name, norm: [norm, allowed], element, found: [plan, alone] } => write!(
                f,
                "gradient of {name}: differs by {norm:.3e}, allowed is {allowed:.3e}; element {element} is {plan:e}, on one \
                 rank {alone:e}"
            ),
            Self::Parameter { name } => write!(f, "{name}: not the same parameter on one rank"),
        }
    }
}

impl Numbers {
    /// Where these numbers lie too far from those of one rank.
    pub fn differences(&self, alone: &Self, tolerance: Tolerance) -> Vec<Difference> {
        let mut differences = Vec::new();
        for (index, (found, expected)) in self.steps.iter().zip(&alone.steps).enumerate() {
            let allowed = if index == 0 { tolerance.first } else { tolerance.later };
            for (what, (found, expected)) in
                ["loss", "gradient norm"].into_iter().zip(found.iter().zip(expected))
            {
                // The norm of later steps has wandered further than the loss: it is shown, and not judged.
                let is_judged = index == 0 || what == "loss";
                let is_near = (found - expected).abs() <= allowed * expected.abs();
                if is_judged && !is_near {
                    differences.push(Difference::Step { step: index + 1, what, found: [*found, *expected] });
                }
            }
        }
        let of_model = norm(alone.gradients.values().flatten().map(|g| f64::from(*g)));
        for name in
            self.gradients.keys().chain(alone.gradients.keys().filter(|n| !self.gradients.contains_key(*n)))
        {
            let (Some(found), Some(expected)) = (self.gradients.get(name), alone.gradients.get(name)) else {
                differences.push(Difference::Parameter { name: name.clone() });
                continue;
            };
            if found.len() != expected.len() {
                differences.push(Difference::Parameter { name: name.clone() });
                continue;
            }
            let apart = |(a, b): (&f32, &f32)| f64::from(*a) - f64::from(*b);
            let distance = norm(found.iter().zip(expected).map(apart));
            let own = norm(expected.iter().map(|g| f64::from(*g)));
            let allowed = tolerance.gradient * own + tolerance.model * of_model;
            if distance.is_nan() || distance > allowed {
                let worst = |index: &usize| apart((&found[*index], &expected[*index])).abs();
                let element = (0..found.len()).max_by(|a, b| worst(a).total_cmp(&worst(b))).unwrap_or(0);
                let found = [found[element], expected[element]];
                let norm = [distance, allowed];
                differences.push(Difference::Gradient { name: name.clone(), norm, element, found });
            }
        }
        differences
    }
}

pub(crate) fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|value| value * value).sum::<f64>().sqrt()
}

/// A run on a small text, for a tiny model that is named by the first of its settings; [`TINY_LLAMA`] is one.
pub const SAMPLE_RUN: &str = include_str!("sample.toml");

/// Rotary positions, RMSNorm, grouped-query attention, tied embeddings: settings for [`SAMPLE_RUN`].
pub const TINY_LLAMA: [&str; 8] = [
    "model.preset=llama-15m",
    "model.hidden_size=32",
    "model.intermediate_size=48",
    "model.num_hidden_layers=4",
    "model.num_attention_heads=8",
    "model.num_key_value_heads=2",
    "model.max_position_embeddings=16",
    "model.tie_word_embeddings=true",
];

/// The text of [`SAMPLE_RUN`], as JSON lines: prompts, which do not count, and completions, so that ranks differ in their valid
/// tokens.
pub fn sample_text() -> String {
    let words = ["tape", "shard", "mesh", "rank", "block"];
    let say = |i: usize, count: usize| -> String {
        (0..count).map(|j| format!("{} ", words[(i * i + j * 7) % 5])).collect()
    };
    let line = |i: usize| {
        let (prompt, completion) = (say(i, 1 + i % 4), say(i + 3, 1 + i % 5));
        format!("{{\"prompt\": \"{prompt}\", \"completion\": \"{completion}\"}}\n")
    };
    (0..300).map(line).collect()
}

/// Runs as `config` says and returns what was computed: on the first rank, and nothing on the others.
///
/// # Errors
/// As [`train`](crate::train).
pub fn numbers(config: &RunConfig, ranks: &Ranks, interrupt: &Interrupt) -> Result<Option<Numbers>, Error> {
    first_numbers(config, u64::MAX, ranks, interrupt)
}

/// What the first `steps` steps of a run compute: [`numbers`] of no more than these.
///
/// # Errors
/// As [`train`](crate::train).
pub fn first_numbers(
    config: &RunConfig,
    steps: u64,
    ranks: &Ranks,
    interrupt: &Interrupt,
) -> Result<Option<Numbers>, Error> {
    // The learning rate of a step depends on how many there are, so that the run is stopped and not shortened.
    let stop = Interrupt::default();
    let mut watch = Watch { ranks, steps, asked: interrupt, stop: stop.clone(), numbers: Numbers::default() };
    let show = |steps| Progress::as_lines(steps, Box::new(std::io::sink()));
    run(config, &Resume::Never, ranks, &stop, show, (&mut watch, Leaves::Nothing))?;
    Ok(ranks.is_first().then_some(watch.numbers))
}

/// The same run on one rank.
pub fn alone(config: &RunConfig) -> RunConfig {
    let mut config = config.clone();
    config.parallel.data_parallel_replicate = 1;
    config.parallel.tensor_parallel = 1;
    config.parallel.sequence_parallel = false;
    config.parallel.pipeline_parallel = 1;
    config
}

/// The same run in f32.
pub fn exact(config: &RunConfig) -> RunConfig {
    let mut config = config.clone();
    config.train.precision = Precision::F32;
    config.train.master_weights = true;
    config.optimizer.state_precision = StatePrecision::F32;
    config.optimizer.rounding = Rounding::Nearest;
    config
}

struct Watch<'a> {
    ranks: &'a Ranks,
    /// After so many the run is stopped.
    steps: u64,
    /// Whether it is to stop before.
    asked: &'a Interrupt,
    stop: Interrupt,
    numbers: Numbers,
}

impl StepObserver for Watch<'_> {
    fn gradients_ready(&mut self, step: u64, engine: &mut Engine) -> Result<(), Error> {
        if step == 1 {
            let of_ranks = self.ranks.gather(&held(self.ranks, engine))?;
            self.numbers.gradients = whole(&of_ranks);
        }
        Ok(())
    }

    fn step_ended(&mut self, row: &StepMetrics) {
        self.numbers.steps.push([row.loss, row.grad_norm]);
        if row.step == 1
            && let Some(scale) = row.loss_scale
        {
            self.numbers.gradients.values_mut().flatten().for_each(|g| *g /= scale as f32);
        }
        if row.step >= self.steps || self.asked.is_requested() {
            self.stop.request();
        }
    }
}

/// What a rank holds of one gradient.
#[derive(Serialize, Deserialize)]
struct Held {
    name: String,
    shape: Vec<usize>,
    share: Share,
}

/// The gradients that this rank is the one to speak for: how long their description is, it, and their elements.
fn held(ranks: &Ranks, engine: &Engine) -> Vec<u8> {
    let speaks_for = |id: &lockstep_plan::ParameterId| ranks.replica() == 0 && engine.speaks_for(*id);
    let ids: Vec<_> = engine.trained_ids().filter(speaks_for).collect();
    let describe = |id: &lockstep_plan::ParameterId| {
        let record = &engine.records()[id.0];
        Held { name: record.name.clone(), shape: record.shape.clone(), share: record.share }
    };
    let description = serde_json::json!(ids.iter().map(describe).collect::<Vec<_>>()).to_string();
    let mut bytes = (description.len() as u64).to_le_bytes().to_vec();
    bytes.extend(description.as_bytes());
    for id in ids {
        bytes.extend(engine.gradient(id).iter().flat_map(|value| value.to_le_bytes()));
    }
    bytes
}

/// Gradients put together from what ranks hold of them; of those that several speak for, the last.
fn whole(of_ranks: &[Vec<u8>]) -> BTreeMap<String, Vec<f32>> {
    let mut gradients = BTreeMap::new();
    for bytes in of_ranks {
        let Some((len, rest)) = bytes.split_first_chunk::<8>() else { continue };
        let (description, elements) = rest.split_at(u64::from_le_bytes(*len) as usize);
        let description: Vec<Held> = serde_json::from_slice(description).unwrap_or_default();
        let mut elements = elements.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        for Held { name, shape, share } in description {
            let gradient =
                gradients.entry(name).or_insert_with(|| vec![f32::NAN; shape.iter().product::<usize>()]);
            for (first, len) in share.stretches(&shape) {
                for (element, value) in gradient[first..first + len].iter_mut().zip(&mut elements) {
                    *element = value;
                }
            }
        }
    }
    gradients
}
