//! Fault injection, to test that tests detect wrong communication. A transport carries out every operation and then corrupts
//! the results of one call site.
//!
//! All ranks run the same operations as without the fault, so no rank waits for an operation that another skips. Production
//! code does not depend on this module: a test wraps the group that it gives to ranks ([`Faults::put_into`]).

use std::{
    collections::HashMap,
    ops::Range,
    panic::Location,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use lockstep_plan::MemoryCategory;
use lockstep_tensor::{Arena, Workers};

use crate::{
    CommError, Deadline, Group, Kind, LentBuffer, NumberType,
    blocks::Blocks,
    exchange::{Exchange, Matrix},
    memory::MemoryRange,
    record::Recorded,
    task::{Flow, Receiver, Task},
    transport::{Ticket, Transport},
};

/// Call site of an operation, with one group. All ranks of the group call it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Site {
    /// Path of the source file.
    pub file: String,
    /// Line in the source file.
    pub line: u32,
    /// Kind of the operation.
    pub kind: Kind,
    /// Element type of the data.
    pub number: NumberType,
    /// Index of the partition of the world that created the group.
    pub group: usize,
    /// Sender of a receive, as a rank of the group; `None` for other kinds.
    pub sender: Option<usize>,
}

/// Corruption of a result. The local contribution is the data that this rank gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Damage {
    /// The local contribution replaces those of the other ranks; a reduction returns the local data alone.
    OwnOnly,
    /// The other ranks' contributions are zeros; for a reduction, the whole result is.
    Zeros,
    /// The other ranks' contributions are missing: the target keeps its earlier contents, as if it were read too early.
    Late,
    /// [`Damage::Late`], except for the first operation on the same input.
    LateAgain,
    /// Later operations on the same input return the result of the first.
    Repeated,
    /// The local contribution is zeros.
    OwnLost,
}

impl Damage {
    /// Returns all corruptions that change the result of an operation. Those of repeated operations are included if
    /// `is_repeated`.
    pub fn of(kind: Kind, is_repeated: bool) -> Vec<Self> {
        let all: &[Self] = match kind {
            Kind::Barrier | Kind::Partition | Kind::Send => return Vec::new(),
            Kind::AllReduce | Kind::Reduce => &[Self::OwnOnly, Self::Zeros],
            Kind::ReduceScatter => &[Self::OwnOnly, Self::Zeros],
            Kind::AllGather => &[Self::OwnOnly, Self::Late, Self::OwnLost],
            Kind::AllToAll => &[Self::OwnOnly, Self::Late],
            Kind::Broadcast | Kind::Scatter | Kind::Gather | Kind::Receive => &[Self::Zeros, Self::Late],
        };
        let again: &[Self] =
            if is_repeated && kind == Kind::AllGather { &[Self::LateAgain, Self::Repeated] } else { &[] };
        [all, again].concat()
    }
}

/// A call site that was used.
#[derive(Debug, Clone)]
pub struct Seen {
    /// The call site.
    pub site: Site,
    /// World ranks of the group, as the first call had it.
    pub ranks: Vec<usize>,
    /// True if a rank has called it again with the same input.
    pub is_repeated: bool,
}

/// At most one fault in the communication of a world's ranks, and the call sites that they used.
#[derive(Debug, Default)]
pub struct Faults {
    fault: Option<(Site, Damage)>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    seen: Vec<Seen>,
    /// First result of each input of a rank.
    first: HashMap<Input, Vec<u8>>,
}

/// Rank, call site, and address and length of the input.
type Input = (usize, Site, usize, usize);

impl Faults {
    /// Returns an instance without a fault, which only records call sites.
    pub fn none() -> Arc<Self> {
        Arc::default()
    }

    /// Returns an instance that corrupts the results of one site.
    pub fn at(site: Site, damage: Damage) -> Arc<Self> {
        Arc::new(Self { fault: Some((site, damage)), ..Self::default() })
    }

    /// Injects the fault into the group of all ranks, and into all groups that are created from it.
    pub fn put_into(self: &Arc<Self>, group: Group) -> Group {
        let (faults, mut faulty) = (Arc::clone(self), group);
        let inner = faulty.transport;
        faulty.transport = Arc::new(FaultyTransport { inner, faults, under_way: Mutex::default() });
        faulty
    }

