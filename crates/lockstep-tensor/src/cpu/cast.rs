//! Conversions between float types, copies, transpositions, and zeroing: kernels that only move memory.

use half::{bf16, f16};
use lockstep_plan::DType;

use super::{
    CpuQueue,
    operands::{Operand, check_disjoint, expect},
    simd::{Float, inlined, with_float},
    tasks::elements_per_task,
    vision::{self, Selection},
};
use crate::{CopyKernels, Element, View, Write};

/// Calls a function generic over the element type of a view's dtype.
macro_rules! with_element {
    ($dtype:expr, $function:ident($($argument:expr),*)) => {
        match $dtype {
            DType::F32 => $function::<f32>($($argument),*),
            DType::BF16 => $function::<bf16>($($argument),*),
            DType::F16 => $function::<f16>($($argument),*),
            DType::I32 => $function::<i32>($($argument),*),
            DType::U32 => $function::<u32>($($argument),*),
            DType::U8 => $function::<u8>($($argument),*),
        }
    };
}

impl CopyKernels for CpuQueue {
    fn cast(&self, x: View<'_>, y: View<'_>) {
        expect("cast: y", y, y.dtype(), x.elements());
        check_disjoint(&[y], &[x]);
        match (x.dtype(), y.dtype()) {
            (from, to) if from == to => with_element!(from, copy_elements(self, x, y)),
            (DType::F32, DType::BF16) => convert::<f32, bf16>(self, x, y),
            (DType::F32, DType::F16) => convert::<f32, f16>(self, x, y),
            (DType::BF16, DType::F32) => convert::<bf16, f32>(self, x, y),
            (DType::BF16, DType::F16) => convert::<bf16, f16>(self, x, y),
            (DType::F16, DType::F32) => convert::<f16, f32>(self, x, y),
            (DType::F16, DType::BF16) => convert::<f16, bf16>(self, x, y),
            (from, to) => panic!("cast converts between f32, bf16 and f16, not from {from} to {to}"),
        }
    }

    fn transpose_blocks(&self, x: View<'_>, y: View<'_>) {
        let &[a, b, width] = x.shape().dims() else {
            panic!("blocks of three dimensions are transposed, not {x:?}");
        };
        assert_eq!(y.shape().dims(), [b, a, width], "{x:?} with its first two dimensions exchanged");
        expect("transpose_blocks: y", y, x.dtype(), x.elements());
        check_disjoint(&[y], &[x]);
        with_float!(x.dtype(), T => {
            let (x, y) = (Operand::<T>::new(x), Operand::<T>::new(y));
            self.for_each_row(a * b, width, inlined!(|row, _| {
                let from = (row % a * b + row / a) * width;
                // SAFETY: the views do not overlap, and each row of `y` belongs to one task.
                unsafe {
                    let y = y.write(row * width..(row + 1) * width);
                    y.copy_from_slice(x.read(from..from + width));
                }
            }));
        });
    }

    fn prepend_row(&self, row: View<'_>, x: View<'_>, y: View<'_>) {
        vision::prepend_row(self, row, x, y);
    }

    fn prepend_row_backward_input(&self, dy: View<'_>, dx: View<'_>, write: Write) {
        vision::prepend_row_backward_input(self, dy, dx, write);
    }

    fn prepend_row_backward_row(&self, dy: View<'_>, drow: View<'_>) {
        vision::prepend_row_backward_row(self, dy, drow);
    }

    fn select_row(&self, x: View<'_>, index: usize, y: View<'_>) {
        vision::select_row(self, x, Selection::Same(index), y);
    }

    fn select_row_backward(&self, dy: View<'_>, index: usize, dx: View<'_>, write: Write) {
        vision::select_row_backward(self, dy, Selection::Same(index), dx, write);
    }

    fn select_rows(&self, x: View<'_>, indices: View<'_>, y: View<'_>) {
        vision::select_row(self, x, Selection::Each(indices), y);
    }

    fn select_rows_backward(&self, dy: View<'_>, indices: View<'_>, dx: View<'_>, write: Write) {
        vision::select_row_backward(self, dy, Selection::Each(indices), dx, write);
    }

    fn zero(&self, y: View<'_>) {
        with_element!(y.dtype(), zero_elements(self, y));
    }
}

fn convert<A: Float, B: Float>(queue: &CpuQueue, x: View<'_>, y: View<'_>) {
    let elements = x.elements();
    let (x, y) = (Operand::<A>::new(x), Operand::<B>::new(y));
    queue.for_each_range(
        elements,
        elements_per_task(elements),
        inlined!(|range, _| {
            // SAFETY: the views do not overlap, and each range of `y` belongs to one task.
            let (x, y) = unsafe { (x.read(range.clone()), y.write(range)) };
            for (y, x) in y.iter_mut().zip(x) {
                *y = B::store(x.load());
            }
        }),
    );
}

fn copy_elements<T: Element>(queue: &CpuQueue, x: View<'_>, y: View<'_>) {
    let elements = x.elements();
    let (x, y) = (Operand::<T>::new(x), Operand::<T>::new(y));
    queue.for_each_range(
        elements,
        elements_per_task(elements),
        inlined!(|range, _| {
            // SAFETY: the views do not overlap, and each range of `y` belongs to one task.
            unsafe { y.write(range.clone()).copy_from_slice(x.read(range)) }
        }),
    );
}

fn zero_elements<T: Element>(queue: &CpuQueue, y: View<'_>) {
    let elements = y.elements();
    let y = Operand::<T>::new(y);
    queue.for_each_range(
        elements,
        elements_per_task(elements),
        inlined!(|range, _| {
            // SAFETY: each range of `y` belongs to one task.
            unsafe { y.write(range).fill(T::zeroed()) }
        }),
    );
}
