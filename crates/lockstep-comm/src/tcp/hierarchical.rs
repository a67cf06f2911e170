//! Hierarchical all-reduce over machines of several ranks each: reduce-scatter in shared memory, all-reduce between machines,
//! all-gather in shared memory. Each rank reduces its shard over its machine, then over the machines, together with the ranks
//! of the same local rank. Each byte then travels between two machines once, instead of once per rank.
//!
//! The order of additions is that of the tree over all ranks, which has a subtree per machine if all machines have the same
//! power of two of ranks. Types that are rounded only at the root must not be rounded in between; they use the plain tree.

use std::{panic::Location, sync::Arc, time::Duration};

use super::{
    frame::Key,
    members::Members,
    reduction::Reduction,
    send_queues::{SendQueues, UnsentBytes},
};
use crate::{
    Call, Deadline, Kind, NumberType, ReduceOp,
    blocks::Blocks,
    exchange::Exchange,
    shm,
    task::{Flow, Receiver, Task},
    transport::{Ticket, Transport},
};

/// Maximum number of reductions in shared memory at a time; fewer than it has room for.
const MAX_REDUCING: usize = 8;
/// Time limit for starting an operation in shared memory, for which there is always room.
const START_LIMIT: Duration = Duration::from_secs(1);

/// Shared-memory transport of this machine, in a world whose machines all have equally many ranks.
#[derive(Debug)]
pub(crate) struct UniformNodes {
    pub(crate) local: Arc<shm::ShmTransport>,
    /// Number of ranks per machine.
    pub(crate) ranks: usize,
    /// Indices of two groups of the local ranks, one for reduce-scatters and one for all-gathers. Each has its own order of
    /// operations.
    reduce_group: usize,
    gather_group: usize,
    /// Number of reductions in flight that have not reached their all-gather.
    reducing: usize,
    /// Number of reductions in their all-gather.
    gathering: usize,
}

impl UniformNodes {
    /// Creates the state for machines of `ranks` ranks each.
    pub(crate) fn new(local: Arc<shm::ShmTransport>, ranks: usize) -> Self {
        let gather_group = local.add_group((0..ranks).collect());
        Self { local, ranks, reduce_group: 0, gather_group, reducing: 0, gathering: 0 }
    }

    /// Returns true if all-reduces of `number` can be hierarchical.
    pub(crate) fn allows(&self, number: NumberType) -> bool {
        !matches!(number, NumberType::Bf16 | NumberType::F16)
    }

    /// Returns true if an operation is in flight in shared memory.
    pub(crate) fn is_busy(&self) -> bool {
        self.reducing > 0 || self.gathering > 0
    }

    /// Returns true if another reduction may start.
    pub(crate) fn has_room(&self) -> bool {
        self.reducing < MAX_REDUCING
    }

    fn begin(
        &self,
        group: usize,
        call: Call,
        flow: Flow,
        task: &Task,
        own: &std::ops::Range<usize>,
    ) -> Arc<Ticket> {
        let part = task.target.slice(own.start, own.len());
        let (source, target) =
            if group == self.reduce_group { (task.target, part) } else { (part, task.target) };
        let task = Task { call, flow, source, target };
        let deadline = Deadline::after(START_LIMIT);
        let begun = self.local.begin(group, task, Vec::new(), deadline, Location::caller());
        // It fails only if the run has ended, which the caller detects soon.
        begun.unwrap_or_else(|_| Ticket::new(Vec::new()))
    }
}

/// Place of an operation in the order of its group.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Turn {
    pub(crate) key: Key,
    /// True if all earlier hierarchical operations have started their all-gather.
    pub(crate) is_next: bool,
}

/// Progress of one hierarchical all-reduce.
#[derive(Debug)]
pub(crate) struct Hierarchical {
    op: ReduceOp,
    /// Shards of the ranks of a machine.
    shares: Blocks,
    /// Group of the ranks with this local rank on all nodes.
    column: Members,
    /// Number of ranks per machine.
    per_node: usize,
    phase: Phase,
}

#[derive(Debug)]
enum Phase {
    /// Reduce-scatter on this machine.
    ReduceScatter(Arc<Ticket>),
    /// All-reduce of this rank's shard over the nodes.
    AllReduce(Box<(Reduction, Task)>),
    /// The shard is reduced. The machine's ranks start their all-gathers in the order of the operations.
    Reduced,
    /// All-gather of the shards on this machine.
    AllGather(Arc<Ticket>),
}

