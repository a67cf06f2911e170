//! Where nodes, or ranks, find each other: one of them listens at an address that all know, the others bring their cards,
//! and everybody gets everybody's.
//!
//! Whoever knocks without the secret is turned away before anything of his is read; so many at once are heard, and for so
//! long, that they take neither memory nor time from those who are expected.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs},
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::handshake::{Hello, Purpose, Secret, Timed, answer, greet};
use crate::{CommError, Deadline, JoinProblem};

/// Bytes of a card.
pub(crate) const CARD_BYTES: usize = 96;
const LISTEN: &str = "listen for the others";
/// Bytes of a card with the address that it came from.
const ENTRY_BYTES: usize = CARD_BYTES + 16;
/// Connections that may be in the middle of their greeting.
const HALF_OPEN: usize = 64;
/// How long a greeting may take.
const GREETING: Duration = Duration::from_secs(5);
/// Between two attempts to reach whoever is to listen.
const RETRY: Duration = Duration::from_millis(100);

/// The number of one who takes what is left.
pub(crate) const ANY: usize = u32::MAX as usize;

/// Where a run meets, and what keeps strangers out.
#[derive(Debug, Default)]
pub struct Meeting {
    /// Name or address of the machine where node 0, or rank 0, runs.
    pub host: String,
    /// Port that it listens on.
    pub port: u16,
    /// Ports to try in this order if something else listens on `port`; the same list on all ranks.
    pub fallback_ports: Vec<u16>,
    /// A socket that listens there already.
    pub listener: Option<TcpListener>,
    /// Name of the run: those of another one are turned away.
    pub run: String,
    /// Needed if the host is not this machine's own loopback.
    pub secret: Option<Secret>,
}

/// One who meets, and where its connection came from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Guest {
    pub(crate) card: [u8; CARD_BYTES],
    pub(crate) address: IpAddr,
}

impl Meeting {
    /// Whether only processes of this machine can come.
    pub fn is_local(&self) -> bool {
        self.host == "localhost" || self.host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    }

