//! A store of model state: one tensor for each parameter of a line of the [`StateLayout`](lockstep_plan::StateLayout), be it weights,
//! gradients or a number that the optimizer keeps.
//!
//! [`StoreLayout`] says where each parameter stands in the stretches of the store. The [`Residence`] of a stretch says where its elements are:
//! in the store's flat buffers, whole or the own elements; whole only while a unit reads them; or on disk. Extent and residence
//! are all that ZeRO stages and offloading change.

use std::ops::Range;

use half::{bf16, f16};
use lockstep_plan::{
    DType, Extent, MemoryCategory, ParameterId, ParameterRecord, ShardPlace, StateItem, StoreKind,
    StoreLayout, Stretch,
};
use lockstep_tensor::{Arena, Buffer, Kernels, Shape, TensorError, View};

/// Where the elements of a stretch are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Residence {
    /// In the flat buffers of the store.
    Resident,
    /// In the pool of gathered parameters, from an element of a bundle on, while a unit reads them. The own elements stay in the flat
    /// buffers of the store or on disk.
    Gathered { bundle: usize, start: usize },
    /// On disk; windows of them are in memory while they are read and written.
    Windowed,
}

/// One tensor for each parameter of a model, in one flat buffer per unit. A tied parameter is a view of the one it is
/// tied to.
#[derive(Debug)]
pub struct StateStore {
    kind: StoreKind,
    dtype: DType,
    extent: Extent,
    /// The flat buffer of each unit.
    units: Vec<Buffer>,
    layout: StoreLayout,
    /// By stretch.
    residences: Vec<Residence>,
    /// By [`ParameterId`]; parameters that are left out have none.
    places: Vec<Option<Place>>,
}

/// A parameter, or some of its elements, in a stretch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) id: ParameterId,
    /// Which elements of what the rank's model holds of it.
    pub(crate) elements: Range<usize>,
    /// Where the first of them is in the stretch.
    pub(crate) first: usize,
}

#[derive(Debug, Clone, Copy)]
struct Place {
    stretch: usize,
    /// Its first element in the stretch.
    first: usize,
    shape: Shape,
}

impl Place {
    fn is_same(&self, other: &Self) -> bool {
        (self.stretch, self.first) == (other.stretch, other.first)
    }
}

/// The own elements of a parameter's tensor.
#[derive(Debug, Clone, Copy)]
pub struct Part<'a> {
    /// The index, in what the rank's model holds of the parameter, of the first element.
    pub first: usize,
    /// The elements, `[count]`.
    pub view: View<'a>,
}

impl Part<'_> {
    /// The indices of its elements.
    pub fn range(&self) -> Range<usize> {
        self.first..self.first + self.view.elements()
    }

    /// Writes the elements as f32, which holds each of them exactly.
    pub(crate) fn copy_to_f32(self, values: &mut Vec<f32>) {
        values.clear();
        match self.view.dtype() {
            DType::BF16 => values.extend(self.view.fetch::<bf16>().into_iter().map(bf16::to_f32)),
            DType::F16 => values.extend(self.view.fetch::<f16>().into_iter().map(f16::to_f32)),
            _ => {
                values.resize(self.view.elements(), 0.0);
                self.view.read(values).wait();
            }
        }
    }
}

impl StateStore {
    /// Zeros for every parameter of `records`.
    ///
    /// # Errors
    /// [`TensorError::OutOfMemory`].
    pub fn zeros(
        arena: &Arena,
        records: &[ParameterRecord],
        dtype: DType,
        category: MemoryCategory,
    ) -> Result<Self, TensorError> {
        let (kind, extent) = (StoreKind::Weights, Extent::Whole);
        let layout = StoreLayout::new(records, extent, |_| ShardPlace::default(), |_| true);
        Self::laid_out(arena, records, StateItem { kind, dtype, extent, layout }, category)
    }

    /// Zeros for a line of the state of a rank that sees its parameters as `records`.
    ///
    /// # Errors
    /// [`TensorError::OutOfMemory`].
    pub(crate) fn zeros_of(
        arena: &Arena,
        records: &[ParameterRecord],
        item: &StateItem,
    ) -> Result<Self, TensorError> {
        Self::laid_out(arena, records, item.clone(), item.kind.category())
    }