impl Hierarchical {
    pub(crate) fn new(nodes: &mut UniformNodes, task: &Task, op: ReduceOp, members: &Members) -> Self {
        let (ranks, own) = (nodes.ranks, members.own % nodes.ranks);
        let shares = Blocks::shares(task.target.elements, ranks);
        let call = Call { op: Some(op), detail: 0, ..task.call };
        let flow = Flow::Reduction { op, blocks: shares.clone(), receiver: Receiver::Owner };
        let call = Call { kind: Kind::ReduceScatter, ..call };
        let ticket = nodes.begin(nodes.reduce_group, call, flow, task, &shares.range(own));
        nodes.reducing += 1;
        let ranks_of_column = members.ranks.iter().copied().skip(own).step_by(ranks).collect();
        let column = Members::new(members.name, ranks_of_column, members.own / ranks);
        Self { op, shares, column, per_node: ranks, phase: Phase::ReduceScatter(ticket) }
    }

    /// Advances the operation. Returns true if it is complete. The all-gathers start in the order of the operations.
    pub(crate) fn advance(
        &mut self,
        nodes: &mut UniformNodes,
        turn: Turn,
        task: &Task,
        members: &Members,
        queues: &mut SendQueues,
        unsent: &mut UnsentBytes,
    ) -> bool {
        let own = self.shares.range(members.own % nodes.ranks);
        loop {
            self.phase = match &mut self.phase {
                Phase::ReduceScatter(ticket) if ticket.is_complete() => {
                    let part = task.target.slice(own.start, own.len());
                    let blocks = Blocks::shares(part.elements, self.column.len());
                    let flow =
                        Flow::Reduction { op: self.op, blocks: blocks.clone(), receiver: Receiver::All };
                    let part = Task { call: task.call, flow, source: part, target: part };
                    let reduction = Reduction::new(&part, self.op, &blocks, Receiver::All, &self.column);
                    Phase::AllReduce(Box::new((reduction, part)))
                }
                Phase::AllReduce(between) => {
                    let (reduction, part) = &mut **between;
                    if !reduction.advance(turn.key, part, &self.column, queues, unsent) || !unsent.is_empty()
                    {
                        return false;
                    }
                    Phase::Reduced
                }
                Phase::Reduced if turn.is_next => {
                    let blocks = self.shares.scaled(task.target.number.size_bytes());
                    let call = Call { kind: Kind::AllGather, op: None, detail: 0, ..task.call };
                    (nodes.reducing, nodes.gathering) = (nodes.reducing - 1, nodes.gathering + 1);
                    let flow = Flow::Exchange(Exchange::AllGather(blocks));
                    Phase::AllGather(nodes.begin(nodes.gather_group, call, flow, task, &own))
                }
                Phase::AllGather(ticket) if ticket.is_complete() => {
                    nodes.gathering -= 1;
                    return true;
                }
                Phase::AllGather(_) => return false,
                Phase::ReduceScatter(_) | Phase::Reduced => return false,
            };
        }
    }

    /// Returns true if later reductions may start their all-gather.
    pub(crate) fn has_started_all_gather(&self) -> bool {
        matches!(self.phase, Phase::AllGather(_))
    }

    /// Returns the all-reduce between machines and `member`'s index in it; `None` in other stages, or for a rank outside it.
    pub(crate) fn between(
        &mut self,
        members: &Members,
        member: usize,
    ) -> Option<(&mut Reduction, &Task, &Members, usize)> {
        match &mut self.phase {
            Phase::AllReduce(between) if member % self.per_node == members.own % self.per_node => {
                let (reduction, task) = &mut **between;
                Some((reduction, task, &self.column, member / self.per_node))
            }
            _ => None,
        }
    }

    /// Returns the member of another machine that it waits for. Ranks of this machine have their own diagnosis.
    pub(crate) fn waits_for(&self, members: &Members) -> Option<usize> {
        let Phase::AllReduce(between) = &self.phase else { return None };
        let (reduction, task) = &**between;
        let late = reduction.waits_for(task, &self.column)?;
        Some(late * self.per_node + members.own % self.per_node)
    }

    /// Returns another member on this machine.
    pub(crate) fn neighbour(&self, members: &Members) -> Option<usize> {
        let first = members.own - members.own % self.per_node;
        (first..first + self.per_node).find(|member| *member != members.own)
    }

    /// Returns true if it has not reached the all-reduce between nodes.
    pub(crate) fn is_in_reduce_scatter(&self) -> bool {
        matches!(self.phase, Phase::ReduceScatter(_))
    }
}
