//! The saver of a run: prepares the job of each save, runs those in the foreground, and reports their results.
//!
//! Saves in the background are advanced by `background`, a second part of its methods.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lockstep_checkpoint::{DType, PendingSave, SaveThread};
use lockstep_config::plan::checked_plan;
use lockstep_config::{ResolvedModel, RunConfig, human};
use lockstep_engine::{Engine, Ranks, Snapshot, TimeLimit};
use lockstep_launch::interrupt::Interrupt;
use lockstep_model::Adapter;
use lockstep_observe::metrics::MetricsWriter;
use lockstep_observe::progress::Progress;
use lockstep_plan::{Feedback, Quantization};
use lockstep_tensor::host::available_memory_bytes;
use serde_json::{Value, json};

use super::directories::{CheckpointDir, Limits};
use super::job::{Attempt, Contents, Job, Saved};
use super::part::{Observer, RankSave, gather};
use super::save::{Save, SaveInterval};
use crate::state::SavedState;
use crate::{Error, StepObserver, TrainingData};

/// Memory that must stay available after a snapshot is allocated.
const RESERVE_BYTES: u64 = 256 << 20;
/// Interval at which the training polls a save that it waits for.
const LOOK: Duration = Duration::from_millis(200);

/// Saver of a run on one rank.
pub(crate) struct Saver {
    /// The ranks that save together.
    pub(super) ranks: Ranks,
    places: Arc<[CheckpointDir]>,
    limits: Limits,
    /// Description of the run's configuration in a checkpoint.
    record: Value,
    /// Description of the plan in a checkpoint.
    plan: Value,
    /// Level of the kernels in a checkpoint.
    kernels: Option<String>,
    /// True if saves may run in the background.
    in_background: bool,
    /// True if this rank writes a part of each checkpoint.
    pub(super) has_part: bool,
    /// Thread of background saves; `None` if this rank writes nothing or saves in the foreground.
    pub(super) thread: Option<SaveThread>,
    pub(super) snapshot: Memory,
    pub(super) in_flight: Option<Save>,
    /// Background work that has ended since it was last taken.
    pub(super) ended: Vec<SaveInterval>,
    /// Step and path of the newest checkpoint; known to the first rank only.
    saved: Option<(u64, PathBuf)>,
    stall_ms: f64,
    /// Warnings that have been reported.
    told: HashSet<String>,
}

/// Memory for the snapshot.
pub(super) enum Memory {
    /// Nothing: not yet allocated, or lent to the save in flight.
    None,
    /// Being allocated and touched by the saving thread.
    Coming(PendingSave<Snapshot>),
    There(Box<Snapshot>),
}

/// The first rank's decision about its result, as all ranks know it.
pub(super) enum Decision<T> {
    /// Success; the result on the first rank.
    GoOn(Option<T>),
    /// The save restarts with this attempt.
    Again(Attempt),
    /// The step is not saved; the reason on the first rank.
    Over(Option<Error>),
}

impl Saver {
    /// Returns a saver for a run that begins with the checkpoint `saved` (step and path), if there is one, and computes with
    /// `kernels`. `None` on ranks that do not save.
    ///
    /// # Errors
    /// If the thread of background saves cannot be started, or the plan does not fit the model.
    pub(crate) fn new(
        config: &RunConfig,
        model: &ResolvedModel,
        data: &TrainingData,
        ranks: &Ranks,
        (saved, kernels): (Option<(u64, PathBuf)>, Option<String>),
        interrupt: &Interrupt,
    ) -> Result<Option<Self>, Error> {
        let ranks = match ranks.has_model_parallelism() {
            true => ranks.clone(),
            false if ranks.is_first() => Ranks::alone(),
            false => return Ok(None),
        };
        let Quantization { gradients, feedback, .. } = config.plan.quantization();
        let keeps_residual = gradients.is_some() && feedback == Feedback::Kept;
        let in_background = config.saves_from_copies();
        let has_part = ranks.is_in_first_replica() || keeps_residual;
        Ok(Some(Self {
            places: CheckpointDir::of_run(config),
            limits: Limits {
                stall: Duration::from_secs_f64(config.checkpoint.stall_s),
                grace: Duration::from_secs_f64(config.checkpoint.grace_s),
                interrupt: interrupt.clone(),
            },
            record: json!({
                "run": config.to_json(),
                "model": model.config.to_json(DType::F32),
                "tokenizer": data.text.as_ref().and_then(|text| text.tokenizer_name.as_ref()),
                "has_chats": data.has_chats(),
                "training_text": data.digest,
                "base": model.base.get(),
                "adapter": model.tuning.adapter.as_ref().map(Adapter::config),
                "quantized": model.quantized_here(),
            }),
            plan: json!(checked_plan(config, &model.config, &model.tuning)?.plan()),
            kernels,
            thread: (in_background && has_part).then(SaveThread::start).transpose()?,
            in_background,
            has_part,
            snapshot: Memory::None,
            in_flight: None,
            ended: Vec::new(),
            saved,
            stall_ms: 0.0,
            told: HashSet::new(),
            ranks,
        }))
    }

