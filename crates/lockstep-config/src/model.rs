//! The model of a run: what `[model]` names, with its overrides, and the part of it that `[fine_tune]` trains.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use lockstep_checkpoint::{BaseModel, ModelDirectory, PeftAdapter};
use lockstep_model::{ModelConfig, Tuning};
use lockstep_plan::BlockFormat;
use serde_json::{Map, Value};

use crate::data_problems::data_problems;
use crate::model_name::config_of;
use crate::plan_keys::plan_problems;
use crate::tuning::resolve_tuning;
use crate::{Error, ModelSource, Origin, Problems, RunConfig};

/// The model of a run.
#[derive(Debug)]
pub struct ResolvedModel {
    /// Configuration of the model, with overrides and the run's dropout.
    pub config: ModelConfig,
    /// The part of the model that is trained.
    pub tuning: Tuning,
    /// Directory of the initial weights; `None` if they come from the initializers.
    pub pretrained: Option<ModelDirectory>,
    /// The adapter that training continues from; `None` if it starts anew, or without one.
    pub adapter: Option<PeftAdapter>,
    /// Record in checkpoints of the base weights that they do not hold, set once these have been read.
    pub base: OnceLock<BaseModel>,
}

impl ResolvedModel {
    /// Returns the block formats of the matrices that the run quantizes, by name: not of those that are stored in blocks.
    pub fn quantized_here(&self) -> BTreeMap<&str, BlockFormat> {
        let stored = self.pretrained.as_ref().map(ModelDirectory::block_parameters).unwrap_or_default();
        let quantized = self.tuning.quantized.iter().map(|(name, format)| (name.as_str(), *format));
        quantized.filter(|(name, _)| stored.iter().all(|stored| stored.name != *name)).collect()
    }
}

/// Returns the model that `[model]` describes.
///
/// # Errors
/// If the preset is unknown, the `config.json` is not supported, overrides do not fit, sequences are longer than the model's
/// maximum, or the plan does not fit the model.
pub fn resolve_model(config: &RunConfig) -> Result<ResolvedModel, Error> {
    let (model, pretrained) = named_model(config)?;
    let mut problems = Vec::new();
    let (longest, fixed) = (model.max_position_embeddings(), model.model().sizes().fixed_seq_len);
    // A fixed length is a rule of the plan.
    if fixed.is_none() && config.train.seq_len > longest {
        problems.push(config.problem(
            "train.seq_len",
            format!("sequences of {} tokens are longer than the model's maximum", config.train.seq_len),
            format!("1 to {longest}, or a larger max_position_embeddings in [model]"),
        ));
    }
    if config.names_data() {
        problems.extend(data_problems(config, &model));
    }
    let tuned = resolve_tuning(config, &model, pretrained.as_ref());
    problems.extend(plan_problems(config, &model, tuned.as_ref().ok().map(|(tuning, _)| tuning)));
    Problems::none_of(problems)?;
    let (tuning, adapter) = tuned?;
    Ok(ResolvedModel { config: model, tuning, pretrained, adapter, base: OnceLock::new() })
}

/// Returns the sequence length of the run's model if all of its samples have one length; `None` also for a model that cannot
/// be read, which [`resolve_model`] reports.
pub(crate) fn fixed_seq_len(config: &RunConfig) -> Option<usize> {
    let model = match config.model_source() {
        ModelSource::Preset(name) => ModelConfig::preset(name).ok(),
        ModelSource::Path(dir) => config_of(dir).ok(),
        ModelSource::ModelType(model_type) => {
            let mut table = overrides_of(config);
            table.insert("model_type".to_owned(), model_type.into());
            ModelConfig::from_table(&table, "[model]").ok()
        }
    };
    model?.model().sizes().fixed_seq_len
}

/// Returns the model that `[model]` names, without checking it against the run, and the directory of its weights if it has one.
///
/// # Errors
/// If the preset is unknown, the `config.json` is not supported, or overrides do not fit.
pub fn named_model(config: &RunConfig) -> Result<(ModelConfig, Option<ModelDirectory>), Error> {
    let overrides = overrides_of(config);
    let mut pretrained = None;
    let base = match config.model_source() {
        ModelSource::Preset(name) => ModelConfig::preset(name)?,
        ModelSource::Path(dir) if config.model.from_pretrained => {
            let directory = ModelDirectory::open(dir)?;
            let base = directory.config().clone();
            pretrained = Some(directory);
            base
        }
        ModelSource::Path(dir) => config_of(dir)?,
        ModelSource::ModelType(model_type) => {
            let mut table = overrides.clone();
            table.insert("model_type".to_owned(), model_type.into());
            ModelConfig::from_table(&table, "[model]")?
        }
    };
    let mut model = if overrides.is_empty() || matches!(config.model_source(), ModelSource::ModelType(_)) {
        base
    } else {
        base.with_overrides(&overrides, "[model]")?
    };
    if config.origin("train.dropout") != Origin::Default {
        model = model.with_dropout(config.train.dropout);
    }
    Ok((model, pretrained))
}

/// Returns the keys of the model that `[model]` overrides.
pub fn overrides_of(config: &RunConfig) -> Map<String, Value> {
    let overrides = config.model.overrides.iter();
    overrides.map(|(key, value)| (key.clone(), serde_json::to_value(value).unwrap_or_default())).collect()
}
