//! The operations a recorded block is made of: what each reads, what it writes, and what its two backward
//! functions need. The kernels they call are in `replay`.

use lockstep_plan::ExpertPlace;
use lockstep_tensor::Gelu;

use crate::{
    Routing, Value,
    context::{Reach, SequenceChange, SequenceExchange},
    layout::Exchange,
    summa::BlockLinear,
    training::Training,
};

/// Index of a parameter in its program's list of declarations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ParameterIndex(pub usize);

/// An integer input of a micro-batch that an embedding can look up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchInput {
    /// Token ids.
    Ids,
    /// Position of each token in its sequence.
    Positions,
}

/// A place in a block where elements are dropped; `site` counts them within the block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DropoutSite {
    /// Number of the site within its block.
    pub site: u32,
    /// Probability of dropping an element.
    pub probability: f32,
}

/// Which elements of a head a rotary embedding turns together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RotaryPairs {
    /// Those at the same place of both halves.
    Halves,
    /// Each second one with that before it.
    Neighbours,
}

/// What the model says of an attention; the batch says the rest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub key_value_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// Sliding window in tokens.
    pub window: Option<usize>,
}

/// Attention and what it reads and writes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionOperation {
    pub(crate) q: Value,
    pub(crate) k: Value,
    pub(crate) v: Value,
    /// What is here of it, where ranks share the heads.
    pub(crate) shape: AttentionShape,
    /// Number of the first query head that is here.
    pub(crate) first_head: usize,
    /// The sequences that are here.
    pub(crate) sequences: SequenceRange,
    pub(crate) dropout: Option<DropoutSite>,
    /// Where its keys are.
    pub(crate) reach: Reach,
    pub(crate) y: Value,
    pub(crate) log_sum_exp: Value,
}

/// Consecutive tokens of a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TokenRange {
    pub(crate) first: usize,
    pub(crate) len: usize,
}

/// Consecutive sequences of a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SequenceRange {
    pub(crate) first: usize,
    pub(crate) len: usize,
}

/// What a loss whose vocabulary is split needs beside its logits: scratch for as many tokens.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SplitLoss {
    pub(crate) first_column: usize,
    /// Three numbers for each token: see [`Kernels::softmax_statistics`](lockstep_tensor::Kernels::softmax_statistics).
    pub(crate) statistics: Value,
    /// Those of all ranks.
    pub(crate) gathered: Value,
    pub(crate) log_sum_exp: Value,
}

/// A router, and what it reads and writes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RouteOperation {
    pub(crate) logits: Value,
    /// What is added to scores where experts are chosen, and scratch for it in f32.
    pub(crate) bias: Option<(ParameterIndex, Value)>,
    pub(crate) routing: Routing,
    /// Slots of a sequence that an expert takes, if that is limited.
    pub(crate) capacity: Option<usize>,
    pub(crate) scores: Value,
    pub(crate) log_sum_exp: Value,
    pub(crate) experts: Value,
    pub(crate) weights: Value,
    /// The tokens that are routed here.
    pub(crate) tokens: TokenRange,
    /// How many slots of each stretch of a sequence that is here have chosen each expert.
    pub(crate) counts: Value,
    /// The same of whole sequences, where other ranks have parts of them.
    pub(crate) parts: Option<PartCounts>,
    /// Scratch: sums of probabilities, or the gradient by them.
    pub(crate) probabilities: Value,
    /// The experts without the slots that they do not take, if that is limited.
    pub(crate) kept: Option<Value>,
}

/// What ranks that have parts of the same sequences know of each other's counts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PartCounts {
    /// Of whole sequences.
    pub(crate) totals: Value,
    /// Scratch: those of each rank's stretches.
    pub(crate) gathered: Value,
    /// Scratch: the same in the order of the tokens, one sequence after the other.
    pub(crate) ordered: Value,
    /// Scratch: of the tokens before each of the own stretches.
    pub(crate) before: Value,
}

