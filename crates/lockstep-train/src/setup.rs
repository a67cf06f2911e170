//! From a configuration to a model and its engine.

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use lockstep_checkpoint::{BaseModel, ModelDirectory, PeftAdapter};
use lockstep_engine::{
    Engine, EngineError, EngineOptions, Offload, Optimizer, RoundingMode, StateKind, Storage, WeightStorage,
};
use lockstep_graph::BlockShape;
use lockstep_model::{Adapter, ModelConfig, Tuning};
use lockstep_plan::gathering::TooFewLive;
use lockstep_plan::{DType, ParameterId};
use lockstep_tensor::{Arena, ScratchFile};
use serde_json::{Map, Value};

use crate::config::{
    F32Products, ModelSource, MuonScale, OptimizerKind, Origin, Precision, Problems, Rounding, RunConfig,
    StatePrecision,
};
use crate::model_name::config_of;
use crate::plan::{checked_plan, misfits};
use crate::tuning::resolve_tuning;
use crate::{Error, Ranks};

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
    pub(crate) base: OnceLock<BaseModel>,
}

/// Returns the model that `[model]` describes.
///
/// # Errors
/// If the preset is unknown, the `config.json` is not supported, overrides do not fit, sequences are longer than the model's
/// maximum, or the plan does not fit the model.
pub fn resolve_model(config: &RunConfig) -> Result<ResolvedModel, Error> {
    let (model, pretrained) = named_model(config)?;
    let mut problems = Vec::new();
    let longest = model.max_position_embeddings();
    if config.train.seq_len > longest {
        problems.push(config.problem(
            "train.seq_len",
            format!("sequences of {} tokens are longer than the model's maximum", config.train.seq_len),
            format!("1 to {longest}, or a larger max_position_embeddings in [model]"),
        ));
    }
    let tuned = resolve_tuning(config, &model);
    problems.extend(misfits(config, &model, tuned.as_ref().ok().map(|(tuning, _)| tuning)));
    Problems::none_of(problems)?;
    let (tuning, adapter) = tuned?;
    Ok(ResolvedModel { config: model, tuning, pretrained, adapter, base: OnceLock::new() })
}

/// Returns the model that `[model]` names, without checking it against the run, and the directory of its weights if it has one.
///
/// # Errors
/// If the preset is unknown, the `config.json` is not supported, or overrides do not fit.
pub(crate) fn named_model(config: &RunConfig) -> Result<(ModelConfig, Option<ModelDirectory>), Error> {
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
pub(crate) fn overrides_of(config: &RunConfig) -> Map<String, Value> {
    let overrides = config.model.overrides.iter();
    overrides.map(|(key, value)| (key.clone(), serde_json::to_value(value).unwrap_or_default())).collect()
}

/// Returns the shape of a run's micro-batch, with the type that its kernels read.
pub(crate) fn shape_of(config: &RunConfig) -> BlockShape {
    let dtype = match config.train.precision {
        Precision::F32 => DType::F32,
        Precision::BF16 => DType::BF16,
        Precision::F16 => DType::F16,
    };
    BlockShape { sequences: config.micro_batch(), seq_len: config.train.seq_len, dtype }
}

/// Returns the engine's settings that do not depend on the plan.
pub fn engine_options(config: &RunConfig) -> EngineOptions {
    let optimizer = &config.optimizer;
    EngineOptions {
        dtype: shape_of(config).dtype,
        storage: storage(config),
        optimizer: match optimizer.kind {
            OptimizerKind::AdamW => Optimizer::AdamW { betas: optimizer.betas(), eps: optimizer.eps },
            OptimizerKind::Sgd => Optimizer::Sgd { momentum: optimizer.momentum() as f32 },
            OptimizerKind::Lion => Optimizer::Lion { betas: optimizer.betas() },
            OptimizerKind::Muon => Optimizer::Muon {
                momentum: optimizer.momentum() as f32,
                scale: match optimizer.muon_scale {
                    MuonScale::MatchAdamW => lockstep_engine::MuonScale::MatchAdamW,
                    MuonScale::Original => lockstep_engine::MuonScale::Original,
                },
                betas: optimizer.betas(),
                eps: optimizer.eps,
                adam_ratio: optimizer.adam_lr.map_or(1.0, |adam_lr| adam_lr / optimizer.lr),
            },
        },
        seed: config.train.seed,
        threads: match config.train.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        },
    }
}

/// Returns the error for a limit on live parameters below what a unit reads.
pub(crate) fn too_few_live(config: &RunConfig, few: TooFewLive) -> Error {
    let allowed = format!("{} or more, padding included", few.needed);
    let problem = config.problem("parallel.max_live_parameters", few.to_string(), allowed);
    Error::Configuration(problem.into())
}

/// Returns the form and place in which the engine stores weights and optimizer state.
fn storage(config: &RunConfig) -> Storage {
    let parallel = &config.parallel;
    Storage {
        weights: if config.train.master_weights { WeightStorage::Master } else { WeightStorage::Kernels },
        state: match config.optimizer.state_precision {
            StatePrecision::F32 => DType::F32,
            StatePrecision::BF16 => DType::BF16,
        },
        rounding: match config.optimizer.rounding {
            Rounding::Nearest => RoundingMode::Nearest,
            Rounding::Stochastic => RoundingMode::Stochastic,
        },
        offload: Offload {
            directory: offload_directory(config),
            method: parallel.offload_io.into(),
            limit: Duration::from_secs_f64(parallel.timeout_s),
            ..Offload::default()
        },
    }
}

