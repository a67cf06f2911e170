//! Cost model of collectives and point-to-point messages.
//!
//! A collective of `n` ranks takes a time `l` for its steps, independent of its size, and a time `b` for its bytes. Messages are sent in
//! pieces, so the two overlap except for the time to fill the path:
//!
//! ```text
//!     seconds = start + l + b + fill * sqrt(l * b)
//! ```
//!
//! With pieces of the best size, one after another, `fill` is 2 (Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth
//! broadcast, reduction and scan", 2009). Libraries with more pieces in flight have a smaller value, which is fitted.
//!
//! Bandwidth is that of hierarchical rings. If `k` ranks of a group are on one node, each has its own network interface, so the group has
//! the bandwidth of `k`; the narrowest level decides. The other ranks of the node are assumed to run the same collective in their own
//! groups at the same time. Steps are counted as in NCCL's tuner (`src/graph/tuning.cc`): an all-reduce follows a chain of the ranks
//! within a node and a tree of nodes, up and down; all-gathers and reduce-scatters follow a ring of all ranks.

use super::{Cluster, Joins, Link, MAX_LEVELS};
use lockstep_plan::work::Collective;

/// Latency of a ring step relative to a tree step, over a network. A ring step waits for one neighbour, a tree step for two children:
/// NCCL's tuner has 14 µs and 20.9 µs. Latencies of links were fitted to trees.
const RING_STEP: f64 = 14.0 / 20.9;

/// Minimum ranks per node for which NCCL reduces in switches rather than in rings.
const IN_SWITCH_RANKS: f64 = 5.0;

/// Placement of a group's ranks on a cluster.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupPlacement {
    size: usize,
    /// Ranks of the group in one part of each level; from the last level on, all of them.
    within: [usize; MAX_LEVELS],
    /// Distance between consecutive ranks.
    stride: usize,
    /// Number of ranks from the first to the last, inclusive.
    reach: usize,
}

impl GroupPlacement {
    /// Returns the size of the group.
    pub const fn size(&self) -> usize {
        self.size
    }

    /// Returns how many ranks of the group are in one part of a level, such as a node.
    pub const fn within(&self, level: usize) -> usize {
        if level < MAX_LEVELS { self.within[level] } else { self.size }
    }
}

/// Time of a collective or message, and its load on the links.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LinkTime {
    /// Duration in seconds.
    pub seconds: f64,
    /// Seconds for which the bytes occupy a device's part of each level of links. Other traffic over the level in the meantime adds to
    /// it.
    pub filled_s: [f64; MAX_LEVELS],
}

impl LinkTime {
    /// Returns the time of `number` repetitions.
    #[must_use]
    pub fn times(self, number: f64) -> Self {
        Self { seconds: self.seconds * number, filled_s: self.filled_s.map(|seconds| seconds * number) }
    }
}

impl std::ops::AddAssign for LinkTime {
    fn add_assign(&mut self, other: Self) {
        self.seconds += other.seconds;
        self.filled_s.iter_mut().zip(other.filled_s).for_each(|(sum, seconds)| *sum += seconds);
    }
}

/// A level that a group's messages cross.
struct Passed<'c> {
    link: &'c Link,
    /// Index of the level in the cluster, innermost first.
    level: usize,
    /// Ranks of the group in one part of the level below.
    below: f64,
    /// Ranks of the group in one part of this level.
    within: f64,
}

impl Passed<'_> {
    /// Returns the achieved bandwidth of a device in bytes per second.
    fn rate(&self) -> f64 {
        self.link.gb_per_s * self.link.efficiency * 1e9
    }

    fn latency(&self) -> f64 {
        self.link.latency_us * 1e-6
    }

    fn is_innermost(&self) -> bool {
        self.level == 0
    }
}

impl Cluster {
    /// Returns the placement of `size` ranks at distances of `stride`. A group that could straddle nodes in several ways is assumed to be
    /// spread evenly over as few as possible. All nodes are taken to be as small as the smallest kind.
    pub fn placement(&self, size: usize, stride: usize) -> GroupPlacement {
        let (size, stride) = (size.max(1), stride.max(1));
        let mut within = [size; MAX_LEVELS];
        for (within, link) in within.iter_mut().zip(&self.links) {
            if let Some(devices) = self.joined_devices(link) {
                let most = (devices / stride).clamp(1, size);
                *within = (size / size.div_ceil(most)).max(1);
            }
        }
        GroupPlacement { size, within, stride, reach: (size - 1).saturating_mul(stride).saturating_add(1) }
    }

