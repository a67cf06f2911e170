//! The configuration of a model of any family.

use std::any::Any;
use std::path::Path;
use std::sync::Arc;

use lockstep_plan::DType;
use lockstep_tensor::CacheShape;
use serde_json::{Map, Value, json};

use super::experts::ExpertsConfig;
use super::reader::shorten;
use super::tokens::SpecialTokens;
use crate::error::{ConfigProblem, ModelError};
use crate::model::Model;
use crate::registry::{model_types, reader};

/// The configuration of a model of any family: a handle of the [`Model`].
#[derive(Debug, Clone)]
pub struct ModelConfig(Arc<dyn Model>);

/// Two configurations are equal if their `config.json` files are.
impl PartialEq for ModelConfig {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.table() == other.table()
    }
}

impl<M: Model> From<M> for ModelConfig {
    fn from(model: M) -> Self {
        Self(Arc::new(model))
    }
}

/// Size limit of a `config.json` in bytes; real ones have a few kilobytes.
const LARGEST_FILE_BYTES: u64 = 4 << 20;

/// Returns true if `auto_map` names only modules that transformers has itself for this model type, such as
/// `modeling_falcon`. transformers then ignores it unless told to run the checkpoint's code.
fn names_own_modules(table: &Map<String, Value>) -> bool {
    let text = |value: Option<&Value>| value.and_then(Value::as_str).unwrap_or_default().to_owned();
    let model_type = text(table.get("model_type"));
    let own = ["configuration", "modeling"].map(|kind| format!("{kind}_{model_type}."));
    let is_own = |class: &Value| {
        let class = text(Some(class));
        let module = class.rsplit("--").next().unwrap_or_default();
        own.iter().any(|own| module.starts_with(own.as_str()))
    };
    table.get("auto_map").and_then(Value::as_object).is_some_and(|map| map.values().all(is_own))
}

impl ModelConfig {
    /// Returns the model.
    pub fn model(&self) -> &dyn Model {
        &*self.0
    }

    /// Returns the shared model, which a family's reader may return again.
    pub fn handle(&self) -> Arc<dyn Model> {
        Arc::clone(&self.0)
    }

