//! All sockets to one other rank: one for control frames, which must not queue behind data, and some for data.

use std::{
    io::{self, ErrorKind},
    net::TcpStream,
    sync::Arc,
    time::Duration,
};

use rustix::{event::PollFlags, net::sockopt::set_tcp_user_timeout};

use super::{
    operation_table::OperationTable,
    stream::{Outbox, Stream},
    wire::{Connection, ConnectionError},
};
use crate::LossCause;

/// Maximum number of bytes read or written on one socket before the others get their turn.
const TURN_BYTES: usize = 512 << 10;
/// Maximum number of reads from the control connection once another one to the same rank has broken; bounds a rank that never
/// stops sending.
const LAST_TURNS: usize = 16;

/// Connections to one rank.
#[derive(Debug)]
pub(crate) struct Link {
    rank: usize,
    streams: Vec<LinkStream>,
    pub(crate) status: Status,
    /// True if anything has been received since the last heartbeat tick; `silence` counts the ticks without.
    heard: bool,
    silence: u32,
    /// True if a connection was closed at the last heartbeat tick.
    is_closed: bool,
}

#[derive(Debug)]
struct LinkStream {
    stream: Stream,
    is_open: bool,
}

/// Presence of a rank, as it has announced it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    Here,
    Left,
    Panicked,
}

impl Link {
    /// Creates a link over `connections`, the first of which carries control frames.
    pub(crate) fn new(rank: usize, connections: Vec<Connection>, silence: Duration) -> io::Result<Self> {
        let mut streams = Vec::new();
        for connection in connections {
            set_tcp_user_timeout(&connection.socket, u32::try_from(silence.as_millis()).unwrap_or(u32::MAX))?;
            streams.push(LinkStream { stream: Stream::new(connection)?, is_open: true });
        }
        Ok(Self { rank, streams, status: Status::Here, heard: true, silence: 0, is_closed: false })
    }

    /// Returns true if nothing more can be received from the rank.
    pub(crate) fn is_gone(&self) -> bool {
        self.streams.iter().all(|connection| !connection.is_open)
    }

    /// Reads available data. Returns true if there was any.
    ///
    /// # Errors
    /// If a connection breaks, or the rank sends invalid frames; returns the cause of loss.
    pub(crate) fn read(&mut self, table: &mut OperationTable) -> Result<bool, LossCause> {
        let mut has_read = false;
        for index in 0..self.streams.len() {
            let LinkStream { stream, is_open: true } = &mut self.streams[index] else { continue };
            match stream.read(self.rank, TURN_BYTES, table) {
                Ok(count) => has_read |= count > 0,
                Err(broken) => {
                    has_read = true;
                    self.close(index, &broken, table)?;
                }
            }
        }
        self.heard |= has_read;
        Ok(has_read)
    }

    /// Writes queued frames, as much as the sockets accept. Returns true if any bytes were written.
    ///
    /// # Errors
    /// As [`Link::read`].
    pub(crate) fn write(&mut self, table: &mut OperationTable) -> Result<bool, LossCause> {
        let mut queue = std::mem::take(table.queues.to(self.rank));
        let (mut has_written, mut lost) = (false, Ok(()));
        for index in 0..self.streams.len() {
            let LinkStream { stream, is_open: true } = &mut self.streams[index] else { continue };
            let mut send_buffer =
                if index == 0 { Outbox::Control(&mut queue.control) } else { Outbox::Data(&mut queue.data) };
            match stream.write(self.rank, TURN_BYTES, &mut send_buffer, table) {
                Ok(count) => has_written |= count > 0,
                Err(broken) => {
                    has_written = true;
                    lost = lost.and(self.close(index, &broken, table));
                }
            }
        }
        *table.queues.to(self.rank) = queue;
        lost.map(|()| has_written)
    }

    /// Closes a connection that has broken. Returns the cause of loss, unless the rank has announced one itself.
    fn close(
        &mut self,
        index: usize,
        broken: &ConnectionError,
        table: &mut OperationTable,
    ) -> Result<(), LossCause> {
        self.streams[index].is_open = false;
        // Nothing is sent on a closed connection, and a rank that leaves waits for the other end to close as well.
        self.streams[index].stream.close_sending();
        // The rank may have announced the reason on the control connection before.
        if let LinkStream { stream, is_open: true } = &mut self.streams[0] {
            for _ in 0..LAST_TURNS {
                if !matches!(stream.read(self.rank, TURN_BYTES, table), Ok(count) if count > 0) {
                    break;
                }
            }
        }
        if self.status != Status::Here || table.messages.iter().any(|(rank, _)| *rank == self.rank) {
            return Ok(());
        }
        match broken {
            ConnectionError::Malformed(what) => Err(LossCause::Malformed(*what)),
            ConnectionError::Failed(ErrorKind::TimedOut) => Err(LossCause::Unreachable),
            ConnectionError::Closed | ConnectionError::Failed(_) if index == 0 => {
                Err(LossCause::Disconnected)
            }
            // A farewell on another connection may be in flight; the next ticks will tell.
            ConnectionError::Closed | ConnectionError::Failed(_) => Ok(()),
        }
    }

    /// Counts a heartbeat tick. Returns the cause of loss if the rank has been silent for `limit` ticks, or if some of its
    /// connections have been closed for one tick.
    pub(crate) fn beat(&mut self, limit: u32, silence: Duration) -> Option<LossCause> {
        self.silence = if std::mem::take(&mut self.heard) { 0 } else { self.silence + 1 };
        let was_closed =
            std::mem::replace(&mut self.is_closed, self.streams.iter().any(|connection| !connection.is_open));
        match self.status {
            Status::Here if was_closed => Some(LossCause::Disconnected),
            Status::Here if self.silence >= limit => Some(LossCause::Silent(silence.as_millis() as u64)),
            _ => None,
        }
    }

    /// Returns the open sockets, with the events to poll for on each.
    pub(crate) fn interests(
        &self,
        table: &OperationTable,
    ) -> impl Iterator<Item = (Arc<TcpStream>, PollFlags)> {
        let waiting = table.queues.are_waiting(self.rank);
        let open = self.streams.iter().enumerate().filter(|(_, connection)| connection.is_open);
        open.map(move |(index, connection)| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, connection.stream.is_readable());
            flags.set(PollFlags::OUT, connection.stream.is_writing() || waiting[index.min(1)]);
            (Arc::clone(connection.stream.socket()), flags)
        })
    }

    /// Drops all references to the memory of operations: no more data is sent, and received data is discarded.
    pub(crate) fn abandon(&mut self) {
        self.streams.iter_mut().for_each(|connection| connection.stream.abandon());
    }

    /// Closes the sending directions, for a rank that leaves: of the control connection once its frames are sent, of the data
    /// connections once the other rank has confirmed. A data connection that closes before the farewell has arrived would look
    /// like a loss.
    pub(crate) fn hang_up(&self, table: &OperationTable) {
        let waiting = table.queues.are_waiting(self.rank);
        for (index, connection) in self.streams.iter().enumerate() {
            let is_sent = !connection.stream.is_writing() && !waiting[index.min(1)];
            if connection.is_open && is_sent && (index == 0 || self.has_confirmed()) {
                connection.stream.close_sending();
            }
        }
    }

    /// Returns true if the other rank has closed its control connection, as it does once it has received a farewell.
    pub(crate) fn has_confirmed(&self) -> bool {
        !self.streams[0].is_open
    }

    /// Discards received data.
    pub(crate) fn drain(&mut self) {
        for connection in self.streams.iter_mut().filter(|connection| connection.is_open) {
            connection.is_open = connection.stream.drain();
        }
    }
}
