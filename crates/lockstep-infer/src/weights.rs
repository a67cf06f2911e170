//! Weights in the type of the model's files. A tensor that the model reads as it is stored stays in the mapped file, so that its
//! pages are read at their first use and belong to the page cache; the others are converted into memory. Quantized matrices stay
//! quantized, whatever the type of the other weights.

use std::{collections::HashMap, path::Path};

use half::{bf16, f16, vec::HalfFloatVecExt};
use lockstep_checkpoint::{CheckpointError, ModelDirectory, RowOrder, StoredParameter, gguf::StoredElements};
use lockstep_engine::StateStore;
use lockstep_plan::{DType, MemoryCategory, ParameterId, ParameterRecord};
use lockstep_tensor::{Arena, BlockMatrix, MappedTensors, Matrix, Shape, Tensor, View};

use crate::InferError;

/// The weights of a model.
pub(crate) struct ModelWeights {
    /// The parameters that are converted into memory.
    pub(crate) converted: StateStore,
    files: Vec<MappedTensors>,
    /// Quantized parameters whose rows are stored in another order than the model's.
    reordered: Vec<Tensor>,
    /// Places of the parameters that stay as they are stored, by [`ParameterId`].
    stored: Vec<Option<StoredPlace>>,
    /// Bytes of the parameters in files, tied ones once.
    pub(crate) in_place_bytes: usize,
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
    /// Index among the reordered parameters.
    Reordered(usize),
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
    /// Loads the weights of `records` in type `dtype`.
    ///
    /// # Errors
    /// If a file is damaged or cannot be mapped, or memory runs out.
    pub(crate) fn load(
        directory: &ModelDirectory,
        records: &[ParameterRecord],
        dtype: DType,
        arena: &Arena,
    ) -> Result<Self, InferError> {
        let ids: HashMap<&str, usize> =
            records.iter().enumerate().map(|(id, record)| (record.name.as_str(), id)).collect();
        let (mut files, mut reordered) = (Files::default(), Vec::new());
        let mut stored: Vec<Option<StoredPlace>> = vec![None; records.len()];
        let parameters = directory.stored_parameters();
        for parameter in &parameters {
            let Some(&id) = ids.get(parameter.name) else { continue };
            let shape = Shape::from(records[id].shape.as_slice());
            if parameter.elements == shape.elements() && stays_stored(parameter, dtype, shape) {
                let file = files.index(parameter.file)?;
                stored[id] = place(parameter, shape, (file, &files.files[file]), &mut reordered, arena)?;
            }
        }
        let is_converted = |id: usize| stored[id].is_none();
        let category = MemoryCategory::Parameters;
        let converted = StateStore::zeros_of_selected(arena, records, is_converted, dtype, category)?;
        let is_selected = |name: &str| ids.get(name).is_some_and(|&id| is_converted(id));
        directory.for_each_selected(is_selected, |name, values| -> Result<(), CheckpointError> {
            write(converted.view(ParameterId(ids[name])), values);
            Ok(())
        })?;
        let in_files = stored.iter().flatten().filter(|place| matches!(place.source, Source::File { .. }));
        let in_place_bytes = in_files.map(StoredPlace::bytes).sum();
        for (id, record) in records.iter().enumerate() {
            if let Some(table) = record.tie {
                stored[id] = stored[table.0]
                    .map(|place| StoredPlace { shape: Shape::from(record.shape.as_slice()), ..place });
            }
        }
        Ok(Self { converted, files: files.files, reordered, stored, in_place_bytes })
    }

    /// Returns the bytes of the parameters in memory.
    pub(crate) fn converted_bytes(&self) -> usize {
        let reordered: usize = self.reordered.iter().map(|tensor| tensor.view().elements()).sum();
        self.converted.len_bytes() + reordered
    }

    /// Returns the parameters that stay as they are stored, by [`ParameterId`].
    pub(crate) fn in_place(&self) -> Vec<Option<Matrix<'_>>> {
        self.stored.iter().map(|place| self.matrix(place.as_ref()?)).collect()
    }

    fn matrix(&self, place: &StoredPlace) -> Option<Matrix<'_>> {
        let bytes = |dtype, shape: Shape| match place.source {
            Source::File { file, offset } => self.files[file].view(dtype, offset, shape),
            Source::Reordered(index) => Some(self.reordered[index].view()),
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
    reordered: &mut Vec<Tensor>,
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
        reordered.push(Tensor::from_slice(arena, [ordered.len()], &ordered, category)?);
        place.source = Source::Reordered(reordered.len() - 1);
    }
    Ok(Some(place))
}

/// Writes values to a parameter, rounded to its type.
fn write(parameter: View<'_>, values: &[f32]) {
    match parameter.dtype() {
        DType::BF16 => parameter.write(&Vec::<bf16>::from_f32_slice(values)),
        DType::F16 => parameter.write(&Vec::<f16>::from_f32_slice(values)),
        _ => parameter.write(values),
    }
}
