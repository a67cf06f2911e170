//! Batch normalization over channels.
//!
//! The statistics of a channel are those of fixed groups of rows, merged in order in f64. A group sums differences from
//! its first row, so a mean that is large compared with the deviation cancels nothing.

use lockstep_plan::{DType, MemoryCategory};

use crate::{
    BatchNorm, BatchNormKernels, CopyKernels, CpuQueue, RunningStatistics, View, Write,
    cpu::{
        operands::{Operand, check_disjoint, check_elementwise, expect},
        simd::{BLOCK, Block, Float, Isa, inlined, with_float},
        tasks::{is_parallel, rows_per_task},
    },
};

/// Rows of one group of the statistics.
const ROWS_PER_GROUP: usize = 64;

/// Statistics of some rows for `N` channels.
struct Moments<const N: usize> {
    rows: f64,
    mean: [f64; N],
    /// Sum of squared differences from the mean.
    squares: [f64; N],
}

impl<const N: usize> Moments<N> {
    const NONE: Self = Self { rows: 0.0, mean: [0.0; N], squares: [0.0; N] };

    /// Adds the statistics of other rows (Chan et al., 1979).
    #[inline(always)]
    fn merge(&mut self, rows: f64, mean: &[f32], squares: &[f32]) {
        if rows == 0.0 {
            return;
        }
        let total = self.rows + rows;
        let (part, cross) = (rows / total, self.rows * rows / total);
        for ((own_mean, own_squares), (mean, squares)) in
            self.mean.iter_mut().zip(&mut self.squares).zip(mean.iter().zip(squares))
        {
            let difference = f64::from(*mean) - *own_mean;
            *own_mean += difference * part;
            *own_squares += f64::from(*squares) + difference * difference * cross;
        }
        self.rows = total;
    }
}

impl Moments<1> {
    /// Returns the variance with `correction` degrees of freedom taken off.
    fn variance(&self, correction: f64) -> f64 {
        self.squares[0] / (self.rows - correction).max(1.0)
    }
}

impl BatchNormKernels for CpuQueue {
    fn batch_norm_statistics(&self, x: View<'_>, statistics: View<'_>) {
        let (rows, channels) = x.shape().as_matrix();
        expect("batch_norm_statistics: statistics", statistics, DType::F32, 3 * channels);
        check_disjoint(&[statistics], &[x]);
        let groups = rows.div_ceil(ROWS_PER_GROUP);
        let elements = 2 * groups * channels;
        let scratch = self
            .arena
            .allocate(elements * size_of::<f32>(), MemoryCategory::Workspace)
            .unwrap_or_else(|error| panic!("statistics of {rows} rows: {error}"));
        let partials = Operand::<f32>::new(scratch.view(DType::F32, 0, [elements]));
        with_float!(x.dtype(), T => group_statistics::<T>(self, x, &partials));
        let statistics = Operand::<f32>::new(statistics);
        let per_task = if is_parallel(elements) { BLOCK } else { channels.max(1) };
        self.for_each_range(
            channels,
            per_task,
            inlined!(|range, _| {
                for first in range.clone().step_by(BLOCK) {
                    let n = BLOCK.min(range.end - first);
                    let mut moments = Moments::<BLOCK>::NONE;
                    for group in 0..groups {
                        let of_group = ROWS_PER_GROUP.min(rows - group * ROWS_PER_GROUP);
                        let at = 2 * group * channels + first;
                        // SAFETY: the partial statistics are complete, and now only read.
                        let (mean, squares) = unsafe {
                            (partials.read(at..at + n), partials.read(at + channels..at + channels + n))
                        };
                        moments.merge(of_group as f64, mean, squares);
                    }
                    // SAFETY: each channel belongs to one task, and the three statistics do not overlap.
                    let [count, mean, squares] = unsafe {
                        [0, 1, 2].map(|which| {
                            statistics.write(which * channels + first..which * channels + first + n)
                        })
                    };
                    count.fill(rows as f32);
                    mean.iter_mut().zip(&moments.mean).for_each(|(to, from)| *to = *from as f32);
                    squares.iter_mut().zip(&moments.squares).for_each(|(to, from)| *to = *from as f32);
                }
            }),
        );
    }