    /// Returns the seconds of a collective. `bytes` are counted as in nccl-tests ([`Exchange::bytes`](lockstep_plan::work::Exchange)); a ring
    /// includes all of its steps.
    pub fn seconds(&self, collective: Collective, bytes: u64, placement: &GroupPlacement) -> f64 {
        self.time(collective, bytes, placement).seconds
    }

    /// Returns the seconds of a collective, and its load on each level of links.
    pub fn time(&self, collective: Collective, bytes: u64, placement: &GroupPlacement) -> LinkTime {
        let ranks = placement.size as f64;
        let passed = self.passed(placement);
        let Some(outermost) = passed.last() else { return LinkTime::default() };
        let mut filled_s = [0.0; MAX_LEVELS];
        for level in &passed {
            filled_s[level.level] = self.bytes_seconds(collective, bytes as f64, level, placement);
        }
        // The level whose bytes take longest decides.
        let (time, narrowest) = passed
            .iter()
            .map(|level| (filled_s[level.level], level.link))
            .max_by(|a, b| a.0.total_cmp(&b.0))
            .unwrap_or((0.0, outermost.link));
        let steps = match collective {
            Collective::AllReduce => self.tree(&passed, placement).min(2.0 * self.ring(&passed, placement)),
            Collective::AllGather | Collective::ReduceScatter => self.ring(&passed, placement),
            Collective::Broadcast | Collective::Reduce => self.tree(&passed, placement) / 2.0,
            Collective::AllToAll => passed.iter().map(Passed::latency).sum(),
            Collective::Ring | Collective::Shift => outermost.latency() * ring_step(outermost),
        };
        let start = outermost.link.start_us * 1e-6;
        let seconds = start + steps + time + narrowest.fill * (steps * time).sqrt();
        let once = LinkTime { seconds, filled_s };
        if collective == Collective::Ring { once.times(ranks - 1.0) } else { once }
    }

    /// Returns the seconds of a collective's bytes over one level of links; for a ring, of one step.
    fn bytes_seconds(
        &self,
        collective: Collective,
        bytes: f64,
        level: &Passed<'_>,
        placement: &GroupPlacement,
    ) -> f64 {
        let ranks = placement.size as f64;
        let others = (ranks - 1.0) / ranks;
        match collective {
            Collective::AllReduce => 2.0 * others * bytes / self.all_reduce_rate(level, placement),
            Collective::AllGather | Collective::ReduceScatter => {
                others * bytes / self.ring_rate(level, placement)
            }
            Collective::Broadcast | Collective::Reduce => bytes / self.ring_rate(level, placement),
            // The bytes that leave a part of the level below.
            Collective::AllToAll => match level.link.torus {
                // In a ring of `e` ranks per dimension, bytes travel e/4 steps on average, over two wires.
                Some(_) => bytes * self.torus_extent(level, placement) / 8.0 / level.rate(),
                None => bytes * (ranks - level.below) / ranks / level.rate(),
            },
            // One neighbour is across the level.
            Collective::Ring | Collective::Shift => bytes / level.rate(),
        }
    }

    /// Returns the bytes that a rank sends over each level of links in a collective, averaged over the group; `bytes` is counted as in
    /// [`Cluster::seconds`]. In a ring, `k` ranks of a part cross the next level once together. With in-switch reduction each rank sends
    /// its operand once.
    pub fn sent_bytes(
        &self,
        collective: Collective,
        bytes: f64,
        placement: &GroupPlacement,
    ) -> [f64; MAX_LEVELS] {
        let ranks = placement.size as f64;
        let others = (ranks - 1.0) / ranks;
        let mut sent = [0.0; MAX_LEVELS];
        for level in self.passed(placement) {
            // The outermost level closes the ring.
            let beyond = if level.within < ranks { 1.0 / level.within } else { 0.0 };
            let of_ring = 1.0 / level.below - beyond;
            sent[level.level] = match collective {
                Collective::AllReduce if self.adds_in_switch(&level, placement) => bytes,
                Collective::AllReduce => 2.0 * others * bytes * of_ring,
                Collective::AllGather | Collective::ReduceScatter => others * bytes * of_ring,
                // The last rank of a chain sends nothing.
                Collective::Broadcast | Collective::Reduce => others * bytes * of_ring,
                Collective::AllToAll => bytes * (level.within - level.below) / ranks,
                Collective::Ring => (ranks - 1.0) * bytes * of_ring,
                Collective::Shift => bytes * of_ring,
            };
        }
        sent
    }

