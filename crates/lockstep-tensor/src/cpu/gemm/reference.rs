//! The definition of the product, in f64 and one element at a time, for tests of the kernels.

use crate::GemmLayout;

/// An element of a product and the sum of its terms' magnitudes, to which rounding errors are proportional.
#[derive(Debug, Clone, Copy)]
pub(super) struct Exact {
    pub(super) value: f64,
    pub(super) magnitude: f64,
}

/// Computes `A · B` by `layout`, `[m, n]`, plus `bias [n]` and `earlier [m, n]` if given.
pub(super) fn multiply(
    layout: GemmLayout,
    [m, n, k]: [usize; 3],
    a: &[f64],
    b: &[f64],
    bias: Option<&[f64]>,
    earlier: Option<&[f64]>,
) -> Vec<Exact> {
    let mut out = Vec::with_capacity(m * n);
    for i in 0..m {
        for j in 0..n {
            let mut sum = Exact { value: 0.0, magnitude: 0.0 };
            let mut add = |term: f64| {
                sum.value += term;
                sum.magnitude += term.abs();
            };
            for p in 0..k {
                let x = if layout == GemmLayout::TN { a[p * m + i] } else { a[i * k + p] };
                let y = if layout == GemmLayout::NT { b[j * k + p] } else { b[p * n + j] };
                add(x * y);
            }
            bias.into_iter().for_each(|bias| add(bias[j]));
            earlier.into_iter().for_each(|earlier| add(earlier[i * n + j]));
            out.push(sum);
        }
    }
    out
}
