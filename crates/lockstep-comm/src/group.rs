//! The process group: the handle through which the upper layers communicate with other ranks.
//!
//! All ranks of a group call the same operations in the same order. Each call takes a deadline. An error ends the run on all
//! ranks with the same message, because the order of operations is lost; no rank is left waiting. The contents of the output
//! buffers are unspecified after an error.

use std::{panic::Location, sync::Arc, time::Instant};

use lockstep_plan::MemoryCategory;
use lockstep_tensor::{Arena, Workers};

use crate::{
    Algorithm, Call, Collective, CommError, Deadline, GroupName, Kind, LentBuffer, MAX_PARTITIONS,
    OperationContext, Problem, ReduceOp, Source, Target, call,
    memory::MemoryRange,
    meter::Meter,
    record::Recorded,
    task::{Flow, Task},
    transport::{self, Ticket, Transport},
};

/// An ordered subset of the world's ranks. Clones share one group.
#[derive(Debug, Clone)]
pub struct Group {
    pub(crate) transport: Arc<dyn Transport>,
    /// Index of the partition that created this group; 0 is the world.
    index: usize,
    rank: usize,
    size: usize,
    algorithm: Algorithm,
    meter: Option<Arc<Meter>>,
}

impl Group {
    /// Creates the group of all ranks.
    ///
    /// # Panics
    /// If the transport is not a member of its first group.
    pub fn world(transport: impl Transport + 'static) -> Self {
        Self::new(Arc::new(transport), 0)
    }

    fn new(transport: Arc<dyn Transport>, index: usize) -> Self {
        let ranks = transport.members(index);
        let rank = ranks.iter().position(|rank| *rank == transport.rank());
        let rank = rank.expect("a group's handle is only given to its members");
        Self { transport, index, rank, size: ranks.len(), algorithm: Algorithm::Tree, meter: None }
    }

    /// Returns the rank of this process in the group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks in the group.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns the group's name for messages.
    pub fn name(&self) -> GroupName {
        transport::name(self.index, &self.ranks())
    }

    /// Returns the world ranks of the members, in group order.
    pub fn ranks(&self) -> Vec<usize> {
        self.transport.members(self.index)
    }

    /// Returns this group with `algorithm` for its all-reduces over a network. All ranks must choose the same one.
    #[must_use]
    pub fn with_algorithm(self, algorithm: Algorithm) -> Self {
        Self { algorithm, ..self }
    }

    /// Returns this group with `meter` counting its operations.
    #[must_use]
    pub fn with_meter(self, meter: Arc<Meter>) -> Self {
        Self { meter: Some(meter), ..self }
    }

    /// Returns an arena whose buffers of `categories` are reachable by the other ranks of this machine, which saves copies.
    pub fn arena(&self, categories: &[MemoryCategory]) -> Arena {
        self.transport.arena(categories)
    }

    /// Returns true if started operations progress while this rank computes, false if they progress only within calls.
    pub fn is_in_background(&self) -> bool {
        self.transport.is_in_background()
    }

    /// Returns true if all members are known to be on one machine. All members get the same answer.
    pub fn is_on_one_machine(&self) -> bool {
        self.ranks().into_iter().all(|rank| self.transport.is_near(rank))
    }

    /// Lets the rank's compute threads take part in the operations of all its groups. They do so while this rank is in a call.
    pub fn set_workers(&self, workers: Workers) {
        self.transport.set_workers(workers);
    }