    /// Returns the call sites that were used, sorted.
    pub fn seen(&self) -> Vec<Seen> {
        let mut seen = self.state().seen.clone();
        seen.sort_by_key(|Seen { site, .. }| {
            (site.file.clone(), site.line, site.kind.name(), site.group, site.sender)
        });
        seen
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, input: &Input, ranks: Vec<usize>) {
        let mut state = self.state();
        let is_repeated = state.first.insert(input.clone(), Vec::new()).is_some();
        match state.seen.iter_mut().find(|seen| seen.site == input.1) {
            Some(seen) => seen.is_repeated |= is_repeated,
            None => state.seen.push(Seen { site: input.1.clone(), ranks, is_repeated }),
        }
    }
}

/// Transport that delegates to another one and corrupts results.
#[derive(Debug)]
struct FaultyTransport {
    inner: Arc<dyn Transport>,
    faults: Arc<Faults>,
    under_way: Mutex<Vec<(Arc<Ticket>, Spoiler)>>,
}

/// Planned corruption of one result.
#[derive(Debug)]
struct Spoiler {
    input: Input,
    damage: Damage,
    target: MemoryRange,
    /// Byte ranges of the target that other ranks contribute to.
    others: Vec<Range<usize>>,
    /// Bytes that the local contribution would put there; as long as the target, or empty.
    own: Vec<u8>,
    before: Vec<u8>,
}

impl Spoiler {
    /// Plans the corruption of an operation of member `member` of a group, before it begins.
    fn new(input: Input, damage: Damage, task: &Task, (member, ranks): (usize, usize)) -> Self {
        let (before, source) = (read(&task.target), read(&task.source));
        let whole = std::iter::once(0..before.len()).collect();
        let but_own = |blocks: &Blocks| -> Vec<_> {
            (0..ranks).filter(|rank| *rank != member).map(|rank| blocks.range(rank)).collect()
        };
        let (others, own) = match &task.flow {
            Flow::Barrier | Flow::Send { .. } => (Vec::new(), Vec::new()),
            Flow::Reduction { receiver: Receiver::One(root), .. } if *root != member => {
                (Vec::new(), Vec::new())
            }
            Flow::Reduction { receiver: Receiver::Owner, blocks, .. } => {
                let own = blocks.scaled(task.source.number.size_bytes()).range(member);
                (whole, source[own].to_vec())
            }
            Flow::Reduction { .. } => (whole, source),
            Flow::Exchange(Exchange::Broadcast { root, .. }) if *root == member => (Vec::new(), Vec::new()),
            Flow::Exchange(Exchange::AllGather(blocks)) => {
                let block = |rank| source.iter().copied().cycle().take(blocks.range(rank).len());
                (but_own(blocks), (0..ranks).flat_map(block).collect())
            }
            Flow::Exchange(Exchange::AllToAll(Matrix::Even { bytes, .. })) => {
                (Blocks::even(bytes * ranks, ranks).iter().flat_map(but_own).collect(), source)
            }
            Flow::Unknown { receives, .. } => {
                (Blocks::of_lengths(receives).iter().flat_map(but_own).collect(), Vec::new())
            }
            Flow::Exchange(Exchange::Gather { root, blocks }) if *root == member => {
                (but_own(blocks), Vec::new())
            }
            Flow::Exchange(_) | Flow::Receive { .. } => (whole, Vec::new()),
        };
        Self { input, damage, target: task.target, others, own, before }
    }

    /// Returns the corrupted form of `came`. `first` is the first result of the same input, if there was one.
    fn spoil(&self, came: &[u8], first: Option<&[u8]>) -> Vec<u8> {
        let zeros = vec![0; came.len()];
        let (mut spoiled, others) = match self.damage {
            Damage::OwnOnly => (came.to_vec(), &self.own),
            Damage::Zeros => (came.to_vec(), &zeros),
            Damage::Late => (came.to_vec(), &self.before),
            Damage::LateAgain | Damage::Repeated if first.is_none() => return came.to_vec(),
            Damage::LateAgain => (came.to_vec(), &self.before),
            Damage::Repeated => return first.unwrap_or(came).to_vec(),
            Damage::OwnLost => (zeros.clone(), &came.to_vec()),
        };
        for range in self.others.iter().cloned() {
            // Where the local contribution does not cover another rank's range, zeros take its place.
            let from = others.get(range.clone()).unwrap_or(&zeros[range.clone()]);
            spoiled[range].copy_from_slice(from);
        }
        spoiled
    }
}

