//! Gradients of one step: the first contribution to each replaces what the last step left, so that nothing has to
//! be set to zero beforehand and read back. Parameters that are not trained have none.

use std::cell::Cell;

use lockstep_comm::CommError;
use lockstep_plan::{DType, MemoryCategory, ParameterId, ParameterRecord};
use lockstep_tensor::{Arena, Kernels, TensorError, View, Write};

use crate::{FlatStore, Reducer, looked_up::LookedUp};

/// The f32 gradients of all parameters. Tied ones share theirs; what the embedding contributes to a shared one is
/// added last.
#[derive(Debug)]
pub struct Gradients {
    store: FlatStore,
    /// The unit that contributes to each. By [`ParameterId`].
    units: Vec<usize>,
    /// What the next contribution to each does. By [`ParameterId`].
    next: Vec<Cell<Write>>,
    tied: Vec<Tied>,
}

/// A table that an output layer and an embedding share.
#[derive(Debug)]
struct Tied {
    output: ParameterId,
    embedding: LookedUp,
}

impl Gradients {
    /// Gradients of those of `records` that are trained, all zero, for steps of up to `micro_batches` of `tokens` on all
    /// replicas together.
    ///
    /// # Errors
    /// [`TensorError::OutOfMemory`].
    ///
    /// # Panics
    /// If nothing is trained.
    pub fn new(
        arena: &Arena,
        records: &[ParameterRecord],
        tokens: usize,
        micro_batches: usize,
    ) -> Result<Self, TensorError> {
        let category = MemoryCategory::Gradients;
        let is_trained = |record: &ParameterRecord| record.trainable;
        let store = FlatStore::zeros_where(arena, records, DType::F32, category, is_trained)?
            .expect("something is trained");
        let tied = |(index, record): (usize, &ParameterRecord)| {
            let table = record.tie.filter(|_| record.trainable)?;
            let embedding = LookedUp::new(arena, table, &records[table.0], tokens, micro_batches);
            Some(embedding.map(|embedding| Tied { output: ParameterId(index), embedding }))
        };
        let tied = records.iter().enumerate().filter_map(tied).collect::<Result<_, _>>()?;
        let units = records.iter().map(|record| record.unit).collect();
        Ok(Self { store, units, next: vec![Cell::new(Write::Overwrite); records.len()], tied })
    }

    /// Starts a step: what is there no longer counts.
    pub fn begin(&mut self) {
        self.next.iter().for_each(|next| next.set(Write::Overwrite));
        self.tied.iter_mut().for_each(|tied| tied.embedding.clear());
    }

    /// Has all replicas of `reducer` agree on what the embeddings among tied ones contribute to in this step; `ids` are the
    /// token ids of the own micro-batches.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn share<'a>(
        &mut self,
        queue: &dyn Kernels,
        ids: impl Iterator<Item = &'a [u32]> + Clone,
        reducer: &mut Reducer,
    ) -> Result<(), CommError> {
        self.tied.iter_mut().try_for_each(|Tied { embedding, .. }| {
            embedding.share(queue, ids.clone(), |marks| reducer.mark_all(marks))
        })
    }

    /// Prepares for the backward of a micro-batch with these token ids.
    ///
    /// # Panics
    /// If there are more micro-batches in the step than there is room for.
    pub fn begin_micro_batch(&mut self, queue: &dyn Kernels, ids: &[u32]) {
        self.tied.iter_mut().for_each(|tied| tied.embedding.look_up(queue, ids));
    }

    /// The gradient, and what its next contribution has to do; the one after that adds.
    pub fn contribute(&self, id: ParameterId) -> (View<'_>, Write) {
        match self.looked_up(id) {
            Some(embedding) => (embedding.gradient(0..embedding.rows()), Write::Accumulate),
            None => (self.store.view(id), self.next[id.0].replace(Write::Accumulate)),
        }
    }

    /// The row of a table's gradient that each token of the micro-batch contributes to, where that is not its id.
    pub fn rows(&self, table: ParameterId) -> Option<View<'_>> {
        self.looked_up(table).map(LookedUp::token_rows)
    }

    /// Completes the gradients of a unit, to which nothing contributes any more: what nothing contributed to is zero, and
    /// tied gradients are the sums of both uses. What is complete stays as it is.
    pub fn end_unit(&mut self, queue: &dyn Kernels, unit: usize) {
        self.zero_untouched(queue, unit);
        for Tied { output, embedding } in &mut self.tied {
            if self.units[embedding.table().0] == unit {
                embedding.add_to(queue, self.store.view(*output));
                embedding.clear();
            }
        }
    }

    /// Begins to sum the gradients of a unit, to which nothing contributes any more, over the replicas of `reducer`. Both
    /// uses of a tied one are summed apart, each when its unit ends; [`Gradients::end_unit`] adds them after that.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn reduce_unit(
        &mut self,
        queue: &dyn Kernels,
        unit: usize,
        reducer: &mut Reducer,
    ) -> Result<(), CommError> {
        self.zero_untouched(queue, unit);
        let Self { store, units, tied, .. } = self;
        for Tied { output, .. } in tied.iter().filter(|tied| units[tied.output.0] == unit) {
            let (buffer, table) = store.bytes_of(*output);
            reducer.start(buffer, table)?;
        }
        let mut rest = 0;
        for Tied { embedding, .. } in tied.iter_mut().filter(|tied| units[tied.embedding.table().0] == unit) {
            let (buffer, table) = store.bytes_of(embedding.table());
            reducer.start(buffer, rest..table.start)?;
            rest = table.end;
            let (rows, bytes) = embedding.gradient_mut();
            reducer.start(rows, 0..bytes)?;
        }
        store.unit_mut(unit).map_or(Ok(()), |buffer| {
            let end = buffer.len_bytes();
            reducer.start(buffer, rest..end)
        })
    }

    /// What nothing of the unit has contributed to is zero.
    fn zero_untouched(&self, queue: &dyn Kernels, unit: usize) {
        for (index, next) in self.next.iter().enumerate() {
            let id = ParameterId(index);
            if self.units[index] == unit
                && self.looked_up(id).is_none()
                && next.replace(Write::Accumulate) == Write::Overwrite
                && let Some(gradient) = self.store.get(id)
            {
                queue.zero(gradient);
            }
        }
    }

    /// The gradient of a step that has ended.
    pub fn view(&self, id: ParameterId) -> View<'_> {
        self.store.view(id)
    }

    /// Elements that are still to be added to tied gradients.
    pub fn tied_elements(&self) -> usize {
        self.tied.iter().map(|tied| tied.embedding.elements()).sum()
    }

    fn looked_up(&self, id: ParameterId) -> Option<&LookedUp> {
        self.tied.iter().map(|tied| &tied.embedding).find(|embedding| embedding.table() == id)
    }
}
