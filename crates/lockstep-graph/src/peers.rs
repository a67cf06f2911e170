//! The ranks that share a block's tensors, while it is replayed.

use std::time::Duration;

use lockstep_comm::{Collective, CommError, Deadline, Group, Lent, Pending, ReduceOp};
use lockstep_tensor::View;

/// Those ranks, in the order of their parts.
#[derive(Debug, Clone, Copy)]
pub struct Peers<'a> {
    /// They and this one.
    pub group: &'a Group,
    /// How long each exchange may take.
    pub limit: Duration,
}

/// Those in the row and in the column of a rank, where they make a square.
#[derive(Debug, Clone, Copy)]
pub struct GridPeers<'a> {
    /// The ranks with the same tokens, in the order of their columns.
    pub row: Peers<'a>,
    /// The ranks with the same columns, in the order of their rows.
    pub column: Peers<'a>,
}

impl Peers<'_> {
    /// Replaces `data` by that of a rank.
    #[track_caller]
    pub(crate) fn broadcast(&self, data: View<'_>, root: usize) -> Result<(), CommError> {
        self.group.broadcast(data, root, self.deadline())
    }

    /// Replaces a rank's `data` by its sum over the ranks.
    #[track_caller]
    pub(crate) fn sum_to(&self, data: View<'_>, root: usize) -> Result<(), CommError> {
        self.group.reduce(data, ReduceOp::Sum, root, self.deadline())
    }

    /// Replaces `data` by its sum over the ranks.
    #[track_caller]
    pub(crate) fn sum(&self, data: View<'_>) -> Result<(), CommError> {
        self.group.all_reduce(data, ReduceOp::Sum, self.deadline())
    }

    /// Writes the rows that are this rank's of the sum of `summands` over the ranks.
    #[track_caller]
    pub(crate) fn sum_rows(&self, summands: View<'_>, rows: View<'_>) -> Result<(), CommError> {
        self.group.reduce_scatter(summands, rows, ReduceOp::Sum, self.deadline())
    }

    /// Writes the rows of all ranks, one after the other.
    ///
    /// # Errors
    /// [`CommError`].
    #[track_caller]
    pub fn gather(&self, rows: View<'_>, all: View<'_>) -> Result<(), CommError> {
        self.group.all_gather(rows, all, self.deadline())
    }

    /// Sends one of equal blocks of `sent` to each rank, and writes theirs in their order.
    #[track_caller]
    pub(crate) fn exchange(&self, sent: View<'_>, received: View<'_>) -> Result<(), CommError> {
        self.group.all_to_all(sent, received, self.deadline())
    }

    /// Begins an operation that goes on while this rank computes.
    #[track_caller]
    pub(crate) fn start(&self, collective: Collective<Lent, Lent>) -> Result<Pending, CommError> {
        let pending = self.group.start(collective, self.deadline())?;
        self.progress()?;
        Ok(pending)
    }

    /// Carries on with what was begun.
    pub(crate) fn progress(&self) -> Result<(), CommError> {
        self.group.progress()
    }

    /// Waits for an operation; what was lent to it is back.
    pub(crate) fn wait(&self, pending: Pending) -> Result<(), CommError> {
        pending.wait(self.deadline()).map(drop)
    }

    /// Writes block r of each rank's numbers to rank r, in the order of the senders; all blocks are as long.
    #[track_caller]
    pub(crate) fn trade_numbers(&self, numbers: &[i64], theirs: &mut [i64]) -> Result<(), CommError> {
        self.group.all_to_all(numbers, theirs, self.deadline())
    }

    /// Writes rows for each rank to it, in the order of the senders: so many as `sent` and `received` say of each.
    #[track_caller]
    pub(crate) fn trade_rows(
        &self,
        rows: View<'_>,
        theirs: View<'_>,
        sent: &[usize],
        received: &[usize],
    ) -> Result<(), CommError> {
        let width = rows.shape().as_matrix().1;
        let elements = |counts: &[usize]| counts.iter().map(|count| count * width).collect::<Vec<_>>();
        let counts = Some((elements(sent), elements(received)));
        let (input, output) = (rows.into(), theirs.into());
        self.group.run(&mut Collective::AllToAll { input, output, counts }, self.deadline())
    }

    fn deadline(&self) -> Deadline {
        Deadline::after(self.limit)
    }
}
