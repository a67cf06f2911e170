//! All operations of a rank in flight, and announcements of other ranks that have arrived before the operation started here. It
//! has no sockets and does not block.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use super::{
    frame::{Channel, ENDING_BYTES, Header, Key, Kind},
    hierarchical::UniformNodes,
    members::Members,
    operation::{self, Announcement, Awaited, Movement, Running},
    send_queues::SendQueues,
    stream::{Room, Sink},
    tree::{FLAT_MEMBERS, check_announcer},
};
use crate::{
    Call, CommError, MAX_PARTITIONS, Malformed,
    error::ERROR_WORDS,
    recorder::Recorder,
    sequence::{Lane, SequenceNumbers},
    task::Task,
    transport::{self, Ticket},
};

/// Maximum number of a group's operations in flight on a rank.
const MAX_IN_FLIGHT: usize = 256;
/// Maximum number of messages to one rank in flight.
const MAX_SENDS: usize = 4;
/// Maximum number of announcements of one rank in one channel that may wait: more than those two permit.
const MAX_ANNOUNCEMENTS: usize = 2 * MAX_IN_FLIGHT;

/// A rank's operations and outgoing frames.
#[derive(Debug)]
pub(crate) struct OperationTable {
    pub(crate) rank: usize,
    /// Number of ranks in the world.
    ranks: usize,
    pub(crate) groups: Vec<Option<Operations>>,
    pub(crate) queues: SendQueues,
    pub(crate) recorder: Recorder,
    /// Shared-memory transport of this machine, if all machines have equally many ranks.
    pub(crate) nodes: Option<UniformNodes>,
    /// Announcements of operations that have not started here, by group, rank and channel.
    announcements: HashMap<(u32, usize, Channel), VecDeque<(u32, Announcement)>>,
    /// Messages of other ranks about themselves and about the run.
    pub(crate) messages: VecDeque<(usize, RankMessage)>,
}

/// Message of a rank that belongs to no operation.
#[derive(Debug)]
pub(crate) enum RankMessage {
    Leaving { in_panic: bool },
    Ending(CommError),
}

/// Operations of one group.
#[derive(Debug)]
pub(crate) struct Operations {
    pub(crate) members: Members,
    pub(crate) numbers: SequenceNumbers,
    running: Vec<Running>,
}

impl Operations {
    fn new(index: usize, ranks: Vec<usize>, own: usize) -> Self {
        let name = transport::name(index, &ranks);
        let (numbers, running) = (SequenceNumbers::default(), Vec::new());
        Self { members: Members::new(name, ranks, own), numbers, running }
    }

    /// Returns the operations in flight between the same ranks, oldest first.
    fn on(&self, lane: Lane) -> impl Iterator<Item = &Running> {
        self.running.iter().filter(move |running| Lane::of(&running.task.flow) == lane)
    }

    /// Returns what the oldest operation between the same ranks waits for; that operation delays the start of further ones.
    pub(crate) fn oldest(&self, lane: Lane) -> Option<Awaited> {
        self.on(lane).next().map(|running| running.waits_for(&self.members))
    }

    /// Returns what the operation of a ticket waits for; `None` once it is complete.
    pub(crate) fn waits_for(&self, ticket: &Arc<Ticket>) -> Option<Awaited> {
        let running = self.running.iter().find(|running| Arc::ptr_eq(&running.ticket, ticket))?;
        Some(running.waits_for(&self.members))
    }
}

/// Returns the channel of a lane, as its operations are announced.
fn channel_of(lane: Lane) -> Channel {
    match lane {
        Lane::Collective => Channel::Collective,
        Lane::Send(_) => Channel::Send,
        Lane::Receive(_) => Channel::Receive,
    }
}

impl OperationTable {
    pub(crate) fn new(rank: usize, ranks: usize, recorder: Recorder) -> Self {
        let mut table = Self {
            rank,
            ranks,
            groups: Vec::new(),
            queues: SendQueues::default(),
            recorder,
            nodes: None,
            announcements: HashMap::new(),
            messages: VecDeque::new(),
        };
        table.add_group((0..ranks).collect());
        table
    }

