//! Outputs of attention: rows in the type of the operands or in f32, overwritten or accumulated.

use std::ops::Range;

use lockstep_plan::DType;

use crate::{
    View, Write,
    cpu::{
        operands::Operand,
        simd::{Float, inlined},
    },
};

/// An output of a kernel whose operands are `T`.
pub(super) struct Output<'a, T> {
    place: Destination<'a, T>,
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
        let place =
            if is_own { Destination::Own(Operand::new(view)) } else { Destination::Wide(Operand::new(view)) };
        Self { place, write }
    }

    /// Writes `factor · values`, or accumulates `keep · old + factor · values`. Values beyond the width of the place
    /// are padding.
    ///
    /// # Safety
    /// No other task may access the place.
    #[inline(always)]
    pub(super) unsafe fn row(&self, place: Range<usize>, keep: f32, factor: f32, values: &[f32]) {
        // SAFETY: the caller promises that no other task accesses the place.
        unsafe {
            match &self.place {
                Destination::Own(out) => put(out.write(place), self.write, keep, factor, values),
                Destination::Wide(out) => put(out.write(place), self.write, keep, factor, values),
            }
        }
    }

    pub(super) fn write(&self) -> Write {
        self.write
    }
}

/// Writes `factor · values`, or accumulates `keep · old + factor · values`.
#[inline(always)]
fn put<T: Float>(out: &mut [T], write: Write, keep: f32, factor: f32, values: &[f32]) {
    let both = out.iter_mut().zip(values);
    match write {
        Write::Overwrite => both.for_each(inlined!(|(out, value)| *out = T::store(value * factor))),
        Write::Accumulate => {
            both.for_each(inlined!(|(out, value)| *out = T::store(keep * out.load() + value * factor)));
        }
    }
}
