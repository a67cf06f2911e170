//! Benchmarks of this machine: whole training steps on random tokens, and the matrix products in them.

use std::time::{Duration, Instant};

use lockstep_config::{NamedModel, RunConfig, config_of, engine_options, overrides_of};
use lockstep_engine::{Engine, EngineOptions, HostBatch, Ranks, Update};
use lockstep_graph::{BlockShape, Seed, Totals};
use lockstep_model::{ModelConfig, Tuning};
use lockstep_observe::metrics::{CommunicationUse, DiskUse, MemoryUse, PredictedMemory};
use lockstep_observe::roofline::{Detail, Limits, Roofline};
use lockstep_plan::random::Philox;
use lockstep_plan::{CheckedPlan, DType, MemoryCategory};
use lockstep_planner::Forecast;
use lockstep_planner::forecast::MemoryInputs;
use lockstep_tensor::host::{peak_own_bytes, peak_resident_bytes, proportional_bytes};
use lockstep_tensor::{
    Arena, CopyKernels, CpuLevel, CpuQueue, Gemm, GemmKernels, GemmLayout, Tensor, TensorError, Write,
};

use crate::Error;
use crate::clipping::clip_coefficient;

pub(crate) const SEED: u64 = 1337;
/// Smallest number of runs of each product; the fastest counts.
const GEMM_RUNS: usize = 5;
/// Time in which a product is run again and again. Threads that have just begun, on cores that others use, are slower for milliseconds.
const GEMM_TIME: Duration = Duration::from_millis(100);

/// A benchmark of training steps.
#[derive(Debug, Clone)]
pub struct StepBenchmark {
    /// The plan of the ranks.
    pub plan: CheckedPlan,
    /// Precision, storage and threads of each rank.
    pub options: EngineOptions,
    /// Timed steps, after one warm-up step; at least one.
    pub steps: usize,
    /// Granularity at which operations are timed as well; `None` if they are not.
    pub roofline: Option<Detail>,
}

impl StepBenchmark {
    /// Returns the engine's settings for a benchmark: AdamW, with so many compute threads.
    pub fn engine_options(config: &RunConfig, dtype: DType, threads: usize) -> EngineOptions {
        let optimizer = EngineOptions::default().optimizer;
        EngineOptions { dtype, threads, optimizer, seed: SEED, ..engine_options(config) }
    }

    /// Returns the shape of a micro-batch, with the type that kernels read.
    pub fn shape(&self) -> BlockShape {
        BlockShape::of_plan(&self.plan, self.options.dtype)
    }

    /// Returns the micro-batches of each rank in a step.
    pub fn accumulation(&self) -> usize {
        self.plan.layout().micro_batches
    }

    /// Predicts the memory of the ranks in these steps of `model`, with the parallelism of `config`.
    ///
    /// # Errors
    /// A configuration that does not fit the model.
    pub fn forecast(
        &self,
        config: &RunConfig,
        model: &ModelConfig,
    ) -> Result<Forecast, lockstep_planner::Error> {
        let training = MemoryInputs::bare(self.options.clone(), self.plan.plan());
        Forecast::of_training(config, model, &Tuning::default(), &training)
    }
}

/// Measured times and memory of training steps.
#[derive(Debug, Clone)]
pub struct StepTimes {
    /// Instruction set that the kernels used.
    pub level: CpuLevel,
    /// Tokens in a step, on all ranks.
    pub tokens: usize,
    /// Milliseconds of the median step.
    pub step_ms: f64,
    /// Tokens per second in the median step.
    pub tokens_per_s: f64,
    /// FLOP/s of the median step, by the formula that a run prints.
    pub flops_per_s: f64,
    /// The loss of each timed step.
    pub losses: Vec<f64>,
    /// The most memory that all ranks together had resident, in bytes; shared pages count once.
    pub peak_bytes: u64,
    /// Booked bytes of each rank after the last step, with its process's memory.
    pub memory_by_rank: Vec<MemoryUse>,
    /// Predicted memory of each rank.
    pub memory_predicted_by_rank: Vec<PredictedMemory>,
    /// Communication of the first rank in the median step.
    pub comm: CommunicationUse,
    /// Milliseconds of the optimizer step in the median step.
    pub update_ms: f64,
    /// Disk traffic of the first rank during the optimizer step; `None` if nothing is offloaded to disk.
    pub disk: Option<DiskUse>,
    /// Disk traffic of the first rank during the forwards and backwards of the median step.
    pub disk_in_passes: Option<DiskUse>,
    /// Time of the median step by operation, if it was asked for.
    pub roofline: Option<Roofline>,
}

