//! Element types of tensors.

use crate::named_enum::named_enum;

named_enum! {
    /// Element type of a tensor. Arithmetic is in `f32` whatever the storage; integer types hold token ids, labels and indices.
    #[derive(PartialOrd, Ord)]
    pub enum DType {
        /// IEEE 754 binary32.
        F32 = "f32",
        /// The upper half of a binary32: 8 exponent bits, 7 fraction bits.
        BF16 = "bf16",
        /// IEEE 754 binary16.
        F16 = "f16",
        /// Signed 32-bit integer: labels, where -100 means "masked".
        I32 = "i32",
        /// Unsigned 32-bit integer: token ids and positions.
        U32 = "u32",
        /// Unsigned 8-bit integer: raw bytes.
        U8 = "u8",
    }
}

impl DType {
    /// Returns the size of one element in bytes.
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::BF16 | Self::F16 => 2,
            Self::U8 => 1,
        }
    }

    /// Returns the name that safetensors files use (`F32`, `BF16`, ...).
    pub const fn safetensors_name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::BF16 => "BF16",
            Self::F16 => "F16",
            Self::I32 => "I32",
            Self::U32 => "U32",
            Self::U8 => "U8",
        }
    }

    /// Returns the type with this [`DType::safetensors_name`]; `None` if no tensor here can hold it.
    pub fn from_safetensors_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.safetensors_name() == name)
    }
}
