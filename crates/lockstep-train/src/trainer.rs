//! The training loop of a rank.
//!
//! One step reads this rank's micro-batches of a global batch and counts the valid tokens G of all ranks. It runs forward and
//! backward of each micro-batch with the seed 1/G, reduces the gradients and computes their global norm. If the guard (`guard`)
//! accepts the step, the clipped gradients enter the optimizer step. All ranks decide alike because they see the same numbers.
//! Between steps the ranks of the first replica save checkpoints (`saving`); rank 0 writes the metrics and the messages.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use lockstep_config::schedule::LearningRate;
use lockstep_config::{ResolvedModel, Resume, RunConfig, resolve_model};
use lockstep_data::{MicroBatch, Prefetcher};
use lockstep_engine::{Engine, EngineError, Ranks, Update};
use lockstep_graph::{Activity, Cost, MAX_REPORTS, Totals};
use lockstep_launch::interrupt::Interrupt;
use lockstep_observe::metrics::{Amount, DiskUse, Means, MemoryUse, Start, StepMetrics, imbalance};
use lockstep_observe::progress::{Progress, Steps};
use lockstep_plan::ParameterId;
use lockstep_tensor::host::proportional_bytes;
use serde_json::Value;

use crate::clipping::clip_coefficient;
use crate::describe::{Screen, describe};
use crate::evaluation::evaluate;
use crate::guard::{Action, Guard, RollbackSnapshot, Verdict};
use crate::kernels::RunKernels;
use crate::loss_scale::LossScale;
use crate::peak::device_peak;
use crate::predicted::Predicted;
use crate::ranks::{StepShare, sum_of_step};
use crate::records::{Records, RunOutputs};
use crate::reported::Reported;
use crate::saving::Saver;
use crate::start::{StartState, abandon_long_steps, lock, open_data, prefetcher, set_checkpoints_aside};
use crate::state::{Counters, SavedState};
use crate::summary::Summary;
use crate::training_data::host_batch;
use crate::{Error, StepObserver, TrainingData};

/// Trains as one of `ranks` until the last step of `config`, or until `interrupt` requests a stop on any rank; saves in either
/// case. `show` builds the progress display, usually [`Progress::on_stderr`].
///
/// # Errors
/// If the configuration does not fit the model or the ranks, an input is damaged, or an operation on a file, a device or the
/// network fails. Checkpoints that were saved before stay.
pub fn train(
    config: &RunConfig,
    resume: &Resume,
    ranks: &Ranks,
    interrupt: &Interrupt,
    show: impl FnOnce(Steps) -> Progress,
) -> Result<Summary, Error> {
    train_observed(config, resume, ranks, interrupt, show, &mut ())
}

/// Trains as [`train`] does and reports each step to `observer`.
///
/// # Errors
/// As [`train`].
pub fn train_observed(
    config: &RunConfig,
    resume: &Resume,
    ranks: &Ranks,
    interrupt: &Interrupt,
    show: impl FnOnce(Steps) -> Progress,
    observer: &mut dyn StepObserver,
) -> Result<Summary, Error> {
    run(config, resume, ranks, interrupt, show, (observer, RunOutputs::Everything))
}

/// Trains as [`train`] does, on `data` instead of the files that `[data]` names.
///
/// # Errors
/// As [`train`].
pub fn train_on(
    data: TrainingData,
    config: &RunConfig,
    resume: &Resume,
    ranks: &Ranks,
    interrupt: &Interrupt,
    show: impl FnOnce(Steps) -> Progress,
) -> Result<Summary, Error> {
    let model = resolve_model(config)?;
    run_on((&model, data), config, resume, ranks, interrupt, show, (&mut (), RunOutputs::Everything))
}

/// Trains as [`train_observed`] does and writes the files that `outputs` allows.
pub(crate) fn run(
    config: &RunConfig,
    resume: &Resume,
    ranks: &Ranks,
    interrupt: &Interrupt,
    show: impl FnOnce(Steps) -> Progress,
    observed: (&mut dyn StepObserver, RunOutputs),
) -> Result<Summary, Error> {
    let model = resolve_model(config)?;
    let data = open_data(config, &model, ranks)?;
    run_on((&model, data), config, resume, ranks, interrupt, show, observed)
}

