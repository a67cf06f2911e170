//! Flat buffers: one for each unit, holding one number per parameter element (weights, gradients, moments).
//!
//! Each parameter starts at a multiple of 1,024 elements, so that shards can be cut at block borders and the
//! gradient norm, a sum over such blocks, does not depend on the cut. Those whose gradients are summed over the same
//! ranks stand together.

use std::ops::Range;

use half::{bf16, f16};
use lockstep_graph::{ParameterIndex, Parameters};
use lockstep_plan::{DType, MemoryCategory, ParameterId, ParameterRecord};
use lockstep_tensor::{Arena, Buffer, Kernels, Shape, TensorError, View, Write};

use crate::{Gradients, groups::Summing};

/// Parameters start at multiples of this many elements.
const ALIGNMENT_ELEMENTS: usize = 1024;

/// One tensor for each parameter of a model, in one flat buffer per unit. A tied parameter is a view of the one it is
/// tied to.
#[derive(Debug)]
pub struct FlatStore {
    dtype: DType,
    units: Vec<Buffer>,
    /// By [`ParameterId`]; parameters that are left out have none.
    places: Vec<Option<Place>>,
}

#[derive(Debug, Clone, Copy)]
struct Place {
    unit: usize,
    offset_bytes: usize,
    shape: Shape,
}

impl Place {
    fn is_same(&self, other: &Self) -> bool {
        self.unit == other.unit && self.offset_bytes == other.offset_bytes
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
        Self::zeros_where(arena, records, dtype, category, |_| true)
    }

    /// Zeros for the parameters that `keeps` says; that may be none.
    ///
    /// # Errors
    /// [`TensorError::OutOfMemory`].
    pub fn zeros_where(
        arena: &Arena,
        records: &[ParameterRecord],
        dtype: DType,
        category: MemoryCategory,
        keeps: impl Fn(&ParameterRecord) -> bool,
    ) -> Result<Self, TensorError> {
        let unit_count = records.iter().map(|record| record.unit + 1).max().unwrap_or(0);
        let mut unit_elements = vec![0; unit_count];
        let mut places: Vec<Option<Place>> = vec![None; records.len()];
        let mut kept: Vec<usize> = (0..records.len())
            .filter(|&index| records[index].tie.is_none() && keeps(&records[index]))
            .collect();
        kept.sort_by_key(|&index| Summing::of(&records[index].share));
        for index in kept {
            let record = &records[index];
            let shape = Shape::from(record.local_shape().as_slice());
            let offset = &mut unit_elements[record.unit];
            let offset_bytes = *offset * dtype.size_bytes();
            places[index] = Some(Place { unit: record.unit, offset_bytes, shape });
            *offset += shape.elements().next_multiple_of(ALIGNMENT_ELEMENTS);
        }
        for (index, record) in records.iter().enumerate() {
            if let Some(target) = record.tie {
                places[index] = places[target.0];
            }
        }
        let total_elements: usize = unit_elements.iter().sum();
        arena.require(total_elements.saturating_mul(dtype.size_bytes()), category)?;
        let units = unit_elements
            .iter()
            .map(|&elements| arena.allocate_zeroed(elements * dtype.size_bytes(), category))
            .collect::<Result<_, _>>()?;
        Ok(Self { dtype, units, places })
    }

    /// Whether it keeps no parameter.
    pub fn is_empty(&self) -> bool {
        self.places.iter().all(Option::is_none)
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
        Ok(Self { dtype: self.dtype, units: units.collect::<Result<_, _>>()?, places: self.places.clone() })
    }

    /// The unit in whose buffer a parameter lies, and its bytes there, padding included; none if it is not kept.
    pub(crate) fn place_of(&self, id: ParameterId) -> Option<(usize, Range<usize>)> {
        let place = self.places[id.0]?;
        let elements = place.shape.elements().next_multiple_of(ALIGNMENT_ELEMENTS);
        let end = place.offset_bytes + elements * self.dtype.size_bytes();
        Some((place.unit, place.offset_bytes..end))
    }

    /// The buffer of a unit, to lend from.
    pub(crate) fn unit_mut(&mut self, unit: usize) -> &mut Buffer {
        &mut self.units[unit]
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
            (self.dtype, self.units.len()),
            (other.dtype, other.units.len()),
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
    /// If the store has none for it.
    pub fn view(&self, id: ParameterId) -> View<'_> {
        self.get(id).expect("the store has a tensor for each parameter that it is asked for")
    }

    /// A parameter's tensor, if the store has one for it.
    pub fn get(&self, id: ParameterId) -> Option<View<'_>> {
        let place = self.places[id.0]?;
        Some(self.units[place.unit].view(self.dtype, place.offset_bytes, place.shape))
    }

    /// Replaces the elements from `start` on of a parameter's tensor, rounded to the store's type.
    ///
    /// # Panics
    /// If the store has none for it, or it has fewer elements.
    pub fn write_part(&self, id: ParameterId, start: usize, values: &[f32]) {
        let whole = self.view(id);
        let view = whole.reshape([whole.elements()]).rows(start..start + values.len());
        match self.dtype {
            DType::BF16 => view.copy_from(&values.iter().copied().map(bf16::from_f32).collect::<Vec<_>>()),
            DType::F16 => view.copy_from(&values.iter().copied().map(f16::from_f32).collect::<Vec<_>>()),
            _ => view.copy_from(values),
        }
    }

    /// A parameter's elements as f32, which holds each of them exactly.
    pub(crate) fn to_f32(&self, id: ParameterId) -> Vec<f32> {
        let view = self.view(id);
        match self.dtype {
            DType::BF16 => view.to_vec::<bf16>().into_iter().map(bf16::to_f32).collect(),
            DType::F16 => view.to_vec::<f16>().into_iter().map(f16::to_f32).collect(),
            _ => view.to_vec(),
        }
    }

    /// The bytes of all parameters that own their storage here, without a copy.
    pub fn tensors(&mut self) -> Vec<(ParameterId, &[u8])> {
        let size = self.dtype.size_bytes();
        let units: Vec<&[u8]> = self.units.iter_mut().map(|unit| &*unit.bytes_mut()).collect();
        let mut tensors: Vec<(ParameterId, &[u8])> = Vec::with_capacity(self.places.len());
        for (index, place) in self.places.iter().enumerate() {
            let Some(place) = place else { continue };
            let bytes = &units[place.unit][place.offset_bytes..][..place.shape.elements() * size];
            // A shared place was listed under the parameter that owns it.
            if !self.places[..index].iter().flatten().any(|earlier| earlier.is_same(place)) {
                tensors.push((ParameterId(index), bytes));
            }
        }
        tensors
    }
}

/// The weights that kernels read.
#[derive(Debug, Clone, Copy)]
pub struct Weights<'a> {
    /// Those that are trained.
    pub trained: &'a FlatStore,
    /// Those that are not, if there are any.
    pub frozen: Option<&'a FlatStore>,
    /// The former in full precision, if kernels read another.
    pub exact: Option<&'a FlatStore>,
}

impl<'a> Weights<'a> {
    fn view(&self, id: ParameterId) -> View<'a> {
        let frozen = || self.frozen.and_then(|store| store.get(id));
        self.trained.get(id).or_else(frozen).expect("a parameter is trained or frozen")
    }
}

impl<'a> From<&'a FlatStore> for Weights<'a> {
    /// Weights in a store that holds all.
    fn from(trained: &'a FlatStore) -> Self {
        Self { trained, frozen: None, exact: None }
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
