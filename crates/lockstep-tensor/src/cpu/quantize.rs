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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cpu::{
        reference,
        testing::{ACTIVATIONS, floats, on_every_queue, random_of, rounded, tensor, values},
    };
    use crate::{Arena, Tensor};

    const KINDS: [QuantizedType; 2] = [QuantizedType::Int8, QuantizedType::Int4];

    /// Numbers of blocks: enough for one task, and for several.
    fn blocks() -> impl Strategy<Value = usize> {
        prop_oneof![1_usize..5, 260_usize..280]
    }

    fn records(kind: QuantizedType, elements: usize) -> Tensor {
        tensor(&vec![0xa5_u8; kind.bytes(elements)])
    }

    /// Numbers whose blocks have different magnitudes.
    fn uneven(dtype: DType, seed: u64, elements: usize) -> Vec<f64> {
        let x = random_of(dtype, seed, elements);
        let scaled = x.iter().enumerate().map(|(i, x)| x * 2.0_f64.powi((i / BLOCK % 20) as i32 - 10));
        rounded(dtype, &scaled.collect::<Vec<_>>())
    }

    /// Quantizes and dequantizes `x`.
    fn passed(queue: &CpuQueue, kind: QuantizedType, dtype: DType, x: &[f64]) -> Vec<f64> {
        let (x, y) = (floats(dtype, [x.len()], x), floats(DType::F32, [x.len()], &vec![5.0; x.len()]));
        let records = records(kind, y.view().elements());
        queue.quantize(kind, x.view(), None, records.view());
        queue.dequantize(kind, records.view(), y.view());
        values(y.view())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(6))]

        #[test]
        fn every_element_becomes_the_nearest_multiple_of_its_blocks_scale(blocks in blocks(), seed in 0_u64..100) {
            for (kind, dtype) in KINDS.into_iter().flat_map(|kind| ACTIVATIONS.map(|dtype| (kind, dtype))) {
                let x = uneven(dtype, seed, blocks * BLOCK);
                on_every_queue(|queue| vec![passed(queue, kind, dtype, &x)], |results| {
                    for (block, (x, found)) in x.chunks(BLOCK).zip(results[0].chunks(BLOCK)).enumerate() {
                        let (scale, codes) = reference::quantized(kind, x);
                        for (i, (found, code)) in found.iter().zip(codes).enumerate() {
                            let off = (found / scale - code).abs();
                            assert!(off <= 0.5 + 1e-4, "{kind} of {dtype}, block {block}[{i}]: off by {off} of {scale:e}");
                            let whole = found / scale;
                            assert!((whole - whole.round()).abs() < 1e-4, "{kind} of {dtype}: code {whole}");
                        }
                    }
                });
            }
        }

        #[test]
        fn whole_multiples_of_a_scale_stay_as_they_are(exponent in -30_i32..30, seed in 0_u64..100) {
            for kind in KINDS {
                let limit = f64::from(kind.limit());
                let scale = 1.375 * 2.0_f64.powi(exponent);
                let mut x: Vec<f64> =
                    random_of(DType::F32, seed, 2 * BLOCK).iter().map(|x| (x / 2.0 * limit).round() * scale).collect();
                x[3] = limit * scale;
                x[BLOCK + 9] = -limit * scale;
                on_every_queue(|queue| vec![passed(queue, kind, DType::F32, &x)], |results| assert_eq!(results[0], x));
            }
        }

        #[test]
        fn what_records_fail_to_say_is_left_and_said_the_next_time(blocks in blocks(), seed in 0_u64..100) {
            for (kind, of_residual) in KINDS.into_iter().flat_map(|kind| [DType::F32, DType::BF16].map(|r| (kind, r))) {
                let x = uneven(DType::F32, seed, blocks * BLOCK);
                let before: Vec<f64> =
                    rounded(of_residual, &uneven(DType::F32, seed + 1, x.len()).iter().map(|x| x / 8.0).collect::<Vec<_>>());
                let run = |queue: &CpuQueue| {
                    let residual = floats(of_residual, [x.len()], &before);
                    let (x, y) = (floats(DType::F32, [x.len()], &x), floats(DType::F32, [x.len()], &vec![5.0; x.len()]));
                    let records = records(kind, y.view().elements());
                    queue.quantize(kind, x.view(), Some(residual.view()), records.view());
                    queue.dequantize(kind, records.view(), y.view());
                    vec![values(y.view()), values(residual.view())]
                };
                on_every_queue(run, |results| {
                    for (i, ((x, before), (said, left))) in
                        x.iter().zip(&before).zip(results[0].iter().zip(&results[1])).enumerate()
                    {
                        let (all, found) = (x + before, said + left);
                        let rounding = if of_residual == DType::F32 { 1e-6 } else { 5e-3 };
                        let allowed = rounding * left.abs() + 1e-6 * (x.abs() + before.abs()) + 1e-37;
                        assert!((all - found).abs() <= allowed, "{kind}, [{i}]: {x} + {before} became {said} + {left}");
                    }
                });
            }
        }

        #[test]
        fn sums_have_the_bits_of_the_tree_over_what_each_part_says(parts in 1_usize..12, blocks in 1_usize..4) {
            fn tree(parts: &[Vec<f64>], i: usize) -> f32 {
                match parts {
                    [only] => only[i] as f32,
                    _ => {
                        let left = (parts.len() / 2 + parts.len() % 2).next_power_of_two().min(parts.len().next_power_of_two() / 2);
                        tree(&parts[..left], i) + tree(&parts[left..], i)
                    }
                }
            }
            for kind in KINDS {
                let elements = blocks * BLOCK;
                let x: Vec<Vec<f64>> = (0..parts as u64).map(|part| uneven(DType::F32, part, elements)).collect();
                let run = |queue: &CpuQueue| {
                    let records = records(kind, parts * elements);
                    for (x, part) in x.iter().zip(0..) {
                        let part = records.view().rows(kind.bytes(part * elements)..kind.bytes((part + 1) * elements));
                        queue.quantize(kind, floats(DType::F32, [elements], x).view(), None, part);
                    }
                    let y = floats(DType::F32, [elements], &vec![5.0; elements]);
                    queue.dequantize_sum(kind, parts, records.view(), y.view());
                    let said = x.iter().map(|x| passed(queue, kind, DType::F32, x));
                    std::iter::once(values(y.view())).chain(said).collect()
                };
                on_every_queue(run, |results| {
                    for (i, sum) in results[0].iter().enumerate() {
                        assert_eq!(sum.to_bits(), f64::from(tree(&results[1..], i)).to_bits(), "{kind}, {parts} parts, [{i}]");
                    }
                });
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_seen_in_the_whole_block_and_leaves_nothing_for_the_next_time() {
        for (kind, broken) in
            KINDS.into_iter().flat_map(|kind| [f64::NAN, f64::INFINITY, f64::NEG_INFINITY].map(|x| (kind, x)))
        {
            let mut x = random_of(DType::F32, 1, 3 * BLOCK);
            x[BLOCK + 7] = broken;
            let run = |queue: &CpuQueue| {
                let residual = floats(DType::BF16, [x.len()], &vec![0.5; x.len()]);
                let (x, y) =
                    (floats(DType::F32, [x.len()], &x), floats(DType::F32, [x.len()], &vec![5.0; x.len()]));
                let records = records(kind, y.view().elements());
                queue.quantize(kind, x.view(), Some(residual.view()), records.view());
                queue.dequantize(kind, records.view(), y.view());
                let is_nan = values(y.view()).iter().map(|y| f64::from(u8::from(y.is_nan()))).collect();
                vec![is_nan, values(residual.view())]
            };
            on_every_queue(run, |results| {
                let block = |block: usize| block * BLOCK..(block + 1) * BLOCK;
                for (i, expected) in [0.0, 1.0, 0.0].into_iter().enumerate() {
                    assert!(
                        results[0][block(i)].iter().all(|is_nan| *is_nan == expected),
                        "{kind}, {broken}: block {i}"
                    );
                }
                assert!(results[1][block(1)].iter().all(|left| *left == 0.0), "{kind}, {broken}");
            });
        }
    }

    #[test]
    fn blocks_of_extremes_stay_finite_and_those_of_next_to_nothing_become_zeros() {
        for kind in KINDS {
            let largest = f64::from(f32::MAX);
            let tiny = f64::from(f32::MIN_POSITIVE) * f64::from(kind.limit()) * 0.99;
            let blocks = [0.0, -0.0, largest, -largest, tiny, f64::from(f32::MIN_POSITIVE) / 8.0];
            let x: Vec<f64> = blocks.iter().flat_map(|x| [*x; BLOCK]).collect();
            let run = |queue: &CpuQueue| vec![passed(queue, kind, DType::F32, &x)];
            on_every_queue(run, |results| {
                let of_blocks: Vec<f64> = results[0].iter().step_by(BLOCK).copied().collect();
                assert_eq!([of_blocks[0], of_blocks[1], of_blocks[4], of_blocks[5]], [0.0; 4], "{kind}");
                for (found, x) in of_blocks[2..4].iter().zip(&blocks[2..4]) {
                    assert!(
                        found.is_finite() && (found / x - 1.0).abs() < 2e-6,
                        "{kind}: {found:e} of {x:e}"
                    );
                }
            });
        }
    }

    #[test]
    #[should_panic(expected = "whole blocks")]
    fn a_part_of_a_block_is_refused() {
        let queue = CpuQueue::new(1, &Arena::new()).unwrap();
        let x = floats(DType::F32, [BLOCK + 1], &vec![1.0; BLOCK + 1]);
        queue.quantize(QuantizedType::Int8, x.view(), None, tensor(&[0_u8; 520]).view());
    }
}
