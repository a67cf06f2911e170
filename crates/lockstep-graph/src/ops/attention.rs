//! Attention: its recording, and its execution as one kernel call if this rank has whole sequences, or several over
//! ranges of tokens under context parallelism.

use lockstep_comm::CommError;
use lockstep_plan::{
    ContextMethod, ContextPlace, DType, Initializer,
    work::{Attention as AttentionWork, Collective, Kept, Pass, Peers as Ranks, TaskKind},
};
use lockstep_tensor::{
    Attention, AttentionDirection, AttentionVariant, AttentionWrite, Dropout, TokenSpan, View, Write,
};

#[cfg(feature = "faults")]
use crate::faults::Fault;
use crate::{
    block::{DropoutSite, Mode, ParameterIndex, SequenceRange, Value, ValueInfo},
    column_scale::ColumnScale,
    context::spans,
    facts::Facts,
    op::Op,
    placement::{ContextCollectiveKind, Placement},
    recorder::Recorder,
    replay::{InputGradients, Run, split_heads},
    shapes::Shapes,
    sharded_cache::ShardedCache,
    work_context::{Work, WorkContext},
};

/// The model's parameters of an attention; the batch supplies the rest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads.
    pub key_value_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// Sliding window in tokens; `None` means full attention.
    pub window: Option<usize>,
    /// Causal, as in decoders, or bidirectional, as in encoders.
    pub direction: AttentionDirection,
    /// Bound `c` of soft-capped scores, `c · tanh(score / c)`; positive.
    pub soft_cap: Option<f32>,
}

impl AttentionShape {
    /// Returns full causal attention with scores scaled by `head_dim^-0.5`.
    pub fn new(heads: usize, key_value_heads: usize, head_dim: usize) -> Self {
        Self {
            heads,
            key_value_heads,
            head_dim,
            scale: (head_dim as f32).powf(-0.5),
            window: None,
            direction: AttentionDirection::Causal,
            soft_cap: None,
        }
    }
}

/// Optional parts of an attention; by default there are none.
#[derive(Debug, Clone, Copy, Default)]
pub struct AttentionOptions<'a> {
    /// Dropout probability of the attention probabilities.
    pub dropout: f32,
    /// A named input, u8 or u32 `[seq_len]` per sequence: 0 hides a key from all queries.
    pub key_mask: Option<Value>,
    /// A constant `[heads]`: the slopes of linear biases ([`alibi_slopes`](lockstep_tensor::alibi_slopes)).
    pub alibi_slopes: Option<Value>,
    /// Name of a parameter `[heads]`: a learned logit that takes part in each softmax and has no value.
    pub sinks: Option<&'a str>,
}

/// An attention with its operands and results.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionOperation {
    pub(crate) q: Value,
    pub(crate) k: Value,
    pub(crate) v: Value,
    /// Shape of this rank's part, where ranks shard the heads.
    pub(crate) shape: AttentionShape,
    /// Index of this rank's first query head.
    first_head: usize,
    key_mask: Option<Value>,
    alibi_slopes: Option<Value>,
    sinks: Option<Sinks>,
    /// The sequences that this rank attends within.
    pub(crate) sequences: SequenceRange,
    dropout: Option<DropoutSite>,
    /// Source of the keys of whole sequences.
    pub(crate) key_source: KeySource,
    pub(crate) y: Value,
    log_sum_exp: Value,
}

/// Attention sinks: a logit for each query head.
#[derive(Debug, Clone, Copy)]
struct Sinks {
    logits: ParameterIndex,
    /// Index of the first query head of the attention among those of the parameter on this rank.
    first: usize,
}

/// Source of the keys and values of other ranks' tokens.
#[derive(Debug, Clone, Copy)]
pub(crate) enum KeySource {
    /// Queries and keys are those of whole sequences.
    Whole,
    /// Keys are those of whole sequences, queries those of local tokens. `sums`: f32 scratch for the gradients of
    /// keys and values, for dtypes narrower than f32.
    Gathered { sums: Option<[Value; 2]> },
    /// Queries and keys are those of local tokens; ring attention supplies the other keys. `sums`: f32 scratch for
    /// the outputs and the gradients of the queries, for dtypes narrower than f32.
    Ring { sums: Option<Value> },
    /// Queries and keys are those of this rank's rows of a batch; earlier keys are in a cache that is sharded over ranks.
    ShardedCache(ShardedCache),
}

