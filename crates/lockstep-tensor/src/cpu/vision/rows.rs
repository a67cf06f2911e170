//! Copies of single rows of sequences: the class token of a vision transformer, and the row that a head reads.

use lockstep_plan::DType;

use crate::{
    CpuQueue, View, Write,
    cpu::{
        operands::{Operand, check_disjoint, expect},
        simd::{Float, Isa, inlined, map_slices, with_float},
    },
};

/// Returns the dimensions `[batch, sequence, width]`.
fn sequences_of(name: &str, view: View<'_>) -> [usize; 3] {
    match *view.shape().dims() {
        [batch, sequence, width] => [batch, sequence, width],
        _ => panic!("{name}: {view:?} must be [batch, sequence, width]"),
    }
}

pub(in crate::cpu) fn prepend_row(queue: &CpuQueue, row: View<'_>, x: View<'_>, y: View<'_>) {
    let [batch, len, width] = sequences_of("prepend_row: x", x);
    expect("prepend_row: row", row, x.dtype(), width);
    expect("prepend_row: y", y, x.dtype(), batch * (len + 1) * width);
    check_disjoint(&[y], &[row, x]);
    with_float!(x.dtype(), T => {
        let [first, x, y] = [row, x, y].map(Operand::<T>::new);
        queue.for_each_row(batch * (len + 1), width, inlined!(|row, _| {
            let (sequence, index) = (row / (len + 1), row % (len + 1));
            // SAFETY: the inputs are only read, and each row of `y` belongs to one task.
            unsafe {
                let from = match index.checked_sub(1) {
                    Some(index) => x.read((sequence * len + index) * width..(sequence * len + index + 1) * width),
                    None => first.read(0..width),
                };
                y.write(row * width..(row + 1) * width).copy_from_slice(from);
            }
        }));
    });
}

pub(in crate::cpu) fn prepend_row_backward_input(queue: &CpuQueue, dy: View<'_>, dx: View<'_>, write: Write) {
    let [batch, len, width] = sequences_of("prepend_row_backward_input: dx", dx);
    expect("prepend_row_backward_input: dy", dy, dx.dtype(), batch * (len + 1) * width);
    check_disjoint(&[dx], &[dy]);
    with_float!(dx.dtype(), T => {
        let [dy, dx] = [dy, dx].map(Operand::<T>::new);
        queue.for_each_row(batch * len, width, inlined!(|row, isa| {
            let from = (row + row / len + 1) * width;
            // SAFETY: `dy` is only read, and each row of `dx` belongs to one task.
            let (dy, dx) = unsafe { (dy.read(from..from + width), dx.write(row * width..(row + 1) * width)) };
            copy_row(isa, dy, dx, write);
        }));
    });
}

pub(in crate::cpu) fn prepend_row_backward_row(queue: &CpuQueue, dy: View<'_>, drow: View<'_>) {
    let [batch, longer, width] = sequences_of("prepend_row_backward_row: dy", dy);
    expect("prepend_row_backward_row: drow", drow, DType::F32, width);
    check_disjoint(&[drow], &[dy]);
    with_float!(dy.dtype(), T => {
        let dy = Operand::<T>::new(dy);
        queue.add_sum_over_rows(batch, [drow], inlined!(|range, [sum]| {
            for sequence in range {
                let first = sequence * longer * width;
                // SAFETY: `dy` is only read, and overlaps no output.
                let dy = unsafe { dy.read(first..first + width) };
                sum.iter_mut().zip(dy).for_each(|(sum, dy)| *sum += dy.load());
            }
        }));
    });
}

/// Row of each sequence that is selected.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) enum Selection<'a> {
    /// One row, the same of every sequence.
    Same(usize),
    /// A row of each sequence, u32 `[batch]`.
    Each(View<'a>),
}

impl<'a> Selection<'a> {
    /// Returns the rows of `batch` sequences, given those that the views of an operation write.
    fn rows(self, name: &str, [batch, len]: [usize; 2], written: View<'_>) -> Rows<'a> {
        match self {
            Self::Same(index) => {
                assert!(index < len, "{name}: row {index} of sequences of {len}");
                Rows::Same(index)
            }
            Self::Each(indices) => {
                expect(format!("{name}: indices"), indices, DType::U32, batch);
                check_disjoint(&[written], &[indices]);
                // SAFETY: the indices overlap no output, and kernels write only their outputs.
                Rows::Each(unsafe { indices.slice::<u32>() })
            }
        }
    }
}

/// Rows of a [`Selection`].
#[derive(Clone, Copy)]
enum Rows<'a> {
    Same(usize),
    Each(&'a [u32]),
}

impl Rows<'_> {
    #[inline(always)]
    fn of(self, sequence: usize) -> usize {
        match self {
            Self::Same(index) => index,
            Self::Each(indices) => indices[sequence] as usize,
        }
    }
}

pub(in crate::cpu) fn select_row(queue: &CpuQueue, x: View<'_>, selection: Selection<'_>, y: View<'_>) {
    let [batch, len, width] = sequences_of("select_row: x", x);
    let rows = selection.rows("select_row", [batch, len], y);
    expect("select_row: y", y, x.dtype(), batch * width);
    check_disjoint(&[y], &[x]);
    with_float!(x.dtype(), T => {
        let [x, y] = [x, y].map(Operand::<T>::new);
        queue.for_each_row(batch, width, inlined!(|sequence, _| {
            let index = rows.of(sequence);
            // SAFETY: each row of `y` belongs to one task.
            let y = unsafe { y.write(sequence * width..(sequence + 1) * width) };
            if index < len {
                let from = (sequence * len + index) * width;
                // SAFETY: `x` is only read, and does not overlap `y`.
                y.copy_from_slice(unsafe { x.read(from..from + width) });
            } else {
                y.fill(T::store(f32::NAN));
            }
        }));
    });
}

pub(in crate::cpu) fn select_row_backward(
    queue: &CpuQueue,
    dy: View<'_>,
    selection: Selection<'_>,
    dx: View<'_>,
    write: Write,
) {
    let [batch, len, width] = sequences_of("select_row_backward: dx", dx);
    let rows = selection.rows("select_row_backward", [batch, len], dx);
    expect("select_row_backward: dy", dy, dx.dtype(), batch * width);
    check_disjoint(&[dx], &[dy]);
    with_float!(dx.dtype(), T => {
        let [dy, dx] = [dy, dx].map(Operand::<T>::new);
        queue.for_each_row(batch * len, width, inlined!(|row, isa| {
            let sequence = row / len;
            let is_selected = row % len == rows.of(sequence);
            if !is_selected && write == Write::Accumulate {
                return;
            }
            // SAFETY: `dy` is only read, and each row of `dx` belongs to one task.
            let (dy, dx) = unsafe {
                (dy.read(sequence * width..(sequence + 1) * width), dx.write(row * width..(row + 1) * width))
            };
            if is_selected {
                copy_row(isa, dy, dx, write);
            } else {
                dx.fill(T::store(0.0));
            }
        }));
    });
}

/// Copies a row, or adds it to the earlier values.
#[inline(always)]
fn copy_row<T: Float>(isa: Isa, from: &[T], to: &mut [T], write: Write) {
    match write {
        Write::Overwrite => to.copy_from_slice(from),
        Write::Accumulate => map_slices(isa, [from], to, write, inlined!(|[x]| x)),
    }
}
