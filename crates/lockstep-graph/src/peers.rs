//! Process groups of a block, and the blocking collectives that its program runs over them.

use std::time::Duration;

use lockstep_comm::{Collective, CommError, Deadline, Group, LentBuffer, Pending, ReduceOp};
use lockstep_tensor::View;

use crate::buffers::Ring;

/// A process group and its timeout; the group's rank order is the order of the shards.
#[derive(Debug, Clone, Copy)]
pub struct Peers<'a> {
    /// The group, this rank included.
    pub group: &'a Group,
    /// Timeout of each collective.
    pub limit: Duration,
}

/// The row group and the column group of a rank under two-dimensional tensor parallelism.
#[derive(Debug, Clone, Copy)]
pub struct GridGroups<'a> {
    /// Ranks with the same tokens, in the order of their columns.
    pub row: Peers<'a>,
    /// Ranks with the same columns of values, in the order of their rows.
    pub column: Peers<'a>,
}

/// The context-parallel group of a replay, and its buffers.
#[derive(Debug, Clone, Copy)]
pub struct ContextPeers<'a> {
    /// The group, this rank included.
    pub peers: Peers<'a>,
    /// Buffers of ring attention; `None` for the other methods.
    pub ring: Option<&'a Ring>,
}

impl Peers<'_> {
    /// Broadcasts `data` from rank `root`, in place.
    ///
    /// # Errors
    /// If a rank fails, or does not answer within `limit`.
    #[track_caller]
    pub fn broadcast(&self, data: View<'_>, root: usize) -> Result<(), CommError> {
        self.group.broadcast(data, root, self.deadline())
    }

    /// Reduces `data` to rank `root`, which gets the sum in place.
    ///
    /// # Errors
    /// If a rank fails, or does not answer within `limit`.
    #[track_caller]
    pub fn reduce(&self, data: View<'_>, root: usize) -> Result<(), CommError> {
        self.group.reduce(data, ReduceOp::Sum, root, self.deadline())
    }

    /// All-reduces `data` in place.
    ///
    /// # Errors
    /// If a rank fails, or does not answer within `limit`.
    #[track_caller]
    pub fn all_reduce(&self, data: View<'_>) -> Result<(), CommError> {
        self.group.all_reduce(data, ReduceOp::Sum, self.deadline())
    }

    /// Reduce-scatters `summands`: writes this rank's rows of their sum.
    ///
    /// # Errors
    /// If a rank fails, or does not answer within `limit`.
    #[track_caller]
    pub fn reduce_scatter(&self, summands: View<'_>, rows: View<'_>) -> Result<(), CommError> {
        self.group.reduce_scatter(summands, rows, ReduceOp::Sum, self.deadline())
    }

    /// All-gathers `rows`: writes the rows of all ranks to `all` in rank order.
    ///
    /// # Errors
    /// If a rank fails, or does not answer within `limit`.
    #[track_caller]
    pub fn gather(&self, rows: View<'_>, all: View<'_>) -> Result<(), CommError> {
        self.group.all_gather(rows, all, self.deadline())
    }

    /// Sends `data` to rank `to`.
    ///
    /// # Errors
    /// If a rank fails, or does not answer within `limit`.
    #[track_caller]
    pub fn send(&self, data: View<'_>, to: usize) -> Result<(), CommError> {
        self.group.send(data, to, self.deadline())
    }

    /// Receives `data` from rank `from`.
    ///
    /// # Errors
    /// If a rank fails, or does not answer within `limit`.
    #[track_caller]
    pub fn receive(&self, data: View<'_>, from: usize) -> Result<(), CommError> {
        self.group.receive(data, from, self.deadline())
    }

    /// All-to-all of equal blocks: sends block r of `sent` to rank r, and writes the received blocks in rank order.
    ///
    /// # Errors
    /// If a rank fails, or does not answer within `limit`.
    #[track_caller]
    pub fn all_to_all(&self, sent: View<'_>, received: View<'_>) -> Result<(), CommError> {
        self.group.all_to_all(sent, received, self.deadline())
    }

    /// Starts a collective that runs while this rank computes.
    #[track_caller]
    pub(crate) fn start(&self, collective: Collective<LentBuffer, LentBuffer>) -> Result<Pending, CommError> {
        let pending = self.group.start(collective, self.deadline())?;
        self.progress()?;
        Ok(pending)
    }

    /// Advances the collectives in flight.
    pub(crate) fn progress(&self) -> Result<(), CommError> {
        self.group.progress()
    }

    /// Waits for a collective; its buffers return to their owner.
    pub(crate) fn wait(&self, pending: Pending) -> Result<(), CommError> {
        pending.wait(self.deadline()).map(drop)
    }

    /// All-to-all of equal blocks of host integers: sends block r to rank r, and writes the received blocks in rank order.
    #[track_caller]
    pub(crate) fn all_to_all_numbers(&self, numbers: &[i64], theirs: &mut [i64]) -> Result<(), CommError> {
        self.group.all_to_all(numbers, theirs, self.deadline())
    }

    /// All-to-all of rows with variable counts: sends `sent[r]` rows to rank r, and writes `received[r]` rows from
    /// it, in rank order.
    #[track_caller]
    pub(crate) fn all_to_all_rows(
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