    pub(crate) fn key(&self) -> Result<Secret, CommError> {
        match &self.secret {
            Some(secret) => Ok(secret.clone()),
            None if self.is_local() => Ok(Secret::none()),
            None => Err(CommError::Join(JoinProblem::NoSecret { host: self.host.clone() })),
        }
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

    /// The socket that the first one listens on: at the address if that is given as one, else on all of this machine's.
    pub(crate) fn listen(&mut self) -> Result<TcpListener, CommError> {
        if let Some(listener) = self.listener.take() {
            return Ok(listener);
        }
        let mut address = self.resolve()?;
        if !self.is_local() && self.host.parse::<IpAddr>().is_err() {
            address.set_ip(unspecified(address.ip()));
        }
        let mut bound = TcpListener::bind(address);
        for port in self.fallback_ports.clone() {
            if !bound.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse) {
                break;
            }
            self.port = port;
            address.set_port(port);
            bound = TcpListener::bind(address);
        }
        bound.map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => self.problem(
                "the port is taken: give all machines the same other one (--master-port, MASTER_PORT, --rdzv-endpoint)",
            ),
            _ => self.problem(error),
        })
    }

    /// Whether the host is this machine.
    ///
    /// # Errors
    /// [`JoinProblem::Address`] if the name has no address.
    pub fn is_here(&self) -> Result<bool, CommError> {
        let address = SocketAddr::new(self.resolve()?.ip(), 0);
        Ok(self.listener.is_some() || TcpListener::bind(address).is_ok())
    }

    /// Whether somebody on this machine listens there already.
    pub fn port_is_taken(&self) -> bool {
        let bound = self.resolve().map(TcpListener::bind);
        matches!(bound, Ok(Err(error)) if error.kind() == io::ErrorKind::AddrInUse)
    }

    /// Brings `card` as number `own` of `count`, or as [`ANY`], and waits until all have come. Returns the own number and
    /// all cards in order, and the open door of the first one.
    pub(crate) fn meet(
        &mut self,
        purpose: Purpose,
        own: usize,
        count: usize,
        card: [u8; CARD_BYTES],
        deadline: Deadline,
    ) -> Result<(usize, Vec<Guest>, Option<Door>), CommError> {
        let secret = self.key()?;
        let run = self.run_digest();
        let hello = Hello { purpose, rank: own as u32, ranks: count as u32, stream: 0, run };
        if own == 0 {
            let listener = self.listen()?;
            let own = listener.local_addr().map_err(CommError::io(LISTEN))?.ip();
            tracing::debug!(
                port = self.port,
                expected = count,
                what = name(purpose),
                "listening for the others"
            );
            let door = Door::open(listener, &secret, &hello).map_err(CommError::io(LISTEN))?;
            let guests = receive(&door, own, &hello, card, deadline)?;
            return Ok((0, guests, Some(door)));
        }
        tracing::debug!(
            host = %self.host, port = self.port, number = own, what = name(purpose), "looking for the first one"
        );
        let (stream, address) = self.reach(&secret, &hello, deadline)?;
        let mut timed = Timed { stream: &stream, deadline };
        timed.send(&card).map_err(CommError::Join)?;
        // The first one waits for all others, and says which of them did not come.
        let patience = Deadline::after(deadline.remaining() + GREETING);
        let mut timed = Timed { stream: &stream, deadline: patience };
        let verdict: [u8; 16] = timed.receive().map_err(CommError::Join)?;
        let number = understand(purpose, verdict, deadline).map_err(CommError::Join)?;
        let mut guests = Vec::with_capacity(count);
        for _ in 0..count {
            let entry: [u8; ENTRY_BYTES] = timed.receive().map_err(CommError::Join)?;
            let (card, address_bytes) = entry.split_at(CARD_BYTES);
            let mut guest = Guest { card: [0; CARD_BYTES], address: address.ip() };
            guest.card.copy_from_slice(card);
            let mut octets = [0; 16];
            octets.copy_from_slice(address_bytes);
            let found = Ipv6Addr::from_bits(u128::from_be_bytes(octets)).to_canonical();
            if !found.is_unspecified() {
                guest.address = found;
            }
            guests.push(guest);
        }
        Ok((number, guests, None))
    }

    /// Connects to the first rank and greets it, at whichever of the ports it listens; `port` is that one afterwards.
    fn reach(
        &mut self,
        secret: &Secret,
        hello: &Hello,
        deadline: Deadline,
    ) -> Result<(TcpStream, SocketAddr), CommError> {
        let mut address = self.resolve()?;
        if self.fallback_ports.is_empty() {
            let stream = self.connect(address, deadline)?;
            greet(&stream, secret, hello, deadline).map_err(CommError::Join)?;
            return Ok((stream, address));
        }
        let ports: Vec<u16> = std::iter::once(self.port).chain(self.fallback_ports.iter().copied()).collect();
        let mut odd = None;
        loop {
            for port in &ports {
                address.set_port(*port);
                let attempt = Deadline::after(deadline.remaining().min(GREETING));
                let limit = attempt.remaining().max(Duration::from_millis(1));
                let Ok(stream) = TcpStream::connect_timeout(&address, limit) else { continue };
                match greet(&stream, secret, hello, attempt) {
                    Ok(_) => {
                        self.port = *port;
                        return Ok((stream, address));
                    }
                    Err(problem @ JoinProblem::Secret) => return Err(CommError::Join(problem)),
                    // Another program, or another run's first rank.
                    Err(problem) => odd = Some(problem),
                }
            }
            if deadline.remaining() <= RETRY {
                let ports: Vec<String> = ports.iter().map(u16::to_string).collect();
                let odd = odd.map_or(String::new(), |problem| format!(" ({problem})"));
                let what = format!(
                    "rank 0 answered on none of the ports {} for {} s{odd}",
                    ports.join(", "),
                    deadline.limit().as_secs()
                );
                return Err(self.problem(what));
            }
            thread::sleep(RETRY);
        }
    }

    /// Connects as soon as somebody listens.
    pub(crate) fn connect(&self, address: SocketAddr, deadline: Deadline) -> Result<TcpStream, CommError> {
        loop {
            let rest = deadline.remaining();
            let failed = match TcpStream::connect_timeout(&address, rest.max(Duration::from_millis(1))) {
                Ok(stream) => return Ok(stream),
                Err(error) => error,
            };
            tracing::trace!(%address, error = %failed, "nobody answers yet");
            if deadline.remaining() <= RETRY {
                let waited = deadline.limit().as_secs();
                return Err(CommError::Join(JoinProblem::Address {
                    address: address.to_string(),
                    what: format!(
                        "nobody answered for {waited} s ({failed}): is the run started on node 0, and can this machine reach it?"
                    ),
                }));
            }
            thread::sleep(RETRY);
        }
    }
}

