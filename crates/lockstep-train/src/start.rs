//! The beginning of a run: its locks, the engine with its starting state, and the remaining samples.

use std::path::{Path, PathBuf};

use lockstep_checkpoint::{Checkpoint, CheckpointError, RunLock, prepare_directory, run_on_disk};
use lockstep_config::{ResolvedModel, Resume, RunConfig};
use lockstep_data::{Prefetcher, SampleCursor};
use lockstep_engine::{Engine, Ranks};
use lockstep_observe::retry_lock;

use crate::saving::Beginning;
use crate::setup::{build_engine, load_first_weights};
use crate::state::{Counters, changed_settings, find_checkpoint, restore, told};
use crate::{Corpus, Error};

/// Number of micro-batches read ahead.
const PREFETCH_DEPTH: usize = 4;

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
    pub(crate) told: Vec<String>,
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
    ) -> Result<Self, Error> {
        let (checkpoint, passed_over) = find_checkpoint(config, resume)?;
        let mut engine = build_engine(config, model, ranks, &ranks.arena())?;
        let words =
            passed_over.iter().map(|skipped| format!("passed over a damaged checkpoint: {}", told(skipped)));
        let mut messages: Vec<String> = words.collect();
        let damaged = passed_over.into_iter().map(|skipped| skipped.path).collect();
        let Some(found) = &checkpoint else {
            tracing::info!(dir = %config.checkpoint.dir.display(), ?resume, "no checkpoint to go on from");
            load_first_weights(config, model, &mut engine)?;
            let counters = Counters::default();
            return Ok(Self { engine, counters, checkpoint, told: messages, damaged });
        };
        tracing::info!(path = %found.path().display(), ?resume, "going on from a checkpoint");
        let changed = changed_settings(config, model, resume, found)?;
        let counters = restore(config, model, &mut engine, found)?;
        messages.push(format!("resuming from {} (step {})", found.path().display(), counters.step));
        messages.extend(changed);
        Ok(Self { engine, counters, checkpoint, told: messages, damaged })
    }
}

/// Starts to read the samples of this rank that no step has consumed.
pub(crate) fn prefetcher(
    config: &RunConfig,
    ranks: &Ranks,
    corpus: &Corpus,
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
    Ok(Prefetcher::start(corpus.train.clone(), cursor.ranges(remaining), PREFETCH_DEPTH)?)
}
