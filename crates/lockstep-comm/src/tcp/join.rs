//! The rendezvous of ranks over TCP. They meet, exchange their addresses, and connect every pair of ranks by one connection for
//! control frames and some for data.

use std::{
    net::{SocketAddr, TcpListener},
    sync::Arc,
    time::Duration,
};

use super::{
    Local, Machine,
    door::{Door, widen},
    handshake::{Hello, Purpose},
    meeting::{Begun, CARD_BYTES, Guest, Meeting},
    peer_credentials::HandOut,
    secret::Secret,
    visit::visit,
    wire::Connection,
};
use crate::{CommError, Deadline, Group, JoinProblem, MAX_WORLD, world::Entered};

/// Options of a rank that joins others over TCP.
#[derive(Debug, Clone, Copy)]
pub struct TcpOptions {
    /// Number of data connections between two ranks. One does not saturate a fast or a long link.
    pub streams: usize,
    /// Time without a heartbeat after which a rank counts as lost.
    pub silence: Duration,
    /// True to encrypt all traffic under the keys of the handshakes.
    pub encrypt: bool,
    /// Digest of all settings that must agree on all ranks.
    pub settings: [u8; 32],
}

impl Default for TcpOptions {
    /// Returns two data connections, 5 s of silence, no encryption, and no settings.
    fn default() -> Self {
        Self { streams: 2, silence: Duration::from_secs(5), encrypt: false, settings: [0; 32] }
    }
}

impl TcpOptions {
    /// Returns a digest of everything that must agree on all ranks, including these options.
    fn alike(&self) -> [u8; 32] {
        if self.encrypt {
            *blake3::keyed_hash(&self.settings, b"encrypted").as_bytes()
        } else {
            self.settings
        }
    }
}

/// Maximum number of data connections between two ranks.
const MAX_STREAMS: usize = 16;

/// Joins, as `rank` of `ranks`, all other ranks at the same meeting. Returns once this rank is connected to all of them.
///
/// # Errors
/// If a number is out of range, or if the ranks cannot reach, authenticate or agree with each other before `deadline`.
pub fn join_by_address(
    rank: usize,
    ranks: usize,
    meeting: Meeting,
    options: TcpOptions,
    deadline: Deadline,
) -> Result<Group, CommError> {
    join_with(rank, ranks, meeting, options, None, |_, _| {}, deadline)
}

/// Joins as [`join_by_address`] does, for a rank that may share memory with others of this machine. Calls `settle` with its
/// rank and the number of ranks on this host, before any thread is started.
///
/// # Errors
/// As [`join_by_address`].
pub fn join_with(
    rank: usize,
    ranks: usize,
    mut meeting: Meeting,
    options: TcpOptions,
    local: Option<Entered>,
    settle: impl FnOnce(usize, usize),
    deadline: Deadline,
) -> Result<Group, CommError> {
    let out_of_range =
        |what, value, allowed| Err(CommError::Join(JoinProblem::OutOfRange { what, value, allowed }));
    if ranks == 0 || ranks > MAX_WORLD {
        return out_of_range("number of ranks", ranks, format!("1 to {MAX_WORLD}"));
    }
    if rank >= ranks {
        return out_of_range("rank", rank, format!("below the number of ranks, {ranks}"));
    }
    if options.streams == 0 || options.streams > MAX_STREAMS {
        return out_of_range("number of connections", options.streams, format!("1 to {MAX_STREAMS}"));
    }
    let local = local.map(|Entered(machine)| machine);
    let near =
        local.as_ref().map_or((rank, 0), |local| (local.segments.world_rank(0), local.segments.ranks()));
    let (sockets, cards) = gather(rank, ranks, &mut meeting, options, near, settle, deadline)?;
    let of_each = ranks_of_each(&cards);
    tracing::debug!(
        rank,
        ranks,
        connections = options.streams + 1,
        shares_memory_with = near.1,
        layered = of_each.is_some(),
        "connected to all other ranks"
    );
    let local = local.map(|machine| Local { machine: Arc::new(machine), of_each });
    Ok(Group::world(Machine::new(rank, sockets, options.silence, local)?))
}

