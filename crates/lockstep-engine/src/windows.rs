//! Model state on disk, of which a few windows are in memory at a time.
//!
//! What a rank owns of the stretches of a [`FlatStore`] that are on disk is cut into windows of equal length. Of a window the file has
//! all tensors side by side, so that an update reads and writes it in one piece each. A few windows have a slot in memory:
//! those ahead are on their way in, the one at hand is worked on, and those behind, if they were changed, are on their way out.
//!
//! ```text
//! file   [ window 0: master | exp_avg | exp_avg_sq ][ window 1: master | exp_avg | exp_avg_sq ] ...
//! slots    writing           in use    reading   reading
//! ```

use std::{ops::Range, time::Duration};

use lockstep_plan::{
    DISK_ALIGNMENT_BYTES, DType, MemoryCategory, ParameterId, StoreKind, WINDOW_SLOTS, window_bytes,
    window_memory_bytes,
};
use lockstep_tensor::{Arena, Buffer, DiskError, DiskQueue, DiskTraffic, ScratchFile, Ticket, View};

use crate::flat::{FlatStore, Piece, write_rounded};
use crate::{EngineError, Offload};

/// How many of the windows in memory may be on their way in: the others are on their way out.
const AHEAD: usize = 3;

/// A window: some elements of a stretch.
#[derive(Debug)]
pub(crate) struct Window {
    pub(crate) stretch: usize,
    /// Which elements of the stretch.
    pub(crate) elements: Range<usize>,
    /// What lies there.
    pub(crate) pieces: Vec<Piece>,
    /// Where it begins in the file.
    offset: u64,
}

/// Stores that lie beside each other on disk, of the stretches that are there.
#[derive(Debug)]
pub(crate) struct DiskStore {
    queue: DiskQueue,
    /// What a window has, in this order.
    kinds: Vec<(StoreKind, DType)>,
    windows: Vec<Window>,
    /// The windows of each stretch.
    of_stretch: Vec<Range<usize>>,
    /// Where parameters that are on disk lie: stretch and first element. By [`ParameterId`].
    places: Vec<Option<(usize, usize)>>,
    memory: Buffer,
    slot_bytes: usize,
    slots: [Slot; WINDOW_SLOTS],
    /// The slot that is filled next.
    turn: usize,
    limit: Duration,
}

#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    window: Option<usize>,
    is_changed: bool,
    /// It is on its way in or out.
    pending: Option<Ticket>,
}

impl DiskStore {
    /// Zeros on disk for what this rank owns of the stretches of `layout` that are there; none if nothing is.
    ///
    /// # Errors
    /// No room on the disk or in memory.
    pub(crate) fn zeros(
        offload: &Offload,
        layout: &FlatStore,
        kinds: Vec<(StoreKind, DType)>,
        arena: &Arena,
    ) -> Result<Option<Self>, EngineError> {
        let (mut windows, mut of_stretch, mut end) = (Vec::new(), Vec::new(), 0);
        for (index, stretch) in layout.stretches().iter().enumerate() {
            let first = windows.len();
            let own = if stretch.is_on_disk { stretch.own.clone() } else { 0..0 };
            for start in own.clone().step_by(offload.window_elements) {
                let elements = start..own.end.min(start + offload.window_elements);
                let pieces = layout.pieces(index, elements.clone());
                let bytes = bytes_of(&kinds, elements.len());
                windows.push(Window { stretch: index, elements, pieces, offset: end });
                end += bytes as u64;
            }
            of_stretch.push(first..windows.len());
        }
        if windows.is_empty() || kinds.is_empty() {
            return Ok(None);
        }
        let longest = layout.layout().longest_window(offload.window_elements);
        let slot_bytes = bytes_of(&kinds, longest.unwrap_or(0));
        let file = ScratchFile::create(&offload.directory, end)?;
        Ok(Some(Self {
            queue: DiskQueue::new(file, offload.method)?,
            kinds,
            windows,
            of_stretch,
            places: layout.places_on_disk(),
            memory: arena.allocate_zeroed(window_memory_bytes(slot_bytes), MemoryCategory::Workspace)?,
            slot_bytes,
            slots: [Slot::default(); WINDOW_SLOTS],
            turn: 0,
            limit: offload.limit,
        }))
    }

    /// All windows, in the order of the file.
    pub(crate) fn windows(&self) -> &[Window] {
        &self.windows
    }

    /// The numbers of those of a stretch.
    pub(crate) fn windows_of(&self, stretch: usize) -> Range<usize> {
        self.of_stretch[stretch].clone()
    }

    /// The parameters that are here, and which elements of each this rank owns.
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

    /// What it keeps of each element.
    pub(crate) fn kinds(&self) -> &[(StoreKind, DType)] {
        &self.kinds
    }

    /// Whether it keeps that kind.
    pub(crate) fn keeps(&self, kind: StoreKind) -> bool {
        self.kinds.iter().any(|(kept, _)| *kept == kind)
    }

    /// Bytes of the file.
    pub(crate) fn len_bytes(&self) -> u64 {
        self.queue.file().len_bytes()
    }

