//! Gradients of one step. The first contribution to a gradient overwrites the one of the last step, which saves zeroing
//! it and reading it back. Frozen parameters have no gradient.
//!
//! With sharded gradients (ZeRO stage 2) a rank keeps only its own elements. The full gradients of a unit exist during
//! its backward, in one of two staging buffers: one is reduce-scattered while the next unit fills the other. Offloaded
//! gradients use the same buffers, and their own elements are written to disk behind the backward
//! ([`OffloadedGradients`]). The reduction of quantized gradients ([`QuantizedGradients`]) always overlaps with the
//! next unit's backward.

use std::cell::{Cell, RefCell};
use std::ops::Range;

use lockstep_plan::{
    DType, FlatParameter, GradientStaging, MemoryCategory, ParameterId, ParameterRecord, ReductionGroup,
    StateLayout, StoreKind, exact::ExactSum,
};
use lockstep_tensor::{Arena, Buffer, DiskTraffic, Kernels, TensorError, View, Write};

use crate::model_state::ModelState;
use crate::offloaded_gradients::OffloadedGradients;
use crate::quantized_gradients::QuantizedGradients;
use crate::state_store::{OwnedElements, ParameterSpan, Residence, StateStore};
use crate::{EngineError, Offload, reducer::Reducer, sparse_embedding_gradient::SparseEmbeddingGradient};

/// The f32 gradients of all parameters. Tied parameters share one gradient, to which the embedding's contribution is
/// added last.
#[derive(Debug)]
pub struct Gradients {
    store: StateStore,
    /// Gradients that are offloaded to disk, if there are any.
    offloaded: Option<RefCell<OffloadedGradients>>,
    /// Staging buffers of gradients that other ranks own or that are offloaded, until they are reduced; `None` if the
    /// store holds all gradients in full.
    staging: Option<GradientStagingBuffers>,
    /// Quantized reduction of gradients; `None` if gradients are reduced in f32.
    quantized: Option<QuantizedGradients>,
    /// Flat parameters whose reduction is in flight and whose sums are taken in when the next unit's reduction begins.
    in_flight: Vec<usize>,
    /// Flat parameters whose sums were taken in last.
    arrived: Vec<usize>,
    /// Index of the last unit whose backward contributes to each gradient, sparse embedding rows excepted. By
    /// [`ParameterId`].
    completed_by: Vec<usize>,
    /// First unit of the buffer that holds each unit's parameters. By unit.
    buffer_firsts: Vec<usize>,
    /// Embedding table that this rank holds only for the tied output layer, because the embedding is on another rank.
    /// Its gradient is the output layer's contribution and counts as of that layer's unit.
    borrowed: Option<ParameterId>,
    /// Flat parameters whose gradients are complete, sparse embedding rows excepted, after a unit's backward. By unit.
    completed: Vec<Vec<usize>>,
    /// Overwrite or accumulate: effect of the next contribution to each gradient. By [`ParameterId`].
    next: Vec<Cell<Write>>,
    tied: Vec<Tied>,
}

/// Staging buffers for the full gradients of units whose backward runs or has just run.
#[derive(Debug)]
struct GradientStagingBuffers {
    /// Two alternating buffers, selected by [`FlatParameter::parity`]: consecutive buffers of the backward use different
    /// ones.
    buffers: [Buffer; 2],
    /// Offset in bytes of each flat parameter in its buffer.
    offsets_bytes: Vec<usize>,
    /// Overwrite or accumulate: effect of the next reduced sum of each flat parameter on the stored gradients.
    next: Vec<Cell<Write>>,
    /// True for flat parameters whose all-reduce over the data-parallel replicas has begun.
    owned_begun: Vec<bool>,
}

/// A table that an output layer and an embedding share: dense gradient of the former, sparse rows of the latter.
#[derive(Debug)]
struct Tied {
    output: ParameterId,
    embedding: SparseEmbeddingGradient,
    /// Unit of the embedding.
    unit: usize,
    summing: ReductionGroup,
}

