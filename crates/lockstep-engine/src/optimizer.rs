//! The update rules: what each keeps for a parameter, in which shards it can work, and the kernel it calls.

use lockstep_plan::{DType, ParameterRecord};
use lockstep_tensor::{AdamW, Kernels, Lion, Muon, Rounding, Sgd, View, muon_flops};

use crate::{StateKind, Update};

/// The update rule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Optimizer {
    /// AdamW.
    AdamW {
        /// Decay rates of the moments.
        betas: [f64; 2],
        /// Added to the root of the second moment.
        eps: f64,
    },
    /// Gradient descent.
    Sgd {
        /// Momentum; 0 keeps no state.
        momentum: f32,
    },
    /// The sign of an average of gradients.
    Lion {
        /// Weights of the old average: in the direction, and in the new average.
        betas: [f64; 2],
    },
    /// Muon for the matrices of the blocks, AdamW for everything else.
    Muon {
        /// Weight of the old average of gradients.
        momentum: f32,
        /// How the step size follows from a matrix's shape.
        scale: MuonScale,
        /// AdamW's decay rates.
        betas: [f64; 2],
        /// AdamW's eps.
        eps: f64,
        /// AdamW's learning rate, as a multiple of that of the matrices.
        adam_ratio: f64,
    },
}

/// How Muon's step size follows from the shape `[rows, columns]` of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MuonScale {
    /// `0.2·√max(rows, columns)`: updates as large as AdamW's, whose learning rates fit (Liu et al., "Muon is scalable
    /// for LLM training", 2025).
    MatchAdamW,
    /// `√max(1, rows / columns)`, as in Jordan's own.
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

/// What of a parameter an update must see at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Granularity {
    /// Each element on its own: any shard will do.
    Elementwise,
    /// The whole matrix: shards follow the borders of parameters.
    WholeMatrix,
}

/// The part that a parameter plays in its model, as far as update rules tell them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// A matrix between the embedding and the output layer.
    HiddenMatrix {
        /// Rows and columns.
        shape: [usize; 2],
    },
    /// Everything else.
    Other,
}

impl Role {
    /// The role of a parameter in a model of `units` units, of which the first embeds and the last has the output
    /// layer.
    pub(crate) fn of(record: &ParameterRecord, units: usize) -> Self {
        match record.shape[..] {
            [rows, columns] if (1..units.saturating_sub(1)).contains(&record.unit) => {
                Self::HiddenMatrix { shape: [rows, columns] }
            }
            _ => Self::Other,
        }
    }
}

/// The operands of one parameter's update.
pub(crate) struct Operands<'a> {
    pub(crate) role: Role,
    pub(crate) parameter: View<'a>,
    pub(crate) gradient: View<'a>,
    /// What kernels read, if that is not `parameter`.
    pub(crate) rounded: Option<View<'a>>,
    pub(crate) rounding: Rounding,
    /// The type that kernels read.
    pub(crate) dtype: DType,
}

impl Optimizer {
    /// What of a parameter an update must see at once.
    pub fn granularity(&self) -> Granularity {
        match self {
            Self::AdamW { .. } | Self::Sgd { .. } | Self::Lion { .. } => Granularity::Elementwise,
            Self::Muon { .. } => Granularity::WholeMatrix,
        }
    }

    /// Floating-point operations of the products in one update of a parameter.
    pub(crate) fn product_flops(&self, role: Role) -> u64 {
        match (self, role) {
            (Self::Muon { .. }, Role::HiddenMatrix { shape }) => muon_flops(shape),
            _ => 0,
        }
    }

    /// The state that it keeps for a parameter.
    pub(crate) fn state_kinds(&self, role: Role) -> &'static [StateKind] {
        match (self, role) {
            (Self::Lion { .. }, _) => &[StateKind::ExpAvg],
            (Self::Muon { .. }, Role::HiddenMatrix { .. }) => &[StateKind::MomentumBuffer],
            (Self::AdamW { .. } | Self::Muon { .. }, _) => &[StateKind::ExpAvg, StateKind::ExpAvgSq],
            (Self::Sgd { momentum }, _) if *momentum != 0.0 => &[StateKind::MomentumBuffer],
            (Self::Sgd { .. }, _) => &[],
        }
    }

    /// Updates one parameter; `update` has its own learning rate and decay, `state` what is kept for it.
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
                // Half precision has too few exponents for the iteration's squares.
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
