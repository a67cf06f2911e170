//! The door of a meeting: one thread that accepts connections, carries out their handshakes, and hands on who has proved to
//! know the secret.
//!
//! Whoever has not is held for a few seconds at most, and only as many as there is room for: when it is full, the oldest
//! connection without a sound greeting is dropped. Clients send their greeting in the moment they connect, so one of ours is past
//! that state long before a flood can push it out; should it be dropped all the same, it tries again.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{IpAddr, TcpListener, TcpStream},
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use snow::TransportState;

use super::{
    handshake::{Hello, PROOF_BYTES, Reception, Refusal, Step},
    secret::Secret,
    turned_away::TurnedAway,
};
use crate::Deadline;

/// The longest that a handshake may take.
pub(crate) const GREETING: Duration = Duration::from_secs(5);
/// Connections without a sound greeting for which there is room, beside those that are expected.
const SPARE: usize = 256;
/// The part of [`SPARE`] that one address may take. Many ranks share one: those of a machine, and those behind a NAT.
const SPARE_OF_ONE: usize = 192;
/// Connections accepted before those that are held have their turn.
const ROUND: usize = 32;
/// Connections that may wait to be accepted.
const BACKLOG: i32 = 4096;
/// The pause after the system has refused to accept a connection.
const EXHAUSTED: Duration = Duration::from_millis(10);
/// The longest sleep of the thread.
const NAP: Duration = Duration::from_millis(500);

/// A client that has proved that it knows the secret.
#[derive(Debug)]
pub(crate) struct Visitor {
    pub(crate) hello: Hello,
    pub(crate) stream: TcpStream,
    /// The keys of its handshake.
    pub(crate) keys: Box<TransportState>,
    pub(crate) address: IpAddr,
}

/// A thread that lets in those who know the secret, until this is dropped.
#[derive(Debug)]
pub(crate) struct Door {
    visitors: mpsc::Receiver<Visitor>,
    stop: Arc<OwnedFd>,
    thread: Option<thread::JoinHandle<()>>,
    turned_away: TurnedAway,
}

impl Door {
    /// Opens the door at `listener` for about `expected` connections, answering as `own`.
    ///
    /// # Errors
    /// If the system refuses a thread or an event counter.
    pub(crate) fn open(
        listener: TcpListener,
        secret: &Secret,
        own: &Hello,
        expected: usize,
        turned_away: TurnedAway,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        widen(&listener)?;
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (sender, visitors) = mpsc::channel();
        let hall = Hall {
            listener,
            secret: secret.clone(),
            own: *own,
            expected,
            turned_away: turned_away.clone(),
            sender,
            held: Vec::new(),
        };
        let stopped = Arc::clone(&stop);
        let watch = move || hall.watch(&stopped);
        let thread = thread::Builder::new().name("lockstep-door".to_owned()).spawn(watch)?;
        Ok(Self { visitors, stop, thread: Some(thread), turned_away })
    }

    /// The next client that was let in; `None` if there is none before the deadline.
    pub(crate) fn next(&self, deadline: Deadline) -> Option<Visitor> {
        self.visitors.recv_timeout(deadline.remaining()).ok()
    }

