//! Gradients of one step: the first contribution to each replaces what the last step left, so that nothing has to
//! be set to zero beforehand and read back. Parameters that are not trained have none.

use std::cell::Cell;

use lockstep_plan::{DType, MemoryCategory, ParameterId, ParameterRecord};
use lockstep_tensor::{Arena, Buffer, Kernels, TensorError, View, Write};

use crate::{FlatStore, looked_up::LookedUp};

/// The f32 gradients of all parameters. Tied ones share theirs; what the embedding contributes to a shared one is
/// added last.
#[derive(Debug)]
pub struct Gradients {
    store: FlatStore,
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
    /// Gradients of those of `records` that are trained, all zero, for steps of up to `micro_batches` of `tokens`.
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
        Ok(Self { store, next: vec![Cell::new(Write::Overwrite); records.len()], tied })
    }

    /// Starts a step: what is there no longer counts.
    pub fn begin(&mut self) {
        self.next.iter().for_each(|next| next.set(Write::Overwrite));
        self.tied.iter_mut().for_each(|tied| tied.embedding.clear());
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
            Some(embedding) => (embedding.gradient(), Write::Accumulate),
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
        for (index, next) in self.next.iter().enumerate() {
            let id = ParameterId(index);
            if self.looked_up(id).is_none()
                && self.store.unit_of(id) == Some(unit)
                && next.replace(Write::Accumulate) == Write::Overwrite
                && let Some(gradient) = self.store.get(id)
            {
                queue.zero(gradient);
            }
        }
        for Tied { output, embedding } in &mut self.tied {
            if self.store.unit_of(*output) == Some(unit) {
                embedding.add_to(queue, self.store.view(*output));
                embedding.clear();
            }
        }
    }

    /// The gradients of a unit, one after the other; none if nothing of it is trained.
    pub(crate) fn unit_mut(&mut self, unit: usize) -> Option<&mut Buffer> {
        self.store.unit_mut(unit)
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
