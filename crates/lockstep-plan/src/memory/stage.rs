//! Units of a rank's pipeline stages and their micro-batches in flight, read from its action list.

use std::ops::Range;

use crate::schedule::Schedule;
use crate::{BufferUnit, ParameterId, ParameterRecord};

/// Units of a pipeline stage, and its micro-batches in flight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageMemory {
    /// Range of units.
    pub units: Range<usize>,
    /// Slots: maximum number of micro-batches in flight in the stage.
    pub slots: usize,
    /// True if any backward is split, so that weight gradients may come later than input gradients.
    pub splits_backward: bool,
}

impl StageMemory {
    /// Returns the only stage of a model of `units` units without pipeline parallelism.
    pub fn whole(units: usize) -> Self {
        Self { units: 0..units, slots: 1, splits_backward: false }
    }

    /// Returns the stages of `rank`; `units` are the unit ranges of all stages of the pipeline.
    pub fn of_rank(schedule: &Schedule, units: &[Range<usize>], rank: usize) -> Vec<Self> {
        let stage = |stage: usize| Self {
            units: units[stage].clone(),
            slots: schedule.slots(stage),
            splits_backward: schedule.splits_backward(stage),
        };
        schedule.stages_of(rank).map(stage).collect()
    }

    /// Returns the number of send buffers for input gradients; 0 for the first stage. At least two, so that one can be written while the
    /// last is still in flight.
    pub fn send_buffers(&self) -> usize {
        if self.units.start > 0 { self.slots.max(2) } else { 0 }
    }
}

/// A table that the first and the last unit of a pipeline share (tied embeddings), as seen by one of their ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedTable {
    /// Table of the embedding.
    pub id: ParameterId,
    /// True if this rank has the output layer and not the embedding.
    pub is_copy: bool,
}

impl SharedTable {
    /// Finds the table of a tied output layer whose embedding is on another rank; `None` if both are on this rank or neither is. If this
    /// rank has the output layer, the table's record moves to the output layer's unit.
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
