//! The work of one rank for a micro-batch, read from the instructions that a replay runs and expressed in [`lockstep_plan::work`].
//!
//! Matrix products have the shapes of this rank, collectives the bytes that ranks really send. A collective that
//! overlaps with its products in chunks counts as one product and one collective. Bytes and other floating-point
//! operations are those of `cost`. The submodule `kept` counts the activations that other frameworks save.

mod kept;

use lockstep_plan::{
    Among,
    work::{Exchange, Pass, Task, TaskKind, UnitWork},
};

use crate::{
    block::ParameterIndex,
    instruction::{Instruction, Phase},
    program::Program,
    timeline::Cost,
    work_context::Work,
};

impl Program {
    /// Returns the work of one rank for a micro-batch, and the activations that other frameworks would save for it.
    pub fn work(&self) -> UnitWork {
        let is_expert = |index: &ParameterIndex| self.parameters()[index.0].share.among == Among::Experts;
        let elements = |index| self.shapes.parameter_elements(index);
        let parameters = (0..self.parameters().len()).map(ParameterIndex);
        UnitWork {
            forward: self.tasks(&self.forward),
            backward: self.tasks(&self.backward),
            backward_inputs: self.tasks(&self.backward_inputs),
            backward_weights: self.tasks(&self.backward_weights),
            kept: self.kept(),
            parameter_elements: parameters.clone().map(elements).sum(),
            expert_elements: parameters.filter(is_expert).map(elements).sum(),
            trained_elements: self.trained().map(elements).sum(),
            trained_expert_elements: self.trained().filter(is_expert).map(elements).sum(),
        }
    }

    fn tasks(&self, phase: &Phase) -> Vec<Task> {
        let mut list = List { program: self, phase, tasks: Vec::new() };
        let mut in_parts: Vec<&Instruction> = Vec::new();
        for instruction in &phase.instructions {
            match instruction {
                Instruction::Part { product, .. } => {
                    if !in_parts.contains(&product.as_ref()) {
                        in_parts.push(product);
                        list.add(product, Overlap::Exposed);
                    }
                }
                Instruction::Start { transit } | Instruction::Send { transit, chunk: 0 } => {
                    list.add(&phase.collectives[*transit].exchange, Overlap::Overlapped);
                }
                Instruction::Send { .. } | Instruction::Await { .. } => {}
                // In a training step the backward computes the loss: see `Program::forward_for_backward`.
                Instruction::Forward(operation)
                    if phase.pass == Pass::Forward
                        && self.has_backward()
                        && self.facts[*operation].is_loss => {}
                _ => list.add(instruction, Overlap::Exposed),
            }
        }
        list.tasks
    }
}

/// Tasks of a phase, collected instruction by instruction.
struct List<'a> {
    program: &'a Program,
    phase: &'a Phase,
    tasks: Vec<Task>,
}

impl List<'_> {
    fn add(&mut self, instruction: &Instruction, overlap: Overlap) {
        let (program, phase) = (self.program, self.phase);
        let activity = program.activity(instruction, phase, 0);
        let pass = activity.pass.unwrap_or(Pass::Forward);
        let stream = || vec![Work { kind: TaskKind::Stream, cost: program.cost(instruction, phase) }];
        for Work { kind, cost } in program.operation_work(instruction, phase).unwrap_or_else(stream) {
            let (kind, cost) = match kind {
                // A collective moves no memory apart from its transfer.
                TaskKind::Exchange(exchange) => {
                    let is_overlapped = exchange.is_overlapped || overlap == Overlap::Overlapped;
                    (TaskKind::Exchange(Exchange { is_overlapped, ..exchange }), Cost::default())
                }
                _ => (kind, cost),
            };
            let Cost { bytes, vector_flops, .. } = cost;
            self.tasks.push(Task { name: activity.name, pass, kind, bytes, vector_flops });
        }
    }
}

/// Overlap of a collective with compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Overlap {
    Exposed,
    Overlapped,
}

#[cfg(test)]
mod tests;
