//! A range of a file in whole blocks of the disk, which direct reads need.

use std::ops::Range;

use lockstep_plan::DISK_ALIGNMENT_BYTES;

/// Range of a file, and its place in the buffer. All are multiples of the block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) file: usize,
    pub(crate) offset: u64,
    pub(crate) bytes: usize,
    /// Byte of the buffer at which the extent begins.
    pub(crate) start: usize,
}

impl Extent {
    /// Returns the blocks of the disk that hold a range of a file, at the begin of a buffer.
    pub(crate) fn of(file: usize, range: Range<u64>) -> Self {
        let block = DISK_ALIGNMENT_BYTES as u64;
        let offset = range.start / block * block;
        let bytes = (range.end.next_multiple_of(block) - offset) as usize;
        Self { file, offset, bytes, start: 0 }
    }
}
