//! What each instruction of a program has to do: floating-point operations and bytes, from shapes alone.
//!
//! Bytes are the least that any implementation moves if nothing stays in a cache between operations: each
//! operand once, twice if it is added to.

use lockstep_tensor::Write;

use crate::{
    Activity, Cost, ParameterIndex, Pass, Program, Value,
    backward::{Gradient, GradientBuffer},
    operation::{AttentionOperation, Operation, RouteOperation},
    program::{Instruction, Phase},
    summa::BlockLinear,
};

/// Bytes of an element of a gradient of a weight.
const GRADIENT_BYTES: u64 = 4;

/// Whether a phase runs after the forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    Forward,
    Backward,
}

impl Program {
    /// What an instruction does, by name.
    pub(crate) fn activity(
        &self,
        instruction: &Instruction,
        phase: &Phase,
        stage: Stage,
        unit: usize,
    ) -> Activity {
        let (operation, pass) = match instruction {
            Instruction::Forward(operation) if stage == Stage::Forward => (*operation, Pass::Forward),
            Instruction::Forward(operation) => (*operation, Pass::Recompute),
            Instruction::BackwardInputs { operation, .. } => (*operation, Pass::BackwardInputs),
            Instruction::BackwardWeights { operation, .. } => (*operation, Pass::BackwardWeights),
            Instruction::Part { product, .. } => return self.activity(product, phase, stage, unit),
            Instruction::Start { transit }
            | Instruction::Send { transit, .. }
            | Instruction::Await { transit, .. } => {
                return self.activity(&phase.transits[*transit].exchange, phase, stage, unit);
            }
            Instruction::Copy { .. } | Instruction::Add { .. } => {
                let name = if matches!(instruction, Instruction::Copy { .. }) {
                    "copy gradient"
                } else {
                    "add gradient"
                };
                let pass = Some(Pass::BackwardInputs);
                return Activity { name, pass, unit: Some(unit), parameter: None };
            }
        };
        let operation = &self.operations[operation];
        let parameter = operation.parameters().next();
        Activity { name: operation.name(), pass: Some(pass), unit: Some(unit), parameter }
    }

    /// What an instruction costs.
    pub(crate) fn cost(
        &self,
        instruction: &Instruction,
        phase: &Phase,
        gradients: &[GradientBuffer],
    ) -> Cost {
        let gradient = |gradient: Gradient| gradients[gradient.0].info.bytes() as u64;
        match instruction {
            Instruction::Forward(operation) => self.forward_cost(&self.operations[*operation]),
            Instruction::BackwardInputs { operation, dy, dx } => {
                let operation = &self.operations[*operation];
                let written: u64 = dx.iter().map(|&(dx, write)| gradient(dx) * passes(write)).sum();
                let read = dy.map_or(0, gradient) + self.bytes(operation.needs_for_inputs());
                // The matrix or the scale; a bias has no part in it.
                let weight = operation.parameters().next().map_or(0, |index| self.weight_bytes(index));
                let gradient =
                    operation.parameters().next().map_or(0, |index| self.parameter_elements(index));
                let (products, weight_gradient) = match *operation {
                    // The scores, and four products for the three gradients.
                    Operation::Attention(_) => (self.product_flops(operation) / 2 * 5, 0),
                    // The logits, and the gradients of the operands that are needed.
                    Operation::OutputLoss { x, weight, .. } => {
                        let is_trained = u64::from(self.training.trains(weight));
                        let products = 1 + u64::from(self.training.differentiates(x)) + is_trained;
                        let bytes = is_trained * gradient * GRADIENT_BYTES * passes(Write::Accumulate);
                        (products * self.product_flops(operation), bytes)
                    }
                    _ => (self.product_flops(operation), 0),
                };
                Cost {
                    product_flops: products,
                    vector_flops: self.elements(operation) * operation.vector_flops(Pass::BackwardInputs),
                    bytes: read + written + weight + weight_gradient,
                }
            }
            Instruction::BackwardWeights { operation, dy } => {
                let operation = &self.operations[*operation];
                let trained = || operation.parameters().filter(|index| self.training.trains(*index));
                let elements: u64 = match operation {
                    Operation::Embedding { .. } => self.elements(operation),
                    _ => trained().map(|index| self.parameter_elements(index)).sum(),
                };
                let read = gradient(*dy) + self.bytes(operation.needs_for_weights(&self.training));
                Cost {
                    product_flops: match operation {
                        // A bias needs no product.
                        Operation::Linear { weight, .. }
                        | Operation::BlockLinear(BlockLinear { weight, .. })
                            if !self.training.trains(*weight) =>
                        {
                            0
                        }
                        _ => self.product_flops(operation),
                    },
                    vector_flops: self.elements(operation) * operation.vector_flops(Pass::BackwardWeights),
                    bytes: read + elements * GRADIENT_BYTES * passes(Write::Accumulate),
                }
            }
            Instruction::Part { product, transit, rows } => {
                let transit = &phase.transits[*transit];
                share_of(self.cost(product, phase, gradients), transit.part_rows(*rows), transit.info.rows)
            }
            // All of it is counted where its end is waited for.
            Instruction::Start { .. } | Instruction::Send { .. } => Cost::default(),
            Instruction::Await { transit, chunk } => {
                let transit = &phase.transits[*transit];
                let rows = transit.chunks[*chunk].len();
                share_of(self.cost(&transit.exchange, phase, gradients), rows, transit.block_rows())
            }
            Instruction::Copy { from, to } => Cost::of_bytes(gradient(*from) + gradient(*to)),
            Instruction::Add { from, to } => Cost {
                vector_flops: gradients[to.0].info.elements() as u64,
                ..Cost::of_bytes(gradient(*from) + gradient(*to) * passes(Write::Accumulate))
            },
        }
    }

