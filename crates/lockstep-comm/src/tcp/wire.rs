//! The bytes of a connection on their way through a socket: as they are, or sealed under the keys of its handshake.
//!
//! A sealed connection carries records of at most 65,535 bytes, each preceded by its length in two: a Noise transport message, whose
//! plain text is a piece of the stream of frames. A record that was altered, repeated or left out is an error.

use std::{
    io::{self, ErrorKind, IoSlice, Read, Write},
    net::TcpStream,
    ops::{ControlFlow, Range},
    sync::Arc,
};

use snow::TransportState;

use super::{frame::Malformed, stream::Broken};

/// Bytes of the length before a record.
const LENGTH_BYTES: usize = 2;
/// Bytes of the longest record.
const RECORD_BYTES: usize = u16::MAX as usize;
/// Bytes by which a record is longer than its plain text.
const TAG_BYTES: usize = 16;
/// Bytes of the longest plain text of a record.
const PLAIN_BYTES: usize = RECORD_BYTES - TAG_BYTES;

/// A connection whose handshake is over.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) socket: TcpStream,
    /// The keys of the handshake, if what follows is sealed.
    pub(crate) keys: Option<Box<TransportState>>,
}

/// A socket that never waits, and what seals its bytes.
#[derive(Debug)]
pub(crate) struct Wire {
    socket: Arc<TcpStream>,
    seal: Option<Box<Seal>>,
}

/// The two directions of a sealed connection.
#[derive(Debug)]
struct Seal {
    keys: Box<TransportState>,
    /// The record that is being read, with its length; `read` bytes of it are there.
    incoming: Vec<u8>,
    read: usize,
    /// Room for the plain text of a record, of which the bytes `unread` have not been handed on.
    opened: Vec<u8>,
    unread: Range<usize>,
    /// Plain text on its way into a record.
    plain: Vec<u8>,
    /// Room for the record that is being sent, with its length; its bytes `unsent` are not out yet.
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

    /// Bytes of the record that is being read, its length included, as far as that is known.
    fn wanted(&self) -> usize {
        if self.read < LENGTH_BYTES {
            return LENGTH_BYTES;
        }
        LENGTH_BYTES + usize::from(u16::from_le_bytes([self.incoming[0], self.incoming[1]]))
    }

    /// Opens the record that has been read.
    fn open(&mut self) -> Result<(), Broken> {
        let record = &self.incoming[LENGTH_BYTES..self.read];
        let len = self.keys.read_message(record, &mut self.opened).map_err(|_| Malformed::CheckSum)?;
        (self.unread, self.read) = (0..len, 0);
        Ok(())
    }

    /// Hands on opened plain text; 0 bytes if there is none.
    fn hand_on(&mut self, target: &mut [u8]) -> usize {
        let rest = &self.opened[self.unread.clone()];
        let count = rest.len().min(target.len());
        target[..count].copy_from_slice(&rest[..count]);
        self.unread.start += count;
        count
    }

    /// Makes a record of the beginning of `slices`; returns how many bytes of them it holds.
    fn seal(&mut self, slices: [&[u8]; 2]) -> io::Result<usize> {
        self.plain.clear();
        for slice in slices {
            let room = PLAIN_BYTES - self.plain.len();
            self.plain.extend_from_slice(&slice[..slice.len().min(room)]);
        }
        let sealed = self.keys.write_message(&self.plain, &mut self.outgoing[LENGTH_BYTES..]);
        let len = sealed.map_err(io::Error::other)?;
        // A record is no longer than its length can say.
        self.outgoing[..LENGTH_BYTES].copy_from_slice(&(len as u16).to_le_bytes());
        self.unsent = 0..LENGTH_BYTES + len;
        Ok(self.plain.len())
    }
}

impl Wire {
    /// # Errors
    /// If the socket cannot be set not to wait.
    pub(crate) fn new(connection: Connection) -> io::Result<Self> {
        let Connection { socket, keys } = connection;
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        Ok(Self { socket: Arc::new(socket), seal: keys.map(|keys| Box::new(Seal::new(keys))) })
    }

    pub(crate) fn socket(&self) -> &Arc<TcpStream> {
        &self.socket
    }

    /// Reads what is there; breaks if that is nothing.
    ///
    /// # Errors
    /// If the connection is closed or fails, or a record cannot be opened.
    pub(crate) fn receive(&mut self, target: &mut [u8]) -> Result<ControlFlow<(), usize>, Broken> {
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

    /// Sends the beginning of `slices`, or of a sealed connection takes it to be sent; returns its length.
    ///
    /// # Errors
    /// [`ErrorKind::WouldBlock`] if the socket takes nothing now; whatever else ends the connection.
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

    /// Sends what was taken before, as far as the socket takes it; returns how many bytes those were.
    ///
    /// # Errors
    /// Whatever ends the connection.
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

    /// Returns true while something that was taken is still to be sent.
    pub(crate) fn is_pending(&self) -> bool {
        self.seal.as_ref().is_some_and(|seal| !seal.unsent.is_empty())
    }
}

/// Reads what is there; breaks if that is nothing.
fn receive(mut socket: &TcpStream, target: &mut [u8]) -> Result<ControlFlow<(), usize>, Broken> {
    loop {
        return match socket.read(target) {
            Ok(0) => Err(Broken::Closed),
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

    /// The keys of both ends after a handshake.
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
            // Cut where frames are cut, with a header and without.
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
            // A record that is said to be longer waits for its end; the rest of one that is shorter is none.
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
                (Some(_), Err(Broken::Malformed(Malformed::CheckSum))) => {}
                (flipped, found) => panic!("{found:?} with byte {flipped:?} flipped"),
            }
        }
    }
}
