//! Attention of ranks that each hold some tokens of every sequence: what it reaches of the others' tokens, and how.
//!
//! Nothing else in a block looks at another token, so that only attention is recorded otherwise. Keys and values are
//! gathered (as in Llama 3: Grattafiori et al., 2024), or travel round the ranks (`ring`), or ranks exchange tokens for heads
//! and each attends to whole sequences (Jacobs et al., 2023). Gathers and exchanges are operations of their own, whose
//! backward is derived as of any other.
//!
//! ```text
//! ring         q, k, v of own tokens -> attention, in which keys and values go round -> y of own tokens
//! all-gather   k, v -> of all tokens; q of own tokens -> attention -> y of own tokens
//! all-to-all   q, k, v -> of all tokens, some heads -> attention -> y -> of own tokens, all heads
//! ```

use lockstep_comm::CommError;
use lockstep_plan::{ContextMethod, ContextPlace, DType};
use lockstep_tensor::{TokenSpan, View};

use crate::{
    AttentionShape, Peers, Recorder, Ring, Value, operation::Operation, recorder::ValueInfo, replay::Run,
};

/// The ranks that share each sequence, while a block is replayed.
#[derive(Debug, Clone, Copy)]
pub struct ContextPeers<'a> {
    /// They and this one.
    pub peers: Peers<'a>,
    /// Memory for keys and values on their way round; none if they are reached otherwise.
    pub ring: Option<&'a Ring>,
}

/// Where an attention finds the keys of whole sequences.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Reach {
    /// Queries and keys are those of whole sequences.
    Whole,
    /// Keys are those of whole sequences, queries those of the own tokens. Where dtypes are narrower than f32 the gradients of
    /// keys and values are summed aside.
    Gathered { sums: Option<[Value; 2]> },
    /// Queries and keys are those of the own tokens. Where dtypes are narrower than f32 outputs, and gradients of the queries, are
    /// summed aside.
    Ring { sums: Option<Value> },
}

impl Reach {
    /// Memory that the attention needs while it runs.
    pub(crate) fn scratch(&self) -> Vec<Value> {
        match *self {
            Self::Whole => vec![],
            Self::Gathered { sums } => sums.into_iter().flatten().collect(),
            Self::Ring { sums } => sums.into_iter().collect(),
        }
    }
}

/// What ranks that share sequences exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SequenceChange {
    /// From the own tokens of each sequence to all of them.
    Gather,
    /// From the own tokens to all of them, of fewer of so many heads. Fewer heads than ranks are repeated.
    TokensToHeads { heads: usize },
    /// And back: `heads` are those of all ranks.
    HeadsToTokens { heads: usize },
}

/// An exchange of parts of sequences.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SequenceExchange {
    pub(crate) change: SequenceChange,
    pub(crate) x: Value,
    pub(crate) y: Value,
    /// As large as `x` or `y`, whichever is larger.
    pub(crate) scratch: [Value; 2],
    /// In f32, where several ranks have the same heads: the sum of what they have.
    pub(crate) sum: Option<Value>,
}

impl SequenceExchange {
    /// As tables and traces call it.
    pub(crate) fn name(&self) -> &'static str {
        match self.change {
            SequenceChange::Gather => "gather sequences of ranks",
            SequenceChange::TokensToHeads { .. } => "exchange tokens for heads",
            SequenceChange::HeadsToTokens { .. } => "exchange heads for tokens",
        }
    }

    /// Memory that it needs while it runs.
    pub(crate) fn scratch(&self) -> Vec<Value> {
        match self.change {
            SequenceChange::Gather => vec![self.scratch[0]],
            _ => self.scratch.into_iter().chain(self.sum).collect(),
        }
    }
}

impl Recorder {
    /// Records the block as rank `place` of those that share each sequence; the shape that was given is that of whole
    /// ones.
    ///
    /// # Panics
    /// If they cannot share such sequences.
    pub fn share_sequences(&mut self, place: ContextPlace) {
        self.shape.seq_len = place.held(self.shape.seq_len);
        self.context = place;
    }

