//! The published pipeline schedules, each a function from a rank to its list of passes.
//!
//! In all of them the forwards of a stage run in ascending order of micro-batches, and so do both halves of its backwards. A schedule
//! therefore only has to write a sequence of (kind, chunk); [`List`] counts which micro-batch comes next. Weight gradients accumulated in
//! this order have the same bits under every schedule.

use super::{Kind, Pass, PassKind, ScheduleError, ScheduleProblem};
use crate::nearest::{Choices, nearest_multiple};

/// Upper limit of a schedule's size, in forwards of all ranks; more is taken for a mistake.
pub(super) const MOST_PASSES: usize = 1 << 22;

impl Kind {
    /// Returns the problems of this schedule with these numbers; empty if they are valid.
    pub fn problems(self, ranks: usize, micro_batches: usize, chunks: usize) -> Vec<ScheduleProblem> {
        if ranks == 0 {
            return vec![ScheduleProblem::NoRanks];
        }
        let mut problems = Vec::new();
        let (fewest, most) = self.chunks();
        if chunks < fewest || chunks > most {
            let nearest = Choices::only(chunks.clamp(fewest, most));
            problems.push(ScheduleProblem::Chunks { kind: self, chunks, nearest });
        }
        let passes = ranks.checked_mul(chunks).and_then(|stages| stages.checked_mul(micro_batches));
        if passes.is_none_or(|passes| passes > MOST_PASSES) {
            problems.push(ScheduleProblem::TooLong { most: MOST_PASSES });
        }
        let minimum = if self.is_v_shaped() { ranks.saturating_mul(2) } else { 1 };
        if self == Self::Interleaved && (micro_batches == 0 || !micro_batches.is_multiple_of(ranks)) {
            let nearest = nearest_multiple(micro_batches, ranks);
            problems.push(ScheduleProblem::Indivisible { kind: self, micro_batches, ranks, nearest });
        } else if micro_batches < minimum {
            problems.push(ScheduleProblem::TooFewMicroBatches { kind: self, micro_batches, ranks, minimum });
        }
        problems
    }

    /// Generates the passes of each rank.
    pub fn passes(
        self,
        ranks: usize,
        micro_batches: usize,
        chunks: usize,
    ) -> Result<Vec<Vec<Pass>>, ScheduleError> {
        let problems = self.problems(ranks, micro_batches, chunks);
        if !problems.is_empty() {
            return Err(ScheduleError(problems));
        }
        let write = match self {
            Self::GPipe | Self::LoopedBreadthFirst => breadth_first,
            Self::OneForwardOneBackward => one_forward_one_backward,
            Self::Interleaved => interleaved,
            Self::ZeroBubbleH1 => zero_bubble_h1,
            Self::ZeroBubbleV => zero_bubble_v,
            Self::DualPipeV => dual_pipe_v,
        };
        let list = |rank| {
            let stages = (0..chunks).map(|chunk| self.stage(rank, chunk, ranks)).collect();
            let mut list =
                List { rank, ranks, micro_batches, next: vec![[0; 3]; chunks], stages, passes: vec![] };
            write(&mut list);
            list.passes
        };
        Ok((0..ranks).map(list).collect())
    }
}

/// List of one rank while it is written; it knows which micro-batch comes next.
struct List {
    rank: usize,
    ranks: usize,
    micro_batches: usize,
    /// Stage of each chunk.
    stages: Vec<usize>,
    /// For each chunk, the next micro-batch of forwards, of input gradients and of weight gradients.
    next: Vec<[usize; 3]>,
    passes: Vec<Pass>,
}

impl List {
    fn push(&mut self, kind: PassKind, chunk: usize) {
        let [forward, input, weight] = &mut self.next[chunk];
        let micro_batch = match kind {
            PassKind::Forward => *forward,
            PassKind::Backward | PassKind::BackwardInput => *input,
            PassKind::BackwardWeight => *weight,
        };
        *forward += usize::from(kind == PassKind::Forward);
        *input += usize::from(kind.makes_input_gradient());
        *weight += usize::from(kind.makes_weight_gradient());
        self.passes.push(Pass { kind, stage: self.stages[chunk], micro_batch });
    }

    fn forward(&mut self, chunk: usize) {
        self.push(PassKind::Forward, chunk);
    }

    fn backward(&mut self, chunk: usize) {
        self.push(PassKind::Backward, chunk);
    }

    fn input(&mut self, chunk: usize) {
        self.push(PassKind::BackwardInput, chunk);
    }

    fn weight(&mut self, chunk: usize) {
        self.push(PassKind::BackwardWeight, chunk);
    }

    /// Returns the number of deferred weight gradients of a chunk.
    fn waiting(&self, chunk: usize) -> usize {
        let [_, input, weight] = self.next[chunk];
        input - weight
    }
}

