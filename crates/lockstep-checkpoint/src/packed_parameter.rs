//! Matrices whose files have another form than memory, with the same values: packed tensors of quantized directories, and blocks of
//! GGUF files that no kernel reads. Both are repacked into blocks of kernels.

use lockstep_plan::BlockFormat;

use crate::{CheckpointError, gguf::model::ForeignRows, quantized::PackedTensors};

/// A parameter that can be repacked into blocks: a matrix, or a stack of the matrices of experts.
#[derive(Debug, Clone)]
pub struct PackedParameter<'a> {
    /// Canonical name.
    pub name: &'a str,
    /// Format of the blocks.
    pub format: BlockFormat,
    /// Shape; the last dimension is the columns of a row.
    pub shape: Vec<usize>,
    source: PackedSource<'a>,
}

/// Source of the rows of a parameter.
#[derive(Debug, Clone)]
enum PackedSource<'a> {
    Tensors(PackedTensors<'a>),
    Foreign(ForeignRows<'a>),
}

impl<'a> PackedParameter<'a> {
    /// Returns the parameter `name` in packed tensors.
    pub(crate) fn of_tensors(name: &'a str, tensors: PackedTensors<'a>) -> Self {
        let (format, shape) = (tensors.format, tensors.shape.clone());
        Self { name, format, shape, source: PackedSource::Tensors(tensors) }
    }

    /// Returns the parameter `name` in rows of a foreign format.
    pub(crate) fn of_foreign(name: &'a str, rows: ForeignRows<'a>) -> Self {
        let (format, shape) = (rows.repacked, rows.shape.clone());
        Self { name, format, shape, source: PackedSource::Foreign(rows) }
    }
}

impl PackedParameter<'_> {
    /// Returns the size of the blocks in bytes.
    pub fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() / self.format.block_elements() * self.format.block_bytes()
    }

    /// Writes the blocks.
    ///
    /// # Errors
    /// If a float of 8 bits or a scale of MXFP4 is NaN.
    ///
    /// # Panics
    /// If `blocks` has another size than [`PackedParameter::bytes`].
    pub fn pack(&self, blocks: &mut [u8]) -> Result<(), CheckpointError> {
        assert_eq!(blocks.len(), self.bytes(), "bytes of the blocks of {}", self.name);
        let columns = self.shape.last().copied().unwrap_or(0);
        let row_bytes = self.format.bytes(columns).unwrap_or(0);
        match &self.source {
            PackedSource::Tensors(tensors) => tensors.pack(row_bytes, blocks),
            PackedSource::Foreign(rows) => {
                rows.repack(row_bytes, blocks);
                Ok(())
            }
        }
    }
}
