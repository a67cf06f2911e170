//! Elements of a tensor in host memory, before they are copied to a device.

use lockstep_plan::DType;

use crate::view::View;

/// Elements of a tensor in host memory, row-major.
#[derive(Debug, Clone, PartialEq)]
pub enum HostData {
    /// f32 elements.
    F32(Vec<f32>),
    /// i32 elements.
    I32(Vec<i32>),
    /// u32 elements.
    U32(Vec<u32>),
    /// u8 elements.
    U8(Vec<u8>),
}

impl HostData {
    /// Returns no elements of `dtype`; `None` for a dtype that host data cannot have.
    pub fn empty(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F32 => Some(Self::F32(Vec::new())),
            DType::I32 => Some(Self::I32(Vec::new())),
            DType::U32 => Some(Self::U32(Vec::new())),
            DType::U8 => Some(Self::U8(Vec::new())),
            DType::BF16 | DType::F16 => None,
        }
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::I32(_) => DType::I32,
            Self::U32(_) => DType::U32,
            Self::U8(_) => DType::U8,
        }
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(data) => data.len(),
            Self::I32(data) => data.len(),
            Self::U32(data) => data.len(),
            Self::U8(data) => data.len(),
        }
    }

    /// Returns true if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies the elements to `view`.
    ///
    /// # Panics
    /// If the view has another dtype or number of elements.
    pub fn write_to(&self, view: View<'_>) {
        match self {
            Self::F32(data) => view.write(data),
            Self::I32(data) => view.write(data),
            Self::U32(data) => view.write(data),
            Self::U8(data) => view.write(data),
        }
    }
}