/// Meets the other ranks and connects to each of them. Returns the connections by rank, and all cards. `near` is the first rank
/// that this one shares memory with, and their number.
pub(super) fn gather(
    rank: usize,
    ranks: usize,
    meeting: &mut Meeting,
    options: TcpOptions,
    near: (usize, usize),
    settle: impl FnOnce(usize, usize),
    deadline: Deadline,
) -> Result<(Vec<Vec<Connection>>, Vec<Card>), CommError> {
    // Hands the secret out until all ranks have come.
    let _given = settle_secret(meeting, rank, deadline)?;
    let secret = meeting.key()?;
    let listener = if rank == 0 { None } else { Some(listen(meeting)?) };
    let port =
        listener.as_ref().map_or(Ok(0), |listener| listener.local_addr().map(|address| address.port()));
    let port = port.map_err(CommError::io("listen for ranks"))?;
    let settings = options.alike();
    let card = Card { port, first: near.0 as u32, near: near.1 as u32, host: host(), settings };
    let (_, guests, door) = meeting.meet(Purpose::Ranks, rank, ranks, card.encode(), deadline)?;
    let cards: Vec<Card> = guests.iter().map(|guest| Card::decode(&guest.card)).collect();
    if let Some(rank) = cards.iter().position(|card| card.settings != cards[0].settings) {
        return Err(CommError::Join(JoinProblem::OtherPlan { rank }));
    }
    let (local_rank, local_size) = place_on_host(&cards, rank);
    settle(local_rank, local_size);
    let streams = options.streams + 1;
    let mesh =
        Mesh { rank, ranks, streams, encrypt: options.encrypt, run: meeting.run_digest(), secret, deadline };
    // Ranks above connect to this rank while it connects to those below.
    let expected = (ranks - 1 - rank) * streams;
    let open =
        |listener| Door::open(listener, &mesh.secret, &mesh.hello(0), expected, meeting.turned_away.clone());
    let door = door.map_or_else(|| listener.map(open).transpose(), |door| Ok(Some(door)));
    let door = door.map_err(CommError::io("listen for ranks"))?;
    let sockets = mesh.connect(meeting, door.as_ref(), &guests, &cards)?;
    Ok((sockets, cards))
}

/// Begins the meeting as rank 0, or receives the secret from rank 0.
fn settle_secret(
    meeting: &mut Meeting,
    rank: usize,
    deadline: Deadline,
) -> Result<Option<HandOut>, CommError> {
    if rank > 0 {
        return meeting.find(deadline).map(|()| None);
    }
    match meeting.begin()? {
        Begun::First(given) => Ok(given),
        Begun::Taken => Err(meeting.taken()),
    }
}

/// Returns the number of ranks per machine, if several machines share memory between equally many, a power of two; otherwise
/// `None`.
fn ranks_of_each(cards: &[Card]) -> Option<usize> {
    let each = cards[0].near as usize;
    let is_alike = |(rank, card): (usize, &Card)| {
        card.near as usize == each && card.first as usize == rank - rank % each
    };
    let is_plain = each.is_power_of_two() && each > 1 && each < cards.len();
    (is_plain && cards.iter().enumerate().all(is_alike)).then_some(each)
}

/// Returns the rank of `rank` among the ranks of its host, and their number.
fn place_on_host(cards: &[Card], rank: usize) -> (usize, usize) {
    let neighbours = |some: &[Card]| some.iter().filter(|card| card.host == cards[rank].host).count();
    (neighbours(&cards[..rank]), neighbours(cards))
}

/// Returns a listener for the other ranks, on any port, reachable from where the meeting is.
fn listen(meeting: &Meeting) -> Result<TcpListener, CommError> {
    let address = if meeting.is_local() { "localhost:0" } else { "[::]:0" };
    let bound = TcpListener::bind(address);
    // The machine may have no IPv6.
    let bound = if meeting.is_local() { bound } else { bound.or_else(|_| TcpListener::bind("0.0.0.0:0")) };
    // Other ranks may connect before this rank starts to accept.
    let bound = bound.and_then(|listener| widen(&listener).map(|()| listener));
    bound.map_err(CommError::io("listen for ranks"))
}

/// A rank's data for the rendezvous.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Card {
    port: u16,
    /// First of the ranks that it shares memory with, and their number; 0 if there are none.
    first: u32,
    near: u32,
    /// Digest that identifies the running machine.
    host: [u8; 16],
    settings: [u8; 32],
}

/// Returns a digest that identifies the running machine; the same in all of its containers.
fn host() -> [u8; 16] {
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let system = rustix::system::uname();
    let name = if boot.is_empty() { system.nodename().to_bytes() } else { &boot };
    let mut digest = [0; 16];
    digest.copy_from_slice(&blake3::hash(name).as_bytes()[..16]);
    digest
}

