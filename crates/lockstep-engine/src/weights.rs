//! Weights as kernels read them.
//!
//! Each pass of a unit first makes its source of weights ready, and then reads every parameter where it is whole: in its store, or in the pool.

use lockstep_plan::ParameterId;
use lockstep_tensor::{Kernels, View};

use crate::EngineError;
use crate::parameter_pool::ParameterPool;
use crate::state_store::{Residence, StateStore};

/// Brings the weights of a unit to where kernels read them.
pub(crate) trait WeightSource {
    /// Waits until the weights of `unit`, the next one of the sequence of uses, are there.
    ///
    /// # Errors
    /// If another rank is lost, or the disk fails.
    fn make_ready(&mut self, queue: &dyn Kernels, unit: usize) -> Result<(), EngineError>;

    /// The weights; of gathered ones, those of the unit that was made ready last.
    fn weights(&self) -> Weights<'_>;
}

/// Weights that are all resident.
impl WeightSource for Weights<'_> {
    fn make_ready(&mut self, _: &dyn Kernels, _: usize) -> Result<(), EngineError> {
        Ok(())
    }

    fn weights(&self) -> Weights<'_> {
        *self
    }
}

/// The weights that kernels read.
#[derive(Debug, Clone, Copy)]
pub struct Weights<'a> {
    /// Trained weights; the own elements, if they are gathered.
    pub trained: &'a StateStore,
    /// The pool of gathered weights, if any are gathered.
    pub(crate) pool: Option<&'a ParameterPool>,
    /// Frozen weights, if there are any.
    pub frozen: Option<&'a StateStore>,
    /// Trained weights in full precision, if kernels read another: all, or those that kernels need so.
    pub exact: Option<&'a StateStore>,
}

impl<'a> Weights<'a> {
    /// The whole weights of a parameter.
    pub(crate) fn view(&self, id: ParameterId) -> View<'a> {
        let find = |store: &'a StateStore| Some((store, store.place_of(id)?));
        let place = find(self.trained).or_else(|| self.frozen.and_then(find));
        let (store, (stretch, first, shape)) = place.expect("a parameter is trained or frozen");
        match (store.residence(stretch), self.pool) {
            (Residence::Gathered { bundle, start }, Some(pool)) => pool.view(bundle, start + first, shape),
            _ => store.view(id),
        }
    }
}

impl<'a> From<&'a StateStore> for Weights<'a> {
    /// Weights in a store that has all.
    fn from(trained: &'a StateStore) -> Self {
        Self { trained, pool: None, frozen: None, exact: None }
    }
}
