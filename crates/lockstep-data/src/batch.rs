//! A micro-batch: what one forward pass reads.

/// The label of a position that counts neither in the loss nor in its number of tokens.
pub const IGNORE_LABEL: i32 = -100;

/// `sequences` × `seq_len` tokens with their labels, row-major, on the host.
///
/// All vectors but `sample_numbers` have `sequences * seq_len` elements.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MicroBatch {
    /// Token ids.
    pub ids: Vec<u32>,
    /// The id that follows each token, or [`IGNORE_LABEL`].
    pub labels: Vec<i32>,
    /// The position of each token in its sequence.
    pub positions: Vec<u32>,
    /// For each token, the index within its sequence of the first token of its document; 0 everywhere where
    /// documents are not kept apart.
    pub document_starts: Vec<u32>,
    /// The global sample number of each sequence (`[sequences]`): dropout is keyed by it. It grows over
    /// epochs, so it names the epoch too.
    pub sample_numbers: Vec<u64>,
    /// Rows.
    pub sequences: usize,
    /// Columns.
    pub seq_len: usize,
}

impl MicroBatch {
    /// How many labels count in the loss.
    pub fn valid_tokens(&self) -> u64 {
        self.labels.iter().filter(|&&label| label != IGNORE_LABEL).count() as u64
    }

    pub(crate) fn clear(&mut self, seq_len: usize) {
        self.ids.clear();
        self.labels.clear();
        self.positions.clear();
        self.document_starts.clear();
        self.sample_numbers.clear();
        self.sequences = 0;
        self.seq_len = seq_len;
    }
}