    /// Returns the milliseconds that the training has waited for saves since the last call.
    pub(crate) fn take_stall_ms(&mut self) -> f64 {
        std::mem::take(&mut self.stall_ms)
    }

    /// Returns when the save in flight began.
    pub(crate) fn saving_since(&self) -> Option<Instant> {
        self.in_flight.as_ref().map(|save| save.begin)
    }

    /// Returns the background work that has ended since the last call.
    pub(crate) fn take_ended(&mut self) -> Vec<SaveInterval> {
        std::mem::take(&mut self.ended)
    }

    /// Allocates the memory of background saves, overlapped with the training. If it is not available, the save reports that.
    pub(crate) fn prepare(&mut self, engine: &Engine) {
        if let (Some(thread), Memory::None) = (&self.thread, &self.snapshot)
            && let Ok(mut snapshot) = new_snapshot(engine)
        {
            self.snapshot = Memory::Coming(thread.run(move || {
                snapshot.touch();
                snapshot
            }));
        }
    }

    /// Saves between two steps. A failure is reported as a message and the run goes on. A collective call: all ranks that save
    /// together make it after the same steps.
    ///
    /// # Errors
    /// If weights are not finite or the communication with other ranks fails.
    pub(crate) fn save_and_go_on(
        &mut self,
        engine: &mut Engine,
        state: &SavedState,
        metrics: Option<&mut MetricsWriter>,
        observer: &mut dyn StepObserver,
        progress: &mut Progress,
    ) -> Result<(), Error> {
        let called = Instant::now();
        while !self.stalls()? {
            if !self.is_saving_after(LOOK, progress)? {
                break;
            }
        }
        if let Some(earlier) = self.step_in_flight() {
            let step = state.counters.step;
            progress.message(&format!(
                "step {step} is not saved while the save of step {earlier} waits for its file system"
            ));
            return Ok(());
        }
        let job = self.job(engine, state, metrics, observer, progress);
        let lacks_copy = self.in_background && self.has_part && !self.take_copy(engine, progress);
        if !self.in_background || self.ranks.any_in_time(lacks_copy, TimeLimit::Unlimited)? {
            if let Some(saved) = self.save_now(&job, engine).transpose() {
                self.tell(job.part.step, saved, progress)?;
            }
        } else {
            self.start(job, progress)?;
        }
        self.stall_ms += called.elapsed().as_secs_f64() * 1e3;
        Ok(())
    }

    /// Saves at the end of a run, waits for it and returns the path of the checkpoint; on ranks other than the first an empty
    /// path.
    ///
    /// # Errors
    /// If the checkpoint cannot be made, for whatever reason.
    pub(crate) fn save_last(
        &mut self,
        engine: &mut Engine,
        state: &SavedState,
        metrics: Option<&mut MetricsWriter>,
        observer: &mut dyn StepObserver,
        progress: &mut Progress,
    ) -> Result<PathBuf, Error> {
        self.wait(progress)?;
        let step = state.counters.step;
        let saved = self.saved.clone().filter(|(saved, _)| self.ranks.is_first() && *saved == step);
        if self.ranks.any_in_time(saved.is_some(), TimeLimit::Unlimited)? {
            return Ok(saved.map_or_else(PathBuf::new, |(_, path)| path));
        }
        let job = self.job(engine, state, metrics, observer, progress);
        let Some(saved) = self.save_now(&job, engine)? else { return Ok(PathBuf::new()) };
        let path = saved.path.clone();
        self.tell(step, Ok(saved), progress)?;
        Ok(path)
    }

    /// Saves in the foreground; returns the checkpoint on the first rank.
    fn save_now(&self, job: &Job, engine: &mut Engine) -> Result<Option<Saved>, Error> {
        let is_first = self.ranks.is_first();
        let mut attempt = Attempt::default();
        loop {
            let opened = is_first.then(|| job.open(attempt));
            let staging = match self.decide(opened, job, attempt, TimeLimit::Unlimited)? {
                Decision::GoOn(staging) => staging,
                Decision::Again(next) => {
                    attempt = next;
                    continue;
                }
                Decision::Over(error) => return error.map_or(Ok(None), Err),
            };
            let written = match self.has_part {
                true => job.write(attempt, &engine.state_tensors()),
                false => Ok(None),
            };
            self.ranks.meet()?;
            let saved = match (gather(&self.ranks, job.part.step, written), staging) {
                (Ok(reports), Some(staging)) => {
                    Some(job.commit(attempt, staging, reports.unwrap_or_default()))
                }
                (Err(error), _) => Some(Err(error)),
                (Ok(_), None) => None,
            };
            match self.decide(saved, job, attempt, TimeLimit::Unlimited)? {
                Decision::GoOn(saved) => return Ok(saved),
                Decision::Again(next) => attempt = next,
                Decision::Over(error) => return error.map_or(Ok(None), Err),
            }
        }
    }

