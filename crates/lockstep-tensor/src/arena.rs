//! The allocator, and the ledger that counts its memory.
//!
//! An [`Arena`] allocates [`Buffer`]s and books their bytes by category. A dropped buffer returns to the arena's
//! cache, so a loop that requests the same sizes again never reaches the system allocator. Buffers of chosen
//! categories lie in memory that other processes can map, and part of a buffer can be lent to another thread.

use std::{
    alloc::{self, Layout},
    cell::Cell,
    collections::BTreeMap,
    marker::PhantomData,
    ops::Range,
    ptr::NonNull,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use lockstep_plan::{CACHE_LINE_BYTES, DType, MemoryBytes, MemoryCategory, booked_bytes};
use rustix::mm;

use crate::{CpuQueue, Device, Element, Event, Place, Queue, Shape, SharedHeap, TensorError, View};

/// Every buffer starts at a cache line, so that vector and tile loads are aligned.
const ALIGNMENT: usize = CACHE_LINE_BYTES;
/// Buffers of this size and larger are aligned for huge pages, and advised to use them.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// An allocator with a ledger. Clones share both.
#[derive(Clone, Default)]
pub struct Arena {
    state: Arc<Mutex<State>>,
    /// True if this handle allocates host memory although the arena belongs to a device.
    is_on_host: bool,
}

#[derive(Default)]
struct State {
    in_use: MemoryBytes,
    peak: MemoryBytes,
    peak_total_bytes: usize,
    /// Freed blocks, keyed by their kind and capacity.
    free: BTreeMap<(Kind, usize), Vec<Arc<LendableBlock>>>,
    shared: Option<SharedCategories>,
    /// The device that holds the buffers, snapshots excepted: those stay on the host.
    device: Option<Arc<dyn Device>>,
}

/// The categories whose buffers lie in shared memory.
struct SharedCategories {
    heap: Arc<SharedHeap>,
    categories: Vec<MemoryCategory>,
}

/// Kind of memory: private to this process, mapped by several processes, or a device's.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Private,
    Shared,
    Device,
}

/// Zeroed memory of the system, released on drop.
struct Block {
    pointer: NonNull<u8>,
    capacity: usize,
    source: Source,
}

/// Contents of a buffer when it is allocated.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Contents {
    Zeros,
    Anything,
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
    Device(Arc<dyn Device>),
}

// SAFETY: a block owns its memory; nothing about it is tied to the thread that allocated it.
unsafe impl Send for Block {}
// SAFETY: a shared block reveals only its address and size; `Buffer` and `Loan` control who may use the memory.
unsafe impl Sync for Block {}

impl Block {
    /// Allocates zeroed private memory; `None` if the system refuses.
    fn allocate(capacity: usize) -> Option<Self> {
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
    fn share(heap: &Arc<SharedHeap>, capacity: usize) -> Option<Self> {
        let (offset, pointer) = heap.take(capacity)?;
        Some(Self { pointer, capacity, source: Source::Shared { heap: Arc::clone(heap), offset } })
    }

    /// Allocates memory of a device; `None` if the device has no more.
    fn on(device: &Arc<dyn Device>, capacity: usize) -> Option<Self> {
        let pointer = device.allocate(capacity)?;
        Some(Self { pointer, capacity, source: Source::Device(Arc::clone(device)) })
    }

    fn kind(&self) -> Kind {
        match self.source {
            Source::Heap | Source::Mapping { .. } => Kind::Private,
            Source::Shared { .. } => Kind::Shared,
            Source::Device(_) => Kind::Device,
        }
    }

    fn place(&self) -> Place<'_> {
        match &self.source {
            Source::Device(device) => Place::Device(device),
            _ => Place::Host,
        }
    }

