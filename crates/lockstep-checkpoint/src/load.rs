//! Reads ranges of tensors from a checkpoint, and never returns a byte that has changed since the save.
//!
//! A slice is hashed before the first element is read from it. So reading without [`Checkpoint::verify`] is as safe as
//! with it, and a rank that needs a tenth of the state reads a tenth. Files are read with positioned reads instead of
//! mappings, so that a failing disk or a truncated file gives an error with a path.

use std::{
    collections::{BTreeMap, HashMap},
    fs::{self, File},
    io::{self, Read},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use lockstep_plan::DType;

use crate::{
    convert,
    digest::digest_reader,
    error::CheckpointError,
    files::{open_regular, parent_of, read_limited},
    listing::list,
    manifest::{MANIFEST_FILE, MAX_MANIFEST_BYTES, Manifest, SliceEntry, TensorEntry, TensorKind},
};

/// Elements converted at a time, which bounds the only intermediate buffer.
const CONVERTED_ELEMENTS: usize = 1 << 20;

/// Checkpoint with a valid manifest. Its tensors are verified as they are read.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    /// Indices of the manifest's tensor entries, by name.
    by_name: HashMap<String, Vec<usize>>,
    files: BTreeMap<String, OnceLock<File>>,
    /// For each tensor, the slices that have been verified.
    whole: Vec<Vec<AtomicBool>>,
}

