//! Where memory comes from, and the ledger that counts it.
//!
//! An [`Arena`] hands out [`Buffer`]s and books their bytes by category. A dropped buffer goes back to the
//! arena's cache, so a loop that asks for the same sizes again never reaches the system allocator.

use std::{
    alloc::{self, Layout},
    collections::BTreeMap,
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use lockstep_plan::{DType, MemoryBytes, MemoryCategory};
use rustix::mm;

use crate::{Element, Shape, TensorError, View};

/// Every buffer starts at a cache line, so vector loads and tile loads are aligned.
const ALIGNMENT: usize = 64;
/// Buffers of this size and more are aligned for, and advised to use, huge pages.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A source of memory with a ledger. Clones share both.
#[derive(Clone, Default)]
pub struct Arena {
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    in_use: MemoryBytes,
    peak: MemoryBytes,
    peak_total_bytes: usize,
    /// Freed blocks by capacity.
    free: BTreeMap<usize, Vec<Block>>,
}

/// Zeroed memory of the system, released when dropped.
struct Block {
    pointer: NonNull<u8>,
    capacity: usize,
    source: Source,
}

/// What a buffer holds when it is handed out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Contents {
    Zeros,
    Anything,
}

/// Where a block came from.
enum Source {
    Heap,
    /// A mapping that holds the block at a multiple of the huge pages' size.
    Mapping {
        start: NonNull<u8>,
        bytes: usize,
    },
}

// SAFETY: a block owns its memory; nothing about it is tied to the thread that allocated it.
unsafe impl Send for Block {}

impl Block {
    /// `None` if the system has no more.
    fn allocate(capacity: usize) -> Option<Self> {
        if capacity >= HUGE_PAGE_BYTES { Self::map(capacity) } else { Self::allocate_on_heap(capacity) }
    }

    fn allocate_on_heap(capacity: usize) -> Option<Self> {
        let layout = Layout::from_size_align(capacity, ALIGNMENT).ok()?;
        // SAFETY: the layout has a non-zero size: capacities are at least one cache line.
        let pointer = NonNull::new(unsafe { alloc::alloc_zeroed(layout) })?;
        Some(Self { pointer, capacity, source: Source::Heap })
    }

    /// Advice must come before the first touch: pages that are there stay small.
    fn map(capacity: usize) -> Option<Self> {
        let bytes = capacity.checked_next_multiple_of(HUGE_PAGE_BYTES)?.checked_add(HUGE_PAGE_BYTES)?;
        // SAFETY: a new mapping at an address of the system's choice touches nothing that exists.
        let start = unsafe {
            mm::mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                mm::ProtFlags::READ | mm::ProtFlags::WRITE,
                mm::MapFlags::PRIVATE,
            )
        };
        let start = NonNull::new(start.ok()?.cast::<u8>())?;
        let padding = start.as_ptr().align_offset(HUGE_PAGE_BYTES);
        // SAFETY: the padding is less than a huge page, by which the mapping is longer than the capacity.
        let pointer = unsafe { start.add(padding) };
        // SAFETY: the range lies in the mapping. A kernel without huge pages refuses, which costs speed only.
        let _ = unsafe { mm::madvise(pointer.as_ptr().cast(), bytes - padding, mm::Advice::LinuxHugepage) };
        Some(Self { pointer, capacity, source: Source::Mapping { start, bytes } })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        match self.source {
            Source::Heap => {
                let layout = Layout::from_size_align(self.capacity, ALIGNMENT);
                let layout = layout.expect("the layout was valid when the block was allocated");
                // SAFETY: `pointer` came from `alloc_zeroed` with this very layout and is freed once.
                unsafe { alloc::dealloc(self.pointer.as_ptr(), layout) }
            }
            Source::Mapping { start, bytes } => {
                // SAFETY: the mapping is this block's own and is unmapped once. It fails for no valid mapping.
                let _ = unsafe { mm::munmap(start.as_ptr().cast(), bytes) };
            }
        }
    }
}

impl Arena {
    /// An arena with nothing booked.
    pub fn new() -> Self {
        Self::default()
    }

    /// A buffer of at least `bytes` bytes, booked under `category`. Its contents are unspecified (zero
    /// when fresh, old values when reused).
    ///
    /// # Errors
    /// [`TensorError::OutOfMemory`] if the system refuses.
    pub fn allocate(&self, bytes: usize, category: MemoryCategory) -> Result<Buffer, TensorError> {
        self.take(bytes, category).map(|(buffer, _)| buffer)
    }

