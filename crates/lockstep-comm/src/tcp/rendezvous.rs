//! The rendezvous of nodes, or ranks. The first of them listens at an address that all know, the others send their data, and
//! all receive the data of all.
//!
//! The [`Acceptor`] authenticates every connection before anything else of it is read.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs},
};

use super::{
    acceptor::{AcceptedConnection, Acceptor},
    connect::{OnRefusal, connect},
    descriptors::allow_descriptors,
    handshake::{HANDSHAKE_LIMIT, Hello, Purpose, TimedStream, word},
    peer_credentials::{Name, SecretServer, fetch},
    rejections::Rejections,
    roster::{self, INFO_BYTES, Participant, Registry},
    secret::Secret,
    wire::Connection,
};
use crate::{CommError, Deadline, JoinProblem, call};

/// Default port of the rendezvous; the same as torchrun's.
pub const DEFAULT_PORT: u16 = 29500;
/// Range of ports for launchers that name a run, but no port.
const RUN_PORTS: std::ops::Range<u16> = 20_000..29_000;

const LISTEN: &str = "listen for the others";
/// Maximum number of connections from one rank to another, all of which may come at once.
const CONNECTIONS: usize = 17;

/// Address and credentials of a rendezvous.
#[derive(Debug, Default)]
pub struct RendezvousEndpoint {
    /// Name or address of the machine of node 0, or rank 0.
    pub host: String,
    /// Port that it listens on.
    pub port: u16,
    /// Ports to try in this order if another program listens on `port`; the same list on all ranks.
    pub fallback_ports: Vec<u16>,
    /// Socket that already listens there.
    pub listener: Option<TcpListener>,
    /// Name of the run; participants of other runs are rejected.
    pub run: String,
    /// Secret of the run. `None` is allowed for a loopback host only: the first participant then creates a secret and
    /// gives it to processes of its own user.
    pub secret: Option<Secret>,
    /// Statistics of the connections that this end rejects while it waits.
    pub rejections: Rejections,
}

/// Outcome of beginning a rendezvous as its first participant.
#[derive(Debug)]
pub(crate) enum Opened {
    /// This process listens. If it created the secret, it hands it out until this is dropped.
    First(Option<SecretServer>),
    /// The address, or the right to hand out the secret, belongs to another process.
    Taken,
}

impl RendezvousEndpoint {
    /// Returns the port of the rendezvous of a run that has a name but no port; [`DEFAULT_PORT`] for an empty name.
    pub fn port_of_run(run: &str) -> u16 {
        if run.is_empty() {
            return DEFAULT_PORT;
        }
        let hash = call::hash(run.bytes().map(usize::from));
        RUN_PORTS.start + (hash % u64::from(RUN_PORTS.end - RUN_PORTS.start)) as u16
    }

    /// Returns true if only processes of this machine can take part.
    pub fn is_local(&self) -> bool {
        self.host == "localhost" || self.host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    }

    /// Returns the secret, which a rendezvous has once [`RendezvousEndpoint::begin`] or [`RendezvousEndpoint::find`] has
    /// succeeded.
    pub(crate) fn key(&self) -> Result<Secret, CommError> {
        self.secret.clone().ok_or_else(|| CommError::Join(JoinProblem::NoSecret { host: self.host.clone() }))
    }

    /// Begins the rendezvous as its first participant: listens, and creates and hands out a secret if there is none.
    ///
    /// # Errors
    /// If the host can be reached from other machines and there is no secret, or if the system refuses the address.
    pub(crate) fn begin(&mut self) -> Result<Opened, CommError> {
        if self.secret.is_some() || !self.is_local() {
            self.key()?;
            let Some(listener) = self.listen()? else { return Ok(Opened::Taken) };
            self.listener = Some(listener);
            return Ok(Opened::First(None));
        }
        let name = Name::new(self.port, &self.run);
        // Only processes that receive the secret need to know the port, so no other process can take it first.
        let mut address = self.resolve()?;
        address.set_port(0);
        let listener = self.listener.take().map_or_else(|| TcpListener::bind(address), Ok);
        let listener = listener.map_err(|error| self.problem(error))?;
        let port = listener.local_addr().map_err(CommError::io(LISTEN))?.port();
        let secret = Secret::random().map_err(CommError::Join)?;
        let Some(given) = SecretServer::open(&name, &secret, port)? else {
            self.listener = Some(listener);
            return Ok(Opened::Taken);
        };
        (self.secret, self.listener, self.port) = (Some(secret), Some(listener), port);
        self.fallback_ports.clear();
        Ok(Opened::First(Some(given)))
    }