    pub(crate) fn add_group(&mut self, ranks: Vec<usize>) -> usize {
        let index = self.groups.len();
        let own = ranks.iter().position(|rank| *rank == self.rank);
        let operations = own.map(|own| Operations::new(index, ranks, own));
        let members = operations.as_ref().map(|operations| &operations.members);
        // Announcements came before this rank knew who may make them.
        self.announcements.retain(|(group, from, channel), _| {
            let member = members.and_then(|members| Some((members, members.index_of(*from)?)));
            let may_announce = member.is_some_and(|(members, member)| {
                let is_flat = *channel != Channel::Collective || members.len() <= FLAT_MEMBERS;
                is_flat || check_announcer(members.own, member, 0).is_ok()
            });
            *group as usize != index || may_announce
        });
        self.groups.push(operations);
        index
    }

    pub(crate) fn group(&self, group: usize) -> &Operations {
        self.groups[group].as_ref().expect("a group's handle is only given to its members")
    }

    /// Returns true if an operation may start.
    pub(crate) fn has_room(&self, group: usize, task: &Task) -> bool {
        let lane = Lane::of(&task.flow);
        let most = if matches!(lane, Lane::Send(_)) { MAX_SENDS } else { MAX_IN_FLIGHT };
        self.group(group).on(lane).count() < most
    }

    /// Starts an operation: announces it to the other ranks, and takes their announcements that have arrived.
    pub(crate) fn begin(
        &mut self,
        group: usize,
        task: Task,
        ticket: Arc<Ticket>,
        caller: &std::panic::Location<'_>,
    ) {
        let operations = self.groups[group].as_mut().expect("a group's handle is only given to its members");
        let lane = Lane::of(&task.flow);
        let (channel, peer, sequence) = (channel_of(lane), lane.peer(), operations.numbers.start(lane));
        let key = Key { group: group as u32, channel, sequence };
        let members = &operations.members;
        let recorded = self.recorder.write(task.call, members.name, sequence, caller);
        let mut running = Running::new(key, peer, task, ticket, recorded, members.len());
        let data = match channel {
            Channel::Receive => Vec::new(),
            Channel::Send | Channel::Collective => Running::eager(&running.task),
        };
        if channel == Channel::Send && operation::is_small(&running.task, running.task.source.bytes()) {
            // Small data is copied; the receiver reports a mismatch.
            running.ticket.complete();
        }
        for member in running.announcers(members) {
            let rank = members.ranks[member];
            if running.is_flat {
                running.announce(rank, &data, &mut self.queues);
            }
            if let Some(waiting) = self.announcements.get_mut(&(key.group, rank, channel.turned()))
                && let Some(at) = waiting.iter().position(|(number, _)| *number == sequence)
            {
                let announcement = waiting.remove(at).map(|(_, announcement)| announcement);
                running.peers.entry(member).or_default().announcement = announcement;
            }
        }
        operations.running.push(running);
    }

    /// Advances all operations. Returns true if any completed.
    ///
    /// # Errors
    /// If ranks called different operations, or one sent data of the wrong length; this ends the run.
    pub(crate) fn advance(&mut self) -> Result<bool, CommError> {
        let Self { groups, queues, recorder, nodes, .. } = self;
        let mut has_completed = false;
        for (index, operations) in groups.iter_mut().enumerate() {
            let Some(Operations { members, running, .. }) = operations else { continue };
            // Only the group of all ranks has the same order of operations on all ranks of a machine.
            let mut nodes = nodes.as_mut().filter(|_| index == 0);
            let mut is_next = true;
            for operation in running.iter_mut() {
                if operation.start_if_agreed(members, queues, nodes.as_deref_mut())? {
                    recorder.stamp(operation.recorded, 0);
                }
                operation.name_missing(members, queues);
                let is_done = operation.advance(members, queues, nodes.as_deref_mut(), is_next);
                is_next &= operation.has_started_all_gather();
                if is_done {
                    recorder.stamp(operation.recorded, 1);
                    operation.ticket.complete();
                    operation.movement = Movement::Done;
                    has_completed = true;
                }
            }
            running.retain(|operation| !matches!(operation.movement, Movement::Done));
        }
        Ok(has_completed)
    }

