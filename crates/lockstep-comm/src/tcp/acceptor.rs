//! The server's side of connecting: one thread accepts connections, does their handshakes, and passes on the clients that have
//! proved to know the secret.
//!
//! Other connections are held for a few seconds at most, and in a limited number: when it is exceeded, the oldest connection
//! without a valid greeting is dropped. Clients send their greeting immediately, so they are past that state before a flood can
//! evict them. A client that is evicted all the same tries again.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{IpAddr, TcpListener, TcpStream},
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use snow::TransportState;

use super::{
    handshake::{HANDSHAKE_LIMIT, Hello, PROOF_BYTES, Refusal, ServerHandshake, Step},
    rejections::Rejections,
    secret::Secret,
};
use crate::{Deadline, stoppable_thread::StoppableThread};

/// Number of connections without a valid greeting that are held beyond the expected ones.
const SPARE: usize = 256;
/// Part of [`SPARE`] for a single address. Many ranks may share one: those of a machine, or behind a NAT.
const SPARE_OF_ONE: usize = 192;
/// Maximum number of connections accepted before the held ones are served.
const ROUND: usize = 32;
/// Number of connections that may wait to be accepted.
const BACKLOG: i32 = 4096;
/// Maximum number of expected clients. Those for whom there is no room try again.
const MAX_EXPECTED: usize = BACKLOG as usize;
/// Pause after the system has refused to accept a connection.
const EXHAUSTED: Duration = Duration::from_millis(10);
/// Maximum sleep of the thread.
const NAP: Duration = Duration::from_millis(500);

/// A client that has proved to know the secret.
#[derive(Debug)]
pub(crate) struct AcceptedConnection {
    pub(crate) hello: Hello,
    pub(crate) stream: TcpStream,
    /// Keys of its handshake.
    pub(crate) keys: Box<TransportState>,
    pub(crate) address: IpAddr,
}

/// Thread that accepts clients that know the secret, until this handle is dropped.
#[derive(Debug)]
pub(crate) struct Acceptor {
    clients: mpsc::Receiver<AcceptedConnection>,
    /// Number of clients that may come at once, shared with the thread.
    expected: Arc<AtomicUsize>,
    _thread: StoppableThread,
    rejections: Rejections,
}

impl Acceptor {
    /// Starts to accept clients at `listener`, about `expected` of them, answering as `own`.
    ///
    /// # Errors
    /// If the system refuses a thread or an event counter.
    pub(crate) fn open(
        listener: TcpListener,
        secret: &Secret,
        own: &Hello,
        expected: usize,
        rejections: Rejections,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        widen(&listener)?;
        let (sender, clients) = mpsc::channel();
        let expected = Arc::new(AtomicUsize::new(expected.min(MAX_EXPECTED)));
        let pending = PendingConnections {
            listener,
            secret: secret.clone(),
            own: *own,
            expected: Arc::clone(&expected),
            rejections: rejections.clone(),
            sender,
            held: Vec::new(),
        };
        let _thread = StoppableThread::spawn("lockstep-listen", move |stop| pending.run(stop))?;
        Ok(Self { clients, expected, _thread, rejections })
    }

    /// Changes the number of clients that are expected at once. It bounds the connections of strangers that are held.
    pub(crate) fn expect(&self, expected: usize) {
        self.expected.store(expected.min(MAX_EXPECTED), Ordering::Relaxed);
    }

    /// Returns the next accepted client; `None` if there is none before the deadline.
    pub(crate) fn next(&self, deadline: Deadline) -> Option<AcceptedConnection> {
        self.clients.recv_timeout(deadline.remaining()).ok()
    }

    /// Returns the statistics of rejected connections.
    pub(crate) fn rejections(&self) -> &Rejections {
        &self.rejections
    }
}

/// Lets as many connections wait at a listening socket as the system allows.
pub(crate) fn widen(listener: &TcpListener) -> io::Result<()> {
    Ok(rustix::net::listen(listener, BACKLOG)?)
}

