//! The configuration of a run: RUN.toml, the `--set` arguments, and everything that follows from them.
//!
//! [`keys`](KEYS) is the single table of keys. [`RunConfig::load`] reads a file and the arguments, and returns either a
//! configuration in which all values are consistent, or the list of all mistakes. Each value knows its source
//! ([`RunConfig::origin`]). Values that follow from several others are computed here and nowhere else.

use std::env;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use lockstep_plan::{Degrees, ParameterRecord, Residence, ZeroStage};
use serde_json::Value;

use crate::keys::values_of_plan;
use crate::model_name::{NamedModel, find_model};
use crate::reader::Reader;
use crate::schedule::{Decay, LearningRate};
use crate::sources::Entries;
use crate::{
    DEFAULT_PRESET, Error, Imported, KEYS, LearningRateScaling, OptimizerConfig, OptimizerKind, Origin,
    PlanFile, Problem, Problems, RunConfig, ScheduleKind, Setting, check, keys, pattern,
};

/// Largest size of a configuration file, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

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

/// The use that a configuration is read for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A run, which needs weights for fine-tuning.
    Run,
    /// Planning of a run, which needs no weights.
    Plan,
}

impl RunConfig {
    /// Reads a file (`None`: defaults only) and applies the `--set` arguments in order.
    ///
    /// # Errors
    /// [`Error::ReadConfiguration`] if the file cannot be read, [`Error::Configuration`] with all mistakes.
    pub fn load(path: Option<&Path>, arguments: &[impl AsRef<str>]) -> Result<Self, Error> {
        Self::load_with(path, &[], None, arguments)
    }

    /// As [`RunConfig::load`], with values from another tool's configuration, and over them a plan, between the file and the arguments.
    ///
    /// # Errors
    /// As [`RunConfig::load`]; if both files set a key to different values; [`Error::Plan`] if the plan alone is wrong.
    pub fn load_with(
        path: Option<&Path>,
        imported: &[Imported],
        plan: Option<&PlanFile>,
        arguments: &[impl AsRef<str>],
    ) -> Result<Self, Error> {
        Self::load_to(Purpose::Run, path, imported, plan, arguments)
    }

    /// As [`RunConfig::load`], for a run that is only planned: it needs no weights, even if fine-tuning would keep some of them.
    ///
    /// # Errors
    /// As [`RunConfig::load`].
    pub fn load_to_plan(
        path: Option<&Path>,
        plan: Option<&PlanFile>,
        arguments: &[impl AsRef<str>],
    ) -> Result<Self, Error> {
        Self::load_to(Purpose::Plan, path, &[], plan, arguments)
    }

    fn load_to(
        purpose: Purpose,
        path: Option<&Path>,
        imported: &[Imported],
        plan: Option<&PlanFile>,
        arguments: &[impl AsRef<str>],
    ) -> Result<Self, Error> {
        let parse = |text: &str, name: &str| Self::parse_to(purpose, text, name, imported, plan, arguments);
        let Some(path) = path else { return parse("", "RUN.toml")?.with_found_model() };
        let text =
            read_text(path).map_err(|source| Error::ReadConfiguration { path: path.to_owned(), source })?;
        let name = path.display().to_string();
        parse(&text, &name)?.with_found_model()
    }

    /// Resolves the name of the run's model to a preset or a directory.
    ///
    /// # Errors
    /// If nothing has that name, or a preset's weights are asked for.
    pub fn with_found_model(mut self) -> Result<Self, Error> {
        let model = &self.model;
        let (key, name) = match (&model.path, &model.preset) {
            (Some(path), _) => ("model.path", path.display().to_string()),
            (None, Some(preset)) => ("model.preset", preset.clone()),
            _ => return Ok(self),
        };
        let found = match find_model(&name) {
            Err(Error::NoModel(what)) => {
                return Err(Error::Configuration(self.problem(key, what, "").into()));
            }
            found => found?,
        };
        let origin = self.origin(key);
        self.origins.remove(key);
        (self.model.preset, self.model.path) = match found {
            NamedModel::Preset(preset) => {
                if self.model.from_pretrained {
                    let what = format!(
                        "{name} is no directory here and not in the cache of Hugging Face: it is known as the preset {preset}, an \
                         architecture without weights"
                    );
                    let allowed = "a directory with weights (`hf download` of Hugging Face fetches one), or model.from_pretrained = false";
                    return Err(Error::Configuration(self.problem(key, what, allowed).into()));
                }
                self.origins.insert("model.preset".to_owned(), origin);
                (Some(preset), None)
            }
            NamedModel::Directory(directory) => {
                self.origins.insert("model.path".to_owned(), origin);
                (None, Some(directory))
            }
        };
        Ok(self)
    }

