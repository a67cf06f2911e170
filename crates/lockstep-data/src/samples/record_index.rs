//! Positions of the records in a shard, found by one pass over it and cached.
//!
//! A cached index is named by a fingerprint of the shard: its length, its modification time, and up to 64 sampled
//! pages. So it is found again when the shard moves, and never used for other contents that differ in a sampled page.
//! Readers check each record where the index says it is, so an index of other contents gives an error, not other data.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
};

use crate::error::{DataError, Result};

const MAGIC: [u8; 8] = *b"LOCKSIDX";
const HASH_BYTES: usize = 32;
/// Size and maximum number of the pages that identify the contents of a shard.
const SAMPLED_PAGE_BYTES: u64 = 4096;
const SAMPLED_PAGES: u64 = 64;

/// Index of a shard: numbers whose meaning the format decides, and the damage at which the shard ends early.
#[derive(Debug)]
pub(crate) struct ShardIndex {
    /// Offsets and lengths, a fixed count of them per sample.
    pub(crate) numbers: Vec<u64>,
    /// First damage; records after it are not in the index.
    pub(crate) damage: Option<DataError>,
}

/// Returns the index of the shard at `path` from `cache_dir`, or builds it and, if the shard is sound, caches it there.
/// `purpose` distinguishes indexes of one shard: format, version, and the fields they list.
///
/// # Errors
/// If the shard cannot be read, or the cache directory cannot be written.
pub(crate) fn cached_index(
    path: &Path,
    purpose: &str,
    cache_dir: Option<&Path>,
    build: impl FnOnce(&File) -> Result<ShardIndex>,
) -> Result<ShardIndex> {
    let file = File::open(path).map_err(DataError::io("open", path))?;
    let Some(cache_dir) = cache_dir else { return build(&file) };
    let key = fingerprint(&file, purpose).map_err(DataError::io("read", path))?;
    let cached = cache_dir.join(format!("{}.index", key.to_hex()));
    if let Ok(bytes) = fs::read(&cached)
        && let Some(numbers) = parse_numbers(&bytes)
    {
        return Ok(ShardIndex { numbers, damage: None });
    }
    let index = build(&file)?;
    if index.damage.is_none() {
        write_numbers(cache_dir, &cached, &index.numbers)?;
    }
    Ok(index)
}

fn fingerprint(file: &File, purpose: &str) -> io::Result<blake3::Hash> {
    let metadata = file.metadata()?;
    let mut hasher = blake3::Hasher::new();
    hasher.update(purpose.as_bytes());
    for number in [metadata.len(), metadata.mtime() as u64, metadata.mtime_nsec() as u64] {
        hasher.update(&number.to_le_bytes());
    }
    let pages = metadata.len().div_ceil(SAMPLED_PAGE_BYTES);
    let samples = pages.min(SAMPLED_PAGES);
    let mut page = [0; SAMPLED_PAGE_BYTES as usize];
    for sample in 0..samples {
        let offset = sample * pages / samples * SAMPLED_PAGE_BYTES;
        let bytes = (metadata.len() - offset).min(SAMPLED_PAGE_BYTES) as usize;
        file.read_exact_at(&mut page[..bytes], offset)?;
        hasher.update(&page[..bytes]);
    }
    Ok(hasher.finalize())
}

/// Returns the numbers of a cache file; `None` if it is damaged, so that the index is built again.
pub(crate) fn parse_numbers(bytes: &[u8]) -> Option<Vec<u64>> {
    let (body, hash) = bytes.split_last_chunk::<HASH_BYTES>()?;
    let numbers = body.strip_prefix(&MAGIC)?;
    if *blake3::hash(body).as_bytes() != *hash {
        return None;
    }
    let (numbers, []) = numbers.as_chunks::<8>() else { return None };
    Some(numbers.iter().map(|number| u64::from_le_bytes(*number)).collect())
}

/// Writes a cache file under another name and renames it, so that ranks may write the same one at once.
pub(crate) fn write_numbers(cache_dir: &Path, path: &Path, numbers: &[u64]) -> Result<()> {
    static WRITTEN: AtomicU64 = AtomicU64::new(0);
    fs::create_dir_all(cache_dir).map_err(DataError::io("create", cache_dir))?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    let hash = blake3::hash(&bytes);
    bytes.extend(hash.as_bytes());
    let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
    let partial = path.with_extension(format!("{}-{number}.partial", std::process::id()));
    let written = fs::write(&partial, &bytes).and_then(|()| fs::rename(&partial, path));
    written.map_err(|error| {
        // The partial file is useless; its removal may fail for the reason of the write.
        let _ = fs::remove_file(&partial);
        DataError::io("write", path)(error)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_is_built_once_for_the_same_contents() {
        let dir = tempfile::tempdir().unwrap();
        let (shard, cache) = (dir.path().join("a.tar"), dir.path().join("cache"));
        fs::write(&shard, vec![1; 10_000]).unwrap();
        let mut built = 0;
        let mut index = |purpose: &str| {
            let build = |_: &File| {
                built += 1;
                Ok(ShardIndex { numbers: vec![1, 2, 1 << 40], damage: None })
            };
            assert_eq!(cached_index(&shard, purpose, Some(&cache), build).unwrap().numbers, [1, 2, 1 << 40]);
        };
        index("tar");
        index("tar");
        index("other");
        assert_eq!(built, 2);
        // Other contents of the same length.
        fs::write(&shard, vec![2; 10_000]).unwrap();
        let build = |_: &File| Ok(ShardIndex { numbers: vec![9], damage: None });
        assert_eq!(cached_index(&shard, "tar", Some(&cache), build).unwrap().numbers, [9]);
    }

    #[test]
    fn a_damaged_cache_file_is_built_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.index");
        write_numbers(dir.path(), &path, &[3, 4]).unwrap();
        let sound = fs::read(&path).unwrap();
        assert_eq!(parse_numbers(&sound), Some(vec![3, 4]));
        for at in 0..sound.len() {
            let mut bytes = sound.clone();
            bytes[at] ^= 1;
            assert_eq!(parse_numbers(&bytes), None, "byte {at}");
            assert_eq!(parse_numbers(&sound[..at]), None, "{at} bytes");
        }
    }
}
