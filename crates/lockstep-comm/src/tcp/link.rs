//! All sockets to one other rank: one for control frames, which must not queue behind data, and some for data.

use std::{
    io::{self, ErrorKind},
    net::{Shutdown, TcpStream},
    sync::Arc,
    time::Duration,
};

use rustix::{event::PollFlags, net::sockopt::set_tcp_user_timeout};

use super::{
    board::Board,
    stream::{Broken, Outbox, Stream},
    wire::Connection,
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
    streams: Vec<Joined>,
    pub(crate) status: Status,
    /// True if anything has been received since the last heartbeat tick; `silence` counts the ticks without.
    heard: bool,
    silence: u32,
    /// True if a connection was closed at the last heartbeat tick.
    is_closed: bool,
}

#[derive(Debug)]
struct Joined {
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
            streams.push(Joined { stream: Stream::new(connection)?, is_open: true });
        }
        Ok(Self { rank, streams, status: Status::Here, heard: true, silence: 0, is_closed: false })
    }

    /// Returns true if nothing more can be received from the rank.
    pub(crate) fn is_gone(&self) -> bool {
        self.streams.iter().all(|joined| !joined.is_open)
    }

    /// Reads available data. Returns true if there was any.
    ///
    /// # Errors
    /// If a connection breaks, or the rank sends invalid frames; returns the cause of loss.
    pub(crate) fn read(&mut self, board: &mut Board) -> Result<bool, LossCause> {
        let mut has_read = false;
        for index in 0..self.streams.len() {
            let Joined { stream, is_open: true } = &mut self.streams[index] else { continue };
            match stream.read(self.rank, TURN_BYTES, board) {
                Ok(count) => has_read |= count > 0,
                Err(broken) => {
                    has_read = true;
                    self.close(index, &broken, board)?;
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
    pub(crate) fn write(&mut self, board: &mut Board) -> Result<bool, LossCause> {
        let mut has_written = false;
        for index in 0..self.streams.len() {
            let Joined { stream, is_open: true } = &mut self.streams[index] else { continue };
            let mut control = std::mem::take(&mut board.sending.control[self.rank]);
            let mut data = std::mem::take(&mut board.sending.data[self.rank]);
            let mut outbox = if index == 0 { Outbox::Control(&mut control) } else { Outbox::Data(&mut data) };
            let written = stream.write(self.rank, TURN_BYTES, &mut outbox, board);
            (board.sending.control[self.rank], board.sending.data[self.rank]) = (control, data);
            match written {
                Ok(count) => has_written |= count > 0,
                Err(broken) => {
                    has_written = true;
                    self.close(index, &broken, board)?;
                }
            }
        }
        Ok(has_written)
    }

    /// Closes a connection that has broken. Returns the cause of loss, unless the rank has announced one itself.
    fn close(&mut self, index: usize, broken: &Broken, board: &mut Board) -> Result<(), LossCause> {
        self.streams[index].is_open = false;
        // The rank may have announced the reason on the control connection before.
        if let Joined { stream, is_open: true } = &mut self.streams[0] {
            for _ in 0..LAST_TURNS {
                if !matches!(stream.read(self.rank, TURN_BYTES, board), Ok(count) if count > 0) {
                    break;
                }
            }
        }
        if self.status != Status::Here || board.said.iter().any(|(rank, _)| *rank == self.rank) {
            return Ok(());
        }
        match broken {
            Broken::Malformed(what) => Err(LossCause::Malformed(*what)),
            Broken::Failed(ErrorKind::TimedOut) => Err(LossCause::Unreachable),
            Broken::Closed | Broken::Failed(_) if index == 0 => Err(LossCause::Disconnected),
            // A farewell on another connection may be in flight; the next ticks will tell.
            Broken::Closed | Broken::Failed(_) => Ok(()),
        }
    }

    /// Counts a heartbeat tick. Returns the cause of loss if the rank has been silent for `limit` ticks, or if some of its
    /// connections have been closed for one tick.
    pub(crate) fn beat(&mut self, limit: u32, silence: Duration) -> Option<LossCause> {
        self.silence = if std::mem::take(&mut self.heard) { 0 } else { self.silence + 1 };
        let was_closed =
            std::mem::replace(&mut self.is_closed, self.streams.iter().any(|joined| !joined.is_open));
        match self.status {
            Status::Here if was_closed => Some(LossCause::Disconnected),
            Status::Here if self.silence >= limit => Some(LossCause::Silent(silence.as_millis() as u64)),
            _ => None,
        }
    }

    /// Returns the open sockets, with the events to poll for on each.
    pub(crate) fn interests(&self, board: &Board) -> impl Iterator<Item = (Arc<TcpStream>, PollFlags)> {
        let (control, data) = (&board.sending.control[self.rank], &board.sending.data[self.rank]);
        let waiting = [!control.is_empty(), !data.is_empty()];
        let open = self.streams.iter().enumerate().filter(|(_, joined)| joined.is_open);
        open.map(move |(index, joined)| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, joined.stream.is_readable());
            flags.set(PollFlags::OUT, joined.stream.is_writing() || waiting[index.min(1)]);
            (Arc::clone(joined.stream.socket()), flags)
        })
    }

    /// Drops all references to the memory of operations: no more data is sent, and received data is discarded.
    pub(crate) fn abandon(&mut self) {
        self.streams.iter_mut().for_each(|joined| joined.stream.abandon());
    }

    /// Closes the sending direction of all connections.
    pub(crate) fn hang_up(&self) {
        for joined in self.streams.iter().filter(|joined| joined.is_open) {
            // The connection may already be gone.
            let _ = joined.stream.socket().shutdown(Shutdown::Write);
        }
    }

    /// Discards received data. Returns true if nothing more can be received.
    pub(crate) fn drain(&mut self) -> bool {
        for joined in self.streams.iter_mut().filter(|joined| joined.is_open) {
            joined.is_open = joined.stream.drain();
        }
        self.is_gone()
    }
}
