//! Weights in the type of the model's files. Without a memory limit, a tensor that the model reads as it is stored stays in the
//! mapped file, so that its pages are read at their first use and belong to the page cache; the others are converted into memory.
//! Quantized matrices stay quantized, whatever the type of the other weights: in the mapped file, or repacked into blocks. With a limit, weights are read into memory or streamed
//! ([`HeldUnits`]), and quantized ones are decoded.

use std::{
    cell::{Ref, RefCell},
    collections::HashMap,
    path::Path,
};

use half::{bf16, f16, vec::HalfFloatVecExt};
use lockstep_checkpoint::{
    CheckpointError, ModelDirectory, RowOrder, StoredParameter, WeightQuantization, encode_blocks,
    gguf::StoredElements, is_quantizable,
};
use lockstep_engine::{EngineError, HeldWeights, StateStore, WeightSource, Weights};
use lockstep_plan::{BlockFormat, DType, MemoryCategory, ParameterId, ParameterRecord};
use lockstep_tensor::{Arena, BlockMatrix, DiskTraffic, Kernels, MappedTensors, Matrix, Shape, Tensor, View};

use crate::{
    InferError,
    device_map::{ModelParts, WeightPlace},
    held::HeldUnits,
    unit_layout::UnitLayout,
};

/// The weights of a model.
pub(crate) struct ModelWeights {
    /// The parameters that are converted into memory.
    pub(crate) converted: StateStore,
    files: Vec<MappedTensors>,
    /// Quantized parameters that are stored in another layout than kernels read.
    repacked: Vec<Tensor>,
    /// Places of the parameters that stay as they are stored, by [`ParameterId`].
    stored: Vec<Option<StoredPlace>>,
    /// Bytes of the parameters in files, tied ones once.
    pub(crate) in_place_bytes: usize,
    /// Resident and streamed weights; `None` without a memory limit.
    held: Option<RefCell<HeldUnits>>,
}

/// Place of a parameter that stays as it is stored.
#[derive(Debug, Clone, Copy)]
struct StoredPlace {
    source: Source,
    stored: StoredElements,
    shape: Shape,
}

/// Memory of a stored parameter.
#[derive(Debug, Clone, Copy)]
enum Source {
    /// A file, and the byte of the first element.
    File { file: usize, offset: usize },
    /// Index among the repacked parameters.
    Repacked(usize),
}

/// Mapped files by path.
#[derive(Default)]
struct Files<'p> {
    files: Vec<MappedTensors>,
    numbers: HashMap<&'p Path, usize>,
}

impl<'p> Files<'p> {
    /// Returns the index of a file, which is mapped at its first use.
    fn index(&mut self, path: &'p Path) -> Result<usize, InferError> {
        if let Some(&file) = self.numbers.get(path) {
            return Ok(file);
        }
        let map = MappedTensors::open(path);
        self.files.push(map.map_err(|source| InferError::Map { path: path.to_owned(), source })?);
        self.numbers.insert(path, self.files.len() - 1);
        Ok(self.files.len() - 1)
    }
}

