//! Typed windows of a buffer: the operands of kernels.

use std::{fmt, marker::PhantomData, ops::Range, ptr::NonNull};

use bytemuck::Pod;
use half::{bf16, f16};
use lockstep_plan::{DType, MemoryCategory};

use crate::{Arena, Buffer, Pending, Place, TensorError};

/// A Rust type that can be the element of a tensor.
pub trait Element: Pod + Send + Sync {
    /// The dtype of this element type.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($type:ty => $dtype:ident),*) => {$(
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}
elements!(f32 => F32, bf16 => BF16, f16 => F16, i32 => I32, u32 => U32, u8 => U8);

/// Up to four dimensions, row-major, stored inline so that making a view never allocates. A shape always fits the
/// address space, so arithmetic on its dimensions and offsets cannot overflow.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; Self::MAX_RANK],
    rank: usize,
}

impl Shape {
    /// Largest number of dimensions.
    pub const MAX_RANK: usize = 4;

    /// Largest number of elements: an allocation of this many elements of the widest type is still possible.
    const MAX_ELEMENTS: usize = isize::MAX as usize / size_of::<f32>();

    /// The dimensions, outermost first.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.rank]
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.dims().iter().product()
    }

    /// The shape as a matrix: (product of all dimensions but the last, last dimension).
    pub fn as_matrix(&self) -> (usize, usize) {
        match self.dims() {
            [] => (1, 1),
            [rows @ .., columns] => (rows.iter().product(), *columns),
        }
    }
}

impl From<&[usize]> for Shape {
    fn from(dims: &[usize]) -> Self {
        assert!(dims.len() <= Self::MAX_RANK, "a shape has at most {} dimensions: {dims:?}", Self::MAX_RANK);
        // A dimension of zero counts as one here; otherwise the product of the others could still overflow.
        let elements = dims.iter().try_fold(1_usize, |product, dim| product.checked_mul((*dim).max(1)));
        assert!(
            elements.is_some_and(|elements| elements <= Self::MAX_ELEMENTS),
            "a shape has at most {} elements: {dims:?}",
            Self::MAX_ELEMENTS
        );
        let mut shape = Self { dims: [1; Self::MAX_RANK], rank: dims.len() };
        shape.dims[..dims.len()].copy_from_slice(dims);
        shape
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Self {
        Self::from(dims.as_slice())
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.dims().fmt(f)
    }
}

/// A typed, shaped, contiguous window of a [`Buffer`]. Copies of a view are cheap and refer to the same memory.
#[derive(Clone, Copy)]
pub struct View<'a> {
    pointer: NonNull<u8>,
    dtype: DType,
    shape: Shape,
    place: Place<'a>,
    /// Makes the view not `Sync`, and ties it to its buffer.
    buffer: PhantomData<&'a Buffer>,
}

impl<'a> View<'a> {
    /// # Safety
    /// The window must lie in memory that lives for `'a`, is initialized, and is written only through
    /// views on this thread.
    pub(crate) unsafe fn new(pointer: NonNull<u8>, dtype: DType, shape: Shape, place: Place<'a>) -> Self {
        Self { pointer, dtype, shape, place, buffer: PhantomData }
    }

    /// Returns the memory that holds the view: the host's or a device's.
    pub fn place(&self) -> Place<'a> {
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
            Place::Host => self.copy_from(source),
            Place::Device(device) => device.write(*self, bytemuck::cast_slice(source)),
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
            Place::Host => {
                self.copy_to(target);
                Pending::ready(target)
            }
            Place::Device(device) => {
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
        if let Place::Device(device) = self.place {
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
            matches!(self.place, Place::Host),
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

/// A buffer of its own with one shape: for tests, fixtures and inputs made on the host.
#[derive(Debug)]
pub struct Tensor {
    buffer: Buffer,
    dtype: DType,
    shape: Shape,
}

impl Tensor {
    /// Creates a tensor of zeros.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn zeros(
        arena: &Arena,
        dtype: DType,
        shape: impl Into<Shape>,
        category: MemoryCategory,
    ) -> Result<Self, TensorError> {
        let shape = shape.into();
        let buffer = arena.allocate_zeroed(shape.elements() * dtype.size_bytes(), category)?;
        Ok(Self { buffer, dtype, shape })
    }

    /// Creates a tensor with the given elements.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn from_slice<T: Element>(
        arena: &Arena,
        shape: impl Into<Shape>,
        elements: &[T],
        category: MemoryCategory,
    ) -> Result<Self, TensorError> {
        let tensor = Self::zeros(arena, T::DTYPE, shape, category)?;
        tensor.view().write(elements);
        Ok(tensor)
    }

    /// Returns a view of the whole tensor.
    pub fn view(&self) -> View<'_> {
        self.buffer.view(self.dtype, 0, self.shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor<T: Element>(shape: impl Into<Shape>, elements: &[T]) -> Tensor {
        Tensor::from_slice(&Arena::new(), shape, elements, MemoryCategory::Activations).unwrap()
    }

    #[test]
    fn rows_and_reshapes_are_windows_of_the_same_memory() {
        let tensor = tensor([4, 3], &[0_u32, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
        let middle = tensor.view().rows(1..3);
        assert_eq!(middle.shape().dims(), [2, 3]);
        assert_eq!(middle.to_vec::<u32>(), [3, 4, 5, 6, 7, 8]);
        middle.reshape([3, 2]).rows(2..3).copy_from(&[70_u32, 80]);
        assert_eq!(tensor.view().to_vec::<u32>()[6..9], [6, 70, 80]);
        assert_eq!(tensor.view().reshape([2, 2, 3]).shape().as_matrix(), (4, 3));
    }

    #[test]
    fn windows_overlap_where_they_share_a_byte_and_empty_ones_never() {
        let tensor = tensor([4], &[0.0_f32; 4]);
        let rows = |range| tensor.view().rows(range);
        assert!(rows(0..3).overlaps(&rows(2..4)) && rows(0..4).overlaps(&rows(1..2)));
        assert!(!rows(0..2).overlaps(&rows(2..4)));
        for empty in [rows(0..0), rows(2..2), rows(4..4)] {
            assert!(!empty.overlaps(&tensor.view()) && !tensor.view().overlaps(&empty));
            assert!(!empty.overlaps(&empty));
        }
        assert!(rows(1..3).same_memory(&rows(1..3)) && !rows(1..3).same_memory(&rows(1..4)));
    }

    #[test]
    #[should_panic(expected = "a shape has at most")]
    fn a_shape_whose_size_would_wrap_around_is_refused() {
        // 2^62 elements of four bytes are 2^64 bytes, which would pass for none.
        let _ = Shape::from([1_usize << 31, 1 << 31]);
    }

    #[test]
    #[should_panic(expected = "a shape has at most")]
    fn an_empty_dimension_does_not_hide_that_the_others_wrap_around() {
        let _ = Shape::from([usize::MAX, 2, 0]);
    }

    #[test]
    #[should_panic(expected = "rows 1..5 of [4]")]
    fn rows_beyond_the_last_are_refused() {
        tensor([4], &[0_u8; 4]).view().rows(1..5);
    }

    #[test]
    #[should_panic(expected = "cannot view [4] as [5]")]
    fn a_reshape_to_another_number_of_elements_is_refused() {
        tensor([4], &[0_u8; 4]).view().reshape([5]);
    }

    #[test]
    #[should_panic(expected = "a view of u8 is not a view of i32")]
    fn elements_of_another_type_are_refused() {
        tensor([4], &[0_u8; 4]).view().to_vec::<i32>();
    }
}
