//! WebDataset: samples as consecutive members of tar shards, read by index.
//!
//! One pass over the headers of a shard finds its samples; the index is cached. Each member is then read at its offset,
//! together with the header before it, which must still be one.

use std::{
    fs::File,
    path::{Path, PathBuf},
};

use super::{
    brace::expand_shards,
    dataset::{Dataset, check_index, get_new},
    field::{Field, check_fields},
    shards::{ShardOptions, Shards},
    tar_index::{ABSENT, BLOCK_BYTES, INDEX_PURPOSE, index_tar, numbers_per_sample},
    tensor::{Sample, TensorSpec},
};
use crate::error::{DataError, Result};

/// Suffixes of Python pickles. Reading one executes code that it holds.
const PICKLES: [&str; 5] = ["pkl", "pickle", "pt", "pth", "pyd"];

/// Samples in tar shards; a tensor per [`Field`].
#[derive(Debug)]
pub struct WebDataset {
    shards: Shards,
    fields: Vec<Field>,
    specs: Vec<TensorSpec>,
}

impl WebDataset {
    /// Opens the shards that `shards` names, such as `data/train-{000000..000099}.tar`; see [`expand_shards`].
    ///
    /// Members that no field selects are skipped. Members whose name has no dot or begins with one, directories, links,
    /// and metadata (`__name__`) belong to no sample.
    ///
    /// # Errors
    /// If a shard cannot be read, is damaged (unless `on_damage` says otherwise) or compressed, there is no sample, or
    /// `fields` is empty or ambiguous.
    pub fn open(shards: &str, fields: Vec<Field>, options: ShardOptions<'_>) -> Result<Self> {
        Self::from_files(expand_shards(shards)?, fields, options)
    }

    /// Opens these shards, in this order, as [`open`](Self::open) does.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn from_files(
        paths: Vec<PathBuf>,
        mut fields: Vec<Field>,
        options: ShardOptions<'_>,
    ) -> Result<Self> {
        check_fields(&fields)?;
        for key in fields.iter_mut().flat_map(|field| &mut field.keys) {
            // The index has suffixes in lower case.
            *key = key.to_lowercase();
            if key.rsplit('.').next().is_some_and(|extension| PICKLES.contains(&extension)) {
                let allowed = "formats that are not Python pickles, which execute code when they are read";
                return Err(DataError::out_of_range("a key of a field", key, allowed));
            }
        }
        let keys: Vec<String> = fields.iter().map(|field| field.keys.join(";")).collect();
        let purpose = format!("{INDEX_PURPOSE}\n{}", keys.join("\n"));
        let per_sample = numbers_per_sample(fields.len());
        let build = |file: &File, path: &Path| index_tar(file, path, &fields);
        let shards = Shards::open(paths, per_sample, options, &purpose, build)?;
        let specs = fields.iter().map(Field::spec).collect();
        Ok(Self { shards, fields, specs })
    }

    /// Returns the damages at which shards end early, with [`OnBadSample::Skip`](super::OnBadSample::Skip).
    pub fn damages(&self) -> &[DataError] {
        &self.shards.damages
    }
}

/// Returns the name in a tar header; `None` if its checksum is wrong.
fn member_name(header: &[u8]) -> Option<String> {
    let header = tar::Header::from_byte_slice(header);
    let mut sound = header.clone();
    sound.set_cksum();
    let is_sound = header.cksum().ok()? == sound.cksum().ok()?;
    is_sound.then(|| String::from_utf8_lossy(&header.path_bytes()).into_owned())
}

impl Dataset for WebDataset {
    fn len(&self) -> u64 {
        self.shards.len()
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        self.specs.clone()
    }

    fn get(&self, index: u64) -> Result<Sample> {
        get_new(self, index)
    }

    fn get_into(&self, index: u64, sample: &mut Sample) -> Result<()> {
        check_index(index, self.len())?;
        let (shard, _, numbers) = self.shards.locate(index);
        let path = self.shards.files.path(shard);
        let bad = |record: String, offset_bytes, problem| DataError::BadRecord {
            path: path.to_owned(),
            record,
            offset_bytes,
            problem,
        };
        let (first, members) = (numbers[0], &numbers[1..]);
        let (tensors, record) = sample.prepare_with_record(&self.specs);
        for ((field, member), tensor) in self.fields.iter().zip(members.chunks_exact(2)).zip(tensors) {
            let (offset, bytes) = (member[0], member[1]);
            // The header is in the block before the contents.
            let header_offset = if offset == ABSENT { first } else { offset }.saturating_sub(BLOCK_BYTES);
            let contents = if offset == ABSENT { 0 } else { bytes as usize };
            record.clear();
            self.shards.files.read(shard, header_offset, BLOCK_BYTES as usize + contents, record)?;
            let (header, contents) = record.split_at(BLOCK_BYTES as usize);
            let name = member_name(header).ok_or_else(|| {
                let problem =
                    "there is no member any more; the shard changed after it was indexed".to_owned();
                bad("a member".to_owned(), header_offset, problem)
            })?;
            if offset == ABSENT {
                let problem = format!("its sample has no member with the suffix {}", field.described());
                return Err(bad(format!("member {name}"), header_offset, problem));
            }
            field
                .decode(contents, tensor)
                .map_err(|problem| bad(format!("member {name}"), offset, problem))?;
        }
        Ok(())
    }
}
