//! All-reduces over machines of several ranks each: first in shared memory, then between machines, then in shared memory
//! again. Each rank sums its share over its machine, sums that over the machines with the ranks that stand where it does on
//! theirs, and all of a machine put the shares together. Between two machines each byte then goes once, not once for each rank.
//!
//! The order of additions is that of the tree over all ranks: it has a subtree for each machine, as long as machines have
//! the same power of two of ranks. Types that are rounded at the root alone must not be rounded on the way, so they go by the
//! plain tree.

use std::{panic::Location, sync::Arc, time::Duration};

use super::{
    operation::{Members, Sending, Turn},
    reduction::Reduction,
};
use crate::{
    Call, Deadline, Kind, NumberType, ReduceOp,
    blocks::Blocks,
    exchange::Exchange,
    shm,
    task::{Flow, Receiver, Task},
    transport::{Ticket, Transport},
};

/// Sums that may be in shared memory at a time; fewer than it has room for.
const UNDER_WAY: usize = 8;
/// What a beginning in shared memory may take, for which there is room.
const BEGINNING: Duration = Duration::from_secs(1);

/// The ranks of this machine, in a world of machines that are alike.
#[derive(Debug)]
pub(crate) struct Machines {
    pub(crate) local: Arc<shm::Machine>,
    /// Ranks of each.
    pub(crate) ranks: usize,
    /// Groups of the local ranks, of which each has an order of operations of its own.
    sums: usize,
    shares: usize,
    /// Sums under way that have not come to their last part.
    under_way: usize,
    /// Those in their last part.
    sharing: usize,
}

impl Machines {
    /// Of `ranks` ranks each.
    pub(crate) fn new(local: Arc<shm::Machine>, ranks: usize) -> Self {
        let shares = local.add_group((0..ranks).collect());
        Self { local, ranks, sums: 0, shares, under_way: 0, sharing: 0 }
    }

    /// Whether an all-reduce of `number` goes this way.
    pub(crate) fn suit(&self, number: NumberType) -> bool {
        !matches!(number, NumberType::Bf16 | NumberType::F16)
    }

    /// Whether something is under way in shared memory.
    pub(crate) fn is_busy(&self) -> bool {
        self.under_way > 0 || self.sharing > 0
    }

    /// Whether one more may begin.
    pub(crate) fn have_room(&self) -> bool {
        self.under_way < UNDER_WAY
    }

    fn begin(
        &self,
        group: usize,
        call: Call,
        flow: Flow,
        task: &Task,
        own: &std::ops::Range<usize>,
    ) -> Arc<Ticket> {
        let part = task.target.part(own.start, own.len());
        let (source, target) = if group == self.sums { (task.target, part) } else { (part, task.target) };
        let task = Task { call, flow, source, target };
        let deadline = Deadline::after(BEGINNING);
        let begun = self.local.begin(group, task, Vec::new(), deadline, Location::caller());
        // Where it cannot begin the run has ended, which is seen soon.
        begun.unwrap_or_else(|_| Ticket::new(Vec::new()))
    }
}

/// How far such a sum has come.
#[derive(Debug)]
pub(crate) struct Layered {
    op: ReduceOp,
    /// Shares of the ranks of a machine.
    shares: Blocks,
    /// The ranks that stand where this one does, as a group.
    column: Members,
    /// Ranks of a machine.
    per_machine: usize,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// The machine's sum of the own share.
    Here(Arc<Ticket>),
    /// The sum of that over machines.
    Between(Box<(Reduction, Task)>),
    /// It is there; the machine's ranks come to this in the order of the operations.
    Summed,
    /// All shares to all of the machine.
    Shared(Arc<Ticket>),
}

