//! Weights that are whole only while a unit works with them (ZeRO stage 3; Rajbhandari et al., 2020, and PyTorch's FSDP).
//!
//! Each rank keeps what it owns. Before a unit's forward or backward its weights are gathered from their owners into one of two
//! buffers, and while it works, those of the unit that follows into the other. Which that is, is known from the program: nothing is
//! traced. After its use a buffer is simply filled anew; nothing is kept from the forward for the backward but the last two units.
//!
//! Weights may travel as small integers (qwZ of ZeRO++: Wang et al., 2023): each rank writes its range as codes and scales, these are
//! gathered, and every rank reads all ranges from them, its own as well, so that all work with the same bits.

use std::time::{Duration, Instant};

use lockstep_comm::{Collective, CommError, Deadline, Lent, Pending};
use lockstep_graph::mutation::{Mutation, active};
use lockstep_model::RecordedModel;
use lockstep_plan::{DType, MemoryCategory, ParameterId, QuantizedType};
use lockstep_tensor::{Arena, Buffer, Kernels, TensorError, View};

use crate::{EngineError, FlatStore, Traffic, Weights, shards::Shards};

/// Brings the weights of a unit to where kernels read them.
pub(crate) trait WeightSource {
    /// Waits until the weights of `unit` are there, and begins to get those of `next`, which will be asked for after it.
    ///
    /// # Errors
    /// [`EngineError`].
    fn make_ready(
        &mut self,
        queue: &dyn Kernels,
        unit: usize,
        next: Option<usize>,
    ) -> Result<(), EngineError>;

    /// The weights; those that are shared out, of the unit that was made ready last.
    fn weights(&self) -> Weights<'_>;
}

/// Weights that are all there.
impl WeightSource for Weights<'_> {
    fn make_ready(&mut self, _: &dyn Kernels, _: usize, _: Option<usize>) -> Result<(), EngineError> {
        Ok(())
    }

    fn weights(&self) -> Weights<'_> {
        *self
    }
}

/// The weights of two units.
#[derive(Debug)]
pub(crate) struct Gathered {
    slots: [Slot; 2],
    /// The stretches that each unit reads, and where they begin in its slot. By unit.
    needs: Vec<Vec<(usize, usize)>>,
    /// The unit that was made ready last.
    current: usize,
    limit: Duration,
    traffic: Traffic,
}

#[derive(Debug)]
struct Slot {
    buffer: Buffer,
    /// Whose weights are in it, or on their way there.
    unit: Option<usize>,
    /// What goes between ranks, where it is not the weights themselves.
    records: Option<(QuantizedType, Buffer)>,
    /// Whether the weights are there as records only.
    is_coded: bool,
    pending: Vec<Pending>,
}

/// Units that follow each other have different ones.
fn slot_of(unit: usize) -> usize {
    unit % 2
}

impl Gathered {
    /// Buffers for the units of `model`, whose weights are kept in `own`.
    ///
    /// # Errors
    /// [`TensorError::OutOfMemory`].
    pub(crate) fn new(
        arena: &Arena,
        model: &RecordedModel,
        own: &FlatStore,
        shards: &Shards,
    ) -> Result<Self, TensorError> {
        let parameters = (0..model.units()).map(|unit| model.unit_parameters(unit));
        let gathering = own.layout().gathering(parameters, |summing| shards.group(summing).is_some());
        let size = own.dtype().size_bytes();
        let in_bytes = |(stretch, start): (usize, usize)| (stretch, start * size);
        let needs =
            gathering.needs.into_iter().map(|needs| needs.into_iter().map(in_bytes).collect()).collect();
        let quantized = shards.quantization().weights;
        let slot = |elements: usize| {
            let buffer = arena.allocate(elements * size, MemoryCategory::Communication)?;
            let of_records = |kind: QuantizedType| {
                Ok((kind, arena.allocate(kind.bytes(elements), MemoryCategory::Communication)?))
            };
            let records = quantized.map(of_records).transpose()?;
            Ok(Slot { buffer, unit: None, records, is_coded: false, pending: Vec::new() })
        };
        let [even, odd] = gathering.elements;
        let slots = [slot(even)?, slot(odd)?];
        let limit = shards.limit();
        Ok(Self { slots, needs, current: 0, limit, traffic: Traffic::default() })
    }

