//! Weights in the type of the model's files. Without a memory limit, a tensor that the model reads as it is stored stays in the
//! mapped file, so that its pages are read at their first use and belong to the page cache; the others are converted into memory.
//! With a limit, weights are read into memory or streamed ([`HeldUnits`]).

use std::{
    cell::{Ref, RefCell},
    collections::HashMap,
    path::Path,
};

use half::{bf16, f16, vec::HalfFloatVecExt};
use lockstep_checkpoint::{CheckpointError, ModelDirectory};
use lockstep_engine::{EngineError, HeldWeights, StateStore, WeightSource, Weights};
use lockstep_plan::{DType, MemoryCategory, ParameterId, ParameterRecord};
use lockstep_tensor::{Arena, DiskTraffic, Kernels, MappedTensors, Shape, View};

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
    /// Places of the parameters that stay in a file, by [`ParameterId`].
    stored: Vec<Option<StoredPlace>>,
    /// Bytes of these parameters, tied ones once.
    pub(crate) in_place_bytes: usize,
    /// Resident and streamed weights; `None` without a memory limit.
    held: Option<RefCell<HeldUnits>>,
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
        let in_place_bytes = in_place * dtype.size_bytes();
        Ok(Self { converted, files, stored, in_place_bytes, held: None })
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
        let made: Vec<ParameterId> = parts.made().collect();
        assert!(
            made.iter().all(|id| resident[id.0]),
            "only weights that are stored as they are used are on disk"
        );
        let category = MemoryCategory::Parameters;
        let is_made = |id: usize| made.contains(&ParameterId(id));
        let converted = StateStore::zeros_of_selected(arena, &parts.records, is_made, dtype, category)?;
        if !made.is_empty() {
            let ids: HashMap<&str, ParameterId> =
                made.iter().map(|&id| (parts.records[id.0].name.as_str(), id)).collect();
            directory.for_each_selected(
                |name| ids.contains_key(name),
                |name, values| -> Result<(), CheckpointError> {
                    write(converted.view(ids[name]), values);
                    Ok(())
                },
            )?;
        }
        let (files, stored) = Self::map_tables(&parts, resident)?;
        let in_place_bytes =
            stored.iter().flatten().map(|place| place.shape.elements() * dtype.size_bytes()).sum();
        let layouts = UnitLayout::of_units(&parts, resident);
        let held = HeldUnits::load(parts, layouts, buffers, arena, kernels)?;
        Ok(Self { converted, files, stored, in_place_bytes, held: Some(RefCell::new(held)) })
    }

    /// Maps the files of the tables that are not resident.
    fn map_tables(
        parts: &ModelParts,
        resident: &[bool],
    ) -> Result<(Vec<MappedTensors>, Vec<Option<StoredPlace>>), InferError> {
        let (mut files, mut stored) = (Vec::new(), vec![None; parts.records.len()]);
        let mut numbers = HashMap::<usize, usize>::new();
        for &id in parts.units[0].iter().filter(|id| !resident[id.0]) {
            let WeightPlace::Stored { file, offset, .. } = parts.place(id) else { continue };
            let number = match numbers.get(&file) {
                Some(&number) => number,
                None => {
                    let path = &parts.files[file];
                    let map = MappedTensors::open(path).and_then(|map| map.for_lookups().map(|()| map));
                    files.push(map.map_err(|source| InferError::Map { path: path.clone(), source })?);
                    numbers.insert(file, files.len() - 1);
                    files.len() - 1
                }
            };
            let shape = Shape::from(parts.records[id.0].shape.as_slice());
            stored[id.0] = Some(StoredPlace { file: number, offset: offset as usize, shape });
        }
        Ok((files, stored))
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
        in_place: &'a [Option<View<'a>>],
        held: Option<&'a HeldUnits>,
    ) -> Weights<'a> {
        let held = held.map(|held| held as &dyn HeldWeights);
        Weights::with_in_place(&self.converted, in_place).with_held(held)
    }

    /// Returns the traffic of the disk since the last call.
    pub(crate) fn take_traffic(&self) -> DiskTraffic {
        self.held.as_ref().map(|held| held.borrow_mut().take_traffic()).unwrap_or_default()
    }

    /// Returns the parameters that stay in a file, by [`ParameterId`].
    pub(crate) fn in_place(&self) -> Vec<Option<View<'_>>> {
        let dtype = self.converted.dtype();
        let view = |place: &StoredPlace| self.files[place.file].view(dtype, place.offset, place.shape);
        self.stored.iter().map(|place| place.as_ref().and_then(view)).collect()
    }
}

/// Weights of a model as a runner asks for them.
pub(crate) struct RunnerWeights<'m> {
    weights: &'m ModelWeights,
    in_place: Vec<Option<View<'m>>>,
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