    /// Returns bytes of the block as a view, to tell a device about their use.
    fn view(&self, range: Range<usize>) -> View<'_> {
        // SAFETY: callers pass ranges within the block.
        let pointer = unsafe { self.pointer.add(range.start) };
        // SAFETY: as above; a device uses the memory in the order of its queue.
        unsafe { View::new(pointer, DType::U8, Shape::from([range.len()]), self.place()) }
    }

    #[track_caller]
    fn expect_host(&self) {
        assert!(
            matches!(self.place(), Place::Host),
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

impl Arena {
    /// Creates an arena with nothing booked.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates an arena whose buffers of `categories` lie in `heap`, which the other ranks of this machine have
    /// mapped. Once the heap is full, these buffers lie in private memory.
    pub fn sharing(heap: Arc<SharedHeap>, categories: &[MemoryCategory]) -> Self {
        let arena = Self::default();
        arena.lock().shared = Some(SharedCategories { heap, categories: categories.to_vec() });
        arena
    }

    /// Creates an arena whose buffers lie on `device`, snapshots excepted: those stay on the host.
    pub fn on(device: Arc<dyn Device>) -> Self {
        let arena = Self::default();
        arena.lock().device = Some(device);
        arena
    }

    /// Returns a handle of the same ledger that allocates only host memory, for the host threads of a device.
    #[must_use]
    pub fn on_host(&self) -> Self {
        Self { is_on_host: true, ..self.clone() }
    }

    /// Creates a queue of the device that holds the buffers, with `threads` host threads including the calling one.
    /// Host memory that kernels need is booked here as workspace.
    ///
    /// # Errors
    /// If the threads cannot be started ([`TensorError::ThreadPool`]) or there is not enough memory
    /// ([`TensorError::OutOfMemory`]).
    pub fn queue(&self, threads: usize) -> Result<Box<dyn Queue>, TensorError> {
        let device = self.lock().device.clone();
        match device {
            Some(device) => device.queue(threads, &self.on_host()),
            None => Ok(Box::new(CpuQueue::new(threads, self)?)),
        }
    }

    /// Allocates a buffer of at least `bytes` bytes, booked under `category`. Its contents are unspecified (zero when
    /// fresh, old values when reused).
    ///
    /// # Errors
    /// If the system refuses the memory.
    pub fn allocate(&self, bytes: usize, category: MemoryCategory) -> Result<Buffer, TensorError> {
        self.take(bytes, category).map(|(buffer, _)| buffer)
    }

    /// Allocates as [`Arena::allocate`] does, and fills the buffer with zeros.
    ///
    /// # Errors
    /// If the system refuses the memory.
    pub fn allocate_zeroed(&self, bytes: usize, category: MemoryCategory) -> Result<Buffer, TensorError> {
        let (mut buffer, contents) = self.take(bytes, category)?;
        match buffer.place() {
            Place::Device(device) => device.zero(buffer.view(DType::U8, 0, [buffer.len_bytes()])),
            Place::Host if contents == Contents::Anything => buffer.bytes_mut().fill(0),
            Place::Host => {}
        }
        Ok(buffer)
    }

    fn take(&self, bytes: usize, category: MemoryCategory) -> Result<(Buffer, Contents), TensorError> {
        let capacity = Self::booked_bytes(bytes);
        let mut state = self.lock();
        let heap = state.heap_for(category);
        let device = state.device.clone();
        let device = device.filter(|_| !self.is_on_host && category != MemoryCategory::Snapshot);
        let kind = match (&device, &heap) {
            (Some(_), _) => Kind::Device,
            (None, Some(_)) => Kind::Shared,
            (None, None) => Kind::Private,
        };
        let cached = state.free.get_mut(&(kind, capacity)).and_then(Vec::pop);
        let (held, contents) = match cached {
            Some(held) => {
                state.in_use[MemoryCategory::Cached] -= capacity;
                (held, Contents::Anything)
            }
            None => {
                let shared = || heap.as_ref().and_then(|heap| Block::share(heap, capacity));
                let on_host = || shared().or_else(|| Block::allocate(capacity));
                let new = || device.as_ref().map_or_else(on_host, |device| Block::on(device, capacity));
                let fresh = state.room_for(capacity).then(new).flatten();
                let block = fresh.ok_or(TensorError::OutOfMemory {
                    category,
                    requested_bytes: capacity,
                    in_use_bytes: state.in_use.total(),
                })?;
                let held = LendableBlock { block, loans: Mutex::default(), lent: AtomicUsize::new(0) };
                (Arc::new(held), Contents::Zeros)
            }
        };
        state.book(category, capacity);
        let home = Owner { arena: self.clone(), category };
        Ok((Buffer { held, home, copy: Vec::new(), not_sync: PhantomData }, contents))
    }

    /// Checks that the machine has room for `bytes` more, in any number of buffers. The check comes before the first
    /// allocation because the system notices a shortage only when the last page is touched.
    ///
    /// # Errors
    /// If the machine does not have that much memory.
    pub fn require(&self, bytes: usize, category: MemoryCategory) -> Result<(), TensorError> {
        let state = self.lock();
        if state.room_for(bytes) {
            return Ok(());
        }
        let in_use_bytes = state.in_use.total();
        Err(TensorError::OutOfMemory { category, requested_bytes: bytes, in_use_bytes })
    }

    /// Returns the number of bytes that an allocation of `bytes` is booked as: whole cache lines, at least one.
    pub const fn booked_bytes(bytes: usize) -> usize {
        booked_bytes(bytes)
    }

    /// Returns the bytes that are booked now, by category.
    pub fn in_use(&self) -> MemoryBytes {
        self.lock().in_use
    }

    /// Returns the peak of each category, in bytes.
    pub fn peak(&self) -> MemoryBytes {
        self.lock().peak
    }

    /// Returns the peak of the total, in bytes, cached blocks included.
    pub fn peak_total_bytes(&self) -> usize {
        self.lock().peak_total_bytes
    }

    /// Resets the peaks to what is booked now.
    pub fn reset_peak(&self) {
        let mut state = self.lock();
        state.peak = state.in_use;
        state.peak_total_bytes = state.in_use.total();
    }

    /// Returns the cached blocks to the system.
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
    fn heap_for(&self, category: MemoryCategory) -> Option<Arc<SharedHeap>> {
        let sharing = self.shared.as_ref()?;
        sharing.categories.contains(&category).then(|| Arc::clone(&sharing.heap))
    }

    fn book(&mut self, category: MemoryCategory, bytes: usize) {
        self.in_use[category] += bytes;
        self.peak[category] = self.peak[category].max(self.in_use[category]);
        self.peak_total_bytes = self.peak_total_bytes.max(self.in_use.total());
    }
}

/// Memory of one device, booked under one category. It is `Send` but not `Sync`: see the crate's documentation.
pub struct Buffer {
    held: Arc<LendableBlock>,
    home: Owner,
    /// For a buffer on a device: the bytes that [`Buffer::host_bytes`] read last. No ledger books them.
    copy: Vec<u8>,
    not_sync: PhantomData<Cell<()>>,
}

/// Number of ranges of a buffer that are usually lent at the same time; it sizes the list of loans.
const LOANS: usize = 16;

/// A block and its loans.
struct LendableBlock {
    block: Block,
    loans: Mutex<Loans>,
    /// Number of lent ranges, readable without the lock.
    lent: AtomicUsize,
}

#[derive(Default)]
struct Loans {
    /// Byte ranges that are lent.
    ranges: Vec<Range<usize>>,
    /// The arena that takes the block back, if its buffer was dropped while part of it was lent.
    home: Option<Owner>,
}

/// The arena that takes a free block back, and the category under which it is booked until then.
#[derive(Clone)]
struct Owner {
    arena: Arena,
    category: MemoryCategory,
}

impl Owner {
    /// Returns a block to the cache. A block of a device returns once the queue has passed all uses of it.
    fn take_back(&self, held: Arc<LendableBlock>) {
        let (retired, home) = (Arc::clone(&held), self.clone());
        let give_back = move || home.take_back_now(retired);
        match held.block.place() {
            Place::Host => give_back(),
            Place::Device(device) => {
                device.retire(held.block.view(0..held.block.capacity), Box::new(give_back))
            }
        }
    }

    fn take_back_now(&self, held: Arc<LendableBlock>) {
        let (kind, capacity) = (held.block.kind(), held.block.capacity);
        let mut state = self.arena.lock();
        state.in_use[self.category] -= capacity;
        state.in_use[MemoryCategory::Cached] += capacity;
        state.free.entry((kind, capacity)).or_default().push(held);
    }
}

impl Buffer {
    /// Size in bytes: the requested size, rounded up to whole cache lines.
    pub fn len_bytes(&self) -> usize {
        self.held.block.capacity
    }

    /// Returns the category that the buffer is booked under.
    pub fn category(&self) -> MemoryCategory {
        self.home.category
    }

    /// Returns a window of `shape` that starts `offset_bytes` into the buffer.
    ///
    /// # Panics
    /// If the window does not lie in the buffer, does not start at a multiple of the element size, or is lent in
    /// part.
    pub fn view(&self, dtype: DType, offset_bytes: usize, shape: impl Into<Shape>) -> View<'_> {
        let shape = shape.into();
        let end = offset_bytes.checked_add(shape.elements() * dtype.size_bytes());
        assert!(
            end.is_some_and(|end| end <= self.len_bytes()) && offset_bytes.is_multiple_of(dtype.size_bytes()),
            "a view of {dtype} {shape:?} at byte {offset_bytes} does not lie in {} bytes",
            self.len_bytes()
        );
        self.held.expect_not_lent(offset_bytes..end.unwrap_or(usize::MAX));
        // SAFETY: the offset lies in the allocation, as just checked.
        let pointer = unsafe { self.held.block.pointer.add(offset_bytes) };
        // SAFETY: the window lies in this buffer, which the view's lifetime borrows.
        unsafe { View::new(pointer, dtype, shape, self.held.block.place()) }
    }

    /// Returns the memory that holds the buffer: the host's or a device's.
    pub fn place(&self) -> Place<'_> {
        self.held.block.place()
    }

    /// Returns the bytes, for the host to read. Bytes of a device are copied once the queue has passed everything
    /// enqueued so far.
    ///
    /// # Panics
    /// If part of them is lent.
    pub fn host_bytes(&mut self) -> &[u8] {
        if matches!(self.place(), Place::Host) {
            return self.bytes_mut();
        }
        self.copy = self.view(DType::U8, 0, [self.len_bytes()]).fetch();
        &self.copy
    }

    /// Returns the bytes. Exclusive access to the buffer means that no view of it exists.
    ///
    /// # Panics
    /// If part of them is lent, or the buffer lies on a device.
    #[track_caller]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.held.expect_not_lent(0..self.len_bytes());
        self.held.block.expect_host();
        let block = &self.held.block;
        // SAFETY: the block is live, initialized (allocated zeroed), and `&mut self` excludes all views.
        unsafe { std::slice::from_raw_parts_mut(block.pointer.as_ptr(), block.capacity) }
    }

    /// Returns the contents as elements of `T`.
    ///
    /// # Panics
    /// As [`Buffer::bytes_mut`].
    #[track_caller]
    pub fn elements_mut<T: Element>(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(self.bytes_mut())
    }

    /// Lends the bytes `range` until the loan is dropped, which any thread may do. Until then no view of these bytes
    /// can be made; the rest of the buffer stays usable. A loan of device memory begins with an event: the borrower
    /// waits until the queue has passed everything enqueued before ([`Loan::hand_over`]).
    ///
    /// # Panics
    /// If the range does not lie in the buffer, or is lent in part already.
    pub fn lend(&mut self, range: Range<usize>) -> Loan {
        assert!(
            range.start <= range.end && range.end <= self.len_bytes(),
            "bytes {range:?} of {} cannot be lent",
            self.len_bytes()
        );
        self.held.expect_not_lent(range.clone());
        let mut loans = self.held.lock_loans();
        if loans.ranges.capacity() == 0 {
            // The number of simultaneous loans depends on the borrowers' speed: a later step may see more than all
            // before it.
            loans.ranges.reserve(LOANS);
        }
        loans.ranges.push(range.clone());
        drop(loans);
        self.held.lent.fetch_add(1, Ordering::Relaxed);
        let after = match self.place() {
            Place::Host => Event::COMPLETE,
            Place::Device(device) => device.record(),
        };
        Loan { held: Arc::clone(&self.held), range, after, is_handed_over: false }
    }
}

