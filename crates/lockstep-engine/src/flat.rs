//! Flat buffers: one for each unit, holding one number per parameter element (weights, gradients, moments).
//!
//! [`StoreLayout`] says where a parameter stands. A store has the stretches that it speaks of whole, or only what the rank owns of
//! them, or, where that is on disk ([`WindowedStore`](crate::windowed_store::WindowedStore)), nothing but the knowledge of where it lies; what is
//! whole and what is not is all that a ZeRO stage changes.

use std::ops::Range;

use half::{bf16, f16};
use lockstep_graph::{ParameterIndex, Parameters};
use lockstep_plan::gathering::Kept;
use lockstep_plan::{
    DType, Extent, MemoryCategory, ParameterId, ParameterRecord, ShardPlace, StateItem, StoreLayout, Stretch,
};
use lockstep_tensor::{Arena, Buffer, Kernels, Shape, TensorError, View, Write};

use crate::{Gradients, gathered::Gathered};

/// One tensor for each parameter of a model, in one flat buffer per unit. A tied parameter is a view of the one it is
/// tied to.
#[derive(Debug)]
pub struct FlatStore {
    dtype: DType,
    extent: Extent,
    units: Vec<Buffer>,
    layout: StoreLayout,
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

/// What a rank owns of a parameter's tensor.
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

impl FlatStore {
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
        let layout = StoreLayout::new(records, Extent::Whole, |_| ShardPlace::default(), |_| true);
        Self::laid_out(arena, records, (dtype, category), Extent::Whole, layout)
    }

    /// Zeros for a store of the state of a rank that sees its parameters as `records`.
    ///
    /// # Errors
    /// [`TensorError::OutOfMemory`].
    pub(crate) fn zeros_of(
        arena: &Arena,
        records: &[ParameterRecord],
        StateItem { kind, dtype, extent, layout }: &StateItem,
    ) -> Result<Self, TensorError> {
        Self::laid_out(arena, records, (*dtype, kind.category()), *extent, layout.clone())
    }

    fn laid_out(
        arena: &Arena,
        records: &[ParameterRecord],
        (dtype, category): (DType, MemoryCategory),
        extent: Extent,
        layout: StoreLayout,
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
        Ok(Self { dtype, extent, units: units.collect::<Result<_, _>>()?, layout, places })
    }

    /// Whether it keeps no parameter.
    pub fn is_empty(&self) -> bool {
        self.places.iter().all(Option::is_none)
    }

