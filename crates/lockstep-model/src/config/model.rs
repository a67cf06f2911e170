//! The configuration of a model of any family.

use std::path::Path;

use lockstep_plan::DType;
use serde_json::{Map, Value, json};

use super::experts::ExpertsConfig;
use super::family::LlamaFamily;
use super::gpt2::{Gpt2Config, canonical_key};
use super::llama::LlamaConfig;
use super::reader::shorten;
use super::tokens::SpecialTokens;
use crate::error::{ConfigProblem, ModelError};

/// Evaluates an expression with the configuration of either family.
macro_rules! either {
    ($model:expr, $config:ident => $value:expr) => {
        match $model {
            ModelConfig::Gpt2($config) => $value,
            ModelConfig::Llama($config) => $value,
        }
    };
}

/// The configuration of a model of any supported family.
#[derive(Debug, Clone, PartialEq)]
pub enum ModelConfig {
    /// The GPT-2 family: `model_type` "gpt2".
    Gpt2(Gpt2Config),
    /// The Llama-like families: `model_type` "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe",
    /// "qwen3_moe" or "deepseek_v3".
    Llama(LlamaConfig),
}

/// Size limit of a `config.json` in bytes; real ones have a few kilobytes.
const LARGEST_FILE_BYTES: u64 = 4 << 20;

impl ModelConfig {
    /// Reads a `config.json`.
    ///
    /// # Errors
    /// If the file cannot be read or is too large, or as for [`ModelConfig::from_json_text`].
    pub fn from_file(path: &Path) -> Result<Self, ModelError> {
        let failed = |source| ModelError::Read { path: path.to_owned(), source };
        let bytes = std::fs::metadata(path).map_err(failed)?.len();
        if bytes > LARGEST_FILE_BYTES {
            let message = format!("it has {bytes} bytes, a config.json at most {LARGEST_FILE_BYTES}");
            return Err(failed(std::io::Error::new(std::io::ErrorKind::InvalidData, message)));
        }
        let text = std::fs::read_to_string(path).map_err(failed)?;
        Self::from_json_text(&text, &path.display().to_string())
    }

    /// Reads the text of a `config.json`; `origin` names it in errors.
    ///
    /// # Errors
    /// If the text is not a JSON object, or as for [`ModelConfig::from_table`].
    pub fn from_json_text(text: &str, origin: &str) -> Result<Self, ModelError> {
        match serde_json::from_str(text) {
            Ok(Value::Object(table)) => Self::from_table(&table, origin),
            Ok(other) => {
                let value = shorten(&other.to_string());
                let problem = ConfigProblem::WrongType { key: "(all)".into(), value, expected: "a table" };
                Err(ModelError::Config { origin: origin.to_owned(), problems: vec![problem] })
            }
            Err(source) => Err(ModelError::Json { origin: origin.to_owned(), source }),
        }
    }

    /// Reads a table with the keys of a `config.json`; `origin` names it in errors. Absent keys get transformers'
    /// defaults for the model type.
    ///
    /// # Errors
    /// If a key is unknown or has the wrong type, if an option would change the numbers and is not supported, or if
    /// [`ModelConfig::validate`] fails. The error lists every problem.
    pub fn from_table(table: &Map<String, Value>, origin: &str) -> Result<Self, ModelError> {
        let refused = |problems| ModelError::Config { origin: origin.to_owned(), problems };
        let family = |name: &Value| LlamaFamily::ALL.into_iter().find(|family| name == family.model_type());
        let (config, mut problems) = match table.get("model_type") {
            Some(name) if name == "gpt2" => {
                let (config, problems) = Gpt2Config::read(table);
                (Self::Gpt2(config), problems)
            }
            Some(name) => {
                let Some(family) = family(name) else {
                    return Err(refused(vec![ConfigProblem::Unsupported {
                        key: "model_type".into(),
                        value: shorten(&name.to_string()),
                        supported: model_types(),
                    }]));
                };
                let (config, problems) = LlamaConfig::read(family, table);
                (Self::Llama(config), problems)
            }
            None => {
                return Err(refused(vec![ConfigProblem::Missing {
                    key: "model_type".into(),
                    expected: format!("one of {}", model_types()),
                }]));
            }
        };
        // A default in place of an unreadable value could break rules that the file itself satisfies.
        let unreadable = problems.iter().any(|problem| {
            matches!(problem, ConfigProblem::WrongType { .. } | ConfigProblem::Missing { .. })
        });
        if !unreadable {
            problems.extend(config.problems());
        }
        if problems.is_empty() { Ok(config) } else { Err(refused(problems)) }
    }