    /// Receives the secret that the first participant hands out, unless there is one.
    ///
    /// # Errors
    /// If the host can be reached from other machines and there is no secret, or if none is handed out before the deadline.
    pub(crate) fn find(&mut self, deadline: Deadline) -> Result<(), CommError> {
        if self.secret.is_none() && self.is_local() {
            let name = Name::new(self.port, &self.run);
            let (secret, port) = fetch(&name, self.port, deadline).map_err(CommError::Join)?;
            (self.secret, self.port) = (Some(secret), port);
            self.fallback_ports.clear();
        }
        self.key().map(|_| ())
    }

    /// Returns the error of a first participant whose address belongs to another process.
    pub(crate) fn taken(&self) -> CommError {
        self.problem(
            "the port is taken: give all machines the same other one (--master-port, MASTER_PORT, --rdzv-endpoint)",
        )
    }

    pub(crate) fn run_digest(&self) -> [u8; 32] {
        *blake3::hash(self.run.as_bytes()).as_bytes()
    }

    fn problem(&self, what: impl ToString) -> CommError {
        let address = format!("{}:{}", self.host, self.port);
        CommError::Join(JoinProblem::Address { address, what: what.to_string() })
    }

    fn resolve(&self) -> Result<SocketAddr, CommError> {
        let addresses = (self.host.as_str(), self.port).to_socket_addrs();
        let mut addresses = addresses.map_err(|error| self.problem(error))?;
        addresses.next().ok_or_else(|| self.problem("the name has no address"))
    }

    /// Returns the first participant's listener: at the host if it is a literal address, else on all addresses of this machine.
    /// `None` if other programs have the port and all fallbacks.
    fn listen(&mut self) -> Result<Option<TcpListener>, CommError> {
        if let Some(listener) = self.listener.take() {
            return Ok(Some(listener));
        }
        let mut address = self.resolve()?;
        if !self.is_local() && self.host.parse::<IpAddr>().is_err() {
            address.set_ip(unspecified(address.ip()));
        }
        let ports: Vec<u16> = self.ports();
        for port in ports {
            address.set_port(port);
            match TcpListener::bind(address) {
                Ok(listener) => {
                    self.port = port;
                    return Ok(Some(listener));
                }
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                Err(error) => return Err(self.problem(error)),
            }
        }
        Ok(None)
    }

    /// Returns the ports where the first participant may listen, in the order in which it tries them.
    fn ports(&self) -> Vec<u16> {
        std::iter::once(self.port).chain(self.fallback_ports.iter().copied()).collect()
    }

    /// Returns true if the host is this machine.
    ///
    /// # Errors
    /// If the host's name has no address.
    pub fn is_here(&self) -> Result<bool, CommError> {
        let address = SocketAddr::new(self.resolve()?.ip(), 0);
        Ok(self.listener.is_some() || TcpListener::bind(address).is_ok())
    }

    /// Returns true if a process on this machine already listens at the address.
    pub fn port_is_taken(&self) -> bool {
        let bound = self.resolve().map(TcpListener::bind);
        matches!(bound, Ok(Err(error)) if error.kind() == io::ErrorKind::AddrInUse)
    }

