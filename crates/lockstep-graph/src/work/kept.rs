//! Activation memory of a framework without memory planning: every value that some gradient needs is saved once.
//!
//! Lockstep's frames are smaller, because `Program::compile` recomputes some of these values. This count serves for
//! comparison with other systems and with published figures.

use lockstep_plan::work::Kept;

use crate::{block::Value, facts::Facts, planner::stored_as, program::Program};

impl Program {
    /// Returns the activations that a framework without memory planning would save for the block without
    /// recomputation. Statistics of norms and of the softmax, a few numbers per row, are not counted.
    pub fn kept(&self) -> Kept {
        let shapes = &self.shapes;
        let mut kept = Kept {
            value_bytes: self.needed_bytes(),
            input_bytes: self.input.map_or(0, |input| shapes.bytes(input)),
            ..Kept::default()
        };
        let runs = |facts: &Facts| shapes.training.runs_for_inputs(facts);
        for (operation, _) in self.recorded().filter(|(_, facts)| runs(facts)) {
            let of = operation.kept(shapes);
            kept.dropped += of.dropped;
            kept.scores += of.scores;
            kept.dropped_scores += of.dropped_scores;
            kept.logits += of.logits;
        }
        kept
    }

    /// Bytes of the values that gradients need, each counted once.
    fn needed_bytes(&self) -> u64 {
        let stored_as = stored_as(self.shapes.values.len(), &self.facts);
        let mut is_needed = vec![false; self.shapes.values.len()];
        for value in self.facts.iter().flat_map(|facts| self.shapes.training.needs(facts)) {
            is_needed[stored_as[value.0]] = true;
        }
        // The output of an all-gather is gathered again in the backward instead (Korthikanti et al. 2022, section 4.2.2).
        for facts in self.facts.iter().filter(|facts| facts.is_gathered) {
            if std::mem::replace(&mut is_needed[facts.output().0], false) {
                facts.inputs.iter().for_each(|input| is_needed[stored_as[input.0]] = true);
            }
        }
        let is_kept = |value: &&Value| {
            is_needed[value.0] && self.shapes.values[value.0].dtype == self.shapes.block.dtype
        };
        let bytes_of = |facts: &Facts| -> u64 {
            let values = facts.outputs[..1].iter().chain(&facts.wide_outputs);
            self.shapes.touched_bytes(facts, values.filter(is_kept))
        };
        let input = self.input.filter(|input| is_needed[input.0]);
        let of_input = input.map_or(0, |input| self.shapes.bytes(input));
        of_input + self.facts.iter().map(bytes_of).sum::<u64>()
    }
}