fn read(range: &MemoryRange) -> Vec<u8> {
    // SAFETY: an operation's memory belongs to the caller before it begins and after it completes; no other code writes to it.
    unsafe { std::slice::from_raw_parts(range.pointer, range.bytes()) }.to_vec()
}

impl Transport for FaultyTransport {
    fn begin(
        &self,
        group: usize,
        task: Task,
        memory: Vec<LentBuffer>,
        deadline: Deadline,
        caller: &Location<'_>,
    ) -> Result<Arc<Ticket>, CommError> {
        let (rank, ranks, kind) = (self.inner.rank(), self.inner.members(group), task.call.kind);
        let sender = task.call.root.filter(|_| kind == Kind::Receive);
        let (file, line, number) = (caller.file().to_owned(), caller.line(), task.call.number);
        let site = Site { file, line, kind, number, group, sender };
        let input = (rank, site, task.source.pointer as usize, task.source.elements);
        let fault = self.faults.fault.as_ref().filter(|(site, _)| *site == input.1);
        let spoiler = fault.map(|(_, damage)| {
            let member = ranks.iter().position(|member| *member == rank).unwrap_or(0);
            Spoiler::new(input.clone(), *damage, &task, (member, ranks.len()))
        });
        let ticket = self.inner.begin(group, task, memory, deadline, caller)?;
        match spoiler {
            Some(spoiler) => self.under_way().push((Arc::clone(&ticket), spoiler)),
            None => self.faults.note(&input, ranks),
        }
        Ok(ticket)
    }

    fn wait(&self, group: usize, ticket: &Arc<Ticket>, deadline: Deadline) -> Result<(), CommError> {
        self.inner.wait(group, ticket, deadline)?;
        let found = {
            let mut under_way = self.under_way();
            let index = under_way.iter().position(|(other, _)| Arc::ptr_eq(ticket, other));
            index.map(|index| under_way.swap_remove(index).1)
        };
        let Some(spoiler) = found else { return Ok(()) };
        let came = read(&spoiler.target);
        let mut state = self.faults.state();
        let spoiled = spoiler.spoil(&came, state.first.get(&spoiler.input).map(Vec::as_slice));
        state.first.entry(spoiler.input).or_insert_with(|| came.clone());
        // SAFETY: the operation is complete, so its memory belongs to the caller again, which waits here.
        let target = unsafe { std::slice::from_raw_parts_mut(spoiler.target.pointer, spoiled.len()) };
        target.copy_from_slice(&spoiled);
        Ok(())
    }

    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn members(&self, group: usize) -> Vec<usize> {
        self.inner.members(group)
    }

    fn groups(&self) -> usize {
        self.inner.groups()
    }

    fn add_group(&self, ranks: Vec<usize>) -> usize {
        self.inner.add_group(ranks)
    }

    fn begun(&self, group: usize) -> u32 {
        self.inner.begun(group)
    }

    fn progress(&self) -> Result<(), CommError> {
        self.inner.progress()
    }

    fn fail(&self, error: CommError) -> CommError {
        self.inner.fail(error)
    }

    fn is_in_background(&self) -> bool {
        self.inner.is_in_background()
    }

    fn is_near(&self, rank: usize) -> bool {
        self.inner.is_near(rank)
    }

    fn abort(&self, code: i32) {
        self.inner.abort(code);
    }

    fn arena(&self, categories: &[MemoryCategory]) -> Arena {
        self.inner.arena(categories)
    }

    fn set_workers(&self, workers: Workers) {
        self.inner.set_workers(workers);
    }

    fn recorded(&self, rank: usize) -> Vec<Recorded> {
        self.inner.recorded(rank)
    }
}

impl FaultyTransport {
    fn under_way(&self) -> MutexGuard<'_, Vec<(Arc<Ticket>, Spoiler)>> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::{thread, time::Duration};

    use super::*;
    use crate::{Collective, ReduceOp, Source, Target, World, WorldOptions};

