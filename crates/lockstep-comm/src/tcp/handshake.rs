//! How two ends of a connection prove to each other that they know the run's secret, before either reads anything else.
//!
//! Messages have a fixed size. With H and H' the two greetings, each of which holds 32 random bytes, and K the job's key:
//!
//! ```text
//!     client -> server  H                        server -> client  H'
//!     T = blake3(H H'),  K' = blake3_K(T)
//!     client -> server  blake3_K'("client" T)    server -> client  blake3_K'("server" T)
//! ```
//!
//! Keyed BLAKE3 stands for HMAC: it is a MAC by itself. The labels keep a proof from being sent back, T binds it to this
//! connection, run, rank and purpose. It authenticates; it does not encrypt.

use std::{
    fmt, fs,
    io::{self, ErrorKind, Read, Write},
    net::TcpStream,
    os::{fd::AsRawFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    time::Duration,
};

use crate::{CommError, Deadline, JoinProblem};

/// `LOCKSTEP` in the order of bytes.
const MAGIC: u64 = u64::from_le_bytes(*b"LOCKSTEP");
/// Changes with every change of frames, greetings and cards.
pub(crate) const VERSION: u32 = 2;
/// Bytes of a greeting.
pub(crate) const HELLO_BYTES: usize = 96;
/// The shortest secret.
const SECRET_BYTES: usize = 16;
/// The longest file that is read as one.
const SECRET_LIMIT: u64 = 4096;

/// What all ranks of a job know, and nobody else. It is not shown, whatever asks.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(***)")
    }
}

impl Secret {
    /// The secret in a file that only its owner may read; one of root's may be readable for its group.
    ///
    /// # Errors
    /// [`JoinProblem::SecretFile`].
    pub fn from_file(path: &Path) -> Result<Self, JoinProblem> {
        let problem = |what: String| JoinProblem::SecretFile { path: path.to_owned(), what };
        let metadata = fs::metadata(path).map_err(|error| problem(error.to_string()))?;
        let user = rustix::process::geteuid().as_raw();
        if metadata.is_file() && others_may_read(metadata.mode(), metadata.uid(), user) {
            let mode = metadata.mode() & 0o777;
            return Err(problem(format!("others may read it (mode {mode:o}): chmod 600 it")));
        }
        let mut bytes = Vec::new();
        let file = fs::File::open(path).map_err(|error| problem(error.to_string()))?;
        file.take(SECRET_LIMIT).read_to_end(&mut bytes).map_err(|error| problem(error.to_string()))?;
        let secret = bytes.trim_ascii();
        if secret.len() < SECRET_BYTES {
            return Err(problem(format!("it holds {} bytes: at least {SECRET_BYTES}, random", secret.len())));
        }
        Ok(Self::of(secret))
    }

    /// The secret made of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(blake3::derive_key("lockstep 2026 job secret", bytes))
    }

    /// For ranks that nobody else can reach.
    pub(crate) fn none() -> Self {
        Self::of(b"")
    }
}

/// Whether a file of this mode and owner can be read by anyone whom its owner has not chosen. Only root makes files of root's, and gives them to
/// a group on purpose: so Kubernetes hands a secret to a pod's user.
fn others_may_read(mode: u32, owner: u32, user: u32) -> bool {
    let allowed = if owner == 0 && user != 0 { 0o040 } else { 0 };
    mode & 0o077 & !allowed != 0
}

/// A secret that people can read out and type: 20 characters of Crockford's base 32, which are 100 random bits.
#[derive(Clone, PartialEq, Eq)]
pub struct PairingCode([u8; CODE_CHARACTERS]);

/// Characters of a pairing code.
const CODE_CHARACTERS: usize = 20;
/// Characters between two hyphens.
const CODE_GROUP: usize = 5;
/// Neither I, L, O nor U.
const CODE_ALPHABET: &[u8; 32] = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ";

impl PairingCode {
    /// A new one.
    ///
    /// # Errors
    /// [`JoinProblem::Connection`] if the system has no random bytes.
    pub fn random() -> Result<Self, JoinProblem> {
        let bytes = nonce()?;
        // 256 is a multiple of 32: every character is as likely.
        Ok(Self(std::array::from_fn(|index| CODE_ALPHABET[usize::from(bytes[index]) % CODE_ALPHABET.len()])))
    }

