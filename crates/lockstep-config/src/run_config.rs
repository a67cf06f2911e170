//! The values of a run's configuration that follow from its keys, each computed here and nowhere else, and the source of each value.

use std::env;
use std::path::{Path, PathBuf};

use lockstep_plan::{Degrees, ParameterRecord, Residence, ZeroStage};

use crate::keys::{MODEL_SOURCES, values_of_plan};
use crate::schedule::{Decay, LearningRate};
use crate::{
    DEFAULT_PRESET, Error, LearningRateScaling, OptimizerConfig, OptimizerKind, Origin, Problem, RunConfig,
    ScheduleKind, pattern,
};

/// The model that a run trains, by the key that names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelSource<'c> {
    /// A named architecture.
    Preset(&'c str),
    /// A directory with a `config.json`.
    Path(&'c Path),
    /// A model family, with its sizes in [`ModelConfig::overrides`](crate::ModelConfig::overrides).
    ModelType(&'c str),
}

impl RunConfig {
    /// Returns true if fine-tuning keeps some weights as they are.
    pub(crate) fn keeps_weights(&self) -> bool {
        let fine_tune = &self.fine_tune;
        fine_tune.adapter.is_some() || fine_tune.lora_rank.is_some() || !fine_tune.freeze.is_empty()
    }

    /// Returns the source of the value of `key` (`section.key`).
    pub fn origin(&self, key: &str) -> Origin {
        self.origins.get(key).cloned().unwrap_or(Origin::Default)
    }

    /// Returns a problem that only a later part of the program can detect (a preset that does not exist, an override that the model
    /// family does not know), located where the user wrote it.
    pub fn problem(&self, key: &str, what: impl Into<String>, allowed: impl Into<String>) -> Problem {
        Problem::new(self.origin(key), key, what, allowed)
    }

    /// Returns the model to train: the one that is named, else [`DEFAULT_PRESET`].
    pub fn model_source(&self) -> ModelSource<'_> {
        let model = &self.model;
        match (&model.preset, &model.path, &model.model_type) {
            (Some(preset), _, _) => ModelSource::Preset(preset),
            (None, Some(path), _) => ModelSource::Path(path),
            (None, None, Some(model_type)) => ModelSource::ModelType(model_type),
            (None, None, None) => ModelSource::Preset(DEFAULT_PRESET),
        }
    }

    /// Returns the number of ranks along each axis of the mesh.
    pub fn degrees(&self) -> Degrees {
        self.plan.mesh
    }

    /// Returns true if checkpoints are written in the background from copies of the state in memory. State that is offloaded to
    /// disk for lack of memory is never copied.
    pub fn saves_from_copies(&self) -> bool {
        self.saves_from_copies_of(&self.plan)
    }

    /// As [`RunConfig::saves_from_copies`], under another plan.
    pub fn saves_from_copies_of(&self, plan: &lockstep_plan::Plan) -> bool {
        self.checkpoint.in_background && plan.residence.optimizer != Residence::Disk
    }

    /// Returns true if no optimizer state is offloaded to disk.
    pub fn has_state_in_memory(&self) -> bool {
        self.plan.residence.optimizer != Residence::Disk
    }

    /// Returns the directories of the run's checkpoints; the first is `checkpoint.dir`.
    pub fn checkpoint_dirs(&self) -> Vec<&Path> {
        let fallback = self.checkpoint.fallback.as_deref();
        std::iter::once(self.checkpoint.dir.as_path()).chain(fallback).collect()
    }

    /// Returns true if any key of `[parallel]` fixes how a step is parallelized; otherwise the planner may choose.
    pub fn says_how_to_split(&self) -> bool {
        let is_of_split = |key: &str| {
            let is_of_plan = || values_of_plan(&self.plan).iter().any(|(known, _)| *known == key);
            key.starts_with("parallel.") && key != "parallel.bucket_mb" && is_of_plan()
        };
        self.origins.iter().any(|(key, origin)| is_of_split(key) && *origin != Origin::Default)
    }

    /// Returns the effective ZeRO stage: nothing is sharded if a replica has a single rank to shard over.
    pub fn zero_stage(&self) -> ZeroStage {
        self.plan.effective_zero_stage()
    }

    /// Returns the number of ranks over which `zero_stage` shards the model state.
    pub(crate) fn owners(&self) -> usize {
        self.plan.mesh.shard * self.plan.mesh.context
    }

    /// Returns true if extra ranks become shards rather than replicas: `zero_stage` is set and neither data-parallel degree is.
    pub fn leaves_shards_open(&self) -> bool {
        let is_open = |key| self.origin(key) == Origin::Default;
        self.plan.zero_stage > 0
            && is_open("parallel.data_parallel_shard")
            && is_open("parallel.data_parallel_replicate")
    }

    /// Returns true if `[data]` names files or their format. A program that brings its own samples leaves both out.
    pub fn names_data(&self) -> bool {
        ["data.train", "data.format"].iter().any(|key| self.origin(key) != Origin::Default)
    }

    /// Returns sentences on defaults that decide what is trained: the default model, the text found on this machine.
    pub fn taken_by_default(&self) -> Vec<String> {
        let is_open = |keys: &[&str]| keys.iter().all(|key| self.origin(key) == Origin::Default);
        let model = is_open(&MODEL_SOURCES).then(|| {
            format!(
                "no model is named, so {DEFAULT_PRESET} is trained; model.preset or model.path names another"
            )
        });
        let data = is_open(&["data.train"]).then(|| {
            "no data are named, so text found on this machine is trained on; data.train names files"
                .to_owned()
        });
        model.into_iter().chain(data).collect()
    }

    /// Returns the reason why `zero_stage` has no effect in this run, and what to set; `None` if it has an effect or is 0.
    pub fn idle_zero_stage(&self) -> Option<String> {
        let stage = self.plan.zero_stage;
        (stage > 0 && self.owners() == 1).then(|| {
            format!(
                "parallel.zero_stage = {stage} shards nothing on one rank; start several with --nproc-per-node N, or set \
                 parallel.data_parallel_shard = N"
            )
        })
    }

    /// Returns the number of ranks of one data-parallel replica.
    pub fn ranks_of_a_replica(&self) -> usize {
        let Degrees { shard, context, tensor, pipeline, .. } = self.degrees();
        shard * context * tensor * pipeline
    }

    /// Returns the number of parts in which a global batch is read: the data-parallel degree (replicate × shard).
    pub fn batch_parts(&self) -> usize {
        self.plan.mesh.replicate * self.plan.mesh.shard
    }

    /// Returns the world size.
    pub fn ranks(&self) -> usize {
        self.plan.mesh.replicate * self.ranks_of_a_replica()
    }

    /// Returns the setting that makes this a run of `ranks` ranks: extra ranks become shards if `zero_stage` is set and leaves them
    /// open, else replicas.
    ///
    /// # Errors
    /// [`Error::Configuration`] if `ranks` is no positive multiple of the ranks of a replica.
    pub fn setting_for_ranks(&self, ranks: usize) -> Result<String, Error> {
        let replicas = self.replicas_of(ranks)?;
        if self.leaves_shards_open() && replicas > 1 {
            return Ok(format!("parallel.data_parallel_shard={replicas}"));
        }
        Ok(format!("parallel.data_parallel_replicate={replicas}"))
    }

    /// Returns the number of data-parallel replicas that `ranks` ranks make.
    ///
    /// # Errors
    /// [`Error::Configuration`] if `ranks` is no positive multiple of the ranks of a replica.
    pub fn replicas_of(&self, ranks: usize) -> Result<usize, Error> {
        let of_each = self.ranks_of_a_replica();
        if ranks.is_multiple_of(of_each) && ranks > 0 {
            return Ok(ranks / of_each);
        }
        let (below, above) = (ranks / of_each * of_each, (ranks / of_each + 1) * of_each);
        let nearest = if below > 0 { format!("{below} or {above}") } else { above.to_string() };
        let what = format!("{of_each} ranks share each part of the batch, and {ranks} were asked for");
        let keys = ["parallel.tensor_parallel", "parallel.pipeline_parallel", "parallel.context_parallel"];
        let problem = self.problem_at(&keys, what, format!("{nearest} ranks"));
        Err(Error::Configuration(problem.into()))
    }

    /// Returns the sequences of one forward and backward.
    pub fn micro_batch(&self) -> usize {
        self.plan.micro_batch_of(self.train.global_batch)
    }

    /// Returns the number of consecutive skipped steps after which the run restores a copy of its state; 0 for never.
    pub fn rollback_after(&self) -> u64 {
        self.train.rollback_after.unwrap_or(if self.train.spike_factor > 0.0 { 3 } else { 0 })
    }

    /// Returns the micro-batches of a rank in one optimizer step.
    pub fn accumulation_steps(&self) -> usize {
        self.train.global_batch / self.batch_parts() / self.micro_batch()
    }

    /// Returns the tokens of one optimizer step.
    pub fn tokens_per_step(&self) -> u64 {
        self.train.global_batch as u64 * self.train.seq_len as u64
    }

    /// Returns the directory of tokenized text: `data.cache_dir`, else `lockstep` in the user's cache directory.
    pub fn cache_dir(&self) -> PathBuf {
        self.data.cache_dir.clone().unwrap_or_else(user_cache_dir)
    }

    /// Returns the factor of `schedule.scale_lr` on the learning rate: global batch over `schedule.scale_lr_batch`, or its square root.
    pub fn lr_scale(&self) -> f64 {
        let ratio = self.train.global_batch as f64 / self.schedule.scale_lr_batch.max(1) as f64;
        match self.schedule.scale_lr {
            LearningRateScaling::None => 1.0,
            LearningRateScaling::Linear => ratio,
            LearningRateScaling::Sqrt => libm::sqrt(ratio),
        }
    }

    /// Returns the learning-rate schedule.
    pub fn learning_rate(&self) -> LearningRate {
        let (steps, schedule) = (self.train.steps, &self.schedule);
        let warmup_steps = schedule.warmup_steps.unwrap_or_else(|| usual_warmup(steps));
        let after_warmup = schedule.decay_steps.unwrap_or(steps - warmup_steps);
        let (decay, decay_steps) = match schedule.kind {
            ScheduleKind::Constant => (Decay::None, 0),
            ScheduleKind::Linear => (Decay::Linear, after_warmup),
            ScheduleKind::Cosine => (Decay::Cosine, after_warmup),
            ScheduleKind::WarmupStableDecay => (Decay::Sqrt, schedule.decay_steps.unwrap_or(steps / 5)),
        };
        LearningRate {
            peak: self.optimizer.lr * self.lr_scale(),
            warmup_steps,
            total_steps: steps,
            decay,
            decay_steps,
            min_ratio: if decay == Decay::None { 1.0 } else { schedule.min_lr_ratio },
        }
    }
}

/// Steps from which on a run's warm-up has at least ten steps, so that Adam's averages settle before the peak learning rate.
const SETTLED_STEPS: u64 = 20;

/// Returns the default number of warm-up steps: a tenth of all, at most 100, and at least 10 in runs of [`SETTLED_STEPS`] or more.
fn usual_warmup(steps: u64) -> u64 {
    if steps < SETTLED_STEPS { steps / 10 } else { (steps / 10).clamp(10, 100) }
}

impl OptimizerConfig {
    /// Returns `betas`, or the default of the optimizer.
    pub fn betas(&self) -> [f64; 2] {
        self.betas.unwrap_or(if self.kind == OptimizerKind::Lion { [0.9, 0.99] } else { [0.9, 0.95] })
    }

    /// Returns `momentum`, or the default of the optimizer.
    pub fn momentum(&self) -> f64 {
        self.momentum.unwrap_or(if self.kind == OptimizerKind::Muon { 0.95 } else { 0.9 })
    }

    /// Returns true if weight decay applies to a parameter: by the patterns of `decay` if there are any, else by its record.
    pub fn decays(&self, parameter: &ParameterRecord) -> bool {
        match &self.decay {
            None => parameter.decay,
            Some(patterns) => patterns.iter().any(|pattern| pattern::describes(pattern, &parameter.name)),
        }
    }

    /// Returns the factor on a parameter's learning rate; of several matching patterns, that of the longest.
    pub fn learning_rate_multiplier(&self, parameter: &ParameterRecord) -> f32 {
        let describing = |(pattern, _): &(&String, &f64)| pattern::describes(pattern, &parameter.name);
        let longest = self.lr_multipliers.iter().filter(describing).max_by_key(|(pattern, _)| pattern.len());
        longest.map_or(1.0, |(_, &factor)| factor as f32)
    }
}

/// Returns `lockstep` in the user's cache directory.
pub fn user_cache_dir() -> PathBuf {
    let variable = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("XDG_CACHE_HOME")
        .or_else(|| Some(variable("HOME")?.join(".cache")))
        .unwrap_or_else(env::temp_dir)
        .join("lockstep")
}
