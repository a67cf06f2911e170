//! The optimizers: state that each keeps for a parameter, shards that it can work on, and the kernel that it calls.

use lockstep_plan::{DType, ParameterRecord};
use lockstep_tensor::{AdamW, Kernels, Lion, Muon, Rounding, Sgd, View, muon_flops};

use crate::StateKind;

/// An optimizer with its hyperparameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Optimizer {
    /// AdamW: Adam with decoupled weight decay.
    AdamW {
        /// Decay rates of the first and second moment.
        betas: [f64; 2],
        /// Term added to the square root of the second moment.
        eps: f64,
    },
    /// Stochastic gradient descent.
    Sgd {
        /// Momentum; 0 keeps no state.
        momentum: f32,
    },
    /// Lion: steps along the sign of an average of gradients.
    Lion {
        /// Weights of the old average in the step's direction and in the new average.
        betas: [f64; 2],
    },
    /// Muon for the matrices of the blocks, AdamW for all other parameters.
    Muon {
        /// Weight of the old average of gradients.
        momentum: f32,
        /// Scale of the step size by a matrix's shape.
        scale: MuonScale,
        /// AdamW's decay rates.
        betas: [f64; 2],
        /// AdamW's term added to the square root of the second moment.
        eps: f64,
        /// AdamW's learning rate, as a multiple of that of the matrices.
        adam_ratio: f64,
    },
}

/// Scale of Muon's step size for a matrix of shape `[rows, columns]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MuonScale {
    /// `0.2·√max(rows, columns)`: updates as large as AdamW's, so that its learning rates fit (Liu et al., "Muon is
    /// scalable for LLM training", 2025).
    MatchAdamW,
    /// `√max(1, rows / columns)`, as in Jordan's original implementation.
    Original,
}

impl MuonScale {
    fn of(self, [rows, columns]: [usize; 2]) -> f32 {
        let (rows, columns) = (rows as f64, columns as f64);
        let scale = match self {
            Self::MatchAdamW => 0.2 * rows.max(columns).sqrt(),
            Self::Original => (rows / columns).max(1.0).sqrt(),
        };
        scale as f32
    }
}

/// Granularity of an optimizer's update, which limits how parameters can be sharded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Granularity {
    /// Each element by itself: any shard works.
    Elementwise,
    /// The whole matrix at once: shards follow parameter boundaries.
    WholeMatrix,
}

/// Role of a parameter in its model, as far as optimizers distinguish them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// A matrix between the embedding and the output layer.
    HiddenMatrix {
        /// Rows and columns.
        shape: [usize; 2],
    },
    /// Any other parameter, such as an embedding, the output layer, or a vector.
    Other,
}

impl Role {
    /// Returns the role of a parameter in a model of `units` units, of which the first is the embedding and the last
    /// has the output layer.
    pub(crate) fn of(record: &ParameterRecord, units: usize) -> Self {
        match record.shape[..] {
            [rows, columns] if (1..units.saturating_sub(1)).contains(&record.unit) => {
                Self::HiddenMatrix { shape: [rows, columns] }
            }
            _ => Self::Other,
        }
    }
}

/// Hyperparameters of one optimizer step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Update {
    /// Learning rate, before the parameter's multiplier.
    pub learning_rate: f64,
    /// Weight decay, for parameters whose record has `decay` set.
    pub weight_decay: f64,
    /// Factor on the gradients, from clipping; 1 without it.
    pub gradient_scale: f32,
    /// Number of this optimizer step, from 1.
    pub step: u64,
}

/// Operands of the update of one parameter.
pub(crate) struct Operands<'a> {
    pub(crate) role: Role,
    pub(crate) parameter: View<'a>,
    pub(crate) gradient: View<'a>,
    /// Rounded weights that kernels read; `None` if they read `parameter`.
    pub(crate) rounded: Option<View<'a>>,
    pub(crate) rounding: Rounding,
    /// Type of the weights that kernels read.
    pub(crate) dtype: DType,
}

