//! The engine's access to its model state: parameters are initialized, and all tensors of the state are read for checkpoints and replaced
//! from them.

use lockstep_plan::{ParameterId, StoreKind};

use crate::state::{Contents, tensors_of, tensors_on_disk};
use crate::{Engine, EngineError, StateKind, StateStore, StateTensor};

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
                self.weights.write(id, StateKind::Parameter, place, part)?;
                place += part.len();
            }
        }
        Ok(())
    }

    /// What this rank owns of everything that a checkpoint holds, as it is kept and without a copy: what is trained, and the
    /// optimizer's state. What is on disk comes last, parameter by parameter, and is read when it is asked for.
    pub fn state_tensors(&mut self) -> Vec<StateTensor<'_>> {
        let (stores, on_disk) = self.weights.all_mut();
        let stores = stores.chain(self.gradients.residual_mut());
        let saved = stores.filter(|store| self.saved.contains(&store.kind()));
        let mut tensors = tensors_of(&self.records, &self.residual_numbers, saved);
        if let Some(store) = on_disk {
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

    /// The trained weights in this rank's memory of which other ranks have copies.
    pub fn copied_weights(&mut self) -> Vec<StateTensor<'_>> {
        let Some(store) = self.weights.copied() else { return Vec::new() };
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
    pub(crate) fn saved_stores(&self) -> impl Iterator<Item = &StateStore> {
        self.saved.iter().filter_map(|kind| self.store(*kind))
    }

    fn store(&self, kind: StoreKind) -> Option<&StateStore> {
        match kind {
            StoreKind::GradientResidual => self.gradients.residual(),
            kind => self.weights.get(kind),
        }
    }

    /// Rounds the own f32 weights, if there are any, to the type that kernels read.
    pub(crate) fn round_weights(&self) {
        self.trained_ids().for_each(|id| self.weights.round(&*self.queue, id));
    }

    /// Replaces a tensor of a parameter by its part of `values`, the tensor of all ranks together, rounded to the type of its store.
    ///
    /// # Errors
    /// If `values` has another size than the parameter, or the disk fails.
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
        let mut place = 0;
        let stretches = record.share.stretches(&record.shape);
        for (first, len) in stretches {
            let values = &values[first..first + len];
            match kind {
                StateKind::GradientResidual(_) => {
                    if let Some(store) = self.gradients.residual() {
                        store.write_part(id, place, values);
                    }
                }
                kind => self.weights.write(id, kind, place, values)?,
            }
            place += len;
        }
        Ok(())
    }

    /// The store of a kind of tensors.
    pub(crate) fn state_store(&self, kind: StateKind) -> Option<&StateStore> {
        match kind {
            StateKind::Parameter => Some(self.weights.updated()),
            StateKind::GradientResidual(_) => self.store(StoreKind::GradientResidual),
            kind => self.store(StoreKind::Optimizer(kind)),
        }
    }
}
