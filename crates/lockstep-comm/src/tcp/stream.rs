//! One socket to another rank: sends and receives frames as far as possible without waiting.

use std::{
    collections::VecDeque,
    io::{self, ErrorKind},
    net::{Shutdown, TcpStream},
    ops::ControlFlow,
    sync::Arc,
};

use super::{
    frame::{FRAME_BYTES, HEADER_BYTES, Header, Key, Kind},
    wire::{Connection, ConnectionError, Wire},
};
use crate::Malformed;

/// One of several sockets to the same rank.
#[derive(Debug)]
pub(crate) struct Stream {
    wire: Wire,
    incoming: Incoming,
    outgoing: Option<Outgoing>,
}

/// State of the frame being received.
#[derive(Debug)]
enum Incoming {
    Header {
        bytes: [u8; HEADER_BYTES],
        read: usize,
    },
    /// The header is complete; there is no destination for the bytes yet.
    Waiting(Header),
    Bytes {
        header: Header,
        room: Room,
        read: usize,
        crc: u32,
    },
}

/// Destination of a frame's bytes.
#[derive(Debug)]
pub(crate) enum Room {
    /// Memory of an operation, which has room for the frame's bytes.
    At(*mut u8),
    /// Vector, for a frame that carries no operation data.
    Kept(Vec<u8>),
}

// SAFETY: the memory belongs to an operation in flight, which is only accessed under the lock on all operations.
unsafe impl Send for Room {}

/// Receiver of frames.
pub(crate) trait Sink {
    /// Returns the destination of a frame's bytes; `None` if it is not known yet.
    ///
    /// # Errors
    /// If such a frame is not allowed now.
    fn accept(&mut self, from: usize, header: &Header) -> Result<Option<Room>, Malformed>;

    /// Takes a complete frame, with its bytes if they went to a vector.
    ///
    /// # Errors
    /// As [`Sink::accept`].
    fn take(&mut self, from: usize, header: &Header, kept: Vec<u8>) -> Result<(), Malformed>;

    /// Notes that `bytes` bytes of an operation have been sent.
    fn sent(&mut self, to: usize, key: Key, bytes: usize);
}

// SAFETY: as for `Room`.
unsafe impl Send for Payload {}

/// Frame being sent.
#[derive(Debug)]
struct Outgoing {
    header: [u8; HEADER_BYTES],
    bytes: Payload,
    len: usize,
    written: usize,
    /// Operation whose data it carries; `None` for a control frame.
    data_of: Option<Key>,
}

/// Bytes of a frame being sent.
#[derive(Debug)]
enum Payload {
    /// Memory of an operation, unchanged until it is sent.
    At(*const u8),
    Own(Vec<u8>),
}

/// Piece of data being sent, frame by frame.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) key: Key,
    /// [`Kind::Direct`] or [`Kind::Chunk`], with the offset of the piece's first byte.
    pub(crate) kind: Kind,
    /// Address of the piece, valid until it is sent.
    pub(crate) start: *const u8,
    pub(crate) len: usize,
    pub(crate) framed: usize,
}

// SAFETY: as for `Room`.
unsafe impl Send for Message {}

impl Message {
    /// Cuts the next frame off.
    fn cut(&mut self) -> Outgoing {
        let len = (self.len - self.framed).min(FRAME_BYTES);
        let start = self.start.wrapping_add(self.framed);
        let skipped = self.framed as u64;
        let kind = match self.kind {
            Kind::Direct { offset } => Kind::Direct { offset: offset + skipped },
            Kind::Chunk { index, offset } => Kind::Chunk { index, offset: offset + skipped },
            other => other,
        };
        self.framed += len;
        // SAFETY: the piece is in an operation's memory, which is valid until its last byte is sent.
        let header = Header::of(kind, self.key, unsafe { std::slice::from_raw_parts(start, len) }).encode();
        Outgoing { header, bytes: Payload::At(start), len, written: 0, data_of: Some(self.key) }
    }
}

/// Queue of a connection to a rank.
#[derive(Debug)]
pub(crate) enum Outbox<'a> {
    /// Whole frames, for the control connection.
    Control(&'a mut VecDeque<(Header, Vec<u8>)>),
    /// Data, from which all data connections take frames.
    Data(&'a mut VecDeque<Message>),
}

impl Outbox<'_> {
    fn next(&mut self) -> Option<Outgoing> {
        match self {
            Self::Control(frames) => {
                let (header, bytes) = frames.pop_front()?;
                let (header, len) = (header.encode(), bytes.len());
                Some(Outgoing { header, bytes: Payload::Own(bytes), len, written: 0, data_of: None })
            }
            Self::Data(messages) => {
                let message = messages.front_mut()?;
                let frame = message.cut();
                if message.framed == message.len {
                    messages.pop_front();
                }
                Some(frame)
            }
        }
    }
}

