//! Windowed model state: stores on disk, of which a few windows are in memory at a time (ZeRO-Infinity: Rajbhandari et al., 2021).
//!
//! The own elements of offloaded flat parameters are cut into windows of equal length. A window holds the tensors of
//! all its stores side by side, so that an optimizer step reads and writes each window in one piece. Staging slots hold
//! a few windows: the next ones are being read, the current one is updated, and changed ones are being written.
//!
//! ```text
//! file   [ window 0: master | exp_avg | exp_avg_sq ][ window 1: master | exp_avg | exp_avg_sq ] ...
//! slots    writing           in use    reading   reading
//! ```

use std::ops::Range;

use lockstep_plan::{
    DISK_ALIGNMENT_BYTES, DType, MemoryCategory, ParameterId, StoreKind, WINDOW_SLOTS, window_bytes,
    window_memory_bytes,
};
use lockstep_tensor::{Arena, Buffer, View};

use crate::staging::{FileExtent, Staging};
use crate::state_store::{Piece, StateStore, write_rounded};
use crate::{EngineError, Offload};

/// Number of windows that are read ahead, the current one included; the other slots are for windows being written.
const AHEAD: usize = 3;

/// Consecutive own elements of a flat parameter.
#[derive(Debug)]
pub(crate) struct Window {
    pub(crate) flat: usize,
    /// Range of elements in the flat parameter.
    pub(crate) elements: Range<usize>,
    /// Parameters in this range.
    pub(crate) pieces: Vec<Piece>,
    extent: FileExtent,
}

/// Stores that lie side by side on disk. Methods fail if the disk fails or does not answer in time.
#[derive(Debug)]
pub(crate) struct WindowedStore {
    /// Kind and type of each store, in their order within a window.
    kinds: Vec<(StoreKind, DType)>,
    windows: Vec<Window>,
    /// Windows of each flat parameter.
    of_flat: Vec<Range<usize>>,
    /// Flat parameter of each parameter and the index of its first element there. By [`ParameterId`].
    places: Vec<Option<(usize, usize)>>,
    /// Staging slots, keyed by the index of the window.
    pub(crate) staging: Staging<usize>,
}

impl WindowedStore {
    /// Writes zeros to disk for the own elements of the offloaded flat parameters of `store`; returns `None` if nothing
    /// is offloaded.
    ///
    /// # Errors
    /// If the disk or memory has no room.
    pub(crate) fn zeros(
        offload: &Offload,
        store: &StateStore,
        kinds: Vec<(StoreKind, DType)>,
        arena: &Arena,
    ) -> Result<Option<Self>, EngineError> {
        let (mut windows, mut of_flat, mut end) = (Vec::new(), Vec::new(), 0);
        for (index, flat) in store.flat_parameters().iter().enumerate() {
            let first = windows.len();
            let own = if flat.is_on_disk { flat.own.clone() } else { 0..0 };
            for start in own.clone().step_by(offload.window_elements) {
                let elements = start..own.end.min(start + offload.window_elements);
                let pieces = store.pieces(index, elements.clone());
                let extent = FileExtent { offset: end, bytes: bytes_of(&kinds, elements.len()) };
                windows.push(Window { flat: index, elements, pieces, extent });
                end += extent.bytes as u64;
            }
            of_flat.push(first..windows.len());
        }
        if windows.is_empty() || kinds.is_empty() {
            return Ok(None);
        }
        let longest = store.layout().longest_window(offload.window_elements);
        let slot_bytes = bytes_of(&kinds, longest.unwrap_or(0));
        let memory = arena.allocate_zeroed(window_memory_bytes(slot_bytes), MemoryCategory::Workspace)?;
        let slots = (vec![memory], slot_bytes, WINDOW_SLOTS);
        let staging = Staging::new(offload, end, slots, windows.len())?;
        Ok(Some(Self { kinds, windows, of_flat, places: store.layout().places.clone(), staging }))
    }

    /// Returns all windows, in file order.
    pub(crate) fn windows(&self) -> &[Window] {
        &self.windows
    }

    /// Returns the indices of a flat parameter's windows.
    pub(crate) fn windows_of(&self, flat: usize) -> Range<usize> {
        self.of_flat[flat].clone()
    }

    /// Returns the parameters on disk, each with the range of this rank's own elements.
    pub(crate) fn owned(&self) -> Vec<(ParameterId, Range<usize>)> {
        let mut owned: Vec<(ParameterId, Range<usize>)> = Vec::new();
        for piece in self.windows.iter().flat_map(|window| &window.pieces) {
            match owned.last_mut() {
                Some((id, range)) if *id == piece.id => range.end = piece.elements.end,
                _ => owned.push((piece.id, piece.elements.clone())),
            }
        }
        owned
    }

