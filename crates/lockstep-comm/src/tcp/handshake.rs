//! The handshake of a connection: both ends prove that they know the run's secret, before either reads anything else.
//!
//! The protocol is `Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s` by the crate `snow`. The secret is its pre-shared key, and the
//! client's [`Hello`] its prologue. Every message has a fixed size:
//!
//! ```text
//!     client -> server   hello 64 | noise 1: psk, e (48)
//!     server -> client   magic 8, version 4, verdict 4 | noise 2: e, ee, the server's hello (112)
//!     client -> server   proof (16), the first message under the new keys
//!     server -> client   welcome (16)
//! ```
//!
//! The verdict is plain text, so that a client can distinguish a refusal, which is final, from a connection dropped for lack of
//! room, which it retries. The proof rejects replays of a client's first message. Later traffic is encrypted under the
//! handshake's keys if `parallel.encrypt` is set ([`super::wire`]).

use std::{
    io::{self, ErrorKind, Read, Write},
    net::TcpStream,
    time::Duration,
};

use snow::{Builder, HandshakeState, TransportState};

use super::secret::Secret;
use crate::{Deadline, JoinProblem};

/// Magic number: `LOCKSTEP` in byte order.
const MAGIC: [u8; 8] = *b"LOCKSTEP";
/// Time limit of a handshake.
pub(crate) const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
/// Version of frames, handshakes and rendezvous messages.
pub(crate) const VERSION: u32 = 4;
/// Name of the protocol, which both ends hash.
const NOISE: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
/// Length in bytes of an encoded [`Hello`].
const HELLO_BYTES: usize = 64;
const KEY_BYTES: usize = 32;
const TAG_BYTES: usize = 16;
/// Number of bytes that contain a client's version.
const VERSION_BYTES: usize = 12;
/// Length in bytes of a client's first message.
pub(crate) const GREETING_BYTES: usize = HELLO_BYTES + KEY_BYTES + TAG_BYTES;
/// Length in bytes of the plain part of a server's answer.
const OPEN_BYTES: usize = 16;
const SEALED_BYTES: usize = KEY_BYTES + HELLO_BYTES + TAG_BYTES;
/// Length in bytes of a server's answer.
pub(crate) const ANSWER_BYTES: usize = OPEN_BYTES + SEALED_BYTES;
/// Length in bytes of the proof and of the welcome.
pub(crate) const PROOF_BYTES: usize = TAG_BYTES;

/// Purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Purpose {
    /// Rendezvous of nodes.
    Nodes = 1,
    /// Rendezvous of ranks.
    Ranks = 2,
    /// Frames between two ranks.
    Frames = 3,
    /// Request of a rank for the connections of a higher one.
    Knock = 4,
}

impl Purpose {
    /// Returns the name of a participant of such a rendezvous: `node` or `rank`.
    pub(crate) fn participant(self) -> &'static str {
        if self == Self::Nodes { "node" } else { "rank" }
    }
}

/// Description that one end gives of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) purpose: Purpose,
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    /// Index of the connection among those between the two ranks.
    pub(crate) stream: u32,
    /// Digest of the run's name.
    pub(crate) run: [u8; 32],
}

impl Hello {
    pub(crate) fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut out = [0; HELLO_BYTES];
        out[..8].copy_from_slice(&MAGIC);
        let numbers = [VERSION, self.purpose as u32, self.rank, self.ranks, self.stream];
        for (number, bytes) in numbers.iter().zip(out[8..28].chunks_exact_mut(4)) {
            bytes.copy_from_slice(&number.to_le_bytes());
        }
        out[32..].copy_from_slice(&self.run);
        out
    }

    /// Decodes a hello that has been authenticated; `None` if no Lockstep program writes such.
    fn decode(bytes: &[u8; HELLO_BYTES]) -> Option<Self> {
        let purpose = match word(bytes, 12) {
            1 => Purpose::Nodes,
            2 => Purpose::Ranks,
            3 => Purpose::Frames,
            4 => Purpose::Knock,
            _ => return None,
        };
        let mut run = [0; 32];
        run.copy_from_slice(&bytes[32..]);
        Some(Self { purpose, rank: word(bytes, 16), ranks: word(bytes, 20), stream: word(bytes, 24), run })
    }
}