    /// The weights have changed: what was gathered no longer counts.
    pub(crate) fn forget(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.unit = None);
    }

    /// What gathering has cost since this was last asked.
    pub(crate) fn take_traffic(&mut self) -> Traffic {
        std::mem::take(&mut self.traffic)
    }

    /// The weights of a parameter of the unit that was made ready last; none if they are not gathered.
    pub(crate) fn get<'a>(&'a self, own: &'a FlatStore, id: ParameterId) -> Option<View<'a>> {
        let (stretch, first, shape) = own.place_of(id)?;
        let needed = self.needs[self.current].iter().find(|(other, _)| *other == stretch);
        let Some((_, start)) = needed else { return own.get(id) };
        let offset_bytes = start + first * own.dtype().size_bytes();
        Some(self.slots[slot_of(self.current)].buffer.view(own.dtype(), offset_bytes, shape))
    }

    /// Waits until the weights of `unit` are in their buffer, and begins to gather those of `next` into the other.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn make_ready(
        &mut self,
        queue: &dyn Kernels,
        (unit, next): (usize, Option<usize>),
        own: &mut FlatStore,
        shards: &Shards,
    ) -> Result<(), CommError> {
        let begin = Instant::now();
        self.start(queue, unit, own, shards)?;
        self.wait(unit)?;
        self.traffic.exposed += begin.elapsed();
        // The stages of a rank may follow each other in any order.
        if let Some(next) = next.filter(|next| slot_of(*next) != slot_of(unit)) {
            self.start(queue, next, own, shards)?;
        }
        self.traffic.busy += begin.elapsed();
        self.decode(queue, unit, own);
        Ok(())
    }

    /// Begins to gather the weights of a unit, if they are neither there nor on their way.
    fn start(
        &mut self,
        queue: &dyn Kernels,
        unit: usize,
        own: &mut FlatStore,
        shards: &Shards,
    ) -> Result<(), CommError> {
        let slot = &mut self.slots[slot_of(unit)];
        if slot.unit == Some(unit) {
            return Ok(());
        }
        let deadline = Deadline::after(self.limit);
        slot.pending.drain(..).try_for_each(|pending| pending.wait(deadline).map(drop))?;
        slot.unit = Some(unit);
        slot.is_coded = slot.records.is_some();
        let dtype = own.dtype();
        for &(stretch, start) in &self.needs[unit] {
            let (summing, elements) = (own.stretches()[stretch].summing, own.stretches()[stretch].elements);
            let Some(group) = shards.group(summing).filter(|_| !active(Mutation::WeightsNotGathered)) else {
                continue;
            };
            let bytes = elements * dtype.size_bytes();
            let ranks = group.size() as u64;
            let range = own.stretches()[stretch].own.clone();
            let (collective, bytes) = if let Some((kind, buffer)) = &mut slot.records {
                let first = start / dtype.size_bytes();
                let kind = *kind;
                let records = |from: usize, to: usize| kind.bytes(first + from)..kind.bytes(first + to);
                let own_records = records(range.start, range.end);
                let target = buffer.view(DType::U8, own_records.start, [own_records.len()]);
                queue.quantize(kind, own.own_of(stretch), None, target);
                let all = records(0, elements);
                let bytes = all.len();
                let data = Lent::new(buffer.lend(all), DType::U8);
                (Collective::AllGatherInPlace { data, counts: None }, bytes)
            } else {
                let (buffer, of_own) = own.lend_from(stretch, range);
                let input = Lent::new(buffer.lend(of_own), dtype);
                let output = Lent::new(slot.buffer.lend(start..start + bytes), dtype);
                (Collective::AllGather { input, output, counts: None }, bytes)
            };
            self.traffic.bytes += (ranks - 1) * bytes as u64 / ranks;
            slot.pending.push(group.start(collective, deadline)?);
            group.progress()?;
        }
        Ok(())
    }

    fn wait(&mut self, unit: usize) -> Result<(), CommError> {
        let deadline = Deadline::after(self.limit);
        let slot = &mut self.slots[slot_of(unit)];
        slot.pending.drain(..).try_for_each(|pending| pending.wait(deadline).map(drop))?;
        self.current = unit;
        Ok(())
    }
    /// Reads the weights of a unit from the records that have come, if they have not been read yet.
    fn decode(&mut self, queue: &dyn Kernels, unit: usize, own: &FlatStore) {
        let Self { slots, needs, .. } = self;
        let slot = &mut slots[slot_of(unit)];
        let Some((kind, buffer)) = &slot.records else { return };
        if !std::mem::replace(&mut slot.is_coded, false) {
            return;
        }
        let dtype = own.dtype();
        for &(stretch, start) in &needs[unit] {
            let elements = own.stretches()[stretch].elements;
            let first = start / dtype.size_bytes();
            let records =
                buffer.view(DType::U8, kind.bytes(first), [kind.bytes(first + elements) - kind.bytes(first)]);
            let weights = slot.buffer.view(dtype, start, [elements]);
            queue.dequantize(*kind, records, weights);
            if active(Mutation::OwnWeightsNotQuantized) {
                queue.cast(own.own_of(stretch), weights.rows(own.stretches()[stretch].own.clone()));
            }
        }
    }
}
