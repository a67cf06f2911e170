//! The operations of a recorded block, and the facts of each that recording, planning and differentiation need: the
//! values and parameters it reads and writes, and the saved activations of its two backward functions. The kernels are
//! called in `execute`.

mod attention;
mod experts;
mod facts;
mod parallel;

use lockstep_tensor::Gelu;

pub(crate) use self::attention::{AttentionOperation, KeySource};
pub use self::attention::{AttentionShape, RotaryPairs};
pub use self::experts::Routing;
pub(crate) use self::experts::{PartCounts, RemoteRows, RouteOperation, SlotTables};
pub(crate) use self::facts::Facts;
pub(crate) use self::parallel::{
    ContextCollective, ContextCollectiveKind, SummaLinear, VocabularyParallelLoss,
};
use crate::{
    block::{BatchInput, DropoutSite, ParameterIndex, TokenRange, Value},
    placement::{Redistribute, Transfer},
};

/// One recorded operation.
#[derive(Debug, Clone)]
pub(crate) enum Operation {
    Embedding {
        input: BatchInput,
        table: ParameterIndex,
        /// Token id of this rank's first row of the table.
        first_id: u32,
        /// The tokens to look up.
        tokens: TokenRange,
        y: Value,
    },
    Linear {
        x: Value,
        weight: ParameterIndex,
        bias: Option<ParameterIndex>,
        /// True if this rank adds the bias. In a row-parallel layer only rank 0 does.
        adds_bias: bool,
        y: Value,
    },
    /// A linear layer under two-dimensional tensor parallelism.
    SummaLinear(SummaLinear),
    RmsNorm {
        x: Value,
        weight: ParameterIndex,
        eps: f32,
        y: Value,
        rstd: Value,
    },
    LayerNorm {
        x: Value,
        weight: ParameterIndex,
        bias: Option<ParameterIndex>,
        eps: f32,
        y: Value,
        mean: Value,
        rstd: Value,
    },
    Rope {
        x: Value,
        head_dim: usize,
        pairs: RotaryPairs,
        /// The tokens of the local rows.
        tokens: TokenRange,
        y: Value,
    },
    /// Concatenation of the elements of each head: those of `own`, then those of `tail`.
    JoinHeads {
        own: Value,
        tail: Value,
        heads: usize,
        /// Number of heads of `tail`: `heads`, or 1 that all heads share.
        tails: usize,
        y: Value,
    },
    /// Each head truncated or zero-padded to the width of `y`.
    ResizeHeads {
        x: Value,
        heads: usize,
        y: Value,
    },
    Attention(AttentionOperation),
    SwiGlu {
        gate: Value,
        up: Value,
        y: Value,
        /// Expert offsets: if given, only the rows before the last offset are computed.
        offsets: Option<Value>,
    },
    Gelu {
        kind: Gelu,
        x: Value,
        y: Value,
    },
    Scale {
        x: Value,
        factor: f32,
        y: Value,
    },
    Add {
        a: Value,
        b: Value,
        y: Value,
    },
    Dropout {
        x: Value,
        dropout: DropoutSite,
        /// The local tokens and the first local column, which key the mask.
        tokens: TokenRange,
        first_feature: u32,
        y: Value,
    },
    /// A tensor-parallel collective that changes the placement of a value.
    Redistribute {
        exchange: Redistribute,
        x: Value,
        y: Value,
        /// Scratch as large as `x`, for all-to-alls to and from blocks.
        scratch: Option<Value>,
    },
    /// A context-parallel collective that converts between local tokens and whole sequences.
    ContextCollective(ContextCollective),
    /// A router: the choice of experts and their weights.
    Route(RouteOperation),
    /// A copy of the row of each slot, sorted by expert.
    Dispatch {
        x: Value,
        chosen: Value,
        tables: SlotTables,
        rows: Value,
    },
    /// A linear layer per expert, as a grouped matrix product.
    GroupedLinear {
        x: Value,
        weight: ParameterIndex,
        offsets: Value,
        /// Total rows of the local experts under even load, for cost estimates.
        even_rows: usize,
        y: Value,
    },
    /// The weighted sum of the rows of each token's slots.
    Combine {
        rows: Value,
        weights: Value,
        tables: SlotTables,
        /// Rows of this rank's slots after they are sent back, where experts are on several ranks.
        returned: Option<Value>,
        y: Value,
    },
    /// Rows scaled by the sigmoid of one number each.
    GateRows {
        gate: Value,
        x: Value,
        y: Value,
    },
    /// The output layer and its cross-entropy, computed for one range of tokens at a time so that all logits never
    /// exist at once. In training the backward computes the logits, the losses and the gradients together.
    OutputLoss {
        x: Value,
        weight: ParameterIndex,
        /// Scratch for the logits of one range of tokens.
        logits: Value,
        split: Option<VocabularyParallelLoss>,
        losses: Value,
    },
}

