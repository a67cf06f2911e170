//! Work of an operation in one pass, from shapes alone: the tasks that the cost model times, and their cost.
//!
//! Bytes are the least that any implementation moves if nothing stays in a cache between operations: each operand
//! once, twice if it is added to. Experts are assumed to be evenly loaded.
//!
//! ```text
//! y = x Wᵀ      [rows, in] [in, out]        forward
//! dx = dy W     [rows, out] [out, in]       gradient of the input
//! dW = dyᵀ x    [out, rows] [rows, in]      gradient of the weight
//! ```

use lockstep_plan::work::{Collective, Exchange, Pass, Peers, Product, TaskKind};

use crate::{
    facts::Facts,
    shapes::{Shapes, touched_elements},
    timeline::Cost,
};

/// Bytes per element of a weight gradient.
const GRADIENT_BYTES: u64 = 4;

/// A task of an operation, with its cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    /// Kind of work.
    pub kind: TaskKind,
    /// Cost of the task. A collective beside compute has none: the compute carries the cost of all operands.
    pub cost: Cost,
}

impl Work {
    /// Returns a collective that ranks wait for.
    pub fn exchange(peers: Peers, collective: Collective, bytes: u64) -> Self {
        let exchange = Exchange { peers, collective, bytes, is_overlapped: false, is_for_host: false };
        Self { kind: TaskKind::Exchange(exchange), cost: Cost::default() }
    }

    /// Returns the collective as one that overlaps with compute; any other task unchanged.
    pub fn overlapped(mut self) -> Self {
        if let TaskKind::Exchange(exchange) = &mut self.kind {
            exchange.is_overlapped = true;
        }
        self
    }
}

/// Context in which an operation lists its work: a pass of a block.
#[derive(Debug, Clone, Copy)]
pub struct WorkContext<'a> {
    /// Shapes of the block's values and parameters.
    pub shapes: &'a Shapes,
    /// Facts of the operation.
    pub facts: &'a Facts,
    /// The pass; a recomputation counts as [`Pass::Forward`].
    pub pass: Pass,
    /// Bytes of the gradient of the output, which is read, and of the gradients of the inputs, which are written.
    pub gradient_bytes: u64,
}

impl WorkContext<'_> {
    /// Returns the cost outside matrix products, as the facts state it: bytes of all operands and vector FLOPs.
    pub fn cost(&self) -> Cost {
        let Self { shapes, facts, pass, gradient_bytes } = *self;
        let elements = self.elements();
        let values = |values: &[_]| shapes.touched_bytes(facts, values);
        let bytes = match pass {
            Pass::Forward | Pass::Recompute => {
                let weights = if facts.looks_up_rows {
                    values(&facts.outputs)
                } else {
                    facts.parameters().map(|index| shapes.weight_bytes(index)).sum()
                };
                values(&facts.inputs) + values(&facts.tables) + values(&facts.outputs) + weights
            }
            Pass::BackwardInputs => {
                // The matrix or the scale; the input gradient does not read a bias.
                let weights: u64 = facts.weights.iter().map(|index| shapes.weight_bytes(*index)).sum();
                gradient_bytes + values(&facts.saved_for_inputs) + weights
            }
            Pass::BackwardWeights => {
                let trained = facts.parameters().filter(|index| shapes.trains(*index));
                let added: u64 = if facts.looks_up_rows {
                    elements
                } else {
                    trained.map(|index| shapes.parameter_elements(index)).sum()
                };
                let saved = values(shapes.training.needs_for_weights(facts));
                gradient_bytes + saved + added * 2 * GRADIENT_BYTES
            }
        };
        Cost { product_flops: 0, vector_flops: elements * facts.vector_flops(pass), bytes }
    }

    /// Returns a memory-bound task with the cost that the facts state.
    pub fn stream(&self) -> Work {
        Work { kind: TaskKind::Stream, cost: self.cost() }
    }

    /// Returns a task of another kind with the cost that the facts state, and these FLOPs of matrix products.
    pub fn task(&self, kind: TaskKind, product_flops: u64) -> Work {
        Work { kind, cost: Cost { product_flops, ..self.cost() } }
    }

    /// Returns `count` products `y = x Wᵀ` of `[rows, inner, columns]` or, in the backward, the products of equal size
    /// for the gradient of `x` or `W`; a memory-bound task for the gradient of a bias alone.
    pub fn products(&self, shape: [u64; 3], count: u64) -> Work {
        if !self.has_product() {
            return self.stream();
        }
        let product = self.product(shape, count);
        self.task(TaskKind::Product(product), product.flops())
    }

    /// Returns false for the gradient of a bias alone.
    pub fn has_product(&self) -> bool {
        self.pass != Pass::BackwardWeights || self.shapes.training.trains_weight(self.facts)
    }

    /// Returns the product `y = x Wᵀ` of `[rows, inner, columns]`, or that of the pass.
    pub fn product(&self, [rows, inner, columns]: [u64; 3], count: u64) -> Product {
        match self.pass {
            Pass::Forward | Pass::Recompute => Product { rows, inner, columns, count },
            Pass::BackwardInputs => Product { rows, inner: columns, columns: inner, count },
            Pass::BackwardWeights => Product { rows: columns, inner: rows, columns: inner, count },
        }
    }

    /// Returns the bytes that a trained weight's gradient moves: it is read and written.
    pub fn weight_gradient_bytes(&self, elements: u64) -> u64 {
        elements * 2 * GRADIENT_BYTES
    }

    fn elements(&self) -> u64 {
        let value = self.facts.counted_value.unwrap_or_else(|| self.facts.output());
        touched_elements(self.facts, self.shapes.values[value.0])
    }
}