/// Any address of the same family.
fn unspecified(address: IpAddr) -> IpAddr {
    if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
}

/// One who has proved that he knows the secret.
#[derive(Debug)]
pub(crate) struct Visitor {
    pub(crate) hello: Hello,
    pub(crate) stream: TcpStream,
    pub(crate) address: IpAddr,
}

/// A thread that lets in those who know the secret, until this is dropped.
#[derive(Debug)]
pub(crate) struct Door {
    visitors: mpsc::Receiver<Visitor>,
    stop: Option<mpsc::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Door {
    pub(crate) fn open(listener: TcpListener, secret: &Secret, hello: &Hello) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let (secret, hello) = (secret.clone(), *hello);
        let (sender, visitors) = mpsc::channel();
        let (stop, stopped) = mpsc::channel::<()>();
        let greeting = Arc::new(AtomicUsize::new(0));
        let watch = move || {
            while !matches!(stopped.try_recv(), Err(mpsc::TryRecvError::Disconnected)) {
                wait_for_one(&listener);
                let Ok((stream, address)) = listener.accept() else { continue };
                if greeting.load(Ordering::Relaxed) >= HALF_OPEN || stream.set_nonblocking(false).is_err() {
                    continue;
                }
                greeting.fetch_add(1, Ordering::Relaxed);
                let (sender, greeting, secret) = (sender.clone(), Arc::clone(&greeting), secret.clone());
                let talk = move || {
                    match answer(&stream, &secret, &hello, Deadline::after(GREETING)) {
                        Ok(hello) => {
                            let address = address.ip().to_canonical();
                            let _ = sender.send(Visitor { hello, stream, address });
                        }
                        Err(error) => tracing::debug!(%address, %error, "turned away"),
                    }
                    greeting.fetch_sub(1, Ordering::Relaxed);
                };
                // One who cannot be heard now may knock again.
                let _ = thread::Builder::new().name("lockstep-door".to_owned()).spawn(talk);
            }
        };
        let thread = thread::Builder::new().name("lockstep-door".to_owned()).spawn(watch)?;
        Ok(Self { visitors, stop: Some(stop), thread: Some(thread) })
    }

    /// The next one who was let in; `None` if nobody is before the deadline.
    pub(crate) fn next(&self, deadline: Deadline) -> Option<Visitor> {
        self.visitors.recv_timeout(deadline.remaining()).ok()
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Sleeps until somebody knocks, a little while at most.
fn wait_for_one(listener: &TcpListener) {
    let mut polled = [PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)];
    let _ = poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 20_000_000 }));
}

/// What the first one does: waits for all, and gives everybody all cards, or the reason why not.
fn receive(
    door: &Door,
    own: IpAddr,
    hello: &Hello,
    card: [u8; CARD_BYTES],
    deadline: Deadline,
) -> Result<Vec<Guest>, CommError> {
    let count = hello.ranks as usize;
    let mut guests: Vec<Option<(Guest, TcpStream)>> = (0..count).map(|_| None).collect();
    // The address by which others reach this machine, if one of them shows it.
    let mut outside = Some(own).filter(|own| !own.is_unspecified());
    let (mut problem, mut unnumbered) = (None, Vec::new());
    let is_open = |guests: &[Option<_>], more: usize| {
        guests.iter().skip(1).filter(|guest| guest.is_none()).count() > more
    };
    while problem.is_none() && is_open(&guests, unnumbered.len()) {
        let Some(visitor) = door.next(deadline) else {
            let missing = (1..count).filter(|number| guests[*number].is_none()).collect();
            let waited_s = deadline.limit().as_secs();
            problem = Some(JoinProblem::Missing { what: name(hello.purpose), missing, waited_s });
            break;
        };
        if visitor.hello.purpose != hello.purpose {
            continue;
        }
        problem = take(&mut guests, &mut unnumbered, &mut outside, hello, visitor);
    }
    // In the order in which they came.
    for place in guests.iter_mut().skip(1).filter(|guest| guest.is_none()).zip(unnumbered) {
        *place.0 = Some(place.1);
    }
    let entries: Vec<Guest> = std::iter::once(Guest { card, address: own })
        .chain(guests.iter().skip(1).flatten().map(|(guest, _)| *guest))
        .map(|guest| {
            let is_inside = guest.address.is_loopback() || guest.address.is_unspecified();
            let address = if is_inside { outside.unwrap_or(guest.address) } else { guest.address };
            Guest { address, ..guest }
        })
        .collect();
    let table: Vec<u8> = entries.iter().flat_map(encode).collect();
    for (number, (_, stream)) in guests.iter().enumerate().filter_map(|(n, guest)| Some((n, guest.as_ref()?)))
    {
        let mut timed = Timed { stream, deadline: Deadline::after(GREETING) };
        let told = timed.send(&verdict(number, problem.as_ref()));
        if problem.is_none() {
            told.and_then(|()| timed.send(&table)).map_err(CommError::Join)?;
        }
    }
    problem.map_or(Ok(entries), |problem| Err(CommError::Join(problem)))
}