impl Gradients {
    /// Allocates zero gradients for the trainable parameters, for micro-batches of `tokens`. Gradients of offloaded
    /// units are on disk, tied tables excepted.
    ///
    /// # Errors
    /// If memory runs out, or the disk has no room.
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
        let tied = layout.tied_tables().map(|(output, table)| {
            let of_table = &records[table.0];
            let embedding = SparseEmbeddingGradient::new(arena, table, of_table, tokens, plan.micro_batches)?;
            Ok(Tied { output, embedding, unit: of_table.unit, summing: ReductionGroup::of(&of_table.share) })
        });
        let tied = tied.collect::<Result<_, TensorError>>()?;
        let mut completed = vec![Vec::new(); is_here.len()];
        for (index, flat) in store.flat_parameters().iter().enumerate() {
            completed[flat.completed_by].push(index);
        }
        Ok(Self {
            quantized: QuantizedGradients::new(
                arena,
                layout,
                &store,
                state.take(StoreKind::GradientResidual),
            )?,
            in_flight: Vec::with_capacity(store.flat_parameters().len()),
            arrived: Vec::with_capacity(store.flat_parameters().len()),
            staging: plan
                .hands_gradients_on()
                .then(|| GradientStagingBuffers::new(arena, &store))
                .transpose()?,
            store,
            offloaded: offloaded.map(RefCell::new),
            completed_by: records.iter().map(completing_unit).collect(),
            buffer_firsts: buffer_firsts(records, is_here.len()),
            borrowed: layout.shared_table.filter(|table| table.is_copy).map(|table| table.id),
            completed,
            next: vec![Cell::new(Write::Overwrite); records.len()],
            tied,
        })
    }

    /// Starts a step: the first contribution to each gradient overwrites what the last step left.
    pub fn begin(&mut self) {
        self.next.iter().for_each(|next| next.set(Write::Overwrite));
        self.tied.iter_mut().for_each(|tied| tied.embedding.clear());
        if let Some(staging) = &mut self.staging {
            staging.next.iter().for_each(|next| next.set(Write::Overwrite));
            staging.owned_begun.fill(false);
        }
    }

    /// Returns true if gradients are reduced after every micro-batch; otherwise they are reduced after the last one of
    /// a step.
    pub(crate) fn reduces_every_micro_batch(&self) -> bool {
        self.staging.is_some()
    }

    /// Agrees with all data-parallel ranks on the rows of tied tables that the embedding contributes to in this step.
    /// `ids` are the token ids of this rank's micro-batches.
    ///
    /// # Errors
    /// If another rank is lost or does not answer in time, or the disk of offloaded gradients fails.
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

    /// Prepares for the backward of a micro-batch with these token ids, given in one or several ranges.
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

    /// Returns the gradient and whether the next contribution overwrites it or adds to it; later contributions add.
    pub fn contribute(&self, id: ParameterId) -> (View<'_>, Write) {
        match self.sparse_embedding_gradient(id) {
            Some(embedding) => (embedding.gradient(0..embedding.rows()), Write::Accumulate),
            None => (self.whole(id), self.next[id.0].replace(Write::Accumulate)),
        }
    }

    /// Returns the row of a tied table's sparse gradient for each token of the micro-batch, u32 `[tokens]`; `None` if
    /// the row is the token id itself.
    pub fn rows(&self, table: ParameterId) -> Option<View<'_>> {
        self.sparse_embedding_gradient(table).map(SparseEmbeddingGradient::token_rows)
    }

    /// Completes the gradients of a unit after its last contribution: untouched ones become zero, and a tied gradient
    /// becomes the sum of both uses. Complete gradients stay as they are.
    ///
    /// # Errors
    /// If the disk of offloaded gradients fails.
    pub fn end_unit(&mut self, queue: &dyn Kernels, unit: usize) -> Result<(), EngineError> {
        if let Some(GradientStagingBuffers { next, .. }) = &self.staging {
            for &flat in &self.completed[unit] {
                if next[flat].replace(Write::Accumulate) == Write::Accumulate {
                    continue;
                }
                match (self.store.residence(flat), &mut self.offloaded) {
                    (Residence::Windowed, Some(offloaded)) => offloaded.get_mut().zero(queue, flat)?,
                    _ => queue.zero(self.store.own_of(flat)),
                }
            }
        } else {
            self.zero_untouched(queue, unit);
        }
        for Tied { output, embedding, .. } in self.tied.iter_mut().filter(|tied| tied.unit == unit) {
            if let Some(part) = self.store.part(*output) {
                embedding.add_to(queue, part);
            }
            embedding.clear();
        }
        Ok(())
    }

    /// Begins to reduce the gradients of a unit after this micro-batch's last contribution to it. With staging buffers,
    /// or quantized gradients, it first waits for the reductions of earlier units and takes in their sums.
    ///
    /// # Errors
    /// If another rank is lost or does not answer in time, or the disk of offloaded gradients fails.
    pub(crate) fn sum_unit(
        &mut self,
        queue: &dyn Kernels,
        unit: usize,
        reducer: &mut Reducer,
    ) -> Result<(), EngineError> {
        // The unit's buffer also holds earlier units, whose backward is still to come.
        if self.completed[unit].is_empty() && self.buffer_firsts[unit] != unit {
            return Ok(());
        }
        // One half of a split backward, or a frozen unit, may contribute nothing. Wait even then: the units before and
        // after use the same buffer.
        if self.staging.is_some() && !self.is_touched(unit) {
            return self.wait(queue, reducer);
        }
        self.zero_untouched(queue, unit);
        let (completed, in_flight) = (&self.completed[unit], &self.in_flight);
        if self.quantized.as_ref().is_some_and(|quantized| quantized.is_busy(completed, in_flight)) {
            self.wait(queue, reducer)?;
        }
        reducer.begin_round();
        for &flat in &self.completed[unit] {
            if let Some(quantized) = self.quantized.as_mut().filter(|quantized| quantized.has(flat)) {
                let elements = self.store.flat_parameters()[flat].elements;
                let gradients = match &self.staging {
                    None => self.store.range_of(flat, 0..elements),
                    Some(staging) => staging.range_of(&self.store, flat, 0..elements),
                };
                quantized.send(queue, flat, gradients, reducer)?;
                continue;
            }
            let &FlatParameter { summing, elements, .. } = &self.store.flat_parameters()[flat];
            let memory = match &mut self.staging {
                None => self.store.lend_from(flat, 0..elements),
                Some(staging) => {
                    let start = staging.offsets_bytes[flat];
                    let buffer = &mut staging.buffers[self.store.flat_parameters()[flat].parity()];
                    (buffer, start..start + elements * size_of::<f32>())
                }
            };
            reducer.reduce_scatter(memory, summing)?;
        }
        if self.staging.is_some() || self.quantized.is_some() {
            reducer.finish_earlier_rounds()?;
            self.accumulate_reduced(queue)?;
            self.in_flight.extend(&self.completed[unit]);
        }
        if self.staging.is_some() {
            self.parameters_of(unit).for_each(|id| self.next[id].set(Write::Overwrite));
        }
        Ok(())
    }

    /// Begins to all-reduce an embedding's rows of a tied table; [`Gradients::end_unit`] later adds them to the output
    /// layer's gradient.
    ///
    /// # Errors
    /// If another rank is lost or does not answer in time, or the disk of offloaded gradients fails.
    pub(crate) fn sum_rows(&mut self, unit: usize, reducer: &mut Reducer) -> Result<(), EngineError> {
        for Tied { embedding, summing, .. } in self.tied.iter_mut().filter(|tied| tied.unit == unit) {
            reducer.sum(embedding.gradient_mut(), *summing)?;
        }
        Ok(())
    }

    /// Waits for all reductions in flight and takes in their sums.
    ///
    /// # Errors
    /// If another rank is lost or does not answer in time, or the disk of offloaded gradients fails.
    pub(crate) fn wait(&mut self, queue: &dyn Kernels, reducer: &mut Reducer) -> Result<(), EngineError> {
        reducer.finish()?;
        self.accumulate_reduced(queue)
    }

    /// Begins to all-reduce this rank's own elements over the data-parallel replicas, for the flat parameters that were
    /// taken in last. Called in the last micro-batch of a step, after [`Gradients::sum_unit`].
    ///
    /// # Errors
    /// If another rank is lost or does not answer in time, or the disk of offloaded gradients fails.
    pub(crate) fn begin_owned(&mut self, reducer: &mut Reducer) -> Result<(), EngineError> {
        let Self { store, quantized, arrived, staging: Some(staging), .. } = self else {
            return Ok(());
        };
        for flat in arrived.drain(..) {
            // Quantized records of several flat parameters would need the one record buffer at the same time.
            let is_coded = quantized.as_ref().is_some_and(|quantized| quantized.has(flat));
            if is_coded || store.residence(flat) == Residence::Windowed {
                continue;
            }
            staging.owned_begun[flat] = true;
            let summing = store.flat_parameters()[flat].summing;
            reducer.sum_owned(store.lend_own(flat), summing)?;
        }
        Ok(())
    }

    /// All-reduces this rank's own elements over the data-parallel replicas after the last micro-batch, except where
    /// [`Gradients::begin_owned`] has begun that, and waits for all of them.
    ///
    /// # Errors
    /// If another rank is lost or does not answer in time, or the disk of offloaded gradients fails.
    pub(crate) fn sum_owned(
        &mut self,
        queue: &dyn Kernels,
        reducer: &mut Reducer,
    ) -> Result<(), EngineError> {
        for flat in 0..self.store.flat_parameters().len() {
            let has_begun = self.staging.as_ref().is_some_and(|staging| staging.owned_begun[flat]);
            if has_begun || self.store.residence(flat) == Residence::Windowed {
                continue;
            }
            if let Some(quantized) = self.quantized.as_mut().filter(|quantized| quantized.has(flat)) {
                quantized.sum_over_replicas(queue, flat, self.store.own_of(flat), reducer)?;
                continue;
            }
            let summing = self.store.flat_parameters()[flat].summing;
            reducer.sum_owned(self.store.lend_own(flat), summing)?;
        }
        reducer.finish()
    }

    /// Takes the finished sums into this rank's own gradients.
    fn accumulate_reduced(&mut self, queue: &dyn Kernels) -> Result<(), EngineError> {
        let Self { store, offloaded, staging, quantized, in_flight, arrived, .. } = self;
        arrived.clear();
        std::mem::swap(arrived, in_flight);
        for &flat in &*arrived {
            let own = store.flat_parameters()[flat].own.clone();
            let sum = match &*staging {
                None => store.own_of(flat),
                Some(staging) => staging.range_of(store, flat, own),
            };
            if let Some(quantized) = &*quantized {
                quantized.accumulate_reduced(queue, flat, sum);
            }
            let Some(staging) = &*staging else { continue };
            let write = staging.next[flat].replace(Write::Accumulate);
            match (store.residence(flat), &mut *offloaded, write) {
                (Residence::Windowed, Some(offloaded), _) => {
                    offloaded.get_mut().take(queue, flat, sum, write)?;
                }
                (_, _, Write::Overwrite) => queue.cast(sum, store.own_of(flat)),
                (_, _, Write::Accumulate) => queue.add(store.own_of(flat), sum, store.own_of(flat)),
            }
        }
        Ok(())
    }

    /// Zeroes the gradients of the unit that have no contribution.
    fn zero_untouched(&self, queue: &dyn Kernels, unit: usize) {
        for id in self.parameters_of(unit) {
            if self.next[id].replace(Write::Accumulate) == Write::Overwrite {
                queue.zero(self.whole(ParameterId(id)));
            }
        }
    }

    /// Returns true if any gradient of the unit has a contribution since its last reduction.
    fn is_touched(&self, unit: usize) -> bool {
        self.parameters_of(unit).any(|id| self.next[id].get() == Write::Accumulate)
    }

    /// Returns the indices of the parameters whose gradients on this rank are complete after a unit's backward.
    fn parameters_of(&self, unit: usize) -> impl Iterator<Item = usize> {
        (0..self.next.len()).filter(move |&index| {
            let id = ParameterId(index);
            self.completed_by[index] == unit
                && self.borrowed != Some(id)
                && self.sparse_embedding_gradient(id).is_none()
                && self.store.span_of(id).is_some()
        })
    }

    /// Returns the store of quantization errors of earlier gradients (error feedback), if they are kept.
    pub(crate) fn residual(&self) -> Option<&StateStore> {
        self.quantized.as_ref()?.residual.as_ref()
    }

    /// See [`Gradients::residual`].
    pub(crate) fn residual_mut(&mut self) -> Option<&mut StateStore> {
        self.quantized.as_mut()?.residual.as_mut()
    }

    /// Returns this rank's own elements of a gradient, valid after the step; `None` if there are none, or they are on
    /// disk.
    pub fn part(&self, id: ParameterId) -> Option<OwnedElements<'_>> {
        self.store.part(id)
    }

    /// Returns the range of this rank's own elements of a gradient, in memory or on disk.
    pub(crate) fn owned_range(&self, id: ParameterId) -> Range<usize> {
        self.store.owned_range(id)
    }

    /// Adds the squares of this rank's own elements of a gradient to `sum`; call it after the step's backward.
    pub(crate) fn add_squares(&self, queue: &dyn Kernels, id: ParameterId, sum: &mut ExactSum) {
        match (self.store.part(id), &self.offloaded) {
            (Some(part), _) => sum.merge(&queue.sum_of_squares(part.view).wait()),
            (None, Some(offloaded)) => offloaded.borrow().add_squares(id, sum),
            (None, None) => {}
        }
    }

    /// Returns a copy of this rank's own elements of a gradient; call it after the step's backward.
    ///
    /// # Errors
    /// If the disk of offloaded gradients fails.
    pub(crate) fn read(&self, id: ParameterId) -> Result<Vec<f32>, EngineError> {
        let range = self.store.owned_range(id);
        match (self.store.part(id), &self.offloaded) {
            (Some(part), _) => Ok(part.view.fetch()),
            (None, Some(offloaded)) => offloaded.borrow_mut().read(id, range),
            (None, None) => Ok(Vec::new()),
        }
    }

    /// Replaces this rank's own elements of a gradient; call it after the step's backward.
    ///
    /// # Errors
    /// If the disk of offloaded gradients fails.
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

    /// Returns the offloaded gradients, which an optimizer step reads window by window.
    pub(crate) fn offloaded(&self) -> Option<&RefCell<OffloadedGradients>> {
        self.offloaded.as_ref()
    }

    /// Returns the disk traffic of offloaded gradients since the last call.
    pub(crate) fn take_disk_traffic(&mut self) -> DiskTraffic {
        let offloaded = self.offloaded.as_mut().map(RefCell::get_mut);
        offloaded.map_or_else(DiskTraffic::default, |offloaded| offloaded.store.staging.take_traffic())
    }

    /// Returns the bytes of the file of offloaded gradients.
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.offloaded.as_ref().map_or(0, |offloaded| offloaded.borrow().store.staging.disk_bytes())
    }

    /// Returns the number of embedding elements that are still to be added to tied gradients.
    pub fn tied_elements(&self) -> usize {
        self.tied.iter().map(|tied| tied.embedding.elements()).sum()
    }

    /// Returns the full (unsharded) gradient, while a backward contributes to it.
    fn whole(&self, id: ParameterId) -> View<'_> {
        let Some(staging) = &self.staging else { return self.store.view(id) };
        let ParameterSpan { flat, first, shape, .. } =
            self.store.span_of(id).expect("what is trained has a gradient");
        let offset_bytes = staging.offsets_bytes[flat] + first * size_of::<f32>();
        let buffer = &staging.buffers[self.store.flat_parameters()[flat].parity()];
        buffer.view(DType::F32, offset_bytes, shape)
    }

    fn sparse_embedding_gradient(&self, id: ParameterId) -> Option<&SparseEmbeddingGradient> {
        self.tied.iter().map(|tied| &tied.embedding).find(|embedding| embedding.table() == id)
    }
}

