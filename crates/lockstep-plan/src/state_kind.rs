//! Tensors of a parameter's state in a checkpoint.

/// A tensor of a parameter's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StateKind {
    /// Weights in full precision.
    Parameter,
    /// AdamW's first moment, or Lion's average.
    ExpAvg,
    /// AdamW's second moment.
    ExpAvgSq,
    /// Momentum of SGD and Muon.
    MomentumBuffer,
    /// Quantization error of a rank's gradients (error feedback). Each rank with a partial sum of the gradient has its own; the value is
    /// its index among them.
    GradientResidual(usize),
}

impl StateKind {
    /// All kinds that a parameter has once.
    pub const ALL: [Self; 4] = [Self::Parameter, Self::ExpAvg, Self::ExpAvgSq, Self::MomentumBuffer];

    /// All kinds that optimizers keep.
    pub const OF_OPTIMIZERS: [Self; 3] = [Self::ExpAvg, Self::ExpAvgSq, Self::MomentumBuffer];

    /// Returns the name in checkpoints.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Parameter => "parameter",
            Self::ExpAvg => "exp_avg",
            Self::ExpAvgSq => "exp_avg_sq",
            Self::MomentumBuffer => "momentum_buffer",
            Self::GradientResidual(_) => "gradient_residual",
        }
    }

    /// Returns true if each rank with a partial sum of a gradient has its own such tensor.
    pub const fn is_of_one_rank(self) -> bool {
        matches!(self, Self::GradientResidual(_))
    }
}
