//! The training loop on one rank.
//!
//! A step reads the micro-batches of one global batch, counts its valid tokens G, runs forward and backward of each
//! with the seed 1/G, clips by the global norm and updates. A loss or gradient that is not finite never reaches the
//! weights: the step is counted, shown and skipped. Weights that leave the range of f32 all the same are not saved.

use std::path::PathBuf;
use std::time::Instant;

use lockstep_checkpoint::{RunLock, prepare_directory};
use lockstep_data::{MicroBatch, Prefetcher, SampleCursor};
use lockstep_engine::{Engine, HostBatch, Update};
use lockstep_tensor::Arena;

use crate::config::RunConfig;
use crate::describe::describe;
use crate::interrupt::Interrupt;
use crate::metrics::{CommunicationUse, EvalMetrics, MemoryUse, MetricsWriter, Row, Start, StepMetrics};
use crate::progress::{Progress, Steps};
use crate::schedule::LearningRate;
use crate::setup::{build_engine, load_first_weights};
use crate::state::{
    Counters, changed_settings, find_checkpoint, restore, save_run, set_aside_later, text_has_changed,
};
use crate::{Corpus, Error, ResolvedModel, resolve_model};

/// Micro-batches read ahead.
const PREFETCH_DEPTH: usize = 4;
/// Steps in a row that may be skipped before the run gives up.
const MAX_SKIPPED_IN_A_ROW: u64 = 10;

/// Where a run begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// From the newest good checkpoint in `checkpoint.dir`, if there is one.
    Auto,
    /// From the start.
    Never,
    /// From this checkpoint.
    From(PathBuf),
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// Steps made in all.
    pub step: u64,
    /// Steps made by this process.
    pub steps_made: u64,
    /// Tokens that this process trained on.
    pub tokens: u64,
    /// Seconds from the first step to the last save.
    pub seconds: f64,
    /// Loss of the last step of this process, if it made one.
    pub loss: Option<f64>,
    /// The last evaluation's loss.
    pub eval_loss: Option<f64>,
    /// The newest checkpoint.
    pub checkpoint: PathBuf,
    /// Whether it was asked to stop before the last step.
    pub interrupted: bool,
}

/// Trains as `config` says until the last step or until `interrupt` asks for a stop; saves in either case. `show` makes
/// what the run is shown on, usually [`Progress::on_stderr`].
///
/// # Errors
/// A configuration that does not fit, damaged input, a machine that fails. Whatever was saved stays.
pub fn train(
    config: &RunConfig,
    resume: &Resume,
    interrupt: &Interrupt,
    show: impl FnOnce(Steps) -> Progress,
) -> Result<Summary, Error> {
    let model = resolve_model(config)?;
    let corpus = Corpus::open(config, &model)?;
    prepare_directory(&config.checkpoint.dir)?;
    let _lock = RunLock::take(&config.checkpoint.dir)?;
    let arena = Arena::new();
    let (checkpoint, passed_over) = find_checkpoint(config, resume)?;
    let mut engine = build_engine(config, &model, &arena)?;
    let (counters, changed) = match &checkpoint {
        Some(checkpoint) => {
            let changed = changed_settings(config, &model, resume, checkpoint)?;
            (restore(&mut engine, checkpoint)?, changed)
        }
        None => {
            load_first_weights(config, &model, &mut engine)?;
            (Counters::default(), Vec::new())
        }
    };
    let steps = Steps { done: counters.step, total: config.train.steps, log_every: config.train.log_every };
    let mut progress = show(steps);
    describe(config, &model, &corpus, &engine, &mut progress);
    for reason in passed_over {
        progress.message(&format!("passed over a damaged checkpoint: {reason}"));
    }
    let start = match &checkpoint {
        Some(checkpoint) => {
            progress.message(&format!(
                "resuming from {} (step {})",
                checkpoint.path().display(),
                counters.step
            ));
            for difference in changed {
                progress.message(&format!("changed: {difference}"));
            }
            if text_has_changed(checkpoint, &corpus) {
                progress.message("the training text is not the one that the checkpoint was trained on");
            }
            Start::After { step: counters.step }
        }
        None => Start::Fresh,
    };
    if let Some(aside) = set_aside_later(config, resume, &counters)? {
        progress.message(&format!("checkpoints of an earlier run are now in {}", aside.display()));
    }
    let metrics =
        config.metrics.jsonl.then(|| MetricsWriter::open(&config.metrics.dir, start)).transpose()?;
    let metrics = metrics.map(|(writer, _)| writer);
    let cursor = SampleCursor::single(
        counters.samples,
        config.train.global_batch as u64,
        config.micro_batch() as u64,
    )?;
    let remaining = config.train.steps.saturating_sub(counters.step);
    let prefetcher = Prefetcher::start(corpus.train.clone(), cursor.ranges(remaining), PREFETCH_DEPTH)?;
    let saved = checkpoint.map(|checkpoint| (counters.step, checkpoint.path().to_owned()));
    Run {
        config,
        model: &model,
        learning_rate: config.learning_rate(),
        accumulation_steps: config.accumulation_steps(),
        flops_per_step: engine.model().training_flops() * config.accumulation_steps() as u64,
        corpus: &corpus,
        engine,
        prefetcher,
        progress,
        metrics,
        counters,
        skipped_in_a_row: 0,
        last_good: counters.step,
        checkpoint_stall_ms: 0.0,
        saved,
        micro_batches: Vec::new(),
    }
    .run(interrupt)
}