/// Returns the little-endian number at an offset.
pub(crate) fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// A server's plain-text answer to a greeting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum Verdict {
    /// The handshake goes on.
    Go = 0,
    /// The client speaks another version.
    Version = 1,
    /// Refusal: the client belongs to another run.
    OtherRun = 2,
    /// Refusal: the client's secret is another one.
    Secret = 3,
}

/// Returns the plain part of an answer: magic, version and verdict.
fn open_part(verdict: Verdict) -> [u8; OPEN_BYTES] {
    let mut out = [0; OPEN_BYTES];
    out[..8].copy_from_slice(&MAGIC);
    out[8..12].copy_from_slice(&VERSION.to_le_bytes());
    out[12..].copy_from_slice(&(verdict as u32).to_le_bytes());
    out
}

/// Returns the Noise state of one end; `None` if the cryptography fails.
fn noise(secret: &Secret, prologue: &[u8; HELLO_BYTES], is_client: bool) -> Option<HandshakeState> {
    let builder = Builder::new(NOISE.parse().ok()?).prologue(prologue).ok()?.psk(0, secret.key()).ok()?;
    if is_client { builder.build_initiator().ok() } else { builder.build_responder().ok() }
}

/// Returns the error for a local failure of the cryptography, such as a system without random numbers.
fn broken() -> JoinProblem {
    JoinProblem::Connection(ErrorKind::Other)
}

/// Does the client's side of the handshake. Returns the server's hello, and the keys for what follows.
///
/// # Errors
/// If version, run or secret of the two ends differ, which is final. If the connection fails or is dropped before that is known
/// ([`JoinProblem::Connection`]), which may be retried.
pub(crate) fn shake_hands(
    stream: &TcpStream,
    secret: &Secret,
    hello: &Hello,
    deadline: Deadline,
) -> Result<(Hello, Box<TransportState>), JoinProblem> {
    let mut timed = TimedStream { stream, deadline };
    let own = hello.encode();
    let mut state = noise(secret, &own, true).ok_or_else(broken)?;
    let mut greeting = [0; GREETING_BYTES];
    greeting[..HELLO_BYTES].copy_from_slice(&own);
    state.write_message(&[], &mut greeting[HELLO_BYTES..]).map_err(|_| broken())?;
    timed.send(&greeting)?;
    let open: [u8; OPEN_BYTES] = timed.receive()?;
    let theirs = if open[..8] == MAGIC { word(&open, 8) } else { 0 };
    if theirs != VERSION {
        return Err(JoinProblem::Version { theirs, ours: VERSION });
    }
    match word(&open, 12) {
        0 => {}
        2 => return Err(JoinProblem::OtherRun),
        3 => return Err(JoinProblem::Secret),
        _ => return Err(JoinProblem::Version { theirs, ours: VERSION }),
    }
    let sealed: [u8; SEALED_BYTES] = timed.receive()?;
    let mut theirs = [0; HELLO_BYTES];
    // Only a server that knows the secret can have written this.
    if state.read_message(&sealed, &mut theirs).ok() != Some(HELLO_BYTES) {
        return Err(JoinProblem::Secret);
    }
    let server = Hello::decode(&theirs).ok_or(JoinProblem::Version { theirs: 0, ours: VERSION })?;
    let mut state = state.into_transport_mode().map_err(|_| broken())?;
    let mut proof = [0; PROOF_BYTES];
    state.write_message(&[], &mut proof).map_err(|_| broken())?;
    timed.send(&proof)?;
    let welcome: [u8; PROOF_BYTES] = timed.receive()?;
    state.read_message(&welcome, &mut []).map_err(|_| JoinProblem::Secret)?;
    Ok((server, Box::new(state)))
}

