//! The optimizer step on this rank's own elements of each parameter, and the balancing of router biases.
//!
//! Offloaded state is updated window by window, overlapped with reads of later windows and writes of earlier ones.

use std::cell::RefCell;
use std::ops::Range;

use lockstep_graph::{Activity, Cost};
use lockstep_plan::{ParameterId, StoreKind};
use lockstep_tensor::View;

use crate::optimizer::Operands;
use crate::state_store::Piece;
use crate::windowed_store::WindowedStore;
use crate::{Engine, EngineError, OwnedElements, StateKind, StateStore, Update};

const F32_BYTES: u64 = size_of::<f32>() as u64;
/// Floating-point operations per element of an optimizer step, counted as for AdamW.
const UPDATE_FLOPS: u64 = 13;

impl Engine {
    /// Runs the optimizer step on the weights that this rank owns, and begins the all-gather of updated weights
    /// ([`Engine::wait_for_weights`] waits for it).
    ///
    /// # Errors
    /// If another rank is lost or does not answer in time, or the disk of offloaded state fails.
    pub fn update(&mut self, update: &Update) -> Result<(), EngineError> {
        self.weights.wait_for_gathers()?;
        self.update_router_biases()?;
        self.update_running_statistics()?;
        for id in self.trained_ids().filter(|id| !self.is_buffer(*id)) {
            self.update_parameter(id, update);
        }
        self.update_on_disk(update)?;
        let begin = self.timeline().begin();
        self.weights.gather_updated()?;
        self.timeline().end(begin, || (Activity::of_step("gather weights"), Cost::default()));
        if let Some(pipeline) = &mut self.pipeline {
            pipeline.end_step();
        }
        Ok(())
    }

    /// Updates the elements of a parameter that are in memory.
    fn update_parameter(&self, id: ParameterId, update: &Update) {
        // An optimizer for whole matrices gets each in its own shape, because its shards follow parameter boundaries.
        let Some(parameter) = self.weights.updated().part_in_shape(id) else { return };
        let Some(gradient) = self.gradients.part(id) else { return };
        let gradient_view = gradient.view.reshape(parameter.shape());
        let state = |kind| self.state_store(kind).and_then(|store| store.part_in_shape(id));
        if !self.state_kinds(id).all(|kind| state(kind).is_some()) {
            return;
        }
        let rounded = self.weights.master().and_then(|_| self.weights.trained().part_in_shape(id));
        self.apply(update, id, gradient.first, (parameter, gradient_view, rounded), state);
    }

    /// Updates the offloaded state, window by window.
    fn update_on_disk(&self, update: &Update) -> Result<(), EngineError> {
        let Some(store) = self.weights.updated_on_disk() else { return Ok(()) };
        let store = &mut *store.borrow_mut();
        let mut gradients = self.gradients.offloaded().map(RefCell::borrow_mut);
        let end = store.windows().len();
        for window in 0..end {
            let begin = self.timeline().begin();
            let flat = store.windows()[window].flat;
            let number = window - store.windows_of(flat).start;
            store.read_ahead(window, end)?;
            let mut offloaded = gradients.as_deref_mut().filter(|gradients| gradients.has(flat));
            if let Some(offloaded) = &mut offloaded {
                offloaded.read_ahead(flat, number)?;
            }
            store.load(window)?;
            let len = store.windows()[window].elements.len();
            let gradients = offloaded.map(|offloaded| offloaded.load(flat, number, 0..len)).transpose()?;
            self.timeline().end(begin, || (Activity::of_step("wait for the disk"), Cost::default()));
            let start = store.windows()[window].elements.start;
            for piece in &store.windows()[window].pieces {
                let in_window = piece.first - start..piece.first - start + piece.elements.len();
                self.update_piece(store, window, (piece, in_window), gradients, update);
            }
            store.mark_dirty(window);
        }
        store.write_behind()
    }

    /// Updates the elements `in_window` of a parameter. `gradients` are those of the whole window, if gradients are
    /// offloaded too.
    fn update_piece(
        &self,
        store: &WindowedStore,
        window: usize,
        (piece, in_window): (&Piece, Range<usize>),
        gradients: Option<View<'_>>,
        update: &Update,
    ) {
        let id = piece.id;
        if self.is_buffer(id) {
            return;
        }
        let gradient = gradients
            .map(|window| window.rows(in_window.clone()))
            .or_else(|| elements_of(self.gradients.part(id), &piece.elements));
        let on_disk = |kind| store.keeps(kind).then(|| store.view(window, kind, in_window.clone()));
        let of_kernels = on_disk(StoreKind::Weights)
            .or_else(|| elements_of(self.weights.trained().part(id), &piece.elements));
        let master = on_disk(StoreKind::MasterWeights);
        let Some((parameter, gradient)) = master.or(of_kernels).zip(gradient) else { return };
        let rounded = of_kernels.filter(|_| master.is_some());
        let on_disk = |kind| on_disk(StoreKind::Optimizer(kind));
        self.apply(update, id, piece.elements.start, (parameter, gradient, rounded), on_disk);
    }