/// Trains as [`run`] does, on `data` and with the model that `config` names.
pub(crate) fn run_on(
    (model, data): (&ResolvedModel, TrainingData),
    config: &RunConfig,
    resume: &Resume,
    ranks: &Ranks,
    interrupt: &Interrupt,
    show: impl FnOnce(Steps) -> Progress,
    (observer, outputs): (&mut dyn StepObserver, RunOutputs),
) -> Result<Summary, Error> {
    let writes_files = outputs == RunOutputs::Everything;
    let writes = ranks.is_first() && writes_files;
    // The lock comes before any look at checkpoints: the process before this one may still be saving.
    let _lock = ranks.first_then_others(|| writes.then(|| lock(config)).transpose())?;
    let StartState { mut engine, counters, checkpoint, mut messages, damaged } =
        StartState::of(config, resume, ranks, model, &data)?;
    let kernels = RunKernels::of(ranks, &engine)?;
    messages.extend(kernels.warning());
    let steps = Steps { done: counters.step, total: config.train.steps, log_every: config.train.log_every };
    let mut progress =
        if ranks.is_first() { show(steps) } else { Progress::of_other_rank(steps, ranks.rank()) };
    let predicted = Predicted::of(config, &engine, ranks)?;
    let peak = if writes_files { device_peak(config, &engine, ranks)? } else { None };
    let screen =
        Screen { config, model, data: &data, engine: &engine, predicted: &predicted, peak: peak.as_ref() };
    describe(&screen, ranks.groups().tensor_place(), &mut progress);
    messages.iter().for_each(|text| progress.message(text));
    let start = checkpoint.as_ref().map_or(Start::Fresh, |_| Start::After { step: counters.step });
    abandon_long_steps(config, &mut engine, ranks, interrupt);
    observer.begins(&mut engine);
    // All ranks have read their starting state before a file is moved or written.
    ranks.check_weights(&mut engine, counters.step)?;
    if writes {
        set_checkpoints_aside(config, resume, &counters, &damaged, &mut progress)?;
    }
    let tell = |text: &str| progress.message(text);
    let records = Records::of_rank(config, (start, outputs), (&engine, ranks), (peak.as_ref(), &data), tell)?;
    let prefetcher = prefetcher(config, ranks, &data, &counters)?;
    let remembered = checkpoint.as_ref().map_or(&Value::Null, |checkpoint| &checkpoint.manifest().state);
    let guard = Guard::new(config, counters.step, &remembered["guard"]);
    let loss_scale = LossScale::new(config, &remembered["loss_scale"]);
    let rollback_snapshot = (config.rollback_after() > 0)
        .then(|| RollbackSnapshot::new(&engine, counters.updates))
        .transpose()?;
    let saved = checkpoint.map(|checkpoint| (counters.step, checkpoint.path().to_owned()));
    let reported = Reported::of(engine.model(), model.config.vocab_size());
    let new_saver = || Saver::new(config, model, &data, ranks, (saved, kernels.word()), interrupt);
    let saver = writes_files.then(new_saver).transpose()?.flatten();
    Run {
        config,
        learning_rate: config.learning_rate(),
        flops_per_step: engine.model().training_flops()
            * (config.accumulation_steps() * ranks.replicas()) as u64,
        peak_flops_per_s: peak.map(|peak| peak.flops_per_s),
        ranks,
        data: &data,
        engine,
        predicted,
        prefetcher,
        progress,
        records,
        counters,
        guard,
        loss_scale,
        rollback_snapshot,
        saver,
        observer,
        phase: "before the first step",
        current_step: counters.step,
        loss: None,
        evaluated: None,
        eval_metrics: Means::default(),
        reported,
        uniform_loss: (outcomes(model) as f64).ln(),
        micro_batches: Vec::new(),
        expert_load: Vec::new(),
    }
    .run(interrupt)
}

/// Number of outcomes that the model predicts: tokens of its vocabulary, or classes.
fn outcomes(model: &ResolvedModel) -> usize {
    let sizes = model.config.model().sizes();
    if sizes.classes > 0 { sizes.classes } else { sizes.vocab }
}

/// Values of a step from which its metrics row is built.
struct Made {
    loss: f64,
    grad_norm: f64,
    learning_rate: f64,
    loss_scale: f64,
    /// Sums over all ranks.
    share: StepShare,
    seconds: f64,
    skipped: bool,
    /// Maximum over ranks, and the value of each rank.
    memory: (MemoryUse, Vec<MemoryUse>),
}

