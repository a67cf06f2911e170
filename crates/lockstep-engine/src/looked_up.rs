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

use lockstep_plan::{DType, MemoryCategory, ParameterId, ParameterRecord};
use lockstep_tensor::{Arena, Buffer, Kernels, Tensor, TensorError, View};

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
        let capacity = ids.min(tokens.saturating_mul(micro_batches));
        let category = MemoryCategory::Gradients;
        let zeros = |shape: usize| Tensor::zeros(arena, DType::U32, [shape], category);
        let row_bytes = columns * size_of::<f32>();
        Ok(Self {
            table,
            first_id: record.share.shard.map_or(0, |shard| shard.start as u32),
            ids: Vec::with_capacity(capacity),
            row_of: vec![NONE; ids],
            rows: arena.allocate_zeroed(capacity.saturating_mul(row_bytes), category)?,
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
        self.token_rows.view().copy_from(&self.host_rows);
        self.begin_rows(queue, before);
    }

    /// Starts the rows from number `first` on at zero.
    fn begin_rows(&self, queue: &dyn Kernels, first: usize) {
        let capacity = self.row_ids.view().elements();
        assert!(self.ids.len() <= capacity, "more micro-batches than the engine was built for");
        let new = first..self.ids.len();
        if !new.is_empty() {
            self.row_ids.view().rows(new.clone()).copy_from(&self.ids[new.clone()]);
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

    /// The gradients of all rows, to be summed over the replicas, and how many bytes they are.
    pub(crate) fn gradient_mut(&mut self) -> (&mut Buffer, usize) {
        let bytes = self.elements() * size_of::<f32>();
        (&mut self.rows, bytes)
    }

    /// How many rows there are.
    pub(crate) fn rows(&self) -> usize {
        self.ids.len()
    }

    /// Adds the rows to those of the whole table's gradient.
    pub(crate) fn add_to(&self, queue: &dyn Kernels, gradient: View<'_>) {
        let rows = 0..self.rows();
        if !rows.is_empty() {
            queue.embedding_backward(
                self.row_ids.view().rows(rows.clone()),
                self.gradient(rows),
                0,
                gradient,
            );
        }
    }

    /// Elements of the rows in use.
    pub(crate) fn elements(&self) -> usize {
        self.rows() * self.columns
    }
}
