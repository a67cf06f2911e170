//! The tensors that a checkpoint holds of a parameter.

/// A tensor of a parameter's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StateKind {
    /// The weights, in full precision.
    Parameter,
    /// The first moment of AdamW, the average of Lion.
    ExpAvg,
    /// AdamW's second moment.
    ExpAvgSq,
    /// The momentum of SGD and Muon.
    MomentumBuffer,
    /// What a rank's gradients have lost on their way to their owners: of each rank that has summands of a gradient its own, so
    /// that this is its number among them.
    GradientResidual(usize),
}

impl StateKind {
    /// All kinds that a parameter has once.
    pub const ALL: [Self; 4] = [Self::Parameter, Self::ExpAvg, Self::ExpAvgSq, Self::MomentumBuffer];

    /// The kinds that optimizers keep.
    pub const OF_OPTIMIZERS: [Self; 3] = [Self::ExpAvg, Self::ExpAvgSq, Self::MomentumBuffer];

    /// The name that checkpoints use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Parameter => "parameter",
            Self::ExpAvg => "exp_avg",
            Self::ExpAvgSq => "exp_avg_sq",
            Self::MomentumBuffer => "momentum_buffer",
            Self::GradientResidual(_) => "gradient_residual",
        }
    }

    /// Whether each rank that has summands of a parameter's gradient has such a tensor of its own.
    pub const fn is_of_one_rank(self) -> bool {
        matches!(self, Self::GradientResidual(_))
    }
}
