//! RMS normalization (Zhang and Sennrich, 2019) and layer normalization (Ba et al., 2016).
//!
//! With `n = (x - mean) · rstd` (mean 0 for RMS normalization), both are `y = n · weight (+ bias)`, and
//! `dx = rstd · (g - average(g) - n · average(g · n))` with `g = dy · weight`; RMS normalization lacks the term
//! `average(g)`. So both share their backward, with the mean as an option. A scale may be stored less an offset.

use lockstep_plan::DType;

use super::{
    CpuQueue,
    operands::{Operand, check_disjoint, expect},
    simd::{Float, Isa, inlined, map_slices, sum, with_float},
    tasks::rows_per_task,
};
use crate::{LayerNorm, NormKernels, RmsNorm, View, Write};

impl NormKernels for CpuQueue {
    fn rms_norm(&self, norm: RmsNorm<'_>, eps: f32, y: View<'_>) {
        let RmsNorm { x, weight, rstd, .. } = norm;
        expect("rms_norm: y", y, x.dtype(), x.elements());
        check_disjoint(&[y, rstd], &[x, weight]);
        forward(self, Norm::of_rms(norm), None, eps, y);
    }

    fn rms_norm_backward_input(&self, norm: RmsNorm<'_>, dy: View<'_>, dx: View<'_>, write: Write) {
        backward_input(self, Norm::of_rms(norm), dy, dx, write);
    }

    fn rms_norm_backward_weight(&self, norm: RmsNorm<'_>, dy: View<'_>, dweight: View<'_>) {
        let Norm { x, rstd, .. } = Norm::of_rms(norm);
        let width = x.shape().as_matrix().1;
        expect("rms_norm_backward_weight: dy", dy, x.dtype(), x.elements());
        expect("rms_norm_backward_weight: dweight", dweight, DType::F32, width);
        check_disjoint(&[dweight], &[dy, x, rstd]);
        backward_weight(self, [x, dy], None, rstd, dweight, None);
    }

    fn layer_norm(&self, norm: LayerNorm<'_>, bias: Option<View<'_>>, eps: f32, y: View<'_>) {
        let LayerNorm { x, weight, mean, rstd } = norm;
        let norm = Norm::of_layer(norm);
        expect("layer_norm: y", y, x.dtype(), x.elements());
        check_disjoint(&[y, mean, rstd], &[x, weight]);
        if let Some(bias) = bias {
            expect("layer_norm: bias", bias, x.dtype(), x.shape().as_matrix().1);
            check_disjoint(&[y, mean, rstd], &[bias]);
        }
        forward(self, norm, bias, eps, y);
    }

    fn layer_norm_backward_input(&self, norm: LayerNorm<'_>, dy: View<'_>, dx: View<'_>, write: Write) {
        backward_input(self, Norm::of_layer(norm), dy, dx, write);
    }

    fn layer_norm_backward_weight(
        &self,
        norm: LayerNorm<'_>,
        dy: View<'_>,
        dweight: View<'_>,
        dbias: Option<View<'_>>,
    ) {
        let Norm { x, mean, rstd, .. } = Norm::of_layer(norm);
        let width = x.shape().as_matrix().1;
        expect("layer_norm_backward_weight: dy", dy, x.dtype(), x.elements());
        expect("layer_norm_backward_weight: dweight", dweight, DType::F32, width);
        let read = [dy, x, norm.mean, rstd];
        check_disjoint(&[dweight], &read);
        if let Some(dbias) = dbias {
            expect("layer_norm_backward_weight: dbias", dbias, DType::F32, width);
            check_disjoint(&[dbias, dweight], &read);
        }
        backward_weight(self, [x, dy], mean, rstd, dweight, dbias);
    }
}

/// Operands of a normalization; `mean` is `None` for RMS normalization. The scale is `offset + weight`.
struct Norm<'a> {
    x: View<'a>,
    weight: View<'a>,
    offset: f32,
    mean: Option<View<'a>>,
    rstd: View<'a>,
}

