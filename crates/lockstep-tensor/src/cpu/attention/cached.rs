//! Attention of a batch of sequences to their key-value caches: the writing of new keys and values, and the
//! geometry of each sequence.

use std::ops::Range;

use super::{
    geometry::Geometry,
    lanes::{BLOCK, Lanes, padded},
    page_layout::page_layout,
    pages::{PageLayout, Pages},
    worker::Worker,
};
use crate::{
    Attention, CpuLevel, PagedCache, TokenSpan,
    cpu::{operands::Operand, simd::Float},
};

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
        let layout = page_layout(level, cache.keys.dtype(), head_dim);
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
            let rows = part.chunks_exact_mut(padded(head_dim)).skip(slot);
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

/// Works of several sequences as one set of tasks.
pub(super) struct Batch<W> {
    /// Each work with the number of tasks before it.
    works: Vec<(usize, W)>,
    tasks: usize,
}

impl<W: Worker> Batch<W> {
    /// Creates the batch of works, in their order.
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
