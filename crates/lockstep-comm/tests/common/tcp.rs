//! Helpers for ranks connected by TCP.

use std::{net::TcpListener, thread, time::Duration};

use lockstep_comm::{Deadline, Group, RendezvousEndpoint, TcpOptions, join_by_address};

/// Returns a deadline long enough for any operation of a test, even on a loaded machine.
pub(crate) fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(30))
}

/// Runs `work` as each of `ranks` ranks, on threads connected by TCP.
pub(crate) fn in_tcp_world(ranks: usize, work: impl Fn(&Group) + Sync) {
    in_tcp_world_with(TcpOptions::default(), ranks, work);
}

/// Runs `work` as [`in_tcp_world`] does, with other options.
pub(crate) fn in_tcp_world_with(options: TcpOptions, ranks: usize, work: impl Fn(&Group) + Sync) {
    let work = &work;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::scope(|scope| {
        for rank in 0..ranks {
            let listener = (rank == 0).then(|| listener.try_clone().unwrap());
            let run = format!("test on port {port}");
            let rendezvous = RendezvousEndpoint {
                host: "127.0.0.1".to_owned(),
                port,
                listener,
                run,
                ..RendezvousEndpoint::default()
            };
            scope.spawn(move || {
                work(&join_by_address(rank, ranks, rendezvous, options, soon()).unwrap());
            });
        }
    });
}