impl Recorder {
    /// Records attention of queries `q [heads · head_dim]` to keys `k` and values `v [key_value_heads · head_dim]`. In inference `k`
    /// and `v` may be the same value; a cache then holds it once.
    ///
    /// # Panics
    /// If the shapes or placements of queries, keys and values do not match, or an option has not one element for each
    /// token or head.
    #[track_caller]
    pub fn attention(
        &mut self,
        q: Value,
        k: Value,
        v: Value,
        shape: AttentionShape,
        options: AttentionOptions<'_>,
    ) -> Value {
        let AttentionShape { heads, head_dim, .. } = shape;
        let of_queries = self.check_operands([q, k, v], shape);
        let AttentionOptions { key_mask, alibi_slopes, .. } = options;
        for (what, value, elements) in
            [("key mask", key_mask, self.shape.seq_len), ("slopes", alibi_slopes, heads)]
        {
            let found = value.map_or(elements, |value| self.columns(value));
            assert_eq!(found, elements, "attention: {found} elements of the {what}, not {elements}");
        }
        let sinks = options.sinks.map(|name| {
            let share = self.share_of_elements(q, heads);
            self.parameter(name.to_owned(), &[heads], Initializer::Zeros, share)
        });
        let held = |value: Value| self.values[value.0].columns / head_dim;
        let shape = AttentionShape { heads: held(q), key_value_heads: held(k), ..shape };
        let all = SequenceRange { first: 0, len: self.shape.sequences };
        let (first_head, sequences) = match of_queries {
            Placement::Replicate => (0, all),
            Placement::ShardBlocks(grid) => (grid.column * shape.heads, self.sequences_of(grid)),
            _ => (self.place.rank * shape.heads, all),
        };
        let dropout = self.dropout_site(options.dropout);
        let heads = shape.heads;
        let ([q, k, v], skipped, shape, key_source) = self.before_attention([q, k, v], shape);
        let y = self.same_shape(q);
        let log_sum_exp = self.statistic(q, shape.heads);
        self.push(AttentionOperation {
            q,
            k,
            v,
            shape,
            first_head: first_head + skipped,
            key_mask,
            alibi_slopes,
            sinks: sinks.map(|logits| Sinks { logits, first: skipped }),
            sequences,
            dropout,
            key_source,
            y,
            log_sum_exp,
        });
        self.after_attention(y, heads)
    }

    /// Checks shapes and placements of queries, keys and values. Returns the placement of the queries.
    #[track_caller]
    fn check_operands(&self, [q, k, v]: [Value; 3], shape: AttentionShape) -> Placement {
        let AttentionShape { heads, key_value_heads, head_dim, .. } = shape;
        for (name, value, heads) in [("q", q, heads), ("k", k, key_value_heads), ("v", v, key_value_heads)] {
            let columns = self.columns(value);
            assert_eq!(
                columns,
                heads * head_dim,
                "attention: {name} has {columns} columns for {heads} heads of {head_dim}"
            );
        }
        let (of_queries, of_keys) = (self.placement(q), self.placement(k));
        let ranks = self.place.ranks;
        let fits = match (of_queries, of_keys) {
            (Placement::Replicate, Placement::Replicate) => true,
            (Placement::ShardColumns { parts }, Placement::ShardColumns { parts: of_keys }) => {
                parts == ranks && key_value_heads.is_multiple_of(of_keys)
            }
            // Every rank computes the only key head.
            (Placement::ShardColumns { parts }, Placement::Replicate) => {
                parts == ranks && key_value_heads == 1 && self.mode() == Mode::Inference
            }
            (Placement::ShardBlocks(grid), Placement::ShardBlocks(_)) => {
                heads.is_multiple_of(grid.side) && key_value_heads.is_multiple_of(grid.side)
            }
            _ => false,
        };
        let describe = |value| self.describe(value);
        assert!(
            fits && of_keys == self.placement(v),
            "attention of queries {} to keys {} and values {}",
            describe(q),
            describe(k),
            describe(v)
        );
        assert!(k != v || self.mode() == Mode::Inference, "attention: keys that are values have no backward");
        of_queries
    }