impl Stream {
    /// Creates a stream over a connection after its handshake.
    pub(crate) fn new(connection: Connection) -> io::Result<Self> {
        Ok(Self { wire: Wire::new(connection)?, incoming: Incoming::HEADER, outgoing: None })
    }

    pub(crate) fn socket(&self) -> &Arc<TcpStream> {
        self.wire.socket()
    }

    /// Returns true if the next bytes can be received.
    pub(crate) fn is_readable(&self) -> bool {
        !matches!(self.incoming, Incoming::Waiting(_))
    }

    /// Returns true if a frame is partly sent.
    pub(crate) fn is_writing(&self) -> bool {
        self.outgoing.is_some() || self.wire.is_pending()
    }

    /// Drops all references to the memory of operations. The stream cannot carry data afterwards.
    pub(crate) fn abandon(&mut self) {
        self.incoming = Incoming::HEADER;
        if self.outgoing.as_ref().is_some_and(|frame| frame.data_of.is_some()) {
            self.outgoing = None;
        }
    }

    /// Closes the sending direction.
    pub(crate) fn close_sending(&self) {
        // The connection may already be gone.
        let _ = self.wire.socket().shutdown(Shutdown::Write);
    }

    /// Discards received bytes. Returns true if more may come.
    pub(crate) fn drain(&mut self) -> bool {
        let mut waste = [0; 4096];
        loop {
            match self.wire.receive(&mut waste) {
                Ok(ControlFlow::Continue(_)) => {}
                Ok(ControlFlow::Break(())) => return true,
                Err(_) => return false,
            }
        }
    }

    /// Receives frames, up to about `limit` bytes. Returns the number of bytes received.
    pub(crate) fn read(
        &mut self,
        from: usize,
        limit: usize,
        sink: &mut impl Sink,
    ) -> Result<usize, ConnectionError> {
        let mut total = 0;
        while total < limit {
            match &mut self.incoming {
                Incoming::Header { bytes, read } => {
                    let ControlFlow::Continue(count) = self.wire.receive(&mut bytes[*read..])? else {
                        break;
                    };
                    (*read, total) = (*read + count, total + count);
                    if *read == HEADER_BYTES {
                        self.incoming = Incoming::Waiting(Header::decode(bytes)?);
                    }
                }
                Incoming::Waiting(header) => {
                    let header = *header;
                    let Some(room) = sink.accept(from, &header)? else { break };
                    self.incoming = Incoming::Bytes { header, room, read: 0, crc: 0 };
                }
                Incoming::Bytes { header, room, read, crc } => {
                    let rest = header.bytes as usize - *read;
                    if rest == 0 {
                        let (header, found) = (*header, *crc);
                        let kept = match room {
                            Room::At(_) => Vec::new(),
                            Room::Kept(bytes) => std::mem::take(bytes),
                        };
                        self.incoming = Incoming::HEADER;
                        if found != header.crc {
                            return Err(Malformed::CheckSum.into());
                        }
                        sink.take(from, &header, kept)?;
                        continue;
                    }
                    let target = match room {
                        // SAFETY: the destination has room for the header's number of bytes. It is valid until the
                        // operation is abandoned, which drops this reference as well.
                        Room::At(start) => unsafe { std::slice::from_raw_parts_mut(start.add(*read), rest) },
                        Room::Kept(bytes) => &mut bytes[*read..],
                    };
                    let ControlFlow::Continue(count) = self.wire.receive(target)? else { break };
                    *crc = crc32c::crc32c_append(*crc, &target[..count]);
                    (*read, total) = (*read + count, total + count);
                }
            }
        }
        Ok(total)
    }

    /// Sends queued frames, up to about `limit` bytes. Returns the number of bytes sent.
    pub(crate) fn write(
        &mut self,
        to: usize,
        limit: usize,
        send_buffer: &mut Outbox<'_>,
        sink: &mut impl Sink,
    ) -> Result<usize, ConnectionError> {
        let mut total = self.wire.flush()?;
        while total < limit {
            if self.outgoing.is_none() {
                self.outgoing = send_buffer.next();
            }
            let Some(frame) = &mut self.outgoing else { break };
            let bytes = match &frame.bytes {
                // SAFETY: data is valid until it is sent, or abandoned, which drops this reference as well.
                Payload::At(start) => unsafe { std::slice::from_raw_parts(*start, frame.len) },
                Payload::Own(bytes) => bytes,
            };
            let (header, skipped) = (frame.written.min(HEADER_BYTES), frame.written.max(HEADER_BYTES));
            match self.wire.send([&frame.header[header..], &bytes[skipped - HEADER_BYTES..]]) {
                Ok(count) => (frame.written, total) = (frame.written + count, total + count),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
            if frame.written == HEADER_BYTES + frame.len {
                if let Some(key) = frame.data_of {
                    sink.sent(to, key, frame.len);
                }
                self.outgoing = None;
            }
        }
        Ok(total)
    }
}

impl Incoming {
    const HEADER: Self = Self::Header { bytes: [0; HEADER_BYTES], read: 0 };
}