    /// Returns the innermost level that joins two ranks; `None` if the ranks are equal or there are no links.
    pub fn level_between(&self, from: usize, to: usize) -> Option<usize> {
        let joins = |link: &Link| self.part(link, from) == self.part(link, to);
        let last = self.links.len().checked_sub(1)?;
        (from != to).then(|| self.links.iter().position(joins).unwrap_or(last))
    }

    /// Returns the seconds of a message from one rank to another.
    pub fn send_seconds(&self, bytes: u64, from: usize, to: usize) -> f64 {
        self.send_time(bytes, from, to).seconds
    }

    /// Returns the seconds of a message, and its load on its level of links.
    pub fn send_time(&self, bytes: u64, from: usize, to: usize) -> LinkTime {
        let Some(level) = self.level_between(from, to) else { return LinkTime::default() };
        let link = &self.links[level];
        let steps = link.latency_us * 1e-6 * RING_STEP;
        let time = bytes as f64 / (link.gb_per_s * link.efficiency * 1e9);
        let mut filled_s = [0.0; MAX_LEVELS];
        filled_s[level] = time;
        let seconds = link.start_us * 1e-6 + steps + time + link.fill * (steps * time).sqrt();
        LinkTime { seconds, filled_s }
    }

    /// Returns the levels that messages of a group cross, innermost first.
    fn passed(&self, placement: &GroupPlacement) -> Vec<Passed<'_>> {
        let mut below = 1;
        let mut passed = Vec::with_capacity(self.links.len());
        for (level, link) in self.links.iter().enumerate() {
            let within = placement.within(level);
            if within > below {
                passed.push(Passed { link, level, below: below as f64, within: within as f64 });
                below = within;
            }
        }
        passed
    }

    /// Returns the devices in one part of a level; `None` if it joins all.
    fn joined_devices(&self, link: &Link) -> Option<usize> {
        match link.joins {
            Joins::Node => Some(self.devices_of_a_node()),
            Joins::Devices(devices) => Some(devices),
            Joins::All => None,
        }
    }

    /// Returns the index of the part of a level that a rank is in.
    fn part(&self, link: &Link, rank: usize) -> usize {
        match link.joins {
            Joins::Node => self.node_of(rank).map_or(usize::MAX, |(_, node)| node),
            Joins::Devices(devices) => rank / devices,
            Joins::All => 0,
        }
    }

    /// Returns the bandwidth of a group's ring at a level in bytes per second: one network interface per rank in the part below.
    fn ring_rate(&self, level: &Passed<'_>, placement: &GroupPlacement) -> f64 {
        match level.link.torus {
            // Rings in each dimension that the group extends in, in both directions.
            Some(_) => level.rate() * 2.0 * self.torus_dimensions(level, placement),
            None => level.rate() * level.below,
        }
    }

    /// Returns the bandwidth of an all-reduce, which switches may reduce. Ranks of a host always reduce in its memory.
    fn all_reduce_rate(&self, level: &Passed<'_>, placement: &GroupPlacement) -> f64 {
        let ring = self.ring_rate(level, placement);
        match self.switched_rate(level, placement) {
            Some(switched) if self.is_host() => switched,
            Some(switched) => ring.max(switched),
            None => ring,
        }
    }

    /// Returns the bandwidth of an in-switch all-reduce, counted as that of a ring; `None` if the level has none.
    fn switched_rate(&self, level: &Passed<'_>, placement: &GroupPlacement) -> Option<f64> {
        // Every rank sends and receives its operand once.
        let others = (placement.size - 1) as f64 / placement.size as f64;
        let rate = level.link.gb_per_s * level.link.in_switch? * 1e9 * 2.0 * others;
        let has_enough = level.below == 1.0 && level.within >= IN_SWITCH_RANKS;
        (self.is_host() || has_enough).then_some(rate)
    }

    /// Returns true if a level's switches, or a host's memory, reduce an all-reduce.
    fn adds_in_switch(&self, level: &Passed<'_>, placement: &GroupPlacement) -> bool {
        let switched = self.switched_rate(level, placement);
        switched.is_some_and(|rate| self.is_host() || rate > self.ring_rate(level, placement))
    }

    /// Returns the seconds of the steps of a chain within nodes and a tree of nodes, up and down.
    fn tree(&self, passed: &[Passed<'_>], placement: &GroupPlacement) -> f64 {
        let of_level = |level: &Passed<'_>| {
            let parts = level.within / level.below;
            let steps = match level.link.torus {
                Some(_) => self.torus_steps(level, placement),
                None if level.is_innermost() => parts - 1.0,
                None => libm::log2(parts).max(1.0),
            };
            2.0 * steps * level.latency()
        };
        passed.iter().map(of_level).sum()
    }

    /// Returns the seconds of the steps of one round in a ring of all ranks.
    fn ring(&self, passed: &[Passed<'_>], placement: &GroupPlacement) -> f64 {
        let ranks = placement.size as f64;
        let of_level = |level: &Passed<'_>| {
            let steps = match level.link.torus {
                Some(_) => self.torus_steps(level, placement),
                None => ranks / level.below - ranks / level.within,
            };
            steps * level.latency() * ring_step(level)
        };
        passed.iter().map(of_level).sum()
    }

    /// Returns the number of torus dimensions that a group extends in. Ranks are assumed to be numbered along one dimension after
    /// another, all of equal length.
    fn torus_dimensions(&self, level: &Passed<'_>, placement: &GroupPlacement) -> f64 {
        let dimensions = level.link.torus.unwrap_or(1) as f64;
        let side = libm::log2(self.devices().max(2) as f64) / dimensions;
        let first = (libm::log2(placement.stride as f64) / side).floor();
        // Tolerance for rounding: a group that just fills a dimension does not extend into the next one.
        let last = (libm::log2(placement.reach as f64) / side - 1e-9).ceil();
        let most = libm::log2(placement.size as f64).floor().max(1.0).min(dimensions);
        (last - first).clamp(1.0, most)
    }

    /// Returns the ranks of a group along each of its torus dimensions.
    fn torus_extent(&self, level: &Passed<'_>, placement: &GroupPlacement) -> f64 {
        libm::pow(placement.size as f64, 1.0 / self.torus_dimensions(level, placement))
    }

    /// Returns the steps until everything has been half around each dimension, in both directions.
    fn torus_steps(&self, level: &Passed<'_>, placement: &GroupPlacement) -> f64 {
        self.torus_dimensions(level, placement) * self.torus_extent(level, placement) / 2.0
    }
}