impl<'a> Norm<'a> {
    /// Checks the operands of an RMS normalization.
    ///
    /// # Panics
    /// If their types or sizes do not fit.
    fn of_rms(RmsNorm { x, weight, offset, rstd }: RmsNorm<'a>) -> Self {
        let (rows, width) = x.shape().as_matrix();
        expect("rms_norm: weight", weight, x.dtype(), width);
        expect("rms_norm: rstd", rstd, DType::F32, rows);
        Self { x, weight, offset, mean: None, rstd }
    }

    /// Checks the operands of a layer normalization.
    ///
    /// # Panics
    /// If their types or sizes do not fit.
    fn of_layer(LayerNorm { x, weight, mean, rstd }: LayerNorm<'a>) -> Self {
        let (rows, width) = x.shape().as_matrix();
        expect("layer_norm: weight", weight, x.dtype(), width);
        expect("layer_norm: mean", mean, DType::F32, rows);
        expect("layer_norm: rstd", rstd, DType::F32, rows);
        Self { x, weight, offset: 0.0, mean: Some(mean), rstd }
    }
}

fn forward(queue: &CpuQueue, norm: Norm<'_>, bias: Option<View<'_>>, eps: f32, y: View<'_>) {
    let (rows, width) = norm.x.shape().as_matrix();
    let offset = norm.offset;
    with_float!(norm.x.dtype(), T => {
        let (x, y) = (Operand::<T>::new(norm.x), Operand::<T>::new(y));
        let (weight, bias) = (Operand::<T>::new(norm.weight), bias.map(Operand::<T>::new));
        let (mean, rstd) = (norm.mean.map(Operand::<f32>::new), Operand::<f32>::new(norm.rstd));
        queue.for_each_range(rows, rows_per_task(rows, width), inlined!(|rows, isa| {
            // SAFETY: weight and bias are only read.
            let weight = unsafe { weight.read(0..width) };
            // SAFETY: as above.
            let bias = bias.as_ref().map(inlined!(|bias| unsafe { bias.read(0..width) }));
            for row in rows {
                let elements = row * width..(row + 1) * width;
                // SAFETY: no operand overlaps an output, and each row of an output belongs to one task.
                let (x, y, rstd) = unsafe {
                    (x.read(elements.clone()), y.write(elements), rstd.write(row..row + 1))
                };
                let mut average = 0.0;
                if let Some(mean) = &mean {
                    let [total] = sum([x], inlined!(|[x]| [x]));
                    average = total / width as f32;
                    // SAFETY: as above.
                    let mean = unsafe { mean.write(row..row + 1) };
                    mean[0] = average;
                }
                // For layer normalization a second pass over the row, because `average(x²) - average(x)²` cancels.
                let [squares] = sum([x], inlined!(|[x]| [(x - average) * (x - average)]));
                rstd[0] = 1.0 / (squares / width as f32 + eps).sqrt();
                let rstd = rstd[0];
                match bias {
                    Some(bias) => map_slices(
                        isa, [x, weight, bias], y, Write::Overwrite,
                        inlined!(|[x, weight, bias]| (x - average) * rstd * (offset + weight) + bias),
                    ),
                    None => map_slices(
                        isa, [x, weight], y, Write::Overwrite,
                        inlined!(|[x, weight]| (x - average) * rstd * (offset + weight)),
                    ),
                }
            }
        }));
    });
}