    /// Splits the world's ranks into `groups` and returns the group that this rank is in; `None` if it is in none. All ranks of
    /// the world must call it with the same lists, through any of their groups.
    ///
    /// # Errors
    /// If a rank is listed twice or does not exist ([`Problem::Partition`]), if there are too many
    /// partitions, or if the lists differ between ranks; otherwise as [`Group::run`].
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
        // All ranks agree on the groups before any rank uses them.
        let task = Task { call, flow: Flow::Barrier, source: MemoryRange::EMPTY, target: MemoryRange::EMPTY };
        let ticket = self.transport.begin(0, task, Vec::new(), deadline, Location::caller())?;
        self.transport.wait(0, &ticket, deadline)?;
        let own = groups.iter().find(|group| group.contains(&self.transport.rank())).cloned();
        let is_in_one = own.is_some();
        let index = self.transport.add_group(own.unwrap_or_default());
        Ok(is_in_one.then(|| Self::new(Arc::clone(&self.transport), index)))
    }

    /// Carries out an operation and waits for its completion.
    ///
    /// # Errors
    /// If the call is invalid, if ranks called different operations, if a rank is lost, if `deadline` passes, or if the run has
    /// ended already.
    #[track_caller]
    pub fn run(
        &self,
        collective: &mut Collective<Source<'_>, Target<'_>>,
        deadline: Deadline,
    ) -> Result<(), CommError> {
        let task = self.task(collective)?;
        collective.hand_over(task.call.kind);
        let (caller, meter) = (Location::caller(), self.meter.as_deref());
        meter.inspect(|meter| meter.count(&task.call, self.size));
        metered(meter, || {
            let ticket = self.transport.begin(self.index, task, Vec::new(), deadline, caller)?;
            self.transport.wait(self.index, &ticket, deadline)
        })
    }

    /// Starts an operation on lent memory, after the events with which the loans begin. The operation progresses at least
    /// while this rank is in a call of any of its groups. `deadline` bounds the start, which waits only if too many operations
    /// are in flight.
    ///
    /// # Errors
    /// As [`Group::run`].
    #[track_caller]
    pub fn start(
        &self,
        mut collective: Collective<LentBuffer, LentBuffer>,
        deadline: Deadline,
    ) -> Result<Pending, CommError> {
        let task = self.task(&collective)?;
        collective.hand_over(task.call.kind);
        let memory = collective.into_memory();
        let is_sent_beside_work = task.call.kind != Kind::Receive && self.is_in_background();
        let (caller, meter) = (Location::caller(), self.meter.clone());
        meter.as_ref().inspect(|meter| meter.count(&task.call, self.size));
        let sent = meter.as_ref().filter(|_| is_sent_beside_work).map(|_| Instant::now());
        let begin = || self.transport.begin(self.index, task, memory, deadline, caller);
        let ticket = metered(meter.as_deref(), begin)?;
        let transport = Arc::clone(&self.transport);
        Ok(Pending { transport, group: self.index, ticket, meter, sent })
    }

    fn task<I, O>(&self, collective: &Collective<I, O>) -> Result<Task, CommError>
    where
        for<'a> MemoryRange: From<&'a I> + From<&'a O>,
    {
        let mut task = Task::new(collective, self.rank, self.size)
            .map_err(|(call, problem)| self.misuse(self.index, call, problem))?;
        if task.call.kind == Kind::AllReduce {
            task.call.detail = self.algorithm.detail();
        }
        Ok(task)
    }

    /// Ends the run because of an invalid call.
    fn misuse(&self, group: usize, call: Call, problem: Problem) -> CommError {
        let name = transport::name(group, &self.transport.members(group));
        let context = OperationContext { call, sequence: self.transport.begun(group), group: name };
        self.transport.fail(CommError::Misuse { rank: self.transport.rank(), problem, context })
    }

    /// Advances started operations of all groups as far as they go without waiting.
    ///
    /// # Errors
    /// If the run has ended, or an operation in flight fails.
    pub fn progress(&self) -> Result<(), CommError> {
        metered(self.meter.as_deref(), || self.transport.progress())
    }

    /// Ends the run on all ranks: their calls fail with [`CommError::Stopped`].
    pub fn stop(&self) {
        self.transport.fail(CommError::Stopped { by: Some(self.transport.rank()) });
    }

    /// Ends the processes of all ranks with exit code `code` where nothing else would: under MPI, which cannot go on after a
    /// failure. Report the failure first. Returns on other transports, whose ranks end by themselves.
    pub fn abort(&self, code: i32) {
        self.transport.abort(code);
    }

    /// Returns the last operations that a world rank called, oldest first; also for a dead rank.
    pub fn recorded(&self, rank: usize) -> Vec<Recorded> {
        self.transport.recorded(rank)
    }

    /// Waits until all ranks of the group have called it.
    ///
    /// # Errors
    /// As [`Group::run`].
    #[track_caller]
    pub fn barrier(&self, deadline: Deadline) -> Result<(), CommError> {
        self.run(&mut Collective::Barrier, deadline)
    }

    /// Replaces `data` on every rank with the root's `data`.
    ///
    /// # Errors
    /// As [`Group::run`].
    #[track_caller]
    pub fn broadcast<'a>(
        &self,
        data: impl Into<Target<'a>>,
        root: usize,
        deadline: Deadline,
    ) -> Result<(), CommError> {
        self.run(&mut Collective::Broadcast { data: data.into(), root }, deadline)
    }

    /// Replaces the root's `data` with the reduction of all ranks' `data`.
    ///
    /// # Errors
    /// As [`Group::run`].
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

    /// Replaces `data` on every rank with the reduction of all ranks' `data`.
    ///
    /// # Errors
    /// As [`Group::run`].
    #[track_caller]
    pub fn all_reduce<'a>(
        &self,
        data: impl Into<Target<'a>>,
        op: ReduceOp,
        deadline: Deadline,
    ) -> Result<(), CommError> {
        self.run(&mut Collective::AllReduce { data: data.into(), op }, deadline)
    }

    /// Reduces all ranks' `input` and writes this rank's block of the result to `output`. The blocks are of equal length.
    ///
    /// # Errors
    /// As [`Group::run`].
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

    /// Writes all ranks' `input`, of equal length, to `output` in rank order.
    ///
    /// # Errors
    /// As [`Group::run`].
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

    /// Sends one of the equal blocks of `input` to each rank, and writes the received blocks to `output` in sender order.
    ///
    /// # Errors
    /// As [`Group::run`].
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

    /// Sends `input` to rank `to` of the group, which must call [`Group::receive`].
    ///
    /// # Errors
    /// As [`Group::run`].
    #[track_caller]
    pub fn send<'a>(
        &self,
        input: impl Into<Source<'a>>,
        to: usize,
        deadline: Deadline,
    ) -> Result<(), CommError> {
        self.run(&mut Collective::Send { input: input.into(), to }, deadline)
    }

    /// Replaces `output` with the data that rank `from` of the group sends.
    ///
    /// # Errors
    /// As [`Group::run`].
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

