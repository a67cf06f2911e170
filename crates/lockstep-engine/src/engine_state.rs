//! Access of the engine to its model state: initialization of parameters, and reading and replacing all tensors of the
//! state for checkpoints.

use std::sync::{Mutex, PoisonError};

use lockstep_plan::{ParameterId, ParameterRecord, StoreKind};
use lockstep_tensor::Workers;

use crate::model_state::ModelState;
use crate::state::{Contents, tensors_of, tensors_on_disk};
use crate::{Engine, EngineError, StateKind, StateStore, StateTensor};

impl Engine {
    /// Fills every parameter of this rank from its initializer and `seed`.
    ///
    /// # Errors
    /// If the disk of offloaded state fails.
    pub fn initialize(&mut self, seed: u64) -> Result<(), EngineError> {
        let ids: Vec<_> = self.parameter_ids().collect();
        ids.into_iter().try_for_each(|id| self.initialize_parameter(id, seed))
    }

    /// Fills the elements of one parameter that this rank keeps from its initializer and `seed`.
    ///
    /// # Errors
    /// As for [`Engine::initialize`].
    pub fn initialize_parameter(&mut self, id: ParameterId, seed: u64) -> Result<(), EngineError> {
        // In parts: a copy of the largest parameter could raise the peak memory of the whole run.
        const PART: usize = 1 << 20;
        let kept = self.weights.kept_range(&self.layout.records[id.0], id);
        let mut values = vec![0.0; PART.min(kept.len())];
        let mut place = kept.start;
        let record = &self.layout.records[id.0];
        for (first, len) in record.share.element_ranges_of_part(&record.shape, kept) {
            for start in (0..len).step_by(PART) {
                let part = &mut values[..PART.min(len - start)];
                let record = &self.layout.records[id.0];
                self.queue.workers().fill(part, |offset, part| {
                    let first = (first + start + offset) as u64;
                    record.initializer.fill(seed, &record.name, first, part);
                });
                write_values(&mut self.weights, &self.queue.workers(), record, id, (place, part))?;
                place += part.len();
            }
        }
        Ok(())
    }

