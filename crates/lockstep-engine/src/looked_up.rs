//! The gradient of an embedding that shares its table with the output layer.
//!
//! The output layer reaches every row of the table and the embedding only those that a step's tokens look up: its
//! share is kept for these rows alone, in the order in which they are first seen, and added when the step ends. So
//! both uses are summed apart, without a second gradient of the table's size.

use lockstep_plan::{DType, MemoryCategory, ParameterId, ParameterRecord};
use lockstep_tensor::{Arena, Kernels, Tensor, TensorError, View};

/// An id that no token has looked up yet.
const NONE: u32 = u32::MAX;

/// The rows of one table that were looked up since a step began.
#[derive(Debug)]
pub(crate) struct LookedUp {
    table: ParameterId,
    /// The id of each row in use.
    ids: Vec<u32>,
    /// The row of each id, or [`NONE`].
    row_of: Vec<u32>,
    /// f32 `[capacity, columns]`: gradients.
    rows: Tensor,
    /// u32 `[capacity]`: `ids`, for kernels.
    row_ids: Tensor,
    /// u32 `[tokens]`: the row of each token of the last micro-batch.
    token_rows: Tensor,
    host_rows: Vec<u32>,
}

impl LookedUp {
    /// Room for the rows of `table` that `micro_batches` of `tokens` can look up.
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
        let (ids, columns) = (record.shape[0], record.shape[1]);
        let capacity = ids.min(tokens.saturating_mul(micro_batches));
        let zeros = |dtype, shape: &[usize]| Tensor::zeros(arena, dtype, shape, MemoryCategory::Gradients);
        Ok(Self {
            table,
            ids: Vec::with_capacity(capacity),
            row_of: vec![NONE; ids],
            rows: zeros(DType::F32, &[capacity, columns])?,
            row_ids: zeros(DType::U32, &[capacity])?,
            token_rows: zeros(DType::U32, &[tokens])?,
            host_rows: Vec::with_capacity(tokens),
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

    /// Finds the rows of a micro-batch's tokens; those of ids not seen before start at zero.
    ///
    /// # Panics
    /// If there are more micro-batches than there is room for.
    pub(crate) fn look_up(&mut self, queue: &dyn Kernels, ids: &[u32]) {
        let before = self.ids.len();
        self.host_rows.clear();
        for &id in ids {
            let row = &mut self.row_of[id as usize];
            if *row == NONE {
                *row = self.ids.len() as u32;
                self.ids.push(id);
            }
            self.host_rows.push(*row);
        }
        let capacity = self.row_ids.view().elements();
        assert!(self.ids.len() <= capacity, "more micro-batches than the engine was built for");
        self.token_rows.view().copy_from(&self.host_rows);
        let new = before..self.ids.len();
        if !new.is_empty() {
            self.row_ids.view().rows(new.clone()).copy_from(&self.ids[new.clone()]);
            queue.zero(self.rows.view().rows(new));
        }
    }

    /// The row of each token of the last micro-batch.
    pub(crate) fn token_rows(&self) -> View<'_> {
        self.token_rows.view()
    }

    /// The gradients of the rows.
    pub(crate) fn gradient(&self) -> View<'_> {
        self.rows.view()
    }

    /// Adds the rows to those of the whole table's gradient.
    pub(crate) fn add_to(&self, queue: &dyn Kernels, gradient: View<'_>) {
        let rows = 0..self.ids.len();
        if !rows.is_empty() {
            queue.embedding_backward(
                self.row_ids.view().rows(rows.clone()),
                self.rows.view().rows(rows),
                gradient,
            );
        }
    }

    /// Elements of the rows in use.
    pub(crate) fn elements(&self) -> usize {
        self.ids.len() * self.rows.view().shape().as_matrix().1
    }
}
