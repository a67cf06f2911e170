//! When and how a run is saved: beside the training if it may, and where nothing better is possible in front of it.
//!
//! Ranks that share a model save together: the first opens a save, each writes the part that it holds (`part`), and when all have,
//! the first makes a checkpoint of the parts. Where each holds all of it the first saves alone. Whatever happens on
//! a rank, it comes to each meeting with the others: one that cannot write says so there.
//!
//! A save in the background works on a snapshot, so that its bytes are those of a save in the foreground. One is
//! under way at a time: the next one waits for it, and what the training waited is its stall. What went wrong in
//! the background is told at the next step; it costs the checkpoint and not the run.

mod part;

use std::collections::HashSet;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use lockstep_checkpoint::{DType, PendingSave, SaveThread, ShardReport, Staging};
use lockstep_engine::{Engine, Snapshot};
use lockstep_model::Adapter;
use lockstep_plan::{Feedback, Quantization};
use serde_json::{Value, json};

use self::part::{Commit, Directory, Observer, Part, Saved, Written, gather};
use crate::machine::available_memory_bytes;
use crate::metrics::MetricsWriter;
use crate::plan::valid_plan;
use crate::progress::Progress;
use crate::ranks::{Patience, Ranks};
use crate::state::SavedState;
use crate::{Corpus, Error, ResolvedModel, RunConfig, StepObserver, human};

/// Memory that a snapshot leaves to everybody else.
const RESERVE_BYTES: u64 = 256 << 20;

