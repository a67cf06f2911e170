//! Weights under a memory limit: resident units in one buffer, and the others streamed from disk.
//!
//! Resident weights are read into memory past the page cache rather than mapped: a pass over streamed weights would drop
//! mapped pages, and read them again from disk in every pass.

use lockstep_engine::{EngineError, HeldWeights};
use lockstep_plan::{MemoryCategory, ParameterId, aligned_buffer_bytes, booked_bytes};
use lockstep_tensor::{Arena, Buffer, DiskIo, DiskTraffic, Kernels, View};

use crate::{
    device_map::ModelParts,
    stream::{Stream, WeightFiles},
    unit_layout::UnitLayout,
};

/// Resident and streamed weights.
#[derive(Debug)]
pub(crate) struct HeldUnits {
    parts: ModelParts,
    resident: Buffer,
    /// Byte of the resident buffer at which each parameter begins.
    starts: Vec<Option<usize>>,
    stream: Option<Stream>,
}

impl HeldUnits {
    /// Reads the resident weights, and starts to read the first streamed units. Each unit has the layouts of its resident and of
    /// its streamed weights.
    ///
    /// # Errors
    /// If memory runs out or a file cannot be read.
    pub(crate) fn load(
        parts: ModelParts,
        layouts: Vec<[UnitLayout; 2]>,
        buffers: usize,
        arena: &Arena,
        kernels: &dyn Kernels,
    ) -> Result<Self, EngineError> {
        let units = layouts.len();
        let (resident, streamed): (Vec<_>, Vec<_>) = layouts.into_iter().map(<(_, _)>::from).unzip();
        let mut files = WeightFiles::open(&parts.files, DiskIo::Auto)?;
        let bytes: usize = resident.iter().map(|layout| layout.resident_bytes(&parts)).sum();
        let mut held = Self {
            resident: arena.allocate(aligned_buffer_bytes(bytes), MemoryCategory::Parameters)?,
            starts: vec![None; parts.records.len()],
            parts,
            stream: None,
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
            held.stream = Some(Stream::new(files, (streamed, units), buffers, arena)?);
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
        const READ_BYTES: usize = 8 << 20;
        if layout.is_as_stored() {
            let mut reads = files.start(layout, &mut self.resident, start, READ_BYTES);
            files.finish(&mut reads)?;
            layout.weights.iter().for_each(|weight| self.starts[weight.id.0] = Some(start + weight.start));
            return Ok(());
        }
        let mut stored = arena.allocate(aligned_buffer_bytes(layout.bytes), MemoryCategory::Workspace)?;
        let mut reads = files.start(layout, &mut stored, 0, READ_BYTES);
        files.finish(&mut reads)?;
        let mut end = start;
        for weight in &layout.weights {
            let elements = self.parts.records[weight.id.0].elements();
            let into = self.resident.view(self.parts.dtype(), end, [elements]);
            kernels.cast(stored.view(weight.stored, weight.start, [elements]), into);
            self.starts[weight.id.0] = Some(end);
            end += booked_bytes(self.parts.bytes(weight.id) as usize);
        }
        Ok(())
    }

    /// Waits for the weights of a unit.
    ///
    /// # Errors
    /// If a read fails, or the disk does not answer.
    pub(crate) fn begin(&mut self, kernels: &dyn Kernels, unit: usize) -> Result<(), EngineError> {
        match &mut self.stream {
            Some(stream) => stream.begin(kernels, &self.parts, unit),
            None => Ok(()),
        }
    }

    /// Returns the traffic of the disk since the last call.
    pub(crate) fn take_traffic(&mut self) -> DiskTraffic {
        self.stream.as_mut().map(Stream::take_traffic).unwrap_or_default()
    }
}

impl HeldWeights for HeldUnits {
    fn view(&self, id: ParameterId) -> Option<View<'_>> {
        let owner = self.parts.owner(id);
        let shape = self.parts.records[id.0].shape.as_slice();
        let resident = || Some(self.resident.view(self.parts.dtype(), self.starts[owner.0]?, shape));
        let streamed = self.stream.as_ref().and_then(|stream| stream.view(&self.parts, owner));
        streamed.map(|view| view.reshape(shape)).or_else(resident)
    }
}
