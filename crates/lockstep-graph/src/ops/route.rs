//! The router of a mixture of experts: the choice of experts for each token, their weights, the router losses and the
//! capacity.

use lockstep_comm::CommError;
use lockstep_plan::{
    DType, Initializer, Share,
    work::{Collective, Pass, Peers as Ranks},
};
use lockstep_tensor::{
    ExpertGroups, Router, RouterGradients, RouterOutputs, RouterScores, RouterWeights, TokenPositions, View,
};

#[cfg(feature = "faults")]
use crate::faults::Fault;
use crate::{
    block::{Mode, ParameterIndex, TokenRange, Value},
    facts::Facts,
    op::Op,
    recorder::Recorder,
    replay::{InputGradients, Run},
    work_context::{Work, WorkContext},
};

/// Configuration of a router: choice of experts, their weights, load-balancing losses and capacity.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routing {
    /// Experts chosen per token.
    pub top_k: usize,
    /// Function from logits to scores.
    pub scores: RouterScores,
    /// Function from the chosen scores to the weights of experts.
    pub weights: RouterWeights,
    /// Factor on the weights.
    pub scale: f32,
    /// Expert groups that restrict the choice.
    pub groups: Option<ExpertGroups>,
    /// Coefficient of the auxiliary loss.
    pub auxiliary_loss: f32,
    /// Coefficient of the z-loss.
    pub z_loss: f32,
    /// Capacity of an expert, as a multiple of its even share of a sequence's slots. `None` means no limit; inference has none.
    pub capacity_factor: Option<f32>,
}

/// Results of a router.
pub(crate) struct Routes {
    /// Weights of each token's experts.
    pub(crate) weights: Value,
    /// Indices of each token's experts; with a capacity, dropped slots are masked.
    pub(crate) chosen: Value,
    /// True if the slots of each expert are limited.
    pub(crate) has_capacity: bool,
}

/// A router with its operands, results and scratch.
#[derive(Debug)]
struct RouteOperation {
    logits: Value,
    /// Selection bias, added to the scores for the choice of experts only, and f32 scratch for it.
    bias: Option<(ParameterIndex, Value)>,
    routing: Routing,
    /// Slots per sequence that an expert takes; `None` means no limit.
    capacity: Option<usize>,
    scores: Value,
    log_sum_exp: Value,
    experts: Value,
    weights: Value,
    /// The tokens that this rank routes.
    tokens: TokenRange,
    /// Slots that chose each expert, per local range of a sequence: f32 `[ranges, experts]`.
    counts: Value,
    /// The counts of whole sequences, where other ranks hold parts of them.
    parts: Option<PartCounts>,
    /// Scratch: sums of probabilities in the forward, their gradients in the backward.
    probabilities: Value,
    /// The chosen experts, with slots beyond the capacity masked; `None` without a capacity.
    kept: Option<Value>,
}

/// Slot counts across the ranks that hold parts of the same sequences.
#[derive(Debug, Clone, Copy)]
struct PartCounts {
    /// Counts of whole sequences.
    totals: Value,
    /// Scratch: the counts of every rank's ranges, as gathered.
    gathered: Value,
    /// Scratch: these counts in token order, one sequence after another.
    ordered: Value,
    /// Scratch: counts of the tokens before each local range.
    before: Value,
}

