//! Outputs of attention: rows in the type of the operands or in f32, overwritten or accumulated.

use std::ops::Range;

use lockstep_plan::DType;

use crate::{
    View, Write,
    cpu::{operands::Operand, simd::Float},
};

/// An output of a kernel whose operands are `T`.
pub(super) struct Output<'a, T> {
    destination: Destination<'a, T>,
    write: Write,
}

enum Destination<'a, T> {
    Own(Operand<'a, T>),
    Wide(Operand<'a, f32>),
}

impl<'a, T: Float> Output<'a, T> {
    /// # Panics
    /// If the view holds neither `T` nor f32, or accumulates in another type than f32.
    pub(super) fn new(name: &str, view: View<'a>, write: Write) -> Self {
        assert!(
            write == Write::Overwrite || view.dtype() == DType::F32,
            "{name} of attention is {view:?}; what is added to must be f32"
        );
        let is_own = view.dtype() == T::DTYPE;
        let destination =
            if is_own { Destination::Own(Operand::new(view)) } else { Destination::Wide(Operand::new(view)) };
        Self { destination, write }
    }

    /// Writes `factor · values`, or accumulates `keep · old + factor · values`. Values beyond the width of `elements`
    /// are padding.
    ///
    /// # Safety
    /// No other task may access `elements`.
    #[inline(always)]
    pub(super) unsafe fn row(&self, elements: Range<usize>, keep: f32, factor: f32, values: &[f32]) {
        // SAFETY: the caller promises that no other task accesses `elements`.
        unsafe {
            match &self.destination {
                Destination::Own(out) => write_row(out.write(elements), self.write, keep, factor, values),
                Destination::Wide(out) => write_row(out.write(elements), self.write, keep, factor, values),
            }
        }
    }

    pub(super) fn write(&self) -> Write {
        self.write
    }
}

/// Writes `factor · values`, or accumulates `keep · old + factor · values`.
#[inline(always)]
fn write_row<T: Float>(out: &mut [T], write: Write, keep: f32, factor: f32, values: &[f32]) {
    let both = out.iter_mut().zip(values);
    match write {
        Write::Overwrite => {
            for (out, value) in both {
                *out = T::store(value * factor);
            }
        }
        Write::Accumulate => {
            for (out, value) in both {
                *out = T::store(keep * out.load() + value * factor);
            }
        }
    }
}