impl LendableBlock {
    fn lock_loans(&self) -> MutexGuard<'_, Loans> {
        self.loans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[track_caller]
    fn expect_not_lent(&self, range: Range<usize>) {
        // Pairs with the end of a loan, so that the borrower's writes are visible.
        if self.lent.load(Ordering::Acquire) == 0 {
            return;
        }
        let loans = self.lock_loans();
        let taken = loans.ranges.iter().find(|loan| loan.start.max(range.start) < loan.end.min(range.end));
        let taken = taken.cloned();
        drop(loans);
        assert!(taken.is_none(), "bytes {range:?} of a buffer are lent in part: {taken:?}");
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut loans = self.held.lock_loans();
        if loans.ranges.is_empty() {
            drop(loans);
            self.home.take_back(Arc::clone(&self.held));
        } else {
            loans.home = Some(self.home.clone());
        }
    }
}

/// A range of a [`Buffer`], for one borrower on any thread. The memory lives until both are dropped.
pub struct Loan {
    held: Arc<LendableBlock>,
    range: Range<usize>,
    after: Event,
    is_handed_over: bool,
}

impl Loan {
    /// Number of lent bytes.
    pub fn len_bytes(&self) -> usize {
        self.range.len()
    }

    /// Blocks until the event after which `by` may use the memory.
    pub fn hand_over(&mut self, by: &dyn std::fmt::Display) {
        if let Place::Device(device) = self.held.block.place()
            && !std::mem::replace(&mut self.is_handed_over, true)
        {
            self.after.wait();
            device.touch(self.held.block.view(self.range.clone()), by);
        }
    }

