//! Pages of a key-value cache: the vectors of 64 tokens, in the order in which the forward reads them. So keys and values are
//! packed once, when they are written, and not again for each token that attends to them.
//!
//! A page is a block of keys of the forward. It holds its key heads one after the other.

use std::ops::Range;

use lockstep_plan::DType;

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::packed::{self, Sizes};
use super::{
    geometry::Geometry,
    lanes::{BLOCK, Lanes},
    worker::Worker,
};
#[cfg(target_arch = "aarch64")]
use crate::cpu::gemm::panels::NeonBf16;
#[cfg(target_arch = "x86_64")]
use crate::cpu::gemm::panels::{Avx512DotBlock, Tiles};
use crate::{
    Attention, CpuLevel, PAGE_TOKENS, PagedCache, TokenSpan,
    cpu::{operands::Operand, simd::Float},
};

const _: () = assert!(PAGE_TOKENS == BLOCK);

/// The order of elements in a key head's part of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cpu) enum PageLayout {
    /// Vectors, `[64, head_dim]`, which are converted for each product.
    Rows {
        /// Elements of a vector.
        head_dim: usize,
    },
    /// f32 keys `[padded_dim, 64]` and values `[64, padded_dim]`.
    Transposed {
        /// Elements of a vector.
        head_dim: usize,
    },
    /// bf16 keys and values as right operands of a micro-kernel.
    Panels(PanelLayout),
}

/// The panels of a right operand: units of two elements, as `ColumnPanels` orders them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cpu) struct PanelLayout {
    pub(super) head_dim: usize,
    /// Units of depth of a vector.
    pub(super) head_units: usize,
    /// Columns of a panel.
    pub(super) width: usize,
    /// Contiguous units of a column.
    pub(super) line: usize,
}

impl PageLayout {
    /// Returns the layout that a queue of `level` uses.
    pub(in crate::cpu) fn of(level: CpuLevel, dtype: DType, head_dim: usize) -> Self {
        #[cfg(target_arch = "x86_64")]
        if dtype == DType::BF16 && level >= packed::LEVEL {
            return Self::Panels(match level {
                CpuLevel::AmxBf16 => Sizes::<Tiles>::of(head_dim).panel_layout(),
                _ => Sizes::<Avx512DotBlock>::of(head_dim).panel_layout(),
            });
        }
        #[cfg(target_arch = "aarch64")]
        if dtype == DType::BF16 && level >= packed::LEVEL {
            return Self::Panels(Sizes::<NeonBf16>::of(head_dim).panel_layout());
        }
        if dtype == DType::F32 { Self::Transposed { head_dim } } else { Self::Rows { head_dim } }
    }

    /// Returns the elements of a key head's keys and values in a page.
    pub(in crate::cpu) fn head_elements(self) -> [usize; 2] {
        match self {
            Self::Rows { head_dim } => [BLOCK * head_dim; 2],
            Self::Transposed { head_dim } => [BLOCK * Geometry::padded(head_dim); 2],
            Self::Panels(PanelLayout { head_dim, head_units, width, .. }) => {
                [2 * BLOCK * head_units, head_dim.next_multiple_of(width) * BLOCK]
            }
        }
    }
}

impl PanelLayout {
    /// Writes a column along the depth of a right operand of `units` of depth.
    fn write_column<T: Copy>(self, units: usize, column: usize, vector: &[T], panels: &mut [T]) {
        let Self { width, line, .. } = self;
        let first = column / width * width * units + column % width * line;
        for (index, elements) in vector.chunks(2 * line).enumerate() {
            let at = 2 * (first + index * width * line);
            panels[at..at + elements.len()].copy_from_slice(elements);
        }
    }

    /// Writes a line across the columns of a right operand of `units` of depth: element `depth` of each column.
    fn write_across<T: Copy>(self, units: usize, depth: usize, vector: &[T], panels: &mut [T]) {
        let Self { width, line, .. } = self;
        let (unit, half) = (depth / 2, depth % 2);
        let first = unit / line * width * line + unit % line;
        for (elements, panel) in vector.chunks(width).zip(panels.chunks_exact_mut(2 * width * units)) {
            for (index, &element) in elements.iter().enumerate() {
                panel[2 * (first + index * line) + half] = element;
            }
        }
    }
}

/// The pages of one sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pages<'a> {
    table: &'a [u32],
    pub(super) layout: PageLayout,
    key_value_heads: usize,
}

