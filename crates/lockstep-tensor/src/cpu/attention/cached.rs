//! Attention of a batch of sequences to their key-value caches: the writing of new keys and values, and the
//! geometry of each sequence.

use std::ops::Range;

use half::bf16;
use lockstep_plan::{CachePlace, DType, KvCacheType};

use super::{
    geometry::Geometry,
    lanes::{BLOCK, Lanes, padded},
    page_codes::encode,
    page_format::{PageFormat, PageLayout},
    page_layout::page_format,
    pages::{PageTable, Pages},
    worker::Worker,
};
use crate::{
    Attention, CacheShape, CpuLevel, PagedCache, TokenSpan,
    cpu::{
        operands::Operand,
        simd::{Float, Isa, inlined},
    },
};

/// The sequences of a batch.
pub(super) struct Sequences<'a> {
    row_starts: &'a [u32],
    cached: &'a [u32],
    pages: &'a [u32],
    format: PageFormat,
    key_value_heads: usize,
    place: CachePlace,
}

/// The new tokens of a sequence.
#[derive(Debug, Clone)]
pub(super) struct NewTokens<'a> {
    /// Rows of the batch.
    pub(super) rows: Range<usize>,
    /// Tokens that were cached before.
    pub(super) cached: usize,
    pub(super) table: PageTable<'a>,
}

