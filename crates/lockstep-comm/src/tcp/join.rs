//! The rendezvous of ranks over TCP. They meet, exchange their addresses, and connect neighbours by one connection for control
//! frames and some for data.

use std::{net::TcpListener, sync::Arc, time::Duration};

use super::{
    acceptor::{Acceptor, widen},
    descriptors::raise_limit,
    handshake::{Purpose, word},
    mesh::{Addresses, Arrivals, Mesh},
    peer_credentials::SecretServer,
    rendezvous::{Opened, RendezvousEndpoint},
    roster::INFO_BYTES,
    transport::{Joined, Local, TcpTransport},
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
    /// Number of ranks on either side of a rank, on the ring of all ranks, that it is connected to from the start, besides
    /// those at a distance of a power of two. Other ranks are connected when one of them has something for the other.
    pub neighbours: usize,
    /// Digest of all settings that must agree on all ranks.
    pub settings: [u8; 32],
}

impl Default for TcpOptions {
    /// Returns two data connections, 5 s of silence, no encryption, 32 neighbours on either side, and no settings.
    fn default() -> Self {
        let silence = Duration::from_secs(5);
        Self { streams: 2, silence, encrypt: false, neighbours: 32, settings: [0; 32] }
    }
}

impl TcpOptions {
    /// Returns a digest of everything that must agree on all ranks, including these options.
    fn alike(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_keyed(&self.settings);
        hasher.update(&[u8::from(self.encrypt)]).update(&(self.neighbours as u64).to_le_bytes());
        *hasher.finalize().as_bytes()
    }
}

/// Maximum number of data connections between two ranks.
const MAX_STREAMS: usize = 16;

/// Joins, as `rank` of `ranks`, all other ranks at the same rendezvous. Returns once this rank is connected to its neighbours.
///
/// # Errors
/// If a number is out of range, or if the ranks cannot reach, authenticate or agree with each other before `deadline`.
pub fn join_by_address(
    rank: usize,
    ranks: usize,
    rendezvous: RendezvousEndpoint,
    options: TcpOptions,
    deadline: Deadline,
) -> Result<Group, CommError> {
    join_with(rank, ranks, rendezvous, options, None, |_, _| {}, deadline)
}

/// Joins as [`join_by_address`] does, for a rank that may share memory with others of this machine. Calls `settle` with its
/// rank and the number of ranks on this host, before any thread is started.
///
/// # Errors
/// As [`join_by_address`].
pub fn join_with(
    rank: usize,
    ranks: usize,
    mut rendezvous: RendezvousEndpoint,
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
    let local = local.map(|Entered(transport)| transport);
    let near =
        local.as_ref().map_or((rank, 0), |local| (local.segments.world_rank(0), local.segments.ranks()));
    let joined = gather(rank, ranks, &mut rendezvous, options, near, settle, deadline)?;
    tracing::debug!(
        rank,
        ranks,
        connected = joined.links.len(),
        connections = options.streams + 1,
        shares_memory_with = near.1,
        hierarchical = joined.of_each.is_some(),
        "connected to the neighbours among the other ranks"
    );
    let local = local.map(|transport| Local { transport: Arc::new(transport), of_each: joined.of_each });
    Ok(Group::world(TcpTransport::new(joined, options.silence, local)?))
}

/// Meets the other ranks and connects to the neighbours among them. `near` is the first rank that this one shares memory with,
/// and their number.
pub(super) fn gather(
    rank: usize,
    ranks: usize,
    rendezvous: &mut RendezvousEndpoint,
    options: TcpOptions,
    near: (usize, usize),
    settle: impl FnOnce(usize, usize),
    deadline: Deadline,
) -> Result<Joined, CommError> {
    // Connections to other ranks come and go during the whole run.
    raise_limit();
    // Hands the secret out until all ranks have come.
    let _given = settle_secret(rendezvous, rank, deadline)?;
    let secret = rendezvous.key()?;
    let listener = if rank == 0 { None } else { Some(listen(rendezvous)?) };
    let port =
        listener.as_ref().map_or(Ok(0), |listener| listener.local_addr().map(|address| address.port()));
    let port = port.map_err(CommError::io("listen for ranks"))?;
    let settings = options.alike();
    let info = RankInfo { port, first: near.0 as u32, near: near.1 as u32, host: host(), settings };
    let (_, participants, acceptor) =
        rendezvous.meet(Purpose::Ranks, rank, ranks, info.encode(), deadline)?;
    let infos: Vec<RankInfo> =
        participants.iter().map(|participant| RankInfo::decode(&participant.info)).collect();
    if let Some(rank) = infos.iter().position(|info| info.settings != infos[0].settings) {
        return Err(CommError::Join(JoinProblem::OtherPlan { rank }));
    }
    let (local_rank, local_size) = place_on_host(&infos, rank);
    settle(local_rank, local_size);
    let mut addresses = Addresses::default();
    for (peer, (participant, info)) in participants.iter().zip(&infos).enumerate() {
        addresses.push(participant.address, if peer == 0 { rendezvous.port } else { info.port });
    }
    let mesh = Mesh {
        rank,
        addresses,
        near: options.neighbours,
        streams: options.streams + 1,
        encrypt: options.encrypt,
        run: rendezvous.run_digest(),
        secret,
    };
    // Ranks above connect to this rank while it connects to those below.
    let expected = mesh.neighbours().filter(|peer| *peer > rank).count() * mesh.streams;
    let rejections = rendezvous.rejections.clone();
    let open = |listener| {
        let hello = mesh.hello(Purpose::Frames, 0);
        Acceptor::open(listener, &mesh.secret, &hello, expected, rejections.clone())
    };
    let acceptor = match (acceptor, listener) {
        (Some(acceptor), _) => acceptor,
        (None, Some(listener)) => open(listener).map_err(CommError::io("listen for ranks"))?,
        (None, None) => return Err(CommError::Join(JoinProblem::HungUp)),
    };
    let mut arrivals = Arrivals::default();
    let (links, knocks) = mesh.connect_neighbours(&acceptor, &mut arrivals, &rejections, deadline)?;
    Ok(Joined { mesh, acceptor, arrivals, links, knocks, of_each: ranks_of_each(&infos) })
}