    /// Returns this configuration with some keys of `config.json` overridden, as by `[model]` in a run file.
    ///
    /// Values derived from an overridden one are derived again: the head size from hidden size and heads, and the
    /// number of key/value heads from the heads if they were equal. RoPE's settings may be overridden in either form.
    ///
    /// # Errors
    /// If the result is invalid, as for [`ModelConfig::from_table`], or if `model_type` would change.
    pub fn with_overrides(&self, overrides: &Map<String, Value>, origin: &str) -> Result<Self, ModelError> {
        let mut table = self.table();
        if let Some(model_type) = overrides.get("model_type")
            && model_type.as_str() != Some(self.model_type())
        {
            let problem = ConfigProblem::Unsupported {
                key: "model_type".into(),
                value: shorten(&model_type.to_string()),
                supported: format!("\"{}\", the type of the model these keys belong to", self.model_type()),
            };
            return Err(ModelError::Config { origin: origin.to_owned(), problems: vec![problem] });
        }
        if let Self::Llama(config) = self {
            let heads_change = overrides.contains_key("num_attention_heads");
            let is_plain = config.latent.is_none();
            let width_changes = heads_change || overrides.contains_key("hidden_size");
            if is_plain && width_changes && config.num_attention_heads * config.head_dim == config.hidden_size
            {
                table.insert("head_dim".into(), Value::Null);
            }
            if heads_change && config.num_key_value_heads == config.num_attention_heads {
                table.insert("num_key_value_heads".into(), Value::Null);
            }
        }
        if let Some(rope) = overrides.get("rope_parameters") {
            table.remove("rope_scaling");
            if rope.get("rope_theta").is_some() {
                table.remove("rope_theta");
            }
        }
        for key in overrides.keys() {
            table.remove(self.canonical_key(key));
        }
        table.extend(overrides.iter().map(|(key, value)| (key.clone(), value.clone())));
        Self::from_table(&table, origin)
    }

    /// Checks all ranges and relations.
    ///
    /// # Errors
    /// If a check fails; the error lists every problem.
    pub fn validate(&self) -> Result<(), ModelError> {
        match self.problems() {
            problems if problems.is_empty() => Ok(()),
            problems => Err(ModelError::Config { origin: "the model's configuration".into(), problems }),
        }
    }

    /// Returns the contents of a `config.json` that transformers 4 and 5 both load, for weights stored as `dtype`. A
    /// GPT-2 without biases has `"bias": false`, which transformers ignores: see [`Gpt2Config::bias`].
    pub fn to_json(&self, dtype: DType) -> Value {
        let mut table = self.table();
        if let Self::Llama(config) = self {
            config.rope.write_form_5(&mut table);
        }
        table.insert("architectures".into(), json!([self.architecture()]));
        let torch_name = match dtype {
            DType::F32 => Some("float32"),
            DType::BF16 => Some("bfloat16"),
            DType::F16 => Some("float16"),
            DType::I32 | DType::U32 | DType::U8 => None,
        };
        if let Some(name) = torch_name {
            table.insert("torch_dtype".into(), json!(name));
        }
        Value::Object(table)
    }

