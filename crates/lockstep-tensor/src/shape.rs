//! Element types of tensors, and shapes.

use std::fmt;

use bytemuck::Pod;
use half::{bf16, f16};
use lockstep_plan::DType;

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
    pub(crate) dims: [usize; Self::MAX_RANK],
    pub(crate) rank: usize,
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
