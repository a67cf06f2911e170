//! Element types of collectives, and reduction operators.

use std::fmt;

use bytemuck::Pod;
use half::{bf16, f16};
use lockstep_plan::DType;

/// Element type of a collective's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NumberType {
    /// IEEE 754 binary32.
    F32,
    /// bfloat16, the upper half of a binary32; reduced in f32 and rounded once.
    Bf16,
    /// IEEE 754 binary16; reduced in f32 and rounded once.
    F16,
    /// Signed 64-bit integers, whose sums wrap around.
    I64,
    /// Signed 32-bit integers, whose sums wrap around.
    I32,
    /// Unsigned 32-bit integers, whose sums wrap around.
    U32,
    /// Bytes, whose sums wrap around.
    U8,
}

impl NumberType {
    /// All types; the index is the type's code in shared memory and on the wire.
    pub const ALL: [Self; 7] = [Self::F32, Self::Bf16, Self::F16, Self::I64, Self::I32, Self::U32, Self::U8];

    /// Returns the size of one element in bytes.
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::I64 => 8,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::U8 => 1,
        }
    }

    /// Returns the name that users know: `f32`, `bf16`, ...
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::I64 => "i64",
            Self::I32 => "i32",
            Self::U32 => "u32",
            Self::U8 => "u8",
        }
    }
}

impl fmt::Display for NumberType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl From<DType> for NumberType {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F32 => Self::F32,
            DType::BF16 => Self::Bf16,
            DType::F16 => Self::F16,
            DType::I32 => Self::I32,
            DType::U32 => Self::U32,
            DType::U8 => Self::U8,
        }
    }
}

/// A Rust type that corresponds to a [`NumberType`].
pub trait Number: Pod + Send + Sync {
    /// Element type of `Self`.
    const TYPE: NumberType;
}

macro_rules! numbers {
    ($($type:ty => $number:ident),*) => {$(
        impl Number for $type {
            const TYPE: NumberType = NumberType::$number;
        }
    )*};
}
numbers!(f32 => F32, bf16 => Bf16, f16 => F16, i64 => I64, i32 => I32, u32 => U32, u8 => U8);

/// Operator of a reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Sum, in the order of a fixed tree over the ranks.
    Sum,
    /// Maximum; NaN if any element is NaN.
    Max,
    /// Minimum; NaN if any element is NaN.
    Min,
}

impl ReduceOp {
    /// All operators; the index is the operator's code in shared memory and on the wire.
    pub const ALL: [Self; 3] = [Self::Sum, Self::Max, Self::Min];

    /// Returns `sum`, `max` or `min`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Max => "max",
            Self::Min => "min",
        }
    }
}
