//! Copies, and work cut into parts for the compute threads.

use std::ops::Range;

use lockstep_tensor::{CpuLevel, Workers};

/// Bytes that make it worth to wake a compute thread.
const BYTES_PER_TASK: usize = 128 << 10;
/// Bytes that are copied at a time: some vectors.
const BLOCK_BYTES: usize = 256;

/// Copies bytes, on several threads if they are many.
///
/// Not by the C library: where source and target lie at about the same place in their pages, as staged data does, its choice
/// of `rep movsb` is up to ten times slower on Zen 3 and 4.
///
/// # Safety
/// Both ranges are valid, do not overlap, and nobody else writes them or reads the target.
pub(crate) unsafe fn copy(workers: Option<&Workers>, from: *const u8, to: *mut u8, bytes: usize) {
    let (from, to) = (from as usize, to as usize);
    in_parts(workers, bytes, 1, |range| {
        let (from, to) = ((from + range.start) as *const u8, (to + range.start) as *mut u8);
        CpuLevel::run_at_best(
            #[inline(always)]
            // SAFETY: parts do not overlap; the rest is the caller's promise.
            || unsafe { copy_blocks(from, to, range.len()) },
        );
    });
}

/// # Safety
/// As for [`copy`].
#[inline(always)]
unsafe fn copy_blocks(from: *const u8, to: *mut u8, bytes: usize) {
    type Block = [u64; BLOCK_BYTES / size_of::<u64>()];
    let whole = bytes / BLOCK_BYTES;
    for block in 0..whole {
        // SAFETY: the block lies in both ranges.
        unsafe {
            to.cast::<Block>().add(block).write_unaligned(from.cast::<Block>().add(block).read_unaligned())
        };
    }
    let done = whole * BLOCK_BYTES;
    // SAFETY: the rest lies in both ranges.
    unsafe { std::ptr::copy_nonoverlapping(from.add(done), to.add(done), bytes - done) };
}

/// Calls `work` with parts of `0..elements` that cover it, on the compute threads if that is worth it.
pub(crate) fn in_parts(
    workers: Option<&Workers>,
    elements: usize,
    bytes_each: usize,
    work: impl Fn(Range<usize>) + Sync,
) {
    let part = BYTES_PER_TASK / bytes_each;
    match workers {
        Some(workers) if workers.threads() > 1 && elements > part => {
            workers.run(elements.div_ceil(part), |task| work(task * part..elements.min((task + 1) * part)));
        }
        _ => work(0..elements),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_copied_and_no_other_is_touched() {
        for bytes in [0, 1, 255, 256, 257, 1000, 300_000] {
            let source: Vec<u8> = (0..bytes).map(|i| (i % 251) as u8).collect();
            let mut target = vec![7; bytes + 2];
            // SAFETY: the target has room, a byte off.
            unsafe { copy(None, source.as_ptr(), target[1..].as_mut_ptr(), bytes) };
            assert_eq!(target[1..=bytes], source);
            assert_eq!((target[0], target[bytes + 1]), (7, 7));
        }
    }
}
