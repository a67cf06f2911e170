//! Weights under a memory limit: resident units in one buffer, the others streamed from disk, and a cache of experts.
//!
//! Resident weights are read into memory past the page cache rather than mapped: a pass over streamed weights would drop
//! mapped pages, and read them again from disk in every pass. Rows of quantized matrices are interleaved where products ask for it.

use std::ops::Range;

use lockstep_checkpoint::{RowOrder, gguf::StoredElements};
use lockstep_engine::{EngineError, HeldWeights};
use lockstep_graph::StreamedExperts;
use lockstep_plan::{
    DISK_ALIGNMENT_BYTES, DType, MemoryCategory, ParameterId, aligned_buffer_bytes, booked_bytes,
};
use lockstep_tensor::{Arena, BlockLayout, BlockMatrix, Buffer, DiskIo, DiskTraffic, Kernels, Matrix, Shape};

use crate::{
    device_map::{ModelParts, WeightPlace},
    experts::{ExpertCache, ExpertRoom},
    extent::Extent,
    stream::{Stream, WeightFiles},
    unit_layout::{HeldWeight, UnitLayout},
    weight_form::{bytes_of, copy_rows, matrix_of},
};

/// Bytes of a read.
const READ_BYTES: usize = 8 << 20;
/// Bytes of a weight that are read before they are converted.
const PIECE_BYTES: usize = 32 << 20;
/// Rows of a piece, or of each row of a head: a multiple of the rows that are interleaved.
const PIECE_ROWS: usize = 16;

/// Resident and streamed weights.
#[derive(Debug)]
pub(crate) struct HeldUnits {
    parts: ModelParts,
    resident: Buffer,
    /// Byte of the resident buffer at which each parameter begins.
    starts: Vec<Option<usize>>,
    stream: Option<Stream>,
    /// Experts that are not resident.
    experts: Option<ExpertCache>,
}

/// Memory for weights that are not resident.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct StreamingRoom {
    /// Buffers that streamed units pass through.
    pub(crate) buffers: usize,
    pub(crate) experts: ExpertRoom,
}

impl HeldUnits {
    /// Reads the resident weights, and starts to read the first streamed units. `is_resident` says for each parameter whether it stays in
    /// memory.
    ///
    /// # Errors
    /// If memory runs out or a file cannot be read.
    pub(crate) fn load(
        parts: ModelParts,
        (is_resident, room): (&[bool], StreamingRoom),
        arena: &Arena,
        kernels: &dyn Kernels,
    ) -> Result<Self, EngineError> {
        let layouts = UnitLayout::of_units(&parts, is_resident);
        let units = layouts.len();
        let (resident, streamed): (Vec<_>, Vec<_>) = layouts.into_iter().map(<(_, _)>::from).unzip();
        let mut files = WeightFiles::open(&parts.files, DiskIo::Auto)?;
        let bytes: usize = resident.iter().map(|layout| layout.resident_bytes(&parts)).sum();
        let mut held = Self {
            resident: arena.allocate(aligned_buffer_bytes(bytes), MemoryCategory::Parameters)?,
            starts: vec![None; parts.records.len()],
            parts,
            stream: None,
            experts: None,
        };
        let mut end = 0;
        for layout in &resident {
            held.read(&mut files, layout, end, arena, kernels)?;
            end += layout.resident_bytes(&held.parts);
        }
        // Memory of conversions.
        arena.trim();
        let streamed: Vec<_> =
            streamed.into_iter().enumerate().filter(|(_, layout)| !layout.weights.is_empty()).collect();
        if !streamed.is_empty() {
            held.stream = Some(Stream::new(files, (streamed, units), room.buffers, arena)?);
        }
        let stacks = held.parts.expert_stacks_on_disk(is_resident);
        if !stacks.is_empty() {
            let files = WeightFiles::open(&held.parts.files, DiskIo::Auto)?;
            held.experts = Some(ExpertCache::new(files, stacks, room.experts, arena)?);
        }
        Ok(held)
    }

    /// Reads a resident unit to byte `start` of the buffer.
    fn read(
        &mut self,
        files: &mut WeightFiles,
        layout: &UnitLayout,
        start: usize,
        arena: &Arena,
        kernels: &dyn Kernels,
    ) -> Result<(), EngineError> {
        if layout.is_as_stored(&self.parts) {
            let mut reads = files.start(&layout.extents, &mut self.resident, start, READ_BYTES);
            files.finish(&mut reads)?;
            layout.weights.iter().for_each(|weight| self.starts[weight.id.0] = Some(start + weight.start));
            return Ok(());
        }
        let mut end = start;
        for weight in &layout.weights {
            self.read_converted(files, weight, end, arena, kernels)?;
            self.starts[weight.id.0] = Some(end);
            end += booked_bytes(self.parts.bytes(weight.id) as usize);
        }
        Ok(())
    }