    /// Reads TOML text, called `name` in messages, and applies the `--set` arguments in their order.
    ///
    /// # Errors
    /// All mistakes at once, in the order of the text.
    pub fn parse(text: &str, name: &str, arguments: &[impl AsRef<str>]) -> Result<Self, Problems> {
        Self::parse_with(text, name, &[], None, arguments)
    }

    /// As [`RunConfig::parse`], for a run that is only planned.
    ///
    /// # Errors
    /// As [`RunConfig::parse`].
    pub fn parse_to_plan(text: &str, name: &str, arguments: &[impl AsRef<str>]) -> Result<Self, Problems> {
        Self::parse_to(Purpose::Plan, text, name, &[], None, arguments)
    }

    /// As [`RunConfig::parse`], with values from another tool's configuration, and over them a plan, between the text and the arguments.
    ///
    /// # Errors
    /// As [`RunConfig::parse`]; if the text and the other configuration set a key to different values.
    pub fn parse_with(
        text: &str,
        name: &str,
        imported: &[Imported],
        plan: Option<&PlanFile>,
        arguments: &[impl AsRef<str>],
    ) -> Result<Self, Problems> {
        Self::parse_to(Purpose::Run, text, name, imported, plan, arguments)
    }

    fn parse_to(
        purpose: Purpose,
        text: &str,
        name: &str,
        imported: &[Imported],
        plan: Option<&PlanFile>,
        arguments: &[impl AsRef<str>],
    ) -> Result<Self, Problems> {
        let mut problems = Vec::new();
        let mut entries = Entries::default();
        entries.add_document(text, name, &mut problems);
        let of_text = problems.len();
        for value in imported {
            entries.add_imported(value, &mut problems);
        }
        // Values that depend on a contradicted one would only cause follow-up errors.
        if problems.len() > of_text {
            return Err(Problems::all_of(problems));
        }
        if let Some(plan) = plan {
            entries.add_plan(plan.name(), plan.plan());
        }
        for argument in arguments {
            entries.add_argument(argument.as_ref(), &mut problems);
        }
        Self::checked(purpose, entries, problems)
    }

    /// Returns the configuration of a past run from the `settings` of its `run.json`, which messages call `name`.
    ///
    /// # Errors
    /// With all values that are inconsistent or that this version does not know.
    pub fn recorded(settings: &[Value], name: &str) -> Result<Self, Problems> {
        let mut entries = Entries::default();
        for setting in settings.iter().filter(|setting| setting["origin"] != Origin::Default.to_string()) {
            if let Some(key) = setting["key"].as_str() {
                let origin = Origin::File { name: name.into(), line: 0 };
                entries.add_known(key.to_owned(), setting["value"].clone(), origin);
            }
        }
        Self::checked(Purpose::Run, entries, Vec::new())
    }

