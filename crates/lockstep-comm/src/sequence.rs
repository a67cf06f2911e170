//! Sequence numbers of a group's operations. Collectives have one numbering, and messages one for each pair of ranks and
//! direction, so that the same operation has the same number on all ranks that take part in it.

use std::collections::BTreeMap;

use crate::task::Flow;

/// Operations of a group that are carried out in the order of their numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// Collectives, in one order for all members.
    Collective,
    /// Messages to a member.
    Send(usize),
    /// Messages from a member.
    Receive(usize),
}

impl Lane {
    /// Returns the lane of an operation.
    pub fn of(flow: &Flow) -> Self {
        match flow {
            Flow::Send { to } => Self::Send(*to),
            Flow::Receive { from } => Self::Receive(*from),
            _ => Self::Collective,
        }
    }

    /// Returns the other member of a message; `None` for collectives.
    pub fn peer(self) -> Option<usize> {
        match self {
            Self::Collective => None,
            Self::Send(peer) | Self::Receive(peer) => Some(peer),
        }
    }
}

/// Numbers of operations that a rank has started, by lane. Only lanes that were ever used have an entry.
#[derive(Debug, Default)]
pub struct SequenceNumbers(BTreeMap<Lane, u32>);

impl SequenceNumbers {
    /// Returns the number of the next operation of a lane, which is that of the started ones; it wraps around.
    pub fn next(&self, lane: Lane) -> u32 {
        self.0.get(&lane).copied().unwrap_or(0)
    }

    /// Returns the number of an operation that starts now.
    pub fn start(&mut self, lane: Lane) -> u32 {
        let next = self.0.entry(lane).or_default();
        let number = *next;
        *next = next.wrapping_add(1);
        number
    }
}
