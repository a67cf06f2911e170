//! The parameters that a run trains, and how: patterns of the configuration matched against the model's parameter names.

use std::collections::{BTreeMap, BTreeSet};

use lockstep_checkpoint::{ModelDirectory, PeftAdapter, WeightQuantization, WeightType, is_quantizable};
use lockstep_model::{
    Adapter, LoraConfig, ModelConfig, ModelError, Tuning, parameter_records, tuned_records,
};
use lockstep_plan::{BlockFormat, ParameterRecord};

use crate::choices::BaseQuantization;
use crate::{Error, Problem, Problems, RunConfig, pattern};

/// The parameters that an optimizer's patterns are matched against, in words.
const TRAINED: &str = "parameters that are trained";

/// Resolves the part of `model` that the run trains, and the adapter that it continues from. The weights are those of `pretrained`.
///
/// # Errors
/// If a pattern matches no parameter, if everything is frozen, or if an adapter does not fit.
pub(crate) fn resolve_tuning(
    config: &RunConfig,
    model: &ModelConfig,
    pretrained: Option<&ModelDirectory>,
) -> Result<(Tuning, Option<PeftAdapter>), Error> {
    let records = parameter_records(model);
    let own: Vec<&ParameterRecord> = records.iter().filter(|record| record.tie.is_none()).collect();
    let mut problems = Vec::new();
    let (adapter, first) = resolve_adapter(config, model)?;
    let freeze = &config.fine_tune.freeze;
    problems.extend(without_effect(config, "fine_tune.freeze", "model's parameters", freeze.iter(), &own));
    let is_frozen = |record: &&ParameterRecord| {
        adapter.is_some() || freeze.iter().any(|pattern| pattern::describes(pattern, &record.name))
    };
    let frozen = own.into_iter().filter(is_frozen).map(|record| record.name.clone()).collect();
    let quantized = quantized_matrices(config, &frozen, &records, pretrained);
    let quantize = config.fine_tune.quantize;
    if quantize != BaseQuantization::None && config.keeps_weights() && quantized.is_empty() {
        let what =
            "quantizes nothing: no frozen matrix of a linear layer in a block has rows of whole groups";
        problems.push(config.problem("fine_tune.quantize", what, "\"none\", or a type of smaller groups"));
    }
    let tuning = Tuning { frozen, quantized, adapter };
    let records = tuned_records(model, &tuning);
    let trained: Vec<&ParameterRecord> =
        records.iter().filter(|record| record.trainable && record.tie.is_none()).collect();
    if trained.is_empty() {
        let what = "describes every parameter, so that there is nothing to train";
        problems.push(config.problem("fine_tune.freeze", what, "patterns that leave some out"));
    } else {
        let optimizer = &config.optimizer;
        let decay = optimizer.decay.iter().flatten();
        problems.extend(without_effect(config, "optimizer.decay", TRAINED, decay, &trained));
        let multipliers = optimizer.lr_multipliers.keys();
        problems.extend(without_effect(config, "optimizer.lr_multipliers", TRAINED, multipliers, &trained));
    }
    Problems::none_of(problems)?;
    Ok((tuning, first))
}

/// Returns the block formats of the frozen matrices of linear layers: of those that `pretrained` stores in blocks theirs, of the others
/// that of `fine_tune.quantize`. A matrix whose rows are no whole blocks stays as it is.
fn quantized_matrices(
    config: &RunConfig,
    frozen: &BTreeSet<String>,
    records: &[ParameterRecord],
    pretrained: Option<&ModelDirectory>,
) -> BTreeMap<String, BlockFormat> {
    let to = match config.fine_tune.quantize {
        BaseQuantization::None => return BTreeMap::new(),
        BaseQuantization::Nf4 => WeightType::Nf4,
        BaseQuantization::Int4 => WeightType::Int4,
        BaseQuantization::Int8 => WeightType::Int8,
    };
    let quantization = WeightQuantization { to, group_size: None };
    let stored = pretrained.map(ModelDirectory::block_parameters).unwrap_or_default();
    let format = |record: &ParameterRecord| {
        if !frozen.contains(&record.name) || !is_quantizable(&record.name, &record.shape) {
            return None;
        }
        let stored =
            stored.iter().find(|stored| stored.name == record.name && stored.elements == record.elements());
        let format =
            stored.map_or_else(|| quantization.format(record.shape[1]), |stored| Some(stored.format));
        Some((record.name.clone(), format?))
    };
    records.iter().filter_map(format).collect()
}

fn resolve_adapter(
    config: &RunConfig,
    model: &ModelConfig,
) -> Result<(Option<Adapter>, Option<PeftAdapter>), Error> {
    let fine_tune = &config.fine_tune;
    if let Some(dir) = &fine_tune.adapter {
        let first = PeftAdapter::open(dir, model)?;
        return Ok((Some(first.adapter().clone()), Some(first)));
    }
    let Some(rank) = fine_tune.lora_rank else { return Ok((None, None)) };
    let lora = LoraConfig {
        rank,
        alpha: fine_tune.lora_alpha,
        dropout: fine_tune.lora_dropout,
        scaling: fine_tune.lora_scaling.into(),
        targets: fine_tune.lora_targets.clone(),
    };
    match Adapter::new(lora, model) {
        Ok(adapter) => Ok((Some(adapter), None)),
        Err(error @ ModelError::LoraTarget { .. }) => {
            let problem = config.problem("fine_tune.lora_targets", error.to_string(), "");
            Err(Error::Configuration(problem.into()))
        }
        Err(error) => Err(error.into()),
    }
}

/// Returns a problem for each pattern that matches none of `records`.
fn without_effect<'p>(
    config: &RunConfig,
    key: &str,
    described: &str,
    patterns: impl Iterator<Item = &'p String>,
    records: &[&ParameterRecord],
) -> Vec<Problem> {
    let names = || records.iter().map(|record| record.name.as_str());
    patterns
        .filter(|pattern| !names().any(|name| pattern::describes(pattern, name)))
        .map(|pattern| {
            let what = format!("\"{pattern}\" describes none of the {described}");
            let near = pattern::nearest(pattern, names()).join(", ");
            config.problem(key, what, format!("names such as {near}, with * for any characters"))
        })
        .collect()
}
