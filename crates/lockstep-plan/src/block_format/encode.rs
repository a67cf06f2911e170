//! Encoding of one block of each format.

use super::{
    decode::{BlockCodec, PART, Q6KCodec, Q8_0Codec, RUN, RUNS},
    half::{narrow, widen},
    rounding::nearest,
};

/// Returns the reciprocal, or zero for zero.
fn reciprocal(x: f32) -> f32 {
    if x == 0.0 { 0.0 } else { 1.0 / x }
}

/// Writes a number as f16.
fn put(block: &mut [u8], at: usize, x: f32) {
    block[at..at + 2].copy_from_slice(&narrow(x).to_le_bytes());
}

/// Returns the first of the elements with the largest magnitude.
fn extreme(values: &[f32]) -> f32 {
    values.iter().fold(0.0_f32, |most, &x| if x.abs() > most.abs() { x } else { most })
}

impl Q8_0Codec {
    /// Writes a block with a scale in f16.
    ///
    /// # Panics
    /// If `block` has another size than a block.
    pub fn pack(scale: [u8; 2], codes: &[i8; PART], block: &mut [u8]) {
        assert_eq!(block.len(), Self::BYTES, "bytes of a block");
        block[..2].copy_from_slice(&scale);
        for (byte, code) in block[2..].iter_mut().zip(codes) {
            *byte = code.cast_unsigned();
        }
    }
}

pub(super) fn q8_0(values: &[f32], block: &mut [u8]) {
    let scale = extreme(values).abs() / 127.0;
    let inverse = reciprocal(scale);
    let code = |index: usize| nearest(values[index] * inverse, -128.0, 127.0) as i8;
    Q8_0Codec::pack(narrow(scale).to_le_bytes(), &std::array::from_fn(code), block);
}

/// Writes 32 codes of 4 bits: the first 16 to low halves, the others to high halves.
fn put_halves(codes: [u8; PART], bytes: &mut [u8]) {
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = codes[index] | codes[index + PART / 2] << 4;
    }
}

pub(super) fn q4_0(values: &[f32], block: &mut [u8]) {
    let scale = extreme(values) / -8.0;
    let inverse = reciprocal(scale);
    put(block, 0, scale);
    let code = |index: usize| ((values[index] * inverse + 8.5) as u8).min(15);
    put_halves(std::array::from_fn(code), &mut block[2..]);
}

pub(super) fn q4_1(values: &[f32], block: &mut [u8]) {
    let (minimum, maximum) =
        values.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), &x| (low.min(x), high.max(x)));
    let scale = (maximum - minimum) / 15.0;
    let inverse = reciprocal(scale);
    put(block, 0, scale);
    put(block, 2, minimum);
    let code = |index: usize| (((values[index] - minimum) * inverse + 0.5) as u8).min(15);
    put_halves(std::array::from_fn(code), &mut block[4..]);
}

/// Factors of the first guess of a scale that are tried; the best in squared error is kept.
const GUESSES: [f32; 7] = [1.0, 0.94, 0.97, 1.03, 1.06, 0.9, 1.1];

/// Returns the scale and the minimum, at most zero, of a run whose codes are `0..=largest`.
fn fit_with_minimum(values: &[f32], largest: f32) -> (f32, f32) {
    let minimum = values.iter().fold(0.0_f32, |least, &x| least.min(x));
    let maximum = values.iter().fold(0.0_f32, |most, &x| most.max(x));
    let (mut best, mut least) = ((0.0, 0.0), f64::INFINITY);
    for guess in GUESSES {
        let inverse = reciprocal((maximum - minimum) / largest * guess);
        let code = |x: f32| f64::from(nearest((x - minimum) * inverse, 0.0, largest));
        // Least squares of `scale · code + minimum`, with these codes.
        let count = values.len() as f64;
        let mut sums = [0.0; 4];
        for &x in values {
            let (code, x) = (code(x), f64::from(x));
            for (sum, term) in sums.iter_mut().zip([code, code * code, x, code * x]) {
                *sum += term;
            }
        }
        let [codes, squares, xs, products] = sums;
        let determinant = count * squares - codes * codes;
        let mut fit = if determinant > 0.0 {
            ((count * products - codes * xs) / determinant, (squares * xs - codes * products) / determinant)
        } else if squares > 0.0 {
            // All codes are the same.
            (products / squares, 0.0)
        } else {
            (0.0, f64::from(minimum))
        };
        if fit.1 > 0.0 {
            fit = (if squares > 0.0 { products / squares } else { 0.0 }, 0.0);
        }
        let error = values.iter().map(|&x| (fit.0 * code(x) + fit.1 - f64::from(x)).powi(2)).sum::<f64>();
        if error < least && fit.0 >= 0.0 {
            (best, least) = ((fit.0 as f32, fit.1 as f32), error);
        }
    }
    best
}

/// Largest scale and minimum of 6 bits.
const SIX_BITS: f32 = 63.0;

