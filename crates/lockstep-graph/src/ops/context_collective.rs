//! Context-parallel collectives that convert between local tokens and whole sequences: an all-gather of keys and values,
//! and all-to-alls between sharded tokens and sharded heads.

use lockstep_comm::CommError;
use lockstep_plan::{
    DType,
    work::{Collective, Pass, Peers as Ranks},
};
use lockstep_tensor::View;

use crate::{
    block::{Value, ValueInfo},
    context::spans,
    facts::Facts,
    op::Op,
    placement::ContextCollectiveKind,
    recorder::Recorder,
    replay::{InputGradients, Run},
    work_context::{Work, WorkContext},
};

/// A context-parallel collective that converts between local tokens and whole sequences.
#[derive(Debug)]
struct ContextCollective {
    change: ContextCollectiveKind,
    x: Value,
    y: Value,
    /// Scratch, each as large as the larger of `x` and `y`.
    scratch: [Value; 2],
    /// f32 scratch for the sum over ranks that have the same heads; `None` if no head is repeated.
    sum: Option<Value>,
}

impl Recorder {
    /// Records a context-parallel collective; `columns` counts the local columns of its output.
    #[track_caller]
    pub(crate) fn exchange_sequences(
        &mut self,
        x: Value,
        change: ContextCollectiveKind,
        columns: usize,
    ) -> Value {
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
        self.push(ContextCollective { change, x, y, scratch, sum });
        y
    }
}

impl Op for ContextCollective {
    fn facts(&self) -> Facts {
        let Self { change, x, y, scratch, sum } = *self;
        let name = match change {
            ContextCollectiveKind::Gather => "gather sequences of ranks",
            ContextCollectiveKind::TokensToHeads { .. } => "exchange tokens for heads",
            ContextCollectiveKind::HeadsToTokens { .. } => "exchange heads for tokens",
        };
        let is_gather = change == ContextCollectiveKind::Gather;
        Facts {
            scratch: if is_gather { vec![scratch[0]] } else { scratch.into_iter().chain(sum).collect() },
            is_gathered: is_gather,
            gathers_sequences: is_gather,
            ..Facts::of(name, [x], [y])
        }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let (x, y) = (run.value(self.x), run.value(self.y));
        match self.change {
            ContextCollectiveKind::Gather => {
                let gathered = scratch_like(run, self.scratch[0], y);
                run.peers_of_context().gather(x, gathered)?;
                for_each_range(run, y, gathered, |of_sequences, of_ranks| {
                    run.queue().cast(of_ranks, of_sequences);
                });
                Ok(())
            }
            ContextCollectiveKind::TokensToHeads { heads } => self.tokens_to_heads(run, heads, x, y),
            ContextCollectiveKind::HeadsToTokens { heads } => self.heads_to_tokens(run, heads, x, y),
        }
    }

    fn backward_inputs(&self, run: &Run<'_>, dy: View<'_>, dx: &InputGradients<'_>) -> Result<(), CommError> {
        let dx = dx.view(0);
        match self.change {
            ContextCollectiveKind::Gather => {
                let summands = scratch_like(run, self.scratch[0], dy);
                for_each_range(run, dy, summands, |of_sequences, of_ranks| {
                    run.queue().cast(of_sequences, of_ranks);
                });
                run.peers_of_context().reduce_scatter(summands, dx)
            }
            ContextCollectiveKind::TokensToHeads { heads } => self.heads_to_tokens(run, heads, dy, dx),
            ContextCollectiveKind::HeadsToTokens { heads } => self.tokens_to_heads(run, heads, dy, dx),
        }
    }

    fn work(&self, context: &WorkContext<'_>) -> Vec<Work> {
        let (collective, value) = match (self.change, context.pass) {
            (ContextCollectiveKind::Gather, Pass::Forward) => (Collective::AllGather, self.y),
            (ContextCollectiveKind::Gather, _) => (Collective::ReduceScatter, self.y),
            // With fewer heads than ranks, a head is sent to several ranks.
            (ContextCollectiveKind::TokensToHeads { .. }, _) => (Collective::AllToAll, self.y),
            (ContextCollectiveKind::HeadsToTokens { .. }, _) => (Collective::AllToAll, self.x),
        };
        let bytes = context.shapes.bytes(value);
        vec![context.stream(), Work::exchange(Ranks::Context, collective, bytes)]
    }
}

impl ContextCollective {
    /// Converts `x [T, heads, ..]` of the local tokens to `y` of all tokens of each sequence and this rank's heads.
    #[track_caller]
    fn tokens_to_heads(
        &self,
        run: &Run<'_>,
        heads: usize,
        x: View<'_>,
        y: View<'_>,
    ) -> Result<(), CommError> {
        let queue = run.queue();
        let Blocks { ranks, groups, tokens, width, copies } = blocks(run, heads, x);
        let [sent, other] = self.scratch.map(|scratch| scratch_like(run, scratch, y));
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
        let sequences = run.shapes.block.sequences;
        let received = if sequences == 1 { y } else { other };
        run.peers_of_context().all_to_all(sent, received)?;
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
        run: &Run<'_>,
        heads: usize,
        x: View<'_>,
        y: View<'_>,
    ) -> Result<(), CommError> {
        let queue = run.queue();
        let Blocks { ranks, groups, tokens, width, copies } = blocks(run, heads, y);
        let [other, received] = self.scratch.map(|scratch| scratch_like(run, scratch, x));
        let sequences = run.shapes.block.sequences;
        let sent = if sequences == 1 { x } else { other };
        if sequences > 1 {
            let row = x.elements() / (ranks * sequences);
            queue.transpose_blocks(x.reshape([sequences, ranks, row]), sent.reshape([ranks, sequences, row]));
        }
        run.peers_of_context().all_to_all(sent, received)?;
        let by_heads = match self.sum {
            None => received,
            Some(sum) => {
                let (from, block) = (received.reshape([ranks, tokens * width]), tokens * width);
                let sums = other.reshape([copies, groups * block]).rows(0..1).reshape([groups, block]);
                let sum = run.flat(sum);
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
}

/// Calls `work` with the rows of each local range of each sequence, for all ranks: first as rows of whole
/// sequences, second as rows in rank order.
fn for_each_range<'v>(
    run: &Run<'_>,
    of_sequences: View<'v>,
    of_ranks: View<'v>,
    work: impl Fn(View<'v>, View<'v>),
) {
    let (place, shape) = (run.shapes.context, run.shapes.block);
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

/// Returns the assignment of the heads of `of_tokens [T, heads, ..]` to ranks.
fn blocks(run: &Run<'_>, heads: usize, of_tokens: View<'_>) -> Blocks {
    let ranks = run.shapes.context.ranks;
    let tokens = run.shapes.block.tokens();
    let groups = heads.min(ranks);
    Blocks { ranks, groups, tokens, width: of_tokens.elements() / (tokens * groups), copies: ranks / groups }
}

/// Returns scratch in the shape of `like`.
fn scratch_like<'a>(run: &Run<'a>, scratch: Value, like: View<'_>) -> View<'a> {
    let flat = run.flat(scratch);
    flat.rows(0..like.elements()).reshape(like.shape())
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