impl ModelWeights {
    /// Loads the weights of `records` in type `dtype`, the matrices of linear layers quantized if that is asked for.
    ///
    /// # Errors
    /// If a file is damaged or cannot be mapped, or memory runs out.
    pub(crate) fn load(
        directory: &ModelDirectory,
        records: &[ParameterRecord],
        (dtype, quantization): (DType, Option<WeightQuantization>),
        arena: &Arena,
    ) -> Result<Self, InferError> {
        let ids: HashMap<&str, usize> =
            records.iter().enumerate().map(|(id, record)| (record.name.as_str(), id)).collect();
        let (mut files, mut repacked) = (Files::default(), Vec::new());
        let mut stored: Vec<Option<StoredPlace>> = vec![None; records.len()];
        let parameters = directory.stored_parameters();
        for parameter in &parameters {
            let Some(&id) = ids.get(parameter.name) else { continue };
            let shape = Shape::from(records[id].shape.as_slice());
            if parameter.elements == shape.elements() && stays_stored(parameter, dtype, shape) {
                let file = files.index(parameter.file)?;
                stored[id] = place(parameter, shape, (file, &files.files[file]), &mut repacked, arena)?;
            }
        }
        for parameter in directory.packed_parameters() {
            let Some(&id) = ids.get(parameter.name) else { continue };
            if records[id].shape != parameter.shape {
                continue;
            }
            let mut blocks = vec![0; parameter.bytes()];
            parameter.pack(&mut blocks)?;
            repacked.push(Tensor::from_slice(arena, [blocks.len()], &blocks, MemoryCategory::Parameters)?);
            let (source, shape) = (Source::Repacked(repacked.len() - 1), Shape::from(parameter.shape));
            stored[id] =
                Some(StoredPlace { source, stored: StoredElements::Blocks(parameter.format), shape });
        }
        if let Some(quantization) = quantization {
            quantize(directory, records, quantization, (&mut stored, &mut repacked), arena)?;
        }
        let is_converted: Vec<bool> = stored.iter().map(Option::is_none).collect();
        let converted = convert(directory, records, &is_converted, dtype, arena)?;
        let in_files = stored.iter().flatten().filter(|place| matches!(place.source, Source::File { .. }));
        let in_place_bytes = in_files.map(StoredPlace::bytes).sum();
        for (id, record) in records.iter().enumerate() {
            if let Some(table) = record.tie {
                stored[id] = stored[table.0]
                    .map(|place| StoredPlace { shape: Shape::from(record.shape.as_slice()), ..place });
            }
        }
        Ok(Self { converted, files: files.files, repacked, stored, in_place_bytes, held: None })
    }

    /// Loads the weights of a model, of which `resident` says for each parameter whether it stays in memory. Those of the
    /// first unit that do not are mapped, since only rows of their tables are read; those of other units are streamed through
    /// `buffers` buffers.
    ///
    /// # Errors
    /// As for [`ModelWeights::load`].
    ///
    /// # Panics
    /// If a parameter that must be made is not resident.
    pub(crate) fn load_placed(
        directory: &ModelDirectory,
        parts: ModelParts,
        (resident, buffers): (&[bool], usize),
        arena: &Arena,
        kernels: &dyn Kernels,
    ) -> Result<Self, InferError> {
        let dtype = parts.dtype();
        let mut is_made = vec![false; parts.records.len()];
        parts.made().for_each(|id| is_made[id.0] = true);
        assert!(
            is_made.iter().zip(resident).all(|(is_made, is_resident)| *is_resident || !is_made),
            "only weights that are stored as they are used are on disk"
        );
        let converted = convert(directory, &parts.records, &is_made, dtype, arena)?;
        let (files, stored) = Self::map_tables(&parts, resident)?;
        let in_place_bytes =
            stored.iter().flatten().map(|place| place.shape.elements() * dtype.size_bytes()).sum();
        let layouts = UnitLayout::of_units(&parts, resident);
        let held = HeldUnits::load(parts, layouts, buffers, arena, kernels)?;
        let held = Some(RefCell::new(held));
        Ok(Self { converted, files, repacked: Vec::new(), stored, in_place_bytes, held })
    }

    /// Maps the files of the tables that are not resident.
    fn map_tables(
        parts: &ModelParts,
        resident: &[bool],
    ) -> Result<(Vec<MappedTensors>, Vec<Option<StoredPlace>>), InferError> {
        let (mut files, mut stored) = (Files::default(), vec![None; parts.records.len()]);
        for &id in parts.units[0].iter().filter(|id| !resident[id.0]) {
            let WeightPlace::Stored { file, offset, .. } = parts.place(id) else { continue };
            let path = &parts.files[file];
            let file = files.index(path)?;
            let advised = files.files[file].for_lookups();
            advised.map_err(|source| InferError::Map { path: path.clone(), source })?;
            let shape = Shape::from(parts.records[id.0].shape.as_slice());
            let source = Source::File { file, offset: offset as usize };
            let elements = StoredElements::Dense(parts.dtype());
            stored[id.0] = Some(StoredPlace { source, stored: elements, shape });
        }
        Ok((files.files, stored))
    }