    /// Sends `info` as number `own` of `count`, or as [`roster::ANY`], and waits for all participants. Returns the own number,
    /// the data of all in order, and the first participant's open acceptor.
    pub(crate) fn meet(
        &mut self,
        purpose: Purpose,
        own: usize,
        count: usize,
        info: [u8; INFO_BYTES],
        deadline: Deadline,
    ) -> Result<(usize, Vec<Participant>, Option<Acceptor>), CommError> {
        let secret = self.key()?;
        let run = self.run_digest();
        let hello = Hello { purpose, rank: own as u32, ranks: count as u32, stream: 0, run };
        if own == 0 {
            let Some(listener) = self.listen()? else { return Err(self.taken()) };
            allow_descriptors(count).map_err(CommError::Join)?;
            let own = listener.local_addr().map_err(CommError::io(LISTEN))?.ip();
            tracing::debug!(
                port = self.port,
                expected = count,
                what = purpose.participant(),
                "listening for the others"
            );
            let acceptor =
                Acceptor::open(listener, &secret, &hello, CONNECTIONS * count, self.rejections.clone());
            let acceptor = acceptor.map_err(CommError::io(LISTEN))?;
            let first = Participant { info, address: own };
            let participants = receive(&acceptor, &hello, first, deadline)?;
            return Ok((0, participants, Some(acceptor)));
        }
        tracing::debug!(
            host = %self.host, port = self.port, number = own, what = purpose.participant(), "looking for the first one"
        );
        let mut address = self.resolve()?;
        let addresses: Vec<SocketAddr> =
            self.ports().into_iter().map(|port| with_port(address, port)).collect();
        let (Connection { socket: stream, .. }, _, found) =
            connect(&addresses, &secret, &hello, OnRefusal::Retry, deadline)?;
        (self.port, address) = (found.port(), found);
        let mut timed = TimedStream { stream: &stream, deadline };
        timed.send(&info).map_err(CommError::Join)?;
        // The first participant waits for all others, and then reports those that did not come.
        let patience = Deadline::after(deadline.remaining() + HANDSHAKE_LIMIT);
        let mut timed = TimedStream { stream: &stream, deadline: patience };
        let verdict: [u8; 16] = timed.receive().map_err(CommError::Join)?;
        let number = understand(purpose, verdict, deadline).map_err(CommError::Join)?;
        let mut participants = receive_roster(&mut timed, count).map_err(CommError::Join)?;
        for participant in participants.iter_mut().filter(|participant| participant.address.is_unspecified())
        {
            participant.address = address.ip();
        }
        Ok((number, participants, None))
    }
}

fn with_port(mut address: SocketAddr, port: u16) -> SocketAddr {
    address.set_port(port);
    address
}

/// Returns the unspecified address of the same family.
fn unspecified(address: IpAddr) -> IpAddr {
    if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
}

/// Runs the first participant's side: waits for all, and sends the roster, or the problem, to everyone.
fn receive(
    acceptor: &Acceptor,
    hello: &Hello,
    first: Participant,
    deadline: Deadline,
) -> Result<Vec<Participant>, CommError> {
    let what = hello.purpose.participant();
    let mut registry = Registry::new(hello.purpose, hello.ranks as usize, first);
    let mut problem = None;
    while problem.is_none() && !registry.is_complete() {
        let Some(client) = acceptor.next(deadline) else {
            let (missing, waited_s) = (registry.missing(), deadline.limit().as_secs());
            let rejections = acceptor.rejections().to_string();
            problem = Some(JoinProblem::Missing { what, missing, waited_s, rejections });
            break;
        };
        let AcceptedConnection { hello: theirs, stream, address, .. } = client;
        if theirs.purpose != hello.purpose {
            continue;
        }
        tracing::debug!(what, number = theirs.rank, %address, "one has come");
        // A participant that hangs up now has to connect again.
        let Ok(info) = TimedStream { stream: &stream, deadline: soon() }.receive() else { continue };
        let reached = stream.local_addr().ok().map(|address| address.ip().to_canonical());
        let added = registry.add(&theirs, Participant { info, address }, reached, stream);
        if let Err((found, stream)) = added {
            // It receives the verdict as well.
            let _ = TimedStream { stream: &stream, deadline: soon() }.send(&verdict(0, Some(&found)));
            problem = Some(found);
        }
    }
    let (participants, connections) = registry.close();
    let roster = roster::encode(&participants);
    let mut failed = None;
    for (number, stream) in &connections {
        let mut timed = TimedStream { stream, deadline: soon() };
        let told = timed.send(&verdict(*number, problem.as_ref()));
        if problem.is_none() {
            let told = told
                .and_then(|()| timed.send(&(roster.len() as u32).to_le_bytes()))
                .and_then(|()| timed.send(&roster));
            // The others still learn whom they have met.
            failed = failed.or(told.err());
        }
    }
    problem.or(failed).map_or(Ok(participants), |problem| Err(CommError::Join(problem)))
}

fn soon() -> Deadline {
    Deadline::after(HANDSHAKE_LIMIT)
}

/// Receives the roster of `count` participants.
fn receive_roster(timed: &mut TimedStream<'_>, count: usize) -> Result<Vec<Participant>, JoinProblem> {
    let invalid = || JoinProblem::Connection(io::ErrorKind::InvalidData);
    let bytes = u32::from_le_bytes(timed.receive()?) as usize;
    if bytes > roster::max_bytes(count) {
        return Err(invalid());
    }
    let mut encoded = vec![0; bytes];
    timed.receive_into(&mut encoded)?;
    roster::decode(&encoded, count).ok_or_else(invalid)
}

