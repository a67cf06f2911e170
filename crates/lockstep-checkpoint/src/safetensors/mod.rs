//! safetensors files, read as if an enemy had written them.
//!
//! A file is an 8-byte little-endian length, a JSON header of that length that gives each tensor's
//! type, shape and byte range, and the bytes. [`parse_header`] is the pure function that decides whether
//! a file is well formed; [`SafetensorsFile`] maps a file that is; [`SafetensorsWriter`] streams one out.

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

/// The stored type of a [`DType`](crate::DType).
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