/// The server's side of a handshake, which is fed with received bytes and does not block.
#[derive(Debug, Default)]
pub(crate) struct ServerHandshake {
    bytes: Greeting,
    read: usize,
    /// Keys and authenticated hello, after a valid greeting.
    proving: Option<(Box<TransportState>, Hello)>,
}

/// Buffer for a greeting.
#[derive(Debug)]
struct Greeting([u8; GREETING_BYTES]);

impl Default for Greeting {
    fn default() -> Self {
        Self([0; GREETING_BYTES])
    }
}

/// Next action in a [`ServerHandshake`].
#[derive(Debug)]
pub(crate) enum Step {
    /// Receive more bytes.
    Wait,
    /// Send the answer, then receive the proof.
    Answer([u8; ANSWER_BYTES]),
    /// Send the welcome: the client is authenticated. With the keys for what follows.
    Welcome([u8; PROOF_BYTES], Hello, Box<TransportState>),
    /// Refuse the client, with an answer that states the reason if it speaks this protocol.
    Refuse(Option<[u8; ANSWER_BYTES]>, Refusal),
}

/// Reason why a connection is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("no greeting within {} s", HANDSHAKE_LIMIT.as_secs())]
    Late,
    #[error("hung up before it had proved who it is")]
    HungUp,
    #[error("dropped, with no greeting, for others to get through")]
    Crowd,
    #[error("it does not speak this protocol")]
    Garbage,
    #[error("it speaks version {0}, this program {VERSION}")]
    Version(u32),
    #[error("it belongs to another run (--rdzv-id)")]
    OtherRun,
    #[error("another secret, or none")]
    Secret,
}

impl ServerHandshake {
    /// Returns the buffer for the next bytes.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        let end = if self.proving.is_some() { PROOF_BYTES } else { GREETING_BYTES };
        &mut self.bytes.0[self.read..end]
    }

    /// Returns true after a valid greeting, which proves that the client knows the secret or replays one that does.
    pub(crate) fn is_proving(&self) -> bool {
        self.proving.is_some()
    }

    /// Processes `count` bytes received into [`Self::room`], as a server that is `own`.
    pub(crate) fn take(&mut self, count: usize, secret: &Secret, own: &Hello) -> Step {
        self.read += count;
        if self.proving.is_some() && self.read < PROOF_BYTES {
            return Step::Wait;
        }
        if let Some((mut state, client)) = self.proving.take() {
            let mut welcome = [0; PROOF_BYTES];
            let is_sound = state.read_message(&self.bytes.0[..PROOF_BYTES], &mut []).is_ok()
                && state.write_message(&[], &mut welcome).is_ok();
            return if is_sound {
                Step::Welcome(welcome, client, state)
            } else {
                Step::Refuse(None, Refusal::Secret)
            };
        }
        let (bytes, read) = (&self.bytes.0, self.read);
        let known = read.min(MAGIC.len());
        if bytes[..known] != MAGIC[..known] {
            return Step::Refuse(None, Refusal::Garbage);
        }
        if read >= VERSION_BYTES && word(bytes, 8) != VERSION {
            return refuse(Verdict::Version, Refusal::Version(word(bytes, 8)));
        }
        if read < GREETING_BYTES {
            return Step::Wait;
        }
        self.answer(secret, own)
    }

    /// Judges a complete greeting.
    fn answer(&mut self, secret: &Secret, own: &Hello) -> Step {
        let mut hello = [0; HELLO_BYTES];
        hello.copy_from_slice(&self.bytes.0[..HELLO_BYTES]);
        if hello[32..] != own.run {
            return refuse(Verdict::OtherRun, Refusal::OtherRun);
        }
        let Some(mut state) = noise(secret, &hello, false) else {
            return Step::Refuse(None, Refusal::HungUp);
        };
        if state.read_message(&self.bytes.0[HELLO_BYTES..], &mut []).is_err() {
            return refuse(Verdict::Secret, Refusal::Secret);
        }
        let Some(client) = Hello::decode(&hello) else { return Step::Refuse(None, Refusal::Garbage) };
        let mut answer = [0; ANSWER_BYTES];
        answer[..OPEN_BYTES].copy_from_slice(&open_part(Verdict::Go));
        let is_written = state.write_message(&own.encode(), &mut answer[OPEN_BYTES..]).is_ok();
        let Some(state) = state.into_transport_mode().ok().filter(|_| is_written) else {
            return Step::Refuse(None, Refusal::HungUp);
        };
        (self.proving, self.read) = (Some((Box::new(state), client)), 0);
        Step::Answer(answer)
    }
}

