//! Inputs of memory planning: the values that a block saves, and the objects that each instruction reads and writes.

use lockstep_plan::{Recompute, TensorPlace};

use crate::{
    block::{Mode, Value, ValueInfo},
    instruction::{Gradient, Instruction},
    operation::Operation,
    storage::{Bump, Region, Slot},
    training::Training,
};

/// Returns for each value the value whose memory it uses: itself, unless it is an alias.
pub(crate) fn stored_as(values: usize, operations: &[Operation]) -> Vec<usize> {
    let mut stored_as: Vec<usize> = (0..values).collect();
    for operation in operations {
        if let Some(value) = operation.renamed() {
            stored_as[operation.output().0] = stored_as[value.0];
        }
    }
    stored_as
}

/// The inputs of memory planning, and the slots that are fixed for all phases.
pub(crate) struct Planner<'a> {
    pub(crate) values: &'a [ValueInfo],
    pub(crate) operations: &'a [Operation],
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
        operations: &'a [Operation],
        input: Option<Value>,
        output: Value,
        training: &'a Training,
        (mode, recompute): (Mode, Recompute),
        TensorPlace { ranks, chunks, .. }: TensorPlace,
    ) -> Self {
        let mut producers = vec![None; values.len()];
        for (index, operation) in operations.iter().enumerate() {
            for value in operation.outputs() {
                producers[value.0] = Some(index);
            }
        }
        let stored_as = stored_as(values.len(), operations);
        let mut saved = vec![false; values.len()];
        if mode == Mode::Training && recompute != Recompute::Full {
            for operation in operations {
                for value in training.needs(operation) {
                    saved[stored_as[value.0]] = true;
                }
            }
        }
        let is_cheap = |operation: &&Operation| recompute == Recompute::Selective && operation.is_cheap();
        for operation in operations.iter().filter(|operation| is_cheap(operation) || operation.is_gathered())
        {
            let is_needed = std::mem::replace(&mut saved[operation.output().0], false);
            // Save the local keys and values, so that their projection is not recomputed before the gather.
            if is_needed && operation.gathers_sequences() {
                operation.inputs().iter().for_each(|input| saved[stored_as[input.0]] = true);
            }
        }
        saved[output.0] = true;
        operations.iter().filter_map(Operation::always_saved).for_each(|value| saved[value.0] = true);
        let mut frame = Bump::default();
        let mut fixed: Vec<Option<Slot>> = (0..values.len())
            .map(|index| {
                if input == Some(Value(index)) {
                    Some(Slot::start_of(Region::Input))
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
            operations,
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
    pub(crate) fn stored(&self, values: Vec<Value>) -> Vec<Value> {
        values.into_iter().map(|value| Value(self.stored_as[value.0])).collect()
    }

    pub(crate) fn values_read(&self, instruction: &Instruction) -> Vec<Value> {
        self.stored(match instruction {
            Instruction::Forward(operation) => self.operations[*operation].reads(),
            Instruction::BackwardInputs { operation, .. } => self.operations[*operation].needs_for_inputs(),
            Instruction::BackwardWeights { operation, .. } => {
                self.training.needs_for_weights(&self.operations[*operation])
            }
            Instruction::Copy { .. }
            | Instruction::Add { .. }
            | Instruction::Start { .. }
            | Instruction::Part { .. }
            | Instruction::Send { .. }
            | Instruction::Await { .. } => vec![],
        })
    }

    /// Returns the object number of a gradient. Objects are the values followed by the gradients.
    pub(crate) fn object(&self, gradient: Gradient) -> usize {
        self.values.len() + gradient.0
    }

    /// Returns every object that an instruction reads or writes, for the instructions before [`Planner::overlapped`].
    pub(crate) fn touches(&self, instruction: &Instruction) -> Vec<usize> {
        let mut objects: Vec<usize> = self.values_read(instruction).iter().map(|value| value.0).collect();
        if let Instruction::Forward(operation) | Instruction::BackwardInputs { operation, .. } = instruction {
            objects.extend(self.operations[*operation].scratch().iter().map(|value| value.0));
        }
        if let Instruction::BackwardWeights { operation, .. } = instruction {
            objects.extend(self.operations[*operation].scratch_for_weights().iter().map(|value| value.0));
        }
        let mut gradient = |gradient: Gradient| objects.push(self.object(gradient));
        match instruction {
            Instruction::Forward(operation) => {
                objects.extend(self.operations[*operation].outputs().iter().map(|value| value.0));
            }
            Instruction::BackwardInputs { dy, dx, .. } => {
                dy.iter().copied().chain(dx.iter().map(|(dx, _)| *dx)).for_each(&mut gradient);
            }
            Instruction::BackwardWeights { dy, .. } => gradient(*dy),
            Instruction::Copy { from, to } | Instruction::Add { from, to } => {
                gradient(*from);
                gradient(*to);
            }
            Instruction::Start { .. }
            | Instruction::Part { .. }
            | Instruction::Send { .. }
            | Instruction::Await { .. } => {
                unreachable!("what they touch is said by their communication_buffer")
            }
        }
        objects
    }
}