    fn forward_cost(&self, operation: &Operation) -> Cost {
        let weights: u64 = match operation {
            // The rows that are looked up.
            Operation::Embedding { y, .. } => self.bytes([*y]),
            _ => operation.parameters().map(|index| self.weight_bytes(index)).sum(),
        };
        Cost {
            product_flops: self.product_flops(operation),
            vector_flops: self.elements(operation) * operation.vector_flops(Pass::Forward),
            bytes: self.bytes(operation.reads()) + self.bytes(operation.outputs()) + weights,
        }
    }

    /// Floating-point operations of the matrix products of an operation's forward, and as many of each of the two
    /// halves of a linear layer's backward.
    pub(crate) fn product_flops(&self, operation: &Operation) -> u64 {
        let columns = |value: Value| self.values[value.0].columns as u64;
        let tokens = self.shape.tokens() as u64;
        match operation {
            Operation::Linear { x, y, .. } => 2 * self.values[y.0].rows as u64 * columns(*x) * columns(*y),
            Operation::BlockLinear(BlockLinear { x, grid, y, .. }) => {
                2 * self.values[y.0].rows as u64 * grid.side as u64 * columns(*x) * columns(*y)
            }
            Operation::GroupedLinear { x, y, even_rows, .. } => {
                2 * *even_rows as u64 * columns(*x) * columns(*y)
            }
            Operation::OutputLoss { x, logits, .. } => 2 * tokens * columns(*x) * columns(*logits),
            Operation::Attention(AttentionOperation { q, shape, .. }) => {
                let seq_len = (self.shape.seq_len * self.context.ranks) as u64;
                let seen = shape.window.map_or(seq_len, |window| seq_len.min(2 * window as u64));
                2 * self.values[q.0].rows as u64 * seen * columns(*q)
            }
            _ => 0,
        }
    }

    /// Elements that an operation goes over: those of its output, or all logits.
    fn elements(&self, operation: &Operation) -> u64 {
        match *operation {
            Operation::OutputLoss { logits, .. } => {
                (self.shape.tokens() * self.values[logits.0].columns) as u64
            }
            Operation::Route(RouteOperation { scores, .. }) => self.values[scores.0].elements() as u64,
            // Rows go over once for each slot, however many make a token.
            Operation::Combine { rows, .. } => self.values[rows.0].elements() as u64,
            _ => self.values[operation.output().0].elements() as u64,
        }
    }

