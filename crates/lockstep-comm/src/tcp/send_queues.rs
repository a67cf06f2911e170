//! Control frames and data that wait to be sent, by rank. Operations fill the queues, links empty them.

use std::collections::{BTreeMap, VecDeque, btree_map::Entry};

use super::{
    frame::{Header, Key, Kind},
    stream::Message,
};
use crate::memory::MemoryRange;

/// Outgoing frames of a rank. Only ranks to which something was ever queued have an entry.
#[derive(Debug, Default)]
pub(crate) struct SendQueues {
    queues: BTreeMap<usize, SendQueue>,
    /// Ranks whose entry is new.
    new: Vec<usize>,
}

/// Number of bytes of an operation that are queued for sending and not written to a socket yet, by receiving rank.
#[derive(Debug, Default)]
pub(crate) struct UnsentBytes(BTreeMap<usize, usize>);

impl UnsentBytes {
    fn add(&mut self, rank: usize, bytes: usize) {
        *self.0.entry(rank).or_default() += bytes;
    }

    /// Notes that bytes to a rank have been written.
    pub(crate) fn remove(&mut self, rank: usize, bytes: usize) {
        if let Entry::Occupied(mut unsent) = self.0.entry(rank) {
            *unsent.get_mut() -= bytes;
            if *unsent.get() == 0 {
                unsent.remove();
            }
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns a rank to which bytes have not been written; `None` if all are.
    pub(crate) fn receiver(&self) -> Option<usize> {
        self.0.keys().next().copied()
    }
}

/// Outgoing frames to one rank.
#[derive(Debug, Default)]
pub(crate) struct SendQueue {
    pub(crate) control: VecDeque<(Header, Vec<u8>)>,
    pub(crate) data: VecDeque<Message>,
}

impl SendQueues {
    /// Returns the queue to a world rank.
    pub(crate) fn to(&mut self, rank: usize) -> &mut SendQueue {
        self.queues.entry(rank).or_insert_with(|| {
            self.new.push(rank);
            SendQueue::default()
        })
    }

    /// Returns true for control frames, and for data, if any waits to be sent to a rank.
    pub(crate) fn are_waiting(&self, rank: usize) -> [bool; 2] {
        self.queues.get(&rank).map_or([false; 2], |queue| [!queue.control.is_empty(), !queue.data.is_empty()])
    }

    /// Returns the ranks to which a frame was queued for the first time since the last call.
    pub(crate) fn take_new(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.new)
    }

    /// Queues a control frame without bytes.
    pub(crate) fn tell(&mut self, rank: usize, header: Header) {
        self.to(rank).control.push_back((header, Vec::new()));
    }

    /// Queues a piece of an operation's data for sending.
    pub(crate) fn send(
        &mut self,
        rank: usize,
        key: Key,
        kind: Kind,
        piece: MemoryRange,
        unsent: &mut UnsentBytes,
    ) {
        if piece.bytes() > 0 {
            unsent.add(rank, piece.bytes());
            let message = Message { key, kind, start: piece.pointer, len: piece.bytes(), framed: 0 };
            self.to(rank).data.push_back(message);
        }
    }

    /// Drops all references to the memory of operations.
    pub(crate) fn abandon(&mut self) {
        self.queues.values_mut().for_each(|queue| queue.data.clear());
    }

    /// Drops the queues to ranks for which `is_kept` is false.
    pub(crate) fn retain(&mut self, is_kept: impl Fn(usize) -> bool) {
        self.queues.retain(|rank, _| is_kept(*rank));
    }

    /// Returns the ranks to which frames wait to be sent.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = usize> {
        let is_waiting = |queue: &SendQueue| !queue.control.is_empty() || !queue.data.is_empty();
        self.queues.iter().filter(move |(_, queue)| is_waiting(queue)).map(|(rank, _)| *rank)
    }

    /// Returns the number of ranks to which anything was ever queued.
    #[cfg(test)]
    pub(crate) fn peers(&self) -> usize {
        self.queues.len()
    }
}
