//! Memory arguments of operations: inputs, outputs, and memory lent for the duration of an operation.

use std::marker::PhantomData;

use lockstep_plan::DType;
use lockstep_tensor::{Loan, View};

use crate::{Kind, Number, NumberType};

/// Input of an operation: a slice, or a view of a tensor.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    pointer: *const u8,
    number: NumberType,
    elements: usize,
    view: Option<View<'a>>,
    memory: PhantomData<&'a [u8]>,
}

/// Output of an operation, which it may also read: a mutable slice, or a view of a tensor.
#[derive(Debug)]
pub struct Target<'a> {
    pointer: *mut u8,
    number: NumberType,
    elements: usize,
    view: Option<View<'a>>,
    memory: PhantomData<&'a mut [u8]>,
}

/// Memory that an operation is given. Device memory may only be used after an event.
pub(crate) trait HandOver {
    /// Waits until an operation of kind `by` may use the memory.
    fn hand_over(&mut self, by: Kind);
}

impl HandOver for Source<'_> {
    fn hand_over(&mut self, by: Kind) {
        self.view.iter().for_each(|view| view.hand_over(&by.name()));
    }
}

impl HandOver for Target<'_> {
    fn hand_over(&mut self, by: Kind) {
        self.view.iter().for_each(|view| view.hand_over(&by.name()));
    }
}

impl HandOver for LentBuffer {
    fn hand_over(&mut self, by: Kind) {
        self.loan.hand_over(&by.name());
    }
}

impl<'a, T: Number> From<&'a [T]> for Source<'a> {
    fn from(slice: &'a [T]) -> Self {
        let (pointer, elements) = (slice.as_ptr().cast(), slice.len());
        Self { pointer, number: T::TYPE, elements, view: None, memory: PhantomData }
    }
}

impl<'a> From<View<'a>> for Source<'a> {
    fn from(view: View<'a>) -> Self {
        let number = view.dtype().into();
        let (pointer, elements) = (view.as_ptr(), view.elements());
        Self { pointer, number, elements, view: Some(view), memory: PhantomData }
    }
}

impl<'a, T: Number> From<&'a mut [T]> for Target<'a> {
    fn from(slice: &'a mut [T]) -> Self {
        let (pointer, elements) = (slice.as_mut_ptr().cast(), slice.len());
        Self { pointer, number: T::TYPE, elements, view: None, memory: PhantomData }
    }
}

impl<'a> From<View<'a>> for Target<'a> {
    fn from(view: View<'a>) -> Self {
        let number = view.dtype().into();
        let (pointer, elements) = (view.as_ptr(), view.elements());
        Self { pointer, number, elements, view: Some(view), memory: PhantomData }
    }
}

/// Part of a buffer, lent to an operation that stays in flight while its rank does something else.
#[derive(Debug)]
pub struct LentBuffer {
    loan: Loan,
    number: NumberType,
}

impl LentBuffer {
    /// Lends the bytes of `loan` as elements of `dtype`. Bytes left over after the last whole element take no part.
    pub fn new(loan: Loan, dtype: DType) -> Self {
        Self { loan, number: dtype.into() }
    }

    /// Returns the loan that was passed to [`LentBuffer::new`].
    pub fn into_loan(self) -> Loan {
        self.loan
    }
}

/// Address range of memory, without a lifetime. Its creator guarantees that the memory outlives its use.
#[derive(Debug, Clone, Copy)]
pub struct MemoryRange {
    /// Address of the first element.
    pub pointer: *mut u8,
    /// Type of the elements.
    pub number: NumberType,
    /// Number of elements.
    pub elements: usize,
}

// SAFETY: a `MemoryRange` is only an address; the code that accesses the memory guarantees exclusive or shared access.
unsafe impl Send for MemoryRange {}

impl MemoryRange {
    /// Empty range, valid to pass but not to access.
    pub(crate) const EMPTY: Self =
        Self { pointer: std::ptr::dangling_mut(), number: NumberType::U8, elements: 0 };

    /// Returns the length in bytes.
    pub fn bytes(&self) -> usize {
        self.elements * self.number.size_bytes()
    }

    /// Returns the `elements` elements from `start` on.
    pub fn slice(&self, start: usize, elements: usize) -> Self {
        debug_assert!(start + elements <= self.elements);
        Self { pointer: self.pointer.wrapping_add(start * self.number.size_bytes()), elements, ..*self }
    }

    /// Returns the `bytes` bytes from byte `start` on, as `U8` elements.
    pub fn bytes_at(&self, start: usize, bytes: usize) -> Self {
        debug_assert!(start + bytes <= self.bytes());
        Self { pointer: self.pointer.wrapping_add(start), number: NumberType::U8, elements: bytes }
    }

    /// Returns true if the two ranges have a byte in common.
    pub fn overlaps(&self, other: &Self) -> bool {
        let range = |range: &Self| range.pointer as usize..range.pointer as usize + range.bytes();
        let (a, b) = (range(self), range(other));
        a.start.max(b.start) < a.end.min(b.end)
    }
}

impl From<&Source<'_>> for MemoryRange {
    fn from(source: &Source<'_>) -> Self {
        Self { pointer: source.pointer.cast_mut(), number: source.number, elements: source.elements }
    }
}

impl From<&Target<'_>> for MemoryRange {
    fn from(target: &Target<'_>) -> Self {
        Self { pointer: target.pointer, number: target.number, elements: target.elements }
    }
}

impl From<&LentBuffer> for MemoryRange {
    fn from(lent: &LentBuffer) -> Self {
        let elements = lent.loan.len_bytes() / lent.number.size_bytes();
        Self { pointer: lent.loan.as_ptr(), number: lent.number, elements }
    }
}
