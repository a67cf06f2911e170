//! Attention: its recording, and its execution as one kernel call if this rank has whole sequences, or several over
//! ranges of tokens under context parallelism.

use lockstep_comm::CommError;
use lockstep_tensor::{Attention, AttentionVariant, AttentionWrite, Dropout, TokenSpan, View, Write};

use crate::{
    block::{SequenceRange, Value},
    context::spans,
    operation::{AttentionOperation, AttentionShape, KeySource, Operation},
    placement::Placement,
    recorder::Recorder,
    replay::{Run, split_heads},
};

impl Recorder {
    /// Records causal attention, with dropout of the probabilities.
    ///
    /// # Panics
    /// If the shapes or placements of queries, keys and values do not match.
    pub fn attention(&mut self, q: Value, k: Value, v: Value, shape: AttentionShape, dropout: f32) -> Value {
        let AttentionShape { heads, key_value_heads, head_dim, .. } = shape;
        for (name, value, heads) in [("q", q, heads), ("k", k, key_value_heads), ("v", v, key_value_heads)] {
            let columns = self.columns(value);
            assert_eq!(
                columns,
                heads * head_dim,
                "{name} has {columns} columns for {heads} heads of {head_dim}"
            );
        }
        let (of_queries, of_keys) = (self.placement(q), self.placement(k));
        let ranks = self.place.ranks;
        let fits = match (of_queries, of_keys) {
            (Placement::Replicate, Placement::Replicate) => true,
            (Placement::ShardColumns { parts }, Placement::ShardColumns { parts: of_keys }) => {
                parts == ranks && key_value_heads.is_multiple_of(of_keys)
            }
            (Placement::ShardBlocks(grid), Placement::ShardBlocks(_)) => {
                heads.is_multiple_of(grid.side) && key_value_heads.is_multiple_of(grid.side)
            }
            _ => false,
        };
        assert!(fits && of_keys == self.placement(v), "attention of {of_queries:?} to {of_keys:?}");
        let held = |value: Value| self.values[value.0].columns / head_dim;
        let shape = AttentionShape { heads: held(q), key_value_heads: held(k), ..shape };
        let all = SequenceRange { first: 0, len: self.shape.sequences };
        let (first_head, sequences) = match of_queries {
            Placement::Replicate => (0, all),
            Placement::ShardBlocks(grid) => (grid.column * shape.heads, self.sequences_of(grid)),
            _ => (self.place.rank * shape.heads, all),
        };
        let dropout = self.dropout_site(dropout);
        let heads = shape.heads;
        let ([q, k, v], skipped, shape, key_source) = self.before_attention([q, k, v], shape);
        let y = self.same_shape(q);
        let log_sum_exp = self.statistic(q, shape.heads);
        self.operations.push(Operation::Attention(AttentionOperation {
            q,
            k,
            v,
            shape,
            first_head: first_head + skipped,
            sequences,
            dropout,
            key_source,
            y,
            log_sum_exp,
        }));
        self.after_attention(y, heads)
    }
}

/// The gradients that an attention backward writes.
#[derive(Clone, Copy)]
pub(crate) struct AttentionGradients<'a> {
    pub(crate) dq: View<'a>,
    pub(crate) dk: View<'a>,
    pub(crate) dv: View<'a>,
}

impl<'a> Run<'a> {
    /// Runs the forward.
    pub(crate) fn attention(&self, operation: &AttentionOperation) -> Result<(), CommError> {
        let AttentionOperation { q, k, v, y, .. } = *operation;
        match operation.key_source {
            KeySource::Whole => self.whole_attention(operation),
            KeySource::Ring { sums } => return self.ring_attention(operation, sums),
            KeySource::Gathered { .. } => {
                let operands = [q, k, v].map(|value| self.value(value));
                for spans in self.spans_of_gathered() {
                    self.attend(operation, spans, operands, self.value(y), Write::Overwrite);
                }
            }
        }
        Ok(())
    }

    /// Computes the gradients of the queries, keys and values.
    pub(crate) fn attention_backward(
        &self,
        operation: &AttentionOperation,
        dy: View<'a>,
        gradients: AttentionGradients<'a>,
    ) -> Result<(), CommError> {
        let block = [operation.k, operation.v].map(|value| self.value(value));
        match operation.key_source {
            KeySource::Ring { sums } => return self.ring_attention_backward(operation, sums, dy, gradients),
            KeySource::Whole => {
                let spans = [TokenSpan::whole(self.queries_of(operation)); 2];
                self.attend_backward(operation, spans, block, dy, gradients, AttentionWrite::OVERWRITE);
            }
            KeySource::Gathered { sums } => {
                let AttentionGradients { dq, dk, dv } = gradients;
                let [keys, values] = sums.map_or([dk, dv], |sums| sums.map(|sum| self.value(sum)));
                let queue = self.replay.queue;
                // Both ranges of queries add to these gradients, and neither reaches all keys.
                queue.zero(keys);
                queue.zero(values);
                let write = AttentionWrite { queries: Write::Overwrite, keys: Write::Accumulate };
                for spans in self.spans_of_gathered() {
                    let gradients = AttentionGradients { dq, dk: keys, dv: values };
                    self.attend_backward(operation, spans, block, dy, gradients, write);
                }
                if sums.is_some() {
                    queue.cast(keys, dk);
                    queue.cast(values, dv);
                }
            }
        }
        Ok(())
    }