fn backward_input(queue: &CpuQueue, norm: Norm<'_>, dy: View<'_>, dx: View<'_>, write: Write) {
    let (rows, width) = norm.x.shape().as_matrix();
    let dtype = norm.x.dtype();
    expect("norm backward: dy", dy, dtype, rows * width);
    expect("norm backward: dx", dx, dtype, rows * width);
    check_disjoint(&[dx], &[dy, norm.x, norm.weight, norm.rstd, norm.mean.unwrap_or(norm.rstd)]);
    with_float!(dtype, T => {
        let (x, dy, dx) = (Operand::<T>::new(norm.x), Operand::<T>::new(dy), Operand::<T>::new(dx));
        let weight = Operand::<T>::new(norm.weight);
        let (mean, rstd) = (norm.mean.map(Operand::<f32>::new), Operand::<f32>::new(norm.rstd));
        queue.for_each_range(rows, rows_per_task(rows, width), inlined!(|rows, isa| {
            // SAFETY: the weight is only read.
            let weight = unsafe { weight.read(0..width) };
            for row in rows {
                let elements = row * width..(row + 1) * width;
                // SAFETY: no operand overlaps `dx`, and each of its rows belongs to one task.
                let (x, dy, dx, rstd) = unsafe {
                    (
                        x.read(elements.clone()),
                        dy.read(elements.clone()),
                        dx.write(elements),
                        rstd.read(row..row + 1)[0],
                    )
                };
                // SAFETY: the means are only read.
                let mean = mean.as_ref().map(inlined!(|mean| unsafe { mean.read(row..row + 1)[0] }));
                backward_input_row(isa, NormRow { x, weight, offset: norm.offset, mean, rstd }, dy, dx, write);
            }
        }));
    });
}

/// One row of a [`Norm`].
struct NormRow<'a, T> {
    x: &'a [T],
    weight: &'a [T],
    offset: f32,
    mean: Option<f32>,
    rstd: f32,
}

#[inline(always)]
fn backward_input_row<T: Float>(isa: Isa, norm: NormRow<'_, T>, dy: &[T], dx: &mut [T], write: Write) {
    let NormRow { x, weight, offset, mean, rstd } = norm;
    let one_over_width = 1.0 / x.len() as f32;
    let shift = mean.unwrap_or(0.0);
    let [total, projection] = sum(
        [dy, weight, x],
        inlined!(|[dy, weight, x]| {
            let g = dy * (offset + weight);
            [g, g * (x - shift)]
        }),
    );
    let average = if mean.is_some() { total * one_over_width } else { 0.0 };
    // average(g · n) · n = (x - mean) · rstd² · average(g · (x - mean))
    let along = projection * one_over_width * rstd * rstd;
    map_slices(
        isa,
        [dy, weight, x],
        dx,
        write,
        inlined!(|[dy, weight, x]| rstd * (dy * (offset + weight) - average - (x - shift) * along)),
    );
}

/// Adds the gradients of the weight and the bias; `mean` is `None` for RMS normalization.
fn backward_weight(
    queue: &CpuQueue,
    [x, dy]: [View<'_>; 2],
    mean: Option<View<'_>>,
    rstd: View<'_>,
    dweight: View<'_>,
    dbias: Option<View<'_>>,
) {
    let (rows, width) = x.shape().as_matrix();
    with_float!(x.dtype(), T => {
        let (dy, x) = (Operand::<T>::new(dy), Operand::<T>::new(x));
        let (mean, rstd) = (mean.map(Operand::<f32>::new), Operand::<f32>::new(rstd));
        let operands = inlined!(|row: usize| {
            let elements = row * width..(row + 1) * width;
            // SAFETY: these operands are only read, and overlap no output.
            unsafe {
                let mean = mean.as_ref().map_or(0.0, inlined!(|mean| mean.read(row..row + 1)[0]));
                (dy.read(elements.clone()), x.read(elements), mean, rstd.read(row..row + 1)[0])
            }
        });
        match dbias {
            Some(dbias) => queue.add_sum_over_rows(rows, [dweight, dbias], inlined!(|rows, [dweight, dbias]| {
                for row in rows {
                    let (dy, x, mean, rstd) = operands(row);
                    for (((dweight, dbias), dy), x) in dweight.iter_mut().zip(dbias.iter_mut()).zip(dy).zip(x) {
                        *dweight += dy.load() * ((x.load() - mean) * rstd);
                        *dbias += dy.load();
                    }
                }
            })),
            None => queue.add_sum_over_rows(rows, [dweight], inlined!(|rows, [dweight]| {
                for row in rows {
                    let (dy, x, mean, rstd) = operands(row);
                    for ((dweight, dy), x) in dweight.iter_mut().zip(dy).zip(x) {
                        *dweight += dy.load() * ((x.load() - mean) * rstd);
                    }
                }
            })),
        }
    });
}
