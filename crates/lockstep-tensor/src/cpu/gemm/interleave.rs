//! Interleaving of quantized rows: 16 at a time, word by word, as products of few rows read them best.

use lockstep_plan::{block_format::BlockCodec, with_block_codec};

use super::{
    block_lines::{BlockLines, CHUNK, WordBuffer},
    dispatch::with_integer_lanes,
    integer_lanes::IntegerLanes,
    store::Window,
    transpose::SIDE,
    word_lanes::WordLanes,
};
use crate::{
    BlockLayout, BlockMatrix, CpuQueue,
    cpu::{operands::check_disjoint, simd::inlined},
    kernels::interleaved_bytes,
};

/// Writes a matrix of rows with its rows interleaved.
pub(in crate::cpu) fn interleave(queue: &CpuQueue, from: BlockMatrix<'_>, to: BlockMatrix<'_>) {
    assert!(
        from.layout() == BlockLayout::Rows
            && to.layout() == BlockLayout::Interleaved
            && (from.format(), from.shape()) == (to.format(), to.shape()),
        "rows to interleave: {from:?} to {to:?}"
    );
    check_disjoint(&[to.bytes()], &[from.bytes()]);
    let [rows, columns] = from.shape();
    let panel_bytes = interleaved_bytes(to.format(), columns);
    // SAFETY: the matrices do not overlap, and kernels write only their outputs.
    let (lines, target) = unsafe { (BlockLines::new(&from), to.bytes().slice_mut::<u8>()) };
    let target = Window::new(target.as_mut_ptr(), panel_bytes);
    with_integer_lanes!(queue.level, V => {
        queue.pool.run(rows / SIDE, |panel| {
            // SAFETY: each panel belongs to one task, and the CPU has the level's instructions.
            unsafe { write_panel::<V>(&lines, panel, target.row(panel, panel_bytes)) };
        });
    });
}

/// Writes 16 lines.
///
/// # Safety
/// The CPU must have the instructions of `V`.
#[inline(never)]
unsafe fn write_panel<V: IntegerLanes>(lines: &BlockLines<'_>, panel: usize, target: &mut [u8]) {
    let first = panel * SIDE;
    // A function for each format, as in `pack_codes`.
    with_block_codec!(lines.format, Codec => {
        // SAFETY: the caller's promise, here and below.
        unsafe {
            V::compiled(inlined!(|| {
                let blocks = lines.columns / Codec::ELEMENTS;
                let (words, halves) = target.split_at_mut(blocks * Codec::WORDS.count * 4 * SIDE);
                let mut words = words.as_chunks_mut().0.iter_mut();
                let mut halves = halves.chunks_exact_mut(2 * SIDE);
                let mut buffer = WordBuffer::ZEROS;
                for start in (0..lines.columns).step_by(CHUNK) {
                    let chunk = lines.rows_chunk(first..first + SIDE, start);
                    lines.fetch_after(&chunk, start);
                    for block in 0..chunk.bytes / Codec::BYTES {
                        let all = buffer.transpose::<V::Words, Codec>(&chunk, block);
                        let (stored, extra) = all.split_at(Codec::WORDS.count);
                        for (word, target) in stored.iter().zip(&mut words) {
                            word.store_bytes(target);
                        }
                        for (word, target) in extra.iter().zip(&mut halves) {
                            let mut whole = [0; SIDE];
                            word.store(&mut whole);
                            for (target, whole) in target.chunks_exact_mut(2).zip(whole) {
                                target.copy_from_slice(&(whole as u16).to_le_bytes());
                            }
                        }
                    }
                }
            }));
        }
    });
}
