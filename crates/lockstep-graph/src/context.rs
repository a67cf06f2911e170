//! Context parallelism: attention where each rank holds some tokens of every sequence.
//!
//! Attention is the only operation of a block that reads other tokens, apart from the slot counts of routers. There are
//! three methods: keys and values are all-gathered (as in Llama 3: Grattafiori et al., 2024), or travel around a ring
//! (`ring`), or an all-to-all converts from sharded tokens to sharded heads, so that each rank attends within whole
//! sequences (Jacobs et al., 2023). All-gathers and all-to-alls are operations of their own, and their backward is
//! derived like any other.
//!
//! ```text
//! ring         q, k, v of local tokens -> attention, in which k and v travel around the ring -> y of local tokens
//! all-gather   k, v -> all-gather; q of local tokens -> attention -> y of local tokens
//! all-to-all   q, k, v -> all tokens, some heads -> attention -> y -> local tokens, all heads
//! ```

use lockstep_comm::CommError;
use lockstep_plan::{ContextMethod, ContextPlace, DType};
use lockstep_tensor::{TokenSpan, View};

use crate::{
    block::{Value, ValueInfo},
    operation::{AttentionShape, ContextCollective, ContextCollectiveKind, KeySource, Operation},
    peers::Peers,
    recorder::Recorder,
    replay::Run,
};

impl Recorder {
    /// Records the block as rank `place` of the context-parallel group. The recorder's shape, until now that of whole
    /// sequences, becomes that of the local tokens.
    ///
    /// # Panics
    /// If the sequences do not divide among the ranks.
    pub fn share_sequences(&mut self, place: ContextPlace) {
        self.shape.seq_len = place.held(self.shape.seq_len);
        self.context = place;
    }

    /// Records what the context-parallel method does before attention. Returns the operands that attention reads, its
    /// first head relative to this rank's query heads, its shape, and its source of keys.
    pub(crate) fn before_attention(
        &mut self,
        [q, k, v]: [Value; 3],
        shape: AttentionShape,
    ) -> ([Value; 3], usize, AttentionShape, KeySource) {
        let ContextPlace { ranks, rank, method } = self.context;
        if ranks == 1 {
            return ([q, k, v], 0, shape, KeySource::Whole);
        }
        let is_narrow = self.shape.dtype != DType::F32;
        match method {
            ContextMethod::Ring => {
                let ValueInfo { rows, columns, .. } = self.values[q.0];
                let sums = is_narrow.then(|| self.local(rows, columns, DType::F32));
                ([q, k, v], 0, shape, KeySource::Ring { sums })
            }
            ContextMethod::AllGather => {
                let [k, v] = [k, v].map(|x| {
                    let columns = self.values[x.0].columns;
                    self.exchange_sequences(x, ContextCollectiveKind::Gather, columns)
                });
                let ValueInfo { rows, columns, .. } = self.values[k.0];
                let mut sum = || self.local(rows, columns, DType::F32);
                let sums = is_narrow.then(|| [sum(), sum()]);
                ([q, k, v], 0, shape, KeySource::Gathered { sums })
            }
            ContextMethod::AllToAll => {
                let AttentionShape { heads, key_value_heads, head_dim, .. } = shape;
                assert!(heads.is_multiple_of(ranks), "{heads} heads are not split over {ranks} ranks");
                let (of_queries, of_keys) = (heads / ranks, (key_value_heads / ranks).max(1));
                let mut change = |x, heads, held| {
                    self.exchange_sequences(
                        x,
                        ContextCollectiveKind::TokensToHeads { heads },
                        held * head_dim,
                    )
                };
                let operands = [
                    change(q, heads, of_queries),
                    change(k, key_value_heads, of_keys),
                    change(v, key_value_heads, of_keys),
                ];
                let shape = AttentionShape { heads: of_queries, key_value_heads: of_keys, ..shape };
                (operands, rank * of_queries, shape, KeySource::Whole)
            }
        }
    }

    /// Returns the output of an attention for the local tokens; `heads` counts the heads of the whole context-parallel group.
    pub(crate) fn after_attention(&mut self, y: Value, heads: usize) -> Value {
        let ContextPlace { ranks, method, .. } = self.context;
        if ranks == 1 || method != ContextMethod::AllToAll {
            return y;
        }
        let columns = self.values[y.0].columns * ranks;
        self.exchange_sequences(y, ContextCollectiveKind::HeadsToTokens { heads }, columns)
    }

    fn exchange_sequences(&mut self, x: Value, change: ContextCollectiveKind, columns: usize) -> Value {
        let ValueInfo { rows, dtype, .. } = self.values[x.0];
        let rows = match change {
            ContextCollectiveKind::HeadsToTokens { .. } => rows / self.context.ranks,
            _ => rows * self.context.ranks,
        };
        let y = self.create(ValueInfo { rows, columns, dtype }, self.placement(x));
        let elements = self.values[x.0].elements().max(rows * columns);
        let scratch = [(); 2].map(|()| self.local(1, elements, dtype));
        let is_repeated =
            matches!(change, ContextCollectiveKind::TokensToHeads { heads } if heads < self.context.ranks);
        let sum = is_repeated.then(|| self.local(1, elements / self.context.ranks, DType::F32));
        self.operations.push(Operation::ContextCollective(ContextCollective { change, x, y, scratch, sum }));
        y
    }
}

