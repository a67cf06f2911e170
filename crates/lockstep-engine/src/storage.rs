//! Storage of weights and optimizer state: precision, rounding, and the files of offloaded state.

use std::{path::PathBuf, time::Duration};

use lockstep_plan::{
    DType, WINDOW_ELEMENTS,
    random::{key_from_name, mix},
};
use lockstep_tensor::{DiskIo, Rounding};

/// Precision, rounding and offload files of weights and optimizer state.
#[derive(Debug, Clone, PartialEq)]
pub struct Storage {
    /// Weights that the optimizer updates: master weights or those of kernels.
    pub weights: WeightStorage,
    /// Type of the optimizer's moments and momentum: f32 or bf16.
    pub state: DType,
    /// Rounding of weights and optimizer state in bf16.
    pub rounding: RoundingMode,
    /// Files of offloaded state and activations.
    pub offload: Offload,
}

/// Files of offloaded state and activations, and the way they are read and written (ZeRO-Infinity: Rajbhandari et al.,
/// 2021). The plan decides what is offloaded.
#[derive(Debug, Clone, PartialEq)]
pub struct Offload {
    /// Directory of the files. They have no name and vanish with the process.
    pub directory: PathBuf,
    /// Elements of a window, which is read and written in one piece; a multiple of 2,048.
    pub window_elements: usize,
    /// System interface for reads and writes.
    pub method: DiskIo,
    /// Timeout of one read or write.
    pub limit: Duration,
}

impl Default for Offload {
    /// Returns the defaults: files in the working directory.
    fn default() -> Self {
        Self {
            directory: PathBuf::from("."),
            window_elements: WINDOW_ELEMENTS,
            method: DiskIo::Auto,
            limit: Duration::from_secs(600),
        }
    }
}

/// Weights that an optimizer step updates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightStorage {
    /// f32 master weights, with a rounded copy if kernels read another type.
    Master,
    /// The weights that kernels read, f32 or bf16; there are no master weights.
    Kernels,
}

/// Rounding of f32 numbers to bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RoundingMode {
    /// Round to nearest.
    Nearest,
    /// Stochastic rounding, determined by (seed, name, element, step).
    Stochastic,
}

impl Default for Storage {
    /// Returns the defaults: everything in f32, with f32 master weights.
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
    /// Returns the rounding of the parameter `name` from `first_element` on in optimizer step `step`.
    pub(crate) fn of(self, seed: u64, name: &str, step: u64, first_element: u64) -> Rounding {
        match self {
            Self::Nearest => Rounding::Nearest,
            Self::Stochastic => {
                // Rounding must be independent of the initial weights, which use the same seed.
                let key = mix(seed ^ key_from_name(name) ^ key_from_name("stochastic rounding"));
                Rounding::Stochastic { key, step, first_element }
            }
        }
    }
}
