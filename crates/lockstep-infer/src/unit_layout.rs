//! The layout of a unit's weights in one buffer: extents of files, read in whole blocks of the disk, and places of weights in
//! them.
//!
//! Tensors that lie next to each other in a file are one extent. Weights of another type than the model's are converted after
//! the read, into a second buffer.
//!
//! ```text
//! file     ... | q | k | v | o | norm | ...          buffer    [ q | k | v | o | norm ]   blocks of 4096 bytes
//! ```

use lockstep_plan::{DISK_ALIGNMENT_BYTES, DType, ParameterId, booked_bytes};

use crate::device_map::{ModelParts, WeightPlace};

/// Bytes between two tensors that are read along with them rather than in two reads.
const LONGEST_GAP_BYTES: u64 = 64 << 10;

/// Range of a file, and its place in the buffer. All are multiples of the block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) file: usize,
    pub(crate) offset: u64,
    pub(crate) bytes: usize,
    /// Byte of the buffer at which the extent begins.
    pub(crate) start: usize,
}

/// Place of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HeldWeight {
    pub(crate) id: ParameterId,
    /// Type in the file.
    pub(crate) stored: DType,
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
        let mut stored: Vec<(usize, u64, DType, ParameterId)> = ids
            .into_iter()
            .filter_map(|id| match parts.place(id) {
                WeightPlace::Stored { file, offset, dtype } => Some((file, offset, dtype, parts.owner(id))),
                WeightPlace::Made => None,
            })
            .collect();
        stored.sort_unstable_by_key(|&(file, offset, ..)| (file, offset));
        stored.dedup();
        let block = DISK_ALIGNMENT_BYTES as u64;
        let mut layout = Self::default();
        for (file, offset, dtype, id) in stored {
            let first = offset / block * block;
            let end = (offset + parts.bytes_in(id, dtype)).next_multiple_of(block);
            match layout.extents.last_mut() {
                Some(last)
                    if last.file == file && first <= last.offset + last.bytes as u64 + LONGEST_GAP_BYTES =>
                {
                    last.bytes = last.bytes.max((end - last.offset) as usize);
                }
                _ => {
                    let start = layout.extents.last().map_or(0, |last| last.start + last.bytes);
                    let bytes = (end - first) as usize;
                    layout.extents.push(Extent { file, offset: first, bytes, start });
                }
            }
            let extent = layout.extents[layout.extents.len() - 1];
            let is_converted = dtype != parts.dtype();
            let converted = is_converted.then_some(layout.converted_bytes);
            if is_converted {
                layout.converted_bytes += booked_bytes(parts.bytes(id) as usize);
            }
            let start = extent.start + (offset - extent.offset) as usize;
            layout.weights.push(HeldWeight { id, stored: dtype, start, converted });
        }
        layout.bytes = layout.extents.last().map_or(0, |last| last.start + last.bytes);
        layout
    }

    /// Returns the layouts of the resident and of the streamed weights of each unit. A tied table is resident in the unit that owns
    /// it, and streamed in the unit that reads all of it.
    pub(crate) fn of_units(parts: &ModelParts, resident: &[bool]) -> Vec<[Self; 2]> {
        let is_resident = |id: ParameterId| resident[parts.owner(id).0];
        let layouts = |(unit, ids): (usize, &Vec<ParameterId>)| {
            let owned = ids.iter().copied().filter(|&id| is_resident(id) && parts.owner(id) == id);
            let streamed = ids.iter().copied().filter(|&id| unit > 0 && !is_resident(id));
            [Self::new(parts, owned), Self::new(parts, streamed)]
        };
        parts.units.iter().enumerate().map(layouts).collect()
    }

    /// Returns the bytes of the weights in a resident buffer: as they are stored, or each in the model's type.
    pub(crate) fn resident_bytes(&self, parts: &ModelParts) -> usize {
        if self.is_as_stored() {
            return self.bytes;
        }
        let bytes: usize =
            self.weights.iter().map(|weight| booked_bytes(parts.bytes(weight.id) as usize)).sum();
        bytes.next_multiple_of(DISK_ALIGNMENT_BYTES)
    }

    /// Returns true if every weight has the model's type.
    pub(crate) fn is_as_stored(&self) -> bool {
        self.converted_bytes == 0
    }
}
