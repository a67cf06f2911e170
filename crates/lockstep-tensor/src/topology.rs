//! Processors of this machine by memory node (NUMA) and core, as far as this process may use them.
//!
//! Linux describes them below `/sys/devices/system`: `node/nodeN/cpulist` has the CPUs of a node, `cpu/cpuN/topology` the package
//! and the siblings of a CPU, which are the threads of one core (SMT). A CPU is a logical one throughout.

use std::{collections::BTreeMap, fmt, fs, ops::Range, path::Path};

use rustix::thread::{CpuSet, sched_getaffinity};

/// Directory in which Linux describes nodes and CPUs.
const SYSTEM: &str = "/sys/devices/system";
/// List of the CPUs that are online, below [`SYSTEM`].
const ONLINE: &str = "cpu/online";

/// The usable CPUs of a machine: at least one node, none of them empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    nodes: Vec<Node>,
}

/// A memory node, with the usable CPUs that are close to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Number of the node.
    pub number: usize,
    /// Number of the package (socket) that it belongs to.
    pub package: usize,
    /// Cores, each with its usable CPUs in ascending order.
    pub cores: Vec<Vec<usize>>,
}

impl Node {
    /// Returns the CPUs in the order in which threads should use them: the first one of every core, then the second ones.
    fn cpus(&self) -> Vec<usize> {
        cpus_of(&self.cores)
    }
}

fn cpus_of(cores: &[Vec<usize>]) -> Vec<usize> {
    let most = cores.iter().map(Vec::len).max().unwrap_or(0);
    (0..most).flat_map(|sibling| cores.iter().filter_map(move |core| core.get(sibling).copied())).collect()
}

impl Topology {
    /// Returns the CPUs that this thread may use. Without any description it is a single node, with a core for each CPU.
    pub fn current() -> Self {
        Self::read(Path::new(SYSTEM), &allowed_cpus())
    }

    /// Reads the description in `system`, limited to the CPUs in `allowed` unless that is empty. CPUs that are offline are left
    /// out, as are nodes without CPUs.
    pub fn read(system: &Path, allowed: &[usize]) -> Self {
        let list = |path: &str| fs::read_to_string(system.join(path)).ok().map(|text| parse_list(&text));
        let online = list(ONLINE);
        let is_online = |cpu: &usize| online.as_ref().is_none_or(|online| online.contains(cpu));
        let mut usable: Vec<usize> = match (allowed, &online) {
            ([], Some(online)) => online.clone(),
            ([], None) => (0..std::thread::available_parallelism().map_or(1, usize::from)).collect(),
            (allowed, _) => allowed.iter().copied().filter(is_online).collect(),
        };
        if usable.is_empty() {
            // The description contradicts the affinity, as in some sandboxes.
            usable = allowed.to_vec();
        }
        usable.sort_unstable();
        let numbers = list("node/online").unwrap_or_default();
        let node_of: BTreeMap<usize, usize> = numbers
            .into_iter()
            .flat_map(|node| {
                let cpus = list(&format!("node/node{node}/cpulist")).unwrap_or_default();
                cpus.into_iter().map(move |cpu| (cpu, node))
            })
            .collect();
        let number = |cpu: usize, name: &str| {
            let path = system.join(format!("cpu/cpu{cpu}/topology/{name}"));
            fs::read_to_string(path).ok()?.trim().parse::<usize>().ok()
        };
        // The first of the CPUs of a core stands for the core, usable or not.
        let core_of = |cpu: usize| {
            let siblings = list(&format!("cpu/cpu{cpu}/topology/thread_siblings_list"));
            siblings.and_then(|siblings| siblings.first().copied()).unwrap_or(cpu)
        };
        let mut nodes: BTreeMap<(usize, usize), BTreeMap<usize, Vec<usize>>> = BTreeMap::new();
        for cpu in usable {
            let package = number(cpu, "physical_package_id").unwrap_or(0);
            let node = node_of.get(&cpu).copied().unwrap_or(0);
            nodes.entry((package, node)).or_default().entry(core_of(cpu)).or_default().push(cpu);
        }
        // A node may span packages, for instance if the firmware interleaves all memory: then it counts once.
        let mut merged: Vec<Node> = Vec::new();
        for ((package, number), cores) in nodes {
            let cores = cores.into_values();
            match merged.iter_mut().find(|node| node.number == number) {
                Some(node) => node.cores.extend(cores),
                None => merged.push(Node { number, package, cores: cores.collect() }),
            }
        }
        Self { nodes: merged }
    }