    /// Returns the model as a `M`; `None` if it is of another type.
    pub fn get<M: Model>(&self) -> Option<&M> {
        let model: &dyn Any = &*self.0;
        model.downcast_ref()
    }

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
        let Some(name) = table.get("model_type") else {
            let expected = format!("one of {}", model_types());
            return Err(refused(vec![ConfigProblem::Missing { key: "model_type".into(), expected }]));
        };
        let Some(read) = name.as_str().and_then(reader) else {
            return Err(refused(vec![ConfigProblem::Unsupported {
                key: "model_type".into(),
                value: shorten(&name.to_string()),
                supported: model_types(),
            }]));
        };
        let (model, mut problems) = if names_own_modules(table) {
            let mut table = table.clone();
            table.remove("auto_map");
            read(&table)
        } else {
            read(table)
        };
        // A default in place of an unreadable value could break rules that the file itself satisfies.
        let unreadable = problems.iter().any(|problem| {
            matches!(problem, ConfigProblem::WrongType { .. } | ConfigProblem::Missing { .. })
        });
        if !unreadable {
            problems.extend(model.problems());
        }
        if problems.is_empty() { Ok(Self(model)) } else { Err(refused(problems)) }
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
        self.0.forget_derived(&mut table, overrides);
        if let Some(rope) = overrides.get("rope_parameters") {
            table.remove("rope_scaling");
            if rope.get("rope_theta").is_some() {
                table.remove("rope_theta");
            }
        }
        for key in overrides.keys() {
            table.remove(self.0.canonical_key(key));
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
    /// GPT-2 without biases has `"bias": false`, which transformers ignores: see [`Gpt2Config::bias`](crate::Gpt2Config::bias).
    pub fn to_json(&self, dtype: DType) -> Value {
        let mut table = self.table();
        self.0.finish_json(&mut table);
        if let Some(architecture) = self.0.architecture() {
            table.insert("architectures".into(), json!([architecture]));
        }
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
    pub fn model_type(&self) -> &str {
        self.0.model_type()
    }

    /// Number of tokens in the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.0.sizes().vocab
    }

    /// Width of the residual stream.
    pub fn hidden_size(&self) -> usize {
        self.0.sizes().hidden
    }

    /// Width of the feed-forward layers.
    pub fn intermediate_size(&self) -> usize {
        self.0.sizes().intermediate
    }

    /// Returns the mixture-of-experts configuration; `None` for a dense model.
    pub fn experts(&self) -> Option<&ExpertsConfig> {
        self.0.experts()
    }

    /// Number of layers: the blocks of a transformer.
    pub fn num_hidden_layers(&self) -> usize {
        self.0.sizes().layers
    }

    /// Number of query heads of a block.
    pub fn num_attention_heads(&self) -> usize {
        self.0.sizes().heads
    }

    /// Number of key/value heads of a block; each serves `num_attention_heads / num_key_value_heads` query heads.
    pub fn num_key_value_heads(&self) -> usize {
        self.0.sizes().key_value_heads
    }

    /// Shape of a layer's key-value cache on one rank.
    pub fn cache_shape(&self) -> CacheShape {
        self.0.sizes().cache_shape()
    }

    /// Number of elements of one head.
    pub fn head_dim(&self) -> usize {
        self.0.sizes().head_dim
    }

    /// Length of the longest sequence, in tokens.
    pub fn max_position_embeddings(&self) -> usize {
        self.0.sizes().positions
    }

    /// Number of positions that a position sees, itself included; `None` means all before it.
    pub fn sliding_window(&self) -> Option<usize> {
        self.0.sizes().window
    }

    /// Sequence length in tokens of the pretraining before the context was extended: the
    /// `original_max_position_embeddings` of scaled RoPE, else `max_position_embeddings`.
    pub fn pretraining_context(&self) -> usize {
        let sizes = self.0.sizes();
        sizes.original_positions.unwrap_or(usize::MAX).min(sizes.positions)
    }

    /// Returns true if parameters repeat others, as an output layer that is tied to the embedding does.
    pub fn tie_word_embeddings(&self) -> bool {
        !self.0.ties().is_empty()
    }

    /// Returns the special token ids.
    pub fn tokens(&self) -> &SpecialTokens {
        self.0.tokens()
    }

    /// Returns the longest sequence, in tokens, up to which the rows of a batch are not [long](lockstep_graph::Batch::long_rows); `None` if
    /// that makes no difference.
    pub fn short_context(&self) -> Option<usize> {
        self.0.short_context()
    }

    /// Returns true if training applies dropout.
    pub fn has_dropout(&self) -> bool {
        self.0.has_dropout()
    }

    /// Returns the model with all of its dropout probabilities set: those of transformers' family, which for the
    /// Llama-likes is attention's alone.
    #[must_use]
    pub fn with_dropout(&self, probability: f64) -> Self {
        self.0.with_dropout(probability).map_or_else(|| self.clone(), Self)
    }

    /// Returns the model without dropout.
    #[must_use]
    pub fn without_dropout(&self) -> Self {
        self.with_dropout(0.0)
    }

    /// Returns true if experts have a capacity in training, beyond which slots are dropped.
    pub fn has_capacity(&self) -> bool {
        self.experts().is_some_and(|experts| experts.capacity_factor.is_some())
    }

    /// Returns the model without expert capacity, so that no slots are dropped.
    #[must_use]
    pub fn without_capacity(&self) -> Self {
        self.0.without_capacity().map_or_else(|| self.clone(), Self)
    }

    /// Returns the table that [`ModelConfig::from_table`] reads back as this configuration, with RoPE in form 4.
    fn table(&self) -> Map<String, Value> {
        let mut table = self.0.table();
        table.insert("model_type".into(), json!(self.model_type()));
        // A model without a vocabulary reads no keys of tokens.
        if self.vocab_size() > 0 {
            self.tokens().write(&mut table);
        }
        table
    }

    fn problems(&self) -> Vec<ConfigProblem> {
        self.0.problems()
    }
}