    fn laid_out(
        arena: &Arena,
        records: &[ParameterRecord],
        StateItem { kind, dtype, extent, layout }: StateItem,
        category: MemoryCategory,
    ) -> Result<Self, TensorError> {
        let place = |(place, record): (Option<(usize, usize)>, &ParameterRecord)| {
            let shape = Shape::from(record.local_shape().as_slice());
            place.map(|(stretch, first)| Place { stretch, first, shape })
        };
        let places = layout.places.iter().copied().zip(records).map(place).collect();
        let unit_bytes: Vec<usize> =
            layout.unit_elements.iter().map(|elements| elements.saturating_mul(dtype.size_bytes())).collect();
        arena.require(unit_bytes.iter().fold(0, |sum: usize, bytes| sum.saturating_add(*bytes)), category)?;
        let units = unit_bytes.into_iter().map(|bytes| arena.allocate_zeroed(bytes, category));
        let units = units.collect::<Result<_, _>>()?;
        let residence =
            |stretch: &Stretch| if stretch.is_on_disk { Residence::Windowed } else { Residence::Resident };
        let residences = layout.stretches.iter().map(residence).collect();
        Ok(Self { kind, dtype, extent, units, layout, residences, places })
    }

    /// The kind of store.
    pub(crate) fn kind(&self) -> StoreKind {
        self.kind
    }

    /// True if it keeps no parameter.
    pub fn is_empty(&self) -> bool {
        self.places.iter().all(Option::is_none)
    }

    /// The extent of each resident stretch.
    pub(crate) fn extent(&self) -> Extent {
        self.extent
    }

    /// Type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// A store for the same parameters, whose contents are unspecified: memory that nobody touches before it is
    /// written.
    ///
    /// # Errors
    /// [`TensorError::OutOfMemory`].
    pub fn like(&self, arena: &Arena, category: MemoryCategory) -> Result<Self, TensorError> {
        arena.require(self.len_bytes(), category)?;
        let units = self.units.iter().map(|unit| arena.allocate(unit.len_bytes(), category));
        Ok(Self {
            units: units.collect::<Result<_, _>>()?,
            layout: self.layout.clone(),
            residences: self.residences.clone(),
            places: self.places.clone(),
            ..*self
        })
    }

    /// The stretches, in which parameters stand together.
    pub(crate) fn stretches(&self) -> &[Stretch] {
        &self.layout.stretches
    }

    /// The places of all parameters.
    pub(crate) fn layout(&self) -> &StoreLayout {
        &self.layout
    }

    /// Where the elements of a stretch are.
    pub(crate) fn residence(&self, stretch: usize) -> Residence {
        self.residences[stretch]
    }

    /// Has a stretch gathered before each use, to an element of a bundle of the pool.
    pub(crate) fn gather(&mut self, stretch: usize, (bundle, start): (usize, usize)) {
        self.residences[stretch] = Residence::Gathered { bundle, start };
    }

    /// The stretch of a parameter, its first element there, and its shape; `None` if the store leaves it out.
    pub(crate) fn place_of(&self, id: ParameterId) -> Option<(usize, usize, Shape)> {
        self.places[id.0].map(|place| (place.stretch, place.first, place.shape))
    }

    /// The buffer that a stretch lies in, and the bytes there of some of its elements.
    ///
    /// # Panics
    /// If the store does not have them.
    pub(crate) fn lend_from(
        &mut self,
        stretch: usize,
        elements: Range<usize>,
    ) -> (&mut Buffer, Range<usize>) {
        let bytes = self.bytes_of(&self.layout.stretches[stretch], elements);
        (&mut self.units[self.layout.stretches[stretch].unit], bytes)
    }

    /// The buffer of a stretch, and the bytes of the own elements there.
    pub(crate) fn lend_own(&mut self, stretch: usize) -> (&mut Buffer, Range<usize>) {
        let own = self.layout.stretches[stretch].own.clone();
        self.lend_from(stretch, own)
    }