/// Returns the unit after whose backward a parameter's gradient is complete. The gradient of a tied output layer is
/// complete after its own unit, which may be on another rank than the table.
fn completing_unit(record: &ParameterRecord) -> usize {
    if record.tie.is_some() { record.unit } else { record.buffer.first }
}

/// Returns the first unit of the buffer that holds each unit's parameters.
fn buffer_firsts(records: &[ParameterRecord], units: usize) -> Vec<usize> {
    let mut firsts: Vec<usize> = (0..units).collect();
    records.iter().for_each(|record| firsts[record.unit] = record.buffer.first);
    firsts
}

impl GradientStagingBuffers {
    /// Returns a view of some elements of a flat parameter of `store`.
    fn range_of(&self, store: &StateStore, flat: usize, elements: Range<usize>) -> View<'_> {
        let start = self.offsets_bytes[flat] + elements.start * size_of::<f32>();
        self.buffers[store.flat_parameters()[flat].parity()].view(DType::F32, start, [elements.len()])
    }

    fn new(arena: &Arena, store: &StateStore) -> Result<Self, TensorError> {
        let GradientStaging { offsets, elements: [even, odd] } = store.layout().passage();
        let bytes = |elements: usize| elements * size_of::<f32>();
        let offsets_bytes: Vec<usize> = offsets.into_iter().map(bytes).collect();
        let flat_parameters = offsets_bytes.len();
        let buffer = |bytes| arena.allocate_zeroed(bytes, MemoryCategory::Communication);
        Ok(Self {
            buffers: [buffer(bytes(even))?, buffer(bytes(odd))?],
            offsets_bytes,
            next: vec![Cell::new(Write::Overwrite); flat_parameters],
            owned_begun: vec![false; flat_parameters],
        })
    }
}