impl Pages<'_> {
    /// Returns the element at which the keys (0) or values (1) of a key head start, in the page of block `block`.
    #[inline(always)]
    pub(super) fn start(&self, operand: usize, key_head: usize, block: usize) -> usize {
        // A block beyond the last page is asked for by prefetches of no keys.
        let page = self.table.get(block).map_or(0, |&page| page as usize);
        (page * self.key_value_heads + key_head) * self.layout.head_elements()[operand]
    }

    /// Returns the keys and values of a block as right operands; `None` if the layout is one of vectors.
    #[inline(always)]
    pub(super) fn operands<'k, T: Float>(
        &self,
        key_head: usize,
        block: usize,
        caches: [&'k [T]; 2],
    ) -> Option<[&'k [f32]; 2]> {
        if matches!(self.layout, PageLayout::Rows { .. }) {
            return None;
        }
        let elements = self.layout.head_elements();
        Some([0, 1].map(|operand| {
            let start = self.start(operand, key_head, block);
            bytemuck::cast_slice(&caches[operand][start..start + elements[operand]])
        }))
    }
}

/// The sequences of a batch.
pub(super) struct Sequences<'a> {
    row_starts: &'a [u32],
    cached: &'a [u32],
    pages: &'a [u32],
    layout: PageLayout,
    key_value_heads: usize,
}

/// The new tokens of a sequence.
#[derive(Debug, Clone)]
pub(super) struct NewTokens<'a> {
    /// Rows of the batch.
    pub(super) rows: Range<usize>,
    /// Tokens that were cached before.
    pub(super) cached: usize,
    pub(super) pages: Pages<'a>,
}

impl<'a> Sequences<'a> {
    /// # Panics
    /// If the sizes of the operands do not fit each other or the layout, or a sequence has not enough pages.
    pub(super) fn new(
        level: CpuLevel,
        cache: &PagedCache<'a>,
        [key_value_heads, head_dim]: [usize; 2],
        rows: usize,
    ) -> Self {
        let layout = PageLayout::of(level, cache.keys.dtype(), head_dim);
        for (view, elements) in [cache.keys, cache.values].into_iter().zip(layout.head_elements()) {
            assert!(
                view.dtype() == cache.keys.dtype()
                    && view.elements().is_multiple_of(key_value_heads * elements),
                "a cache of pages of {key_value_heads} times {elements} elements is {view:?}"
            );
        }
        // SAFETY: the callers check that no output overlaps these operands.
        let [row_starts, cached, pages] =
            unsafe { [cache.row_starts, cache.cached, cache.pages].map(|view| view.slice::<u32>()) };
        let sequences = cached.len();
        assert!(
            row_starts.len() == sequences + 1
                && row_starts.is_sorted()
                && row_starts.last().is_some_and(|&end| end as usize == rows)
                && (sequences == 0 || pages.len().is_multiple_of(sequences)),
            "{sequences} sequences with {} starts and {} pages, for {rows} rows",
            row_starts.len(),
            pages.len()
        );
        let new = Self { row_starts, cached, pages, layout, key_value_heads };
        let held = [cache.keys, cache.values].into_iter().zip(layout.head_elements());
        let available = held.map(|(view, elements)| view.elements() / (key_value_heads * elements)).min();
        let available = available.unwrap_or(0);
        for sequence in 0..sequences {
            let NewTokens { rows, cached, pages } = new.get(sequence);
            let needed = (cached + rows.len()).div_ceil(BLOCK);
            assert!(
                pages
                    .table
                    .get(..needed)
                    .is_some_and(|pages| { pages.iter().all(|&page| (page as usize) < available) }),
                "sequence {sequence} of {cached} and {} tokens has pages {:?} of {available}",
                rows.len(),
                pages.table
            );
        }
        new
    }

    pub(super) fn len(&self) -> usize {
        self.cached.len()
    }

    pub(super) fn get(&self, sequence: usize) -> NewTokens<'a> {
        let most = self.pages.len() / self.len();
        NewTokens {
            rows: self.row_starts[sequence] as usize..self.row_starts[sequence + 1] as usize,
            cached: self.cached[sequence] as usize,
            pages: Pages {
                table: &self.pages[sequence * most..(sequence + 1) * most],
                layout: self.layout,
                key_value_heads: self.key_value_heads,
            },
        }
    }

    /// Returns the geometry of each sequence with new tokens.
    pub(super) fn geometries(
        &self,
        attention: &Attention<'a>,
        rows: usize,
    ) -> impl Iterator<Item = Geometry<'a>> {
        (0..self.len()).map(|sequence| self.get(sequence)).filter(|new| !new.rows.is_empty()).map(
            move |NewTokens { rows: own, cached, pages }| {
                let queries = TokenSpan { stored: rows, first: own.start, len: own.len(), position: cached };
                let keys = TokenSpan::whole(cached + own.len());
                Geometry::new(&Attention { sequences: 1, queries, keys, ..*attention }).paged(pages)
            },
        )
    }
}

