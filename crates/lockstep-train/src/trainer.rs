//! The training loop of a rank.
//!
//! A step reads the rank's micro-batches of one global batch, counts the valid tokens G of all ranks, runs forward and
//! backward of each with the seed 1/G, sums the gradients over the ranks, clips by the global norm and updates, if the
//! guard lets it (`guard`). All ranks decide alike, for they see the same numbers. Between steps the ranks of the first replica
//! save the run (`saving`), and the first one speaks of it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use lockstep_checkpoint::{Checkpoint, CommitObserver, set_damaged_aside};
use lockstep_config::schedule::LearningRate;
use lockstep_config::{ResolvedModel, Resume, RunConfig, resolve_model};
use lockstep_data::{MicroBatch, Prefetcher};
use lockstep_engine::{Engine, EngineError, HostBatch, Ranks, Update};
use lockstep_graph::{Activity, Cost, Seed};
use lockstep_observe::metrics::{DiskUse, EvalMetrics, MemoryUse, Start, StepMetrics, imbalance};
use lockstep_observe::progress::{Progress, Steps};
use lockstep_plan::ParameterId;
use lockstep_tensor::host::proportional_bytes;
use serde_json::Value;

use crate::describe::{Screen, describe};
use crate::guard::{Action, Guard, Refuge, Verdict};
use crate::interrupt::Interrupt;
use crate::loss_scale::{LossScale, Overflow};
use crate::origin::{Origin, lock, prefetcher};
use crate::peak::device_peak;
use crate::predicted::Predicted;
use crate::ranks::sum_and_memory;
use crate::records::Records;
use crate::saving::Saver;
use crate::state::{Counters, SavedState, set_aside_later, text_has_changed};
use crate::{Corpus, Error};

/// How a run ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// Steps made in all.
    pub step: u64,
    /// Steps made by this process.
    pub steps_made: u64,
    /// Tokens that all ranks trained on while this process ran.
    pub tokens: u64,
    /// Seconds from the first step to the last save.
    pub seconds: f64,
    /// Loss of the last step of this process that was not skipped, if there was one.
    pub loss: Option<f64>,
    /// The last evaluation's loss.
    pub eval_loss: Option<f64>,
    /// The loss of a uniform guess: the logarithm of the vocabulary's size.
    pub uniform_loss: f64,
    /// True if the run was trained on chats.
    pub has_chats: bool,
    /// The newest checkpoint; empty but on the first rank.
    pub checkpoint: PathBuf,
    /// The run on one page, if it has metrics.
    pub report: Option<PathBuf>,
    /// Whether it was asked to stop before the last step.
    pub interrupted: bool,
    /// Steps of the whole run that were skipped: not finite, or spikes.
    pub skipped: u64,
    /// Steps skipped in a row up to the last one.
    pub skipped_last: u64,
    /// Times that the whole run went back to a copy of its state.
    pub rollbacks: u64,
}

/// Sees each step between its backward and its update, and may change its gradients: fault tests put in what must
/// not reach the weights.
pub trait StepObserver {
    /// The gradients of step `step` (from 1) are complete, on all ranks.
    ///
    /// # Errors
    /// End the run.
    fn gradients_ready(&mut self, step: u64, engine: &mut Engine) -> Result<(), Error>;

    /// The run is about to make its first step.
    fn begins(&mut self, _engine: &mut Engine) {}

    /// What sees this rank's part of the save after step `step`, and may stop it.
    fn saving(&mut self, _step: u64) -> Box<dyn CommitObserver + Send + Sync> {
        Box::new(())
    }

    /// A step has ended with these numbers.
    fn step_ended(&mut self, _row: &StepMetrics) {}
}

/// Sees nothing.
impl StepObserver for () {
    fn gradients_ready(&mut self, _: u64, _: &mut Engine) -> Result<(), Error> {
        Ok(())
    }
}

/// What a run leaves behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leaves {
    /// Checkpoints and metrics.
    Everything,
    /// Nothing but what its observer has seen.
    Nothing,
}

/// Trains as `config` says, as one of `ranks`, until the last step or until `interrupt` asks any of them for a stop; saves
/// in either case. `show` makes what the run is shown on, usually [`Progress::on_stderr`].
///
/// # Errors
/// A configuration that does not fit, damaged input, a machine that fails. Whatever was saved stays.
pub fn train(
    config: &RunConfig,
    resume: &Resume,
    ranks: &Ranks,
    interrupt: &Interrupt,
    show: impl FnOnce(Steps) -> Progress,
) -> Result<Summary, Error> {
    train_observed(config, resume, ranks, interrupt, show, &mut ())
}