/// Takes the card of one who has come in; returns what is wrong with him.
fn take(
    guests: &mut [Option<(Guest, TcpStream)>],
    unnumbered: &mut Vec<(Guest, TcpStream)>,
    outside: &mut Option<IpAddr>,
    hello: &Hello,
    visitor: Visitor,
) -> Option<JoinProblem> {
    let what = name(hello.purpose);
    tracing::debug!(what, number = visitor.hello.rank, address = %visitor.address, "one has come");
    let (number, theirs, ours) =
        (visitor.hello.rank as usize, visitor.hello.ranks as usize, hello.ranks as usize);
    let mut timed = Timed { stream: &visitor.stream, deadline: Deadline::after(GREETING) };
    // One who hangs up now has to come again.
    let card = timed.receive().ok()?;
    let problem = if theirs != ours {
        Some(JoinProblem::OtherSize { what, number, theirs, ours })
    } else if number == ANY {
        None
    } else if number >= ours {
        Some(JoinProblem::OutOfRange { what, value: number, allowed: format!("0 to {}", ours - 1) })
    } else if number == 0 || guests[number].is_some() {
        Some(JoinProblem::Duplicate { what, number })
    } else {
        None
    };
    if !visitor.address.is_loopback() {
        *outside = visitor.stream.local_addr().ok().map(|address| address.ip().to_canonical()).or(*outside);
    }
    let guest = (Guest { card, address: visitor.address }, visitor.stream);
    match guests.get_mut(number) {
        Some(place @ None) => *place = Some(guest),
        None if number == ANY && problem.is_none() => unnumbered.push(guest),
        // He is told as well.
        _ => {
            let mut timed = Timed { stream: &guest.1, deadline: Deadline::after(GREETING) };
            let _ = timed.send(&verdict(number, problem.as_ref()));
        }
    }
    problem
}

fn name(purpose: Purpose) -> &'static str {
    if purpose == Purpose::Nodes { "node" } else { "rank" }
}

fn encode(guest: &Guest) -> [u8; ENTRY_BYTES] {
    let mut out = [0; ENTRY_BYTES];
    out[..CARD_BYTES].copy_from_slice(&guest.card);
    let address = match guest.address {
        IpAddr::V4(address) if address.is_unspecified() => Ipv6Addr::UNSPECIFIED,
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    };
    out[CARD_BYTES..].copy_from_slice(&address.octets());
    out
}

/// What one is told who waits: his number, or why it cannot be.
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
    let word = |at: usize| {
        u32::from_le_bytes([verdict[at], verdict[at + 1], verdict[at + 2], verdict[at + 3]]) as usize
    };
    let what = name(purpose);
    Err(match word(0) {
        0 => return Ok(word(4)),
        1 => JoinProblem::Duplicate { what, number: word(4) },
        2 => JoinProblem::OtherSize { what, number: word(4), theirs: word(8), ours: word(12) },
        3 => {
            JoinProblem::OutOfRange { what, value: word(4), allowed: format!("a {what} below their number") }
        }
        4 => JoinProblem::Missing { what, missing: vec![word(4)], waited_s: deadline.limit().as_secs() },
        _ => JoinProblem::HungUp,
    })
}
