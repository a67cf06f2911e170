//! The definitions of the product and of the convolution, in f64 and one element at a time, for tests of the kernels.

use lockstep_tensor::{Conv2d, GemmLayout, Window2d};

/// An element of a product and the sum of its terms' magnitudes, to which rounding errors are proportional.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Exact {
    pub(crate) value: f64,
    pub(crate) magnitude: f64,
}

/// Computes `A · B` by `layout`, `[m, n]`, plus `bias [n]` and `earlier [m, n]` if given.
pub(crate) fn multiply(
    layout: GemmLayout,
    [m, n, k]: [usize; 3],
    a: &[f64],
    b: &[f64],
    bias: Option<&[f64]>,
    earlier: Option<&[f64]>,
) -> Vec<Exact> {
    let transposed: Vec<f64>;
    let b = if layout == GemmLayout::NT {
        transposed = (0..k * n).map(|index| b[index % n * k + index / n]).collect();
        &transposed
    } else {
        b
    };
    let mut out = vec![Exact { value: 0.0, magnitude: 0.0 }; m * n];
    for (i, row) in out.chunks_mut(n.max(1)).enumerate() {
        // A row at a time: its sums are independent, and the compiler computes several at once.
        let mut add = |x: f64, terms: &[f64]| {
            for (sum, y) in row.iter_mut().zip(terms) {
                sum.value += x * y;
                sum.magnitude += (x * y).abs();
            }
        };
        for p in 0..k {
            let x = if layout == GemmLayout::TN { a[p * m + i] } else { a[i * k + p] };
            add(x, &b[p * n..][..n]);
        }
        bias.into_iter().for_each(|bias| add(1.0, bias));
        earlier.into_iter().for_each(|earlier| add(1.0, &earlier[i * n..][..n]));
    }
    out
}

/// Calls `work` with the indices in input, weight and output of each multiplication of a convolution.
fn for_each_multiplication(conv: Conv2d, mut work: impl FnMut(usize, usize, usize)) {
    let Window2d { kernel, stride, padding, dilation } = conv.window();
    let ([height, width], output) = (conv.input(), conv.output());
    let (inputs, outputs) = (conv.in_channels() / conv.groups(), conv.out_channels() / conv.groups());
    let position = |axis: usize, out: usize, tap: usize| {
        (out * stride[axis] + tap * dilation[axis])
            .checked_sub(padding[axis])
            .filter(|at| *at < [height, width][axis])
    };
    for image in 0..conv.batch() {
        for (row, column) in (0..output[0]).flat_map(|row| (0..output[1]).map(move |column| (row, column))) {
            for (i, j) in (0..kernel[0]).flat_map(|i| (0..kernel[1]).map(move |j| (i, j))) {
                let (Some(y), Some(x)) = (position(0, row, i), position(1, column, j)) else { continue };
                for out in 0..conv.out_channels() {
                    for within in 0..inputs {
                        let channel = out / outputs * inputs + within;
                        work(
                            ((image * height + y) * width + x) * conv.in_channels() + channel,
                            ((out * inputs + within) * kernel[0] + i) * kernel[1] + j,
                            ((image * output[0] + row) * output[1] + column) * conv.out_channels() + out,
                        );
                    }
                }
            }
        }
    }
}

/// Computes the convolution of `x` with `weight`.
pub(crate) fn conv2d(conv: Conv2d, x: &[f64], weight: &[f64]) -> Vec<f64> {
    let mut y = vec![0.0; conv.output_shape().elements()];
    for_each_multiplication(conv, |at, w, out| y[out] += x[at] * weight[w]);
    y
}

/// Returns the gradients of the input and of the weight of a convolution.
pub(crate) fn conv2d_backward(conv: Conv2d, dy: &[f64], x: &[f64], weight: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (mut dx, mut dweight) = (vec![0.0; x.len()], vec![0.0; weight.len()]);
    for_each_multiplication(conv, |at, w, out| {
        dx[at] += dy[out] * weight[w];
        dweight[w] += dy[out] * x[at];
    });
    (dx, dweight)
}