/// Returns the model of a benchmark, with the overrides of its configuration's `[model]`.
///
/// # Errors
/// If the `config.json` is not supported, or overrides do not fit.
pub fn benchmark_model(model: &NamedModel, config: &RunConfig) -> Result<ModelConfig, Error> {
    let model = match model {
        NamedModel::Preset(preset) => ModelConfig::preset(preset)?,
        NamedModel::Directory(directory) => config_of(directory)?,
    };
    let overrides = overrides_of(config);
    if overrides.is_empty() { Ok(model) } else { Ok(model.with_overrides(&overrides, "--set")?) }
}

/// Times steps with AdamW on random tokens. Collective: every rank calls it.
///
/// # Errors
/// If memory or threads cannot be had, or a rank does not answer ([`Error::Comm`]).
pub fn time_steps(
    config: &ModelConfig,
    benchmark: &StepBenchmark,
    ranks: &Ranks,
) -> Result<StepTimes, Error> {
    let StepBenchmark { steps, roofline, .. } = *benchmark;
    let (shape, micro_batches) = (benchmark.shape(), benchmark.accumulation());
    let (options, arena) = (benchmark.options.clone(), ranks.arena());
    let builder = Engine::builder(config, benchmark.plan.rank(ranks.rank()));
    let mut engine = builder.options(options).groups(ranks.groups().clone()).build(&arena)?;
    engine.initialize(SEED)?;
    let tokens_per_step = shape.tokens() * micro_batches * ranks.replicas();
    let steps = steps.max(1);
    let (mut losses, mut timed) = (Vec::with_capacity(steps), Vec::with_capacity(steps));
    for step in 0..=steps {
        let batch = |index| {
            let number = (step * micro_batches + index) * ranks.replicas() + ranks.replica();
            RandomTokens::new(config, shape, number)
        };
        let batches: Vec<RandomTokens> = (0..micro_batches).map(batch).collect();
        if roofline.is_some() {
            engine.timeline().start();
        }
        let begin = Instant::now();
        let (loss, update) = make_step(&mut engine, &batches, tokens_per_step, step as u64 + 1)?;
        let time = begin.elapsed();
        let spans = engine.timeline().stop();
        let traffic = engine.take_traffic();
        if step > 0 {
            timed.push((time, spans, traffic, update));
            losses.push(loss);
        }
    }
    for loss in &mut losses {
        let mut own = Totals::default();
        own.sums[0] = *loss;
        *loss = ranks.totals(own)?.sums[0];
    }
    // Pages count as shared only while all ranks are alive.
    let own_bytes = if ranks.size() == 1 { peak_resident_bytes() } else { peak_own_bytes() };
    let peak_bytes = ranks.sum_of_all(own_bytes)?;
    let memory = MemoryUse { process_pss: proportional_bytes() as usize, ..MemoryUse::of(&arena) };
    let memory_by_rank = memory.of_ranks(ranks)?;
    let predicted =
        MemoryUse { by_category: engine.predicted_memory().by_category(), ..memory }.of_ranks(ranks)?;
    timed.sort_by_key(|(time, ..)| *time);
    let (time, spans, traffic, update) = timed.swap_remove(steps / 2);
    let level = engine.queue().level();
    let flops_per_step = engine.model().training_flops() * (micro_batches * ranks.replicas()) as u64;
    Ok(StepTimes {
        level,
        tokens: tokens_per_step,
        step_ms: time.as_secs_f64() * 1e3,
        tokens_per_s: tokens_per_step as f64 / time.as_secs_f64(),
        flops_per_s: flops_per_step as f64 / time.as_secs_f64(),
        losses,
        peak_bytes,
        memory_by_rank,
        memory_predicted_by_rank: predicted
            .iter()
            .map(|memory| PredictedMemory(memory.by_category))
            .collect(),
        comm: traffic.into(),
        update_ms: update.ms,
        disk: update.disk,
        disk_in_passes: update.disk_in_passes,
        roofline: roofline.map(|detail| {
            let limits = Limits::measure(level, benchmark.options.threads);
            Roofline::new(&spans, time, engine.model(), detail, Some(limits))
        }),
    })
}

/// Time and disk traffic of an optimizer step.
pub(crate) struct UpdateUse {
    ms: f64,
    disk: Option<DiskUse>,
    /// Disk traffic of the forwards and backwards before it.
    disk_in_passes: Option<DiskUse>,
}

