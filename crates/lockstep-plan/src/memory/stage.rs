//! Which part of a model a rank of a pipeline has, and how many micro-batches are in it at once: read off its list of actions.

use std::ops::Range;

use crate::schedule::Schedule;
use crate::{BufferUnit, ParameterId, ParameterRecord};

/// A stage of a rank, from the model's first layer on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageMemory {
    /// The units.
    pub units: Range<usize>,
    /// Micro-batches that are in it at once.
    pub slots: usize,
    /// Whether the gradients of weights may come later than those of inputs.
    pub splits_backward: bool,
}

impl StageMemory {
    /// The one stage of a model of `units` units that no pipeline cuts.
    pub fn whole(units: usize) -> Self {
        Self { units: 0..units, slots: 1, splits_backward: false }
    }

    /// The stages of `rank`; `units` says which those of every stage are.
    pub fn of_rank(schedule: &Schedule, units: &[Range<usize>], rank: usize) -> Vec<Self> {
        let stage = |stage: usize| Self {
            units: units[stage].clone(),
            slots: schedule.slots(stage),
            splits_backward: schedule.splits_backward(stage),
        };
        schedule.stages_of(rank).map(stage).collect()
    }

    /// Buffers for gradients of the input, which are written while the last one may still be on its way.
    pub fn outboxes(&self) -> usize {
        if self.units.start > 0 { self.slots.max(2) } else { 0 }
    }
}

/// A table that the first and the last unit share, on one of the ranks that have them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedTable {
    /// The table of the embedding.
    pub id: ParameterId,
    /// Whether it is the output layer that is here.
    pub is_copy: bool,
}

impl SharedTable {
    /// Finds the table that a tied output layer of `records` shares with an embedding on another rank, where one of both is
    /// here. If that is the output layer, the table counts as of its unit.
    pub fn of(records: &mut [ParameterRecord], is_here: &[bool]) -> Option<Self> {
        let tied = |record: &ParameterRecord| Some((record.unit, record.tie?));
        let (unit, id) = records.iter().find_map(tied)?;
        match (is_here[records[id.0].unit], is_here[unit]) {
            (true, false) => Some(Self { id, is_copy: false }),
            (false, true) => {
                let buffer = records.iter().find(|record| record.unit == unit).map(|record| record.buffer);
                records[id.0].unit = unit;
                records[id.0].buffer = buffer.unwrap_or(BufferUnit::alone(unit));
                Some(Self { id, is_copy: true })
            }
            _ => None,
        }
    }
}
