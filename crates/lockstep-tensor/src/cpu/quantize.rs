//! Block quantization of floats for communication (ZeRO++: Wang et al., 2023, sections 3.1 and 3.3).
//!
//! A view consists of blocks of [`QUANTIZATION_BLOCK`] elements. A block becomes a
//! record: its scale, `largest |x| / limit` in f32, and a code for each element, the whole number nearest to
//! `x / scale`. Records are contiguous, so a shard of whole blocks is a shard of whole records.
//!
//! ```text
//! int8  [scale | 256 codes of a byte, -127 to 127]                           260 bytes
//! int4  [scale | 128 bytes: codes i and 128 + i, -7 to 7 with 8 added]       132 bytes
//! ```
//!
//! In int4, elements `i` and `128 + i` share a byte, not neighbours: so packing is a loop over two slices that
//! vectorizes.

use lockstep_plan::{DType, QUANTIZATION_BLOCK, QuantizedType};

use super::{
    CpuQueue,
    operands::{Operand, check_disjoint, expect},
    simd::{BLOCK, Block, Float, ROUND, add_to, inlined, with_float},
    tasks::elements_per_task,
};
use crate::{QuantizationKernels, View};

const _: () = assert!(QUANTIZATION_BLOCK == BLOCK, "a block fits what kernels work on at a time");

const SCALE_BYTES: usize = size_of::<f32>();
const HALF: usize = BLOCK / 2;
/// Added to codes of four bits, which makes them 1 to 15.
const INT4_ZERO: u8 = 8;
/// Larger magnitudes are clamped to this one, so that the largest code times its scale is finite.
const LARGEST: f32 = f32::MAX * 0.999_999;

/// Returns the scale of a block, from the bits of its largest magnitude; NaN if any element is not finite.
#[inline(always)]
fn scale_of(kind: QuantizedType, largest_bits: u32) -> f32 {
    let scale = f32::from_bits(largest_bits).min(LARGEST) / kind.limit();
    // Blocks so small that their scale would lose bits are treated as zeros.
    let scale = if scale < f32::MIN_POSITIVE { 0.0 } else { scale };
    if largest_bits >= 0x7f80_0000 { f32::NAN } else { scale }
}

/// Writes the record of one block, and replaces `x` by its quantization error; by zeros if the block is not finite.
#[inline(always)]
fn encode(kind: QuantizedType, x: &mut [f32; BLOCK], record: &mut [u8]) {
    // Positive floats are ordered like their bits, and a maximum of integers vectorizes.
    let largest = x.iter().fold(0, |largest, x| largest.max(x.to_bits() & 0x7fff_ffff));
    let scale = scale_of(kind, largest);
    let (head, codes) = record.split_at_mut(SCALE_BYTES);
    head.copy_from_slice(&scale.to_le_bytes());
    let (is_finite, limit) = (!scale.is_nan(), kind.limit());
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    let mut shifted = [0.0; BLOCK];
    for (shifted, x) in shifted.iter_mut().zip(&mut *x) {
        *x = if is_finite { *x } else { 0.0 };
        // If the inverse is rounded up, the largest element lies just above the limit.
        *shifted = (*x * inverse).clamp(-limit, limit) + ROUND;
    }
    let code = |shifted: &f32| shifted.to_bits() as u8;
    match kind {
        QuantizedType::Int8 => codes.iter_mut().zip(&shifted).for_each(|(to, shifted)| *to = code(shifted)),
        QuantizedType::Int4 => {
            let (low, high) = shifted.split_at(HALF);
            for ((to, low), high) in codes.iter_mut().zip(low).zip(high) {
                let with_zero = |shifted| code(shifted).wrapping_add(INT4_ZERO) & 15;
                *to = with_zero(low) | with_zero(high) << 4;
            }
        }
    }
    let scale = if is_finite { scale } else { 0.0 };
    for (x, shifted) in x.iter_mut().zip(&shifted) {
        *x -= (shifted - ROUND) * scale;
    }
}

/// Writes the elements of a record to `x`.
#[inline(always)]
fn decode(kind: QuantizedType, record: &[u8], x: &mut [f32; BLOCK]) {
    let (scale, codes) = record.split_at(SCALE_BYTES);
    let scale = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
    match kind {
        QuantizedType::Int8 => {
            for (x, code) in x.iter_mut().zip(codes) {
                *x = f32::from(code.cast_signed()) * scale;
            }
        }
        QuantizedType::Int4 => {
            let (low, high) = x.split_at_mut(HALF);
            for ((low, high), code) in low.iter_mut().zip(high).zip(codes) {
                *low = (f32::from(code & 15) - f32::from(INT4_ZERO)) * scale;
                *high = (f32::from(code >> 4) - f32::from(INT4_ZERO)) * scale;
            }
        }
    }
}

