//! Meter of communication: bytes, busy time and exposed time of a rank's operations.

use std::{
    mem,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use crate::{Call, Kind};

/// Adds up bytes and times of the operations of the groups that it is attached to
/// ([`Group::with_meter`](crate::Group::with_meter)).
#[derive(Debug, Default)]
pub struct Meter(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    sums: Metered,
    /// Start and end times of operations and waits, in any order, that are not yet added to `sums`.
    under_way: Vec<(Instant, Instant)>,
}

/// Number of intervals after which they are added up, unless [`Meter::take`] is called before.
const COUNTED_AT_ONCE: usize = 4096;

/// Communication volume and time of a rank since the last reading.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Metered {
    /// Bytes that an optimal algorithm sends from this rank, counted as in nccl-tests.
    pub bytes: u64,
    /// Time in which at least one operation was in flight or waited for, whether overlapped with computation or not.
    pub busy: Duration,
    /// Exposed communication: time in which this rank did nothing but carry out operations or wait for them.
    pub exposed: Duration,
}

impl Meter {
    /// Returns the totals since the last call of this function, and resets them.
    pub fn take(&self) -> Metered {
        let mut state = self.state();
        state.count();
        mem::take(&mut state.sums)
    }

    /// Counts the bytes of an operation among `ranks`.
    pub(crate) fn count(&self, call: &Call, ranks: usize) {
        self.state().sums.bytes += bytes_sent(call, ranks);
    }

    /// Counts the time since `begin` as exposed.
    pub(crate) fn waited(&self, begin: Instant) {
        let now = Instant::now();
        let mut state = self.state();
        state.sums.exposed += now - begin;
        state.add(begin, now);
    }

    /// Counts an operation that was in flight from `begin` to `end`.
    pub(crate) fn was_sent(&self, begin: Instant, end: Instant) {
        self.state().add(begin, end);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn add(&mut self, begin: Instant, end: Instant) {
        if self.under_way.len() == COUNTED_AT_ONCE {
            self.count();
        }
        self.under_way.push((begin, end));
    }

    /// Adds the union of all intervals to the busy time, so that overlapping intervals count once.
    fn count(&mut self) {
        self.under_way.sort_unstable();
        let mut until: Option<Instant> = None;
        for (begin, end) in self.under_way.drain(..) {
            let from = until.map_or(begin, |until| begin.max(until));
            self.sums.busy += end.saturating_duration_since(from);
            until = Some(from.max(end));
        }
    }
}

/// Returns the bytes that a rank must send for an operation, as nccl-tests counts them.
fn bytes_sent(call: &Call, ranks: usize) -> u64 {
    let bytes = (call.elements * call.number.size_bytes()) as u64;
    let (ranks, others) = (ranks as u64, ranks as u64 - 1);
    match call.kind {
        Kind::AllReduce => 2 * others * bytes / ranks,
        Kind::ReduceScatter | Kind::AllGather | Kind::AllToAll | Kind::Scatter | Kind::Gather => {
            others * bytes / ranks
        }
        Kind::Broadcast | Kind::Reduce | Kind::Send => bytes,
        Kind::Barrier | Kind::Receive | Kind::Partition => 0,
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, thread};

    use super::*;
    use crate::{Deadline, Group, NumberType, ReduceOp, World, WorldOptions};

    #[test]
    fn time_that_two_operations_share_is_busy_once() {
        let meter = Meter::default();
        let begin = Instant::now();
        let at = |ms: u64| begin + Duration::from_millis(ms);
        // Ordered by known completion: an operation may have begun long before.
        for (from, to) in [(4, 6), (20, 21), (0, 10), (8, 15)] {
            meter.was_sent(at(from), at(to));
        }
        assert_eq!(meter.take().busy, Duration::from_millis(16));
        assert_eq!(meter.take(), Metered::default(), "what was taken is not counted again");
    }

    #[test]
    fn a_rank_sends_what_an_operation_takes_at_least() {
        let of = |kind| bytes_sent(&Call { elements: 100, number: NumberType::F32, ..Call::bare(kind) }, 4);
        let found = [Kind::AllReduce, Kind::AllGather, Kind::Send, Kind::Receive].map(of);
        assert_eq!(found, [600, 300, 400, 0]);
    }

    #[test]
    fn only_groups_with_a_meter_are_counted_and_waiting_for_others_is_exposed() {
        const LATE: Duration = Duration::from_millis(30);
        let options = WorldOptions { arena_bytes: 1 << 20, ..WorldOptions::default() };
        let groups = World::in_process(2, options).unwrap();
        let found: Vec<Metered> = thread::scope(|scope| {
            let rank = |group: Group| {
                scope.spawn(move || {
                    let limit = || Deadline::after(Duration::from_secs(20));
                    let meter = Arc::new(Meter::default());
                    let metered = group.clone().with_meter(Arc::clone(&meter));
                    let mut numbers = [1.0_f32; 8];
                    group.all_reduce(&mut numbers[..], ReduceOp::Sum, limit()).unwrap();
                    if group.rank() == 1 {
                        thread::sleep(LATE);
                    }
                    metered.all_reduce(&mut numbers[..], ReduceOp::Sum, limit()).unwrap();
                    meter.take()
                })
            };
            let threads: Vec<_> = groups.into_iter().map(rank).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(found.iter().map(|rank| rank.bytes).collect::<Vec<_>>(), [32, 32]);
        assert!(found[0].exposed > LATE / 2 && found[0].busy == found[0].exposed, "{found:?}");
    }
}