impl<'a> Sequences<'a> {
    /// # Panics
    /// If the sizes of the operands do not fit each other or the format, a sequence has not enough pages, or the cache holds no
    /// numbers of `dtype`.
    pub(super) fn new(
        (level, dtype): (CpuLevel, DType),
        cache: &PagedCache<'a>,
        [key_value_heads, head_dim]: [usize; 2],
        rows: usize,
    ) -> Self {
        let shape = CacheShape { key_value_heads, head_dim, vectors: cache.vectors() };
        let format = page_format(level, dtype, cache.stored, shape);
        let held = || [Some(cache.keys), cache.values].into_iter().flatten().zip(format.head_bytes());
        for (view, bytes) in held() {
            assert!(
                view.dtype() == DType::U8 && view.elements().is_multiple_of(key_value_heads * bytes),
                "a cache of pages of {key_value_heads} times {bytes} bytes is {view:?}"
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
        let new = Self { row_starts, cached, pages, format, key_value_heads, place: cache.place };
        let available = held().map(|(view, bytes)| view.elements() / (key_value_heads * bytes)).min();
        let available = available.unwrap_or(0);
        for sequence in 0..sequences {
            let NewTokens { rows, cached, table } = new.get(sequence);
            let needed = table.entries_of((cached + rows.len()).div_ceil(BLOCK));
            assert!(
                table
                    .entries
                    .get(..needed)
                    .is_some_and(|pages| { pages.iter().all(|&page| (page as usize) < available) }),
                "sequence {sequence} of {cached} and {} tokens has pages {:?} of {available}",
                rows.len(),
                table.entries
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
            table: PageTable {
                entries: &self.pages[sequence * most..(sequence + 1) * most],
                format: self.format,
                key_value_heads: self.key_value_heads,
                place: self.place,
            },
        }
    }

    /// Returns the geometry of each sequence with new tokens, and its pages among those of `bytes`.
    pub(super) fn geometries(
        &self,
        attention: &Attention<'a>,
        rows: usize,
        bytes: [&'a [u8]; 2],
    ) -> impl Iterator<Item = (Geometry<'a>, Pages<'a>)> {
        (0..self.len()).map(|sequence| self.get(sequence)).filter(|new| !new.rows.is_empty()).map(
            move |NewTokens { rows: own, cached, table }| {
                let queries = TokenSpan { stored: rows, first: own.start, len: own.len(), position: cached };
                let keys = TokenSpan::whole(cached + own.len());
                let geometry = Geometry::new(&Attention { sequences: 1, queries, keys, ..*attention });
                let pages = Pages { table, bytes };
                (geometry.paged(pages), pages)
            },
        )
    }
}

/// The writing of new keys and values to their pages.
pub(super) struct Append<'a, T> {
    pub(super) sequences: Sequences<'a>,
    pub(super) head_dim: usize,
    /// Keys, then values if the cache has them.
    pub(super) operands: [Option<NewVectors<'a, T>>; 2],
}

/// New keys or values.
pub(super) struct NewVectors<'a, T> {
    /// `[rows, key_value_heads, head_dim]`.
    pub(super) vectors: &'a [T],
    pub(super) pages: Operand<'a, u8>,
}

impl<T: Float> Worker for Append<'_, T> {
    fn tasks(&self) -> usize {
        self.sequences.len() * self.sequences.key_value_heads
    }

    fn scratch_elements(&self) -> usize {
        // A vector, and its codes.
        2 * padded(self.head_dim)
    }

    fn run<V: Lanes>(&self, task: usize, scratch: &mut [f32]) {
        let heads = self.sequences.key_value_heads;
        let (new, key_head) = (self.sequences.get(task / heads), task % heads);
        let NewTokens { rows, cached, table } = new;
        let format = table.format;
        let (mut row, mut token) = (rows.start, cached);
        while row < rows.end {
            let slot = token % BLOCK;
            let len = (BLOCK - slot).min(rows.end - row);
            let here =
                self.operands.iter().flatten().enumerate().filter(|_| table.place.holds(token / BLOCK));
            for (operand, new) in here {
                let start = table.start(operand, key_head, token / BLOCK);
                let bytes = format.head_bytes()[operand];
                // SAFETY: sequences have pages of their own, and a task has a key head of its own.
                let part = unsafe { new.pages.write(start..start + bytes) };
                if slot == 0 {
                    part.fill(0);
                }
                let (elements, scales) = part.split_at_mut(format.element_bytes()[operand]);
                for index in 0..len {
                    let first = ((row + index) * heads + key_head) * self.head_dim;
                    let vector = &new.vectors[first..first + self.head_dim];
                    store::<V, T>(format, operand, slot + index, vector, (elements, scales), scratch);
                }
            }
            (row, token) = (row + len, token + len);
        }
    }
}

/// Writes a vector to a token's place in a key head's elements and scales, in the type of the cache.
fn store<V: Lanes, T: Float>(
    format: PageFormat,
    operand: usize,
    slot: usize,
    vector: &[T],
    (elements, scales): (&mut [u8], &mut [u8]),
    scratch: &mut [f32],
) {
    if !format.is_encoded {
        return write::<T>(format.layout, operand, slot, vector, bytemuck::cast_slice_mut(elements));
    }
    let (numbers, codes) = scratch.split_at_mut(scratch.len() / 2);
    let numbers = &mut numbers[..vector.len()];
    V::run(inlined!(|| {
        for (number, x) in numbers.iter_mut().zip(vector) {
            *number = x.load();
        }
    }));
    if format.stored == KvCacheType::Bf16 {
        let narrow = &mut bytemuck::cast_slice_mut::<f32, bf16>(codes)[..vector.len()];
        V::run(inlined!(|| bf16::store_all(Isa::PLAIN, numbers, narrow)));
        return write(format.layout, operand, slot, narrow, bytemuck::cast_slice_mut(elements));
    }
    let codes = &mut bytemuck::cast_slice_mut::<f32, u8>(codes)[..vector.len()];
    let scale = encode::<V>(format.stored, numbers, codes);
    bytemuck::cast_slice_mut::<u8, f32>(scales)[slot] = scale;
    write(format.layout, operand, slot, codes, elements);
}

/// Writes the elements of a vector to the place of token `slot` in a key head's part of a page.
#[inline]
fn write<T: Copy>(layout: PageLayout, operand: usize, slot: usize, vector: &[T], part: &mut [T]) {
    const KEYS: usize = 0;
    match layout {
        PageLayout::Rows { head_dim } => part[slot * head_dim..][..head_dim].copy_from_slice(vector),
        PageLayout::Transposed { .. } if operand == KEYS => {
            for (column, &value) in part.chunks_exact_mut(BLOCK).zip(vector) {
                column[slot] = value;
            }
        }
        PageLayout::Transposed { head_dim } => {
            part[slot * padded(head_dim)..][..head_dim].copy_from_slice(vector);
        }
        PageLayout::Panels(layout) if operand == KEYS => {
            layout.write_column(layout.head_units, slot, vector, part);
        }
        PageLayout::Panels(layout) => layout.write_across(BLOCK / 2, slot, vector, part),
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