/// What takes rows to the experts of other ranks and back. A part of an expert counts as an expert here.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RemoteRows {
    pub(crate) place: ExpertPlace,
    /// The experts of each slot, once for each part of them; none where they have no parts.
    pub(crate) experts: Option<Value>,
    /// The first of the own rows for each expert, in the order of the ranks that hold them.
    pub(crate) sent: Value,
    /// How many rows came for each of the own experts from each rank.
    pub(crate) received: Value,
    /// Scratch: the expert of each row that came.
    pub(crate) arrived: Value,
    /// Which row in the order of the experts belongs to which that came, and the reverse.
    pub(crate) arrived_slots: Value,
    pub(crate) arrived_rows: Value,
    /// Scratch: rows as they are sent, and as they come.
    pub(crate) sending: Value,
    pub(crate) receiving: Value,
}

/// Which row belongs to which slot, and which rows to which expert.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SlotTables {
    pub(crate) slots: Value,
    pub(crate) rows: Value,
    pub(crate) offsets: Value,
    /// Where the experts are on several ranks.
    pub(crate) remote: Option<RemoteRows>,
}

impl SlotTables {
    /// Everything that leads from rows to slots and back.
    fn values(&self) -> Vec<Value> {
        let mut values = vec![self.slots, self.rows];
        if let Some(remote) = self.remote {
            let RemoteRows { sent, received, arrived_slots, arrived_rows, .. } = remote;
            values.extend([sent, received, arrived_slots, arrived_rows]);
        }
        values
    }

    fn scratch(&self) -> Vec<Value> {
        self.remote.map_or_else(Vec::new, |remote| vec![remote.sending, remote.receiving])
    }
}

/// One recorded operation.
#[derive(Debug, Clone)]
pub(crate) enum Operation {
    Embedding {
        input: BatchInput,
        table: ParameterIndex,
        /// The id of the first row of the table that is here.
        first_id: u32,
        /// The tokens that are looked up.
        tokens: TokenRange,
        y: Value,
    },
    Linear {
        x: Value,
        weight: ParameterIndex,
        bias: Option<ParameterIndex>,
        /// Whether the bias is added here, and not by another rank whose summand this one's is added to.
        adds_bias: bool,
        y: Value,
    },
    /// A linear layer that ranks share as a square.
    BlockLinear(BlockLinear),
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
        /// The tokens that are here.
        tokens: TokenRange,
        y: Value,
    },
    /// Heads of two parts.
    JoinHeads {
        own: Value,
        tail: Value,
        heads: usize,
        /// As many, or one for all.
        tails: usize,
        y: Value,
    },
    /// The first elements of each head, and zeros beyond.
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
        /// Where only some rows count: those before the last of these.
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
        /// The tokens and the first of the columns that are here.
        tokens: TokenRange,
        first_feature: u32,
        y: Value,
    },
    /// What ranks do to get a value that they share in another layout.
    Exchange {
        exchange: Exchange,
        x: Value,
        y: Value,
        /// As large as `x`, for those of blocks.
        scratch: Option<Value>,
    },
    /// What ranks do to get at the tokens of sequences that others hold.
    SequenceExchange(SequenceExchange),
    /// A router's choice.
    Route(RouteOperation),
    /// A row for each slot, in the order of the experts.
    Dispatch {
        x: Value,
        chosen: Value,
        tables: SlotTables,
        rows: Value,
    },
    /// A linear layer of each expert on its rows.
    GroupedLinear {
        x: Value,
        weight: ParameterIndex,
        offsets: Value,
        /// Rows that experts have to multiply if all have as many as any other.
        even_rows: usize,
        y: Value,
    },
    /// The sum of the rows of each token's slots, weighted.
    Combine {
        rows: Value,
        weights: Value,
        tables: SlotTables,
        /// The rows of the own slots, come back, where experts are on several ranks.
        returned: Option<Value>,
        y: Value,
    },
    /// Rows scaled by the sigmoid of a number each.
    GateRows {
        gate: Value,
        x: Value,
        y: Value,
    },
    /// The output layer and its cross-entropy, some tokens at a time: all logits never exist at once. In training,
    /// the backward computes them, losses and gradients together.
    OutputLoss {
        x: Value,
        weight: ParameterIndex,
        /// Scratch for the logits of as many tokens as it has rows.
        logits: Value,
        split: Option<SplitLoss>,
        losses: Value,
    },
}