impl Card {
    fn encode(&self) -> [u8; CARD_BYTES] {
        let mut out = [0; CARD_BYTES];
        out[..2].copy_from_slice(&self.port.to_le_bytes());
        out[4..8].copy_from_slice(&self.first.to_le_bytes());
        out[8..12].copy_from_slice(&self.near.to_le_bytes());
        out[12..28].copy_from_slice(&self.host);
        out[32..64].copy_from_slice(&self.settings);
        out
    }

    fn decode(bytes: &[u8; CARD_BYTES]) -> Self {
        let (mut host, mut settings) = ([0; 16], [0; 32]);
        host.copy_from_slice(&bytes[12..28]);
        settings.copy_from_slice(&bytes[32..64]);
        let number = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let port = u16::from_le_bytes([bytes[0], bytes[1]]);
        Self { port, first: number(4), near: number(8), host, settings }
    }
}

struct Mesh {
    rank: usize,
    ranks: usize,
    /// Number of connections between two ranks.
    streams: usize,
    encrypt: bool,
    run: [u8; 32],
    secret: Secret,
    deadline: Deadline,
}

impl Mesh {
    /// Connects to the ranks below, and waits for those above.
    fn connect(
        &self,
        meeting: &Meeting,
        door: Option<&Door>,
        guests: &[Guest],
        cards: &[Card],
    ) -> Result<Vec<Vec<Connection>>, CommError> {
        let mut sockets: Vec<Vec<Option<Connection>>> =
            (0..self.ranks).map(|_| (0..self.streams).map(|_| None).collect()).collect();
        for (peer, sockets) in sockets.iter_mut().enumerate().take(self.rank) {
            let port = if peer == 0 { meeting.port } else { cards[peer].port };
            let address = SocketAddr::new(guests[peer].address, port);
            for (index, socket) in sockets.iter_mut().enumerate() {
                let (connection, server, _) =
                    visit(&[address], &self.secret, &self.hello(index), self.deadline)?;
                if server.rank as usize != peer {
                    return Err(CommError::Join(JoinProblem::Duplicate { what: "rank", number: peer }));
                }
                *socket = Some(self.sealed(connection));
            }
        }
        let mut open = (self.ranks - 1 - self.rank) * self.streams;
        while open > 0 {
            let Some(visitor) = door.and_then(|door| door.next(self.deadline)) else {
                let is_missing = |rank: &usize| sockets[*rank].iter().any(Option::is_none);
                let missing = (self.rank + 1..self.ranks).filter(is_missing).collect();
                let waited_s = self.deadline.limit().as_secs();
                let turned_away = meeting.turned_away.to_string();
                let what = "rank";
                return Err(CommError::Join(JoinProblem::Missing { what, missing, waited_s, turned_away }));
            };
            let (rank, index) = (visitor.hello.rank as usize, visitor.hello.stream as usize);
            let is_expected = visitor.hello.purpose == Purpose::Frames && rank > self.rank;
            let place =
                sockets.get_mut(rank).filter(|_| is_expected).and_then(|sockets| sockets.get_mut(index));
            // A client that connects again has given up its first connection.
            if let Some(place) = place {
                let connection = Connection { socket: visitor.stream, keys: Some(visitor.keys) };
                open -= usize::from(place.replace(self.sealed(connection)).is_none());
            }
        }
        Ok(sockets.into_iter().map(|sockets| sockets.into_iter().flatten().collect()).collect())
    }

    /// Returns the connection as ranks use it: without the keys of its handshake, unless everything is encrypted.
    fn sealed(&self, connection: Connection) -> Connection {
        Connection { keys: connection.keys.filter(|_| self.encrypt), ..connection }
    }

    fn hello(&self, stream: usize) -> Hello {
        Hello {
            purpose: Purpose::Frames,
            rank: self.rank as u32,
            ranks: self.ranks as u32,
            stream: stream as u32,
            run: self.run,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_learn_their_neighbours_from_the_cards() {
        let card = |host: u8| Card { port: 1, first: 0, near: 0, host: [host; 16], settings: [0; 32] };
        let cards = [1, 2, 1, 1, 2].map(card);
        let places: Vec<_> = (0..5).map(|rank| place_on_host(&cards, rank)).collect();
        assert_eq!(places, [(0, 3), (0, 2), (1, 3), (2, 3), (1, 2)]);
        assert_eq!(Card::decode(&cards[1].encode()), cards[1]);
        assert_eq!(host(), host());
    }
}
