//! Weights that other ranks have updated and that every rank keeps (ZeRO stages 1 and 2), on their way after an update.
//!
//! All of them leave at once. A unit waits for those that it reads before it reads them, in the forward that follows, so that the first
//! units compute while the last ones' weights come.

use std::time::Instant;

use lockstep_comm::{Collective, CommError, Deadline, Lent, Pending};
use lockstep_model::RecordedModel;

use crate::{FlatStore, Traffic, shards::Shards};

/// The stretches of a store that are on their way.
#[derive(Debug)]
pub(crate) struct Arriving {
    /// The stretches that each unit reads.
    needs: Vec<Vec<usize>>,
    /// By stretch.
    pending: Vec<Option<Pending>>,
    traffic: Traffic,
}

impl Arriving {
    /// For the units of `model`, which read what `weights` keeps.
    pub(crate) fn new(model: &RecordedModel, weights: &FlatStore) -> Self {
        let stretches_of = |unit: usize| {
            let ids = model.unit_parameters(unit).iter();
            ids.filter_map(|id| Some(weights.place_of(*id)?.0)).collect()
        };
        Self {
            needs: (0..model.units()).map(stretches_of).collect(),
            pending: weights.stretches().iter().map(|_| None).collect(),
            traffic: Traffic::default(),
        }
    }

    /// Begins to fill each stretch of `weights`, of which every rank has brought its own range up to date, with the ranges of the others.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn begin(&mut self, weights: &mut FlatStore, shards: &Shards) -> Result<(), CommError> {
        let begin = Instant::now();
        let deadline = Deadline::after(shards.limit());
        let dtype = weights.dtype();
        for (stretch, pending) in self.pending.iter_mut().enumerate() {
            let (summing, elements) =
                (weights.stretches()[stretch].summing, weights.stretches()[stretch].elements);
            let Some(group) = shards.gathering(summing) else { continue };
            let (buffer, bytes) = weights.lend_from(stretch, 0..elements);
            let ranks = group.size() as u64;
            self.traffic.bytes += (ranks - 1) * bytes.len() as u64 / ranks;
            let data = Lent::new(buffer.lend(bytes), dtype);
            *pending = Some(group.start(Collective::AllGatherInPlace { data, counts: None }, deadline)?);
            group.progress()?;
        }
        self.traffic.busy += begin.elapsed();
        self.traffic.exposed += begin.elapsed();
        Ok(())
    }

    /// Waits until what `unit` reads has come.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn wait_for(&mut self, unit: usize, shards: &Shards) -> Result<(), CommError> {
        for index in 0..self.needs[unit].len() {
            self.wait(self.needs[unit][index], shards)?;
        }
        Ok(())
    }

    /// Waits until everything has come.
    ///
    /// # Errors
    /// [`CommError`].
    pub(crate) fn wait_for_all(&mut self, shards: &Shards) -> Result<(), CommError> {
        (0..self.pending.len()).try_for_each(|stretch| self.wait(stretch, shards))
    }

    fn wait(&mut self, stretch: usize, shards: &Shards) -> Result<(), CommError> {
        let Some(pending) = self.pending[stretch].take() else { return Ok(()) };
        let begin = Instant::now();
        pending.wait(Deadline::after(shards.limit()))?;
        self.traffic.busy += begin.elapsed();
        self.traffic.exposed += begin.elapsed();
        Ok(())
    }

    /// What gathering has cost since this was last asked.
    pub(crate) fn take_traffic(&mut self) -> Traffic {
        std::mem::take(&mut self.traffic)
    }
}
