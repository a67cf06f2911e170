//! What can be wrong with a schedule.

use std::fmt;

use super::{Action, Kind};
use crate::nearest::{Choices, lines};

/// Everything that is wrong with a schedule, one line each.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", lines(.0))]
pub struct ScheduleError(pub Vec<ScheduleProblem>);

/// One thing that is wrong with a schedule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleProblem {
    /// Nobody to do anything.
    #[error("a schedule needs at least one rank")]
    NoRanks,
    /// Numbers that cannot be meant.
    #[error("the schedule would have more than {most} forwards")]
    TooLong {
        /// The most that there may be.
        most: usize,
    },
    /// Too few micro-batches for the kind of schedule.
    #[error("{kind} on {ranks} pipeline ranks needs at least {minimum} micro-batches, not {micro_batches}")]
    TooFewMicroBatches {
        /// The schedule.
        kind: Kind,
        /// What was given.
        micro_batches: usize,
        /// Pipeline ranks.
        ranks: usize,
        /// The nearest valid choice.
        minimum: usize,
    },
    /// Micro-batches that cannot be grouped by ranks.
    #[error(
        "{kind} takes micro-batches in groups of {ranks}, the pipeline ranks, and {micro_batches} are not a multiple; {nearest}"
    )]
    Indivisible {
        /// The schedule.
        kind: Kind,
        /// What was given.
        micro_batches: usize,
        /// Pipeline ranks.
        ranks: usize,
        /// The nearest valid choices.
        nearest: Choices,
    },
    /// A number of chunks that the kind of schedule does not have.
    #[error("{kind} cannot have {chunks} stages on each rank; {nearest}")]
    Chunks {
        /// The schedule.
        kind: Kind,
        /// What was given.
        chunks: usize,
        /// The nearest valid choice.
        nearest: Choices,
    },
    /// A cell of a file that is no pass.
    #[error(
        "row {row}, cell {column}: {cell:?} is no pass; one is written STAGE, one of F, B, I and W, MICRO-BATCH, as in 1F0"
    )]
    BadCell {
        /// Row in the file, from 1.
        row: usize,
        /// Cell in its row, from 1.
        column: usize,
        /// What is written there.
        cell: String,
    },
    /// A file for another number of ranks.
    #[error("the schedule has {rows} rows for {ranks} pipeline ranks; it needs one for each")]
    Rows {
        /// Rows of the file.
        rows: usize,
        /// Pipeline ranks.
        ranks: usize,
    },
    /// A stage number beyond the number of stages.
    #[error("rank {rank}: {action} is of an unknown stage; the schedule has {stages} stages, counted from 0")]
    UnknownStage {
        /// Where.
        rank: usize,
        /// What.
        action: Action,
        /// The number of stages.
        stages: usize,
    },
    /// A stage that no rank has.
    #[error("stage {stage} of {stages} is on no rank")]
    MissingStage {
        /// Which.
        stage: usize,
        /// The number of stages.
        stages: usize,
    },
    /// A rank that has no stage.
    #[error("rank {rank} has no stage")]
    IdleRank {
        /// Which.
        rank: usize,
    },
    /// A micro-batch number beyond the number of micro-batches.
    #[error("rank {rank}: {action} is of an unknown micro-batch; there are {micro_batches}, counted from 0")]
    UnknownMicroBatch {
        /// Where.
        rank: usize,
        /// What.
        action: Action,
        /// The number of micro-batches.
        micro_batches: usize,
    },
    /// A message between stages that are no neighbours or on one rank.
    #[error("rank {rank}: {action} is no message: stages that follow each other on different ranks send")]
    NoMessage {
        /// Where.
        rank: usize,
        /// What.
        action: Action,
    },
    /// An action of a stage that another rank has.
    #[error("rank {rank}: {action} belongs to rank {owner}")]
    WrongRank {
        /// Where it is.
        rank: usize,
        /// What.
        action: Action,
        /// Where it should be.
        owner: usize,
    },
    /// An action that is missing.
    #[error("rank {rank} forgets {action}")]
    Forgotten {
        /// Where it should be.
        rank: usize,
        /// What.
        action: Action,
    },
    /// An action that is there more than once.
    #[error("rank {rank} does {action} {times} times")]
    Doubled {
        /// Where.
        rank: usize,
        /// What.
        action: Action,
        /// How often.
        times: usize,
    },
    /// A backward both in one piece and in two.
    #[error("rank {rank} does {fused} and its half {half}")]
    FusedAndSplit {
        /// Where.
        rank: usize,
        /// The whole.
        fused: Action,
        /// The half.
        half: Action,
    },
    /// An action before something that it needs.
    #[error("rank {rank} does {action} before {needs}, which it needs")]
    TooEarly {
        /// Where.
        rank: usize,
        /// What.
        action: Action,
        /// What should come first.
        needs: Action,
    },
    /// Weight gradients that are added in another order than that of the micro-batches, which would change their bits.
    #[error(
        "rank {rank} does {action} after {before}: gradients of weights are added in ascending order of micro-batches"
    )]
    WeightsOutOfOrder {
        /// Where.
        rank: usize,
        /// What.
        action: Action,
        /// The one of a later micro-batch before it.
        before: Action,
    },
    /// Ranks that wait for each other in a circle.
    #[error("deadlock: {}", circle(.cycle))]
    Deadlock {
        /// Who waits where, each for the next one, the last for the first.
        cycle: Vec<Wait>,
    },
}

/// A rank that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait {
    /// Which.
    pub rank: usize,
    /// What it is about to do.
    pub action: Action,
    /// What has to happen first.
    pub needs: Action,
    /// On which rank.
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