/// The writing of new keys and values to their pages.
pub(super) struct Append<'a, T> {
    pub(super) sequences: Sequences<'a>,
    pub(super) head_dim: usize,
    /// New keys and values, `[rows, key_value_heads, head_dim]`.
    pub(super) new: [&'a [T]; 2],
    /// Pages of keys and of values.
    pub(super) caches: [Operand<'a, T>; 2],
}

impl<T: Float> Worker for Append<'_, T> {
    fn tasks(&self) -> usize {
        self.sequences.len() * self.sequences.key_value_heads
    }

    fn scratch_elements(&self) -> usize {
        0
    }

    fn run<V: Lanes>(&self, task: usize, _: &mut [f32]) {
        let heads = self.sequences.key_value_heads;
        let (new, key_head) = (self.sequences.get(task / heads), task % heads);
        let NewTokens { rows, cached, pages } = new;
        let (mut row, mut token) = (rows.start, cached);
        while row < rows.end {
            let slot = token % BLOCK;
            let len = (BLOCK - slot).min(rows.end - row);
            for operand in [0, 1] {
                let start = pages.start(operand, key_head, token / BLOCK);
                let elements = pages.layout.head_elements()[operand];
                // SAFETY: sequences have pages of their own, and a task has a key head of its own.
                let part = unsafe { self.caches[operand].write(start..start + elements) };
                if slot == 0 {
                    part.fill(T::store(0.0));
                }
                let vector = |index: usize| {
                    let first = ((row + index) * heads + key_head) * self.head_dim;
                    &self.new[operand][first..first + self.head_dim]
                };
                write(pages.layout, operand, part, slot, len, vector);
            }
            (row, token) = (row + len, token + len);
        }
    }
}

/// Writes `len` vectors to a key head's part of a page, from token `slot` of the page on.
fn write<'v, T: Float>(
    layout: PageLayout,
    operand: usize,
    part: &mut [T],
    slot: usize,
    len: usize,
    vector: impl Fn(usize) -> &'v [T],
) {
    const KEYS: usize = 0;
    match layout {
        PageLayout::Rows { head_dim } => {
            for (index, row) in part.chunks_exact_mut(head_dim).skip(slot).take(len).enumerate() {
                row.copy_from_slice(vector(index));
            }
        }
        PageLayout::Transposed { .. } if operand == KEYS => {
            for index in 0..len {
                for (column, &value) in part.chunks_exact_mut(BLOCK).zip(vector(index)) {
                    column[slot + index] = value;
                }
            }
        }
        PageLayout::Transposed { head_dim } => {
            let rows = part.chunks_exact_mut(Geometry::padded(head_dim)).skip(slot);
            for (index, row) in rows.take(len).enumerate() {
                row[..head_dim].copy_from_slice(vector(index));
            }
        }
        PageLayout::Panels(layout) if operand == KEYS => {
            for index in 0..len {
                layout.write_column(layout.head_units, slot + index, vector(index), part);
            }
        }
        PageLayout::Panels(layout) => {
            for index in 0..len {
                layout.write_across(BLOCK / 2, slot + index, vector(index), part);
            }
        }
    }
}

/// The same work for several sequences: the tasks of the longest ones first.
pub(super) struct Batch<W> {
    /// Each work with the number of tasks before it.
    works: Vec<(usize, W)>,
    tasks: usize,
}

impl<W: Worker> Batch<W> {
    /// Creates the batch of works, the longest first.
    pub(super) fn new(works: impl IntoIterator<Item = W>) -> Self {
        let mut tasks = 0;
        let numbered = works.into_iter().map(|work| {
            let before = tasks;
            tasks += work.tasks();
            (before, work)
        });
        Self { works: numbered.collect(), tasks }
    }
}

impl<W: Worker> Worker for Batch<W> {
    fn tasks(&self) -> usize {
        self.tasks
    }

    fn scratch_elements(&self) -> usize {
        self.works.iter().map(|(_, work)| work.scratch_elements()).max().unwrap_or(0)
    }

    fn run<V: Lanes>(&self, task: usize, scratch: &mut [f32]) {
        let index = self.works.partition_point(|&(before, _)| before <= task) - 1;
        let (before, work) = &self.works[index];
        work.run::<V>(task - before, scratch);
    }
}
