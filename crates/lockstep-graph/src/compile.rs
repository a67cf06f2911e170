//! Compilation of a recording into a program: recomputation of values that are not saved, and a place for every value
//! and gradient.

use std::collections::BTreeSet;

use lockstep_plan::{Recompute, work::Pass};

use crate::{
    backward::{self, Order},
    block::{Mode, Value},
    facts::Facts,
    instruction::{Gradient, GradientBuffer, Home, Instruction, Phase},
    overlap::Overlapped,
    planner::Planner,
    program::Program,
    recorder::Recorder,
    shapes::Shapes,
    storage::{Bump, Lifetime, Region, Slot, pack},
    training::{InputGradient, Training},
};

impl Recorder {
    /// Ends the recording and compiles it; `output` is the value that the next block reads.
    pub fn finish(self, output: Value, recompute: Recompute) -> Program {
        let recorder = self;
        #[cfg(feature = "faults")]
        let recorder = recorder.with_fault();
        let Recorder { mode, shape, context, place, values, operations, parameters, input, given, .. } =
            recorder;
        let wanted = input.filter(|_| recorder.input_gradient == InputGradient::Wanted);
        let facts: Vec<Facts> = operations.iter().map(|operation| operation.facts()).collect();
        // A view at the end is its input, which has the same rows and columns.
        let output = facts.iter().rev().fold(output, |output, facts| match facts.alias_of {
            Some(x) if facts.passes_gradient_on && facts.output() == output => x,
            _ => output,
        });
        let reports = recorder.reports.of_unit(output, &facts);
        let training = Training::new(values.len(), &facts, &parameters, wanted);
        let outputs = (output, reports.as_slice());
        let planner =
            Planner::new(&values, &facts, (input, &given), outputs, &training, (mode, recompute), place);
        let does_something = |index: &usize| facts[*index].alias_of.is_none();
        let forward_instructions =
            (0..operations.len()).filter(does_something).map(Instruction::Forward).collect();
        let forward = planner.place(Pass::Forward, forward_instructions, &[], &[]);

        let place = |instructions, gradients: &[GradientBuffer], deferred: &[(usize, Slot)]| {
            planner.place(Pass::Recompute, instructions, gradients, deferred)
        };
        let empty = || place(Vec::new(), &[], &[]);
        let (mut backward, mut backward_inputs, mut backward_weights) = (empty(), empty(), empty());
        let mut deferred_bytes = 0;
        if mode == Mode::Training {
            let fused = backward::derive(&values, &facts, input, output, &training, Order::Fused);
            let instructions = planner.with_recomputation(fused.inputs, &mut Vec::new());
            backward = place(instructions, &fused.gradients, &[]);

            let split = backward::derive(&values, &facts, input, output, &training, Order::Split);
            let mut recomputed = Vec::new();
            let inputs = planner.with_recomputation(split.inputs, &mut recomputed);
            let weights = planner.with_recomputation(split.weights, &mut recomputed);
            let (deferred, bytes) = planner.deferred(&inputs, &weights, &split.gradients);
            backward_inputs = place(inputs, &split.gradients, &deferred);
            backward_weights = place(weights, &split.gradients, &deferred);
            deferred_bytes = bytes;
        }
        Program {
            forward,
            backward,
            backward_inputs,
            backward_weights,
            frame_bytes: planner.frame_bytes,
            deferred_bytes,
            input,
            output,
            shapes: Shapes { block: shape, context, values, parameters, training, reports },
            operations,
            facts,
        }
    }
}