    fn merge_batch_norm(
        &self,
        parts: View<'_>,
        eps: f32,
        running: Option<RunningStatistics<'_>>,
        mean: View<'_>,
        rstd: View<'_>,
    ) {
        let channels = mean.elements();
        let count = parts.elements() / (3 * channels).max(1);
        expect("merge_batch_norm: parts", parts, DType::F32, count * 3 * channels);
        expect("merge_batch_norm: mean", mean, DType::F32, channels);
        expect("merge_batch_norm: rstd", rstd, DType::F32, channels);
        check_disjoint(&[mean, rstd], &[parts]);
        if let Some(running) = running {
            expect("merge_batch_norm: running mean", running.mean, DType::F32, channels);
            expect("merge_batch_norm: running variance", running.variance, DType::F32, channels);
            check_disjoint(&[running.mean, running.variance, mean, rstd], &[parts]);
        }
        let [parts, mean, rstd] = [parts, mean, rstd].map(Operand::<f32>::new);
        let running = running
            .map(|running| (running.momentum, [running.mean, running.variance].map(Operand::<f32>::new)));
        // Few numbers: the host thread merges them.
        for channel in 0..channels {
            let mut moments = Moments::<1>::NONE;
            for part in 0..count {
                // SAFETY: the parts are only read.
                let [rows, mean, squares] = [0, 1, 2].map(|which| unsafe {
                    let at = (3 * part + which) * channels + channel;
                    parts.read(at..at + 1)
                });
                moments.merge(f64::from(rows[0]), mean, squares);
            }
            let set = |operand: &Operand<'_, f32>, value: &dyn Fn(f32) -> f64| {
                // SAFETY: the outputs overlap no other operand, and one thread writes them.
                let element = unsafe { &mut operand.write(channel..channel + 1)[0] };
                *element = value(*element) as f32;
            };
            set(&mean, &|_| moments.mean[0]);
            set(&rstd, &|_| 1.0 / (moments.variance(0.0) + f64::from(eps)).sqrt());
            let Some((momentum, [running_mean, running_variance])) = &running else { continue };
            let momentum = f64::from(*momentum);
            let updated = |old: f32, new: f64| (1.0 - momentum) * f64::from(old) + momentum * new;
            if moments.rows > 0.0 {
                set(running_mean, &|old| updated(old, moments.mean[0]));
            }
            if moments.rows > 1.0 {
                set(running_variance, &|old| updated(old, moments.variance(1.0)));
            }
        }
    }

    fn batch_norm_totals(&self, statistics: View<'_>, totals: View<'_>) {
        let channels = totals.elements() / 2;
        expect("batch_norm_totals: statistics", statistics, DType::F32, 3 * channels);
        expect("batch_norm_totals: totals", totals, DType::F32, 2 * channels);
        check_disjoint(&[totals], &[statistics]);
        let [statistics, totals] = [statistics, totals].map(Operand::<f32>::new);
        // SAFETY: the operands are disjoint, and the host thread alone accesses them.
        let (statistics, totals) =
            unsafe { (statistics.read(0..2 * channels), totals.write(0..2 * channels)) };
        for channel in 0..channels {
            let (rows, mean) = (statistics[channel], statistics[channels + channel]);
            totals[channel] = rows;
            totals[channels + channel] = rows * mean;
        }
    }

    fn recentre_batch_norm(&self, totals: View<'_>, statistics: View<'_>) {
        let channels = totals.elements() / 2;
        expect("recentre_batch_norm: statistics", statistics, DType::F32, 3 * channels);
        expect("recentre_batch_norm: totals", totals, DType::F32, 2 * channels);
        check_disjoint(&[statistics], &[totals]);
        let [statistics, totals] = [statistics, totals].map(Operand::<f32>::new);
        // SAFETY: the operands are disjoint, and the host thread alone accesses them.
        let (statistics, totals) =
            unsafe { (statistics.write(0..3 * channels), totals.read(0..2 * channels)) };
        for channel in 0..channels {
            let [own_rows, own_mean, squares] =
                [0, 1, 2].map(|which| f64::from(statistics[which * channels + channel]));
            let rows = f64::from(totals[channel]);
            let mean = f64::from(totals[channels + channel]) / rows.max(1.0);
            let difference = own_mean - mean;
            statistics[channel] = rows as f32;
            statistics[channels + channel] = mean as f32;
            statistics[2 * channels + channel] = (squares + own_rows * difference * difference) as f32;
        }
    }

    fn reciprocal_deviation(&self, variance: View<'_>, eps: f32, rstd: View<'_>) {
        expect("reciprocal_deviation: variance", variance, DType::F32, rstd.elements());
        expect("reciprocal_deviation: rstd", rstd, DType::F32, variance.elements());
        check_elementwise(rstd, &[variance]);
        let channels = variance.elements();
        let [variance, rstd] = [variance, rstd].map(Operand::<f32>::new);
        for channel in 0..channels {
            // SAFETY: one thread reads and writes these.
            unsafe {
                let variance = variance.read(channel..channel + 1)[0];
                rstd.write(channel..channel + 1)[0] = 1.0 / (variance + eps).sqrt();
            }
        }
    }

    fn batch_norm(&self, norm: BatchNorm<'_>, bias: View<'_>, y: View<'_>) {
        let (rows, channels) = check("batch_norm", norm);
        expect("batch_norm: bias", bias, norm.x.dtype(), channels);
        expect("batch_norm: y", y, norm.x.dtype(), norm.x.elements());
        check_disjoint(&[y], &[norm.x, norm.weight, norm.mean, norm.rstd, bias]);
        with_float!(norm.x.dtype(), T => {
            let (x, y, bias) = (Operand::<T>::new(norm.x), Operand::<T>::new(y), Operand::<T>::new(bias));
            let weight = Operand::<T>::new(norm.weight);
            let [mean, rstd] = [norm.mean, norm.rstd].map(Operand::<f32>::new);
            self.for_each_range(rows, rows_per_task(rows, channels), inlined!(|rows, isa| {
                for first in (0..channels).step_by(BLOCK) {
                    let part = first..channels.min(first + BLOCK);
                    // SAFETY: these are only read.
                    let (weight, bias, mean, rstd) = unsafe {
                        (weight.read(part.clone()), bias.read(part.clone()), mean.read(part.clone()), rstd.read(part.clone()))
                    };
                    let mut scale = Block::ZERO;
                    let scale = &mut scale.0[..part.len()];
                    scale.iter_mut().zip(weight.iter().zip(rstd)).for_each(|(s, (w, r))| *s = w.load() * r);
                    let mut result = Block::ZERO;
                    let result = &mut result.0[..part.len()];
                    for row in rows.clone() {
                        let at = row * channels + part.start..row * channels + part.end;
                        // SAFETY: `x` is only read, and each row of `y` belongs to one task.
                        let (x, y) = unsafe { (x.read(at.clone()), y.write(at)) };
                        for ((((result, x), mean), scale), bias) in result.iter_mut().zip(x).zip(mean).zip(&*scale).zip(bias) {
                            *result = isa.mul_add(x.load() - mean, *scale, bias.load());
                        }
                        T::store_all(isa, result, y);
                    }
                }
            }));
        });
    }

    fn batch_norm_backward_sums(&self, norm: BatchNorm<'_>, dy: View<'_>, sums: View<'_>) {
        let (rows, channels) = check("batch_norm_backward_sums", norm);
        expect("batch_norm_backward_sums: dy", dy, norm.x.dtype(), norm.x.elements());
        expect("batch_norm_backward_sums: sums", sums, DType::F32, 2 * channels);
        check_disjoint(&[sums], &[dy, norm.x, norm.mean, norm.rstd]);
        self.zero(sums);
        let sums = sums.reshape([2, channels]);
        let outputs = [0, 1].map(|which| sums.rows(which..which + 1));
        // SAFETY: as just checked they overlap no output, and kernels write only their outputs.
        let (mean, rstd) = unsafe { (norm.mean.slice::<f32>(), norm.rstd.slice::<f32>()) };
        with_float!(norm.x.dtype(), T => {
            let (x, dy) = (Operand::<T>::new(norm.x), Operand::<T>::new(dy));
            self.add_sum_over_rows(rows, outputs, inlined!(|rows, [of_dy, of_product]| {
                for row in rows {
                    let at = row * channels..(row + 1) * channels;
                    // SAFETY: both are only read, and overlap no output.
                    let (x, dy) = unsafe { (x.read(at.clone()), dy.read(at)) };
                    let sums = of_dy.iter_mut().zip(of_product.iter_mut());
                    for (((x, dy), (of_dy, of_product)), (mean, rstd)) in x.iter().zip(dy).zip(sums).zip(mean.iter().zip(rstd)) {
                        *of_dy += dy.load();
                        *of_product += dy.load() * ((x.load() - mean) * rstd);
                    }
                }
            }));
        });
    }

    fn batch_norm_backward_input(
        &self,
        norm: BatchNorm<'_>,
        dy: View<'_>,
        sums: View<'_>,
        rows: usize,
        dx: View<'_>,
        write: Write,
    ) {
        let (own_rows, channels) = check("batch_norm_backward_input", norm);
        expect("batch_norm_backward_input: dy", dy, norm.x.dtype(), norm.x.elements());
        expect("batch_norm_backward_input: dx", dx, norm.x.dtype(), norm.x.elements());
        expect("batch_norm_backward_input: sums", sums, DType::F32, 2 * channels);
        check_disjoint(&[dx], &[dy, norm.x, norm.weight, norm.mean, norm.rstd, sums]);
        let one_over_rows = 1.0 / rows.max(1) as f32;
        with_float!(norm.x.dtype(), T => {
            let (x, dy, dx) = (Operand::<T>::new(norm.x), Operand::<T>::new(dy), Operand::<T>::new(dx));
            let weight = Operand::<T>::new(norm.weight);
            let [mean, rstd, sums] = [norm.mean, norm.rstd, sums].map(Operand::<f32>::new);
            self.for_each_range(own_rows, rows_per_task(own_rows, channels), inlined!(|range, isa| {
                for first in (0..channels).step_by(BLOCK) {
                    let part = first..channels.min(first + BLOCK);
                    let of_product = channels + part.start..channels + part.end;
                    // SAFETY: these are only read.
                    let (weight, mean, rstd, sums) = unsafe {
                        (
                            weight.read(part.clone()),
                            mean.read(part.clone()),
                            rstd.read(part.clone()),
                            [sums.read(part.clone()), sums.read(of_product)],
                        )
                    };
                    let line = Coefficients::new(weight, mean, rstd, sums, one_over_rows);
                    for row in range.clone() {
                        let at = row * channels + part.start..row * channels + part.end;
                        // SAFETY: `x` and `dy` are only read, and each row of `dx` belongs to one task.
                        let (x, dy, dx) = unsafe { (x.read(at.clone()), dy.read(at.clone()), dx.write(at)) };
                        line.gradient(isa, x, dy, dx, write);
                    }
                }
            }));
        });
    }
}