    /// What has been read and written since this was last asked.
    pub(crate) fn take_traffic(&mut self) -> DiskTraffic {
        self.queue.take_traffic()
    }

    /// Begins to read windows from number `window` on that a pass in their order will ask for soon, and to write those behind.
    ///
    /// # Errors
    /// [`DiskError`].
    pub(crate) fn look_ahead(&mut self, window: usize, end: usize) -> Result<(), DiskError> {
        self.write_behind(Some(window));
        for next in window..end.min(window + AHEAD) {
            if self.slot_of(next).is_none() {
                self.begin_to_read(next)?;
            }
        }
        Ok(())
    }

    /// Has a window in memory.
    ///
    /// # Errors
    /// [`DiskError`].
    pub(crate) fn load(&mut self, window: usize) -> Result<(), DiskError> {
        let slot = match self.slot_of(window) {
            Some(slot) => slot,
            None => {
                self.write_behind(None);
                self.begin_to_read(window)?
            }
        };
        self.settle(slot)
    }

    /// Has memory for a window whose contents will be written, all of them.
    ///
    /// # Errors
    /// [`DiskError`].
    pub(crate) fn begin_anew(&mut self, window: usize) -> Result<(), DiskError> {
        self.write_behind(Some(window));
        match self.slot_of(window) {
            Some(slot) => self.settle(slot),
            None => self.take_slot(window).map(drop),
        }
    }

    /// Notes that a window in memory was changed; it is written when another one is turned to.
    pub(crate) fn note_change(&mut self, window: usize) {
        if let Some(slot) = self.slot_of(window) {
            self.slots[slot].is_changed = true;
        }
    }

    /// Begins to write everything that was changed.
    pub(crate) fn write_all_behind(&mut self) {
        self.write_behind(None);
    }

