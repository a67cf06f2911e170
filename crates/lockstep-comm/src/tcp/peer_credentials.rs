//! Secret of ranks on one host that were given none. The first rank creates it, and sends it over a Unix socket to processes of
//! the same user, as the kernel reports it.
//!
//! The socket has a name in the abstract namespace, which belongs to the same network namespace as the loopback device:
//! whoever can reach one can reach the other. Both ends query the user at the other end from the kernel
//! (`SO_PEERCRED`). If a process of another user has taken the name first, the first rank appends random characters to
//! the name, and the others search all names with this prefix.

use std::{
    fs,
    io::{self, ErrorKind, Read, Write},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    thread,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with},
};

use super::{
    connect::Backoff,
    secret::{Secret, random},
};
use crate::{CommError, Deadline, JoinProblem, stoppable_thread::StoppableThread};

/// Length in bytes of the first rank's message: the key of its secret, and the port where it listens.
const MESSAGE_BYTES: usize = 34;
/// Number of connections that may wait to be accepted.
const BACKLOG: i32 = 4096;
/// Maximum wait for the message, which is sent when a connection is accepted.
const MESSAGE_LIMIT: Duration = Duration::from_secs(2);
/// The kernel's list of Unix sockets.
const LIST: &str = "/proc/net/unix";
/// Number of attempts to bind a name whose owner does not answer, and the time between two attempts.
const ATTEMPTS: usize = 10;
const ATTEMPT: Duration = Duration::from_millis(5);
const WHAT: &str = "hand out the run's secret to the ranks of this machine";

/// Name under which ranks of one run find each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Name(String);

impl Name {
    /// Returns the name of the run that meets at `port`.
    pub(crate) fn new(port: u16, run: &str) -> Self {
        let digest = blake3::Hasher::new().update(&port.to_le_bytes()).update(run.as_bytes()).finalize();
        Self(format!("lockstep-{}", &digest.to_hex()[..32]))
    }

    fn address(name: &str) -> io::Result<SocketAddrUnix> {
        Ok(SocketAddrUnix::new_abstract_name(name.as_bytes())?)
    }

    /// Returns the names of other sockets that have this one as a prefix.
    fn longer(&self) -> Vec<String> {
        let list = fs::read(LIST).unwrap_or_default();
        let list = String::from_utf8_lossy(&list);
        let names = list.lines().filter_map(|line| line.split_once('@').map(|(_, name)| name.to_owned()));
        let mut names: Vec<String> =
            names.filter(|name| name.len() > self.0.len() && name.starts_with(&self.0)).collect();
        names.dedup();
        names
    }