impl Checkpoint {
    /// Opens the checkpoint directory `path`: reads and checks the manifest only.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let manifest_path = path.join(MANIFEST_FILE);
        let file = open_regular(&manifest_path).map_err(|error| error.or_near_checkpoints(path))?;
        let bytes = read_limited(file, &manifest_path, MAX_MANIFEST_BYTES)?.ok_or_else(|| {
            CheckpointError::Manifest {
                path: manifest_path.clone(),
                reason: format!("it is longer than {MAX_MANIFEST_BYTES} bytes"),
            }
        })?;
        let manifest = Manifest::parse(&bytes, &manifest_path)?;
        let mut by_name: HashMap<String, Vec<usize>> = HashMap::new();
        for (index, entry) in manifest.tensors.iter().enumerate() {
            by_name.entry(entry.name.clone()).or_default().push(index);
        }
        let files = manifest.files.keys().map(|name| (name.clone(), OnceLock::new())).collect();
        let unread = |entry: &TensorEntry| entry.slices.iter().map(|_| AtomicBool::new(false)).collect();
        let whole = manifest.tensors.iter().map(unread).collect();
        tracing::debug!(
            path = %path.display(), step = manifest.step, tensors = manifest.tensors.len(), files = manifest.files.len(),
            "opened a checkpoint"
        );
        Ok(Self { path: path.to_path_buf(), manifest, by_name, files, whole })
    }

    /// Returns the path of the checkpoint directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns the manifest entry of a tensor.
    pub fn tensor(&self, name: &str, kind: &TensorKind) -> Result<&TensorEntry, CheckpointError> {
        self.find(name, kind).map(|(_, entry)| entry)
    }

    /// Checks that every file exists with its saved size, without reading it.
    pub fn check_sizes(&self) -> Result<(), CheckpointError> {
        self.files.keys().try_for_each(|name| self.file(name).map(drop))
    }

    /// Reads every byte of every file and compares the hashes with the saved ones. The error names the file that
    /// differs and the tensors whose bytes changed.
    pub fn verify(&self) -> Result<(), CheckpointError> {
        self.check_sizes()?;
        for (name, entry) in &self.manifest.files {
            let path = self.path.join(name);
            let digest = digest_reader(&mut ReadAt { file: self.file(name)?, offset: 0 }, entry.bytes)
                .map_err(CheckpointError::io("read", &path))?;
            if digest != entry.blake3 {
                let tensors = self.damaged_in(name)?;
                return Err(CheckpointError::Corrupt { path, tensors });
            }
        }
        self.whole.iter().flatten().for_each(|whole| whole.store(true, Ordering::Relaxed));
        tracing::debug!(path = %self.path.display(), "every byte of the checkpoint is as it was written");
        Ok(())
    }

    /// Fills `out` with the stored bytes of elements `start_element..` of a tensor, in row-major order. The number of
    /// elements follows from the size of `out`. Reads from all slices that hold them.
    pub fn read_bytes(
        &self,
        name: &str,
        kind: &TensorKind,
        start_element: usize,
        out: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let (index, entry) = self.find(name, kind)?;
        let size = entry.dtype.size_bytes();
        let count = out.len() / size;
        if !out.len().is_multiple_of(size) {
            let expected = ((count + 1) * size) as u64;
            let tensor = name.to_owned();
            return Err(CheckpointError::ByteCount { tensor, expected, found: out.len() as u64 });
        }
        let elements = entry.elements();
        if start_element > elements || count > elements - start_element {
            let tensor = name.to_owned();
            return Err(CheckpointError::Range { tensor, start: start_element, count, elements });
        }
        for (slice_index, slice) in entry.slices.iter().enumerate() {
            let runs = entry.runs(slice);
            let mut pieces = runs.within(start_element..start_element + count).peekable();
            if pieces.peek().is_none() {
                continue;
            }
            self.check_slice(index, slice_index)?;
            let file = self.file(&slice.file)?;
            for piece in pieces {
                let from = (piece.in_tensor - start_element) * size;
                let target = &mut out[from..from + piece.elements * size];
                file.read_exact_at(target, slice.offset + (piece.in_slice * size) as u64)
                    .map_err(CheckpointError::io("read", &self.path.join(&slice.file)))?;
            }
        }
        Ok(())
    }

    /// Fills `out` with elements `start_element..` of a float tensor, converted to `f32`.
    pub fn read(
        &self,
        name: &str,
        kind: &TensorKind,
        start_element: usize,
        out: &mut [f32],
    ) -> Result<(), CheckpointError> {
        let entry = self.tensor(name, kind)?;
        if !convert::is_float(entry.dtype) {
            return Err(CheckpointError::UnsupportedDtype {
                path: self.path.clone(),
                tensor: name.to_owned(),
                dtype: entry.dtype.to_string(),
            });
        }
        if entry.dtype == DType::F32 {
            return self.read_bytes(name, kind, start_element, bytemuck::cast_slice_mut(out));
        }
        let size = entry.dtype.size_bytes();
        let mut stored = vec![0; out.len().min(CONVERTED_ELEMENTS) * size];
        for (index, part) in out.chunks_mut(CONVERTED_ELEMENTS).enumerate() {
            let stored = &mut stored[..part.len() * size];
            self.read_bytes(name, kind, start_element + index * CONVERTED_ELEMENTS, stored)?;
            convert::widen(entry.dtype, stored, part);
        }
        Ok(())
    }

    fn find(&self, name: &str, kind: &TensorKind) -> Result<(usize, &TensorEntry), CheckpointError> {
        self.by_name
            .get(name)
            .into_iter()
            .flatten()
            .map(|&index| (index, &self.manifest.tensors[index]))
            .find(|(_, entry)| entry.kind == *kind)
            .ok_or_else(|| CheckpointError::NoSuchTensor {
                path: self.path.clone(),
                tensor: format!("{name} ({kind})"),
            })
    }

    /// Returns a file of the checkpoint, opened once and checked for its size.
    fn file(&self, name: &str) -> Result<&File, CheckpointError> {
        let cell = self.files.get(name).expect("slices lie in listed files: checked when opened");
        if let Some(file) = cell.get() {
            return Ok(file);
        }
        let path = self.path.join(name);
        let file = open_regular(&path).map_err(|error| self.missing(error))?;
        let found = file.metadata().map_err(CheckpointError::io("open", &path))?.len();
        let expected = self.manifest.files[name].bytes;
        if found != expected {
            return Err(CheckpointError::FileSize { path, expected, found });
        }
        Ok(cell.get_or_init(|| file))
    }

    /// Distinguishes a checkpoint that was removed completely from one that lacks a file.
    fn missing(&self, error: CheckpointError) -> CheckpointError {
        let manifest = self.path.join(MANIFEST_FILE);
        let is_missing =
            matches!(&error, CheckpointError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound);
        if is_missing && fs::symlink_metadata(&manifest).is_err() {
            let beside = list(&parent_of(&self.path)).unwrap_or_default();
            let newest = beside.into_iter().next_back().map(|listed| listed.path);
            return CheckpointError::Removed { path: self.path.clone(), newest };
        }
        error.named_in(manifest)
    }

    /// Hashes a slice when it is first read.
    fn check_slice(&self, tensor: usize, slice: usize) -> Result<(), CheckpointError> {
        let whole = &self.whole[tensor][slice];
        if whole.load(Ordering::Relaxed) {
            return Ok(());
        }
        let entry = &self.manifest.tensors[tensor];
        if !self.is_whole(entry, &entry.slices[slice])? {
            return Err(CheckpointError::Corrupt {
                path: self.path.join(&entry.slices[slice].file),
                tensors: vec![described(entry)],
            });
        }
        whole.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn is_whole(&self, entry: &TensorEntry, slice: &SliceEntry) -> Result<bool, CheckpointError> {
        let bytes = (slice.elements() * entry.dtype.size_bytes()) as u64;
        let mut source = ReadAt { file: self.file(&slice.file)?, offset: slice.offset };
        let digest = digest_reader(&mut source, bytes)
            .map_err(CheckpointError::io("read", &self.path.join(&slice.file)))?;
        Ok(digest == slice.blake3)
    }

    /// Returns the tensors in a damaged file whose own bytes changed.
    fn damaged_in(&self, file: &str) -> Result<Vec<String>, CheckpointError> {
        let mut damaged = Vec::new();
        for entry in &self.manifest.tensors {
            for slice in entry.slices.iter().filter(|slice| slice.file == file) {
                if !self.is_whole(entry, slice)? {
                    damaged.push(described(entry));
                }
            }
        }
        Ok(damaged)
    }
}

/// Formats a tensor as `model.norm.weight`, or `model.norm.weight (exp_avg)`.
fn described(entry: &TensorEntry) -> String {
    match &entry.kind {
        TensorKind::Parameter => entry.name.clone(),
        kind => format!("{} ({kind})", entry.name),
    }
}

/// Reader from an offset. It does not use the file's shared position, so that threads can share the file.
struct ReadAt<'a> {
    file: &'a File,
    offset: u64,
}

impl Read for ReadAt<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_at(buffer, self.offset)?;
        self.offset += count as u64;
        Ok(count)
    }
}