    /// Agrees on the next action of all ranks after the first rank's result `own`, which is `None` on the others.
    ///
    /// # Errors
    /// If `own` is an error that ends the run, or the communication with other ranks fails.
    pub(super) fn decide<T>(
        &self,
        own: Option<Result<T, Error>>,
        job: &Job,
        attempt: Attempt,
        limit: TimeLimit,
    ) -> Result<Decision<T>, Error> {
        let decision = match own {
            None => Decision::GoOn(None),
            Some(Ok(result)) => Decision::GoOn(Some(result)),
            Some(Err(Error::Checkpoint(error))) => match job.next(attempt, error) {
                Ok(next) => Decision::Again(next),
                Err(error) => Decision::Over(Some(error)),
            },
            Some(Err(error)) => return Err(error),
        };
        let code = match &decision {
            Decision::GoOn(_) => 0,
            Decision::Over(_) => 1,
            Decision::Again(next) => 2 + next.place as u8,
        };
        let of_all = self.ranks.maximum(code, limit)?;
        Ok(match (decision, of_all) {
            (decision, _) if self.ranks.is_first() => decision,
            (_, 0) => Decision::GoOn(None),
            (_, 1) => Decision::Over(None),
            (_, code) => Decision::Again(Attempt::at(usize::from(code) - 2)),
        })
    }

    /// Returns the job that saves the state after the last step.
    fn job(
        &self,
        engine: &Engine,
        state: &SavedState,
        metrics: Option<&mut MetricsWriter>,
        observer: &mut dyn StepObserver,
        progress: &mut Progress,
    ) -> Job {
        let step = state.counters.step;
        let observer: Observer = Arc::from(observer.saving(step));
        // Other ranks of the replica hold the same values.
        let owned = engine.trained_ids().filter(|id| engine.is_primary_owner(*id));
        let metrics = metrics.map(MetricsWriter::file).transpose().unwrap_or_else(|error| {
            progress.message(&error.to_string());
            None
        });
        let contents = self.ranks.is_first().then(|| Contents {
            record: self.record.clone(),
            plan: self.plan.clone(),
            kernels: self.kernels.clone(),
            state: state.clone(),
            parameters: engine.records().to_vec(),
            metrics: metrics.map(Arc::new),
        });
        Job {
            part: RankSave {
                step,
                rank: self.ranks.rank(),
                owned: owned.map(|id| engine.records()[id.0].name.clone()).collect(),
                is_in_first_replica: self.ranks.is_in_first_replica(),
            },
            places: self.places.clone(),
            observer,
            voice: progress.voice(),
            limits: self.limits.clone(),
            contents,
            stalls: AtomicBool::new(false),
            failures: Mutex::default(),
        }
    }

    pub(super) fn tell(
        &mut self,
        step: u64,
        saved: Result<Saved, Error>,
        progress: &mut Progress,
    ) -> Result<(), Error> {
        match saved {
            Ok(Saved { path, warnings }) => {
                for warning in warnings {
                    // A persistent warning is reported once.
                    if self.told.insert(warning.clone()) {
                        progress.message(&warning);
                    }
                }
                progress.message(&format!("saved {}", path.display()));
                self.saved = Some((step, path));
                Ok(())
            }
            Err(error @ (Error::Checkpoint(_) | Error::NotSaved { .. })) => {
                progress.message(&format!("not saved: {error}"));
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Takes a snapshot of the engine; returns false if saves are made in the foreground because its memory is not available.
    fn take_copy(&mut self, engine: &Engine, progress: &mut Progress) -> bool {
        if self.thread.is_none() {
            return false;
        }
        let snapshot = match std::mem::replace(&mut self.snapshot, Memory::None) {
            Memory::None => new_snapshot(engine).map(Box::new),
            Memory::Coming(pending) => Ok(Box::new(pending.wait())),
            Memory::There(snapshot) => Ok(snapshot),
        };
        match snapshot {
            Ok(mut snapshot) => {
                snapshot.take(engine);
                self.snapshot = Memory::There(snapshot);
                true
            }
            Err(reason) => {
                progress.message(&format!("saving in the foreground: {reason}"));
                self.thread = None;
                false
            }
        }
    }
}

/// Returns memory for a snapshot of the engine's state, or the reason why there is none.
fn new_snapshot(engine: &Engine) -> Result<Snapshot, String> {
    check_room(Snapshot::bytes_for(engine) as u64, available_memory_bytes())?;
    Snapshot::new(engine).map_err(|error| error.to_string())
}

/// Checks that the system has `RESERVE_BYTES` left after `needed` bytes; passes if `available` is unknown.
fn check_room(needed: u64, available: Option<u64>) -> Result<(), String> {
    match available {
        Some(available) if available < needed.saturating_add(RESERVE_BYTES) => {
            let (needed, available) = (human::bytes(needed), human::bytes(available));
            Err(format!("a copy of the state takes {needed}, and {available} are available"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_that_leaves_the_system_too_little_is_not_made() {
        let gib = 1 << 30;
        assert_eq!(check_room(gib, Some(2 * gib)), Ok(()));
        assert_eq!(check_room(gib, None), Ok(()));
        for available in [0, gib, gib + RESERVE_BYTES - 1] {
            let reason = check_room(gib, Some(available)).unwrap_err();
            assert!(reason.starts_with("a copy of the state takes 1.0 GiB, and "), "{reason}");
        }
    }
}
