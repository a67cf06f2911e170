//! Which machines a name means: a preset, a file, or this one.

use std::path::Path;

use lockstep_plan::cluster::Cluster;

use crate::Error;
use crate::fit::available_bytes;

/// Bytes of a machine of which the system does not say how much memory it has left.
const UNKNOWN_MEMORY_BYTES: u64 = 8 << 30;

/// The preset of a name, or what a file says.
///
/// # Errors
/// [`Error::Cluster`] with everything that is wrong with it.
pub fn cluster(name: &str) -> Result<Cluster, Error> {
    let path = Path::new(name);
    let is_file = path.is_file() || path.extension().is_some_and(|extension| extension == "toml");
    if !is_file {
        return Ok(Cluster::preset(name)?);
    }
    let text = std::fs::read_to_string(path)
        .map_err(|source| Error::ReadCluster { path: path.to_owned(), source })?;
    Ok(Cluster::parse(&text, name)?)
}

/// This machine, with a device for each core, or for each of `ranks` if these are more.
///
/// # Errors
/// None yet.
pub fn local(ranks: usize) -> Result<Cluster, Error> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(Cluster::local(cores.max(ranks), available_bytes().unwrap_or(UNKNOWN_MEMORY_BYTES)))
}
