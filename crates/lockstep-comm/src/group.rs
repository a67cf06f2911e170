//! A group of ranks: what everything above is given to talk to other ranks.
//!
//! All ranks of a group call the same operations in the same order. Each call says until when it may wait. An error ends the
//! run on all ranks, with the same message: the order of operations is lost, and nobody is left waiting. What an operation
//! was to write is unspecified then.

use std::{panic::Location, sync::Arc, time::Instant};

use lockstep_plan::MemoryCategory;
use lockstep_tensor::{Arena, Workers};

use crate::{
    Algorithm, Call, Collective, CommError, Deadline, GroupName, Kind, Lent, MAX_PARTITIONS, Occasion,
    Problem, ReduceOp, Source, Target, call,
    memory::Stretch,
    meter::Meter,
    recorder::Recorded,
    task::{Flow, Task},
    transport::{self, Ticket, Transport},
};

/// Some ranks of the world, in an order of their own. Clones are the same group.
#[derive(Debug, Clone)]
pub struct Group {
    pub(crate) transport: Arc<dyn Transport>,
    /// Of the partition that made it.
    index: usize,
    rank: usize,
    size: usize,
    algorithm: Algorithm,
    meter: Option<Arc<Meter>>,
}

impl Group {
    /// The group of all ranks.
    pub(crate) fn world(transport: impl Transport + 'static) -> Self {
        Self::new(Arc::new(transport), 0)
    }

    fn new(transport: Arc<dyn Transport>, index: usize) -> Self {
        let ranks = transport.members(index);
        let rank = ranks.iter().position(|rank| *rank == transport.rank());
        let rank = rank.expect("a group's handle is only given to its members");
        Self { transport, index, rank, size: ranks.len(), algorithm: Algorithm::Tree, meter: None }
    }

    /// The own rank in the group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Its name in messages.
    pub fn name(&self) -> GroupName {
        transport::name(self.index, &self.ranks())
    }

    /// Ranks of the world, in the order of the group.
    pub fn ranks(&self) -> Vec<usize> {
        self.transport.members(self.index)
    }

    /// The same group, whose all-reduces go by `algorithm` where they go over a network. All ranks choose the same.
    #[must_use]
    pub fn with_algorithm(self, algorithm: Algorithm) -> Self {
        Self { algorithm, ..self }
    }

    /// The same group, whose operations `meter` counts.
    #[must_use]
    pub fn with_meter(self, meter: Arc<Meter>) -> Self {
        Self { meter: Some(meter), ..self }
    }

    /// An arena whose buffers of `categories` the other ranks of this machine can reach: operations on them copy less.
    pub fn arena(&self, categories: &[MemoryCategory]) -> Arena {
        self.transport.arena(categories)
    }

    /// Whether what is started goes on by itself while this rank computes; if not, it goes on within calls.
    pub fn is_in_background(&self) -> bool {
        self.transport.is_in_background()
    }

    /// Whether all of its ranks are known to be on one machine; all of them say the same.
    pub fn is_on_one_machine(&self) -> bool {
        self.ranks().into_iter().all(|rank| self.transport.is_near(rank))
    }

    /// Has the rank's own compute threads share the work of operations, in all its groups. They take part while this
    /// rank is in a call.
    pub fn set_workers(&self, workers: Workers) {
        self.transport.set_workers(workers);
    }

    /// Makes groups of ranks of the world, which all ranks of the world call with the same lists, through any of their
    /// groups. Returns the one that this rank is in.
    ///
    /// # Errors
    /// [`CommError`]; among them [`Problem::Partition`](crate::Problem::Partition) if a rank is listed twice, and a
    /// mismatch if the lists differ from rank to rank.
    #[track_caller]
    pub fn partition(&self, groups: &[Vec<usize>], deadline: Deadline) -> Result<Option<Self>, CommError> {
        let words = groups.iter().flat_map(|group| std::iter::once(group.len()).chain(group.iter().copied()));
        let call = Call { detail: call::hash(words), ..Call::bare(Kind::Partition) };
        let mut seen = vec![false; self.transport.members(0).len()];
        let is_new = |rank: &usize| *rank < seen.len() && !std::mem::replace(&mut seen[*rank], true);
        if !groups.iter().flatten().all(is_new) {
            return Err(self.misuse(0, call, Problem::Partition));
        }
        if self.transport.groups() == MAX_PARTITIONS {
            return Err(self.misuse(0, call, Problem::TooManyGroups));
        }
        // All ranks agree on the groups before anybody uses them.
        let task = Task { call, flow: Flow::Barrier, source: Stretch::EMPTY, target: Stretch::EMPTY };
        let ticket = self.transport.begin(0, task, Vec::new(), deadline, Location::caller())?;
        self.transport.wait(0, &ticket, deadline)?;
        let own = groups.iter().find(|group| group.contains(&self.transport.rank())).cloned();
        let is_in_one = own.is_some();
        let index = self.transport.add_group(own.unwrap_or_default());
        Ok(is_in_one.then(|| Self::new(Arc::clone(&self.transport), index)))
    }

