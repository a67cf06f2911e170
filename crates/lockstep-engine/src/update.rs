//! What changes the weights: the optimizer on what this rank owns, and the biases of routers.

use lockstep_comm::CommError;
use lockstep_graph::{Activity, Cost};
use lockstep_plan::ParameterId;

use crate::optimizer::Operands;
use crate::{Engine, FlatStore};

const F32_BYTES: u64 = size_of::<f32>() as u64;
/// Floating-point operations per element of an update, as in AdamW.
const UPDATE_FLOPS: u64 = 13;

/// The numbers of one update.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Update {
    /// Step size.
    pub learning_rate: f64,
    /// Weight decay of the parameters whose record says that they decay.
    pub weight_decay: f64,
    /// Factor on the gradients, from clipping.
    pub gradient_scale: f32,
    /// Number of this update, from 1.
    pub step: u64,
}

impl Engine {
    /// Updates the weights: each rank those that it owns, which are then on their way to the others ([`Engine::settle_weights`]).
    ///
    /// # Errors
    /// [`CommError`]: none on one rank.
    pub fn update(&mut self, update: &Update) -> Result<(), CommError> {
        self.weights.settle()?;
        self.balance();
        let is_bias = |id: &ParameterId| self.model.selection_bias(self.records[id.0].unit) == Some(*id);
        for id in self.trained_ids().filter(|id| !is_bias(id)) {
            self.update_parameter(id, update);
        }
        let begin = self.timeline().begin();
        self.weights.refresh()?;
        self.timeline().end(begin, || (Activity::of_step("gather weights"), Cost::default()));
        if let Some(pipeline) = &mut self.pipeline {
            pipeline.end_step();
        }
        Ok(())
    }

    fn update_parameter(&self, id: ParameterId, update: &Update) {
        let Some(gradient) = self.gradients.part(id) else { return };
        let record = &self.records[id.0];
        let of_parameter = Update {
            learning_rate: update.learning_rate * f64::from(record.learning_rate_multiplier),
            weight_decay: if record.decay { update.weight_decay } else { 0.0 },
            ..*update
        };
        // Rules for whole matrices are not given parts of them.
        let Some(parameter) = self.weights.updated().part_in_shape(id) else { return };
        let operands = Operands {
            role: self.role(id),
            parameter,
            gradient: gradient.view.reshape(parameter.shape()),
            rounded: self.weights.master.as_ref().and_then(|_| self.weights.trained.part_in_shape(id)),
            rounding: self.storage.rounding.of(self.seed, &record.name, update.step, gradient.first as u64),
            dtype: self.weights.trained.dtype(),
        };
        let state = |kind| self.state_store(kind).and_then(|store| store.part_in_shape(id));
        let begin = self.timeline().begin();
        self.optimizer.step(&self.queue, &of_parameter, &operands, state);
        self.timeline().end(begin, || {
            let activity = Activity { unit: Some(record.unit), ..Activity::of_step("optimizer") };
            (activity, self.update_cost(id, gradient.view.elements() as u64))
        });
    }

    /// Moves the biases by which experts are chosen against the load of the step, alike on all ranks.
    fn balance(&mut self) {
        let rate = self.model.bias_update_rate() as f32;
        let mut values = std::mem::take(&mut self.bias_values);
        for unit in (0..self.model.units()).filter(|unit| self.is_here[*unit]) {
            let bias = self.model.selection_bias(unit).filter(|id| self.records[id.0].trainable);
            let Some((id, steps)) = bias.zip(self.runner.expert_load().steps_to_balance(unit, rate)) else {
                continue;
            };
            let whole = self.weights.biases.as_ref().unwrap_or_else(|| self.weights.updated());
            let Some(part) = whole.kept_part(id) else { continue };
            part.copy_to_f32(&mut values);
            values.iter_mut().zip(steps).for_each(|(value, step)| *value += step);
            self.write_parameter(id, 0, &values);
        }
        self.bias_values = values;
    }

    /// The gradient and the rounded weights go through memory once, everything else is read and written.
    fn update_cost(&self, id: ParameterId, elements: u64) -> Cost {
        let bytes_of = |store: &FlatStore| store.dtype().size_bytes() as u64;
        let rounded = self.weights.master.as_ref().map_or(0, |_| bytes_of(&self.weights.trained));
        let kept: u64 = self.state_kinds(id).filter_map(|kind| self.state_store(kind)).map(bytes_of).sum();
        Cost {
            product_flops: self.optimizer.product_flops(self.role(id)),
            vector_flops: UPDATE_FLOPS * elements,
            ..Cost::of_bytes((F32_BYTES + rounded + 2 * kept) * elements)
        }
    }
}