impl Recorder {
    /// Records the router, with the parameter `selection_bias [experts]` if the model has one.
    #[track_caller]
    pub(crate) fn route(&mut self, logits: Value, routing: Routing, selection_bias: Option<&str>) -> Routes {
        let experts = self.columns(logits);
        let tokens = self.values[logits.0].rows;
        let bias = selection_bias.map(|name| {
            let share = self.whole_share(self.placement(logits));
            let share = Share { summands: 1, ..share };
            let parameter = self.parameter(name.to_owned(), &[experts], Initializer::Zeros, share);
            (parameter, self.local(1, experts, DType::F32))
        });
        let (sequences, ranks) = (self.shape.sequences, self.place.ranks);
        let tokens_here = self.tokens_of(self.placement(logits));
        let ranks = ranks * self.context.ranks;
        let ranges = sequences * self.context.pieces();
        // Counts of whole sequences are for the auxiliary loss and the capacity, which inference has not.
        let is_limited = self.mode == Mode::Training;
        let has_parts =
            ranks > 1 && is_limited && (routing.auxiliary_loss != 0.0 || routing.capacity_factor.is_some());
        let capacity = routing.capacity_factor.filter(|_| is_limited).map(|factor| {
            let seq_len = self.shape.seq_len * self.context.ranks;
            let even = (routing.top_k * seq_len) as f32 / experts as f32;
            (factor * even).ceil() as usize
        });
        let route = RouteOperation {
            logits,
            bias,
            routing,
            capacity,
            scores: self.local(tokens, experts, DType::F32),
            log_sum_exp: self.local(tokens, 1, DType::F32),
            experts: self.local(tokens, routing.top_k, DType::U32),
            weights: self.local(tokens, routing.top_k, DType::F32),
            tokens: tokens_here,
            counts: self.local(ranges, experts, DType::F32),
            parts: has_parts.then(|| PartCounts {
                totals: self.local(sequences, experts, DType::F32),
                gathered: self.local(ranks * ranges, experts, DType::F32),
                ordered: self.local(ranks * ranges, experts, DType::F32),
                before: self.local(ranges, experts, DType::F32),
            }),
            probabilities: self.local(ranges, experts, DType::F32),
            kept: capacity.map(|_| self.local(tokens, routing.top_k, DType::U32)),
        };
        let routes = Routes {
            weights: route.weights,
            chosen: route.kept.unwrap_or(route.experts),
            has_capacity: route.kept.is_some(),
        };
        self.push(route);
        routes
    }
}

impl Op for RouteOperation {
    fn facts(&self) -> Facts {
        let Self { logits, scores, log_sum_exp, experts, weights, counts, parts, kept, .. } = *self;
        let of_parts = parts.iter().flat_map(|parts| [parts.gathered, parts.ordered, parts.before]);
        let of_bias = self.bias.map(|(_, scratch)| scratch);
        let totals = parts.map(|parts| parts.totals);
        let always = [weights, scores, log_sum_exp, experts, counts];
        let written: Vec<_> = always.into_iter().chain(totals).chain(kept).collect();
        Facts {
            scratch: of_parts.chain(of_bias).chain([self.probabilities]).collect(),
            saved_for_inputs: vec![logits, scores, log_sum_exp, experts, weights, totals.unwrap_or(counts)],
            // Per score.
            vector_flops: [4, 6, 0],
            counted_value: Some(scores),
            buffers: self.bias.iter().map(|(parameter, _)| *parameter).collect(),
            selection_bias: self.bias.map(|(parameter, _)| parameter),
            slot_counts: Some(counts),
            ..Facts::of("router", [logits], written)
        }
    }

    fn forward(&self, run: &Run<'_>) -> Result<(), CommError> {
        let Self { capacity, experts, tokens, counts, parts, probabilities, kept, .. } = *self;
        let (queue, routed) = (run.queue(), self.routed(run));
        let router = self.router(run);
        queue.router_top_k(&router, run.value(self.logits), routed);
        if let Some(smallest) = run.replay().router_margin {
            smallest.set(smallest.get().min(queue.router_margin(&router, routed.scores).wait()));
        }
        // The tokens of one range of a sequence are consecutive; other ranks may hold the tokens between two ranges.
        let places = run.places(tokens);
        let ranges = TokenPositions { seq_len: places.seq_len / run.shapes.context.pieces(), ..places };
        queue.router_load(routed, ranges, run.value(counts), run.value(probabilities));
        if let Some(parts) = parts {
            count_parts(run, run.value(counts), parts)?;
        }
        if let (Some(capacity), Some(kept)) = (capacity, kept) {
            let before = parts.map(|parts| run.value(parts.before));
            queue.limit_slots(run.value(experts), ranges, capacity, before, run.value(kept));
        }
        Ok(())
    }

    /// Writes the gradient of the logits, by the weights of experts and by the router losses.
    fn backward_inputs(
        &self,
        run: &Run<'_>,
        dweights: View<'_>,
        dlogits: &InputGradients<'_>,
    ) -> Result<(), CommError> {
        let Self { routing, counts, parts, probabilities, .. } = *self;
        let (queue, seed) = (run.queue(), run.seed().of_sequences);
        let counts = run.value(parts.map_or(counts, |parts| parts.totals));
        let probabilities = run.value(probabilities).rows(0..counts.shape().as_matrix().0);
        let (experts, seq_len) = (counts.shape().as_matrix().1 as f32, run.shapes.whole_seq_len() as f32);
        let has_loss = routing.auxiliary_loss != 0.0;
        if has_loss {
            let even = experts / (routing.top_k as f32 * seq_len * seq_len);
            queue.scale(seed * routing.auxiliary_loss * even, counts, probabilities);
        }
        let gradients = RouterGradients {
            weights: dweights,
            probabilities: has_loss.then_some(probabilities),
            squared_log_sum_exp: seed * routing.z_loss / seq_len,
        };
        let (routed, places) = (self.routed(run), run.places(self.tokens));
        let logits = run.value(self.logits);
        let dlogits = dlogits.view(0);
        queue.router_top_k_backward(&self.router(run), logits, routed, gradients, places, dlogits);
        Ok(())
    }