    /// Returns the value of `model_type`.
    pub fn model_type(&self) -> &'static str {
        match self {
            Self::Gpt2(_) => "gpt2",
            Self::Llama(config) => config.family.model_type(),
        }
    }

    /// Number of tokens in the vocabulary.
    pub fn vocab_size(&self) -> usize {
        either!(self, config => config.vocab_size)
    }

    /// Width of the residual stream.
    pub fn hidden_size(&self) -> usize {
        either!(self, config => config.hidden_size)
    }

    /// Width of the feed-forward layers.
    pub fn intermediate_size(&self) -> usize {
        either!(self, config => config.intermediate_size)
    }

    /// Returns true if the model has multi-head latent attention.
    pub fn has_latent_attention(&self) -> bool {
        matches!(self, Self::Llama(LlamaConfig { latent: Some(_), .. }))
    }

    /// Returns the mixture-of-experts configuration; `None` for a dense model.
    pub fn experts(&self) -> Option<&ExpertsConfig> {
        match self {
            Self::Gpt2(_) => None,
            Self::Llama(config) => config.experts.as_deref(),
        }
    }

    /// Number of blocks.
    pub fn num_hidden_layers(&self) -> usize {
        either!(self, config => config.num_hidden_layers)
    }

    /// Number of query heads of a block.
    pub fn num_attention_heads(&self) -> usize {
        either!(self, config => config.num_attention_heads)
    }

    /// Number of key/value heads of a block; each serves `num_attention_heads / num_key_value_heads` query heads.
    pub fn num_key_value_heads(&self) -> usize {
        match self {
            Self::Gpt2(config) => config.num_attention_heads,
            Self::Llama(config) => config.num_key_value_heads,
        }
    }

    /// Number of elements of one head.
    pub fn head_dim(&self) -> usize {
        match self {
            Self::Gpt2(config) => config.head_dim(),
            Self::Llama(config) => config.head_dim,
        }
    }

    /// Length of the longest sequence, in tokens.
    pub fn max_position_embeddings(&self) -> usize {
        either!(self, config => config.max_position_embeddings)
    }

    /// Number of positions that a position sees, itself included; `None` means all before it.
    pub fn sliding_window(&self) -> Option<usize> {
        match self {
            Self::Gpt2(_) => None,
            Self::Llama(config) => config.sliding_window,
        }
    }

    /// Sequence length in tokens of the pretraining before the context was extended: the
    /// `original_max_position_embeddings` of scaled RoPE, else `max_position_embeddings`.
    pub fn pretraining_context(&self) -> usize {
        let original = match self {
            Self::Gpt2(_) => None,
            Self::Llama(config) => config.rope.scaling.original_context(),
        };
        original.unwrap_or(usize::MAX).min(self.max_position_embeddings())
    }

    /// Returns true if the output layer is tied to the embedding.
    pub fn tie_word_embeddings(&self) -> bool {
        either!(self, config => config.tie_word_embeddings)
    }

    /// Returns the special token ids.
    pub fn tokens(&self) -> &SpecialTokens {
        either!(self, config => &config.tokens)
    }

    /// Returns the class that transformers builds from this configuration.
    fn architecture(&self) -> &'static str {
        match self {
            Self::Gpt2(_) => "GPT2LMHeadModel",
            Self::Llama(config) => config.family.traits().architecture,
        }
    }

    /// Returns the table that [`ModelConfig::from_table`] reads back as this configuration, with RoPE in form 4.
    fn table(&self) -> Map<String, Value> {
        let mut table = either!(self, config => config.table());
        table.insert("model_type".into(), json!(self.model_type()));
        self.tokens().write(&mut table);
        table
    }

    /// Returns the key that [`ModelConfig::table`] uses for `key` or its alias.
    fn canonical_key<'a>(&self, key: &'a str) -> &'a str {
        match self {
            Self::Gpt2(_) => canonical_key(key),
            // transformers 5 writes `num_local_experts` for `num_experts`.
            Self::Llama(config) if key == "num_local_experts" => match config.family {
                LlamaFamily::Qwen2Moe | LlamaFamily::Qwen3Moe => "num_experts",
                _ => key,
            },
            Self::Llama(_) => key,
        }
    }

    fn problems(&self) -> Vec<ConfigProblem> {
        either!(self, config => config.problems())
    }
}

/// Returns the supported values of `model_type`, quoted.
fn model_types() -> String {
    let names = ["gpt2"].into_iter().chain(LlamaFamily::ALL.map(LlamaFamily::model_type));
    names.map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ")
}