    /// Waits until the weights of `unit` can be read, and returns those that are not in a mapped file or in the store.
    ///
    /// # Errors
    /// If the disk fails.
    ///
    /// # Panics
    /// If the weights of another unit are still borrowed.
    pub(crate) fn begin(
        &self,
        kernels: &dyn Kernels,
        unit: usize,
    ) -> Result<Option<Ref<'_, HeldUnits>>, EngineError> {
        let Some(held) = &self.held else { return Ok(None) };
        held.borrow_mut().begin(kernels, unit)?;
        Ok(Some(held.borrow()))
    }

    /// Returns the weights that kernels read, with those that [`ModelWeights::begin`] and [`ModelWeights::in_place`] returned.
    pub(crate) fn weights<'a>(
        &'a self,
        in_place: &'a [Option<Matrix<'a>>],
        held: Option<&'a HeldUnits>,
    ) -> Weights<'a> {
        let held = held.map(|held| held as &dyn HeldWeights);
        Weights::with_in_place(&self.converted, in_place).with_held(held)
    }

    /// Returns the traffic of the disk since the last call.
    pub(crate) fn take_traffic(&self) -> DiskTraffic {
        self.held.as_ref().map(|held| held.borrow_mut().take_traffic()).unwrap_or_default()
    }

    /// Returns the bytes of the parameters in memory.
    pub(crate) fn converted_bytes(&self) -> usize {
        let repacked: usize = self.repacked.iter().map(|tensor| tensor.view().elements()).sum();
        self.converted.len_bytes() + repacked
    }

    /// Returns the parameters that stay as they are stored, by [`ParameterId`].
    pub(crate) fn in_place(&self) -> Vec<Option<Matrix<'_>>> {
        self.stored.iter().map(|place| self.matrix(place.as_ref()?)).collect()
    }

    fn matrix(&self, place: &StoredPlace) -> Option<Matrix<'_>> {
        let bytes = |dtype, shape: Shape| match place.source {
            Source::File { file, offset } => self.files[file].view(dtype, offset, shape),
            Source::Repacked(index) => Some(self.repacked[index].view()),
        };
        match place.stored {
            StoredElements::Dense(dtype) => bytes(dtype, place.shape).map(Matrix::Dense),
            StoredElements::Blocks(format) => {
                let bytes = bytes(DType::U8, Shape::from([place.bytes()]))?;
                Some(Matrix::Blocks(BlockMatrix::new(format, bytes, place.shape.as_matrix().into())))
            }
        }
    }
}

impl StoredPlace {
    /// Returns the bytes of the elements.
    fn bytes(&self) -> usize {
        let (rows, columns) = self.shape.as_matrix();
        self.stored.row_bytes(columns).map_or(0, |row| row * rows)
    }
}

/// Quantizes the matrices of linear layers that are numbers, one at a time.
fn quantize(
    directory: &ModelDirectory,
    records: &[ParameterRecord],
    quantization: WeightQuantization,
    (stored, repacked): (&mut [Option<StoredPlace>], &mut Vec<Tensor>),
    arena: &Arena,
) -> Result<(), InferError> {
    let mut formats: HashMap<&str, (usize, BlockFormat)> = HashMap::new();
    for (id, record) in records.iter().enumerate() {
        let is_number = stored[id].is_none_or(|place| matches!(place.stored, StoredElements::Dense(_)));
        if record.tie.is_none()
            && is_number
            && is_quantizable(&record.name, &record.shape)
            && let Some(format) = quantization.format(record.shape[1])
        {
            formats.insert(record.name.as_str(), (id, format));
        }
    }
    directory.for_each_selected(
        |name| formats.contains_key(name),
        |name, values| -> Result<(), InferError> {
            let (id, format) = formats[name];
            let shape = Shape::from(records[id].shape.as_slice());
            let place = StoredPlace {
                source: Source::Repacked(repacked.len()),
                stored: StoredElements::Blocks(format),
                shape,
            };
            let blocks = encode_blocks(format, values);
            repacked.push(Tensor::from_slice(arena, [blocks.len()], &blocks, MemoryCategory::Parameters)?);
            stored[id] = Some(place);
            Ok(())
        },
    )
}

