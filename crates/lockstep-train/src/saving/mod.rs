//! When and how a run is saved: beside the training if it may, and where nothing better is possible in front of it.
//!
//! Ranks that share a model save together: the first opens a save, each writes the part that it holds (`part`), and when all have,
//! the first makes a checkpoint of the parts. Where each holds all of it the first saves alone. Whatever happens on
//! a rank, it comes to each meeting with the others: one that cannot write says so there.
//!
//! A save in the background works on a snapshot, so that its bytes are those of a save in the foreground. One is
//! under way at a time: the next one waits for it, and what the training waited is its stall. What went wrong in
//! the background is told at the next step; it costs the checkpoint and not the run.
//!
//! Each save is tried in one directory after the other (`job`), and none is waited for without limit (`places`): a file system that has
//! stopped answering costs a thread, which is left behind in its call.

mod background;
mod job;
mod part;
mod places;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lockstep_checkpoint::{DType, PendingSave, SaveThread};
use lockstep_engine::{Engine, Snapshot};
use lockstep_model::Adapter;
use lockstep_plan::{Feedback, Quantization};
use serde_json::{Value, json};

use self::background::Save;
use self::job::{Attempt, Contents, Job, Saved};
use self::part::{Observer, gather};

pub(crate) use self::places::Beginning;
use self::places::{Limits, Place};
use crate::interrupt::Interrupt;
use crate::state::SavedState;
use crate::{Corpus, Error, StepObserver};
use lockstep_config::plan::checked_plan;
use lockstep_config::{ResolvedModel, RunConfig, human};
use lockstep_engine::{Patience, Ranks};
use lockstep_observe::metrics::MetricsWriter;
use lockstep_observe::progress::Progress;
use lockstep_tensor::host::available_memory_bytes;

/// Memory that a snapshot leaves to everybody else.
const RESERVE_BYTES: u64 = 256 << 20;
/// Time that the training waits for a save to be opened, so that ranks which save together need no step more for it.
const OPENING: Duration = Duration::from_millis(100);
/// Time between two looks at a save that the training waits for.
const LOOK: Duration = Duration::from_millis(200);

/// Saves a run.
pub(crate) struct Saver {
    /// Those that save together.
    ranks: Ranks,
    places: Arc<[Place]>,
    limits: Limits,
    /// What a checkpoint says of the run's configuration.
    record: Value,
    /// What it says of the plan.
    plan: Value,
    /// True if saves may run in the background.
    in_background: bool,
    /// True if this rank has a part of each checkpoint to write.
    has_part: bool,
    /// The thread of saves; `None` if this rank has nothing to write, or saves in the foreground.
    thread: Option<SaveThread>,
    snapshot: Memory,
    under_way: Option<Save>,
    /// What has ended in the background.
    ended: Vec<Ran>,
    /// Step and path of the newest checkpoint; the first rank knows it.
    saved: Option<(u64, PathBuf)>,
    stall_ms: f64,
    /// Warnings that were told.
    told: HashSet<String>,
}

/// Memory for the copy that is saved.
enum Memory {
    /// There is none yet, or the save under way has it.
    None,
    /// The thread has the system give it.
    Coming(PendingSave<Snapshot>),
    There(Box<Snapshot>),
}

/// When a save in the background ran.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ran {
    pub(crate) begin: Instant,
    pub(crate) end: Instant,
}

/// The decision of the first rank on what it has done, as all ranks know it.
enum Decision<T> {
    /// Success; its result, on the first rank.
    GoOn(Option<T>),
    /// The save is tried again from its beginning.
    Again(Attempt),
    /// The step is not saved; the reason, on the first rank.
    Over(Option<Error>),
}

impl Saver {
    /// A saver for a run that begins with the checkpoint `saved` (step and path), if there is one; none on ranks that do not
    /// save.
    ///
    /// # Errors
    /// No thread for saves in the background; a plan that does not fit.
    pub(crate) fn new(
        config: &RunConfig,
        model: &ResolvedModel,
        corpus: &Corpus,
        ranks: &Ranks,
        saved: Option<(u64, PathBuf)>,
        interrupt: &Interrupt,
    ) -> Result<Option<Self>, Error> {
        let ranks = match ranks.share_models() {
            true => ranks.clone(),
            false if ranks.is_first() => Ranks::alone(),
            false => return Ok(None),
        };
        let Quantization { gradients, feedback, .. } = config.plan.quantization();
        let keeps_residual = gradients.is_some() && feedback == Feedback::Kept;
        let in_background = config.saves_from_copies();
        let has_part = ranks.is_of_first_copy() || keeps_residual;
        Ok(Some(Self {
            places: Place::of_run(config),
            limits: Limits {
                stall: Duration::from_secs_f64(config.checkpoint.stall_s),
                grace: Duration::from_secs_f64(config.checkpoint.grace_s),
                interrupt: interrupt.clone(),
            },
            record: json!({
                "run": config.to_json(),
                "model": model.config.to_json(DType::F32),
                "tokenizer": corpus.tokenizer_name,
                "has_chats": corpus.shapes.iter().any(|shape| shape.uses_template()),
                "training_text": corpus.digest,
                "base": model.base.get(),
                "adapter": model.tuning.adapter.as_ref().map(Adapter::config),
            }),
            plan: json!(checked_plan(config, &model.config, &model.tuning)?.plan()),
            thread: (in_background && has_part).then(SaveThread::start).transpose()?,
            in_background,
            has_part,
            snapshot: Memory::None,
            under_way: None,
            ended: Vec::new(),
            saved,
            stall_ms: 0.0,
            told: HashSet::new(),
            ranks,
        }))
    }