/// Returns the directory of offloaded state.
pub(crate) fn offload_directory(config: &RunConfig) -> PathBuf {
    config.parallel.offload_dir.clone().unwrap_or_else(|| config.checkpoint.dir.clone())
}

/// Moves disk offload to the nearest directory that exists, for runs that leave nothing behind.
pub fn offload_to_existing_directory(config: &mut RunConfig) {
    let directory = ScratchFile::existing_directory(&offload_directory(config));
    config.parallel.offload_dir = Some(directory);
}

/// Builds the engine of the run; its weights are zero.
///
/// # Errors
/// If memory or threads cannot be had, the plan does not fit, or the offload directory is in memory itself.
pub(crate) fn build_engine(
    config: &RunConfig,
    model: &ResolvedModel,
    ranks: &Ranks,
    arena: &Arena,
) -> Result<Engine, Error> {
    let directory = offload_directory(config);
    if config.plan.residence.use_disk() && ScratchFile::is_in_memory(&directory) {
        let what = format!("{} lies in memory, so that nothing is saved", directory.display());
        let problem = config.problem("parallel.offload.dir", what, "a directory on a disk");
        Problems::none_of(vec![problem])?;
    }
    let groups = ranks.groups().clone();
    let plan = match groups.plan() {
        Some(plan) => plan.clone(),
        None => checked_plan(config, &model.config, &model.tuning)?.rank(0),
    };
    let builder = Engine::builder(&model.config, plan).tuning(&model.tuning).groups(groups);
    let engine = builder.options(engine_options(config)).build(arena);
    let mut engine = engine.map_err(|error| match error {
        // The parameters that a unit reads are known only after recording.
        EngineError::TooFewLive(few) => too_few_live(config, few),
        error => error.into(),
    })?;
    engine.set_f32_products(match config.train.f32_products {
        F32Products::Split => lockstep_tensor::F32Products::SplitBf16,
        F32Products::Fma => lockstep_tensor::F32Products::Fma,
    });
    for record in engine.records_mut() {
        record.decay = config.optimizer.decays(record);
        record.learning_rate_multiplier = config.optimizer.learning_rate_multiplier(record);
    }
    Ok(engine)
}

/// Loads the run's initial weights: those of the model's directory, or those of the initializers.
///
/// # Errors
/// If the weights cannot be read, are damaged, or are those of another model.
pub(crate) fn load_first_weights(
    config: &RunConfig,
    model: &ResolvedModel,
    engine: &mut Engine,
) -> Result<(), Error> {
    match &model.pretrained {
        None => Ok(engine.initialize(config.train.seed)?),
        Some(directory) if model.tuning == Tuning::default() => {
            load_weights(engine, |sink| directory.for_each_parameter(sink))
        }
        Some(directory) => {
            let mut digest = None;
            load_weights(engine, |sink| {
                digest = Some(directory.for_each_parameter_hashed(sink)?);
                Ok(())
            })?;
            let path = std::path::absolute(directory.path()).unwrap_or_else(|_| directory.path().to_owned());
            if let Some(digest) = digest {
                // The directory is read once; a second reading would find the same.
                let _ = model.base.set(BaseModel { path, digest });
            }
            load_first_adapter(config, model, engine)
        }
    }
}

/// Loads the initial adapter: the one that training continues from, or that of the initializers.
fn load_first_adapter(config: &RunConfig, model: &ResolvedModel, engine: &mut Engine) -> Result<(), Error> {
    let given: HashMap<&str, &[f32]> = model.adapter.iter().flat_map(PeftAdapter::parameters).collect();
    let is_adapter = |id: &ParameterId| Adapter::owns(&engine.records()[id.0].name);
    let ids: Vec<ParameterId> = engine.trained_ids().filter(is_adapter).collect();
    for id in ids {
        match given.get(engine.records()[id.0].name.as_str()) {
            Some(values) => engine.write_state(id, StateKind::Parameter, values)?,
            None => engine.initialize_parameter(id, config.train.seed)?,
        }
    }
    Ok(())
}

/// Callback that takes a parameter's name and values.
type Sink<'s> = &'s mut dyn FnMut(&str, &[f32]) -> Result<(), Error>;

/// Loads the weights that `read` passes to its callback.
///
/// # Errors
/// If the weights lack a parameter of the model or have others.
fn load_weights(engine: &mut Engine, read: impl FnOnce(Sink<'_>) -> Result<(), Error>) -> Result<(), Error> {
    // Includes parameters of other pipeline stages, which this rank skips.
    let owned = engine.records().iter().enumerate().filter(|(_, record)| record.tie.is_none());
    let ids: HashMap<String, ParameterId> =
        owned.map(|(index, record)| (record.name.clone(), ParameterId(index))).collect();
    let mut missing: BTreeSet<String> = ids.keys().filter(|name| !Adapter::owns(name)).cloned().collect();
    let mut left_over = Vec::new();
    read(&mut |name, values| -> Result<(), Error> {
        // The directory was checked against its own configuration, which [model] may override.
        let Some(&id) = ids.get(name) else {
            left_over.push(name.to_owned());
            return Ok(());
        };
        missing.remove(name);
        Ok(engine.write_state(id, StateKind::Parameter, values)?)
    })?;
    if missing.is_empty() && left_over.is_empty() {
        return Ok(());
    }
    Err(Error::OtherParameters { missing: missing.into_iter().collect(), left_over })
}