    /// The own elements of a stretch, `[count]`; there may be none.
    pub(crate) fn own_of(&self, stretch: usize) -> View<'_> {
        let stretch = &self.layout.stretches[stretch];
        self.elements_of(stretch, stretch.own.clone())
    }

    /// Elements of a stretch, `[count]`.
    ///
    /// # Panics
    /// If the store does not have them.
    pub(crate) fn range_of(&self, stretch: usize, elements: Range<usize>) -> View<'_> {
        self.elements_of(&self.layout.stretches[stretch], elements)
    }

    /// Bytes of all parameters, padding included.
    pub fn len_bytes(&self) -> usize {
        self.units.iter().map(Buffer::len_bytes).sum()
    }

    /// Has the system give all of the memory now: it does so page by page, when each is written first.
    pub fn touch(&mut self) {
        self.units.iter_mut().for_each(|unit| unit.bytes_mut().fill(0));
    }

    /// Copies the contents of a store of the same parameters and type.
    ///
    /// # Panics
    /// If it is not one.
    pub fn copy_from(&self, other: &Self, queue: &dyn Kernels) {
        assert_eq!(
            (self.dtype, self.extent, self.units.len()),
            (other.dtype, other.extent, other.units.len()),
            "stores of unlike shape"
        );
        for (from, to) in other.units.iter().zip(&self.units) {
            let elements = from.len_bytes() / self.dtype.size_bytes();
            queue.cast(from.view(self.dtype, 0, [elements]), to.view(self.dtype, 0, [elements]));
        }
    }

    /// A parameter's tensor.
    ///
    /// # Panics
    /// If the store has none for it, or not all of it.
    pub fn view(&self, id: ParameterId) -> View<'_> {
        self.get(id).expect("the store has a tensor for each parameter that it is asked for")
    }

    /// A parameter's tensor, if the store has one for it.
    ///
    /// # Panics
    /// If it has not all of it.
    pub fn get(&self, id: ParameterId) -> Option<View<'_>> {
        let place = self.places[id.0]?;
        let elements = place.first..place.first + place.shape.elements();
        Some(self.elements_of(&self.layout.stretches[place.stretch], elements).reshape(place.shape))
    }

    /// The own elements of a parameter's tensor; `None` if there are none, or they are on disk.
    pub fn part(&self, id: ParameterId) -> Option<Part<'_>> {
        let place = self.places[id.0]?;
        let range = self.owned_in_memory(&place);
        (!range.is_empty()).then(|| self.part_of(&place, range))
    }

    /// The range of a parameter's own elements, wherever they are.
    pub(crate) fn owned_range(&self, id: ParameterId) -> Range<usize> {
        self.places[id.0].map_or(0..0, |place| self.owned(&place))
    }

    /// True if any stretch is on disk.
    pub(crate) fn is_partly_on_disk(&self) -> bool {
        self.layout.stretches.iter().any(|stretch| stretch.is_on_disk)
    }

    /// The parameters that lie in `elements` of a stretch, each that owns its storage once, in their order there.
    pub(crate) fn pieces(&self, stretch: usize, elements: Range<usize>) -> Vec<Piece> {
        let mut pieces: Vec<Piece> = Vec::new();
        for (index, place) in self.places.iter().enumerate() {
            let Some(place) = place.filter(|place| place.stretch == stretch) else { continue };
            let (start, end) = (place.first, place.first + place.shape.elements());
            let first = elements.start.max(start);
            // A shared place was listed under the parameter that owns it.
            if first < elements.end.min(end) && pieces.iter().all(|piece| piece.first != first) {
                let of_parameter = first - start..elements.end.min(end) - start;
                pieces.push(Piece { id: ParameterId(index), elements: of_parameter, first });
            }
        }
        pieces.sort_by_key(|piece| piece.first);
        pieces
    }

    /// The own elements of a parameter's tensor, in its shape if that is all of it.
    pub(crate) fn part_in_shape(&self, id: ParameterId) -> Option<View<'_>> {
        let (place, part) = (self.places[id.0]?, self.part(id)?.view);
        Some(if part.elements() == place.shape.elements() { part.reshape(place.shape) } else { part })
    }

    /// What the store has in memory of a parameter's tensor; `None` if that is nothing.
    pub(crate) fn kept_part(&self, id: ParameterId) -> Option<Part<'_>> {
        let place = self.places[id.0]?;
        let range = self.kept_in_memory(&place);
        (!range.is_empty()).then(|| self.part_of(&place, range))
    }

    /// Replaces the elements from `start` on of a parameter's tensor, rounded to the store's type, as far as the store has them.
    ///
    /// # Panics
    /// If the parameter has fewer elements.
    pub fn write_part(&self, id: ParameterId, start: usize, values: &[f32]) {
        let Some(kept) = self.kept_part(id) else { return };
        let range = kept.range().start.max(start)..kept.range().end.min(start + values.len());
        if range.is_empty() {
            return;
        }
        let view = kept.view.rows(range.start - kept.first..range.end - kept.first);
        write_rounded(view, &values[range.start - start..range.end - start]);
    }

    /// The own bytes in memory of all parameters that own their storage here, each with its first element, without a copy.
    pub fn parts(&mut self) -> Vec<(ParameterId, usize, &[u8])> {
        self.bytes_where(Self::owned_in_memory)
    }

    /// The bytes in memory of all parameters that own their storage here, each with its first element, without a copy.
    pub(crate) fn kept_parts(&mut self) -> Vec<(ParameterId, usize, &[u8])> {
        self.bytes_where(Self::kept_in_memory)
    }

    fn bytes_where(
        &mut self,
        elements: impl Fn(&Self, &Place) -> Range<usize>,
    ) -> Vec<(ParameterId, usize, &[u8])> {
        let mut found = Vec::with_capacity(self.places.len());
        for (index, place) in self.places.iter().enumerate() {
            let Some(place) = place else { continue };
            // A shared place was listed under the parameter that owns it.
            if self.places[..index].iter().flatten().any(|earlier| earlier.is_same(place)) {
                continue;
            }
            let range = elements(self, place);
            if !range.is_empty() {
                let stretch = &self.layout.stretches[place.stretch];
                let of_stretch = place.first + range.start..place.first + range.end;
                found.push((
                    ParameterId(index),
                    range.start,
                    stretch.unit,
                    self.bytes_of(stretch, of_stretch),
                ));
            }
        }
        let units: Vec<&[u8]> = self.units.iter_mut().map(Buffer::host_bytes).collect();
        found.into_iter().map(|(id, first, unit, bytes)| (id, first, &units[unit][bytes])).collect()
    }

    /// The elements of a parameter that this rank owns.
    fn owned(&self, place: &Place) -> Range<usize> {
        let own = &self.layout.stretches[place.stretch].own;
        let end = place.first + place.shape.elements();
        let range = own.start.max(place.first)..own.end.min(end);
        if range.is_empty() { 0..0 } else { range.start - place.first..range.end - place.first }
    }

    /// The own elements of a parameter that the store has in memory.
    fn owned_in_memory(&self, place: &Place) -> Range<usize> {
        if self.layout.stretches[place.stretch].is_on_disk { 0..0 } else { self.owned(place) }
    }

    /// The elements of a parameter that the store has in memory.
    fn kept_in_memory(&self, place: &Place) -> Range<usize> {
        match self.extent {
            Extent::Whole if !self.layout.stretches[place.stretch].is_on_disk => 0..place.shape.elements(),
            _ => self.owned_in_memory(place),
        }
    }

    fn part_of(&self, place: &Place, range: Range<usize>) -> Part<'_> {
        let of_stretch = place.first + range.start..place.first + range.end;
        Part { first: range.start, view: self.elements_of(&self.layout.stretches[place.stretch], of_stretch) }
    }

    /// The elements of a stretch that the store has in memory.
    fn kept(&self, stretch: &Stretch) -> Range<usize> {
        match self.extent {
            _ if stretch.is_on_disk => 0..0,
            Extent::Whole => 0..stretch.elements,
            Extent::Own => stretch.own.clone(),
        }
    }

    fn elements_of(&self, stretch: &Stretch, elements: Range<usize>) -> View<'_> {
        let count = elements.len();
        let bytes = self.bytes_of(stretch, elements);
        self.units[stretch.unit].view(self.dtype, bytes.start, [count])
    }

    /// The bytes of elements of a stretch in its unit's buffer.
    fn bytes_of(&self, stretch: &Stretch, elements: Range<usize>) -> Range<usize> {
        let kept = self.kept(stretch);
        assert!(
            kept.start <= elements.start && elements.end <= kept.end,
            "elements {elements:?} of a stretch of which the store has {kept:?}"
        );
        let byte = |element: usize| (stretch.start + element - kept.start) * self.dtype.size_bytes();
        byte(elements.start)..byte(elements.end)
    }
}

/// Writes f32 values, rounded to the type of what is written.
pub(crate) fn write_rounded(view: View<'_>, values: &[f32]) {
    match view.dtype() {
        DType::BF16 => view.write(&values.iter().copied().map(bf16::from_f32).collect::<Vec<_>>()),
        DType::F16 => view.write(&values.iter().copied().map(f16::from_f32).collect::<Vec<_>>()),
        _ => view.write(values),
    }
}
