//! Blocks of memory: private, shared with other processes, or a device's. Each is released as it was allocated.

use std::{
    alloc::{self, Layout},
    ops::Range,
    ptr::NonNull,
    sync::Arc,
};

use lockstep_plan::{CACHE_LINE_BYTES, DType};
use rustix::mm;

use crate::{DeviceMemory, MemoryLocation, Shape, SharedHeap, View};

/// Every buffer starts at a cache line, so that vector and tile loads are aligned.
const ALIGNMENT: usize = CACHE_LINE_BYTES;
/// Buffers of this size and larger are aligned for huge pages, and advised to use them.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Kind of memory: private to this process, mapped by several processes, or a device's.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Private,
    Shared,
    Device,
}

/// Zeroed memory of the system, released on drop.
pub(crate) struct Block {
    pub(crate) pointer: NonNull<u8>,
    pub(crate) capacity: usize,
    source: Source,
}

/// Origin of a block; it decides how the block is freed.
enum Source {
    Heap,
    /// A mapping that holds the block at a multiple of the huge-page size.
    Mapping {
        start: NonNull<u8>,
        bytes: usize,
    },
    Shared {
        heap: Arc<SharedHeap>,
        offset: usize,
    },
    Device(Arc<dyn DeviceMemory>),
}

// SAFETY: a block owns its memory; nothing about it is tied to the thread that allocated it.
unsafe impl Send for Block {}
// SAFETY: a shared block reveals only its address and size; `Buffer` and `Loan` control who may use the memory.
unsafe impl Sync for Block {}

impl Block {
    /// Allocates zeroed private memory; `None` if the system refuses.
    pub(crate) fn allocate(capacity: usize) -> Option<Self> {
        if capacity >= HUGE_PAGE_BYTES { Self::map(capacity) } else { Self::allocate_on_heap(capacity) }
    }

    fn allocate_on_heap(capacity: usize) -> Option<Self> {
        let layout = Layout::from_size_align(capacity, ALIGNMENT).ok()?;
        // SAFETY: the layout has a non-zero size: capacities are at least one cache line.
        let pointer = NonNull::new(unsafe { alloc::alloc_zeroed(layout) })?;
        Some(Self { pointer, capacity, source: Source::Heap })
    }

    /// Allocates by `mmap`. The advice must precede the first touch: pages that exist already stay small.
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
        // Whole huge pages only: the end of a buffer would occupy up to one more of them than is booked.
        let advised = capacity - capacity % HUGE_PAGE_BYTES;
        // SAFETY: the range lies in the mapping. A kernel without huge pages refuses, which costs speed only.
        let _ = unsafe { mm::madvise(pointer.as_ptr().cast(), advised, mm::Advice::LinuxHugepage) };
        Some(Self { pointer, capacity, source: Source::Mapping { start, bytes } })
    }

    /// Allocates memory that other processes can map; `None` if the heap has no room.
    pub(crate) fn share(heap: &Arc<SharedHeap>, capacity: usize) -> Option<Self> {
        let (offset, pointer) = heap.take(capacity)?;
        Some(Self { pointer, capacity, source: Source::Shared { heap: Arc::clone(heap), offset } })
    }

    /// Allocates memory of a device; `None` if the device has no more.
    pub(crate) fn on(device: &Arc<dyn DeviceMemory>, capacity: usize) -> Option<Self> {
        let pointer = device.allocate(capacity)?;
        Some(Self { pointer, capacity, source: Source::Device(Arc::clone(device)) })
    }

    pub(crate) fn kind(&self) -> Kind {
        match self.source {
            Source::Heap | Source::Mapping { .. } => Kind::Private,
            Source::Shared { .. } => Kind::Shared,
            Source::Device(_) => Kind::Device,
        }
    }

    pub(crate) fn place(&self) -> MemoryLocation<'_> {
        match &self.source {
            Source::Device(device) => MemoryLocation::Device(device),
            _ => MemoryLocation::Host,
        }
    }

    /// Returns bytes of the block as a view, to tell a device about their use.
    pub(crate) fn view(&self, range: Range<usize>) -> View<'_> {
        // SAFETY: callers pass ranges within the block.
        let pointer = unsafe { self.pointer.add(range.start) };
        // SAFETY: as above; a device uses the memory in the order of its queue.
        unsafe { View::new(pointer, DType::U8, Shape::from([range.len()]), self.place()) }
    }

    #[track_caller]
    pub(crate) fn expect_host(&self) {
        assert!(
            matches!(self.place(), MemoryLocation::Host),
            "the host touches {} bytes in the memory of a device, which is reached by `read` and `write`",
            self.capacity
        );
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        match &self.source {
            Source::Heap => {
                let layout = Layout::from_size_align(self.capacity, ALIGNMENT);
                let layout = layout.expect("the layout was valid when the block was allocated");
                // SAFETY: `pointer` came from `alloc_zeroed` with this very layout and is freed once.
                unsafe { alloc::dealloc(self.pointer.as_ptr(), layout) }
            }
            Source::Mapping { start, bytes } => {
                // SAFETY: this block owns the mapping and unmaps it once. `munmap` of a valid mapping does not fail.
                let _ = unsafe { mm::munmap(start.as_ptr().cast(), *bytes) };
            }
            Source::Shared { heap, offset } => heap.give_back(*offset, self.capacity),
            // SAFETY: the device allocated this memory, and this block is its last owner.
            Source::Device(device) => unsafe { device.free(self.pointer, self.capacity) },
        }
    }
}