    /// Returns the kind and type of each store.
    pub(crate) fn kinds(&self) -> &[(StoreKind, DType)] {
        &self.kinds
    }

    /// Returns true if it has a store of this kind.
    pub(crate) fn keeps(&self, kind: StoreKind) -> bool {
        self.kinds.iter().any(|(kept, _)| *kept == kind)
    }

    /// Begins to read the next windows from index `window` on, up to `end`, and to write changed ones other than
    /// `window`.
    pub(crate) fn read_ahead(&mut self, window: usize, end: usize) -> Result<(), EngineError> {
        self.staging.write_behind(Some(window))?;
        for next in window..end.min(window + AHEAD) {
            if self.staging.slot_of(next).is_none() {
                self.begin_to_read(next)?;
            }
        }
        Ok(())
    }

    /// Waits until a window is in memory, and reads it if necessary.
    pub(crate) fn load(&mut self, window: usize) -> Result<(), EngineError> {
        let slot = match self.staging.slot_of(window) {
            Some(slot) => slot,
            None => {
                self.staging.write_behind(None)?;
                self.begin_to_read(window)?
            }
        };
        self.staging.wait_for_slot(slot)
    }

    /// Provides a slot for a window that will be overwritten in full, so nothing is read.
    pub(crate) fn begin_anew(&mut self, window: usize) -> Result<(), EngineError> {
        self.staging.write_behind(Some(window))?;
        match self.staging.slot_of(window) {
            Some(slot) => self.staging.wait_for_slot(slot),
            None => self.take_slot(window).map(drop),
        }
    }

    /// Marks a window in memory as changed; it is written when another window is used.
    pub(crate) fn mark_dirty(&mut self, window: usize) {
        if let Some(slot) = self.staging.get_mut(window) {
            slot.is_changed = true;
        }
    }

    /// Begins to write all changed windows.
    pub(crate) fn write_behind(&mut self) -> Result<(), EngineError> {
        self.staging.write_behind(None)
    }