fn refuse(verdict: Verdict, refusal: Refusal) -> Step {
    let mut answer = [0; ANSWER_BYTES];
    answer[..OPEN_BYTES].copy_from_slice(&open_part(verdict));
    Step::Refuse(Some(answer), refusal)
}

/// A socket with a deadline for each transfer as a whole, however slowly bytes trickle.
pub(crate) struct TimedStream<'a> {
    pub(crate) stream: &'a TcpStream,
    pub(crate) deadline: Deadline,
}

impl TimedStream<'_> {
    /// Sends all of `bytes` before the deadline.
    pub(crate) fn send(&mut self, mut bytes: &[u8]) -> Result<(), JoinProblem> {
        while !bytes.is_empty() {
            self.stream.set_write_timeout(Some(self.rest()?)).map_err(problem)?;
            match self.stream.write(bytes) {
                Ok(0) => return Err(JoinProblem::Connection(ErrorKind::WriteZero)),
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(problem(error)),
            }
        }
        Ok(())
    }

    /// Receives exactly `BYTES` bytes before the deadline.
    pub(crate) fn receive<const BYTES: usize>(&mut self) -> Result<[u8; BYTES], JoinProblem> {
        let mut bytes = [0; BYTES];
        self.receive_into(&mut bytes)?;
        Ok(bytes)
    }

    /// Receives as many bytes as `bytes` holds before the deadline.
    pub(crate) fn receive_into(&mut self, bytes: &mut [u8]) -> Result<(), JoinProblem> {
        let mut read = 0;
        while read < bytes.len() {
            self.stream.set_read_timeout(Some(self.rest()?)).map_err(problem)?;
            match self.stream.read(&mut bytes[read..]) {
                Ok(0) => return Err(JoinProblem::Connection(ErrorKind::UnexpectedEof)),
                Ok(count) => read += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(problem(error)),
            }
        }
        Ok(())
    }

    fn rest(&self) -> Result<Duration, JoinProblem> {
        let rest = self.deadline.remaining();
        if rest.is_zero() { Err(JoinProblem::Connection(ErrorKind::TimedOut)) } else { Ok(rest) }
    }
}

fn problem(error: io::Error) -> JoinProblem {
    match error.kind() {
        ErrorKind::WouldBlock => JoinProblem::Connection(ErrorKind::TimedOut),
        kind => JoinProblem::Connection(kind),
    }
}

#[cfg(test)]
mod tests {
    use std::{net::TcpListener, thread};

    use super::*;

    const HELLO: Hello = Hello { purpose: Purpose::Ranks, rank: 1, ranks: 2, stream: 0, run: [7; 32] };

