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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        CopyKernels,
        cpu::testing::{
            ACTIVATIONS, assert_close, floats, on_every_queue, random_of, tensor, tolerance, values,
        },
    };

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]

        #[test]
        fn a_prepended_and_a_selected_row_and_their_gradients_match_the_reference(
            (batch, len, width) in prop_oneof![(1usize..5, 1usize..6, 1usize..40), (20usize..80, 10usize..12, 200usize..300)],
            place in 0.0..1.0,
        ) {
            let index = (place * len as f64) as usize;
            for dtype in ACTIVATIONS {
                let x = random_of(dtype, 1, batch * len * width);
                let [token, before] = [2, 3].map(|seed| random_of(dtype, seed, width));
                let dy = random_of(dtype, 4, batch * (len + 1) * width);
                let run = |queue: &CpuQueue| {
                    let sequences = |values: &[f64]| floats(dtype, [batch, len, width], values);
                    let longer = |values: &[f64]| floats(dtype, [batch, len + 1, width], values);
                    let nan = vec![f64::NAN; batch * len * width];
                    let (x_tensor, token, dy) = (sequences(&x), floats(dtype, [width], &token), longer(&dy));
                    let (y, dx, added) = (longer(&values(dy.view())), sequences(&nan), sequences(&x));
                    let drow = floats(DType::F32, [width], &before);
                    let (selected, spread, more) =
                        (floats(dtype, [batch, width], &vec![9.0; batch * width]), sequences(&nan), sequences(&x));
                    queue.prepend_row(token.view(), x_tensor.view(), y.view());
                    queue.prepend_row_backward_row(dy.view(), drow.view());
                    queue.prepend_row_backward_input(dy.view(), dx.view(), Write::Overwrite);
                    queue.prepend_row_backward_input(dy.view(), added.view(), Write::Accumulate);
                    queue.select_row(x_tensor.view(), index, selected.view());
                    queue.select_row_backward(selected.view(), index, spread.view(), Write::Overwrite);
                    queue.select_row_backward(selected.view(), index, more.view(), Write::Accumulate);
                    [y, drow, dx, added, selected, spread, more].map(|tensor| values(tensor.view())).to_vec()
                };
                let y: Vec<f64> = x.chunks(len * width).flat_map(|x| [&token, x].concat()).collect();
                let dx: Vec<f64> = dy.chunks((len + 1) * width).flat_map(|dy| dy[width..].to_vec()).collect();
                let added: Vec<f64> = dx.iter().zip(&x).map(|(a, b)| a + b).collect();
                let sum_at = |i: usize| dy.iter().skip(i).step_by((len + 1) * width).sum::<f64>();
                let drow: Vec<f64> = (0..width).map(|i| before[i] + sum_at(i)).collect();
                let selected: Vec<f64> = x.chunks(len * width).flat_map(|x| x[index * width..][..width].to_vec()).collect();
                let is_selected = |i: usize| i / width % len == index;
                let spread: Vec<f64> = x.iter().enumerate().map(|(i, x)| if is_selected(i) { *x } else { 0.0 }).collect();
                let more: Vec<f64> = x.iter().zip(&spread).map(|(a, b)| a + b).collect();
                on_every_queue(run, |results| {
                    assert_eq!((&results[0], &results[2]), (&y, &dx));
                    assert_close("drow", &results[1], &drow, 2e-6, 1e-5);
                    assert_close("dx added", &results[3], &added, tolerance(dtype), 1e-6);
                    assert_eq!((&results[4], &results[5]), (&selected, &spread));
                    assert_close("dx of the selection added", &results[6], &more, tolerance(dtype), 1e-6);
                });
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]

        #[test]
        fn a_row_of_each_sequence_and_its_gradient_match_the_reference(
            (batch, len, width) in prop_oneof![(1usize..5, 1usize..6, 1usize..40), (20usize..80, 10usize..12, 200usize..300)],
            seed in 0u32..100,
        ) {
            let indices: Vec<u32> = (0..batch as u32).map(|b| (b * 7 + seed) % len as u32).collect();
            for dtype in ACTIVATIONS {
                let (x, dy) = (random_of(dtype, 1, batch * len * width), random_of(dtype, 2, batch * width));
                let run = |queue: &CpuQueue| {
                    let sequences = |values: &[f64]| floats(dtype, [batch, len, width], values);
                    let (x_tensor, rows) = (sequences(&x), tensor(&indices));
                    let [y, dy] = [&vec![9.0; batch * width], &dy].map(|values| floats(dtype, [batch, width], values));
                    let (dx, added) = (sequences(&vec![f64::NAN; batch * len * width]), sequences(&x));
                    queue.select_rows(x_tensor.view(), rows.view(), y.view());
                    queue.select_rows_backward(dy.view(), rows.view(), dx.view(), Write::Overwrite);
                    queue.select_rows_backward(dy.view(), rows.view(), added.view(), Write::Accumulate);
                    [y, dx, added].map(|tensor| values(tensor.view())).to_vec()
                };
                let first = |b: usize| (b * len + indices[b] as usize) * width;
                let y: Vec<f64> = (0..batch).flat_map(|b| x[first(b)..][..width].to_vec()).collect();
                let mut dx = vec![0.0; x.len()];
                (0..batch).for_each(|b| dx[first(b)..][..width].copy_from_slice(&dy[b * width..][..width]));
                let added: Vec<f64> = x.iter().zip(&dx).map(|(a, b)| a + b).collect();
                on_every_queue(run, |results| {
                    assert_eq!((&results[0], &results[1]), (&y, &dx));
                    assert_close("dx added", &results[2], &added, tolerance(dtype), 1e-6);
                });
            }
        }
    }

    #[test]
    fn an_index_beyond_its_sequence_gives_nan_and_no_gradient() {
        let queue = CpuQueue::new(1, &crate::Arena::new()).unwrap();
        let x = floats(DType::F32, [2, 2, 1], &[1.0, 2.0, 3.0, 4.0]);
        let (y, rows) = (floats(DType::F32, [2, 1], &[0.0; 2]), tensor(&[1_u32, 2]));
        queue.select_rows(x.view(), rows.view(), y.view());
        assert!(values(y.view())[0] == 2.0 && values(y.view())[1].is_nan(), "{:?}", values(y.view()));
        let dy = floats(DType::F32, [2, 1], &[5.0, 6.0]);
        queue.select_rows_backward(dy.view(), rows.view(), x.view(), Write::Overwrite);
        assert_eq!(values(x.view()), [0.0, 5.0, 0.0, 0.0]);
    }

    #[test]
    #[should_panic(expected = "select_row: row 3 of sequences of 3")]
    fn a_row_beyond_the_sequence_is_refused() {
        let queue = CpuQueue::new(1, &crate::Arena::new()).unwrap();
        let (x, y) = (floats(DType::F32, [1, 3, 2], &[0.0; 6]), floats(DType::F32, [2], &[0.0; 2]));
        queue.select_row(x.view(), 3, y.view());
    }
}
