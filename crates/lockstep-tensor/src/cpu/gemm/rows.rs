//! Products with few rows, `Y = X · Wᵀ` with up to eight rows of X. Reading W is the bottleneck, so W is read once, in
//! place. Each element of Y is a dot product of a line of X and a line of W: other additions than those of more rows.

use std::ops::Range;

use super::{lanes::Dot, problem::Problem};
use crate::{
    Summation, Write,
    cpu::simd::{Float, inlined},
};

/// Largest number of rows of X for which this is faster than packing W.
const MAX_ROWS: usize = 8;
/// Approximate number of elements of W that a task reads.
const TASK_ELEMENTS: usize = 1 << 16;
/// Elements of the longest vector.
const MAX_ELEMENTS: usize = 32;

/// Returns true if a product has few rows, both operands are contiguous along the depth, and the order of additions may
/// depend on the number of rows.
pub(super) fn fits<T, C>(problem: &Problem<'_, T, C>, summation: Summation) -> bool {
    let are_lines = problem.a.is_stored_along_depth() && problem.b.is_stored_along_depth();
    summation == Summation::ByShape && problem.of_rows <= MAX_ROWS && are_lines
}

/// Returns the number of columns of a task.
fn task_columns<T, C>(problem: &Problem<'_, T, C>) -> usize {
    (TASK_ELEMENTS / problem.k.max(1)).clamp(8, 1024)
}

/// Returns the number of tasks of `problem`, which [`fits`].
pub(super) fn tasks<T, C>(problem: &Problem<'_, T, C>) -> usize {
    problem.n.div_ceil(task_columns(problem))
}

/// Runs one of the tasks, with vectors `V`. Tasks write different columns.
///
/// # Safety
/// The CPU must have the instructions of `V`.
pub(super) unsafe fn task<V: Dot<T>, T: Float, C: Float>(problem: &Problem<'_, T, C>, index: usize) {
    let columns = task_columns(problem);
    let columns = index * columns..((index + 1) * columns).min(problem.n);
    // SAFETY: the caller's promise; nothing else writes these columns.
    unsafe {
        V::compiled(inlined!(|| match problem.m {
            0 => {}
            1 => dots::<V, T, C, 1, 8>(problem, columns),
            2 => dots::<V, T, C, 2, 4>(problem, columns),
            3 => dots::<V, T, C, 3, 2>(problem, columns),
            4 => dots::<V, T, C, 4, 2>(problem, columns),
            5 => dots::<V, T, C, 5, 1>(problem, columns),
            6 => dots::<V, T, C, 6, 1>(problem, columns),
            7 => dots::<V, T, C, 7, 1>(problem, columns),
            _ => dots::<V, T, C, MAX_ROWS, 1>(problem, columns),
        }));
    }
}

/// Computes columns `columns` of the product of `ROWS` rows, `LINES` lines of W at a time.
///
/// # Safety
/// The CPU must have the instructions of `V`, and nothing else may use these columns of C.
#[inline(always)]
unsafe fn dots<V: Dot<T>, T: Float, C: Float, const ROWS: usize, const LINES: usize>(
    problem: &Problem<'_, T, C>,
    columns: Range<usize>,
) {
    let x: [&[T]; ROWS] = std::array::from_fn(|i| problem.a.line(i));
    let whole = columns.end - columns.len() % LINES;
    for column in (columns.start..whole).step_by(LINES) {
        // SAFETY: the caller's promises, here and below.
        let sums =
            unsafe { dot::<V, T, ROWS, LINES>(x, std::array::from_fn(|j| problem.b.line(column + j))) };
        for j in 0..LINES {
            // SAFETY: as above.
            unsafe { finish(problem, column + j, sums.map(|row| row[j])) };
        }
    }
    for column in whole..columns.end {
        // SAFETY: as above.
        unsafe {
            let sums = dot::<V, T, ROWS, 1>(x, [problem.b.line(column)]);
            finish(problem, column, sums.map(|[sum]| sum));
        }
    }
}

/// Computes the dot products of lines of the same length.
///
/// # Safety
/// The CPU must have the instructions of `V`.
#[inline(always)]
unsafe fn dot<V: Dot<T>, T: Float, const ROWS: usize, const LINES: usize>(
    x: [&[T]; ROWS],
    w: [&[T]; LINES],
) -> [[f32; LINES]; ROWS] {
    let k = x[0].len();
    assert!(x.iter().all(|line| line.len() == k) && w.iter().all(|line| line.len() == k));
    let whole = k - k % V::ELEMENTS;
    // SAFETY: `V::ELEMENTS` elements follow each index below `whole`, and each padded remainder is as long as the
    // longest vector; the caller promises the instructions.
    unsafe {
        let mut sums = [[V::zero(); LINES]; ROWS];
        let mut step = inlined!(|x: [*const T; ROWS], w: [*const T; LINES]| {
            let x: [V; ROWS] = x.map(|x| V::load_elements(x));
            for (j, w) in w.into_iter().enumerate() {
                let w = V::load_elements(w);
                for (sums, x) in sums.iter_mut().zip(x) {
                    sums[j] = V::multiply_add(x, w, sums[j]);
                }
            }
        });
        for index in (0..whole).step_by(V::ELEMENTS) {
            step(x.map(|x| x.as_ptr().add(index)), w.map(|w| w.as_ptr().add(index)));
        }
        if whole < k {
            let (x, w) = (x.map(|x| padded(&x[whole..])), w.map(|w| padded(&w[whole..])));
            step(x.each_ref().map(|x| x.as_ptr()), w.each_ref().map(|w| w.as_ptr()));
        }
        sums.map(|row| row.map(|sum| sum.total()))
    }
}

/// Returns the elements, padded with zeros.
#[inline(always)]
fn padded<T: Float>(rest: &[T]) -> [T; MAX_ELEMENTS] {
    let mut elements = [T::zeroed(); MAX_ELEMENTS];
    elements[..rest.len()].copy_from_slice(rest);
    elements
}

/// Writes a column of C: adds bias and old values, and rounds.
///
/// # Safety
/// Nothing else may use the column.
#[inline(always)]
unsafe fn finish<T: Float, C: Float, const ROWS: usize>(
    problem: &Problem<'_, T, C>,
    column: usize,
    sums: [f32; ROWS],
) {
    let bias = problem.bias.map_or(0.0, |bias| bias[column].load());
    for (i, sum) in sums.into_iter().enumerate() {
        // SAFETY: the caller's promise; C has `ROWS` rows and this column.
        let out = unsafe { &mut problem.c.row(i, column, 1)[0] };
        let sum = sum + bias;
        *out = C::store(if problem.write == Write::Accumulate { sum + out.load() } else { sum });
    }
}
