//! Memory-mapped files: token corpora and checkpoints are read through the page cache, without a copy.

use std::{cell::Cell, fs::File, io, marker::PhantomData, ops::Deref, path::Path, ptr::NonNull};

use lockstep_plan::DType;

use crate::{MemoryLocation, Shape, View};

/// A file mapped read-only for as long as this value lives.
#[derive(Debug)]
pub struct MappedFile {
    map: memmap2::Mmap,
}

impl MappedFile {
    /// Maps the whole file at `path`.
    ///
    /// If another process truncates the file while it is mapped, this process dies with SIGBUS. So map only files
    /// that are renamed into place and never rewritten.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        // SAFETY: the mapping is private and read-only, and the files that Lockstep maps (token caches,
        // checkpoints) are committed by rename and never written again.
        let map = unsafe { memmap2::Mmap::map(&file)? };
        Ok(Self { map })
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}

/// A file whose tensors are operands of kernels where they lie: pages are read from the page cache at their first use. A
/// kernel that wrote one would change this process's copy of it only.
#[derive(Debug)]
pub struct MappedTensors {
    map: memmap2::MmapMut,
    /// Views are of one thread.
    not_sync: PhantomData<Cell<()>>,
}

impl MappedTensors {
    /// Maps the whole file at `path`. As for [`MappedFile::open`], it must not be truncated meanwhile.
    ///
    /// # Errors
    /// If the file cannot be opened or mapped.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        // SAFETY: the mapping is private, and copied where it is written; model files are committed by rename and never
        // written again.
        let map = unsafe { memmap2::MmapOptions::new().map_copy(&file)? };
        Ok(Self { map, not_sync: PhantomData })
    }

    /// Tells the system that rows of tables are read here and there, so that it does not read ahead.
    ///
    /// # Errors
    /// If the system refuses the advice.
    pub fn for_lookups(&self) -> io::Result<()> {
        self.map.advise(memmap2::Advice::Random)
    }

    /// Returns the tensor of `shape` at byte `offset`; `None` if it does not lie in the file or is not aligned to its
    /// elements.
    pub fn view(&self, dtype: DType, offset: usize, shape: impl Into<Shape>) -> Option<View<'_>> {
        let shape = shape.into();
        let end = offset.checked_add(shape.elements().checked_mul(dtype.size_bytes())?)?;
        let pointer = self.map.as_ptr().wrapping_add(offset).cast_mut();
        if end > self.map.len() || !(pointer as usize).is_multiple_of(dtype.size_bytes()) {
            return None;
        }
        // SAFETY: the window lies in the mapping, which lives as long as this value and has no other references: its bytes
        // are accessed through views alone, on one thread. Every bit pattern is a number of the type.
        Some(unsafe { View::new(NonNull::new(pointer)?, dtype, shape, MemoryLocation::Host) })
    }
}