/// State of the thread.
struct PendingConnections {
    listener: TcpListener,
    secret: Secret,
    own: Hello,
    expected: Arc<AtomicUsize>,
    rejections: Rejections,
    sender: mpsc::Sender<AcceptedConnection>,
    /// Connections whose handshake is not complete, in order of arrival.
    held: Vec<PendingConnection>,
}

/// A connection whose handshake is not complete.
struct PendingConnection {
    stream: TcpStream,
    address: IpAddr,
    until: Instant,
    handshake: ServerHandshake,
    /// True if it was refused and counted. What it sends is discarded until it hangs up: closing at once could destroy
    /// the answer in transit.
    is_refused: bool,
}

impl PendingConnection {
    fn is_proving(&self) -> bool {
        self.handshake.is_proving()
    }
}

/// Outcome of serving a held connection.
enum Outcome {
    Pending,
    Accepted(Hello, Box<TransportState>),
    Closed(Option<Refusal>),
}

impl PendingConnections {
    /// Serves connections until `stop` is set.
    fn run(mut self, stop: &OwnedFd) {
        let mut pause = false;
        loop {
            let ready = self.sleep(stop, pause);
            let Some((has_news, ready)) = ready else { break };
            pause = has_news && self.accept();
            self.serve_ready(&ready);
            self.expire();
            self.rejections.report(false);
        }
        self.rejections.report(true);
    }

    /// Sleeps until an event. Returns whether there are new connections, and which held ones to serve; `None` if `stop` is set.
    fn sleep(&self, stop: &OwnedFd, is_exhausted: bool) -> Option<(bool, Vec<bool>)> {
        let next = self.held.iter().map(|held| held.until).min();
        let limit = next.map_or(NAP, |at| at.saturating_duration_since(Instant::now()).min(NAP));
        let limit = if is_exhausted { limit.min(EXHAUSTED) } else { limit } + Duration::from_millis(1);
        let timeout = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        let mut polled = vec![PollFd::new(stop, PollFlags::IN)];
        let of_listener = if is_exhausted { PollFlags::empty() } else { PollFlags::IN };
        polled.push(PollFd::from_borrowed_fd(self.listener.as_fd(), of_listener));
        let held = self.held.iter();
        polled.extend(held.map(|held| PollFd::from_borrowed_fd(held.stream.as_fd(), PollFlags::IN)));
        // If polling fails, the next round finds out what is ready.
        let _ = poll(&mut polled, Some(&timeout));
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        if is_ready(&polled[0]) {
            return None;
        }
        Some((is_ready(&polled[1]) || is_exhausted, polled[2..].iter().map(is_ready).collect()))
    }

