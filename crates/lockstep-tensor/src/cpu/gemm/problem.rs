//! A product whose operands are slices: the form in which the loops around the micro-kernels take it.

use super::{
    block_lines::BlockLines,
    operand::{Operand, Order},
    store::{Target, Window},
};
use crate::{BlockGemm, BlockLayout, Gemm, GemmLayout, View, Write, cpu::simd::Float};

/// A product whose operands are slices: `C [m, n] (+)= A [m, k] · B [k, n] (+ bias [n])`.
#[derive(Clone, Copy)]
pub(super) struct Problem<'a, T, C> {
    pub(super) m: usize,
    /// Rows of the whole product, of which these `m` are a part; they select the algorithm and so the bits.
    pub(super) of_rows: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) a: Operand<'a, T>,
    pub(super) b: Operand<'a, T>,
    pub(super) c: Target<'a, C>,
    pub(super) bias: Option<&'a [T]>,
    pub(super) write: Write,
}

/// Checks the shapes of a part of a product, and forms the slices.
pub(super) fn problem<'a, T: Float, C: Float>((gemm, of_rows): (Gemm<'a>, usize)) -> Problem<'a, T, C> {
    let Gemm { layout, a, b, c, bias, write } = gemm;
    let (m, n) = c.shape().as_matrix();
    let (a_rows, a_columns) = a.shape().as_matrix();
    let (b_rows, b_columns) = b.shape().as_matrix();
    let (a_order, k) = match layout {
        GemmLayout::NN | GemmLayout::NT => (Order::AlongDepth, a_columns),
        GemmLayout::TN => (Order::AcrossDepth, a_rows),
    };
    let b_order = match layout {
        GemmLayout::NT => Order::AlongDepth,
        GemmLayout::NN | GemmLayout::TN => Order::AcrossDepth,
    };
    let expected = |order, outer| if order == Order::AlongDepth { (outer, k) } else { (k, outer) };
    assert!(
        (a_rows, a_columns) == expected(a_order, m)
            && (b_rows, b_columns) == expected(b_order, n)
            && bias.is_none_or(|bias| bias.elements() == n),
        "the shapes of a {layout:?} product do not fit: a {a:?}, b {b:?}, c {c:?}, bias {bias:?}"
    );
    assert!(
        of_rows == m || (of_rows > m && layout != GemmLayout::TN),
        "{m} rows are no part of a {layout:?} product of {of_rows}"
    );
    // SAFETY: `c` overlaps no other operand (checked by the caller), and no other kernel runs meanwhile: a queue runs
    // one kernel at a time, and views cannot be sent to another thread.
    let (a, b, bias, c) = unsafe {
        (a.slice::<T>(), b.slice::<T>(), bias.map(|bias: View<'a>| bias.slice::<T>()), c.slice_mut::<C>())
    };
    Problem {
        m,
        of_rows,
        n,
        k,
        a: Operand::new(a, a_columns, a_order),
        b: Operand::new(b, b_columns, b_order),
        c: Target::Matrix(Window::new(c.as_mut_ptr(), n)),
        bias,
        write,
    }
}

/// Checks the shapes of a product with quantized weights, and forms the slices.
pub(super) fn block_problem<'a, T: Float, C: Float>(gemm: BlockGemm<'a>) -> Problem<'a, T, C> {
    let BlockGemm { layout, a, b, c, bias, write } = gemm;
    let ((m, n), [rows, columns]) = (c.shape().as_matrix(), b.shape());
    let (order, expected_n, k) = match layout {
        GemmLayout::NT => (Order::AlongDepth, rows, columns),
        GemmLayout::NN => (Order::AcrossDepth, columns, rows),
        GemmLayout::TN => panic!("no TN product has quantized weights: b {b:?}"),
    };
    assert!(
        a.shape().as_matrix() == (m, k) && expected_n == n && bias.is_none_or(|bias| bias.elements() == n),
        "the shapes of a {layout:?} product with quantized weights do not fit: a {a:?}, b {b:?}, c {c:?}, bias {bias:?}"
    );
    assert!(
        layout == GemmLayout::NT || b.layout() == BlockLayout::Rows,
        "no {layout:?} product has interleaved weights: b {b:?}"
    );
    // SAFETY: as in `problem`.
    let (a, lines, bias, c) = unsafe {
        (
            a.slice::<T>(),
            BlockLines::new(&b),
            bias.map(|bias: View<'a>| bias.slice::<T>()),
            c.slice_mut::<C>(),
        )
    };
    Problem {
        m,
        of_rows: m,
        n,
        k,
        a: Operand::new(a, k, Order::AlongDepth),
        b: Operand::blocks(lines, order),
        c: Target::Matrix(Window::new(c.as_mut_ptr(), n)),
        bias,
        write,
    }
}