struct Run<'a> {
    config: &'a RunConfig,
    ranks: &'a Ranks,
    data: &'a TrainingData,
    engine: Engine,
    predicted: Predicted,
    prefetcher: Prefetcher,
    progress: Progress,
    records: Records,
    learning_rate: LearningRate,
    flops_per_step: u64,
    /// Sum over the devices of all ranks, in FLOP/s, if known.
    peak_flops_per_s: Option<f64>,
    counters: Counters,
    guard: Guard,
    /// Loss of a uniform guess.
    uniform_loss: f64,
    /// Loss of the last step that was not skipped.
    loss: Option<f64>,
    /// Step and loss of the last evaluation.
    evaluated: Option<(u64, f64)>,
    /// Mean of each metric of the last evaluation.
    eval_metrics: Means,
    /// Losses and metrics of the model.
    reported: Reported,
    /// `None` except in f16.
    loss_scale: Option<LossScale>,
    /// In-memory copy of the state for rollbacks; `None` if the run never rolls back.
    rollback_snapshot: Option<RollbackSnapshot>,
    /// None on ranks that do not save.
    saver: Option<Saver>,
    observer: &'a mut dyn StepObserver,
    /// Phase of the current step, for the error report.
    phase: &'static str,
    /// Step in progress, or the last one completed.
    current_step: u64,
    /// Micro-batches of the current step.
    micro_batches: Vec<MicroBatch>,
    /// Tokens per layer and expert of the step shown last; its memory is reused for the next one.
    expert_load: Vec<Vec<i64>>,
}