    /// What attention reads in the place of queries, keys and values of the own tokens, which of the query heads that are here it
    /// begins with, the heads that it has, and how it reaches the keys.
    pub(crate) fn reached(
        &mut self,
        [q, k, v]: [Value; 3],
        shape: AttentionShape,
    ) -> ([Value; 3], usize, AttentionShape, Reach) {
        let ContextPlace { ranks, rank, method } = self.context;
        if ranks == 1 {
            return ([q, k, v], 0, shape, Reach::Whole);
        }
        let is_narrow = self.shape.dtype != DType::F32;
        match method {
            ContextMethod::Ring => {
                let ValueInfo { rows, columns, .. } = self.values[q.0];
                let sums = is_narrow.then(|| self.scratch(rows, columns, DType::F32));
                ([q, k, v], 0, shape, Reach::Ring { sums })
            }
            ContextMethod::AllGather => {
                let [k, v] = [k, v].map(|x| {
                    let columns = self.values[x.0].columns;
                    self.exchange_sequences(x, SequenceChange::Gather, columns)
                });
                let ValueInfo { rows, columns, .. } = self.values[k.0];
                let mut sum = || self.scratch(rows, columns, DType::F32);
                let sums = is_narrow.then(|| [sum(), sum()]);
                ([q, k, v], 0, shape, Reach::Gathered { sums })
            }
            ContextMethod::AllToAll => {
                let AttentionShape { heads, key_value_heads, head_dim, .. } = shape;
                assert!(heads.is_multiple_of(ranks), "{heads} heads are not split over {ranks} ranks");
                let (of_queries, of_keys) = (heads / ranks, (key_value_heads / ranks).max(1));
                let mut change = |x, heads, held| {
                    self.exchange_sequences(x, SequenceChange::TokensToHeads { heads }, held * head_dim)
                };
                let operands = [
                    change(q, heads, of_queries),
                    change(k, key_value_heads, of_keys),
                    change(v, key_value_heads, of_keys),
                ];
                let shape = AttentionShape { heads: of_queries, key_value_heads: of_keys, ..shape };
                (operands, rank * of_queries, shape, Reach::Whole)
            }
        }
    }

    /// The output of an attention, of the own tokens again; `heads` are those of all ranks that share sequences.
    pub(crate) fn returned(&mut self, y: Value, heads: usize) -> Value {
        let ContextPlace { ranks, method, .. } = self.context;
        if ranks == 1 || method != ContextMethod::AllToAll {
            return y;
        }
        let columns = self.values[y.0].columns * ranks;
        self.exchange_sequences(y, SequenceChange::HeadsToTokens { heads }, columns)
    }

    fn exchange_sequences(&mut self, x: Value, change: SequenceChange, columns: usize) -> Value {
        let ValueInfo { rows, dtype, .. } = self.values[x.0];
        let rows = match change {
            SequenceChange::HeadsToTokens { .. } => rows / self.context.ranks,
            _ => rows * self.context.ranks,
        };
        self.values.push(ValueInfo { rows, columns, dtype });
        self.layouts.push(self.layout(x));
        let y = Value(self.values.len() - 1);
        let elements = self.values[x.0].elements().max(rows * columns);
        let scratch = [(); 2].map(|()| self.scratch(1, elements, dtype));
        let is_repeated =
            matches!(change, SequenceChange::TokensToHeads { heads } if heads < self.context.ranks);
        let sum = is_repeated.then(|| self.scratch(1, elements / self.context.ranks, DType::F32));
        self.operations.push(Operation::SequenceExchange(SequenceExchange { change, x, y, scratch, sum }));
        y
    }
}

/// The two stretches of each sequence that a rank holds, as spans of its tensors; `held` tokens in all.
pub(crate) fn spans(place: ContextPlace, rank: usize, held: usize) -> [TokenSpan; 2] {
    let positions = place.halves_of(rank, held * place.ranks);
    let half = held / 2;
    [0, 1].map(|index| TokenSpan {
        stored: held,
        first: index * half,
        len: if index == 0 { half } else { held - half },
        position: positions[index],
    })
}

/// Whether any of the queries may see any of the keys.
pub(crate) fn may_see(queries: TokenSpan, keys: TokenSpan, window: Option<usize>) -> bool {
    let first_seen = window.map_or(0, |window| (queries.position + 1).saturating_sub(window));
    queries.len > 0
        && keys.len > 0
        && keys.position < queries.position + queries.len
        && keys.position + keys.len > first_seen
}

