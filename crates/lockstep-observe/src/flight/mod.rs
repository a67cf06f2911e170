//! The flight recorder on disk: the last operations of each rank, written when a run fails, and their analysis.
//!
//! Each host writes a file of its own ([`Dump::write`]). [`read_all`] reads the files of a run, [`analyse`] finds the first
//! operation on which ranks differ, and its `Display` explains it.

mod analysis;
mod display;
mod dump;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use lockstep_comm::CommError;
use lockstep_engine::Ranks;

pub use analysis::{Analysis, Called, Finding, Last, LastCall, OperationId, Straggler, analyse};
pub use dump::{Dump, Ending, Group, Operation, RankRecords};

use crate::Error;

/// Writes the last operations of this rank to a file in `dir`, for ranks that no launcher of ours watches; returns its path, or `None` for a
/// run on one rank.
///
/// # Errors
/// If the file cannot be written.
pub fn write_records(ranks: &Ranks, error: &CommError, dir: &Path) -> Result<Option<PathBuf>, Error> {
    let Some(group) = ranks.group() else { return Ok(None) };
    let own = (group.rank(), group.recorded(group.rank()));
    Dump::new(group.size(), Some(Ending::by(error)), [own]).write(dir).map(Some)
}

/// Reads the files of one run.
///
/// # Errors
/// As [`Dump::read`], and [`Error::BadRecords`] if the files belong to different runs.
pub fn read_all(paths: &[PathBuf]) -> Result<Vec<Dump>, Error> {
    let mut dumps: Vec<Dump> = Vec::new();
    let mut owners: BTreeMap<usize, &PathBuf> = BTreeMap::new();
    for path in paths {
        let dump = Dump::read(path)?;
        let bad = |problem| Error::BadRecords { path: path.clone(), problem };
        if let Some(first) = dumps.first()
            && first.world_size != dump.world_size
        {
            let (ours, theirs) = (dump.world_size, first.world_size);
            return Err(bad(format!("a run of {ours} ranks, and {} of {theirs}", paths[0].display())));
        }
        for rank in dump.ranks.iter().map(|rank| rank.rank) {
            if let Some(owner) = owners.insert(rank, path) {
                return Err(bad(format!("{} has records of rank {rank} as well", owner.display())));
            }
        }
        dumps.push(dump);
    }
    Ok(dumps)
}
