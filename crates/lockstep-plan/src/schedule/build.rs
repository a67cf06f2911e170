//! Constructors of schedules: from a published kind, from passes, and from complete action lists.

use super::{
    Action, Kind, Pass, Schedule, ScheduleError, ScheduleProblem,
    generate::MOST_PASSES,
    lower::lower,
    validate::{owners, problems as problems_of},
};

impl Schedule {
    /// Generates a published schedule for `ranks` pipeline ranks with `chunks` stages each.
    pub fn new(kind: Kind, ranks: usize, micro_batches: usize, chunks: usize) -> Result<Self, ScheduleError> {
        Self::from_passes(micro_batches, &kind.passes(ranks, micro_batches, chunks)?)
    }

    /// Generates a published schedule without validation. Tests show that every published schedule is complete and cannot deadlock, so
    /// the search skips the check for its thousands of schedules.
    pub fn published(
        kind: Kind,
        ranks: usize,
        micro_batches: usize,
        chunks: usize,
    ) -> Result<Self, ScheduleError> {
        let passes = kind.passes(ranks, micro_batches, chunks)?;
        let (rank_of, problems) = owners(&passes);
        if !problems.is_empty() {
            return Err(ScheduleError(problems));
        }
        let actions = lower(&rank_of, micro_batches, &passes);
        Ok(Self::of_lists(micro_batches, rank_of, actions).with_flows())
    }

    /// Builds a schedule from the passes of each rank. A stage belongs to the rank with its first forward.
    pub fn from_passes(micro_batches: usize, passes: &[Vec<Pass>]) -> Result<Self, ScheduleError> {
        let (rank_of, mut problems) = owners(passes);
        if micro_batches.saturating_mul(rank_of.len().max(1)) > MOST_PASSES {
            return Err(ScheduleError(vec![ScheduleProblem::TooLong { most: MOST_PASSES }]));
        }
        let actions = lower(&rank_of, micro_batches, passes);
        let schedule = Self::of_lists(micro_batches, rank_of, actions);
        problems.extend(problems_of(&schedule));
        if problems.is_empty() { Ok(schedule.with_flows()) } else { Err(ScheduleError(problems)) }
    }

    /// Builds a schedule from complete action lists; `rank_of` has the rank of each stage.
    pub fn from_actions(
        rank_of: Vec<usize>,
        micro_batches: usize,
        actions: Vec<Vec<Action>>,
    ) -> Result<Self, ScheduleError> {
        let schedule = Self::of_lists(micro_batches, rank_of, actions);
        let problems = problems_of(&schedule);
        if problems.is_empty() { Ok(schedule.with_flows()) } else { Err(ScheduleError(problems)) }
    }
}
