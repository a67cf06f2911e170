//! Gradients of one step: the first contribution to each replaces what the last step left, so that nothing has to
//! be set to zero beforehand and read back. Parameters that are not trained have none.
//!
//! Where ranks share out gradients (ZeRO stage 2) a rank keeps those that it owns. The others' are there for as long as a unit's
//! backward takes: in one of two buffers, from which each owner gets its sum while the next unit works on the other.

use std::cell::Cell;

use lockstep_comm::CommError;
use lockstep_graph::mutation::{Mutation, active};
use lockstep_plan::{
    DType, Extent, MemoryCategory, ParameterId, ParameterRecord, Passage, Summing, ZeroStage,
};
use lockstep_tensor::{Arena, Buffer, Kernels, TensorError, View, Write};

use crate::flat::{FlatStore, Part};
use crate::{looked_up::LookedUp, reducer::Reducer, shards::Shards};

/// The f32 gradients of all parameters. Tied ones share theirs; what the embedding contributes to a shared one is
/// added last.
#[derive(Debug)]
pub struct Gradients {
    store: FlatStore,
    /// Where those that others own are until they have been summed; none where the store has all.
    passing: Option<Passing>,
    /// The unit that contributes to each. By [`ParameterId`].
    units: Vec<usize>,
    /// Whether it is another's contribution that it holds: that of the output layer, where the embedding of a shared table is
    /// on another rank. By [`ParameterId`].
    is_borrowed: Vec<bool>,
    /// The stretches that are complete, but for looked-up rows, when a unit has ended. By unit.
    completed: Vec<Vec<usize>>,
    /// What the next contribution to each does. By [`ParameterId`].
    next: Vec<Cell<Write>>,
    tied: Vec<Tied>,
}

/// Gradients of units whose backward runs or has just run.
#[derive(Debug)]
struct Passing {
    /// That of a unit is in the one of its parity: neighbours have different ones.
    buffers: [Buffer; 2],
    /// Where each stretch lies in its buffer.
    offsets_bytes: Vec<usize>,
    /// What the next sum of each stretch does to what the store has.
    next: Vec<Write>,
    /// The stretches that are being summed.
    under_way: Vec<usize>,
    /// Those whose sums have come last.
    came: Vec<usize>,
    /// Whether the sum of what this rank owns of a stretch over the replicas has begun.
    owned_begun: Vec<bool>,
}

/// A table that an output layer and an embedding share.
#[derive(Debug)]
struct Tied {
    output: ParameterId,
    embedding: LookedUp,
    summing: Summing,
}

/// What is to be trained on a rank, and who owns it.
#[derive(Clone, Copy)]
pub(crate) struct Trained<'a> {
    pub(crate) records: &'a [ParameterRecord],
    /// Which units are on this rank.
    pub(crate) is_here: &'a [bool],
    pub(crate) shards: &'a Shards,
}

impl Gradients {
    /// Gradients of what is trained, all zero, for steps of up to `micro_batches` of `tokens` on all replicas together.
    ///
    /// # Errors
    /// [`TensorError::OutOfMemory`].
    pub(crate) fn new(
        arena: &Arena,
        Trained { records, is_here, shards }: Trained<'_>,
        tokens: usize,
        micro_batches: usize,
    ) -> Result<Self, TensorError> {
        let kind = (DType::F32, MemoryCategory::Gradients);
        let is_trained = |record: &ParameterRecord| record.trainable && is_here[record.unit];
        let is_shared_out = shards.stage() >= ZeroStage::Gradients;
        let extent = if is_shared_out { Extent::Own } else { Extent::Whole };
        let store = FlatStore::zeros_where(arena, records, kind, shards, extent, is_trained)?;
        let mut is_borrowed = vec![false; records.len()];
        let mut tied = Vec::new();
        for (index, record) in records.iter().enumerate() {
            let Some(table) = record.tie.filter(|_| is_trained(record)) else { continue };
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
        let mut completed = vec![Vec::new(); is_here.len()];
        for (index, stretch) in store.stretches().iter().enumerate() {
            completed[stretch.completed_by].push(index);
        }
        Ok(Self {
            passing: is_shared_out.then(|| Passing::new(arena, &store)).transpose()?,
            store,
            units: records.iter().map(|record| record.unit).collect(),
            is_borrowed,
            completed,
            next: vec![Cell::new(Write::Overwrite); records.len()],
            tied,
        })
    }

    /// Starts a step: what is there no longer counts.
    pub fn begin(&mut self) {
        self.next.iter().for_each(|next| next.set(Write::Overwrite));
        self.tied.iter_mut().for_each(|tied| tied.embedding.clear());
        if let Some(passing) = &mut self.passing {
            passing.next.fill(Write::Overwrite);
            passing.owned_begun.fill(false);
        }
    }

    /// Whether gradients are summed after every micro-batch, not after the last.
    pub(crate) fn are_summed_at_once(&self) -> bool {
        self.passing.is_some()
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
            None => (self.whole(id), self.next[id.0].replace(Write::Accumulate)),
        }
    }