impl Optimizer {
    /// Returns the granularity of the optimizer's update.
    pub fn granularity(&self) -> Granularity {
        match self {
            Self::AdamW { .. } | Self::Sgd { .. } | Self::Lion { .. } => Granularity::Elementwise,
            Self::Muon { .. } => Granularity::WholeMatrix,
        }
    }

    /// Returns the floating-point operations of the matrix products in one update of a parameter.
    pub(crate) fn product_flops(&self, role: Role) -> u64 {
        match (self, role) {
            (Self::Muon { .. }, Role::HiddenMatrix { shape }) => muon_flops(shape),
            _ => 0,
        }
    }

    /// Returns the kinds of state that the optimizer keeps for a parameter.
    pub(crate) fn state_kinds(&self, role: Role) -> &'static [StateKind] {
        match (self, role) {
            (Self::Lion { .. }, _) => &[StateKind::ExpAvg],
            (Self::Muon { .. }, Role::HiddenMatrix { .. }) => &[StateKind::MomentumBuffer],
            (Self::AdamW { .. } | Self::Muon { .. }, _) => &[StateKind::ExpAvg, StateKind::ExpAvgSq],
            (Self::Sgd { momentum }, _) if *momentum != 0.0 => &[StateKind::MomentumBuffer],
            (Self::Sgd { .. }, _) => &[],
        }
    }

    /// Updates one parameter. `update` has the parameter's own learning rate and decay; `state` returns its optimizer
    /// state.
    pub(crate) fn step<'a>(
        &self,
        kernels: &dyn Kernels,
        update: &Update,
        operands: &Operands<'a>,
        state: impl Fn(StateKind) -> Option<View<'a>>,
    ) {
        let Operands { role, parameter, gradient, rounded, rounding, dtype } = *operands;
        let Update { learning_rate, weight_decay, gradient_scale, step } = *update;
        let kept = |kind: StateKind| state(kind).expect("the store has what `state_kinds` lists");
        let adamw = |betas, eps, learning_rate| {
            kernels.adamw(&AdamW {
                parameter,
                gradient,
                exp_avg: kept(StateKind::ExpAvg),
                exp_avg_sq: kept(StateKind::ExpAvgSq),
                rounded,
                rounding,
                learning_rate,
                betas,
                eps,
                weight_decay,
                gradient_scale,
                step,
            });
        };
        match (*self, role) {
            (Self::AdamW { betas, eps }, _) => adamw(betas, eps, learning_rate),
            (Self::Muon { betas, eps, adam_ratio, .. }, Role::Other) => {
                adamw(betas, eps, learning_rate * adam_ratio);
            }
            (Self::Muon { momentum, scale, .. }, Role::HiddenMatrix { shape }) => kernels.muon(&Muon {
                parameter,
                gradient,
                momentum_buffer: kept(StateKind::MomentumBuffer),
                rounded,
                rounding,
                // The exponent range of f16 is too small for the squares in the iteration.
                dtype: if dtype == DType::BF16 { DType::BF16 } else { DType::F32 },
                learning_rate,
                momentum,
                weight_decay,
                gradient_scale,
                scale: scale.of(shape),
            }),
            (Self::Lion { betas }, _) => kernels.lion(&Lion {
                parameter,
                gradient,
                exp_avg: kept(StateKind::ExpAvg),
                rounded,
                rounding,
                learning_rate,
                betas,
                weight_decay,
                gradient_scale,
            }),
            (Self::Sgd { momentum }, _) => kernels.sgd(&Sgd {
                parameter,
                gradient,
                momentum_buffer: state(StateKind::MomentumBuffer),
                rounded,
                rounding,
                learning_rate: learning_rate as f32,
                momentum,
                weight_decay: weight_decay as f32,
                gradient_scale,
                step,
            }),
        }
    }
}
