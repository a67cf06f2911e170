//! How the launchers of several machines find each other, and number their ranks.

use std::{
    net::{SocketAddr, TcpListener},
    sync::Arc,
};

use super::{
    handshake::Purpose,
    meeting::{ANY, Begun, CARD_BYTES, Meeting},
    secret::SecretInMemory,
};
use crate::{CommError, Deadline, JoinProblem, MAX_WORLD, Placement, environment::Leader};

/// Meets the launchers of the other machines, as number `node` of `nodes`, to start `ranks` ranks here. Without a number,
/// the one on the machine of the meeting is the first, and the others follow in the order in which they come.
///
/// # Errors
/// [`CommError::Join`].
pub fn meet_nodes(
    mut meeting: Meeting,
    node: Option<usize>,
    nodes: usize,
    ranks: usize,
    deadline: Deadline,
) -> Result<Placement, CommError> {
    let out_of_range =
        |what, value, allowed| Err(CommError::Join(JoinProblem::OutOfRange { what, value, allowed }));
    if let Some(node) = node.filter(|node| *node >= nodes) {
        return out_of_range("node", node, format!("below the number of nodes, {nodes}"));
    }
    let mut node = node.unwrap_or(if meeting.is_here()? { 0 } else { ANY });
    let (mut listener, mut given) = (None, None);
    if node == 0 {
        match meeting.begin()? {
            Begun::First(hand_out) => {
                given = hand_out;
                listener = Some(listen_beside(&meeting)?);
            }
            // Another one of this machine was first.
            Begun::Taken if nodes > 1 => node = ANY,
            Begun::Taken => return Err(meeting.taken()),
        }
    }
    if node != 0 {
        meeting.find(deadline)?;
    }
    let secret = Some(Arc::new(SecretInMemory::new(&meeting.key()?)?));
    let port =
        listener.as_ref().map_or(Ok(0), |listener| listener.local_addr().map(|address| address.port()));
    let mut card = [0; CARD_BYTES];
    card[..2].copy_from_slice(&port.map_err(CommError::io("listen for ranks"))?.to_le_bytes());
    card[4..8].copy_from_slice(&(ranks as u32).to_le_bytes());
    let (node, guests, _) = meeting.meet(Purpose::Nodes, node, nodes, card, deadline)?;
    drop(given);
    let counts: Vec<usize> = guests
        .iter()
        .map(|guest| {
            u32::from_le_bytes([guest.card[4], guest.card[5], guest.card[6], guest.card[7]]) as usize
        })
        .collect();
    let world_size = counts.iter().sum();
    if world_size > MAX_WORLD {
        return out_of_range("number of ranks", world_size, format!("1 to {MAX_WORLD}"));
    }
    let port = u16::from_le_bytes([guests[0].card[0], guests[0].card[1]]);
    Ok(Placement {
        node,
        nodes,
        first_rank: counts[..node].iter().sum(),
        world_size,
        leader: Some(Leader { host: meeting.host, port: Some(port) }),
        listener: listener.map(Arc::new),
        secret,
        run: meeting.run,
    })
}

/// A socket at the address of the meeting, on a port of its own, for rank 0.
fn listen_beside(meeting: &Meeting) -> Result<TcpListener, CommError> {
    let what = "listen for ranks";
    let address = meeting.listener.as_ref().map_or(Ok(None), |listener| listener.local_addr().map(Some));
    let address = address.map_err(CommError::io(what))?.ok_or(CommError::Join(JoinProblem::HungUp))?;
    TcpListener::bind(SocketAddr::new(address.ip(), 0)).map_err(CommError::io(what))
}