    /// Returns the checkpointed tensors that this rank owns, in their stored type and without a copy: trained
    /// parameters and optimizer state. Tensors on disk come last, parameter by parameter, and are read on demand.
    pub fn state_tensors(&mut self) -> Vec<StateTensor<'_>> {
        let (stores, on_disk) = self.weights.all_mut();
        let stores = stores.chain(self.gradients.residual_mut());
        let saved = stores.filter(|store| self.layout.saved().any(|item| item.kind == store.kind()));
        let mut tensors = tensors_of(&self.layout.records, &self.residual_numbers, saved);
        if let Some(store) = on_disk {
            tensors.extend(tensors_on_disk(&self.layout.records, store));
        }
        tensors
    }

    /// Returns the kind of this rank's residual of a parameter's quantized gradients, the last such kind over all
    /// ranks, and the kind after that, which does not exist. `None` if no residual is kept.
    pub fn residual_kinds(&self, id: ParameterId) -> Option<[StateKind; 3]> {
        self.gradients.residual()?.part(id)?;
        self.residual_numbers.kinds(&self.layout.records[id.0])
    }

    /// Returns the trained weights in this rank's memory that are replicated on other ranks.
    pub fn replicated_weights(&mut self) -> Vec<StateTensor<'_>> {
        let Some(store) = self.weights.copied() else { return Vec::new() };
        let dtype = store.dtype();
        let tensor = |(id, first, bytes): (ParameterId, _, _)| StateTensor {
            record: &self.layout.records[id.0],
            kind: StateKind::Parameter,
            dtype,
            first,
            contents: Contents::Memory(bytes),
        };
        store.kept_parts().into_iter().map(tensor).collect()
    }

    /// Returns the stores that a checkpoint or a snapshot holds.
    pub(crate) fn saved_stores(&self) -> impl Iterator<Item = &StateStore> {
        self.layout.saved().filter_map(|item| self.store(item.kind))
    }

    fn store(&self, kind: StoreKind) -> Option<&StateStore> {
        match kind {
            StoreKind::GradientResidual => self.gradients.residual(),
            kind => self.weights.get(kind),
        }
    }

    /// Rounds this rank's f32 master weights, if any, to the type that kernels read.
    pub(crate) fn round_weights(&self) {
        self.trained_ids().for_each(|id| self.weights.round(&*self.queue, id));
    }

    /// Replaces this rank's part of a tensor of a parameter. `values` is the whole tensor; elements are rounded to the
    /// type of the store.
    ///
    /// # Errors
    /// If `values` does not have the parameter's number of elements, or the disk fails.
    pub fn write_state(
        &mut self,
        id: ParameterId,
        kind: StateKind,
        values: &[f32],
    ) -> Result<(), EngineError> {
        let record = &self.layout.records[id.0];
        if values.len() != record.elements() {
            return Err(EngineError::WrongSize {
                name: record.name.clone(),
                kind,
                found: values.len(),
                expected: record.elements(),
            });
        }
        if !self.layout.is_here[record.unit] {
            return Ok(());
        }
        let mut place = 0;
        for (first, len) in record.share.element_ranges(&record.shape) {
            let values = &values[first..first + len];
            match kind {
                StateKind::GradientResidual(_) => {
                    if let Some(store) = self.gradients.residual() {
                        store.write_part(id, place, values);
                    }
                }
                StateKind::Parameter => {
                    write_values(&mut self.weights, &self.queue.workers(), record, id, (place, values))?;
                }
                kind => self.weights.write(id, kind, place, values)?,
            }
            place += len;
        }
        Ok(())
    }

    /// Replaces the blocks of a quantized matrix, which are of the format of its record. A rank that does not hold the matrix skips it.
    ///
    /// # Errors
    /// If the matrix is not quantized, or has another number of bytes.
    pub fn write_blocks(&mut self, id: ParameterId, blocks: &[u8]) -> Result<(), EngineError> {
        let record = &self.layout.records[id.0];
        let expected = record.block_format.and_then(|format| format.bytes(record.elements())).unwrap_or(0);
        if blocks.len() != expected {
            let (name, kind, found) = (record.name.clone(), StateKind::Parameter, blocks.len());
            return Err(EngineError::WrongSize { name, kind, found, expected });
        }
        self.weights.write_blocks(id, 0, blocks);
        Ok(())
    }

    /// Returns the store that holds a kind of tensors.
    pub(crate) fn state_store(&self, kind: StateKind) -> Option<&StateStore> {
        match kind {
            StateKind::Parameter => Some(self.weights.updated()),
            StateKind::GradientResidual(_) => self.store(StoreKind::GradientResidual),
            kind => self.store(StoreKind::Optimizer(kind)),
        }
    }
}

/// Replaces the values of a parameter from element `start` on, those of a quantized matrix encoded as blocks.
///
/// # Panics
/// If `start` or the number of values of a quantized matrix is no multiple of the block.
fn write_values(
    weights: &mut ModelState,
    workers: &Workers,
    record: &ParameterRecord,
    id: ParameterId,
    (start, values): (usize, &[f32]),
) -> Result<(), EngineError> {
    /// Elements that a thread encodes at a time: whole blocks of every format.
    const PART: usize = 1 << 14;
    let Some(format) = record.block_format else {
        return weights.write(id, StateKind::Parameter, start, values);
    };
    let bytes = |elements: usize| format.bytes(elements).expect("rows of a quantized shard are whole blocks");
    let mut blocks = vec![0; bytes(values.len())];
    let parts: Vec<_> = values.chunks(PART).zip(blocks.chunks_mut(bytes(PART)).map(Mutex::new)).collect();
    workers.run(parts.len(), |part| {
        let (values, blocks) = &parts[part];
        format.quantize(values, &mut blocks.lock().unwrap_or_else(PoisonError::into_inner));
    });
    drop(parts);
    weights.write_blocks(id, bytes(start), &blocks);
    Ok(())
}