impl Planner<'_> {
    /// Inserts the forward of each unsaved value before the first instruction that reads it. `available` lists the
    /// values recomputed so far.
    fn with_recomputation(
        &self,
        instructions: Vec<Instruction>,
        available: &mut Vec<Value>,
    ) -> Vec<Instruction> {
        let mut out = Vec::with_capacity(instructions.len());
        for instruction in instructions {
            for value in self.values_read(&instruction) {
                self.ensure(value, available, &mut out);
            }
            out.push(instruction);
        }
        out
    }

    fn ensure(&self, value: Value, available: &mut Vec<Value>, out: &mut Vec<Instruction>) {
        if self.fixed[value.0].is_some() || available.contains(&value) {
            return;
        }
        let producer = self.producers[value.0].expect("a value that is not the block's input has a producer");
        for input in self.stored(self.facts[producer].reads()) {
            self.ensure(input, available, out);
        }
        out.push(Instruction::Forward(producer));
        available.extend(&self.facts[producer].outputs);
    }

    /// Returns slots in the deferred buffer for the objects that both halves of a split backward touch, and the total bytes.
    fn deferred(
        &self,
        inputs: &[Instruction],
        weights: &[Instruction],
        gradients: &[GradientBuffer],
    ) -> (Vec<(usize, Slot)>, usize) {
        let objects = |instructions: &[Instruction]| {
            let mut objects: Vec<usize> =
                instructions.iter().flat_map(|instruction| self.touches(instruction)).collect();
            objects.sort_unstable();
            objects.dedup();
            objects
        };
        let (first, second) = (objects(inputs), objects(weights));
        let scratch: BTreeSet<usize> = self
            .facts
            .iter()
            .filter(|facts| !facts.keeps_scratch)
            .flat_map(|facts| &facts.scratch)
            .map(|value| value.0)
            .collect();
        let mut bump = Bump::default();
        let places = second
            .into_iter()
            .filter(|object| first.binary_search(object).is_ok() && !scratch.contains(object))
            .filter(|&object| self.fixed.get(object).is_none_or(Option::is_none))
            .map(|object| (object, bump.place(Region::Deferred, self.bytes(object, gradients))))
            .collect();
        (places, bump.bytes)
    }

    fn bytes(&self, object: usize, gradients: &[GradientBuffer]) -> usize {
        match self.values.get(object) {
            Some(value) => value.bytes(),
            None => gradients[object - self.values.len()].info.bytes(),
        }
    }

    /// Returns for each object the object that takes over its storage. An output takes over that of an input which
    /// dies there and which it may overwrite; any other object keeps its own. The lifetime of such an output begins
    /// with the input's.
    fn heirs(
        &self,
        instructions: &[Instruction],
        gradients: &[GradientBuffer],
        slots: &[Option<Slot>],
        lifetimes: &mut [Option<Lifetime>],
    ) -> Vec<usize> {
        let mut heir: Vec<usize> = (0..slots.len()).collect();
        for (time, instruction) in instructions.iter().enumerate() {
            let Instruction::Forward(operation) = instruction else { continue };
            let facts = &self.facts[*operation];
            let output = facts.output().0;
            let dying = facts.in_place_inputs.iter().map(|value| self.stored_as[value.0]).find(|&input| {
                slots[input].is_none()
                    && input != output
                    && lifetimes[input].is_some_and(|lifetime| lifetime.last == time)
                    && self.bytes(input, gradients) == self.bytes(output, gradients)
            });
            if let Some(input) = dying {
                heir[input] = output;
                let first = lifetimes[input].map_or(time, |lifetime| lifetime.first);
                if let Some(lifetime) = &mut lifetimes[output] {
                    lifetime.first = lifetime.first.min(first);
                }
            }
        }
        heir
    }

    /// Assigns a slot to every object of a phase.
    fn place(
        &self,
        pass: Pass,
        instructions: Vec<Instruction>,
        gradients: &[GradientBuffer],
        deferred: &[(usize, Slot)],
    ) -> Phase {
        let count = self.values.len() + gradients.len();
        let mut slots: Vec<Option<Slot>> = self.fixed.clone();
        slots.extend(gradients.iter().map(|gradient| match gradient.home {
            Home::OutputGradient => Some(Slot::start_of(Region::OutputGradient)),
            Home::InputGradient => Some(Slot::start_of(Region::InputGradient)),
            Home::Anywhere => None,
        }));
        for &(object, slot) in deferred {
            slots[object] = Some(slot);
        }

        let Overlapped { instructions, collectives, overlap_buffer_bytes } =
            self.overlapped(instructions, gradients, &slots);
        let mut lifetimes: Vec<Option<Lifetime>> = vec![None; count];
        for (time, instruction) in instructions.iter().enumerate() {
            for object in self.touches_of(instruction, &collectives) {
                let bytes = self.bytes(object, gradients);
                lifetimes[object].get_or_insert(Lifetime { first: time, last: time, bytes }).last = time;
            }
        }

        let heir = self.heirs(&instructions, gradients, &slots, &mut lifetimes);
        let free: Vec<usize> = (0..count)
            .filter(|&object| {
                slots[object].is_none() && heir[object] == object && lifetimes[object].is_some()
            })
            .collect();
        let packed: Vec<Lifetime> = free.iter().filter_map(|&object| lifetimes[object]).collect();
        let (offsets, workspace_bytes) = pack(&packed);
        for (&object, offset_bytes) in free.iter().zip(offsets) {
            slots[object] = Some(Slot { region: Region::Workspace, offset_bytes });
        }
        for object in 0..count {
            let mut last = object;
            while heir[last] != last {
                last = heir[last];
            }
            if lifetimes[object].is_some() {
                slots[object] = slots[last];
            }
        }
        for value in 0..self.values.len() {
            slots[value] = slots[self.stored_as[value]];
        }
        let gradient_slots = (0..gradients.len()).map(|g| slots[self.object(Gradient(g))]).collect();
        slots.truncate(self.values.len());
        debug_assert!(self.input.is_none_or(|input| slots[input.0].is_some()));
        Phase {
            instructions,
            collectives,
            values: slots,
            gradients: gradient_slots,
            workspace_bytes,
            overlap_buffer_bytes,
            touches_output: lifetimes[self.output.0].is_some(),
            pass,
            buffers: gradients.to_vec(),
        }
    }
}