    #[track_caller]
    fn expect_handed_over(&self) {
        if !self.is_handed_over {
            self.held.block.expect_host();
        }
    }

    /// Returns the lent bytes.
    ///
    /// # Panics
    /// If they lie on a device and were not [handed over](Loan::hand_over).
    #[track_caller]
    pub fn bytes(&self) -> &[u8] {
        self.expect_handed_over();
        // SAFETY: the range lies in the live block, and is this loan's alone while it is lent.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.range.len()) }
    }

    /// Returns the lent bytes for writing.
    ///
    /// # Panics
    /// As [`Loan::bytes`].
    #[track_caller]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.expect_handed_over();
        // SAFETY: as in `bytes`; `&mut self` excludes other references.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.range.len()) }
    }

    /// Returns the address of the lent bytes, to hand them to another process or device.
    pub fn as_ptr(&self) -> *mut u8 {
        self.held.block.pointer.as_ptr().wrapping_add(self.range.start)
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        let mut loans = self.held.lock_loans();
        if let Some(index) = loans.ranges.iter().position(|range| *range == self.range) {
            loans.ranges.swap_remove(index);
        }
        self.held.lent.fetch_sub(1, Ordering::Release);
        let home = if loans.ranges.is_empty() { loans.home.take() } else { None };
        drop(loans);
        if let Some(home) = home {
            home.take_back(Arc::clone(&self.held));
        }
    }
}