    /// Returns elements of a window in memory, by their index in the window.
    ///
    /// # Panics
    /// If the window is not in memory, or there is no store of this kind.
    pub(crate) fn view(&self, window: usize, kind: StoreKind, elements: Range<usize>) -> View<'_> {
        let slot = self.staging.slot_of(window).expect("a window is loaded before it is looked at");
        let (dtype, start) = self.span_of(window, kind, elements.start);
        self.staging.view(slot, dtype, start, elements.len())
    }

    /// Returns the type of a store and the byte offset of one of its elements within a window.
    fn span_of(&self, window: usize, kind: StoreKind, element: usize) -> (DType, usize) {
        let number = self.kinds.iter().position(|(other, _)| *other == kind).expect("a kind of the store");
        let (len, dtype) = (self.windows[window].elements.len(), self.kinds[number].1);
        (dtype, bytes_of(&self.kinds[..number], len) + element * dtype.size_bytes())
    }

    /// Replaces the elements of a parameter from `start` on, rounded to the type of the store. Elements that are not on
    /// this rank's disk are skipped.
    pub(crate) fn write(
        &mut self,
        id: ParameterId,
        kind: StoreKind,
        start: usize,
        values: &[f32],
    ) -> Result<(), EngineError> {
        self.each_window(id, start..start + values.len(), |store, window, in_window, done| {
            store.load(window)?;
            write_rounded(store.view(window, kind, in_window.clone()), &values[done..done + in_window.len()]);
            store.mark_dirty(window);
            Ok(())
        })
    }

    /// Copies elements of a parameter to `bytes` in the type of the store; all of them must be on this rank's disk.
    pub(crate) fn read(
        &mut self,
        id: ParameterId,
        kind: StoreKind,
        elements: Range<usize>,
        bytes: &mut [u8],
    ) -> Result<(), EngineError> {
        let size = self.kinds.iter().find(|(other, _)| *other == kind).map_or(1, |(_, t)| t.size_bytes());
        self.each_window(id, elements, |store, window, in_window, done| {
            let into = &mut bytes[done * size..(done + in_window.len()) * size];
            let view = store.load_part(window, kind, in_window)?;
            match view.dtype() {
                DType::F32 => drop(view.read::<f32>(bytemuck::cast_slice_mut(into)).wait()),
                _ => drop(view.read::<half::bf16>(bytemuck::cast_slice_mut(into)).wait()),
            }
            Ok(())
        })
    }

    /// Begins to read this rank's own elements of a flat parameter, from the first store, to `memory` from byte `start`
    /// on.
    ///
    /// # Panics
    /// If the memory from `start` on is not aligned to a disk block.
    pub(crate) fn begin_to_fill(
        &mut self,
        flat: usize,
        memory: &mut Buffer,
        start: usize,
    ) -> Result<(), EngineError> {
        let mut end = start;
        for window in self.windows_of(flat) {
            // A changed window is written before it is read.
            if let Some(slot) = self.staging.slot_of(window) {
                if self.staging.is_changed(slot) {
                    self.staging.begin_to_write(slot)?;
                }
                self.staging.wait_for_slot(slot)?;
            }
            let Window { extent, elements, .. } = &self.windows[window];
            let bytes = bytes_of(&self.kinds[..1], elements.len());
            self.staging.begin_to_fill(flat, extent.offset, memory, end..end + bytes)?;
            end += bytes;
        }
        Ok(())
    }

    /// Waits for the reads of a flat parameter.
    pub(crate) fn finish_filling(&mut self, flat: usize) -> Result<(), EngineError> {
        self.staging.finish_filling(flat)
    }

    /// Calls `work` for each window that holds some of the `elements` of a parameter, with the window's index, the
    /// range of the elements within the window, and the number of elements in earlier windows.
    fn each_window(
        &mut self,
        id: ParameterId,
        elements: Range<usize>,
        mut work: impl FnMut(&mut Self, usize, Range<usize>, usize) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let Some((flat, first)) = self.places[id.0] else { return Ok(()) };
        let asked = first + elements.start..first + elements.end;
        for window in self.windows_with(flat, &asked) {
            let has = self.windows[window].elements.clone();
            let common = asked.start.max(has.start)..asked.end.min(has.end);
            work(self, window, common.start - has.start..common.end - has.start, common.start - asked.start)?;
        }
        Ok(())
    }

    /// Returns the windows that hold some of the elements `asked` of a flat parameter. All windows but the last have
    /// the same length.
    fn windows_with(&self, flat: usize, asked: &Range<usize>) -> Range<usize> {
        let of_flat = self.windows_of(flat);
        let windows = &self.windows[of_flat.clone()];
        let (Some(first), Some(last)) = (windows.first(), windows.last()) else { return 0..0 };
        let (own, len) = (first.elements.start..last.elements.end, first.elements.len());
        let common = asked.start.max(own.start)..asked.end.min(own.end);
        if common.is_empty() {
            return 0..0;
        }
        let number = |windows: usize| of_flat.start + windows;
        number((common.start - own.start) / len)..number((common.end - own.start).div_ceil(len))
    }

    /// Returns elements of one store of a window. A window of a single parameter is not read in full: a save reads the
    /// stores of a parameter one after the other, and by the next store the first windows of a long parameter have lost
    /// their slots.
    fn load_part(
        &mut self,
        window: usize,
        kind: StoreKind,
        elements: Range<usize>,
    ) -> Result<View<'_>, EngineError> {
        if self.staging.slot_of(window).is_some() || self.windows[window].pieces.len() > 1 {
            self.load(window)?;
            return Ok(self.view(window, kind, elements));
        }
        // The slot gets no window index, because the rest of the window is not in it.
        let slot = self.staging.take(None, self.windows[window].extent, |_| Some(()))?;
        let (dtype, start) = self.span_of(window, kind, elements.start);
        let end = (start + elements.len() * dtype.size_bytes()).next_multiple_of(DISK_ALIGNMENT_BYTES);
        self.staging.begin_to_read_part(slot, start / DISK_ALIGNMENT_BYTES * DISK_ALIGNMENT_BYTES..end)?;
        self.staging.wait_for_slot(slot)?;
        Ok(self.staging.view(slot, dtype, start, elements.len()))
    }

    fn begin_to_read(&mut self, window: usize) -> Result<usize, EngineError> {
        let slot = self.take_slot(window)?;
        self.staging.begin_to_read(slot)?;
        Ok(slot)
    }

    /// Assigns the next slot in turn to a window.
    fn take_slot(&mut self, window: usize) -> Result<usize, EngineError> {
        self.staging.take(Some(window), self.windows[window].extent, |_| Some(()))
    }
}

/// Returns the bytes of a window of `elements` elements of each kind.
fn bytes_of(kinds: &[(StoreKind, DType)], elements: usize) -> usize {
    window_bytes(kinds.iter().map(|(_, dtype)| *dtype), elements)
}

#[cfg(test)]
mod tests;
