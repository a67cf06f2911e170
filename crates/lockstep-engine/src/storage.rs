//! In which precision weights and optimizer state are kept, how they are rounded, and where they are.

use std::{path::PathBuf, time::Duration};

use lockstep_plan::{
    DType, WINDOW_ELEMENTS,
    random::{key_from_name, mix},
};
use lockstep_tensor::{DiskIo, Rounding};

/// How an engine keeps weights and optimizer state.
#[derive(Debug, Clone, PartialEq)]
pub struct Storage {
    /// The weights that are updated.
    pub weights: WeightStorage,
    /// Type of moments and momentum: f32 or bf16.
    pub state: DType,
    /// How what is kept in bf16 is rounded.
    pub rounding: RoundingMode,
    /// Files of what is on disk.
    pub offload: Offload,
}

/// The files of offloaded state and activations, and how they are moved (ZeRO-Infinity: Rajbhandari et al., 2021). The plan says what is
/// offloaded.
#[derive(Debug, Clone, PartialEq)]
pub struct Offload {
    /// Where the files are. They have no name, and end with the process.
    pub directory: PathBuf,
    /// Elements that are moved at once, a multiple of 2,048.
    pub window_elements: usize,
    /// By what they are moved.
    pub method: DiskIo,
    /// How long the disk may take for one of them.
    pub limit: Duration,
}

impl Default for Offload {
    /// In the working directory.
    fn default() -> Self {
        Self {
            directory: PathBuf::from("."),
            window_elements: WINDOW_ELEMENTS,
            method: DiskIo::Auto,
            limit: Duration::from_secs(600),
        }
    }
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
    /// Everything in f32 and in memory.
    fn default() -> Self {
        Self {
            weights: WeightStorage::Master,
            state: DType::F32,
            rounding: RoundingMode::Nearest,
            offload: Offload::default(),
        }
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