impl std::fmt::Debug for Loan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Loan of bytes {:?} of {} bytes", self.range, self.held.block.capacity)
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} bytes of {})", self.len_bytes(), self.category().name())
    }
}

impl State {
    /// Returns true if the machine has room for `bytes` besides everything booked, cached blocks not counted.
    fn room_for(&self, bytes: usize) -> bool {
        let booked = self.in_use.total() - self.in_use[MemoryCategory::Cached];
        booked.checked_add(bytes).is_some_and(|total| total as u64 <= machine_bytes())
    }
}

/// Returns the bytes of main memory and swap of this machine, the upper limit of what can be allocated.
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
    fn what_is_lent_cannot_be_viewed_until_it_is_given_back_and_outlives_its_buffer() {
        let arena = Arena::new();
        let mut buffer = arena.allocate_zeroed(1024, MemoryCategory::Gradients).unwrap();
        let mut loan = buffer.lend(256..512);
        let rest = buffer.lend(512..520);
        buffer.view(DType::F32, 0, [64]).copy_from(&[1.0_f32; 64]);
        for (start, floats) in [(0, 65), (256, 64), (508, 2), (516, 1)] {
            let view = || buffer.view(DType::F32, start, [floats]).elements();
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(view)).is_err(), "{start}");
        }
        std::thread::spawn(move || loan.bytes_mut().fill(7)).join().unwrap();
        assert_eq!(buffer.view(DType::U8, 256, [256]).to_vec::<u8>(), [7; 256]);
        drop(buffer);
        assert_eq!(rest.bytes(), [0; 8]);
        assert_eq!(arena.in_use()[MemoryCategory::Gradients], 1024);
        drop(rest);
        assert_eq!(arena.in_use()[MemoryCategory::Gradients], 0);
    }

    #[test]
    fn chosen_categories_lie_in_shared_memory_as_long_as_there_is_room() {
        let memory = Arc::new(crate::SharedMemory::create(1 << 20).unwrap());
        let heap = SharedHeap::new(Arc::clone(&memory), 0);
        let arena = Arena::sharing(heap, &[MemoryCategory::Gradients]);
        let is_shared = |buffer: &Buffer| memory.offset_of(buffer.view(DType::U8, 0, [1]).as_ptr()).is_some();
        let gradients = arena.allocate_zeroed(600_000, MemoryCategory::Gradients).unwrap();
        let weights = arena.allocate_zeroed(600_000, MemoryCategory::Parameters).unwrap();
        assert!(is_shared(&gradients) && !is_shared(&weights));
        let more = arena.allocate(600_000, MemoryCategory::Gradients).unwrap();
        assert!(!is_shared(&more));
        drop(gradients);
        // Private memory of the same size is not reused as shared memory.
        assert!(!is_shared(&arena.allocate(600_000, MemoryCategory::Parameters).unwrap()));
        assert!(is_shared(&arena.allocate(600_000, MemoryCategory::Gradients).unwrap()));
        arena.trim();
        let mut anew = arena.allocate_zeroed(1 << 20, MemoryCategory::Gradients).unwrap();
        assert!(is_shared(&anew) && anew.bytes_mut().iter().all(|byte| *byte == 0));
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
