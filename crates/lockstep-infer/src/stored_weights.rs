//! Parameters that are used, or read, where a model's files store them: the bytes of this rank's shard of each.

use std::ops::Range;

use lockstep_checkpoint::{RowOrder, StoredParameter, gguf::StoredElements};
use lockstep_plan::{DType, MemoryCategory, ParameterRecord};
use lockstep_tensor::{Arena, BlockLayout, BlockMatrix, Buffer, Kernels, MappedTensors, Shape, View};

use crate::{
    InferError,
    weight_form::{WeightForm, bytes_of},
};

/// Place of a parameter that stays as it is stored.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StoredPlace {
    pub(crate) source: Source,
    pub(crate) stored: StoredElements,
    /// Order of the rows of quantized blocks.
    pub(crate) layout: BlockLayout,
    pub(crate) shape: Shape,
}

/// Memory of a stored parameter.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Source {
    /// A file, and the byte of the first element.
    File { file: usize, offset: usize },
    /// Index among the copied parameters.
    Copied(usize),
}

impl StoredPlace {
    /// Returns the bytes of the elements.
    pub(crate) fn bytes(&self) -> usize {
        bytes_of(self.stored, self.layout, self.shape).unwrap_or(0)
    }

    /// Returns the place of a matrix in a form; `map` is the file in which it lies.
    ///
    /// # Errors
    /// If memory runs out.
    pub(crate) fn arranged(
        self,
        form: WeightForm,
        map: Option<&MappedTensors>,
        copied: &mut Vec<Buffer>,
        memory: (&Arena, &dyn Kernels),
    ) -> Result<Self, InferError> {
        match form.interleaves(self.stored, self.shape) {
            true => self.interleaved(map, copied, memory),
            false => Ok(self),
        }
    }

    /// Interleaves the rows of a matrix of blocks, so that products of few tokens read them faster. The result takes the place of a
    /// copied matrix, or is a copy of one that lies in the file `map`.
    ///
    /// # Errors
    /// If memory runs out.
    ///
    /// # Panics
    /// If the place holds numbers, or rows that cannot be interleaved.
    fn interleaved(
        self,
        map: Option<&MappedTensors>,
        copied: &mut Vec<Buffer>,
        memory: (&Arena, &dyn Kernels),
    ) -> Result<Self, InferError> {
        let bytes = [self.bytes()];
        let source = match (self.source, map) {
            (Source::Copied(index), _) => {
                copied[index] = self.interleave(copied[index].view(DType::U8, 0, bytes), memory)?;
                self.source
            }
            (Source::File { offset, .. }, map) => {
                let rows = map.and_then(|map| map.view(DType::U8, offset, bytes));
                copied.push(self.interleave(rows.expect("the matrix lies in its file"), memory)?);
                Source::Copied(copied.len() - 1)
            }
        };
        Ok(Self { source, layout: BlockLayout::Interleaved, ..self })
    }

    fn interleave(
        &self,
        rows: View<'_>,
        (arena, kernels): (&Arena, &dyn Kernels),
    ) -> Result<Buffer, InferError> {
        let (shape, layout) = (self.shape.as_matrix().into(), BlockLayout::Interleaved);
        let StoredElements::Blocks(format) = self.stored else { panic!("numbers are not interleaved") };
        let bytes = BlockMatrix::bytes_of(format, layout, shape).expect("rows that can be interleaved");
        let buffer = arena.allocate(bytes, MemoryCategory::Parameters)?;
        let target = BlockMatrix::with_layout(format, layout, buffer.view(DType::U8, 0, [bytes]), shape);
        kernels.interleave_blocks(BlockMatrix::new(format, rows, shape), target);
        Ok(buffer)
    }
}

/// This rank's shard of a stored parameter.
pub(crate) struct StoredShard<'a> {
    pub(crate) parameter: &'a StoredParameter<'a>,
    pub(crate) record: &'a ParameterRecord,
}

impl StoredShard<'_> {
    /// Returns true if the kernels of a model of type `dtype` read the parameter as it is stored.
    pub(crate) fn stays_stored(&self, dtype: DType) -> bool {
        let Self { parameter, record } = self;
        let is_readable = match parameter.stored {
            StoredElements::Dense(stored) => stored == dtype && parameter.order == RowOrder::Same,
            StoredElements::Blocks(_) => matches!(record.shape.len(), 2 | 3),
        };
        is_readable && parameter.elements == record.elements()
    }

    /// Returns the place of the shard; `None` if it is not aligned to its elements or cuts a block of quantized ones. A shard that is
    /// not contiguous in the file, or whose rows have another order there, is copied.
    pub(crate) fn place(
        &self,
        (file, map): (usize, &MappedTensors),
        copied: &mut Vec<Buffer>,
        arena: &Arena,
    ) -> Result<Option<StoredPlace>, InferError> {
        let StoredParameter { stored, offset, .. } = *self.parameter;
        let Some(ranges) = self.byte_ranges() else { return Ok(None) };
        let shape = Shape::from(self.record.local_shape().as_slice());
        if let [range] = ranges.as_slice() {
            let start = offset + range.start;
            let view = match stored {
                StoredElements::Dense(dtype) => map.view(dtype, start, shape),
                StoredElements::Blocks(_) => map.view(DType::U8, start, [range.len()]),
            };
            let source = Source::File { file, offset: start };
            return Ok(view.map(|_| StoredPlace { source, stored, layout: BlockLayout::Rows, shape }));
        }
        let mut bytes = vec![0_u8; ranges.iter().map(Range::len).sum()];
        let mut rest = bytes.as_mut_slice();
        for range in &ranges {
            let Some(view) = map.view(DType::U8, offset + range.start, [range.len()]) else {
                return Ok(None);
            };
            let (piece, after) = rest.split_at_mut(range.len());
            view.copy_to(piece);
            rest = after;
        }
        Ok(Some(copy(&[&bytes], (stored, self.record), copied, arena)?))
    }

    fn byte_ranges(&self) -> Option<Vec<Range<usize>>> {
        byte_ranges(self.parameter.stored, self.parameter.order, self.record)
    }
}

