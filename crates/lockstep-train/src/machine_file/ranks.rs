//! Threads of this process as the ranks of a measurement.
//!
//! They communicate by shared memory, as the processes of a run on one machine do.

use std::time::Duration;

use lockstep_comm::{Group, World, WorldOptions};

use crate::Error;

/// Deadline of barriers and waits, longer than any measurement.
pub(super) const LIMIT: Duration = Duration::from_secs(600);

/// Runs `run` on each of `ranks` ranks of this machine, which are threads, and returns their results in rank order.
///
/// # Errors
/// The error of the first rank that has one. The others end at their deadlines.
pub(super) fn on_ranks<T: Send>(
    ranks: usize,
    run: impl Fn(&Group) -> Result<T, Error> + Sync,
) -> Result<Vec<T>, Error> {
    // Ranks that measure send no heartbeats for a while.
    let options = WorldOptions { silence: LIMIT, ..WorldOptions::default() };
    let groups = World::in_process(ranks.max(1), options)?;
    std::thread::scope(|scope| {
        let run = &run;
        let ranks: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || run(&group))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a measuring rank does not panic")).collect()
    })
}
