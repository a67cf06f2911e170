//! Activation offload to disk: the frames that are offloaded, and the number of them in memory at a time.

use super::windows::{DISK_ALIGNMENT_BYTES, aligned_buffer_bytes};
use super::{ModelProfile, StageMemory};

/// Frame buffers in memory: one for the unit that runs, one for the frame that ends in its input, and one for a transfer.
pub const FRAME_PLACES: usize = 3;

impl ModelProfile {
    /// Returns the bytes of a unit's frame in the offload file, if frames are offloaded. `None` if the frame stays in memory: that of the
    /// head, which is read again at once, or an empty one.
    ///
    /// A stage's output is not in its last unit's frame on disk. It stays in memory until it has been sent.
    pub fn frame_on_disk_bytes(&self, stage: &StageMemory, unit: usize) -> Option<usize> {
        let of_unit = &self.units[unit];
        let is_last = unit + 1 == stage.units.end;
        let bytes = if is_last { of_unit.saved_bytes } else { of_unit.frame_bytes };
        let is_head = unit + 1 == self.units.len();
        (bytes > 0 && !is_head).then(|| bytes.next_multiple_of(DISK_ALIGNMENT_BYTES))
    }

    /// Returns the bytes of a unit's frame in memory; `None` if it is on disk.
    pub fn frame_in_memory_bytes(
        &self,
        stage: &StageMemory,
        unit: usize,
        are_on_disk: bool,
    ) -> Option<usize> {
        let is_head = unit + 1 == self.units.len();
        match self.frame_on_disk_bytes(stage, unit).filter(|_| are_on_disk) {
            Some(_) => None,
            None if are_on_disk && !is_head => Some(0),
            None => Some(self.units[unit].frame_bytes),
        }
    }

    /// Returns the number of frame buffers in memory if frames of `stages` are on disk, and the bytes of each.
    pub fn frame_places(&self, stages: &[StageMemory]) -> (usize, usize) {
        let (mut frames, mut longest) = (0, 0);
        for stage in stages {
            for bytes in stage.units.clone().filter_map(|unit| self.frame_on_disk_bytes(stage, unit)) {
                frames += stage.slots;
                longest = bytes.max(longest);
            }
        }
        (frames.min(FRAME_PLACES), aligned_buffer_bytes(longest))
    }
}