/// Carries out `work`, and counts its time as exposed unless it fails.
fn metered<R>(meter: Option<&Meter>, work: impl FnOnce() -> Result<R, CommError>) -> Result<R, CommError> {
    let begin = meter.map(|_| Instant::now());
    let result = work()?;
    if let (Some(meter), Some(begin)) = (meter, begin) {
        meter.waited(begin);
    }
    Ok(result)
}

/// Handle of an operation in flight. The operation goes on if the handle is dropped.
#[derive(Debug)]
#[must_use = "the operation is not known to be done before it has been waited for"]
pub struct Pending {
    transport: Arc<dyn Transport>,
    group: usize,
    ticket: Arc<Ticket>,
    meter: Option<Arc<Meter>>,
    /// Start time, for the meter; `None` unless the operation progresses in the background. A receive has none either: its
    /// sender may start later.
    sent: Option<Instant>,
}

impl Pending {
    /// Advances operations as far as they go without waiting, and returns true if this one is complete.
    ///
    /// # Errors
    /// If the run has ended, or an operation in flight fails.
    pub fn is_done(&self) -> Result<bool, CommError> {
        self.transport.progress()?;
        Ok(self.ticket.is_complete())
    }

    /// Waits for completion. Returns the lent memory, inputs first, and the time of completion.
    ///
    /// # Errors
    /// As [`Group::run`].
    pub fn wait_with_time(self, deadline: Deadline) -> Result<(Vec<LentBuffer>, Instant), CommError> {
        let meter = self.meter.as_deref();
        metered(meter, || self.transport.wait(self.group, &self.ticket, deadline))?;
        let done = self.ticket.completed_at().unwrap_or_else(Instant::now);
        if let (Some(meter), Some(sent)) = (meter, self.sent) {
            meter.was_sent(sent, done);
        }
        Ok((self.ticket.take_memory(), done))
    }

    /// Waits for completion. Returns the lent memory, inputs first; operations issued on that memory from now on see
    /// the result.
    ///
    /// # Errors
    /// As [`Group::run`].
    pub fn wait(self, deadline: Deadline) -> Result<Vec<LentBuffer>, CommError> {
        self.wait_with_time(deadline).map(|(memory, _)| memory)
    }
}
