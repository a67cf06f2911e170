//! The beginning of a run: its locks, its corpus, the engine with its starting state, the remaining samples, and what rank 0
//! says about them before the first step.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use lockstep_checkpoint::{
    Checkpoint, CheckpointError, RunLock, prepare_directory, run_on_disk, set_damaged_aside,
};
use lockstep_config::{ResolvedModel, Resume, RunConfig};
use lockstep_data::{Prefetcher, SampleCursor};
use lockstep_engine::{Engine, Ranks};
use lockstep_launch::interrupt::Interrupt;
use lockstep_observe::progress::Progress;
use lockstep_observe::retry_lock;

use crate::kernels::changed_kernels;
use crate::saving::Beginning;
use crate::setup::{build_engine, load_first_weights};
use crate::state::{
    Counters, changed_settings, damage_of, data_have_changed, find_checkpoint, restore, set_aside_later,
};
use crate::{Error, TrainingData};

/// Locks the checkpoint directories for this run.
pub(crate) fn lock(config: &RunConfig) -> Result<Vec<RunLock>, Error> {
    let lock = |dir: &Path| {
        let owned = dir.to_owned();
        let take = move || {
            prepare_directory(&owned)?;
            let is_busy = |error: &CheckpointError| matches!(error, CheckpointError::Busy { .. });
            retry_lock(|| RunLock::take(&owned), is_busy)
        };
        Ok(run_on_disk(&Beginning::of(config, dir), "opening", dir, take)?)
    };
    config.checkpoint_dirs().into_iter().map(lock).collect()
}

/// The engine with the starting state of a run.
pub(crate) struct StartState {
    pub(crate) engine: Engine,
    pub(crate) counters: Counters,
    /// Checkpoint from which the run resumes; `None` for a new run.
    pub(crate) checkpoint: Option<Checkpoint>,
    /// Messages about the starting state.
    pub(crate) messages: Vec<String>,
    /// Damaged checkpoints newer than the one from which the run resumes.
    pub(crate) damaged: Vec<PathBuf>,
}

impl StartState {
    /// Loads the checkpoint that `resume` selects, or the initial weights.
    pub(crate) fn of(
        config: &RunConfig,
        resume: &Resume,
        ranks: &Ranks,
        model: &ResolvedModel,
        data: &TrainingData,
    ) -> Result<Self, Error> {
        let (checkpoint, passed_over) = find_checkpoint(config, resume)?;
        let mut engine = build_engine(config, model, ranks, &ranks.arena())?;
        let words = passed_over
            .iter()
            .map(|skipped| format!("passed over a damaged checkpoint: {}", damage_of(skipped)));
        let mut messages: Vec<String> = words.collect();
        let damaged = passed_over.into_iter().map(|skipped| skipped.path).collect();
        let Some(found) = &checkpoint else {
            tracing::info!(dir = %config.checkpoint.dir.display(), ?resume, "no checkpoint to go on from");
            load_first_weights(config, model, &mut engine)?;
            let counters = Counters::default();
            return Ok(Self { engine, counters, checkpoint, messages, damaged });
        };
        tracing::info!(path = %found.path().display(), ?resume, "going on from a checkpoint");
        let changed = changed_settings(config, model, resume, found)?;
        let counters = restore(config, model, &mut engine, found)?;
        messages.push(format!("resuming from {} (step {})", found.path().display(), counters.step));
        messages.extend(changed);
        messages.extend(changed_kernels(found, engine.queue().level()));
        if data_have_changed(found, data) {
            messages.push("the training data are not those that the checkpoint was trained on".to_owned());
        }
        Ok(Self { engine, counters, checkpoint, messages, damaged })
    }
}

/// Opens the data: the first rank tokenizes, and the other ranks read its cache.
pub(crate) fn open_data(
    config: &RunConfig,
    model: &ResolvedModel,
    ranks: &Ranks,
) -> Result<TrainingData, Error> {
    let data = ranks.first_then_others(|| TrainingData::open(config, model))?;
    tracing::info!(samples = data.train.samples(), digest = %data.digest, "the data are open");
    Ok(data)
}

/// Starts to read the samples of this rank that no step has consumed.
pub(crate) fn prefetcher(
    config: &RunConfig,
    ranks: &Ranks,
    data: &TrainingData,
    counters: &Counters,
) -> Result<Prefetcher, Error> {
    let cursor = SampleCursor {
        samples_consumed: counters.samples,
        global_batch: config.train.global_batch as u64,
        micro_batch: config.micro_batch() as u64,
        replica: ranks.replica() as u64,
        replicas: ranks.replicas() as u64,
    };
    cursor.validate()?;
    let remaining = config.train.steps.saturating_sub(counters.step);
    Ok(Prefetcher::start(Arc::clone(&data.train), cursor.ranges(remaining), config.data.prefetch)?)
}

/// Abandons a step that is still running when half of the grace period after a stop request is over; the other half is for the
/// save. Runs on several ranks finish their step because each rank needs the others in its collectives. A run with state on disk
/// finishes its step as well.
pub(crate) fn abandon_long_steps(
    config: &RunConfig,
    engine: &mut Engine,
    ranks: &Ranks,
    interrupt: &Interrupt,
) {
    if ranks.size() > 1 || !config.has_state_in_memory() {
        return;
    }
    let (interrupt, patience) = (interrupt.clone(), Duration::from_secs_f64(config.checkpoint.grace_s / 2.0));
    engine.abandon_if(move || interrupt.requested_since().is_some_and(|since| since.elapsed() >= patience));
}

/// Moves damaged checkpoints aside, and those of an earlier run that are newer than the step at which this one begins.
pub(crate) fn set_checkpoints_aside(
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

/// Moves damaged checkpoints out of the directories in which checkpoints are looked for.
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
