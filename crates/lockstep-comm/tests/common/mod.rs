//! What tests of ranks share.

use std::time::Duration;

use lockstep_comm::{Deadline, Group, World, WorldOptions};

/// Long enough for any operation of a test, on a machine that has other things to do.
pub(crate) fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(30))
}

/// Runs `work` as each of `ranks` ranks, on threads.
pub(crate) fn in_world(ranks: usize, work: impl Fn(&Group) + Sync) {
    let options = WorldOptions { arena_bytes: 1 << 30, ..WorldOptions::default() };
    let groups = World::in_process(ranks, options).unwrap();
    let work = &work;
    std::thread::scope(|scope| {
        for group in groups {
            scope.spawn(move || work(&group));
        }
    });
}