    /// The row of a table's gradient that each token of the micro-batch contributes to, where that is not its id.
    pub fn rows(&self, table: ParameterId) -> Option<View<'_>> {
        self.looked_up(table).map(LookedUp::token_rows)
    }

    /// Completes the gradients of a unit, to which nothing contributes any more: what nothing contributed to is zero, and
    /// tied gradients are the sums of both uses. What is complete stays as it is.
    pub fn end_unit(&mut self, queue: &dyn Kernels, unit: usize) {
        if let Some(Passing { next, .. }) = &mut self.passing {
            for &stretch in &self.completed[unit] {
                if std::mem::replace(&mut next[stretch], Write::Accumulate) == Write::Overwrite {
                    queue.zero(self.store.own_of(stretch));
                }
            }
        } else {
            self.zero_untouched(queue, unit);
        }
        for Tied { output, embedding, .. } in &mut self.tied {
            if self.units[embedding.table().0] == unit && !active(Mutation::TiedRowsNotAdded) {
                if let Some(part) = self.store.part(*output) {
                    embedding.add_to(queue, part);
                }
                embedding.clear();
            }
        }
    }

    /// Begins to sum the gradients of a unit, to which this micro-batch contributes nothing any more, over those that have
    /// summands; where they are kept by their owners, those of the units before are there when it returns.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn sum_unit(
        &mut self,
        queue: &dyn Kernels,
        unit: usize,
        reducer: &mut Reducer,
    ) -> Result<(), CommError> {
        // One half of a split backward, or a unit that is frozen, may contribute nothing. The unit before has the buffer of the one after.
        if self.passing.is_some() && !self.is_touched(unit) {
            return self.wait(queue, reducer);
        }
        self.zero_untouched(queue, unit);
        let before = reducer.pending();
        for &stretch in &self.completed[unit] {
            let (summing, elements) =
                (self.store.stretches()[stretch].summing, self.store.stretches()[stretch].elements);
            let (buffer, bytes) = match &mut self.passing {
                None => self.store.lend_from(stretch, 0..elements),
                Some(passing) => {
                    let start = passing.offsets_bytes[stretch];
                    let bytes = start..start + elements * size_of::<f32>();
                    (&mut passing.buffers[unit % 2], bytes)
                }
            };
            reducer.sum_stretch(buffer, bytes, summing)?;
        }
        if self.passing.is_some() {
            reducer.wait_but(reducer.pending() - before)?;
            self.take_in(queue);
            self.parameters_of(unit).for_each(|id| self.next[id].set(Write::Overwrite));
        }
        if let Some(Passing { under_way, .. }) = &mut self.passing {
            under_way.extend(&self.completed[unit]);
        }
        Ok(())
    }

    /// Begins to sum what an embedding contributes to a tied table over those that have summands; [`Gradients::end_unit`] adds it
    /// to the output layer's contribution after that.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn sum_rows(&mut self, unit: usize, reducer: &mut Reducer) -> Result<(), CommError> {
        let Self { units, tied, .. } = self;
        for Tied { embedding, summing, .. } in tied
            .iter_mut()
            .filter(|tied| units[tied.embedding.table().0] == unit && !active(Mutation::TiedRowsNotSummed))
        {
            let (rows, bytes) = embedding.gradient_mut();
            reducer.sum(rows, 0..bytes, *summing)?;
        }
        Ok(())
    }

    /// Waits until everything is summed that is under way.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn wait(&mut self, queue: &dyn Kernels, reducer: &mut Reducer) -> Result<(), CommError> {
        reducer.wait_but(0)?;
        self.take_in(queue);
        Ok(())
    }

    /// In the last micro-batch of a step, after [`Gradients::sum_unit`]: begins to sum over the replicas what this rank owns of the
    /// stretches whose sums have come meanwhile.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn begin_owned(&mut self, reducer: &mut Reducer) -> Result<(), CommError> {
        let Self { store, passing: Some(passing), .. } = self else { return Ok(()) };
        for stretch in passing.came.drain(..) {
            passing.owned_begun[stretch] = true;
            let (summing, own) = (store.stretches()[stretch].summing, store.stretches()[stretch].own.clone());
            let (buffer, bytes) = store.lend_from(stretch, own);
            reducer.sum_owned(buffer, bytes, summing)?;
        }
        Ok(())
    }

    /// Sums what this rank owns over the replicas, after the last micro-batch, as far as that has not begun.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn sum_owned(&mut self, reducer: &mut Reducer) -> Result<(), CommError> {
        for stretch in 0..self.store.stretches().len() {
            if self.passing.as_ref().is_some_and(|passing| passing.owned_begun[stretch]) {
                continue;
            }
            let (summing, own) =
                (self.store.stretches()[stretch].summing, self.store.stretches()[stretch].own.clone());
            let (buffer, bytes) = self.store.lend_from(stretch, own);
            reducer.sum_owned(buffer, bytes, summing)?;
        }
        reducer.wait_but(0)
    }

    /// Adds sums that have come to what this rank owns.
    fn take_in(&mut self, queue: &dyn Kernels) {
        let Self { store, passing: Some(passing), .. } = self else { return };
        let Passing { buffers, offsets_bytes, next, under_way, came, .. } = passing;
        came.clear();
        for stretch in under_way.drain(..) {
            came.push(stretch);
            let of = &store.stretches()[stretch];
            let start = offsets_bytes[stretch] + of.own.start * size_of::<f32>();
            let sum = buffers[of.completed_by % 2].view(DType::F32, start, [of.own.len()]);
            let own = store.own_of(stretch);
            match std::mem::replace(&mut next[stretch], Write::Accumulate) {
                Write::Overwrite => queue.cast(sum, own),
                Write::Accumulate => queue.add(own, sum, own),
            }
        }
    }

    /// What nothing of the unit has contributed to is zero.
    fn zero_untouched(&self, queue: &dyn Kernels, unit: usize) {
        for id in self.parameters_of(unit) {
            if self.next[id].replace(Write::Accumulate) == Write::Overwrite {
                queue.zero(self.whole(ParameterId(id)));
            }
        }
    }

    /// Whether anything of the unit was contributed to since it was summed last.
    fn is_touched(&self, unit: usize) -> bool {
        self.parameters_of(unit).any(|id| self.next[id].get() == Write::Accumulate)
    }

    /// The parameters of a unit to whose gradients here it contributes, by number.
    fn parameters_of(&self, unit: usize) -> impl Iterator<Item = usize> {
        (0..self.next.len()).filter(move |&index| {
            let id = ParameterId(index);
            self.units[index] == unit
                && !self.is_borrowed[index]
                && self.looked_up(id).is_none()
                && self.store.place_of(id).is_some()
        })
    }

    /// What this rank owns of the gradient of a step that has ended; none if that is nothing.
    pub fn part(&self, id: ParameterId) -> Option<Part<'_>> {
        self.store.part(id)
    }

    /// Elements that are still to be added to tied gradients.
    pub fn tied_elements(&self) -> usize {
        self.tied.iter().map(|tied| tied.embedding.elements()).sum()
    }

    /// The whole gradient, while a backward contributes to it.
    fn whole(&self, id: ParameterId) -> View<'_> {
        let Some(passing) = &self.passing else { return self.store.view(id) };
        let (stretch, first, shape) = self.store.place_of(id).expect("what is trained has a gradient");
        let offset_bytes = passing.offsets_bytes[stretch] + first * size_of::<f32>();
        let buffer = &passing.buffers[self.store.stretches()[stretch].completed_by % 2];
        buffer.view(DType::F32, offset_bytes, shape)
    }

    fn looked_up(&self, id: ParameterId) -> Option<&LookedUp> {
        self.tied.iter().map(|tied| &tied.embedding).find(|embedding| embedding.table() == id)
    }
}

impl Passing {
    fn new(arena: &Arena, store: &FlatStore) -> Result<Self, TensorError> {
        let Passage { offsets, elements: [even, odd] } = store.layout().passage();
        let bytes = |elements: usize| elements * size_of::<f32>();
        let offsets_bytes: Vec<usize> = offsets.into_iter().map(bytes).collect();
        let stretches = offsets_bytes.len();
        let buffer = |bytes| arena.allocate_zeroed(bytes, MemoryCategory::Communication);
        Ok(Self {
            buffers: [buffer(bytes(even))?, buffer(bytes(odd))?],
            offsets_bytes,
            next: vec![Write::Overwrite; stretches],
            under_way: Vec::with_capacity(stretches),
            came: Vec::with_capacity(stretches),
            owned_begun: vec![false; stretches],
        })
    }
}
