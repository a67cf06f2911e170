//! Wrapping: the grouping of units into flat buffers. A buffer is the unit of gradient reductions and parameter gathers, as in PyTorch's
//! FSDP, whose policies are by size and by name as well.
//!
//! The smallest groups are the embedding, each block and the head, since each is replayed as a whole. Small groups make small messages;
//! over a network it may pay to combine several consecutive units.
//!
//! ```text
//! units         embedding  block 0  block 1  block 2  block 3  head
//! first unit    0          1        1        3        3        5        of the buffer, with two blocks each
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{BufferUnit, ParameterRecord, describes};

/// Wrapping policy: which consecutive units share a flat buffer.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub enum Wrap {
    /// One buffer per unit.
    #[default]
    Block,
    /// Consecutive units are combined until they have this many parameters.
    AtLeast(usize),
    /// Consecutive units are combined if one pattern matches the names of all their parameters; `*` stands for any characters.
    Named(Vec<String>),
}

/// Serialized form of [`Wrap`].
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(untagged)]
enum Written {
    Word(String),
    // A map rather than a struct: serde would read a struct from a list as well.
    BySize(BTreeMap<String, usize>),
    ByName(Vec<String>),
}

const SIZE_KEY: &str = "min_parameters";

/// Error in a wrapping policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WrapError {
    /// The word is not `block`.
    #[error("{found:?} is no policy")]
    Word {
        /// Word that was found.
        found: String,
    },
    /// The table has a key other than `min_parameters`, or more than one.
    #[error("the table has no key but {SIZE_KEY}")]
    Key,
    /// The minimum size is 0.
    #[error("min_parameters = 0 is less than any unit has")]
    NoSize,
    /// The list of patterns is empty.
    #[error("the list of patterns is empty")]
    NoPattern,
}

impl TryFrom<Written> for Wrap {
    type Error = WrapError;

    fn try_from(written: Written) -> Result<Self, WrapError> {
        match written {
            Written::Word(word) if word == "block" => Ok(Self::Block),
            Written::Word(found) => Err(WrapError::Word { found }),
            Written::BySize(table) => match (table.get(SIZE_KEY), table.len()) {
                (Some(0), 1) => Err(WrapError::NoSize),
                (Some(min_parameters), 1) => Ok(Self::AtLeast(*min_parameters)),
                _ => Err(WrapError::Key),
            },
            Written::ByName(patterns) if patterns.is_empty() => Err(WrapError::NoPattern),
            Written::ByName(patterns) => Ok(Self::Named(patterns)),
        }
    }
}

impl From<Wrap> for Written {
    fn from(wrap: Wrap) -> Self {
        match wrap {
            Wrap::Block => Self::Word("block".to_owned()),
            Wrap::AtLeast(least) => Self::BySize(BTreeMap::from([(SIZE_KEY.to_owned(), least)])),
            Wrap::Named(patterns) => Self::ByName(patterns),
        }
    }
}

impl fmt::Display for Wrap {
    /// Writes the policy as the value of a setting.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Block => f.write_str("block"),
            Self::AtLeast(least) => write!(f, "{{ {SIZE_KEY} = {least} }}"),
            Self::Named(patterns) => write!(f, "{patterns:?}"),
        }
    }
}

impl Wrap {
    /// Assigns the buffer of each record by the policy. `stages` are the unit ranges of this rank's stages; no buffer crosses a border
    /// between them. Units outside them have a buffer of their own.
    pub fn apply<'s>(&self, records: &mut [ParameterRecord], stages: impl Iterator<Item = &'s Range<usize>>) {
        let units = records.iter().map(|record| record.unit + 1).max().unwrap_or(0);
        let mut is_joined = vec![false; units];
        for stage in stages {
            let stage = stage.start..stage.end.min(units);
            match self {
                Self::Block => {}
                Self::AtLeast(parameters) => join_by_size(records, stage, *parameters, &mut is_joined),
                Self::Named(patterns) => join_by_name(records, stage, patterns, &mut is_joined),
            }
        }
        // The backward pass ends with the first trained unit, so that unit starts a buffer.
        let trained = records.iter().filter(|record| record.trainable).map(|record| record.unit);
        if let Some(first) = trained.min() {
            is_joined[first] = false;
        }
        let mut buffers: Vec<BufferUnit> = Vec::with_capacity(units);
        for (unit, is_joined) in is_joined.into_iter().enumerate() {
            let buffer = match buffers.last() {
                Some(last) if is_joined => *last,
                last => BufferUnit { first: unit, number: last.map_or(0, |last| last.number + 1) },
            };
            buffers.push(buffer);
        }
        for record in records {
            record.buffer = buffers[record.unit];
        }
    }
}

/// Joins each unit of a stage to the buffer before it until that buffer has `least` parameters.
fn join_by_size(records: &[ParameterRecord], stage: Range<usize>, least: usize, is_joined: &mut [bool]) {
    let size_of = |unit: usize| -> usize {
        let own = records.iter().filter(|record| record.unit == unit && record.tie.is_none());
        own.map(ParameterRecord::local_elements).sum()
    };
    let mut size = None;
    for unit in stage {
        is_joined[unit] = size.is_some_and(|size| size < least);
        size = Some(size_of(unit) + size.filter(|_| is_joined[unit]).unwrap_or(0));
    }
}

