//! A plan's numbers against those of one rank: loss, gradient norm and every parameter's gradient, step by step.
//!
//! Both are ordinary runs that leave nothing behind. How far they may lie apart is in [`Tolerance`]: sums are made of other
//! summands, and that is all that a plan may change. [`Comparison`] is what a person is shown, and the verdict.

use std::collections::BTreeMap;
use std::ops::Range;

use lockstep_config::{
    Precision, Resume, Rounding, RunConfig, StatePrecision, offload_to_existing_directory,
};
use lockstep_engine::{Engine, Ranks};
use lockstep_observe::metrics::StepMetrics;
use lockstep_observe::progress::Progress;
use lockstep_plan::{Plan, Quantization, QuantizedType, Sharding, Share};
use serde::{Deserialize, Serialize};

use crate::interrupt::Interrupt;
use crate::trainer::{Leaves, run};
use crate::{Error, StepObserver};

pub use crate::comparison::{
    ComparedElement, ComparedGradient, ComparedStep, Comparison, NARROW_FACTOR, ROUTER_MARGIN,
};

/// What a run computed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Numbers {
    /// Loss and gradient norm of each step.
    pub steps: Vec<[f64; 2]>,
    /// The gradients of the first step by parameter, whole.
    pub gradients: BTreeMap<String, Vec<f32>>,
    /// How many slots of each step have chosen each expert, by layer that has experts.
    pub load: Vec<Vec<Vec<i64>>>,
    /// How near any token of any step has been to choosing other experts, in scores of its router; none in models without any.
    pub router_margin: Option<f32>,
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

    /// What plans in which something is quantized keep to, beside one rank of the same precision.
    ///
    /// An element is off by at most half of its block's scale, which is the block's largest element over 127 or 7, and by 0.29 of it on
    /// the average. Where one element of 256 has all of a block's norm, that makes 3.6 % of the norm for int8 and 66 % for int4; gradients made
    /// with weights that are off so little are further off, by what they go through.
    pub fn of(quantization: Quantization) -> Self {
        let of_gradients = match quantization.gradients {
            None => 0.0,
            Some(QuantizedType::Int8) => 0.036,
            Some(QuantizedType::Int4) => 0.66,
        };
        let of_weights = if quantization.weights.is_some() { 0.1 } else { 0.0 };
        let all = of_gradients + of_weights;
        if all == 0.0 {
            Self::F32
        } else {
            Self { first: all, later: all / 4.0, gradient: all, model: all / 100.0 }
        }
    }
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
    let mut config = config.clone();
    offload_to_existing_directory(&mut config);
    // Only steps that are shown say how experts were chosen.
    config.train.log_every = 1;
    // The learning rate of a step depends on how many there are, so that the run is stopped and not shortened.
    let stop = Interrupt::default();
    let mut watch = Watch { ranks, steps, asked: interrupt, stop: stop.clone(), numbers: Numbers::default() };
    let show = |steps| Progress::as_lines(steps, Box::new(std::io::sink()));
    run(&config, &Resume::Never, ranks, &stop, show, (&mut watch, Leaves::Nothing))?;
    Ok(ranks.is_first().then_some(watch.numbers))
}

/// Runs as `config` says, seen by `observer`, and leaves nothing behind.
///
/// # Errors
/// As [`train`](crate::train).
pub fn watch(config: &RunConfig, ranks: &Ranks, observer: &mut dyn StepObserver) -> Result<(), Error> {
    let mut config = config.clone();
    offload_to_existing_directory(&mut config);
    let show = |steps| Progress::as_lines(steps, Box::new(std::io::sink()));
    run(&config, &Resume::Never, ranks, &Interrupt::default(), show, (observer, Leaves::Nothing)).map(drop)
}

/// The same run on one rank.
pub fn alone(config: &RunConfig) -> RunConfig {
    let mut config = config.clone();
    let Plan { micro_batch, recompute, residence, bucket_mb, .. } = config.plan;
    let sharding = Sharding { wrap: config.plan.sharding.wrap.clone(), ..Sharding::default() };
    config.plan = Plan { micro_batch, recompute, residence, bucket_mb, sharding, ..Plan::default() };
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
    fn begins(&mut self, engine: &mut Engine) {
        engine.watch_router_margin();
    }

    fn gradients_ready(&mut self, step: u64, engine: &mut Engine) -> Result<(), Error> {
        if step == 1 {
            let of_ranks = self.ranks.gather(&held(self.ranks, engine)?)?;
            self.numbers.gradients = whole(&of_ranks);
        }
        let of_ranks = self.ranks.gather(&engine.router_margin().unwrap_or(f32::INFINITY).to_le_bytes())?;
        let margins =
            of_ranks.iter().filter_map(|bytes| bytes.first_chunk()).map(|bytes| f32::from_le_bytes(*bytes));
        self.numbers.router_margin = margins.reduce(f32::min).filter(|margin| margin.is_finite());
        Ok(())
    }

    fn step_ended(&mut self, row: &StepMetrics) {
        self.numbers.steps.push([row.loss, row.grad_norm]);
        self.numbers.load.push(row.expert_load.clone());
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
    /// Of what the share says, these elements.
    part: Range<usize>,
}

/// The gradients that this rank is the one to speak for: how long their description is, it, and their elements.
fn held(ranks: &Ranks, engine: &Engine) -> Result<Vec<u8>, Error> {
    let speaks_for = |id: &lockstep_plan::ParameterId| ranks.is_of_first_copy() && engine.speaks_for(*id);
    let ids: Vec<_> = engine.trained_ids().filter(speaks_for).collect();
    let describe = |id: &lockstep_plan::ParameterId| {
        let record = &engine.records()[id.0];
        let part = engine.owned_range(*id);
        Held { name: record.name.clone(), shape: record.shape.clone(), share: record.share, part }
    };
    let description = serde_json::json!(ids.iter().map(describe).collect::<Vec<_>>()).to_string();
    let mut bytes = (description.len() as u64).to_le_bytes().to_vec();
    bytes.extend(description.as_bytes());
    for id in ids {
        bytes.extend(engine.gradient(id)?.iter().flat_map(|value| value.to_le_bytes()));
    }
    Ok(bytes)
}

/// Gradients put together from what ranks hold of them; of those that several speak for, the last.
fn whole(of_ranks: &[Vec<u8>]) -> BTreeMap<String, Vec<f32>> {
    let mut gradients = BTreeMap::new();
    for bytes in of_ranks {
        let Some((len, rest)) = bytes.split_first_chunk::<8>() else { continue };
        let (description, elements) = rest.split_at(u64::from_le_bytes(*len) as usize);
        let description: Vec<Held> = serde_json::from_slice(description).unwrap_or_default();
        let mut elements = elements.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        for Held { name, shape, share, part } in description {
            let gradient =
                gradients.entry(name).or_insert_with(|| vec![f32::NAN; shape.iter().product::<usize>()]);
            for (first, len) in share.stretches_of_part(&shape, part) {
                for (element, value) in gradient[first..first + len].iter_mut().zip(&mut elements) {
                    *element = value;
                }
            }
        }
    }
    gradients
}
