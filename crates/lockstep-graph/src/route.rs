//! Mixtures of experts, as they are replayed.
//!
//! Where experts are on several ranks, rows go to them and come back. How many go where is known only now, so ranks tell each other
//! before; kinds and order of what they do together never change.
//!
//! ```text
//! tokens -> slots by expert: "sending" -> all-to-all -> "receiving", by sender -> rows by expert -> the experts
//! tokens <- "returned", by expert     <- all-to-all <-                         <- rows by expert <-
//! ```

use lockstep_comm::CommError;
use lockstep_tensor::{Kernels, Permutation, Routed, Router, RouterGradients, View};

use crate::{
    Peers,
    mutation::{Mutation, active},
    operation::{RemoteRows, RemoteSlots, RouteOperation, SlotTables},
    replay::Run,
};

impl<'a> Run<'a> {
    pub(crate) fn route(&self, route: &RouteOperation) -> Result<(), CommError> {
        let RouteOperation { capacity, experts, tokens, counts, parts, probabilities, kept, .. } = *route;
        let (queue, routed, places) = (self.replay.queue, self.routed(route), self.places(tokens));
        let counts = self.value(counts);
        queue.router_top_k(&self.router(route), self.value(route.logits), routed);
        queue.router_load(routed, places, counts, self.value(probabilities));
        if let Some(parts) = parts {
            // Sums over ranks of whole numbers: exact in any order.
            let peers =
                self.replay.sequence_peers.expect("a router of parts of sequences is given the others'");
            let (gathered, rank) = (self.value(parts.gathered), peers.group.rank());
            self.gather_from(peers, counts, gathered, Mutation::RoutersCountOwnTokens)?;
            for (sums, ranks) in [(parts.totals, gathered.shape().as_matrix().0), (parts.before, rank)] {
                let sums = self.flat(sums);
                queue.zero(sums);
                queue.sum_rows(gathered.rows(0..ranks), sums);
            }
        }
        if let (Some(capacity), Some(kept)) = (capacity, kept) {
            let before = parts.map(|parts| self.value(parts.before));
            queue.limit_slots(self.value(experts), places, capacity, before, self.value(kept));
        }
        Ok(())
    }

    /// The gradient of the logits: by the weights, and by the losses of the router.
    pub(crate) fn route_gradient(&self, route: &RouteOperation, dweights: View<'_>, dlogits: View<'_>) {
        let RouteOperation { routing, counts, parts, probabilities, .. } = *route;
        let (queue, seed) = (self.replay.queue, self.extra.seed.of_sequences);
        let counts = self.value(parts.map_or(counts, |parts| parts.totals));
        let probabilities = self.value(probabilities);
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
        let trade = self.tell_counts(remote)?;
        trade.forth(queue, (sending, receiving), Mutation::RowsForExpertsLost)?;
        // Rows have come by sender and expert; the experts want them by expert, and then by sender.
        let arrived = self.flat(remote.arrived).rows(0..trade.arrived());
        arrived.copy_from(&trade.experts());
        queue.sort_slots(arrived, 0, self.arrivals(remote, &trade), self.flat(tables.offsets));
        queue.permute(
            self.arrivals(remote, &trade),
            receiving.rows(0..trade.arrived()),
            rows.rows(0..trade.arrived()),
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
            Some(remote) => {
                self.send_back(drows, remote, self.value(remote.sending), Mutation::GradientsOfRowsLost)?
            }
        };
        queue.unpermute(permutation, rows, None, dx);
        Ok(())
    }

    pub(crate) fn combine(
        &self,
        rows: View<'_>,
        weights: View<'_>,
        (tables, slots): (SlotTables, Option<RemoteSlots>),
        y: View<'_>,
    ) -> Result<(), CommError> {
        let (mut rows, mut weights) = (rows, weights);
        if let (Some(remote), Some(slots)) = (tables.remote, slots) {
            rows = self.send_back(rows, remote, self.value(slots.returned), Mutation::RowsOfExpertsLost)?;
            weights = self.weights_of_parts(weights, slots);
        }
        self.replay.queue.unpermute(self.permutation(tables), rows, Some(weights), y);
        Ok(())
    }

