//! Typed windows of a buffer, the operands of kernels, and the memory that they lie in: the host's or a device's.

use std::{cell::Cell, fmt, marker::PhantomData, ops::Range, ptr::NonNull, sync::Arc};

use lockstep_plan::DType;

use crate::{Element, Event, Pending, Shape};

/// The memory that holds a buffer or a view.
#[derive(Debug, Clone, Copy)]
pub enum MemoryLocation<'a> {
    /// Host memory, which any code may touch.
    Host,
    /// Memory of a device.
    Device(&'a Arc<dyn DeviceMemory>),
}

/// The memory of a device with a queue of its own.
///
/// Every method that takes a view is enqueued: its work runs in the order of the device's queue. The view's memory
/// stays valid until the queue has passed the call, because buffers are freed in queue order ([`DeviceMemory::retire`]).
pub trait DeviceMemory: fmt::Debug + Send + Sync {
    /// Allocates device memory, aligned for direct disk transfers; `None` if the device is out of memory. The
    /// contents are unspecified.
    fn allocate(&self, bytes: usize) -> Option<NonNull<u8>>;

    /// Frees memory that [`DeviceMemory::allocate`] returned.
    ///
    /// # Safety
    /// The memory must come from this device with the same `bytes`, and must not be used again.
    unsafe fn free(&self, memory: NonNull<u8>, bytes: usize);

    /// Returns an event that completes when everything enqueued so far has run.
    fn record(&self) -> Event;

    /// Enqueues a copy of `bytes` from the host to a view of the same size.
    fn write(&self, to: View<'_>, bytes: &[u8]);

    /// Enqueues a copy of a view's bytes to the host.
    fn read(&self, from: View<'_>) -> Pending<'static, Vec<u8>>;

    /// Enqueues a fill of a view with zero bytes.
    fn zero(&self, view: View<'_>);

    /// Calls `give_back`, which returns the memory to its next owner, once the queue has passed everything enqueued
    /// so far.
    fn retire(&self, memory: View<'_>, give_back: Box<dyn FnOnce() + Send>);

    /// Records that `by`, which is not the queue, uses this memory from now on.
    ///
    /// # Panics
    /// May panic if the queue has not passed every use of the memory.
    fn touch(&self, memory: View<'_>, by: &dyn fmt::Display);
}

/// A typed, shaped, contiguous window of a [`Buffer`](crate::Buffer). Copies of a view are cheap and refer to the same memory.
#[derive(Clone, Copy)]
pub struct View<'a> {
    pointer: NonNull<u8>,
    dtype: DType,
    shape: Shape,
    place: MemoryLocation<'a>,
    /// Makes the view neither `Send` nor `Sync`, and ties it to its buffer.
    buffer: PhantomData<&'a Cell<()>>,
}

impl<'a> View<'a> {
    /// # Safety
    /// The window must lie in memory that lives for `'a`, is initialized, and is written only through
    /// views on this thread.
    pub(crate) unsafe fn new(
        pointer: NonNull<u8>,
        dtype: DType,
        shape: Shape,
        place: MemoryLocation<'a>,
    ) -> Self {
        Self { pointer, dtype, shape, place, buffer: PhantomData }
    }

    /// Returns the memory that holds the view: the host's or a device's.
    pub fn place(&self) -> MemoryLocation<'a> {
        self.place
    }

    /// Element type of the view.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Shape of the view.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.elements()
    }

    /// Returns the same elements under another shape.
    ///
    /// # Panics
    /// If the number of elements differs.
    pub fn reshape(self, shape: impl Into<Shape>) -> Self {
        let shape = shape.into();
        assert_eq!(shape.elements(), self.elements(), "cannot view {:?} as {shape:?}", self.shape);
        Self { shape, ..self }
    }

    /// Returns rows `rows`, where the outermost dimension counts rows.
    ///
    /// # Panics
    /// If the range does not lie in the view.
    pub fn rows(self, rows: Range<usize>) -> Self {
        let mut shape = self.shape;
        assert!(
            shape.rank > 0 && rows.start <= rows.end && rows.end <= shape.dims[0],
            "rows {rows:?} of {shape:?}"
        );
        let row_bytes = shape.dims[1..shape.rank].iter().product::<usize>() * self.dtype.size_bytes();
        shape.dims[0] = rows.len();
        // SAFETY: `rows.start` rows lie inside this view, as just checked.
        let pointer = unsafe { self.pointer.add(rows.start * row_bytes) };
        Self { pointer, shape, ..self }
    }

    /// Copies the elements from the host. On a device the copy is enqueued.
    ///
    /// # Panics
    /// If the type or the number of elements differs.
    #[track_caller]
    pub fn write<T: Element>(&self, source: &[T]) {
        self.expect::<T>(source.len());
        match self.place {
            MemoryLocation::Host => self.copy_from(source),
            MemoryLocation::Device(device) => device.write(*self, bytemuck::cast_slice(source)),
        }
    }

    /// Copies the elements to the host. On a device the copy is enqueued.
    ///
    /// # Panics
    /// If the type or the number of elements differs.
    #[track_caller]
    pub fn read<'h, T: Element>(&self, target: &'h mut [T]) -> Pending<'h, &'h mut [T]> {
        self.expect::<T>(target.len());
        match self.place {
            MemoryLocation::Host => {
                self.copy_to(target);
                Pending::ready(target)
            }
            MemoryLocation::Device(device) => {
                let bytes = device.read(*self);
                Pending::later(move || {
                    bytemuck::cast_slice_mut(target).copy_from_slice(&bytes.wait());
                    target
                })
            }
        }
    }

    /// Copies the elements to a new vector, and waits for the queue.
    #[track_caller]
    pub fn fetch<T: Element>(&self) -> Vec<T> {
        let mut out = vec![T::zeroed(); self.elements()];
        self.read(&mut out).wait();
        out
    }

    /// Copies the elements from `source`, at once; both are host memory.
    ///
    /// # Panics
    /// If the type or the number of elements differs, or the view lies on a device.
    #[track_caller]
    pub fn copy_from<T: Element>(&self, source: &[T]) {
        self.expect_host::<T>(source.len());
        // SAFETY: both ranges hold `source.len()` elements of `T`; no reference into a buffer's bytes is
        // held by safe code while a view of it exists, so `source` is other memory.
        unsafe { std::ptr::copy(source.as_ptr(), self.pointer.as_ptr().cast(), source.len()) }
    }

    /// Copies the elements to `target`, at once; both are host memory.
    ///
    /// # Panics
    /// If the type or the number of elements differs, or the view lies on a device.
    #[track_caller]
    pub fn copy_to<T: Element>(&self, target: &mut [T]) {
        self.expect_host::<T>(target.len());
        // SAFETY: as in `copy_from`.
        unsafe { std::ptr::copy(self.pointer.as_ptr().cast(), target.as_mut_ptr(), target.len()) }
    }

    /// Returns the elements of a view of host memory in a new vector.
    ///
    /// # Panics
    /// If the type differs, or the view lies on a device.
    #[track_caller]
    pub fn to_vec<T: Element>(&self) -> Vec<T> {
        let mut out = vec![T::zeroed(); self.elements()];
        self.copy_to(&mut out);
        out
    }

    /// Hands the memory to `by`, which is not the queue, for the time of a call. Blocks until the queue has passed
    /// everything enqueued so far.
    pub fn hand_over(&self, by: &dyn fmt::Display) {
        if let MemoryLocation::Device(device) = self.place {
            device.record().wait();
            device.touch(*self, by);
        }
    }

    /// Returns the address of the first byte, to hand the memory to another process or device. The caller must ensure
    /// that the memory may be used.
    pub fn as_ptr(&self) -> *mut u8 {
        self.pointer.as_ptr()
    }

    /// Returns the address of the first byte.
    #[cfg(feature = "delayed")]
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.pointer
    }

