//! Work of each instruction of a program: floating-point operations and bytes, from shapes alone.
//!
//! Bytes are the least that any implementation moves if nothing stays in a cache between operations: each operand
//! once, twice if it is added to. Logits count as operands, although they exist for one range of tokens at a time.
//! Experts are assumed to be evenly loaded.

use lockstep_plan::work::{Pass, Product, TaskKind};
use lockstep_tensor::Write;

use crate::{
    block::{ParameterIndex, Value, ValueInfo},
    instruction::{Gradient, Instruction, Phase},
    operation::{AttentionOperation, Facts, Operation, RouteOperation, SummaLinear},
    program::Program,
    timeline::{Activity, Cost},
};

/// Bytes per element of a weight gradient.
const GRADIENT_BYTES: u64 = 4;

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
            forward_flops: self.operations.iter().map(|operation| self.product_flops(operation)).sum(),
            backward_flops: self
                .recorded()
                .map(|(operation, facts)| self.backward_flops(operation, facts))
                .sum(),
            saved_bytes: self.frame_bytes,
            workspace_bytes: self.workspace_bytes(),
            deferred_bytes: self.deferred_bytes,
            parameter_elements: self
                .parameters
                .iter()
                .map(|parameter| parameter.share.shape_of(&parameter.shape).iter().product::<usize>())
                .sum(),
            attention_flops: self.attention_flops(),
        }
    }

    fn attention_flops(&self) -> u64 {
        let flops = |(operation, facts): (&Operation, &Facts)| match operation {
            Operation::Attention(_) => self.product_flops(operation) + self.backward_flops(operation, facts),
            _ => 0,
        };
        self.recorded().map(flops).sum()
    }

    /// Returns the operations with their facts.
    pub(crate) fn recorded(&self) -> impl Iterator<Item = (&Operation, &Facts)> {
        self.operations.iter().zip(&self.facts)
    }

    pub(crate) fn backward_flops(&self, operation: &Operation, facts: &Facts) -> u64 {
        let forward = self.product_flops(operation);
        let inputs = if self.training.reaches_inputs(facts) { forward } else { 0 };
        let weights = match operation {
            // Attention has no weights; its backward has two products per forward product.
            Operation::Attention(_) => inputs,
            _ if self.training.trains_weight(facts) => forward,
            _ => 0,
        };
        inputs + weights
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

    /// Returns the cost of an instruction.
    pub(crate) fn cost(&self, instruction: &Instruction, phase: &Phase) -> Cost {
        let gradient = |operation: Option<&Operation>, gradient: Gradient| {
            self.info_bytes(operation, phase.buffers[gradient.0].info)
        };
        match instruction {
            Instruction::Forward(operation) => {
                self.forward_cost(&self.operations[*operation], &self.facts[*operation])
            }
            Instruction::BackwardInputs { operation, dy, dx } => {
                let (operation, facts) = (&self.operations[*operation], &self.facts[*operation]);
                let of = |other: Gradient| gradient(Some(operation), other);
                let written: u64 = dx.iter().map(|&(dx, write)| of(dx) * passes(write)).sum();
                if facts.is_loss {
                    return sum(self.loss_parts(operation, facts, Some(written)));
                }
                // The matrix or the scale; the input gradient does not read a bias.
                let weight = facts.weight.map_or(0, |index| self.weight_bytes(index));
                let product_flops = match operation {
                    // The scores again, and four products for the three gradients.
                    Operation::Attention(_) => self.product_flops(operation) / 2 * 5,
                    _ => self.product_flops(operation),
                };
                Cost {
                    product_flops,
                    vector_flops: self.elements(operation, facts) * facts.vector_flops(Pass::BackwardInputs),
                    bytes: dy.map_or(0, of)
                        + self.bytes(operation, &facts.saved_for_inputs)
                        + written
                        + weight,
                }
            }
            Instruction::BackwardWeights { operation, dy } => {
                let (operation, facts) = (&self.operations[*operation], &self.facts[*operation]);
                let elements: u64 = match operation {
                    Operation::Embedding { .. } => self.elements(operation, facts),
                    _ => {
                        let trained = facts.parameters().filter(|index| self.training.trains(*index));
                        trained.map(|index| self.parameter_elements(index)).sum()
                    }
                };
                let read = gradient(Some(operation), *dy)
                    + self.bytes(operation, self.training.needs_for_weights(facts));
                // A bias gradient needs no product.
                let has_product = self.training.trains_weight(facts);
                Cost {
                    product_flops: if has_product { self.product_flops(operation) } else { 0 },
                    vector_flops: self.elements(operation, facts) * facts.vector_flops(Pass::BackwardWeights),
                    bytes: read + elements * GRADIENT_BYTES * passes(Write::Accumulate),
                }
            }
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
            Instruction::Copy { from, to } => Cost::of_bytes(gradient(None, *from) + gradient(None, *to)),
            Instruction::Add { from, to } => Cost {
                vector_flops: phase.buffers[to.0].info.elements() as u64,
                ..Cost::of_bytes(gradient(None, *from) + gradient(None, *to) * passes(Write::Accumulate))
            },
        }
    }

    fn forward_cost(&self, operation: &Operation, facts: &Facts) -> Cost {
        if facts.is_loss {
            return sum(self.loss_parts(operation, facts, None));
        }
        let weights: u64 = match operation {
            // Only the rows that are looked up.
            Operation::Embedding { y, .. } => self.bytes(operation, [y]),
            _ => facts.parameters().map(|index| self.weight_bytes(index)).sum(),
        };
        let values = facts.inputs.iter().chain(&facts.tables).chain(&facts.outputs);
        Cost {
            product_flops: self.product_flops(operation),
            vector_flops: self.elements(operation, facts) * facts.vector_flops(Pass::Forward),
            bytes: self.bytes(operation, values) + weights,
        }
    }

    /// Returns the parts of an output layer and its loss: the logits, the loss, and in the backward the needed
    /// gradients. `gradient_bytes` is the size of the input gradient; `None` in the forward.
    pub(crate) fn loss_parts(
        &self,
        operation: &Operation,
        facts: &Facts,
        gradient_bytes: Option<u64>,
    ) -> Vec<(TaskKind, Cost)> {
        let Operation::OutputLoss { x, weight, logits, losses, .. } = *operation else { return Vec::new() };
        let (tokens, inner) = (self.shape.tokens() as u64, self.values[x.0].columns as u64);
        let columns = self.values[logits.0].columns as u64;
        let of_logits = tokens * columns * self.values[logits.0].dtype.size_bytes() as u64;
        let (of_weight, of_x) = (self.weight_bytes(weight), self.bytes(operation, [&x]));
        let product = |rows, inner, columns, bytes| {
            let product = Product { rows, inner, columns, count: 1 };
            (TaskKind::Product(product), Cost { product_flops: product.flops(), ..Cost::of_bytes(bytes) })
        };
        let pass = if gradient_bytes.is_some() { Pass::BackwardInputs } else { Pass::Forward };
        // In the backward the gradient of the logits overwrites them.
        let of_loss = of_logits * if gradient_bytes.is_some() { 2 } else { 1 };
        let loss = Cost {
            vector_flops: self.elements(operation, facts) * facts.vector_flops(pass),
            ..Cost::of_bytes(of_loss + self.bytes(operation, [&losses]))
        };
        let mut parts =
            vec![product(tokens, inner, columns, of_x + of_weight + of_logits), (TaskKind::Stream, loss)];
        if let Some(gradient_bytes) = gradient_bytes {
            if self.training.differentiates(x) {
                parts.push(product(tokens, columns, inner, of_logits + of_weight + gradient_bytes));
            }
            if self.training.trains(weight) {
                let added = self.parameter_elements(weight) * GRADIENT_BYTES * passes(Write::Accumulate);
                parts.push(product(columns, tokens, inner, of_logits + of_x + added));
            }
        }
        parts
    }

    /// Floating-point operations of the matrix products of an operation's forward; each of the two halves of a linear
    /// layer's backward has as many.
    pub(crate) fn product_flops(&self, operation: &Operation) -> u64 {
        let columns = |value: Value| self.values[value.0].columns as u64;
        let tokens = self.shape.tokens() as u64;
        match operation {
            Operation::Linear { x, y, .. } => 2 * self.values[y.0].rows as u64 * columns(*x) * columns(*y),
            Operation::SummaLinear(SummaLinear { x, grid, y, .. }) => {
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

    /// Elements that an operation processes: those of its output, or all logits.
    fn elements(&self, operation: &Operation, facts: &Facts) -> u64 {
        match *operation {
            Operation::OutputLoss { logits, .. } => {
                (self.shape.tokens() * self.values[logits.0].columns) as u64
            }
            Operation::Route(RouteOperation { scores, .. }) => self.values[scores.0].elements() as u64,
            // Every row is read once, however many rows make a token.
            Operation::Combine { rows, .. } => self.info_elements(Some(operation), self.values[rows.0]),
            _ => self.info_elements(Some(operation), self.values[facts.output().0]),
        }
    }

    pub(crate) fn bytes<'v>(
        &self,
        operation: &Operation,
        values: impl IntoIterator<Item = &'v Value>,
    ) -> u64 {
        values.into_iter().map(|value| self.info_bytes(Some(operation), self.values[value.0])).sum()
    }

    fn info_bytes(&self, operation: Option<&Operation>, info: ValueInfo) -> u64 {
        self.info_elements(operation, info) * info.dtype.size_bytes() as u64
    }

    /// Elements of a value or gradient that an operation touches. A buffer with room for the rows of all tokens of
    /// all ranks counts with the rows of evenly loaded experts.
    fn info_elements(&self, operation: Option<&Operation>, info: ValueInfo) -> u64 {
        match operation.and_then(|operation| self.expert_rows(operation)) {
            Some((room, even)) if info.rows == room => (even * info.columns) as u64,
            _ => info.elements() as u64,
        }
    }

    /// Returns (capacity, rows under even load) of an operation on rows of experts; `None` for other operations.
    fn expert_rows(&self, operation: &Operation) -> Option<(usize, usize)> {
        let (Operation::GroupedLinear { x: rows, .. }
        | Operation::SwiGlu { gate: rows, offsets: Some(_), .. }
        | Operation::Dispatch { rows, .. }
        | Operation::Combine { rows, .. }) = *operation
        else {
            return None;
        };
        let even = self.operations.iter().find_map(|operation| match *operation {
            Operation::GroupedLinear { x, y, even_rows, .. } if [x, y].contains(&rows) => Some(even_rows),
            _ => None,
        })?;
        Some((self.values[rows.0].rows, even))
    }

    pub(crate) fn parameter_elements(&self, index: ParameterIndex) -> u64 {
        let parameter = &self.parameters()[index.0];
        parameter.share.shape_of(&parameter.shape).iter().product::<usize>() as u64
    }

    fn weight_bytes(&self, index: ParameterIndex) -> u64 {
        self.parameter_elements(index) * self.shape.dtype.size_bytes() as u64
    }
}

/// Sums the cost of all parts of an operation.
fn sum(parts: Vec<(TaskKind, Cost)>) -> Cost {
    parts.into_iter().fold(Cost::default(), |mut all, (_, cost)| {
        all += cost;
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