/// How an operation's gradient reaches an input that already has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Accumulation {
    /// Its kernel can add to what is there.
    InKernel,
    /// It is computed aside and added.
    Aside,
}

impl Operation {
    /// The value the rest of the block uses.
    pub(crate) fn output(&self) -> Value {
        match *self {
            Self::Embedding { y, .. }
            | Self::Linear { y, .. }
            | Self::BlockLinear(BlockLinear { y, .. })
            | Self::RmsNorm { y, .. }
            | Self::LayerNorm { y, .. }
            | Self::Rope { y, .. }
            | Self::Attention(AttentionOperation { y, .. })
            | Self::SwiGlu { y, .. }
            | Self::Gelu { y, .. }
            | Self::Scale { y, .. }
            | Self::Add { y, .. }
            | Self::Dropout { y, .. }
            | Self::GroupedLinear { y, .. }
            | Self::Combine { y, .. }
            | Self::GateRows { y, .. }
            | Self::JoinHeads { y, .. }
            | Self::ResizeHeads { y, .. }
            | Self::Exchange { y, .. }
            | Self::SequenceExchange(SequenceExchange { y, .. }) => y,
            Self::Route(RouteOperation { weights, .. }) => weights,
            Self::Dispatch { rows, .. } => rows,
            Self::OutputLoss { losses, .. } => losses,
        }
    }

    /// Everything the forward writes: the output, and statistics for the backward.
    pub(crate) fn outputs(&self) -> Vec<Value> {
        match *self {
            Self::RmsNorm { y, rstd, .. } => vec![y, rstd],
            Self::LayerNorm { y, mean, rstd, .. } => vec![y, mean, rstd],
            Self::Attention(AttentionOperation { y, log_sum_exp, .. }) => vec![y, log_sum_exp],
            Self::Route(route) => {
                let RouteOperation { weights, scores, log_sum_exp, experts, counts, parts, kept, .. } = route;
                let totals = parts.map(|parts| parts.totals);
                let always = [weights, scores, log_sum_exp, experts, counts];
                always.into_iter().chain(totals).chain(kept).collect()
            }
            Self::Dispatch { tables, rows, .. } => {
                let experts = tables.remote.and_then(|remote| remote.experts);
                let tables = tables.values().into_iter().chain([tables.offsets]);
                [rows].into_iter().chain(tables).chain(experts).collect()
            }
            Self::Combine { returned: Some(returned), y, .. } => vec![y, returned],
            _ => vec![self.output()],
        }
    }

    /// The values that its forward reads.
    pub(crate) fn reads(&self) -> Vec<Value> {
        let mut values = self.inputs();
        match *self {
            Self::SwiGlu { offsets, .. } => values.extend(offsets),
            Self::GroupedLinear { offsets, .. } => values.push(offsets),
            Self::Dispatch { chosen, .. } => values.push(chosen),
            Self::Combine { tables, .. } => values.extend(tables.values()),
            _ => {}
        }
        values
    }

    /// The parameter whose values choose experts.
    pub(crate) fn selection_bias(&self) -> Option<ParameterIndex> {
        match self {
            Self::Route(RouteOperation { bias, .. }) => bias.map(|(parameter, _)| parameter),
            _ => None,
        }
    }

    /// What it writes that is saved whatever is recomputed: somebody outside looks at it.
    pub(crate) fn always_saved(&self) -> Option<Value> {
        match *self {
            Self::Route(RouteOperation { counts, .. }) => Some(counts),
            _ => None,
        }
    }

    /// The values it reads that have gradients.
    pub(crate) fn inputs(&self) -> Vec<Value> {
        match *self {
            Self::Embedding { .. } => vec![],
            Self::Linear { x, .. }
            | Self::BlockLinear(BlockLinear { x, .. })
            | Self::RmsNorm { x, .. }
            | Self::LayerNorm { x, .. }
            | Self::Rope { x, .. }
            | Self::Gelu { x, .. }
            | Self::Scale { x, .. }
            | Self::Dropout { x, .. }
            | Self::ResizeHeads { x, .. }
            | Self::Exchange { x, .. }
            | Self::SequenceExchange(SequenceExchange { x, .. })
            | Self::OutputLoss { x, .. } => vec![x],
            Self::JoinHeads { own, tail, .. } => vec![own, tail],
            Self::Attention(AttentionOperation { q, k, v, .. }) => vec![q, k, v],
            Self::SwiGlu { gate, up, .. } => vec![gate, up],
            Self::Add { a, b, .. } => vec![a, b],
            Self::Route(RouteOperation { logits, .. }) => vec![logits],
            Self::Dispatch { x, .. } | Self::GroupedLinear { x, .. } => vec![x],
            Self::Combine { rows, weights, .. } => vec![rows, weights],
            Self::GateRows { gate, x, .. } => vec![gate, x],
        }
    }