    /// Does the client's side; the keys are tested with the traffic that they encrypt.
    fn shake_hands(
        stream: &TcpStream,
        secret: &Secret,
        hello: &Hello,
        deadline: Deadline,
    ) -> Result<Hello, JoinProblem> {
        super::shake_hands(stream, secret, hello, deadline).map(|(server, _)| server)
    }

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(5))
    }

    fn secret() -> Secret {
        Secret::of(b"0123456789abcdef")
    }

    /// Runs a server that answers one client as the acceptor does.
    fn answer(stream: &TcpStream, secret: &Secret, own: &Hello) -> Result<Hello, Refusal> {
        let mut handshake = ServerHandshake::default();
        loop {
            let count = { stream }.read(handshake.room()).unwrap_or(0);
            if count == 0 {
                return Err(Refusal::HungUp);
            }
            match handshake.take(count, secret, own) {
                Step::Wait => {}
                Step::Answer(answer) => { stream }.write_all(&answer).unwrap(),
                Step::Welcome(welcome, hello, _) => {
                    { stream }.write_all(&welcome).unwrap();
                    return Ok(hello);
                }
                Step::Refuse(answer, refusal) => {
                    answer.map(|answer| { stream }.write_all(&answer));
                    return Err(refusal);
                }
            }
        }
    }

    /// Returns the results of both ends of a connection between a client and a server.
    fn shake<C, S: Send>(
        client: impl FnOnce(&TcpStream) -> C,
        server: impl FnOnce(&TcpStream) -> S + Send,
    ) -> (C, S) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        thread::scope(|scope| {
            let address = listener.local_addr().unwrap();
            let server = scope.spawn(move || server(&listener.accept().unwrap().0));
            let stream = TcpStream::connect(address).unwrap();
            let client = client(&stream);
            drop(stream);
            (client, server.join().unwrap())
        })
    }

    #[test]
    fn two_that_know_the_secret_know_each_other() {
        let own = Hello { rank: 0, purpose: Purpose::Nodes, ..HELLO };
        let found = shake(
            |stream| shake_hands(stream, &secret(), &HELLO, soon()),
            |stream| answer(stream, &secret(), &own),
        );
        assert_eq!(found, (Ok(own), Ok(HELLO)));
    }

    #[test]
    fn a_client_with_another_secret_or_of_another_run_is_told_so() {
        let other = Secret::of(b"0123456789abcdeF");
        let found = shake(
            |stream| shake_hands(stream, &other, &HELLO, soon()),
            |stream| answer(stream, &secret(), &HELLO),
        );
        assert_eq!(found, (Err(JoinProblem::Secret), Err(Refusal::Secret)));
        let own = Hello { run: [8; 32], ..HELLO };
        let found = shake(
            |stream| shake_hands(stream, &secret(), &HELLO, soon()),
            |stream| answer(stream, &secret(), &own),
        );
        assert_eq!(found, (Err(JoinProblem::OtherRun), Err(Refusal::OtherRun)));
    }

    #[test]
    fn a_server_that_hangs_up_at_any_byte_before_its_verdict_is_no_proof_of_anything() {
        for bytes in [0, 1, OPEN_BYTES, ANSWER_BYTES - 1, ANSWER_BYTES] {
            let (client, _) = shake(
                |stream| shake_hands(stream, &secret(), &HELLO, soon()),
                |stream| {
                    let mut handshake = ServerHandshake::default();
                    { stream }.read_exact(handshake.room()).unwrap();
                    let Step::Answer(answer) = handshake.take(GREETING_BYTES, &secret(), &HELLO) else {
                        panic!("no answer")
                    };
                    { stream }.write_all(&answer[..bytes]).unwrap();
                },
            );
            assert!(matches!(client, Err(JoinProblem::Connection(_))), "after {bytes} bytes: {client:?}");
        }
    }

    #[test]
    fn a_server_without_the_secret_is_found_out() {
        let answers = |change: fn(&mut [u8; ANSWER_BYTES])| {
            let server = move |stream: &TcpStream| {
                let mut greeting = [0; GREETING_BYTES];
                { stream }.read_exact(&mut greeting).unwrap();
                let mut answer = [0x5a; ANSWER_BYTES];
                answer[..OPEN_BYTES].copy_from_slice(&open_part(Verdict::Go));
                // Reflects the greeting.
                answer[OPEN_BYTES..OPEN_BYTES + 48].copy_from_slice(&greeting[HELLO_BYTES..]);
                change(&mut answer);
                { stream }.write_all(&answer).unwrap();
            };
            shake(|stream| shake_hands(stream, &secret(), &HELLO, soon()), server).0
        };
        assert_eq!(answers(|_| {}), Err(JoinProblem::Secret));
        assert_eq!(answers(|answer| answer[OPEN_BYTES] ^= 1), Err(JoinProblem::Secret));
    }

    #[test]
    fn a_greeting_that_is_played_back_or_altered_gets_nobody_in() {
        let mut recorded = [0; GREETING_BYTES];
        let (_, ()) = shake(
            |stream| shake_hands(stream, &secret(), &HELLO, soon()),
            |stream| { stream }.read_exact(&mut recorded).unwrap(),
        );
        let mut handshake = ServerHandshake::default();
        handshake.room().copy_from_slice(&recorded);
        assert!(matches!(handshake.take(GREETING_BYTES, &secret(), &HELLO), Step::Answer(_)));
        // Without the ephemeral key there is no proof.
        handshake.room().fill(9);
        assert!(matches!(
            handshake.take(PROOF_BYTES, &secret(), &HELLO),
            Step::Refuse(None, Refusal::Secret)
        ));
        for bit in 0..GREETING_BYTES * 8 {
            let mut altered = recorded;
            altered[bit / 8] ^= 1 << (bit % 8);
            let mut handshake = ServerHandshake::default();
            handshake.room().copy_from_slice(&altered);
            let step = handshake.take(GREETING_BYTES, &secret(), &HELLO);
            assert!(matches!(step, Step::Refuse(..)), "bit {bit}: {step:?}");
        }
    }

    #[test]
    fn another_version_is_told_ours_at_its_first_bytes_and_garbage_nothing() {
        let mut hello = HELLO.encode();
        hello[8] = 2;
        let mut handshake = ServerHandshake::default();
        for (at, byte) in hello[..VERSION_BYTES].iter().enumerate() {
            handshake.room()[0] = *byte;
            match handshake.take(1, &secret(), &HELLO) {
                Step::Wait => assert!(at < VERSION_BYTES - 1),
                // The place where versions 1 and 2 look for the version.
                Step::Refuse(Some(answer), Refusal::Version(2)) => {
                    assert_eq!((&answer[..8], word(&answer, 8)), (&MAGIC[..], VERSION));
                    assert_eq!(at, VERSION_BYTES - 1);
                }
                step => panic!("{step:?}"),
            }
        }
        let mut handshake = ServerHandshake::default();
        handshake.room()[..4].copy_from_slice(b"GET ");
        assert!(matches!(handshake.take(4, &secret(), &HELLO), Step::Refuse(None, Refusal::Garbage)));
        // A server of version 2 sends 96 bytes and hangs up.
        let (client, ()) = shake(
            |stream| shake_hands(stream, &secret(), &HELLO, soon()),
            |stream| { stream }.write_all(&[&MAGIC[..], &2_u32.to_le_bytes(), &[0; 84]].concat()).unwrap(),
        );
        assert_eq!(client, Err(JoinProblem::Version { theirs: 2, ours: VERSION }));
    }

    #[test]
    fn a_server_that_trickles_is_left_in_time() {
        let begin = std::time::Instant::now();
        let (client, ()) = shake(
            |stream| shake_hands(stream, &secret(), &HELLO, Deadline::after(Duration::from_millis(200))),
            |mut stream| {
                for byte in open_part(Verdict::Go).iter().chain(&[0; 50]) {
                    if stream.write_all(&[*byte]).is_err() {
                        break;
                    }
                    thread::sleep(Duration::from_millis(10));
                }
            },
        );
        assert_eq!(client, Err(JoinProblem::Connection(ErrorKind::TimedOut)));
        assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
    }
}