impl Operation {
    /// Returns the facts of the operation.
    pub(crate) fn facts(&self) -> Facts {
        match *self {
            Self::Embedding { table, y, .. } => {
                Facts { weight: Some(table), vector_flops: [0, 0, 1], ..Facts::of("embedding", [], [y]) }
            }
            Self::Linear { x, weight, bias, y, .. } => Facts {
                weight: Some(weight),
                bias,
                saved_for_weights: vec![x],
                accumulates: true,
                ..Facts::of("linear", [x], [y])
            },
            Self::SummaLinear(ref linear) => linear.facts(),
            Self::RmsNorm { x, weight, y, rstd, .. } => Facts {
                weight: Some(weight),
                saved_for_inputs: vec![x, rstd],
                saved_for_weights: vec![x, rstd],
                accumulates: true,
                is_cheap: true,
                vector_flops: [4, 8, 3],
                ..Facts::of("RMSNorm", [x], [y, rstd])
            },
            Self::LayerNorm { x, weight, bias, y, mean, rstd, .. } => Facts {
                weight: Some(weight),
                bias,
                saved_for_inputs: vec![x, mean, rstd],
                saved_for_weights: vec![x, mean, rstd],
                accumulates: true,
                is_cheap: true,
                vector_flops: [8, 11, 5],
                ..Facts::of("LayerNorm", [x], [y, mean, rstd])
            },
            Self::Rope { x, y, .. } => Facts { vector_flops: [3, 3, 0], ..Facts::in_place("RoPE", x, y) },
            Self::Scale { x, y, .. } => Facts { vector_flops: [1, 1, 0], ..Facts::in_place("scale", x, y) },
            Self::Dropout { x, y, .. } => {
                Facts { is_cheap: true, vector_flops: [2, 2, 0], ..Facts::in_place("dropout", x, y) }
            }
            Self::JoinHeads { own, tail, y, .. } => Facts::of("join heads", [own, tail], [y]),
            Self::ResizeHeads { x, y, .. } => Facts::of("resize heads", [x], [y]),
            Self::Attention(ref attention) => attention.facts(),
            Self::SwiGlu { gate, up, y, offsets } => Facts {
                tables: offsets.into_iter().collect(),
                saved_for_inputs: [gate, up].into_iter().chain(offsets).collect(),
                is_cheap: true,
                vector_flops: [5, 12, 0],
                ..Facts::of("SwiGLU", [gate, up], [y])
            },
            Self::Gelu { x, y, .. } => Facts {
                saved_for_inputs: vec![x],
                backward_in_place: true,
                is_cheap: true,
                vector_flops: [8, 14, 0],
                ..Facts::of("GELU", [x], [y])
            },
            Self::Add { a, b, y } => Facts {
                in_place_inputs: vec![b, a],
                passes_gradient_on: true,
                vector_flops: [1, 0, 0],
                ..Facts::of("add", [a, b], [y])
            },
            Self::Redistribute { exchange, x, y, scratch } => Facts {
                scratch: scratch.into_iter().collect(),
                in_place_inputs: if exchange == Redistribute::AllReduce { vec![x] } else { vec![] },
                backward_in_place: exchange == Redistribute::AllReduceGradient,
                passes_gradient_on: exchange == Redistribute::AllReduce,
                alias_of: (exchange == Redistribute::AllReduceGradient).then_some(x),
                is_gathered: exchange.forward() == Transfer::AllGather,
                // The output of a norm in blocks; the norm's output is not saved either.
                is_cheap: exchange == Redistribute::TokensToBlocks,
                ..Facts::of(exchange.name(), [x], [y])
            },
            Self::ContextCollective(ref exchange) => exchange.facts(),
            Self::Route(ref route) => route.facts(),
            Self::Dispatch { x, chosen, ref tables, rows } => {
                let experts = tables.remote.and_then(|remote| remote.experts);
                let written = [rows].into_iter().chain(tables.permutations()).chain([tables.offsets]);
                Facts {
                    tables: vec![chosen],
                    scratch: tables.buffers().chain(tables.remote.map(|remote| remote.arrived)).collect(),
                    saved_for_inputs: tables.permutations().collect(),
                    is_cheap: tables.remote.is_none(),
                    vector_flops: [0, 1, 0],
                    ..Facts::of("dispatch to experts", [x], written.chain(experts).collect::<Vec<_>>())
                }
            }
            Self::GroupedLinear { x, weight, offsets, y, .. } => Facts {
                tables: vec![offsets],
                weight: Some(weight),
                saved_for_inputs: vec![offsets],
                saved_for_weights: vec![x, offsets],
                accumulates: true,
                ..Facts::of("linear of experts", [x], [y])
            },
            Self::Combine { rows, weights, ref tables, returned, y } => {
                let (combined, written) = (returned.unwrap_or(rows), [y].into_iter().chain(returned));
                Facts {
                    tables: tables.permutations().collect(),
                    scratch: tables.buffers().collect(),
                    saved_for_inputs: [combined, weights].into_iter().chain(tables.permutations()).collect(),
                    vector_flops: [2, 3, 0],
                    ..Facts::of("combine experts", [rows, weights], written.collect::<Vec<_>>())
                }
            }
            Self::GateRows { gate, x, y } => Facts {
                saved_for_inputs: vec![gate, x],
                vector_flops: [1, 3, 0],
                ..Facts::of("gate rows", [gate, x], [y])
            },
            Self::OutputLoss { x, weight, logits, split, losses } => Facts {
                scratch: split.iter().flat_map(VocabularyParallelLoss::scratch).chain([logits]).collect(),
                weight: Some(weight),
                saved_for_inputs: vec![x],
                is_loss: true,
                vector_flops: [4, 7, 0],
                ..Facts::of("output layer and loss", [x], [losses])
            },
        }
    }

    /// Returns the parameter that biases the choice of experts, if this is a router with one.
    pub(crate) fn selection_bias(&self) -> Option<ParameterIndex> {
        match self {
            Self::Route(RouteOperation { bias, .. }) => bias.map(|(parameter, _)| parameter),
            _ => None,
        }
    }

    /// Returns the output that is saved even if it could be recomputed, because the engine reads it: a router's slot counts.
    pub(crate) fn always_saved(&self) -> Option<Value> {
        match *self {
            Self::Route(RouteOperation { counts, .. }) => Some(counts),
            _ => None,
        }
    }
}