impl<'a> Run<'a> {
    pub(crate) fn peers_of_context(&self) -> Peers<'a> {
        let context = self.replay.context;
        context.expect("a program that was recorded for parts of sequences is given the other ranks").peers
    }

    /// `y` is `x` for all tokens, or of other ones.
    pub(crate) fn exchange_sequences(
        &self,
        exchange: &SequenceExchange,
        x: View<'a>,
        y: View<'a>,
    ) -> Result<(), CommError> {
        match exchange.change {
            SequenceChange::Gather => {
                let gathered = self.scratch_like(exchange.scratch[0], y);
                let peers = self.peers_of_context();
                peers.gather(x, gathered)?;
                self.for_each_stretch(y, gathered, |of_sequences, of_ranks| {
                    self.replay.queue.cast(of_ranks, of_sequences);
                });
                Ok(())
            }
            SequenceChange::TokensToHeads { heads } => self.tokens_to_heads(exchange, heads, x, y),
            SequenceChange::HeadsToTokens { heads } => self.heads_to_tokens(exchange, heads, x, y),
        }
    }

    /// `dx` is the gradient of the value whose gradient after the exchange is `dy`.
    pub(crate) fn exchange_sequence_gradients(
        &self,
        exchange: &SequenceExchange,
        dy: View<'a>,
        dx: View<'a>,
    ) -> Result<(), CommError> {
        match exchange.change {
            SequenceChange::Gather => {
                let summands = self.scratch_like(exchange.scratch[0], dy);
                self.for_each_stretch(dy, summands, |of_sequences, of_ranks| {
                    self.replay.queue.cast(of_sequences, of_ranks);
                });
                let peers = self.peers_of_context();
                peers.sum_rows(summands, dx)
            }
            SequenceChange::TokensToHeads { heads } => self.heads_to_tokens(exchange, heads, dy, dx),
            SequenceChange::HeadsToTokens { heads } => self.tokens_to_heads(exchange, heads, dy, dx),
        }
    }

    /// Calls `work` with the rows of each stretch of each sequence: among those of whole sequences, and among those of one rank
    /// after the other.
    fn for_each_stretch(
        &self,
        of_sequences: View<'a>,
        of_ranks: View<'a>,
        work: impl Fn(View<'a>, View<'a>),
    ) {
        let (place, shape) = (self.program.context, self.program.shape);
        let (sequences, held) = (shape.sequences, shape.seq_len);
        for rank in 0..place.ranks {
            for (sequence, span) in
                (0..sequences).flat_map(|sequence| spans(place, rank, held).map(|span| (sequence, span)))
            {
                let whole = sequence * held * place.ranks + span.position;
                let part = (rank * sequences + sequence) * held + span.first;
                work(of_sequences.rows(whole..whole + span.len), of_ranks.rows(part..part + span.len));
            }
        }
    }

    /// `x [T, heads, ..]` of the own tokens becomes `y` of all tokens of each sequence and the own heads.
    #[track_caller]
    fn tokens_to_heads(
        &self,
        exchange: &SequenceExchange,
        heads: usize,
        x: View<'a>,
        y: View<'a>,
    ) -> Result<(), CommError> {
        let queue = self.replay.queue;
        let Blocks { ranks, groups, tokens, width, copies } = self.blocks(heads, x);
        let [sent, other] = exchange.scratch.map(|scratch| self.scratch_like(scratch, y));
        // One block of heads after the other; where ranks are more than heads, one for each rank.
        let by_heads = if copies == 1 { sent } else { other.reshape([copies, x.elements()]).rows(0..1) };
        queue.transpose_blocks(x.reshape([tokens, groups, width]), by_heads.reshape([groups, tokens, width]));
        if copies > 1 {
            let (from, to) =
                (by_heads.reshape([groups, tokens * width]), sent.reshape([ranks, tokens * width]));
            for rank in 0..ranks {
                queue.cast(from.rows(rank / copies..rank / copies + 1), to.rows(rank..rank + 1));
            }
        }
        let sequences = self.program.shape.sequences;
        let received = if sequences == 1 { y } else { other };
        self.peers_of_context().exchange(sent, received)?;
        if sequences > 1 {
            let row = y.elements() / (ranks * sequences);
            queue.transpose_blocks(
                received.reshape([ranks, sequences, row]),
                y.reshape([sequences, ranks, row]),
            );
        }
        Ok(())
    }

    /// `x` of all tokens of each sequence and the own heads becomes `y [T, heads, ..]` of the own tokens; what several ranks
    /// have of a head is summed, in f32.
    #[track_caller]
    fn heads_to_tokens(
        &self,
        exchange: &SequenceExchange,
        heads: usize,
        x: View<'a>,
        y: View<'a>,
    ) -> Result<(), CommError> {
        let queue = self.replay.queue;
        let Blocks { ranks, groups, tokens, width, copies } = self.blocks(heads, y);
        let [other, received] = exchange.scratch.map(|scratch| self.scratch_like(scratch, x));
        let sequences = self.program.shape.sequences;
        let sent = if sequences == 1 { x } else { other };
        if sequences > 1 {
            let row = x.elements() / (ranks * sequences);
            queue.transpose_blocks(x.reshape([sequences, ranks, row]), sent.reshape([ranks, sequences, row]));
        }
        self.peers_of_context().exchange(sent, received)?;
        let by_heads = match exchange.sum {
            None => received,
            Some(sum) => {
                let (from, block) = (received.reshape([ranks, tokens * width]), tokens * width);
                let sums = other.reshape([copies, groups * block]).rows(0..1).reshape([groups, block]);
                let sum = self.flat(sum);
                for group in 0..groups {
                    queue.zero(sum);
                    queue.sum_rows(from.rows(group * copies..(group + 1) * copies), sum);
                    queue.cast(sum, sums.rows(group..group + 1).reshape([block]));
                }
                sums
            }
        };
        queue.transpose_blocks(by_heads.reshape([groups, tokens, width]), y.reshape([tokens, groups, width]));
        Ok(())
    }

    /// How the heads of `of_tokens [T, heads, ..]` are given to the ranks.
    fn blocks(&self, heads: usize, of_tokens: View<'_>) -> Blocks {
        let ranks = self.program.context.ranks;
        let tokens = self.program.shape.tokens();
        let groups = heads.min(ranks);
        Blocks {
            ranks,
            groups,
            tokens,
            width: of_tokens.elements() / (tokens * groups),
            copies: ranks / groups,
        }
    }

    /// Scratch of as many elements as `like`.
    fn scratch_like(&self, scratch: Value, like: View<'_>) -> View<'a> {
        let flat = self.flat(scratch);
        flat.rows(0..like.elements()).reshape(like.shape())
    }
}