    /// Memory nodes with usable CPUs, those of a package together.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Number of packages (sockets) with usable CPUs.
    pub fn packages(&self) -> usize {
        let mut packages: Vec<usize> = self.nodes.iter().map(|node| node.package).collect();
        packages.sort_unstable();
        packages.dedup();
        packages.len()
    }

    /// Number of usable cores.
    pub fn cores(&self) -> usize {
        self.nodes.iter().map(|node| node.cores.len()).sum()
    }

    /// Number of usable CPUs: as cores, unless cores have several threads (SMT).
    pub fn cpus(&self) -> usize {
        self.nodes.iter().flat_map(|node| &node.cores).map(Vec::len).sum()
    }

    /// Returns the number of ranks that leaves each on a memory node of its own; `None` if there is a single node, which says
    /// nothing about ranks.
    pub fn ranks_by_node(&self) -> Option<usize> {
        Some(self.nodes.len()).filter(|nodes| *nodes > 1)
    }

    /// Returns the CPUs of one of `ranks` ranks on this machine, the first of every core before its siblings.
    ///
    /// With fewer ranks than nodes a rank has whole nodes. Otherwise it has a part of one node, and nodes have ranks in proportion to
    /// their cores. Within a node ranks have whole cores, or CPUs if there are more ranks than cores; they share CPUs only if
    /// there are too few.
    ///
    /// # Panics
    /// If `rank` is not below `ranks`.
    pub fn cpus_of_rank(&self, rank: usize, ranks: usize) -> Vec<usize> {
        assert!(rank < ranks, "rank {rank} of {ranks}");
        let nodes = self.nodes.len();
        if ranks <= nodes {
            return self.nodes[part(nodes, rank, ranks)].iter().flat_map(Node::cpus).collect();
        }
        let mut first = 0;
        for (node, ranks_here) in self.nodes.iter().zip(self.shares(ranks)) {
            if rank < first + ranks_here {
                return part_of_node(node, rank - first, ranks_here);
            }
            first += ranks_here;
        }
        Vec::new()
    }

    /// Returns the CPU for each of `threads` compute threads, if they should stay where they are: if the process may use several
    /// nodes and has a thread for every core. Consecutive threads are on the same node.
    pub(crate) fn cpus_of_threads(&self, threads: usize) -> Option<Vec<usize>> {
        if self.nodes.len() < 2 || threads < self.cores() {
            return None;
        }
        let cpus = self.nodes.iter().zip(self.shares(threads));
        Some(cpus.flat_map(|(node, threads)| node.cpus().into_iter().cycle().take(threads)).collect())
    }

    /// Divides `count` ranks or threads, at least one for each node, among the nodes in proportion to their cores.
    fn shares(&self, count: usize) -> Vec<usize> {
        let mut shares = vec![1; self.nodes.len()];
        for _ in self.nodes.len()..count {
            // D'Hondt's rule: the node that then has the most cores for each.
            let cores_each = |node: &usize| self.nodes[*node].cores.len() as f64 / (shares[*node] + 1) as f64;
            let next = (0..shares.len()).rev().max_by(|a, b| cores_each(a).total_cmp(&cores_each(b)));
            next.into_iter().for_each(|node| shares[node] += 1);
        }
        shares
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = |count: usize, noun: &str| format!("{count} {noun}{}", if count == 1 { "" } else { "s" });
        let (packages, nodes) = (count(self.packages(), "socket"), count(self.nodes.len(), "memory node"));
        write!(f, "{packages}, {nodes}, {}", count(self.cores(), "core"))?;
        match self.cpus() {
            cpus if cpus == self.cores() => write!(f, ", one thread each"),
            cpus => write!(f, " with {cpus} threads (SMT)"),
        }
    }
}

/// Returns the CPUs of one of `ranks` ranks on a node.
fn part_of_node(node: &Node, rank: usize, ranks: usize) -> Vec<usize> {
    if ranks <= node.cores.len() {
        return cpus_of(&node.cores[part(node.cores.len(), rank, ranks)]);
    }
    let cpus = node.cpus();
    match ranks <= cpus.len() {
        true => cpus[part(cpus.len(), rank, ranks)].to_vec(),
        false => vec![cpus[rank % cpus.len()]],
    }
}

/// Returns part `index` of `0..whole` in `parts` nearly equal parts.
fn part(whole: usize, index: usize, parts: usize) -> Range<usize> {
    index * whole / parts..(index + 1) * whole / parts
}

