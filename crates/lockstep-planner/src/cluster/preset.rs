//! Named clusters. They are TOML files as users write them; those in `presets/` start with the sources of their numbers.

use super::{Cluster, ClusterError, ClusterProblem};

use super::section::{one_of, unknown};

/// Declares the presets by the names of their files.
macro_rules! presets {
    ($($name:literal),+) => {
        /// Names of the presets, which a number of nodes may follow: `dgx-h100x96`.
        pub const PRESETS: [&str; [$($name),+].len()] = [$($name),+];

        const TEXTS: [&str; PRESETS.len()] = [$(include_str!(concat!("presets/", $name, ".toml"))),+];
    };
}

presets![
    "dgx-2",
    "dgx-a100",
    "dgx-h100",
    "dgx-b200",
    "hgx-h200",
    "hgx-a100-roce",
    "ethernet-100g",
    "tpu-v4",
    "tpu-v5p"
];

/// Common names of accelerators, with the preset that has them: `h100x16` is 16 of them, two nodes of `dgx-h100`.
const ACCELERATORS: [(&str, &str); 10] = [
    ("h100", "dgx-h100"),
    ("h200", "hgx-h200"),
    ("b200", "dgx-b200"),
    ("a100", "dgx-a100"),
    ("a100-80gb", "dgx-a100"),
    ("v100", "dgx-2"),
    ("h100-sxm", "dgx-h100"),
    ("h200-sxm", "hgx-h200"),
    ("b200-sxm", "dgx-b200"),
    ("a100-sxm", "dgx-a100"),
];

impl Cluster {
    /// Returns one of the [`PRESETS`] with a number of nodes (`dgx-h100x96`), or a number of accelerators in the nodes of their preset:
    /// `h100x16`, `h100:16`, `16xH100`, `2x8xH100`.
    ///
    /// # Errors
    /// If the name is unknown (the message has the nearest one), if there are more nodes than can be counted, or if the accelerators fill
    /// no whole number of nodes.
    pub fn preset(name: &str) -> Result<Self, ClusterError> {
        let Some(Counted { preset, are_accelerators, count }) = Counted::of(name) else {
            let allowed = format!(
                "{}, each with a number of nodes (dgx-h100x96), or accelerators (h100x16)",
                one_of(&PRESETS)
            );
            return Err(refused(unknown(name, &PRESETS), allowed));
        };
        let text = PRESETS.iter().position(|known| *known == preset).map_or("", |index| TEXTS[index]);
        let cluster = Self::parse(text, preset)?;
        let of_node = cluster.nodes[0].devices;
        let most = u32::MAX as usize / of_node;
        let are_nodes = |nodes: usize| (1..=most).contains(&nodes);
        match (count, are_accelerators) {
            (Count::One, false) => Ok(cluster),
            (Count::One, true) => Ok(cluster.with_devices_of_a_node(1)),
            (Count::Of(nodes), false) if are_nodes(nodes) => Ok(cluster.with_nodes(nodes)),
            (Count::Of(devices), true) if devices.is_multiple_of(of_node) && are_nodes(devices / of_node) => {
                Ok(cluster.with_nodes(devices / of_node))
            }
            (Count::Of(devices), true) if (1..of_node).contains(&devices) => {
                Ok(cluster.with_devices_of_a_node(devices))
            }
            (_, true) => Err(refused(
                format!("\"{}\" fills no whole number of nodes", name.escape_debug()),
                format!(
                    "1 to {of_node} accelerators, or a multiple of the {of_node} that a node of {preset} has"
                ),
            )),
            (_, false) => {
                let what = format!("\"{}\" has no number of nodes after {preset}x", name.escape_debug());
                Err(refused(what, format!("1 to {most}")))
            }
        }
    }

    /// Returns the preset with this number of nodes.
    fn with_nodes(mut self, nodes: usize) -> Self {
        if nodes > 1 || self.nodes[0].count > 1 {
            self.name = format!("{}x{nodes}", self.name);
        }
        self.nodes[0].count = nodes;
        self
    }

