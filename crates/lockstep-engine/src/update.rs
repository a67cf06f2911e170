//! The optimizer step on the own elements of each parameter, and the balance of the biases that choose experts.
//!
//! Windowed state is updated window by window, while the next windows are read and those before are written.

use std::cell::RefCell;
use std::ops::Range;

use lockstep_graph::{Activity, Cost};
use lockstep_plan::{ParameterId, StoreKind};
use lockstep_tensor::View;

use crate::offloaded_gradients::OffloadedGradients;
use crate::optimizer::Operands;
use crate::state_store::Piece;
use crate::windowed_store::WindowedStore;
use crate::{Engine, EngineError, Part, StateKind, StateStore};

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
    /// [`EngineError::Comm`], [`EngineError::Disk`].
    pub fn update(&mut self, update: &Update) -> Result<(), EngineError> {
        self.weights.settle()?;
        self.balance()?;
        for id in self.trained_ids().filter(|id| !self.is_selection_bias(*id)) {
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

    /// Updates what is in memory of a parameter.
    fn update_parameter(&self, id: ParameterId, update: &Update) {
        // Rules for whole matrices are not given parts of them.
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

    /// Updates what is on disk, window by window.
    fn update_on_disk(&self, update: &Update) -> Result<(), EngineError> {
        let Some(store) = self.weights.updated_on_disk() else { return Ok(()) };
        let mut offloaded = self.gradients.offloaded().map(RefCell::borrow_mut);
        self.update_windows(&mut store.borrow_mut(), offloaded.as_deref_mut(), update)
    }

    fn update_windows(
        &self,
        store: &mut WindowedStore,
        mut offloaded: Option<&mut OffloadedGradients>,
        update: &Update,
    ) -> Result<(), EngineError> {
        let end = store.windows().len();
        for window in 0..end {
            let begin = self.timeline().begin();
            let stretch = store.windows()[window].stretch;
            let number = window - store.windows_of(stretch).start;
            store.read_ahead(window, end)?;
            let mut offloaded = offloaded.as_deref_mut().filter(|offloaded| offloaded.has(stretch));
            if let Some(offloaded) = &mut offloaded {
                offloaded.read_ahead(stretch, number)?;
            }
            store.load(window)?;
            let len = store.windows()[window].elements.len();
            let gradients = offloaded.map(|offloaded| offloaded.load(stretch, number, 0..len)).transpose()?;
            self.timeline().end(begin, || (Activity::of_step("wait for the disk"), Cost::default()));
            let start = store.windows()[window].elements.start;
            for piece in &store.windows()[window].pieces {
                let in_window = piece.first - start..piece.first - start + piece.elements.len();
                self.update_piece(store, window, (piece, in_window), gradients, update);
            }
            store.note_change(window);
        }
        store.write_behind()
    }

    /// Updates the elements of a parameter that lie `in_window`; `gradients` are the window's, if they are on disk too.
    fn update_piece(
        &self,
        store: &WindowedStore,
        window: usize,
        (piece, in_window): (&Piece, Range<usize>),
        gradients: Option<View<'_>>,
        update: &Update,
    ) {
        let id = piece.id;
        if self.is_selection_bias(id) {
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

    /// Applies the rule to elements of a parameter, the first of which has the index `first`: the weights, the gradient, and what
    /// kernels read if that is not the weights.
    fn apply<'a>(
        &self,
        update: &Update,
        id: ParameterId,
        first: usize,
        (parameter, gradient, rounded): (View<'a>, View<'a>, Option<View<'a>>),
        state: impl Fn(StateKind) -> Option<View<'a>>,
    ) {
        let record = &self.records[id.0];
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

    /// Whether experts are chosen by it: it moves with their load and not by its gradient.
    fn is_selection_bias(&self, id: ParameterId) -> bool {
        self.model.selection_bias(self.records[id.0].unit) == Some(id)
    }

    /// Moves the biases by which experts are chosen against the load of the step, alike on all ranks.
    fn balance(&mut self) -> Result<(), EngineError> {
        let rate = self.model.bias_update_rate() as f32;
        let mut values = std::mem::take(&mut self.bias_values);
        for unit in 0..self.model.units() {
            if !self.is_here[unit] {
                continue;
            }
            let bias = self.model.selection_bias(unit).filter(|id| self.records[id.0].trainable);
            let Some((id, steps)) = bias.zip(self.runner.expert_load().steps_to_balance(unit, rate)) else {
                continue;
            };
            let biases = self.weights.biases();
            let whole = biases.unwrap_or_else(|| self.weights.updated());
            let Some(part) = whole.kept_part(id) else { continue };
            part.copy_to_f32(&mut values);
            values.iter_mut().zip(steps).for_each(|(value, step)| *value += step);
            self.weights.write(id, StateKind::Parameter, 0, &values)?;
        }
        self.bias_values = values;
        Ok(())
    }

    /// The gradient and the rounded weights go through memory once, everything else is read and written.
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

/// Some elements of a parameter, out of those of which there is a part.
fn elements_of<'a>(part: Option<Part<'a>>, elements: &Range<usize>) -> Option<View<'a>> {
    part.map(|part| part.view.rows(elements.start - part.first..elements.end - part.first))
}
