//! One rank's file: written and hashed at the same time, straight from the caller's memory.
//!
//! A writer thread takes copies of the pieces in file order ([`ShardFile`]); the calling thread hashes the same pieces meanwhile, once for
//! the file and once for the tensor. The slower of disk and hash sets the pace.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap},
    io,
    path::Path,
};

use lockstep_plan::DType;
use serde::{Deserialize, Serialize};

use crate::{
    digest::{Digest, Hasher},
    error::CheckpointError,
    manifest::{FileEntry, SliceEntry, TensorEntry, TensorKind},
    region::{Region, Runs},
    safetensors::{Layout, TensorSpec, stored_dtype},
    save::{CommitObserver, CommitPoint, notify},
    shard_file::ShardFile,
};

/// Bytes per write and per hash update: large enough for the disk, small enough to share a cache.
pub(crate) const PIECE_BYTES: usize = 4 << 20;

/// A part of a tensor in the memory of this rank.
#[derive(Debug, Clone)]
pub struct TensorSlice<'a> {
    /// Name of the parameter that it is or belongs to.
    pub name: &'a str,
    /// What of the parameter.
    pub kind: TensorKind,
    /// Element type.
    pub dtype: DType,
    /// Shape of the whole tensor.
    pub global_shape: &'a [usize],
    /// Which of its elements these are.
    pub region: Region,
    /// The elements, little-endian, row-major in the region.
    pub bytes: SliceBytes<'a>,
}

/// Where the bytes of a slice are.
#[derive(Debug, Clone, Copy)]
pub enum SliceBytes<'a> {
    /// In memory.
    Memory(&'a [u8]),
    /// Elsewhere: they are read as they are written.
    Source {
        /// Where.
        source: &'a dyn ByteSource,
        /// The first of them there.
        start: usize,
        /// How many.
        len: usize,
    },
}

/// Bytes that are read piece by piece.
pub trait ByteSource: std::fmt::Debug {
    /// Fills `bytes` with what is there from `start` on.
    fn read(&self, start: usize, bytes: &mut [u8]) -> io::Result<()>;
}

impl<'a> From<&'a [u8]> for SliceBytes<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self::Memory(bytes)
    }
}

impl<'a> SliceBytes<'a> {
    /// How many.
    pub fn len(&self) -> usize {
        match self {
            Self::Memory(bytes) => bytes.len(),
            Self::Source { len, .. } => *len,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Those of a range.
    ///
    /// # Panics
    /// If they are not all there.
    pub fn range(self, range: std::ops::Range<usize>) -> Self {
        match self {
            Self::Memory(bytes) => Self::Memory(&bytes[range]),
            Self::Source { source, start, len } => {
                assert!(range.end <= len, "bytes {range:?} of {len}");
                Self::Source { source, start: start + range.start, len: range.len() }
            }
        }
    }

    /// The bytes in pieces of `piece_bytes`, the last of which may be shorter.
    fn pieces(self, piece_bytes: usize) -> impl Iterator<Item = io::Result<Cow<'a, [u8]>>> {
        (0..self.len()).step_by(piece_bytes).map(move |first| {
            let range = first..self.len().min(first + piece_bytes);
            match self {
                Self::Memory(bytes) => Ok(Cow::Borrowed(&bytes[range])),
                Self::Source { source, start, .. } => {
                    let mut piece = vec![0; range.len()];
                    source.read(start + range.start, &mut piece)?;
                    Ok(Cow::Owned(piece))
                }
            }
        })
    }
}

/// What a rank tells the one that commits: which file it wrote, and what is in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardReport {
    /// Name of the file.
    pub file: String,
    /// Its size and hash.
    pub entry: FileEntry,
    /// The tensors it holds parts of, with those parts as slices.
    pub tensors: Vec<TensorEntry>,
}

