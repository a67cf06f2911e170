//! Problems of pipeline schedules, and their messages.

use std::fmt;

use super::{Action, Kind};
use crate::nearest::{Choices, lines};

/// All problems of a schedule, one per line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", lines(.0))]
pub struct ScheduleError(pub Vec<ScheduleProblem>);

/// A problem of a schedule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleProblem {
    /// There are no pipeline ranks.
    #[error("a schedule needs at least one rank")]
    NoRanks,
    /// The schedule would be unreasonably long.
    #[error("the schedule would have more than {most} forwards")]
    TooLong {
        /// Upper limit of forwards.
        most: usize,
    },
    /// The kind of schedule needs more micro-batches.
    #[error("{kind} on {ranks} pipeline ranks needs at least {minimum} micro-batches, not {micro_batches}")]
    TooFewMicroBatches {
        /// Kind of schedule.
        kind: Kind,
        /// Number of micro-batches that was given.
        micro_batches: usize,
        /// Number of pipeline ranks.
        ranks: usize,
        /// Smallest valid number of micro-batches.
        minimum: usize,
    },
    /// The number of micro-batches is not a multiple of the ranks.
    #[error(
        "{kind} takes micro-batches in groups of {ranks}, the pipeline ranks, and {micro_batches} are not a multiple; {nearest}"
    )]
    Indivisible {
        /// Kind of schedule.
        kind: Kind,
        /// Number of micro-batches that was given.
        micro_batches: usize,
        /// Number of pipeline ranks.
        ranks: usize,
        /// Nearest valid numbers of micro-batches.
        nearest: Choices,
    },
    /// The kind of schedule does not allow this number of chunks.
    #[error("{kind} cannot have {chunks} stages on each rank; {nearest}")]
    Chunks {
        /// Kind of schedule.
        kind: Kind,
        /// Number of chunks that was given.
        chunks: usize,
        /// Nearest valid number of chunks.
        nearest: Choices,
    },
    /// A cell of a CSV file is not a pass.
    #[error(
        "row {row}, cell {column}: {cell:?} is no pass; one is written STAGE, one of F, B, I and W, MICRO-BATCH, as in 1F0"
    )]
    BadCell {
        /// Row in the file, counted from 1.
        row: usize,
        /// Cell in its row, counted from 1.
        column: usize,
        /// Text of the cell, at most 40 characters of it.
        cell: String,
    },
    /// A CSV file has rows for a different number of ranks.
    #[error("the schedule has {rows} rows for {ranks} pipeline ranks; it needs one for each")]
    Rows {
        /// Number of rows in the file.
        rows: usize,
        /// Number of pipeline ranks.
        ranks: usize,
    },
    /// A stage index is beyond the number of stages.
    #[error(
        "rank {rank}: {action} names a stage that does not exist; the schedule has {stages} stages, counted from 0"
    )]
    UnknownStage {
        /// Rank whose list has the action.
        rank: usize,
        /// Action with the unknown stage.
        action: Action,
        /// Number of stages.
        stages: usize,
    },
    /// A stage has no pass on any rank.
    #[error("stage {stage} of {stages} is on no rank")]
    MissingStage {
        /// Index of the stage.
        stage: usize,
        /// Number of stages.
        stages: usize,
    },
    /// A rank has no stage.
    #[error("rank {rank} has no stage")]
    IdleRank {
        /// Rank without a stage.
        rank: usize,
    },
    /// A micro-batch index is beyond the number of micro-batches.
    #[error(
        "rank {rank}: {action} names a micro-batch that does not exist; there are {micro_batches}, counted from 0"
    )]
    UnknownMicroBatch {
        /// Rank whose list has the action.
        rank: usize,
        /// Action with the unknown micro-batch.
        action: Action,
        /// Number of micro-batches.
        micro_batches: usize,
    },
    /// A message is between stages that are not neighbours, or that are on one rank.
    #[error("rank {rank}: {action} is invalid: only consecutive stages on different ranks exchange messages")]
    NoMessage {
        /// Rank whose list has the action.
        rank: usize,
        /// Send or receive of the message.
        action: Action,
    },
    /// An action is for a stage of another rank.
    #[error("rank {rank}: {action} belongs to rank {owner}")]
    WrongRank {
        /// Rank whose list has the action.
        rank: usize,
        /// Action on the wrong rank.
        action: Action,
        /// Rank that has the stage.
        owner: usize,
    },
    /// An action is missing.
    #[error("rank {rank} lacks {action}")]
    Forgotten {
        /// Rank whose list lacks the action.
        rank: usize,
        /// Action that is missing.
        action: Action,
    },
    /// An action occurs more than once.
    #[error("rank {rank} does {action} {times} times")]
    Doubled {
        /// Rank whose list has the action.
        rank: usize,
        /// Action that is repeated.
        action: Action,
        /// Number of occurrences.
        times: usize,
    },
    /// A backward occurs both whole and split.
    #[error("rank {rank} does {fused} and its half {half}")]
    FusedAndSplit {
        /// Rank whose list has both.
        rank: usize,
        /// Whole backward of the micro-batch.
        fused: Action,
        /// Half of a split backward.
        half: Action,
    },
    /// An action comes before one that it needs.
    #[error("rank {rank} does {action} before {needs}, which it needs")]
    TooEarly {
        /// Rank whose list has the action.
        rank: usize,
        /// Action that comes too early.
        action: Action,
        /// Action that has to come first.
        needs: Action,
    },
    /// Weight gradients are not accumulated in ascending order of micro-batches, which would change their bits.
    #[error(
        "rank {rank} does {action} after {before}: gradients of weights are added in ascending order of micro-batches"
    )]
    WeightsOutOfOrder {
        /// Rank whose list has the action.
        rank: usize,
        /// Backward that comes too late.
        action: Action,
        /// Backward of a later micro-batch, which comes first.
        before: Action,
    },
    /// Ranks wait for each other in a cycle.
    #[error("deadlock: {}", circle(.cycle))]
    Deadlock {
        /// Waits of the cycle: each for the next one's rank, the last for the first.
        cycle: Vec<Wait>,
    },
}

/// A rank that waits for another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait {
    /// Rank that waits.
    pub rank: usize,
    /// Next action of the rank.
    pub action: Action,
    /// Action that has to happen first.
    pub needs: Action,
    /// Rank of that action.
    pub on: usize,
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, action, needs, on } = self;
        write!(f, "rank {rank} waits before {action} for {needs} of rank {on}")
    }
}

fn circle(cycle: &[Wait]) -> String {
    cycle.iter().map(Wait::to_string).collect::<Vec<_>>().join("; ")
}
