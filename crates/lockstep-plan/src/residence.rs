//! Where model state and activations are kept between their uses: in the memory of whoever computes, or on a disk, from which they are
//! streamed (ZeRO-Infinity: Rajbhandari et al. 2021).

use serde::{Deserialize, Serialize};

use crate::DiskPlan;

/// Elements that are moved to or from a disk at once, unless somebody says otherwise.
pub const WINDOW_ELEMENTS: usize = 1 << 20;

/// Where a kind of state is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Residence {
    /// In the memory of the device.
    #[default]
    Memory,
    /// In a file, of which a few windows are in memory at a time.
    Disk,
}

/// Where each kind is.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Residences {
    /// Master weights, moments and momentum.
    pub optimizer: Residence,
    /// Gradients, but those of tied tables; on disk only where the optimizer's state is.
    pub gradients: Residence,
    /// The weights that kernels read; on disk only where the optimizer's state is.
    pub parameters: Residence,
    /// What units keep from their forward to their backward.
    pub activations: Residence,
    /// How much of the model's state is on disk, of what a rank owns, from 0 to 1: rounded up to whole units of the model, from the first on.
    pub fraction: f64,
}

impl Default for Residences {
    /// Everything is in memory.
    fn default() -> Self {
        let [optimizer, gradients, parameters, activations] = [Residence::Memory; 4];
        Self { optimizer, gradients, parameters, activations, fraction: 1.0 }
    }
}

impl Residences {
    /// Whether anything is on disk.
    pub fn use_disk(&self) -> bool {
        self.optimizer == Residence::Disk || self.activations == Residence::Disk
    }

    /// Whether what units keep for their backward is.
    pub fn have_activations_on_disk(&self) -> bool {
        self.activations == Residence::Disk
    }

    /// What of model state is on disk, moved in windows of so many elements; none if nothing is.
    pub fn disk_plan(&self, window_elements: usize) -> Option<DiskPlan> {
        (self.optimizer == Residence::Disk).then(|| DiskPlan {
            share: self.fraction,
            has_gradients: self.gradients == Residence::Disk,
            has_parameters: self.parameters == Residence::Disk,
            window_elements,
        })
    }
}

/// Which kinds of state are on disk, whatever share of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct OnDisk {
    /// See [`Residences::optimizer`].
    pub optimizer: Residence,
    /// See [`Residences::gradients`].
    pub gradients: Residence,
    /// See [`Residences::parameters`].
    pub parameters: Residence,
    /// See [`Residences::activations`].
    pub activations: Residence,
}

impl OnDisk {
    /// Every way to have something there.
    pub fn all() -> Vec<Self> {
        use Residence::{Disk, Memory};
        let mut all = Vec::new();
        for activations in [Memory, Disk] {
            for [optimizer, gradients, parameters] in [
                [Memory, Memory, Memory],
                [Disk, Memory, Memory],
                [Disk, Disk, Memory],
                [Disk, Memory, Disk],
                [Disk, Disk, Disk],
            ] {
                all.push(Self { optimizer, gradients, parameters, activations });
            }
        }
        all.retain(|on_disk| !on_disk.is_nothing());
        all
    }

    /// Whether everything is in memory.
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }

    /// The same with so much of the model's state there.
    pub fn of_fraction(self, fraction: f64) -> Residences {
        let Self { optimizer, gradients, parameters, activations } = self;
        Residences { optimizer, gradients, parameters, activations, fraction }
    }
}
