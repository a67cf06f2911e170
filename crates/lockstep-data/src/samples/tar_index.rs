//! Index of the samples in a tar shard of a WebDataset.
//!
//! The key of a member is its path up to the first dot of the last component; the suffix is the rest in lower case
//! (`a/b.seg.PNG`: key `a/b`, suffix `seg.png`). Consecutive members with one key are a sample.

use std::{
    io::{Read, Seek, SeekFrom},
    path::Path,
};

use super::{field::Field, record_index::ShardIndex};
use crate::error::{DataError, Result};

/// Size of a block of the format: headers are one block, and contents fill up their last one.
pub(crate) const BLOCK_BYTES: u64 = 512;

/// Version of the numbers in an index; part of the name of a cached one.
pub(crate) const INDEX_PURPOSE: &str = "lockstep tar index 1";

/// Number in an index for a member that the sample does not have.
pub(crate) const ABSENT: u64 = 0;

/// Returns the count of numbers per sample: the offset of its first member's contents, then offset and length of the
/// contents for each field, or [`ABSENT`] and 0.
pub(crate) fn numbers_per_sample(fields: usize) -> usize {
    1 + 2 * fields
}

/// Members of the sample that is being read.
#[derive(Default)]
struct Members {
    key: Vec<u8>,
    /// Suffix, offset and length of the contents.
    members: Vec<(String, u64, u64)>,
}

impl Members {
    /// Appends the numbers of the sample to `numbers`, and forgets its members.
    fn finish(&mut self, fields: &[Field], numbers: &mut Vec<u64>) {
        let Some((_, first, _)) = self.members.first() else { return };
        numbers.push(*first);
        for field in fields {
            let found =
                field.keys.iter().find_map(|key| self.members.iter().find(|(suffix, ..)| suffix == key));
            numbers.extend(found.map_or([ABSENT, 0], |&(_, offset, bytes)| [offset, bytes]));
        }
        self.members.clear();
    }
}

/// Reads the headers of a shard and returns the index of its samples for `fields`.
///
/// A damage ends the index, and the sample in which it lies is not in it: a header that is no header, a member beyond the
/// end of the file, a missing end-of-archive block (the file was cut off between members), or two members of a sample
/// with one suffix.
///
/// # Errors
/// If the reader fails.
pub(crate) fn index_tar(reader: impl Read + Seek, path: &Path, fields: &[Field]) -> Result<ShardIndex> {
    let mut numbers = Vec::new();
    let mut members = Members::default();
    let damage = walk(reader, path, fields, &mut members, &mut numbers)?;
    if damage.is_none() {
        members.finish(fields, &mut numbers);
    }
    Ok(ShardIndex { numbers, damage })
}

/// Walks over the members; returns the damage that ended the walk.
fn walk(
    mut reader: impl Read + Seek,
    path: &Path,
    fields: &[Field],
    sample: &mut Members,
    numbers: &mut Vec<u64>,
) -> Result<Option<DataError>> {
    let file_bytes = reader.seek(SeekFrom::End(0)).map_err(DataError::io("read", path))?;
    reader.seek(SeekFrom::Start(0)).map_err(DataError::io("read", path))?;
    let bad = |record: String, offset_bytes, problem: String| {
        Ok(Some(DataError::BadRecord { path: path.to_owned(), record, offset_bytes, problem }))
    };
    let mut archive = tar::Archive::new(reader);
    let entries = archive.entries_with_seek().map_err(DataError::io("read", path))?;
    // End of the last sound member, where the next header is.
    let mut next = 0;
    for (number, entry) in entries.enumerate() {
        let entry = match entry {
            Ok(entry) => entry,
            Err(error) => {
                let problem = format!("it is not a tar header: {error}; shards are uncompressed tar files");
                return bad(format!("member {number}"), next, problem);
            }
        };
        let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        let (offset, bytes) = (entry.raw_file_position(), entry.size());
        let kind = entry.header().entry_type();
        let is_regular = kind.is_file() || kind.is_contiguous();
        let named = split_name(&name).filter(|_| is_regular);
        if let Some((key, _)) = named
            && sample.key != key.as_bytes()
        {
            sample.finish(fields, numbers);
            sample.key = key.as_bytes().to_vec();
        }
        if offset.checked_add(bytes).is_none_or(|end| end > file_bytes) {
            let problem =
                format!("it has {bytes} bytes, but the file ends at byte {file_bytes}: it was cut off");
            return bad(format!("member {name}"), offset, problem);
        }
        next = offset + bytes.next_multiple_of(BLOCK_BYTES);
        if kind.is_gnu_sparse() {
            return bad(
                format!("member {name}"),
                offset,
                "it is sparse; allowed: regular members".to_owned(),
            );
        }
        let Some((key, suffix)) = named else { continue };
        if sample.members.iter().any(|(other, ..)| *other == suffix) {
            let problem = format!("the sample {key} has two members with the suffix .{suffix}; allowed: one");
            return bad(format!("member {name}"), offset, problem);
        }
        sample.members.push((suffix, offset, bytes));
    }
    if next + BLOCK_BYTES > file_bytes {
        let problem = "it has no end-of-archive block: it was cut off, or is empty".to_owned();
        return bad("the end".to_owned(), file_bytes, problem);
    }
    Ok(None)
}

/// Splits the path of a member into key and suffix. `None` for members that belong to no sample: names without a dot or
/// beginning with one, and metadata (`__name__` at the top).
pub(crate) fn split_name(name: &str) -> Option<(&str, String)> {
    if !name.contains('/') && name.starts_with("__") && name.ends_with("__") {
        return None;
    }
    let start = name.rfind('/').map_or(0, |at| at + 1);
    let dot = name[start..].find('.').filter(|&at| at > 0)?;
    let (key, suffix) = name.split_at(start + dot);
    Some((key, suffix[1..].to_lowercase()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_split_at_the_first_dot_of_the_last_component() {
        for (name, expected) in [
            ("a/b.seg.PNG", Some(("a/b", "seg.png"))),
            ("a.b/c.jpg", Some(("a.b/c", "jpg"))),
            ("000.cls", Some(("000", "cls"))),
            ("x.", Some(("x", ""))),
            ("readme", None),
            ("a.b/readme", None),
            ("a/.hidden.jpg", None),
            ("__index.json__", None),
            ("a/__x.y__", Some(("a/__x", "y__"))),
        ] {
            let split = split_name(name);
            assert_eq!(split.as_ref().map(|(key, suffix)| (*key, suffix.as_str())), expected, "{name}");
        }
    }
}
