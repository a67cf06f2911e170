//! Machines by name: a preset, a file, or this machine, as `lockstep bench machine` has measured it or by guesses.
//!
//! What was measured of this machine is kept in the user's cache directory, where whoever plans for it looks first.

use std::path::{Path, PathBuf};

use lockstep_config::{RunConfig, offload_directory, user_cache_dir};
use lockstep_plan::DType;
use lockstep_tensor::ScratchFile;
use lockstep_tensor::host::{online_cores, processor_name};

use crate::Error;
use crate::advice::with_nodes;
use crate::cluster::{Cluster, NodeKind};
use crate::fit::available_bytes;

/// The file with what was measured of this machine, if it is not the usual one.
pub const MACHINE_VARIABLE: &str = "LOCKSTEP_MACHINE";

/// Bytes of a machine of which the system does not say how much memory it has left.
const UNKNOWN_MEMORY_BYTES: u64 = 8 << 30;

/// The preset of a name, or what a file says.
///
/// # Errors
/// [`Error::Cluster`] with everything that is wrong with it.
pub fn cluster(name: &str) -> Result<Cluster, Error> {
    let path = Path::new(name);
    let is_file = path.is_file() || path.extension().is_some_and(|extension| extension == "toml");
    if is_file { read(path) } else { Ok(Cluster::preset(name)?) }
}

/// Refuses more ranks than a cluster has devices. The CPU cores of one machine are no limit: its ranks may share them.
///
/// # Errors
/// If there are more ranks than devices, with a cluster of the same kind that has enough.
pub fn check_ranks(cluster: &Cluster, ranks: usize) -> Result<(), Error> {
    let devices = cluster.devices();
    let may_share = cluster.node_count() == 1 && cluster.nodes.iter().all(|node| node.device.is_host);
    if ranks <= devices || may_share {
        return Ok(());
    }
    let larger = match larger_preset(cluster, ranks) {
        Some(larger) => format!("write --cluster {}, which has {}", larger.name, larger.devices()),
        None => format!("give --cluster a file with {ranks} devices"),
    };
    let name = cluster.name.clone();
    Err(Error::TooManyRanks { ranks, devices, name, larger })
}

/// The preset of a cluster with as many nodes as `ranks` need; `None` for a cluster that is no preset.
fn larger_preset(cluster: &Cluster, ranks: usize) -> Option<Cluster> {
    // The name of a part of a node ends with that of the node.
    let base = with_nodes(cluster.name.rsplit(' ').next()?, 1);
    let one = Cluster::preset(&base).ok()?;
    let is_same_device = |node: &NodeKind| node.device.name == one.nodes[0].device.name;
    if one.nodes.len() != 1 || !cluster.nodes.iter().all(is_same_device) {
        return None;
    }
    let nodes = ranks.div_ceil(one.devices().max(1));
    Cluster::preset(&with_nodes(&base, nodes)).ok()
}

fn read(path: &Path) -> Result<Cluster, Error> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| Error::ReadCluster { path: path.to_owned(), source })?;
    Ok(Cluster::parse(&text, &path.display().to_string())?)
}

/// Returns the path of this machine's measurements: `LOCKSTEP_MACHINE`, else `lockstep/machine.toml` in the user's cache directory.
pub fn measured_file() -> PathBuf {
    let named = std::env::var_os(MACHINE_VARIABLE).filter(|path| !path.is_empty());
    named.map_or_else(|| user_cache_dir().join("machine.toml"), PathBuf::from)
}

/// This machine.
#[derive(Debug, Clone)]
pub struct LocalMachine {
    /// As a cluster of one node.
    pub cluster: Cluster,
    /// Reason why it is known by guesses alone; `None` if it was measured.
    pub doubt: Option<String>,
}

