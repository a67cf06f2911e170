//! The gradient of an embedding that shares its table with the output layer.
//!
//! The output layer reaches every row of the table and the embedding only those that a step's tokens look up: its
//! share is kept for these rows alone, in the order in which they are first seen, and added when the step ends. So
//! both uses are summed apart, without a second gradient of the table's size.
//!
//! Replicas agree on the rows before they start: those that any of them looks up, in the order of the ids. So the output
//! layer's share, which is complete first, need not wait for the embedding's to be summed over them. Of a table that ranks
//! split only the ids that are here count.

use std::ops::Range;

use lockstep_plan::{DType, MemoryCategory, ParameterId, ParameterRecord, SparseGradientSizes};
use lockstep_tensor::{Arena, Buffer, Kernels, Tensor, TensorError, View};

use crate::state_store::Part;

/// An id that no token has looked up yet.
const NONE: u32 = u32::MAX;

/// The rows of one table that were looked up since a step began.
#[derive(Debug)]
pub(crate) struct LookedUp {
    table: ParameterId,
    /// The id of the first row of the table that is here.
    first_id: u32,
    /// The id of each row in use, counted from there.
    ids: Vec<u32>,
    /// The row of each of these ids, or [`NONE`].
    row_of: Vec<u32>,
    /// f32 `[capacity, columns]`: gradients.
    rows: Buffer,
    columns: usize,
    /// u32 `[capacity]`: `ids`, for kernels.
    row_ids: Tensor,
    /// u32 `[tokens]`: the row of each token of the last micro-batch, or [`NONE`] if its id is not here.
    token_rows: Tensor,
    host_rows: Vec<u32>,
    /// For each id, whether it has a row.
    marks: Vec<u8>,
}

impl LookedUp {
    /// Room for the rows of `table` that `micro_batches` of `tokens`, on all replicas together, can look up.
    ///
    /// # Errors
    /// [`TensorError::OutOfMemory`].
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

    /// The parameter that is looked up.
    pub(crate) fn table(&self) -> ParameterId {
        self.table
    }

    /// Forgets all rows.
    pub(crate) fn clear(&mut self) {
        for id in self.ids.drain(..) {
            self.row_of[id as usize] = NONE;
        }
    }

    /// Makes rows for all ids that any replica looks up in a step, as `agree` finds: it turns marks of the ids of this
    /// one into marks of those of all.
    ///
    /// # Errors
    /// Those of `agree`.
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

    /// Finds the rows of a micro-batch's tokens; those of ids not seen before start at zero.
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

    /// Starts the rows from number `first` on at zero.
    fn begin_rows(&self, queue: &dyn Kernels, first: usize) {
        let capacity = self.row_ids.view().elements();
        assert!(self.ids.len() <= capacity, "more micro-batches than the engine was built for");
        let new = first..self.ids.len();
        if !new.is_empty() {
            self.row_ids.view().rows(new.clone()).write(&self.ids[new.clone()]);
            queue.zero(self.gradient(new));
        }
    }

    /// The row of each token of the last micro-batch.
    pub(crate) fn token_rows(&self) -> View<'_> {
        self.token_rows.view()
    }

    /// The gradients of the rows, f32 `[rows, columns]`.
    pub(crate) fn gradient(&self, rows: Range<usize>) -> View<'_> {
        let row_bytes = self.columns * size_of::<f32>();
        self.rows.view(DType::F32, rows.start * row_bytes, [rows.len(), self.columns])
    }

    /// The buffer of the gradients of all rows, to be summed over the replicas, and their bytes there.
    pub(crate) fn gradient_mut(&mut self) -> (&mut Buffer, Range<usize>) {
        let bytes = self.elements() * size_of::<f32>();
        (&mut self.rows, 0..bytes)
    }

    /// How many rows there are.
    pub(crate) fn rows(&self) -> usize {
        self.ids.len()
    }

    /// Adds the rows to what is here of the table's gradient, `[elements]`, which may begin and end within a row.
    pub(crate) fn add_to(&self, queue: &dyn Kernels, Part { first, view }: Part<'_>) {
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
        // Rows that are cut: the first, and the last if it is another one.
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

    /// Elements of the rows in use.
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
            decay: true,
            learning_rate_multiplier: 1.0,
        };
        let mut looked_up = LookedUp::new(&arena, ParameterId(0), &record, 4, 1).unwrap();
        looked_up.look_up(&queue, [&[6, 0, 3, 0][..]].into_iter());
        let rows: Vec<f32> = (0..15).map(|value| 1.0 + value as f32).collect();
        looked_up.gradient(0..3).copy_from(&rows);
        let table = Tensor::zeros(&arena, DType::F32, [35], MemoryCategory::Gradients).unwrap();
        let ones = [1.0_f32; 35];
        let added = |first: usize, end: usize| {
            table.view().copy_from(&ones);
            looked_up.add_to(&queue, Part { first, view: table.view().rows(first..end) });
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