    /// Carries out an operation, and waits until it is done.
    ///
    /// # Errors
    /// [`CommError`].
    #[track_caller]
    pub fn run(
        &self,
        collective: &mut Collective<Source<'_>, Target<'_>>,
        deadline: Deadline,
    ) -> Result<(), CommError> {
        let task = self.task(collective)?;
        collective.hand_over(task.call.kind);
        let begin = self.meter.as_ref().map(|meter| meter.begin(&task.call, self.size));
        let ticket = self.transport.begin(self.index, task, Vec::new(), deadline, Location::caller())?;
        self.transport.wait(self.index, &ticket, deadline)?;
        if let (Some(meter), Some(begin)) = (&self.meter, begin) {
            meter.waited(begin);
        }
        Ok(())
    }

    /// Begins an operation on memory that is lent to it, after the events with which the loans begin. It goes on whenever this rank is in a call of any of its groups. The
    /// deadline is for the beginning, which waits only if many operations are under way.
    ///
    /// # Errors
    /// [`CommError`].
    #[track_caller]
    pub fn start(
        &self,
        mut collective: Collective<Lent, Lent>,
        deadline: Deadline,
    ) -> Result<Pending, CommError> {
        let task = self.task(&collective)?;
        collective.hand_over(task.call.kind);
        let memory = collective.into_memory();
        let is_sent_beside_work = task.call.kind != Kind::Receive && self.is_in_background();
        let begin = self.meter.as_ref().map(|meter| meter.begin(&task.call, self.size));
        let ticket = self.transport.begin(self.index, task, memory, deadline, Location::caller())?;
        if let (Some(meter), Some(begin)) = (&self.meter, begin) {
            meter.waited(begin);
        }
        let (transport, meter) = (Arc::clone(&self.transport), self.meter.clone());
        let sent = begin.filter(|_| is_sent_beside_work);
        Ok(Pending { transport, group: self.index, ticket, meter, sent })
    }

    fn task<I, O>(&self, collective: &Collective<I, O>) -> Result<Task, CommError>
    where
        for<'a> Stretch: From<&'a I> + From<&'a O>,
    {
        let mut task = Task::new(collective, self.rank, self.size)
            .map_err(|(call, problem)| self.misuse(self.index, call, problem))?;
        if task.call.kind == Kind::AllReduce {
            task.call.detail = self.algorithm.detail();
        }
        Ok(task)
    }

    /// Ends the run because of a call that cannot be right.
    fn misuse(&self, group: usize, call: Call, problem: Problem) -> CommError {
        let name = transport::name(group, &self.transport.members(group));
        let occasion = Occasion { call, sequence: self.transport.begun(group), group: name };
        self.transport.fail(CommError::Misuse { rank: self.transport.rank(), problem, occasion })
    }

    /// Carries on with what was started, in all groups, as far as it goes without waiting.
    ///
    /// # Errors
    /// [`CommError`].
    pub fn progress(&self) -> Result<(), CommError> {
        let begin = self.meter.as_ref().map(|_| Instant::now());
        self.transport.progress()?;
        if let (Some(meter), Some(begin)) = (&self.meter, begin) {
            meter.waited(begin);
        }
        Ok(())
    }

    /// Ends the run on all ranks: their calls fail with [`CommError::Stopped`].
    pub fn stop(&self) {
        self.transport.fail(CommError::Stopped { by: Some(self.transport.rank()) });
    }

    /// Ends the processes of all ranks with exit code `code`, where nobody else would: with MPI, which cannot go on after a
    /// failure. To be called after that was told; returns where the ranks end by themselves.
    pub fn abort(&self, code: i32) {
        self.transport.abort(code);
    }

    /// What a rank of the world called last, oldest first; also if it is dead.
    pub fn recorded(&self, rank: usize) -> Vec<Recorded> {
        self.transport.recorded(rank)
    }

    /// Waits until all ranks have called it.
    ///
    /// # Errors
    /// [`CommError`], as all that follow.
    #[track_caller]
    pub fn barrier(&self, deadline: Deadline) -> Result<(), CommError> {
        self.run(&mut Collective::Barrier, deadline)
    }