    /// Returns true if an operation waits for members that must be named to others after a while.
    pub(crate) fn has_waiting_trees(&self) -> bool {
        let waits = |running: &Running| !running.is_flat && !running.is_agreed;
        self.groups.iter().flatten().any(|operations| operations.running.iter().any(waits))
    }

    /// Drops all operations.
    pub(crate) fn abandon(&mut self) {
        self.groups.iter_mut().flatten().for_each(|operations| operations.running.clear());
        self.queues.abandon();
    }

    /// Returns the operation that a frame from `rank` belongs to, and that rank's index in the group.
    fn find(&mut self, rank: usize, key: Key) -> Result<(&mut Running, &Members, usize), Malformed> {
        let group = self.groups.get_mut(key.group as usize).and_then(Option::as_mut);
        let Operations { members, running, .. } = group.ok_or(Malformed::Operation)?;
        let member = members.index_of(rank).ok_or(Malformed::Operation)?;
        let channel = key.channel.turned();
        let is_it = |running: &&mut Running| {
            running.key.channel == channel
                && running.key.sequence == key.sequence
                && running.peer.is_none_or(|peer| peer == member)
        };
        let running = running.iter_mut().find(is_it).ok_or(Malformed::Operation)?;
        Ok((running, members, member))
    }

    /// Checks that `from` may have started an operation before this rank: one of the next operations of an existing group,
    /// or one of the group whose partition is not complete here. `bytes` is the length of the attached data.
    fn check_early(&self, from: usize, key: Key, bytes: usize) -> Result<(), Malformed> {
        let Some(group) = self.groups.get(key.group as usize) else {
            let is_next = key.group as usize == self.groups.len() && self.groups.len() < MAX_PARTITIONS;
            return if is_next { Ok(()) } else { Err(Malformed::Operation) };
        };
        let Operations { members, numbers, .. } = group.as_ref().ok_or(Malformed::Operation)?;
        let member = members.index_of(from).ok_or(Malformed::Operation)?;
        if key.channel == Channel::Collective && members.len() > FLAT_MEMBERS {
            check_announcer(members.own, member, bytes)?;
        }
        let next = numbers.next(match key.channel {
            Channel::Collective => Lane::Collective,
            Channel::Send => Lane::Receive(member),
            Channel::Receive => Lane::Send(member),
        });
        let is_near = (key.sequence.wrapping_sub(next) as usize) < MAX_ANNOUNCEMENTS;
        if is_near { Ok(()) } else { Err(Malformed::Operation) }
    }

    fn take_announcement(
        &mut self,
        from: usize,
        header: &Header,
        call: [u64; 3],
        data: Vec<u8>,
    ) -> Result<(), Malformed> {
        let key = header.key;
        Call::from_words(call).ok_or(Malformed::Call)?;
        let announcement = Announcement { call, data };
        if let Ok((running, members, member)) = self.find(from, key) {
            return running.take_announcement(members, member, announcement);
        }
        self.check_early(from, key, announcement.data.len())?;
        let waiting = self.announcements.entry((key.group, from, key.channel)).or_default();
        let is_known = waiting.iter().any(|(sequence, _)| *sequence == key.sequence);
        if is_known || waiting.len() >= MAX_ANNOUNCEMENTS {
            return Err(Malformed::Operation);
        }
        waiting.push_back((key.sequence, announcement));
        Ok(())
    }
}

impl Sink for OperationTable {
    fn accept(&mut self, from: usize, header: &Header) -> Result<Option<Room>, Malformed> {
        match header.kind {
            Kind::Direct { .. } | Kind::Chunk { .. } => {
                let (running, members, member) = self.find(from, header.key)?;
                running.room(members, member, header)
            }
            _ => Ok(Some(Room::Kept(vec![0; header.bytes as usize]))),
        }
    }