impl Run<'_> {
    fn run(mut self, interrupt: &Interrupt) -> Result<Summary, Error> {
        let (begin, before) = (Instant::now(), self.counters);
        match self.make_steps(before.step, interrupt) {
            Ok(()) => self.end(begin, &before),
            Err(error) => {
                self.leave_report();
                Err(error)
            }
        }
    }

    /// Runs the steps after `first` until the last one or a stop request, with their evaluations and saves.
    fn make_steps(&mut self, first: u64, interrupt: &Interrupt) -> Result<(), Error> {
        let train = &self.config.train;
        while self.counters.step < train.steps && !self.ranks.any(interrupt.is_requested())? {
            match self.step() {
                Err(Error::Engine(EngineError::Abandoned)) => {
                    self.tell_abandoned();
                    break;
                }
                made => made?,
            }
            self.phase = "between two steps";
            if let Some(saver) = &mut self.saver {
                saver.poll(&mut self.progress)?;
            }
            self.record_save();
            let step = self.counters.step;
            let every = self.config.checkpoint.every;
            if step == first + 1 && every > 0 && step.next_multiple_of(every) < train.steps {
                // Not before the first step, for which the user is waiting.
                if let Some(saver) = &mut self.saver {
                    saver.prepare(&self.engine);
                }
            }
            let check_every = self.config.parallel.check_every;
            if check_every > 0 && step.is_multiple_of(check_every) {
                self.ranks.check_weights(&mut self.engine, step)?;
            }
            let is_last = step == train.steps;
            if train.eval_every > 0 && (step.is_multiple_of(train.eval_every) || is_last) {
                self.phase = "evaluation";
                self.evaluate()?;
            }
            let is_saved = every > 0 && step.is_multiple_of(every) && !is_last;
            // A run that resumes from this checkpoint would roll back to it, so this run does the same.
            if let Some(rollback_snapshot) = &mut self.rollback_snapshot
                && (is_saved || step.is_multiple_of(train.rollback_every))
            {
                self.engine.wait_for_weights()?;
                rollback_snapshot.renew(&self.engine, self.counters.updates);
            }
            if is_saved {
                self.phase = "save";
                self.engine.wait_for_weights()?;
                self.save_and_go_on()?;
            }
        }
        if self.counters.step < self.config.train.steps {
            // The grace period begins now on ranks that the signal has not reached.
            interrupt.request();
        }
        Ok(())
    }

    /// Reports that the current step is abandoned so that the state before it is saved in time.
    fn tell_abandoned(&mut self) {
        let (step, grace) = (self.current_step, self.config.checkpoint.grace_s);
        self.progress.message(&format!(
            "step {step} would take longer than checkpoint.grace_s ({grace} s) allows: abandoned; the state after step {} is saved",
            step - 1
        ));
    }

    /// Saves after the last step, writes the report and returns the summary.
    fn end(mut self, begin: Instant, before: &Counters) -> Result<Summary, Error> {
        let interrupted = self.counters.step < self.config.train.steps;
        tracing::info!(step = self.counters.step, interrupted, "the last step of this process is made");
        self.engine.wait_for_weights()?;
        let state = self.state();
        let Self { saver, engine, records, progress, ranks, observer, .. } = &mut self;
        // The trace is gathered while all ranks are here.
        records.end_trace(engine, ranks, |text| progress.message(text))?;
        let path = match saver {
            Some(saver) => saver.save_last(engine, &state, records.rows(), *observer, progress)?,
            None => PathBuf::new(),
        };
        // Some launchers end all ranks when one ends.
        self.ranks.meet()?;
        self.record_save();
        let report = self.records.finish(&self.engine, |text| self.progress.message(text));
        self.progress.finish();
        Ok(Summary {
            step: self.counters.step,
            steps_made: self.counters.step - before.step,
            amount: self.counters.tokens - before.tokens,
            unit: self.reported.unit,
            seconds: begin.elapsed().as_secs_f64(),
            loss: self.loss,
            eval_loss: self.evaluated.map(|(_, loss)| loss),
            eval_metrics: self.eval_metrics,
            uniform_loss: self.uniform_loss,
            has_chats: self.data.has_chats(),
            checkpoint: path,
            report,
            interrupted,
            skipped: self.guard.skipped,
            skipped_last: self.guard.skipped_in_a_row,
            rollbacks: self.guard.rollbacks,
        })
    }

    /// Reports the step and phase in which a failing run was, and writes the report of its steps.
    fn leave_report(&mut self) {
        let Self { records, progress, config, phase, current_step, .. } = self;
        if !records.has_rows() {
            return;
        }
        progress.field("ended", &format!("in step {current_step} of {}: {phase}", config.train.steps));
        if let Some(report) = records.report(|text| progress.message(text)) {
            progress.field("report", &report.display().to_string());
        }
    }

    /// Returns the contents of a checkpoint other than its tensors.
    fn state(&self) -> SavedState {
        SavedState {
            counters: self.counters,
            guard: self.guard.to_json(),
            loss_scale: self.loss_scale.as_ref().map_or(Value::Null, LossScale::to_json),
            is_doubtful: self.guard.is_doubtful(),
            eval_loss: self.evaluated.filter(|(step, _)| *step == self.counters.step).map(|(_, loss)| loss),
        }
    }

    fn save_and_go_on(&mut self) -> Result<(), Error> {
        let state = self.state();
        let begin = Instant::now();
        let Self { saver: Some(saver), engine, records, progress, observer, .. } = self else {
            return Ok(());
        };
        saver.save_and_go_on(engine, &state, records.rows(), *observer, progress)?;
        self.records.pause("checkpoint", begin);
        self.record_save();
        Ok(())
    }

    /// Records the saves that have ended, for the trace.
    fn record_save(&mut self) {
        for ran in self.saver.as_mut().map(Saver::take_ended).unwrap_or_default() {
            self.records.saved(ran);
        }
    }

    /// Runs one optimizer step.
    fn step(&mut self) -> Result<(), Error> {
        let begin = Instant::now();
        let step = self.counters.step + 1;
        self.current_step = step;
        self.records.begin_step(step, &self.engine);
        let waiting = self.engine.timeline().begin();
        self.phase = "reading data";
        let (own_counts, counted) = self.read_global_batch()?;
        self.engine.timeline().end(waiting, || (Activity::of_step("data wait"), Cost::default()));
        if counted.counts[0] == 0 {
            return Err(Error::NothingToPredict { step });
        }
        let loss_scale = self.loss_scale.as_ref().map_or(1.0, LossScale::value);
        let samples = self.config.train.global_batch as u64;
        let seed = counted.seed(self.reported.reports(), samples, loss_scale);
        self.phase = "forward and backward";
        let batches = self.micro_batches.iter().map(host_batch);
        self.engine.take_reported();
        self.engine.forward_backward(batches, seed)?;
        let amount = self.micro_batches.iter().map(|batch| (batch.sequences * batch.seq_len) as u64).sum();
        let skipped_samples = self.micro_batches.iter().map(|batch| batch.skipped).sum();
        self.micro_batches.drain(..).for_each(|batch| self.prefetcher.recycle(batch));
        self.observer.gradients_ready(step, &mut self.engine)?;
        let mut own_memory = MemoryUse::of(self.engine.arena());
        if looks_at_process(step, self.config.train.steps) {
            own_memory.process_pss = process_pss();
        }
        let totals = Totals { sums: self.engine.take_reported(), counts: own_counts };
        let own = StepShare { totals, amount, skipped_samples, memory: own_memory };
        let (share, mut memory_by_rank) = sum_of_step(self.ranks, own)?;
        let loss = self.reported.loss(&share.totals);
        self.phase = "exchange of gradients";
        let grad_norm = self.engine.finish_gradients()? / loss_scale;
        let learning_rate = self.learning_rate.at(self.counters.step);
        let verdict = self.guard.judge(loss, grad_norm);
        self.phase = "optimizer step";
        if verdict == Verdict::Accepted {
            self.loss = Some(loss);
            self.guard.accept(step, loss, grad_norm);
            if let Some(scale) = &mut self.loss_scale {
                scale.calm();
            }
            self.counters.updates += 1;
            self.engine.update(&Update {
                learning_rate,
                weight_decay: self.config.optimizer.weight_decay,
                gradient_scale: (clip_coefficient(self.config.train.max_grad_norm, grad_norm) / loss_scale)
                    as f32,
                step: self.counters.updates,
            })?;
        }
        self.counters.step = step;
        self.counters.samples += self.config.train.global_batch as u64;
        self.counters.tokens += share.amount;
        // If the guard ends the run, the step's row is written first.
        let refused = if verdict == Verdict::Accepted { Ok(()) } else { self.refuse(step, verdict) };
        let seconds = begin.elapsed().as_secs_f64();
        let saving_since = self.saver.as_ref().and_then(Saver::saving_since);
        let tell = |text: &str| self.progress.message(text);
        self.records.end_step(step, begin, saving_since, &self.engine, self.ranks, tell)?;
        // The optimizer step may have allocated more on this rank; the other ranks report theirs with the next step.
        own_memory = MemoryUse { process_pss: own_memory.process_pss, ..MemoryUse::of(self.engine.arena()) };
        if let Some(own) = memory_by_rank.get_mut(self.ranks.rank()) {
            *own = own_memory;
        }
        let skipped = verdict != Verdict::Accepted;
        let memory = (memory_by_rank.iter().fold(own_memory, MemoryUse::maximum), memory_by_rank);
        let row =
            self.row(Made { loss, grad_norm, learning_rate, loss_scale, share, seconds, skipped, memory });
        tracing::trace!(step, loss, grad_norm, step_ms = row.step_ms, "made a step");
        // Whoever sees the step on the screen finds it in the records and at the metrics server.
        self.records.append(&row, |text| self.progress.message(text));
        self.progress.step(&row);
        self.observer.step_ended(&row);
        if self.is_shown(step) {
            self.expert_load = row.expert_load;
        }
        refused
    }

    /// Returns true if step `step` is one that is logged.
    fn is_shown(&self, step: u64) -> bool {
        let every = self.config.train.log_every.max(1);
        step == 1 || step.is_multiple_of(every) || step == self.config.train.steps
    }

    /// Returns the metrics of the step that has just ended; counters are those since the step before.
    fn row(&mut self, made: Made) -> StepMetrics {
        let Made { loss, grad_norm, learning_rate, loss_scale, share, seconds, .. } = made;
        let step = self.counters.step;
        let load = self.engine.expert_load();
        let expert_imbalance = load.layers().filter_map(imbalance).max_by(f64::total_cmp);
        let is_shown = self.is_shown(step);
        let mut expert_load = if is_shown { std::mem::take(&mut self.expert_load) } else { Vec::new() };
        if is_shown {
            expert_load.resize_with(load.layers().count(), Vec::new);
            for (shown, counts) in expert_load.iter_mut().zip(load.layers()) {
                shown.clear();
                shown.extend_from_slice(counts);
            }
        }
        let flops_per_s = self.flops_per_step as f64 / seconds;
        StepMetrics {
            step,
            loss,
            metrics: self.reported.metrics(&share.totals),
            losses: self.reported.losses(&share.totals),
            grad_norm,
            lr: learning_rate,
            amount: Amount {
                unit: self.reported.unit,
                of_step: share.amount,
                seen: self.counters.tokens,
                per_s: share.amount as f64 / seconds,
            },
            step_ms: seconds * 1e3,
            flops_per_s,
            mfu: self.peak_flops_per_s.map(|peak| flops_per_s / peak),
            skipped: made.skipped,
            skipped_steps: self.guard.skipped,
            rollbacks: self.guard.rollbacks,
            skipped_samples: share.skipped_samples,
            loss_scale: self.loss_scale.is_some().then_some(loss_scale),
            expert_imbalance,
            expert_load,
            memory: made.memory.0,
            memory_by_rank: made.memory.1,
            memory_predicted: self.predicted.greatest,
            memory_predicted_by_rank: self.predicted.by_rank.clone(),
            comm: self.engine.take_traffic().into(),
            disk: DiskUse::of(self.engine.disk_bytes(), self.engine.take_disk_traffic()),
            data_wait_ms: self.prefetcher.take_wait().as_secs_f64() * 1e3,
            checkpoint_stall_ms: self.saver.as_mut().map_or(0.0, Saver::take_stall_ms),
        }
    }

    /// Reads this rank's micro-batches of the next step. Returns the numbers of valid labels of each report: this rank's, and
    /// the totals over all ranks.
    fn read_global_batch(&mut self) -> Result<([u64; MAX_REPORTS], Totals), Error> {
        let mut own = Totals::default();
        for _ in 0..self.config.accumulation_steps() {
            let batch = self.prefetcher.next_batch()?.ok_or(lockstep_data::DataError::PrefetcherLost)?;
            let counts = host_batch(&batch).counts(self.engine.model());
            own.add(&Totals { counts, ..Totals::default() });
            self.micro_batches.push(batch);
        }
        Ok((own.counts, self.ranks.totals(own)?))
    }

    /// Handles a step that must not change the weights: counts and reports it, and rolls back after too many.
    fn refuse(&mut self, step: u64, verdict: Verdict) -> Result<(), Error> {
        if matches!(verdict, Verdict::NotFinite { .. })
            && let Some(scale) = &mut self.loss_scale
            && let Some(next) = scale.overflow()
        {
            self.guard.skip_for_scale();
            self.progress.message(&format!("step {step}: overflow in f16; step skipped, loss scale {next}"));
            return Ok(());
        }
        self.progress.message(&format!("step {step}: {verdict}; step skipped"));
        let suspect = || {
            let is_not_finite = |id: &ParameterId| {
                self.engine.gradient(*id).is_ok_and(|values| !values.iter().all(|value| value.is_finite()))
            };
            let found = self.engine.trained_ids().find(is_not_finite)?;
            Some(self.engine.records()[found.0].name.clone())
        };
        if self.guard.skip(step, verdict, suspect)? == Action::RollBack
            && let Some(rollback_snapshot) = &self.rollback_snapshot
        {
            self.counters.updates = rollback_snapshot.restore(&mut self.engine)?;
            tracing::info!(step, updates = self.counters.updates, "went back to earlier weights");
            let updates = self.counters.updates;
            self.progress
                .message(&format!("step {step}: back to the weights after update {updates}; the data go on"));
        }
        Ok(())
    }

    /// Evaluates the run if there is a validation set.
    fn evaluate(&mut self) -> Result<(), Error> {
        let Some(valid) = &self.data.valid else { return Ok(()) };
        let begin = Instant::now();
        let Self { config, ranks, engine, reported, .. } = self;
        let row = evaluate(config, ranks, &**valid, engine, reported, self.counters.step)?;
        self.records.pause("evaluation", begin);
        tracing::debug!(step = row.step, loss = row.loss, ms = row.ms, "evaluated");
        self.records.append(&row, |text| self.progress.message(text));
        self.progress.evaluation(&row);
        self.evaluated = Some((row.step, row.loss));
        self.eval_metrics = row.metrics;
        Ok(())
    }
}

/// Returns the proportional set size of this process. Ranks that are threads of one process share a measurement, because the system
/// walks all page tables for each.
fn process_pss() -> usize {
    /// Maximum age of a measurement.
    const FRESH: Duration = Duration::from_millis(20);
    static LAST: Mutex<Option<(Instant, usize)>> = Mutex::new(None);
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((measured, bytes)) = *last
        && measured.elapsed() < FRESH
    {
        return bytes;
    }
    let bytes = proportional_bytes() as usize;
    *last = Some((Instant::now(), bytes));
    bytes
}

/// Returns true if this step measures the memory of the process (PSS): at powers of two from step 2, and at the last step.
fn looks_at_process(step: u64, steps: u64) -> bool {
    step > 1 && step.is_power_of_two() || step == steps
}
