//! Conversions between stored bytes and `f32`, the only ones that checkpoints need.
//!
//! Widening is exact. Narrowing rounds to nearest, ties to even, as `half` and PyTorch do. Bytes may be unaligned,
//! because the header of a mapped file decides the offsets of its tensors.

use half::{bf16, f16, slice::HalfFloatSliceExt};
use lockstep_plan::DType;
use rayon::prelude::*;

/// Elements per parallel task, a few hundred microseconds of work.
const TASK_ELEMENTS: usize = 1 << 18;

/// Returns true if [`widen`] reads `dtype` and [`narrow`] writes it.
pub(crate) fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16 | DType::F16)
}

/// Converts little-endian `bytes` of a float `dtype` to `f32` values in `out`.
///
/// Callers must have checked that `dtype` is a float type and that `bytes` has `out.len() * dtype.size_bytes()` bytes.
pub(crate) fn widen(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), out.len() * dtype.size_bytes(), "callers check sizes");
    let size = dtype.size_bytes();
    out.par_chunks_mut(TASK_ELEMENTS).zip(bytes.par_chunks(TASK_ELEMENTS * size)).for_each(|(out, bytes)| {
        match dtype {
            DType::F32 => bytemuck::cast_slice_mut(out).copy_from_slice(bytes),
            DType::BF16 => {
                for (value, pair) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *value = f32::from_bits(u32::from(u16::from_le_bytes([pair[0], pair[1]])) << 16);
                }
            }
            DType::F16 => match bytemuck::try_cast_slice::<u8, f16>(bytes) {
                Ok(halves) => halves.convert_to_f32_slice(out),
                Err(_) => {
                    for (value, pair) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                        *value = f16::from_le_bytes([pair[0], pair[1]]).to_f32();
                    }
                }
            },
            DType::I32 | DType::U32 | DType::U8 => unreachable!("callers check that the type is a float"),
        }
    });
}

/// Returns the value of one little-endian number of a float `dtype`.
pub(crate) fn scalar(dtype: DType, bytes: &[u8]) -> f32 {
    match (dtype, bytes) {
        (DType::BF16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
        (DType::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
        (DType::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        _ => unreachable!("callers check type and size"),
    }
}

/// Converts `values` to little-endian bytes of a float `dtype`. Sizes and type are as in [`widen`].
pub(crate) fn narrow(dtype: DType, values: &[f32], out: &mut [u8]) {
    assert_eq!(out.len(), values.len() * dtype.size_bytes(), "callers check sizes");
    let size = dtype.size_bytes();
    out.par_chunks_mut(TASK_ELEMENTS * size).zip(values.par_chunks(TASK_ELEMENTS)).for_each(
        |(out, values)| match dtype {
            DType::F32 => out.copy_from_slice(bytemuck::cast_slice(values)),
            DType::BF16 => {
                for (pair, &value) in out.chunks_exact_mut(2).zip(values) {
                    pair.copy_from_slice(&bf16::from_f32(value).to_le_bytes());
                }
            }
            DType::F16 => {
                for (pair, &value) in out.chunks_exact_mut(2).zip(values) {
                    pair.copy_from_slice(&f16::from_f32(value).to_le_bytes());
                }
            }
            DType::I32 | DType::U32 | DType::U8 => unreachable!("callers check that the type is a float"),
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_16_bit_number_survives_widening_and_narrowing() {
        for dtype in [DType::BF16, DType::F16] {
            let bits: Vec<u16> = (0..=u16::MAX).collect();
            let bytes: &[u8] = bytemuck::cast_slice(&bits);
            let mut wide = vec![0.0; bits.len()];
            widen(dtype, bytes, &mut wide);
            let mut back = vec![0; bytes.len()];
            narrow(dtype, &wide, &mut back);
            for ((&bits, value), back) in bits.iter().zip(&wide).zip(back.chunks_exact(2)) {
                let back = u16::from_le_bytes([back[0], back[1]]);
                // A signalling NaN may become quiet; every number keeps its bits.
                assert!(back == bits || value.is_nan(), "{dtype} {bits:#06x} came back as {back:#06x}");
            }
        }
    }

    #[test]
    fn unaligned_bytes_read_like_aligned_ones() {
        let values: Vec<f32> = (0..100).map(|i| i as f32 * 0.25 - 3.0).collect();
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let mut shifted = vec![0; 100 * dtype.size_bytes() + 1];
            narrow(dtype, &values, &mut shifted[1..]);
            let mut read = vec![0.0; 100];
            widen(dtype, &shifted[1..], &mut read);
            assert_eq!(read, values, "{dtype}");
        }
    }

    #[test]
    fn narrowing_rounds_ties_to_even() {
        // 1 + 2^-8 is halfway between the bf16 neighbours 1 and 1 + 2^-7; 1 + 3 * 2^-8 is halfway between an odd and an
        // even one.
        let mut out = [0; 4];
        narrow(DType::BF16, &[1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0], &mut out);
        assert_eq!(out, bytemuck::cast::<[u16; 2], [u8; 4]>([0x3f80, 0x3f82]));
    }
}
