//! Execution of a mixture of experts: routing, dispatch and combine.
//!
//! Under expert parallelism rows go to the ranks of their experts and back by all-to-all. Row counts are known only
//! at run time, so ranks exchange them first; the kinds and the order of collectives never change.
//!
//! ```text
//! tokens -> slots by expert: "sending" -> all-to-all -> "receiving", by sender -> rows by expert -> the experts
//! tokens <- "returned", by expert     <- all-to-all <-                         <- rows by expert <-
//! ```

use lockstep_comm::CommError;
use lockstep_tensor::{Permutation, Router, RouterGradients, RouterOutputs, TokenPositions, View};

use crate::{
    block::Value,
    operation::{PartCounts, RemoteRows, RouteOperation, SlotTables},
    peers::Peers,
    replay::Run,
};

impl<'a> Run<'a> {
    pub(crate) fn route(&self, route: &RouteOperation) -> Result<(), CommError> {
        let RouteOperation { capacity, experts, tokens, counts, parts, probabilities, kept, .. } = *route;
        let (queue, routed) = (self.replay.queue, self.routed(route));
        let router = self.router(route);
        queue.router_top_k(&router, self.value(route.logits), routed);
        if let Some(smallest) = self.replay.router_margin {
            smallest.set(smallest.get().min(queue.router_margin(&router, routed.scores).wait()));
        }
        // The tokens of one range of a sequence are consecutive; other ranks may hold the tokens between two ranges.
        let places = self.places(tokens);
        let ranges = TokenPositions { seq_len: places.seq_len / self.program.context.pieces(), ..places };
        queue.router_load(routed, ranges, self.value(counts), self.value(probabilities));
        if let Some(parts) = parts {
            self.count_parts(self.value(counts), parts)?;
        }
        if let (Some(capacity), Some(kept)) = (capacity, kept) {
            let before = parts.map(|parts| self.value(parts.before));
            queue.limit_slots(self.value(experts), ranges, capacity, before, self.value(kept));
        }
        Ok(())
    }