    /// Milliseconds that saves have kept the training waiting since this was last asked.
    pub(crate) fn take_stall_ms(&mut self) -> f64 {
        std::mem::take(&mut self.stall_ms)
    }

    /// Since when a save has been under way in the background.
    pub(crate) fn saving_since(&self) -> Option<Instant> {
        self.under_way.as_ref().map(|save| save.begin)
    }

    /// What has ended in the background since this was last asked.
    pub(crate) fn take_ended(&mut self) -> Vec<Ran> {
        std::mem::take(&mut self.ended)
    }

    /// Gets the memory that a save in the background needs, beside the training. If there is none, the save says so.
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

    /// A save between two steps. Where it fails, the run says so and goes on, and the next one may succeed. All ranks that save
    /// together call this after the same steps.
    ///
    /// # Errors
    /// Weights that are not finite; [`Error::Comm`].
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
        if let Some(earlier) = self.step_under_way() {
            let step = state.counters.step;
            progress.message(&format!(
                "step {step} is not saved while the save of step {earlier} waits for its file system"
            ));
            return Ok(());
        }
        let job = self.job(engine, state, metrics, observer, progress);
        let lacks_copy = self.in_background && self.has_part && !self.take_copy(engine, progress);
        if !self.in_background || self.ranks.any_in_time(lacks_copy, Patience::Unlimited)? {
            match self.save_now(&job, engine) {
                Ok(Some(saved)) => self.tell(job.step, Ok(saved), progress)?,
                Ok(None) => {}
                Err(error) => self.tell(job.step, Err(error), progress)?,
            }
        } else {
            self.start(job, progress)?;
        }
        self.stall_ms += called.elapsed().as_secs_f64() * 1e3;
        Ok(())
    }

    /// The save that ends a run: waits for it, and returns the checkpoint; on other ranks than the first an empty path.
    ///
    /// # Errors
    /// Whatever kept it from being made.
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
        if self.ranks.any_in_time(saved.is_some(), Patience::Unlimited)? {
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
            let staging = match self.decide(opened, job, attempt, Patience::Unlimited)? {
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
            let saved = match (gather(&self.ranks, job.step, written), staging) {
                (Ok(reports), Some(staging)) => {
                    Some(job.commit(attempt, staging, reports.unwrap_or_default()))
                }
                (Err(error), _) => Some(Err(error)),
                (Ok(_), None) => None,
            };
            match self.decide(saved, job, attempt, Patience::Unlimited)? {
                Decision::GoOn(saved) => return Ok(saved),
                Decision::Again(next) => attempt = next,
                Decision::Over(error) => return error.map_or(Ok(None), Err),
            }
        }
    }

    /// Agrees on the next action of all ranks after the first has come to the result `own`, which is `None` on the others.
    ///
    /// # Errors
    /// Those of `own` that end the run; [`Error::Comm`].
    fn decide<T>(
        &self,
        own: Option<Result<T, Error>>,
        job: &Job,
        attempt: Attempt,
        patience: Patience,
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
        let of_all = self.ranks.maximum(code, patience)?;
        Ok(match (decision, of_all) {
            (decision, _) if self.ranks.is_first() => decision,
            (_, 0) => Decision::GoOn(None),
            (_, 1) => Decision::Over(None),
            (_, code) => Decision::Again(Attempt::at(usize::from(code) - 2)),
        })
    }

    /// A save of the state after the last step.
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
        // Other copies hold the same.
        let spoken_for = engine.trained_ids().filter(|id| engine.speaks_for(*id));
        let spoken_for: HashSet<_> = spoken_for.map(|id| engine.records()[id.0].name.clone()).collect();
        // What only this rank has it saves, of whichever copy it is.
        let own = if self.ranks.is_of_first_copy() { spoken_for.clone() } else { HashSet::new() };
        let metrics = metrics.map(MetricsWriter::file).transpose().unwrap_or_else(|error| {
            progress.message(&error.to_string());
            None
        });
        let contents = self.ranks.is_first().then(|| Contents {
            record: self.record.clone(),
            plan: self.plan.clone(),
            state: state.clone(),
            parameters: engine.records().to_vec(),
            metrics: metrics.map(Arc::new),
        });
        Job {
            step,
            places: self.places.clone(),
            rank: self.ranks.rank(),
            own,
            spoken_for,
            observer,
            voice: progress.voice(),
            limits: self.limits.clone(),
            contents,
            stalls: AtomicBool::new(false),
            failures: Mutex::default(),
        }
    }

    fn tell(&mut self, step: u64, saved: Result<Saved, Error>, progress: &mut Progress) -> Result<(), Error> {
        match saved {
            Ok(Saved { path, warnings }) => {
                for warning in warnings {
                    // What stays wrong is told once.
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

    /// Takes a snapshot of the engine; returns false where saves are made in the foreground because there is no memory for one.
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

/// Memory for a copy of the engine's state, or why there is none.
fn new_snapshot(engine: &Engine) -> Result<Snapshot, String> {
    check_room(Snapshot::bytes_for(engine) as u64, available_memory_bytes())?;
    Snapshot::new(engine).map_err(|error| error.to_string())
}

/// Whether a copy of `needed` bytes leaves the system enough; where it does not say, the copy is tried.
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