/// Returns the latency of a ring step relative to a tree step; 1 within a node, where both were fitted to chains.
fn ring_step(level: &Passed<'_>) -> f64 {
    if level.is_innermost() { 1.0 } else { RING_STEP }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn preset(name: &str) -> Cluster {
        Cluster::preset(name).unwrap_or_else(|problems| panic!("{problems}"))
    }

    /// Returns the bus bandwidth in 10⁹ bytes per second, as nccl-tests define it.
    fn bus(cluster: &Cluster, collective: Collective, bytes: u64, placement: &GroupPlacement) -> f64 {
        let factor = (placement.size() - 1) as f64 / placement.size() as f64;
        let factor = if collective == Collective::AllReduce { 2.0 * factor } else { factor };
        factor * bytes as f64 / cluster.seconds(collective, bytes, placement) / 1e9
    }

    #[test]
    fn a_group_lies_on_as_few_nodes_as_its_stride_permits() {
        let cluster = preset("dgx-h100x8");
        for (size, stride, within) in [
            (8, 1, [8, 8]),
            (64, 1, [8, 64]),
            (8, 8, [1, 8]),
            (16, 4, [2, 16]),
            (4, 2, [4, 4]),
            (2, 16, [1, 2]),
            (12, 1, [6, 12]),
            (3, 3, [1, 3]),
            (1, 1, [1, 1]),
        ] {
            let found = cluster.placement(size, stride);
            assert_eq!([found.within(0), found.within(1)], within, "{size} ranks, stride {stride}");
            assert_eq!(found.size(), size);
        }
    }

    /// Returns the placement of arbitrary ranks, given in ascending order.
    fn placement_of(cluster: &Cluster, ranks: &[usize]) -> GroupPlacement {
        let size = ranks.len().max(1);
        let mut within = [size; MAX_LEVELS];
        for (within, link) in within.iter_mut().zip(&cluster.links) {
            let part = |&rank: &usize| cluster.part(link, rank);
            let parts = ranks.chunk_by(|a, b| part(a) == part(b)).count().max(1);
            *within = (size / parts).max(1);
        }
        let stride = ranks.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).min().unwrap_or(1).max(1);
        let reach = match ranks {
            [first, .., last] => last.saturating_sub(*first).saturating_add(1),
            _ => 1,
        };
        GroupPlacement { size, within, stride, reach }
    }

    #[test]
    fn listed_ranks_lie_where_strided_ones_do() {
        let cluster = preset("dgx-h100x8");
        for (size, stride) in [(8, 1), (64, 1), (8, 8), (16, 4), (4, 2), (2, 16), (1, 1)] {
            let ranks: Vec<usize> = (0..size).map(|index| index * stride).collect();
            let listed = GroupPlacement { stride, ..placement_of(&cluster, &ranks) };
            assert_eq!(listed, cluster.placement(size, stride), "{size} ranks, stride {stride}");
        }
        // Two nodes with four ranks each, as for a group along the tensor and replicate axes.
        let found = placement_of(&cluster, &[0, 1, 2, 3, 8, 9, 10, 11]);
        assert_eq!([found.within(0), found.within(1)], [4, 8]);
    }

    #[test]
    fn what_is_sent_over_all_levels_is_what_a_ring_sends_and_each_level_has_its_share() {
        // DGX A100 has no in-switch reduction.
        let cluster = preset("dgx-a100x16");
        let bytes = 128.0 * 1024.0;
        for (size, stride) in [(8, 1), (16, 1), (128, 1), (16, 8), (8, 16), (4, 2)] {
            let placement = cluster.placement(size, stride);
            let sent = |collective| cluster.sent_bytes(collective, bytes, &placement);
            let sum = |collective| sent(collective).iter().sum::<f64>();
            let others = (size - 1) as f64 / size as f64;
            for (collective, expected) in [
                (Collective::AllReduce, 2.0 * others),
                (Collective::AllGather, others),
                (Collective::ReduceScatter, others),
                (Collective::AllToAll, others),
                (Collective::Ring, (size - 1) as f64),
                (Collective::Shift, 1.0),
            ] {
                let found = sum(collective) / bytes;
                assert!((found - expected).abs() < 1e-9, "{collective:?} of {size} by {stride}: {found}");
            }
            // In a ring, one rank's share leaves the node; an all-to-all sends each other rank its own part.
            let within = placement.within(0) as f64;
            if placement.within(0) < size && within > 1.0 {
                let [ring, all_to_all] =
                    [Collective::AllGather, Collective::AllToAll].map(|collective| sent(collective)[1]);
                assert!((ring - others * bytes / within).abs() < 1e-6, "{ring}");
                assert!((all_to_all - bytes * (1.0 - within / size as f64)).abs() < 1e-6, "{all_to_all}");
            }
        }
        // Eight H100 reduce in switches: a rank's operand goes up once.
        let cluster = preset("dgx-h100x2");
        let [inside, outside, ..] =
            cluster.sent_bytes(Collective::AllReduce, bytes, &cluster.placement(16, 1));
        assert_eq!((inside, outside), (bytes, 2.0 * 15.0 / 16.0 * bytes / 8.0));
        assert_eq!(cluster.level_between(0, 7), Some(0));
        assert_eq!(cluster.level_between(7, 8), Some(1));
        assert_eq!(cluster.level_between(3, 3), None);
    }

    #[test]
    fn ranks_of_a_node_share_the_network_of_all_of_them() {
        let cluster = preset("dgx-a100x16");
        let bytes = 16 << 30;
        let all = bus(&cluster, Collective::AllReduce, bytes, &cluster.placement(128, 1));
        let columns = bus(&cluster, Collective::AllReduce, bytes, &cluster.placement(16, 8));
        // 192 GB/s of eight devices together, 24 of a single one (NVIDIA, GTC24 S62129).
        assert!((185.0..197.0).contains(&all), "{all}");
        assert!((23.0..24.6).contains(&columns), "{columns}");
        let node = bus(&cluster, Collective::AllGather, bytes, &cluster.placement(8, 1));
        assert!((225.0..237.0).contains(&node), "{node}");
    }

    #[test]
    fn switches_add_up_from_five_ranks_on() {
        let cluster = preset("hgx-h200");
        // nccl-tests on H200, 8 GiB: all-reduces of 4, 5, 6 and 8 ranks, and an all-gather of 8.
        for (ranks, measured) in [(4, 363.3), (5, 414.2), (6, 435.6), (7, 460.0), (8, 473.1)] {
            let found = bus(&cluster, Collective::AllReduce, 8 << 30, &cluster.placement(ranks, 1));
            assert!((found / measured - 1.0).abs() < 0.09, "{ranks} ranks: {found}, measured {measured}");
        }
        let found = bus(&cluster, Collective::AllGather, 16 << 30, &cluster.placement(8, 1));
        assert!((found / 361.4 - 1.0).abs() < 0.04, "{found}");
    }

    #[test]
    fn time_grows_with_bytes_and_with_ranks() {
        for name in ["dgx-2x64", "dgx-a100x64", "dgx-h100x64", "ethernet-100gx64", "tpu-v4x64"] {
            let cluster = preset(name);
            for collective in [
                Collective::AllReduce,
                Collective::AllGather,
                Collective::ReduceScatter,
                Collective::AllToAll,
                Collective::Broadcast,
                Collective::Ring,
            ] {
                let time = |bytes, size| cluster.seconds(collective, bytes, &cluster.placement(size, 1));
                assert_eq!(time(1 << 20, 1), 0.0);
                let mut last = 0.0;
                for bytes in (0..36).map(|power| 1 << power) {
                    let found = time(bytes, 64);
                    assert!(
                        found > last && found < 1e5,
                        "{name} {collective:?} {bytes}: {found} after {last}"
                    );
                    last = found;
                }
                // In a torus more dimensions may come into use.
                if cluster.links[0].torus.is_none() {
                    let times: Vec<f64> = [2, 8, 16, 64, 256].map(|size| time(1 << 22, size)).into();
                    let switched =
                        collective == Collective::AllReduce && cluster.links[0].in_switch.is_some();
                    let from = usize::from(switched);
                    assert!(times[from..].is_sorted(), "{name} {collective:?}: {times:?}");
                }
            }
        }
    }

    #[test]
    fn messages_take_the_innermost_level_that_joins_both() {
        let cluster = preset("dgx-a100x2");
        let rate = |from, to| (1_u64 << 32) as f64 / cluster.send_seconds(1 << 32, from, to) / 1e9;
        assert!((225.0..240.0).contains(&rate(0, 7)), "{}", rate(0, 7));
        assert!((23.5..24.5).contains(&rate(0, 8)), "{}", rate(0, 8));
        assert_eq!(cluster.send_seconds(1 << 30, 3, 3), 0.0);
    }

    #[test]
    fn a_torus_has_the_wires_of_the_dimensions_in_use() {
        // 4096 chips: 16 along each dimension.
        let cluster = preset("tpu-v4x1024");
        let rate =
            |size, stride| bus(&cluster, Collective::AllGather, 1 << 34, &cluster.placement(size, stride));
        let wire = 45.0 * 0.9 * 2.0;
        for (size, stride, dimensions) in
            [(16, 1, 1.0), (256, 1, 2.0), (4096, 1, 3.0), (16, 16, 1.0), (256, 16, 2.0)]
        {
            let found = rate(size, stride) / wire;
            assert!((found / dimensions - 1.0).abs() < 0.05, "{size} ranks, stride {stride}: {found} wires");
        }
    }
}
