//! Gradients of one step: the first contribution to each replaces what the last step left, so that nothing has to
//! be set to zero beforehand and read back. Parameters that are not trained have none.
//!
//! With sharded gradients (ZeRO stage 2) a rank keeps its own elements. The others' exist for as long as a unit's backward takes: in one of
//! two buffers, which is reduced to the owners while the next unit fills the other. Offloaded gradients use the same buffers: the own
//! elements of a sum are written behind the backward ([`OffloadedGradients`]). Quantized ones ([`QuantizedGradients`]) are summed while the next
//! unit works in any case.

use std::cell::{Cell, RefCell};
use std::ops::Range;

use lockstep_plan::{
    DType, GradientStaging, MemoryCategory, ParameterId, ParameterRecord, SharedTable, StateLayout,
    StoreKind, Stretch, Summing, exact::ExactSum,
};
use lockstep_tensor::{Arena, Buffer, DiskTraffic, Kernels, TensorError, View, Write};

use crate::model_state::ModelState;
use crate::offloaded_gradients::OffloadedGradients;
use crate::quantized_gradients::QuantizedGradients;
use crate::state_store::{Part, Residence, StateStore};
use crate::{EngineError, Offload, looked_up::LookedUp, reducer::Reducer};

/// The f32 gradients of all parameters. Tied ones share theirs; what the embedding contributes to a shared one is
/// added last.
#[derive(Debug)]
pub struct Gradients {
    store: StateStore,
    /// Windowed gradients.
    offloaded: Option<RefCell<OffloadedGradients>>,
    /// The buffers of gradients of other owners, or of a disk, until they are summed; `None` if the store has all gradients.
    passing: Option<Passing>,
    /// The codes of gradients between ranks; `None` if they are not quantized.
    quantized: Option<QuantizedGradients>,
    /// The stretches that are being summed, if their sums are taken in when the next unit's are begun.
    in_flight: Vec<usize>,
    /// The stretches whose sums were taken in last.
    arrived: Vec<usize>,
    /// The unit that contributes to each. By [`ParameterId`].
    units: Vec<usize>,
    /// The unit after which nothing of its buffer contributes to it, but for a table of which others look up rows. By [`ParameterId`].
    completed_by: Vec<usize>,
    /// The first unit of the buffer that each unit's stand in. By unit.
    buffer_firsts: Vec<usize>,
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
    /// A unit uses the buffer of its parity: neighbours use different ones.
    buffers: [Buffer; 2],
    /// The first byte of each stretch in its buffer.
    offsets_bytes: Vec<usize>,
    /// How the next sum of each stretch changes the stored gradients.
    next: Vec<Cell<Write>>,
    /// True for stretches whose sum over the replicas has begun.
    owned_begun: Vec<bool>,
}

/// A table that an output layer and an embedding share.
#[derive(Debug)]
struct Tied {
    output: ParameterId,
    embedding: LookedUp,
    summing: Summing,
}