    /// Records what the context-parallel method does before attention. Returns the operands that attention reads, its
    /// first head relative to this rank's query heads, its shape, and its source of keys.
    #[track_caller]
    fn before_attention(
        &mut self,
        [q, k, v]: [Value; 3],
        shape: AttentionShape,
    ) -> ([Value; 3], usize, AttentionShape, KeySource) {
        if self.cache.ranks > 1 {
            let scratch = self.sharded_cache([q, k, v], shape.heads);
            return ([q, k, v], 0, shape, KeySource::ShardedCache(scratch));
        }
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
    #[track_caller]
    fn after_attention(&mut self, y: Value, heads: usize) -> Value {
        let ContextPlace { ranks, method, .. } = self.context;
        if ranks == 1 || method != ContextMethod::AllToAll {
            return y;
        }
        let columns = self.values[y.0].columns * ranks;
        self.exchange_sequences(y, ContextCollectiveKind::HeadsToTokens { heads }, columns)
    }
}

/// The gradients that an attention backward writes.
#[derive(Clone, Copy)]
pub(crate) struct AttentionGradients<'a> {
    pub(crate) dq: View<'a>,
    pub(crate) dk: View<'a>,
    pub(crate) dv: View<'a>,
}

impl Op for AttentionOperation {
    fn facts(&self) -> Facts {
        let Self { q, k, v, y, log_sum_exp, key_source, .. } = *self;
        Facts {
            scratch: match key_source {
                KeySource::Whole => vec![],
                KeySource::Gathered { sums } => sums.into_iter().flatten().collect(),
                KeySource::Ring { sums } => sums.into_iter().collect(),
                KeySource::ShardedCache(scratch) => scratch.values(),
            },
            tables: self.key_mask.into_iter().collect(),
            weights: self.sinks.iter().map(|sinks| sinks.logits).collect(),
            saved_for_inputs: [q, k, v, y, log_sum_exp].into_iter().chain(self.key_mask).collect(),
            saved_for_weights: vec![y, log_sum_exp],
            is_long: true,
            ..Facts::of("attention", [q, k, v], [y, log_sum_exp])
        }
    }

    fn column_scale(&self) -> Option<ColumnScale> {
        let AttentionShape { heads, key_value_heads, head_dim, .. } = self.shape;
        let has_all_keys = matches!(self.key_source, KeySource::Whole);
        has_all_keys.then_some(ColumnScale::Input { input: self.v, group: heads / key_value_heads, head_dim })
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let Self { q, k, v, y, .. } = *self;
        match self.key_source {
            KeySource::Whole => self.whole_attention(run),
            KeySource::Ring { sums } => return self.ring_attention(run, sums),
            KeySource::ShardedCache(scratch) => return self.sharded_cache_attention(run, scratch),
            KeySource::Gathered { .. } => {
                let operands = [q, k, v].map(|value| run.value(value));
                for spans in self.spans_of_gathered(run) {
                    self.attend(run, spans, operands, run.value(y), Write::Overwrite);
                }
            }
        }
        Ok(())
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        let block = [self.k, self.v].map(|value| run.value(value));
        let gradients = AttentionGradients { dq: dx.view(0), dk: dx.view(1), dv: dx.view(2) };
        match self.key_source {
            KeySource::Ring { sums } => return self.ring_attention_backward(run, sums, dy, gradients),
            KeySource::ShardedCache(_) => unreachable!("generation has no backward"),
            KeySource::Whole => {
                let spans = [TokenSpan::whole(self.queries(run)); 2];
                self.attend_backward(run, spans, block, dy, gradients, AttentionWrite::OVERWRITE);
            }
            KeySource::Gathered { sums } => {
                let AttentionGradients { dq, dk, dv } = gradients;
                let [keys, values] = sums.map_or([dk, dv], |sums| sums.map(|sum| run.value(sum)));
                let queue = run.queue();
                // Both ranges of queries add to these gradients, and neither reaches all keys.
                queue.zero(keys);
                queue.zero(values);
                let write = AttentionWrite { queries: Write::Overwrite, keys: Write::Accumulate };
                for spans in self.spans_of_gathered(run) {
                    let gradients = AttentionGradients { dq, dk: keys, dv: values };
                    self.attend_backward(run, spans, block, dy, gradients, write);
                }
                if sums.is_some() {
                    queue.cast(keys, dk);
                    queue.cast(values, dv);
                }
            }
        }
        Ok(())
    }