    /// All-gathers the slot counts of the ranks that hold tokens of the same sequences. Sums them per expert: over
    /// whole sequences, and over the tokens before each local range.
    fn count_parts(&self, counts: View<'a>, parts: PartCounts) -> Result<(), CommError> {
        let (queue, context) = (self.replay.queue, self.program.context);
        let peers = self.replay.sequence_peers.expect("a router of parts of sequences is given the others'");
        let [totals, gathered, ordered, before] =
            [parts.totals, parts.gathered, parts.ordered, parts.before].map(|value| self.value(value));
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

    /// Writes the gradient of the logits, by the weights of experts and by the router losses.
    pub(crate) fn route_gradient(&self, route: &RouteOperation, dweights: View<'_>, dlogits: View<'_>) {
        let RouteOperation { routing, counts, parts, probabilities, .. } = *route;
        let (queue, seed) = (self.replay.queue, self.extra.seed.of_sequences);
        let counts = self.value(parts.map_or(counts, |parts| parts.totals));
        let probabilities = self.value(probabilities).rows(0..counts.shape().as_matrix().0);
        let (experts, seq_len) = (counts.shape().as_matrix().1 as f32, self.whole_seq_len() as f32);
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
        let (routed, places) = (self.routed(route), self.places(route.tokens));
        let logits = self.value(route.logits);
        queue.router_top_k_backward(&self.router(route), logits, routed, gradients, places, dlogits);
    }

    pub(crate) fn dispatch(
        &self,
        x: View<'_>,
        chosen: View<'_>,
        tables: SlotTables,
        rows: View<'_>,
    ) -> Result<(), CommError> {
        let (queue, permutation) = (self.replay.queue, self.permutation(tables));
        let Some(remote) = tables.remote else {
            queue.sort_slots(chosen, 0, permutation, self.flat(tables.offsets));
            queue.permute(permutation, x, rows);
            return Ok(());
        };
        let chosen = self.parts_of_experts(chosen, remote);
        queue.sort_slots(chosen, 0, permutation, self.flat(remote.sent));
        let (sending, receiving) = (self.value(remote.sending), self.value(remote.receiving));
        queue.permute(permutation, x, sending);
        let exchange = self.exchange_counts(remote)?;
        exchange.to_experts(sending, receiving)?;
        // Received rows are sorted by sender, then expert; the experts need them sorted by expert, then sender.
        let arrived = self.flat(remote.arrived).rows(0..exchange.arrived());
        queue.arrived_experts(self.flat(remote.received), exchange.experts, arrived);
        queue.sort_slots(arrived, 0, self.arrivals(remote, &exchange), self.flat(tables.offsets));
        queue.permute(
            self.arrivals(remote, &exchange),
            receiving.rows(0..exchange.arrived()),
            rows.rows(0..exchange.arrived()),
        );
        Ok(())
    }

    pub(crate) fn dispatch_gradient(
        &self,
        drows: View<'_>,
        tables: SlotTables,
        dx: View<'_>,
    ) -> Result<(), CommError> {
        let (queue, permutation) = (self.replay.queue, self.permutation(tables));
        let rows = match tables.remote {
            None => drows,
            Some(remote) => self.send_back(drows, remote, self.value(remote.sending))?,
        };
        queue.unpermute(permutation, rows, None, dx);
        Ok(())
    }

    pub(crate) fn combine(
        &self,
        rows: View<'_>,
        weights: View<'_>,
        (tables, returned): (SlotTables, Option<Value>),
        y: View<'_>,
    ) -> Result<(), CommError> {
        let mut rows = rows;
        if let (Some(remote), Some(returned)) = (tables.remote, returned) {
            rows = self.send_back(rows, remote, self.value(returned))?;
        }
        self.replay.queue.unpermute(self.permutation(tables), rows, Some(weights), y);
        Ok(())
    }

    /// Computes the gradients of the rows and of the weights. `rows` are the rows that the forward combined; with
    /// remote experts, the returned ones.
    pub(crate) fn combine_gradient(
        &self,
        dy: View<'_>,
        rows: View<'_>,
        weights: View<'_>,
        tables: SlotTables,
        [drows, dweights]: [View<'_>; 2],
    ) -> Result<(), CommError> {
        let (queue, permutation) = (self.replay.queue, self.permutation(tables));
        let Some(remote) = tables.remote else {
            queue.unpermute_backward(permutation, dy, rows, weights, drows, dweights);
            return Ok(());
        };
        let (sending, receiving) = (self.value(remote.sending), self.value(remote.receiving));
        queue.unpermute_backward(permutation, dy, rows, weights, sending, dweights);
        let exchange = self.known_counts(remote);
        exchange.to_experts(sending, receiving)?;
        let arrived = exchange.arrived();
        queue.permute(self.arrivals(remote, &exchange), receiving.rows(0..arrived), drows.rows(0..arrived));
        Ok(())
    }

    /// Sends rows of the local experts back to the ranks of their slots: writes and returns `returned`.
    #[track_caller]
    fn send_back<'v>(
        &self,
        rows: View<'_>,
        remote: RemoteRows,
        returned: View<'v>,
    ) -> Result<View<'v>, CommError> {
        let (queue, exchange) = (self.replay.queue, self.known_counts(remote));
        let receiving = self.value(remote.receiving).rows(0..exchange.arrived());
        queue.unpermute(self.arrivals(remote, &exchange), rows.rows(0..exchange.arrived()), None, receiving);
        exchange.to_tokens(receiving, returned)?;
        Ok(returned)
    }

