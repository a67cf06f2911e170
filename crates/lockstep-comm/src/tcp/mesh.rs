//! Connections between the ranks of a world. Neighbours are connected from the start, and so report each other's loss; other
//! ranks are connected when one of them has something for the other. A rank keeps a few bytes of each rank that it has no
//! connection to.
//!
//! The higher of two ranks connects to the lower one. The lower one asks for it by knocking: a handshake without
//! connection.

use std::{
    collections::BTreeMap,
    io::ErrorKind,
    net::{IpAddr, SocketAddr},
};

use super::{
    acceptor::{AcceptedConnection, Acceptor},
    connect::{OnRefusal, connect},
    handshake::{Hello, Purpose},
    secret::Secret,
    wire::Connection,
};
use crate::{CommError, Deadline, JoinProblem, Rejections};

/// Addresses of all ranks.
#[derive(Debug, Default)]
pub(crate) struct Addresses {
    /// Different addresses of hosts.
    hosts: Vec<IpAddr>,
    /// Index of each rank's host, and its port.
    ranks: Vec<(u32, u16)>,
}

impl Addresses {
    /// Adds the address of the next rank.
    pub(crate) fn push(&mut self, host: IpAddr, port: u16) {
        // Ranks of one host mostly follow each other.
        let known = self.hosts.iter().rposition(|known| *known == host);
        let index = known.unwrap_or_else(|| {
            self.hosts.push(host);
            self.hosts.len() - 1
        });
        self.ranks.push((index as u32, port));
    }

    fn of(&self, rank: usize) -> SocketAddr {
        let (host, port) = self.ranks[rank];
        SocketAddr::new(self.hosts[host as usize], port)
    }
}

/// Addresses and credentials with which a rank connects to others.
#[derive(Debug)]
pub(crate) struct Mesh {
    pub(crate) rank: usize,
    pub(crate) addresses: Addresses,
    /// Ring distance up to which ranks are neighbours.
    pub(crate) near: usize,
    /// Number of connections between two ranks.
    pub(crate) streams: usize,
    pub(crate) encrypt: bool,
    pub(crate) run: [u8; 32],
    pub(crate) secret: Secret,
}

/// All connections to one rank.
pub(crate) type Connections = Vec<Connection>;

/// Ranks that have connected or knocked.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    /// Connections that have come, by rank and number, until all of a rank have.
    partial: BTreeMap<usize, Vec<Option<Connection>>>,
}

/// Arrival of another rank.
#[derive(Debug)]
pub(crate) enum Arrival {
    /// All its connections have come.
    Connected(usize, Connections),
    /// It asks for a connection.
    Knocked(usize),
}

impl Arrivals {
    /// Adds a client of the rank of `mesh`. Returns what it completes.
    pub(crate) fn add(&mut self, mesh: &Mesh, client: AcceptedConnection) -> Option<Arrival> {
        let (peer, index) = (client.hello.rank as usize, client.hello.stream as usize);
        match client.hello.purpose {
            Purpose::Knock if peer < mesh.rank => Some(Arrival::Knocked(peer)),
            Purpose::Frames if peer > mesh.rank && peer < mesh.ranks() && index < mesh.streams => {
                let connections = self.partial.entry(peer).or_default();
                connections.resize_with(mesh.streams, || None);
                let connection = Connection { socket: client.stream, keys: Some(client.keys) };
                // A client that connects again has given up its first connection.
                connections[index] = Some(mesh.sealed(connection));
                if connections.iter().any(Option::is_none) {
                    return None;
                }
                let connections = self.partial.remove(&peer)?.into_iter().flatten().collect();
                Some(Arrival::Connected(peer, connections))
            }
            _ => None,
        }
    }
}

impl Mesh {
    pub(crate) fn ranks(&self) -> usize {
        self.addresses.ranks.len()
    }

    /// Returns true if a rank is connected to this one from the start: if their distance on the ring of all ranks is small,
    /// or a power of two. All ranks are then connected by few hops, even if some are lost.
    pub(crate) fn is_neighbour(&self, peer: usize) -> bool {
        let distance = self.rank.abs_diff(peer);
        let distance = distance.min(self.ranks() - distance);
        distance > 0 && (distance <= self.near || distance.is_power_of_two())
    }

    /// Returns true if every other rank is a neighbour.
    pub(crate) fn is_complete(&self) -> bool {
        (self.near + 1..=self.ranks() / 2).all(usize::is_power_of_two)
    }

    /// Returns the ranks of which this one has connections from the start.
    pub(crate) fn neighbours(&self) -> impl Iterator<Item = usize> {
        (0..self.ranks()).filter(|peer| self.is_neighbour(*peer))
    }