    fn backward_weights(&self, run: &Run<'_>, dy: View<'_>) -> Result<(), CommError> {
        let Some(Sinks { logits, first }) = self.sinks else { return Ok(()) };
        let AttentionShape { heads, head_dim, .. } = self.shape;
        let gradient = run.gradient_of_weight(logits).rows(first..first + heads);
        let [y, dy] = [run.value(self.y), dy].map(|view| split_heads(view, heads, head_dim));
        let geometry = self.geometry(run, [TokenSpan::whole(self.queries(run)); 2]);
        run.queue().attention_sinks_backward(&geometry, y, self.softmax_statistic(run), dy, gradient);
        Ok(())
    }

    fn work(&self, context: &WorkContext<'_>) -> Vec<Work> {
        let shapes = context.shapes;
        if context.pass == Pass::BackwardWeights {
            return vec![context.stream()];
        }
        let flops = self.product_flops(shapes);
        let task = |flops, product_flops| {
            let attention =
                AttentionWork { flops, scores: self.scores(shapes), head_dim: self.shape.head_dim as u64 };
            context.task(TaskKind::Attention(attention), product_flops)
        };
        let is_forward = matches!(context.pass, Pass::Forward | Pass::Recompute);
        let attention = match is_forward {
            true => task(flops, flops),
            // Two products for each one of the forward; the kernel computes the scores again.
            false => task(2 * flops, flops / 2 * 5),
        };
        if let KeySource::ShardedCache(scratch) = self.key_source {
            return [vec![attention], scratch.work(shapes)].concat();
        }
        if !matches!(self.key_source, KeySource::Ring { .. }) {
            return vec![attention];
        }
        let ring = |collective, elements_bytes: usize| {
            let bytes = (self.ring_elements(shapes) * elements_bytes) as u64;
            Work::exchange(Ranks::Context, collective, bytes)
        };
        let (element, gradient) = (shapes.block().dtype.size_bytes(), DType::F32.size_bytes());
        if is_forward {
            return vec![ring(Collective::Ring, element).overlapped(), attention];
        }
        // Gradients travel after their keys and values; one more step takes them to their owner.
        let around = ring(Collective::Ring, element + gradient).overlapped();
        vec![around, attention, ring(Collective::Shift, gradient)]
    }

    fn kept(&self, shapes: &Shapes) -> Kept {
        let scores = self.scores(shapes);
        let dropped_scores = if self.dropout.is_some() { scores } else { 0 };
        Kept { scores, dropped_scores, ..Kept::default() }
    }

    fn ring_elements(&self, shapes: &Shapes) -> usize {
        match self.key_source {
            KeySource::Ring { .. } => (shapes.elements(self.k) + shapes.elements(self.v)) as usize,
            _ => 0,
        }
    }

    #[cfg(feature = "faults")]
    fn inject(&mut self, fault: Fault) {
        match fault {
            Fault::DropoutFromFirstHead => self.first_head = 0,
            Fault::DropoutFromFirstSequence => self.sequences.first = 0,
            _ => {}
        }
    }
}

impl AttentionOperation {
    /// Floating-point operations of the two products of the forward, over the visible keys: half of the sequence or the
    /// window in causal attention.
    fn product_flops(&self, shapes: &Shapes) -> u64 {
        let seq_len = shapes.whole_seq_len() as u64;
        let seen = self.shape.window.map_or(seq_len, |window| seq_len.min(2 * window as u64));
        let directions = match self.shape.direction {
            AttentionDirection::Causal => 1,
            AttentionDirection::Bidirectional => 2,
        };
        2 * directions * shapes.rows(self.q) * seen * shapes.columns(self.q)
    }

    /// Elements of the score matrices of this rank's heads: local queries times keys of the whole sequence.
    fn scores(&self, shapes: &Shapes) -> u64 {
        self.shape.heads as u64 * shapes.rows(self.q) * shapes.whole_seq_len() as u64
    }

    /// Attends within whole sequences or, with a key-value cache, from new tokens to all tokens of their sequences.
    fn whole_attention(&self, run: &Run<'_>) {
        let Self { q, k, v, y, shape, .. } = *self;
        let spans = [TokenSpan::whole(self.queries(run)); 2];
        let [q, k, v, y] = [q, k, v, y].map(|value| run.value(value));
        let Some(cache) = run.replay.cache else {
            return self.attend(run, spans, [q, k, v], y, Write::Overwrite);
        };
        let AttentionShape { heads, key_value_heads, head_dim, .. } = shape;
        let of_queries = |view| split_heads(view, heads, head_dim);
        let [k, v] = [k, v].map(|view| split_heads(view, key_value_heads, head_dim));
        let queue = run.queue();
        queue.append_to_cache(cache, key_value_heads, k, (self.k != self.v).then_some(v));
        let geometry = self.geometry(run, spans);
        queue.cached_attention(&geometry, cache, of_queries(q), of_queries(y), self.softmax_statistic(run));
    }