/// Joins each unit of a stage to the one before it if one pattern matches both.
fn join_by_name(
    records: &[ParameterRecord],
    stage: Range<usize>,
    patterns: &[String],
    is_joined: &mut [bool],
) {
    let describes_all = |pattern: &String, unit: usize| {
        let mut of_unit = records.iter().filter(|record| record.unit == unit).peekable();
        of_unit.peek().is_some() && of_unit.all(|record| describes(pattern, &record.name))
    };
    let pattern_of = |unit: usize| patterns.iter().position(|pattern| describes_all(pattern, unit));
    let mut before = None;
    for unit in stage {
        let pattern = pattern_of(unit);
        is_joined[unit] = pattern.is_some() && pattern == before;
        before = pattern;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Initializer, ParameterId, Share};

    /// An embedding, four blocks of two parameters and a head that is tied to the embedding.
    fn records() -> Vec<ParameterRecord> {
        let record = |name: String, unit: usize, elements: usize, tie: Option<ParameterId>| ParameterRecord {
            name,
            shape: vec![elements],
            share: Share::default(),
            initializer: Initializer::Zeros,
            tie,
            unit,
            buffer: BufferUnit::alone(unit),
            trainable: true,
            block_format: None,
            decay: false,
            learning_rate_multiplier: 1.0,
        };
        let of_block = |block: usize| {
            ["attention", "mlp"].map(|part| record(format!("layers.{block}.{part}"), block + 1, 50, None))
        };
        let mut records = vec![record("embedding".to_owned(), 0, 1000, None)];
        records.extend((0..4).flat_map(of_block));
        records.push(record("norm".to_owned(), 5, 10, None));
        records.push(record("head".to_owned(), 5, 1000, Some(ParameterId(0))));
        records
    }

    /// Returns the first unit of each unit's buffer.
    fn firsts(wrap: &Wrap, stages: &[Range<usize>]) -> Vec<usize> {
        let mut records = records();
        wrap.apply(&mut records, stages.iter());
        let of_unit =
            |unit: usize| records.iter().find(|record| record.unit == unit).map(|record| record.buffer);
        let buffers: Vec<BufferUnit> = (0..6).filter_map(of_unit).collect();
        let is_counted = |pair: &[BufferUnit]| {
            pair[0] == pair[1]
                || (pair[1].number, pair[1].first > pair[0].first) == (pair[0].number + 1, true)
        };
        assert!(buffers.windows(2).all(is_counted), "{buffers:?}");
        buffers.into_iter().map(|buffer| buffer.first).collect()
    }

    #[test]
    fn units_stand_together_until_they_are_large_enough_or_while_a_pattern_describes_them() {
        let (whole, halves) = (std::slice::from_ref(&(0..6)), &[0..3, 3..6]);
        let named = |patterns: &[&str]| Wrap::Named(patterns.iter().map(|p| (*p).to_owned()).collect());
        assert_eq!(firsts(&Wrap::Block, whole), [0, 1, 2, 3, 4, 5]);
        assert_eq!(firsts(&Wrap::AtLeast(200), whole), [0, 1, 1, 3, 3, 5]);
        // A tied table counts once, and the remainder at the end is a buffer of its own.
        assert_eq!(firsts(&Wrap::AtLeast(201), whole), [0, 1, 1, 1, 4, 4]);
        assert_eq!(firsts(&Wrap::AtLeast(10_000), whole), [0; 6]);
        assert_eq!(firsts(&Wrap::AtLeast(10_000), halves), [0, 0, 0, 3, 3, 3]);
        assert_eq!(firsts(&named(&["layers.*"]), whole), [0, 1, 1, 1, 1, 5]);
        assert_eq!(firsts(&named(&["layers.0.*", "layers.*"]), halves), [0, 1, 2, 3, 3, 5]);
        let mut records = records();
        records.iter_mut().filter(|record| record.unit < 2).for_each(|record| record.trainable = false);
        named(&["layers.*"]).apply(&mut records, whole.iter());
        assert_eq!(records.iter().map(|record| record.buffer.first).max(), Some(5));
        assert!(records.iter().all(|record| !record.trainable || record.buffer.first >= 2));
        // A pattern that matches only a part of a block combines nothing.
        assert_eq!(firsts(&named(&["*mlp"]), whole), [0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn what_is_written_is_read() {
        let wraps = [Wrap::Block, Wrap::AtLeast(7), Wrap::Named(vec!["a.*".to_owned(), "b".to_owned()])];
        for wrap in wraps {
            let written = serde_json::to_string(&wrap).unwrap();
            assert_eq!(serde_json::from_str::<Wrap>(&written).unwrap(), wrap, "{written}");
        }
        for broken in ["\"blocks\"", "{\"min_parameters\": 0}", "{\"min_parameter\": 1}", "[]", "[1]", "3"] {
            assert!(serde_json::from_str::<Wrap>(broken).is_err(), "{broken}");
        }
    }
}
