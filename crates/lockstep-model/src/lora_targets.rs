//! Construction of a LoRA adapter: the linear layers of a model that its targets name, as PEFT would find them.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    config::ModelConfig,
    error::ModelError,
    hf_names::HfMapping,
    hf_tensor::{HfContent, HfPlace},
    hf_transform::HfTransform,
    lora::{Adapter, AdapterTensor, LoraConfig},
    recorded::parameter_records,
};

/// Target that means every linear layer except the output layer.
pub const ALL_LINEAR: &str = "all-linear";
/// Largest allowed rank, about a hundred times the largest in practice.
pub const MAX_RANK: usize = 1 << 14;

impl Adapter {
    /// Returns the adapter that `config` describes for `model`.
    ///
    /// # Errors
    /// If a target matches no linear layer of the model, or the rank is not in 1..=[`MAX_RANK`].
    pub fn new(config: LoraConfig, model: &ModelConfig) -> Result<Self, ModelError> {
        if !(1..=MAX_RANK).contains(&config.rank) {
            return Err(ModelError::LoraRank { rank: config.rank, largest: MAX_RANK });
        }
        let linear = linear_layers(model);
        let modules: BTreeSet<&str> = linear.iter().map(|layer| layer.module.as_str()).collect();
        for target in &config.targets {
            let found = modules.iter().any(|module| is_target(target, module));
            if !found {
                return Err(ModelError::LoraTarget {
                    target: target.clone(),
                    allowed: last_components(modules.iter().copied()).into_iter().collect(),
                });
            }
        }
        let is_adapted =
            |layer: &&LinearLayer| config.targets.iter().any(|target| is_target(target, &layer.module));
        let adapted: Vec<&LinearLayer> = linear.iter().filter(is_adapted).collect();
        let mut tensors: Vec<AdapterTensor> = Vec::new();
        for layer in &adapted {
            let b = format!("{}.lora_B.weight", layer.module);
            let rows = (format!("{}.lora_B.weight", layer.name), layer.shape[0] * config.rank);
            if let Some(known) = tensors.iter_mut().find(|tensor| tensor.name == b) {
                known.shape[0] += layer.shape[0];
                known.parameters.push(rows);
                continue;
            }
            let a = format!("{}.lora_A.weight", layer.module);
            let shape = vec![config.rank, layer.shape[1]];
            tensors.push(AdapterTensor {
                name: a.clone(),
                shape,
                parameters: vec![(a, config.rank * layer.shape[1])],
            });
            let shape = vec![layer.shape[0], config.rank];
            tensors.push(AdapterTensor { name: b, shape, parameters: vec![rows] });
        }
        Ok(Self {
            layers: adapted.iter().map(|layer| (layer.name.clone(), layer.module.clone())).collect(),
            fan_in_fan_out: adapted.iter().any(|layer| layer.is_transposed),
            tensors,
            config,
        })
    }

    /// Returns the shortest list of target names by which PEFT finds the adapted modules of `model` and no others.
    pub fn target_modules(&self, model: &ModelConfig) -> Vec<String> {
        let linear = linear_layers(model);
        let adapted: BTreeSet<&str> = self.layers.values().map(String::as_str).collect();
        let short = last_components(adapted.iter().copied());
        let found = linear.iter().map(|layer| layer.module.as_str());
        let found: BTreeSet<&str> =
            found.filter(|module| short.iter().any(|name| is_target(name, module))).collect();
        if found == adapted {
            short.into_iter().collect()
        } else {
            adapted.into_iter().map(str::to_owned).collect()
        }
    }
}

struct LinearLayer {
    name: String,
    module: String,
    shape: Vec<usize>,
    /// True if the checkpoint stores the weight as `[in, out]`.
    is_transposed: bool,
}

/// Returns the linear layers of a model's blocks, in order. The output layer is excluded: its loss is computed in
/// parts, which an adapter would have to follow.
fn linear_layers(model: &ModelConfig) -> Vec<LinearLayer> {
    let mapping = HfMapping::new(model);
    let mut module_of: BTreeMap<&str, (&str, bool)> = BTreeMap::new();
    for tensor in mapping.tensors() {
        if let HfContent::Parameters(places) = &tensor.content {
            // Layers whose rows are interleaved per head in one module are excluded: PEFT would adapt the module as a whole.
            let is_whole =
                |place: &&HfPlace| !matches!(place.transform, HfTransform::Rows { blocks, .. } if blocks > 1);
            let whole = places.iter().filter(is_whole);
            module_of.extend(whole.map(|place| {
                let is_transposed = matches!(place.transform, HfTransform::Columns { .. });
                (place.parameter.as_str(), (tensor.name.as_str(), is_transposed))
            }));
        }
    }
    let units = model.model().units();
    let without_suffix = |name: &str| name.strip_suffix(".weight").map(str::to_owned);
    parameter_records(model)
        .into_iter()
        .filter(|record| units[record.unit].layer.is_some() && record.shape.len() == 2)
        .filter_map(|record| {
            let (module, is_transposed) = *module_of.get(record.name.as_str())?;
            let (name, module) = (without_suffix(&record.name)?, without_suffix(module)?);
            Some(LinearLayer { name, module, shape: record.shape, is_transposed })
        })
        .collect()
}

