//! The work of one rank for a micro-batch, read from the instructions that a replay runs and expressed in [`lockstep_plan::work`].
//!
//! Matrix products have the shapes of this rank, collectives the bytes that ranks really send. A collective that
//! overlaps with its products in chunks counts as one product and one collective. Bytes and other floating-point
//! operations are those of `cost`. The submodule `kept` counts the activations that other frameworks save.
//!
//! ```text
//! y = x Wᵀ      [rows, in] [in, out]        forward
//! dx = dy W     [rows, out] [out, in]       gradient of the input
//! dW = dyᵀ x    [out, rows] [rows, in]      gradient of the weight
//! ```

mod kept;

use lockstep_plan::{
    Among, DType,
    work::{Attention, Collective, Exchange, Pass, Peers, Product, Task, TaskKind, UnitWork},
};

use crate::{
    block::{ParameterIndex, Value},
    instruction::{Gradient, Instruction, Phase},
    operation::{
        AttentionOperation, ContextCollective, ContextCollectiveKind, Facts, KeySource, Operation,
        RemoteRows, RouteOperation, SummaLinear, VocabularyParallelLoss,
    },
    placement::Transfer,
    program::Program,
    timeline::Cost,
};

impl Program {
    /// Returns the work of one rank for a micro-batch, and the activations that other frameworks would save for it.
    pub fn work(&self) -> UnitWork {
        let is_expert = |index: &usize| self.parameters()[*index].share.among == Among::Experts;
        let elements = |index: usize| self.parameter_elements(ParameterIndex(index));
        let parameters = 0..self.parameters().len();
        let is_trained = |index: &usize| self.parameters()[*index].trainable;
        let trained = parameters.clone().filter(is_trained);
        UnitWork {
            forward: self.tasks(&self.forward),
            backward: self.tasks(&self.backward),
            backward_inputs: self.tasks(&self.backward_inputs),
            backward_weights: self.tasks(&self.backward_weights),
            kept: self.kept(),
            parameter_elements: parameters.clone().map(elements).sum(),
            expert_elements: parameters.filter(is_expert).map(elements).sum(),
            trained_elements: trained.clone().map(elements).sum(),
            trained_expert_elements: trained.filter(is_expert).map(elements).sum(),
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

    /// Returns the tasks of a linear layer in one pass; `None` for other operations, and for a gradient of
    /// the bias alone.
    fn linear_tasks(&self, operation: &Operation, facts: &Facts, pass: Pass) -> Option<Vec<TaskKind>> {
        if pass == Pass::BackwardWeights && !self.training.trains_weight(facts) {
            return None;
        }
        let in_order = |[rows, inner, columns]: [u64; 3]| match pass {
            Pass::Forward | Pass::Recompute => [rows, inner, columns],
            Pass::BackwardInputs => [rows, columns, inner],
            Pass::BackwardWeights => [columns, rows, inner],
        };
        match operation {
            Operation::Linear { x, y, .. } => {
                let shape = [self.rows(*y), self.columns(*x), self.columns(*y)];
                Some(vec![product(in_order(shape), 1)])
            }
            Operation::SummaLinear(SummaLinear { x, y, grid, .. }) => {
                let shape @ [rows, inner, columns] = [self.rows(*y), self.columns(*x), self.columns(*y)];
                let sent = match pass {
                    Pass::Forward | Pass::Recompute => {
                        [self.broadcast(rows * inner), self.broadcast(columns * inner)]
                    }
                    Pass::BackwardInputs => {
                        [self.broadcast(columns * inner), self.reduce(rows * inner, self.shape.dtype)]
                    }
                    Pass::BackwardWeights => {
                        [self.broadcast(rows * inner), self.reduce(columns * inner, DType::F32)]
                    }
                };
                // One product of blocks, and its transfers, per step of SUMMA.
                let steps = std::iter::repeat_n(sent, grid.side).flatten();
                Some(steps.chain([product(in_order(shape), grid.side as u64)]).collect())
            }
            Operation::GroupedLinear { x, y, offsets, even_rows, .. } => {
                let experts = self.rows(*offsets) - 1;
                let rows = (*even_rows as u64).div_ceil(experts);
                Some(vec![product(in_order([rows, self.columns(*x), self.columns(*y)]), experts)])
            }
            _ => None,
        }
    }

    /// Returns the tasks of an operation's forward, in order.
    fn forward_tasks(&self, operation: &Operation, overlap: Overlap) -> Vec<TaskKind> {
        match operation {
            Operation::Attention(attention) => {
                let mut tasks = Vec::new();
                if let KeySource::Ring { .. } = attention.key_source {
                    let bytes = self.ring_bytes(attention, self.shape.dtype);
                    tasks.push(exchange(Peers::Context, Collective::Ring, bytes, Overlap::Overlapped));
                }
                tasks.push(self.attention(attention, self.product_flops(operation)));
                tasks
            }
            Operation::Redistribute { exchange: change, x, y, .. } => {
                self.transferred(change.forward(), (*x, *y), overlap)
            }
            Operation::ContextCollective(change) => self.sequences_exchanged(change, Pass::Forward),
            Operation::Route(RouteOperation { parts: Some(parts), counts, .. }) => {
                let bytes = self.value_bytes(parts.gathered);
                let ranks = self.rows(parts.gathered) / self.rows(*counts);
                let peers = match self.context.ranks as u64 {
                    1 => Peers::Tensor,
                    context if context == ranks => Peers::Context,
                    _ => Peers::TensorAndContext,
                };
                vec![TaskKind::Stream, exchange(peers, Collective::AllGather, bytes, overlap)]
            }
            Operation::Dispatch { tables, chosen, .. } => {
                let remote = tables.remote.iter();
                let counts = |remote| self.counts_exchanged(remote, self.has_capacity(*chosen));
                let exchanges = remote.flat_map(|remote| [counts(remote), self.rows_sent(remote)]);
                [TaskKind::Stream].into_iter().chain(exchanges).collect()
            }
            Operation::Combine { tables, .. } => {
                let exchange = tables.remote.iter().map(|remote| self.rows_sent(remote));
                exchange.chain([TaskKind::Stream]).collect()
            }
            _ => vec![TaskKind::Stream],
        }
    }

    /// Returns the tasks of an operation's input gradients, in order.
    fn input_tasks(&self, operation: &Operation, facts: &Facts, overlap: Overlap) -> Vec<TaskKind> {
        match operation {
            Operation::Attention(attention) => {
                let mut tasks = Vec::new();
                let gradients = self.ring_bytes(attention, DType::F32);
                let is_ring = matches!(attention.key_source, KeySource::Ring { .. });
                if is_ring {
                    // Gradients travel after their keys and values.
                    let bytes = self.ring_bytes(attention, self.shape.dtype) + gradients;
                    tasks.push(exchange(Peers::Context, Collective::Ring, bytes, Overlap::Overlapped));
                }
                tasks.push(self.attention(attention, self.backward_flops(operation, facts)));
                if is_ring {
                    // One more step takes the gradients to their owner.
                    tasks.push(exchange(Peers::Context, Collective::Shift, gradients, overlap));
                }
                tasks
            }
            Operation::Redistribute { exchange: change, x, y, .. } => {
                self.transferred(change.backward(), (*y, *x), overlap)
            }
            Operation::ContextCollective(change) => self.sequences_exchanged(change, Pass::BackwardInputs),
            Operation::Dispatch { tables, .. } | Operation::Combine { tables, .. } => {
                let exchange = tables.remote.iter().map(|remote| self.rows_sent(remote));
                [TaskKind::Stream].into_iter().chain(exchange).collect()
            }
            _ => vec![TaskKind::Stream],
        }
    }

    /// Returns the communication of a redistribution in one direction.
    fn transferred(&self, transfer: Transfer, (from, to): (Value, Value), overlap: Overlap) -> Vec<TaskKind> {
        let all =
            |collective, value| vec![exchange(Peers::Tensor, collective, self.value_bytes(value), overlap)];
        match transfer {
            Transfer::AllGather => all(Collective::AllGather, to),
            Transfer::AllReduce => all(Collective::AllReduce, to),
            Transfer::ReduceScatter => all(Collective::ReduceScatter, from),
            Transfer::TokensToBlocks | Transfer::BlocksToTokens => self.blocks_exchanged(from),
            Transfer::Slice | Transfer::Alias => vec![TaskKind::Stream],
        }
    }

    /// All-to-all between tokens and blocks: a transpose, and the communication along a row.
    fn blocks_exchanged(&self, x: Value) -> Vec<TaskKind> {
        let bytes = self.value_bytes(x);
        vec![TaskKind::Stream, exchange(Peers::TensorLine, Collective::AllToAll, bytes, Overlap::Exposed)]
    }

    fn sequences_exchanged(&self, change: &ContextCollective, pass: Pass) -> Vec<TaskKind> {
        let ContextCollective { change, x, y, .. } = *change;
        let (collective, value) = match (change, pass) {
            (ContextCollectiveKind::Gather, Pass::Forward) => (Collective::AllGather, y),
            (ContextCollectiveKind::Gather, _) => (Collective::ReduceScatter, y),
            // With fewer heads than ranks, a head is sent to several ranks.
            (ContextCollectiveKind::TokensToHeads { .. }, _) => (Collective::AllToAll, y),
            (ContextCollectiveKind::HeadsToTokens { .. }, _) => (Collective::AllToAll, x),
        };
        let bytes = self.value_bytes(value);
        vec![TaskKind::Stream, exchange(Peers::Context, collective, bytes, Overlap::Exposed)]
    }

    /// All-to-all of rows to or from the experts: as many rows as slots, under even load.
    fn rows_sent(&self, remote: &RemoteRows) -> TaskKind {
        exchange(Peers::Expert, Collective::AllToAll, self.value_bytes(remote.sending), Overlap::Exposed)
    }

    /// All-to-all of the row counts of each expert. With a capacity the host need not wait for the counts: the most
    /// rows that can come are known.
    fn counts_exchanged(&self, remote: &RemoteRows, has_capacity: bool) -> TaskKind {
        TaskKind::Exchange(Exchange {
            peers: Peers::Expert,
            collective: Collective::AllToAll,
            bytes: self.rows(remote.received) * size_of::<i64>() as u64,
            is_overlapped: false,
            is_for_host: !has_capacity,
        })
    }

    /// Returns true if the router that produced `chosen` limits the slots of each expert.
    fn has_capacity(&self, chosen: Value) -> bool {
        self.operations.iter().any(|operation| {
            matches!(operation, Operation::Route(RouteOperation { kept: Some(kept), .. }) if *kept == chosen)
        })
    }

    /// All-gathers of the softmax statistics of a vocabulary-parallel loss, one per range of tokens.
    fn statistics(&self, logits: Value, split: VocabularyParallelLoss) -> Vec<TaskKind> {
        let columns = self.columns(split.gathered);
        let (tokens, step) = (self.shape.tokens() as u64, self.rows(logits));
        let parts = (0..tokens).step_by(step as usize).map(|start| step.min(tokens - start));
        let bytes = |tokens: u64| tokens * columns * DType::F32.size_bytes() as u64;
        let gather = |tokens| exchange(Peers::Tensor, Collective::AllGather, bytes(tokens), Overlap::Exposed);
        parts.map(gather).collect()
    }

    fn attention(&self, attention: &AttentionOperation, flops: u64) -> TaskKind {
        let head_dim = attention.shape.head_dim as u64;
        TaskKind::Attention(Attention { flops, scores: self.scores(attention), head_dim })
    }

    /// Bytes of the keys and values of one rank.
    fn ring_bytes(&self, attention: &AttentionOperation, dtype: DType) -> u64 {
        let elements = |value: Value| self.values[value.0].elements() as u64;
        (elements(attention.k) + elements(attention.v)) * dtype.size_bytes() as u64
    }

    fn broadcast(&self, elements: u64) -> TaskKind {
        let bytes = elements * self.shape.dtype.size_bytes() as u64;
        exchange(Peers::TensorLine, Collective::Broadcast, bytes, Overlap::Exposed)
    }

    fn reduce(&self, elements: u64, dtype: DType) -> TaskKind {
        let bytes = elements * dtype.size_bytes() as u64;
        exchange(Peers::TensorLine, Collective::Reduce, bytes, Overlap::Exposed)
    }

    fn rows(&self, value: Value) -> u64 {
        self.values[value.0].rows as u64
    }

    fn columns(&self, value: Value) -> u64 {
        self.values[value.0].columns as u64
    }

    fn value_bytes(&self, value: Value) -> u64 {
        self.values[value.0].bytes() as u64
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
        let program = self.program;
        let activity = program.activity(instruction, self.phase, 0);
        let pass = activity.pass.unwrap_or(Pass::Forward);
        let cost = program.cost(instruction, self.phase);
        for (kind, cost) in self.parts(instruction, overlap, cost) {
            let Cost { bytes, vector_flops, .. } = cost;
            self.tasks.push(Task { name: activity.name, pass, kind, bytes, vector_flops });
        }
    }

    fn parts(&self, instruction: &Instruction, overlap: Overlap, cost: Cost) -> Vec<(TaskKind, Cost)> {
        let (index, pass) = match instruction {
            Instruction::Forward(operation) => (*operation, Pass::Forward),
            Instruction::BackwardInputs { operation, .. } => (*operation, Pass::BackwardInputs),
            Instruction::BackwardWeights { operation, .. } => (*operation, Pass::BackwardWeights),
            _ => return vec![(TaskKind::Stream, cost)],
        };
        let program = self.program;
        let (operation, facts) = (&program.operations[index], &program.facts[index]);
        if facts.is_loss {
            let bytes = |gradient: &Gradient| self.phase.buffers[gradient.0].info.bytes() as u64;
            let written = match instruction {
                Instruction::BackwardInputs { dx, .. } => Some(dx.iter().map(|(dx, _)| bytes(dx)).sum()),
                _ => None,
            };
            return self.loss(operation, facts, written);
        }
        let tasks = program.linear_tasks(operation, facts, pass).unwrap_or_else(|| match pass {
            Pass::Forward | Pass::Recompute => program.forward_tasks(operation, overlap),
            Pass::BackwardInputs => program.input_tasks(operation, facts, overlap),
            Pass::BackwardWeights => vec![TaskKind::Stream],
        });
        // Compute carries the whole cost. A collective moves no memory apart from its transfer.
        tasks
            .into_iter()
            .map(|kind| match kind {
                TaskKind::Exchange(_) => (kind, Cost::default()),
                _ => (kind, cost),
            })
            .collect()
    }

    fn loss(
        &self,
        operation: &Operation,
        facts: &Facts,
        gradient_bytes: Option<u64>,
    ) -> Vec<(TaskKind, Cost)> {
        let mut parts = self.program.loss_parts(operation, facts, gradient_bytes);
        if let Operation::OutputLoss { logits, split: Some(split), .. } = *operation {
            let exchanges = self.program.statistics(logits, split);
            // After the logits.
            parts.splice(1..1, exchanges.into_iter().map(|kind| (kind, Cost::default())));
        }
        parts
    }
}

/// Overlap of a collective with compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Overlap {
    Exposed,
    Overlapped,
}

fn exchange(peers: Peers, collective: Collective, bytes: u64, overlap: Overlap) -> TaskKind {
    let is_overlapped = overlap == Overlap::Overlapped;
    TaskKind::Exchange(Exchange { peers, collective, bytes, is_overlapped, is_for_host: false })
}

fn product([rows, inner, columns]: [u64; 3], count: u64) -> TaskKind {
    TaskKind::Product(Product { rows, inner, columns, count })
}

#[cfg(test)]
mod tests;
