//! Reading and writing of PEFT adapter directories: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! The adapted modules are derived from the tensor names, not from the patterns in the configuration, so every way in
//! which PEFT selects modules is supported. Options that would change the numbers and are not supported are rejected.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use lockstep_model::{Adapter, LoraConfig, LoraScaling, MAX_RANK, ModelConfig};
use serde_json::{Map, Value, json};

use crate::{
    CheckpointError,
    files::{open_regular, read_limited},
    safetensors::SafetensorsFile,
};

pub(crate) const CONFIG_FILE: &str = "adapter_config.json";
pub(crate) const WEIGHTS_FILE: &str = "adapter_model.safetensors";
/// Prefix of the model's module names in PEFT.
pub(crate) const PREFIX: &str = "base_model.model.";
/// Maximum size of an `adapter_config.json`; published ones have about a kilobyte.
const LARGEST_CONFIG_BYTES: u64 = 1 << 20;

/// Maximum `lora_alpha`, which keeps the scale within f32. Published values are a few hundred.
const LARGEST_ALPHA: f64 = 1e9;

/// PEFT options that change the numbers, with the values that turn them off.
const NEUTRAL: [(&str, &[Neutral]); 16] = [
    ("bias", &[Neutral::Text("none")]),
    ("use_dora", &[Neutral::False]),
    ("use_qalora", &[Neutral::False]),
    ("lora_bias", &[Neutral::False]),
    ("rank_pattern", &[Neutral::Empty]),
    ("alpha_pattern", &[Neutral::Empty]),
    ("modules_to_save", &[Neutral::Empty]),
    ("trainable_token_indices", &[Neutral::Empty]),
    ("target_parameters", &[Neutral::Empty]),
    ("layer_replication", &[Neutral::Empty]),
    ("alora_invocation_tokens", &[Neutral::Empty]),
    ("arrow_config", &[Neutral::Empty]),
    ("kasa_config", &[Neutral::Empty]),
    ("monteclora_config", &[Neutral::Empty]),
    ("velora_config", &[Neutral::Empty]),
    ("use_bdlora", &[Neutral::False]),
];

/// Value that turns an option off; so do null and an absent key.
enum Neutral {
    False,
    Empty,
    Text(&'static str),
}

impl Neutral {
    fn is(&self, value: &Value) -> bool {
        match (self, value) {
            (_, Value::Null) | (Self::False, Value::Bool(false)) => true,
            (Self::Empty, Value::Array(items)) => items.is_empty(),
            (Self::Empty, Value::Object(fields)) => fields.is_empty(),
            (Self::Text(word), Value::String(text)) => word == text,
            _ => false,
        }
    }
}

/// PEFT adapter in memory.
#[derive(Debug)]
pub struct PeftAdapter {
    dir: PathBuf,
    adapter: Adapter,
    /// Values of each parameter, by name.
    values: BTreeMap<String, Vec<f32>>,
}

impl PeftAdapter {
    /// Reads the adapter in `dir` and checks that it fits `model`.
    ///
    /// # Errors
    /// If the adapter is of another model or kind, or a file is missing or damaged.
    pub fn open(dir: &Path, model: &ModelConfig) -> Result<Self, CheckpointError> {
        let refused = |reason: String| CheckpointError::Adapter { dir: dir.to_owned(), reason };
        let path = dir.join(CONFIG_FILE);
        let text = read_limited(open_regular(&path)?, &path, LARGEST_CONFIG_BYTES)?
            .ok_or_else(|| refused(format!("{CONFIG_FILE} is longer than {LARGEST_CONFIG_BYTES} bytes")))?;
        let config = parse_adapter_config(&text).map_err(refused)?;
        let file = SafetensorsFile::open(&dir.join(WEIGHTS_FILE))?;
        let module = |name: &str| Some(name.strip_prefix(PREFIX)?.strip_suffix(".lora_A.weight")?.to_owned());
        let targets: Vec<String> = file.names().filter_map(module).collect();
        if targets.is_empty() {
            return Err(refused(format!("{WEIGHTS_FILE} holds no {PREFIX}*.lora_A.weight")));
        }
        let another = |what: String| refused(format!("it is for another model: {what}"));
        let adapter = Adapter::new(LoraConfig { targets, ..config }, model)
            .map_err(|error| another(error.to_string()))?;
        let mut left: BTreeSet<&str> = file.names().collect();
        let mut values = BTreeMap::new();
        for tensor in adapter.tensors() {
            let name = format!("{PREFIX}{}", tensor.name);
            if !left.remove(name.as_str()) {
                return Err(another(format!("{name} is missing")));
            }
            let found = file.tensor(&name)?.shape;
            if found != tensor.shape {
                return Err(another(format!("{name} is {found:?}, the model needs {:?}", tensor.shape)));
            }
            let mut stored = vec![0.0; tensor.shape.iter().product()];
            file.read_f32_at(&name, 0, &mut stored)?;
            let mut rest = stored.as_slice();
            for (parameter, elements) in &tensor.parameters {
                let (own, later) = rest.split_at(*elements);
                values.insert(parameter.clone(), own.to_vec());
                rest = later;
            }
        }
        match left.first() {
            Some(name) => Err(another(format!("{name} has no place in it"))),
            None => Ok(Self { dir: dir.to_owned(), adapter, values }),
        }
    }