/// Saves a run.
pub(crate) struct Saver {
    /// Those that save together.
    ranks: Ranks,
    directory: Directory,
    /// What a checkpoint says of the run's configuration.
    record: Value,
    /// What it says of the plan.
    plan: Value,
    /// None if saves are made in the foreground.
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

/// A save under way.
struct Save {
    step: u64,
    begin: Instant,
    stage: Stage,
}

/// What is being done.
enum Stage {
    /// Each rank writes its part; the first has the rest in hand.
    Parts { own: Own, commit: Option<Box<Commit>> },
    /// The first makes a checkpoint of the parts.
    Commit(PendingSave<Done<Result<Saved, Error>>>),
}

/// The own part of a save.
enum Own {
    Pending(PendingSave<Done<Written>>),
    Written(Written),
}

/// What came of work in the background.
struct Done<T> {
    ran: Ran,
    /// What it was done on.
    snapshot: Option<Snapshot>,
    result: T,
}

impl<T> Done<T> {
    /// Does `work` on what a snapshot holds.
    fn on(mut snapshot: Snapshot, work: impl FnOnce(&mut Snapshot) -> T) -> Self {
        let begin = Instant::now();
        let result = work(&mut snapshot);
        Self { ran: Ran { begin, end: Instant::now() }, snapshot: Some(snapshot), result }
    }
}

impl Done<Result<Saved, Error>> {
    /// Makes a checkpoint of parts that are written.
    fn of_commit(commit: Box<Commit>, reports: Vec<ShardReport>) -> Self {
        let begin = Instant::now();
        let result = commit.run(reports);
        Self { ran: Ran { begin, end: Instant::now() }, snapshot: None, result }
    }
}

/// A save that has been opened.
struct Opened {
    part: Part,
    /// The first rank's.
    commit: Option<Box<Commit>>,
}

/// When a save in the background ran.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ran {
    pub(crate) begin: Instant,
    pub(crate) end: Instant,
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
    ) -> Result<Option<Self>, Error> {
        let ranks = match ranks.share_models() {
            true => ranks.clone(),
            false if ranks.is_first() => Ranks::alone(),
            false => return Ok(None),
        };
        let Quantization { gradients, feedback, .. } = config.quantization();
        let keeps_residual = gradients.is_some() && feedback == Feedback::Kept;
        let in_background = config.saves_from_copies() && (ranks.is_of_first_copy() || keeps_residual);
        Ok(Some(Self {
            directory: Directory {
                path: config.checkpoint.dir.clone(),
                keep: NonZeroUsize::new(config.checkpoint.keep),
                keep_best: config.checkpoint.keep_best,
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
            plan: json!(valid_plan(config, &model.config, &model.tuning)?.0),
            thread: in_background.then(SaveThread::start).transpose()?,
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

    /// Takes a save one stage further, if all ranks are done with this one, and tells of it when it has ended. All that save
    /// together call this after the same steps.
    ///
    /// # Errors
    /// Weights that are not finite; [`Error::Comm`]. What kept the save from being made is a message.
    pub(crate) fn poll(&mut self, progress: &mut Progress) -> Result<(), Error> {
        self.poll_for(Patience::Limited, progress)
    }

    fn poll_for(&mut self, patience: Patience, progress: &mut Progress) -> Result<(), Error> {
        let Some(Save { step, begin, stage }) = self.under_way.take() else { return Ok(()) };
        let stage = match stage {
            Stage::Parts { own, commit } => {
                let own = match own {
                    Own::Pending(pending) => match pending.poll() {
                        Ok(done) => Own::Written(self.take_back(done)),
                        Err(pending) => Own::Pending(pending),
                    },
                    written @ Own::Written(_) => written,
                };
                let is_pending = self.ranks.any_in_time(matches!(own, Own::Pending(_)), patience)?;
                match own {
                    Own::Written(written) if !is_pending => {
                        return self.join(step, begin, written, commit, progress);
                    }
                    own => Stage::Parts { own, commit },
                }
            }
            Stage::Commit(pending) => match pending.poll() {
                Ok(done) => {
                    let saved = self.take_back(done);
                    return self.tell(step, saved, progress);
                }
                Err(pending) => Stage::Commit(pending),
            },
        };
        self.under_way = Some(Save { step, begin, stage });
        Ok(())
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
        self.wait(progress)?;
        let step = state.counters.step;
        match self.open(engine, state, metrics, observer, progress) {
            Ok(Some(opened)) => self.start(step, opened, engine, progress)?,
            Ok(None) => {}
            Err(error) => self.tell(step, Err(error), progress)?,
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
        let Some(Opened { part, commit }) = self.open(engine, state, metrics, observer, progress)? else {
            return Ok(PathBuf::new());
        };
        let written = self.write_in_foreground(&part, engine);
        self.ranks.meet()?;
        let reports = gather(&self.ranks, step, written)?;
        let Some((commit, reports)) = commit.zip(reports) else { return Ok(PathBuf::new()) };
        let saved = commit.run(reports)?;
        let path = saved.path.clone();
        self.tell(step, Ok(saved), progress)?;
        Ok(path)
    }

    /// Waits for the save that is under way.
    fn wait(&mut self, progress: &mut Progress) -> Result<(), Error> {
        if let Some(Save { step, begin, stage: Stage::Parts { own, commit } }) =
            self.under_way.take_if(|save| matches!(save.stage, Stage::Parts { .. }))
        {
            let written = match own {
                Own::Pending(pending) => self.take_back(pending.wait()),
                Own::Written(written) => written,
            };
            self.ranks.meet()?;
            self.join(step, begin, written, commit, progress)?;
        }
        match self.under_way.take() {
            Some(Save { step, stage: Stage::Commit(pending), .. }) => {
                let saved = self.take_back(pending.wait());
                self.tell(step, saved, progress)
            }
            _ => Ok(()),
        }
    }

    /// Opens a save: the first rank makes a directory, in which the others then find themselves. None where the first could
    /// not, and on it why.
    fn open(
        &self,
        engine: &Engine,
        state: &SavedState,
        metrics: Option<&mut MetricsWriter>,
        observer: &mut dyn StepObserver,
        progress: &mut Progress,
    ) -> Result<Option<Opened>, Error> {
        let step = state.counters.step;
        let observer: Observer = Arc::from(observer.saving(step));
        // Other copies hold the same.
        let spoken_for = engine.trained_ids().filter(|id| engine.speaks_for(*id));
        let spoken_for: HashSet<_> = spoken_for.map(|id| engine.records()[id.0].name.clone()).collect();
        // What only this rank has it saves, of whichever copy it is.
        let own = if self.ranks.is_of_first_copy() { spoken_for.clone() } else { HashSet::new() };
        let (rank, directory) = (self.ranks.rank(), &self.directory);
        let part =
            Part { step, directory: directory.clone(), rank, own, spoken_for, observer: observer.clone() };
        if !self.ranks.is_first() {
            let is_refused = self.ranks.any_in_time(false, Patience::Unlimited)?;
            return Ok((!is_refused).then(|| Opened { part, commit: None }));
        }
        let metrics = metrics.map(MetricsWriter::file).transpose().unwrap_or_else(|error| {
            progress.message(&error.to_string());
            None
        });
        let staging = Staging::begin_observed(&directory.path, step, &*observer);
        self.ranks.any_in_time(staging.is_err(), Patience::Unlimited)?;
        let commit = Box::new(Commit {
            staging: staging?,
            directory: directory.clone(),
            record: self.record.clone(),
            plan: self.plan.clone(),
            state: state.clone(),
            parameters: engine.records().to_vec(),
            metrics,
            observer,
        });
        Ok(Some(Opened { part, commit: Some(commit) }))
    }

    /// Has the own part of a save written.
    fn start(
        &mut self,
        step: u64,
        Opened { part, commit }: Opened,
        engine: &mut Engine,
        progress: &mut Progress,
    ) -> Result<(), Error> {
        let is_alone = self.ranks.size() == 1;
        let begin = Instant::now();
        let stage = match (self.copy_of(engine, progress), commit) {
            (Some((thread, snapshot)), Some(commit)) if is_alone => {
                let save = move |snapshot: &mut Snapshot| {
                    let report = part.write(&snapshot.tensors())?;
                    commit.run(report.into_iter().collect())
                };
                Stage::Commit(thread.run(move || Done::on(snapshot, save)))
            }
            (Some((thread, snapshot)), commit) => {
                let write = move |snapshot: &mut Snapshot| part.write(&snapshot.tensors());
                let own = Own::Pending(thread.run(move || Done::on(snapshot, write)));
                Stage::Parts { own, commit }
            }
            (None, commit) => {
                let own = Own::Written(self.write_in_foreground(&part, engine));
                Stage::Parts { own, commit }
            }
        };
        let has_parts = matches!(stage, Stage::Parts { .. });
        self.under_way = Some(Save { step, begin, stage });
        // Nobody begins a step, which waits for the others for a limited time, while another writes in the foreground.
        if has_parts { self.poll_for(Patience::Unlimited, progress) } else { Ok(()) }
    }

    fn write_in_foreground(&self, part: &Part, engine: &mut Engine) -> Written {
        let tensors = engine.state_tensors();
        // The other copies hold the same, but for what each rank has for itself.
        let has_part =
            self.ranks.is_of_first_copy() || tensors.iter().any(|tensor| tensor.kind.is_of_one_rank());
        if has_part { part.write(&tensors) } else { Ok(None) }
    }

    /// All ranks have written their parts, or failed to: the first makes a checkpoint of them, or says what went wrong.
    fn join(
        &mut self,
        step: u64,
        begin: Instant,
        written: Written,
        commit: Option<Box<Commit>>,
        progress: &mut Progress,
    ) -> Result<(), Error> {
        let reports = match gather(&self.ranks, step, written) {
            Ok(reports) => reports,
            Err(error) => return self.tell(step, Err(error), progress),
        };
        let Some((commit, reports)) = commit.zip(reports) else { return Ok(()) };
        match &self.thread {
            Some(thread) => {
                let stage = Stage::Commit(thread.run(move || Done::of_commit(commit, reports)));
                self.under_way = Some(Save { step, begin, stage });
                Ok(())
            }
            None => self.tell(step, commit.run(reports), progress),
        }
    }

    /// What came of work in the background; its snapshot is there for the next.
    fn take_back<T>(&mut self, done: Done<T>) -> T {
        self.ended.push(done.ran);
        if let Some(snapshot) = done.snapshot {
            self.snapshot = Memory::There(Box::new(snapshot));
        }
        done.result
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
            Err(Error::Checkpoint(error)) => {
                progress.message(&format!("not saved: {error}"));
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// A snapshot of the engine and the thread that may save it; none where saves are made in the foreground,
    /// because the run says so or there is no memory for a snapshot.
    fn copy_of(&mut self, engine: &Engine, progress: &mut Progress) -> Option<(&SaveThread, Snapshot)> {
        self.thread.as_ref()?;
        let snapshot = match std::mem::replace(&mut self.snapshot, Memory::None) {
            Memory::None => new_snapshot(engine),
            Memory::Coming(pending) => Ok(pending.wait()),
            Memory::There(snapshot) => Ok(*snapshot),
        };
        match snapshot {
            Ok(mut snapshot) => {
                snapshot.take(engine);
                self.thread.as_ref().map(|thread| (thread, snapshot))
            }
            Err(reason) => {
                progress.message(&format!("saving in the foreground: {reason}"));
                self.thread = None;
                None
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