    /// Like [`Arena::allocate`], filled with zeros.
    ///
    /// # Errors
    /// [`TensorError::OutOfMemory`] if the system refuses.
    pub fn allocate_zeroed(&self, bytes: usize, category: MemoryCategory) -> Result<Buffer, TensorError> {
        let (mut buffer, contents) = self.take(bytes, category)?;
        if contents == Contents::Anything {
            buffer.bytes_mut().fill(0);
        }
        Ok(buffer)
    }

    fn take(&self, bytes: usize, category: MemoryCategory) -> Result<(Buffer, Contents), TensorError> {
        let capacity = Self::booked_bytes(bytes);
        let mut state = self.lock();
        let cached = state.free.get_mut(&capacity).and_then(Vec::pop);
        let (block, contents) = match cached {
            Some(block) => {
                state.in_use[MemoryCategory::Cached] -= capacity;
                (block, Contents::Anything)
            }
            None => {
                let fresh = state.room_for(capacity).then(|| Block::allocate(capacity)).flatten();
                let block = fresh.ok_or(TensorError::OutOfMemory {
                    category,
                    requested_bytes: capacity,
                    in_use_bytes: state.in_use.total(),
                })?;
                (block, Contents::Zeros)
            }
        };
        state.book(category, capacity);
        Ok((Buffer { block: Some(block), category, arena: self.clone() }, contents))
    }

    /// Whether `bytes` more, in as many buffers as one likes, can be had at all: asked before the first of them
    /// is taken, since the system finds out only when the last is touched.
    ///
    /// # Errors
    /// [`TensorError::OutOfMemory`] if the machine does not have that much.
    pub fn require(&self, bytes: usize, category: MemoryCategory) -> Result<(), TensorError> {
        let state = self.lock();
        if state.room_for(bytes) {
            return Ok(());
        }
        let in_use_bytes = state.in_use.total();
        Err(TensorError::OutOfMemory { category, requested_bytes: bytes, in_use_bytes })
    }

    /// How many bytes an allocation of `bytes` is booked as: whole cache lines, at least one.
    pub const fn booked_bytes(bytes: usize) -> usize {
        let lines = bytes.div_ceil(ALIGNMENT);
        // More than the address space saturates, and is refused as any impossible allocation.
        if lines == 0 { ALIGNMENT } else { lines.saturating_mul(ALIGNMENT) }
    }

    /// Bytes booked now.
    pub fn in_use(&self) -> MemoryBytes {
        self.lock().in_use
    }

    /// The most that each category ever held.
    pub fn peak(&self) -> MemoryBytes {
        self.lock().peak
    }

    /// The most that was ever booked in total, cached blocks included.
    pub fn peak_total_bytes(&self) -> usize {
        self.lock().peak_total_bytes
    }

    /// Starts the peaks again from what is booked now.
    pub fn reset_peak(&self) {
        let mut state = self.lock();
        state.peak = state.in_use;
        state.peak_total_bytes = state.in_use.total();
    }

    /// Returns cached blocks to the system.
    pub fn trim(&self) {
        let mut state = self.lock();
        state.free.clear();
        state.in_use[MemoryCategory::Cached] = 0;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn book(&mut self, category: MemoryCategory, bytes: usize) {
        self.in_use[category] += bytes;
        self.peak[category] = self.peak[category].max(self.in_use[category]);
        self.peak_total_bytes = self.peak_total_bytes.max(self.in_use.total());
    }
}

/// Memory of one device, booked under one category. `Send`, but not `Sync`: see the crate's documentation.
pub struct Buffer {
    /// `None` only while it is being dropped.
    block: Option<Block>,
    category: MemoryCategory,
    arena: Arena,
}

impl Buffer {
    /// Size in bytes: what was asked for, rounded up to whole cache lines.
    pub fn len_bytes(&self) -> usize {
        self.block().capacity
    }

    /// The category it is booked under.
    pub fn category(&self) -> MemoryCategory {
        self.category
    }

    /// A window of `shape` that starts `offset_bytes` into the buffer.
    ///
    /// # Panics
    /// If the window does not lie in the buffer or does not start at a multiple of the element size.
    pub fn view(&self, dtype: DType, offset_bytes: usize, shape: impl Into<Shape>) -> View<'_> {
        let shape = shape.into();
        let end = offset_bytes.checked_add(shape.elements() * dtype.size_bytes());
        assert!(
            end.is_some_and(|end| end <= self.len_bytes()) && offset_bytes.is_multiple_of(dtype.size_bytes()),
            "a view of {dtype} {shape:?} at byte {offset_bytes} does not lie in {} bytes",
            self.len_bytes()
        );
        // SAFETY: the offset lies in the allocation, as just checked.
        let pointer = unsafe { self.block().pointer.add(offset_bytes) };
        // SAFETY: the window lies in this buffer, which the view's lifetime borrows.
        unsafe { View::new(pointer, dtype, shape) }
    }