/// Runs a step, and returns this rank's part of the mean loss and the cost of the optimizer step.
pub(crate) fn make_step(
    engine: &mut Engine,
    batches: &[RandomTokens],
    tokens: usize,
    step: u64,
) -> Result<(f64, UpdateUse), Error> {
    let of_micro_batch = batches[0].batch();
    let seq_len = of_micro_batch.ids.len() / of_micro_batch.sample_numbers.len();
    let (tokens, sequences) = (tokens as f64, (tokens / seq_len) as f64);
    let seed = Seed::new((1.0 / tokens) as f32, (1.0 / sequences) as f32);
    let loss = engine.forward_backward(batches.iter().map(RandomTokens::batch), seed)?;
    let norm = engine.finish_gradients()?;
    let disk_in_passes = DiskUse::of(engine.disk_bytes(), engine.take_disk_traffic());
    let begin = Instant::now();
    engine.update(&Update {
        learning_rate: 3e-4,
        weight_decay: 0.1,
        gradient_scale: clip_coefficient(1.0, norm) as f32,
        step,
    })?;
    let ms = begin.elapsed().as_secs_f64() * 1e3;
    let disk = DiskUse::of(engine.disk_bytes(), engine.take_disk_traffic());
    Ok((loss / tokens, UpdateUse { ms, disk, disk_in_passes }))
}

/// A micro-batch of random tokens.
pub(crate) struct RandomTokens {
    /// Token ids, one more than the batch has tokens: labels are the ids shifted by one.
    ids: Vec<u32>,
    labels: Vec<i32>,
    positions: Vec<u32>,
    document_starts: Vec<u32>,
    sample_numbers: Vec<u64>,
}

impl RandomTokens {
    pub(crate) fn new(config: &ModelConfig, shape: BlockShape, number: usize) -> Self {
        let tokens = shape.tokens();
        let random = Philox::new(SEED);
        let first = (number * (tokens + 1)) as u64;
        let vocabulary = config.vocab_size() as u32;
        let ids: Vec<u32> = (first..=first + tokens as u64).map(|i| random.at(i)[0] % vocabulary).collect();
        Self {
            labels: ids[1..].iter().map(|&id| id as i32).collect(),
            positions: (0..tokens).map(|i| (i % shape.seq_len) as u32).collect(),
            document_starts: vec![0; tokens],
            sample_numbers: (0..shape.sequences as u64).collect(),
            ids,
        }
    }

    fn batch(&self) -> HostBatch<'_> {
        HostBatch {
            ids: &self.ids[..self.labels.len()],
            labels: &self.labels,
            positions: &self.positions,
            document_starts: &self.document_starts,
            sample_numbers: &self.sample_numbers,
            inputs: &[],
        }
    }
}

/// Timed layers as (name, tokens, outputs, inputs): linear layers of `baby-gpt` (8 × 256) and of `gpt2-124m` (2 × 512, its
/// vocabulary rounded up to whole tiles).
const LAYERS: [(&str, usize, usize, usize); 6] = [
    ("baby-gpt projection", 2048, 384, 384),
    ("baby-gpt feed-forward", 2048, 1536, 384),
    ("gpt2-124m projection", 1024, 768, 768),
    ("gpt2-124m feed-forward", 1024, 3072, 768),
    ("gpt2-124m output layer", 1024, 50304, 768),
    ("square", 1024, 1024, 1024),
];

/// A timed matrix product.
#[derive(Debug, Clone, PartialEq)]
pub struct GemmTime {
    /// Name of the layer that it belongs to.
    pub name: &'static str,
    /// Layout: NT is the forward, NN the input gradient, TN the weight gradient.
    pub layout: GemmLayout,
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Length of the inner dimension.
    pub k: usize,
    /// Milliseconds of the fastest run.
    pub ms: f64,
    /// Rate of the fastest run, in GFLOP/s.
    pub gflops: f64,
}

/// Times the products of a few layers in `dtype` by the kernels of `level`, and passes each to `show`.
///
/// # Errors
/// If memory or threads cannot be had.
pub fn time_gemms(
    dtype: DType,
    level: CpuLevel,
    threads: usize,
    mut show: impl FnMut(GemmTime),
) -> Result<(), TensorError> {
    let arena = Arena::new();
    let queue = CpuQueue::with_level(threads, &arena, level)?;
    for (name, tokens, outputs, inputs) in LAYERS {
        for layout in [GemmLayout::NT, GemmLayout::NN, GemmLayout::TN] {
            let (m, n, k) = match layout {
                GemmLayout::NT => (tokens, outputs, inputs),
                GemmLayout::NN => (tokens, inputs, outputs),
                GemmLayout::TN => (outputs, inputs, tokens),
            };
            let a = random(&queue, &arena, dtype, if layout == GemmLayout::TN { [k, m] } else { [m, k] })?;
            let b = random(&queue, &arena, dtype, if layout == GemmLayout::NT { [n, k] } else { [k, n] })?;
            // Weight gradients are accumulated in f32.
            let out = if layout == GemmLayout::TN { DType::F32 } else { dtype };
            let c = Tensor::zeros(&arena, out, [m, n], MemoryCategory::Workspace)?;
            let gemm =
                Gemm { layout, a: a.view(), b: b.view(), c: c.view(), bias: None, write: Write::Overwrite };
            let (first, mut seconds, mut runs) = (Instant::now(), f64::INFINITY, 0);
            while runs < GEMM_RUNS || first.elapsed() < GEMM_TIME {
                let begin = Instant::now();
                queue.gemm(gemm);
                seconds = begin.elapsed().as_secs_f64().min(seconds);
                runs += 1;
            }
            let gflops = 2.0 * m as f64 * n as f64 * k as f64 / seconds / 1e9;
            show(GemmTime { name, layout, m, n, k, ms: seconds * 1e3, gflops });
        }
    }
    Ok(())
}

