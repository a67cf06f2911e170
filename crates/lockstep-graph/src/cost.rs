//! Work of each instruction of a program: floating-point operations and bytes, from shapes alone.
//!
//! Each operation states its own work: see `work_context`. Here it is summed and, for parts of products and
//! collectives, divided. Logits count as operands, although they exist for one range of tokens at a time.

use lockstep_plan::work::{Pass, TaskKind};
use lockstep_tensor::Write;

use crate::{
    block::ParameterIndex,
    facts::Facts,
    instruction::{Gradient, Instruction, Phase},
    op::Op,
    program::Program,
    shapes::touched_bytes,
    timeline::{Activity, Cost},
    work_context::{Work, WorkContext},
};

/// Compute and memory of a block, known as soon as it is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockProfile {
    /// Floating-point operations of one forward: 2 per multiply-add of matrix products, and of attention's two
    /// products over the causal half.
    pub forward_flops: u64,
    /// Floating-point operations of one backward: for each product, as many as forward for the input gradients and as
    /// many for the weight gradients, where these are needed.
    pub backward_flops: u64,
    /// Bytes saved from the forward to the backward, the block's output included.
    pub saved_bytes: usize,
    /// Bytes of scratch inside a forward or a backward.
    pub workspace_bytes: usize,
    /// Bytes saved between the two halves of a split backward.
    pub deferred_bytes: usize,
    /// Number of parameter elements on this rank.
    pub parameter_elements: usize,
    /// Floating-point operations of attention in one forward and one backward.
    pub attention_flops: u64,
}

impl Program {
    /// Returns the compute and memory of the block.
    pub fn profile(&self) -> BlockProfile {
        BlockProfile {
            forward_flops: self
                .recorded()
                .map(|(operation, facts)| self.forward_flops(operation, facts))
                .sum(),
            backward_flops: self
                .recorded()
                .map(|(operation, facts)| self.backward_flops(operation, facts))
                .sum(),
            saved_bytes: self.frame_bytes,
            workspace_bytes: self.workspace_bytes(),
            deferred_bytes: self.deferred_bytes,
            parameter_elements: (0..self.parameters().len())
                .map(|index| self.shapes.parameter_elements(ParameterIndex(index)) as usize)
                .sum(),
            attention_flops: self.attention_flops(),
        }
    }

    fn attention_flops(&self) -> u64 {
        let is_attention = |(operation, facts): &(&dyn Op, &Facts)| {
            let work = operation.work(&self.context(facts, Pass::Forward, 0));
            work.iter().any(|work| matches!(work.kind, TaskKind::Attention(_)))
        };
        let flops = |(operation, facts): (&dyn Op, &Facts)| {
            self.forward_flops(operation, facts) + self.backward_flops(operation, facts)
        };
        self.recorded().filter(is_attention).map(flops).sum()
    }

    fn context<'a>(&'a self, facts: &'a Facts, pass: Pass, gradient_bytes: u64) -> WorkContext<'a> {
        WorkContext { shapes: &self.shapes, facts, pass, gradient_bytes }
    }

    fn forward_flops(&self, operation: &dyn Op, facts: &Facts) -> u64 {
        model_flops(&operation.work(&self.context(facts, Pass::Forward, 0)))
    }

    fn backward_flops(&self, operation: &dyn Op, facts: &Facts) -> u64 {
        let training = &self.shapes.training;
        let of = |pass| model_flops(&operation.work(&self.context(facts, pass, 0)));
        if facts.is_loss {
            // Its backward computes the logits, which are those of the forward.
            let is_run = training.runs_for_inputs(facts);
            return if is_run { of(Pass::BackwardInputs) - of(Pass::Forward) } else { 0 };
        }
        let inputs = if training.reaches_inputs(facts) { of(Pass::BackwardInputs) } else { 0 };
        inputs + if training.trains_weight(facts) { of(Pass::BackwardWeights) } else { 0 }
    }