impl Gradients {
    /// Gradients of what is trained, all zero, for steps with micro-batches of `tokens`. Those of offloaded units are on disk, but tied ones.
    ///
    /// # Errors
    /// No memory, no room on the disk.
    pub(crate) fn new(
        arena: &Arena,
        layout: &StateLayout,
        state: &mut ModelState,
        tokens: usize,
        offload: &Offload,
    ) -> Result<Self, EngineError> {
        let store = state.take(StoreKind::Gradients).expect("every rank has a store of gradients");
        let StateLayout { records, is_here, plan, .. } = layout;
        let offloaded = OffloadedGradients::new(offload, &store, arena)?;
        let mut is_borrowed = vec![false; records.len()];
        if let Some(SharedTable { id, is_copy: true }) = layout.shared_table {
            // A table that this rank has for its output layer alone counts as of that layer's unit.
            is_borrowed[id.0] = true;
        }
        let tied = layout.tied_tables().map(|(output, table)| {
            let of_table = &records[table.0];
            let embedding = LookedUp::new(arena, table, of_table, tokens, plan.micro_batches)?;
            Ok(Tied { output, embedding, summing: Summing::of(&of_table.share) })
        });
        let tied = tied.collect::<Result<_, TensorError>>()?;
        let mut completed = vec![Vec::new(); is_here.len()];
        for (index, stretch) in store.stretches().iter().enumerate() {
            completed[stretch.completed_by].push(index);
        }
        Ok(Self {
            quantized: QuantizedGradients::new(
                arena,
                layout,
                &store,
                state.take(StoreKind::GradientResidual),
            )?,
            in_flight: Vec::with_capacity(store.stretches().len()),
            arrived: Vec::with_capacity(store.stretches().len()),
            passing: plan.hands_gradients_on().then(|| Passing::new(arena, &store)).transpose()?,
            store,
            offloaded: offloaded.map(RefCell::new),
            units: records.iter().map(|record| record.unit).collect(),
            completed_by: records.iter().map(completing_unit).collect(),
            buffer_firsts: buffer_firsts(records, is_here.len()),
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
            passing.next.iter().for_each(|next| next.set(Write::Overwrite));
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
    /// [`EngineError`].
    pub(crate) fn share<'a>(
        &mut self,
        queue: &dyn Kernels,
        ids: impl Iterator<Item = &'a [u32]> + Clone,
        reducer: &mut Reducer,
    ) -> Result<(), EngineError> {
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
    ///
    /// # Errors
    /// [`EngineError::Disk`].
    pub fn end_unit(&mut self, queue: &dyn Kernels, unit: usize) -> Result<(), EngineError> {
        if let Some(Passing { next, .. }) = &self.passing {
            for &stretch in &self.completed[unit] {
                if next[stretch].replace(Write::Accumulate) == Write::Accumulate {
                    continue;
                }
                match (self.store.residence(stretch), &mut self.offloaded) {
                    (Residence::Windowed, Some(offloaded)) => offloaded.get_mut().zero(queue, stretch)?,
                    _ => queue.zero(self.store.own_of(stretch)),
                }
            }
        } else {
            self.zero_untouched(queue, unit);
        }
        for Tied { output, embedding, .. } in &mut self.tied {
            if self.units[embedding.table().0] == unit {
                if let Some(part) = self.store.part(*output) {
                    embedding.add_to(queue, part);
                }
                embedding.clear();
            }
        }
        Ok(())
    }

    /// Begins to sum the gradients of a unit, to which this micro-batch contributes nothing any more, over those that have
    /// summands; where they are kept by their owners, those of the units before are there when it returns.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn sum_unit(
        &mut self,
        queue: &dyn Kernels,
        unit: usize,
        reducer: &mut Reducer,
    ) -> Result<(), EngineError> {
        // Units before it stand in the same buffer.
        if self.completed[unit].is_empty() && self.buffer_firsts[unit] != unit {
            return Ok(());
        }
        // One half of a split backward, or a unit that is frozen, may contribute nothing. The unit before has the buffer of the one after.
        if self.passing.is_some() && !self.is_touched(unit) {
            return self.wait(queue, reducer);
        }
        self.zero_untouched(queue, unit);
        let (completed, in_flight) = (&self.completed[unit], &self.in_flight);
        if self.quantized.as_ref().is_some_and(|quantized| quantized.is_busy(completed, in_flight)) {
            self.wait(queue, reducer)?;
        }
        reducer.begin_round();
        for &stretch in &self.completed[unit] {
            if let Some(quantized) = self.quantized.as_mut().filter(|quantized| quantized.has(stretch)) {
                let elements = self.store.stretches()[stretch].elements;
                let gradients = match &self.passing {
                    None => self.store.range_of(stretch, 0..elements),
                    Some(passing) => passing.range_of(&self.store, stretch, 0..elements),
                };
                quantized.send(queue, stretch, gradients, reducer)?;
                continue;
            }
            let &Stretch { summing, elements, .. } = &self.store.stretches()[stretch];
            let memory = match &mut self.passing {
                None => self.store.lend_from(stretch, 0..elements),
                Some(passing) => {
                    let start = passing.offsets_bytes[stretch];
                    let buffer = &mut passing.buffers[self.store.stretches()[stretch].parity()];
                    (buffer, start..start + elements * size_of::<f32>())
                }
            };
            reducer.sum_stretch(memory, summing)?;
        }
        if self.passing.is_some() || self.quantized.is_some() {
            reducer.finish_earlier_rounds()?;
            self.take_in(queue)?;
            self.in_flight.extend(&self.completed[unit]);
        }
        if self.passing.is_some() {
            self.parameters_of(unit).for_each(|id| self.next[id].set(Write::Overwrite));
        }
        Ok(())
    }

    /// Begins to sum what an embedding contributes to a tied table over those that have summands; [`Gradients::end_unit`] adds it
    /// to the output layer's contribution after that.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn sum_rows(&mut self, unit: usize, reducer: &mut Reducer) -> Result<(), EngineError> {
        let Self { units, tied, .. } = self;
        let of_unit = tied.iter_mut().filter(|tied| units[tied.embedding.table().0] == unit);
        for Tied { embedding, summing, .. } in of_unit {
            reducer.sum(embedding.gradient_mut(), *summing)?;
        }
        Ok(())
    }

    /// Waits until everything is summed that is under way.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn wait(&mut self, queue: &dyn Kernels, reducer: &mut Reducer) -> Result<(), EngineError> {
        reducer.finish()?;
        self.take_in(queue)
    }