    /// How much it has.
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
            dtype: self.dtype,
            extent: self.extent,
            units: units.collect::<Result<_, _>>()?,
            layout: self.layout.clone(),
            places: self.places.clone(),
        })
    }

    /// What stands together.
    pub(crate) fn stretches(&self) -> &[Stretch] {
        &self.layout.stretches
    }

    /// Where everything stands.
    pub(crate) fn layout(&self) -> &StoreLayout {
        &self.layout
    }

    /// The stretch that a parameter stands in, its first element there, and the shape; none if it is not kept.
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

    /// What this rank owns of a stretch, `[count]`; there may be nothing.
    pub(crate) fn own_of(&self, stretch: usize) -> View<'_> {
        let stretch = &self.layout.stretches[stretch];
        self.elements_of(stretch, stretch.own.clone())
    }

    /// Some elements of a stretch, `[count]`.
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

    /// Takes the contents of a store of the same parameters and type.
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

    /// What this rank owns of a parameter's tensor; none if that is nothing, or on disk.
    pub fn part(&self, id: ParameterId) -> Option<Part<'_>> {
        let place = self.places[id.0]?;
        let range = self.owned_in_memory(&place);
        (!range.is_empty()).then(|| self.part_of(&place, range))
    }

    /// Which elements of a parameter's tensor this rank owns, wherever they are.
    pub(crate) fn owned_range(&self, id: ParameterId) -> Range<usize> {
        self.places[id.0].map_or(0..0, |place| self.owned(&place))
    }

    /// Whether what this rank owns of a parameter is on disk.
    pub(crate) fn is_on_disk(&self, id: ParameterId) -> bool {
        self.places[id.0].is_some_and(|place| self.layout.stretches[place.stretch].is_on_disk)
    }

    /// Whether anything that it would have is on disk.
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

    /// The same in the tensor's shape, if that is all of it.
    pub(crate) fn part_in_shape(&self, id: ParameterId) -> Option<View<'_>> {
        let (place, part) = (self.places[id.0]?, self.part(id)?.view);
        Some(if part.elements() == place.shape.elements() { part.reshape(place.shape) } else { part })
    }

    /// What the store has of a parameter's tensor; none if that is nothing.
    pub(crate) fn kept_part(&self, id: ParameterId) -> Option<Part<'_>> {
        match self.extent {
            _ if self.is_on_disk(id) => None,
            Extent::Own => self.part(id),
            Extent::Whole => self.places[id.0].map(|place| self.part_of(&place, 0..place.shape.elements())),
        }
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

    /// The bytes that this rank owns of all parameters that own their storage here, and the first element of each, without a copy.
    pub fn parts(&mut self) -> Vec<(ParameterId, usize, &[u8])> {
        let ranges = |store: &Self, place: &Place| store.owned_in_memory(place);
        self.bytes_where(ranges)
    }

    /// The bytes that the store has of all parameters that own their storage here, and the first element of each, without a copy.
    pub(crate) fn kept_parts(&mut self) -> Vec<(ParameterId, usize, &[u8])> {
        let ranges = |store: &Self, place: &Place| match store.extent {
            _ if store.layout.stretches[place.stretch].is_on_disk => 0..0,
            Extent::Own => store.owned(place),
            Extent::Whole => 0..place.shape.elements(),
        };
        self.bytes_where(ranges)
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

    /// Those of them that the store has.
    fn owned_in_memory(&self, place: &Place) -> Range<usize> {
        if self.layout.stretches[place.stretch].is_on_disk { 0..0 } else { self.owned(place) }
    }

    fn part_of(&self, place: &Place, range: Range<usize>) -> Part<'_> {
        let of_stretch = place.first + range.start..place.first + range.end;
        Part { first: range.start, view: self.elements_of(&self.layout.stretches[place.stretch], of_stretch) }
    }

    /// The elements of a stretch that the store has.
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

    /// Where some elements of a stretch lie in its unit's buffer.
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

/// The weights that kernels read.
#[derive(Debug, Clone, Copy)]
pub struct Weights<'a> {
    /// Those that are trained; what this rank owns of them, if they are gathered.
    pub trained: &'a FlatStore,
    /// Where they are whole, if they are not there.
    pub(crate) gathered: Option<&'a Gathered>,
    /// Those that are not, if there are any.
    pub frozen: Option<&'a FlatStore>,
    /// The former in full precision, if kernels read another: all, or those of which there is need.
    pub exact: Option<&'a FlatStore>,
}

impl<'a> Weights<'a> {
    fn view(&self, id: ParameterId) -> View<'a> {
        let of = |kept, store: &'a FlatStore| match self.gathered {
            Some(gathered) => gathered.get(kept, store, id),
            None => store.get(id),
        };
        let frozen = || self.frozen.and_then(|store| of(Kept::Frozen, store));
        of(Kept::Trained, self.trained).or_else(frozen).expect("a parameter is trained or frozen")
    }
}

impl<'a> From<&'a FlatStore> for Weights<'a> {
    /// Weights in a store that holds all.
    fn from(trained: &'a FlatStore) -> Self {
        Self { trained, gathered: None, frozen: None, exact: None }
    }
}

/// The parameters of one unit, as its program sees them.
pub struct UnitParameters<'a> {
    /// By the program's parameter index.
    pub ids: &'a [ParameterId],
    /// Weights that kernels read.
    pub weights: Weights<'a>,
    /// Gradients, where there is a backward.
    pub gradients: Option<&'a Gradients>,
}

impl Parameters for UnitParameters<'_> {
    fn weight(&self, index: ParameterIndex) -> View<'_> {
        self.weights.view(self.ids[index.0])
    }

    fn exact(&self, index: ParameterIndex) -> View<'_> {
        let id = self.ids[index.0];
        self.weights.exact.and_then(|store| store.get(id)).unwrap_or_else(|| self.weights.view(id))
    }

    fn gradient(&self, index: ParameterIndex) -> (View<'_>, Write) {
        self.gradients.expect("a backward is given gradients").contribute(self.ids[index.0])
    }

    fn gradient_rows(&self, table: ParameterIndex) -> Option<View<'_>> {
        self.gradients.expect("a backward is given gradients").rows(self.ids[table.0])
    }
}