/// Returns the CPUs that this thread may use; empty if the system does not tell.
pub fn allowed_cpus() -> Vec<usize> {
    let allowed = sched_getaffinity(None).ok();
    allowed.map_or(Vec::new(), |allowed| (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect())
}

/// Returns the CPUs that are online; empty if the system does not tell.
pub fn online_cpus() -> Vec<usize> {
    let list = fs::read_to_string(Path::new(SYSTEM).join(ONLINE));
    list.map_or(Vec::new(), |list| parse_list(&list))
}

/// Parses a list of Linux: numbers and ranges such as `0-3,8`. Parts that are neither are left out.
fn parse_list(text: &str) -> Vec<usize> {
    /// More than any kernel has: a range beyond it is not of CPUs.
    const MOST: usize = 1 << 16;
    let parts = text.trim().split(',').filter_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.trim().parse::<usize>().ok()?, last.trim().parse::<usize>().ok()?);
        (last < MOST).then_some(first..=last)
    });
    parts.flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes the description of a machine: nodes as (package, list of CPUs), and the first CPU of the siblings of each CPU.
    fn machine(
        nodes: &[(usize, &str)],
        online: &str,
        first_sibling: impl Fn(usize) -> usize,
    ) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: String, text: String| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text + "\n").unwrap();
        };
        write("cpu/online".to_owned(), online.to_owned());
        write("node/online".to_owned(), format!("0-{}", nodes.len() - 1));
        let all: Vec<usize> = nodes.iter().flat_map(|(_, cpus)| parse_list(cpus)).collect();
        for (node, (package, cpus)) in nodes.iter().enumerate() {
            write(format!("node/node{node}/cpulist"), (*cpus).to_owned());
            for cpu in parse_list(cpus) {
                let siblings = all.iter().filter(|other| first_sibling(**other) == first_sibling(cpu));
                let siblings: Vec<String> = siblings.map(usize::to_string).collect();
                write(format!("cpu/cpu{cpu}/topology/thread_siblings_list"), siblings.join(","));
                write(format!("cpu/cpu{cpu}/topology/physical_package_id"), package.to_string());
            }
        }
        dir
    }

    /// Two sockets of 8 cores with 2 nodes each, and SMT: CPUs 16 to 31 are the second threads of 0 to 15.
    fn two_sockets() -> tempfile::TempDir {
        let nodes = [(0, "0-3,16-19"), (0, "4-7,20-23"), (1, "8-11,24-27"), (1, "12-15,28-31")];
        machine(&nodes, "0-31", |cpu| cpu % 16)
    }

    fn all_ranks(topology: &Topology, ranks: usize) -> Vec<Vec<usize>> {
        (0..ranks).map(|rank| topology.cpus_of_rank(rank, ranks)).collect()
    }

    #[test]
    fn nodes_packages_and_siblings_of_two_sockets_are_found() {
        let topology = Topology::read(two_sockets().path(), &[]);
        let counts = (topology.nodes().len(), topology.packages(), topology.cores(), topology.cpus());
        assert_eq!(counts, (4, 2, 16, 32));
        assert_eq!(topology.ranks_by_node(), Some(4));
        assert_eq!(topology.to_string(), "2 sockets, 4 memory nodes, 16 cores with 32 threads (SMT)");
        let cores = vec![vec![8, 24], vec![9, 25], vec![10, 26], vec![11, 27]];
        assert_eq!(topology.nodes()[2], Node { number: 2, package: 1, cores });
    }

    #[test]
    fn ranks_have_whole_nodes_or_parts_of_one_and_cores_before_siblings() {
        let topology = Topology::read(two_sockets().path(), &[]);
        let node_of = |cpu: usize| cpu % 16 / 4;
        assert_eq!(all_ranks(&topology, 4)[1], [4, 5, 6, 7, 20, 21, 22, 23]);
        assert_eq!(all_ranks(&topology, 2)[1][..4], [8, 9, 10, 11]);
        assert_eq!(all_ranks(&topology, 8)[3], [6, 7, 22, 23]);
        assert_eq!(all_ranks(&topology, 16)[5], [5, 21]);
        assert_eq!(all_ranks(&topology, 32)[8..12], [[4], [5], [6], [7]]);
        assert_eq!(all_ranks(&topology, 64)[17], [5]);
        for ranks in 1..=40 {
            let shares = all_ranks(&topology, ranks);
            let mut cpus = shares.concat();
            cpus.sort_unstable();
            cpus.dedup();
            assert_eq!(cpus, (0..32).collect::<Vec<_>>(), "{ranks} ranks use every CPU");
            if ranks <= 32 {
                assert_eq!(shares.iter().map(Vec::len).sum::<usize>(), 32, "{ranks} ranks share no CPU");
            }
            for share in shares.iter().filter(|_| ranks >= 4) {
                assert!(
                    share.iter().all(|cpu| node_of(*cpu) == node_of(share[0])),
                    "{ranks} ranks: {share:?}"
                );
            }
        }
    }

    #[test]
    fn siblings_that_are_offline_are_left_out() {
        let dir = machine(&[(0, "0-3"), (1, "4-7")], "0-7", |cpu| cpu % 8);
        let text = "0,8\n";
        fs::write(dir.path().join("cpu/cpu0/topology/thread_siblings_list"), text).unwrap();
        // A list of all CPUs of the node, the offline ones included.
        fs::write(dir.path().join("node/node0/cpulist"), "0-3,8-11\n").unwrap();
        for allowed in [vec![], (0..16).collect()] {
            let topology = Topology::read(dir.path(), &allowed);
            assert_eq!((topology.cores(), topology.cpus()), (8, 8), "{allowed:?}");
            assert_eq!(all_ranks(&topology, 2), [[0, 1, 2, 3], [4, 5, 6, 7]]);
        }
    }

    #[test]
    fn a_container_sees_the_cores_of_its_cpuset_alone() {
        let dir = two_sockets();
        // Whole cores of one node, and two of another.
        let topology = Topology::read(dir.path(), &[1, 2, 8, 9, 10, 11]);
        assert_eq!((topology.nodes().len(), topology.packages(), topology.cpus()), (2, 2, 6));
        assert_eq!(all_ranks(&topology, 3), [[1, 2], [8, 9], [10, 11]]);
        assert_eq!(all_ranks(&topology, 2), [vec![1, 2], vec![8, 9, 10, 11]]);
        let topology = Topology::read(dir.path(), &[4, 5, 6, 20, 21, 22]);
        assert_eq!((topology.nodes().len(), topology.cores(), topology.cpus()), (1, 3, 6));
        assert_eq!(all_ranks(&topology, 3), [[4, 20], [5, 21], [6, 22]]);
        assert_eq!(all_ranks(&topology, 2), [vec![4, 20], vec![5, 6, 21, 22]]);
    }

    #[test]
    fn without_a_description_all_cores_are_of_one_node() {
        let dir = tempfile::tempdir().unwrap();
        let topology = Topology::read(dir.path(), &[2, 3, 9, 10, 11]);
        assert_eq!((topology.nodes().len(), topology.cores(), topology.ranks_by_node()), (1, 5, None));
        assert_eq!(topology.to_string(), "1 socket, 1 memory node, 5 cores, one thread each");
        assert_eq!(all_ranks(&topology, 2), [vec![2, 3], vec![9, 10, 11]]);
        assert_eq!(all_ranks(&topology, 7)[5..], [[2], [3]]);
        let cores = std::thread::available_parallelism().unwrap().get();
        assert_eq!(Topology::read(dir.path(), &[]).cpus(), cores);
        // A description of other CPUs than the allowed ones is none.
        let other = machine(&[(0, "0-1")], "0-1", |cpu| cpu);
        assert_eq!(Topology::read(other.path(), &[64, 65]).cpus(), 2);
    }

    #[test]
    fn threads_stay_on_their_cores_only_if_they_fill_several_nodes() {
        let dir = two_sockets();
        let topology = Topology::read(dir.path(), &(0..8).chain(16..24).collect::<Vec<_>>());
        assert_eq!(topology.cpus_of_threads(7), None);
        assert_eq!(topology.cpus_of_threads(8), Some(vec![0, 1, 2, 3, 4, 5, 6, 7]));
        let all = [0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23];
        assert_eq!(topology.cpus_of_threads(16), Some(all.to_vec()));
        assert_eq!(topology.cpus_of_threads(18).unwrap()[8..10], [0, 4]);
        let one_node = Topology::read(dir.path(), &(0..4).collect::<Vec<_>>());
        assert_eq!(one_node.cpus_of_threads(4), None);
    }

    #[test]
    fn this_machine_has_the_cpus_that_this_process_may_use() {
        let topology = Topology::current();
        assert!(topology.packages() >= 1 && topology.cores() <= topology.cpus());
        let mut cpus = topology.cpus_of_rank(0, 1);
        cpus.sort_unstable();
        assert_eq!(cpus, allowed_cpus());
    }

    #[test]
    fn lists_are_read_and_nothing_else_is_taken_for_one() {
        assert_eq!(parse_list("0-3,8,10-11\n"), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(parse_list("5"), [5]);
        for text in ["", "\n", "a-b", "3-", "-", "0-99999999"] {
            assert!(parse_list(text).is_empty(), "{text:?}");
        }
    }
}
