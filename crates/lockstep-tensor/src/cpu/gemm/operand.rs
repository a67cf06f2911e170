//! The matrices that a product reads: stored ones, and those of a convolution, which index arithmetic defines.

#[cfg(target_arch = "x86_64")]
use std::ops::Range;

use super::{
    block_lines::BlockLines,
    patches::{Filters, LONG_SEGMENT, Patches},
};
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::Float;

/// The index along which neighbours are contiguous in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::cpu) enum Order {
    /// Neighbours along the depth (the summed index) are contiguous.
    AlongDepth,
    /// Neighbours along the other index are contiguous.
    AcrossDepth,
}

/// A matrix of a product, indexed by a row of A or column of B, and the depth.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Operand<'a, T> {
    pub(super) elements: &'a [T],
    pub(super) form: Form<'a>,
}

/// The map from an index of a matrix to an element in memory.
#[derive(Clone, Copy)]
pub(super) enum Form<'a> {
    /// Lines in the given order, `stride` elements apart.
    Matrix { stride: usize, order: Order },
    /// Patches of images. The depth is an element of a patch ([`Order::AlongDepth`]), or else the patch.
    Patches(&'a Patches, Order),
    /// Filters: the depth is an element of a patch, the other index a lane.
    Filters(&'a Filters),
    /// Lines of quantized blocks in the given order; the operand has no elements.
    Blocks(BlockLines<'a>, Order),
}

impl<'a, T> Operand<'a, T> {
    /// Wraps a matrix whose lines, in the given order, are `stride` elements apart.
    pub(in crate::cpu) fn new(elements: &'a [T], stride: usize, order: Order) -> Self {
        Self { elements, form: Form::Matrix { stride, order } }
    }

    /// Wraps the pixels of images.
    pub(super) fn patches(elements: &'a [T], patches: &'a Patches, order: Order) -> Self {
        Self { elements, form: Form::Patches(patches, order) }
    }

    /// Wraps the weight of a convolution.
    pub(super) fn filters(elements: &'a [T], filters: &'a Filters) -> Self {
        Self { elements, form: Form::Filters(filters) }
    }

    /// Wraps lines of quantized blocks in the given order.
    pub(super) fn blocks(lines: BlockLines<'a>, order: Order) -> Self {
        Self { elements: &[], form: Form::Blocks(lines, order) }
    }

    /// Returns the lines of quantized blocks along the depth; `None` of other matrices.
    pub(super) fn block_lines(&self) -> Option<BlockLines<'a>> {
        match self.form {
            Form::Blocks(lines, Order::AlongDepth) => Some(lines),
            _ => None,
        }
    }

    /// Returns true if the matrix is stored, element by element.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn is_stored(&self) -> bool {
        matches!(self.form, Form::Matrix { .. })
    }

    /// Returns true if the matrix is stored, and its lines are contiguous along the depth.
    pub(super) fn is_stored_along_depth(&self) -> bool {
        matches!(self.form, Form::Matrix { order: Order::AlongDepth, .. })
    }

    /// Returns the number of elements along the depth that are best packed together, if the product has a preference.
    pub(super) fn block_depth(&self) -> Option<usize> {
        match self.form {
            Form::Patches(patches, Order::AlongDepth) => {
                let order = patches.order;
                (order.block < order.channels).then_some(order.block * order.taps[0] * order.taps[1])
            }
            _ => None,
        }
    }

    /// Returns the patches whose long segments are worth reading in place, as rows of A.
    pub(super) fn long_patches(&self) -> Option<&'a Patches> {
        match self.form {
            Form::Patches(patches, Order::AlongDepth) => {
                (patches.order.block >= LONG_SEGMENT).then_some(patches)
            }
            _ => None,
        }
    }

    /// Returns line `index` of a stored matrix.
    pub(super) fn line(&self, index: usize) -> &'a [T] {
        let Form::Matrix { stride, .. } = self.form else { unreachable!("only stored matrices have lines") };
        &self.elements[index * stride..][..stride]
    }
}

#[cfg(target_arch = "x86_64")]
impl<T: Float> Operand<'_, T> {
    /// Returns the elements at `depth` of a row of A or column of B.
    pub(super) fn along(&self, outer: usize, depth: Range<usize>) -> impl Iterator<Item = T> {
        depth.map(move |index| self.element(outer, index))
    }

    fn element(&self, outer: usize, depth: usize) -> T {
        match self.form {
            Form::Matrix { stride, order: Order::AlongDepth } => self.elements[outer * stride + depth],
            Form::Matrix { stride, order: Order::AcrossDepth } => self.elements[depth * stride + outer],
            Form::Patches(patches, order) => {
                let (patch, index) = if order == Order::AlongDepth { (outer, depth) } else { (depth, outer) };
                let span = patches
                    .segments(index..index + 1)
                    .map(|segment| patches.span(patches.patch(patch), &segment))
                    .next();
                span.filter(|span| span.len > 0).map_or(T::zeroed(), |span| self.elements[span.start])
            }
            Form::Filters(filters) => self.elements[filters.at(depth).0 + outer * filters.lane_stride],
            Form::Blocks(lines, Order::AlongDepth) => lines.element(outer, depth),
            Form::Blocks(lines, Order::AcrossDepth) => lines.element(depth, outer),
        }
    }
}