impl QuantizationKernels for CpuQueue {
    fn quantize(&self, kind: QuantizedType, x: View<'_>, residual: Option<View<'_>>, records: View<'_>) {
        let elements = x.elements();
        expect("quantize: records", records, DType::U8, kind.bytes(elements));
        check_disjoint(&[records], &[x]);
        if let Some(residual) = residual {
            expect("quantize: residual", residual, residual.dtype(), elements);
            check_disjoint(&[records, residual], &[x]);
            with_float!(residual.dtype(), R => with_float!(x.dtype(), T =>
                encode_all::<T, R>(self, kind, x, Some(Operand::new(residual)), records)));
        } else {
            with_float!(x.dtype(), T => encode_all::<T, f32>(self, kind, x, None, records));
        }
    }

    fn dequantize(&self, kind: QuantizedType, records: View<'_>, y: View<'_>) {
        expect("dequantize: records", records, DType::U8, kind.bytes(y.elements()));
        check_disjoint(&[y], &[records]);
        with_float!(y.dtype(), T => decode_sum::<T>(self, kind, 1, records, y));
    }

    fn dequantize_sum(&self, kind: QuantizedType, parts: usize, records: View<'_>, y: View<'_>) {
        expect("dequantize_sum: records", records, DType::U8, parts * kind.bytes(y.elements()));
        expect("dequantize_sum: y", y, DType::F32, y.elements());
        check_disjoint(&[y], &[records]);
        decode_sum::<f32>(self, kind, parts, records, y);
    }
}

fn encode_all<T: Float, R: Float>(
    queue: &CpuQueue,
    kind: QuantizedType,
    x: View<'_>,
    residual: Option<Operand<'_, R>>,
    records: View<'_>,
) {
    let elements = x.elements();
    let (x, records) = (Operand::<T>::new(x), Operand::<u8>::new(records));
    queue.for_each_range(
        elements,
        elements_per_task(elements),
        inlined!(|range, isa| {
            let mut block = Block::ZERO;
            for start in range.step_by(BLOCK) {
                let elements = start..start + BLOCK;
                // SAFETY: each block belongs to one task, which alone accesses its elements, its residual and its
                // record; the views do not overlap.
                let (x, record) = unsafe {
                    (x.read(elements.clone()), records.write(kind.bytes(start)..kind.bytes(start + BLOCK)))
                };
                for (sum, x) in block.0.iter_mut().zip(x) {
                    *sum = x.load();
                }
                if let Some(residual) = &residual {
                    // SAFETY: as above.
                    let residual = unsafe { residual.write(elements) };
                    for (sum, left) in block.0.iter_mut().zip(&*residual) {
                        *sum += left.load();
                    }
                    encode(kind, &mut block.0, record);
                    R::store_all(isa, &block.0, residual);
                } else {
                    encode(kind, &mut block.0, record);
                }
            }
        }),
    );
}

/// Levels of the reduction tree over the largest possible number of ranks.
const LEVELS: usize = 9;

#[inline(always)]
fn decode_sum<T: Float>(queue: &CpuQueue, kind: QuantizedType, parts: usize, records: View<'_>, y: View<'_>) {
    assert!(0 < parts && parts < 1 << LEVELS, "a sum of {parts} parts");
    let elements = y.elements();
    let of_part = kind.bytes(elements);
    let (records, y) = (Operand::<u8>::new(records), Operand::<T>::new(y));
    queue.for_each_range(
        elements,
        elements_per_task(elements),
        inlined!(|range, isa| {
            // The sums of complete subtrees, the left ones first, as in the reduction of floats (`lockstep-comm`).
            let mut sums = [Block::ZERO; LEVELS];
            for start in range.step_by(BLOCK) {
                let mut depth = 0;
                for part in 0..parts {
                    let first = part * of_part;
                    let record = first + kind.bytes(start)..first + kind.bytes(start + BLOCK);
                    // SAFETY: the records are only read.
                    decode(kind, unsafe { records.read(record) }, &mut sums[depth].0);
                    depth += 1;
                    // A subtree is complete when its right half is; after the last part all are.
                    let mut subtrees = part;
                    while depth > 1 && (subtrees % 2 == 1 || part + 1 == parts) {
                        let (left, right) = sums.split_at_mut(depth - 1);
                        add_to(&mut left[depth - 2].0, &right[0].0);
                        depth -= 1;
                        subtrees /= 2;
                    }
                }
                // SAFETY: each block belongs to one task, and the views do not overlap.
                T::store_all(isa, &sums[0].0, unsafe { y.write(start..start + BLOCK) });
            }
        }),
    );
}
