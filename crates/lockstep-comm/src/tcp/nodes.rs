//! The rendezvous of the launchers of several machines, which numbers their ranks and decides what follows an attempt.
//!
//! They meet before each attempt and after the last one. Each launcher's [`NodeInfo`] states the attempt that it takes for
//! the next one, and the loss that ended its last one, or that it ends. All launchers get all of them, so all reach the same
//! conclusion.

use std::{
    net::{SocketAddr, TcpListener},
    sync::Arc,
};

use super::{
    handshake::{Purpose, word},
    rendezvous::{Opened, RendezvousEndpoint},
    roster::{ANY, INFO_BYTES},
    secret::SecretInMemory,
};
use crate::{CommError, Deadline, JoinProblem, Leader, LossCause, MAX_WORLD, NodePlacement};

/// A launcher's data for the rendezvous.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeInfo {
    /// Number of ranks that it starts.
    pub ranks: usize,
    /// Number of the attempt that it takes for the next one, from 0.
    pub attempt: usize,
    /// Maximum number of restarts in all.
    pub max_restarts: usize,
    /// Exit code with which it ends; `None` if it starts another attempt.
    pub ends: Option<u8>,
    /// World rank that its last attempt lost on this machine, and the cause.
    pub lost: Option<(usize, LossCause)>,
}

impl NodeInfo {
    /// Creates the data of a launcher that starts `ranks` ranks for the first time.
    pub fn first(ranks: usize) -> Self {
        Self { ranks, attempt: 0, max_restarts: 0, ends: None, lost: None }
    }

    /// Encodes the data, with the port where rank 0 will listen.
    fn encode(&self, port: u16) -> [u8; INFO_BYTES] {
        let mut out = [0; INFO_BYTES];
        out[..2].copy_from_slice(&port.to_le_bytes());
        out[2] = u8::from(self.ends.is_some());
        out[3] = self.ends.unwrap_or(0);
        let (lost, (kind, value)) =
            self.lost.map_or((0, (0, 0)), |(rank, cause)| (rank + 1, cause.to_numbers()));
        for (at, number) in [(4, self.ranks), (8, self.attempt), (12, self.max_restarts), (16, lost)] {
            out[at..at + 4].copy_from_slice(&(number as u32).to_le_bytes());
        }
        out[20..24].copy_from_slice(&(kind as u32).to_le_bytes());
        out[24..32].copy_from_slice(&value.to_le_bytes());
        out
    }

    fn decode(bytes: &[u8; INFO_BYTES]) -> (u16, Self) {
        let number = |at| word(bytes, at) as usize;
        let value = number(24) as u64 | (number(28) as u64) << 32;
        let cause = LossCause::from_numbers(number(20) as u64, value);
        let lost = number(16).checked_sub(1).and_then(|rank| Some((rank, cause?)));
        let ends = (bytes[2] != 0).then_some(bytes[3]);
        let info = Self { ranks: number(4), attempt: number(8), max_restarts: number(12), ends, lost };
        (u16::from_le_bytes([bytes[0], bytes[1]]), info)
    }
}

/// Result of the rendezvous of all launchers.
#[derive(Debug)]
pub struct JoinedNodes {
    /// Place of this machine's ranks.
    pub placement: NodePlacement,
    /// Number of the next attempt: the maximum over all launchers.
    pub attempt: usize,
    /// Cards of all launchers, by node.
    pub nodes: Vec<NodeInfo>,
}

/// Meets the launchers of the other machines, as number `node` of `nodes`. Without a number, the launcher on the
/// machine of the rendezvous address is node 0, and the others are numbered in order of arrival.
///
/// # Errors
/// If a launcher does not come before `deadline`, or if a node number or the total number of ranks is out of range.
pub fn join_nodes(
    mut rendezvous: RendezvousEndpoint,
    node: Option<usize>,
    nodes: usize,
    info: NodeInfo,
    deadline: Deadline,
) -> Result<JoinedNodes, CommError> {
    let out_of_range =
        |what, value, allowed| Err(CommError::Join(JoinProblem::OutOfRange { what, value, allowed }));
    if let Some(node) = node.filter(|node| *node >= nodes) {
        return out_of_range("node", node, format!("below the number of nodes, {nodes}"));
    }
    if nodes > MAX_WORLD {
        return out_of_range("number of nodes", nodes, format!("1 to {MAX_WORLD}"));
    }
    let mut node = node.unwrap_or(if rendezvous.is_here()? { 0 } else { ANY });
    let (mut listener, mut given) = (None, None);
    if node == 0 {
        match rendezvous.begin()? {
            Opened::First(hand_out) => {
                given = hand_out;
                listener = Some(listen_beside(&rendezvous)?);
            }
            // Another launcher on this machine was first.
            Opened::Taken if nodes > 1 => node = ANY,
            Opened::Taken => return Err(rendezvous.taken()),
        }
    }
    if node != 0 {
        rendezvous.find(deadline)?;
    }
    let secret = Some(Arc::new(SecretInMemory::new(&rendezvous.key()?)?));
    let port =
        listener.as_ref().map_or(Ok(0), |listener| listener.local_addr().map(|address| address.port()));
    let info = info.encode(port.map_err(CommError::io("listen for ranks"))?);
    let (node, participants, _) = rendezvous.meet(Purpose::Nodes, node, nodes, info, deadline)?;
    drop(given);
    let (ports, infos): (Vec<u16>, Vec<NodeInfo>) =
        participants.iter().map(|participant| NodeInfo::decode(&participant.info)).unzip();
    let world_size = infos.iter().map(|info| info.ranks).sum();
    if world_size > MAX_WORLD {
        return out_of_range("number of ranks", world_size, format!("1 to {MAX_WORLD}"));
    }
    let placement = NodePlacement {
        node,
        nodes,
        first_rank: infos[..node].iter().map(|info| info.ranks).sum(),
        world_size,
        leader: Some(Leader { host: rendezvous.host, port: Some(ports[0]) }),
        listener: listener.map(Arc::new),
        secret,
        run: rendezvous.run,
    };
    let attempt = infos.iter().map(|info| info.attempt).max().unwrap_or(0);
    Ok(JoinedNodes { placement, attempt, nodes: infos })
}

/// Returns a listener for rank 0, at the rendezvous address and on a port of its own.
fn listen_beside(rendezvous: &RendezvousEndpoint) -> Result<TcpListener, CommError> {
    let what = "listen for ranks";
    let address = rendezvous.listener.as_ref().map_or(Ok(None), |listener| listener.local_addr().map(Some));
    let address = address.map_err(CommError::io(what))?.ok_or(CommError::Join(JoinProblem::HungUp))?;
    TcpListener::bind(SocketAddr::new(address.ip(), 0)).map_err(CommError::io(what))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_says_the_same_to_those_who_get_it() {
        let plain = NodeInfo::first(8);
        let ends = NodeInfo { ends: Some(0), ..plain };
        let lost = NodeInfo {
            attempt: 7,
            max_restarts: 1000,
            ends: Some(75),
            lost: Some((0, LossCause::Exit(-1))),
            ..plain
        };
        let silent = NodeInfo { lost: Some((255, LossCause::Silent(u64::MAX))), ..plain };
        for info in [plain, ends, lost, silent] {
            assert_eq!(NodeInfo::decode(&info.encode(29400)), (29400, info));
        }
    }
}