    /// The code that `text` shows, in either case, with or without hyphens, O for 0, I and L for 1.
    pub fn parse(text: &str) -> Option<Self> {
        let mut code = [0; CODE_CHARACTERS];
        let mut characters = text.bytes().filter(|byte| !matches!(byte, b'-' | b' '));
        for place in &mut code {
            let character = match characters.next()?.to_ascii_uppercase() {
                b'O' => b'0',
                b'I' | b'L' => b'1',
                other => other,
            };
            *place = *CODE_ALPHABET.iter().find(|known| **known == character)?;
        }
        characters.next().is_none().then_some(Self(code))
    }

    /// Its characters, without hyphens.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Display for PairingCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, character) in self.0.iter().enumerate() {
            let hyphen = if index > 0 && index % CODE_GROUP == 0 { "-" } else { "" };
            write!(f, "{hyphen}{}", char::from(*character))?;
        }
        Ok(())
    }
}

impl fmt::Debug for PairingCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PairingCode(***)")
    }
}

/// A secret in memory, which processes of the same user can read as a file as long as this one lives.
#[derive(Debug)]
pub struct SecretInMemory(fs::File);

impl SecretInMemory {
    /// Keeps these bytes.
    ///
    /// # Errors
    /// [`CommError::Io`].
    pub fn new(bytes: &[u8]) -> Result<Self, CommError> {
        Self::keep(bytes).map_err(CommError::io("keep the run's secret"))
    }

    fn keep(bytes: &[u8]) -> io::Result<Self> {
        let file = rustix::fs::memfd_create("lockstep-secret", rustix::fs::MemfdFlags::CLOEXEC)?;
        rustix::fs::fchmod(&file, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)?;
        let mut file = fs::File::from(file);
        file.write_all(bytes)?;
        Ok(Self(file))
    }

    /// The file that it looks like.
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd()).into()
    }
}

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Purpose {
    /// Nodes find each other.
    Nodes = 1,
    /// Ranks find each other.
    Ranks = 2,
    /// Frames between two ranks.
    Frames = 3,
}

/// What one end says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) purpose: Purpose,
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    /// Which of several connections between the two.
    pub(crate) stream: u32,
    /// A digest of the run's name.
    pub(crate) run: [u8; 32],
}

impl Hello {
    fn encode(&self, nonce: [u8; 32]) -> [u8; HELLO_BYTES] {
        let mut out = [0; HELLO_BYTES];
        out[..8].copy_from_slice(&MAGIC.to_le_bytes());
        let numbers = [VERSION, self.purpose as u32, self.rank, self.ranks, self.stream];
        for (number, bytes) in numbers.iter().zip(out[8..28].chunks_exact_mut(4)) {
            bytes.copy_from_slice(&number.to_le_bytes());
        }
        out[32..64].copy_from_slice(&self.run);
        out[64..].copy_from_slice(&nonce);
        out
    }

    /// The greeting that these bytes are.
    ///
    /// # Errors
    /// The version that they speak, 0 for none.
    fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self, JoinProblem> {
        let number = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let theirs = if bytes[..8] == MAGIC.to_le_bytes() { number(8) } else { 0 };
        let purpose = match number(12) {
            1 => Purpose::Nodes,
            2 => Purpose::Ranks,
            3 => Purpose::Frames,
            _ => return Err(JoinProblem::Version { theirs, ours: VERSION }),
        };
        if theirs != VERSION {
            return Err(JoinProblem::Version { theirs, ours: VERSION });
        }
        let mut run = [0; 32];
        run.copy_from_slice(&bytes[32..64]);
        Ok(Self { purpose, rank: number(16), ranks: number(20), stream: number(24), run })
    }
}

/// Greets the server at the other end.
///
/// # Errors
/// Why it is not who it should be.
pub(crate) fn greet(
    stream: &TcpStream,
    secret: &Secret,
    hello: &Hello,
    deadline: Deadline,
) -> Result<Hello, JoinProblem> {
    let mut timed = Timed { stream, deadline };
    let own = hello.encode(nonce()?);
    timed.send(&own)?;
    let theirs: [u8; HELLO_BYTES] = timed.receive()?;
    let server = Hello::decode(&theirs)?;
    if server.run != hello.run {
        return Err(JoinProblem::OtherRun);
    }
    let proofs = Proofs::new(secret, &own, &theirs);
    timed.send(proofs.client.as_bytes())?;
    // A server that does not believe us hangs up.
    let proof: [u8; 32] = timed.receive().map_err(|_| JoinProblem::Secret)?;
    if proofs.server == proof { Ok(server) } else { Err(JoinProblem::Secret) }
}

