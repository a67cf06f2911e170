//! Process groups over which a rank's model state is sharded (ZeRO), and those for its collectives.
//!
//! Each flat parameter ([`StateStore`](crate::StateStore)) is sharded over the ranks that hold it within one
//! data-parallel replica. These are the shard and context axes, plus neighbours on the tensor axis that hold the same
//! elements and reduce their gradients. For experts it is the rest of these axes. Every element thus has one owner in
//! each replica, and weights are all-gathered after an optimizer step.
//!
//! ```text
//! gradients   reduce-scatter over the owners, then all-reduce of the own range over the replicas
//! optimizer   step on the own range
//! weights     all-gather from the owners
//! ```

use std::time::Duration;

use lockstep_comm::CommError;
use lockstep_plan::{ParameterRecord, ShardPlace, StateLayout, ZeroStage};

use crate::Groups;
use crate::groups::ReductionGroups;

/// Shard groups of the model state; empty if nothing is sharded.
#[derive(Debug, Default)]
pub(crate) struct Shards {
    /// The ZeRO stage, which says what is sharded.
    pub(crate) stage: ZeroStage,
    /// Groups of the ranks that share a flat parameter, by kind of reduction.
    pub(crate) groups: ReductionGroups,
    /// Separate groups of the same ranks for weight gathers. Collectives of one group run in order, so weights do not
    /// queue behind gradients, nor world collectives behind weights.
    pub(crate) gathering: ReductionGroups,
    /// Subgroups that keep secondary shards of gathered weights (hpZ), if the plan asks for them.
    pub(crate) neighbours: ReductionGroups,
    /// Timeout of a wait for other ranks.
    pub(crate) limit: Duration,
}

impl Shards {
    /// Returns no shard groups: every rank owns all that it holds.
    pub(crate) fn none() -> Self {
        Self::default()
    }

    /// Makes the shard groups of `records` under `groups`; a collective call.
    ///
    /// # Errors
    /// If a rank is lost, or does not answer in time.
    pub(crate) fn new(groups: &Groups, records: &[ParameterRecord]) -> Result<Self, CommError> {
        let stage = groups.zero_stage();
        let Some(limit) = groups.limit().filter(|_| stage > ZeroStage::Nothing) else {
            return Ok(Self::none());
        };
        let (gathering, neighbours) =
            (groups.separate_shard_groups(records)?, groups.secondary_shard_groups(records)?);
        let groups = groups.shard_groups(records)?;
        if groups.is_empty() {
            return Ok(Self::none());
        }
        Ok(Self { stage, groups, gathering, neighbours, limit })
    }

    /// Asserts, in debug builds, that the shard groups match the state layout.
    pub(crate) fn check(&self, layout: &StateLayout) {
        for (summing, group) in self.groups.iter() {
            let place = ShardPlace { ranks: group.size(), rank: group.rank() };
            debug_assert_eq!(layout.place(*summing), place, "a shard group in another order");
        }
    }
}