    /// Memory that it needs while it runs, forward or backward.
    pub(crate) fn scratch(&self) -> Vec<Value> {
        match *self {
            Self::Attention(ref attention) => attention.reach.scratch(),
            Self::BlockLinear(ref linear) => linear.scratch(),
            Self::Exchange { scratch, .. } => scratch.into_iter().collect(),
            Self::SequenceExchange(ref exchange) => exchange.scratch(),
            Self::OutputLoss { logits, split: None, .. } => vec![logits],
            Self::OutputLoss { logits, split: Some(split), .. } => {
                vec![logits, split.statistics, split.gathered, split.log_sum_exp]
            }
            Self::Route(RouteOperation { probabilities, parts, bias, .. }) => {
                let parts = parts.into_iter().flat_map(|parts| [parts.gathered, parts.ordered, parts.before]);
                parts.chain(bias.map(|(_, scratch)| scratch)).chain([probabilities]).collect()
            }
            Self::Dispatch { tables, .. } => {
                let arrived = tables.remote.map(|remote| remote.arrived);
                tables.scratch().into_iter().chain(arrived).collect()
            }
            Self::Combine { tables, .. } => tables.scratch(),
            _ => vec![],
        }
    }

    /// Memory that it needs while it computes the gradients of its weights.
    pub(crate) fn scratch_for_weights(&self) -> Vec<Value> {
        match self {
            Self::BlockLinear(linear) => linear.scratch_for_weights(),
            _ => vec![],
        }
    }

    /// The value that its output is another name of: only their gradients differ.
    pub(crate) fn renamed(&self) -> Option<Value> {
        match *self {
            Self::Exchange { exchange: Exchange::SumGradients, x, .. } => Some(x),
            _ => None,
        }
    }

    /// Whether its output has the gradient that its inputs have.
    pub(crate) fn passes_gradient_on(&self) -> bool {
        matches!(self, Self::Add { .. } | Self::Exchange { exchange: Exchange::Sum, .. })
    }

    /// Whether it is a loss: it seeds the backward, which does all of its work.
    pub(crate) fn is_loss(&self) -> bool {
        matches!(self, Self::OutputLoss { .. })
    }

    /// Values of the forward that the gradient of the inputs needs.
    pub(crate) fn needs_for_inputs(&self) -> Vec<Value> {
        match *self {
            Self::RmsNorm { x, rstd, .. } => vec![x, rstd],
            Self::LayerNorm { x, mean, rstd, .. } => vec![x, mean, rstd],
            Self::Attention(AttentionOperation { q, k, v, y, log_sum_exp, .. }) => {
                vec![q, k, v, y, log_sum_exp]
            }
            Self::SwiGlu { gate, up, offsets, .. } => [gate, up].into_iter().chain(offsets).collect(),
            Self::Gelu { x, .. } | Self::OutputLoss { x, .. } => vec![x],
            Self::Route(RouteOperation {
                logits,
                scores,
                log_sum_exp,
                experts,
                weights,
                counts,
                parts,
                ..
            }) => {
                let counts = parts.map_or(counts, |parts| parts.totals);
                vec![logits, scores, log_sum_exp, experts, weights, counts]
            }
            Self::Dispatch { tables, .. } => tables.values(),
            Self::GroupedLinear { offsets, .. } => vec![offsets],
            Self::Combine { rows, weights, tables, returned, .. } => {
                let rows = returned.unwrap_or(rows);
                [rows, weights].into_iter().chain(tables.values()).collect()
            }
            Self::GateRows { gate, x, .. } => vec![gate, x],
            Self::Embedding { .. }
            | Self::Linear { .. }
            | Self::BlockLinear(_)
            | Self::Rope { .. }
            | Self::Scale { .. }
            | Self::Add { .. }
            | Self::Dropout { .. }
            | Self::JoinHeads { .. }
            | Self::ResizeHeads { .. }
            | Self::Exchange { .. }
            | Self::SequenceExchange(_) => vec![],
        }
    }

