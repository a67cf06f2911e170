//! One socket to another rank: frames in and out, as far as they go without waiting.

use std::{
    collections::VecDeque,
    io::{self, ErrorKind},
    net::TcpStream,
    ops::ControlFlow,
    sync::Arc,
};

use super::{
    frame::{FRAME_BYTES, HEADER_BYTES, Header, Key, Kind, Malformed},
    wire::{Connection, Wire},
};

/// A socket that is one of several to the same rank.
#[derive(Debug)]
pub(crate) struct Stream {
    wire: Wire,
    incoming: Incoming,
    outgoing: Option<Outgoing>,
}

/// How far the frame has come that is being read.
#[derive(Debug)]
enum Incoming {
    Header {
        bytes: [u8; HEADER_BYTES],
        read: usize,
    },
    /// Its bytes cannot be taken yet.
    Waiting(Header),
    Bytes {
        header: Header,
        room: Room,
        read: usize,
        crc: u32,
    },
}

/// Where the bytes of a frame go.
#[derive(Debug)]
pub(crate) enum Room {
    /// To memory that whoever accepted the frame has set aside for as many bytes.
    At(*mut u8),
    /// To a vector, for a frame that is no data.
    Kept(Vec<u8>),
}

// SAFETY: the memory belongs to an operation under way, which is only touched by whoever holds the lock on all of them.
unsafe impl Send for Room {}

/// What takes frames.
pub(crate) trait Sink {
    /// Where the bytes of a frame go; `None` if that is not known yet.
    ///
    /// # Errors
    /// If there should be no such frame.
    fn accept(&mut self, from: usize, header: &Header) -> Result<Option<Room>, Malformed>;

    /// A frame is there, with the bytes that were kept.
    ///
    /// # Errors
    /// As [`Sink::accept`].
    fn take(&mut self, from: usize, header: &Header, kept: Vec<u8>) -> Result<(), Malformed>;

    /// So many bytes of an operation have gone out.
    fn sent(&mut self, to: usize, key: Key, bytes: usize);
}

/// What ends a connection.
#[derive(Debug)]
pub(crate) enum Broken {
    /// The other end closed it, or is gone.
    Closed,
    /// The system gave up on it.
    Failed(ErrorKind),
    /// It sent what no rank sends.
    Malformed(Malformed),
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted => Self::Closed,
            kind => Self::Failed(kind),
        }
    }
}

impl From<Malformed> for Broken {
    fn from(what: Malformed) -> Self {
        Self::Malformed(what)
    }
}

// SAFETY: as for `Room`.
unsafe impl Send for Payload {}

/// A frame on its way out.
#[derive(Debug)]
struct Outgoing {
    header: [u8; HEADER_BYTES],
    bytes: Payload,
    len: usize,
    written: usize,
    /// Of which operation, if it is data.
    data_of: Option<Key>,
}

/// Bytes to be sent.
#[derive(Debug)]
enum Payload {
    /// They stay where they are until they are sent.
    At(*const u8),
    Own(Vec<u8>),
}

/// A piece of data on its way out, frame by frame.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) key: Key,
    /// [`Kind::Direct`] or [`Kind::Part`], with the offset of its first byte.
    pub(crate) kind: Kind,
    /// Where it lies until it is sent.
    pub(crate) start: *const u8,
    pub(crate) len: usize,
    pub(crate) framed: usize,
}

// SAFETY: as for `Room`.
unsafe impl Send for Message {}

impl Message {
    /// The next frame.
    fn cut(&mut self) -> Outgoing {
        let len = (self.len - self.framed).min(FRAME_BYTES);
        let start = self.start.wrapping_add(self.framed);
        let skipped = self.framed as u64;
        let kind = match self.kind {
            Kind::Direct { offset } => Kind::Direct { offset: offset + skipped },
            Kind::Part { index, offset } => Kind::Part { index, offset: offset + skipped },
            other => other,
        };
        self.framed += len;
        // SAFETY: the message lies in an operation's memory, which is there until its last byte is sent.
        let header = Header::of(kind, self.key, unsafe { std::slice::from_raw_parts(start, len) }).encode();
        Outgoing { header, bytes: Payload::At(start), len, written: 0, data_of: Some(self.key) }
    }
}

/// What waits to be sent to a rank.
#[derive(Debug)]
pub(crate) enum Outbox<'a> {
    /// Frames that are whole.
    Control(&'a mut VecDeque<(Header, Vec<u8>)>),
    /// Data, which all streams for data share.
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
    /// A connection on which nothing but frames follows.
    pub(crate) fn new(connection: Connection) -> io::Result<Self> {
        Ok(Self { wire: Wire::new(connection)?, incoming: Incoming::HEADER, outgoing: None })
    }

    pub(crate) fn socket(&self) -> &Arc<TcpStream> {
        self.wire.socket()
    }

    /// Whether what comes next can be taken.
    pub(crate) fn is_readable(&self) -> bool {
        !matches!(self.incoming, Incoming::Waiting(_))
    }

    /// Whether a frame is half-way out.
    pub(crate) fn is_writing(&self) -> bool {
        self.outgoing.is_some() || self.wire.is_pending()
    }

    /// Forgets what points to the memory of operations. The stream is of no use for data afterwards.
    pub(crate) fn abandon(&mut self) {
        self.incoming = Incoming::HEADER;
        if self.outgoing.as_ref().is_some_and(|frame| frame.data_of.is_some()) {
            self.outgoing = None;
        }
    }

    /// Throws away what has come; says whether more may.
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

    /// Reads up to about `limit` bytes of frames; says how many it read.
    pub(crate) fn read(&mut self, from: usize, limit: usize, sink: &mut impl Sink) -> Result<usize, Broken> {
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
                        // SAFETY: the room is as long as the header says, and stays until the operation is abandoned,
                        // which forgets it here as well.
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

    /// Writes up to about `limit` bytes of what waits; says how many it wrote.
    pub(crate) fn write(
        &mut self,
        to: usize,
        limit: usize,
        outbox: &mut Outbox<'_>,
        sink: &mut impl Sink,
    ) -> Result<usize, Broken> {
        let mut total = self.wire.flush()?;
        while total < limit {
            if self.outgoing.is_none() {
                self.outgoing = outbox.next();
            }
            let Some(frame) = &mut self.outgoing else { break };
            let bytes = match &frame.bytes {
                // SAFETY: data stays until it is sent, or abandoned here as well.
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