/// Reads parameters into memory in type `dtype`: those that `is_converted` is true for.
fn convert(
    directory: &ModelDirectory,
    records: &[ParameterRecord],
    is_converted: &[bool],
    dtype: DType,
    arena: &Arena,
) -> Result<StateStore, InferError> {
    let category = MemoryCategory::Parameters;
    let store = StateStore::zeros_of_selected(arena, records, |id| is_converted[id], dtype, category)?;
    let converted = records.iter().enumerate().filter(|(id, _)| is_converted[*id]);
    let ids: HashMap<&str, ParameterId> =
        converted.map(|(id, record)| (record.name.as_str(), ParameterId(id))).collect();
    if !ids.is_empty() {
        directory.for_each_selected(
            |name| ids.contains_key(name),
            |name, values| -> Result<(), CheckpointError> {
                write(store.view(ids[name]), values);
                Ok(())
            },
        )?;
    }
    Ok(store)
}

/// Returns true if the kernels of a model of type `dtype` read a parameter as it is stored.
fn stays_stored(parameter: &StoredParameter<'_>, dtype: DType, shape: Shape) -> bool {
    match parameter.stored {
        StoredElements::Dense(stored) => stored == dtype && parameter.order == RowOrder::Same,
        StoredElements::Blocks(_) => shape.dims().len() == 2,
    }
}

/// Returns the place of a parameter; `None` if it is not aligned to its elements. One with rows in another order is copied.
fn place(
    parameter: &StoredParameter<'_>,
    shape: Shape,
    (file, map): (usize, &MappedTensors),
    repacked: &mut Vec<Tensor>,
    arena: &Arena,
) -> Result<Option<StoredPlace>, InferError> {
    let (stored, offset) = (parameter.stored, parameter.offset);
    let mut place = StoredPlace { source: Source::File { file, offset }, stored, shape };
    let view = match stored {
        StoredElements::Dense(dtype) => map.view(dtype, offset, shape),
        StoredElements::Blocks(_) => map.view(DType::U8, offset, [place.bytes()]),
    };
    let Some(view) = view else { return Ok(None) };
    if parameter.order != RowOrder::Same {
        let rows = shape.as_matrix().0;
        let row_bytes = place.bytes() / rows.max(1);
        let (bytes, mut ordered) = (view.to_vec::<u8>(), vec![0; place.bytes()]);
        for (row, ordered) in ordered.chunks_exact_mut(row_bytes.max(1)).enumerate() {
            ordered.copy_from_slice(&bytes[parameter.order.stored_row(row) * row_bytes..][..row_bytes]);
        }
        let category = MemoryCategory::Parameters;
        repacked.push(Tensor::from_slice(arena, [ordered.len()], &ordered, category)?);
        place.source = Source::Repacked(repacked.len() - 1);
    }
    Ok(Some(place))
}

/// Weights of a model as a runner asks for them.
pub(crate) struct RunnerWeights<'m> {
    weights: &'m ModelWeights,
    in_place: Vec<Option<Matrix<'m>>>,
    held: Option<Ref<'m, HeldUnits>>,
}

impl<'m> RunnerWeights<'m> {
    pub(crate) fn new(weights: &'m ModelWeights) -> Self {
        Self { weights, in_place: weights.in_place(), held: None }
    }
}

impl WeightSource for RunnerWeights<'_> {
    fn make_ready(&mut self, queue: &dyn Kernels, unit: usize) -> Result<(), EngineError> {
        // The weights of the unit before are no longer read.
        self.held = None;
        self.held = self.weights.begin(queue, unit)?;
        Ok(())
    }

    fn weights(&self) -> Weights<'_> {
        self.weights.weights(&self.in_place, self.held.as_deref())
    }
}

/// Writes values to a parameter, rounded to its type.
fn write(parameter: View<'_>, values: &[f32]) {
    match parameter.dtype() {
        DType::BF16 => parameter.write(&Vec::<bf16>::from_f32_slice(values)),
        DType::F16 => parameter.write(&Vec::<f16>::from_f32_slice(values)),
        _ => parameter.write(values),
    }
}
