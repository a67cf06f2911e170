//! Bytes of a connection on the socket: plain, or encrypted under the keys of its handshake.
//!
//! An encrypted connection carries records of at most 65,535 bytes, each preceded by its length in two bytes. A record
//! is a Noise transport message, whose plain text is a piece of the stream of frames. An altered, repeated or missing
//! record is an error.

use std::{
    io::{self, ErrorKind, IoSlice, Read, Write},
    net::TcpStream,
    ops::{ControlFlow, Range},
    sync::Arc,
};

use snow::TransportState;

use crate::Malformed;

/// Number of bytes of the length before a record.
const LENGTH_BYTES: usize = 2;
/// Maximum length of a record in bytes.
const RECORD_BYTES: usize = u16::MAX as usize;
/// Number of bytes by which a record is longer than its plain text.
const TAG_BYTES: usize = 16;
/// Maximum length of a record's plain text in bytes.
const PLAIN_BYTES: usize = RECORD_BYTES - TAG_BYTES;

/// A connection after its handshake.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) socket: TcpStream,
    /// Keys of the handshake; `None` if the connection is not encrypted.
    pub(crate) keys: Option<Box<TransportState>>,
}

/// Reason of a connection's end.
#[derive(Debug)]
pub(crate) enum ConnectionError {
    /// The other end has closed it or is gone.
    Closed,
    /// The system reports an error.
    Failed(ErrorKind),
    /// The other end has sent invalid data.
    Malformed(Malformed),
}

impl From<io::Error> for ConnectionError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted => Self::Closed,
            kind => Self::Failed(kind),
        }
    }
}

impl From<Malformed> for ConnectionError {
    fn from(what: Malformed) -> Self {
        Self::Malformed(what)
    }
}

/// Non-blocking socket, with the encryption of its bytes.
#[derive(Debug)]
pub(crate) struct Wire {
    socket: Arc<TcpStream>,
    seal: Option<Box<Seal>>,
}

/// State of both directions of an encrypted connection.
#[derive(Debug)]
struct Seal {
    keys: Box<TransportState>,
    /// Record being received, with its length; its first `read` bytes are there.
    incoming: Vec<u8>,
    read: usize,
    /// Plain text of the last record; its bytes `unread` have not been returned yet.
    opened: Vec<u8>,
    unread: Range<usize>,
    /// Plain text of the next record.
    plain: Vec<u8>,
    /// Record being sent, with its length; its bytes `unsent` are not written yet.
    outgoing: Vec<u8>,
    unsent: Range<usize>,
}

impl Seal {
    fn new(keys: Box<TransportState>) -> Self {
        Self {
            keys,
            incoming: vec![0; LENGTH_BYTES + RECORD_BYTES],
            read: 0,
            opened: vec![0; RECORD_BYTES],
            unread: 0..0,
            plain: Vec::with_capacity(PLAIN_BYTES),
            outgoing: vec![0; LENGTH_BYTES + RECORD_BYTES],
            unsent: 0..0,
        }
    }

    /// Returns the length in bytes of the record being received, including its length field, as far as that is known.
    fn wanted(&self) -> usize {
        if self.read < LENGTH_BYTES {
            return LENGTH_BYTES;
        }
        LENGTH_BYTES + usize::from(u16::from_le_bytes([self.incoming[0], self.incoming[1]]))
    }

    /// Decrypts the received record.
    fn open(&mut self) -> Result<(), ConnectionError> {
        let record = &self.incoming[LENGTH_BYTES..self.read];
        let len = self.keys.read_message(record, &mut self.opened).map_err(|_| Malformed::CheckSum)?;
        (self.unread, self.read) = (0..len, 0);
        Ok(())
    }

    /// Returns decrypted plain text in `target`, and its length; 0 if there is none.
    fn hand_on(&mut self, target: &mut [u8]) -> usize {
        let rest = &self.opened[self.unread.clone()];
        let count = rest.len().min(target.len());
        target[..count].copy_from_slice(&rest[..count]);
        self.unread.start += count;
        count
    }

