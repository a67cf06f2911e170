//! Access to weights in the form that kernels read.
//!
//! Each pass of a unit first makes its weight source ready, and then reads every parameter unsharded: from its store,
//! or from the pool.

use lockstep_graph::StreamedExperts;
use lockstep_plan::ParameterId;
use lockstep_tensor::{Kernels, Matrix, View};

use crate::EngineError;
use crate::parameter_pool::ParameterPool;
use crate::state_store::{ParameterSpan, Residence, StateStore};

/// Source of unsharded weights, unit by unit.
pub trait WeightSource {
    /// Waits until the weights of `unit`, the next one in the sequence of uses, can be read.
    ///
    /// # Errors
    /// If another rank is lost, or the disk fails.
    fn make_ready(&mut self, queue: &dyn Kernels, unit: usize) -> Result<(), EngineError>;

    /// Returns the weights. Of gathered and streamed weights, only those of the unit that was made ready last are valid.
    fn weights(&self) -> Weights<'_>;
}

/// A source whose weights are all resident.
impl WeightSource for Weights<'_> {
    fn make_ready(&mut self, _: &dyn Kernels, _: usize) -> Result<(), EngineError> {
        Ok(())
    }

    fn weights(&self) -> Weights<'_> {
        *self
    }
}

/// Weights in memory outside of stores, such as buffers that hold one unit after the other.
pub trait HeldWeights: std::fmt::Debug {
    /// Returns the weights of a parameter, which may be quantized; `None` if they are elsewhere.
    fn matrix(&self, id: ParameterId) -> Option<Matrix<'_>>;

    /// Returns the matrices of a stack of experts that are read from disk one at a time; `None` for any other parameter.
    fn streamed_experts(&self, _stack: ParameterId) -> Option<StreamedExperts<'_>> {
        None
    }
}

/// Weights that kernels read, by store.
#[derive(Debug, Clone, Copy)]
pub struct Weights<'a> {
    /// Trained weights; only this rank's own elements if they are gathered before use.
    pub trained: &'a StateStore,
    /// The pool of gathered weights, if any are gathered.
    pub(crate) pool: Option<&'a ParameterPool>,
    /// Frozen weights, if there are any.
    pub frozen: Option<&'a StateStore>,
    /// Blocks of frozen quantized matrices, if there are any.
    pub(crate) quantized: Option<&'a StateStore>,
    /// Trained weights in full precision, if kernels read another type: all of them, or only those that kernels need
    /// exactly.
    pub exact: Option<&'a StateStore>,
    /// Weights that are read where a file holds them, by [`ParameterId`]; parameters without one are in a store. May be empty.
    pub in_place: &'a [Option<Matrix<'a>>],
    /// Weights in other memory, which come before all others.
    pub(crate) held: Option<&'a dyn HeldWeights>,
}

impl<'a> Weights<'a> {
    /// Returns the weights of a store, but for those that are read in place, which are given by [`ParameterId`].
    pub fn with_in_place(store: &'a StateStore, in_place: &'a [Option<Matrix<'a>>]) -> Self {
        Self { in_place, ..store.into() }
    }

    /// Returns these weights, but for those that `held` has.
    #[must_use]
    pub fn with_held(self, held: Option<&'a dyn HeldWeights>) -> Self {
        Self { held, ..self }
    }

    /// Returns the unsharded weights of a parameter, which may be quantized.
    pub(crate) fn matrix(&self, id: ParameterId) -> Matrix<'a> {
        if let Some(blocks) = self.quantized.and_then(|store| store.blocks(id)) {
            return Matrix::Blocks(blocks);
        }
        self.elsewhere(id).unwrap_or_else(|| Matrix::Dense(self.view(id)))
    }

    /// Returns the matrices of a stack of experts that are read from disk one at a time.
    pub(crate) fn streamed_experts(&self, stack: ParameterId) -> Option<StreamedExperts<'a>> {
        self.held?.streamed_experts(stack)
    }

    /// Returns weights that are in no store.
    fn elsewhere(&self, id: ParameterId) -> Option<Matrix<'a>> {
        let held = self.held.and_then(|held| held.matrix(id));
        held.or_else(|| self.in_place.get(id.0).copied().flatten())
    }

    /// Returns the unsharded weights of a parameter.
    ///
    /// # Panics
    /// If the weights are quantized: the operation that reads them can only read numbers.
    pub(crate) fn view(&self, id: ParameterId) -> View<'a> {
        let elsewhere = self.elsewhere(id);
        let blocks = || self.quantized.and_then(|store| store.blocks(id)).map(Matrix::Blocks);
        match elsewhere.or_else(blocks) {
            Some(Matrix::Dense(view)) => return view,
            Some(Matrix::Blocks(blocks)) => {
                panic!("parameter {} is {}, but its operation reads numbers", id.0, blocks.format())
            }
            None => {}
        }
        let find = |store: &'a StateStore| Some((store, store.span_of(id)?));
        let place = find(self.trained).or_else(|| self.frozen.and_then(find));
        let (store, ParameterSpan { flat, first, shape, .. }) =
            place.expect("a parameter is trained or frozen");
        match (store.residence(flat), self.pool) {
            (Residence::Gathered { bundle, start }, Some(pool)) => pool.view(bundle, start + first, shape),
            _ => store.view(id),
        }
    }
}

impl<'a> From<&'a StateStore> for Weights<'a> {
    /// Returns the weights of a store that holds all of them in full.
    fn from(trained: &'a StateStore) -> Self {
        Self { trained, pool: None, frozen: None, quantized: None, exact: None, in_place: &[], held: None }
    }
}