    /// `rows` are those that the forward combined: on several ranks, as they have come back.
    pub(crate) fn combine_gradient(
        &self,
        dy: View<'_>,
        rows: View<'_>,
        weights: View<'_>,
        (tables, slots): (SlotTables, Option<RemoteSlots>),
        [drows, dweights]: [View<'_>; 2],
    ) -> Result<(), CommError> {
        let (queue, permutation) = (self.replay.queue, self.permutation(tables));
        let (Some(remote), Some(slots)) = (tables.remote, slots) else {
            queue.unpermute_backward(permutation, dy, rows, weights, drows, dweights);
            return Ok(());
        };
        let weights = self.weights_of_parts(weights, slots);
        let of_parts = slots.weights.map(|[_, gradients]| self.value(gradients));
        let (sending, receiving) = (self.value(remote.sending), self.value(remote.receiving));
        queue.unpermute_backward(permutation, dy, rows, weights, sending, of_parts.unwrap_or(dweights));
        if let Some(of_parts) = of_parts {
            sum_parts(of_parts, dweights);
        }
        let trade = self.known_counts(remote);
        trade.forth(queue, (sending, receiving), Mutation::GradientsForRowsLost)?;
        let arrived = trade.arrived();
        queue.permute(self.arrivals(remote, &trade), receiving.rows(0..arrived), drows.rows(0..arrived));
        Ok(())
    }

    /// Rows of the experts that are here, back to the slots that they belong to: `returned`.
    fn send_back<'v>(
        &self,
        rows: View<'_>,
        remote: RemoteRows,
        returned: View<'v>,
        lost: Mutation,
    ) -> Result<View<'v>, CommError> {
        let (queue, trade) = (self.replay.queue, self.known_counts(remote));
        let receiving = self.value(remote.receiving).rows(0..trade.arrived());
        queue.unpermute(self.arrivals(remote, &trade), rows.rows(0..trade.arrived()), None, receiving);
        trade.back(queue, (receiving, returned), lost)?;
        Ok(returned)
    }

    /// The experts of slots, with a slot for each part of an expert.
    fn parts_of_experts<'v>(&self, chosen: View<'v>, remote: RemoteRows) -> View<'v>
    where
        'a: 'v,
    {
        let Some(experts) = remote.experts else { return chosen };
        let (experts, parts) = (self.flat(experts), remote.place.tensor_ranks as u32);
        let here = (self.flat(remote.received).elements() / remote.place.group_size()) as u32;
        // Parts of an expert are on neighbouring ranks; a rank has as many experts as any other.
        let part_of = |expert: u32, part: u32| match expert {
            Permutation::NONE => Permutation::NONE,
            expert => (expert / here * parts + part) * here + expert % here,
        };
        let of_parts: Vec<u32> = chosen
            .to_vec::<u32>()
            .into_iter()
            .flat_map(|expert| (0..parts).map(move |part| part_of(expert, part)))
            .collect();
        experts.copy_from(&of_parts);
        experts
    }

    /// The weights of slots, once for each part of an expert.
    fn weights_of_parts<'v>(&self, weights: View<'v>, slots: RemoteSlots) -> View<'v>
    where
        'a: 'v,
    {
        let Some([of_parts, _]) = slots.weights else { return weights };
        let of_parts = self.value(of_parts);
        let parts = of_parts.shape().as_matrix().1;
        let repeated: Vec<f32> = weights
            .to_vec::<f32>()
            .into_iter()
            .flat_map(|weight| std::iter::repeat_n(weight, parts))
            .collect();
        of_parts.copy_from(&repeated);
        of_parts
    }

    /// Tells the other ranks how many rows come to each expert, and learns it of the own ones.
    fn tell_counts(&self, remote: RemoteRows) -> Result<Trade<'a>, CommError> {
        let sent: Vec<i64> = self.counts_sent(remote);
        let mut received = vec![0; sent.len()];
        let peers = self.expert_peers();
        peers.trade_numbers(&sent, &mut received)?;
        let numbers: Vec<u32> = received.iter().map(|count| *count as u32).collect();
        self.flat(remote.received).copy_from(&numbers);
        Ok(Trade::new(peers, &sent, received))
    }

    /// The same where all ranks have been told.
    fn known_counts(&self, remote: RemoteRows) -> Trade<'a> {
        let received = self.flat(remote.received).to_vec::<u32>().into_iter().map(i64::from).collect();
        Trade::new(self.expert_peers(), &self.counts_sent(remote), received)
    }

    fn counts_sent(&self, remote: RemoteRows) -> Vec<i64> {
        let offsets = self.flat(remote.sent).to_vec::<u32>();
        offsets.windows(2).map(|ends| i64::from(ends[1] - ends[0])).collect()
    }

    fn arrivals(&self, remote: RemoteRows, trade: &Trade<'_>) -> Permutation<'a> {
        let [slots, rows] = [remote.arrived_slots, remote.arrived_rows]
            .map(|table| self.flat(table).rows(0..trade.arrived()));
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

    fn routed(&self, route: &RouteOperation) -> Routed<'a> {
        Routed {
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

/// Rows on their way between ranks: how many go to each, and how many come from each.
struct Trade<'a> {
    peers: Peers<'a>,
    sent: Vec<usize>,
    received: Vec<usize>,
    /// By sender and own expert.
    by_expert: Vec<i64>,
}

impl<'a> Trade<'a> {
    fn new(peers: Peers<'a>, sent: &[i64], by_expert: Vec<i64>) -> Self {
        let experts = sent.len() / peers.group.size();
        let of_ranks = |counts: &[i64]| -> Vec<usize> {
            counts.chunks_exact(experts).map(|counts| counts.iter().sum::<i64>() as usize).collect()
        };
        Self { peers, sent: of_ranks(sent), received: of_ranks(&by_expert), by_expert }
    }

    /// Rows that come.
    fn arrived(&self) -> usize {
        self.received.iter().sum()
    }

    /// The own expert of each row that comes.
    fn experts(&self) -> Vec<u32> {
        let experts = self.by_expert.len() / self.peers.group.size();
        let of_sender = self.by_expert.iter().enumerate();
        of_sender
            .flat_map(|(index, count)| std::iter::repeat_n((index % experts) as u32, *count as usize))
            .collect()
    }

    /// To the experts.
    fn forth(
        &self,
        queue: &dyn Kernels,
        (sending, receiving): (View<'_>, View<'_>),
        lost: Mutation,
    ) -> Result<(), CommError> {
        let receiving = receiving.rows(0..self.arrived());
        let sending = sending.rows(0..self.sent.iter().sum());
        self.peers.trade_rows(sending, receiving, &self.sent, &self.received)?;
        lose(queue, receiving, lost);
        Ok(())
    }

    /// From the experts.
    fn back(
        &self,
        queue: &dyn Kernels,
        (receiving, returned): (View<'_>, View<'_>),
        lost: Mutation,
    ) -> Result<(), CommError> {
        let returned = returned.rows(0..self.sent.iter().sum());
        self.peers.trade_rows(receiving, returned, &self.received, &self.sent)?;
        lose(queue, returned, lost);
        Ok(())
    }
}

fn lose(queue: &dyn Kernels, rows: View<'_>, lost: Mutation) {
    if active(lost) {
        queue.zero(rows);
    }
}

/// The gradients of weights that parts of experts have had.
fn sum_parts(of_parts: View<'_>, dweights: View<'_>) {
    let parts = of_parts.shape().as_matrix().1;
    let sums: Vec<f32> =
        of_parts.to_vec::<f32>().chunks_exact(parts).map(|parts| parts.iter().sum()).collect();
    dweights.copy_from(&sums);
}