    /// Encrypts a record from the beginning of `slices`. Returns the number of their bytes in it.
    fn seal(&mut self, slices: [&[u8]; 2]) -> io::Result<usize> {
        self.plain.clear();
        for slice in slices {
            let room = PLAIN_BYTES - self.plain.len();
            self.plain.extend_from_slice(&slice[..slice.len().min(room)]);
        }
        let sealed = self.keys.write_message(&self.plain, &mut self.outgoing[LENGTH_BYTES..]);
        let len = sealed.map_err(io::Error::other)?;
        // The length of a record fits its length field.
        self.outgoing[..LENGTH_BYTES].copy_from_slice(&(len as u16).to_le_bytes());
        self.unsent = 0..LENGTH_BYTES + len;
        Ok(self.plain.len())
    }
}

impl Wire {
    /// Makes the socket of `connection` non-blocking.
    ///
    /// # Errors
    /// If the socket's options cannot be set.
    pub(crate) fn new(connection: Connection) -> io::Result<Self> {
        let Connection { socket, keys } = connection;
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        Ok(Self { socket: Arc::new(socket), seal: keys.map(|keys| Box::new(Seal::new(keys))) })
    }

    pub(crate) fn socket(&self) -> &Arc<TcpStream> {
        &self.socket
    }

    /// Receives available bytes. Returns `Break` if there are none.
    ///
    /// # Errors
    /// If the connection is closed or fails, or a record cannot be decrypted.
    pub(crate) fn receive(&mut self, target: &mut [u8]) -> Result<ControlFlow<(), usize>, ConnectionError> {
        let Some(seal) = &mut self.seal else { return receive(&self.socket, target) };
        loop {
            let count = seal.hand_on(target);
            if count > 0 || target.is_empty() {
                return Ok(ControlFlow::Continue(count));
            }
            while seal.read < seal.wanted() {
                let end = seal.wanted();
                match receive(&self.socket, &mut seal.incoming[seal.read..end])? {
                    ControlFlow::Continue(count) => seal.read += count,
                    ControlFlow::Break(()) => return Ok(ControlFlow::Break(())),
                }
            }
            seal.open()?;
        }
    }

    /// Sends the beginning of `slices`, or buffers it as a record if the connection is encrypted. Returns its length.
    ///
    /// # Errors
    /// If the socket accepts nothing now ([`ErrorKind::WouldBlock`]), or if the connection fails.
    pub(crate) fn send(&mut self, slices: [&[u8]; 2]) -> io::Result<usize> {
        let Some(seal) = &mut self.seal else {
            return (&*self.socket).write_vectored(&slices.map(IoSlice::new));
        };
        if !seal.unsent.is_empty() {
            return Err(ErrorKind::WouldBlock.into());
        }
        let count = seal.seal(slices)?;
        self.flush()?;
        Ok(count)
    }

