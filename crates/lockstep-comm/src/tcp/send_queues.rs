//! Control frames and data that wait to be sent, by rank. Operations fill the queues, links empty them.

use std::collections::VecDeque;

use super::{
    frame::{Header, Key, Kind},
    stream::Message,
};
use crate::memory::MemoryRange;

/// Outgoing control frames and data, by world rank.
#[derive(Debug, Default)]
pub(crate) struct Sending {
    pub(crate) control: Vec<VecDeque<(Header, Vec<u8>)>>,
    pub(crate) data: Vec<VecDeque<Message>>,
}

/// Queues a piece for sending.
pub(crate) fn send(
    sending: &mut Sending,
    rank: usize,
    key: Key,
    kind: Kind,
    piece: MemoryRange,
    unsent_bytes: &mut usize,
) {
    if piece.bytes() > 0 {
        *unsent_bytes += piece.bytes();
        let message = Message { key, kind, start: piece.pointer, len: piece.bytes(), framed: 0 };
        sending.data[rank].push_back(message);
    }
}
