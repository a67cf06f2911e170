//! Where others find a rank's data.

/// What a rank says of its memory when it begins an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Nowhere yet: it will go through chunks.
    Private,
    /// In its small slot.
    Small,
    /// In its segment, at this byte.
    Shared(usize),
}

impl Place {
    pub(crate) fn to_word(self) -> u64 {
        match self {
            Self::Private => u64::MAX,
            Self::Small => u64::MAX - 1,
            Self::Shared(offset) => offset as u64,
        }
    }

    pub(crate) fn from_word(word: u64) -> Self {
        match word {
            u64::MAX => Self::Private,
            word if word == u64::MAX - 1 => Self::Small,
            offset => Self::Shared(offset as usize),
        }
    }
}