    /// Sends the buffered record, as far as the socket accepts it. Returns the number of bytes sent.
    ///
    /// # Errors
    /// If the connection fails.
    pub(crate) fn flush(&mut self) -> io::Result<usize> {
        let Some(seal) = &mut self.seal else { return Ok(0) };
        let mut total = 0;
        while !seal.unsent.is_empty() {
            match (&*self.socket).write(&seal.outgoing[seal.unsent.clone()]) {
                Ok(count) => (seal.unsent.start, total) = (seal.unsent.start + count, total + count),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(total)
    }

    /// Returns true while a buffered record is not entirely sent.
    pub(crate) fn is_pending(&self) -> bool {
        self.seal.as_ref().is_some_and(|seal| !seal.unsent.is_empty())
    }
}

/// Receives available bytes. Returns `Break` if there are none.
fn receive(mut socket: &TcpStream, target: &mut [u8]) -> Result<ControlFlow<(), usize>, ConnectionError> {
    loop {
        return match socket.read(target) {
            Ok(0) => Err(ConnectionError::Closed),
            Ok(count) => Ok(ControlFlow::Continue(count)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(ControlFlow::Break(())),
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => Err(error.into()),
        };
    }
}

#[cfg(test)]
mod tests {
    use std::{net::TcpListener, thread, time::Duration};

    use super::*;

    /// Returns the keys of both ends after a handshake.
    fn keys() -> [Box<TransportState>; 2] {
        let builder = || snow::Builder::new("Noise_NN_25519_ChaChaPoly_BLAKE2s".parse().unwrap());
        let (mut client, mut server) =
            (builder().build_initiator().unwrap(), builder().build_responder().unwrap());
        let (mut message, mut nothing) = ([0; 128], [0; 128]);
        let len = client.write_message(&[], &mut message).unwrap();
        server.read_message(&message[..len], &mut nothing).unwrap();
        let len = server.write_message(&[], &mut message).unwrap();
        client.read_message(&message[..len], &mut nothing).unwrap();
        [client, server].map(|state| Box::new(state.into_transport_mode().unwrap()))
    }

    fn sockets() -> [TcpStream; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        [client, listener.accept().unwrap().0]
    }

    fn is_blocked(sent: &io::Result<usize>) -> bool {
        sent.as_ref().is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    }

    #[test]
    fn a_stream_comes_out_as_it_went_in_however_full_the_sockets_are() {
        let (sockets, [own, theirs]) = (sockets(), keys());
        let [client, server] = sockets;
        let mut client = Wire::new(Connection { socket: client, keys: Some(own) }).unwrap();
        let mut server = Wire::new(Connection { socket: server, keys: Some(theirs) }).unwrap();
        let sent: Vec<u8> =
            (0..10_000_000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let (mut at, mut received, mut part) = (0, Vec::new(), vec![0; 100_003]);
        while received.len() < sent.len() {
            client.flush().unwrap();
            // Split at frame boundaries, with a header and without.
            let header = (at % 7).min(sent.len() - at);
            let rest = &sent[at + header..(at + header + 300_000).min(sent.len())];
            if at < sent.len() {
                match client.send([&sent[at..at + header], rest]) {
                    blocked if is_blocked(&blocked) => assert!(client.is_pending()),
                    taken => at += taken.unwrap(),
                }
            }
            while let ControlFlow::Continue(count) = server.receive(&mut part).unwrap() {
                received.extend_from_slice(&part[..count]);
            }
        }
        assert!(received == sent, "other bytes");
    }

    #[test]
    fn who_listens_reads_nothing_and_who_alters_is_found_out() {
        let secret = b"the weights of a model that is not yet published";
        for flipped in [None, Some(0), Some(2), Some(40)] {
            let (sockets, [own, theirs]) = (sockets(), keys());
            let [client, mut between] = sockets;
            let mut client = Wire::new(Connection { socket: client, keys: Some(own) }).unwrap();
            assert_eq!(client.send([secret, b""]).unwrap(), secret.len());
            let mut seen = vec![0; LENGTH_BYTES + secret.len() + TAG_BYTES];
            between.read_exact(&mut seen).unwrap();
            assert!(!seen.windows(6).any(|bytes| secret.windows(6).any(|plain| plain == bytes)));
            // If the length field is too large, the reader waits for more; if it is too small, the remainder is not a
            // valid record.
            if let Some(at) = flipped {
                seen[at] ^= 1;
                seen.extend_from_slice(&[0; 64]);
            }
            let [mut sender, receiver] = self::sockets();
            sender.write_all(&seen).unwrap();
            let mut server = Wire::new(Connection { socket: receiver, keys: Some(theirs) }).unwrap();
            let mut plain = vec![0; 100];
            let mut found = Ok(ControlFlow::Break(()));
            for _ in 0..100 {
                found = server.receive(&mut plain);
                if !matches!(found, Ok(ControlFlow::Break(()))) {
                    break;
                }
                thread::sleep(Duration::from_millis(5));
            }
            match (flipped, found) {
                (None, Ok(ControlFlow::Continue(count))) => assert_eq!(&plain[..count], secret),
                (Some(_), Err(ConnectionError::Malformed(Malformed::CheckSum))) => {}
                (flipped, found) => panic!("{found:?} with byte {flipped:?} flipped"),
            }
        }
    }
}