    /// Calls the attention kernel on a span of queries and a span of keys.
    pub(crate) fn attend(
        &self,
        run: &Run<'_>,
        spans: [TokenSpan; 2],
        [q, k, v]: [View<'_>; 3],
        out: View<'_>,
        write: Write,
    ) {
        let AttentionShape { heads, key_value_heads, head_dim, .. } = self.shape;
        run.replay.queue.attention(
            &self.geometry(run, spans),
            split_heads(q, heads, head_dim),
            split_heads(k, key_value_heads, head_dim),
            split_heads(v, key_value_heads, head_dim),
            split_heads(out, heads, head_dim),
            self.softmax_statistic(run),
            write,
        );
    }

    /// Calls the attention backward kernel on a span of queries and a span of keys.
    pub(crate) fn attend_backward(
        &self,
        run: &Run<'_>,
        spans: [TokenSpan; 2],
        [k, v]: [View<'_>; 2],
        dy: View<'_>,
        AttentionGradients { dq, dk, dv }: AttentionGradients<'_>,
        write: AttentionWrite,
    ) {
        let AttentionShape { heads, key_value_heads, head_dim, .. } = self.shape;
        let of_queries = |view| split_heads(view, heads, head_dim);
        let [k, v, dk, dv] = [k, v, dk, dv].map(|view| split_heads(view, key_value_heads, head_dim));
        run.replay.queue.attention_backward(
            &self.geometry(run, spans),
            of_queries(run.value(self.q)),
            k,
            v,
            of_queries(run.value(self.y)),
            self.softmax_statistic(run),
            of_queries(dy),
            of_queries(dq),
            dk,
            dv,
            write,
        );
    }

    pub(crate) fn geometry<'a>(&self, run: &Run<'a>, [queries, keys]: [TokenSpan; 2]) -> Attention<'a> {
        let Self { shape, first_head, dropout, sequences, .. } = *self;
        // Selects this rank's sequences from a batch input.
        let own = |all: View<'a>| {
            let (SequenceRange { first, len }, all_sequences) = (sequences, run.shapes.block.sequences);
            let of_each = all.elements() / all_sequences;
            all.reshape([all_sequences, of_each]).rows(first..first + len)
        };
        let key_mask = self.key_mask.map(|mask| {
            let mask = run.value(mask);
            mask.rows(sequences.first..sequences.first + sequences.len)
        });
        let of_heads = |all: View<'a>, first: usize| all.rows(first..first + shape.heads);
        let variant = AttentionVariant {
            direction: shape.direction,
            document_ends: None,
            key_mask,
            alibi_slopes: self.alibi_slopes.map(|slopes| of_heads(run.flat(slopes), first_head)),
            soft_cap: shape.soft_cap,
            sinks: self.sinks.map(|Sinks { logits, first }| of_heads(run.weight(logits), first)),
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
            document_starts: run.replay.batch.document_starts.map(own_starts),
            first_head,
            dropout: dropout.map(|dropout| own_keys(run.dropout(dropout))),
            variant,
        }
    }

    /// Returns the log-sum-exps as `[sequences, heads, queries]`.
    fn softmax_statistic<'a>(&self, run: &Run<'a>) -> View<'a> {
        let (sequences, heads) = (self.sequences.len, self.shape.heads);
        run.value(self.log_sum_exp).reshape([sequences, heads, self.queries(run)])
    }

    /// Returns each range of local queries with the keys of the whole sequence up to its end, or with all keys.
    fn spans_of_gathered(&self, run: &Run<'_>) -> [[TokenSpan; 2]; 2] {
        let (place, held) = (run.shapes.context, run.shapes.block.seq_len);
        let stored = held * place.ranks;
        spans(place, place.rank, held).map(|queries| {
            let len = match self.shape.direction {
                AttentionDirection::Causal => queries.position + queries.len,
                AttentionDirection::Bidirectional => stored,
            };
            [queries, TokenSpan { stored, first: 0, len, position: 0 }]
        })
    }

    /// Query tokens per sequence.
    pub(crate) fn queries(&self, run: &Run<'_>) -> usize {
        run.shapes.values[self.q.0].rows / self.sequences.len
    }
}