/// Begins the rendezvous as rank 0, or receives the secret from rank 0.
fn settle_secret(
    rendezvous: &mut RendezvousEndpoint,
    rank: usize,
    deadline: Deadline,
) -> Result<Option<SecretServer>, CommError> {
    if rank > 0 {
        return rendezvous.find(deadline).map(|()| None);
    }
    match rendezvous.begin()? {
        Opened::First(given) => Ok(given),
        Opened::Taken => Err(rendezvous.taken()),
    }
}

/// Returns the number of ranks per machine, if several machines share memory between equally many, a power of two; otherwise
/// `None`.
fn ranks_of_each(infos: &[RankInfo]) -> Option<usize> {
    let each = infos[0].near as usize;
    let is_alike = |(rank, info): (usize, &RankInfo)| {
        info.near as usize == each && info.first as usize == rank - rank % each
    };
    let is_plain = each.is_power_of_two() && each > 1 && each < infos.len();
    (is_plain && infos.iter().enumerate().all(is_alike)).then_some(each)
}

/// Returns the rank of `rank` among the ranks of its host, and their number.
fn place_on_host(infos: &[RankInfo], rank: usize) -> (usize, usize) {
    let neighbours = |some: &[RankInfo]| some.iter().filter(|info| info.host == infos[rank].host).count();
    (neighbours(&infos[..rank]), neighbours(infos))
}

/// Returns a listener for the other ranks, on any port, reachable from where the rendezvous is.
fn listen(rendezvous: &RendezvousEndpoint) -> Result<TcpListener, CommError> {
    let address = if rendezvous.is_local() { "localhost:0" } else { "[::]:0" };
    let bound = TcpListener::bind(address);
    // The machine may have no IPv6.
    let bound = if rendezvous.is_local() { bound } else { bound.or_else(|_| TcpListener::bind("0.0.0.0:0")) };
    // Other ranks may connect before this rank starts to accept.
    let bound = bound.and_then(|listener| widen(&listener).map(|()| listener));
    bound.map_err(CommError::io("listen for ranks"))
}

/// A rank's data for the rendezvous.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RankInfo {
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

impl RankInfo {
    fn encode(&self) -> [u8; INFO_BYTES] {
        let mut out = [0; INFO_BYTES];
        out[..2].copy_from_slice(&self.port.to_le_bytes());
        out[4..8].copy_from_slice(&self.first.to_le_bytes());
        out[8..12].copy_from_slice(&self.near.to_le_bytes());
        out[12..28].copy_from_slice(&self.host);
        out[32..64].copy_from_slice(&self.settings);
        out
    }

    fn decode(bytes: &[u8; INFO_BYTES]) -> Self {
        let (mut host, mut settings) = ([0; 16], [0; 32]);
        host.copy_from_slice(&bytes[12..28]);
        settings.copy_from_slice(&bytes[32..64]);
        let port = u16::from_le_bytes([bytes[0], bytes[1]]);
        Self { port, first: word(bytes, 4), near: word(bytes, 8), host, settings }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_learn_their_neighbours_from_the_cards() {
        let info = |host: u8| RankInfo { port: 1, first: 0, near: 0, host: [host; 16], settings: [0; 32] };
        let infos = [1, 2, 1, 1, 2].map(info);
        let places: Vec<_> = (0..5).map(|rank| place_on_host(&infos, rank)).collect();
        assert_eq!(places, [(0, 3), (0, 2), (1, 3), (2, 3), (1, 2)]);
        assert_eq!(RankInfo::decode(&infos[1].encode()), infos[1]);
        assert_eq!(host(), host());
    }
}