    /// In the last micro-batch of a step, after [`Gradients::sum_unit`]: begins to sum over the replicas what this rank owns of the
    /// stretches whose sums have come meanwhile.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn begin_owned(&mut self, reducer: &mut Reducer) -> Result<(), EngineError> {
        let Self { store, quantized, arrived, passing: Some(passing), .. } = self else { return Ok(()) };
        for stretch in arrived.drain(..) {
            // Records of several stretches would want one buffer at once.
            let is_coded = quantized.as_ref().is_some_and(|quantized| quantized.has(stretch));
            if is_coded || store.residence(stretch) == Residence::Windowed {
                continue;
            }
            passing.owned_begun[stretch] = true;
            let summing = store.stretches()[stretch].summing;
            reducer.sum_owned(store.lend_own(stretch), summing)?;
        }
        Ok(())
    }

    /// Sums what this rank owns over the replicas, after the last micro-batch, as far as that has not begun.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn sum_owned(
        &mut self,
        queue: &dyn Kernels,
        reducer: &mut Reducer,
    ) -> Result<(), EngineError> {
        for stretch in 0..self.store.stretches().len() {
            if self.store.residence(stretch) == Residence::Windowed
                || self.passing.as_ref().is_some_and(|passing| passing.owned_begun[stretch])
            {
                continue;
            }
            if let Some(quantized) = self.quantized.as_mut().filter(|quantized| quantized.has(stretch)) {
                quantized.sum_over_replicas(queue, stretch, self.store.own_of(stretch), reducer)?;
                continue;
            }
            let summing = self.store.stretches()[stretch].summing;
            reducer.sum_owned(self.store.lend_own(stretch), summing)?;
        }
        reducer.finish()
    }

    /// Adds sums that have arrived to the own gradients.
    fn take_in(&mut self, queue: &dyn Kernels) -> Result<(), EngineError> {
        let Self { store, offloaded, passing, quantized, in_flight, arrived, .. } = self;
        arrived.clear();
        std::mem::swap(arrived, in_flight);
        for &stretch in &*arrived {
            let own = store.stretches()[stretch].own.clone();
            let sum = match &*passing {
                None => store.own_of(stretch),
                Some(passing) => passing.range_of(store, stretch, own),
            };
            if let Some(quantized) = &*quantized {
                quantized.take_in(queue, stretch, sum);
            }
            let Some(passing) = &*passing else { continue };
            let write = passing.next[stretch].replace(Write::Accumulate);
            match (store.residence(stretch), &mut *offloaded, write) {
                (Residence::Windowed, Some(offloaded), _) => {
                    offloaded.get_mut().take(queue, stretch, sum, write)?;
                }
                (_, _, Write::Overwrite) => queue.cast(sum, store.own_of(stretch)),
                (_, _, Write::Accumulate) => queue.add(store.own_of(stretch), sum, store.own_of(stretch)),
            }
        }
        Ok(())
    }

    /// Sets gradients of the unit to zero that nothing has contributed to.
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

    /// The parameters whose gradients here are complete when a unit has contributed to them, by number.
    fn parameters_of(&self, unit: usize) -> impl Iterator<Item = usize> {
        (0..self.next.len()).filter(move |&index| {
            let id = ParameterId(index);
            self.completed_by[index] == unit
                && !self.is_borrowed[index]
                && self.looked_up(id).is_none()
                && self.store.place_of(id).is_some()
        })
    }

    /// The quantization errors of earlier gradients, if they are kept.
    pub(crate) fn residual(&self) -> Option<&StateStore> {
        self.quantized.as_ref().and_then(QuantizedGradients::residual)
    }

    /// See [`Gradients::residual`].
    pub(crate) fn residual_mut(&mut self) -> Option<&mut StateStore> {
        self.quantized.as_mut().and_then(QuantizedGradients::residual_mut)
    }

    /// The own elements of a gradient, after the step; `None` if there are none, or they are on disk.
    pub fn part(&self, id: ParameterId) -> Option<Part<'_>> {
        self.store.part(id)
    }

    /// The range of a gradient's own elements, wherever they are.
    pub(crate) fn owned_range(&self, id: ParameterId) -> Range<usize> {
        self.store.owned_range(id)
    }

    /// Adds the squares of what this rank owns of the gradient of a step that has ended.
    pub(crate) fn add_squares(&self, queue: &dyn Kernels, id: ParameterId, sum: &mut ExactSum) {
        match (self.store.part(id), &self.offloaded) {
            (Some(part), _) => sum.merge(&queue.sum_of_squares(part.view).wait()),
            (None, Some(offloaded)) => offloaded.borrow().add_squares(id, sum),
            (None, None) => {}
        }
    }

    /// A copy of what this rank owns of the gradient of a step that has ended.
    ///
    /// # Errors
    /// [`EngineError::Disk`].
    pub(crate) fn read(&self, id: ParameterId) -> Result<Vec<f32>, EngineError> {
        let range = self.store.owned_range(id);
        match (self.store.part(id), &self.offloaded) {
            (Some(part), _) => Ok(part.view.fetch()),
            (None, Some(offloaded)) => offloaded.borrow_mut().read(id, range),
            (None, None) => Ok(Vec::new()),
        }
    }

    /// Replaces what this rank owns of the gradient of a step that has ended.
    ///
    /// # Errors
    /// [`EngineError::Disk`].
    pub(crate) fn write(
        &mut self,
        queue: &dyn Kernels,
        id: ParameterId,
        values: &[f32],
    ) -> Result<(), EngineError> {
        let start = self.store.owned_range(id).start;
        match (self.store.part(id), &mut self.offloaded) {
            (Some(part), _) => part.view.write(values),
            (None, Some(offloaded)) => offloaded.get_mut().write(queue, id, start, values)?,
            (None, None) => {}
        }
        Ok(())
    }

    /// Windowed gradients, which an optimizer step reads window by window.
    pub(crate) fn offloaded(&self) -> Option<&RefCell<OffloadedGradients>> {
        self.offloaded.as_ref()
    }

    /// The cost of reads and writes since this was last asked.
    pub(crate) fn take_disk_traffic(&mut self) -> DiskTraffic {
        let offloaded = self.offloaded.as_mut().map(RefCell::get_mut);
        offloaded.map_or_else(DiskTraffic::default, OffloadedGradients::take_traffic)
    }

    /// Bytes of the file.
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.offloaded.as_ref().map_or(0, |offloaded| offloaded.borrow().disk_bytes())
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
        let buffer = &passing.buffers[self.store.stretches()[stretch].parity()];
        buffer.view(DType::F32, offset_bytes, shape)
    }

    fn looked_up(&self, id: ParameterId) -> Option<&LookedUp> {
        self.tied.iter().map(|tied| &tied.embedding).find(|embedding| embedding.table() == id)
    }
}