/// The gradient of the input as a function of `x` and `dy`, for a block of channels:
/// `scale · (dy - average - (x - mean) · slope)`, with `slope = rstd · Σ(dy · xhat) / rows`.
struct Coefficients {
    mean: Block,
    scale: Block,
    average: Block,
    slope: Block,
}

impl Coefficients {
    #[inline(always)]
    fn new<T: Float>(
        weight: &[T],
        mean: &[f32],
        rstd: &[f32],
        [of_dy, of_product]: [&[f32]; 2],
        one_over_rows: f32,
    ) -> Self {
        let mut own =
            Self { mean: Block::ZERO, scale: Block::ZERO, average: Block::ZERO, slope: Block::ZERO };
        for (i, weight) in weight.iter().enumerate() {
            own.mean.0[i] = mean[i];
            own.scale.0[i] = weight.load() * rstd[i];
            own.average.0[i] = of_dy[i] * one_over_rows;
            own.slope.0[i] = of_product[i] * one_over_rows * rstd[i];
        }
        own
    }

    /// Computes a row of the gradient.
    #[inline(always)]
    fn gradient<T: Float>(&self, isa: Isa, x: &[T], dy: &[T], dx: &mut [T], write: Write) {
        let n = dx.len();
        assert!(n <= BLOCK && x.len() == n && dy.len() == n);
        let mut result = Block::ZERO;
        for i in 0..n {
            let centered = x[i].load() - self.mean.0[i];
            let rest = isa.mul_add(-centered, self.slope.0[i], dy[i].load() - self.average.0[i]);
            result.0[i] = self.scale.0[i] * rest;
        }
        if write == Write::Accumulate {
            result.0.iter_mut().zip(&*dx).for_each(|(result, earlier)| *result += earlier.load());
        }
        T::store_all(isa, &result.0[..n], dx);
    }
}

