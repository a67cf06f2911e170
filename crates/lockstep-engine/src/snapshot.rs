//! A copy of everything that a checkpoint holds, taken between two steps.
//!
//! It is plain memory that can be sent to another thread: the training goes on while it is written to disk. The
//! copy is one pass of the compute threads over the flat buffers; it was preferred to copying pages as they are
//! overwritten, which would need buffers that two threads share, to save a pass that takes a few thousandths of
//! the time between two saves.

use lockstep_plan::{MemoryCategory, ParameterRecord};

use crate::state::{ResidualNumbers, residuals_of, tensors_of};
use crate::{Engine, EngineError, FlatStore, StateKind, StateTensor};

/// Weights in full precision and optimizer state, as they were between two steps.
#[derive(Debug)]
pub struct Snapshot {
    records: Vec<ParameterRecord>,
    stores: Vec<(StateKind, FlatStore)>,
    /// What an engine has whole of state that it else owns a part of.
    biases: Option<FlatStore>,
    /// What gradients have lost on their way.
    residual: Option<FlatStore>,
    residual_numbers: ResidualNumbers,
}

impl Snapshot {
    /// Memory for the state of `engine`, booked in its ledger. It holds nothing yet: call [`Snapshot::take`].
    ///
    /// # Errors
    /// Out of memory; [`EngineError::OnDisk`].
    pub fn new(engine: &Engine) -> Result<Self, EngineError> {
        if engine.weights.on_disk.is_some() {
            return Err(EngineError::OnDisk);
        }
        let stores = engine
            .state_stores()
            .map(|(kind, store)| Ok((kind, store.like(engine.arena(), MemoryCategory::Snapshot)?)));
        let biases = engine.weights.biases.as_ref();
        Ok(Self {
            records: engine.records().to_vec(),
            stores: stores.collect::<Result<_, EngineError>>()?,
            biases: biases.map(|store| store.like(engine.arena(), MemoryCategory::Snapshot)).transpose()?,
            residual: engine
                .gradients
                .residual()
                .map(|store| store.like(engine.arena(), MemoryCategory::Snapshot))
                .transpose()?,
            residual_numbers: engine.residual_numbers.clone(),
        })
    }

    /// Has the system give all of the memory now, so that the first copy is as quick as any.
    pub fn touch(&mut self) {
        self.stores.iter_mut().map(|(_, store)| store).chain(&mut self.residual).for_each(FlatStore::touch);
    }

    /// Bytes that a snapshot of `engine` takes.
    pub fn bytes_for(engine: &Engine) -> usize {
        let others = engine.weights.biases.iter().chain(engine.gradients.residual());
        let stores = engine.state_stores().map(|(_, store)| store).chain(others);
        stores.map(FlatStore::len_bytes).sum()
    }

    /// Copies the state of the engine that it was made for, whose weights are settled ([`Engine::settle_weights`]).
    pub fn take(&mut self, engine: &Engine) {
        for ((_, copy), (_, store)) in self.stores.iter().zip(engine.state_stores()) {
            copy.copy_from(store, engine.queue());
        }
        if let (Some(copy), Some(store)) = (&self.biases, &engine.weights.biases) {
            copy.copy_from(store, engine.queue());
        }
        if let (Some(copy), Some(store)) = (&self.residual, engine.gradients.residual()) {
            copy.copy_from(store, engine.queue());
        }
    }

    /// Gives the engine that it was made for the state back, on all ranks that share it out.
    ///
    /// # Errors
    /// [`EngineError`]: none on one rank.
    pub fn restore(&self, engine: &mut Engine) -> Result<(), EngineError> {
        engine.weights.settle()?;
        for ((_, copy), (_, store)) in self.stores.iter().zip(engine.state_stores()) {
            store.copy_from(copy, engine.queue());
        }
        if let (Some(copy), Some(store)) = (&self.biases, &engine.weights.biases) {
            store.copy_from(copy, engine.queue());
        }
        if let (Some(copy), Some(store)) = (&self.residual, engine.gradients.residual()) {
            store.copy_from(copy, engine.queue());
        }
        engine.round_weights();
        engine.weights.refresh()?;
        engine.weights.settle()
    }

    /// The parameters of the model.
    pub fn records(&self) -> &[ParameterRecord] {
        &self.records
    }

    /// Everything that a checkpoint holds.
    pub fn tensors(&mut self) -> Vec<StateTensor<'_>> {
        let mut tensors =
            tensors_of(&self.records, self.stores.iter_mut().map(|(kind, store)| (*kind, store)));
        if let Some(residual) = &mut self.residual {
            tensors.extend(residuals_of(&self.records, residual, &self.residual_numbers));
        }
        tensors
    }
}