    /// Returns a socket bound to the name, or, if another user has it, to a longer one. `None` if a process of the same
    /// user has either.
    fn bind(&self) -> io::Result<Option<OwnedFd>> {
        for _ in 0..ATTEMPTS {
            if self.is_held_by_own("") {
                return Ok(None);
            }
            match bound(&self.0) {
                // Another process of this user may have bound it and not be listening yet.
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
        // If two processes get here at once, the one with the lesser name is first.
        Ok((!self.is_held_by_own(&name)).then_some(socket))
    }

    /// Returns true if a process of this user listens under the name or a longer one. If `own` is not empty, only longer names
    /// less than `own` count.
    fn is_held_by_own(&self, own: &str) -> bool {
        let longer = self.longer().into_iter().filter(|name| own.is_empty() || name.as_str() < own);
        std::iter::once(self.0.clone()).chain(longer).any(|name| reach(&name).is_ok())
    }
}

/// Returns a socket that listens under `name`.
fn bound(name: &str) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    bind(&socket, &Name::address(name)?)?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Returns the user at the other end of a Unix socket: the one who connected, or who listens.
fn peer_user(socket: &impl AsFd) -> io::Result<u32> {
    /// The kernel's `struct ucred`. rustix's type does not allow process id 0, which a process in another PID namespace has.
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
    // SAFETY: the descriptor is open. The kernel writes at most `length` bytes to three integers, for which every bit
    // pattern is valid.
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

/// Connects to a name without waiting.
///
/// # Errors
/// If no process listens there, or one of another user does ([`ErrorKind::PermissionDenied`]).
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

/// Thread of the first rank that sends the secret to processes of the same user, until this handle is dropped.
#[derive(Debug)]
pub(crate) struct SecretServer {
    _thread: StoppableThread,
}

impl SecretServer {
    /// Starts to send `secret`, and the port where the first rank listens, under `name`. `None` if another process of this user
    /// does so already.
    ///
    /// # Errors
    /// If the socket or the thread cannot be created.
    pub(crate) fn open(name: &Name, secret: &Secret, port: u16) -> Result<Option<Self>, CommError> {
        let Some(socket) = name.bind().map_err(CommError::io(WHAT))? else { return Ok(None) };
        let mut message = [0; MESSAGE_BYTES];
        message[..32].copy_from_slice(secret.key());
        message[32..].copy_from_slice(&port.to_le_bytes());
        let serve = move |stop: &OwnedFd| serve(&UnixListener::from(socket), stop, &message);
        let _thread = StoppableThread::spawn("lockstep-secret", serve).map_err(CommError::io(WHAT))?;
        Ok(Some(Self { _thread }))
    }
}

/// Sends `message` to processes of the same user that connect, until `stop` is set.
fn serve(listener: &UnixListener, stop: &OwnedFd, message: &[u8; MESSAGE_BYTES]) {
    let mut has_warned = false;
    loop {
        let mut polled =
            [PollFd::new(stop, PollFlags::IN), PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)];
        let _ = poll(&mut polled, None);
        if !polled[0].revents().is_empty() {
            return;
        }
        let mut stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
            // Without free descriptors, pause instead of failing again immediately.
            Err(_) => {
                thread::sleep(Duration::from_millis(10));
                continue;
            }
        };
        match peer_user(&stream) {
            // The buffer of a new socket has room for it.
            Ok(user) if user == rustix::process::geteuid().as_raw() => {
                let _ = stream.write_all(message);
            }
            Ok(user) if !std::mem::replace(&mut has_warned, true) => {
                tracing::warn!(user, "turned away a process of another user that asked for the run's secret");
            }
            _ => {}
        }
    }
}

/// Receives the secret, and the port where the first rank listens, from the first rank.
///
/// # Errors
/// If no process of this user sends them before the deadline.
pub(crate) fn fetch(name: &Name, port: u16, deadline: Deadline) -> Result<(Secret, u16), JoinProblem> {
    let mut backoff = Backoff::default();
    let mut is_squatted = false;
    loop {
        for name in std::iter::once(name.0.clone()).chain(name.longer()) {
            match reach(&name).and_then(|stream| receive(stream, deadline)) {
                Ok(message) => {
                    let mut key = [0; 32];
                    key.copy_from_slice(&message[..32]);
                    return Ok((Secret::from_key(key), u16::from_le_bytes([message[32], message[33]])));
                }
                Err(error) => is_squatted |= error.kind() == ErrorKind::PermissionDenied,
            }
        }
        if !backoff.pause(deadline) {
            let waited = deadline.limit().as_secs();
            let stranger = if is_squatted { "; a process of another user waits there" } else { "" };
            let what = format!(
                "no answer for {waited} s{stranger}: is rank 0 (or node 0) of this run started on this machine, by the same user?"
            );
            return Err(JoinProblem::Address { address: format!("127.0.0.1:{port}"), what });
        }
    }
}

fn receive(mut stream: UnixStream, deadline: Deadline) -> io::Result<[u8; MESSAGE_BYTES]> {
    let limit = deadline.remaining().clamp(Duration::from_millis(1), MESSAGE_LIMIT);
    stream.set_read_timeout(Some(limit))?;
    let mut message = [0; MESSAGE_BYTES];
    stream.read_exact(&mut message)?;
    Ok(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_of_one_user_get_the_secret_and_a_second_giver_is_told() {
        let name = Name::new(7, &format!("a test of {}", std::process::id()));
        let nobody = fetch(&name, 7, Deadline::after(Duration::from_millis(50))).unwrap_err();
        assert!(nobody.to_string().contains("127.0.0.1:7: no answer"), "{nobody}");
        let secret = Secret::random().unwrap();
        let given = SecretServer::open(&name, &secret, 1234).unwrap().unwrap();
        let soon = Deadline::after(Duration::from_secs(5));
        let (found, port) = fetch(&name, 7, soon).unwrap();
        assert_eq!((found.key(), port), (secret.key(), 1234));
        assert!(SecretServer::open(&name, &secret, 1).unwrap().is_none());
        drop(given);
        assert!(SecretServer::open(&name, &secret, 1).unwrap().is_some());
    }
}
