use super::*;
use crate::random::Philox;

/// Returns the bytes of a file that `tests/fixtures/make_gguf.py` has made.
macro_rules! fixture {
    ($name:literal) => {
        include_bytes!(concat!("../../../../tests/fixtures/gguf/blocks/", $name)).as_slice()
    };
}

fn numbers(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// Format, random blocks, and what gguf-py reads from them.
const READ: [(BlockFormat, &[u8], &[u8]); 7] = [
    (BlockFormat::Q8_0, fixture!("q8_0.bytes"), fixture!("q8_0.values")),
    (BlockFormat::Q4_0, fixture!("q4_0.bytes"), fixture!("q4_0.values")),
    (BlockFormat::Q4_1, fixture!("q4_1.bytes"), fixture!("q4_1.values")),
    (BlockFormat::Q4K, fixture!("q4_k.bytes"), fixture!("q4_k.values")),
    (BlockFormat::Q5K, fixture!("q5_k.bytes"), fixture!("q5_k.values")),
    (BlockFormat::Q6K, fixture!("q6_k.bytes"), fixture!("q6_k.values")),
    (BlockFormat::Mxfp4, fixture!("mxfp4.bytes"), fixture!("mxfp4.values")),
];

#[test]
fn blocks_of_every_format_are_read_with_the_bits_of_gguf_py() {
    for (format, bytes, expected) in READ {
        let expected = numbers(expected);
        let mut values = vec![f32::NAN; expected.len()];
        format.dequantize(bytes, &mut values);
        for (index, (value, expected)) in values.iter().zip(&expected).enumerate() {
            assert_eq!(
                value.to_bits(),
                expected.to_bits(),
                "{format} element {index}: {value} for {expected}"
            );
        }
    }
}

#[test]
fn blocks_of_32_are_written_with_the_bits_of_gguf_py() {
    let source = numbers(fixture!("source.values"));
    let written = [
        (BlockFormat::Q8_0, fixture!("q8_0.quantized")),
        (BlockFormat::Q4_0, fixture!("q4_0.quantized")),
        (BlockFormat::Q4_1, fixture!("q4_1.quantized")),
        (BlockFormat::Mxfp4, fixture!("mxfp4.quantized")),
    ];
    for (format, expected) in written {
        let mut bytes = vec![0; expected.len()];
        format.quantize(&source, &mut bytes);
        let size = format.block_bytes();
        for (block, (found, expected)) in bytes.chunks(size).zip(expected.chunks(size)).enumerate() {
            assert_eq!(found, expected, "{format} block {block}");
        }
    }
}

#[test]
fn an_encoded_matrix_is_near_the_numbers_it_was_made_of() {
    // Root mean square of the error, relative to that of normally distributed weights: half of what a uniform quantizer of so many
    // bits would lose at three standard deviations.
    let limits = [
        (BlockFormat::Q8_0, 0.006),
        (BlockFormat::Q4_0, 0.1),
        (BlockFormat::Q4_1, 0.09),
        (BlockFormat::Q4K, 0.08),
        (BlockFormat::Q5K, 0.04),
        (BlockFormat::Q6K, 0.02),
        (BlockFormat::Int4G32, 0.08),
        (BlockFormat::Int4G64, 0.09),
        (BlockFormat::Int4G128, 0.1),
        (BlockFormat::Int8G32, 0.006),
        (BlockFormat::Int8G128, 0.007),
        (BlockFormat::Fp8G128, 0.03),
        (BlockFormat::Nf4G64, 0.1),
        (BlockFormat::Mxfp4, 0.13),
    ];
    let philox = Philox::new(7);
    let values: Vec<f32> = (0..64 * 256).map(|index| philox.normal(index) * 0.02).collect();
    let energy: f64 = values.iter().map(|x| f64::from(*x).powi(2)).sum();
    for (format, limit) in limits {
        let mut bytes = vec![0; format.bytes(values.len()).unwrap()];
        format.quantize(&values, &mut bytes);
        let mut read = vec![0.0; values.len()];
        format.dequantize(&bytes, &mut read);
        let error: f64 = read.iter().zip(&values).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        let relative = (error / energy).sqrt();
        assert!(relative < limit, "{format}: {relative:.4} of the weights' size, allowed {limit}");
    }
}

#[test]
fn zeros_and_equal_numbers_are_encoded_without_an_undefined_result() {
    for format in BlockFormat::ALL {
        for constant in [0.0, 1.5, -1.5] {
            let values = [constant; 256];
            let mut bytes = vec![0; format.bytes(values.len()).unwrap()];
            format.quantize(&values, &mut bytes);
            let mut read = [f32::NAN; 256];
            format.dequantize(&bytes, &mut read);
            for value in read {
                assert!(
                    (value - constant).abs() <= constant.abs() / 50.0,
                    "{format}: {value} for {constant}"
                );
            }
        }
    }
}

#[test]
fn a_block_of_4_bit_codes_subtracts_its_zero_point() {
    let codes: Vec<u8> = (0..64).map(|index| (index * 7 % 16) as u8).collect();
    let mut block = vec![0; Int4Codec::<64>::BYTES];
    for zero_point in [0, 8, 16] {
        Int4Codec::<64>::pack(-0.3, zero_point, &codes, &mut block);
        let mut values = [0.0; 64];
        BlockFormat::Int4G64.dequantize(&block, &mut values);
        let expected = codes.iter().map(|code| -0.3 * (f32::from(*code) - f32::from(zero_point)));
        assert_eq!(values.to_vec(), expected.collect::<Vec<f32>>(), "zero point {zero_point}");
    }
}

#[test]
fn numbers_of_8_bits_have_four_bits_of_exponent_and_three_of_mantissa() {
    for code in 0..=u8::MAX {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
        let magnitude = match exponent {
            0 => mantissa * 2.0_f32.powi(-9),
            _ => (1.0 + mantissa / 8.0) * 2.0_f32.powi(exponent - 7),
        };
        let expected = if code >> 7 == 1 { -magnitude } else { magnitude };
        assert_eq!(fp8_value(code).to_bits(), expected.to_bits(), "code {code:#x}");
    }
}

#[test]
fn parts_of_blocks_have_no_size() {
    assert_eq!(BlockFormat::Q8_0.bytes(33), None);
    assert_eq!(BlockFormat::Q4K.bytes(128), None);
    assert_eq!(BlockFormat::Q6K.bytes(512), Some(420));
    assert_eq!(BlockFormat::Q8_0.bytes(usize::MAX / 32 * 32), None);
}
