//! The tensors that belong to one parameter.

/// Which tensor of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StateKind {
    /// The weights, in full precision.
    Parameter,
    /// AdamW's first moment.
    ExpAvg,
    /// AdamW's second moment.
    ExpAvgSq,
    /// SGD's momentum.
    MomentumBuffer,
}

impl StateKind {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::Parameter, Self::ExpAvg, Self::ExpAvgSq, Self::MomentumBuffer];

    /// The name that checkpoints use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Parameter => "parameter",
            Self::ExpAvg => "exp_avg",
            Self::ExpAvgSq => "exp_avg_sq",
            Self::MomentumBuffer => "momentum_buffer",
        }
    }
}
