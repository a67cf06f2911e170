//! The secret of ranks on one host that nobody could hand one: the first makes it, and gives it over a Unix socket to whoever the
//! kernel says belongs to the same user.
//!
//! The socket has a name in the abstract namespace, which is the loopback device's: who can reach the one can reach the other. Both
//! ends ask the kernel for the user at the other end (`SO_PEERCRED`). A process of another user that has taken the name first
//! is passed over: the first rank then adds random characters to the name, and the others look through the names that begin
//! alike.

use std::{
    fs,
    io::{self, ErrorKind, Read, Write},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    sync::Arc,
    thread,
    time::Duration,
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, eventfd, poll},
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with},
};

use super::{
    secret::{Secret, random},
    visit::Backoff,
};
use crate::{CommError, Deadline, JoinProblem};

/// Bytes that the first rank sends: its secret's key, and the port where it listens.
const GIFT_BYTES: usize = 34;
/// Connections that may wait.
const BACKLOG: i32 = 4096;
/// The longest wait for a gift, which is sent when a connection is accepted.
const PATIENCE: Duration = Duration::from_secs(2);
/// The kernel's list of Unix sockets.
const LIST: &str = "/proc/net/unix";
/// Attempts to take a name that somebody has who does not answer, and the time between two.
const ATTEMPTS: usize = 10;
const ATTEMPT: Duration = Duration::from_millis(5);
const WHAT: &str = "hand out the run's secret to the ranks of this machine";

/// The name under which ranks of one run look for each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Name(String);

impl Name {
    /// The name of the run that is to meet at `port`.
    pub(crate) fn new(port: u16, run: &str) -> Self {
        let digest = blake3::Hasher::new().update(&port.to_le_bytes()).update(run.as_bytes()).finalize();
        Self(format!("lockstep-{}", &digest.to_hex()[..32]))
    }

    fn address(name: &str) -> io::Result<SocketAddrUnix> {
        Ok(SocketAddrUnix::new_abstract_name(name.as_bytes())?)
    }

    /// The names of other sockets that begin with this one.
    fn longer(&self) -> Vec<String> {
        let list = fs::read(LIST).unwrap_or_default();
        let list = String::from_utf8_lossy(&list);
        let names = list.lines().filter_map(|line| line.split_once('@').map(|(_, name)| name.to_owned()));
        let mut names: Vec<String> =
            names.filter(|name| name.len() > self.0.len() && name.starts_with(&self.0)).collect();
        names.dedup();
        names
    }

    /// A socket that is bound to the name, or, if another user has it, to a longer one; `None` if a process of the same user has
    /// either.
    fn bind(&self) -> io::Result<Option<OwnedFd>> {
        for _ in 0..ATTEMPTS {
            if self.is_held_by_own("") {
                return Ok(None);
            }
            match bound(&self.0) {
                // One of this user may be between its binding and its listening.
                Err(error) if error.kind() == ErrorKind::AddrInUse => thread::sleep(ATTEMPT),
                bound => return bound.map(Some),
            }
        }
        let suffix: [u8; 16] = random().map_err(|_| ErrorKind::Other)?;
        let suffix: String = suffix.iter().map(|byte| format!("{byte:02x}")).collect();
        tracing::warn!(
            "a process of another user has taken the name where the ranks of this run meet: they meet under another one"
        );
        let name = format!("{}-{suffix}", self.0);
        let socket = bound(&name)?;
        // Of two that come here at once, the one with the lesser name is the first.
        Ok((!self.is_held_by_own(&name)).then_some(socket))
    }

    /// Returns true if a process of this user listens under the name, or under a longer one: any, or one less than `own`.
    fn is_held_by_own(&self, own: &str) -> bool {
        let longer = self.longer().into_iter().filter(|name| own.is_empty() || name.as_str() < own);
        std::iter::once(self.0.clone()).chain(longer).any(|name| reach(&name).is_ok())
    }
}