    /// Returns the configuration of the run that wrote a checkpoint, from its [`RunConfig::to_json`], which messages call `name`.
    /// Values that follow from other keys stay derived.
    ///
    /// # Errors
    /// With all values that are inconsistent or that this version does not know.
    pub fn stored(stored: &Value, name: &str) -> Result<Self, Problems> {
        const DERIVED: [&str; 7] = [
            "model.preset",
            "train.micro_batch",
            "train.rollback_after",
            "optimizer.betas",
            "optimizer.momentum",
            "schedule.warmup_steps",
            "schedule.decay_steps",
        ];
        let origin = Origin::File { name: name.into(), line: 0 };
        let given = |section: &str, key: &str| {
            let value = &stored[section][key];
            let default = KEYS.iter().find(|known| known.section() == section && known.key() == key);
            let is_default = default.is_some_and(|known| known.default == *value);
            (!value.is_null() && !is_default).then(|| (format!("{section}.{key}"), value.clone()))
        };
        let overrides =
            stored["model"].as_object().into_iter().flatten().map(|(key, _)| ("model", key.as_str()));
        let mut keys: Vec<(&str, &str)> =
            KEYS.iter().map(|key| (key.section(), key.key())).chain(overrides).collect();
        keys.sort_unstable();
        keys.dedup();
        let values: Vec<(String, Value)> =
            keys.into_iter().filter_map(|(section, key)| given(section, key)).collect();
        let of = |is_kept: &dyn Fn(&str) -> bool| {
            let mut entries = Entries::default();
            for (key, value) in values.iter().filter(|(key, _)| is_kept(key)) {
                entries.add_known(key.clone(), value.clone(), origin.clone());
            }
            Self::checked(Purpose::Run, entries, Vec::new())
        };
        // Of the derived values, only those that would otherwise come out differently are set.
        let derived = of(&|key| !DERIVED.contains(&key)).map(|config| config.to_json()).unwrap_or_default();
        let is_same = |key: &str| {
            let (section, key) = key.split_once('.').unwrap_or_default();
            derived[section][key] == stored[section][key]
        };
        of(&|key| !DERIVED.contains(&key) || !is_same(key))
    }

    /// Returns this configuration with the number of steps of another run, whose [`RunConfig::to_json`] is `stored`. `None` if that
    /// has no number of steps, the same number, or one that is inconsistent with this configuration.
    pub fn with_steps_of(&self, stored: &Value) -> Option<Self> {
        let steps = stored["train"]["steps"].as_u64().filter(|steps| *steps != self.train.steps)?;
        self.with_settings(&[format!("train.steps={steps}")]).ok()
    }

    /// Returns this configuration with more `--set` arguments.
    ///
    /// # Errors
    /// With all values that are inconsistent.
    pub fn with_settings(&self, arguments: &[impl AsRef<str>]) -> Result<Self, Problems> {
        self.with_changes(None, arguments)
    }

    /// Returns this configuration under a plan, if there is one, and with more `--set` arguments.
    ///
    /// # Errors
    /// With all values that are inconsistent.
    pub fn with_changes(
        &self,
        plan: Option<&PlanFile>,
        arguments: &[impl AsRef<str>],
    ) -> Result<Self, Problems> {
        let mut problems = Vec::new();
        let mut entries = self.entries(|_| true);
        if let Some(plan) = plan {
            entries.add_plan(plan.name(), plan.plan());
        }
        for argument in arguments {
            entries.add_argument(argument.as_ref(), &mut problems);
        }
        Self::checked(self.purpose(), entries, problems)
    }

    /// Returns this configuration under a plan.
    ///
    /// # Errors
    /// With all values that are inconsistent.
    pub fn with_plan(&self, plan: &PlanFile) -> Result<Self, Problems> {
        self.with_changes(Some(plan), &[""; 0])
    }

    /// Returns the keys that were set and that `is_kept` selects.
    fn entries(&self, is_kept: impl Fn(&str) -> bool) -> Entries {
        let mut entries = Entries::default();
        for Setting { key, value, origin } in self.settings() {
            if origin != Origin::Default && !value.is_null() && is_kept(&key) {
                entries.add_known(key, value, origin);
            }
        }
        entries
    }

    /// Returns this configuration without the keys of a plan: `[parallel]` and the micro-batch.
    ///
    /// # Errors
    /// With all values that are consistent only with these keys.
    pub fn without_plan(&self) -> Result<Self, Problems> {
        let entries = self.entries(|key| !key.starts_with("parallel.") && key != "train.micro_batch");
        Self::checked(self.purpose(), entries, Vec::new())
    }

