//! A store of model state: one tensor for each parameter of an item of the [`StateLayout`](lockstep_plan::StateLayout),
//! such as weights, gradients or an optimizer moment.
//!
//! [`StoreLayout`] places each parameter in a flat parameter (`FlatParameter`: consecutive parameters whose gradients are
//! complete at the same time and reduced over the same group). The [`Residence`] of a flat parameter says where its
//! elements are: in the store's buffers, in the pool while a unit reads them, or on disk. ZeRO stages and offloading
//! change only extent and residence.

use std::ops::Range;

use half::{bf16, f16};
use lockstep_plan::{
    BlockFormat, DType, Extent, FlatParameter, MemoryCategory, ParameterId, ParameterRecord, ShardPlace,
    StateItem, StoreKind, StoreLayout,
};
use lockstep_tensor::{
    Arena, BlockMatrix, Buffer, Kernels, MemoryLocation, Shape, TensorError, View, Workers,
};

/// Residence of a flat parameter's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Residence {
    /// In the flat buffers of the store, in full or only this rank's own elements.
    Resident,
    /// In the pool of gathered parameters while a unit reads them, from element `start` of `bundle` on. This rank's own
    /// elements stay in the flat buffers of the store or on disk.
    Gathered { bundle: usize, start: usize },
    /// On disk; windows of them are in memory while they are read or written.
    Windowed,
}

/// One tensor for each parameter of a model, in one flat buffer per unit. A tied parameter is a view of the one that it
/// is tied to.
#[derive(Debug)]
pub struct StateStore {
    kind: StoreKind,
    dtype: DType,
    extent: Extent,
    /// The flat buffer of each unit.
    units: Vec<Buffer>,
    layout: StoreLayout,
    /// Residence of each flat parameter.
    residences: Vec<Residence>,
    /// Span of each parameter, by [`ParameterId`]; `None` for parameters that the store does not hold.
    spans: Vec<Option<ParameterSpan>>,
}

/// A range of a parameter's elements in a flat parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) id: ParameterId,
    /// Range among the parameter's elements on this rank.
    pub(crate) elements: Range<usize>,
    /// Index of the first of them in the flat parameter.
    pub(crate) first: usize,
}

/// Position of a parameter in a flat parameter.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ParameterSpan {
    /// Index of the flat parameter.
    pub(crate) flat: usize,
    /// Index of the parameter's first element in the flat parameter.
    pub(crate) first: usize,
    pub(crate) shape: Shape,
    /// Format of a quantized matrix, whose elements here are the bytes of its blocks.
    pub(crate) format: Option<BlockFormat>,
}

impl ParameterSpan {
    fn is_same(&self, other: &Self) -> bool {
        (self.flat, self.first) == (other.flat, other.first)
    }

    /// Returns the range of the parameter's elements that lie within `elements` of the flat parameter.
    fn common(&self, elements: &Range<usize>) -> Range<usize> {
        let (start, end) = (self.first, self.first + self.shape.elements());
        let common = elements.start.max(start)..elements.end.min(end);
        if common.is_empty() { 0..0 } else { common.start - start..common.end - start }
    }
}

/// Elements of a parameter's tensor that this rank owns.
#[derive(Debug, Clone, Copy)]
pub struct OwnedElements<'a> {
    /// Index of the first element among the parameter's elements on this rank.
    pub first: usize,
    /// The elements, `[count]`.
    pub view: View<'a>,
}