    /// Returns the name, pass, unit and first parameter of an instruction.
    pub(crate) fn activity(&self, instruction: &Instruction, phase: &Phase, unit: usize) -> Activity {
        let of_gradients =
            |name| Activity { name, pass: Some(Pass::BackwardInputs), unit: Some(unit), parameter: None };
        let (operation, pass) = match instruction {
            Instruction::Forward(operation) => (*operation, phase.pass),
            Instruction::BackwardInputs { operation, .. } => (*operation, Pass::BackwardInputs),
            Instruction::BackwardWeights { operation, .. } => (*operation, Pass::BackwardWeights),
            Instruction::Part { product, .. } => return self.activity(product, phase, unit),
            Instruction::Start { transit }
            | Instruction::Send { transit, .. }
            | Instruction::Await { transit, .. } => {
                return self.activity(&phase.collectives[*transit].exchange, phase, unit);
            }
            Instruction::Copy { .. } => return of_gradients("copy gradient"),
            Instruction::Add { .. } => return of_gradients("add gradient"),
        };
        let facts = &self.facts[operation];
        Activity {
            name: facts.name,
            pass: Some(pass),
            unit: Some(unit),
            parameter: facts.parameters().next(),
        }
    }

    /// Returns the work of an instruction that calls an operation; `None` for other instructions.
    pub(crate) fn operation_work(&self, instruction: &Instruction, phase: &Phase) -> Option<Vec<Work>> {
        let (index, pass) = match instruction {
            Instruction::Forward(operation) => (*operation, Pass::Forward),
            Instruction::BackwardInputs { operation, .. } => (*operation, Pass::BackwardInputs),
            Instruction::BackwardWeights { operation, .. } => (*operation, Pass::BackwardWeights),
            _ => return None,
        };
        let facts = &self.facts[index];
        let bytes = |gradient: Gradient| touched_bytes(facts, phase.buffers[gradient.0].info);
        let gradient_bytes = match instruction {
            Instruction::BackwardInputs { dy, dx, .. } => {
                let written: u64 = dx.iter().map(|&(dx, write)| bytes(dx) * passes(write)).sum();
                dy.map_or(0, bytes) + written
            }
            Instruction::BackwardWeights { dy, .. } => bytes(*dy),
            _ => 0,
        };
        Some(self.operations[index].work(&self.context(facts, pass, gradient_bytes)))
    }

    /// Returns the cost of an instruction.
    pub(crate) fn cost(&self, instruction: &Instruction, phase: &Phase) -> Cost {
        let bytes = |gradient: Gradient| phase.buffers[gradient.0].info.bytes() as u64;
        match instruction {
            Instruction::Part { product, transit, rows } => {
                let transit = &phase.collectives[*transit];
                share_of(self.cost(product, phase), transit.part_rows(*rows), transit.info.rows)
            }
            // A collective is counted in full where its end is awaited.
            Instruction::Start { .. } | Instruction::Send { .. } => Cost::default(),
            Instruction::Await { transit, chunk } => {
                let transit = &phase.collectives[*transit];
                let rows = transit.chunks[*chunk].len();
                share_of(self.cost(&transit.exchange, phase), rows, transit.block_rows())
            }
            Instruction::Copy { from, to } => Cost::of_bytes(bytes(*from) + bytes(*to)),
            Instruction::Add { from, to } => Cost {
                vector_flops: phase.buffers[to.0].info.elements() as u64,
                ..Cost::of_bytes(bytes(*from) + bytes(*to) * passes(Write::Accumulate))
            },
            Instruction::Forward(_)
            | Instruction::BackwardInputs { .. }
            | Instruction::BackwardWeights { .. } => {
                sum(&self.operation_work(instruction, phase).unwrap_or_default())
            }
        }
    }
}

/// Returns the floating-point operations that a model's count includes: of matrix products, and of attention without
/// recomputed scores.
fn model_flops(work: &[Work]) -> u64 {
    let of = |work: &Work| match work.kind {
        TaskKind::Attention(attention) => attention.flops,
        _ => work.cost.product_flops,
    };
    work.iter().map(of).sum()
}

/// Sums the cost of all tasks of an operation.
fn sum(work: &[Work]) -> Cost {
    work.iter().fold(Cost::default(), |mut all, work| {
        all += work.cost;
        all
    })
}

/// Returns the proportional cost of `rows` of the `all` rows of an operation.
fn share_of(cost: Cost, rows: usize, all: usize) -> Cost {
    let share = |of: u64| (u128::from(of) * rows as u128 / all.max(1) as u128) as u64;
    Cost {
        product_flops: share(cost.product_flops),
        vector_flops: share(cost.vector_flops),
        bytes: share(cost.bytes),
    }
}

/// Number of times that a written operand goes through memory.
fn passes(write: Write) -> u64 {
    match write {
        Write::Overwrite => 1,
        Write::Accumulate => 2,
    }
}
