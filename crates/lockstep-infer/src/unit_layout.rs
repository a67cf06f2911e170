//! The layout of a unit's weights in one buffer: extents of files, read in whole blocks of the disk, and places of weights in
//! them.
//!
//! Tensors that lie next to each other in a file are one extent. Numbers of another type than the model's, and rows in another order,
//! are converted after the read, into a second buffer. Quantized blocks are used as they are read, row by row.
//!
//! ```text
//! file     ... | q | k | v | o | norm | ...          buffer    [ q | k | v | o | norm ]   blocks of 4096 bytes
//! ```

use std::collections::HashSet;

use lockstep_checkpoint::{RowOrder, gguf::StoredElements};
use lockstep_plan::{DISK_ALIGNMENT_BYTES, ParameterId, booked_bytes};
use lockstep_tensor::BlockLayout;

use crate::{
    device_map::{ModelParts, WeightPlace},
    extent::Extent,
};

/// Bytes between two tensors that are read along with them rather than in two reads.
const LONGEST_GAP_BYTES: u64 = 64 << 10;

/// Place of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HeldWeight {
    pub(crate) id: ParameterId,
    /// Elements in the file.
    pub(crate) stored: StoredElements,
    /// Order of the rows in the file.
    pub(crate) order: RowOrder,
    /// Byte of the buffer at which the elements begin.
    pub(crate) start: usize,
    /// Byte of the buffer for conversions at which the converted elements begin, if they are converted.
    pub(crate) converted: Option<usize>,
}

/// Layout of the weights of a unit that are read from files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct UnitLayout {
    pub(crate) extents: Vec<Extent>,
    pub(crate) weights: Vec<HeldWeight>,
    /// Bytes of the buffer.
    pub(crate) bytes: usize,
    /// Bytes of the buffer for conversions.
    pub(crate) converted_bytes: usize,
}

impl UnitLayout {
    /// Lays out those of the parameters that are stored in a file.
    pub(crate) fn new(parts: &ModelParts, ids: impl IntoIterator<Item = ParameterId>) -> Self {
        let mut weights: Vec<(usize, u64, (StoredElements, RowOrder), ParameterId)> = ids
            .into_iter()
            .filter_map(|id| match parts.place(id) {
                WeightPlace::Stored { file, offset, stored, order } => {
                    Some((file, offset, (stored, order), parts.owner(id)))
                }
                WeightPlace::OneByOne | WeightPlace::Made => None,
            })
            .collect();
        weights.sort_unstable_by_key(|&(file, offset, ..)| (file, offset));
        weights.dedup();
        let mut layout = Self::default();
        for (file, offset, (stored, order), id) in weights {
            let Extent { offset: first, bytes, .. } =
                Extent::of(file, offset..offset + parts.bytes_in(id, stored));
            let end = first + bytes as u64;
            match layout.extents.last_mut() {
                Some(last)
                    if last.file == file && first <= last.offset + last.bytes as u64 + LONGEST_GAP_BYTES =>
                {
                    last.bytes = last.bytes.max((end - last.offset) as usize);
                }
                _ => {
                    let start = layout.extents.last().map_or(0, |last| last.start + last.bytes);
                    layout.extents.push(Extent { file, offset: first, bytes, start });
                }
            }
            let extent = layout.extents[layout.extents.len() - 1];
            let elements = parts.elements(id);
            let is_converted = (stored, order) != (elements, RowOrder::Same);
            let converted = is_converted.then_some(layout.converted_bytes);
            if is_converted {
                layout.converted_bytes += booked_bytes(parts.bytes_in(id, elements) as usize);
            }
            let start = extent.start + (offset - extent.offset) as usize;
            layout.weights.push(HeldWeight { id, stored, order, start, converted });
        }
        layout.bytes = layout.extents.last().map_or(0, |last| last.start + last.bytes);
        layout
    }

    /// Returns the layouts of the resident and of the streamed weights of each unit. A tied table is resident in the unit that owns
    /// it, and streamed in the unit that reads all of it. Matrices of experts are not streamed with their units.
    pub(crate) fn of_units(parts: &ModelParts, resident: &[bool]) -> Vec<[Self; 2]> {
        let is_resident = |id: ParameterId| resident[parts.owner(id).0];
        let stacks: HashSet<ParameterId> = parts.expert_stacks().iter().map(|stack| stack.id).collect();
        let layouts = |(unit, ids): (usize, &Vec<ParameterId>)| {
            let owned = ids.iter().copied().filter(|&id| is_resident(id) && parts.owner(id) == id);
            let streamed =
                ids.iter().copied().filter(|&id| unit > 0 && !is_resident(id) && !stacks.contains(&id));
            [Self::new(parts, owned), Self::new(parts, streamed)]
        };
        parts.units.iter().enumerate().map(layouts).collect()
    }

    /// Returns the bytes of the weights in a resident buffer: as they are stored, or each in its form in memory.
    pub(crate) fn resident_bytes(&self, parts: &ModelParts) -> usize {
        if self.is_as_stored(parts) {
            return self.bytes;
        }
        let bytes: usize =
            self.weights.iter().map(|weight| booked_bytes(parts.bytes(weight.id) as usize)).sum();
        bytes.next_multiple_of(DISK_ALIGNMENT_BYTES)
    }

    /// Returns true if every weight is stored in its form in memory.
    pub(crate) fn is_as_stored(&self, parts: &ModelParts) -> bool {
        let is_row_by_row = |weight: &HeldWeight| parts.layout(weight.id) == BlockLayout::Rows;
        self.converted_bytes == 0 && self.weights.iter().all(is_row_by_row)
    }
}