    /// Accepts new connections, and reads greetings that are there already. Returns true if the system has no room for more.
    fn accept(&mut self) -> bool {
        for _ in 0..ROUND {
            let (stream, address) = match self.listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if is_passing(error.kind()) => return false,
                Err(error) => {
                    tracing::debug!(%error, "cannot accept a connection");
                    self.drop_oldest(None);
                    return true;
                }
            };
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            let (address, until) = (address.ip().to_canonical(), Instant::now() + HANDSHAKE_LIMIT);
            let (handshake, is_refused) = (ServerHandshake::default(), false);
            self.held.push(PendingConnection { stream, address, until, handshake, is_refused });
            self.serve_one(self.held.len() - 1);
            self.make_room(address);
        }
        false
    }

    /// Drops connections until `address`, and all addresses together, have no more than their limits.
    fn make_room(&mut self, address: IpAddr) {
        let expected = self.expected.load(Ordering::Relaxed);
        let of_one = |held: &&PendingConnection| held.address == address && !held.is_proving();
        while self.held.iter().filter(of_one).count() > expected + SPARE_OF_ONE {
            self.drop_oldest(Some(address));
        }
        while self.held.len() > 2 * expected + SPARE {
            self.drop_oldest(None);
        }
    }

    /// Drops the oldest connection, of `address` if one is given. Prefers connections without a valid greeting.
    fn drop_oldest(&mut self, address: Option<IpAddr>) {
        let is_of = |held: &PendingConnection| address.is_none_or(|address| held.address == address);
        let oldest = self.held.iter().position(|held| is_of(held) && !held.is_proving());
        if let Some(index) = oldest.or_else(|| self.held.iter().position(is_of)) {
            self.close(index, Some(Refusal::Crowd));
        }
    }

    /// Serves the held connections that have received bytes: `ready` has one entry for each of the first ones.
    fn serve_ready(&mut self, ready: &[bool]) {
        // Connections accepted since come after them, unless some were dropped; serving another connection is harmless.
        for index in (0..self.held.len().min(ready.len())).rev().filter(|index| ready[*index]) {
            self.serve_one(index);
        }
    }

    fn serve_one(&mut self, index: usize) {
        match self.advance(index) {
            Outcome::Pending => {}
            Outcome::Closed(refusal) => self.close(index, refusal),
            Outcome::Accepted(hello, keys) => {
                let PendingConnection { stream, address, .. } = self.held.remove(index);
                if stream.set_nonblocking(false).is_ok() {
                    // The receiver may be gone.
                    let _ = self.sender.send(AcceptedConnection { hello, stream, keys, address });
                }
            }
        }
    }

    /// Reads what a connection has sent, and answers.
    fn advance(&mut self, index: usize) -> Outcome {
        let Self { held, secret, own, .. } = self;
        let PendingConnection { stream, handshake, is_refused, address, .. } = &mut held[index];
        let mut waste = [0; 512];
        // Once per message, and as often for discarded bytes.
        for _ in 0..4 {
            let room = if *is_refused { &mut waste[..] } else { handshake.room() };
            let count = match stream.read(room) {
                Ok(0) => return Outcome::Closed((!*is_refused).then_some(Refusal::HungUp)),
                Ok(count) => count,
                Err(error) if is_passing(error.kind()) => return Outcome::Pending,
                Err(_) => return Outcome::Closed((!*is_refused).then_some(Refusal::HungUp)),
            };
            if *is_refused {
                continue;
            }
            // The buffer of a new socket has room for all that is ever sent here.
            let mut send = |bytes: &[u8]| stream.write(bytes).is_ok_and(|count| count == bytes.len());
            match handshake.take(count, secret, own) {
                Step::Wait => {}
                Step::Answer(answer) if send(&answer) => {}
                Step::Answer(_) => return Outcome::Closed(Some(Refusal::HungUp)),
                Step::Welcome(welcome, hello, keys) if send(&welcome[..PROOF_BYTES]) => {
                    return Outcome::Accepted(hello, keys);
                }
                Step::Welcome(..) => return Outcome::Closed(Some(Refusal::HungUp)),
                Step::Refuse(None, refusal) => return Outcome::Closed(Some(refusal)),
                Step::Refuse(Some(answer), refusal) => {
                    send(&answer);
                    let _ = stream.shutdown(std::net::Shutdown::Write);
                    *is_refused = true;
                    tracing::debug!(%address, %refusal, "turned away");
                    self.rejections.add(*address, refusal);
                    return Outcome::Pending;
                }
            }
        }
        Outcome::Pending
    }

    /// Closes connections whose handshake takes too long.
    fn expire(&mut self) {
        let now = Instant::now();
        while let Some(index) = self.held.iter().position(|held| held.until <= now) {
            self.close(index, Some(Refusal::Late));
        }
    }

    /// Closes a connection, and counts it unless it was counted.
    fn close(&mut self, index: usize, refusal: Option<Refusal>) {
        let held = self.held.remove(index);
        if let Some(refusal) = refusal.filter(|_| !held.is_refused) {
            tracing::debug!(address = %held.address, %refusal, "turned away");
            self.rejections.add(held.address, refusal);
        }
    }
}

/// Returns true for an error that only means that nothing is available now.
fn is_passing(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionAborted)
}
