//! The state of a run in a checkpoint, and how it is restored: tensors, counters and, of the data loader, only the number of
//! samples consumed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use lockstep_checkpoint::{
    BaseModel, Checkpoint, CheckpointError, DType, Latest, SkippedCheckpoint, TensorKind, latest_good_of,
    set_aside,
};
use lockstep_config::{Difference, ResolvedModel, Resume, RunConfig};
use lockstep_engine::{Engine, StateKind};
use lockstep_observe::metrics::FILE_NAME;
use lockstep_plan::ParameterId;
use serde_json::{Value, json};

use crate::setup::load_first_weights;
use crate::{Error, TrainingData};

/// Counters of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counters {
    /// Completed steps, skipped ones included.
    pub(crate) step: u64,
    /// Optimizer steps taken; skipped steps do not count.
    pub(crate) updates: u64,
    /// Samples consumed by all ranks.
    pub(crate) samples: u64,
    /// Tokens seen by all ranks.
    pub(crate) tokens: u64,
}

/// State of a run in a checkpoint, other than tensors.
#[derive(Debug, Clone)]
pub(crate) struct SavedState {
    pub(crate) counters: Counters,
    /// State of the guard.
    pub(crate) guard: Value,
    /// State of the loss scale; null if it is not adjusted.
    pub(crate) loss_scale: Value,
    /// True if the run is failing: its last step was skipped, or its loss has risen far above the median.
    pub(crate) is_doubtful: bool,
    /// Loss of an evaluation after this step, if there was one.
    pub(crate) eval_loss: Option<f64>,
}

impl SavedState {
    /// Returns the values for which a checkpoint's manifest has no field of its own.
    pub(crate) fn to_json(&self) -> Value {
        let Counters { updates, tokens, .. } = self.counters;
        json!({
            "updates": updates,
            "tokens_seen": tokens,
            "guard": self.guard,
            "loss_scale": self.loss_scale,
            "is_doubtful": self.is_doubtful,
            "eval_loss": self.eval_loss,
        })
    }
}

/// Returns the name in checkpoints for a kind of tensor.
pub(crate) fn tensor_kind(kind: StateKind) -> TensorKind {
    match kind {
        StateKind::Parameter => TensorKind::Parameter,
        StateKind::ExpAvg => TensorKind::ExpAvg,
        StateKind::ExpAvgSq => TensorKind::ExpAvgSq,
        StateKind::MomentumBuffer => TensorKind::Momentum,
        StateKind::GradientResidual(rank) => TensorKind::Other(format!("{}.{rank}", kind.name())),
    }
}

/// Returns the checkpoint to resume from, and newer ones that are damaged.
pub(crate) fn find_checkpoint(
    config: &RunConfig,
    resume: &Resume,
) -> Result<(Option<Checkpoint>, Vec<SkippedCheckpoint>), Error> {
    match resume {
        Resume::Never => Ok((None, Vec::new())),
        Resume::From(path) => {
            let checkpoint = Checkpoint::open(path)?;
            checkpoint.verify()?;
            Ok((Some(checkpoint), Vec::new()))
        }
        Resume::Auto => {
            let dirs = config.checkpoint_dirs();
            let dirs: Vec<&Path> = dirs.into_iter().filter(|dir| dir.is_dir()).collect();
            let Latest { checkpoint, skipped } = latest_good_of(&dirs)?;
            if checkpoint.is_none() && !skipped.is_empty() {
                let reasons: Vec<String> =
                    skipped.iter().map(|skipped| format!("  {}", damage_of(skipped))).collect();
                let dir = config.checkpoint.dir.clone();
                return Err(Error::NoGoodCheckpoint { dir, reasons: reasons.join("\n") });
            }
            Ok((checkpoint, skipped))
        }
    }
}

/// Describes a damaged checkpoint.
pub(crate) fn damage_of(skipped: &SkippedCheckpoint) -> String {
    format!("{}: {}", skipped.path.display(), skipped.reason)
}

/// Describes the settings in which this run differs from that of the checkpoint. Differences are accepted if the user has named
/// the checkpoint, unless its tensors belong to another model or optimizer. A schedule that only follows a new number of steps is
/// always accepted.
///
/// # Errors
/// If differences are not accepted, or the checkpoint holds weights only.
pub(crate) fn changed_settings(
    config: &RunConfig,
    model: &ResolvedModel,
    resume: &Resume,
    checkpoint: &Checkpoint,
) -> Result<Vec<String>, Error> {
    let path = checkpoint.path().to_owned();
    let Some(run) = checkpoint.manifest().config.get("run") else {
        return Err(Error::NoRunToResume { path });
    };
    let mut differences = config.differences(run);
    let mut is_other_model = false;
    if let Some(stored) = checkpoint.manifest().config.get("model") {
        let current = model.config.to_json(DType::F32);
        let of_model = Difference::between(&model_settings(stored), &model_settings(&current));
        // A key that the user has set is already in the list.
        let is_new = |found: &Difference| differences.iter().all(|listed| listed.key != found.key);
        let of_model: Vec<_> = of_model.into_iter().filter(is_new).collect();
        is_other_model = !of_model.is_empty();
        differences.extend(of_model);
    }
    let fits = |difference: &Difference| {
        let of_model = difference.key.starts_with("model.") && !difference.key.contains("drop");
        let of_tensors = ["optimizer.kind", "optimizer.state_precision", "train.master_weights"];
        let of_tuning = difference.key.starts_with("fine_tune.");
        !of_model && !of_tuning && !of_tensors.contains(&difference.key.as_str())
    };
    if differences.is_empty() {
        return Ok(Vec::new());
    }
    if !is_other_model
        && let Some(before) = config.with_steps_of(run).filter(|before| before.differences(run).is_empty())
    {
        return Ok(vec![other_schedule(config, &before, checkpoint.manifest().step)]);
    }
    let can_go_on = differences.iter().all(fits);
    if can_go_on && matches!(resume, Resume::From(_)) {
        Ok(differences.iter().map(|difference| format!("changed: {difference}")).collect())
    } else {
        Err(Error::OtherRun { path, differences, can_go_on })
    }
}

