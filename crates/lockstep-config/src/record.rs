//! The configuration as data: JSON for a checkpoint's manifest, a hash of the values that decide the losses, and the differences
//! between a stored configuration and this one.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde_json::{Value, json};

use crate::keys::{KEYS, RunConfig, SECTIONS};
use crate::problem::Origin;
use crate::run_config::ModelSource;
use crate::schedule::Decay;

/// A value of the configuration and its source.
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    /// The key, `section.key`.
    pub key: String,
    /// The effective value; `null` if the key is not set and none is derived.
    pub value: Value,
    /// Source of the value.
    pub origin: Origin,
}

/// A value that affects the losses of a run and differs from a stored configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// The key, `section.key`.
    pub key: String,
    /// The stored value; `None` if the stored configuration lacks the key.
    pub stored: Option<Value>,
    /// The current value; `None` if this configuration lacks the key.
    pub current: Option<Value>,
}

impl Difference {
    /// Returns the differences between two sets of settings, by name.
    pub fn between(stored: &BTreeMap<String, Value>, current: &BTreeMap<String, Value>) -> Vec<Self> {
        let keys: BTreeSet<&String> = current.keys().chain(stored.keys()).collect();
        keys.into_iter()
            .filter(|key| current.get(*key) != stored.get(*key))
            .map(|key| Self {
                key: key.clone(),
                stored: stored.get(key).cloned(),
                current: current.get(key).cloned(),
            })
            .collect()
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |value: &Option<Value>| value.as_ref().map_or("not set".to_owned(), Value::to_string);
        write!(f, "{} was {}, is {}", self.key, text(&self.stored), text(&self.current))
    }
}

impl RunConfig {
    /// Returns the configuration with all derived values, by section, as checkpoints store it.
    pub fn to_json(&self) -> Value {
        let mut json = self.values();
        let rate = self.learning_rate();
        json["train"]["micro_batch"] = self.micro_batch().into();
        json["optimizer"]["betas"] = json!(self.optimizer.betas());
        json["optimizer"]["momentum"] = self.optimizer.momentum().into();
        if self.rollback_after() > 0 {
            json["train"]["rollback_after"] = self.rollback_after().into();
        }
        json["schedule"]["warmup_steps"] = rate.warmup_steps.into();
        if rate.decay != Decay::None {
            json["schedule"]["decay_steps"] = rate.decay_steps.into();
        }
        if let ModelSource::Preset(preset) = self.model_source() {
            json["model"]["preset"] = preset.into();
        }
        json["derived"] = json!({
            "accumulation_steps": self.accumulation_steps(),
            "tokens_per_step": self.tokens_per_step(),
            "stable_steps": (rate.decay != Decay::None).then(|| rate.stable_steps()),
        });
        json
    }

    /// Returns the hash (BLAKE3, hexadecimal) of the values on which the losses of the run depend beyond rounding. The parallelization,
    /// directories and logging intervals do not enter; nor does the number of steps, except through the learning rate.
    pub fn fingerprint(&self) -> String {
        let values = json!(deciding_values(&self.to_json()));
        blake3::hash(values.to_string().as_bytes()).to_hex().to_string()
    }

    /// Returns the digest of all values that must be equal on all ranks: all but the number of threads.
    pub fn digest(&self) -> [u8; 32] {
        let mut values = self.to_json();
        values["train"]["threads"] = Value::Null;
        *blake3::hash(values.to_string().as_bytes()).as_bytes()
    }

    /// Returns the values that affect the losses and differ from `stored`, the [`RunConfig::to_json`] of another run. A key that an
    /// older version did not know counts as its default.
    pub fn differences(&self, stored: &Value) -> Vec<Difference> {
        let current = deciding_values(&self.to_json());
        let mut stored = deciding_values(stored);
        for key in KEYS.iter().filter(|key| key.rules.defines_numbers && !key.default.is_null()) {
            stored.entry(key.name.to_owned()).or_insert_with(|| key.default.clone());
        }
        Difference::between(&stored, &current)
    }

