//! The memory that the ranks of a run were predicted to use, as their engines predict it once they are built.

use lockstep_comm::CommError;
use lockstep_config::RunConfig;
use lockstep_engine::{Engine, Ranks, Snapshot};
use lockstep_observe::metrics::{MemoryUse, PredictedMemory};
use lockstep_plan::{MemoryBytes, MemoryCategory};
use lockstep_planner::forecast::{Copies, MemoryInputs};

/// Predicted memory of the ranks of a run that has started.
#[derive(Debug, Clone)]
pub(crate) struct Predicted {
    /// Prediction of each rank; empty for a run of one rank.
    pub(crate) by_rank: Vec<PredictedMemory>,
    /// The most that any rank holds, by category.
    pub(crate) greatest: PredictedMemory,
}

impl Predicted {
    /// Gathers the predictions of the engines of all ranks, with the copies of the state that the run makes. Collective: every rank
    /// calls it.
    ///
    /// # Errors
    /// If a rank does not answer.
    pub(crate) fn of(config: &RunConfig, engine: &Engine, ranks: &Ranks) -> Result<Self, CommError> {
        let mut own = engine.predicted_memory().by_category();
        let Copies { kept, saved } =
            MemoryInputs::of(config).copies(&ranks.mesh(), ranks.rank(), config.zero_stage());
        own[MemoryCategory::Snapshot] += (kept + saved) * Snapshot::bytes_for(engine);
        let own = MemoryUse { by_category: own, ..MemoryUse::default() };
        let all = own.of_ranks(ranks)?;
        let greatest = PredictedMemory(all.iter().fold(own, MemoryUse::maximum).by_category);
        let several = all.iter().filter(|_| all.len() > 1);
        Ok(Self { by_rank: several.map(|one| PredictedMemory(one.by_category)).collect(), greatest })
    }

    /// Returns the rank that holds most, with its bytes.
    pub(crate) fn largest(&self) -> (usize, MemoryBytes) {
        let largest = self.by_rank.iter().enumerate().rev().max_by_key(|(_, memory)| memory.0.total());
        largest.map_or((0, self.greatest.0), |(rank, memory)| (rank, memory.0))
    }

    /// Returns the bytes of all ranks together.
    pub(crate) fn total(&self) -> usize {
        if self.by_rank.is_empty() {
            self.greatest.0.total()
        } else {
            self.by_rank.iter().map(|memory| memory.0.total()).sum()
        }
    }
}
