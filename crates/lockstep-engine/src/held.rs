//! What an engine holds of each parameter: how it is filled, read for checkpoints, and replaced from them.

use std::cell::RefCell;

use lockstep_plan::{ParameterId, StoreKind};

use crate::state::{Contents, tensors_of, tensors_on_disk};
use crate::weights::ModelWeights;
use crate::{Engine, EngineError, FlatStore, StateKind, StateTensor};

impl Engine {
    /// Fills every parameter by its initializer.
    ///
    /// # Errors
    /// None that a fitting model can cause.
    pub fn initialize(&mut self, seed: u64) -> Result<(), EngineError> {
        let ids: Vec<_> = self.parameter_ids().collect();
        ids.into_iter().try_for_each(|id| self.initialize_parameter(id, seed))
    }

    /// Fills what this rank has of one parameter by its initializer.
    ///
    /// # Errors
    /// As for [`Engine::initialize`].
    pub fn initialize_parameter(&mut self, id: ParameterId, seed: u64) -> Result<(), EngineError> {
        // Part by part: a copy of the largest parameter may be the most memory that a run ever needs.
        const PART: usize = 1 << 20;
        let kept = self.weights.kept_range(&self.records[id.0], id);
        let mut values = vec![0.0; PART.min(kept.len())];
        let mut place = kept.start;
        let record = &self.records[id.0];
        for (first, len) in record.share.stretches_of_part(&record.shape, kept) {
            for start in (0..len).step_by(PART) {
                let part = &mut values[..PART.min(len - start)];
                let record = &self.records[id.0];
                self.queue.workers().fill(part, |offset, part| {
                    let first = (first + start + offset) as u64;
                    record.initializer.fill(seed, &record.name, first, part);
                });
                self.write_parameter(id, place, part)?;
                place += part.len();
            }
        }
        Ok(())
    }

    /// What this rank owns of everything that a checkpoint holds, as it is kept and without a copy: what is trained, and the
    /// optimizer's state. What is on disk comes last, parameter by parameter, and is read when it is asked for.
    pub fn state_tensors(&mut self) -> Vec<StateTensor<'_>> {
        let ModelWeights { stores, on_disk, .. } = &mut self.weights;
        let residual = self.gradients.residual_mut().map(|store| (StoreKind::GradientResidual, store));
        let saved = stores.iter_mut().chain(residual).filter(|(kind, _)| self.saved.contains(kind));
        let mut tensors = tensors_of(&self.records, &self.residual_numbers, saved);
        if let Some(store) = &*on_disk {
            tensors.extend(tensors_on_disk(&self.records, store));
        }
        tensors
    }

    /// The residual that this rank has of a parameter's gradients, and of those that all ranks have the last and the one after it,
    /// which there is not; none where no residual is kept.
    pub fn residual_kinds(&self, id: ParameterId) -> Option<[StateKind; 3]> {
        self.gradients.residual()?.part(id)?;
        let record = &self.records[id.0];
        let [last, next] = self.residual_numbers.last_and_next(record)?;
        Some([self.residual_numbers.own(record)?, last, next])
    }

    /// What this rank has of the trained weights that other ranks have copies of.
    pub fn copied_weights(&mut self) -> Vec<StateTensor<'_>> {
        let store = self.weights.copied();
        let dtype = store.dtype();
        let tensor = |(id, first, bytes): (ParameterId, _, _)| StateTensor {
            record: &self.records[id.0],
            kind: StateKind::Parameter,
            dtype,
            first,
            contents: Contents::Memory(bytes),
        };
        store.kept_parts().into_iter().map(tensor).collect()
    }

    /// The stores that a checkpoint or a copy of the state holds.
    pub(crate) fn saved_stores(&self) -> impl Iterator<Item = (StoreKind, &FlatStore)> {
        self.saved.iter().filter_map(|kind| Some((*kind, self.store(*kind)?)))
    }

    fn store(&self, kind: StoreKind) -> Option<&FlatStore> {
        match kind {
            StoreKind::GradientResidual => self.gradients.residual(),
            kind => self.weights.stores.get(kind),
        }
    }

    /// Rounds the master weights that this rank owns, if there are any, to what kernels read.
    pub(crate) fn round_weights(&self) {
        self.trained_ids().for_each(|id| self.weights.round(&*self.queue, id));
    }

    /// Replaces a tensor of a parameter by its part of `values`, which are those of all ranks together, rounded to what it is
    /// kept in.
    ///
    /// # Errors
    /// [`EngineError::WrongSize`], [`EngineError::Disk`].
    pub fn write_state(
        &mut self,
        id: ParameterId,
        kind: StateKind,
        values: &[f32],
    ) -> Result<(), EngineError> {
        let record = &self.records[id.0];
        if values.len() != record.elements() {
            return Err(EngineError::WrongSize {
                name: record.name.clone(),
                kind,
                found: values.len(),
                expected: record.elements(),
            });
        }
        if !self.is_here[record.unit] {
            return Ok(());
        }
        let is_of_optimizer = kind != StateKind::Parameter;
        if is_of_optimizer && (!record.trainable || self.state_store(kind).is_none()) {
            return Ok(());
        }
        let mut place = 0;
        let stretches = record.share.stretches(&record.shape);
        for (first, len) in stretches {
            let values = &values[first..first + len];
            match self.state_store(kind).filter(|_| kind != StateKind::Parameter) {
                Some(store) => {
                    store.write_part(id, place, values);
                    self.write_to_disk(id, kind, place, values)?;
                }
                None => self.write_parameter(id, place, values)?,
            }
            place += len;
        }
        Ok(())
    }

    /// Replaces the elements from `start` on of a parameter's weights, in every precision in which it is kept.
    ///
    /// # Errors
    /// [`EngineError::Disk`], if they are there.
    pub(crate) fn write_parameter(
        &mut self,
        id: ParameterId,
        start: usize,
        values: &[f32],
    ) -> Result<(), EngineError> {
        self.weights.write(&self.records[id.0], id, start, values);
        self.write_to_disk(id, StateKind::Parameter, start, values)
    }

    fn write_to_disk(
        &mut self,
        id: ParameterId,
        kind: StateKind,
        start: usize,
        values: &[f32],
    ) -> Result<(), EngineError> {
        let is_trained = self.records[id.0].trainable;
        let store = if is_trained { &mut self.weights.on_disk } else { &mut self.weights.frozen_on_disk };
        let Some(store) = store.as_mut().map(RefCell::get_mut) else { return Ok(()) };
        let of_weights = [StoreKind::Weights, StoreKind::FrozenWeights, StoreKind::MasterWeights];
        let of_optimizer = [StoreKind::Optimizer(kind)];
        let kinds = if kind == StateKind::Parameter { &of_weights[..] } else { &of_optimizer };
        for &kind in kinds {
            if store.keeps(kind) {
                store.write(id, kind, start, values)?;
            }
        }
        Ok(())
    }

    /// The store that has a kind of tensors in memory.
    pub(crate) fn state_store(&self, kind: StateKind) -> Option<&FlatStore> {
        match kind {
            StateKind::Parameter => Some(self.weights.stores.updated()),
            StateKind::GradientResidual(_) => self.store(StoreKind::GradientResidual),
            kind => self.store(StoreKind::Optimizer(kind)),
        }
    }
}