    /// Returns every key of the manual and every override, with its effective value and its source.
    pub fn settings(&self) -> Vec<Setting> {
        let json = self.to_json();
        let overrides = self.model.overrides.keys().map(|key| ("model", key.as_str()));
        KEYS.iter()
            .map(|key| (key.section(), key.key()))
            .chain(overrides)
            .map(|(section, key)| {
                let name = format!("{section}.{key}");
                Setting { value: json[section][key].clone(), origin: self.origin(&name), key: name }
            })
            .collect()
    }

    /// Returns the configuration as the text of a RUN.toml: keys that were set with their source, everything else as comments, so
    /// that derived values stay derived.
    pub fn to_toml(&self) -> String {
        let settings = self.settings();
        let mut text = String::new();
        for section in SECTIONS.iter() {
            let blank = if text.is_empty() { "" } else { "\n" };
            text += &format!("{blank}[{}]\n", section.name);
            let of_section = |key: &str| key.strip_prefix(section.name)?.strip_prefix('.').map(str::to_owned);
            for Setting { key, value, origin } in &settings {
                let Some(name) = of_section(key) else { continue };
                let known = KEYS.iter().find(|known| known.name == key);
                let follows = known.and_then(|known| known.rules.when_absent).unwrap_or("default");
                text += &match toml_value(value) {
                    None => format!("# {name} is not set: {follows}\n"),
                    Some(value) if *origin == Origin::Default => format!("# {name} = {value}  # {follows}\n"),
                    Some(value) => format!("{name} = {value}  # {origin}\n"),
                };
            }
        }
        text
    }

    /// Returns [`RunConfig::settings`] in the form of `run.json`, which [`RunConfig::recorded`] reads.
    pub fn recorded_settings(&self) -> Vec<Value> {
        let record = |Setting { key, value, origin }: Setting| json!({ "key": key, "value": value, "origin": origin.to_string() });
        self.settings().into_iter().map(record).collect()
    }
}

/// Returns a value as TOML on one line; `None` if TOML cannot express it.
pub(crate) fn toml_value(value: &Value) -> Option<String> {
    Some(match value {
        Value::Null => return None,
        Value::Array(values) => {
            let values: Option<Vec<String>> = values.iter().map(toml_value).collect();
            format!("[{}]", values?.join(", "))
        }
        Value::Object(table) => {
            let entry = |(key, value): (&String, &Value)| {
                Some(format!("{} = {}", toml_text(key), toml_value(value)?))
            };
            let entries: Vec<String> = table.iter().filter_map(entry).collect();
            format!("{{ {} }}", entries.join(", "))
        }
        Value::String(text) => toml_text(text),
        other => other.to_string(),
    })
}

/// Returns a quoted TOML string.
fn toml_text(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

/// Returns the leaves of a stored configuration that affect the losses, by dotted name; values that are not set are left out.
fn deciding_values(json: &Value) -> BTreeMap<String, Value> {
    let mut leaves = BTreeMap::new();
    collect_leaves("", json, &mut leaves);
    leaves.retain(|name, value| {
        // A key of [model] that is not in the table is an override, which affects the losses.
        let of_key = KEYS.iter().find(|key| key.name == name).map(|key| key.rules.defines_numbers);
        let of_rest = || name.starts_with("model.") || name == "derived.stable_steps";
        !value.is_null() && of_key.unwrap_or_else(of_rest)
    });
    leaves
}

fn collect_leaves(name: &str, value: &Value, leaves: &mut BTreeMap<String, Value>) {
    let is_key = || KEYS.iter().any(|key| key.name == name);
    let Some(table) = value.as_object().filter(|_| !is_key()) else {
        leaves.insert(name.to_owned(), value.clone());
        return;
    };
    for (key, value) in table {
        let name = if name.is_empty() { key.clone() } else { format!("{name}.{key}") };
        collect_leaves(&name, value, leaves);
    }
}