fn breadth_first(list: &mut List) {
    let chunks = list.stages.len();
    for chunk in 0..chunks {
        (0..list.micro_batches).for_each(|_| list.forward(chunk));
    }
    for chunk in (0..chunks).rev() {
        (0..list.micro_batches).for_each(|_| list.backward(chunk));
    }
}

/// Each rank runs as many forwards ahead as there are ranks after it.
fn one_forward_one_backward(list: &mut List) {
    let ahead = (list.ranks - 1 - list.rank).min(list.micro_batches);
    (0..ahead).for_each(|_| list.forward(0));
    for _ in ahead..list.micro_batches {
        list.forward(0);
        list.backward(0);
    }
    (0..ahead).for_each(|_| list.backward(0));
}

/// 1F1B over pairs of (micro-batch, chunk), which pass through the chunks in groups of as many micro-batches as ranks.
fn interleaved(list: &mut List) {
    let (ranks, chunks) = (list.ranks, list.stages.len());
    let chunk = |pair: usize| pair / ranks % chunks;
    let pairs = list.micro_batches * chunks;
    let ahead = (2 * (ranks - 1 - list.rank) + (chunks - 1) * ranks).min(pairs);
    (0..ahead).for_each(|pair| list.forward(chunk(pair)));
    for pair in ahead..pairs {
        list.forward(chunk(pair));
        list.backward(chunks - 1 - chunk(pair - ahead));
    }
    (pairs - ahead..pairs).for_each(|pair| list.backward(chunks - 1 - chunk(pair)));
}

/// 1F1B in which rank `r` defers the weight gradients of `r` micro-batches. It runs `r` fewer forwards ahead than the first rank, so it
/// has memory for `r` more, and sends its input gradients that much sooner. The deferred passes fill the bubble that 1F1B has at the end.
fn zero_bubble_h1(list: &mut List) {
    let ahead = (list.ranks - 1 - list.rank).min(list.micro_batches);
    (0..ahead).for_each(|_| list.forward(0));
    for _ in ahead..list.micro_batches {
        list.forward(0);
        list.input(0);
        if list.waiting(0) > list.rank {
            list.weight(0);
        }
    }
    for _ in 0..ahead {
        list.input(0);
        list.weight(0);
    }
    (0..list.waiting(0)).for_each(|_| list.weight(0));
}

/// Chunk 0 goes down the V, chunk 1 up. The length of the warm-up makes the first chunk-1 forward arrive when the memory of 1F1B is full.
/// Then every rank repeats six passes, one of each kind and chunk.
fn zero_bubble_v(list: &mut List) {
    let (rank, after) = (list.rank, list.ranks - list.rank);
    (0..2 * after - 1).for_each(|_| list.forward(0));
    for _ in 0..rank {
        list.forward(1);
        list.forward(0);
    }
    for _ in 0..after {
        list.forward(1);
        list.input(1);
        list.weight(1);
    }
    while list.next[1][0] < list.micro_batches {
        if list.next[0][0] < list.micro_batches {
            list.forward(0);
        }
        list.input(0);
        list.weight(0);
        list.forward(1);
        list.input(1);
        list.weight(1);
    }
    // Input gradients that other ranks wait for come first; weight gradients fill the rest.
    for _ in 0..rank {
        list.input(0);
        list.input(1);
    }
    for _ in 0..after {
        list.input(0);
        list.weight(0);
    }
    for chunk in [1, 0] {
        (0..list.waiting(chunk)).for_each(|_| list.weight(chunk));
    }
}

/// The eight phases of DualPipe for one direction; the second chunk takes the place of the other direction.
fn dual_pipe_v(list: &mut List) {
    let (done, after) = (list.rank + 1, list.ranks - 1 - list.rank);
    (0..2 * after).for_each(|_| list.forward(0));
    for _ in 0..done {
        list.forward(0);
        list.forward(1);
    }
    for _ in 0..after {
        list.input(1);
        list.weight(1);
        list.forward(1);
    }
    // Pairs that may overlap: a forward, then a backward of the other chunk.
    for _ in 0..list.micro_batches - list.ranks - after {
        list.forward(0);
        list.backward(1);
        list.forward(1);
        list.backward(0);
    }
    for _ in 0..after {
        list.backward(1);
        list.forward(1);
        list.backward(0);
    }
    // No forward is left to overlap with. In the second half, weight gradients are deferred and fill the gaps that follow.
    for pass in 0..2 * done {
        let chunk = 1 - pass % 2;
        if pass < done { list.backward(chunk) } else { list.input(chunk) }
    }
    let oldest = |list: &List| usize::from(list.waiting(1) >= list.waiting(0));
    for _ in 0..after {
        let chunk = oldest(list);
        list.weight(chunk);
        list.input(0);
    }
    for _ in 0..done {
        let chunk = oldest(list);
        list.weight(chunk);
    }
}
