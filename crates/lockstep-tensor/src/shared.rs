//! Memory that other processes can map: an anonymous file (memfd) of fixed size, without a name that could be guessed
//! or left behind.
//!
//! Every process that receives the file descriptor maps the same bytes. The file is sealed, so that nobody can shrink
//! it while others have it mapped. Pages are allocated on first touch, so a generous size costs nothing.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rustix::{
    fs::{self, FallocateFlags, MemfdFlags, SealFlags},
    mm,
};

/// Blocks are whole pages, so that freed blocks can be returned to the system.
const PAGE_BYTES: usize = 4096;

/// A read-write mapping of a memfd. Its users must agree on who writes where.
#[derive(Debug)]
pub struct SharedMemory {
    file: OwnedFd,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping lives as long as the value and belongs to no thread.
unsafe impl Send for SharedMemory {}
// SAFETY: as above; no method touches the contents.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Creates a file of `bytes` zeros and maps it.
    ///
    /// # Errors
    /// If the system refuses to create, size, seal or map the file.
    pub fn create(bytes: usize) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = fs::memfd_create("lockstep", flags)?;
        fs::ftruncate(&file, bytes as u64)?;
        fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Self::open(file)
    }

    /// Maps a file that another process has created.
    ///
    /// # Errors
    /// If the file is not sealed against a change of its size, or the system refuses to map it.
    pub fn open(file: OwnedFd) -> io::Result<Self> {
        if !fs::fcntl_get_seals(&file)?.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "shared memory that is not sealed"));
        }
        let too_large = || io::Error::new(io::ErrorKind::InvalidData, "more than the address space");
        let bytes = usize::try_from(fs::fstat(&file)?.st_size).map_err(|_| too_large())?;
        let protection = mm::ProtFlags::READ | mm::ProtFlags::WRITE;
        let flags = mm::MapFlags::SHARED | mm::MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the system's choice touches nothing that exists.
        let start = unsafe { mm::mmap(std::ptr::null_mut(), bytes, protection, flags, &file, 0) }?;
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(too_large)?;
        // SAFETY: the range is the new mapping. A system without huge pages for shared memory refuses.
        let _ = unsafe { mm::madvise(start.as_ptr().cast(), bytes, mm::Advice::LinuxHugepage) };
        Ok(Self { file, start, bytes })
    }

    /// Returns the file descriptor, to be sent to other processes.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Size of the mapping in bytes.
    pub fn len_bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the address of byte `offset` in this process.
    ///
    /// # Panics
    /// If `offset` is beyond the end.
    pub fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.bytes, "byte {offset} of {} shared ones", self.bytes);
        self.start.as_ptr().wrapping_add(offset)
    }

    /// Returns the offset of the byte at `pointer`; `None` if the pointer is outside the mapping.
    pub fn offset_of(&self, pointer: *const u8) -> Option<usize> {
        let offset = (pointer as usize).checked_sub(self.start.as_ptr() as usize)?;
        (offset < self.bytes).then_some(offset)
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping and unmaps it once. `munmap` of a valid mapping does not fail.
        let _ = unsafe { mm::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// An allocator of blocks in a [`SharedMemory`], behind a reserved beginning.
#[derive(Debug)]
pub struct SharedHeap {
    memory: Arc<SharedMemory>,
    /// Lengths of the free ranges, keyed by their offset. No two of them are adjacent.
    free: Mutex<BTreeMap<usize, usize>>,
}

impl SharedHeap {
    /// Creates a heap of everything after the first `reserved_bytes`. That memory must be zero and used by nobody
    /// else.
    pub fn new(memory: Arc<SharedMemory>, reserved_bytes: usize) -> Arc<Self> {
        let start = reserved_bytes.next_multiple_of(PAGE_BYTES);
        let len = memory.len_bytes().saturating_sub(start) / PAGE_BYTES * PAGE_BYTES;
        let free = (len > 0).then_some((start, len)).into_iter().collect();
        Arc::new(Self { memory, free: Mutex::new(free) })
    }

    /// Allocates `bytes` zeros; returns their offset in the memory and their address. `None` if no free range is long
    /// enough.
    pub(crate) fn take(&self, bytes: usize) -> Option<(usize, NonNull<u8>)> {
        let bytes = bytes.checked_next_multiple_of(PAGE_BYTES)?;
        let mut free = self.lock();
        let (&offset, &len) = free.iter().find(|(_, len)| **len >= bytes)?;
        free.remove(&offset);
        if len > bytes {
            free.insert(offset + bytes, len - bytes);
        }
        Some((offset, NonNull::new(self.memory.at(offset))?))
    }

    /// Frees a block that [`SharedHeap::take`] returned.
    pub(crate) fn give_back(&self, offset: usize, bytes: usize) {
        let bytes = bytes.next_multiple_of(PAGE_BYTES);
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // A block whose pages cannot be returned to the system must not be allocated again: it is not zero.
        if fs::fallocate(&self.memory.file, hole, offset as u64, bytes as u64).is_err() {
            return;
        }
        let mut free = self.lock();
        let (mut start, mut end) = (offset, offset + bytes);
        if let Some((&before, &len)) = free.range(..start).next_back()
            && before + len == start
        {
            free.remove(&before);
            start = before;
        }
        if let Some(len) = free.remove(&end) {
            end += len;
        }
        free.insert(start, end - start);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_of_one_file_see_the_same_bytes() {
        let ours = SharedMemory::create(8192).unwrap();
        let theirs = SharedMemory::open(ours.file().try_clone_to_owned().unwrap()).unwrap();
        assert_ne!(ours.at(0), theirs.at(0));
        // SAFETY: the byte lies in both mappings, and nothing else uses it.
        unsafe {
            ours.at(5000).write(42);
            assert_eq!(theirs.at(5000).read(), 42);
        }
        assert_eq!(theirs.offset_of(theirs.at(5000)), Some(5000));
        assert_eq!((theirs.offset_of(ours.at(5000)), theirs.len_bytes()), (None, 8192));
    }

    #[test]
    fn shared_memory_is_advised_to_use_huge_pages() {
        let memory = SharedMemory::create(8 << 20).unwrap();
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{:x}-", memory.at(0) as usize);
        let flags = maps.lines().skip_while(|line| !line.starts_with(&start));
        let flags = flags.into_iter().find_map(|line| line.strip_prefix("VmFlags:"));
        // Kernels without huge pages refuse the advice.
        if std::path::Path::new("/sys/kernel/mm/transparent_hugepage/shmem_enabled").exists() {
            let flags = flags.expect("the mapping is listed");
            assert!(flags.split_whitespace().any(|flag| flag == "hg"), "{flags}");
        }
    }

    #[test]
    fn memory_that_could_shrink_under_its_users_is_refused() {
        let file = fs::memfd_create("open", MemfdFlags::ALLOW_SEALING).unwrap();
        fs::ftruncate(&file, 4096).unwrap();
        let error = SharedMemory::open(file).unwrap_err();
        assert!(error.to_string().contains("not sealed"), "{error}");
        let sealed = SharedMemory::create(4096).unwrap();
        fs::ftruncate(sealed.file(), 0).unwrap_err();
    }

    #[test]
    fn what_is_given_back_is_merged_and_zero_again() {
        let heap = SharedHeap::new(Arc::new(SharedMemory::create(10 * PAGE_BYTES).unwrap()), 100);
        let parts: Vec<_> = (0..9).map(|_| heap.take(PAGE_BYTES - 7).unwrap()).collect();
        assert!(heap.take(1).is_none());
        for index in [3, 5, 4, 0, 8, 1, 7, 2, 6] {
            let (offset, pointer) = parts[index];
            assert_eq!(offset, (index + 1) * PAGE_BYTES);
            // SAFETY: the block was handed out and is not in use.
            unsafe { pointer.write(1) };
            heap.give_back(offset, PAGE_BYTES - 7);
        }
        let (offset, pointer) = heap.take(9 * PAGE_BYTES).unwrap();
        // SAFETY: the block is this test's own.
        assert_eq!((offset, unsafe { pointer.read() }), (PAGE_BYTES, 0));
    }
}