/// Encodes Q4_K (codes up to 15) and Q5_K (up to 31).
pub(super) fn with_minima(values: &[f32], block: &mut [u8], largest: u8) {
    let fits: Vec<(f32, f32)> =
        values.chunks_exact(PART).map(|run| fit_with_minimum(run, f32::from(largest))).collect();
    let factor = fits.iter().fold(0.0_f32, |most, fit| most.max(fit.0)) / SIX_BITS;
    let factor_of_minima = fits.iter().fold(0.0_f32, |most, fit| most.max(-fit.1)) / SIX_BITS;
    block.fill(0);
    put(block, 0, factor);
    put(block, 2, factor_of_minima);
    let (factor, factor_of_minima) = (widen(narrow(factor)), widen(narrow(factor_of_minima)));
    let five_bits = largest > 15;
    let low_bits = if five_bits { 48 } else { 16 };
    for (part, (run, (scale, minimum))) in values.chunks_exact(PART).zip(fits).enumerate() {
        let of_factor = |x: f32, factor: f32| nearest(x * reciprocal(factor), 0.0, SIX_BITS);
        let (scale, minimum) = (of_factor(scale, factor), of_factor(-minimum, factor_of_minima));
        put_six_bits(&mut block[4..16], part, scale as u8, minimum as u8);
        let (inverse, minimum) = (reciprocal(factor * scale), factor_of_minima * minimum);
        for (index, x) in run.iter().enumerate() {
            let code = nearest((x + minimum) * inverse, 0.0, f32::from(largest)) as u8;
            block[low_bits + part / 2 * PART + index] |= (code & 15) << (part % 2 * 4);
            if five_bits {
                block[16 + index] |= code >> 4 << part;
            }
        }
    }
}

/// Writes pair `pair` of a scale and a minimum, each of 6 bits.
fn put_six_bits(packed: &mut [u8], pair: usize, scale: u8, minimum: u8) {
    match pair.checked_sub(4) {
        None => {
            packed[pair] |= scale;
            packed[pair + 4] |= minimum;
        }
        Some(low) => {
            packed[pair + 4] |= scale & 15 | (minimum & 15) << 4;
            packed[low] |= scale >> 4 << 6;
            packed[pair] |= minimum >> 4 << 6;
        }
    }
}

/// Returns the scale of a run whose codes are -32 to 31.
fn fit_signed(values: &[f32]) -> f32 {
    let first = extreme(values) / -32.0;
    let (mut best, mut least) = (first, f64::INFINITY);
    for guess in GUESSES {
        let inverse = reciprocal(first * guess);
        let code = |x: f32| f64::from(nearest(x * inverse, -32.0, 31.0));
        let squares: f64 = values.iter().map(|&x| code(x).powi(2)).sum();
        let products: f64 = values.iter().map(|&x| code(x) * f64::from(x)).sum();
        let scale = if squares > 0.0 { products / squares } else { 0.0 };
        let error = values.iter().map(|&x| (scale * code(x) - f64::from(x)).powi(2)).sum::<f64>();
        if error < least {
            (best, least) = (scale as f32, error);
        }
    }
    best
}

impl Q6KCodec {
    /// Writes a block with a scale in f16, that of each run, and codes from -32 to 31.
    ///
    /// # Panics
    /// If `block` has another size than a block.
    pub fn pack(scale: [u8; 2], scales: &[i8; RUNS], codes: &[i8; Self::ELEMENTS], block: &mut [u8]) {
        assert_eq!(block.len(), Self::BYTES, "bytes of a block");
        block.fill(0);
        for (byte, scale) in block[192..].iter_mut().zip(scales) {
            *byte = scale.cast_unsigned();
        }
        block[208..].copy_from_slice(&scale);
        for (element, code) in codes.iter().enumerate() {
            let code = (code + 32).cast_unsigned();
            let (half, quarter, place) = (element / 128, element / PART % 4, element % PART);
            block[64 * half + quarter % 2 * PART + place] |= (code & 15) << (quarter / 2 * 4);
            block[128 + PART * half + place] |= code >> 4 << (2 * quarter);
        }
    }
}

pub(super) fn q6_k(values: &[f32], block: &mut [u8]) {
    let fits: Vec<f32> = values.chunks_exact(RUN).map(fit_signed).collect();
    // The scale of the largest magnitude becomes -128, which alone uses the whole range.
    let factor = narrow(extreme(&fits) / -128.0);
    let (mut scales, mut codes) = ([0; RUNS], [0; Q6KCodec::ELEMENTS]);
    let runs = values.chunks_exact(RUN).zip(codes.chunks_exact_mut(RUN));
    for ((values, codes), (fit, of_run)) in runs.zip(fits.into_iter().zip(&mut scales)) {
        let scale = nearest(fit * reciprocal(widen(factor)), -128.0, 127.0);
        *of_run = scale as i8;
        let inverse = reciprocal(widen(factor) * scale);
        for (code, x) in codes.iter_mut().zip(values) {
            *code = nearest(x * inverse, -32.0, 31.0) as i8;
        }
    }
    Q6KCodec::pack(factor.to_le_bytes(), &scales, &codes, block);
}