/// Checks the operands, and returns the number of rows and of channels.
fn check(kernel: &str, norm: BatchNorm<'_>) -> (usize, usize) {
    let BatchNorm { x, weight, mean, rstd } = norm;
    let (rows, channels) = x.shape().as_matrix();
    expect(format_args!("{kernel}: weight"), weight, x.dtype(), channels);
    expect(format_args!("{kernel}: mean"), mean, DType::F32, channels);
    expect(format_args!("{kernel}: rstd"), rstd, DType::F32, channels);
    (rows, channels)
}

/// Writes mean and sum of squared differences of each group of rows to `partials`, f32 `[groups, 2, channels]`.
fn group_statistics<T: Float>(queue: &CpuQueue, x: View<'_>, partials: &Operand<'_, f32>) {
    let (rows, channels) = x.shape().as_matrix();
    let groups = rows.div_ceil(ROWS_PER_GROUP);
    let x = Operand::<T>::new(x);
    let per_task = if is_parallel(rows * channels) { 1 } else { groups.max(1) };
    queue.for_each_range(
        groups,
        per_task,
        inlined!(|range, _| {
            for group in range {
                let rows = group * ROWS_PER_GROUP..rows.min((group + 1) * ROWS_PER_GROUP);
                for first in (0..channels).step_by(BLOCK) {
                    let n = BLOCK.min(channels - first);
                    // SAFETY: `x` is only read.
                    let part =
                        |row: usize| unsafe { x.read(row * channels + first..row * channels + first + n) };
                    let (mut shift, mut sums, mut squares) = (Block::ZERO, Block::ZERO, Block::ZERO);
                    shift.0.iter_mut().zip(part(rows.start)).for_each(|(shift, x)| *shift = x.load());
                    for row in rows.clone() {
                        let sums = sums.0.iter_mut().zip(&mut squares.0);
                        for ((x, shift), (sum, squares)) in part(row).iter().zip(&shift.0).zip(sums) {
                            let difference = x.load() - shift;
                            *sum += difference;
                            *squares += difference * difference;
                        }
                    }
                    let one_over_rows = 1.0 / rows.len() as f32;
                    let at = 2 * group * channels + first;
                    // SAFETY: each group belongs to one task, and its two parts do not overlap.
                    let (mean, of_squares) = unsafe {
                        (partials.write(at..at + n), partials.write(at + channels..at + channels + n))
                    };
                    for i in 0..n {
                        let average = sums.0[i] * one_over_rows;
                        mean[i] = shift.0[i] + average;
                        // Not below zero; NaN stays NaN.
                        let squares = squares.0[i] - sums.0[i] * average;
                        of_squares[i] = if squares < 0.0 { 0.0 } else { squares };
                    }
                }
            }
        }),
    );
}
