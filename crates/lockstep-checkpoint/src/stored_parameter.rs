//! Location of a parameter that can be used where it is stored.

use std::path::Path;

use lockstep_plan::DType;

/// A parameter whose elements are stored in a file in the model's order.
#[derive(Debug, Clone)]
pub struct StoredParameter<'a> {
    /// Canonical name.
    pub name: &'a str,
    /// The safetensors file.
    pub file: &'a Path,
    /// Byte of the file at which the first element lies.
    pub offset: usize,
    /// Type of the elements.
    pub dtype: DType,
    /// Number of elements.
    pub elements: usize,
}
