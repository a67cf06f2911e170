//! Gradients of one step: the first contribution to each replaces what the last step left, so that nothing has to
//! be set to zero beforehand and read back.

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
    /// Gradients of `records`, all zero.
    ///
    /// # Errors
    /// [`TensorError::OutOfMemory`].
    pub fn new(arena: &Arena, records: &[ParameterRecord]) -> Result<Self, TensorError> {
        let store = FlatStore::zeros(arena, records, DType::F32, MemoryCategory::Gradients, Tied::Separate)?;
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
            if next.replace(Write::Accumulate) == Write::Overwrite {
                queue.zero(self.store.view(ParameterId(index)));
            }
        }
    }

    /// The gradient of a step that has ended.
    pub fn view(&self, id: ParameterId) -> View<'_> {
        self.store.view(id)
    }
}
