//! Kernels of block-quantized matrices: rows by token id, decoded. Products are in `gemm`.

use lockstep_plan::DType;

use super::{
    CpuQueue, gemm,
    operands::{Operand, check_disjoint, expect},
    simd::{Float, inlined, with_float},
};
use crate::{BlockGemm, BlockKernels, BlockMatrix, View};

impl BlockKernels for CpuQueue {
    fn block_gemm(&self, gemm: BlockGemm<'_>) {
        gemm::block_gemm(self, gemm);
    }

    fn interleave_blocks(&self, from: BlockMatrix<'_>, to: BlockMatrix<'_>) {
        gemm::interleave(self, from, to);
    }

    fn block_embedding(&self, ids: View<'_>, table: BlockMatrix<'_>, first_id: u32, out: View<'_>) {
        let ([rows, width], tokens) = (table.shape(), ids.elements());
        expect("block_embedding: ids", ids, DType::U32, tokens);
        expect("block_embedding: out", out, out.dtype(), tokens * width);
        check_disjoint(&[out], &[ids, table.bytes()]);
        // SAFETY: the ids and the table overlap no output, and kernels write only their outputs.
        let (ids, lines) = unsafe { (ids.slice::<u32>(), gemm::BlockLines::new(&table)) };
        with_float!(out.dtype(), T => {
            let out = Operand::<T>::new(out);
            self.for_each_row(tokens, width, inlined!(|token, _| {
                // SAFETY: each row of `out` belongs to one task.
                let out = unsafe { out.write(token * width..(token + 1) * width) };
                // An id before the first one wraps around to a row beyond the last.
                match ids[token].wrapping_sub(first_id) as usize {
                    row if row < rows => lines.decode_whole(self.level, row, out),
                    _ => out.fill(T::store(0.0)),
                }
            }));
        });
    }
}
