//! Means of a model's losses and metrics by name, and the unit in which a run counts what it trains on.

use std::sync::Arc;

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

/// Unit of a run's progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CountUnit {
    /// Tokens of sequences.
    #[default]
    Tokens,
    /// Samples, such as images, of a model without tokens.
    Samples,
}

impl CountUnit {
    /// Returns the plural, in keys and messages.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Tokens => "tokens",
            Self::Samples => "samples",
        }
    }
}

/// Amount that a run has trained on; written as `tokens`, `tokens_seen` and `tokens_per_s`, or as the same of samples.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Amount {
    /// Unit of the numbers.
    pub unit: CountUnit,
    /// Amount of one step, over all ranks.
    pub of_step: u64,
    /// Amount of all steps up to this one.
    pub seen: u64,
    /// Amount of the step divided by its time, per second.
    pub per_s: f64,
}

impl Serialize for Amount {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let [of_step, seen, per_s] = match self.unit {
            CountUnit::Tokens => ["tokens", "tokens_seen", "tokens_per_s"],
            CountUnit::Samples => ["samples", "samples_seen", "samples_per_s"],
        };
        let mut map = serializer.serialize_map(Some(3))?;
        map.serialize_entry(of_step, &self.of_step)?;
        map.serialize_entry(seen, &self.seen)?;
        map.serialize_entry(per_s, &self.per_s)?;
        map.end()
    }
}

/// Means of losses or metrics by name, in the order of the model.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Means(pub Vec<(Arc<str>, f64)>);

impl Means {
    /// Returns true if there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the names with their means.
    pub fn iter(&self) -> impl Iterator<Item = (&str, f64)> {
        self.0.iter().map(|(name, mean)| (&**name, *mean))
    }
}

impl Serialize for Means {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, mean) in self.iter() {
            map.serialize_entry(name, &mean)?;
        }
        map.end()
    }
}
