//! The file of one rank, written from the caller's memory and hashed at the same time.
//!
//! A writer thread receives copies of the pieces in file order ([`ShardFile`]). Meanwhile the calling thread hashes the
//! same pieces, once for the file and once for the tensor. The slower of disk and hash limits the speed.

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
    disk::notify,
    error::CheckpointError,
    manifest::{FileEntry, SliceEntry, TensorEntry, TensorKind},
    observer::{CommitObserver, CommitPoint},
    region::{Region, Runs},
    safetensors::{Layout, TensorSpec, stored_dtype},
    shard_file::{PIECE_BYTES, ShardFile},
};

/// Slice of a tensor that this rank holds.
#[derive(Debug, Clone)]
pub struct TensorSlice<'a> {
    /// Name of the parameter that the tensor is or belongs to.
    pub name: &'a str,
    /// Role of the tensor: the parameter itself, or one of its optimizer states.
    pub kind: TensorKind,
    /// Element type of the slice.
    pub dtype: DType,
    /// Global shape of the tensor.
    pub global_shape: &'a [usize],
    /// Region of the tensor that the slice covers.
    pub region: Region,
    /// Elements, little-endian, row-major within the region.
    pub bytes: SliceBytes<'a>,
}

/// Source of a slice's bytes.
#[derive(Debug, Clone, Copy)]
pub enum SliceBytes<'a> {
    /// Bytes in memory.
    Memory(&'a [u8]),
    /// Bytes stored elsewhere, which are read while they are written to the checkpoint.
    Source {
        /// Source of the bytes.
        source: &'a dyn ByteSource,
        /// Offset of the first byte in the source.
        start: usize,
        /// Number of bytes.
        len: usize,
    },
}

/// Source of bytes that are read piece by piece.
pub trait ByteSource: std::fmt::Debug {
    /// Fills `bytes` from offset `start` of the source.
    fn read(&self, start: usize, bytes: &mut [u8]) -> io::Result<()>;
}

impl<'a> From<&'a [u8]> for SliceBytes<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self::Memory(bytes)
    }
}

impl<'a> SliceBytes<'a> {
    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Memory(bytes) => bytes.len(),
            Self::Source { len, .. } => *len,
        }
    }

    /// Returns true if there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes of a range.
    ///
    /// # Panics
    /// If the range exceeds the bytes.
    pub fn range(self, range: std::ops::Range<usize>) -> Self {
        match self {
            Self::Memory(bytes) => Self::Memory(&bytes[range]),
            Self::Source { source, start, len } => {
                assert!(range.end <= len, "bytes {range:?} of {len}");
                Self::Source { source, start: start + range.start, len: range.len() }
            }
        }
    }

    /// Returns the bytes in pieces of `piece_bytes`; the last one may be shorter.
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

/// Report of a rank to the rank that commits: the file it wrote and the contents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardReport {
    /// Name of the file.
    pub file: String,
    /// Size and hash of the file.
    pub entry: FileEntry,
    /// Tensors of which the file holds slices, with those slices only.
    pub tensors: Vec<TensorEntry>,
}

/// Writes the slices of rank `rank` into `staging` ([`Staging::path`](crate::Staging::path)) and makes them durable.
pub fn write_shard(
    staging: &Path,
    rank: usize,
    slices: &[TensorSlice<'_>],
) -> Result<ShardReport, CheckpointError> {
    write_shard_observed(staging, rank, slices, &())
}

/// Writes as [`write_shard`] does, watched by `observer`.
pub fn write_shard_observed(
    staging: &Path,
    rank: usize,
    slices: &[TensorSlice<'_>],
    observer: &dyn CommitObserver,
) -> Result<ShardReport, CheckpointError> {
    PlannedShard::new(rank, slices)?.write(staging, observer)
}

/// Rank file with a complete layout, before any byte is written.
pub(crate) struct PlannedShard<'a, 'b> {
    file: String,
    slices: &'b [TensorSlice<'a>],
    layout: Layout,
    /// Tensors of the report; their hashes are not known yet.
    pub(crate) tensors: Vec<TensorEntry>,
    /// For each slice, the index of its tensor and its index among that tensor's slices.
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
            // The offset is set once the layout is known, the hash once the bytes are written.
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
                // The writer thread writes the piece while it is hashed here.
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
    /// Checks that all slices of a tensor have the same type and global shape.
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

/// Returns the tensor name within the file. A parameter keeps its own name, so that any tool finds it; optimizer states
/// get a prefix.
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