struct Run<'a> {
    config: &'a RunConfig,
    model: &'a ResolvedModel,
    corpus: &'a Corpus,
    engine: Engine,
    prefetcher: Prefetcher,
    progress: Progress,
    metrics: Option<MetricsWriter>,
    learning_rate: LearningRate,
    accumulation_steps: usize,
    flops_per_step: u64,
    counters: Counters,
    skipped_in_a_row: u64,
    last_good: u64,
    checkpoint_stall_ms: f64,
    /// Step and path of the newest checkpoint.
    saved: Option<(u64, PathBuf)>,
    /// The micro-batches of the step at hand.
    micro_batches: Vec<MicroBatch>,
}

impl Run<'_> {
    fn run(mut self, interrupt: &Interrupt) -> Result<Summary, Error> {
        let train = &self.config.train;
        let (mut loss, mut eval_loss) = (None, None);
        let (begin, before) = (Instant::now(), self.counters);
        while self.counters.step < train.steps && !interrupt.is_requested() {
            loss = Some(self.step()?);
            let step = self.counters.step;
            let is_last = step == train.steps;
            if train.eval_every > 0 && (step.is_multiple_of(train.eval_every) || is_last) {
                eval_loss = self.evaluate()?.or(eval_loss);
            }
            let every = self.config.checkpoint.every;
            if every > 0 && step.is_multiple_of(every) && !is_last {
                self.save_or_warn()?;
            }
        }
        let interrupted = self.counters.step < train.steps;
        let path = self.save()?;
        self.progress.finish();
        Ok(Summary {
            step: self.counters.step,
            steps_made: self.counters.step - before.step,
            tokens: self.counters.tokens - before.tokens,
            seconds: begin.elapsed().as_secs_f64(),
            loss,
            eval_loss,
            checkpoint: path,
            interrupted,
        })
    }

    /// One optimizer step; returns its loss.
    fn step(&mut self) -> Result<f64, Error> {
        let begin = Instant::now();
        let step = self.counters.step + 1;
        let valid_tokens = self.read_global_batch()?;
        if valid_tokens == 0 {
            return Err(Error::NothingToPredict { step });
        }
        self.engine.zero_gradients();
        let seed_gradient = (1.0 / valid_tokens as f64) as f32;
        let mut loss_sum = 0.0;
        let mut tokens = 0;
        for batch in self.micro_batches.drain(..) {
            loss_sum += self.engine.accumulate(&host_batch(&batch), seed_gradient);
            tokens += batch.ids.len() as u64;
            self.prefetcher.recycle(batch);
        }
        let loss = loss_sum / valid_tokens as f64;
        let grad_norm = self.engine.finish_gradients();
        let learning_rate = self.learning_rate.at(self.counters.step);
        let skipped = !(loss.is_finite() && grad_norm.is_finite());
        if !skipped {
            self.counters.updates += 1;
            self.engine.update(&Update {
                learning_rate,
                weight_decay: self.config.optimizer.weight_decay,
                gradient_scale: clip_coefficient(self.config.train.max_grad_norm, grad_norm),
                step: self.counters.updates,
            });
        }
        self.counters.step = step;
        self.counters.samples += self.config.train.global_batch as u64;
        self.counters.tokens += tokens;
        let seconds = begin.elapsed().as_secs_f64();
        let arena = self.engine.arena();
        let row = StepMetrics {
            step,
            loss,
            grad_norm,
            lr: learning_rate,
            tokens,
            tokens_seen: self.counters.tokens,
            step_ms: seconds * 1e3,
            tokens_per_s: tokens as f64 / seconds,
            flops_per_s: self.flops_per_step as f64 / seconds,
            mfu: None,
            skipped,
            memory: MemoryUse { by_category: arena.in_use(), peak: arena.peak_total_bytes() },
            comm: CommunicationUse::default(),
            data_wait_ms: self.prefetcher.take_wait().as_secs_f64() * 1e3,
            checkpoint_stall_ms: std::mem::take(&mut self.checkpoint_stall_ms),
        };
        self.progress.step(&row);
        self.write(&row);
        self.guard(step, skipped)?;
        Ok(loss)
    }

    /// Reads the micro-batches of the next step and returns how many of their labels count.
    fn read_global_batch(&mut self) -> Result<u64, Error> {
        let mut valid_tokens = 0;
        for _ in 0..self.accumulation_steps {
            let batch = self.prefetcher.next_batch()?.ok_or(lockstep_data::DataError::PrefetcherLost)?;
            valid_tokens += batch.valid_tokens();
            self.micro_batches.push(batch);
        }
        Ok(valid_tokens)
    }

    fn guard(&mut self, step: u64, skipped: bool) -> Result<(), Error> {
        if !skipped {
            self.skipped_in_a_row = 0;
            self.last_good = step;
            return Ok(());
        }
        self.skipped_in_a_row += 1;
        self.progress.message(&format!("step {step}: the loss or a gradient is not finite; step skipped"));
        if self.skipped_in_a_row < MAX_SKIPPED_IN_A_ROW {
            return Ok(());
        }
        Err(Error::NotFinite { step, consecutive: self.skipped_in_a_row, last_good: self.last_good })
    }

    /// Loss over the first `eval_steps` global batches of the validation set; none if there is no such set.
    fn evaluate(&mut self) -> Result<Option<f64>, Error> {
        let Some(valid) = &self.corpus.valid else { return Ok(None) };
        let begin = Instant::now();
        let train = &self.config.train;
        let micro_batch = self.config.micro_batch() as u64;
        let samples = valid.windows().min(train.eval_steps.saturating_mul(train.global_batch as u64));
        let mut batch = MicroBatch::default();
        let (mut loss_sum, mut tokens) = (0.0, 0);
        for first in (0..samples).step_by(micro_batch as usize) {
            valid.fill(first..first + micro_batch, &mut batch)?;
            // The last micro-batch goes on into samples that do not count.
            let counted = (samples - first).min(micro_batch) as usize * train.seq_len;
            batch.labels[counted..].fill(lockstep_data::IGNORE_LABEL);
            loss_sum += self.engine.evaluate(&host_batch(&batch));
            tokens += batch.valid_tokens();
        }
        let row = EvalMetrics {
            step: self.counters.step,
            eval_loss: loss_sum / tokens as f64,
            eval_tokens: tokens,
            eval_ms: begin.elapsed().as_secs_f64() * 1e3,
        };
        self.progress.evaluation(&row);
        self.write(&row);
        Ok(Some(row.eval_loss))
    }

    /// Appends a row of metrics. A disk that takes none delays rows and does not end the run.
    fn write(&mut self, row: &impl Row) {
        if let Some(metrics) = &mut self.metrics
            && let Err(error) = metrics.append(row)
        {
            self.progress.message(&error.to_string());
        }
    }

    /// A periodic save: where it fails, the run says so and goes on, and the next one may succeed.
    fn save_or_warn(&mut self) -> Result<(), Error> {
        match self.save() {
            Err(Error::Checkpoint(error)) => {
                self.progress.message(&format!("not saved: {error}"));
                Ok(())
            }
            result => result.map(|_| ()),
        }
    }

    fn save(&mut self) -> Result<PathBuf, Error> {
        if let Some((step, path)) = &self.saved
            && *step == self.counters.step
        {
            return Ok(path.clone());
        }
        let begin = Instant::now();
        // Finite gradients may still carry a weight out of the range of f32.
        if let Some(name) = self.engine.parameter_that_is_not_finite() {
            return Err(Error::WeightsNotFinite { step: self.counters.step, name });
        }
        // Rows reach the disk before the checkpoint that counts them, or a resumed run would miss some.
        if let Some(metrics) = &mut self.metrics
            && let Err(error) = metrics.sync()
        {
            self.progress.message(&error.to_string());
        }
        let (path, unpruned) =
            save_run(self.config, self.model, self.corpus, &mut self.engine, self.counters)?;
        if let Some(error) = unpruned {
            self.progress.message(&format!("old checkpoints are not removed: {error}"));
        }
        self.checkpoint_stall_ms += begin.elapsed().as_secs_f64() * 1e3;
        self.progress.message(&format!("saved {}", path.display()));
        self.saved = Some((self.counters.step, path.clone()));
        Ok(path)
    }
}

/// `min(1, max_norm / (norm + 1e-6))`, or 1 where clipping is off.
pub(crate) fn clip_coefficient(max_norm: f64, norm: f64) -> f32 {
    if max_norm == 0.0 { 1.0 } else { (max_norm / (norm + 1e-6)).min(1.0) as f32 }
}

fn host_batch(batch: &MicroBatch) -> HostBatch<'_> {
    HostBatch {
        ids: &batch.ids,
        labels: &batch.labels,
        positions: &batch.positions,
        document_starts: &batch.document_starts,
        sample_numbers: &batch.sample_numbers,
    }
}
