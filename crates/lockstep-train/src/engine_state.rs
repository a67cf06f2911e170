//! Saving and loading of an engine that a training loop of one's own drives, in the checkpoints of `lockstep train`.
//!
//! A save is in the foreground and collective: each rank writes its part, the first one commits. A load reads a checkpoint
//! under any plan, or the weights of a Hugging Face directory.

use std::path::{Path, PathBuf};

use lockstep_checkpoint::{
    Checkpoint, CheckpointError, DType, MANIFEST_FILE, ModelDirectory, SaveRequest, Staging, step_directory,
};
use lockstep_engine::{Engine, Ranks};
use lockstep_model::ModelConfig;
use lockstep_plan::Plan;
use serde_json::json;

use crate::Error;
use crate::kernels::{RunKernels, changed_kernels};
use crate::new_head::NewHead;
use crate::saving::{RankSave, gather};
use crate::setup::load_weights;
use crate::state::read_tensors;

/// Counters of a training loop, which its checkpoints keep.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LoopState {
    /// Optimizer steps so far; they name the checkpoint.
    pub step: u64,
    /// Samples that all ranks have consumed: the state of the loader.
    pub samples_consumed: u64,
    /// Seed of the initial weights.
    pub seed: u64,
}

/// Saves parameters and optimizer state under `dir` and returns the path of the new checkpoint, `dir/step-NNNNNNNN`. A
/// collective call.
///
/// # Errors
/// If a weight is not finite, a rank cannot write its part, the parts do not cover every tensor exactly once, or a rank is
/// lost. Earlier checkpoints remain.
pub fn save_engine(
    engine: &mut Engine,
    ranks: &Ranks,
    dir: &Path,
    state: LoopState,
    (model, plan): (&ModelConfig, &Plan),
) -> Result<PathBuf, Error> {
    engine.wait_for_weights()?;
    let kernels = RunKernels::of(ranks, engine)?.word();
    let step = state.step;
    let begun = ranks.is_first().then(|| Staging::begin(dir, step)).transpose();
    let staging = on_all_ranks(ranks, begun.map_err(Error::from))?;
    let owned = engine.trained_ids().filter(|id| engine.is_primary_owner(*id));
    let part = RankSave {
        step,
        rank: ranks.rank(),
        owned: owned.map(|id| engine.records()[id.0].name.clone()).collect(),
        is_in_first_replica: ranks.is_in_first_replica(),
    };
    let written = part.write(dir, &engine.state_tensors(), &());
    ranks.meet()?;
    let saved = gather(ranks, step, written).and_then(|reports| {
        let (Some(staging), Some(reports)) = (staging, reports) else { return Ok(()) };
        let request = SaveRequest {
            step,
            samples_consumed: state.samples_consumed,
            seed: state.seed,
            kernels,
            config: json!({ "model": model.to_json(DType::F32) }),
            plan: json!(plan),
            state: json!({ "updates": step }),
            parameters: engine.records(),
        };
        staging.commit(&request, reports)?;
        Ok(())
    });
    on_all_ranks(ranks, saved)?;
    Ok(step_directory(dir, step))
}

/// Loads a checkpoint, or the weights of a Hugging Face directory, and returns the counters of the checkpoint; those of a
/// Hugging Face directory are zero. A classifier that starts from a model without a head gets initial values for its own, by
/// `seed`. Every rank reads its own shards.
///
/// # Errors
/// If the files are damaged, or lack a tensor of the model, or have one of another shape.
pub fn load_engine(
    engine: &mut Engine,
    path: &Path,
    (model, seed): (&ModelConfig, u64),
) -> Result<LoopState, Error> {
    engine.wait_for_weights()?;
    if !path.join(MANIFEST_FILE).exists() {
        let directory = ModelDirectory::open(path)?;
        let head = NewHead::of(model, directory.config());
        load_weights(engine, (&head, seed), |sink| directory.for_each_parameter(sink))?;
        return Ok(LoopState::default());
    }
    let checkpoint = Checkpoint::open(path)?;
    checkpoint.verify()?;
    read_tensors(engine, &checkpoint)?;
    if let Some(text) = changed_kernels(&checkpoint, engine.queue().level()) {
        tracing::warn!(path = %path.display(), "{text}");
    }
    let manifest = checkpoint.manifest();
    let (samples_consumed, seed) = (manifest.samples_consumed, manifest.seed);
    Ok(LoopState { step: manifest.step, samples_consumed, seed })
}

/// Returns this rank's result if no rank has failed. A collective call.
///
/// # Errors
/// If a rank has failed: on that rank its error, on the others that they have no checkpoint.
fn on_all_ranks<T>(ranks: &Ranks, own: Result<T, Error>) -> Result<T, Error> {
    let has_failed = ranks.any(own.is_err())?;
    let own = own?;
    if has_failed {
        let reason = "another rank could not save its part; its message says why".to_owned();
        return Err(CheckpointError::OfRank { rank: 0, reason, is_full: false }.into());
    }
    Ok(own)
}
