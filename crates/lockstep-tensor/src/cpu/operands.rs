//! Operands of kernels: checks of their types, sizes and overlaps, and access to their elements from tasks.

use std::{fmt, marker::PhantomData, ops::Range, ptr::NonNull, slice};

use lockstep_plan::DType;

use crate::{Element, View};

/// A view that the tasks of a kernel share; each accesses its own part.
pub(super) struct Operand<'a, T> {
    pointer: NonNull<T>,
    len: usize,
    memory: PhantomData<&'a [T]>,
}

// SAFETY: `Element`s are plain data, and the only access is through the unsafe methods below, whose callers rule out
// races.
unsafe impl<T: Element> Sync for Operand<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Element> Send for Operand<'_, T> {}

impl<'a, T: Element> Operand<'a, T> {
    /// Wraps the elements of `view`.
    ///
    /// # Panics
    /// If the view has another type.
    pub(super) fn new(view: View<'a>) -> Self {
        Self { pointer: view.pointer(), len: view.elements(), memory: PhantomData }
    }

    /// Returns elements `range` for reading.
    ///
    /// # Safety
    /// Nothing may write them while the slice lives.
    #[inline(always)]
    pub(super) unsafe fn read(&self, range: Range<usize>) -> &'a [T] {
        self.check(&range);
        // SAFETY: the range lies in the view, which is initialized and lives for `'a`; the caller excludes writers.
        unsafe { slice::from_raw_parts(self.pointer.as_ptr().add(range.start), range.len()) }
    }

    /// Returns elements `range` for writing.
    ///
    /// # Safety
    /// The view must be one that the kernel may write, and nothing else may read or write the range while the
    /// slice lives.
    #[inline(always)]
    pub(super) unsafe fn write(&self, range: Range<usize>) -> &'a mut [T] {
        self.check(&range);
        // SAFETY: as in `read`; the caller excludes all other access.
        unsafe { slice::from_raw_parts_mut(self.pointer.as_ptr().add(range.start), range.len()) }
    }

    #[inline(always)]
    fn check(&self, range: &Range<usize>) {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "elements {range:?} of {} that a kernel was given",
            self.len
        );
    }
}

/// Panics unless an operand has the expected type and number of elements.
#[track_caller]
pub(super) fn expect(name: impl fmt::Display, view: View<'_>, dtype: DType, elements: usize) {
    assert!(
        view.dtype() == dtype && view.elements() == elements,
        "{name} must be {dtype} with {elements} elements, not {view:?}"
    );
}

/// Panics if an output shares memory with another operand. This check makes it sound for kernels to write through
/// shared views.
pub(super) fn check_disjoint(written: &[View<'_>], read: &[View<'_>]) {
    for (i, output) in written.iter().enumerate() {
        for other in written[i + 1..].iter().chain(read) {
            assert!(!output.overlaps(other), "an output ({output:?}) overlaps another operand ({other:?})");
        }
    }
}

/// Checks as [`check_disjoint`] does, for elementwise kernels, whose output may also be exactly one of the inputs.
pub(super) fn check_elementwise(output: View<'_>, inputs: &[View<'_>]) {
    for input in inputs {
        assert!(
            output.same_memory(input) || !output.overlaps(input),
            "an output ({output:?}) overlaps part of an operand ({input:?})"
        );
    }
}