    /// Returns the address of the first element, for kernels whose tasks write disjoint parts of one view.
    ///
    /// # Panics
    /// If the type differs, or the view lies on a device.
    pub(crate) fn pointer<T: Element>(&self) -> NonNull<T> {
        self.expect_host::<T>(self.elements());
        self.pointer.cast()
    }

    #[track_caller]
    fn expect_host<T: Element>(&self, elements: usize) {
        assert!(
            matches!(self.place, MemoryLocation::Host),
            "the host touches {self:?} in the memory of a device, which is reached by `read` and `write`"
        );
        self.expect::<T>(elements);
    }

    #[track_caller]
    fn expect<T: Element>(&self, elements: usize) {
        assert_eq!(self.dtype, T::DTYPE, "a view of {} is not a view of {}", self.dtype, T::DTYPE);
        assert_eq!(self.elements(), elements, "a view of shape {:?} against {elements} elements", self.shape);
    }

    /// Returns the elements, for a kernel that only reads them.
    ///
    /// # Safety
    /// Nothing may write to this window while the slice lives.
    pub(crate) unsafe fn slice<T: Element>(&self) -> &'a [T] {
        self.expect_host::<T>(self.elements());
        // SAFETY: the window is initialized, aligned and live for `'a`; the caller excludes writers.
        unsafe { std::slice::from_raw_parts(self.pointer.as_ptr().cast(), self.elements()) }
    }

    /// Returns the elements, for a kernel that writes them.
    ///
    /// # Safety
    /// Nothing else may read or write this window while the slice lives.
    pub(crate) unsafe fn slice_mut<T: Element>(&self) -> &'a mut [T] {
        self.expect_host::<T>(self.elements());
        // SAFETY: as in `slice`; the caller excludes all other access.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.as_ptr().cast(), self.elements()) }
    }

    /// Returns the first and one-past-last address, to check that two windows do not overlap.
    fn address_range(&self) -> Range<usize> {
        let start = self.pointer.as_ptr() as usize;
        start..start + self.elements() * self.dtype.size_bytes()
    }

    /// Returns true if the two windows share a byte; an empty window shares none.
    pub fn overlaps(&self, other: &View<'_>) -> bool {
        let (a, b) = (self.address_range(), other.address_range());
        a.start.max(b.start) < a.end.min(b.end)
    }

    /// Returns true if the two windows are the same bytes.
    pub fn same_memory(&self, other: &View<'_>) -> bool {
        self.address_range() == other.address_range()
    }
}

impl fmt::Debug for View<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.dtype, self.shape)
    }
}
