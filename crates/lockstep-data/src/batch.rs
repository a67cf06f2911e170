//! A micro-batch: the input of one forward pass.

use lockstep_tensor::{NamedTensor, TensorData, is_name_of};

/// Label of a position that is masked: it counts neither in the loss nor in the number of valid tokens.
pub const IGNORE_LABEL: i32 = -100;

/// `sequences` × `seq_len` tokens with their labels, row-major, on the host, and the named inputs of the samples.
///
/// The vectors of tokens have `sequences * seq_len` elements. They are empty for samples of named tensors, whose `seq_len`
/// is 1.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MicroBatch {
    /// Token ids, the inputs.
    pub ids: Vec<u32>,
    /// Id of the token that follows each input, or [`IGNORE_LABEL`].
    pub labels: Vec<i32>,
    /// Position of each token, counted from the start of its sequence, or of its document where documents are kept
    /// apart.
    pub positions: Vec<u32>,
    /// For each token, the index within its sequence of the first token of its document. All zero where documents are
    /// not kept apart.
    pub document_starts: Vec<u32>,
    /// Global sample number of each sequence, `[sequences]`. Dropout is keyed by it. Numbers keep growing over epochs,
    /// so they identify the epoch too.
    pub sample_numbers: Vec<u64>,
    /// Named inputs besides the tokens, `[sequences, ...]` each.
    pub inputs: Vec<NamedTensor>,
    /// Number of damaged samples that were skipped for these.
    pub skipped: u64,
    /// Number of sequences: the rows.
    pub sequences: usize,
    /// Tokens per sequence: the columns.
    pub seq_len: usize,
}

impl MicroBatch {
    /// Returns the number of labels that count in the loss.
    pub fn valid_tokens(&self) -> u64 {
        self.labels.iter().filter(|&&label| label != IGNORE_LABEL).count() as u64
    }

    /// Masks the labels of the samples from index `counted` on, so that they do not count in losses and metrics: the labels of
    /// tokens and the inputs named in `targets`. Returns false if one of these does not hold integers, or there are none.
    pub fn mask_from(&mut self, counted: usize, targets: &mut dyn Iterator<Item = &str>) -> bool {
        let Self { inputs, labels, sequences, .. } = self;
        let mask = |labels: &mut [i32]| {
            let of_sample = labels.len() / (*sequences).max(1);
            labels[counted * of_sample..].fill(IGNORE_LABEL);
        };
        let mut is_masked = !labels.is_empty();
        mask(labels);
        for target in targets {
            let of_inputs = inputs.iter_mut().find(|tensor| is_name_of(&tensor.name, target));
            match of_inputs.map(|tensor| &mut tensor.data) {
                Some(TensorData::I32(labels)) => mask(labels),
                Some(_) => return false,
                None => continue,
            }
            is_masked = true;
        }
        is_masked
    }

    pub(crate) fn clear(&mut self, seq_len: usize) {
        self.ids.clear();
        self.labels.clear();
        self.positions.clear();
        self.document_starts.clear();
        self.sample_numbers.clear();
        self.skipped = 0;
        self.sequences = 0;
        self.seq_len = seq_len;
    }
}