    fn bytes(&self, values: impl IntoIterator<Item = Value>) -> u64 {
        values.into_iter().map(|value| self.values[value.0].bytes() as u64).sum()
    }

    fn parameter_elements(&self, index: ParameterIndex) -> u64 {
        {
            let parameter = &self.parameters()[index.0];
            parameter.share.shape_of(&parameter.shape).iter().product::<usize>() as u64
        }
    }

    fn weight_bytes(&self, index: ParameterIndex) -> u64 {
        self.parameter_elements(index) * self.shape.dtype.size_bytes() as u64
    }
}

/// What some of the rows cost of an operation on `all`.
fn share_of(cost: Cost, rows: usize, all: usize) -> Cost {
    let share = |of: u64| (u128::from(of) * rows as u128 / all.max(1) as u128) as u64;
    Cost {
        product_flops: share(cost.product_flops),
        vector_flops: share(cost.vector_flops),
        bytes: share(cost.bytes),
    }
}

/// How often a written operand goes through memory.
fn passes(write: Write) -> u64 {
    match write {
        Write::Overwrite => 1,
        Write::Accumulate => 2,
    }
}

impl Operation {
    /// The kind, as tables and traces call it.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Embedding { .. } => "embedding",
            Self::Linear { .. } => "linear",
            Self::BlockLinear(_) => "linear in blocks",
            Self::RmsNorm { .. } => "RMSNorm",
            Self::LayerNorm { .. } => "LayerNorm",
            Self::Rope { .. } => "RoPE",
            Self::Attention(_) => "attention",
            Self::SwiGlu { .. } => "SwiGLU",
            Self::Gelu { .. } => "GELU",
            Self::Scale { .. } => "scale",
            Self::Add { .. } => "add",
            Self::Dropout { .. } => "dropout",
            Self::Exchange { exchange, .. } => exchange.name(),
            Self::SequenceExchange(exchange) => exchange.name(),
            Self::Route(_) => "router",
            Self::Dispatch { .. } => "dispatch to experts",
            Self::GroupedLinear { .. } => "linear of experts",
            Self::Combine { .. } => "combine experts",
            Self::GateRows { .. } => "gate rows",
            Self::JoinHeads { .. } => "join heads",
            Self::ResizeHeads { .. } => "resize heads",
            Self::OutputLoss { .. } => "output layer and loss",
        }
    }

    /// Operations per element beside matrix products, counted in the kernels' formulas; those of attention's
    /// softmax are left out.
    fn vector_flops(&self, pass: Pass) -> u64 {
        let (forward, inputs, weights) = match self {
            Self::RmsNorm { .. } => (4, 8, 3),
            Self::LayerNorm { .. } => (8, 11, 5),
            Self::Rope { .. } => (3, 3, 0),
            Self::SwiGlu { .. } => (5, 12, 0),
            Self::Gelu { .. } => (8, 14, 0),
            Self::Scale { .. } => (1, 1, 0),
            Self::Add { .. } => (1, 0, 0),
            Self::Dropout { .. } => (2, 2, 0),
            Self::OutputLoss { .. } => (4, 7, 0),
            Self::Embedding { .. } => (0, 0, 1),
            // For each score.
            Self::Route(_) => (4, 6, 0),
            Self::Combine { .. } => (2, 3, 0),
            Self::GateRows { .. } => (1, 3, 0),
            Self::Dispatch { .. } => (0, 1, 0),
            Self::Linear { .. }
            | Self::BlockLinear(_)
            | Self::GroupedLinear { .. }
            | Self::Attention(_)
            | Self::JoinHeads { .. }
            | Self::ResizeHeads { .. }
            | Self::Exchange { .. }
            | Self::SequenceExchange(_) => (0, 0, 0),
        };
        match pass {
            Pass::Forward | Pass::Recompute => forward,
            Pass::BackwardInputs => inputs,
            Pass::BackwardWeights => weights,
        }
    }
}
