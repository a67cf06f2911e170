//! Memory copies, and the split of work into tasks for the compute threads.

use std::ops::Range;

use lockstep_tensor::{CpuLevel, Workers};

/// Minimum number of bytes for which it pays to wake a compute thread.
const BYTES_PER_TASK: usize = 128 << 10;
/// Minimum number of bytes for non-temporal stores, where the caller asks for them.
const STREAM_BYTES: usize = 1 << 20;
/// Number of bytes copied per iteration: a few vectors.
const BLOCK_BYTES: usize = 256;

/// Copies bytes, on several threads if there are many.
///
/// It avoids `memcpy` of the C library. If source and target have nearly the same offset in their pages, as staged data does,
/// its choice of `rep movsb` is up to ten times slower on Zen 3 and 4.
///
/// # Safety
/// Both ranges are valid and do not overlap. Meanwhile no other code writes to them or reads the target.
pub(crate) unsafe fn copy(workers: Option<&Workers>, from: *const u8, to: *mut u8, bytes: usize) {
    let (from, to) = (from as usize, to as usize);
    in_parts(workers, bytes, 1, |range| {
        let (from, to) = ((from + range.start) as *const u8, (to + range.start) as *mut u8);
        CpuLevel::run_at_best(
            #[inline(always)]
            // SAFETY: parts do not overlap; the caller guarantees the rest.
            || unsafe { copy_blocks(from, to, range.len()) },
        );
    });
}

/// Copies bytes that are not read again soon. Large copies use non-temporal stores, which bypass the cache and avoid reading
/// the cache lines that they overwrite.
///
/// # Safety
/// As for [`copy`].
pub(crate) unsafe fn copy_past_cache(workers: Option<&Workers>, from: *const u8, to: *mut u8, bytes: usize) {
    if bytes < STREAM_BYTES {
        // SAFETY: the caller upholds the contract of `copy`.
        return unsafe { copy(workers, from, to, bytes) };
    }
    let (from, to) = (from as usize, to as usize);
    in_parts(workers, bytes, 1, |range| {
        let (from, to) = ((from + range.start) as *const u8, (to + range.start) as *mut u8);
        // SAFETY: parts do not overlap; the caller guarantees the rest.
        unsafe { stream(from, to, range.len()) };
    });
}

/// # Safety
/// As for [`copy`].
#[cfg(target_arch = "x86_64")]
unsafe fn stream(from: *const u8, to: *mut u8, bytes: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    const LINE: usize = 64;
    let head = to.align_offset(LINE).min(bytes);
    let lines = (bytes - head) / LINE;
    // SAFETY: all accesses are within both ranges; from `head` on the target is aligned to cache lines. The fence orders these
    // stores before the store that announces them. SSE2 is part of the architecture.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, head);
        for line in 0..lines {
            let at = head + line * LINE;
            let (from, to) = (from.add(at).cast::<__m128i>(), to.add(at).cast::<__m128i>());
            let parts = [0, 1, 2, 3].map(|part| _mm_loadu_si128(from.add(part)));
            for (part, value) in parts.into_iter().enumerate() {
                _mm_stream_si128(to.add(part), value);
            }
        }
        _mm_sfence();
        let done = head + lines * LINE;
        std::ptr::copy_nonoverlapping(from.add(done), to.add(done), bytes - done);
    }
}

/// # Safety
/// As for [`copy`].
#[cfg(not(target_arch = "x86_64"))]
unsafe fn stream(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller upholds the contract of `copy`.
    unsafe { copy_blocks(from, to, bytes) };
}

/// # Safety
/// As for [`copy`].
#[inline(always)]
unsafe fn copy_blocks(from: *const u8, to: *mut u8, bytes: usize) {
    type Block = [u64; BLOCK_BYTES / size_of::<u64>()];
    let whole = bytes / BLOCK_BYTES;
    for block in 0..whole {
        // SAFETY: the block is within both ranges.
        unsafe {
            to.cast::<Block>().add(block).write_unaligned(from.cast::<Block>().add(block).read_unaligned())
        };
    }
    let done = whole * BLOCK_BYTES;
    // SAFETY: the rest is within both ranges.
    unsafe { std::ptr::copy_nonoverlapping(from.add(done), to.add(done), bytes - done) };
}

/// Calls `work` with ranges that cover `0..elements`, on the compute threads if that pays.
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
        for bytes in [0, 1, 255, 256, 257, 1000, 300_000, STREAM_BYTES, STREAM_BYTES + 77] {
            let source: Vec<u8> = (0..bytes).map(|i| (i % 251) as u8).collect();
            let mut target = vec![7; bytes + 2];
            // SAFETY: the target has one byte more than is copied to it.
            unsafe { copy(None, source.as_ptr(), target[1..].as_mut_ptr(), bytes) };
            assert_eq!(target[1..=bytes], source);
            target[1..=bytes].fill(0);
            // SAFETY: as above.
            unsafe { copy_past_cache(None, source.as_ptr(), target[1..].as_mut_ptr(), bytes) };
            assert_eq!(target[1..=bytes], source);
            assert_eq!((target[0], target[bytes + 1]), (7, 7));
        }
    }
}