/// Writes the shard of a parameter that is stored in `pieces` to `store`, in its type: the elements of each piece that the rank holds.
/// Returns false if pieces are missing, not stored as numbers in the parameter's order, or not aligned to them.
pub(crate) fn cast_pieces<'m>(
    pieces: &[&StoredParameter<'_>],
    record: &ParameterRecord,
    map_of: impl Fn(&StoredParameter<'_>) -> &'m MappedTensors,
    store: View<'_>,
    kernels: &dyn Kernels,
) -> bool {
    if pieces.iter().map(|piece| piece.elements).sum::<usize>() != record.elements() {
        return false;
    }
    let store = store.reshape([store.elements()]);
    let mut held = 0;
    let range = |(first, len)| {
        held += len;
        (held - len, first..first + len)
    };
    let ranges: Vec<(usize, Range<usize>)> = record.share.element_ranges(&record.shape).map(range).collect();
    for piece in pieces {
        let StoredParameter { stored, order: RowOrder::Same, offset, elements, first_element, .. } = **piece
        else {
            return false;
        };
        let StoredElements::Dense(dtype) = stored else { return false };
        let (map, end) = (map_of(piece), first_element + elements);
        let from = ranges.partition_point(|(_, range)| range.end <= first_element);
        for (held, range) in ranges[from..].iter().take_while(|(_, range)| range.start < end) {
            let common = range.start.max(first_element)..range.end.min(end);
            let start = offset + (common.start - first_element) * dtype.size_bytes();
            let Some(view) = map.view(dtype, start, [common.len()]) else { return false };
            let first = held + common.start - range.start;
            kernels.cast(view, store.rows(first..first + common.len()));
        }
    }
    true
}

/// Copies this rank's shard of a parameter, `pieces` of its bytes as they are stored.
///
/// # Errors
/// If memory runs out.
pub(crate) fn copy(
    pieces: &[&[u8]],
    (stored, record): (StoredElements, &ParameterRecord),
    copied: &mut Vec<Buffer>,
    arena: &Arena,
) -> Result<StoredPlace, InferError> {
    let len = pieces.iter().map(|piece| piece.len()).sum();
    let buffer = arena.allocate(len, MemoryCategory::Parameters)?;
    let mut first = 0;
    for piece in pieces {
        buffer.view(DType::U8, first, [piece.len()]).copy_from(piece);
        first += piece.len();
    }
    copied.push(buffer);
    let shape = Shape::from(record.local_shape().as_slice());
    let source = Source::Copied(copied.len() - 1);
    Ok(StoredPlace { source, stored, layout: BlockLayout::Rows, shape })
}

/// Returns the ranges of a parameter's bytes that the rank holds, in the order of the shard's elements; `None` if they cut a block.
pub(crate) fn byte_ranges(
    stored: StoredElements,
    order: RowOrder,
    record: &ParameterRecord,
) -> Option<Vec<Range<usize>>> {
    let columns = record.shape.last().copied().unwrap_or(1).max(1);
    let row_bytes = stored.row_bytes(columns)?;
    let byte_of = |element: usize| Some(element / columns * row_bytes + stored.row_bytes(element % columns)?);
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for (first, len) in record.share.element_ranges(&record.shape) {
        for piece in in_stored_order(order, first..first + len, columns) {
            let bytes = byte_of(piece.start)?..byte_of(piece.end)?;
            match ranges.last_mut() {
                Some(last) if last.end == bytes.start => last.end = bytes.end,
                _ => ranges.push(bytes),
            }
        }
    }
    Some(ranges)
}

/// Returns where a range of a parameter's elements is stored, in pieces.
fn in_stored_order(order: RowOrder, elements: Range<usize>, columns: usize) -> Vec<Range<usize>> {
    if order == RowOrder::Same {
        return vec![elements];
    }
    let row_of = |row: usize| {
        let part = elements.start.max(row * columns)..elements.end.min((row + 1) * columns);
        let start = order.stored_row(row) * columns + part.start % columns;
        start..start + part.len()
    };
    (elements.start / columns..elements.end.div_ceil(columns)).map(row_of).collect()
}
