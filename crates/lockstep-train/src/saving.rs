//! When and how a run is saved: beside the training if it may, and where nothing better is possible in front of it.
//!
//! A save in the background works on a snapshot, so that its bytes are those of a save in the foreground. One is
//! under way at a time: the next one waits for it, and what the training waited is its stall. What went wrong in
//! the background is told at the next step; it costs the checkpoint and not the run.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Instant;

use lockstep_checkpoint::{DType, PendingSave, Region, SaveRequest, SaveThread, TensorSlice, prune, save};
use lockstep_engine::{Engine, Snapshot, StateTensor};
use lockstep_model::Adapter;
use lockstep_plan::ParameterRecord;
use serde_json::{Value, json};

use crate::machine::available_memory_bytes;
use crate::metrics::{MetricsFile, MetricsWriter};
use crate::progress::Progress;
use crate::state::{Counters, SavedState, tensor_kind};
use crate::{Corpus, Error, ResolvedModel, RunConfig, human};

/// Memory that a snapshot leaves to everybody else.
const RESERVE_BYTES: u64 = 256 << 20;

/// Saves a run.
pub(crate) struct Saver {
    directory: Directory,
    /// What a checkpoint says of the run's configuration.
    record: Value,
    /// None if saves are made in the foreground.
    thread: Option<SaveThread>,
    snapshot: Memory,
    /// The step that is being saved, and since when.
    pending: Option<(u64, Instant, PendingSave<Outcome>)>,
    /// The last save in the background that has ended.
    ended: Option<Ran>,
    /// Step and path of the newest checkpoint.
    saved: Option<(u64, PathBuf)>,
    stall_ms: f64,
}

/// Memory for the copy that is saved.
enum Memory {
    /// There is none yet, or the save under way has it.
    None,
    /// The thread has the system give it.
    Coming(PendingSave<Snapshot>),
    There(Snapshot),
}

/// Where checkpoints go, and how many of them stay.
#[derive(Debug, Clone)]
struct Directory {
    path: PathBuf,
    keep: Option<NonZeroUsize>,
}

/// What a save in the background gives back.
struct Outcome {
    ran: Ran,
    snapshot: Snapshot,
    saved: Result<Saved, Error>,
}

/// When a save in the background ran.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ran {
    pub(crate) begin: Instant,
    pub(crate) end: Instant,
}

/// A new checkpoint.
struct Saved {
    path: PathBuf,
    /// What went wrong and did not keep it from being made.
    warnings: Vec<String>,
}

impl Saver {
    /// A saver for a run that begins with the checkpoint `saved` (step and path), if there is one.
    ///
    /// # Errors
    /// No thread for saves in the background.
    pub(crate) fn new(
        config: &RunConfig,
        model: &ResolvedModel,
        corpus: &Corpus,
        saved: Option<(u64, PathBuf)>,
    ) -> Result<Self, Error> {
        Ok(Self {
            directory: Directory {
                path: config.checkpoint.dir.clone(),
                keep: NonZeroUsize::new(config.checkpoint.keep),
            },
            record: json!({
                "run": config.to_json(),
                "model": model.config.to_json(DType::F32),
                "tokenizer": corpus.tokenizer_name,
                "training_text": corpus.digest,
                "base": model.base.get(),
                "adapter": model.tuning.adapter.as_ref().map(Adapter::config),
            }),
            thread: config.checkpoint.in_background.then(SaveThread::start).transpose()?,
            snapshot: Memory::None,
            pending: None,
            ended: None,
            saved,
            stall_ms: 0.0,
        })
    }

    /// Milliseconds that saves have kept the training waiting since this was last asked.
    pub(crate) fn take_stall_ms(&mut self) -> f64 {
        std::mem::take(&mut self.stall_ms)
    }

    /// Since when a save has been under way in the background.
    pub(crate) fn saving_since(&self) -> Option<Instant> {
        self.pending.as_ref().map(|(_, begin, _)| *begin)
    }

