//! Verification of a plan against one rank: loss, gradient norm and every parameter's gradient, step by step.
//!
//! Both are ordinary runs that write no files. [`Tolerance`] limits their difference: a plan may change only the order of
//! summation. [`Comparison`] holds the numbers for display and the verdict.

use std::collections::BTreeMap;
use std::ops::Range;

use lockstep_config::{
    Precision, Resume, Rounding, RunConfig, StatePrecision, offload_to_existing_directory, resolve_model,
};
use lockstep_engine::{Engine, Ranks};
use lockstep_launch::interrupt::Interrupt;
use lockstep_observe::metrics::StepMetrics;
use lockstep_observe::progress::Progress;
use lockstep_plan::{Plan, Quantization, QuantizedType, Sharding, Share};
use serde::{Deserialize, Serialize};

use crate::generated_samples::generated_samples;
use crate::records::RunOutputs;
use crate::trainer::{run, run_on};
use crate::{Error, StepObserver, TrainingData};

pub use crate::comparison::{
    ComparedElement, ComparedGradient, ComparedStep, Comparison, NARROW_FACTOR, ROUTER_MARGIN,
};

/// Numbers that a run has computed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Numbers {
    /// Loss and gradient norm of each step.
    pub steps: Vec<[f64; 2]>,
    /// Complete gradients of the first step, by parameter.
    pub gradients: BTreeMap<String, Vec<f32>>,
    /// Token slots routed to each expert, by step and layer with experts.
    pub load: Vec<Vec<Vec<i64>>>,
    /// Smallest difference between router scores at which any token would have been routed to other experts; `None` without
    /// experts.
    pub router_margin: Option<f32>,
}

/// Tolerance between a plan's numbers and those of one rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tolerance {
    /// Relative tolerance of the loss and gradient norm of the first step.
    pub first: f64,
    /// Relative tolerance of the loss of all later steps.
    pub later: f64,
    /// Factor `gradient` in the tolerance of each gradient: `‖Δg‖ ≤ gradient ‖g‖ + model ‖g of the model‖`.
    pub gradient: f64,
    /// Factor `model` in the same formula.
    pub model: f64,
}

impl Tolerance {
    /// Tolerance of plans in f32.
    pub const F32: Self = Self { first: 1e-5, later: 1e-4, gradient: 1e-5, model: 1e-7 };

    /// Returns the tolerance of plans with quantized communication, compared with one rank of the same precision.
    ///
    /// An element's error is at most half of its block's scale, which is the block's largest element divided by 127 or 7; the
    /// average error is 0.29 of the scale. If one element of 256 has all of a block's norm, the error is 3.6 % of the norm for
    /// int8 and 66 % for int4. Quantized weights add the error that propagates through them to the gradients.
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

/// Configuration of a run on a small text, without a model: the settings of a tiny one are added, for instance [`TINY_LLAMA`].
pub const SAMPLE_RUN: &str = include_str!("sample.toml");

/// Settings for [`SAMPLE_RUN`]: rotary positions, RMSNorm, grouped-query attention, tied embeddings.
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

/// Returns the text of [`SAMPLE_RUN`] as JSON lines with prompts, whose labels are masked, and completions. The number of valid
/// tokens differs between ranks.
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

/// Runs `config` and returns its numbers on the first rank; `None` on the others.
///
/// # Errors
/// As [`train`](crate::train).
pub fn numbers(config: &RunConfig, ranks: &Ranks, interrupt: &Interrupt) -> Result<Option<Numbers>, Error> {
    first_numbers(config, u64::MAX, ranks, interrupt)
}

/// Runs the first `steps` steps of `config` and returns their numbers, as [`numbers`] does.
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
    // Only logged steps report the expert load.
    config.train.log_every = 1;
    // The learning rate depends on the number of steps, so the run is stopped early instead of being shortened.
    let stop = Interrupt::default();
    let mut watch = Watch { ranks, steps, asked: interrupt, stop: stop.clone(), numbers: Numbers::default() };
    run_silently(&config, ranks, &stop, &mut watch)?;
    Ok(ranks.is_first().then_some(watch.numbers))
}

/// Runs `config` with an observer and writes no files.
///
/// # Errors
/// As [`train`](crate::train).
pub fn watch(config: &RunConfig, ranks: &Ranks, observer: &mut dyn StepObserver) -> Result<(), Error> {
    let mut config = config.clone();
    offload_to_existing_directory(&mut config);
    run_silently(&config, ranks, &Interrupt::default(), observer)
}

/// Runs `config` on its text, or on [`sample_data`] if its model needs them, and writes no files.
fn run_silently(
    config: &RunConfig,
    ranks: &Ranks,
    interrupt: &Interrupt,
    observer: &mut dyn StepObserver,
) -> Result<(), Error> {
    let show = |steps| Progress::as_lines(steps, Box::new(std::io::sink()));
    let observed = (observer, RunOutputs::Nothing);
    match sample_data(config)? {
        None => run(config, &Resume::Never, ranks, interrupt, show, observed),
        Some(data) => {
            let model = resolve_model(config)?;
            run_on((&model, data), config, &Resume::Never, ranks, interrupt, show, observed)
        }
    }
    .map(drop)
}

/// Returns random samples for a run whose model reads named inputs, which no text has; `None` for other runs.
///
/// # Errors
/// If the model is not supported, or the plan does not fit it.
pub fn sample_data(config: &RunConfig) -> Result<Option<TrainingData>, Error> {
    let model = resolve_model(config)?;
    Ok(generated_samples(&model.config, config.train.seq_len))
}

/// Returns the same run on one rank.
pub fn alone(config: &RunConfig) -> RunConfig {
    let mut config = config.clone();
    let Plan { micro_batch, recompute, residence, bucket_mb, .. } = config.plan;
    let sharding = Sharding { wrap: config.plan.sharding.wrap.clone(), ..Sharding::default() };
    config.plan = Plan { micro_batch, recompute, residence, bucket_mb, sharding, ..Plan::default() };
    config
}

/// Returns the same run in f32.
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
    /// Number of steps after which the run is stopped.
    steps: u64,
    /// Stop request of the caller.
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

/// Description of a rank's shard of one gradient.
#[derive(Serialize, Deserialize)]
struct Held {
    name: String,
    shape: Vec<usize>,
    share: Share,
    /// Range of the shard's elements that this rank owns.
    part: Range<usize>,
}

/// Serializes the gradients that this rank represents: the length of the description in bytes, the description as JSON, and the
/// elements.
fn held(ranks: &Ranks, engine: &Engine) -> Result<Vec<u8>, Error> {
    let is_primary_owner =
        |id: &lockstep_plan::ParameterId| ranks.is_in_first_replica() && engine.is_primary_owner(*id);
    let ids: Vec<_> = engine.trained_ids().filter(is_primary_owner).collect();
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

/// Assembles complete gradients from the shards of all ranks; if several ranks represent an element, the last one wins.
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
            for (first, len) in share.element_ranges_of_part(&shape, part) {
                for (element, value) in gradient[first..first + len].iter_mut().zip(&mut elements) {
                    *element = value;
                }
            }
        }
    }
    gradients
}