/// Describes the effect of a new number of steps on the next learning rate.
fn other_schedule(config: &RunConfig, before: &RunConfig, step: u64) -> String {
    let (steps, earlier) = (config.train.steps, before.train.steps);
    let (rate, was) = (config.learning_rate().at(step), before.learning_rate().at(step));
    format!(
        "the schedule now follows {steps} steps, and not {earlier}: the learning rate of step {} is {rate:.2e}, and was to be {was:.2e} \
         (schedule.warmup_steps and schedule.decay_steps keep a schedule as it is)",
        step + 1,
    )
}

/// Returns the keys of a model's `config.json` as settings: the file at `model.path` may have been edited.
fn model_settings(config: &Value) -> BTreeMap<String, Value> {
    let keys = config.as_object().into_iter().flatten();
    keys.map(|(key, value)| (format!("model.{key}"), value.clone())).collect()
}

/// Moves checkpoints that are newer than the run's starting point to separate directories, and returns these. They would count as
/// newer than the run's own checkpoints, which would then be pruned in their place.
pub(crate) fn set_aside_later(
    config: &RunConfig,
    resume: &Resume,
    counters: &Counters,
) -> Result<Vec<PathBuf>, Error> {
    let from = match resume {
        Resume::Auto => return Ok(Vec::new()),
        Resume::Never => 0,
        Resume::From(_) => counters.step + 1,
    };
    let mut moved = Vec::new();
    for dir in config.checkpoint_dirs() {
        moved.extend(set_aside(dir, from)?);
    }
    for aside in &moved {
        // A run that resumes from an earlier step cuts off the later rows, so they are copied. A missing metrics file is not an
        // error.
        let _ = std::fs::copy(config.metrics.dir.join(FILE_NAME), aside.join(FILE_NAME));
    }
    Ok(moved)
}

/// Loads a checkpoint into an engine. Tensors that it lacks come from the pretrained weights from which the run started.
pub(crate) fn restore(
    config: &RunConfig,
    model: &ResolvedModel,
    engine: &mut Engine,
    checkpoint: &Checkpoint,
) -> Result<Counters, Error> {
    let manifest = checkpoint.manifest();
    if let Some(BaseModel { digest, path: base }) = BaseModel::of(checkpoint)? {
        load_first_weights(config, model, engine)?;
        if model.base.get().is_none_or(|found| found.digest != digest) {
            let path = checkpoint.path().to_owned();
            return Err(CheckpointError::BaseModelChanged { path, base }.into());
        }
    }
    read_tensors(engine, checkpoint)?;
    let counter = |name: &str| manifest.state.get(name).and_then(serde_json::Value::as_u64).unwrap_or(0);
    Ok(Counters {
        step: manifest.step,
        updates: counter("updates"),
        samples: manifest.samples_consumed,
        tokens: counter("tokens_seen"),
    })
}

/// Reads this rank's shards of the trained parameters and their optimizer state.
///
/// # Errors
/// If the checkpoint lacks a tensor, has one of another shape, or cannot be read.
pub(crate) fn read_tensors(engine: &mut Engine, checkpoint: &Checkpoint) -> Result<(), Error> {
    let mut values = Vec::new();
    let ids: Vec<_> = engine.trained_ids().collect();
    for id in ids {
        for kind in engine.state_kinds(id).chain(own_residual(engine, id, checkpoint)) {
            let record = &engine.records()[id.0];
            let stored = tensor_kind(kind);
            values.resize(checkpoint.tensor(&record.name, &stored)?.elements(), 0.0);
            // Only this rank's shard is read. A tensor of another shape is left for `write_state` to refuse.
            let fits = values.len() == record.elements();
            for (first, len) in record.share.element_ranges(&record.shape).filter(|_| fits) {
                checkpoint.read(&record.name, &stored, first, &mut values[first..first + len])?;
            }
            engine.write_state(id, kind, &values)?;
        }
    }
    Ok(())
}

/// Returns the error-feedback residual of this rank that the checkpoint holds for a parameter. `None` if the checkpoint is of a
/// different number of ranks, whose residuals belong to other shards of the gradients; this rank then begins without one.
fn own_residual(engine: &Engine, id: ParameterId, checkpoint: &Checkpoint) -> Option<StateKind> {
    let [own, last, next] = engine.residual_kinds(id)?;
    let name = &engine.records()[id.0].name;
    let is_there = |kind| checkpoint.manifest().tensor(name, &tensor_kind(kind)).is_some();
    (is_there(last) && !is_there(next)).then_some(own)
}

/// Returns true if the training data are not those that the checkpoint's run read.
pub(crate) fn data_have_changed(checkpoint: &Checkpoint, data: &TrainingData) -> bool {
    let stored = checkpoint.manifest().config.get("training_text");
    stored.is_some_and(|stored| *stored != data.digest)
}