    /// The save in the background that has ended since this was last asked.
    pub(crate) fn take_ended(&mut self) -> Option<Ran> {
        self.ended.take()
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

    /// Tells of a save that has ended since the last call.
    ///
    /// # Errors
    /// Weights that are not finite. What kept the save from being made is a message.
    pub(crate) fn poll(&mut self, progress: &mut Progress) -> Result<(), Error> {
        let Some((step, begin, pending)) = self.pending.take() else { return Ok(()) };
        match pending.poll() {
            Ok(outcome) => self.end(step, outcome, progress),
            Err(pending) => {
                self.pending = Some((step, begin, pending));
                Ok(())
            }
        }
    }

    /// A save between two steps. Where it fails, the run says so and goes on, and the next one may succeed.
    ///
    /// # Errors
    /// Weights that are not finite.
    pub(crate) fn save_and_go_on(
        &mut self,
        engine: &mut Engine,
        state: &SavedState,
        metrics: Option<&mut MetricsWriter>,
        progress: &mut Progress,
    ) -> Result<(), Error> {
        let begin = Instant::now();
        self.wait(progress)?;
        let job = self.job(engine, state, metrics, progress);
        match self.copy_of(engine, progress) {
            Some((thread, mut snapshot)) => {
                let begin = Instant::now();
                let save = move || {
                    let saved = job.run(&snapshot.tensors());
                    Outcome { ran: Ran { begin, end: Instant::now() }, snapshot, saved }
                };
                self.pending = Some((state.counters.step, begin, thread.run(save)));
            }
            None => {
                let saved = job.run(&engine.state_tensors());
                self.tell(state.counters.step, saved, progress)?;
            }
        }
        self.stall_ms += begin.elapsed().as_secs_f64() * 1e3;
        Ok(())
    }

    /// The save that ends a run: waits for it, and returns the checkpoint.
    ///
    /// # Errors
    /// Whatever kept it from being made.
    pub(crate) fn save_last(
        &mut self,
        engine: &mut Engine,
        state: &SavedState,
        metrics: Option<&mut MetricsWriter>,
        progress: &mut Progress,
    ) -> Result<PathBuf, Error> {
        self.wait(progress)?;
        if let Some((step, path)) = &self.saved
            && *step == state.counters.step
        {
            return Ok(path.clone());
        }
        let saved = self.job(engine, state, metrics, progress).run(&engine.state_tensors())?;
        let path = saved.path.clone();
        self.tell(state.counters.step, Ok(saved), progress)?;
        Ok(path)
    }

    /// Waits for the save that is under way.
    fn wait(&mut self, progress: &mut Progress) -> Result<(), Error> {
        match self.pending.take() {
            Some((step, _, pending)) => self.end(step, pending.wait(), progress),
            None => Ok(()),
        }
    }

    fn end(&mut self, step: u64, outcome: Outcome, progress: &mut Progress) -> Result<(), Error> {
        self.snapshot = Memory::There(outcome.snapshot);
        self.ended = Some(outcome.ran);
        self.tell(step, outcome.saved, progress)
    }

    fn tell(&mut self, step: u64, saved: Result<Saved, Error>, progress: &mut Progress) -> Result<(), Error> {
        match saved {
            Ok(Saved { path, warnings }) => {
                for warning in warnings {
                    progress.message(&warning);
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
            Memory::There(snapshot) => Ok(snapshot),
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

    fn job(
        &self,
        engine: &Engine,
        state: &SavedState,
        metrics: Option<&mut MetricsWriter>,
        progress: &mut Progress,
    ) -> Job {
        let metrics = metrics.map(MetricsWriter::file).transpose().unwrap_or_else(|error| {
            progress.message(&error.to_string());
            None
        });
        Job {
            directory: self.directory.clone(),
            record: self.record.clone(),
            state: state.clone(),
            parameters: engine.records().to_vec(),
            metrics,
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

/// Everything that one save needs but the tensors.
struct Job {
    directory: Directory,
    record: Value,
    state: SavedState,
    parameters: Vec<ParameterRecord>,
    metrics: Option<MetricsFile>,
}

impl Job {
    /// Saves the tensors and removes checkpoints beyond `checkpoint.keep`.
    fn run(self, tensors: &[StateTensor<'_>]) -> Result<Saved, Error> {
        let Counters { step, samples, .. } = self.state.counters;
        // Finite gradients may still carry a weight out of the range of f32.
        if let Some(name) = StateTensor::first_not_finite(tensors) {
            return Err(Error::WeightsNotFinite { step, name: name.to_owned() });
        }
        let mut warnings = Vec::new();
        // Rows reach the disk before the checkpoint that counts them, or a resumed run would miss some.
        if let Some(error) = self.metrics.and_then(|metrics| metrics.sync().err()) {
            warnings.push(error.to_string());
        }
        let slices: Vec<TensorSlice<'_>> = tensors.iter().map(slice).collect();
        let request = SaveRequest {
            step,
            samples_consumed: samples,
            seed: self.record["run"]["train"]["seed"].as_u64().unwrap_or_default(),
            config: self.record,
            state: self.state.to_json(),
            parameters: &self.parameters,
            ..SaveRequest::default()
        };
        let dir: &Path = &self.directory.path;
        let path = save(dir, &request, &slices)?;
        if let Some(error) = self.directory.keep.and_then(|keep| prune(dir, keep, &[step]).err()) {
            warnings.push(format!("old checkpoints are not removed: {error}"));
        }
        Ok(Saved { path, warnings })
    }
}

fn slice<'a>(tensor: &StateTensor<'a>) -> TensorSlice<'a> {
    TensorSlice {
        name: &tensor.record.name,
        kind: tensor_kind(tensor.kind),
        dtype: tensor.dtype,
        global_shape: &tensor.record.shape,
        region: Region::Whole,
        bytes: tensor.bytes,
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