/// Answers a client that has connected.
///
/// # Errors
/// Why it may not come in.
pub(crate) fn answer(
    stream: &TcpStream,
    secret: &Secret,
    hello: &Hello,
    deadline: Deadline,
) -> Result<Hello, JoinProblem> {
    let mut timed = Timed { stream, deadline };
    let theirs: [u8; HELLO_BYTES] = timed.receive()?;
    let own = hello.encode(nonce()?);
    // One of another version is told ours.
    timed.send(&own)?;
    let client = Hello::decode(&theirs)?;
    if client.run != hello.run {
        return Err(JoinProblem::OtherRun);
    }
    let proofs = Proofs::new(secret, &theirs, &own);
    let proof: [u8; 32] = timed.receive()?;
    // Compared in constant time.
    if proofs.client != proof {
        return Err(JoinProblem::Secret);
    }
    timed.send(proofs.server.as_bytes())?;
    Ok(client)
}

struct Proofs {
    client: blake3::Hash,
    server: blake3::Hash,
}

impl Proofs {
    fn new(secret: &Secret, client: &[u8; HELLO_BYTES], server: &[u8; HELLO_BYTES]) -> Self {
        let transcript = blake3::Hasher::new().update(client).update(server).finalize();
        let key = blake3::keyed_hash(&secret.0, transcript.as_bytes());
        let proof = |label: &[u8]| {
            blake3::Hasher::new_keyed(key.as_bytes()).update(label).update(transcript.as_bytes()).finalize()
        };
        Self { client: proof(b"client"), server: proof(b"server") }
    }
}

fn nonce() -> Result<[u8; 32], JoinProblem> {
    let mut bytes = [0; 32];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(32) => Ok(bytes),
        _ => Err(JoinProblem::Connection(ErrorKind::Other)),
    }
}

/// A socket on which nothing takes longer than it may, however slowly bytes trickle.
pub(crate) struct Timed<'a> {
    pub(crate) stream: &'a TcpStream,
    pub(crate) deadline: Deadline,
}

