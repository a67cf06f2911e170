//! Gradients of one step: the first contribution to each replaces what the last step left, so that nothing has to
//! be set to zero beforehand and read back. Parameters that are not trained have none.

use std::cell::Cell;
use std::ops::Range;

use lockstep_comm::CommError;
use lockstep_graph::mutation::{Mutation, active};
use lockstep_plan::{DType, MemoryCategory, ParameterId, ParameterRecord};
use lockstep_tensor::{Arena, Kernels, TensorError, View, Write};

use crate::{FlatStore, groups::Summing, looked_up::LookedUp, reducer::Reducer};

/// The f32 gradients of all parameters. Tied ones share theirs; what the embedding contributes to a shared one is
/// added last.
#[derive(Debug)]
pub struct Gradients {
    store: FlatStore,
    /// The unit that contributes to each. By [`ParameterId`].
    units: Vec<usize>,
    /// Whether it is another's contribution that it holds: that of the output layer, where the embedding of a shared table is
    /// on another rank. By [`ParameterId`].
    is_borrowed: Vec<bool>,
    /// What is to be summed over ranks when a unit has ended. By unit.
    sums: Vec<Vec<Stretch>>,
    /// What the next contribution to each does. By [`ParameterId`].
    next: Vec<Cell<Write>>,
    tied: Vec<Tied>,
}

/// Gradients that stand side by side and are summed over the same ranks.
#[derive(Debug)]
struct Stretch {
    /// The unit in whose buffer they stand.
    buffer: usize,
    bytes: Range<usize>,
    summing: Summing,
}

/// A table that an output layer and an embedding share.
#[derive(Debug)]
struct Tied {
    output: ParameterId,
    embedding: LookedUp,
    summing: Summing,
}

impl Gradients {
    /// Gradients of those of `records` that are trained, all zero, for steps of up to `micro_batches` of `tokens` on all
    /// replicas together. Of the units only those that `is_here` says are on this rank.
    ///
    /// # Errors
    /// [`TensorError::OutOfMemory`].
    pub fn new(
        arena: &Arena,
        records: &[ParameterRecord],
        tokens: usize,
        micro_batches: usize,
        is_here: impl Fn(usize) -> bool,
    ) -> Result<Self, TensorError> {
        let category = MemoryCategory::Gradients;
        let is_trained = |record: &ParameterRecord| record.trainable && is_here(record.unit);
        let store = FlatStore::zeros_where(arena, records, DType::F32, category, is_trained)?;
        let mut is_borrowed = vec![false; records.len()];
        let mut tied = Vec::new();
        for (index, record) in records.iter().enumerate() {
            let Some(table) = record.tie.filter(|_| record.trainable && is_here(record.unit)) else {
                continue;
            };
            let of_table = &records[table.0];
            // A table that this rank has for its output layer alone counts as of that layer's unit.
            if of_table.unit == record.unit {
                is_borrowed[table.0] = true;
            } else {
                let embedding = LookedUp::new(arena, table, of_table, tokens, micro_batches)?;
                let summing = Summing::of(&of_table.share);
                tied.push(Tied { output: ParameterId(index), embedding, summing });
            }
        }
        let units = records.iter().map(|record| record.unit).collect();
        let sums = sums(&store, records, &tied);
        Ok(Self {
            store,
            units,
            is_borrowed,
            sums,
            next: vec![Cell::new(Write::Overwrite); records.len()],
            tied,
        })
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
        self.tied.iter_mut().try_for_each(|Tied { embedding, summing, .. }| {
            embedding.share(queue, ids.clone(), |marks| reducer.mark_all(marks, *summing))
        })
    }

    /// Prepares for the backward of a micro-batch with these token ids, in one stretch or several.
    ///
    /// # Panics
    /// If there are more micro-batches in the step than there is room for.
    pub fn begin_micro_batch<'a>(
        &mut self,
        queue: &dyn Kernels,
        ids: impl Iterator<Item = &'a [u32]> + Clone,
    ) {
        self.tied.iter_mut().for_each(|tied| tied.embedding.look_up(queue, ids.clone()));
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
        for Tied { output, embedding, .. } in &mut self.tied {
            if self.units[embedding.table().0] == unit && !active(Mutation::TiedRowsNotAdded) {
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
        let Self { store, units, sums, tied, .. } = self;
        for Stretch { buffer, bytes, summing } in sums.get(unit).into_iter().flatten() {
            reducer.start(store.unit_mut(*buffer), bytes.clone(), *summing)?;
        }
        for Tied { embedding, summing, .. } in tied
            .iter_mut()
            .filter(|tied| units[tied.embedding.table().0] == unit && !active(Mutation::TiedRowsNotSummed))
        {
            let (rows, bytes) = embedding.gradient_mut();
            reducer.start(rows, 0..bytes, *summing)?;
        }
        Ok(())
    }

    /// What nothing of the unit has contributed to is zero.
    fn zero_untouched(&self, queue: &dyn Kernels, unit: usize) {
        for (index, next) in self.next.iter().enumerate() {
            let id = ParameterId(index);
            if self.units[index] == unit
                && !self.is_borrowed[index]
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

/// What each unit completes but rows of embeddings, by unit.
fn sums(store: &FlatStore, records: &[ParameterRecord], tied: &[Tied]) -> Vec<Vec<Stretch>> {
    let is_looked_up = |id: ParameterId| tied.iter().any(|tied| tied.embedding.table() == id);
    let is_shared = |id: ParameterId| tied.iter().any(|tied| tied.output == id);
    let mut stretches: Vec<(usize, Stretch)> = Vec::new();
    for (index, record) in records.iter().enumerate() {
        let id = ParameterId(index);
        if !is_looked_up(id)
            && (record.tie.is_none() || is_shared(id))
            && let Some((buffer, bytes)) = store.place_of(id)
        {
            stretches.push((record.unit, Stretch { buffer, bytes, summing: Summing::of(&record.share) }));
        }
    }
    stretches.sort_by_key(|(unit, stretch)| (*unit, stretch.buffer, stretch.bytes.start));
    let units = records.iter().map(|record| record.unit + 1).max().unwrap_or(0);
    let mut sums: Vec<Vec<Stretch>> = (0..units).map(|_| Vec::new()).collect();
    for (unit, stretch) in stretches {
        match sums[unit].last_mut() {
            Some(before)
                if (before.buffer, before.bytes.end, before.summing)
                    == (stretch.buffer, stretch.bytes.start, stretch.summing) =>
            {
                before.bytes.end = stretch.bytes.end;
            }
            _ => sums[unit].push(stretch),
        }
    }
    sums
}