impl LocalMachine {
    /// This machine for at least so many ranks, each on its share of the cores, or on `threads` of them if that is not 0.
    pub fn for_ranks(ranks: usize, threads: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let path = measured_file();
        let measured = path.is_file().then(|| read(&path));
        let own_name = name_of_this(cores);
        let doubt = match &measured {
            Some(Ok(cluster)) if cluster.name == own_name && cluster.nodes.len() == 1 => None,
            Some(Ok(cluster)) => Some(format!(
                "{} is of {}, and this is {own_name}: lockstep bench machine measures it",
                path.display(),
                cluster.name
            )),
            Some(Err(error)) => Some(error.to_string()),
            None => Some("nobody has measured this machine: lockstep bench machine does".to_owned()),
        };
        let memory_bytes = available_bytes().unwrap_or(UNKNOWN_MEMORY_BYTES);
        let mut cluster = match (measured, &doubt) {
            (Some(Ok(cluster)), None) => cluster,
            _ => Cluster::local(cores, memory_bytes),
        };
        share_out(&mut cluster, ranks, threads);
        cluster.nodes[0].host_memory_bytes = memory_bytes;
        Self { cluster, doubt }
    }

    /// The same with the room that is left where a run would put what does not fit into memory; none where that lies in memory itself.
    #[must_use]
    pub fn with_disk_of(mut self, config: &RunConfig) -> Self {
        let directory = ScratchFile::existing_directory(&offload_directory(config));
        let free_bytes = || {
            let stat = rustix::fs::statvfs(&directory).ok()?;
            Some(stat.f_bavail.saturating_mul(stat.f_frsize))
        };
        let is_in_memory = ScratchFile::is_in_memory(&directory);
        self.cluster.nodes[0].disk_bytes = if is_in_memory { 0 } else { free_bytes().unwrap_or(0) };
        self
    }
}

/// Makes a machine one for at least so many ranks, each on its share of the cores, or on `threads` of them if that is not 0.
fn share_out(cluster: &mut Cluster, ranks: usize, threads: usize) {
    let node = &mut cluster.nodes[0];
    let used = if threads == 0 { node.devices } else { (ranks.max(1) * threads).min(node.devices) };
    *node = node.with_cores(used, ranks);
    // One that was measured with one rank has no link.
    if node.devices > 1 && cluster.links.is_empty() {
        cluster.links = Cluster::local(2, 0).links;
    }
}

/// Returns the name that a machine file gives the machine that it was measured on.
pub fn name_of_this(cores: usize) -> String {
    format!("{} x {cores}", processor_name())
}

/// The machine that the ranks of `config` run on, if all of them are on this one and it was measured.
///
/// A rank may use its share of the cores and sees no others, so that the file is taken as it is.
pub(crate) fn of_run(config: &RunConfig) -> Option<Cluster> {
    let place = lockstep_comm::place().ok().flatten();
    if place.is_some_and(|place| place.world_size.is_some_and(|ranks| place.local_size != Some(ranks))) {
        return None;
    }
    let cluster = read(&measured_file()).ok().filter(|cluster| cluster.nodes.len() == 1)?;
    Some(for_run(&cluster, config))
}

/// The peak of what this rank computes with in products of `dtype`, in operations a second; none where `lockstep bench machine` has not
/// measured this machine.
pub fn peak_of_rank(config: &RunConfig, dtype: DType) -> Option<f64> {
    let mut cluster = read(&measured_file()).ok()?;
    let is_of_this = cluster.name.rsplit_once(" x ").is_some_and(|(name, _)| name == processor_name());
    let is_measured = |node: &NodeKind| !node.device.efficiency.measured.is_empty();
    if !is_of_this || cluster.nodes.len() != 1 || !cluster.nodes.iter().all(is_measured) {
        return None;
    }
    let ranks = crate::machine::local_ranks();
    share_out(&mut cluster, ranks, config.train.threads);
    // Processors widen f16 to f32.
    let dtype = if dtype == DType::F16 { DType::F32 } else { dtype };
    cluster.nodes[0].device_of(ranks).peak_flops(dtype)
}

/// A machine as the ranks of `config` share it out.
pub(crate) fn for_run(cluster: &Cluster, config: &RunConfig) -> Cluster {
    let mut cluster = cluster.clone();
    if cluster.nodes.iter().any(|node| node.device.is_host) {
        share_out(&mut cluster, config.ranks(), config.train.threads);
    }
    cluster
}

/// Ranks of this machine; as many as have a share of the cores like this one's where the launcher does not say.
pub fn local_ranks() -> usize {
    let Some(place) = lockstep_comm::place().ok().flatten() else { return 1 };
    let own_cores = std::thread::available_parallelism().map_or(1, usize::from);
    place.local_size.unwrap_or_else(|| (online_cores() / own_cores).max(1))
}
