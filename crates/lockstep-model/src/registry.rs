//! The families that a `config.json` can name by its `model_type`: those of this crate, and those that a program adds.

use std::sync::{Arc, LazyLock, PoisonError, RwLock};

use serde_json::{Map, Value};

use crate::config::{
    BertConfig, BloomConfig, FalconConfig, Gpt2Config, GptNeoxConfig, LlamaConfig, LlamaFamily, OptConfig,
    ResNetConfig, VitConfig,
};
use crate::error::ConfigProblem;
use crate::model::Model;

/// Reads a model from the keys of its `config.json`. Absent keys have defaults; the second value lists all problems.
pub type ReadModel = dyn Fn(&Map<String, Value>) -> (Arc<dyn Model>, Vec<ConfigProblem>) + Send + Sync;

/// A family by its `model_type`.
struct Entry {
    model_type: String,
    read: Arc<ReadModel>,
    /// True for a family of this crate.
    is_own: bool,
}

static FAMILIES: LazyLock<RwLock<Vec<Entry>>> = LazyLock::new(|| {
    let mut families = vec![entry("gpt2", |table| boxed(Gpt2Config::read(table)))];
    families.extend(
        LlamaFamily::ALL
            .map(|family| entry(family.model_type(), move |table| boxed(LlamaConfig::read(family, table)))),
    );
    families.push(entry("bert", |table| boxed(BertConfig::read(table))));
    families.push(entry("vit", |table| boxed(VitConfig::read(table))));
    families.push(entry("resnet", |table| boxed(ResNetConfig::read(table))));
    families.push(entry("gpt_neox", |table| boxed(GptNeoxConfig::read(table))));
    families.push(entry("falcon", |table| boxed(FalconConfig::read(table))));
    families.push(entry("opt", |table| boxed(OptConfig::read(table))));
    families.push(entry("bloom", |table| boxed(BloomConfig::read(table))));
    RwLock::new(families)
});

fn entry(
    model_type: &str,
    read: impl Fn(&Map<String, Value>) -> (Arc<dyn Model>, Vec<ConfigProblem>) + Send + Sync + 'static,
) -> Entry {
    Entry { model_type: model_type.to_owned(), read: Arc::new(read), is_own: true }
}

fn boxed((model, problems): (impl Model, Vec<ConfigProblem>)) -> (Arc<dyn Model>, Vec<ConfigProblem>) {
    (Arc::new(model), problems)
}

/// Adds a family, so that `model_type` in a run's `[model]` or in a `config.json` names it. A family that is already
/// registered under this name is replaced. Every process of a run has to register it.
pub fn register(
    model_type: &str,
    read: impl Fn(&Map<String, Value>) -> (Arc<dyn Model>, Vec<ConfigProblem>) + Send + Sync + 'static,
) {
    let mut families = FAMILIES.write().unwrap_or_else(PoisonError::into_inner);
    families.retain(|family| family.model_type != model_type);
    families.push(Entry { is_own: false, ..entry(model_type, read) });
}

/// Registers a model that a program has built, and returns the `model_type` by which a run names exactly this model: its own,
/// unless that is a family of this crate, whose reader stays. Keys beside it may only repeat those of the model.
pub fn register_given(model: Arc<dyn Model>) -> String {
    let own = model.model_type();
    let name = if is_own_family(own) { format!("{own}, as given") } else { own.to_owned() };
    register(&name, move |table| {
        let keys = model.table();
        let is_other = |(key, value): &(&String, &Value)| {
            !GENERAL.contains(&key.as_str()) && keys.get(*key) != Some(*value)
        };
        let problem = |(key, value): (&String, &Value)| ConfigProblem::Unsupported {
            key: key.clone(),
            value: value.to_string(),
            supported: "the value of the model that the program has built".to_owned(),
        };
        (Arc::clone(&model), table.iter().filter(is_other).map(problem).collect())
    });
    name
}

/// Keys of a `config.json` that are not the model's own.
const GENERAL: [&str; 6] =
    ["model_type", "architectures", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id"];

/// Returns true if a family of this crate has this `model_type`.
fn is_own_family(model_type: &str) -> bool {
    let families = FAMILIES.read().unwrap_or_else(PoisonError::into_inner);
    families.iter().any(|family| family.is_own && family.model_type == model_type)
}

/// Returns the reader of a family; `None` if no family has this `model_type`.
pub(crate) fn reader(model_type: &str) -> Option<Arc<ReadModel>> {
    let families = FAMILIES.read().unwrap_or_else(PoisonError::into_inner);
    families.iter().find(|family| family.model_type == model_type).map(|family| Arc::clone(&family.read))
}

/// Returns the supported values of `model_type`, quoted.
pub(crate) fn model_types() -> String {
    let families = FAMILIES.read().unwrap_or_else(PoisonError::into_inner);
    let names = families.iter().map(|family| format!("\"{}\"", family.model_type));
    names.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::ModelConfig;

    #[test]
    fn a_given_model_is_read_by_its_name_and_leaves_its_family_alone() {
        let given = ModelConfig::preset("baby-gpt").expect("a preset").with_dropout(0.3);
        let name = register_given(given.handle());
        let read = |name: &str, more: Value| {
            let mut table = more.as_object().expect("a table").clone();
            table.insert("model_type".to_owned(), json!(name));
            ModelConfig::from_table(&table, "test")
        };
        assert_eq!(read(&name, json!({})).expect("registered"), given);
        assert_eq!(read(&name, json!({ "resid_pdrop": 0.3 })).expect("the model's own value"), given);
        let refused = read(&name, json!({ "n_layer": 3 })).expect_err("another model").to_string();
        assert!(refused.contains("n_layer"), "{refused}");
        assert_eq!(read("gpt2", json!({ "n_layer": 3 })).expect("GPT-2").num_hidden_layers(), 3);
    }
}
