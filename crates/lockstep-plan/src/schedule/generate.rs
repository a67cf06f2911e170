//! The published schedules, each a function from a rank to its list of passes.
//!
//! In all of them the forwards of a stage run in ascending order of micro-batches, and so do both halves of its
//! backwards. A list is therefore a word over (kind, chunk): which micro-batch comes next is a matter of counting, and
//! [`List`] counts. Weight gradients that are added in this order have the same bits under every schedule.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{MOST_PASSES, Pass, PassKind, ScheduleError, ScheduleProblem};
use crate::nearest::{Choices, nearest_multiple};

/// The published schedules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// All forwards, then all backwards (Huang et al. 2019).
    #[serde(rename = "gpipe")]
    GPipe,
    /// One forward, one backward: a rank holds no more micro-batches than there are ranks after it (Narayanan et
    /// al. 2019, PipeDream-Flush in 2021).
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
    /// The same with several chunks on each rank, in groups of as many micro-batches as ranks (Narayanan et al.
    /// 2021, section 2.2): the bubble shrinks by the number of chunks.
    #[serde(rename = "interleaved_1f1b")]
    Interleaved,
    /// Chunk after chunk, all micro-batches through each (Lamy-Poirier 2022, "Breadth-First Pipeline Parallelism").
    #[serde(rename = "looped_bfs")]
    LoopedBreadthFirst,
    /// 1F1B with a split backward and no more memory (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section
    /// 2.3, ZB-H1).
    #[serde(rename = "zb_h1")]
    ZeroBubbleH1,
    /// Two chunks on each rank, laid out as a V, so that the last stage is on the first rank (Qi et al. 2024,
    /// "Pipeline Parallelism with Controllable Memory", section 4, V-ZB).
    #[serde(rename = "zb_v")]
    ZeroBubbleV,
    /// The V-shaped half of DualPipe (DeepSeek-AI 2025, DeepSeek-V3 report, section 3.2.1). In its steady state a forward
    /// stands directly before a backward of another chunk, so that an engine may overlap the communication of each
    /// with the other's arithmetic. Engine and simulator run the two one after the other, and the forward's output leaves before
    /// the backward: a rank then waits for P - 1 passes, half of (P - 1)(F&B + B - 3W), what DeepSeek gives for pairs whose
    /// results leave together, with F&B = F + B and B = 2F = 2W.
    #[serde(rename = "dualpipe_v")]
    DualPipeV,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::GPipe,
        Self::OneForwardOneBackward,
        Self::Interleaved,
        Self::LoopedBreadthFirst,
        Self::ZeroBubbleH1,
        Self::ZeroBubbleV,
        Self::DualPipeV,
    ];

    /// The name in configurations and plans.
    pub const fn name(self) -> &'static str {
        match self {
            Self::GPipe => "gpipe",
            Self::OneForwardOneBackward => "1f1b",
            Self::Interleaved => "interleaved_1f1b",
            Self::LoopedBreadthFirst => "looped_bfs",
            Self::ZeroBubbleH1 => "zb_h1",
            Self::ZeroBubbleV => "zb_v",
            Self::DualPipeV => "dualpipe_v",
        }
    }

    /// The schedule of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Whether chunks lie as a V: chunk 0 of rank `i` is stage `i`, chunk 1 is the stage as far from the end.
    pub const fn is_v_shaped(self) -> bool {
        matches!(self, Self::ZeroBubbleV | Self::DualPipeV)
    }

    /// Whether backwards are split.
    pub const fn splits_backward(self) -> bool {
        matches!(self, Self::ZeroBubbleH1 | Self::ZeroBubbleV | Self::DualPipeV)
    }

    /// The fewest and the most chunks on a rank.
    pub const fn chunks(self) -> (usize, usize) {
        match self {
            Self::GPipe | Self::OneForwardOneBackward | Self::ZeroBubbleH1 => (1, 1),
            Self::Interleaved => (2, usize::MAX),
            Self::LoopedBreadthFirst => (1, usize::MAX),
            Self::ZeroBubbleV | Self::DualPipeV => (2, 2),
        }
    }

    /// The stage that is chunk `chunk` of rank `rank`.
    pub const fn stage(self, rank: usize, chunk: usize, ranks: usize) -> usize {
        if self.is_v_shaped() && chunk == 1 { 2 * ranks - 1 - rank } else { chunk * ranks + rank }
    }

    /// What keeps this schedule from being made of these numbers; empty if nothing does.
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

    /// The passes of each rank.
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

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The list of one rank as it is written: it knows which micro-batch is next.
struct List {
    rank: usize,
    ranks: usize,
    micro_batches: usize,
    /// The stage of each chunk.
    stages: Vec<usize>,
    /// For each chunk the next micro-batch of forwards, of input gradients and of weight gradients.
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

    /// Weight gradients of a chunk that wait.
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

/// Each rank runs ahead by as many forwards as there are ranks after it.
fn one_forward_one_backward(list: &mut List) {
    let ahead = (list.ranks - 1 - list.rank).min(list.micro_batches);
    (0..ahead).for_each(|_| list.forward(0));
    for _ in ahead..list.micro_batches {
        list.forward(0);
        list.backward(0);
    }
    (0..ahead).for_each(|_| list.backward(0));
}

/// 1F1B over pairs of (micro-batch, chunk), which go through the chunks in groups of as many micro-batches as ranks.
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

/// 1F1B, but rank `r` lets the weight gradients of `r` micro-batches wait: it runs `r` fewer forwards ahead than the
/// first rank, so it may hold `r` more, and gives its input gradients that much sooner to the rank before it. What
/// waits is done where 1F1B would stand still at the end.
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

/// Chunk 0 on the way down the V, chunk 1 on the way up. After the warm-up, whose length makes the first chunk-1 forward
/// arrive as the memory of 1F1B is full, every rank repeats six passes, one of each kind and chunk.
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
    // Input gradients that other ranks wait for come first; weights fill the rest.
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

/// The eight phases of DualPipe for one direction, the other direction being the second chunk.
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
    // Pairs to overlap: a forward, then a backward of the other chunk.
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
    // No forward is left to overlap with: from the middle on, weights wait and fill the gaps that follow.
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
