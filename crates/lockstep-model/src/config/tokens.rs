//! Ids of a model's special tokens.

use serde_json::{Map, Value, json};

use super::reader::Reader;

/// Ids of special tokens. They steer generation; the forward pass does not use them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SpecialTokens {
    /// Token at the beginning of a text (`bos_token_id`).
    pub beginning: Option<u32>,
    /// Tokens that end a text (`eos_token_id`).
    pub end: Vec<u32>,
    /// Token that pads a batch (`pad_token_id`).
    pub padding: Option<u32>,
}

impl SpecialTokens {
    pub(super) fn read(reader: &mut Reader<'_>) -> Self {
        Self {
            beginning: reader.token("bos_token_id"),
            end: reader.tokens("eos_token_id"),
            padding: reader.token("pad_token_id"),
        }
    }

    /// Writes absent ids as `null`: an absent key would bring transformers' defaults back.
    pub(super) fn write(&self, out: &mut Map<String, Value>) {
        out.insert("bos_token_id".into(), json!(self.beginning));
        let end = match self.end[..] {
            [] => Value::Null,
            [single] => json!(single),
            _ => json!(self.end),
        };
        out.insert("eos_token_id".into(), end);
        out.insert("pad_token_id".into(), json!(self.padding));
    }
}
