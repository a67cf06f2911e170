//! The client's side of connecting: it connects, does the handshake, and retries after passing failures until its deadline.

use std::{
    io::ErrorKind,
    net::{SocketAddr, TcpStream},
    thread,
    time::Duration,
};

use super::{
    descriptors::is_shortage,
    handshake::{HANDSHAKE_LIMIT, Hello, shake_hands},
    secret::{Secret, random},
    wire::Connection,
};
use crate::{CommError, Deadline, JoinProblem};

/// Pauses between connection attempts. Each is twice as long as the one before, up to a maximum, and varied at random by up to
/// a half, so that ranks refused together do not return together.
#[derive(Debug)]
pub(crate) struct Backoff(Duration);

impl Default for Backoff {
    fn default() -> Self {
        Self(Self::FIRST)
    }
}

impl Backoff {
    const FIRST: Duration = Duration::from_millis(10);
    const LONGEST: Duration = Duration::from_millis(320);

    /// Sleeps until the next attempt. Returns false, without sleeping, if that would be after the deadline.
    pub(crate) fn pause(&mut self, deadline: Deadline) -> bool {
        // Without random numbers there is no jitter.
        let part = random::<1>().map_or(0.5, |[byte]| f64::from(byte) / 256.0);
        let pause = self.0.mul_f64(0.5 + part);
        self.0 = (self.0 * 2).min(Self::LONGEST);
        if deadline.remaining() <= pause {
            return false;
        }
        thread::sleep(pause);
        true
    }
}

/// Response to a server's refusal of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnRefusal {
    /// Another attempt, since the server may not listen yet.
    Retry,
    /// An error at once, since the server has listened before.
    Fail,
}

/// Connects to a server at one of `addresses`, tried in turn, and does the handshake. Returns the connection with the keys of
/// its handshake, the hello of the server, and the address.
///
/// # Errors
/// Immediately if the only address belongs to another run or version, if the server has another secret, if it refuses and
/// `on_refusal` says so, or if this process has no descriptors left. At the deadline if no server has accepted this client.
pub(crate) fn connect(
    addresses: &[SocketAddr],
    secret: &Secret,
    hello: &Hello,
    on_refusal: OnRefusal,
    deadline: Deadline,
) -> Result<(Connection, Hello, SocketAddr), CommError> {
    let mut backoff = Backoff::default();
    let mut failed = JoinProblem::Connection(ErrorKind::TimedOut);
    let is_only = addresses.len() == 1;
    loop {
        for address in addresses {
            let limit = Deadline::after(deadline.remaining().min(HANDSHAKE_LIMIT));
            let problem = match attempt(*address, secret, hello, limit) {
                Ok((connection, server)) => return Ok((connection, server, *address)),
                Err(CommError::Join(problem)) => problem,
                Err(error) => return Err(error),
            };
            let is_refusal = problem == JoinProblem::Connection(ErrorKind::ConnectionRefused);
            let is_final = match problem {
                JoinProblem::Secret => true,
                JoinProblem::OtherRun | JoinProblem::Version { .. } => is_only,
                _ => is_refusal && on_refusal == OnRefusal::Fail,
            };
            if is_final {
                return Err(CommError::Join(problem));
            }
            tracing::trace!(%address, %problem, "not let in yet");
            // Among several ports, a port with another program is more informative than one without a listener.
            if is_only || !is_refusal {
                failed = problem;
            }
        }
        if !backoff.pause(deadline) {
            return Err(CommError::Join(unreached(addresses, &failed, deadline)));
        }
    }
}

fn attempt(
    address: SocketAddr,
    secret: &Secret,
    hello: &Hello,
    deadline: Deadline,
) -> Result<(Connection, Hello), CommError> {
    let failed = |kind| CommError::Join(JoinProblem::Connection(kind));
    let limit = deadline.remaining().max(Duration::from_millis(1));
    let stream = TcpStream::connect_timeout(&address, limit).map_err(|error| {
        // A shortage of this process is no fault of the server's.
        if is_shortage(&error) {
            CommError::io("connect to another rank or node")(error)
        } else {
            failed(error.kind())
        }
    })?;
    // A socket can connect to itself if no process listens on a port of the ephemeral range.
    if stream.local_addr().is_ok_and(|own| own == address) {
        return Err(failed(ErrorKind::ConnectionRefused));
    }
    let (server, keys) = shake_hands(&stream, secret, hello, deadline).map_err(CommError::Join)?;
    Ok((Connection { socket: stream, keys: Some(keys) }, server))
}

fn unreached(addresses: &[SocketAddr], failed: &JoinProblem, deadline: Deadline) -> JoinProblem {
    let waited = deadline.limit().as_secs();
    let ports: Vec<String> = addresses.iter().map(|address| address.port().to_string()).collect();
    let what = if ports.len() == 1 {
        format!(
            "no answer for {waited} s ({failed}): is the run started on node 0, and can this machine reach it?"
        )
    } else {
        format!("rank 0 answered on none of the ports {} for {waited} s ({failed})", ports.join(", "))
    };
    JoinProblem::Address { address: addresses[0].to_string(), what }
}
