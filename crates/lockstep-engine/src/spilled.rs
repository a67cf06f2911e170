//! Gradients on disk: each is written once its sum has come, read back for the next micro-batch's sum, and read by the update.
//!
//! The squares that the norm is made of are summed as a gradient goes by, so that the norm costs no pass over the disk.

use std::ops::Range;

use lockstep_plan::{DType, ParameterId, StoreKind, exact::ExactSum};
use lockstep_tensor::{Arena, DiskTraffic, Kernels, View, Write};

use crate::windows::DiskStore;
use crate::{EngineError, FlatStore, Offload};

const KIND: StoreKind = StoreKind::Gradients;

/// The gradients of the stretches of a store that are on disk.
#[derive(Debug)]
pub(crate) struct Spilled {
    store: DiskStore,
    /// Of each window, the sum of squares of each of its pieces, as they were written last.
    squares: Vec<Vec<ExactSum>>,
}

impl Spilled {
    /// Gradients for what this rank owns of the stretches of `layout` that are on disk; none if nothing is.
    ///
    /// # Errors
    /// No room on the disk or in memory.
    pub(crate) fn new(
        offload: &Offload,
        layout: &FlatStore,
        arena: &Arena,
    ) -> Result<Option<Self>, EngineError> {
        let Some(store) = DiskStore::zeros(offload, layout, vec![(KIND, DType::F32)], arena)? else {
            return Ok(None);
        };
        let of_window = store.windows().iter().map(|window| vec![ExactSum::default(); window.pieces.len()]);
        let squares = of_window.collect();
        Ok(Some(Self { store, squares }))
    }

    /// Whether a stretch is here.
    pub(crate) fn has(&self, stretch: usize) -> bool {
        !self.store.windows_of(stretch).is_empty()
    }

    /// Takes a sum, `[own elements of the stretch]`: instead of what was here, or besides.
    ///
    /// # Errors
    /// [`EngineError::Disk`].
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
                    self.store.look_ahead(window, windows.end)?;
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
        self.store.write_all_behind();
        Ok(())
    }

    /// Nothing has contributed to a stretch.
    ///
    /// # Errors
    /// [`EngineError::Disk`].
    pub(crate) fn zero(&mut self, queue: &dyn Kernels, stretch: usize) -> Result<(), EngineError> {
        for window in self.store.windows_of(stretch) {
            self.store.begin_anew(window)?;
            queue.zero(self.store.view(window, KIND, 0..self.store.windows()[window].elements.len()));
            self.note_change(queue, window);
        }
        self.store.write_all_behind();
        Ok(())
    }

    /// Adds the squares of what is here of a gradient.
    pub(crate) fn add_squares(&self, id: ParameterId, sum: &mut ExactSum) {
        for (window, squares) in self.store.windows().iter().zip(&self.squares) {
            let of_parameter = window.pieces.iter().zip(squares).filter(|(piece, _)| piece.id == id);
            of_parameter.for_each(|(_, squares)| sum.merge(squares));
        }
    }

    /// A copy of elements of a gradient.
    ///
    /// # Errors
    /// [`EngineError::Disk`].
    pub(crate) fn read(&mut self, id: ParameterId, elements: Range<usize>) -> Result<Vec<f32>, EngineError> {
        let mut values = vec![0.0_f32; elements.len()];
        self.store.read(id, KIND, elements, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }

    /// Replaces elements of a gradient from `start` on.
    ///
    /// # Errors
    /// [`EngineError::Disk`].
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
    ///
    /// # Errors
    /// [`EngineError::Disk`].
    pub(crate) fn look_ahead(&mut self, stretch: usize, number: usize) -> Result<(), EngineError> {
        let windows = self.store.windows_of(stretch);
        // Those of the next stretch follow.
        Ok(self.store.look_ahead(windows.start + number, self.store.windows().len())?)
    }

    /// The elements of a window, given by its number in its stretch, once they have come.
    ///
    /// # Errors
    /// [`EngineError::Disk`].
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

    /// See [`DiskStore::take_traffic`].
    pub(crate) fn take_traffic(&mut self) -> DiskTraffic {
        self.store.take_traffic()
    }

    /// Bytes of the file.
    pub(crate) fn len_bytes(&self) -> u64 {
        self.store.len_bytes()
    }

    /// A window that is in memory has other contents.
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
