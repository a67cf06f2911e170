//! What of a model's state the ranks of the shard axis share out instead of each holding a copy (Rajbhandari et al., "ZeRO: memory
//! optimizations toward training trillion parameter models", 2020).

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
