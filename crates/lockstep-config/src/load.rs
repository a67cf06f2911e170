//! Loading of a configuration: RUN.toml, another tool's values, a plan and the `--set` arguments are read together and checked.
//!
//! [`RunConfig::load`] returns either a configuration in which all values are consistent, or the list of all mistakes.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use serde_json::Value;

use crate::check::{Purpose, check};
use crate::ineffective_keys::no_effect;
use crate::model::fixed_seq_len;
use crate::model_name::{NamedModel, find_model, find_tokenizer, find_weights};
use crate::reader::Reader;
use crate::sources::Entries;
use crate::value::TokenizerSource;
use crate::{Error, Imported, KEYS, Origin, PlanFile, Problem, Problems, RunConfig, Setting};

/// Largest size of a configuration file, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

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
        let Some(path) = path else { return parse("", "RUN.toml")?.with_found(purpose) };
        let text =
            read_text(path).map_err(|source| Error::ReadConfiguration { path: path.to_owned(), source })?;
        let name = path.display().to_string();
        parse(&text, &name)?.with_found(purpose)
    }

    /// Resolves the names of the run's model and tokenizer to a preset, directories and files. Repositories that are not in the
    /// cache are downloaded, with their weights if the run starts from these.
    ///
    /// # Errors
    /// If nothing has a name, a preset's weights are asked for, or a download fails.
    pub fn with_found_model(self) -> Result<Self, Error> {
        self.with_found(Purpose::Run)
    }

    fn with_found(self, purpose: Purpose) -> Result<Self, Error> {
        self.with_named_model(purpose)?.with_named_tokenizer(purpose)
    }

    fn with_named_model(mut self, purpose: Purpose) -> Result<Self, Error> {
        let model = &self.model;
        let (key, name) = match (&model.path, &model.preset) {
            (Some(path), _) => ("model.path", path.display().to_string()),
            (None, Some(preset)) => ("model.preset", preset.clone()),
            _ => return Ok(self),
        };
        let needs_weights = model.from_pretrained && purpose == Purpose::Run;
        let found = match needs_weights {
            true => find_weights(&name).map(NamedModel::Directory),
            false => find_model(&name),
        };
        let found = found.map_err(|error| self.at(key, error))?;
        let origin = self.origin(key);
        self.origins.remove(key);
        (self.model.preset, self.model.path) = match found {
            NamedModel::Preset(preset) => {
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

    fn with_named_tokenizer(mut self, purpose: Purpose) -> Result<Self, Error> {
        let Some(TokenizerSource::File(path)) =
            self.data.tokenizer.as_ref().filter(|_| purpose == Purpose::Run)
        else {
            return Ok(self);
        };
        let key = "data.tokenizer";
        let found = find_tokenizer(&path.display().to_string()).map_err(|error| self.at(key, error))?;
        self.data.tokenizer = Some(TokenizerSource::File(found.into()));
        Ok(self)
    }

    /// Adds the place of a key to an error about its name; failures of the network and of disks stay as they are.
    fn at(&self, key: &str, error: Error) -> Error {
        let is_of_name = match &error {
            Error::NoModel(_) => true,
            Error::Hub { source, .. } => source.kind() == lockstep_hub::ErrorKind::Configuration,
            _ => false,
        };
        if is_of_name { Error::Configuration(self.problem(key, error.to_string(), "").into()) } else { error }
    }

    /// Reads TOML text, called `name` in messages, and applies the `--set` arguments in their order.
    ///
    /// # Errors
    /// All mistakes at once, in the order of the text.
    pub fn parse(text: &str, name: &str, arguments: &[impl AsRef<str>]) -> Result<Self, Problems> {
        Self::parse_with(text, name, &[], None, arguments)
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
        Self::changed(purpose, entries, problems, plan, arguments)
    }

    /// Returns the configuration of a past run from the `settings` of its `run.json`, which messages call `name`.
    ///
    /// # Errors
    /// With all values that are inconsistent or that this version does not know.
    pub fn recorded(settings: &[Value], name: &str) -> Result<Self, Problems> {
        let origin = Origin::File { name: name.into(), line: 0 };
        let set = settings.iter().filter(|setting| setting["origin"] != Origin::Default.to_string());
        let entry = |setting: &Value| {
            Some((setting["key"].as_str()?.to_owned(), setting["value"].clone(), origin.clone()))
        };
        Self::checked(Purpose::Run, set.filter_map(entry).collect(), Vec::new())
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
            let kept = values.iter().filter(|(key, _)| is_kept(key));
            let entries = kept.map(|(key, value)| (key.clone(), value.clone(), origin.clone())).collect();
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
        Self::changed(self.purpose(), self.entries(|_| true), Vec::new(), plan, arguments)
    }

    /// Returns the default configuration under the plan of an inference, if there is one, and with `--set` arguments. Whether the
    /// plan fits is not checked.
    ///
    /// # Errors
    /// With all values that no plan may have.
    pub fn of_inference(plan: Option<&PlanFile>, arguments: &[impl AsRef<str>]) -> Result<Self, Problems> {
        Self::changed(Purpose::Inference, Entries::default(), Vec::new(), plan, arguments)
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
        let is_set = |Setting { key, value, origin }: &Setting| {
            *origin != Origin::Default && !value.is_null() && is_kept(key)
        };
        let set = self.settings().into_iter().filter(is_set);
        set.map(|Setting { key, value, origin }| (key, value, origin)).collect()
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

    /// Checks `entries` under a plan, if there is one, and with more arguments.
    fn changed(
        purpose: Purpose,
        mut entries: Entries,
        mut problems: Vec<Problem>,
        plan: Option<&PlanFile>,
        arguments: &[impl AsRef<str>],
    ) -> Result<Self, Problems> {
        if let Some(plan) = plan {
            entries.add_plan(plan.name(), plan.plan());
        }
        for argument in arguments {
            entries.add_argument(argument.as_ref(), &mut problems);
        }
        Self::checked(purpose, entries, problems)
    }

    fn checked(purpose: Purpose, entries: Entries, mut problems: Vec<Problem>) -> Result<Self, Problems> {
        let mut reader = Reader::new(entries, &mut problems);
        let mut config = Self::read(&mut reader);
        config.origins = std::mem::take(&mut reader.origins);
        reader.refuse_rest();
        config.pass_over_idle_keys_of_plan();
        if let (Origin::Default, Some(seq_len)) = (config.origin("train.seq_len"), fixed_seq_len(&config)) {
            config.train.seq_len = seq_len;
        }
        check(purpose, &config, &mut reader);
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
            if is_of_plan && no_effect(self, key.name).is_some() {
                self.reset(key.name);
                self.origins.remove(key.name);
            }
        }
    }
}

impl Default for RunConfig {
    /// Returns the configuration in which no key is set.
    fn default() -> Self {
        Self::read(&mut Reader::new(Entries::default(), &mut Vec::new()))
    }
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
