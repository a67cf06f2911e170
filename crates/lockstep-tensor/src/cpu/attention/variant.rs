//! Operands of the variants of attention: key masks, and the logits of sinks.

use half::{bf16, f16};
use lockstep_plan::DType;

use super::lanes::BLOCK;
use crate::{Element, View};

/// The mask of valid keys.
#[derive(Clone, Copy)]
pub(super) struct KeyMask<'a> {
    valid: Valid<'a>,
    /// Columns of the mask: positions of a whole sequence.
    positions: usize,
}

#[derive(Clone, Copy)]
enum Valid<'a> {
    Bytes(&'a [u8]),
    Words(&'a [u32]),
}

impl<'a> KeyMask<'a> {
    /// # Panics
    /// If the mask is not u8 or u32 `[sequences, positions]` with at least `end` positions.
    ///
    /// # Safety
    /// Nothing may write to the mask while the result lives.
    pub(super) unsafe fn new(mask: View<'a>, sequences: usize, end: usize) -> Self {
        let positions = mask.elements() / sequences.max(1);
        assert!(
            positions * sequences == mask.elements() && (positions >= end || sequences == 0),
            "the key mask of attention is {mask:?}; it needs {sequences} rows of at least {end} positions"
        );
        // SAFETY: the caller's promise.
        let valid = unsafe {
            match mask.dtype() {
                DType::U8 => Valid::Bytes(mask.slice()),
                DType::U32 => Valid::Words(mask.slice()),
                other => panic!("the key mask of attention must be u8 or u32, not {other}"),
            }
        };
        Self { valid, positions }
    }

    /// Returns the mask of the valid keys among up to 64 from position `first` on.
    pub(super) fn bits(&self, sequence: usize, first: usize, keys: usize) -> u64 {
        let start = sequence * self.positions + first;
        match self.valid {
            Valid::Bytes(valid) => bits(&valid[start..start + keys]),
            Valid::Words(valid) => bits(&valid[start..start + keys]),
        }
    }
}

fn bits<T: Element + Default + PartialEq>(valid: &[T]) -> u64 {
    debug_assert!(valid.len() <= BLOCK);
    valid.iter().rev().fold(0, |bits, valid| bits << 1 | u64::from(*valid != T::default()))
}

/// The logit of each head's sink.
#[derive(Clone, Copy)]
pub(super) enum Sinks<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
}

impl<'a> Sinks<'a> {
    /// # Panics
    /// If the sinks are not `heads` floats.
    ///
    /// # Safety
    /// Nothing may write to the sinks while the result lives.
    pub(super) unsafe fn new(sinks: View<'a>, heads: usize) -> Self {
        assert_eq!(sinks.elements(), heads, "attention needs one sink for each head, not {sinks:?}");
        // SAFETY: the caller's promise.
        unsafe {
            match sinks.dtype() {
                DType::F32 => Self::F32(sinks.slice()),
                DType::BF16 => Self::Bf16(sinks.slice()),
                DType::F16 => Self::F16(sinks.slice()),
                other => panic!("the sinks of attention must be f32, bf16 or f16, not {other}"),
            }
        }
    }

    pub(super) fn logit(&self, head: usize) -> f32 {
        match self {
            Self::F32(sinks) => sinks[head],
            Self::Bf16(sinks) => sinks[head].to_f32(),
            Self::F16(sinks) => sinks[head].to_f32(),
        }
    }
}
