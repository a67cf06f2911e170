//! Sparse gradient of an embedding that shares its table with the output layer.
//!
//! The output layer contributes to every row of the table, the embedding only to the rows of the step's token ids. The
//! embedding's contribution is kept for these rows alone, in order of first use, and added at the end of the step. Both
//! uses are thus accumulated separately without a second gradient of the table's size.
//!
//! Data-parallel ranks agree on the rows before the step: those that any of them looks up, in the order of their ids.
//! The output layer's gradient, which is complete first, can then be reduced without waiting for the embedding's. Of a
//! vocabulary-parallel table only this rank's rows count.

use std::ops::Range;

use lockstep_plan::{DType, MemoryCategory, ParameterId, ParameterRecord, SparseGradientSizes};
use lockstep_tensor::{Arena, Buffer, Kernels, Tensor, TensorError, View};

use crate::state_store::OwnedElements;

/// Row of an id that no token has looked up yet.
const NONE: u32 = u32::MAX;

/// Rows of one table that were looked up since the step began, and their gradients.
#[derive(Debug)]
pub(crate) struct SparseEmbeddingGradient {
    table: ParameterId,
    /// Token id of the first table row on this rank.
    first_id: u32,
    /// Token id of each row in use, relative to `first_id`.
    ids: Vec<u32>,
    /// Row of each id, relative to `first_id`; [`NONE`] without a row.
    row_of: Vec<u32>,
    /// Gradients of the rows, f32 `[capacity, columns]`.
    rows: Buffer,
    columns: usize,
    /// `ids` for kernels, u32 `[capacity]`.
    row_ids: Tensor,
    /// Row of each token of the last micro-batch, u32 `[tokens]`; [`NONE`] if its id is on another rank.
    token_rows: Tensor,
    host_rows: Vec<u32>,
    /// Mark of each id: 1 if any data-parallel rank looks it up in this step, else 0.
    marks: Vec<u8>,
}

impl SparseEmbeddingGradient {
    /// Allocates room for the rows of `table` that `micro_batches` of `tokens` on all data-parallel ranks together can
    /// look up.
    ///
    /// # Errors
    /// If memory runs out.
    pub(crate) fn new(
        arena: &Arena,
        table: ParameterId,
        record: &ParameterRecord,
        tokens: usize,
        micro_batches: usize,
    ) -> Result<Self, TensorError> {
        let shape = record.local_shape();
        let (ids, columns) = (shape[0], shape[1]);
        let SparseGradientSizes { capacity, rows_bytes, .. } =
            SparseGradientSizes::new(record, tokens, micro_batches);
        let category = MemoryCategory::Gradients;
        let zeros = |shape: usize| Tensor::zeros(arena, DType::U32, [shape], category);
        Ok(Self {
            table,
            first_id: record.share.shard.map_or(0, |shard| shard.start as u32),
            ids: Vec::with_capacity(capacity),
            row_of: vec![NONE; ids],
            rows: arena.allocate_zeroed(rows_bytes, category)?,
            columns,
            row_ids: zeros(capacity)?,
            token_rows: zeros(tokens)?,
            host_rows: Vec::with_capacity(tokens),
            marks: vec![0; ids],
        })
    }

    /// Returns the embedding table.
    pub(crate) fn table(&self) -> ParameterId {
        self.table
    }

    /// Removes all rows.
    pub(crate) fn clear(&mut self) {
        for id in self.ids.drain(..) {
            self.row_of[id as usize] = NONE;
        }
    }