/// [`train`], watched by `observer`.
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
    run(config, resume, ranks, interrupt, show, (observer, Leaves::Everything))
}

/// [`train_observed`], which leaves what `leaves` says.
pub(crate) fn run(
    config: &RunConfig,
    resume: &Resume,
    ranks: &Ranks,
    interrupt: &Interrupt,
    show: impl FnOnce(Steps) -> Progress,
    (observer, leaves): (&mut dyn StepObserver, Leaves),
) -> Result<Summary, Error> {
    let model = resolve_model(config)?;
    let corpus = open_corpus(config, &model, ranks)?;
    let leaves_anything = leaves == Leaves::Everything;
    let writes = ranks.is_first() && leaves_anything;
    // Nobody looks for a checkpoint as long as the run before this one may still save.
    let _lock = ranks.first_then_others(|| writes.then(|| lock(config)).transpose())?;
    let Origin { mut engine, counters, checkpoint, told, damaged } =
        Origin::of(config, resume, ranks, &model)?;
    let steps = Steps { done: counters.step, total: config.train.steps, log_every: config.train.log_every };
    let mut progress =
        if ranks.is_first() { show(steps) } else { Progress::of_other_rank(steps, ranks.rank()) };
    let predicted = Predicted::of(config, &engine, ranks)?;
    let peak = if leaves_anything { device_peak(config, &engine, ranks)? } else { None };
    let screen = Screen {
        config,
        model: &model,
        corpus: &corpus,
        engine: &engine,
        predicted: &predicted,
        peak: peak.as_ref(),
    };
    tell_beginning(&screen, ranks, (checkpoint.as_ref(), &told), &mut progress);
    let start = checkpoint.as_ref().map_or(Start::Fresh, |_| Start::After { step: counters.step });
    abandon_long_steps(config, &mut engine, ranks, interrupt);
    observer.begins(&mut engine);
    // All have read what they begin with before anything is moved or written.
    ranks.check_weights(&mut engine, counters.step)?;
    if writes {
        set_aside(config, resume, &counters, &damaged, &mut progress)?;
    }
    let records = match (leaves, writes) {
        (Leaves::Nothing, _) => Records::of_trace(config),
        (_, false) => Records::of_other(config, start),
        _ => Records::open(config, &engine, start, (peak.as_ref(), &corpus), |text| progress.message(text))?,
    };
    records.describe_ranks(&engine, ranks, |text| progress.message(text))?;
    let prefetcher = prefetcher(config, ranks, &corpus, &counters)?;
    let remembered = checkpoint.as_ref().map_or(&Value::Null, |checkpoint| &checkpoint.manifest().state);
    let guard = Guard::new(config, counters.step, &remembered["guard"]);
    let loss_scale = LossScale::new(config, &remembered["loss_scale"]);
    let refuge = (config.rollback_after() > 0).then(|| Refuge::new(&engine, counters.updates)).transpose()?;
    let saved = checkpoint.map(|checkpoint| (counters.step, checkpoint.path().to_owned()));
    let new_saver = || Saver::new(config, &model, &corpus, ranks, saved, interrupt);
    let saver = leaves_anything.then(new_saver).transpose()?.flatten();
    Run {
        config,
        learning_rate: config.learning_rate(),
        accumulation_steps: config.accumulation_steps(),
        flops_per_step: engine.model().training_flops()
            * (config.accumulation_steps() * ranks.replicas()) as u64,
        peak_flops_per_s: peak.map(|peak| peak.flops_per_s),
        ranks,
        corpus: &corpus,
        engine,
        predicted,
        prefetcher,
        progress,
        records,
        counters,
        guard,
        loss_scale,
        refuge,
        saver,
        observer,
        phase: "before the first step",
        under_way: counters.step,
        evaluated: None,
        uniform_loss: (model.config.vocab_size() as f64).ln(),
        micro_batches: Vec::new(),
        expert_load: Vec::new(),
    }
    .run(interrupt)
}

