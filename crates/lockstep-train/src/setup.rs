//! From a configuration to a model and its engine.

use std::collections::{BTreeSet, HashMap};

use lockstep_checkpoint::{BaseModel, ModelDirectory, PeftAdapter};
use lockstep_config::plan::checked_plan;
use lockstep_config::{
    F32Products, Problems, ResolvedModel, RunConfig, engine_options, offload_directory, too_few_live,
};
use lockstep_engine::{Engine, EngineError, Ranks, StateKind};
use lockstep_model::{Adapter, Tuning};
use lockstep_plan::{ParameterId, ParameterRecord};
use lockstep_tensor::{Arena, ScratchFile};

use crate::Error;
use crate::new_head::NewHead;

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
        EngineError::LiveLimitTooLow(few) => Error::from(too_few_live(config, few)),
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
            let head = NewHead::of(&model.config, directory.config());
            load_weights(engine, (&head, config.train.seed), |sink| directory.for_each_parameter(sink))
        }
        Some(directory) => {
            let mut digest = None;
            let head = NewHead::of(&model.config, directory.config());
            load_weights(engine, (&head, config.train.seed), |sink| {
                digest = Some(directory.for_each_parameter_hashed(sink)?);
                Ok(())
            })?;
            load_stored_blocks(directory, engine)?;
            let path = std::path::absolute(directory.path()).unwrap_or_else(|_| directory.path().to_owned());
            if let Some(digest) = digest {
                // The directory is read once; a second reading would find the same.
                let _ = model.base.set(BaseModel { path, digest });
            }
            load_first_adapter(config, model, engine)
        }
    }
}

/// Loads the quantized matrices that the model's directory stores in blocks of the same format: as they are stored, where encoding
/// their decoded values could give others.
fn load_stored_blocks(directory: &ModelDirectory, engine: &mut Engine) -> Result<(), Error> {
    for stored in directory.block_parameters() {
        let is_stored = |record: &ParameterRecord| {
            record.name == stored.name && record.block_format == Some(stored.format)
        };
        let Some(index) = engine.records().iter().position(is_stored) else { continue };
        let columns = engine.records()[index].shape[1];
        engine.write_blocks(ParameterId(index), &stored.blocks(columns)?)?;
    }
    Ok(())
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
pub(crate) type Sink<'s> = &'s mut dyn FnMut(&str, &[f32]) -> Result<(), Error>;

/// Loads the weights that `read` passes to its callback. Trained parameters of a new head that they lack get initial values by
/// `seed`.
///
/// # Errors
/// If the weights lack another parameter of the model or have others.
pub(crate) fn load_weights(
    engine: &mut Engine,
    (head, seed): (&NewHead, u64),
    read: impl FnOnce(Sink<'_>) -> Result<(), Error>,
) -> Result<(), Error> {
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
    let is_new = |name: &String| head.is_new(name) && engine.records()[ids[name].0].trainable;
    let (new, missing): (BTreeSet<String>, BTreeSet<String>) = missing.into_iter().partition(is_new);
    left_over.retain(|name| !head.is_left(name));
    if missing.is_empty() && left_over.is_empty() {
        let held: Vec<ParameterId> = engine.parameter_ids().collect();
        let new = held.into_iter().filter(|id| new.contains(&engine.records()[id.0].name));
        let new: Vec<ParameterId> = new.collect();
        return Ok(new.into_iter().try_for_each(|id| engine.initialize_parameter(id, seed))?);
    }
    Err(Error::OtherParameters { missing: missing.into_iter().collect(), left_over })
}
