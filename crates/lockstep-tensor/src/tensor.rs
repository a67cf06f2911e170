//! Tensors with a buffer of their own.

use lockstep_plan::{DType, MemoryCategory};

use crate::{Arena, Buffer, Element, Shape, TensorError, View};

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
