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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Arena;
    use crate::cpu::testing::{floats, on_every_queue, random_of, rounded, tensor, values};

    const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

    #[test]
    fn casts_round_to_nearest_between_all_floats() {
        for (from, to) in FLOATS.into_iter().flat_map(|from| FLOATS.map(|to| (from, to))) {
            for len in [1, 15, 257, 70_001] {
                let x = random_of(from, 1, len);
                let run = |queue: &CpuQueue| {
                    let (x, y) = (floats(from, [len], &x), floats(to, [len], &vec![0.0; len]));
                    queue.cast(x.view(), y.view());
                    vec![values(y.view())]
                };
                let expected = rounded(to, &x);
                on_every_queue(run, |results| assert_eq!(results[0], expected, "{from} to {to}"));
            }
        }
    }

    #[test]
    fn blocks_are_transposed() {
        for (dtype, [a, b, width]) in FLOATS
            .into_iter()
            .flat_map(|dtype| [[1, 4, 3], [3, 1, 17], [2, 3, 5], [70, 3, 500]].map(|dims| (dtype, dims)))
        {
            let x = random_of(dtype, 1, a * b * width);
            let run = |queue: &CpuQueue| {
                let (x, y) =
                    (floats(dtype, [a, b, width], &x), floats(dtype, [b, a, width], &vec![0.0; x.len()]));
                queue.transpose_blocks(x.view(), y.view());
                vec![values(y.view())]
            };
            let row = |block: usize| x[block * width..(block + 1) * width].iter();
            let expected: Vec<f64> =
                (0..b).flat_map(|j| (0..a).flat_map(move |i| row(i * b + j))).copied().collect();
            on_every_queue(run, |results| assert_eq!(results[0], expected, "{dtype} {a} x {b} x {width}"));
        }
    }

    #[test]
    fn every_level_converts_special_numbers_alike() {
        // Vectorized conversions differ from the scalar code, so the numbers fill whole vectors.
        let special = [
            0.0,
            -0.0,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::NAN,
            f32::from_bits(0x7f80_0001),
            f32::MAX,
            f32::MIN_POSITIVE / 8.0,
            // Ties in bf16 (to even: down, up), the largest f16, the tie above it, and f16 subnormals.
            f32::from_bits(0x3f80_8000),
            f32::from_bits(0x3f81_8000),
            65_504.0,
            65_520.0,
            2.0_f32.powi(-24),
            2.0_f32.powi(-25),
            3.0 * 2.0_f32.powi(-25),
            -2.0_f32.powi(-15),
        ];
        let x: Vec<f64> = special.repeat(5).into_iter().map(f64::from).collect();
        // All NaNs get one bit pattern here, so that equality compares bits.
        let bits = |values: &[f64]| -> Vec<u64> {
            values.iter().map(|x| if x.is_nan() { f64::NAN } else { *x }.to_bits()).collect()
        };
        for (from, to) in FLOATS.into_iter().flat_map(|from| FLOATS.map(|to| (from, to))) {
            let x = rounded(from, &x);
            let run = |queue: &CpuQueue| {
                let (x, y) = (floats(from, [x.len()], &x), floats(to, [x.len()], &vec![1.0; x.len()]));
                queue.cast(x.view(), y.view());
                vec![values(y.view())]
            };
            let expected = bits(&rounded(to, &x));
            on_every_queue(run, |results| assert_eq!(bits(&results[0]), expected, "{from} to {to}"));
        }
    }

    #[test]
    fn integers_are_copied_and_everything_can_be_zeroed() {
        let queue = CpuQueue::new(2, &Arena::new()).unwrap();
        let numbers: Vec<u32> = (0..70_001).collect();
        let (x, y) = (tensor(&numbers), tensor(&vec![0_u32; numbers.len()]));
        queue.cast(x.view(), y.view());
        assert_eq!(y.view().to_vec::<u32>(), numbers);
        queue.zero(y.view().rows(1..70_000));
        assert!(y.view().to_vec::<u32>()[..70_000].iter().all(|x| *x == 0));
        assert_eq!(y.view().to_vec::<u32>()[70_000], 70_000);
    }

    #[test]
    #[should_panic(expected = "not from f32 to u32")]
    fn a_cast_to_integers_is_refused() {
        let queue = CpuQueue::new(1, &Arena::new()).unwrap();
        queue.cast(floats(DType::F32, [1], &[1.0]).view(), tensor(&[1_u32]).view());
    }
}