    /// Replaces `data` by the root's.
    ///
    /// # Errors
    /// [`CommError`].
    #[track_caller]
    pub fn broadcast<'a>(
        &self,
        data: impl Into<Target<'a>>,
        root: usize,
        deadline: Deadline,
    ) -> Result<(), CommError> {
        self.run(&mut Collective::Broadcast { data: data.into(), root }, deadline)
    }

    /// Replaces the root's `data` by the reduction of all ranks'.
    ///
    /// # Errors
    /// [`CommError`].
    #[track_caller]
    pub fn reduce<'a>(
        &self,
        data: impl Into<Target<'a>>,
        op: ReduceOp,
        root: usize,
        deadline: Deadline,
    ) -> Result<(), CommError> {
        self.run(&mut Collective::Reduce { data: data.into(), op, root }, deadline)
    }

    /// Replaces `data` by the reduction of all ranks'.
    ///
    /// # Errors
    /// [`CommError`].
    #[track_caller]
    pub fn all_reduce<'a>(
        &self,
        data: impl Into<Target<'a>>,
        op: ReduceOp,
        deadline: Deadline,
    ) -> Result<(), CommError> {
        self.run(&mut Collective::AllReduce { data: data.into(), op }, deadline)
    }

    /// Writes the own one of equal blocks of the reduction of all ranks' `input`.
    ///
    /// # Errors
    /// [`CommError`].
    #[track_caller]
    pub fn reduce_scatter<'a>(
        &self,
        input: impl Into<Source<'a>>,
        output: impl Into<Target<'a>>,
        op: ReduceOp,
        deadline: Deadline,
    ) -> Result<(), CommError> {
        let (input, output) = (input.into(), output.into());
        self.run(&mut Collective::ReduceScatter { input, output, op, counts: None }, deadline)
    }

    /// Writes all ranks' `input`, of one length, one after the other.
    ///
    /// # Errors
    /// [`CommError`].
    #[track_caller]
    pub fn all_gather<'a>(
        &self,
        input: impl Into<Source<'a>>,
        output: impl Into<Target<'a>>,
        deadline: Deadline,
    ) -> Result<(), CommError> {
        let (input, output) = (input.into(), output.into());
        self.run(&mut Collective::AllGather { input, output, counts: None }, deadline)
    }

    /// Sends one of equal blocks of `input` to each rank, and writes what they sent in the order of the senders.
    ///
    /// # Errors
    /// [`CommError`].
    #[track_caller]
    pub fn all_to_all<'a>(
        &self,
        input: impl Into<Source<'a>>,
        output: impl Into<Target<'a>>,
        deadline: Deadline,
    ) -> Result<(), CommError> {
        let (input, output) = (input.into(), output.into());
        self.run(&mut Collective::AllToAll { input, output, counts: None }, deadline)
    }

    /// Sends `input` to rank `to` of the group, which calls [`Group::receive`].
    ///
    /// # Errors
    /// [`CommError`].
    #[track_caller]
    pub fn send<'a>(
        &self,
        input: impl Into<Source<'a>>,
        to: usize,
        deadline: Deadline,
    ) -> Result<(), CommError> {
        self.run(&mut Collective::Send { input: input.into(), to }, deadline)
    }

    /// Replaces `output` by what rank `from` of the group sends.
    ///
    /// # Errors
    /// [`CommError`].
    #[track_caller]
    pub fn receive<'a>(
        &self,
        output: impl Into<Target<'a>>,
        from: usize,
        deadline: Deadline,
    ) -> Result<(), CommError> {
        self.run(&mut Collective::Receive { output: output.into(), from }, deadline)
    }
}

/// An operation under way. Dropped, it goes on all the same.
#[derive(Debug)]
#[must_use = "the operation is not known to be done before it has been waited for"]
pub struct Pending {
    transport: Arc<dyn Transport>,
    group: usize,
    ticket: Arc<Ticket>,
    meter: Option<Arc<Meter>>,
    /// When it began, for the meter, if it goes on beside this rank's work. What another rank sends may not have begun there.
    sent: Option<Instant>,
}

impl Pending {
    /// Carries on as far as it goes without waiting, and says whether the operation is done.
    ///
    /// # Errors
    /// [`CommError`].
    pub fn is_done(&self) -> Result<bool, CommError> {
        self.transport.progress()?;
        Ok(self.ticket.is_complete())
    }

    /// Waits until it is done. Returns what was lent, inputs first, and when it was done.
    ///
    /// # Errors
    /// [`CommError`].
    pub fn wait_with_time(self, deadline: Deadline) -> Result<(Vec<Lent>, Instant), CommError> {
        let begin = self.meter.as_ref().map(|_| Instant::now());
        self.transport.wait(self.group, &self.ticket, deadline)?;
        let done = self.ticket.completed_at().unwrap_or_else(Instant::now);
        if let (Some(meter), Some(begin)) = (&self.meter, begin) {
            if let Some(sent) = self.sent {
                meter.was_sent(sent, done);
            }
            meter.waited(begin);
        }
        Ok((self.ticket.take_memory(), done))
    }

    /// Waits until it is done. Returns what was lent, inputs first: what is called on that memory from now on finds the result.
    ///
    /// # Errors
    /// [`CommError`].
    pub fn wait(self, deadline: Deadline) -> Result<Vec<Lent>, CommError> {
        self.wait_with_time(deadline).map(|(memory, _)| memory)
    }
}
