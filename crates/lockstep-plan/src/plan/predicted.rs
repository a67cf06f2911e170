//! Predicted memory and step time of a plan, as stored in its file. Runs ignore them; a reader can compare them with the prediction for
//! the run at hand, which also depends on settings outside the plan.
//!
//! ```json
//! "predicted": { "memory": [
//!   { "ranks": "0-1,4", "bytes": { "parameters": 4096, "gradients": 4096, "optimizer": 8192 } },
//!   { "ranks": "2-3", "bytes": { "parameters": 2048, "gradients": 2048, "optimizer": 4096 } }
//! ] }
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use crate::{MemoryBytes, MemoryCategory};

/// Predicted memory and step time of a plan, for the run that it was made for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanPrediction {
    /// Booked memory of each rank; ranks with equal bytes share an entry.
    pub memory: Vec<RanksMemory>,
    /// Predicted step time; `None` if it was not predicted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<PlannedStep>,
}

/// Returns true if a field has its default, so that it is left out of the file.
pub(super) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Predicted step time on the cluster that the plan was made for. The parts are those of the rank that ends last, and add up to
/// `step_ms`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlannedStep {
    /// Name of the cluster.
    pub cluster: String,
    /// Duration of the whole step.
    pub step_ms: f64,
    /// Compute of micro-batches and of the optimizer step.
    pub compute_ms: f64,
    /// Exposed communication, the gradient reduction included.
    pub exposed_ms: f64,
    /// Pipeline bubble: waiting for other stages.
    pub bubble_ms: f64,
    /// Exposed transfers of offloaded state to and from host memory.
    #[serde(default, skip_serializing_if = "is_default")]
    pub host_ms: f64,
    /// Exposed transfers of offloaded state to and from disk.
    #[serde(default, skip_serializing_if = "is_default")]
    pub disk_ms: f64,
    /// Throughput of all ranks together, in tokens per second.
    pub tokens_per_s: f64,
    /// Model FLOPs utilization, from 0 to 1; `None` if the device's peak is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// Price in dollars of 10⁹ tokens; `None` if the cluster has no price.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price_per_billion_tokens: Option<f64>,
}

/// Booked memory of a set of ranks with equal bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RanksMemory {
    /// Ranks that the entry holds for.
    pub ranks: RankList,
    /// Booked bytes of each of these ranks; in a file, an omitted category is 0.
    #[serde(with = "by_category")]
    pub bytes: MemoryBytes,
}

impl PlanPrediction {
    /// Returns the predicted bytes of a rank; `None` if no entry names it.
    pub fn of_rank(&self, rank: usize) -> Option<MemoryBytes> {
        self.memory.iter().find(|memory| memory.ranks.contains(rank)).map(|memory| memory.bytes)
    }

    /// Returns the first rank of each range that overlaps an earlier one.
    pub(super) fn repeated(&self) -> Vec<usize> {
        let mut ranges: Vec<&RangeInclusive<usize>> =
            self.memory.iter().flat_map(|memory| &memory.ranks.0).collect();
        ranges.sort_by_key(|range| *range.start());
        let mut next = 0;
        let mut repeated = Vec::new();
        for (index, range) in ranges.into_iter().enumerate() {
            if index > 0 && *range.start() <= next {
                repeated.push(*range.start());
            }
            next = next.max(*range.end());
        }
        repeated
    }
}

/// Set of ranks as ascending ranges: `0-3,6`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RankList(Vec<RangeInclusive<usize>>);

impl RankList {
    /// Returns true if the set has `rank`.
    pub fn contains(&self, rank: usize) -> bool {
        self.0.iter().any(|range| range.contains(&rank))
    }
}

/// Builds the set from ranks in ascending order.
impl FromIterator<usize> for RankList {
    fn from_iter<T: IntoIterator<Item = usize>>(ranks: T) -> Self {
        let mut ranges: Vec<RangeInclusive<usize>> = Vec::new();
        for rank in ranks {
            match ranges.last_mut() {
                Some(range) if range.end().checked_add(1) == Some(rank) => *range = *range.start()..=rank,
                _ => ranges.push(rank..=rank),
            }
        }
        Self(ranges)
    }
}

impl fmt::Display for RankList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, range) in self.0.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            match (range.start(), range.end()) {
                (start, end) if start == end => write!(f, "{comma}{start}")?,
                (start, end) => write!(f, "{comma}{start}-{end}")?,
            }
        }
        Ok(())
    }
}

impl From<RankList> for String {
    fn from(list: RankList) -> Self {
        list.to_string()
    }
}

impl TryFrom<String> for RankList {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let range = |part: &str| {
            let (start, end) = part.split_once('-').unwrap_or((part, part));
            // `usize` parses a leading "+", which is not allowed here.
            let number =
                |text: &str| text.parse().ok().filter(|_| text.starts_with(|c: char| c.is_ascii_digit()));
            let range: RangeInclusive<usize> = number(start)?..=number(end)?;
            Some(range).filter(|range| !range.is_empty())
        };
        let ranges: Option<Vec<_>> = text.split(',').map(range).collect();
        let ascends = |ranges: &Vec<RangeInclusive<usize>>| {
            ranges.windows(2).all(|pair| pair[0].end() < pair[1].start())
        };
        ranges.filter(ascends).map(Self).ok_or_else(|| {
            format!("the ranks {text:?} are no ascending list of numbers and ranges, such as \"0-3,6\"")
        })
    }
}

/// Serializes [`MemoryBytes`] as a map by category name, without [`MemoryCategory::Cached`], which is not predicted.
mod by_category {
    use serde::{Deserializer, Serializer, de::Error};

    use super::{BTreeMap, Deserialize, MemoryBytes, MemoryCategory};

    pub(super) fn serialize<S: Serializer>(bytes: &MemoryBytes, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(bytes.entries().filter(|(category, _)| *category != MemoryCategory::Cached))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<MemoryBytes, D::Error> {
        let mut bytes = MemoryBytes::default();
        for (category, number) in BTreeMap::<MemoryCategory, usize>::deserialize(deserializer)? {
            if category == MemoryCategory::Cached {
                return Err(D::Error::custom("what is cached is not predicted"));
            }
            bytes[category] = number;
        }
        Ok(bytes)
    }
}