/// Returns the two token ranges of each sequence that a rank holds, as spans of its tensors; `held` is their total length.
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

/// Returns true if any of the queries may see any of the keys.
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

    /// Runs the collective forward: converts `x` to `y`.
    pub(crate) fn exchange_sequences(
        &self,
        exchange: &ContextCollective,
        x: View<'a>,
        y: View<'a>,
    ) -> Result<(), CommError> {
        match exchange.change {
            ContextCollectiveKind::Gather => {
                let gathered = self.scratch_like(exchange.scratch[0], y);
                let peers = self.peers_of_context();
                peers.gather(x, gathered)?;
                self.for_each_range(y, gathered, |of_sequences, of_ranks| {
                    self.replay.queue.cast(of_ranks, of_sequences);
                });
                Ok(())
            }
            ContextCollectiveKind::TokensToHeads { heads } => self.tokens_to_heads(exchange, heads, x, y),
            ContextCollectiveKind::HeadsToTokens { heads } => self.heads_to_tokens(exchange, heads, x, y),
        }
    }

    /// Runs the collective backward: writes the gradient of its input to `dx`, given that of its output, `dy`.
    pub(crate) fn exchange_sequence_gradients(
        &self,
        exchange: &ContextCollective,
        dy: View<'a>,
        dx: View<'a>,
    ) -> Result<(), CommError> {
        match exchange.change {
            ContextCollectiveKind::Gather => {
                let summands = self.scratch_like(exchange.scratch[0], dy);
                self.for_each_range(dy, summands, |of_sequences, of_ranks| {
                    self.replay.queue.cast(of_sequences, of_ranks);
                });
                let peers = self.peers_of_context();
                peers.reduce_scatter(summands, dx)
            }
            ContextCollectiveKind::TokensToHeads { heads } => self.heads_to_tokens(exchange, heads, dy, dx),
            ContextCollectiveKind::HeadsToTokens { heads } => self.tokens_to_heads(exchange, heads, dy, dx),
        }
    }

    /// Calls `work` with the rows of each local range of each sequence, for all ranks: first as rows of whole
    /// sequences, second as rows in rank order.
    fn for_each_range(&self, of_sequences: View<'a>, of_ranks: View<'a>, work: impl Fn(View<'a>, View<'a>)) {
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

    /// Converts `x [T, heads, ..]` of the local tokens to `y` of all tokens of each sequence and this rank's heads.
    #[track_caller]
    fn tokens_to_heads(
        &self,
        exchange: &ContextCollective,
        heads: usize,
        x: View<'a>,
        y: View<'a>,
    ) -> Result<(), CommError> {
        let queue = self.replay.queue;
        let Blocks { ranks, groups, tokens, width, copies } = self.blocks(heads, x);
        let [sent, other] = exchange.scratch.map(|scratch| self.scratch_like(scratch, y));
        // One block of heads after another; with more ranks than heads, one block per rank.
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
        self.peers_of_context().all_to_all(sent, received)?;
        if sequences > 1 {
            let row = y.elements() / (ranks * sequences);
            queue.transpose_blocks(
                received.reshape([ranks, sequences, row]),
                y.reshape([sequences, ranks, row]),
            );
        }
        Ok(())
    }

    /// Converts `x` of all tokens of each sequence and this rank's heads to `y [T, heads, ..]` of the local tokens.
    /// Values that several ranks have of a head are summed, in f32.
    #[track_caller]
    fn heads_to_tokens(
        &self,
        exchange: &ContextCollective,
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
        self.peers_of_context().all_to_all(sent, received)?;
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

    /// Returns the assignment of the heads of `of_tokens [T, heads, ..]` to ranks.
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

    /// Returns scratch in the shape of `like`.
    fn scratch_like(&self, scratch: Value, like: View<'_>) -> View<'a> {
        let flat = self.flat(scratch);
        flat.rows(0..like.elements()).reshape(like.shape())
    }
}

/// Shape of an all-to-all between sharded tokens and sharded heads: blocks of heads, one per rank.
struct Blocks {
    ranks: usize,
    /// Distinct blocks of heads.
    groups: usize,
    tokens: usize,
    /// Elements of a token in each block.
    width: usize,
    /// Ranks that get the same block.
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
    fn spans_are_the_ranges_that_a_rank_holds() {
        let place = ContextPlace { ranks: 2, rank: 0, method: ContextMethod::Ring };
        let positions = |rank| spans(place, rank, 6).map(|span| (span.first, span.len, span.position));
        assert_eq!(positions(0), [(0, 3, 0), (3, 3, 9)]);
        assert_eq!(positions(1), [(0, 3, 3), (3, 3, 6)]);
    }
}
