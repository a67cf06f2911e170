//! Inputs of memory planning: the values that a block saves, and the objects that each instruction reads and writes.

use lockstep_plan::{Recompute, TensorPlace};

use crate::{
    block::{Mode, Value, ValueInfo},
    facts::Facts,
    instruction::{Gradient, Instruction},
    reports::Report,
    storage::{Bump, Region, Slot},
    training::Training,
};

/// Returns for each value the value whose memory it uses: itself, unless it is an alias.
pub(crate) fn stored_as(values: usize, facts: &[Facts]) -> Vec<usize> {
    let mut stored_as: Vec<usize> = (0..values).collect();
    for facts in facts {
        if let Some(value) = facts.alias_of {
            stored_as[facts.output().0] = stored_as[value.0];
        }
    }
    stored_as
}

/// The inputs of memory planning, and the slots that are fixed for all phases.
pub(crate) struct Planner<'a> {
    pub(crate) values: &'a [ValueInfo],
    /// Facts of each operation.
    pub(crate) facts: &'a [Facts],
    pub(crate) input: Option<Value>,
    pub(crate) output: Value,
    pub(crate) training: &'a Training,
    /// Size of the tensor-parallel group, and number of chunks of its overlapped collectives.
    pub(crate) ranks: usize,
    pub(crate) chunks: usize,
    /// Operation that writes each value; `None` for the block's input.
    pub(crate) producers: Vec<Option<usize>>,
    /// The value whose memory each value uses: itself, unless it is an alias.
    pub(crate) stored_as: Vec<usize>,
    /// Slots of the values in the frame and of the block's input.
    pub(crate) fixed: Vec<Option<Slot>>,
    pub(crate) frame_bytes: usize,
}

impl<'a> Planner<'a> {
    pub(crate) fn new(
        values: &'a [ValueInfo],
        facts: &'a [Facts],
        (input, given): (Option<Value>, &[(Value, Region)]),
        (output, reports): (Value, &[Report]),
        training: &'a Training,
        (mode, recompute): (Mode, Recompute),
        TensorPlace { ranks, chunks, .. }: TensorPlace,
    ) -> Self {
        let mut producers = vec![None; values.len()];
        for (index, facts) in facts.iter().enumerate() {
            for value in &facts.outputs {
                producers[value.0] = Some(index);
            }
        }
        let stored_as = stored_as(values.len(), facts);
        let mut saved = vec![false; values.len()];
        if mode == Mode::Training && recompute != Recompute::Full {
            for value in facts.iter().flat_map(|facts| training.needs(facts)) {
                saved[stored_as[value.0]] = true;
            }
        }
        let is_dropped =
            |facts: &&Facts| facts.is_gathered || (recompute == Recompute::Selective && facts.is_cheap);
        for facts in facts.iter().filter(is_dropped) {
            let is_needed = std::mem::replace(&mut saved[facts.output().0], false);
            // Save the local keys and values, so that their projection is not recomputed before the gather.
            if is_needed && facts.gathers_sequences {
                facts.inputs.iter().for_each(|input| saved[stored_as[input.0]] = true);
            }
        }
        saved[output.0] = true;
        reports.iter().for_each(|report| saved[report.values.0] = true);
        facts.iter().filter_map(|facts| facts.slot_counts).for_each(|value| saved[value.0] = true);
        facts.iter().filter_map(|facts| facts.running).for_each(|running| saved[running.statistics.0] = true);
        let mut frame = Bump::default();
        let mut fixed: Vec<Option<Slot>> = (0..values.len())
            .map(|index| {
                if input == Some(Value(index)) {
                    Some(Slot::start_of(Region::Input))
                } else if let Some((_, region)) = given.iter().find(|(value, _)| value.0 == index) {
                    Some(Slot::start_of(*region))
                } else {
                    let is_in_frame = saved[index] && index != output.0;
                    is_in_frame.then(|| frame.place(Region::Frame, values[index].bytes()))
                }
            })
            .collect();
        // The output comes last, so that a frame can do without it.
        fixed[output.0].get_or_insert_with(|| frame.place(Region::Output, values[output.0].bytes()));
        let frame_bytes = frame.bytes;
        let chunks = if ranks > 1 { chunks } else { 1 };
        Self {
            values,
            facts,
            input,
            output,
            training,
            ranks,
            chunks,
            producers,
            stored_as,
            fixed,
            frame_bytes,
        }
    }

    /// Returns the values whose memory these use.
    pub(crate) fn stored(&self, values: impl Iterator<Item = Value>) -> Vec<Value> {
        values.map(|value| Value(self.stored_as[value.0])).collect()
    }

    pub(crate) fn values_read(&self, instruction: &Instruction) -> Vec<Value> {
        match instruction {
            Instruction::Forward(operation) => self.stored(self.facts[*operation].reads()),
            Instruction::BackwardInputs { operation, .. } => {
                self.stored(self.facts[*operation].saved_for_inputs.iter().copied())
            }
            Instruction::BackwardWeights { operation, .. } => {
                self.stored(self.training.needs_for_weights(&self.facts[*operation]).iter().copied())
            }
            _ => vec![],
        }
    }

    /// Returns the object number of a gradient. Objects are the values followed by the gradients.
    pub(crate) fn object(&self, gradient: Gradient) -> usize {
        self.values.len() + gradient.0
    }

    /// Returns every object that an instruction reads or writes, for the instructions before [`Planner::overlapped`].
    pub(crate) fn touches(&self, instruction: &Instruction) -> Vec<usize> {
        let mut objects: Vec<usize> = self.values_read(instruction).iter().map(|value| value.0).collect();
        let mut values = |values: &[Value]| objects.extend(values.iter().map(|value| value.0));
        let mut gradients = Vec::new();
        match instruction {
            Instruction::Forward(operation) => {
                values(&self.facts[*operation].scratch);
                values(&self.facts[*operation].outputs);
            }
            Instruction::BackwardInputs { operation, dy, dx } => {
                values(&self.facts[*operation].scratch);
                gradients.extend(dy.iter().copied().chain(dx.iter().map(|(dx, _)| *dx)));
            }
            Instruction::BackwardWeights { operation, dy } => {
                values(&self.facts[*operation].scratch_for_weights);
                gradients.push(*dy);
            }
            Instruction::Copy { from, to } | Instruction::Add { from, to } => gradients.extend([*from, *to]),
            _ => unreachable!("an overlapped instruction: see touches_of"),
        }
        objects.extend(gradients.into_iter().map(|gradient| self.object(gradient)));
        objects
    }
}