    /// Values of the forward that the gradients of the trained weights need. A bias needs none.
    pub(crate) fn needs_for_weights(&self, training: &Training) -> Vec<Value> {
        match *self {
            Self::Linear { x, weight, .. } | Self::BlockLinear(BlockLinear { x, weight, .. })
                if training.trains(weight) =>
            {
                vec![x]
            }
            Self::GroupedLinear { x, weight, offsets, .. } if training.trains(weight) => vec![x, offsets],
            Self::RmsNorm { x, rstd, weight, .. } if training.trains(weight) => vec![x, rstd],
            Self::LayerNorm { x, mean, rstd, weight, .. } if training.trains(weight) => vec![x, mean, rstd],
            _ => vec![],
        }
    }

    /// Its parameters: the matrix or the scale first, then the bias.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = ParameterIndex> {
        let (weight, bias) = match *self {
            Self::Embedding { table, .. } => (Some(table), None),
            Self::RmsNorm { weight, .. }
            | Self::GroupedLinear { weight, .. }
            | Self::OutputLoss { weight, .. } => (Some(weight), None),
            Self::Linear { weight, bias, .. }
            | Self::BlockLinear(BlockLinear { weight, bias, .. })
            | Self::LayerNorm { weight, bias, .. } => (Some(weight), bias),
            _ => (None, None),
        };
        weight.into_iter().chain(bias)
    }

    /// Inputs whose storage the output may take over once nothing else needs them.
    pub(crate) fn in_place_inputs(&self) -> Vec<Value> {
        match *self {
            Self::Rope { x, .. }
            | Self::Scale { x, .. }
            | Self::Dropout { x, .. }
            | Self::Exchange { exchange: Exchange::Sum, x, .. } => vec![x],
            Self::Add { a, b, .. } => vec![b, a],
            _ => vec![],
        }
    }

    /// Whether the gradient of the input may be computed in the storage of the gradient of the output.
    pub(crate) fn backward_in_place(&self) -> bool {
        matches!(
            self,
            Self::Rope { .. }
                | Self::Scale { .. }
                | Self::Dropout { .. }
                | Self::Gelu { .. }
                | Self::Exchange { exchange: Exchange::SumGradients, .. }
        )
    }

    /// How a second gradient is added to an input's.
    pub(crate) fn accumulation(&self) -> Accumulation {
        match self {
            Self::Linear { .. }
            | Self::BlockLinear(_)
            | Self::GroupedLinear { .. }
            | Self::RmsNorm { .. }
            | Self::LayerNorm { .. } => Accumulation::InKernel,
            _ => Accumulation::Aside,
        }
    }

    /// Whether its output is never saved, but made again: other ranks keep the parts of it that this one does not.
    pub(crate) fn is_gathered(&self) -> bool {
        matches!(self, Self::Exchange { exchange: Exchange::GatherTokens | Exchange::AllTokens, .. })
            || self.gathers_sequences()
    }

    /// Whether its output is keys or values of whole sequences: those of the own tokens are saved instead.
    pub(crate) fn gathers_sequences(&self) -> bool {
        matches!(self, Self::SequenceExchange(SequenceExchange { change: SequenceChange::Gather, .. }))
    }

    /// Whether selective recomputation drops its output: cheap to compute again, and as wide as an activation.
    pub(crate) fn is_cheap(&self) -> bool {
        matches!(
            self,
            Self::RmsNorm { .. }
                | Self::LayerNorm { .. }
                | Self::SwiGlu { .. }
                | Self::Gelu { .. }
                | Self::Dispatch { tables: SlotTables { remote: None, .. }, .. }
                | Self::Dropout { .. }
                // A norm's output once more, which is not kept itself.
                | Self::Exchange { exchange: Exchange::TokensToBlocks, .. }
        )
    }
}
