//! Generation settings of a model, from its `generation_config.json`.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value};

use crate::InferError;

/// The supported keys of a `generation_config.json`; absent ones are `None`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GenerationConfig {
    /// Tokens that end a text; they override those of `config.json`.
    pub end: Option<Vec<u32>>,
    /// True if tokens are sampled, false if the most likely one is taken (greedy).
    pub samples: Option<bool>,
    /// Divisor of the logits.
    pub temperature: Option<f32>,
    /// Number of most likely tokens to sample from.
    pub top_k: Option<usize>,
    /// Probability mass of the most likely tokens to sample from (nucleus sampling).
    pub top_p: Option<f32>,
    /// Least probability of a token, as a factor on that of the most likely one.
    pub min_p: Option<f32>,
    /// Divisor of the positive logits of tokens in the prompt or the output.
    pub repetition_penalty: Option<f32>,
    /// Number of beams of a beam search.
    pub num_beams: Option<usize>,
    /// Exponent of the length by which the log-probability of a beam is divided.
    pub length_penalty: Option<f32>,
    /// True ends a beam search with the first complete texts.
    pub early_stopping: Option<bool>,
    /// Largest number of new tokens.
    pub max_new_tokens: Option<usize>,
    /// Largest number of tokens, those of the prompt included.
    pub max_length: Option<usize>,
    /// Keys that would change the text and are not supported, with their values.
    pub ignored: Vec<String>,
}

/// Keys that change the text and are not supported, with their neutral values.
const UNSUPPORTED: [(&str, f64); 5] = [
    ("no_repeat_ngram_size", 0.0),
    ("penalty_alpha", 0.0),
    ("typical_p", 1.0),
    ("epsilon_cutoff", 0.0),
    ("eta_cutoff", 0.0),
];

impl GenerationConfig {
    /// Reads the file at `path`.
    ///
    /// # Errors
    /// If the file cannot be read or is not a JSON object, or if a key has a value of the wrong type.
    pub fn read(path: &Path) -> Result<Self, InferError> {
        let bad = |problem| InferError::GenerationConfig { path: path.to_owned(), problem };
        let text = fs::read_to_string(path).map_err(|error| bad(error.to_string()))?;
        let table: Map<String, Value> =
            serde_json::from_str(&text).map_err(|error| bad(error.to_string()))?;
        Self::from_table(&table).map_err(bad)
    }

    fn from_table(table: &Map<String, Value>) -> Result<Self, String> {
        let given = |key: &str| table.get(key).filter(|value| !value.is_null());
        let wrong = |key: &str, value: &Value, allowed| format!("`{key}` is {value}; allowed: {allowed}");
        let number = |key: &str| {
            let read = |value: &Value| value.as_f64().ok_or_else(|| wrong(key, value, "a number"));
            given(key).map(read).transpose().map(|number| number.map(|number| number as f32))
        };
        let size = |key: &str| {
            let read =
                |value: &Value| value.as_u64().ok_or_else(|| wrong(key, value, "an integer, 0 or more"));
            given(key).map(read).transpose().map(|size| size.map(|size| size as usize))
        };
        let flag = |value: &Value| value.as_bool().ok_or_else(|| wrong("do_sample", value, "true or false"));
        let idle = |key: &str, idle: f64| given(key).filter(|value| value.as_f64() != Some(idle));
        let ignored = UNSUPPORTED
            .iter()
            .filter_map(|(key, neutral)| idle(key, *neutral).map(|value| format!("{key} = {value}")));
        Ok(Self {
            end: given("eos_token_id").map(token_ids).transpose()?,
            samples: given("do_sample").map(flag).transpose()?,
            temperature: number("temperature")?,
            top_k: size("top_k")?,
            top_p: number("top_p")?,
            min_p: number("min_p")?,
            num_beams: size("num_beams")?,
            length_penalty: number("length_penalty")?,
            // The third value, "never", is not supported.
            early_stopping: given("early_stopping").and_then(Value::as_bool),
            repetition_penalty: number("repetition_penalty")?,
            max_new_tokens: size("max_new_tokens")?,
            max_length: size("max_length")?,
            ignored: ignored.collect(),
        })
    }
}

/// Reads an id or a list of ids.
fn token_ids(value: &Value) -> Result<Vec<u32>, String> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    let ids = match value {
        Value::Array(ids) => ids.iter().map(id).collect(),
        one => id(one).map(|id| vec![id]),
    };
    ids.ok_or_else(|| format!("`eos_token_id` is {value}; allowed: a token id or a list of them"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: Value) -> Result<GenerationConfig, String> {
        GenerationConfig::from_table(value.as_object().expect("a table"))
    }

    #[test]
    fn keys_are_read_and_what_is_not_supported_is_named() {
        let config = read(json!({
            "eos_token_id": [128_001, 128_009], "do_sample": true, "temperature": 0.6, "top_k": null, "top_p": 0.9,
            "max_new_tokens": 40, "repetition_penalty": 1.05, "num_beams": 1, "typical_p": 0.9, "transformers_version": "4.44.0",
        }));
        let expected = GenerationConfig {
            end: Some(vec![128_001, 128_009]),
            samples: Some(true),
            temperature: Some(0.6),
            top_p: Some(0.9),
            max_new_tokens: Some(40),
            repetition_penalty: Some(1.05),
            num_beams: Some(1),
            ignored: vec!["typical_p = 0.9".to_owned()],
            ..GenerationConfig::default()
        };
        assert_eq!(config, Ok(expected));
        assert_eq!(read(json!({"eos_token_id": 2})).map(|config| config.end), Ok(Some(vec![2])));
    }

    #[test]
    fn values_of_another_type_are_refused_with_their_key() {
        for (value, key) in [
            (json!({"eos_token_id": "</s>"}), "eos_token_id"),
            (json!({"eos_token_id": [1, -1]}), "eos_token_id"),
            (json!({"temperature": "hot"}), "temperature"),
            (json!({"top_k": 1.5}), "top_k"),
            (json!({"do_sample": 1}), "do_sample"),
        ] {
            assert!(read(value).expect_err(key).contains(key), "{key}");
        }
    }
}