/// Writes the slices that rank `rank` holds into `staging` ([`Staging::path`](crate::Staging::path)) and
/// makes them durable.
pub fn write_shard(
    staging: &Path,
    rank: usize,
    slices: &[TensorSlice<'_>],
) -> Result<ShardReport, CheckpointError> {
    write_shard_observed(staging, rank, slices, &())
}

/// [`write_shard`], watched by `observer`.
pub fn write_shard_observed(
    staging: &Path,
    rank: usize,
    slices: &[TensorSlice<'_>],
    observer: &dyn CommitObserver,
) -> Result<ShardReport, CheckpointError> {
    PlannedShard::new(rank, slices)?.write(staging, observer)
}

/// A file whose every byte has its place, before the first is written.
pub(crate) struct PlannedShard<'a, 'b> {
    file: String,
    slices: &'b [TensorSlice<'a>],
    layout: Layout,
    /// As in the report, but for the hashes.
    pub(crate) tensors: Vec<TensorEntry>,
    /// For each slice: its entry in `tensors` and its place in that entry's list.
    entries: Vec<(usize, usize)>,
}

impl<'a, 'b> PlannedShard<'a, 'b> {
    pub(crate) fn new(rank: usize, slices: &'b [TensorSlice<'a>]) -> Result<Self, CheckpointError> {
        let file = format!("rank-{rank:05}.safetensors");
        let mut tensors: Vec<TensorEntry> = Vec::new();
        let mut entries = Vec::with_capacity(slices.len());
        let mut specs = Vec::with_capacity(slices.len());
        let mut known = HashMap::new();
        for slice in slices {
            let (start, shape) = slice.region.extent(slice.global_shape);
            check_size(slice, &start, &shape)?;
            let index = *known.entry((slice.name, &slice.kind)).or_insert_with(|| {
                tensors.push(TensorEntry {
                    name: slice.name.to_owned(),
                    kind: slice.kind.clone(),
                    dtype: slice.dtype,
                    shape: slice.global_shape.to_vec(),
                    slices: Vec::new(),
                });
                tensors.len() - 1
            });
            let tensor = &mut tensors[index];
            tensor.must_agree(slice.dtype, slice.global_shape)?;
            specs.push(TensorSpec {
                name: name_in_file(slice, tensor.slices.len()),
                dtype: stored_dtype(slice.dtype),
                shape: shape.clone(),
            });
            entries.push((index, tensor.slices.len()));
            // Offset and hash are known once the layout is, and the bytes are written.
            tensor.slices.push(SliceEntry {
                file: file.clone(),
                offset: 0,
                start,
                shape,
                blake3: Digest::of(&[]),
            });
        }
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let layout = Layout::new(&specs, &metadata)?;
        for place in &layout.placed {
            let (tensor, slice) = entries[place.index];
            tensors[tensor].slices[slice].offset = place.offset;
        }
        Ok(Self { file, slices, layout, tensors, entries })
    }

    pub(crate) fn write(
        mut self,
        staging: &Path,
        observer: &dyn CommitObserver,
    ) -> Result<ShardReport, CheckpointError> {
        let path = staging.join(&self.file);
        let mut file = ShardFile::create(&path, self.layout.file_bytes, observer)?;
        notify(observer, CommitPoint::ShardStarted)?;

        let mut file_hash = Hasher::new();
        let mut hashes = Vec::with_capacity(self.slices.len());
        file.write(&self.layout.prefix)?;
        file_hash.update(&self.layout.prefix);
        for (done, place) in self.layout.placed.iter().enumerate() {
            if done == self.layout.placed.len() / 2 {
                notify(observer, CommitPoint::ShardHalfWritten)?;
            }
            let mut hash = Hasher::new();
            for piece in self.slices[place.index].bytes.pieces(PIECE_BYTES) {
                let piece = piece.map_err(CheckpointError::io("write", &path))?;
                // What is hashed here is written meanwhile.
                file.write(&piece)?;
                file_hash.update(&piece);
                hash.update(&piece);
            }
            hashes.push((place.index, hash.finish()));
        }
        file.await_writes()?;
        notify(observer, CommitPoint::ShardWritten)?;
        file.sync()?;
        notify(observer, CommitPoint::ShardSynced)?;

        for (index, hash) in hashes {
            let (tensor, slice) = self.entries[index];
            self.tensors[tensor].slices[slice].blake3 = hash;
        }
        let entry = FileEntry { bytes: self.layout.file_bytes, blake3: file_hash.finish() };
        Ok(ShardReport { file: self.file, entry, tensors: self.tensors })
    }
}

impl TensorEntry {
    /// All parts of a tensor must be parts of the same one.
    pub(crate) fn must_agree(&self, dtype: DType, shape: &[usize]) -> Result<(), CheckpointError> {
        if self.dtype == dtype && self.shape == shape {
            return Ok(());
        }
        Err(CheckpointError::Disagreement {
            tensor: self.name.clone(),
            kind: self.kind.to_string(),
            first: format!("{} {:?}", self.dtype, self.shape),
            second: format!("{dtype} {shape:?}"),
        })
    }
}

/// A parameter keeps its name, so that any tool finds it; its optimizer state stands beside it.
fn name_in_file(slice: &TensorSlice<'_>, earlier_slices: usize) -> String {
    let mut name = match &slice.kind {
        TensorKind::Parameter => slice.name.to_owned(),
        kind => format!("{kind}/{}", slice.name),
    };
    if earlier_slices > 0 {
        name.push_str(&format!("#{earlier_slices}"));
    }
    name
}

fn check_size(slice: &TensorSlice<'_>, start: &[usize], shape: &[usize]) -> Result<(), CheckpointError> {
    let runs = Runs::new(start, shape, slice.global_shape).map_err(|source| CheckpointError::Coverage {
        tensor: slice.name.to_owned(),
        kind: slice.kind.to_string(),
        source,
    })?;
    let expected = (runs.elements() * slice.dtype.size_bytes()) as u64;
    let found = slice.bytes.len() as u64;
    if expected == found {
        return Ok(());
    }
    Err(CheckpointError::ByteCount { tensor: slice.name.to_owned(), expected, found })
}
