//! Machines by name: a preset, a file, or this machine with the rates that `lockstep bench machine` measured or default ones.
//!
//! Measurements of this machine are kept in the user's cache directory, where the planner looks first.

use std::path::{Path, PathBuf};

use lockstep_config::{RunConfig, offload_directory, user_cache_dir};
use lockstep_plan::{DType, PlannedStep};
use lockstep_tensor::ScratchFile;
use lockstep_tensor::host::{online_cores, processor_name};

use crate::Error;
use crate::cluster::{Cluster, NodeKind, with_nodes};
use crate::fit::available_bytes;
use crate::planner::predicted_step;

/// Environment variable with the path of this machine's measurements, if it is not the default one.
pub const MACHINE_VARIABLE: &str = "LOCKSTEP_MACHINE";

/// Assumed memory, in bytes, of a machine whose system does not report how much is available.
const UNKNOWN_MEMORY_BYTES: u64 = 8 << 30;

/// Returns the cluster that `name` stands for: a preset, or the content of a TOML file.
///
/// # Errors
/// If the file cannot be read or parsed, or the preset does not exist; [`Error::Cluster`] lists everything that is wrong.
pub fn cluster(name: &str) -> Result<Cluster, Error> {
    let path = Path::new(name);
    let is_file = path.is_file() || path.extension().is_some_and(|extension| extension == "toml");
    if is_file { read(path) } else { Ok(Cluster::preset(name)?) }
}

/// Rejects more ranks than a cluster has devices. The CPU cores of a single machine are no limit: its ranks may share them.
///
/// # Errors
/// If there are more ranks than devices; the error names a cluster of the same kind that has enough.
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

/// Returns the preset of the same kind with as many nodes as `ranks` need; `None` if the cluster is no preset.
fn larger_preset(cluster: &Cluster, ranks: usize) -> Option<Cluster> {
    // The name of a partial node ends with the name of the whole node.
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

/// This machine as a cluster.
#[derive(Debug, Clone)]
pub struct LocalMachine {
    /// The machine as a cluster of one node.
    pub cluster: Cluster,
    /// Reason why default rates are used instead of measured ones; `None` if the machine was measured.
    pub doubt: Option<String>,
}

impl LocalMachine {
    /// Returns this machine for at least `ranks` ranks, each on an equal share of the cores, or on `threads` of them if that is not 0.
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
            None => Some("this machine is not measured; lockstep bench machine measures it".to_owned()),
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

    /// Sets the disk capacity to the free space of the run's offload directory; to 0 if that directory is in memory itself.
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

/// Divides the cores of a machine among at least `ranks` ranks: evenly, or `threads` for each if that is not 0.
fn share_out(cluster: &mut Cluster, ranks: usize, threads: usize) {
    let node = &mut cluster.nodes[0];
    let used = if threads == 0 { node.devices } else { (ranks.max(1) * threads).min(node.devices) };
    *node = node.with_cores(used, ranks);
    // A machine that was measured with one rank has no link.
    if node.devices > 1 && cluster.links.is_empty() {
        cluster.links = Cluster::local(2, 0).links;
    }
}

/// Returns the name by which a machine file identifies this machine: processor and number of cores.
pub fn name_of_this(cores: usize) -> String {
    format!("{} x {cores}", processor_name())
}

/// Returns the machine that the ranks of `config` run on; `None` if ranks run elsewhere too, or it was not measured.
///
/// A rank may be pinned to its share of the cores and see no others, so the file is not compared with this machine.
fn of_run(config: &RunConfig) -> Option<Cluster> {
    let place = lockstep_launch::place().ok().flatten();
    if place.is_some_and(|place| place.world_size.is_some_and(|ranks| place.local_size != Some(ranks))) {
        return None;
    }
    let cluster = read(&measured_file()).ok().filter(|cluster| cluster.nodes.len() == 1)?;
    Some(for_run(&cluster, config))
}

/// Predicts a step of `config` on this machine; `None` if the machine was not measured, or if ranks run on other machines too.
pub fn predict_step(config: &RunConfig) -> Option<PlannedStep> {
    predicted_step(config, of_run(config)?).ok()
}

/// Returns the measured peak of this rank's cores in matrix products of `dtype`, in FLOP/s; `None` if `lockstep bench machine` has
/// not measured this machine.
pub fn peak_of_rank(config: &RunConfig, dtype: DType) -> Option<f64> {
    let mut cluster = read(&measured_file()).ok()?;
    let is_of_this = cluster.name.rsplit_once(" x ").is_some_and(|(name, _)| name == processor_name());
    let is_measured = |node: &NodeKind| !node.device.efficiency.measured.is_empty();
    if !is_of_this || cluster.nodes.len() != 1 || !cluster.nodes.iter().all(is_measured) {
        return None;
    }
    let ranks = local_ranks();
    share_out(&mut cluster, ranks, config.train.threads);
    // Processors widen f16 to f32.
    let dtype = if dtype == DType::F16 { DType::F32 } else { dtype };
    cluster.nodes[0].device_of(ranks).peak_flops(dtype)
}

/// Returns `cluster` with the cores of a host divided among the ranks of `config`.
pub(crate) fn for_run(cluster: &Cluster, config: &RunConfig) -> Cluster {
    let mut cluster = cluster.clone();
    if cluster.is_host() {
        share_out(&mut cluster, config.ranks(), config.train.threads);
    }
    cluster
}

/// Returns the number of ranks on this machine; if the launcher does not tell, estimated from this rank's share of the cores.
pub fn local_ranks() -> usize {
    let Some(place) = lockstep_launch::place().ok().flatten() else { return 1 };
    let own_cores = std::thread::available_parallelism().map_or(1, usize::from);
    place.local_size.unwrap_or_else(|| (online_cores() / own_cores).max(1))
}
