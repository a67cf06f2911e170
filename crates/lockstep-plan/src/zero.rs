//! ZeRO stages: the model state that is sharded over data-parallel ranks instead of replicated (Rajbhandari et al., "ZeRO: memory
//! optimizations toward training trillion parameter models", 2020).

use serde::{Deserialize, Serialize};

use crate::Wrap;
use crate::gathering::{LiveParameters, ReshardAfterForward};

/// ZeRO stage: the model state that is sharded. Each stage includes the ones before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum ZeroStage {
    /// Stage 0: nothing is sharded.
    #[default]
    Nothing,
    /// Stage 1: optimizer state, including master weights.
    Optimizer,
    /// Stage 2: gradients as well.
    Gradients,
    /// Stage 3: parameters as well.
    Parameters,
}

impl ZeroStage {
    const ALL: [Self; 4] = [Self::Nothing, Self::Optimizer, Self::Gradients, Self::Parameters];

    /// Returns the stage with this number; `None` if there is none.
    pub fn from_number(number: usize) -> Option<Self> {
        Self::ALL.get(number).copied()
    }

    /// Returns the stage's number.
    pub const fn number(self) -> u8 {
        self as u8
    }
}

/// Settings of sharded state other than the shard group and the ZeRO stage. None of them changes a bit of the result.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Sharding {
    /// Reshard policy of gathered weights after a forward pass (stage 3).
    pub reshard_after_forward: ReshardAfterForward,
    /// Upper limit of unsharded elements at a time (stage 3); `None` for the default of [`LiveParameters::limit`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_live_parameters: Option<usize>,
    /// Size of the subgroups that keep a secondary shard of gathered weights, for later gathers of the same step (stage 3).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secondary_shard: Option<usize>,
    /// Grouping of units into flat buffers (all stages).
    pub wrap: Wrap,
}

impl Sharding {
    /// Returns the settings that limit how many parameters are unsharded at a time.
    pub fn live_parameters(&self) -> LiveParameters {
        LiveParameters { reshard: self.reshard_after_forward, limit: self.max_live_parameters }
    }

    /// Returns the size of the secondary shard groups in a shard group of `ranks`; `None` if there is no secondary shard.
    pub fn neighbours(&self, ranks: usize) -> Option<usize> {
        self.secondary_shard.filter(|&count| count > 1 && ranks > count && ranks.is_multiple_of(count))
    }
}

/// A rank's position in the shard group of a flat parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ShardPlace {
    /// Size of the shard group.
    pub ranks: usize,
    /// Rank within the shard group.
    pub rank: usize,
}

impl Default for ShardPlace {
    /// A group of one rank.
    fn default() -> Self {
        Self { ranks: 1, rank: 0 }
    }
}
