//! Location of a rank's data for the other ranks.

/// Location of a buffer, which a rank publishes when it starts an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BufferLocation {
    /// Private memory: the data goes through chunks.
    Private,
    /// The rank's small slot.
    Small,
    /// Shared memory, at this byte offset of the rank's segment.
    Shared(usize),
}

impl BufferLocation {
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
