//! Flags by which other tools count machines. `plan` counts them in `--cluster`, so each of these flags is refused with the
//! `--cluster` to write instead.

use clap::Args;
use lockstep_planner::cluster::Cluster;

use crate::exit::Failure;

/// Accelerator of the answer if `--cluster` names none.
const USUAL: &str = "h100";

/// Numbers of devices and nodes, as flags of other tools.
#[derive(Debug, Args)]
pub(super) struct Counts {
    #[arg(long, value_name = "N", hide = true, aliases = ["num-gpus", "num_gpus", "gpu", "devices", "num-devices",
        "num-processes", "num_processes", "world-size", "world_size"])]
    gpus: Option<String>,
    #[arg(long, value_name = "N", hide = true, aliases = ["num-nodes", "num_nodes", "nodes", "num-machines", "num_machines"])]
    nnodes: Option<String>,
}

/// A number of devices or nodes.
#[derive(Debug, Clone, Copy)]
enum Count {
    Devices(usize),
    Nodes(usize),
}

impl Counts {
    /// Refuses the flags.
    ///
    /// # Errors
    /// If one of the flags is given; the error names the equivalent `--cluster`.
    pub(super) fn refuse(&self, cluster: Option<&str>) -> Result<(), Failure> {
        let (flag, text, count): (_, _, fn(usize) -> Count) = match (&self.nnodes, &self.gpus) {
            (Some(text), _) => ("--nnodes", text, Count::Nodes),
            (None, Some(text)) => ("--gpus", text, Count::Devices),
            (None, None) => return Ok(()),
        };
        let number = text.parse::<usize>().ok().map(count);
        let bases = [cluster, Some(USUAL)].into_iter().flatten();
        let found = number.and_then(|number| bases.into_iter().find_map(|base| cluster_with(base, number)));
        let (written, machines) = found.unwrap_or_else(|| ("dgx-h100x2".to_owned(), "2 nodes".to_owned()));
        Err(Failure::configuration(format!(
            "{flag} {text}: plan counts machines in --cluster; write --cluster {written} for {machines} (docs/clusters.md lists others)"
        )))
    }
}

/// Returns the name of a cluster with so many of the machines of `base`, and its devices in words; `None` if `base` has a number
/// already, or there is no such cluster.
fn cluster_with(base: &str, count: Count) -> Option<(String, String)> {
    let one = Cluster::preset(base).ok().filter(|one| one.node_count() == 1)?;
    let node = one.nodes.first()?;
    let is_part = one.name.contains(' ');
    let name = match count {
        Count::Devices(devices) if is_part => format!("{base}x{devices}"),
        Count::Devices(devices) if devices.is_multiple_of(node.devices) => {
            format!("{base}x{}", devices / node.devices)
        }
        Count::Devices(_) => return None,
        // The name of a partial node ends with the name of the whole node.
        Count::Nodes(nodes) => format!("{}x{nodes}", one.name.rsplit(' ').next()?),
    };
    let cluster = Cluster::preset(&name).ok()?;
    let words = format!("{} x {}", cluster.devices(), node.device.name);
    Some((if cluster.name.contains(' ') { name } else { cluster.name }, words))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_answered_with_a_cluster() {
        let table = [
            (Some("16"), None, None, "--cluster dgx-h100x2 for 16 x h100-sxm"),
            (Some("4"), None, None, "--cluster h100x4 for 4 x h100-sxm"),
            (None, Some("2"), None, "--cluster dgx-h100x2 for 16 x h100-sxm"),
            (Some("16"), None, Some("a100"), "--cluster dgx-a100x2 for 16 x a100"),
            (Some("16"), None, Some("dgx-a100"), "--cluster dgx-a100x2 for 16 x a100"),
            (Some("8"), Some("4"), Some("hgx-h200"), "--cluster hgx-h200x4 for 32 x h200"),
            (Some("many"), None, None, "--cluster dgx-h100x2"),
        ];
        for (gpus, nnodes, cluster, expected) in table {
            let [gpus, nnodes] = [gpus, nnodes].map(|text| text.map(str::to_owned));
            let Err(failure) = (Counts { gpus, nnodes }).refuse(cluster) else { panic!("{expected}") };
            assert!(failure.message.contains(expected), "{}", failure.message);
        }
        assert!((Counts { gpus: None, nnodes: None }).refuse(None).is_ok());
    }
}