    /// The account of those that were not.
    pub(crate) fn turned_away(&self) -> &TurnedAway {
        &self.turned_away
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        // A counter at its limit would refuse; it is read as set then.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Lets as many connections wait at a listening socket as the system allows.
pub(crate) fn widen(listener: &TcpListener) -> io::Result<()> {
    Ok(rustix::net::listen(listener, BACKLOG)?)
}

/// The state of the thread.
struct Hall {
    listener: TcpListener,
    secret: Secret,
    own: Hello,
    expected: usize,
    turned_away: TurnedAway,
    sender: mpsc::Sender<Visitor>,
    /// Connections in the order in which they came.
    held: Vec<Held>,
}

/// A connection whose handshake is not over.
struct Held {
    stream: TcpStream,
    address: IpAddr,
    until: Instant,
    reception: Reception,
    /// True if it was refused and counted: what it sends is thrown away until it hangs up, for closing at once could take the
    /// answer back.
    is_refused: bool,
}

impl Held {
    fn is_proving(&self) -> bool {
        self.reception.is_proving()
    }
}

/// The outcome of a look at a held connection.
enum Fate {
    Stays,
    Enters(Hello, Box<TransportState>),
    Goes(Option<Refusal>),
}

impl Hall {
    /// Carries on until `stop` is set.
    fn watch(mut self, stop: &OwnedFd) {
        let mut pause = false;
        loop {
            let ready = self.sleep(stop, pause);
            let Some((has_news, ready)) = ready else { break };
            pause = has_news && self.accept();
            self.look(&ready);
            self.expire();
            self.turned_away.tell(false);
        }
        self.turned_away.tell(true);
    }

    /// Sleeps until something has come; returns whether there are new connections, and which of the held ones to look at. `None`
    /// if the door closes.
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
        // Whatever keeps it from telling, the next look finds out.
        let _ = poll(&mut polled, Some(&timeout));
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        if is_ready(&polled[0]) {
            return None;
        }
        Some((is_ready(&polled[1]) || is_exhausted, polled[2..].iter().map(is_ready).collect()))
    }

    /// Accepts what has come, and takes greetings that are there already; says whether the system has no room for more.
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
            let (address, until) = (address.ip().to_canonical(), Instant::now() + GREETING);
            let (reception, is_refused) = (Reception::default(), false);
            self.held.push(Held { stream, address, until, reception, is_refused });
            self.look_at(self.held.len() - 1);
            self.make_room(address);
        }
        false
    }

    /// Drops connections until `address` has no more than its share, and all together no more than there is room for.
    fn make_room(&mut self, address: IpAddr) {
        let of_one = |held: &&Held| held.address == address && !held.is_proving();
        while self.held.iter().filter(of_one).count() > self.expected + SPARE_OF_ONE {
            self.drop_oldest(Some(address));
        }
        while self.held.len() > 2 * self.expected + SPARE {
            self.drop_oldest(None);
        }
    }

    /// Drops the oldest connection, of `address` if one is given; if there is any, one without a sound greeting.
    fn drop_oldest(&mut self, address: Option<IpAddr>) {
        let is_of = |held: &Held| address.is_none_or(|address| held.address == address);
        let oldest = self.held.iter().position(|held| is_of(held) && !held.is_proving());
        if let Some(index) = oldest.or_else(|| self.held.iter().position(is_of)) {
            self.close(index, Some(Refusal::Crowd));
        }
    }

    /// Looks at the held connections of which something has come: `ready` has one entry for each of the first ones.
    fn look(&mut self, ready: &[bool]) {
        // Those accepted since stand behind them, unless some were dropped; a look at another one does no harm.
        for index in (0..self.held.len().min(ready.len())).rev().filter(|index| ready[*index]) {
            self.look_at(index);
        }
    }

    fn look_at(&mut self, index: usize) {
        match self.fate(index) {
            Fate::Stays => {}
            Fate::Goes(refusal) => self.close(index, refusal),
            Fate::Enters(hello, keys) => {
                let Held { stream, address, .. } = self.held.remove(index);
                if stream.set_nonblocking(false).is_ok() {
                    // Nobody may listen any more.
                    let _ = self.sender.send(Visitor { hello, stream, keys, address });
                }
            }
        }
    }

    /// Reads what has come on a connection, and answers.
    fn fate(&mut self, index: usize) -> Fate {
        let Self { held, secret, own, .. } = self;
        let Held { stream, reception, is_refused, address, .. } = &mut held[index];
        let mut waste = [0; 512];
        // Once for each message, and as often for what is thrown away.
        for _ in 0..4 {
            let room = if *is_refused { &mut waste[..] } else { reception.room() };
            let count = match stream.read(room) {
                Ok(0) => return Fate::Goes((!*is_refused).then_some(Refusal::HungUp)),
                Ok(count) => count,
                Err(error) if is_passing(error.kind()) => return Fate::Stays,
                Err(_) => return Fate::Goes((!*is_refused).then_some(Refusal::HungUp)),
            };
            if *is_refused {
                continue;
            }
            // The buffer of a new socket holds all that is ever sent here.
            let mut send = |bytes: &[u8]| stream.write(bytes).is_ok_and(|count| count == bytes.len());
            match reception.take(count, secret, own) {
                Step::Wait => {}
                Step::Answer(answer) if send(&answer) => {}
                Step::Answer(_) => return Fate::Goes(Some(Refusal::HungUp)),
                Step::Welcome(welcome, hello, keys) if send(&welcome[..PROOF_BYTES]) => {
                    return Fate::Enters(hello, keys);
                }
                Step::Welcome(..) => return Fate::Goes(Some(Refusal::HungUp)),
                Step::Refuse(None, refusal) => return Fate::Goes(Some(refusal)),
                Step::Refuse(Some(answer), refusal) => {
                    send(&answer);
                    let _ = stream.shutdown(std::net::Shutdown::Write);
                    *is_refused = true;
                    tracing::debug!(%address, %refusal, "turned away");
                    self.turned_away.add(*address, refusal);
                    return Fate::Stays;
                }
            }
        }
        Fate::Stays
    }

    /// Hangs up on those that take too long.
    fn expire(&mut self) {
        let now = Instant::now();
        while let Some(index) = self.held.iter().position(|held| held.until <= now) {
            self.close(index, Some(Refusal::Late));
        }
    }

    /// Hangs up on one, and counts it unless it was counted.
    fn close(&mut self, index: usize, refusal: Option<Refusal>) {
        let held = self.held.remove(index);
        if let Some(refusal) = refusal.filter(|_| !held.is_refused) {
            tracing::debug!(address = %held.address, %refusal, "turned away");
            self.turned_away.add(held.address, refusal);
        }
    }
}

/// Returns true for an error that says that there is nothing just now.
fn is_passing(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionAborted)
}
