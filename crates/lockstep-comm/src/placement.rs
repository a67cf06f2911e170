//! Place of the ranks of one machine among those of all machines, as the rendezvous of the launchers decides it.

use std::{
    net::{Ipv4Addr, TcpListener},
    sync::Arc,
};

use crate::{CommError, SecretInMemory};

/// The address where ranks meet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leader {
    /// Name or address of the host.
    pub host: String,
    /// Port, if it is given.
    pub port: Option<u16>,
}

/// Place of this machine's ranks among those of all machines.
#[derive(Debug, Clone)]
pub struct NodePlacement {
    /// Number of this machine, from 0.
    pub node: usize,
    /// Number of machines.
    pub nodes: usize,
    /// World rank of the first rank of this machine.
    pub first_rank: usize,
    /// Number of ranks of all machines.
    pub world_size: usize,
    /// Address where ranks without shared memory meet.
    pub leader: Option<Leader>,
    /// Listening socket at that address, which rank 0 inherits.
    pub listener: Option<Arc<TcpListener>>,
    /// Name of the run; may be empty.
    pub run: String,
    /// Secret that authenticates ranks without shared memory to each other. The ranks inherit its descriptor.
    pub secret: Option<Arc<SecretInMemory>>,
}

impl NodePlacement {
    /// Returns the placement of a run on one machine.
    pub fn alone(ranks: usize) -> Self {
        Self {
            node: 0,
            nodes: 1,
            first_rank: 0,
            world_size: ranks,
            leader: None,
            listener: None,
            run: String::new(),
            secret: None,
        }
    }

    /// Returns a placement on one machine with a loopback address where ranks meet as if on several machines, and a new secret.
    ///
    /// # Errors
    /// If the system has no port, random bytes or memory.
    pub fn on_loopback(ranks: usize) -> Result<Self, CommError> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
        let listener = listener.map_err(CommError::io("listen for ranks"))?;
        let port = listener.local_addr().map_err(CommError::io("listen for ranks"))?.port();
        let leader = Leader { host: Ipv4Addr::LOCALHOST.to_string(), port: Some(port) };
        let (listener, secret) = (Some(Arc::new(listener)), Some(Arc::new(SecretInMemory::random()?)));
        Ok(Self { leader: Some(leader), listener, run: port.to_string(), secret, ..Self::alone(ranks) })
    }
}