/// Has a step abandoned that goes on when half of the grace after a request to stop is over; the other half is for the save. Several ranks
/// finish their step, for each needs the others in it, and so does one whose state is on disk.
fn abandon_long_steps(config: &RunConfig, engine: &mut Engine, ranks: &Ranks, interrupt: &Interrupt) {
    if ranks.size() > 1 || !config.has_state_in_memory() {
        return;
    }
    let (interrupt, patience) = (interrupt.clone(), Duration::from_secs_f64(config.checkpoint.grace_s / 2.0));
    engine.abandon_if(move || interrupt.requested_since().is_some_and(|since| since.elapsed() >= patience));
}

/// Opens the corpus: the first rank tokenizes, and the others read what it has kept.
fn open_corpus(config: &RunConfig, model: &ResolvedModel, ranks: &Ranks) -> Result<Corpus, Error> {
    let corpus = ranks.first_then_others(|| Corpus::open(config, model))?;
    tracing::info!(
        tokens = corpus.train.tokens(), sources = corpus.sources.len(), from_cache = corpus.from_cache(),
        digest = %corpus.digest, "the corpus is open"
    );
    Ok(corpus)
}

/// Shows the run before its first step, and what was found out of the checkpoint that it goes on from.
fn tell_beginning(
    screen: &Screen<'_>,
    ranks: &Ranks,
    (checkpoint, told): (Option<&Checkpoint>, &[String]),
    progress: &mut Progress,
) {
    describe(screen, ranks.groups().tensor_place(), progress);
    told.iter().for_each(|text| progress.message(text));
    if checkpoint.is_some_and(|checkpoint| text_has_changed(checkpoint, screen.corpus)) {
        progress.message("the training text is not the one that the checkpoint was trained on");
    }
}

/// Moves damaged checkpoints aside, and those of an earlier run that would lie after those of this one.
fn set_aside(
    config: &RunConfig,
    resume: &Resume,
    counters: &Counters,
    damaged: &[PathBuf],
    progress: &mut Progress,
) -> Result<(), Error> {
    set_damaged_aside_in(config, damaged, progress);
    if counters.step >= config.train.steps {
        return Ok(());
    }
    for aside in set_aside_later(config, resume, counters)? {
        progress.message(&format!("checkpoints of an earlier run are now in {}", aside.display()));
    }
    Ok(())
}

/// Moves damaged checkpoints to where they count for nothing.
fn set_damaged_aside_in(config: &RunConfig, damaged: &[PathBuf], progress: &mut Progress) {
    for dir in config.checkpoint_dirs() {
        let here: Vec<PathBuf> = damaged.iter().filter(|path| path.parent() == Some(dir)).cloned().collect();
        if here.is_empty() {
            continue;
        }
        match set_damaged_aside(dir, &here) {
            Ok(moved) => moved.iter().for_each(|path| {
                progress.message(&format!("the damaged checkpoint is now {}", path.display()))
            }),
            Err(error) => progress.message(&format!("a damaged checkpoint stays where it is: {error}")),
        }
    }
}

/// The last losses of a run.
#[derive(Debug, Clone, Copy, Default)]
struct Losses {
    train: Option<f64>,
    eval: Option<f64>,
}

/// The figures of a step that its own code knows, for its metrics.
struct Made {
    loss: f64,
    grad_norm: f64,
    learning_rate: f64,
    loss_scale: f64,
    tokens: u64,
    seconds: f64,
    skipped: bool,
    /// The maximum over ranks, and of each.
    memory: (MemoryUse, Vec<MemoryUse>),
}

struct Run<'a> {
    config: &'a RunConfig,
    ranks: &'a Ranks,
    corpus: &'a Corpus,
    engine: Engine,
    predicted: Predicted,
    prefetcher: Prefetcher,
    progress: Progress,
    records: Records,
    learning_rate: LearningRate,
    accumulation_steps: usize,
    flops_per_step: u64,
    /// Of the devices of all ranks together, where that is known.
    peak_flops_per_s: Option<f64>,
    counters: Counters,
    guard: Guard,
    /// The loss of a uniform guess.
    uniform_loss: f64,
    /// The step and the loss of the last evaluation.
    evaluated: Option<(u64, f64)>,
    /// None but in f16.
    loss_scale: Option<LossScale>,
    /// None if the run never goes back.
    refuge: Option<Refuge>,
    /// None on ranks that do not save.
    saver: Option<Saver>,
    observer: &'a mut dyn StepObserver,
    /// The phase of the step, for whoever asks why the run ended.
    phase: &'static str,
    /// The step that it is making, or has made last.
    under_way: u64,
    /// The micro-batches of the step at hand.
    micro_batches: Vec<MicroBatch>,
    /// The last that was shown, whose memory the next one takes.
    expert_load: Vec<Vec<i64>>,
}