/// The unit after whose backward a parameter's gradient is complete; a table that an output layer shares stands by itself.
fn completing_unit(record: &ParameterRecord) -> usize {
    if record.tie.is_some() { record.unit } else { record.buffer.first }
}

/// The first unit of the buffer that each unit's parameters stand in.
fn buffer_firsts(records: &[ParameterRecord], units: usize) -> Vec<usize> {
    let mut firsts: Vec<usize> = (0..units).collect();
    records.iter().for_each(|record| firsts[record.unit] = record.buffer.first);
    firsts
}

impl Passing {
    /// Some elements of a stretch of `store`.
    fn range_of(&self, store: &StateStore, stretch: usize, elements: Range<usize>) -> View<'_> {
        let start = self.offsets_bytes[stretch] + elements.start * size_of::<f32>();
        self.buffers[store.stretches()[stretch].parity()].view(DType::F32, start, [elements.len()])
    }

    fn new(arena: &Arena, store: &StateStore) -> Result<Self, TensorError> {
        let GradientStaging { offsets, elements: [even, odd] } = store.layout().passage();
        let bytes = |elements: usize| elements * size_of::<f32>();
        let offsets_bytes: Vec<usize> = offsets.into_iter().map(bytes).collect();
        let stretches = offsets_bytes.len();
        let buffer = |bytes| arena.allocate_zeroed(bytes, MemoryCategory::Communication);
        Ok(Self {
            buffers: [buffer(bytes(even))?, buffer(bytes(odd))?],
            offsets_bytes,
            next: vec![Cell::new(Write::Overwrite); stretches],
            owned_begun: vec![false; stretches],
        })
    }
}