    /// Returns the expert of each slot; with expert tensor parallelism, one slot per shard of the expert.
    fn parts_of_experts<'v>(&self, chosen: View<'v>, remote: RemoteRows) -> View<'v>
    where
        'a: 'v,
    {
        let Some(experts) = remote.experts else { return chosen };
        let experts = self.flat(experts);
        let here = self.flat(remote.received).elements() / remote.place.group_size();
        // Shards of an expert are on neighbouring ranks; every rank has equally many experts.
        self.replay.queue.part_slots(chosen, here, experts);
        experts
    }

    /// Exchanges with the expert group how many rows each rank sends to each expert.
    fn exchange_counts(&self, remote: RemoteRows) -> Result<ExpertAllToAll<'a>, CommError> {
        let sent = self.counts_sent(remote);
        let mut theirs = vec![0; sent.len()];
        let peers = self.expert_peers();
        peers.all_to_all_numbers(&sent.iter().copied().map(i64::from).collect::<Vec<_>>(), &mut theirs)?;
        let received: Vec<u32> = theirs.iter().map(|count| *count as u32).collect();
        self.flat(remote.received).write(&received);
        Ok(ExpertAllToAll::new(peers, &sent, &received))
    }

    /// Returns the counts that an earlier call of `exchange_counts` exchanged.
    fn known_counts(&self, remote: RemoteRows) -> ExpertAllToAll<'a> {
        let received = self.read_table(self.flat(remote.received));
        ExpertAllToAll::new(self.expert_peers(), &self.counts_sent(remote), &received)
    }

    fn counts_sent(&self, remote: RemoteRows) -> Vec<u32> {
        let offsets = self.read_table(self.flat(remote.sent));
        offsets.windows(2).map(|ends| ends[1] - ends[0]).collect()
    }

    /// Reads a small table to the host, because the host passes their sizes to the collectives.
    fn read_table(&self, table: View<'_>) -> Vec<u32> {
        let mut numbers = vec![0; table.elements()];
        table.read(&mut numbers).wait();
        numbers
    }

    fn arrivals(&self, remote: RemoteRows, exchange: &ExpertAllToAll<'_>) -> Permutation<'a> {
        let [slots, rows] = [remote.arrived_slots, remote.arrived_rows]
            .map(|table| self.flat(table).rows(0..exchange.arrived()));
        Permutation { slots, rows }
    }

    fn expert_peers(&self) -> Peers<'a> {
        self.replay.expert_peers.expect("a program whose experts are on several ranks is given them")
    }

    fn router(&self, route: &RouteOperation) -> Router<'a> {
        let RouteOperation { bias, routing, .. } = *route;
        let bias = bias.map(|(parameter, scratch)| {
            let exact = self.flat(scratch);
            self.replay.queue.cast(self.replay.parameters.exact(parameter), exact);
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

    fn routed(&self, route: &RouteOperation) -> RouterOutputs<'a> {
        RouterOutputs {
            scores: self.value(route.scores),
            log_sum_exp: self.flat(route.log_sum_exp),
            experts: self.value(route.experts),
            weights: self.value(route.weights),
        }
    }

    fn permutation(&self, tables: SlotTables) -> Permutation<'a> {
        Permutation { slots: self.flat(tables.slots), rows: self.flat(tables.rows) }
    }
}

/// An expert-parallel all-to-all of rows, with the row counts to and from each rank.
struct ExpertAllToAll<'a> {
    peers: Peers<'a>,
    /// Experts per rank.
    experts: usize,
    sent: Vec<usize>,
    received: Vec<usize>,
}

impl<'a> ExpertAllToAll<'a> {
    /// Sums counts per rank and expert to counts per rank.
    fn new(peers: Peers<'a>, sent: &[u32], received: &[u32]) -> Self {
        let experts = sent.len() / peers.group.size();
        let of_ranks = |counts: &[u32]| -> Vec<usize> {
            counts.chunks_exact(experts).map(|counts| counts.iter().sum::<u32>() as usize).collect()
        };
        Self { peers, experts, sent: of_ranks(sent), received: of_ranks(received) }
    }

    /// Number of rows received.
    fn arrived(&self) -> usize {
        self.received.iter().sum()
    }

    /// Sends rows from the ranks of their tokens to the ranks of their experts.
    #[track_caller]
    fn to_experts(&self, sending: View<'_>, receiving: View<'_>) -> Result<(), CommError> {
        let receiving = receiving.rows(0..self.arrived());
        let sending = sending.rows(0..self.sent.iter().sum());
        self.peers.all_to_all_rows(sending, receiving, &self.sent, &self.received)
    }

    /// Sends rows from the ranks of their experts back to the ranks of their tokens.
    #[track_caller]
    fn to_tokens(&self, receiving: View<'_>, returned: View<'_>) -> Result<(), CommError> {
        let returned = returned.rows(0..self.sent.iter().sum());
        self.peers.all_to_all_rows(receiving, returned, &self.received, &self.sent)
    }
}
