//! The rows of A of a task: read where they lie if the micro-kernel can, and packed, widened or copied to scratch memory otherwise.

use std::ops::Range;

use super::{
    image::locate,
    kernel::{Columns, MicroKernel, Place, RowPanels, Rows},
    lanes::Lanes,
    operand::Operand,
    pack::Packing,
    store::Tile,
};
use crate::{
    Buffer,
    cpu::simd::{CACHE_LINE_BYTES, Float, inlined, prefetch},
};

/// The rows of A of a task.
pub(super) enum TaskRows<'a> {
    /// Packed panels of the given number of units.
    Packed(&'a [u32], usize),
    /// Lines of units along the depth.
    Lines(TaskLines),
    /// Segments of lines, read in place: the elements, and the places of the segments, panel after panel of the given
    /// length.
    Segments(*const u32, &'a [u64], usize),
}

impl<'a> TaskRows<'a> {
    /// Returns true if rows with `depth` elements need no packing.
    pub(super) fn can_be_lines<K: MicroKernel, U: Packing>(a: &Operand<'_, U::Source>, depth: usize) -> bool {
        let are_units = U::IS_STORED_ALONG && depth.is_multiple_of(U::ELEMENTS * K::DEPTH);
        K::READS_LINES && are_units && a.is_stored_along_depth()
    }

    /// Packs the rows into scratch memory, or notes the places of lines that need no packing.
    pub(super) fn new<K: MicroKernel, U: Packing>(
        a: &Operand<'a, U::Source>,
        rows: Range<usize>,
        depth: Range<usize>,
        units: usize,
        scratch: &'a mut Buffer,
    ) -> Self {
        if let Some(patches) = a.long_patches().filter(|_| K::IS_IN_PLACE && U::IS_STORED) {
            let table = bytemuck::cast_slice_mut::<u32, u64>(scratch.elements_mut());
            // SAFETY: the queue's level has the kernel's instructions.
            let panel_len =
                unsafe { K::Vector::compiled(inlined!(|| locate(patches, rows, depth, K::ROWS, table))) };
            return Self::Segments(a.elements.as_ptr().cast(), table, panel_len);
        }
        if Self::can_be_lines::<K, U>(a, depth.len()) {
            return Self::Lines(TaskLines::new::<K, _>(a, rows, depth, scratch));
        }
        if K::READS_LINES && U::IS_WIDENED && K::DEPTH == 1 && a.is_stored_along_depth() {
            // SAFETY: as above.
            return Self::Lines(unsafe { TaskLines::widened::<K, _>(a, rows, depth, scratch) });
        }
        let panel_units = U::panel_units::<RowPanels<K>>(units);
        let panels = &mut scratch.elements_mut::<u32>()[..rows.len().div_ceil(K::ROWS) * panel_units];
        // SAFETY: the queue's level has the kernel's instructions.
        unsafe { U::pack::<K::Vector, RowPanels<K>>(a, rows, depth, units, panels) };
        Self::Packed(panels, panel_units)
    }

    /// Writes the product of panel `index` and a panel of B to its place in C, if there is one, or else to the tile.
    /// Returns true if the panel of A is exceptional.
    ///
    /// # Safety
    /// The CPU must have the kernel's instructions, the thread must be prepared, and the panel of B must hold `units`,
    /// a multiple of the kernel's depth, as the rows do. Nothing else may use the place.
    pub(super) unsafe fn multiply<K: MicroKernel, U: Packing>(
        &self,
        index: usize,
        units: usize,
        b: Columns,
        place: Option<Place>,
        tile: &mut Tile,
    ) -> bool {
        let mut multiply = |a: Rows| {
            // SAFETY: the caller's promise; both operands hold `units`.
            unsafe {
                match place {
                    Some(place) => K::finished_tile(units, a, b, &place),
                    None => K::tile(units, a, b, tile),
                }
            }
        };
        match *self {
            Self::Packed(panels, panel_units) => {
                let a = panel(panels, index, panel_units);
                multiply(Rows::Packed(a.as_ptr()));
                U::is_exceptional(a)
            }
            Self::Lines(lines) => {
                multiply(lines.panel(index, K::ROWS));
                false
            }
            Self::Segments(elements, table, panel_len) => {
                let lines = &table[index * panel_len..][..panel_len];
                // SAFETY: the caller's promise; the lines lie in the operand and are `units` long.
                unsafe { K::tile_of_lines(elements, lines, b.units, tile) };
                false
            }
        }
    }
}

/// Lines of A that a task reads where they lie, but for some that are copied first.
#[derive(Clone, Copy)]
pub(super) struct TaskLines {
    /// The first line.
    stored: Lines,
    /// Index of the first panel that is copied.
    copied_from: usize,
    /// The first line of that panel.
    copied: Lines,
}

/// Lines of units: the address of the first one, and the bytes from one to the next.
#[derive(Clone, Copy)]
struct Lines {
    first: *const u32,
    stride: usize,
}

impl TaskLines {
    /// Copies to scratch memory all lines if they compete for the same sets of the L1 cache, or else those of a last panel
    /// that has too few rows.
    fn new<K: MicroKernel, T: Float>(
        a: &Operand<'_, T>,
        rows: Range<usize>,
        depth: Range<usize>,
        scratch: &mut Buffer,
    ) -> Self {
        let line = |row: usize| &a.line(row)[depth.clone()];
        let stride = size_of_val(a.line(0));
        let copied_from = if compete_for_sets(K::ROWS, stride) { 0 } else { rows.len() / K::ROWS };
        let first_copied = rows.start + copied_from * K::ROWS;
        let copied_stride = copied_stride(size_of_val(line(rows.start)));
        let copies = (rows.end - first_copied).next_multiple_of(K::ROWS);
        let copied = &mut scratch.elements_mut::<T>()[..copies * copied_stride / size_of::<T>()];
        for (index, copy) in copied.chunks_exact_mut(copied_stride / size_of::<T>()).enumerate() {
            let copy = &mut copy[..depth.len()];
            match first_copied + index {
                row if row < rows.end => copy.copy_from_slice(line(row)),
                _ => copy.fill(T::zeroed()),
            }
        }
        let copied = Lines { first: copied.as_ptr().cast(), stride: copied_stride };
        Self { stored: Lines { first: line(rows.start).as_ptr().cast(), stride }, copied_from, copied }
    }

    /// Copies all lines to scratch memory as f32: cheaper than packing, which transposes them.
    ///
    /// # Safety
    /// The CPU must have the kernel's instructions.
    unsafe fn widened<K: MicroKernel, T: Float>(
        a: &Operand<'_, T>,
        rows: Range<usize>,
        depth: Range<usize>,
        scratch: &mut Buffer,
    ) -> Self {
        let stride = copied_stride(depth.len() * size_of::<f32>());
        let copied = &mut scratch.elements_mut::<f32>()
            [..rows.len().next_multiple_of(K::ROWS) * stride / size_of::<f32>()];
        let first = copied.as_ptr().cast();
        let copies = copied.chunks_exact_mut(stride / size_of::<f32>());
        // SAFETY: the caller's promise.
        unsafe {
            K::Vector::compiled(inlined!(|| for (index, copy) in copies.enumerate() {
                let copy = &mut copy[..depth.len()];
                match rows.start + index {
                    row if row < rows.end => {
                        let line = &a.line(row)[depth.clone()];
                        copy.iter_mut().zip(line).for_each(inlined!(|(copy, x)| *copy = x.load()));
                    }
                    _ => copy.fill(0.0),
                }
            }));
        }
        let copied = Lines { first, stride };
        Self { stored: copied, copied_from: 0, copied }
    }

    /// Returns the lines of panel `index`, which has `rows` rows.
    fn panel(&self, index: usize, rows: usize) -> Rows {
        let (lines, index) = match index.checked_sub(self.copied_from) {
            Some(index) => (self.copied, index),
            None => (self.stored, index),
        };
        Rows::Lines(lines.first.wrapping_byte_add(index * rows * lines.stride), lines.stride)
    }
}

/// Returns the bytes from one copied line to the next: an odd number of cache lines, so that neighbours lie in different sets.
fn copied_stride(bytes: usize) -> usize {
    (bytes.div_ceil(CACHE_LINE_BYTES) | 1) * CACHE_LINE_BYTES
}

/// The lines of the rows of a later task, fetched into the L2 cache a few at a time while this task computes: without it the
/// first panel of B waits for the memory.
pub(super) struct Lookahead {
    /// Address of the next row, and of the next cache line in it.
    row: *const u8,
    line: *const u8,
    /// Bytes from one row to the next.
    stride: usize,
    /// Bytes of a row.
    row_bytes: usize,
    rows_left: usize,
    /// Cache lines to fetch at a time.
    at_a_time: usize,
}

impl Lookahead {
    /// Fetches `rows` of A at `depth` in `times` steps, if they are lines along the depth.
    pub(super) fn new<T>(a: &Operand<'_, T>, rows: Range<usize>, depth: Range<usize>, times: usize) -> Self {
        let rows_left = if a.is_stored_along_depth() { rows.len() } else { 0 };
        let (first, stride) = match rows_left {
            0 => (std::ptr::null(), 0),
            _ => (a.line(rows.start)[depth.start..].as_ptr().cast(), size_of_val(a.line(0))),
        };
        let row_bytes = depth.len() * size_of::<T>();
        let lines = rows_left * row_bytes.div_ceil(CACHE_LINE_BYTES);
        Self {
            row: first,
            line: first,
            stride,
            row_bytes,
            rows_left,
            at_a_time: lines.div_ceil(times.max(1)),
        }
    }

    /// Fetches the next lines.
    #[inline]
    pub(super) fn step(&mut self) {
        for _ in 0..self.at_a_time {
            if self.rows_left == 0 {
                return;
            }
            prefetch(self.line);
            self.line = self.line.wrapping_add(CACHE_LINE_BYTES);
            if self.line >= self.row.wrapping_add(self.row_bytes) {
                self.row = self.row.wrapping_add(self.stride);
                self.line = self.row;
                self.rows_left -= 1;
            }
        }
    }
}

/// Returns true if lines `stride` bytes apart begin in so few sets of the L1 cache that a panel of `rows` of them does not stay there.
fn compete_for_sets(rows: usize, stride: usize) -> bool {
    /// Bytes after which the sets of an L1 cache repeat.
    const PERIOD: usize = 4096;
    /// Ways of a set that the lines may take: half of those of most caches.
    const WAYS: usize = 4;
    // The power of two in the stride: lines begin in `PERIOD / step` places of the period.
    let step = 1 << (stride | PERIOD).trailing_zeros();
    rows.div_ceil(PERIOD / step) > WAYS
}

/// Returns panel `index` of panels of `units` units.
pub(super) fn panel(panels: &[u32], index: usize, units: usize) -> &[u32] {
    &panels[index * units..][..units]
}