    /// The bytes. Exclusive access to the buffer means that no view of it exists.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let block = self.block();
        // SAFETY: the block is live, initialized (allocated zeroed), and `&mut self` excludes all views.
        unsafe { std::slice::from_raw_parts_mut(block.pointer.as_ptr(), block.capacity) }
    }

    /// The contents as elements of `T`.
    pub fn elements_mut<T: Element>(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(self.bytes_mut())
    }

    fn block(&self) -> &Block {
        self.block.as_ref().expect("a buffer has its block until it is dropped")
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            let mut state = self.arena.lock();
            state.in_use[self.category] -= block.capacity;
            state.in_use[MemoryCategory::Cached] += block.capacity;
            state.free.entry(block.capacity).or_default().push(block);
        }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} bytes of {})", self.len_bytes(), self.category.name())
    }
}

impl State {
    /// Whether the machine has `bytes` besides what is booked, cached blocks not counted.
    fn room_for(&self, bytes: usize) -> bool {
        let booked = self.in_use.total() - self.in_use[MemoryCategory::Cached];
        booked.checked_add(bytes).is_some_and(|total| total as u64 <= machine_bytes())
    }
}

/// Main memory and swap of this machine. More than that was never there to be had.
fn machine_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_add(info.totalswap).saturating_mul(u64::from(info.mem_unit.max(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_booked_until_its_buffer_is_dropped() {
        let arena = Arena::new();
        let a = arena.allocate(1000, MemoryCategory::Parameters).unwrap();
        let b = arena.allocate(64, MemoryCategory::Gradients).unwrap();
        assert_eq!(arena.in_use()[MemoryCategory::Parameters], 1024);
        assert_eq!(arena.in_use()[MemoryCategory::Gradients], 64);
        drop(a);
        assert_eq!(arena.in_use()[MemoryCategory::Parameters], 0);
        assert_eq!(arena.in_use()[MemoryCategory::Cached], 1024);
        let reused = arena.allocate(1001, MemoryCategory::Activations).unwrap();
        assert_eq!(arena.in_use()[MemoryCategory::Cached], 0);
        assert_eq!(arena.in_use()[MemoryCategory::Activations], 1024);
        drop((b, reused));
        arena.trim();
        assert_eq!(arena.in_use().total(), 0);
        assert_eq!(arena.peak()[MemoryCategory::Parameters], 1024);
        assert_eq!(arena.peak_total_bytes(), 1024 + 64);
    }

    #[test]
    fn an_impossible_allocation_is_an_error_that_says_what_it_was_for() {
        let arena = Arena::new();
        for bytes in [1 << 60, usize::MAX - 70, usize::MAX] {
            let error = arena.allocate(bytes, MemoryCategory::Optimizer).unwrap_err();
            assert!(error.to_string().contains("for optimizer"), "{error}");
        }
        assert_eq!(arena.in_use().total(), 0);
    }

    #[test]
    #[should_panic(expected = "does not lie in 64 bytes")]
    fn a_view_whose_end_would_wrap_around_is_refused() {
        let buffer = Arena::new().allocate(64, MemoryCategory::Workspace).unwrap();
        let _ = buffer.view(DType::F32, usize::MAX - 3, [4]);
    }

    #[test]
    fn more_than_the_machine_has_is_refused_before_anything_is_taken() {
        let arena = Arena::new();
        let half = machine_bytes() as usize / 2;
        arena.require(half, MemoryCategory::Parameters).unwrap();
        let error = arena.require(3 * half, MemoryCategory::Parameters).unwrap_err();
        assert!(error.to_string().contains("for parameters (0 bytes already in use)"), "{error}");
        arena.require(usize::MAX, MemoryCategory::Parameters).unwrap_err();
        assert_eq!(arena.peak_total_bytes(), 0);
    }

    #[test]
    #[should_panic(expected = "does not lie in 64 bytes")]
    fn a_view_outside_its_buffer_is_refused() {
        let buffer = Arena::new().allocate(64, MemoryCategory::Workspace).unwrap();
        let _ = buffer.view(DType::F32, 4, [16]);
    }
}
