//! Times collectives between the ranks of this machine and fits a link to them.

use std::time::Duration;

use lockstep_comm::benchmark::{Benchmark, BenchmarkMemory};
use lockstep_comm::{Kind, NumberType};
use lockstep_plan::work::Collective;
use lockstep_planner::cluster::{Cluster, Joins, Link};

use super::descent::descend;
use super::ranks::on_ranks;
use crate::Error;

const SIZES: [usize; 6] = [1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20];
/// The collectives of plans. Broadcasts are left out: only 2D tensor parallelism uses them, and they are several times as fast as a
/// ring would be.
const KINDS: [(Kind, Collective); 4] = [
    (Kind::AllReduce, Collective::AllReduce),
    (Kind::ReduceScatter, Collective::ReduceScatter),
    (Kind::AllGather, Collective::AllGather),
    (Kind::AllToAll, Collective::AllToAll),
];
/// A collective with its measured time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timed {
    ranks: usize,
    collective: Collective,
    bytes: u64,
    seconds: f64,
}

/// Times collectives of 2, 4, 8, ... and of all `ranks` ranks of this machine, each repeated for `time`.
///
/// # Errors
/// [`Error::Comm`] if a rank does not answer.
pub(super) fn time(ranks: usize, time: Duration) -> Result<Vec<Timed>, Error> {
    let mut counts: Vec<usize> =
        (1..usize::BITS).map(|power| 1 << power).take_while(|count| *count < ranks).collect();
    counts.push(ranks);
    let mut timed = Vec::new();
    for ranks in counts {
        let of_rank = on_ranks(ranks, |group| {
            let mut timed = Vec::new();
            for (kind, collective) in KINDS {
                for bytes in SIZES {
                    let (number, memory) = (NumberType::F32, BenchmarkMemory::Shared);
                    let found = Benchmark { kind, number, bytes, memory, time }.run(group)?;
                    let (bytes, seconds) = (found.bytes as u64, found.median_us / 1e6);
                    timed.push(Timed { ranks, collective, bytes, seconds });
                }
            }
            Ok(timed)
        })?;
        // Every rank reports the times of the slowest.
        timed.extend(of_rank.into_iter().next().unwrap_or_default());
    }
    Ok(timed)
}

/// Returns the weight of a collective in the fit: large ones, whose buffers no cache holds, take most of a step's communication time.
fn weight(bytes: u64) -> f64 {
    if bytes < 1 << 20 { 1.0 } else { 4.0 }
}

/// Returns the link that fits the collectives best, and the mean relative error on single ones. Its bandwidth is the highest that
/// any collective achieved.
pub(super) fn fit(timed: &[Timed], machine: &Cluster) -> (Link, f64) {
    let fastest = timed.iter().map(|timed| timed.bytes as f64 / timed.seconds / 1e9).fold(0.01, f64::max);
    let link = |&[efficiency, in_switch, latency_us, start_us, fill]: &[f64; 5]| Link {
        name: "shared memory".to_owned(),
        joins: Joins::All,
        gb_per_s: fastest,
        efficiency,
        in_switch: Some(in_switch),
        latency_us,
        start_us,
        fill,
        torus: None,
    };
    let error = |numbers: &[f64; 5]| -> f64 {
        let cluster = Cluster { links: vec![link(numbers)], ..machine.clone() };
        let of_one = |timed: &Timed| {
            let placement = cluster.placement(timed.ranks, 1);
            let found = cluster.seconds(timed.collective, timed.bytes, &placement);
            weight(timed.bytes) * (found / timed.seconds).ln().powi(2)
        };
        timed.iter().map(of_one).sum()
    };
    let mut numbers = [0.3, 0.3, 0.5, 0.5, 0.1];
    descend(&mut numbers, [(1e-4, 1.2), (1e-4, 1.2), (0.01, 1e5), (0.01, 1e5), (0.001, 2.0)], error);
    let weights: f64 = timed.iter().map(|timed| weight(timed.bytes)).sum();
    let mean = (error(&numbers) / weights.max(1.0)).sqrt();
    (link(&numbers), mean)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_that_a_link_gives_lead_back_to_it() {
        let mut machine = Cluster::local(8, 1 << 30);
        let link = &mut machine.links[0];
        (link.efficiency, link.in_switch) = (0.7, Some(0.5));
        (link.latency_us, link.start_us, link.fill) = (2.0, 4.0, 0.3);
        let mut timed = Vec::new();
        for ranks in [2, 8] {
            for (_, collective) in KINDS {
                for bytes in SIZES.map(|bytes| bytes as u64) {
                    let seconds = machine.seconds(collective, bytes, &machine.placement(ranks, 1));
                    timed.push(Timed { ranks, collective, bytes, seconds });
                }
            }
        }
        let (found, error) = fit(&timed, &machine);
        assert!(error < 0.05, "{error}: {found:?}");
        let rates =
            [found.efficiency, found.in_switch.expect("memory adds up")].map(|share| share * found.gb_per_s);
        let expected = [0.7, 0.5].map(|share| share * machine.links[0].gb_per_s);
        for (found, expected) in [(rates[0], expected[0]), (rates[1], expected[1]), (found.latency_us, 2.0)] {
            assert!((found / expected - 1.0).abs() < 0.15, "{found}, not {expected}");
        }
    }
}