/// A socket that listens under `name`.
fn bound(name: &str) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    bind(&socket, &Name::address(name)?)?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// The user at the other end of a Unix socket: the one who connected, or who listens.
fn peer_user(socket: &impl AsFd) -> io::Result<u32> {
    /// The kernel's `struct ucred`; rustix's has a process id that may not be 0, which it is for one in another pid namespace.
    #[repr(C)]
    #[derive(Default)]
    struct Credentials {
        pid: i32,
        uid: u32,
        gid: u32,
    }
    unsafe extern "C" {
        fn getsockopt(socket: i32, level: i32, name: i32, value: *mut Credentials, length: *mut u32) -> i32;
    }
    const SOL_SOCKET: i32 = 1;
    const SO_PEERCRED: i32 = 17;
    let mut found = Credentials { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut length = size_of::<Credentials>() as u32;
    let descriptor = socket.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open, and the kernel writes at most `length` bytes to three integers, for which any bytes are
    // valid.
    let result = unsafe { getsockopt(descriptor, SOL_SOCKET, SO_PEERCRED, &raw mut found, &raw mut length) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    if length as usize == size_of::<Credentials>() {
        Ok(found.uid)
    } else {
        Err(ErrorKind::InvalidData.into())
    }
}

fn is_own(socket: &impl AsFd) -> io::Result<bool> {
    Ok(peer_user(socket)? == rustix::process::geteuid().as_raw())
}

/// Connects to a name, without waiting.
///
/// # Errors
/// [`ErrorKind::PermissionDenied`] if another user listens there; what the system says.
fn reach(name: &str) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &Name::address(name)?)?;
    if !is_own(&socket)? {
        return Err(ErrorKind::PermissionDenied.into());
    }
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// The thread of the first rank that gives the secret to others of the same user, until this is dropped.
#[derive(Debug)]
pub(crate) struct HandOut {
    stop: Arc<OwnedFd>,
    thread: Option<thread::JoinHandle<()>>,
}

impl HandOut {
    /// Hands out `secret` under `name`, and the port where the first rank listens; `None` if another process of this user does.
    ///
    /// # Errors
    /// What the system says.
    pub(crate) fn open(name: &Name, secret: &Secret, port: u16) -> Result<Option<Self>, CommError> {
        let Some(socket) = name.bind().map_err(CommError::io(WHAT))? else { return Ok(None) };
        Self::start(UnixListener::from(socket), secret, port).map(Some).map_err(CommError::io(WHAT))
    }

    fn start(listener: UnixListener, secret: &Secret, port: u16) -> io::Result<Self> {
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let mut gift = [0; GIFT_BYTES];
        gift[..32].copy_from_slice(secret.key());
        gift[32..].copy_from_slice(&port.to_le_bytes());
        let stopped = Arc::clone(&stop);
        let give = move || {
            let mut told = false;
            loop {
                let mut polled = [
                    PollFd::new(&stopped, PollFlags::IN),
                    PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN),
                ];
                let _ = poll(&mut polled, None);
                if !polled[0].revents().is_empty() {
                    return;
                }
                let mut stream = match listener.accept() {
                    Ok((stream, _)) => stream,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
                    // Out of descriptors: a pause, instead of the same answer at once.
                    Err(_) => {
                        thread::sleep(Duration::from_millis(10));
                        continue;
                    }
                };
                match peer_user(&stream) {
                    // The buffer of a new socket holds it.
                    Ok(user) if user == rustix::process::geteuid().as_raw() => {
                        let _ = stream.write_all(&gift);
                    }
                    Ok(user) if !std::mem::replace(&mut told, true) => {
                        tracing::warn!(
                            user,
                            "turned away a process of another user that asked for the run's secret"
                        );
                    }
                    _ => {}
                }
            }
        };
        let thread = thread::Builder::new().name("lockstep-secret".to_owned()).spawn(give)?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for HandOut {
    fn drop(&mut self) {
        // A counter at its limit would refuse; it is read as set then.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The secret, and the port where the first rank listens, as that one hands them out.
///
/// # Errors
/// [`JoinProblem::Address`] if nobody of this user does before the deadline.
pub(crate) fn fetch(name: &Name, port: u16, deadline: Deadline) -> Result<(Secret, u16), JoinProblem> {
    let mut backoff = Backoff::default();
    let mut is_squatted = false;
    loop {
        for name in std::iter::once(name.0.clone()).chain(name.longer()) {
            match reach(&name).and_then(|stream| receive(stream, deadline)) {
                Ok(gift) => {
                    let mut key = [0; 32];
                    key.copy_from_slice(&gift[..32]);
                    return Ok((Secret::from_key(key), u16::from_le_bytes([gift[32], gift[33]])));
                }
                Err(error) => is_squatted |= error.kind() == ErrorKind::PermissionDenied,
            }
        }
        if !backoff.pause(deadline) {
            let waited = deadline.limit().as_secs();
            let stranger = if is_squatted { "; a process of another user waits there" } else { "" };
            let what = format!(
                "nobody answered for {waited} s{stranger}: is rank 0 (or node 0) of this run started on this machine, by the same user?"
            );
            return Err(JoinProblem::Address { address: format!("127.0.0.1:{port}"), what });
        }
    }
}

fn receive(mut stream: UnixStream, deadline: Deadline) -> io::Result<[u8; GIFT_BYTES]> {
    let limit = deadline.remaining().clamp(Duration::from_millis(1), PATIENCE);
    stream.set_read_timeout(Some(limit))?;
    let mut gift = [0; GIFT_BYTES];
    stream.read_exact(&mut gift)?;
    Ok(gift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_of_one_user_get_the_secret_and_a_second_giver_is_told() {
        let name = Name::new(7, &format!("a test of {}", std::process::id()));
        let nobody = fetch(&name, 7, Deadline::after(Duration::from_millis(50))).unwrap_err();
        assert!(nobody.to_string().contains("127.0.0.1:7: nobody answered"), "{nobody}");
        let secret = Secret::random().unwrap();
        let given = HandOut::open(&name, &secret, 1234).unwrap().unwrap();
        let soon = Deadline::after(Duration::from_secs(5));
        let (found, port) = fetch(&name, 7, soon).unwrap();
        assert_eq!((found.key(), port), (secret.key(), 1234));
        assert!(HandOut::open(&name, &secret, 1).unwrap().is_none());
        drop(given);
        assert!(HandOut::open(&name, &secret, 1).unwrap().is_some());
    }
}