/// Heads of some tokens as blocks, of which each rank gets one.
struct Blocks {
    ranks: usize,
    /// Blocks of heads that differ.
    groups: usize,
    tokens: usize,
    /// Elements of a token in each.
    width: usize,
    /// Ranks that get the same.
    copies: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_see_keys_that_are_neither_later_nor_out_of_their_window() {
        let span = |position, len| TokenSpan { stored: len, first: 0, len, position };
        let table = [
            (span(4, 4), span(0, 4), None, true),
            (span(4, 4), span(4, 4), None, true),
            (span(4, 4), span(8, 4), None, false),
            (span(4, 4), span(7, 4), None, true),
            (span(8, 4), span(0, 4), Some(5), false),
            (span(8, 4), span(0, 4), Some(6), true),
            (span(8, 4), span(0, 0), None, false),
        ];
        for (queries, keys, window, expected) in table {
            assert_eq!(may_see(queries, keys, window), expected, "{queries:?} {keys:?} {window:?}");
        }
    }

    #[test]
    fn spans_are_the_stretches_that_a_rank_holds() {
        let place = ContextPlace { ranks: 2, rank: 0, method: ContextMethod::Ring };
        let positions = |rank| spans(place, rank, 6).map(|span| (span.first, span.len, span.position));
        assert_eq!(positions(0), [(0, 3, 0), (3, 3, 9)]);
        assert_eq!(positions(1), [(0, 3, 3), (3, 3, 6)]);
    }
}