impl OwnedElements<'_> {
    /// Returns the range of the elements.
    pub fn range(&self) -> Range<usize> {
        self.first..self.first + self.view.elements()
    }

    /// Copies the elements to `values` as f32, which represents each exactly.
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
    /// Allocates zeros for every parameter of `records`.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn zeros(
        arena: &Arena,
        records: &[ParameterRecord],
        dtype: DType,
        category: MemoryCategory,
    ) -> Result<Self, TensorError> {
        Self::zeros_of_selected(arena, records, |_| true, dtype, category)
    }

    /// Allocates zeros for the parameters of `records` whose index is selected.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn zeros_of_selected(
        arena: &Arena,
        records: &[ParameterRecord],
        is_selected: impl Fn(usize) -> bool,
        dtype: DType,
        category: MemoryCategory,
    ) -> Result<Self, TensorError> {
        let (kind, extent) = (StoreKind::Weights, Extent::Whole);
        let layout = StoreLayout::new(records, extent, |_| ShardPlace::default(), is_selected);
        Self::laid_out(arena, records, StateItem { kind, dtype, extent, layout }, category)
    }

    /// Allocates zeros for an item of a rank's state layout, whose parameters are `records`.
    ///
    /// # Errors
    /// If memory runs out.
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
            let (shape, format) = (Shape::from(record.stored_shape().as_slice()), record.block_format);
            place.map(|(flat, first)| ParameterSpan { flat, first, shape, format })
        };
        let spans = layout.places.iter().copied().zip(records).map(place).collect();
        let unit_bytes: Vec<usize> =
            layout.unit_elements.iter().map(|elements| elements.saturating_mul(dtype.size_bytes())).collect();
        arena.require(unit_bytes.iter().fold(0, |sum: usize, bytes| sum.saturating_add(*bytes)), category)?;
        let units = unit_bytes.into_iter().map(|bytes| arena.allocate_zeroed(bytes, category));
        let units = units.collect::<Result<_, _>>()?;
        let residence =
            |flat: &FlatParameter| if flat.is_on_disk { Residence::Windowed } else { Residence::Resident };
        let residences = layout.flat_parameters.iter().map(residence).collect();
        Ok(Self { kind, dtype, extent, units, layout, residences, spans })
    }

    /// Returns the kind of store.
    pub(crate) fn kind(&self) -> StoreKind {
        self.kind
    }

    /// Returns true if the store holds no parameter.
    pub fn is_empty(&self) -> bool {
        self.spans.iter().all(Option::is_none)
    }

    /// Returns the extent of resident flat parameters: in full, or only own elements.
    pub(crate) fn extent(&self) -> Extent {
        self.extent
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Allocates a store for the same parameters with unspecified contents; its memory is not touched before it is
    /// written.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn like(&self, arena: &Arena, category: MemoryCategory) -> Result<Self, TensorError> {
        arena.require(self.len_bytes(), category)?;
        let units = self.units.iter().map(|unit| arena.allocate(unit.len_bytes(), category));
        Ok(Self {
            units: units.collect::<Result<_, _>>()?,
            layout: self.layout.clone(),
            residences: self.residences.clone(),
            spans: self.spans.clone(),
            ..*self
        })
    }

    /// Returns the flat parameters of the store.
    pub(crate) fn flat_parameters(&self) -> &[FlatParameter] {
        &self.layout.flat_parameters
    }

    /// Returns the layout of the store.
    pub(crate) fn layout(&self) -> &StoreLayout {
        &self.layout
    }

    /// Returns the residence of a flat parameter's elements.
    pub(crate) fn residence(&self, flat: usize) -> Residence {
        self.residences[flat]
    }

    /// Marks a flat parameter as gathered before each use, to element `start` of a bundle of the pool.
    pub(crate) fn gather(&mut self, flat: usize, (bundle, start): (usize, usize)) {
        self.residences[flat] = Residence::Gathered { bundle, start };
    }

    /// Returns the span of a parameter; `None` if the store does not hold it.
    pub(crate) fn span_of(&self, id: ParameterId) -> Option<ParameterSpan> {
        self.spans[id.0]
    }

    /// Returns the buffer of a flat parameter, and the byte range of some of its elements.
    ///
    /// # Panics
    /// If the elements are not in the store's memory.
    pub(crate) fn lend_from(&mut self, flat: usize, elements: Range<usize>) -> (&mut Buffer, Range<usize>) {
        let bytes = self.bytes_of(&self.layout.flat_parameters[flat], elements);
        (&mut self.units[self.layout.flat_parameters[flat].unit], bytes)
    }

    /// Returns the buffer of a flat parameter, and the byte range of this rank's own elements.
    pub(crate) fn lend_own(&mut self, flat: usize) -> (&mut Buffer, Range<usize>) {
        let own = self.layout.flat_parameters[flat].own.clone();
        self.lend_from(flat, own)
    }

    /// Returns this rank's own elements of a flat parameter, `[count]`; `count` may be 0.
    pub(crate) fn own_of(&self, flat: usize) -> View<'_> {
        let flat = &self.layout.flat_parameters[flat];
        self.elements_of(flat, flat.own.clone())
    }

    /// Returns elements of a flat parameter, `[count]`.
    ///
    /// # Panics
    /// If the elements are not in the store's memory.
    pub(crate) fn range_of(&self, flat: usize, elements: Range<usize>) -> View<'_> {
        self.elements_of(&self.layout.flat_parameters[flat], elements)
    }

    /// Returns the bytes of all parameters in memory, padding included.
    pub fn len_bytes(&self) -> usize {
        self.units.iter().map(Buffer::len_bytes).sum()
    }

    /// Touches all of the memory now. Otherwise the operating system commits each page at its first write.
    pub fn touch(&mut self) {
        self.units.iter_mut().for_each(|unit| unit.bytes_mut().fill(0));
    }

    /// Touches all elements, own ones by the threads that update them: each page is then on the memory node of its thread,
    /// whoever writes its first values.
    pub(crate) fn touch_by(&mut self, workers: &Workers) {
        if self.units.iter().any(|unit| !matches!(unit.place(), MemoryLocation::Host)) {
            return;
        }
        let own = self.ranges_where(Self::owned_in_memory);
        for (_, _, unit, bytes) in own.into_iter().chain(self.ranges_where(Self::kept_in_memory)) {
            workers.touch(&mut self.units[unit].bytes_mut()[bytes], self.dtype.size_bytes());
        }
    }

    /// Copies the contents of `other`, a store of the same parameters and type.
    ///
    /// # Panics
    /// If the stores differ in type, extent or number of units.
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

    /// Returns a parameter's tensor.
    ///
    /// # Panics
    /// If the store does not hold the parameter, or only a part of it.
    pub fn view(&self, id: ParameterId) -> View<'_> {
        self.get(id).expect("the store has a tensor for each parameter that it is asked for")
    }

    /// Returns a parameter's tensor; `None` if the store does not hold it.
    ///
    /// # Panics
    /// If the store holds only a part of it.
    pub fn get(&self, id: ParameterId) -> Option<View<'_>> {
        let place = self.spans[id.0]?;
        let elements = place.first..place.first + place.shape.elements();
        Some(self.elements_of(&self.layout.flat_parameters[place.flat], elements).reshape(place.shape))
    }

    /// Returns the blocks of a quantized matrix; `None` if the store does not hold it, or holds numbers.
    pub(crate) fn blocks(&self, id: ParameterId) -> Option<BlockMatrix<'_>> {
        let span = self.spans.get(id.0).copied().flatten()?;
        let (rows, row_bytes) = span.shape.as_matrix();
        let format = span.format?;
        let bytes = self.view(id).reshape([rows * row_bytes]);
        let columns = row_bytes / format.block_bytes() * format.block_elements();
        Some(BlockMatrix::new(format, bytes, [rows, columns]))
    }

    /// Replaces bytes of the blocks of a quantized matrix from byte `start` on.
    pub(crate) fn write_blocks(&self, id: ParameterId, start: usize, blocks: &[u8]) {
        let view = self.view(id);
        view.reshape([view.elements()]).rows(start..start + blocks.len()).write(blocks);
    }

    /// Returns this rank's own elements of a parameter's tensor; `None` if there are none, or they are on disk.
    pub fn part(&self, id: ParameterId) -> Option<OwnedElements<'_>> {
        let place = self.spans[id.0]?;
        let range = self.owned_in_memory(&place);
        (!range.is_empty()).then(|| self.part_of(&place, range))
    }

    /// Returns the range of this rank's own elements of a parameter, in memory or on disk.
    pub(crate) fn owned_range(&self, id: ParameterId) -> Range<usize> {
        self.spans[id.0].map_or(0..0, |place| self.owned(&place))
    }

    /// Returns true if any flat parameter is on disk.
    pub(crate) fn is_partly_on_disk(&self) -> bool {
        self.layout.flat_parameters.iter().any(|flat| flat.is_on_disk)
    }

    /// Returns the parameters within `elements` of a flat parameter, in order. Tied parameters are listed once, as the
    /// one that owns the storage.
    pub(crate) fn pieces(&self, flat: usize, elements: Range<usize>) -> Vec<Piece> {
        let mut pieces: Vec<Piece> = Vec::new();
        for (index, place) in self.spans.iter().enumerate() {
            let Some(place) = place.filter(|place| place.flat == flat) else { continue };
            let common = place.common(&elements);
            let first = place.first + common.start;
            // A place shared by tied parameters was listed under the parameter that owns it.
            if !common.is_empty() && pieces.iter().all(|piece| piece.first != first) {
                pieces.push(Piece { id: ParameterId(index), elements: common, first });
            }
        }
        pieces.sort_by_key(|piece| piece.first);
        pieces
    }

    /// Returns this rank's own elements of a parameter's tensor, in the tensor's shape if they are all of it, else
    /// `[count]`.
    pub(crate) fn part_in_shape(&self, id: ParameterId) -> Option<View<'_>> {
        let (place, part) = (self.spans[id.0]?, self.part(id)?.view);
        Some(if part.elements() == place.shape.elements() { part.reshape(place.shape) } else { part })
    }

    /// Returns the elements of a parameter's tensor that are in the store's memory; `None` if there are none.
    pub(crate) fn kept_part(&self, id: ParameterId) -> Option<OwnedElements<'_>> {
        let place = self.spans[id.0]?;
        let range = self.kept_in_memory(&place);
        (!range.is_empty()).then(|| self.part_of(&place, range))
    }

    /// Replaces the elements of a parameter's tensor from `start` on, rounded to the store's type. Elements that are
    /// not in the store's memory are skipped.
    ///
    /// # Panics
    /// If `values` reaches beyond the end of the parameter.
    pub fn write_part(&self, id: ParameterId, start: usize, values: &[f32]) {
        let Some(kept) = self.kept_part(id) else { return };
        let range = kept.range().start.max(start)..kept.range().end.min(start + values.len());
        if range.is_empty() {
            return;
        }
        let view = kept.view.rows(range.start - kept.first..range.end - kept.first);
        write_rounded(view, &values[range.start - start..range.end - start]);
    }

    /// Returns the bytes in memory of this rank's own elements, without a copy: for each parameter that owns its
    /// storage, its id, the index of its first element, and the bytes.
    pub fn parts(&mut self) -> Vec<(ParameterId, usize, &[u8])> {
        self.bytes_where(Self::owned_in_memory)
    }

    /// Returns, as [`StateStore::parts`], the bytes of all elements in memory, own or not.
    pub(crate) fn kept_parts(&mut self) -> Vec<(ParameterId, usize, &[u8])> {
        self.bytes_where(Self::kept_in_memory)
    }

    fn bytes_where(
        &mut self,
        elements: impl Fn(&Self, &ParameterSpan) -> Range<usize>,
    ) -> Vec<(ParameterId, usize, &[u8])> {
        let found = self.ranges_where(elements);
        let units: Vec<&[u8]> = self.units.iter_mut().map(Buffer::host_bytes).collect();
        found.into_iter().map(|(id, first, unit, bytes)| (id, first, &units[unit][bytes])).collect()
    }

    /// Returns, for each parameter that owns its storage, its id, the index of the first of the `elements`, their unit, and
    /// their bytes in the unit's buffer.
    fn ranges_where(
        &self,
        elements: impl Fn(&Self, &ParameterSpan) -> Range<usize>,
    ) -> Vec<(ParameterId, usize, usize, Range<usize>)> {
        let mut found = Vec::with_capacity(self.spans.len());
        for (index, place) in self.spans.iter().enumerate() {
            let Some(place) = place else { continue };
            // A place shared by tied parameters was listed under the parameter that owns it.
            if self.spans[..index].iter().flatten().any(|earlier| earlier.is_same(place)) {
                continue;
            }
            let range = elements(self, place);
            if !range.is_empty() {
                let flat = &self.layout.flat_parameters[place.flat];
                let of_flat = place.first + range.start..place.first + range.end;
                found.push((ParameterId(index), range.start, flat.unit, self.bytes_of(flat, of_flat)));
            }
        }
        found
    }

    /// Returns the elements of a parameter that this rank owns.
    fn owned(&self, place: &ParameterSpan) -> Range<usize> {
        place.common(&self.layout.flat_parameters[place.flat].own)
    }

    /// Returns this rank's own elements of a parameter that are in memory.
    fn owned_in_memory(&self, place: &ParameterSpan) -> Range<usize> {
        if self.layout.flat_parameters[place.flat].is_on_disk { 0..0 } else { self.owned(place) }
    }

    /// Returns the elements of a parameter that are in memory.
    fn kept_in_memory(&self, place: &ParameterSpan) -> Range<usize> {
        place.common(&self.kept(&self.layout.flat_parameters[place.flat]))
    }

    fn part_of(&self, place: &ParameterSpan, range: Range<usize>) -> OwnedElements<'_> {
        let of_flat = place.first + range.start..place.first + range.end;
        OwnedElements {
            first: range.start,
            view: self.elements_of(&self.layout.flat_parameters[place.flat], of_flat),
        }
    }

    /// Returns the elements of a flat parameter that are in memory.
    fn kept(&self, flat: &FlatParameter) -> Range<usize> {
        match self.extent {
            _ if flat.is_on_disk => 0..0,
            Extent::Whole => 0..flat.elements,
            Extent::Own => flat.own.clone(),
        }
    }

    fn elements_of(&self, flat: &FlatParameter, elements: Range<usize>) -> View<'_> {
        let count = elements.len();
        let bytes = self.bytes_of(flat, elements);
        self.units[flat.unit].view(self.dtype, bytes.start, [count])
    }

    /// Returns the byte range of elements of a flat parameter in its unit's buffer.
    fn bytes_of(&self, flat: &FlatParameter, elements: Range<usize>) -> Range<usize> {
        let kept = self.kept(flat);
        assert!(
            kept.start <= elements.start && elements.end <= kept.end,
            "elements {elements:?} of a flat of which the store has {kept:?}"
        );
        let byte = |element: usize| (flat.start + element - kept.start) * self.dtype.size_bytes();
        byte(elements.start)..byte(elements.end)
    }
}

/// Writes f32 values to `view`, rounded to its type.
pub(crate) fn write_rounded(view: View<'_>, values: &[f32]) {
    match view.dtype() {
        DType::BF16 => view.write(&values.iter().copied().map(bf16::from_f32).collect::<Vec<_>>()),
        DType::F16 => view.write(&values.iter().copied().map(f16::from_f32).collect::<Vec<_>>()),
        _ => view.write(values),
    }
}