    /// Reads a weight in pieces, and converts them to their form in memory at byte `start` of the buffer.
    fn read_converted(
        &self,
        files: &mut WeightFiles,
        weight: &HeldWeight,
        start: usize,
        arena: &Arena,
        kernels: &dyn Kernels,
    ) -> Result<(), EngineError> {
        let WeightPlace::Stored { file, offset, .. } = self.parts.place(weight.id) else { return Ok(()) };
        let (rows, row_bytes) = self.rows(weight);
        // A piece has whole heads, within which rows change places.
        let head = if let RowOrder::InterleavedHeads { head_dim } = weight.order { head_dim } else { 1 };
        let piece_rows = (PIECE_BYTES / row_bytes).next_multiple_of(head * PIECE_ROWS).clamp(1, rows.max(1));
        let buffer = |bytes: usize| arena.allocate(aligned_buffer_bytes(bytes), MemoryCategory::Workspace);
        let mut piece = buffer(piece_rows * row_bytes + 2 * DISK_ALIGNMENT_BYTES)?;
        let ordered =
            if weight.order == RowOrder::Same { None } else { Some(buffer(piece_rows * row_bytes)?) };
        for first in (0..rows).step_by(piece_rows) {
            let bytes = piece_rows.min(rows - first) * row_bytes;
            let begin = offset + (first * row_bytes) as u64;
            let extent = Extent::of(file, begin..begin + bytes as u64);
            let mut reads = files.start(&[extent], &mut piece, 0, READ_BYTES);
            files.finish(&mut reads)?;
            let mut read = (&piece, (begin - extent.offset) as usize);
            if let Some(ordered) = &ordered {
                let [from, to] = [read, (ordered, 0)].map(|(buffer, at)| buffer.view(DType::U8, at, [bytes]));
                copy_rows(from, weight.order, row_bytes, to);
                read = (ordered, 0);
            }
            self.place(weight, first..first + bytes / row_bytes, read, start, kernels);
        }
        Ok(())
    }

    /// Writes rows of a weight, which lie in a buffer as they are stored, to the resident weight at byte `start`.
    fn place(
        &self,
        weight: &HeldWeight,
        rows: Range<usize>,
        (stored, at): (&Buffer, usize),
        start: usize,
        kernels: &dyn Kernels,
    ) {
        let (columns, row_bytes) = (self.parts.shape(weight.id).as_matrix().1, self.rows(weight).1);
        let shape = [rows.len(), columns];
        let (elements, layout) = (self.parts.elements(weight.id), self.parts.layout(weight.id));
        let bytes_of = |rows: usize| {
            bytes_of(elements, layout, Shape::from([rows, columns]))
                .expect("rows that fit the form of their matrix")
        };
        let start = start + bytes_of(rows.start);
        match (weight.stored, elements, layout) {
            (StoredElements::Dense(from), StoredElements::Dense(to), _) => {
                kernels.cast(stored.view(from, at, shape), self.resident.view(to, start, shape));
            }
            (_, StoredElements::Blocks(format), BlockLayout::Interleaved) => {
                let stored = stored.view(DType::U8, at, [rows.len() * row_bytes]);
                let target = self.resident.view(DType::U8, start, [bytes_of(rows.len())]);
                let target = BlockMatrix::with_layout(format, layout, target, shape);
                kernels.interleave_blocks(BlockMatrix::new(format, stored, shape), target);
            }
            _ => {
                let bytes = [rows.len() * row_bytes];
                let target = self.resident.view(DType::U8, start, bytes);
                copy_rows(stored.view(DType::U8, at, bytes), RowOrder::Same, row_bytes, target);
            }
        }
    }

    /// Returns the number of rows of a weight, and the bytes of each in its file.
    fn rows(&self, weight: &HeldWeight) -> (usize, usize) {
        let rows = self.parts.shape(weight.id).as_matrix().0;
        (rows, (self.parts.bytes_in(weight.id, weight.stored) as usize / rows.max(1)).max(1))
    }

    /// Waits for the weights of a unit.
    ///
    /// # Errors
    /// If a read fails, or the disk does not answer; for experts, at the begin of the unit after.
    pub(crate) fn begin(&mut self, kernels: &dyn Kernels, unit: usize) -> Result<(), EngineError> {
        self.experts.as_ref().map_or(Ok(()), ExpertCache::begin)?;
        match &mut self.stream {
            Some(stream) => stream.begin(kernels, &self.parts, unit),
            None => Ok(()),
        }
    }

    /// Returns the traffic of the disk since the last call.
    pub(crate) fn take_traffic(&mut self) -> DiskTraffic {
        let of_units = self.stream.as_mut().map(Stream::take_traffic).unwrap_or_default();
        of_units + self.experts.as_ref().map(ExpertCache::take_traffic).unwrap_or_default()
    }
}

impl HeldWeights for HeldUnits {
    fn streamed_experts(&self, stack: ParameterId) -> Option<StreamedExperts<'_>> {
        let source = self.experts.as_ref().filter(|experts| experts.has(stack))?;
        Some(StreamedExperts { source, stack })
    }

    fn matrix(&self, id: ParameterId) -> Option<Matrix<'_>> {
        let owner = self.parts.owner(id);
        let shape = Shape::from(self.parts.records[id.0].shape.as_slice());
        let streamed = self.stream.as_ref().and_then(|stream| stream.matrix(&self.parts, owner, shape));
        streamed.or_else(|| {
            let start = self.starts[owner.0]?;
            let form = (self.parts.elements(owner), self.parts.layout(owner));
            matrix_of(form, shape, |dtype, shape| Some(self.resident.view(dtype, start, shape)))
        })
    }
}
