//! Helpers shared by tests of ranks.

mod tcp;

use lockstep_comm::{Group, TcpOptions, World, WorldOptions};

pub(crate) use tcp::soon;

/// Transport between the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    SharedMemory,
    Tcp,
    /// TCP, encrypted under the keys of the handshake.
    Encrypted,
}

impl Way {
    pub(crate) const ALL: [Self; 3] = [Self::SharedMemory, Self::Tcp, Self::Encrypted];
}

/// Runs `work` as each of `ranks` ranks, on threads.
pub(crate) fn in_world_by(way: Way, ranks: usize, work: impl Fn(&Group) + Sync) {
    let work = &work;
    match way {
        Way::SharedMemory => {
            let options = WorldOptions { arena_bytes: 1 << 30, ..WorldOptions::default() };
            let groups = World::in_process(ranks, options).unwrap();
            std::thread::scope(|scope| {
                for group in groups {
                    scope.spawn(move || work(&group));
                }
            });
        }
        Way::Tcp => tcp::in_tcp_world(ranks, work),
        Way::Encrypted => {
            tcp::in_tcp_world_with(TcpOptions { encrypt: true, ..TcpOptions::default() }, ranks, work);
        }
    }
}