    fn work(&self, context: &WorkContext<'_>) -> Vec<Work> {
        let (Some(parts), Pass::Forward) = (self.parts, context.pass) else { return vec![context.stream()] };
        let shapes = context.shapes;
        let ranks = shapes.rows(parts.gathered) / shapes.rows(self.counts);
        let peers = match shapes.context().ranks as u64 {
            1 => Ranks::Tensor,
            context if context == ranks => Ranks::Context,
            _ => Ranks::TensorAndContext,
        };
        let bytes = shapes.bytes(parts.gathered);
        vec![context.stream(), Work::exchange(peers, Collective::AllGather, bytes)]
    }

    #[cfg(feature = "faults")]
    fn inject(&mut self, fault: Fault) {
        if fault == Fault::RoutesFromFirstToken {
            self.tokens.first = 0;
        }
    }
}

impl RouteOperation {
    fn router<'a>(&self, run: &Run<'a>) -> Router<'a> {
        let Self { bias, routing, .. } = *self;
        let bias = bias.map(|(parameter, scratch)| {
            let exact = run.flat(scratch);
            run.queue().cast(run.replay().parameters.exact(parameter), exact);
            exact
        });
        Router {
            top_k: routing.top_k,
            scores: routing.scores,
            selection_bias: bias,
            groups: routing.groups,
            weights: routing.weights,
            scale: routing.scale,
        }
    }

    fn routed<'a>(&self, run: &Run<'a>) -> RouterOutputs<'a> {
        RouterOutputs {
            scores: run.value(self.scores),
            log_sum_exp: run.flat(self.log_sum_exp),
            experts: run.value(self.experts),
            weights: run.value(self.weights),
        }
    }
}

/// All-gathers the slot counts of the ranks that hold tokens of the same sequences. Sums them per expert: over
/// whole sequences, and over the tokens before each local range.
fn count_parts<'a>(run: &Run<'a>, counts: View<'a>, parts: PartCounts) -> Result<(), CommError> {
    let (queue, context) = (run.queue(), run.shapes.context);
    let peers = run.replay().sequence_peers.expect("a router of parts of sequences is given the others'");
    let [totals, gathered, ordered, before] =
        [parts.totals, parts.gathered, parts.ordered, parts.before].map(|value| run.value(value));
    peers.gather(counts, gathered)?;
    let rows = |view: View<'_>| view.shape().as_matrix().0;
    let row_of = |view: View<'a>, row: usize| view.rows(row..row + 1);
    let (sequences, ranks) = (rows(totals), rows(gathered) / rows(counts));
    // Ranks of a tensor-parallel group hold consecutive parts of the same range.
    let (ranges, sharing) = (context.pieces(), ranks / context.ranks);
    let of_sequence = rows(ordered) / sequences;
    let places = || {
        (0..ranks).flat_map(move |rank| (0..ranges).map(move |range| (rank, range))).map(
            move |(rank, range)| {
                let place = context.piece_place(rank / sharing, range);
                (rank, range, place * sharing + rank % sharing)
            },
        )
    };
    // Sums of integers: exact in any order.
    for sequence in 0..sequences {
        let of_sequence = ordered.rows(sequence * of_sequence..(sequence + 1) * of_sequence);
        for (rank, range, place) in places() {
            let row = (rank * sequences + sequence) * ranges + range;
            queue.cast(row_of(gathered, row), row_of(of_sequence, place));
        }
        let own = places().filter(|(rank, ..)| *rank == peers.group.rank());
        let sums = own.map(|(_, range, place)| (row_of(before, sequence * ranges + range), place));
        for (sum, len) in sums.chain([(row_of(totals, sequence), rows(of_sequence))]) {
            let sum = sum.reshape([sum.elements()]);
            queue.zero(sum);
            queue.sum_rows(of_sequence.rows(0..len), sum);
        }
    }
    Ok(())
}
