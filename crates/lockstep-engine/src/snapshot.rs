//! A snapshot: an in-memory copy of everything that a checkpoint holds, taken between two steps.
//!
//! A snapshot can be sent to another thread, which writes it to disk while training goes on. Taking it is one pass of
//! the compute threads over the flat buffers, a few thousandths of the time between two saves. Copy-on-write of pages
//! would save that pass, but needs buffers that two threads share.

use lockstep_plan::{MemoryCategory, ParameterRecord};

use crate::state::{ResidualNumbers, tensors_of};
use crate::{Engine, EngineError, StateStore, StateTensor};

/// Copy of the weights in full precision and the optimizer state between two steps.
#[derive(Debug)]
pub struct Snapshot {
    records: Vec<ParameterRecord>,
    stores: Vec<StateStore>,
    residual_numbers: ResidualNumbers,
}

impl Snapshot {
    /// Allocates memory for the state of `engine`, booked in its ledger. The contents are undefined until
    /// [`Snapshot::take`].
    ///
    /// # Errors
    /// If memory runs out, or state is offloaded to disk.
    pub fn new(engine: &Engine) -> Result<Self, EngineError> {
        if engine.weights.updated_on_disk().is_some() {
            return Err(EngineError::OnDisk);
        }
        let copy = |store: &StateStore| Ok(store.like(engine.arena(), MemoryCategory::Snapshot)?);
        Ok(Self {
            records: engine.records().to_vec(),
            stores: engine.saved_stores().map(copy).collect::<Result<_, EngineError>>()?,
            residual_numbers: engine.residual_numbers.clone(),
        })
    }

    /// Touches all of the memory now, so that the first copy is as fast as later ones.
    pub fn touch(&mut self) {
        self.stores.iter_mut().for_each(StateStore::touch);
    }

    /// Returns the bytes of a snapshot of `engine`.
    pub fn bytes_for(engine: &Engine) -> usize {
        engine.saved_stores().map(StateStore::len_bytes).sum()
    }

    /// Copies the state of the engine that the snapshot was made for. Call [`Engine::wait_for_weights`] first.
    pub fn take(&mut self, engine: &Engine) {
        for (copy, store) in self.stores.iter().zip(engine.saved_stores()) {
            copy.copy_from(store, engine.queue());
        }
    }

    /// Restores the state of the engine that the snapshot was made for; a collective call of all ranks.
    ///
    /// # Errors
    /// If another rank is lost or does not answer in time.
    pub fn restore(&self, engine: &mut Engine) -> Result<(), EngineError> {
        engine.weights.wait_for_gathers()?;
        for (copy, store) in self.stores.iter().zip(engine.saved_stores()) {
            store.copy_from(copy, engine.queue());
        }
        engine.round_weights();
        engine.weights.gather_updated()?;
        engine.weights.wait_for_gathers()
    }

    /// Returns the records of all parameters.
    pub fn records(&self) -> &[ParameterRecord] {
        &self.records
    }

    /// Returns the tensors that a checkpoint holds.
    pub fn tensors(&mut self) -> Vec<StateTensor<'_>> {
        tensors_of(&self.records, &self.residual_numbers, self.stores.iter_mut())
    }
}
