//! What a plan file says that the plan comes to: its `predicted`. No run follows it. Whoever reads the file can compare it with what
//! is predicted for the run at hand, which has settings that no plan has.
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

/// What was predicted of a plan, for the run that it was made for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanPrediction {
    /// What each rank books; ranks that book the same stand together.
    pub memory: Vec<RanksMemory>,
    /// What a step takes, and where.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<PlannedStep>,
}

/// What a step takes on the machines that a plan was made for. The parts are those of the rank that ends last, and add up to the step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlannedStep {
    /// The machines.
    pub cluster: String,
    /// From beginning to end.
    pub step_ms: f64,
    /// Work on micro-batches, and the update.
    pub compute_ms: f64,
    /// Waiting for exchanges, those of gradients included.
    pub exposed_ms: f64,
    /// Waiting for other stages of the pipeline.
    pub bubble_ms: f64,
    /// Waiting for offloaded state from host memory.
    #[serde(default, skip_serializing_if = "super::is_default")]
    pub host_ms: f64,
    /// Waiting for offloaded state from disk.
    #[serde(default, skip_serializing_if = "super::is_default")]
    pub disk_ms: f64,
    /// Tokens a second, of all ranks.
    pub tokens_per_s: f64,
    /// Model FLOP/s as a share of the peak; none where that is a guess.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// Dollars for 10⁹ tokens, if the machines have a price.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price_per_billion_tokens: Option<f64>,
}

/// What some ranks book, each of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RanksMemory {
    /// Which.
    pub ranks: RankList,
    /// Bytes; in a file, what is not said is 0.
    #[serde(with = "by_category")]
    pub bytes: MemoryBytes,
}

impl PlanPrediction {
    /// What it says of a rank, if it does.
    pub fn of_rank(&self, rank: usize) -> Option<MemoryBytes> {
        self.memory.iter().find(|memory| memory.ranks.contains(rank)).map(|memory| memory.bytes)
    }

    /// The ranks of which it says something more than once: the first of each such range.
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

/// Numbers of ranks as ranges, in ascending order: `0-3,6`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RankList(Vec<RangeInclusive<usize>>);

impl RankList {
    /// Whether a rank is one of them.
    pub fn contains(&self, rank: usize) -> bool {
        self.0.iter().any(|range| range.contains(&rank))
    }
}

/// Of ranks in ascending order.
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
            // A sign is none of a rank's number.
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

/// [`MemoryBytes`] as a map by the categories' names, without what nobody predicts.
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