    fn take(&mut self, from: usize, header: &Header, kept: Vec<u8>) -> Result<(), Malformed> {
        match header.kind {
            Kind::Announce(call) => self.take_announcement(from, header, call, kept)?,
            Kind::Direct { .. } | Kind::Chunk { .. } => {
                let (running, members, member) = self.find(from, header.key)?;
                running.take(members, member, header)?;
            }
            // The operation may be complete, if all parts were sent already.
            Kind::Turn { index } => {
                if let Ok((running, members, member)) = self.find(from, header.key) {
                    running.turn(members, member, index);
                }
            }
            Kind::Beat => {}
            Kind::Leaving { in_panic } => self.messages.push_back((from, RankMessage::Leaving { in_panic })),
            Kind::Ending => {
                let mut words = [0; ERROR_WORDS];
                debug_assert_eq!(kept.len(), ENDING_BYTES);
                for (word, bytes) in words.iter_mut().zip(kept.as_chunks::<8>().0) {
                    *word = u64::from_le_bytes(*bytes);
                }
                let error = CommError::of_rank(words, self.ranks);
                self.messages.push_back((from, RankMessage::Ending(error.ok_or(Malformed::Ending)?)));
            }
        }
        Ok(())
    }

    fn sent(&mut self, to: usize, key: Key, bytes: usize) {
        let turned = Key { channel: key.channel.turned(), ..key };
        if let Ok((running, ..)) = self.find(to, turned) {
            running.unsent.remove(to, bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Collective, Kind as Operation, ReduceOp, Source, Target};

    /// Strategy for frames that a rank may send, valid or not.
    fn frame() -> impl Strategy<Value = (usize, Header, Vec<u8>)> {
        let words = prop_oneof![
            2 => Just(None),
            1 => any::<[u64; 3]>().prop_map(Some),
        ];
        let offset = prop_oneof![0_u64..100_000, any::<u64>()];
        let bytes = prop_oneof![Just(0), Just(48), 1_usize..600, Just(20_000)];
        let kind = (0_u8..7, words, offset, 0_u32..5, any::<bool>());
        let key = (0_u32..3, 0_usize..3, 0_u32..3);
        (1_usize..3, kind, key, bytes).prop_map(
            |(from, (kind, words, offset, index, in_panic), key, bytes)| {
                let same = Call {
                    op: Some(ReduceOp::Sum),
                    elements: 100_000,
                    number: crate::NumberType::F32,
                    ..Call::bare(Operation::AllReduce)
                };
                let kind = match kind {
                    0 | 1 => Kind::Announce(words.unwrap_or(same.to_words())),
                    2 => Kind::Direct { offset },
                    3 => Kind::Chunk { index, offset },
                    4 => Kind::Turn { index },
                    5 => Kind::Leaving { in_panic },
                    _ => Kind::Beat,
                };
                let channel = [Channel::Collective, Channel::Send, Channel::Receive][key.1];
                let data = vec![7; bytes];
                (from, Header::of(kind, Key { group: key.0, channel, sequence: key.2 }, &data), data)
            },
        )
    }

    proptest! {
        #[test]
        fn whatever_ranks_send_nothing_panics_and_little_is_kept(
            frames in proptest::collection::vec(frame(), 0..40)
        ) {
            let mut table = OperationTable::new(0, 3, Recorder::new(None));
            let (mut large, mut small) = (vec![1.0_f32; 100_000], [1.0_f32; 9]);
            let (input, mut output) = ([1_u8; 6], [0_u8; 6]);
            let counts = Some((vec![2, 2, 2], vec![2, 2, 2]));
            let collectives: [Collective<Source<'_>, Target<'_>>; 3] = [
                Collective::AllReduce { data: large[..].as_mut().into(), op: ReduceOp::Sum },
                Collective::AllToAll { input: (&input[..]).into(), output: (&mut output[..]).into(), counts },
                Collective::Receive { output: small[..].as_mut().into(), from: 1 },
            ];
            for collective in &collectives {
                let task = Task::new(collective, 0, 3).map_err(|(call, problem)| format!("{call}: {problem}")).unwrap();
                table.begin(0, task, Ticket::new(Vec::new()), std::panic::Location::caller());
            }
            for (from, header, data) in frames {
                let Ok(room) = table.accept(from, &header) else { break };
                let Some(room) = room else { continue };
                // Data with a destination in an operation is not written here.
                let kept = if matches!(room, Room::Kept(_)) { data } else { Vec::new() };
                if table.take(from, &header, kept).is_err() || table.advance().is_err() {
                    break;
                }
            }
            let kept: usize = table.announcements.values().map(VecDeque::len).sum();
            prop_assert!(kept <= 40);
        }
    }

    /// Passes all queued frames on, in any order of the ranks, and advances all ranks. Returns true if there were any frames.
    fn pass_on(tables: &mut [OperationTable]) -> bool {
        let mut has_moved = false;
        for from in 0..tables.len() {
            tables[from].advance().unwrap();
            let to: Vec<usize> = tables[from].queues.waiting().collect();
            for to in to {
                has_moved = true;
                let queue = std::mem::take(tables[from].queues.to(to));
                let control = queue.control.into_iter();
                let frames = control.map(|(header, bytes)| (header, bytes, 0)).chain(
                    queue.data.into_iter().map(|data| {
                        // SAFETY: the piece belongs to an operation in flight.
                        let bytes = unsafe { std::slice::from_raw_parts(data.start, data.len) }.to_vec();
                        (Header::of(data.kind, data.key, &bytes), bytes, data.len)
                    }),
                );
                for (header, bytes, sent) in frames {
                    // Data waits until its receiver knows where to.
                    let room = loop {
                        match tables[to].accept(from, &header).unwrap() {
                            Some(room) => break room,
                            None => drop(tables[to].advance().unwrap()),
                        }
                    };
                    let kept = match room {
                        Room::At(place) => {
                            // SAFETY: the room has this many bytes.
                            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
                            Vec::new()
                        }
                        Room::Kept(_) => bytes,
                    };
                    tables[to].take(from, &header, kept).unwrap();
                    if sent > 0 {
                        tables[from].sent(to, header.key, sent);
                    }
                }
            }
        }
        has_moved
    }

    #[test]
    fn early_announcements_of_a_large_group_come_from_neighbours_in_its_tree_and_are_tallies() {
        let mut table = OperationTable::new(40, 100, Recorder::private());
        let mut announce = |from: usize, group: u32, sequence: u32, bytes: usize| {
            let (key, data) = (Key { group, channel: Channel::Collective, sequence }, vec![0; bytes]);
            let header = Header::of(Kind::Announce(Call::bare(Operation::Barrier).to_words()), key, &data);
            table.take(from, &header, data)
        };
        // The parent, and two children.
        for (from, bytes) in [(32, 0), (41, 32), (44, 256)] {
            assert_eq!(announce(from, 0, 3, bytes), Ok(()), "rank {from}");
        }
        for from in [0, 39, 43, 48, 99] {
            assert_eq!(announce(from, 0, 3, 32), Err(Malformed::Operation), "rank {from}");
        }
        assert_eq!(announce(42, 0, 3, 257), Err(Malformed::Call));
        // The members of the next group are not known yet.
        for from in [32, 43, 98, 99] {
            assert_eq!(announce(from, 1, 0, 32), Ok(()), "rank {from}");
        }
        table.add_group((0..99).collect());
        let mut kept: Vec<usize> =
            table.announcements.keys().filter(|key| key.0 == 1).map(|key| key.1).collect();
        kept.sort_unstable();
        assert_eq!(kept, [32]);
    }

    #[test]
    fn a_sender_needs_the_rank_that_has_not_received_and_no_rank_that_has() {
        let mut tables: Vec<OperationTable> =
            (0..3).map(|rank| OperationTable::new(rank, 3, Recorder::private())).collect();
        let mut data = vec![vec![0_u8; 100_000]; 3];
        let mut tickets = Vec::new();
        for (rank, (table, data)) in tables.iter_mut().zip(&mut data).enumerate() {
            let collective: Collective<Source<'_>, Target<'_>> =
                Collective::Broadcast { data: data[..].as_mut().into(), root: 1 };
            let task = Task::new(&collective, rank, 3).map_err(|(call, _)| call.to_string()).unwrap();
            let ticket = Ticket::new(Vec::new());
            table.begin(0, task, Arc::clone(&ticket), std::panic::Location::caller());
            tickets.push(ticket);
        }
        // Announcements go in the first round; of the data, only that for rank 0 is written.
        pass_on(&mut tables);
        tables[1].advance().unwrap();
        let key = Key { group: 0, channel: Channel::Collective, sequence: 0 };
        tables[1].queues.to(0).data.clear();
        tables[1].sent(0, key, 100_000);
        assert!(!tables[1].advance().unwrap());
        let awaited = tables[1].group(0).waits_for(&tickets[1]).unwrap();
        assert_eq!((awaited.rank, awaited.needed), (2, Some(2)));
    }

    #[test]
    fn a_rank_that_a_neighbour_in_the_tree_has_named_is_not_needed() {
        let mut table = OperationTable::new(41, 100, Recorder::private());
        let task = Task::new(&Collective::<Source<'_>, Target<'_>>::Barrier, 41, 100);
        let task = task.map_err(|(call, _)| call.to_string()).unwrap();
        let ticket = Ticket::new(Vec::new());
        table.begin(0, task, Arc::clone(&ticket), std::panic::Location::caller());
        let key = Key { group: 0, channel: Channel::Collective, sequence: 0 };
        table.take(40, &Header::of(Kind::Turn { index: 77 }, key, &[]), Vec::new()).unwrap();
        // Rank 77 may be through and gone before the consent of rank 40 is here.
        let awaited = table.group(0).waits_for(&ticket).unwrap();
        assert_eq!((awaited.rank, awaited.needed), (77, Some(40)));
    }

    #[test]
    fn thousands_of_ranks_agree_and_add_and_each_talks_to_few() {
        const RANKS: usize = 2000;
        let mut tables: Vec<OperationTable> =
            (0..RANKS).map(|rank| OperationTable::new(rank, RANKS, Recorder::private())).collect();
        let mut reduce_group: Vec<[f32; 3]> = (0..RANKS).map(|rank| [rank as f32 * 0.37; 3]).collect();
        let mut tickets = Vec::new();
        for (rank, (table, sum)) in tables.iter_mut().zip(&mut reduce_group).enumerate() {
            assert_eq!(table.queues.waiting().count(), 0);
            let collectives: [Collective<Source<'_>, Target<'_>>; 2] = [
                Collective::Barrier,
                Collective::AllReduce { data: sum[..].as_mut().into(), op: ReduceOp::Sum },
            ];
            for collective in &collectives {
                let task = Task::new(collective, rank, RANKS).map_err(|(call, _)| call.to_string()).unwrap();
                let ticket = Ticket::new(Vec::new());
                table.begin(0, task, Arc::clone(&ticket), std::panic::Location::caller());
                tickets.push(ticket);
            }
        }
        while pass_on(&mut tables) {}
        assert!(tickets.iter().all(|ticket| ticket.is_complete()));
        let values: Vec<f32> = (0..RANKS).map(|rank| rank as f32 * 0.37).collect();
        let pointers: Vec<*const u8> = values.iter().map(|value| std::ptr::from_ref(value).cast()).collect();
        let mut expected = 0.0_f32;
        let target = std::ptr::from_mut(&mut expected).cast();
        // SAFETY: each pointer is that of one number.
        unsafe { crate::reduce::reduce(crate::NumberType::F32, ReduceOp::Sum, &pointers, &[target], 1) };
        for (rank, (sum, table)) in reduce_group.iter().zip(&tables).enumerate() {
            assert_eq!(sum.map(f32::to_bits), [expected.to_bits(); 3], "rank {rank}");
            assert!(table.queues.peers() <= 12, "rank {rank} talks to {}", table.queues.peers());
        }
    }
}
