//! Gradients of one step: the first contribution to each replaces what the last step left, so that nothing has to
//! be set to zero beforehand and read back. Parameters that are not trained have none.

use std::cell::Cell;

use lockstep_plan::{DType, MemoryCategory, ParameterId, ParameterRecord};
use lockstep_tensor::{Arena, Kernels, TensorError, View, Write};

use crate::{FlatStore, Tied};

/// The f32 gradients of all parameters. Tied ones have their own.
#[derive(Debug)]
pub struct Gradients {
    store: FlatStore,
    /// What the next contribution to each does. By [`ParameterId`].
    next: Vec<Cell<Write>>,
}

impl Gradients {
    /// Gradients of those of `records` that are trained, all zero.
    ///
    /// # Errors
    /// [`TensorError::OutOfMemory`].
    ///
    /// # Panics
    /// If nothing is trained.
    pub fn new(arena: &Arena, records: &[ParameterRecord]) -> Result<Self, TensorError> {
        let category = MemoryCategory::Gradients;
        let store = FlatStore::zeros_where(arena, records, DType::F32, category, Tied::Separate, |record| {
            record.trainable
        })?
        .expect("something is trained");
        Ok(Self { store, next: vec![Cell::new(Write::Overwrite); records.len()] })
    }

    /// Starts a step: what is there no longer counts.
    pub fn begin(&self) {
        self.next.iter().for_each(|next| next.set(Write::Overwrite));
    }

    /// The gradient, and what its next contribution has to do; the one after that adds.
    pub fn contribute(&self, id: ParameterId) -> (View<'_>, Write) {
        (self.store.view(id), self.next[id.0].replace(Write::Accumulate))
    }

    /// Ends a step: what nothing contributed to is zero.
    pub fn end(&self, queue: &dyn Kernels) {
        for (index, next) in self.next.iter().enumerate() {
            if next.replace(Write::Accumulate) == Write::Overwrite
                && let Some(gradient) = self.store.get(ParameterId(index))
            {
                queue.zero(gradient);
            }
        }
    }

    /// The gradient of a step that has ended.
    pub fn view(&self, id: ParameterId) -> View<'_> {
        self.store.view(id)
    }
}