    /// Returns the use that the configuration was read for, as far as it makes a difference.
    fn purpose(&self) -> Purpose {
        if self.keeps_weights() && !self.model.from_pretrained { Purpose::Plan } else { Purpose::Run }
    }

    /// Returns true if fine-tuning keeps some weights as they are.
    pub(crate) fn keeps_weights(&self) -> bool {
        let fine_tune = &self.fine_tune;
        fine_tune.adapter.is_some() || fine_tune.lora_rank.is_some() || !fine_tune.freeze.is_empty()
    }

    fn checked(purpose: Purpose, entries: Entries, mut problems: Vec<Problem>) -> Result<Self, Problems> {
        let mut reader = Reader::new(entries, &mut problems);
        let mut config = Self::read(&mut reader);
        reader.refuse_rest();
        config.pass_over_idle_keys_of_plan();
        check::check(purpose, &config, &mut reader);
        problems.sort_by_key(|problem| match problem.origin {
            Origin::File { line, .. } => (0, line),
            Origin::Plan(_) | Origin::Argument(_) => (1, 0),
            Origin::Default => (2, 0),
        });
        Problems::none_of(problems)?;
        Ok(config)
    }

    /// Resets keys without effect that come from a plan to their defaults, since a plan sets every key.
    fn pass_over_idle_keys_of_plan(&mut self) {
        for key in KEYS.iter() {
            let is_of_plan = matches!(self.origin(key.name), Origin::Plan(_));
            if is_of_plan && key.rules.idle.is_some_and(|idle| idle(self).is_some()) {
                self.reset(key.name);
                self.origins.remove(key.name);
            }
        }
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

    /// Returns true if nothing is offloaded to disk.
    pub fn offloads_nothing(&self) -> bool {
        !self.plan.residence.use_disk()
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

    /// Returns sentences on defaults that decide what is trained: the default model, the text found on this machine.
    pub fn taken_by_default(&self) -> Vec<String> {
        let is_open = |keys: &[&str]| keys.iter().all(|key| self.origin(key) == Origin::Default);
        let model = is_open(&keys::MODEL_SOURCES).then(|| {
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

impl Default for RunConfig {
    /// Returns the configuration in which no key is set.
    fn default() -> Self {
        Self::read(&mut Reader::new(Entries::default(), &mut Vec::new()))
    }
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

/// Reads a configuration file of at most [`MAX_FILE_BYTES`] of UTF-8.
///
/// # Errors
/// If the path is a directory or a file of another format, if the file is too long, or if it cannot be read.
fn read_text(path: &Path) -> io::Result<String> {
    let shown = path.display();
    let instead = match path.extension().and_then(|extension| extension.to_str()) {
        Some("json") => format!(
            "write `lockstep import deepspeed {shown} > run.toml`, or `lockstep train RUN.toml --deepspeed {shown}`"
        ),
        Some("yaml" | "yml") => format!("write `lockstep import accelerate {shown} > run.toml`"),
        Some("jsonl" | "parquet" | "txt") => format!("write `lockstep train --set data.train={shown}`"),
        _ => String::new(),
    };
    if !instead.is_empty() && path.exists() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("a run is described in TOML; {instead}"),
        ));
    }
    if path.is_dir() {
        let instead =
            if lockstep_checkpoint::find(path).is_ok_and(|found| found.join("manifest.json").exists()) {
                format!("`lockstep train --resume {shown}` goes on from its checkpoint")
            } else if path.join("config.json").exists() {
                format!("its model is named by `--set model.path={shown}`")
            } else {
                "give the file that describes the run".to_owned()
            };
        return Err(io::Error::new(io::ErrorKind::IsADirectory, format!("it is a directory; {instead}")));
    }
    let mut text = String::new();
    let bytes = File::open(path)?.take(MAX_FILE_BYTES + 1).read_to_string(&mut text)? as u64;
    if bytes > MAX_FILE_BYTES {
        let message = format!("longer than the {MAX_FILE_BYTES} bytes that a configuration may have");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    Ok(text)
}
