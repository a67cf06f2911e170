//! What frameworks without a plan keep of a block: every value that some gradient needs, once.
//!
//! Lockstep's own frames hold less, for they know what can be made again (`Program::compile`). This count is for comparing with others
//! and with what is published of them.

use lockstep_plan::work::Kept;

use crate::{
    Program,
    operation::{AttentionOperation, Operation},
    program::stored_as,
};

impl Program {
    /// What others keep of the block, if nothing is computed again. The statistics of norms and of the softmax, a few numbers a row,
    /// are left out.
    pub fn kept(&self) -> Kept {
        let elements = |value: crate::Value| self.values[value.0].elements() as u64;
        let mut kept = Kept {
            value_bytes: self.needed_bytes(),
            input_bytes: self.input.map_or(0, |input| self.values[input.0].bytes() as u64),
            ..Kept::default()
        };
        for operation in self.operations.iter().filter(|operation| self.training.runs_for_inputs(operation)) {
            match *operation {
                Operation::Dropout { y, .. } => kept.dropped += elements(y),
                Operation::Attention(ref attention) => {
                    let scores = self.scores(attention);
                    kept.scores += scores;
                    kept.dropped_scores += if attention.dropout.is_some() { scores } else { 0 };
                }
                Operation::OutputLoss { logits, .. } => {
                    kept.logits += (self.shape.tokens() * self.values[logits.0].columns) as u64;
                }
                _ => {}
            }
        }
        kept
    }

    /// Elements of the square of scores of the heads that are here: all queries that are here by all keys.
    pub(crate) fn scores(&self, attention: &AttentionOperation) -> u64 {
        let queries = self.values[attention.q.0].rows;
        (attention.shape.heads * queries * self.shape.seq_len * self.context.ranks) as u64
    }

    /// Bytes of the values that gradients need, each once.
    fn needed_bytes(&self) -> u64 {
        let stored_as = stored_as(self.values.len(), &self.operations);
        let mut is_needed = vec![false; self.values.len()];
        for operation in &self.operations {
            let for_weights = operation.needs_for_weights(&self.training);
            let for_inputs = self.training.runs_for_inputs(operation).then(|| operation.needs_for_inputs());
            for value in for_inputs.into_iter().flatten().chain(for_weights) {
                is_needed[stored_as[value.0]] = true;
            }
        }
        // What other ranks have as well is gathered again (Korthikanti et al. 2022, section 4.2.2).
        for operation in self.operations.iter().filter(|operation| operation.is_gathered()) {
            if std::mem::replace(&mut is_needed[operation.output().0], false) {
                operation.inputs().iter().for_each(|input| is_needed[stored_as[input.0]] = true);
            }
        }
        let bytes_of = |operation: &Operation| -> u64 {
            let returned = match *operation {
                Operation::Combine { returned, .. } => returned,
                _ => None,
            };
            let values = [operation.output()].into_iter().chain(returned);
            let is_kept =
                |value: &crate::Value| is_needed[value.0] && self.values[value.0].dtype == self.shape.dtype;
            self.bytes(operation, values.filter(is_kept))
        };
        let input = self.input.filter(|input| is_needed[input.0]);
        let of_input = input.map_or(0, |input| self.values[input.0].bytes() as u64);
        of_input + self.operations.iter().map(bytes_of).sum::<u64>()
    }
}