/// Encodes the reply to a waiting participant: its number, or the problem.
fn verdict(number: usize, problem: Option<&JoinProblem>) -> [u8; 16] {
    let words: [u32; 4] = match problem {
        None => [0, number as u32, 0, 0],
        Some(JoinProblem::Duplicate { number, .. }) => [1, *number as u32, 0, 0],
        Some(JoinProblem::OtherSize { number, theirs, ours, .. }) => {
            [2, *number as u32, *theirs as u32, *ours as u32]
        }
        Some(JoinProblem::OutOfRange { value, .. }) => [3, *value as u32, 0, 0],
        Some(JoinProblem::Missing { missing, .. }) => {
            [4, missing.first().map_or(0, |first| *first as u32), 0, 0]
        }
        Some(_) => [5, 0, 0, 0],
    };
    let mut out = [0; 16];
    for (word, bytes) in words.iter().zip(out.chunks_exact_mut(4)) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    out
}

fn understand(purpose: Purpose, verdict: [u8; 16], deadline: Deadline) -> Result<usize, JoinProblem> {
    let word = |at| word(&verdict, at) as usize;
    let what = purpose.participant();
    Err(match word(0) {
        0 => return Ok(word(4)),
        1 => JoinProblem::Duplicate { what, number: word(4) },
        2 => JoinProblem::OtherSize { what, number: word(4), theirs: word(8), ours: word(12) },
        3 => {
            JoinProblem::OutOfRange { what, value: word(4), allowed: format!("a {what} below their number") }
        }
        4 => {
            let (missing, waited_s) = (vec![word(4)], deadline.limit().as_secs());
            JoinProblem::Missing { what, missing, waited_s, rejections: String::new() }
        }
        _ => JoinProblem::HungUp,
    })
}

#[cfg(test)]
mod tests {
    use std::{io::Write, net::TcpStream, thread};

    use super::*;

    #[test]
    fn a_roster_that_claims_more_than_its_participants_take_is_refused_before_it_is_read() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let stream = listener.accept().unwrap().0;
        for claim in [u32::MAX, roster::max_bytes(2) as u32 + 1] {
            sender.write_all(&claim.to_le_bytes()).unwrap();
            let mut timed = TimedStream { stream: &stream, deadline: soon() };
            let refused = receive_roster(&mut timed, 2);
            assert_eq!(refused, Err(JoinProblem::Connection(io::ErrorKind::InvalidData)), "{claim} bytes");
        }
    }

    #[test]
    fn a_participant_that_has_gone_does_not_keep_the_roster_from_the_others() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (secret, deadline) = (Secret::of(b"a test"), Deadline::after(HANDSHAKE_LIMIT));
        let endpoint = |listener| RendezvousEndpoint {
            host: "127.0.0.1".to_owned(),
            port,
            listener,
            secret: Some(secret.clone()),
            ..RendezvousEndpoint::default()
        };
        let meet = |rank: usize, listener: Option<TcpListener>| {
            endpoint(listener).meet(Purpose::Ranks, rank, 3, [rank as u8; INFO_BYTES], deadline)
        };
        let (first, last) = thread::scope(|scope| {
            let first = scope.spawn(|| meet(0, Some(listener)));
            let run = endpoint(None).run_digest();
            let hello = Hello { purpose: Purpose::Ranks, rank: 1, ranks: 3, stream: 0, run };
            let address = SocketAddr::from(([127, 0, 0, 1], port));
            let (connection, ..) = connect(&[address], &secret, &hello, OnRefusal::Retry, deadline).unwrap();
            let mut timed = TimedStream { stream: &connection.socket, deadline };
            timed.send(&[1; INFO_BYTES]).unwrap();
            drop(connection);
            let last = meet(2, None);
            (first.join().unwrap(), last)
        });
        let (number, participants, _) = last.unwrap();
        let infos: Vec<u8> = participants.iter().map(|participant| participant.info[0]).collect();
        assert_eq!((number, infos), (2, vec![0, 1, 2]));
        assert!(
            matches!(first, Err(CommError::Join(JoinProblem::Connection(_) | JoinProblem::HungUp))),
            "{first:?}"
        );
    }
}
