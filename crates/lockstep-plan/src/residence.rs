//! Offload: residence of model state and activations between their uses. They stay in device memory, in host memory (ZeRO-Offload: Ren et
//! al. 2021), or on disk, from where they are streamed in windows (ZeRO-Infinity: Rajbhandari et al. 2021).

use serde::{Deserialize, Serialize};

use crate::{OffloadPlan, named_enum::named_enum};

/// Elements of an offload window: the unit of a transfer to or from host memory or a disk.
pub const WINDOW_ELEMENTS: usize = 1 << 20;

named_enum! {
    /// Residence of one kind of state.
    #[derive(Default)]
    pub enum Residence {
        /// Memory of the device.
        #[default]
        #[serde(alias = "memory")]
        Memory = "none",
        /// Host memory. For ranks on CPUs that is the device memory.
        #[serde(alias = "host")]
        Host = "cpu",
        /// A file on disk, of which a few windows are in memory at a time.
        Disk = "disk",
    }
}

/// Residence of each kind of state.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Residences {
    /// Master weights, moments and momentum.
    pub optimizer: Residence,
    /// Gradients, except those of tied tables; offloaded only together with the optimizer state.
    pub gradients: Residence,
    /// Weights that kernels read; offloaded only together with the optimizer state.
    pub parameters: Residence,
    /// Saved activations, from a unit's forward to its backward.
    pub activations: Residence,
    /// Fraction of a rank's model state that is offloaded, from 0 to 1; rounded up to whole units, first unit first.
    pub fraction: f64,
}

impl Default for Residences {
    /// Everything in device memory.
    fn default() -> Self {
        Offload::default().of_fraction(1.0)
    }
}

impl Residences {
    /// Returns true if optimizer state or activations are on disk.
    pub fn use_disk(&self) -> bool {
        self.optimizer == Residence::Disk || self.activations == Residence::Disk
    }

    /// Returns true if anything is offloaded to host memory or disk.
    pub fn offload_anything(&self) -> bool {
        [self.optimizer, self.activations].iter().any(|place| *place != Residence::Memory)
    }

    /// Returns true if saved activations are on disk.
    pub fn have_activations_on_disk(&self) -> bool {
        self.activations == Residence::Disk
    }

    /// Returns the plan for model state on disk, moved in windows of `window_elements`; `None` if there is none on disk.
    pub fn disk_plan(&self, window_elements: usize) -> Option<OffloadPlan> {
        self.plan_of(Residence::Disk, window_elements)
    }

    /// Returns the plan for model state that a device offloads to host memory or disk; see [`Residences::disk_plan`].
    pub fn offload_plan(&self, window_elements: usize) -> Option<OffloadPlan> {
        self.plan_of(self.optimizer, window_elements)
    }

    fn plan_of(&self, place: Residence, window_elements: usize) -> Option<OffloadPlan> {
        (self.optimizer == place && place != Residence::Memory).then(|| OffloadPlan {
            share: self.fraction,
            has_gradients: self.gradients == place,
            has_parameters: self.parameters == place,
            window_elements,
        })
    }

    /// Returns the residences with host memory replaced by disk: device memory is the same for both.
    #[must_use]
    pub fn off_device(self) -> Self {
        self.with(|residence| if residence == Residence::Host { Residence::Disk } else { residence })
    }

    /// Returns the residences for ranks on CPUs, where host memory is device memory.
    #[must_use]
    pub fn on_cpu(self) -> Self {
        self.with(|residence| if residence == Residence::Host { Residence::Memory } else { residence })
    }

    fn with(self, of_kind: impl Fn(Residence) -> Residence) -> Self {
        let Self { optimizer, gradients, parameters, activations, fraction } = self;
        let [optimizer, gradients, parameters, activations] =
            [optimizer, gradients, parameters, activations].map(of_kind);
        Self { optimizer, gradients, parameters, activations, fraction }
    }
}

/// Kinds of state that are offloaded and their destinations, without the fraction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Offload {
    /// See [`Residences::optimizer`].
    pub optimizer: Residence,
    /// See [`Residences::gradients`].
    pub gradients: Residence,
    /// See [`Residences::parameters`].
    pub parameters: Residence,
    /// See [`Residences::activations`].
    pub activations: Residence,
}

impl Offload {
    /// Returns every valid combination of kinds offloaded to `place`.
    pub fn all_to(place: Residence) -> Vec<Self> {
        use Residence::Memory;
        let mut all = Vec::new();
        for activations in [Memory, place] {
            for [optimizer, gradients, parameters] in [
                [Memory, Memory, Memory],
                [place, Memory, Memory],
                [place, place, Memory],
                [place, Memory, place],
                [place, place, place],
            ] {
                all.push(Self { optimizer, gradients, parameters, activations });
            }
        }
        all.retain(|offload| !offload.is_nothing());
        all
    }

    /// Returns true if nothing is offloaded.
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the residences with a fraction of the model state offloaded.
    pub fn of_fraction(self, fraction: f64) -> Residences {
        let Self { optimizer, gradients, parameters, activations } = self;
        Residences { optimizer, gradients, parameters, activations, fraction }
    }
}
