//! The allocator, and the ledger that counts its memory.
//!
//! An [`Arena`] allocates [`Buffer`](crate::Buffer)s and books their bytes by category. A dropped buffer returns to the arena's
//! cache, so a loop that requests the same sizes again never reaches the system allocator. Buffers of chosen
//! categories lie in memory that other processes can map, and part of a buffer can be lent to another thread.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use lockstep_plan::{MemoryBytes, MemoryCategory, booked_bytes};

use crate::{
    DeviceMemory, MemoryLocation, Queue, SharedHeap, TensorError,
    block::{Block, Kind},
};

/// Contents of a buffer when it is allocated.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Contents {
    Zeros,
    Anything,
}

/// A device with memory and a queue of its own.
pub trait Device: DeviceMemory {
    /// Returns a handle of the queue, with `threads` host threads. Host memory that the queue needs is booked in
    /// `arena`.
    ///
    /// # Errors
    /// As [`Arena::queue`].
    fn queue(self: Arc<Self>, threads: usize, arena: &Arena) -> Result<Box<dyn Queue>, TensorError>;
}

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

    /// Returns the device that holds the buffers; `None` if they lie on the host.
    pub(crate) fn device(&self) -> Option<Arc<dyn Device>> {
        self.lock().device.clone()
    }

    /// Returns a handle of the same ledger that allocates only host memory, for the host threads of a device.
    #[must_use]
    pub fn on_host(&self) -> Self {
        Self { is_on_host: true, ..self.clone() }
    }

    /// Takes a block of at least `bytes` bytes from the cache or the system, and books it.
    pub(crate) fn take(
        &self,
        bytes: usize,
        category: MemoryCategory,
    ) -> Result<(Arc<LendableBlock>, Owner, Contents), TensorError> {
        let capacity = Self::booked_bytes(bytes);
        let mut state = self.lock();
        let heap = state.heap_for(category);
        let device = state.device.clone().map(|device| device as Arc<dyn DeviceMemory>);
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
        Ok((held, Owner { arena: self.clone(), category }, contents))
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

/// A block and its loans.
pub(crate) struct LendableBlock {
    pub(crate) block: Block,
    loans: Mutex<Loans>,
    /// Number of lent ranges, readable without the lock.
    pub(crate) lent: AtomicUsize,
}

#[derive(Default)]
pub(crate) struct Loans {
    /// Byte ranges that are lent.
    pub(crate) ranges: Vec<Range<usize>>,
    /// The arena that takes the block back, if its buffer was dropped while part of it was lent.
    pub(crate) home: Option<Owner>,
}

/// The arena that takes a free block back, and the category under which it is booked until then.
#[derive(Clone)]
pub(crate) struct Owner {
    arena: Arena,
    pub(crate) category: MemoryCategory,
}

impl Owner {
    /// Returns a block to the cache. A block of a device returns once the queue has passed all uses of it.
    pub(crate) fn take_back(&self, held: Arc<LendableBlock>) {
        let (retired, home) = (Arc::clone(&held), self.clone());
        let give_back = move || home.take_back_now(retired);
        match held.block.place() {
            MemoryLocation::Host => give_back(),
            MemoryLocation::Device(device) => {
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

impl LendableBlock {
    pub(crate) fn lock_loans(&self) -> MutexGuard<'_, Loans> {
        self.loans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[track_caller]
    pub(crate) fn expect_not_lent(&self, range: Range<usize>) {
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
    use lockstep_plan::DType;

    use super::*;
    use crate::Buffer;

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
    fn more_than_the_machine_has_is_refused_before_anything_is_taken() {
        let arena = Arena::new();
        let half = machine_bytes() as usize / 2;
        arena.require(half, MemoryCategory::Parameters).unwrap();
        let error = arena.require(3 * half, MemoryCategory::Parameters).unwrap_err();
        assert!(error.to_string().contains("for parameters (0 bytes already in use)"), "{error}");
        arena.require(usize::MAX, MemoryCategory::Parameters).unwrap_err();
        assert_eq!(arena.peak_total_bytes(), 0);
    }
}
