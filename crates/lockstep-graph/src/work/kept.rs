//! Activation memory of a framework without memory planning: every value that some gradient needs is saved once.
//!
//! Lockstep's frames are smaller, because `Program::compile` recomputes some of these values. This count serves for
//! comparison with other systems and with published figures.

use lockstep_plan::work::Kept;

use crate::{
    block::Value,
    operation::{AttentionOperation, Facts, Operation},
    planner::stored_as,
    program::Program,
};

impl Program {
    /// Returns the activations that a framework without memory planning would save for the block without
    /// recomputation. Statistics of norms and of the softmax, a few numbers per row, are not counted.
    pub fn kept(&self) -> Kept {
        let elements = |value: Value| self.values[value.0].elements() as u64;
        let mut kept = Kept {
            value_bytes: self.needed_bytes(),
            input_bytes: self.input.map_or(0, |input| self.values[input.0].bytes() as u64),
            ..Kept::default()
        };
        for (operation, _) in self.recorded().filter(|(_, facts)| self.training.runs_for_inputs(facts)) {
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

    /// Elements of the attention score matrices of this rank's heads: local queries times keys of the whole sequence.
    pub(crate) fn scores(&self, attention: &AttentionOperation) -> u64 {
        let queries = self.values[attention.q.0].rows;
        (attention.shape.heads * queries * self.shape.seq_len * self.context.ranks) as u64
    }

    /// Bytes of the values that gradients need, each counted once.
    fn needed_bytes(&self) -> u64 {
        let stored_as = stored_as(self.values.len(), &self.facts);
        let mut is_needed = vec![false; self.values.len()];
        for value in self.facts.iter().flat_map(|facts| self.training.needs(facts)) {
            is_needed[stored_as[value.0]] = true;
        }
        // The output of an all-gather is gathered again in the backward instead (Korthikanti et al. 2022, section 4.2.2).
        for facts in self.facts.iter().filter(|facts| facts.is_gathered) {
            if std::mem::replace(&mut is_needed[facts.output().0], false) {
                facts.inputs.iter().for_each(|input| is_needed[stored_as[input.0]] = true);
            }
        }
        let bytes_of = |(operation, facts): (&Operation, &Facts)| -> u64 {
            let returned = match *operation {
                Operation::Combine { returned, .. } => returned,
                _ => None,
            };
            let values = facts.outputs[..1].iter().chain(&returned);
            let is_kept =
                |value: &&Value| is_needed[value.0] && self.values[value.0].dtype == self.shape.dtype;
            self.bytes(operation, values.filter(is_kept))
        };
        let input = self.input.filter(|input| is_needed[input.0]);
        let of_input = input.map_or(0, |input| self.values[input.0].bytes() as u64);
        of_input + self.recorded().map(bytes_of).sum::<u64>()
    }
}
