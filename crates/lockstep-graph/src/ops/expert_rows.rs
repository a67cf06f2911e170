//! Rows on their way to the experts and back: the tables by which dispatch and combine move them, and the all-to-all of
//! expert parallelism.
//!
//! Row counts are known only at run time, so ranks exchange them first; the kinds and the order of collectives never
//! change.
//!
//! ```text
//! tokens -> slots by expert: "sending" -> all-to-all -> "receiving", by sender -> rows by expert -> the experts
//! tokens <- "returned", by expert     <- all-to-all <-                         <- rows by expert <-
//! ```

use lockstep_comm::CommError;
use lockstep_plan::{
    ExpertPlace,
    work::{Collective, Peers as Ranks},
};
use lockstep_tensor::{Permutation, View};

use crate::{block::Value, facts::ExpertRows, peers::Peers, replay::Run, shapes::Shapes, work_context::Work};

/// Permutation between slots and rows sorted by expert, and the first row of each expert.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SlotTables {
    pub(crate) slots: Value,
    pub(crate) rows: Value,
    pub(crate) offsets: Value,
    /// Rows of buffers of this rank's experts: room, and under even load.
    pub(crate) expert_rows: ExpertRows,
    /// Index of this rank's first expert among those that slots name; 0 with an all-to-all.
    pub(crate) first_expert: usize,
    /// Tables of the all-to-all that takes rows to the experts of other ranks.
    pub(crate) remote: Option<RemoteRows>,
}

/// Tables and buffers of the all-to-all that takes rows to the experts of other ranks and back. A shard of an expert
/// counts as an expert here.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RemoteRows {
    pub(crate) place: ExpertPlace,
    /// The expert of each slot, once per shard of the expert; `None` without expert tensor parallelism.
    pub(crate) experts: Option<Value>,
    /// Offset of the first row to send for each expert, in rank order.
    pub(crate) sent: Value,
    /// Number of rows received, per sending rank and local expert.
    pub(crate) received: Value,
    /// Scratch: the expert of each received row.
    pub(crate) arrived: Value,
    /// Permutation from received rows to rows sorted by expert, and its inverse.
    pub(crate) arrived_slots: Value,
    pub(crate) arrived_rows: Value,
    /// Scratch: the send and the receive buffer.
    pub(crate) sending: Value,
    pub(crate) receiving: Value,
}

impl SlotTables {
    /// Returns the permutations between rows and slots, without the offsets.
    pub(crate) fn permutations(&self) -> impl Iterator<Item = Value> {
        let of_remote = self.remote.map(|remote| {
            let RemoteRows { sent, received, arrived_slots, arrived_rows, .. } = remote;
            [sent, received, arrived_slots, arrived_rows]
        });
        [self.slots, self.rows].into_iter().chain(of_remote.into_iter().flatten())
    }

    /// Returns the send and the receive buffer.
    pub(crate) fn buffers(&self) -> impl Iterator<Item = Value> {
        self.remote.into_iter().flat_map(|remote| [remote.sending, remote.receiving])
    }

    pub(crate) fn permutation<'a>(&self, run: &Run<'a>) -> Permutation<'a> {
        Permutation { slots: run.flat(self.slots), rows: run.flat(self.rows) }
    }

    /// Returns the all-to-all of rows to or from the experts, if there is one: as many rows as slots, under even load.
    pub(crate) fn rows_sent(&self, shapes: &Shapes) -> Option<Work> {
        let bytes = shapes.bytes(self.remote?.sending);
        Some(Work::exchange(Ranks::Expert, Collective::AllToAll, bytes))
    }
}

impl RemoteRows {
    /// Sends rows of the local experts back to the ranks of their slots: writes and returns `returned`.
    #[track_caller]
    pub(crate) fn send_back<'v>(
        &self,
        run: &Run<'_>,
        rows: View<'_>,
        returned: View<'v>,
    ) -> Result<View<'v>, CommError> {
        let (queue, exchange) = (run.queue(), self.known_counts(run));
        let receiving = run.value(self.receiving).rows(0..exchange.arrived());
        queue.unpermute(self.arrivals(run, &exchange), rows.rows(0..exchange.arrived()), None, receiving);
        exchange.to_tokens(receiving, returned)?;
        Ok(returned)
    }

    /// Returns the expert of each slot; with expert tensor parallelism, one slot per shard of the expert.
    pub(crate) fn parts_of_experts<'a>(&self, run: &Run<'a>, chosen: View<'a>) -> View<'a> {
        let Some(experts) = self.experts else { return chosen };
        let experts = run.flat(experts);
        let here = run.flat(self.received).elements() / self.place.group_size();
        // Shards of an expert are on neighbouring ranks; every rank has equally many experts.
        run.queue().part_slots(chosen, here, experts);
        experts
    }

    /// Exchanges with the expert group how many rows each rank sends to each expert.
    pub(crate) fn exchange_counts<'a>(&self, run: &Run<'a>) -> Result<ExpertAllToAll<'a>, CommError> {
        let sent = self.counts_sent(run);
        let mut theirs = vec![0; sent.len()];
        let peers = expert_peers(run);
        peers.all_to_all_numbers(&sent.iter().copied().map(i64::from).collect::<Vec<_>>(), &mut theirs)?;
        let received: Vec<u32> = theirs.iter().map(|count| *count as u32).collect();
        run.flat(self.received).write(&received);
        Ok(ExpertAllToAll::new(peers, &sent, &received))
    }

    /// Returns the counts that an earlier call of `exchange_counts` exchanged.
    pub(crate) fn known_counts<'a>(&self, run: &Run<'a>) -> ExpertAllToAll<'a> {
        let received = read_table(run.flat(self.received));
        ExpertAllToAll::new(expert_peers(run), &self.counts_sent(run), &received)
    }

    pub(crate) fn arrivals<'a>(&self, run: &Run<'a>, exchange: &ExpertAllToAll<'_>) -> Permutation<'a> {
        let [slots, rows] =
            [self.arrived_slots, self.arrived_rows].map(|table| run.flat(table).rows(0..exchange.arrived()));
        Permutation { slots, rows }
    }

    fn counts_sent(&self, run: &Run<'_>) -> Vec<u32> {
        let offsets = read_table(run.flat(self.sent));
        offsets.windows(2).map(|ends| ends[1] - ends[0]).collect()
    }
}

fn expert_peers<'a>(run: &Run<'a>) -> Peers<'a> {
    run.replay().expert_peers.expect("a program whose experts are on several ranks is given them")
}

/// Reads a small table to the host, because the host passes their sizes to the collectives.
fn read_table(table: View<'_>) -> Vec<u32> {
    let mut numbers = vec![0; table.elements()];
    table.read(&mut numbers).wait();
    numbers
}

/// An expert-parallel all-to-all of rows, with the row counts to and from each rank.
pub(crate) struct ExpertAllToAll<'a> {
    peers: Peers<'a>,
    /// Experts per rank.
    pub(crate) experts: usize,
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
    pub(crate) fn arrived(&self) -> usize {
        self.received.iter().sum()
    }

    /// Sends rows from the ranks of their tokens to the ranks of their experts.
    #[track_caller]
    pub(crate) fn to_experts(&self, sending: View<'_>, receiving: View<'_>) -> Result<(), CommError> {
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
