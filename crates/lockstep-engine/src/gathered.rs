//! Weights that are whole only while a unit works with them (ZeRO stage 3; Rajbhandari et al., 2020, and PyTorch's FSDP).
//!
//! Each rank keeps what it owns. Before a unit's forward or backward its weights are gathered from their owners into one of two
//! buffers, and while it works, those of the unit that follows into the other. Which that is, is known from the program: nothing is
//! traced. After its use a buffer is simply filled anew; nothing is kept from the forward for the backward but the last two units.

use std::time::{Duration, Instant};

use lockstep_comm::{Collective, CommError, Deadline, Lent, Pending};
use lockstep_graph::mutation::{Mutation, active};
use lockstep_model::RecordedModel;
use lockstep_plan::{MemoryCategory, ParameterId};
use lockstep_tensor::{Arena, Buffer, TensorError, View};

use crate::{EngineError, FlatStore, Traffic, Weights, shards::Shards};

/// Brings the weights of a unit to where kernels read them.
pub(crate) trait WeightSource {
    /// Waits until the weights of `unit` are there, and begins to get those of `next`, which will be asked for after it.
    ///
    /// # Errors
    /// [`EngineError`].
    fn make_ready(&mut self, unit: usize, next: Option<usize>) -> Result<(), EngineError>;

    /// The weights; those that are shared out, of the unit that was made ready last.
    fn weights(&self) -> Weights<'_>;
}

/// Weights that are all there.
impl WeightSource for Weights<'_> {
    fn make_ready(&mut self, _: usize, _: Option<usize>) -> Result<(), EngineError> {
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
        let slot = |bytes| {
            let buffer = arena.allocate(bytes, MemoryCategory::Communication)?;
            Ok(Slot { buffer, unit: None, pending: Vec::new() })
        };
        let [even, odd] = gathering.elements;
        let slots = [slot(even * size)?, slot(odd * size)?];
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
        unit: usize,
        next: Option<usize>,
        own: &mut FlatStore,
        shards: &Shards,
    ) -> Result<(), CommError> {
        let begin = Instant::now();
        self.start(unit, own, shards)?;
        self.wait(unit)?;
        self.traffic.exposed += begin.elapsed();
        // The stages of a rank may follow each other in any order.
        if let Some(next) = next.filter(|next| slot_of(*next) != slot_of(unit)) {
            self.start(next, own, shards)?;
        }
        self.traffic.busy += begin.elapsed();
        Ok(())
    }

    /// Begins to gather the weights of a unit, if they are neither there nor on their way.
    fn start(&mut self, unit: usize, own: &mut FlatStore, shards: &Shards) -> Result<(), CommError> {
        let slot = &mut self.slots[slot_of(unit)];
        if slot.unit == Some(unit) {
            return Ok(());
        }
        let deadline = Deadline::after(self.limit);
        slot.pending.drain(..).try_for_each(|pending| pending.wait(deadline).map(drop))?;
        slot.unit = Some(unit);
        let dtype = own.dtype();
        for &(stretch, start) in &self.needs[unit] {
            let (summing, elements) = (own.stretches()[stretch].summing, own.stretches()[stretch].elements);
            let Some(group) = shards.group(summing).filter(|_| !active(Mutation::WeightsNotGathered)) else {
                continue;
            };
            let bytes = elements * dtype.size_bytes();
            let ranks = group.size() as u64;
            self.traffic.bytes += (ranks - 1) * bytes as u64 / ranks;
            let range = own.stretches()[stretch].own.clone();
            let (buffer, of_own) = own.lend_from(stretch, range);
            let input = Lent::new(buffer.lend(of_own), dtype);
            let output = Lent::new(slot.buffer.lend(start..start + bytes), dtype);
            slot.pending.push(group.start(Collective::AllGather { input, output, counts: None }, deadline)?);
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
}
