//! What of a model's state the ranks of the shard axis share out instead of each holding a copy (Rajbhandari et al., "ZeRO: memory
//! optimizations toward training trillion parameter models", 2020).

use serde::{Deserialize, Serialize};

use crate::Wrap;
use crate::gathering::{LiveParameters, ReshardAfterForward};

/// What is shared out. Each stage shares out what the one before does, and more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum ZeroStage {
    /// 0: nothing.
    #[default]
    Nothing,
    /// 1: the optimizer's state, and the master weights with it.
    Optimizer,
    /// 2: gradients as well.
    Gradients,
    /// 3: parameters as well.
    Parameters,
}

impl ZeroStage {
    const ALL: [Self; 4] = [Self::Nothing, Self::Optimizer, Self::Gradients, Self::Parameters];

    /// The stage of this number, if there is one.
    pub fn from_number(number: usize) -> Option<Self> {
        Self::ALL.get(number).copied()
    }

    /// The stage's number.
    pub const fn number(self) -> u8 {
        self as u8
    }
}

/// How model state is shared out, beside over whom. No bit depends on it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Sharding {
    /// What happens to gathered weights after a forward (stage 3).
    pub reshard_after_forward: ReshardAfterForward,
    /// The most elements that are whole at once (stage 3).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_live_parameters: Option<usize>,
    /// Neighbours among which gathered weights are kept once more, for the further gathers of a step (stage 3).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secondary_shard: Option<usize>,
    /// Which units stand together (all stages).
    pub wrap: Wrap,
}

impl Sharding {
    /// How many parameters are whole at once.
    pub fn live_parameters(&self) -> LiveParameters {
        LiveParameters { reshard: self.reshard_after_forward, limit: self.max_live_parameters }
    }

    /// Size of the groups that a shard group of so many ranks is cut into, to keep gathered weights once more; `None` where it is not cut.
    pub fn neighbours(&self, ranks: usize) -> Option<usize> {
        self.secondary_shard.filter(|&count| count > 1 && ranks > count && ranks.is_multiple_of(count))
    }
}

/// A rank's place among those that share out a stretch of the state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ShardPlace {
    /// How many they are.
    pub ranks: usize,
    /// Which of them this is.
    pub rank: usize,
}

impl Default for ShardPlace {
    /// Alone.
    fn default() -> Self {
        Self { ranks: 1, rank: 0 }
    }
}