impl Timed<'_> {
    /// Sends all of `bytes`.
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

    /// Receives just so many bytes.
    pub(crate) fn receive<const BYTES: usize>(&mut self) -> Result<[u8; BYTES], JoinProblem> {
        let (mut bytes, mut read) = ([0; BYTES], 0);
        while read < BYTES {
            self.stream.set_read_timeout(Some(self.rest()?)).map_err(problem)?;
            match self.stream.read(&mut bytes[read..]) {
                Ok(0) => return Err(JoinProblem::Connection(ErrorKind::UnexpectedEof)),
                Ok(count) => read += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(problem(error)),
            }
        }
        Ok(bytes)
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
    use std::{net::TcpListener, os::unix::fs::PermissionsExt, thread};

    use super::*;

    const HELLO: Hello = Hello { purpose: Purpose::Ranks, rank: 1, ranks: 2, stream: 0, run: [7; 32] };

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(5))
    }

    /// Both ends' verdicts of a connection between a client and a server.
    fn shake(
        client: impl FnOnce(&TcpStream) -> Result<Hello, JoinProblem>,
        server: impl FnOnce(&TcpStream) -> Result<Hello, JoinProblem> + Send,
    ) -> (Result<Hello, JoinProblem>, Result<Hello, JoinProblem>) {
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
    fn a_secret_of_roots_may_be_given_to_a_group_and_no_other_to_anybody() {
        for (mode, owner, user, expected) in [
            (0o600, 1000, 1000, false),
            (0o400, 1000, 1000, false),
            (0o640, 1000, 1000, true),
            (0o604, 1000, 1000, true),
            (0o440, 0, 1000, false),
            (0o640, 0, 1000, false),
            (0o660, 0, 1000, true),
            (0o444, 0, 1000, true),
            (0o440, 0, 0, true),
        ] {
            assert_eq!(others_may_read(mode, owner, user), expected, "{mode:o} {owner} {user}");
        }
    }

    #[test]
    fn two_that_know_the_secret_know_each_other() {
        let secret = Secret::of(b"0123456789abcdef");
        let own = Hello { rank: 0, ..HELLO };
        let verdicts = shake(
            |stream| greet(stream, &secret, &HELLO, soon()),
            |stream| answer(stream, &secret, &own, soon()),
        );
        assert_eq!(verdicts, (Ok(own), Ok(HELLO)));
    }

    #[test]
    fn neither_end_believes_one_without_the_secret_or_of_another_run() {
        let secrets = [Secret::of(b"0123456789abcdef"), Secret::of(b"0123456789abcdeF")];
        let verdicts = shake(
            |stream| greet(stream, &secrets[0], &HELLO, soon()),
            |stream| answer(stream, &secrets[1], &HELLO, soon()),
        );
        assert_eq!(verdicts, (Err(JoinProblem::Secret), Err(JoinProblem::Secret)));
        let other = Hello { run: [8; 32], ..HELLO };
        let verdicts = shake(
            |stream| greet(stream, &secrets[0], &HELLO, soon()),
            |stream| answer(stream, &secrets[0], &other, soon()),
        );
        assert_eq!(verdicts, (Err(JoinProblem::OtherRun), Err(JoinProblem::OtherRun)));
    }

    #[test]
    fn a_proof_that_is_sent_back_proves_nothing() {
        let secret = Secret::of(b"0123456789abcdef");
        let (client, _) = shake(
            |stream| greet(stream, &secret, &HELLO, soon()),
            // Sends back what it gets.
            |stream| {
                let mut timed = Timed { stream, deadline: soon() };
                let hello: [u8; HELLO_BYTES] = timed.receive()?;
                timed.send(&hello)?;
                let proof: [u8; 32] = timed.receive()?;
                timed.send(&proof).map(|()| HELLO)
            },
        );
        assert_eq!(client, Err(JoinProblem::Secret));
    }

    #[test]
    fn another_version_is_told_by_its_number() {
        let secret = Secret::none();
        let (client, server) = shake(
            |stream| {
                let mut hello = HELLO.encode([0; 32]);
                hello[8] = 9;
                let mut timed = Timed { stream, deadline: soon() };
                timed.send(&hello)?;
                Hello::decode(&timed.receive()?)
            },
            |stream| answer(stream, &secret, &HELLO, soon()),
        );
        assert_eq!((client, server), (Ok(HELLO), Err(JoinProblem::Version { theirs: 9, ours: VERSION })));
    }

    #[test]
    fn one_who_trickles_is_hung_up_on_in_time() {
        let secret = Secret::none();
        let begin = std::time::Instant::now();
        let limit = Duration::from_millis(200);
        let (_, server) = shake(
            |stream| {
                let mut stream = stream;
                for byte in HELLO.encode([0; 32]) {
                    if stream.write_all(&[byte]).is_err() {
                        break;
                    }
                    thread::sleep(Duration::from_millis(10));
                }
                Ok(HELLO)
            },
            |stream| answer(stream, &secret, &HELLO, Deadline::after(limit)),
        );
        assert_eq!(server, Err(JoinProblem::Connection(ErrorKind::TimedOut)));
        assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
    }

    #[test]
    fn a_secret_that_others_may_read_or_that_is_short_is_refused() {
        let dir = std::env::temp_dir().join(format!("lockstep-secret-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let path = dir.join("secret");
        let verdict = |bytes: &[u8], mode: u32| {
            fs::write(&path, bytes).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            Secret::from_file(&path).map(|_| ()).map_err(|problem| problem.to_string())
        };
        assert_eq!(verdict(b"0123456789abcdef\n", 0o600), Ok(()));
        assert!(verdict(b"0123456789abcdef\n", 0o640).unwrap_err().contains("mode 640"));
        assert!(verdict(b"short\n", 0o600).unwrap_err().contains("5 bytes"));
        fs::remove_dir_all(&dir).unwrap();
        assert!(Secret::from_file(&path).is_err());
        assert_eq!(format!("{:?}", Secret::of(b"x")), "Secret(***)");
    }

    #[test]
    fn a_pairing_code_is_read_as_people_type_it_and_serves_as_a_file() {
        let code = PairingCode::random().unwrap();
        assert_ne!(code, PairingCode::random().unwrap());
        let text = code.to_string();
        assert_eq!((text.len(), text.matches('-').count()), (23, 3), "{text}");
        assert_eq!(PairingCode::parse(&text), Some(code.clone()));
        assert_eq!(PairingCode::parse(&text.to_lowercase().replace('-', " ")), Some(code.clone()));
        assert_eq!(
            PairingCode::parse("olih2-33333-44444-5555Z"),
            PairingCode::parse("011H2 33333 44444 5555z")
        );
        for wrong in ["", "K7QX2", "U0000-00000-00000-00000", &format!("{text}0")] {
            assert_eq!(PairingCode::parse(wrong), None, "{wrong}");
        }
        let kept = SecretInMemory::new(code.bytes()).unwrap();
        let found = Secret::from_file(&kept.path()).unwrap();
        assert_eq!(found.0, Secret::of(code.bytes()).0);
    }
}
