//! Among whom a rank's model state is shared out, and the collectives by which the ranks give each other their shares.
//!
//! Ranks that hold the same parameters, and are on one coordinate of the replicate axis, share out each stretch of them
//! ([`StateStore`](crate::StateStore)): the shard and the context axis, and where neighbours on the tensor axis hold the same and sum its gradients
//! these too. Of experts it is what is left of these axes. So every element has one owner in each replica, and after an update
//! the owners' weights are gathered.
//!
//! ```text
//! gradients   reduce-scatter over the owners, then all-reduce of the own range over the replicas
//! update      of the own range
//! weights     all-gather from the owners
//! ```

use std::time::Duration;

use lockstep_comm::{CommError, Group};
use lockstep_plan::{ParameterRecord, ShardPlace, StateLayout, Summing, ZeroStage};

use crate::Groups;

/// Who owns what of the model's state.
#[derive(Debug, Default)]
pub(crate) struct Shards {
    stage: ZeroStage,
    /// Those that share out what is summed so, where that are several.
    groups: Vec<(Summing, Group)>,
    /// The same ranks once more, to gather weights: what is under way in one group goes in its order, and weights shall not stand behind
    /// gradients, nor what the run asks of all ranks behind weights.
    gathering: Vec<(Summing, Group)>,
    /// Those of them among which what was gathered is kept once more, where that is asked for.
    neighbours: Vec<(Summing, Group)>,
    limit: Duration,
}

impl Shards {
    /// Every rank owns all that it holds.
    pub(crate) fn none() -> Self {
        Self::default()
    }

    /// As `groups` says, for the parameters `records`; all ranks call this together.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn new(groups: &Groups, records: &[ParameterRecord]) -> Result<Self, CommError> {
        let stage = groups.zero_stage();
        let Some(limit) = groups.limit().filter(|_| stage > ZeroStage::Nothing) else {
            return Ok(Self::none());
        };
        let (gathering, neighbours) = (groups.of_shards_apart(records)?, groups.of_neighbours(records)?);
        let groups = groups.of_shards(records)?;
        if groups.is_empty() {
            return Ok(Self::none());
        }
        Ok(Self { stage, groups, gathering, neighbours, limit })
    }

    /// Checks, in tests, that its groups are those that the state was laid out for.
    pub(crate) fn check(&self, layout: &StateLayout) {
        for (summing, group) in &self.groups {
            let place = ShardPlace { ranks: group.size(), rank: group.rank() };
            debug_assert_eq!(layout.place(*summing), place, "a shard group in another order");
        }
    }

    /// How long a wait for the others may be.
    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }

    /// What is shared out.
    pub(crate) fn stage(&self) -> ZeroStage {
        self.stage
    }

    /// Those that share out what is summed so, where that are several.
    pub(crate) fn groups(&self) -> &[(Summing, Group)] {
        &self.groups
    }

    /// The neighbours that have secondary shards of weights whose gradients are summed so, if there are several.
    pub(crate) fn neighbours(&self, summing: Summing) -> Option<&Group> {
        self.neighbours.iter().find(|(kind, _)| *kind == summing).map(|(_, group)| group)
    }

    /// Those that gather from each other what they share out and sum so, if they are several.
    pub(crate) fn gathering(&self, summing: Summing) -> Option<&Group> {
        self.gathering.iter().find(|(kind, _)| *kind == summing).map(|(_, group)| group)
    }
}
