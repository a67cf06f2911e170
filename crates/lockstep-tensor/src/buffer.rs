//! Buffers, and the loans of their parts to other threads. A dropped buffer returns to its arena.

use std::{
    cell::Cell,
    marker::PhantomData,
    ops::Range,
    sync::{Arc, atomic::Ordering},
};

use lockstep_plan::{DType, MemoryCategory};

use crate::{
    Arena, Element, Event, MemoryLocation, Shape, TensorError, View,
    arena::{Contents, LendableBlock, Owner},
};

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

impl Arena {
    /// Allocates a buffer of at least `bytes` bytes, booked under `category`. Its contents are unspecified (zero when
    /// fresh, old values when reused).
    ///
    /// # Errors
    /// If the system refuses the memory.
    pub fn allocate(&self, bytes: usize, category: MemoryCategory) -> Result<Buffer, TensorError> {
        self.take(bytes, category).map(|(held, home, _)| Buffer::new(held, home))
    }

    /// Allocates as [`Arena::allocate`] does, and fills the buffer with zeros.
    ///
    /// # Errors
    /// If the system refuses the memory.
    pub fn allocate_zeroed(&self, bytes: usize, category: MemoryCategory) -> Result<Buffer, TensorError> {
        let (held, home, contents) = self.take(bytes, category)?;
        let mut buffer = Buffer::new(held, home);
        match buffer.place() {
            MemoryLocation::Device(device) => device.zero(buffer.view(DType::U8, 0, [buffer.len_bytes()])),
            MemoryLocation::Host if contents == Contents::Anything => buffer.bytes_mut().fill(0),
            MemoryLocation::Host => {}
        }
        Ok(buffer)
    }
}

impl Buffer {
    fn new(held: Arc<LendableBlock>, home: Owner) -> Self {
        Self { held, home, copy: Vec::new(), not_sync: PhantomData }
    }

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
    pub fn place(&self) -> MemoryLocation<'_> {
        self.held.block.place()
    }

    /// Returns the bytes, for the host to read. Bytes of a device are copied once the queue has passed everything
    /// enqueued so far.
    ///
    /// # Panics
    /// If part of them is lent.
    pub fn host_bytes(&mut self) -> &[u8] {
        if matches!(self.place(), MemoryLocation::Host) {
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
            MemoryLocation::Host => Event::COMPLETE,
            MemoryLocation::Device(device) => device.record(),
        };
        Loan { held: Arc::clone(&self.held), range, after, is_handed_over: false }
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
        if let MemoryLocation::Device(device) = self.held.block.place()
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

#[cfg(test)]
mod tests {
    use super::*;

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
    #[should_panic(expected = "does not lie in 64 bytes")]
    fn a_view_whose_end_would_wrap_around_is_refused() {
        let buffer = Arena::new().allocate(64, MemoryCategory::Workspace).unwrap();
        let _ = buffer.view(DType::F32, usize::MAX - 3, [4]);
    }

    #[test]
    #[should_panic(expected = "does not lie in 64 bytes")]
    fn a_view_outside_its_buffer_is_refused() {
        let buffer = Arena::new().allocate(64, MemoryCategory::Workspace).unwrap();
        let _ = buffer.view(DType::F32, 4, [16]);
    }
}