    /// Returns the results of two such operations on each of two ranks, which contribute 1 and 2.
    fn read_by_ranks(kind: Kind, damage: Option<Damage>) -> Vec<[Vec<f32>; 2]> {
        let run = |faults: &Arc<Faults>| {
            let options = WorldOptions { arena_bytes: 1 << 20, ..WorldOptions::default() };
            let groups = World::in_process(2, options).unwrap();
            let of_rank = |group: Group| {
                let group = faults.put_into(group);
                let (own, mut read) = (group.rank() as f32 + 1.0, vec![9.0_f32; 4]);
                let mut data = vec![own; if kind == Kind::AllGather { 2 } else { 4 }];
                [0.0, 10.0].map(|more| {
                    data.iter_mut().for_each(|element| *element = own + more);
                    operation(&group, kind, &mut data, &mut read);
                    if kind == Kind::AllReduce { data.clone() } else { read.clone() }
                })
            };
            thread::scope(|scope| {
                let threads: Vec<_> =
                    groups.into_iter().map(|group| scope.spawn(|| of_rank(group))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
            })
        };
        let sound = Faults::none();
        let read = run(&sound);
        let Some(damage) = damage else { return read };
        let seen = sound.seen();
        assert_eq!(seen.len(), 1, "{seen:?}");
        assert!(seen[0].is_repeated && seen[0].ranks == [0, 1]);
        run(&Faults::at(seen[0].site.clone(), damage))
    }

    fn operation(group: &Group, kind: Kind, data: &mut [f32], read: &mut [f32]) {
        let mut collective = match kind {
            Kind::AllReduce => Collective::AllReduce { data: Target::from(data), op: ReduceOp::Sum },
            Kind::AllGather => {
                Collective::AllGather { input: Source::from(&*data), output: read.into(), counts: None }
            }
            _ => Collective::AllToAll { input: Source::from(&*data), output: read.into(), counts: None },
        };
        group.run(&mut collective, Deadline::after(Duration::from_secs(20))).unwrap();
    }

    #[test]
    fn without_a_fault_nothing_changes() {
        assert_eq!(
            read_by_ranks(Kind::AllReduce, None),
            [[vec![3.0; 4], vec![23.0; 4]], [vec![3.0; 4], vec![23.0; 4]]]
        );
        let gathered = [vec![1.0, 1.0, 2.0, 2.0], vec![11.0, 11.0, 12.0, 12.0]];
        assert_eq!(read_by_ranks(Kind::AllGather, None), [gathered.clone(), gathered]);
    }

    #[test]
    fn each_damage_leaves_what_it_says() {
        let table = [
            (Kind::AllReduce, Damage::OwnOnly, [vec![1.0; 4], vec![11.0; 4]]),
            (Kind::AllReduce, Damage::Zeros, [vec![0.0; 4], vec![0.0; 4]]),
            (Kind::AllGather, Damage::OwnOnly, [vec![1.0; 4], vec![11.0; 4]]),
            (Kind::AllGather, Damage::Zeros, [vec![1.0, 1.0, 0.0, 0.0], vec![11.0, 11.0, 0.0, 0.0]]),
            (Kind::AllGather, Damage::Late, [vec![1.0, 1.0, 9.0, 9.0], vec![11.0, 11.0, 9.0, 9.0]]),
            (Kind::AllGather, Damage::LateAgain, [vec![1.0, 1.0, 2.0, 2.0], vec![11.0, 11.0, 2.0, 2.0]]),
            (Kind::AllGather, Damage::Repeated, [vec![1.0, 1.0, 2.0, 2.0], vec![1.0, 1.0, 2.0, 2.0]]),
            (Kind::AllGather, Damage::OwnLost, [vec![0.0, 0.0, 2.0, 2.0], vec![0.0, 0.0, 12.0, 12.0]]),
            (Kind::AllToAll, Damage::OwnOnly, [vec![1.0; 4], vec![11.0; 4]]),
            (Kind::AllToAll, Damage::Late, [vec![1.0, 1.0, 9.0, 9.0], vec![11.0, 11.0, 9.0, 9.0]]),
        ];
        for (kind, damage, of_first) in table {
            assert_eq!(read_by_ranks(kind, Some(damage))[0], of_first, "{damage:?} of {kind:?}");
        }
    }
}