impl Layered {
    pub(crate) fn new(machines: &mut Machines, task: &Task, op: ReduceOp, members: &Members) -> Self {
        let (ranks, own) = (machines.ranks, members.own % machines.ranks);
        let shares = Blocks::shares(task.target.elements, ranks);
        let call = Call { op: Some(op), detail: 0, ..task.call };
        let flow = Flow::Reduction { op, blocks: shares.clone(), receiver: Receiver::Owner };
        let call = Call { kind: Kind::ReduceScatter, ..call };
        let ticket = machines.begin(machines.sums, call, flow, task, &shares.range(own));
        machines.under_way += 1;
        let column = Members {
            name: members.name,
            ranks: members.ranks.iter().copied().skip(own).step_by(ranks).collect(),
            own: members.own / ranks,
        };
        Self { op, shares, column, per_machine: ranks, stage: Stage::Here(ticket) }
    }

    /// Carries on; says whether everything is done. The last part comes in the order of the operations.
    pub(crate) fn advance(
        &mut self,
        machines: &mut Machines,
        turn: Turn,
        task: &Task,
        members: &Members,
        sending: &mut Sending,
        unsent: &mut usize,
    ) -> bool {
        let own = self.shares.range(members.own % machines.ranks);
        loop {
            self.stage = match &mut self.stage {
                Stage::Here(ticket) if ticket.is_complete() => {
                    let part = task.target.part(own.start, own.len());
                    let blocks = Blocks::shares(part.elements, self.column.len());
                    let flow =
                        Flow::Reduction { op: self.op, blocks: blocks.clone(), receiver: Receiver::All };
                    let part = Task { call: task.call, flow, source: part, target: part };
                    let reduction = Reduction::new(&part, self.op, &blocks, Receiver::All, &self.column);
                    Stage::Between(Box::new((reduction, part)))
                }
                Stage::Between(between) => {
                    let (reduction, part) = &mut **between;
                    if !reduction.advance(turn.key, part, &self.column, sending, unsent) || *unsent > 0 {
                        return false;
                    }
                    Stage::Summed
                }
                Stage::Summed if turn.is_next => {
                    let blocks = self.shares.scaled(task.target.number.size_bytes());
                    let call = Call { kind: Kind::AllGather, op: None, detail: 0, ..task.call };
                    (machines.under_way, machines.sharing) = (machines.under_way - 1, machines.sharing + 1);
                    let flow = Flow::Exchange(Exchange::AllGather(blocks));
                    Stage::Shared(machines.begin(machines.shares, call, flow, task, &own))
                }
                Stage::Shared(ticket) if ticket.is_complete() => {
                    machines.sharing -= 1;
                    return true;
                }
                Stage::Shared(_) => return false,
                Stage::Here(_) | Stage::Summed => return false,
            };
        }
    }

    /// Whether later ones may come to their last part.
    pub(crate) fn is_past_its_turn(&self) -> bool {
        matches!(self.stage, Stage::Shared(_))
    }

    /// The part that goes between machines, if it is that part's turn, and `member`'s place in it.
    pub(crate) fn between(
        &mut self,
        members: &Members,
        member: usize,
    ) -> Option<(&mut Reduction, &Task, &Members, usize)> {
        match &mut self.stage {
            Stage::Between(between) if member % self.per_machine == members.own % self.per_machine => {
                let (reduction, task) = &mut **between;
                Some((reduction, task, &self.column, member / self.per_machine))
            }
            _ => None,
        }
    }

    /// Whom it waits for, as a member; ranks of this machine are named by their own waits.
    pub(crate) fn waits_for(&self, members: &Members) -> Option<usize> {
        let first = members.own - members.own % self.per_machine;
        match &self.stage {
            Stage::Between(between) => {
                let (reduction, task) = &**between;
                let late = reduction.waits_for(task, &self.column)?;
                Some(late * self.per_machine + members.own % self.per_machine)
            }
            _ => (first..first + self.per_machine).find(|member| *member != members.own),
        }
    }

    /// Whether it has not come to that part.
    pub(crate) fn is_early(&self) -> bool {
        matches!(self.stage, Stage::Here(_))
    }
}
