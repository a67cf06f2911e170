//! Matrices that a model's files hold in quantized blocks, as memory holds them: the blocks of a GGUF file, or those into which the
//! packed tensors of a quantized directory, and blocks that no kernel reads, are repacked. Neither changes a value.

use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
};

use lockstep_plan::BlockFormat;

use crate::{
    CheckpointError, ModelDirectory, PackedParameter, RowOrder, StoredParameter, gguf::StoredElements,
};

/// A matrix that is stored quantized.
#[derive(Debug, Clone)]
pub struct BlockParameter<'a> {
    /// Canonical name.
    pub name: &'a str,
    /// Format of the blocks.
    pub format: BlockFormat,
    /// Number of elements.
    pub elements: usize,
    source: Source<'a>,
}

#[derive(Debug, Clone)]
enum Source<'a> {
    Packed(PackedParameter<'a>),
    Stored(StoredParameter<'a>),
}

impl ModelDirectory {
    /// Returns the matrices that the model's files hold in blocks, or in a form with the same values.
    pub fn block_parameters(&self) -> Vec<BlockParameter<'_>> {
        let packed = self.packed_parameters().into_iter().map(|packed| BlockParameter {
            name: packed.name,
            format: packed.format,
            elements: packed.shape.iter().product(),
            source: Source::Packed(packed),
        });
        let stored = self.stored_parameters().into_iter().filter_map(|stored| {
            let StoredElements::Blocks(format) = stored.stored else { return None };
            let (name, elements) = (stored.name, stored.elements);
            Some(BlockParameter { name, format, elements, source: Source::Stored(stored) })
        });
        packed.chain(stored).collect()
    }
}

impl BlockParameter<'_> {
    /// Returns the blocks, row by row, of a matrix with rows of `columns` elements.
    ///
    /// # Errors
    /// If the file cannot be read, or holds values that blocks cannot have.
    pub fn blocks(&self, columns: usize) -> Result<Vec<u8>, CheckpointError> {
        match &self.source {
            Source::Packed(packed) => {
                let mut blocks = vec![0; packed.bytes()];
                packed.pack(&mut blocks)?;
                Ok(blocks)
            }
            Source::Stored(stored) => self.stored_blocks(stored, columns),
        }
    }

    fn stored_blocks(
        &self,
        stored: &StoredParameter<'_>,
        columns: usize,
    ) -> Result<Vec<u8>, CheckpointError> {
        let bytes_of = |elements: usize| elements / self.format.block_elements() * self.format.block_bytes();
        let mut bytes = vec![0; bytes_of(self.elements)];
        let read = |bytes: &mut [u8]| {
            let mut file = File::open(stored.file)?;
            file.seek(SeekFrom::Start(stored.offset as u64))?;
            file.read_exact(bytes)
        };
        read(&mut bytes).map_err(CheckpointError::io("read", stored.file))?;
        if stored.order == RowOrder::Same {
            return Ok(bytes);
        }
        let row_bytes = bytes_of(columns).max(1);
        let row = |row: usize| &bytes[stored.order.stored_row(row) * row_bytes..][..row_bytes];
        Ok((0..bytes.len() / row_bytes).flat_map(row).copied().collect())
    }
}
