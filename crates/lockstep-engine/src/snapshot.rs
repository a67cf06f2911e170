//! A copy of everything that a checkpoint holds, taken between two steps.
//!
//! It is plain memory that can be sent to another thread: the training goes on while it is written to disk. The
//! copy is one pass of the compute threads over the flat buffers; it was preferred to copying pages as they are
//! overwritten, which would need buffers that two threads share, to save a pass that takes a few thousandths of
//! the time between two saves.

use lockstep_plan::{MemoryCategory, ParameterRecord};

use crate::state::{ResidualNumbers, tensors_of};
use crate::{Engine, EngineError, StateStore, StateTensor};

/// Weights in full precision and optimizer state, as they were between two steps.
#[derive(Debug)]
pub struct Snapshot {
    records: Vec<ParameterRecord>,
    stores: Vec<StateStore>,
    residual_numbers: ResidualNumbers,
}

impl Snapshot {
    /// Memory for the state of `engine`, booked in its ledger. It holds nothing yet: call [`Snapshot::take`].
    ///
    /// # Errors
    /// Out of memory; [`EngineError::OnDisk`].
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

    /// Has the system give all of the memory now, so that the first copy is as quick as any.
    pub fn touch(&mut self) {
        self.stores.iter_mut().for_each(StateStore::touch);
    }

    /// Bytes that a snapshot of `engine` takes.
    pub fn bytes_for(engine: &Engine) -> usize {
        engine.saved_stores().map(StateStore::len_bytes).sum()
    }

    /// Copies the state of the engine that it was made for, whose weights are settled ([`Engine::settle_weights`]).
    pub fn take(&mut self, engine: &Engine) {
        for (copy, store) in self.stores.iter().zip(engine.saved_stores()) {
            copy.copy_from(store, engine.queue());
        }
    }

    /// Restores the state of the engine that it was made for, on all ranks of the run.
    ///
    /// # Errors
    /// [`EngineError`]: none on one rank.
    pub fn restore(&self, engine: &mut Engine) -> Result<(), EngineError> {
        engine.weights.settle()?;
        for (copy, store) in self.stores.iter().zip(engine.saved_stores()) {
            store.copy_from(copy, engine.queue());
        }
        engine.round_weights();
        engine.weights.gather_updated()?;
        engine.weights.settle()
    }

    /// The parameters of the model.
    pub fn records(&self) -> &[ParameterRecord] {
        &self.records
    }

    /// Everything that a checkpoint holds.
    pub fn tensors(&mut self) -> Vec<StateTensor<'_>> {
        tensors_of(&self.records, &self.residual_numbers, self.stores.iter_mut())
    }
}
