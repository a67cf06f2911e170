//! Offloaded activations: the frames of units that go to disk between their forward and their backward, and how many are in memory at a time.

use super::windows::{DISK_ALIGNMENT_BYTES, aligned_buffer_bytes};
use super::{ModelProfile, StageMemory};

/// Frames in memory: that of the unit at work, the one that ends in its input, and one on its way.
pub const FRAME_PLACES: usize = 3;

impl ModelProfile {
    /// Bytes of the file that the frame of a unit of `stage` takes, where frames are on disk. None of one that stays in memory: the head's,
    /// which is read again at once, and one that holds nothing.
    ///
    /// What a stage hands on is not in the frame of its last unit there, for it stays in memory until it has been sent.
    pub fn frame_on_disk_bytes(&self, stage: &StageMemory, unit: usize) -> Option<usize> {
        let of_unit = &self.units[unit];
        let is_last = unit + 1 == stage.units.end;
        let bytes = if is_last { of_unit.saved_bytes } else { of_unit.frame_bytes };
        let is_head = unit + 1 == self.units.len();
        (bytes > 0 && !is_head).then(|| bytes.next_multiple_of(DISK_ALIGNMENT_BYTES))
    }

    /// Bytes of the frame of a unit of `stage` in memory; none of one on disk.
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

    /// How many frames of these stages are in memory at a time where they are on disk, and the bytes of each.
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
