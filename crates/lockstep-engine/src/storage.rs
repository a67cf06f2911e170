//! In which precision weights and optimizer state are kept, and how they are rounded.

use lockstep_plan::{
    DType,
    random::{key_from_name, mix},
};
use lockstep_tensor::Rounding;

/// How an engine keeps weights and optimizer state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Storage {
    /// The weights that are updated.
    pub weights: WeightStorage,
    /// Type of moments and momentum: f32 or bf16.
    pub state: DType,
    /// How what is kept in bf16 is rounded.
    pub rounding: RoundingMode,
}

/// The weights that an update changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightStorage {
    /// f32, with a rounded copy for kernels that read another type.
    Master,
    /// Those that kernels read, f32 or bf16, and no others.
    Kernels,
}

/// How numbers are rounded to bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RoundingMode {
    /// To the nearest.
    Nearest,
    /// At random, by (seed, name, element, step).
    Stochastic,
}

impl Default for Storage {
    /// Everything in f32.
    fn default() -> Self {
        Self { weights: WeightStorage::Master, state: DType::F32, rounding: RoundingMode::Nearest }
    }
}

impl RoundingMode {
    /// The rounding of the parameter `name` from `first_element` on in update `step`.
    pub(crate) fn of(self, seed: u64, name: &str, step: u64, first_element: u64) -> Rounding {
        match self {
            Self::Nearest => Rounding::Nearest,
            Self::Stochastic => {
                // Rounding must not walk in step with the initial weights.
                let key = mix(seed ^ key_from_name(name) ^ key_from_name("stochastic rounding"));
                Rounding::Stochastic { key, step, first_element }
            }
        }
    }
}
