//! Shards of a data set with the positions of their records, independent of the format.

use std::{
    fs::File,
    path::{Path, PathBuf},
};

use rayon::prelude::*;

use super::{
    bad_samples::OnBadSample,
    file_pool::FilePool,
    record_index::{ShardIndex, cached_index},
};
use crate::error::{DataError, Result};

/// Options of data sets in shards.
#[derive(Debug, Clone, Copy, Default)]
pub struct ShardOptions<'a> {
    /// Directory for indexes of shards; `None` indexes them again at each start.
    pub cache_dir: Option<&'a Path>,
    /// Reaction to a shard whose framing is damaged. `Skip` keeps the samples before the damage.
    pub on_damage: OnBadSample,
}

/// Shards with an index of their samples.
#[derive(Debug)]
pub(crate) struct Shards {
    pub(crate) files: FilePool,
    /// Numbers of each shard, `per_sample` for each sample.
    indexes: Vec<Vec<u64>>,
    per_sample: usize,
    /// Number of samples before each shard, and the total.
    starts: Vec<u64>,
    pub(crate) damages: Vec<DataError>,
}

impl Shards {
    /// Indexes shards in parallel.
    pub(crate) fn open(
        paths: Vec<PathBuf>,
        per_sample: usize,
        options: ShardOptions<'_>,
        purpose: &str,
        build: impl Fn(&File, &Path) -> Result<ShardIndex> + Sync,
    ) -> Result<Self> {
        let found: Vec<Result<ShardIndex>> = paths
            .par_iter()
            .map(|path| {
                let index = cached_index(path, purpose, options.cache_dir, |file| build(file, path))?;
                match (index, options.on_damage) {
                    (ShardIndex { damage: Some(damage), .. }, OnBadSample::Fail) => Err(damage),
                    (index, _) => Ok(index),
                }
            })
            .collect();
        let mut starts = vec![0];
        let (mut indexes, mut damages, mut end) = (Vec::new(), Vec::new(), 0);
        for ShardIndex { numbers, damage } in DataError::all_of(found)? {
            if let Some(damage) = &damage {
                tracing::warn!(%damage, "a shard ends early");
            }
            damages.extend(damage);
            end += (numbers.len() / per_sample) as u64;
            starts.push(end);
            indexes.push(numbers);
        }
        if end == 0 {
            let path = paths.into_iter().next().unwrap_or_default();
            let problem = "there is no sample in it, nor in the other shards".to_owned();
            return Err(DataError::NoSamples { path, problem });
        }
        Ok(Self { files: FilePool::new(paths), indexes, per_sample, starts, damages })
    }

    pub(crate) fn len(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Returns the shard of sample `index`, the sample's number in it, and its numbers.
    pub(crate) fn locate(&self, index: u64) -> (usize, u64, &[u64]) {
        let shard = self.starts.partition_point(|&start| start <= index) - 1;
        let number = index - self.starts[shard];
        (shard, number, &self.indexes[shard][number as usize * self.per_sample..][..self.per_sample])
    }
}