    /// Creates rows for all ids that any data-parallel rank looks up in a step. `agree` combines the marks of this
    /// rank's ids with those of all ranks.
    ///
    /// # Errors
    /// If `agree` fails.
    pub(crate) fn share<'a, E>(
        &mut self,
        queue: &dyn Kernels,
        ids: impl Iterator<Item = &'a [u32]>,
        agree: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.marks.fill(0);
        for id in ids.flatten() {
            if let Some(mark) = self.marks.get_mut(id.wrapping_sub(self.first_id) as usize) {
                *mark = 1;
            }
        }
        agree(&mut self.marks)?;
        let marked = |(id, mark): (usize, &u8)| (*mark != 0).then_some(id as u32);
        let Self { ids, row_of, marks, .. } = self;
        for id in marks.iter().enumerate().filter_map(marked) {
            row_of[id as usize] = ids.len() as u32;
            ids.push(id);
        }
        self.begin_rows(queue, 0);
        Ok(())
    }

    /// Finds the row of each token of a micro-batch, and creates zero rows for new ids.
    ///
    /// # Panics
    /// If there are more micro-batches than there is room for.
    pub(crate) fn look_up<'a>(&mut self, queue: &dyn Kernels, ids: impl Iterator<Item = &'a [u32]>) {
        let before = self.ids.len();
        self.host_rows.clear();
        for id in ids.flatten().map(|id| id.wrapping_sub(self.first_id)) {
            let Some(row) = self.row_of.get_mut(id as usize) else {
                self.host_rows.push(NONE);
                continue;
            };
            if *row == NONE {
                *row = self.ids.len() as u32;
                self.ids.push(id);
            }
            self.host_rows.push(*row);
        }
        self.token_rows.view().write(&self.host_rows);
        self.begin_rows(queue, before);
    }

    /// Zeroes the rows from index `first` on and writes their ids for kernels.
    fn begin_rows(&self, queue: &dyn Kernels, first: usize) {
        let capacity = self.row_ids.view().elements();
        assert!(self.ids.len() <= capacity, "more micro-batches than the engine was built for");
        let new = first..self.ids.len();
        if !new.is_empty() {
            self.row_ids.view().rows(new.clone()).write(&self.ids[new.clone()]);
            queue.zero(self.gradient(new));
        }
    }

    /// Returns the row of each token of the last micro-batch, u32 `[tokens]`.
    pub(crate) fn token_rows(&self) -> View<'_> {
        self.token_rows.view()
    }

    /// Returns the gradients of `rows`, f32 `[rows, columns]`.
    pub(crate) fn gradient(&self, rows: Range<usize>) -> View<'_> {
        let row_bytes = self.columns * size_of::<f32>();
        self.rows.view(DType::F32, rows.start * row_bytes, [rows.len(), self.columns])
    }

    /// Returns the buffer of all rows' gradients and their byte range, for the reduction over ranks.
    pub(crate) fn gradient_mut(&mut self) -> (&mut Buffer, Range<usize>) {
        let bytes = self.elements() * size_of::<f32>();
        (&mut self.rows, 0..bytes)
    }

    /// Returns the number of rows in use.
    pub(crate) fn rows(&self) -> usize {
        self.ids.len()
    }

    /// Adds the rows to this rank's part of the table's gradient, `[elements]`, which may begin and end within a row.
    pub(crate) fn add_to(&self, queue: &dyn Kernels, OwnedElements { first, view }: OwnedElements<'_>) {
        let (rows, end) = (0..self.rows(), first + view.elements());
        if rows.is_empty() {
            return;
        }
        let whole = first.div_ceil(self.columns)..end / self.columns;
        if !whole.is_empty() {
            let elements = whole.start * self.columns - first..whole.end * self.columns - first;
            let table = view.rows(elements).reshape([whole.len(), self.columns]);
            let ids = self.row_ids.view().rows(rows.clone());
            queue.embedding_backward(ids, self.gradient(rows), whole.start as u32, table);
        }
        // Partial rows: the first, and the last if it is another one.
        let cut = [(first, end.min(whole.start * self.columns)), (first.max(whole.end * self.columns), end)];
        let of_one_row = whole.start > whole.end;
        for (start, end) in
            cut.into_iter().take(if of_one_row { 1 } else { 2 }).filter(|(start, end)| start < end)
        {
            let (id, column) = (start / self.columns, start % self.columns);
            let row = self.row_of[id] as usize;
            if row == NONE as usize {
                continue;
            }
            let row = self.gradient(row..row + 1).reshape([self.columns]);
            let target = view.rows(start - first..end - first);
            queue.add(target, row.rows(column..column + end - start), target);
        }
    }

    /// Returns the number of elements of the rows in use.
    pub(crate) fn elements(&self) -> usize {
        self.rows() * self.columns
    }
}

#[cfg(test)]
mod tests {
    use lockstep_plan::{Initializer, Share};
    use lockstep_tensor::CpuQueue;

    use super::*;

    #[test]
    fn parts_of_a_table_get_what_the_whole_gets() {
        const SHAPE: [usize; 2] = [7, 5];
        let arena = Arena::new();
        let queue = CpuQueue::new(1, &arena).unwrap();
        let record = ParameterRecord {
            name: "table".to_owned(),
            shape: SHAPE.to_vec(),
            share: Share::default(),
            initializer: Initializer::Zeros,
            tie: None,
            unit: 0,
            buffer: lockstep_plan::BufferUnit::alone(0),
            trainable: true,
            block_format: None,
            decay: true,
            learning_rate_multiplier: 1.0,
        };
        let mut sparse_embedding_gradient =
            SparseEmbeddingGradient::new(&arena, ParameterId(0), &record, 4, 1).unwrap();
        sparse_embedding_gradient.look_up(&queue, [&[6, 0, 3, 0][..]].into_iter());
        let rows: Vec<f32> = (0..15).map(|value| 1.0 + value as f32).collect();
        sparse_embedding_gradient.gradient(0..3).copy_from(&rows);
        let table = Tensor::zeros(&arena, DType::F32, [35], MemoryCategory::Gradients).unwrap();
        let ones = [1.0_f32; 35];
        let added = |first: usize, end: usize| {
            table.view().copy_from(&ones);
            sparse_embedding_gradient
                .add_to(&queue, OwnedElements { first, view: table.view().rows(first..end) });
            table.view().to_vec::<f32>()
        };
        let whole = added(0, 35);
        assert_eq!(whole[..5], [7.0, 8.0, 9.0, 10.0, 11.0], "the second row that was looked up");
        for first in 0..35 {
            for end in first + 1..=35 {
                let found = added(first, end);
                assert!(found[first..end] == whole[first..end], "{first}..{end}: {found:?}, whole {whole:?}");
                let others = found[..first].iter().chain(&found[end..]);
                assert!(others.clone().all(|value| *value == 1.0), "{first}..{end}: {found:?}");
            }
        }
    }
}