    /// Elements of a window that is in memory, by their index in it.
    ///
    /// # Panics
    /// If it is not, or is not kept of that kind.
    pub(crate) fn view(&self, window: usize, kind: StoreKind, elements: Range<usize>) -> View<'_> {
        let slot = self.slot_of(window).expect("a window is loaded before it is looked at");
        let (dtype, offset) = self.place_of(window, kind, elements.start);
        self.memory.view(dtype, slot * self.slot_bytes + offset, [elements.len()])
    }

    /// Type of a kind, and where in a window an element of it begins, in bytes.
    fn place_of(&self, window: usize, kind: StoreKind, element: usize) -> (DType, usize) {
        let number = self.kinds.iter().position(|(other, _)| *other == kind).expect("a kind that is kept");
        let (len, dtype) = (self.windows[window].elements.len(), self.kinds[number].1);
        (dtype, bytes_of(&self.kinds[..number], len) + element * dtype.size_bytes())
    }

    /// Replaces the elements from `start` on of a parameter, rounded to the type they are kept in, as far as this rank has them here.
    ///
    /// # Errors
    /// [`DiskError`].
    pub(crate) fn write(
        &mut self,
        id: ParameterId,
        kind: StoreKind,
        start: usize,
        values: &[f32],
    ) -> Result<(), DiskError> {
        self.each_window(id, start..start + values.len(), |store, window, in_window, done| {
            store.load(window)?;
            write_rounded(store.view(window, kind, in_window.clone()), &values[done..done + in_window.len()]);
            store.note_change(window);
            Ok(())
        })
    }

    /// Copies elements of a parameter, all of which this rank has here, as they are kept.
    ///
    /// # Errors
    /// [`DiskError`].
    pub(crate) fn read(
        &mut self,
        id: ParameterId,
        kind: StoreKind,
        elements: Range<usize>,
        bytes: &mut [u8],
    ) -> Result<(), DiskError> {
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

    /// Begins to fill `memory`, from a byte on, with all that this rank owns of a stretch, of the kind that comes first; it is there when
    /// [`DiskStore::wait`] says so of each of the `tickets`.
    ///
    /// # Errors
    /// [`DiskError`].
    ///
    /// # Panics
    /// If the memory does not begin with a block of the disk.
    pub(crate) fn begin_to_fill(
        &mut self,
        stretch: usize,
        memory: &mut Buffer,
        start: usize,
        tickets: &mut Vec<Ticket>,
    ) -> Result<(), DiskError> {
        let mut end = start;
        for window in self.windows_of(stretch) {
            // What was changed is read when it has been written.
            if let Some(slot) = self.slot_of(window) {
                if self.slots[slot].is_changed {
                    self.begin_to_write(slot);
                }
                self.settle(slot)?;
            }
            let Window { offset, elements, .. } = &self.windows[window];
            let bytes = bytes_of(&self.kinds[..1], elements.len());
            tickets.push(self.queue.read(*offset, memory.lend(end..end + bytes)));
            end += bytes;
        }
        Ok(())
    }

    /// Waits until what was begun is done.
    ///
    /// # Errors
    /// [`DiskError`].
    pub(crate) fn wait(&mut self, ticket: Ticket) -> Result<(), DiskError> {
        self.queue.wait(ticket, self.limit)
    }

    /// Calls `work` for each window that has some of the `elements` of a parameter: with its number, the elements by their
    /// index in the window, and how many came before.
    fn each_window(
        &mut self,
        id: ParameterId,
        elements: Range<usize>,
        mut work: impl FnMut(&mut Self, usize, Range<usize>, usize) -> Result<(), DiskError>,
    ) -> Result<(), DiskError> {
        let Some((stretch, first)) = self.places[id.0] else { return Ok(()) };
        let asked = first + elements.start..first + elements.end;
        for window in self.windows_with(stretch, &asked) {
            let has = self.windows[window].elements.clone();
            let common = asked.start.max(has.start)..asked.end.min(has.end);
            work(self, window, common.start - has.start..common.end - has.start, common.start - asked.start)?;
        }
        Ok(())
    }

    /// The windows that have some of the elements `asked` of a stretch. All but the last are equally long.
    fn windows_with(&self, stretch: usize, asked: &Range<usize>) -> Range<usize> {
        let of_stretch = self.windows_of(stretch);
        let windows = &self.windows[of_stretch.clone()];
        let (Some(first), Some(last)) = (windows.first(), windows.last()) else { return 0..0 };
        let (own, len) = (first.elements.start..last.elements.end, first.elements.len());
        let common = asked.start.max(own.start)..asked.end.min(own.end);
        if common.is_empty() {
            return 0..0;
        }
        let number = |windows: usize| of_stretch.start + windows;
        number((common.start - own.start) / len)..number((common.end - own.start).div_ceil(len))
    }

    /// Elements of a window, of one kind. A window that a parameter has to itself is not read whole for them: a save asks for one
    /// kind of such a parameter after the other, and windows of a long one would be gone when the next kind's turn has come.
    fn load_part(
        &mut self,
        window: usize,
        kind: StoreKind,
        elements: Range<usize>,
    ) -> Result<View<'_>, DiskError> {
        if self.slot_of(window).is_some() || self.windows[window].pieces.len() > 1 {
            self.load(window)?;
            return Ok(self.view(window, kind, elements));
        }
        let slot = self.take_slot(window)?;
        let (dtype, start) = self.place_of(window, kind, elements.start);
        let end = (start + elements.len() * dtype.size_bytes()).next_multiple_of(DISK_ALIGNMENT_BYTES);
        let units = start / DISK_ALIGNMENT_BYTES * DISK_ALIGNMENT_BYTES..end;
        let (offset, memory) = (self.windows[window].offset + units.start as u64, slot * self.slot_bytes);
        let loan = self.memory.lend(memory + units.start..memory + units.end);
        // What else belongs to the window is not there.
        self.slots[slot] = Slot { pending: Some(self.queue.read(offset, loan)), ..Slot::default() };
        self.settle(slot)?;
        Ok(self.memory.view(dtype, memory + start, [elements.len()]))
    }

    fn slot_of(&self, window: usize) -> Option<usize> {
        self.slots.iter().position(|slot| slot.window == Some(window))
    }

    fn begin_to_read(&mut self, window: usize) -> Result<usize, DiskError> {
        let slot = self.take_slot(window)?;
        let (offset, bytes) = self.in_file(window);
        let start = slot * self.slot_bytes;
        self.slots[slot].pending = Some(self.queue.read(offset, self.memory.lend(start..start + bytes)));
        Ok(slot)
    }

    /// Gives a window the slot whose turn it is.
    fn take_slot(&mut self, window: usize) -> Result<usize, DiskError> {
        let slot = self.turn;
        self.turn = (self.turn + 1) % WINDOW_SLOTS;
        if self.slots[slot].is_changed {
            self.begin_to_write(slot);
        }
        self.settle(slot)?;
        self.slots[slot].window = Some(window);
        Ok(slot)
    }

    /// Begins to write what was changed, but for one window.
    fn write_behind(&mut self, but: Option<usize>) {
        for slot in 0..WINDOW_SLOTS {
            if self.slots[slot].is_changed && (but.is_none() || self.slots[slot].window != but) {
                self.begin_to_write(slot);
            }
        }
    }

    fn begin_to_write(&mut self, slot: usize) {
        let Some(window) = self.slots[slot].window else { return };
        let (offset, bytes) = self.in_file(window);
        let start = slot * self.slot_bytes;
        self.slots[slot].is_changed = false;
        self.slots[slot].pending = Some(self.queue.write(offset, self.memory.lend(start..start + bytes)));
    }

    /// Waits until a slot is neither read nor written.
    fn settle(&mut self, slot: usize) -> Result<(), DiskError> {
        match self.slots[slot].pending.take() {
            Some(ticket) => self.queue.wait(ticket, self.limit),
            None => Ok(()),
        }
    }

    fn in_file(&self, window: usize) -> (u64, usize) {
        let Window { offset, elements, .. } = &self.windows[window];
        (*offset, bytes_of(&self.kinds, elements.len()))
    }
}

/// Bytes that tensors of so many elements of each kind take beside each other.
fn bytes_of(kinds: &[(StoreKind, DType)], elements: usize) -> usize {
    window_bytes(kinds.iter().map(|(_, dtype)| *dtype), elements)
}

#[cfg(test)]
mod tests;
