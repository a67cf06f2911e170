//! Weights in the type of the model's files. A tensor that the model reads as it is stored stays in the mapped file, so that its
//! pages are read at their first use and belong to the page cache; the others are converted into memory.

use std::{collections::HashMap, path::Path};

use half::{bf16, f16, vec::HalfFloatVecExt};
use lockstep_checkpoint::{CheckpointError, ModelDirectory};
use lockstep_engine::StateStore;
use lockstep_plan::{DType, MemoryCategory, ParameterId, ParameterRecord};
use lockstep_tensor::{Arena, MappedTensors, Shape, View};

use crate::InferError;

/// The weights of a model.
pub(crate) struct ModelWeights {
    /// The parameters that are converted into memory.
    pub(crate) converted: StateStore,
    files: Vec<MappedTensors>,
    /// Places of the parameters that stay in a file, by [`ParameterId`].
    stored: Vec<Option<StoredPlace>>,
    /// Bytes of these parameters, tied ones once.
    pub(crate) in_place_bytes: usize,
}

/// Place of a parameter in a mapped file.
#[derive(Debug, Clone, Copy)]
struct StoredPlace {
    file: usize,
    /// Byte of the first element.
    offset: usize,
    shape: Shape,
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
        let (mut files, mut numbers) = (Vec::new(), HashMap::<&Path, usize>::new());
        let mut stored: Vec<Option<StoredPlace>> = vec![None; records.len()];
        let parameters = directory.stored_parameters();
        for parameter in parameters.iter().filter(|parameter| parameter.dtype == dtype) {
            let Some(&id) = ids.get(parameter.name) else { continue };
            let file = match numbers.get(parameter.file) {
                Some(&file) => file,
                None => {
                    let map = MappedTensors::open(parameter.file);
                    let path = parameter.file.to_owned();
                    files.push(map.map_err(|source| InferError::Map { path, source })?);
                    numbers.insert(parameter.file, files.len() - 1);
                    files.len() - 1
                }
            };
            let (offset, shape) = (parameter.offset, Shape::from(records[id].shape.as_slice()));
            // A tensor that is not aligned to its elements is converted.
            if parameter.elements == shape.elements() && files[file].view(dtype, offset, shape).is_some() {
                stored[id] = Some(StoredPlace { file, offset, shape });
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
        let in_place = stored.iter().flatten().map(|place| place.shape.elements()).sum::<usize>();
        for (id, record) in records.iter().enumerate() {
            if let Some(table) = record.tie {
                stored[id] = stored[table.0]
                    .map(|place| StoredPlace { shape: Shape::from(record.shape.as_slice()), ..place });
            }
        }
        Ok(Self { converted, files, stored, in_place_bytes: in_place * dtype.size_bytes() })
    }

    /// Returns the parameters that stay in a file, by [`ParameterId`].
    pub(crate) fn in_place(&self) -> Vec<Option<View<'_>>> {
        let dtype = self.converted.dtype();
        let view = |place: &StoredPlace| self.files[place.file].view(dtype, place.offset, place.shape);
        self.stored.iter().map(|place| place.as_ref().and_then(view)).collect()
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