    /// Applies the optimizer to elements of a parameter, from index `first` on. The views are the weights, the
    /// gradient, and the rounded weights of kernels if these are separate.
    fn apply<'a>(
        &self,
        update: &Update,
        id: ParameterId,
        first: usize,
        (parameter, gradient, rounded): (View<'a>, View<'a>, Option<View<'a>>),
        state: impl Fn(StateKind) -> Option<View<'a>>,
    ) {
        let record = &self.layout.records[id.0];
        let of_parameter = Update {
            learning_rate: update.learning_rate * f64::from(record.learning_rate_multiplier),
            weight_decay: if record.decay { update.weight_decay } else { 0.0 },
            ..*update
        };
        let operands = Operands {
            role: self.role(id),
            parameter,
            gradient,
            rounded,
            rounding: self.rounding.of(self.seed, &record.name, update.step, first as u64),
            dtype: self.weights.trained().dtype(),
        };
        let begin = self.timeline().begin();
        self.optimizer.step(&*self.queue, &of_parameter, &operands, state);
        self.timeline().end(begin, || {
            let activity = Activity { unit: Some(record.unit), ..Activity::of_step("optimizer") };
            (activity, self.update_cost(id, gradient.elements() as u64))
        });
    }

    /// Returns true for a parameter that is not changed by a gradient: a bias that selects experts, a running statistic.
    fn is_buffer(&self, id: ParameterId) -> bool {
        self.model.buffers(self.layout.records[id.0].unit).any(|buffer| buffer == id)
    }

    /// Moves the router biases against the expert load of the step, by the same amount on all ranks.
    fn update_router_biases(&mut self) -> Result<(), EngineError> {
        let rate = self.model.bias_update_rate() as f32;
        let mut values = std::mem::take(&mut self.bias_values);
        for unit in 0..self.model.units() {
            if !self.layout.is_here[unit] {
                continue;
            }
            let bias = self.model.selection_bias(unit).filter(|id| self.layout.records[id.0].trainable);
            let Some((id, steps)) = bias.zip(self.runner.expert_load.steps_to_balance(unit, rate)) else {
                continue;
            };
            let buffers = self.weights.buffers();
            let whole = buffers.unwrap_or_else(|| self.weights.updated());
            let Some(part) = whole.kept_part(id) else { continue };
            part.copy_to_f32(&mut values);
            values.iter_mut().zip(steps).for_each(|(value, step)| *value += step);
            self.weights.write(id, StateKind::Parameter, 0, &values)?;
        }
        self.bias_values = values;
        Ok(())
    }

    /// Moves the running statistics of batch norms by those of the step, by the same amount on all ranks.
    fn update_running_statistics(&mut self) -> Result<(), EngineError> {
        let mut values = std::mem::take(&mut self.bias_values);
        for norm in self.runner.running.moved() {
            for (which, id) in norm.ids.into_iter().enumerate() {
                if !self.layout.is_here[self.layout.records[id.0].unit]
                    || !self.layout.records[id.0].trainable
                {
                    continue;
                }
                let buffers = self.weights.buffers();
                let whole = buffers.unwrap_or_else(|| self.weights.updated());
                let Some(part) = whole.kept_part(id) else { continue };
                part.copy_to_f32(&mut values);
                norm.move_running(which, &mut values);
                self.weights.write(id, StateKind::Parameter, 0, &values)?;
            }
        }
        self.bias_values = values;
        Ok(())
    }

    /// Returns the cost of a parameter's update. The gradient and the rounded weights pass through memory once; weights
    /// and state are read and written.
    fn update_cost(&self, id: ParameterId, elements: u64) -> Cost {
        let bytes_of = |store: &StateStore| store.dtype().size_bytes() as u64;
        let rounded = self.weights.master().map_or(0, |_| bytes_of(self.weights.trained()));
        let kept: u64 = self.state_kinds(id).filter_map(|kind| self.state_store(kind)).map(bytes_of).sum();
        Cost {
            product_flops: self.optimizer.product_flops(self.role(id)),
            vector_flops: UPDATE_FLOPS * elements,
            ..Cost::of_bytes((F32_BYTES + rounded + 2 * kept) * elements)
        }
    }
}

/// Returns some elements of a parameter as a view of its part, which must contain them.
fn elements_of<'a>(part: Option<OwnedElements<'a>>, elements: &Range<usize>) -> Option<View<'a>> {
    part.map(|part| part.view.rows(elements.start - part.first..elements.end - part.first))
}
