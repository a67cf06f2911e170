//! The families that a `config.json` can name by its `model_type`: those of this crate, and those that a program adds.

use std::sync::{Arc, LazyLock, PoisonError, RwLock};

use serde_json::{Map, Value};

use crate::config::{Gpt2Config, LlamaConfig, LlamaFamily, ResNetConfig};
use crate::error::ConfigProblem;
use crate::model::Model;

/// Reads a model from the keys of its `config.json`. Absent keys have defaults; the second value lists all problems.
pub type ReadModel = dyn Fn(&Map<String, Value>) -> (Arc<dyn Model>, Vec<ConfigProblem>) + Send + Sync;

/// A family by its `model_type`.
struct Entry {
    model_type: String,
    read: Arc<ReadModel>,
}

static FAMILIES: LazyLock<RwLock<Vec<Entry>>> = LazyLock::new(|| {
    let mut families = vec![entry("gpt2", |table| boxed(Gpt2Config::read(table)))];
    families.extend(
        LlamaFamily::ALL
            .map(|family| entry(family.model_type(), move |table| boxed(LlamaConfig::read(family, table)))),
    );
    families.push(entry("resnet", |table| boxed(ResNetConfig::read(table))));
    RwLock::new(families)
});

fn entry(
    model_type: &str,
    read: impl Fn(&Map<String, Value>) -> (Arc<dyn Model>, Vec<ConfigProblem>) + Send + Sync + 'static,
) -> Entry {
    Entry { model_type: model_type.to_owned(), read: Arc::new(read) }
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
    families.push(entry(model_type, read));
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