    /// Returns the adapter's configuration and targets.
    pub fn adapter(&self) -> &Adapter {
        &self.adapter
    }

    /// Returns the directory of the adapter.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Returns the adapter's parameters by name.
    pub fn parameters(&self) -> impl Iterator<Item = (&str, &[f32])> {
        self.values.iter().map(|(name, values)| (name.as_str(), values.as_slice()))
    }

    pub(crate) fn parameter(&self, name: &str) -> Option<&[f32]> {
        self.values.get(name).map(Vec::as_slice)
    }
}

/// Parses an `adapter_config.json`; leaves the targets empty.
///
/// # Errors
/// If the text is not valid JSON, or a value is invalid or not supported; the message says which.
pub fn parse_adapter_config(text: &[u8]) -> Result<LoraConfig, String> {
    let table: Map<String, Value> =
        serde_json::from_slice(text).map_err(|error| format!("{CONFIG_FILE}: {error}"))?;
    let get = |key: &str| table.get(key).unwrap_or(&Value::Null);
    if get("peft_type").as_str() != Some("LORA") {
        return Err(format!("{CONFIG_FILE}: peft_type is {}, supported is \"LORA\"", get("peft_type")));
    }
    for (key, neutral) in NEUTRAL {
        let value = get(key);
        if !neutral.iter().any(|neutral| neutral.is(value)) {
            let value: String = value.to_string().chars().take(60).collect();
            return Err(format!("{CONFIG_FILE}: {key} = {value} is not supported"));
        }
    }
    let number = |key: &str| match get(key) {
        Value::Null => Ok(0.0),
        value => value.as_f64().ok_or_else(|| format!("{CONFIG_FILE}: {key} is {value}, not a number")),
    };
    let rank = get("r").as_u64().and_then(|rank| usize::try_from(rank).ok()).unwrap_or(0);
    let (alpha, dropout) = (number("lora_alpha")?, number("lora_dropout")?);
    if !(1..=MAX_RANK).contains(&rank) {
        return Err(format!("{CONFIG_FILE}: r is {}, allowed is 1 to {MAX_RANK}", get("r")));
    }
    if !(alpha > 0.0 && alpha <= LARGEST_ALPHA && (0.0..1.0).contains(&dropout)) {
        return Err(format!(
            "{CONFIG_FILE}: lora_alpha = {alpha} and lora_dropout = {dropout} make no adapter"
        ));
    }
    let scaling = match get("use_rslora") {
        Value::Bool(true) => LoraScaling::RankStabilized,
        Value::Bool(false) | Value::Null => LoraScaling::Standard,
        other => return Err(format!("{CONFIG_FILE}: use_rslora is {other}, not true or false")),
    };
    Ok(LoraConfig { rank, alpha, dropout, scaling, targets: Vec::new() })
}

/// Returns the text of the `adapter_config.json` for an adapter of `model`, whose directory is `base`.
pub(crate) fn config_text(adapter: &Adapter, model: &ModelConfig, base: &Path) -> String {
    let LoraConfig { rank, alpha, dropout, scaling, .. } = adapter.config();
    // PEFT writes integers.
    let alpha = if alpha.fract() == 0.0 { json!(*alpha as u64) } else { json!(alpha) };
    let config = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "use_rslora": *scaling == LoraScaling::RankStabilized,
        "target_modules": adapter.target_modules(model),
        "fan_in_fan_out": adapter.fan_in_fan_out(),
        "bias": "none",
        "use_dora": false,
        "init_lora_weights": true,
        "inference_mode": true,
        "modules_to_save": null,
        "rank_pattern": {},
        "alpha_pattern": {},
    });
    serde_json::to_string_pretty(&config).unwrap_or_default() + "\n"
}
