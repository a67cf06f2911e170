//! Safetensors files, read without trust in their contents.
//!
//! A file is an 8-byte little-endian length, a JSON header of that length with each tensor's type, shape and byte
//! range, and the data. [`parse_header`] is the pure function that decides if a file is valid. [`SafetensorsFile`] maps
//! a valid file, and [`SafetensorsWriter`] streams a file out.

mod header;
mod json;
mod reader;
mod writer;

pub use ::safetensors::Dtype as StoredDtype;
pub use header::{Header, HeaderError, MAX_HEADER_BYTES, TensorInfo, parse_header};
pub use reader::{SafetensorsFile, TensorRef};
pub use writer::{SafetensorsWriter, TensorSpec};

pub(crate) use json::deserialize_unique_strings;
pub(crate) use writer::Layout;

/// Returns the stored type of a [`DType`](crate::DType).
pub const fn stored_dtype(dtype: crate::DType) -> StoredDtype {
    match dtype {
        crate::DType::F32 => StoredDtype::F32,
        crate::DType::BF16 => StoredDtype::BF16,
        crate::DType::F16 => StoredDtype::F16,
        crate::DType::I32 => StoredDtype::I32,
        crate::DType::U32 => StoredDtype::U32,
        crate::DType::U8 => StoredDtype::U8,
    }
}