impl Run<'_> {
    fn run(mut self, interrupt: &Interrupt) -> Result<Summary, Error> {
        let (begin, before) = (Instant::now(), self.counters);
        match self.make_steps(before.step, interrupt) {
            Ok(losses) => self.end(begin, &before, losses),
            Err(error) => {
                self.leave_report();
                Err(error)
            }
        }
    }

    /// Makes the steps after `first` until the last one, or until a stop is asked for, with their evaluations and saves.
    fn make_steps(&mut self, first: u64, interrupt: &Interrupt) -> Result<Losses, Error> {
        let train = &self.config.train;
        let mut losses = Losses::default();
        while self.counters.step < train.steps && !self.ranks.any(interrupt.is_requested())? {
            losses.train = match self.step() {
                Err(Error::Engine(EngineError::Abandoned)) => {
                    self.tell_abandoned();
                    break;
                }
                loss => loss?.or(losses.train),
            };
            self.phase = "between two steps";
            if let Some(saver) = &mut self.saver {
                saver.poll(&mut self.progress)?;
            }
            self.record_save();
            let step = self.counters.step;
            let every = self.config.checkpoint.every;
            if step == first + 1 && every > 0 && step.next_multiple_of(every) < train.steps {
                // Not before the first step, which somebody is waiting for.
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
                losses.eval = self.evaluate()?.or(losses.eval);
            }
            let is_saved = every > 0 && step.is_multiple_of(every) && !is_last;
            // A run that resumes from the checkpoint has that to go back to, and this one does the same.
            if let Some(refuge) = &mut self.refuge
                && (is_saved || step.is_multiple_of(train.rollback_every))
            {
                self.engine.settle_weights()?;
                refuge.renew(&self.engine, self.counters.updates);
            }
            if is_saved {
                self.phase = "save";
                self.engine.settle_weights()?;
                self.save_and_go_on()?;
            }
        }
        if self.counters.step < self.config.train.steps {
            // On the ranks that the signal has not reached, the grace begins now.
            interrupt.request();
        }
        Ok(losses)
    }

    /// Says that the step at hand is given up, so that the state before it is saved in time.
    fn tell_abandoned(&mut self) {
        let (step, grace) = (self.under_way, self.config.checkpoint.grace_s);
        self.progress.message(&format!(
            "step {step} would take longer than checkpoint.grace_s ({grace} s) allows: abandoned; the state after step {} is saved",
            step - 1
        ));
    }

    /// Saves the last step, and writes down what the run came to.
    fn end(mut self, begin: Instant, before: &Counters, losses: Losses) -> Result<Summary, Error> {
        let interrupted = self.counters.step < self.config.train.steps;
        tracing::info!(step = self.counters.step, interrupted, "the last step of this process is made");
        self.engine.settle_weights()?;
        let state = self.state();
        let Self { saver, engine, records, progress, ranks, observer, .. } = &mut self;
        // While all ranks are here.
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
            tokens: self.counters.tokens - before.tokens,
            seconds: begin.elapsed().as_secs_f64(),
            loss: losses.train,
            eval_loss: losses.eval,
            uniform_loss: self.uniform_loss,
            has_chats: self.corpus.shapes.iter().any(|shape| shape.uses_template()),
            checkpoint: path,
            report,
            interrupted,
            skipped: self.guard.skipped,
            skipped_last: self.guard.skipped_in_a_row,
            rollbacks: self.guard.rollbacks,
        })
    }

    /// Says where a run that fails was, and leaves the report of its steps.
    fn leave_report(&mut self) {
        let Self { records, progress, config, phase, under_way, .. } = self;
        if !records.has_rows() {
            return;
        }
        progress.field("ended", &format!("in step {under_way} of {}: {phase}", config.train.steps));
        if let Some(report) = records.report(|text| progress.message(text)) {
            progress.field("report", &report.display().to_string());
        }
    }

    /// What a checkpoint remembers beside the tensors.
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

    /// A trace shows the saves that ran beside its steps.
    fn record_save(&mut self) {
        for ran in self.saver.as_mut().map(Saver::take_ended).unwrap_or_default() {
            self.records.saved(ran);
        }
    }

    /// One optimizer step; returns its loss, or none if it was skipped.
    fn step(&mut self) -> Result<Option<f64>, Error> {
        let begin = Instant::now();
        let step = self.counters.step + 1;
        self.under_way = step;
        self.records.begin_step(step, &self.engine);
        let waiting = self.engine.timeline().begin();
        self.phase = "reading data";
        let valid_tokens = self.read_global_batch()?;
        self.engine.timeline().end(waiting, || (Activity::of_step("data wait"), Cost::default()));
        if valid_tokens == 0 {
            return Err(Error::NothingToPredict { step });
        }
        let loss_scale = self.loss_scale.as_ref().map_or(1.0, LossScale::value);
        let seed = Seed {
            of_tokens: (loss_scale / valid_tokens as f64) as f32,
            of_sequences: (loss_scale / self.config.train.global_batch as f64) as f32,
        };
        self.phase = "forward and backward";
        let batches = self.micro_batches.iter().map(host_batch);
        let loss_sum = self.engine.forward_backward(batches, seed)?;
        let tokens = self.micro_batches.iter().map(|batch| batch.ids.len() as u64).sum();
        self.micro_batches.drain(..).for_each(|batch| self.prefetcher.recycle(batch));
        self.observer.gradients_ready(step, &mut self.engine)?;
        let mut own_memory = MemoryUse::of(self.engine.arena());
        if looks_at_process(step, self.config.train.steps) {
            own_memory.process_pss = proportional_bytes() as usize;
        }
        let (loss_sum, tokens, mut memory_by_rank) =
            sum_and_memory(self.ranks, loss_sum, tokens, own_memory)?;
        let loss = loss_sum / valid_tokens as f64;
        self.phase = "exchange of gradients";
        let grad_norm = self.engine.finish_gradients()? / loss_scale;
        let learning_rate = self.learning_rate.at(self.counters.step);
        let verdict = self.guard.judge(loss, grad_norm);
        self.phase = "optimizer step";
        if verdict == Verdict::Sound {
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
        self.counters.tokens += tokens;
        // An error ends the run after its row is written.
        let refused = if verdict == Verdict::Sound { Ok(()) } else { self.refuse(step, verdict) };
        let seconds = begin.elapsed().as_secs_f64();
        let saving_since = self.saver.as_ref().and_then(Saver::saving_since);
        let tell = |text: &str| self.progress.message(text);
        self.records.end_step(step, begin, saving_since, &self.engine, self.ranks, tell)?;
        // The update may have taken more here; it did so on the others in the step before.
        own_memory = MemoryUse { process_pss: own_memory.process_pss, ..MemoryUse::of(self.engine.arena()) };
        if let Some(own) = memory_by_rank.get_mut(self.ranks.rank()) {
            *own = own_memory;
        }
        let skipped = verdict != Verdict::Sound;
        let memory = (memory_by_rank.iter().fold(own_memory, MemoryUse::maximum), memory_by_rank);
        let row =
            self.row(Made { loss, grad_norm, learning_rate, loss_scale, tokens, seconds, skipped, memory });
        tracing::trace!(step, loss, grad_norm, step_ms = row.step_ms, "made a step");
        self.progress.step(&row);
        self.observer.step_ended(&row);
        self.records.append(&row, |text| self.progress.message(text));
        if self.is_shown(step) {
            self.expert_load = row.expert_load;
        }
        refused.map(|()| (verdict == Verdict::Sound).then_some(loss))
    }

    /// Returns true if a step is among those that are shown.
    fn is_shown(&self, step: u64) -> bool {
        let every = self.config.train.log_every.max(1);
        step == 1 || step.is_multiple_of(every) || step == self.config.train.steps
    }

    /// The metrics of the step that has just been made, with what was counted since the one before.
    fn row(&mut self, made: Made) -> StepMetrics {
        let Made { loss, grad_norm, learning_rate, loss_scale, tokens, seconds, .. } = made;
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
            grad_norm,
            lr: learning_rate,
            tokens,
            tokens_seen: self.counters.tokens,
            step_ms: seconds * 1e3,
            tokens_per_s: tokens as f64 / seconds,
            flops_per_s,
            mfu: self.peak_flops_per_s.map(|peak| flops_per_s / peak),
            skipped: made.skipped,
            skipped_steps: self.guard.skipped,
            rollbacks: self.guard.rollbacks,
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

    /// Reads the own micro-batches of the next step and returns how many labels of all ranks' count.
    fn read_global_batch(&mut self) -> Result<u64, Error> {
        let mut valid_tokens = 0;
        for _ in 0..self.accumulation_steps {
            let batch = self.prefetcher.next_batch()?.ok_or(lockstep_data::DataError::PrefetcherLost)?;
            valid_tokens += batch.valid_tokens();
            self.micro_batches.push(batch);
        }
        Ok(self.ranks.sum(0.0, valid_tokens)?.1)
    }

    /// A step that must not change the weights: counts it, tells of it, and goes back if there were too many.
    fn refuse(&mut self, step: u64, verdict: Verdict) -> Result<(), Error> {
        if matches!(verdict, Verdict::NotFinite { .. })
            && let Some(scale) = &mut self.loss_scale
            && let Overflow::Adjusts { next } = scale.overflow()
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
            && let Some(refuge) = &self.refuge
        {
            self.counters.updates = refuge.restore(&mut self.engine)?;
            tracing::info!(step, updates = self.counters.updates, "went back to earlier weights");
            let updates = self.counters.updates;
            self.progress
                .message(&format!("step {step}: back to the weights after update {updates}; the data go on"));
        }
        Ok(())
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
        // All ranks make as many forwards, for those that share experts need each other: some may read again what does not count.
        let starts: Vec<u64> = (0..samples).step_by(micro_batch as usize).collect();
        for starts in starts.chunks(self.ranks.replicas()) {
            let own = starts.get(self.ranks.replica()).copied();
            let first = own.unwrap_or(starts[0]);
            valid.fill(first..first + micro_batch, &mut batch)?;
            // The last micro-batch goes on into samples that do not count.
            let counted = own.map_or(0, |first| (samples - first).min(micro_batch)) as usize * train.seq_len;
            batch.labels[counted..].fill(lockstep_data::IGNORE_LABEL);
            loss_sum += self.engine.evaluate(&host_batch(&batch))?;
            tokens += batch.valid_tokens();
        }
        let (loss_sum, tokens) = self.ranks.sum(loss_sum, tokens)?;
        // What was exchanged is not the next step's.
        self.engine.take_traffic();
        let row = EvalMetrics {
            step: self.counters.step,
            eval_loss: loss_sum / tokens as f64,
            eval_tokens: tokens,
            eval_ms: begin.elapsed().as_secs_f64() * 1e3,
        };
        self.records.pause("evaluation", begin);
        tracing::debug!(step = row.step, loss = row.eval_loss, ms = row.eval_ms, "evaluated");
        self.progress.evaluation(&row);
        self.records.append(&row, |text| self.progress.message(text));
        self.evaluated = Some((row.step, row.eval_loss));
        Ok(Some(row.eval_loss))
    }
}

/// Whether a step looks at what its process has of the machine's memory, once everything was used: often at the beginning,
/// rarely later, and at the end.
fn looks_at_process(step: u64, steps: u64) -> bool {
    step > 1 && step.is_power_of_two() || step == steps
}

/// `min(1, max_norm / (norm + 1e-6))`, or 1 where clipping is off.
pub(crate) fn clip_coefficient(max_norm: f64, norm: f64) -> f64 {
    if max_norm == 0.0 { 1.0 } else { (max_norm / (norm + 1e-6)).min(1.0) }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clip_coefficient_is_that_of_pytorch_at_its_boundaries() {
        for (max_norm, norm, expected) in [
            (1.0, 2.0, 1.0 / 2.000_001),
            // At the limit itself the small number makes the difference.
            (1.0, 1.0, 1.0 / 1.000_001),
            (1.0, 1.0 - 1e-6, 1.0),
            (1e-6, 1e-6, 0.5),
            (1.0, 0.0, 1.0),
            (0.0, 5.0, 1.0),
        ] {
            let found = clip_coefficient(max_norm, norm);
            assert!(
                (found - expected).abs() < 1e-12,
                "{found} of {max_norm} and {norm}, {expected} expected"
            );
        }
    }
}