    /// Connects to the neighbours below, and waits for those above. Returns the connections by rank; others may have come too.
    ///
    /// # Errors
    /// If a neighbour cannot be reached, or has not come before `deadline`.
    pub(crate) fn connect_neighbours(
        &self,
        acceptor: &Acceptor,
        arrivals: &mut Arrivals,
        rejections: &Rejections,
        deadline: Deadline,
    ) -> Result<(BTreeMap<usize, Connections>, Vec<usize>), CommError> {
        let (mut links, mut knocks) = (BTreeMap::new(), Vec::new());
        for peer in self.neighbours().take_while(|peer| *peer < self.rank) {
            let connections = self.dial(peer, deadline).map_err(|error| self.during_joining(peer, error))?;
            links.insert(peer, connections);
        }
        let is_missing =
            |peer: &usize, links: &BTreeMap<usize, _>| *peer > self.rank && !links.contains_key(peer);
        let mut open = self.neighbours().filter(|peer| is_missing(peer, &links)).count();
        while open > 0 {
            let Some(client) = acceptor.next(deadline) else {
                let missing = self.neighbours().filter(|peer| is_missing(peer, &links)).collect();
                let (waited_s, rejections) = (deadline.limit().as_secs(), rejections.to_string());
                let what = "rank";
                return Err(CommError::Join(JoinProblem::Missing { what, missing, waited_s, rejections }));
            };
            match arrivals.add(self, client) {
                Some(Arrival::Connected(peer, connections)) => {
                    let is_new = links.insert(peer, connections).is_none();
                    open -= usize::from(is_new && self.is_neighbour(peer));
                }
                Some(Arrival::Knocked(peer)) => knocks.push(peer),
                None => {}
            }
        }
        Ok((links, knocks))
    }

    /// Connects to a rank below this one.
    ///
    /// # Errors
    /// If it does not answer before `deadline`, or refuses: it listens until it leaves.
    pub(crate) fn dial(&self, peer: usize, deadline: Deadline) -> Result<Connections, CommError> {
        let one = |index| self.connect(peer, &self.hello(Purpose::Frames, index), deadline);
        (0..self.streams).map(one).collect()
    }

    /// Asks a rank above this one for a connection.
    ///
    /// # Errors
    /// As [`Mesh::dial`].
    pub(crate) fn knock(&self, peer: usize, deadline: Deadline) -> Result<(), CommError> {
        self.connect(peer, &self.hello(Purpose::Knock, 0), deadline).map(drop)
    }

    fn connect(&self, peer: usize, hello: &Hello, deadline: Deadline) -> Result<Connection, CommError> {
        let address = self.addresses.of(peer);
        let (connection, server, _) = connect(&[address], &self.secret, hello, OnRefusal::Fail, deadline)?;
        if server.rank as usize != peer {
            return Err(CommError::Join(JoinProblem::Duplicate { what: "rank", number: peer }));
        }
        Ok(self.sealed(connection))
    }

    /// Returns the error of joining because of a neighbour that could not be dialed.
    fn during_joining(&self, peer: usize, error: CommError) -> CommError {
        let CommError::Join(JoinProblem::Connection(ErrorKind::ConnectionRefused)) = error else {
            return error;
        };
        let address = self.addresses.of(peer).to_string();
        let what = format!(
            "rank {peer} has met the others, and refuses connections now: it has ended (its own messages say why), or a firewall is in between"
        );
        CommError::Join(JoinProblem::Address { address, what })
    }

    /// Returns the connection as ranks use it: without the keys of its handshake, unless everything is encrypted.
    fn sealed(&self, connection: Connection) -> Connection {
        Connection { keys: connection.keys.filter(|_| self.encrypt), ..connection }
    }

    /// Returns what this rank says of itself on connection `stream`.
    pub(crate) fn hello(&self, purpose: Purpose, stream: usize) -> Hello {
        let (rank, ranks) = (self.rank as u32, self.ranks() as u32);
        Hello { purpose, rank, ranks, stream: stream as u32, run: self.run }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::MAX_WORLD;

    fn mesh(rank: usize, ranks: usize, near: usize) -> Mesh {
        let mut addresses = Addresses::default();
        for rank in 0..ranks {
            addresses.push(Ipv4Addr::from(0x0a00_0000 + rank as u32 / 8).into(), rank as u16);
        }
        let (run, secret) = ([0; 32], Secret::of(b"a test"));
        Mesh { rank, addresses, near, streams: 3, encrypt: false, run, secret }
    }

    #[test]
    fn a_rank_of_the_largest_world_keeps_few_bytes_of_each_other_rank_and_has_few_neighbours() {
        let mesh = mesh(40_000, MAX_WORLD, 32);
        let Addresses { hosts, ranks } = &mesh.addresses;
        let bytes = hosts.capacity() * size_of::<IpAddr>() + ranks.capacity() * size_of::<(u32, u16)>();
        assert!(bytes <= 16 * MAX_WORLD, "{bytes} bytes");
        assert_eq!(mesh.addresses.of(40_001), "10.0.19.136:40001".parse().unwrap());
        // 32 on either side, and 64 to 16,384 on either side, and the opposite one.
        assert_eq!(mesh.neighbours().count(), 64 + 2 * 9 + 1);
    }

    #[test]
    fn neighbourhood_is_mutual_connects_all_ranks_and_is_complete_in_small_worlds() {
        for (ranks, near) in [(1, 1), (2, 1), (5, 1), (6, 1), (7, 1), (12, 2), (65, 32), (66, 32), (200, 3)] {
            let meshes: Vec<Mesh> = (0..ranks).map(|rank| mesh(rank, ranks, near)).collect();
            for (rank, mesh) in meshes.iter().enumerate() {
                assert!(mesh.neighbours().all(|peer| meshes[peer].is_neighbour(rank)), "{rank} of {ranks}");
                let is_complete = mesh.neighbours().count() == ranks - 1;
                assert_eq!(mesh.is_complete(), is_complete, "{rank} of {ranks}, {near} near");
                assert!(ranks == 1 || mesh.is_neighbour((rank + 1) % ranks));
            }
        }
    }
}
