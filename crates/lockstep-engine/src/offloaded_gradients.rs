//! Offloaded gradients: each is written once it is reduced, read back to add the next micro-batch's, and read by the optimizer step.
//!
//! The squares of the gradient norm are summed whenever a window changes, so that the norm costs no pass over the disk.

use std::ops::Range;

use lockstep_plan::{DType, ParameterId, StoreKind, exact::ExactSum};
use lockstep_tensor::{Arena, DiskTraffic, Kernels, View, Write};

use crate::windowed_store::WindowedStore;
use crate::{EngineError, Offload, state_store::StateStore};

const KIND: StoreKind = StoreKind::Gradients;

/// The gradients of the offloaded stretches of a store. Methods fail if the disk does, or does not answer in time.
#[derive(Debug)]
pub(crate) struct OffloadedGradients {
    store: WindowedStore,
    /// The sum of squares of each piece of each window.
    squares: Vec<Vec<ExactSum>>,
}

impl OffloadedGradients {
    /// Gradients for the own elements of the offloaded stretches of `gradients`; `None` if nothing is offloaded.
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

    /// True if a stretch is offloaded.
    pub(crate) fn has(&self, stretch: usize) -> bool {
        !self.store.windows_of(stretch).is_empty()
    }

    /// Replaces the gradients of a stretch by a sum, `[own elements of the stretch]`, or adds it.
    pub(crate) fn take(
        &mut self,
        queue: &dyn Kernels,
        stretch: usize,
        sum: View<'_>,
        write: Write,
    ) -> Result<(), EngineError> {
        let windows = self.store.windows_of(stretch);
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
            self.note_change(queue, window);
            first += len;
        }
        self.store.write_behind()
    }

    /// Sets the gradients of a stretch to zero.
    pub(crate) fn zero(&mut self, queue: &dyn Kernels, stretch: usize) -> Result<(), EngineError> {
        for window in self.store.windows_of(stretch) {
            self.store.begin_anew(window)?;
            queue.zero(self.store.view(window, KIND, 0..self.store.windows()[window].elements.len()));
            self.note_change(queue, window);
        }
        self.store.write_behind()
    }

    /// Adds the squares of the own elements of a gradient.
    pub(crate) fn add_squares(&self, id: ParameterId, sum: &mut ExactSum) {
        for (window, squares) in self.store.windows().iter().zip(&self.squares) {
            let of_parameter = window.pieces.iter().zip(squares).filter(|(piece, _)| piece.id == id);
            of_parameter.for_each(|(_, squares)| sum.merge(squares));
        }
    }

    /// A copy of elements of a gradient.
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
                self.note_change(queue, window);
            }
        }
        Ok(())
    }

    /// Begins to read the windows of a stretch from the one with this number on.
    pub(crate) fn read_ahead(&mut self, stretch: usize, number: usize) -> Result<(), EngineError> {
        let windows = self.store.windows_of(stretch);
        // The windows of the next stretch follow.
        self.store.read_ahead(windows.start + number, self.store.windows().len())
    }

    /// The elements of a window, given by its number in its stretch, once they have come.
    pub(crate) fn load(
        &mut self,
        stretch: usize,
        number: usize,
        elements: Range<usize>,
    ) -> Result<View<'_>, EngineError> {
        let window = self.store.windows_of(stretch).start + number;
        self.store.load(window)?;
        Ok(self.store.view(window, KIND, elements))
    }

    /// The cost of reads and writes since this was last asked.
    pub(crate) fn take_traffic(&mut self) -> DiskTraffic {
        self.store.take_traffic()
    }

    /// Bytes of the file.
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.store.disk_bytes()
    }

    /// Notes that a window in memory was changed, and sums its squares again.
    fn note_change(&mut self, queue: &dyn Kernels, window: usize) {
        self.store.note_change(window);
        let of_window = &self.store.windows()[window];
        for (piece, squares) in of_window.pieces.iter().zip(&mut self.squares[window]) {
            let first = piece.first - of_window.elements.start;
            let view = self.store.view(window, KIND, first..first + piece.elements.len());
            *squares = queue.sum_of_squares(view).wait();
        }
    }
}
