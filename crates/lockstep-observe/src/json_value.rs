//! JSON values of a run's records: written to files as a whole, and gathered from the ranks.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use lockstep_engine::Ranks;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Error;

/// Writes a file atomically: a reader sees all of it or nothing.
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<(), Error> {
    let draft = path.with_extension("tmp");
    let written = || -> io::Result<()> {
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir)?;
        }
        let mut file = BufWriter::new(File::create(&draft)?);
        serde_json::to_writer(&mut file, value)?;
        file.flush()?;
        fs::rename(&draft, path)
    };
    written().map_err(Error::io("write", path))
}

/// Gathers a value of each rank on the first rank, in the order of the ranks; `None` on the others. `path` is the file that will
/// contain them, for messages.
///
/// # Errors
/// If a rank is lost or does not answer in time, or a value cannot be read as JSON.
#[track_caller]
pub(crate) fn gather_json<T: Serialize + DeserializeOwned>(
    ranks: &Ranks,
    path: &Path,
    own: &T,
) -> Result<Option<Vec<T>>, Error> {
    let failed = |error: serde_json::Error| Error::io("gather the records of", path)(error.into());
    let parts = ranks.gather(&serde_json::to_vec(own).map_err(failed)?)?;
    if !ranks.is_first() {
        return Ok(None);
    }
    let values = parts.iter().map(|part| serde_json::from_slice(part).map_err(failed));
    values.collect::<Result<_, _>>().map(Some)
}