/// Returns a matrix of random numbers in -1..1: some CPUs multiply zeros faster.
pub(crate) fn random(
    queue: &CpuQueue,
    arena: &Arena,
    dtype: DType,
    shape: [usize; 2],
) -> Result<Tensor, TensorError> {
    let random = Philox::new(SEED);
    let elements = (shape[0] * shape[1]) as u64;
    let values: Vec<f32> = (0..elements).map(|i| random.at(i)[0] as i32 as f32 / i32::MAX as f32).collect();
    let exact = Tensor::from_slice(arena, shape, &values, MemoryCategory::Workspace)?;
    let rounded = Tensor::zeros(arena, dtype, shape, MemoryCategory::Workspace)?;
    queue.cast(exact.view(), rounded.view());
    Ok(rounded)
}

#[cfg(test)]
mod tests {

    use lockstep_comm::{World, WorldOptions};

    use super::*;
    use crate::ranks_of_model;
    use lockstep_config::plan::checked_plan;

    fn tiny() -> ModelConfig {
        let table = serde_json::json!({
            "model_type": "llama", "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
            "max_position_embeddings": 8,
        });
        ModelConfig::from_table(table.as_object().unwrap(), "test").unwrap()
    }

    /// Returns a benchmark of two micro-batches of two sequences of 8 tokens, on `replicas` data-parallel replicas.
    fn benchmark(replicas: usize) -> (RunConfig, StepBenchmark) {
        let batch = ["train.seq_len=8", "train.micro_batch=2", "train.global_batch=4"];
        let replicas = format!("parallel.data_parallel_replicate={replicas}");
        let config = RunConfig::parse("", "test", &[&batch[..], &[&replicas]].concat()).unwrap();
        let plan = checked_plan(&config, &tiny(), &Tuning::default()).unwrap();
        let options = StepBenchmark::engine_options(&config, DType::F32, 1);
        (config, StepBenchmark { plan, options, steps: 3, roofline: None })
    }

    #[test]
    fn ranks_and_micro_batches_share_the_same_step() {
        let alone = time_steps(&tiny(), &benchmark(1).1, &Ranks::alone()).unwrap();
        let groups = World::in_process(2, WorldOptions { arena_bytes: 1 << 24, ..WorldOptions::default() });
        let both: Vec<StepTimes> = std::thread::scope(|scope| {
            let rank = |group| {
                scope.spawn(move || {
                    let (config, benchmark) = benchmark(2);
                    let ranks = ranks_of_model(group, &config, &tiny(), &Tuning::default()).unwrap();
                    time_steps(&tiny(), &benchmark, &ranks).unwrap()
                })
            };
            let threads: Vec<_> = groups.unwrap().into_iter().map(rank).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!((alone.tokens, both[0].tokens, alone.comm.bytes), (32, 32, 0));
        assert_eq!(both[0].losses, both[1].losses);
        for (alone, both) in alone.losses.iter().zip(&both[0].losses) {
            assert!((alone - both).abs() <= 1e-5 * alone, "{both}, on one rank {alone}");
        }
        assert!(both[0].comm.bytes > 0 && both[0].comm.busy_ms >= both[0].comm.exposed_ms, "{both:?}");
        assert!(both[0].peak_bytes > 0);
    }

    #[test]
    fn every_step_is_timed_and_learns_from_nothing() {
        let roofline = Some(Detail::Kinds);
        let benchmark = StepBenchmark { roofline, ..benchmark(1).1 };
        let times = time_steps(&tiny(), &benchmark, &Ranks::alone()).unwrap();
        assert_eq!((times.losses.len(), times.tokens), (3, 32));
        assert!(times.tokens_per_s > 0.0 && times.flops_per_s > 0.0, "{times:?}");
        // The loss is ln 50 for any model that has seen random tokens only.
        assert!(times.losses.iter().all(|loss| (3.5..4.3).contains(loss)), "{:?}", times.losses);
        let roofline = times.roofline.unwrap();
        assert_eq!(roofline.step_ms, times.step_ms);
        assert!(roofline.covered_ms <= roofline.step_ms, "{roofline}");
    }
}