/// Returns true if a target, as PEFT reads it, matches a module.
fn is_target(target: &str, module: &str) -> bool {
    target == ALL_LINEAR
        || module.strip_suffix(target).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

fn last_components<'m>(modules: impl Iterator<Item = &'m str>) -> BTreeSet<String> {
    modules.map(|module| module.rsplit('.').next().unwrap_or(module).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lora::LoraScaling;

    fn adapter(model: &str, targets: &[&str]) -> Result<Adapter, ModelError> {
        let targets = targets.iter().map(|target| (*target).to_owned()).collect();
        let scaling = LoraScaling::Standard;
        let config = LoraConfig { rank: 4, alpha: 8.0, dropout: 0.0, scaling, targets };
        Adapter::new(config, &ModelConfig::preset(model).expect("a preset"))
    }

    #[test]
    fn targets_are_read_as_peft_reads_them() {
        for (model, targets, layers, tensors) in [
            ("llama3-8b", &["q_proj", "v_proj"][..], 64, 128),
            ("llama3-8b", &["all-linear"], 7 * 32, 14 * 32),
            ("llama3-8b", &["layers.3.mlp.up_proj"], 1, 2),
            // One module of PEFT, three layers here.
            ("gpt2-124m", &["c_attn"], 36, 24),
            ("gpt2-124m", &["attn.c_proj"], 12, 24),
            ("gpt2-124m", &["c_proj"], 24, 48),
            ("gpt2-124m", &["all-linear"], 6 * 12, 8 * 12),
            ("phi-3-mini", &["qkv_proj"], 3 * 32, 2 * 32),
            ("phi-3-mini", &["all-linear"], 7 * 32, 8 * 32),
        ] {
            let adapter = adapter(model, targets).expect("targets that are there");
            assert_eq!(
                (adapter.layers.len(), adapter.tensors.len()),
                (layers, tensors),
                "{model} {targets:?}"
            );
        }
    }

    #[test]
    fn a_target_that_is_no_linear_layer_is_refused_with_those_that_are() {
        for (model, target) in [
            ("gpt2-124m", "q_proj"),
            ("gpt2-124m", "lm_head"),
            ("gpt2-124m", "q"),
            ("llama3-8b", "proj"),
            ("llama3-8b", "lm_head"),
        ] {
            let error = adapter(model, &[target]).expect_err(target).to_string();
            let known = if model == "gpt2-124m" { "c_attn" } else { "q_proj" };
            assert!(error.contains(target) && error.contains(known), "{error}");
        }
    }

    #[test]
    fn the_names_for_peft_find_the_same_modules_again() {
        for (model, targets, expected) in [
            ("llama3-8b", &["self_attn.q_proj"][..], &["q_proj"][..]),
            ("gpt2-124m", &["all-linear"], &["c_attn", "c_fc", "c_proj"]),
        ] {
            let adapter = adapter(model, targets).expect("targets that are there");
            let model = ModelConfig::preset(model).expect("a preset");
            assert_eq!(adapter.target_modules(&model), expected);
        }
        let gpt2 = ModelConfig::preset("gpt2-124m").expect("a preset");
        let attention = adapter("gpt2-124m", &["attn.c_proj"]).expect("targets that are there");
        assert_eq!(
            attention.target_modules(&gpt2).len(),
            12,
            "`c_proj` alone would mean the feed-forward too"
        );
    }

    #[test]
    fn a_fused_module_has_one_a_and_the_rows_of_all_its_layers() {
        let adapter = adapter("gpt2-124m", &["c_attn"]).expect("a target that is there");
        let [a, b] = &adapter.tensors[..2] else { panic!("two tensors a module") };
        assert_eq!(
            (a.name.as_str(), &a.shape[..]),
            ("transformer.h.0.attn.c_attn.lora_A.weight", &[4, 768][..])
        );
        assert_eq!(
            (b.name.as_str(), &b.shape[..]),
            ("transformer.h.0.attn.c_attn.lora_B.weight", &[2304, 4][..])
        );
        let rows =
            ["q", "k", "v"].map(|layer| (format!("transformer.h.0.attn.{layer}.lora_B.weight"), 768 * 4));
        assert_eq!(b.parameters, rows);
        let factors = adapter.factors_of("transformer.h.0.attn.k.weight").expect("it is adapted");
        assert_eq!(factors, [a.name.clone(), rows[1].0.clone()]);
        assert_eq!(adapter.factors_of("transformer.h.0.mlp.c_fc.weight"), None);
    }
}
