//! Offloaded gradients: written to disk once reduced, read back to add the gradients of the next micro-batch, and read
//! by the optimizer step.
//!
//! The squares for the gradient norm are summed whenever a window changes, so that the norm needs no reads.

use std::ops::Range;

use lockstep_plan::{DType, ParameterId, StoreKind, exact::ExactSum};
use lockstep_tensor::{Arena, Kernels, View, Write};

use crate::windowed_store::WindowedStore;
use crate::{EngineError, Offload, state_store::StateStore};

const KIND: StoreKind = StoreKind::Gradients;

/// Gradients of the offloaded flat parameters of a store. Methods fail if the disk fails or does not answer in time.
#[derive(Debug)]
pub(crate) struct OffloadedGradients {
    pub(crate) store: WindowedStore,
    /// Sum of squares of each piece of each window.
    squares: Vec<Vec<ExactSum>>,
}

impl OffloadedGradients {
    /// Creates gradients for this rank's own elements of the offloaded flat parameters of `gradients`; returns `None`
    /// if nothing is offloaded.
    ///
    /// # Errors
    /// If the disk or memory has no room.
    pub(crate) fn new(
        offload: &Offload,
        gradients: &StateStore,
        arena: &Arena,
    ) -> Result<Option<Self>, EngineError> {
        let Some(store) = WindowedStore::zeros(offload, gradients, vec![(KIND, DType::F32)], arena)? else {
            return Ok(None);
        };
        let of_window = store.windows().iter().map(|window| vec![ExactSum::default(); window.pieces.len()]);
        let squares = of_window.collect();
        Ok(Some(Self { store, squares }))
    }

    /// Returns true if a flat parameter is offloaded.
    pub(crate) fn has(&self, flat: usize) -> bool {
        !self.store.windows_of(flat).is_empty()
    }

    /// Overwrites the gradients of a flat parameter with `sum`, `[own elements]`, or adds `sum` to them.
    pub(crate) fn take(
        &mut self,
        queue: &dyn Kernels,
        flat: usize,
        sum: View<'_>,
        write: Write,
    ) -> Result<(), EngineError> {
        let windows = self.store.windows_of(flat);
        let mut first = 0;
        for window in windows.clone() {
            match write {
                Write::Overwrite => self.store.begin_anew(window)?,
                Write::Accumulate => {
                    self.store.read_ahead(window, windows.end)?;
                    self.store.load(window)?;
                }
            }
            let len = self.store.windows()[window].elements.len();
            let kept = self.store.view(window, KIND, 0..len);
            let sum = sum.rows(first..first + len);
            match write {
                Write::Overwrite => queue.cast(sum, kept),
                Write::Accumulate => queue.add(kept, sum, kept),
            }
            self.mark_dirty(queue, window);
            first += len;
        }
        self.store.write_behind()
    }

    /// Zeroes the gradients of a flat parameter.
    pub(crate) fn zero(&mut self, queue: &dyn Kernels, flat: usize) -> Result<(), EngineError> {
        for window in self.store.windows_of(flat) {
            self.store.begin_anew(window)?;
            queue.zero(self.store.view(window, KIND, 0..self.store.windows()[window].elements.len()));
            self.mark_dirty(queue, window);
        }
        self.store.write_behind()
    }

    /// Adds the squares of this rank's own elements of a gradient to `sum`.
    pub(crate) fn add_squares(&self, id: ParameterId, sum: &mut ExactSum) {
        for (window, squares) in self.store.windows().iter().zip(&self.squares) {
            let of_parameter = window.pieces.iter().zip(squares).filter(|(piece, _)| piece.id == id);
            of_parameter.for_each(|(_, squares)| sum.merge(squares));
        }
    }

    /// Returns a copy of elements of a gradient.
    pub(crate) fn read(&mut self, id: ParameterId, elements: Range<usize>) -> Result<Vec<f32>, EngineError> {
        let mut values = vec![0.0_f32; elements.len()];
        self.store.read(id, KIND, elements, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }

    /// Replaces elements of a gradient from `start` on.
    pub(crate) fn write(
        &mut self,
        queue: &dyn Kernels,
        id: ParameterId,
        start: usize,
        values: &[f32],
    ) -> Result<(), EngineError> {
        self.store.write(id, KIND, start, values)?;
        for window in 0..self.store.windows().len() {
            if self.store.windows()[window].pieces.iter().any(|piece| piece.id == id) {
                self.store.load(window)?;
                self.mark_dirty(queue, window);
            }
        }
        Ok(())
    }

    /// Begins to read the windows of a flat parameter from index `number` on.
    pub(crate) fn read_ahead(&mut self, flat: usize, number: usize) -> Result<(), EngineError> {
        let windows = self.store.windows_of(flat);
        // Reading ahead goes on with the windows of the next flat parameter.
        self.store.read_ahead(windows.start + number, self.store.windows().len())
    }

    /// Waits for a window, given by its index in its flat parameter, and returns a view of some of its elements.
    pub(crate) fn load(
        &mut self,
        flat: usize,
        number: usize,
        elements: Range<usize>,
    ) -> Result<View<'_>, EngineError> {
        let window = self.store.windows_of(flat).start + number;
        self.store.load(window)?;
        Ok(self.store.view(window, KIND, elements))
    }

    /// Marks a window in memory as changed, and recomputes its sums of squares.
    fn mark_dirty(&mut self, queue: &dyn Kernels, window: usize) {
        self.store.mark_dirty(window);
        let of_window = &self.store.windows()[window];
        for (piece, squares) in of_window.pieces.iter().zip(&mut self.squares[window]) {
            let first = piece.first - of_window.elements.start;
            let view = self.store.view(window, KIND, first..first + piece.elements.len());
            *squares = queue.sum_of_squares(view).wait();
        }
    }
}
