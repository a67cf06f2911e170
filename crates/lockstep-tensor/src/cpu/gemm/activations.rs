//! Activations as int8 codes with a scale for each group of 32, in the order in which integer products read them.
//!
//! A value is `scale · code`, with the scale `largest magnitude / 127` of its group. A row's codes depend on that row alone.

use super::integer_lanes::{GROUP_UNITS, UNIT_CODES};
use crate::cpu::simd::{Float, ROUND};

/// Elements that share a scale.
pub(super) const GROUP: usize = GROUP_UNITS * UNIT_CODES;
/// Words of a group of one row: units of codes, a scale, and for each of two runs the start of its sum and its term.
pub(super) const GROUP_WORDS: usize = GROUP_UNITS + 1 + 2 * MOST_RUNS;
/// Runs of a group that have scales of their own in the weights, at most.
pub(super) const MOST_RUNS: usize = 2;
/// Largest code.
const LARGEST: f32 = 127.0;
/// Groups of smaller magnitudes have codes of zero: the inverse of their scale may be no number.
const SMALLEST: f32 = f32::MIN_POSITIVE * LARGEST;

/// A group of 32 elements of `ROWS` rows.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RowGroup<const ROWS: usize> {
    /// Four codes each: of all rows side by side, or of one row after the other ([`CodeForm::by_rows`]).
    pub(super) codes: [[i32; ROWS]; GROUP_UNITS],
    pub(super) scales: [f32; ROWS],
    /// Starts of the sums of a run, which make the weights' codes signed.
    pub(super) starts: [[i32; ROWS]; MOST_RUNS],
    /// The scale times the sum of the codes of a run: the factor of the weights' offsets.
    pub(super) terms: [[f32; ROWS]; MOST_RUNS],
}

/// Form of the codes in a product.
#[derive(Clone, Copy)]
pub(super) struct CodeForm {
    /// Code of a weight that stands for zero.
    pub(super) zero: i32,
    /// Runs of a group of weights.
    pub(super) runs: usize,
    /// True if a group of eight rows of activations has the codes of one row after the other.
    pub(super) by_rows: bool,
}

impl<const ROWS: usize> RowGroup<ROWS> {
    /// Quantizes the group of row `row`.
    #[inline(always)]
    pub(super) fn quantize<T: Float>(&mut self, row: usize, elements: &[T; GROUP], form: CodeForm) {
        let mut values = [0.0; GROUP];
        for (value, element) in values.iter_mut().zip(elements) {
            *value = element.load();
        }
        // Magnitudes are ordered as their bits are, with infinity and NaN above all numbers.
        let mut largest_bits = 0;
        for value in &values {
            largest_bits = (value.to_bits() & i32::MAX as u32).max(largest_bits);
        }
        let largest = f32::from_bits(largest_bits);
        let (scale, inverse) = match largest {
            SMALLEST..=f32::MAX => (largest / LARGEST, LARGEST / largest),
            0.0..SMALLEST => (0.0, 0.0),
            _ => (f32::NAN, 0.0),
        };
        let mut sums = [0; MOST_RUNS];
        let mut codes = [0_i8; GROUP];
        for (code, value) in codes.iter_mut().zip(&values) {
            // The low byte of the sum is the rounded number. No number times zero is no number and becomes any code.
            *code = (value * inverse + ROUND).to_bits() as i8;
        }
        for (sum, codes) in sums.iter_mut().zip(codes.chunks_exact(GROUP / MOST_RUNS)) {
            *sum = codes.iter().map(|code| i32::from(*code)).sum::<i32>();
        }
        if form.runs == 1 {
            sums = [sums.iter().sum(), 0];
        }
        let (units, _) = codes.as_chunks();
        for (unit, codes) in self.codes.iter_mut().zip(units) {
            unit[row] = i32::from_le_bytes(codes.map(i8::cast_unsigned));
        }
        self.scales[row] = scale;
        for (starts, sum) in self.starts.iter_mut().zip(sums) {
            starts[row] = -form.zero * sum;
        }
        for (terms, sum) in self.terms.iter_mut().zip(sums) {
            terms[row] = scale * sum as f32;
        }
    }

    /// Orders the codes of a group of eight rows by rows.
    pub(super) fn order_by_rows(&mut self) {
        assert_eq!(ROWS, GROUP_UNITS, "rows of a square of codes");
        for row in 1..ROWS {
            for unit in 0..row {
                let code = self.codes[unit][row];
                self.codes[unit][row] = std::mem::replace(&mut self.codes[row][unit], code);
            }
        }
    }
}
