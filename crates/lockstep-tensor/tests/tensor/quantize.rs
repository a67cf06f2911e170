//! Quantization of blocks against the definition.

use lockstep_plan::{DType, QUANTIZATION_BLOCK as BLOCK, QuantizedType};
use lockstep_tensor::{Arena, CpuQueue, QuantizationKernels, Tensor};
use proptest::prelude::*;

use crate::reference;
use crate::testing::{ACTIVATIONS, floats, on_every_queue, random_of, rounded, tensor, values};

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
                assert!(found.is_finite() && (found / x - 1.0).abs() < 2e-6, "{kind}: {found:e} of {x:e}");
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