    /// Attends within whole sequences or, with a key-value cache, to the cached tokens of one sequence as well.
    fn whole_attention(&self, operation: &AttentionOperation) {
        let AttentionOperation { q, k, v, y, .. } = *operation;
        let len = self.queries_of(operation);
        let (mut keys, mut values) = (self.value(k), self.value(v));
        let [mut of_queries, mut of_keys] = [TokenSpan::whole(len); 2];
        if let Some(cache) = self.replay.cache {
            let end = cache.filled + len;
            self.replay.queue.cast(keys, cache.keys.rows(cache.filled..end));
            self.replay.queue.cast(values, cache.values.rows(cache.filled..end));
            (keys, values) = (cache.keys.rows(0..end), cache.values.rows(0..end));
            of_keys = TokenSpan::whole(end);
            of_queries.position = cache.filled;
        }
        let operands = [self.value(q), keys, values];
        self.attend(operation, [of_queries, of_keys], operands, self.value(y), Write::Overwrite);
    }

    /// Returns each range of local queries with the keys of the whole sequence up to its end.
    fn spans_of_gathered(&self) -> [[TokenSpan; 2]; 2] {
        let (place, held) = (self.program.context, self.program.shape.seq_len);
        spans(place, place.rank, held).map(|queries| {
            let len = queries.position + queries.len;
            [queries, TokenSpan { stored: held * place.ranks, first: 0, len, position: 0 }]
        })
    }

    /// Calls the attention kernel on a span of queries and a span of keys.
    pub(crate) fn attend(
        &self,
        operation: &AttentionOperation,
        spans: [TokenSpan; 2],
        [q, k, v]: [View<'_>; 3],
        out: View<'_>,
        write: Write,
    ) {
        let AttentionShape { heads, key_value_heads, head_dim, .. } = operation.shape;
        self.replay.queue.attention(
            &self.geometry(operation, spans),
            split_heads(q, heads, head_dim),
            split_heads(k, key_value_heads, head_dim),
            split_heads(v, key_value_heads, head_dim),
            split_heads(out, heads, head_dim),
            self.log_sum_exp(operation),
            write,
        );
    }

    /// Calls the attention backward kernel on a span of queries and a span of keys.
    pub(crate) fn attend_backward(
        &self,
        operation: &AttentionOperation,
        spans: [TokenSpan; 2],
        [k, v]: [View<'_>; 2],
        dy: View<'_>,
        AttentionGradients { dq, dk, dv }: AttentionGradients<'_>,
        write: AttentionWrite,
    ) {
        let AttentionShape { heads, key_value_heads, head_dim, .. } = operation.shape;
        let of_queries = |view| split_heads(view, heads, head_dim);
        let [k, v, dk, dv] = [k, v, dk, dv].map(|view| split_heads(view, key_value_heads, head_dim));
        self.replay.queue.attention_backward(
            &self.geometry(operation, spans),
            of_queries(self.value(operation.q)),
            k,
            v,
            of_queries(self.value(operation.y)),
            self.log_sum_exp(operation),
            of_queries(dy),
            of_queries(dq),
            dk,
            dv,
            write,
        );
    }

    fn geometry(&self, operation: &AttentionOperation, [queries, keys]: [TokenSpan; 2]) -> Attention<'a> {
        let AttentionOperation { shape, first_head, dropout, sequences, .. } = *operation;
        // Selects this rank's sequences from a batch input.
        let own = |all: View<'a>| {
            let (SequenceRange { first, len }, all_sequences) = (sequences, self.program.shape.sequences);
            let of_each = all.elements() / all_sequences;
            all.reshape([all_sequences, of_each]).rows(first..first + len)
        };
        let own_keys = |dropout: Dropout<'a>| Dropout { keys: own(dropout.keys), ..dropout };
        let own_starts = |starts: View<'a>| {
            let starts = own(starts);
            starts.reshape([starts.elements()])
        };
        Attention {
            sequences: sequences.len,
            queries,
            keys,
            heads: shape.heads,
            key_value_heads: shape.key_value_heads,
            head_dim: shape.head_dim,
            scale: shape.scale,
            window: shape.window,
            document_starts: self.replay.batch.document_starts.map(own_starts),
            first_head,
            dropout: dropout.map(|dropout| own_keys(self.dropout(dropout))),
            variant: AttentionVariant::default(),
        }
    }

    fn log_sum_exp(&self, operation: &AttentionOperation) -> View<'a> {
        let (sequences, heads) = (operation.sequences.len, operation.shape.heads);
        let view = self.value(operation.log_sum_exp);
        view.reshape([sequences, heads, self.queries_of(operation)])
    }

    /// Query tokens per sequence.
    fn queries_of(&self, operation: &AttentionOperation) -> usize {
        self.program.values[operation.q.0].rows / operation.sequences.len
    }
}