    /// Returns one node with fewer devices, and with that share of its host memory, disk and price.
    fn with_devices_of_a_node(mut self, devices: usize) -> Self {
        let node = &mut self.nodes[0];
        let share = devices as f64 / node.devices as f64;
        self.name = format!("{devices} of {} devices of {}", node.devices, self.name);
        node.devices = devices;
        let part = |bytes: u64| (bytes as f64 * share) as u64;
        (node.host_memory_bytes, node.disk_bytes) = (part(node.host_memory_bytes), part(node.disk_bytes));
        for rate in [&mut node.price_per_hour, &mut node.kilowatts, &mut node.host_memory_gb_per_s]
            .into_iter()
            .flatten()
        {
            *rate *= share;
        }
        node.disk_gb_per_s *= share;
        self
    }

    /// Returns a machine of which only the cores and the memory are known, with estimates for a server core until `lockstep bench
    /// machine` has measured it.
    pub fn local(cores: usize, memory_bytes: u64) -> Self {
        let mut cluster = Self::parse(include_str!("presets/local.toml"), "local").expect("a valid file");
        let node = &mut cluster.nodes[0];
        node.devices = cores.max(1);
        (node.device.memory_bytes, node.host_memory_bytes) = (memory_bytes, memory_bytes);
        cluster
    }
}

/// A name of machines with their number.
struct Counted {
    /// The preset that describes the machines.
    preset: &'static str,
    /// True if the number is one of accelerators; false for nodes.
    are_accelerators: bool,
    count: Count,
}

/// Number in a name of machines.
enum Count {
    /// No number is given.
    One,
    /// Product of all numbers that are given.
    Of(usize),
    /// The number cannot be parsed, or is too large.
    Unreadable,
}

impl Counted {
    /// Parses a name such as `dgx-h100x2`, `2x8xH100` or `h100:16`; `None` if no machines have it.
    fn of(name: &str) -> Option<Self> {
        let name = name.to_ascii_lowercase();
        let mut rest = name.as_str();
        let mut before = Vec::new();
        while let Some((number, more)) = rest.split_once('x')
            && !number.is_empty()
            && number.bytes().all(|byte| byte.is_ascii_digit())
        {
            before.push(number);
            rest = more;
        }
        let find = |name: &str| {
            let preset = PRESETS.into_iter().find(|known| *known == name).map(|preset| (preset, false));
            let accelerators = || ACCELERATORS.into_iter().find(|(known, _)| *known == name);
            preset.or_else(|| accelerators().map(|(_, preset)| (preset, true)))
        };
        let ((preset, are_accelerators), after) = match (find(rest), rest.rsplit_once(['x', ':'])) {
            (Some(found), _) => (found, None),
            (None, Some((base, count))) => (find(base)?, Some(count)),
            (None, None) => return None,
        };
        let numbers: Vec<&str> = before.into_iter().chain(after).collect();
        let product = numbers.iter().try_fold(1_usize, |product, number| {
            number.parse::<usize>().ok().and_then(|number| product.checked_mul(number))
        });
        let count = match (numbers.is_empty(), product) {
            (true, _) => Count::One,
            (false, Some(product)) => Count::Of(product),
            (false, None) => Count::Unreadable,
        };
        Some(Self { preset, are_accelerators, count })
    }
}

/// Returns the name of a cluster with another number of nodes: `dgx-h100x4` with 8 is `dgx-h100x8`.
pub(crate) fn with_nodes(name: &str, nodes: usize) -> String {
    let base = match name.rsplit_once('x') {
        Some((base, count))
            if !count.is_empty()
                && count.bytes().all(|byte| byte.is_ascii_digit())
                && PRESETS.contains(&base) =>
        {
            base
        }
        _ => name,
    };
    if nodes == 1 { base.to_owned() } else { format!("{base}x{nodes}") }
}

fn refused(what: String, allowed: String) -> ClusterError {
    let (origin, place) = ("--cluster".to_owned(), String::new());
    ClusterError(vec![ClusterProblem { origin, place, what, allowed }])
}
