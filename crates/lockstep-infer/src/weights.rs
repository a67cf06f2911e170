//! Weights in the type of the model's files. Without a memory limit, a tensor that the model reads as it is stored stays in the
//! mapped file, so that its pages are read at their first use and belong to the page cache; the others are converted into memory. Of a
//! parameter that is sharded over ranks, each maps or copies its own bytes alone.
//! Quantized matrices stay quantized, whatever the type of the other weights: in the mapped file, or repacked into blocks. With a limit,
//! weights are read into memory or streamed ([`HeldUnits`]).

use std::{
    borrow::Cow,
    cell::{Ref, RefCell},
    collections::{BTreeMap, HashMap},
    ops::Range,
    path::Path,
};

use half::{bf16, f16, vec::HalfFloatVecExt};
use lockstep_checkpoint::{
    CheckpointError, ModelDirectory, PackedParameter, RowOrder, StoredParameter, encode_blocks,
    gguf::StoredElements, round_to_blocks,
};
use lockstep_engine::{EngineError, HeldWeights, StateStore, WeightSource, Weights};
use lockstep_plan::{BlockFormat, DType, MemoryCategory, ParameterId, ParameterRecord};
use lockstep_tensor::{Arena, BlockLayout, Buffer, DiskTraffic, Kernels, MappedTensors, Matrix, Shape, View};

use crate::{
    InferError,
    device_map::{ModelParts, WeightPlace},
    held::{HeldUnits, StreamingRoom},
    stored_weights::{Source, StoredPlace, StoredShard, byte_ranges, cast_pieces, copy},
    weight_form::{WeightForm, matrix_of},
};

/// The weights of a model.
pub(crate) struct ModelWeights {
    /// The parameters that are converted into memory.
    pub(crate) converted: StateStore,
    files: Vec<MappedTensors>,
    /// Parameters that are copied as they are stored: shards that are not contiguous in their files, and quantized matrices whose
    /// rows are stored in another order than the model's.
    copied: Vec<Buffer>,
    /// Places of the parameters that stay as they are stored, by [`ParameterId`].
    stored: Vec<Option<StoredPlace>>,
    /// Bytes of the parameters in files, tied ones once.
    pub(crate) in_place_bytes: usize,
    /// Resident and streamed weights; `None` without a memory limit.
    held: Option<RefCell<HeldUnits>>,
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
        self.files.push(map(path)?);
        self.numbers.insert(path, self.files.len() - 1);
        Ok(self.files.len() - 1)
    }

    /// Returns a file that [`Files::index`] has mapped.
    fn map(&self, path: &Path) -> &MappedTensors {
        &self.files[self.numbers[path]]
    }
}

fn map(path: &Path) -> Result<MappedTensors, InferError> {
    MappedTensors::open(path).map_err(|source| InferError::Map { path: path.to_owned(), source })
}

impl ModelWeights {
    /// Loads the shards of `records` that the units of this rank's `stage` read, in a form.
    ///
    /// # Errors
    /// If a file is damaged or cannot be mapped, or memory runs out.
    pub(crate) fn load(
        directory: &ModelDirectory,
        (records, stage): (&[ParameterRecord], Range<usize>),
        form: WeightForm,
        (arena, kernels): (&Arena, &dyn Kernels),
    ) -> Result<Self, InferError> {
        let dtype = form.dtype;
        let is_read = read_by(records, stage);
        let ids: HashMap<&str, usize> = records
            .iter()
            .enumerate()
            .filter(|(id, record)| is_read[*id] && record.tie.is_none())
            .map(|(id, record)| (record.name.as_str(), id))
            .collect();
        let (mut files, mut copied) = (Files::default(), Vec::new());
        let mut stored: Vec<Option<StoredPlace>> = vec![None; records.len()];
        let parameters = directory.stored_parameters();
        for parameter in &parameters {
            let Some(&id) = ids.get(parameter.name) else { continue };
            let shard = StoredShard { parameter, record: &records[id] };
            // Numbers that are quantized are neither mapped nor copied.
            let is_quantized = matches!(parameter.stored, StoredElements::Dense(_))
                && form.quantized_format(&records[id]).is_some();
            if is_quantized || !shard.stays_stored(dtype) {
                continue;
            }
            let shape = Shape::from(records[id].local_shape().as_slice());
            // Pages that are only copied from are mapped for one matrix, and leave memory with the mapping.
            let own = form.interleaves(parameter.stored, shape).then(|| map(parameter.file)).transpose()?;
            let (file, map) = match &own {
                Some(map) => (usize::MAX, map),
                None => {
                    let file = files.index(parameter.file)?;
                    (file, &files.files[file])
                }
            };
            if let Some(place) = shard.place((file, map), &mut copied, arena)? {
                stored[id] = Some(place.arranged(form, Some(map), &mut copied, (arena, kernels))?);
            }
        }
        for parameter in directory.packed_parameters() {
            let Some(&id) = ids.get(parameter.name) else { continue };
            if let Some(place) = packed(&parameter, &records[id], &mut copied, arena)? {
                stored[id] = Some(place.arranged(form, None, &mut copied, (arena, kernels))?);
            }
        }
        let missing = records.iter().enumerate().filter(|&(id, _)| is_read[id] && stored[id].is_none());
        let formats: Vec<(usize, BlockFormat)> =
            missing.filter_map(|(id, record)| Some((id, form.quantized_format(record)?))).collect();
        // Shards that cut blocks are converted.
        let is_cut = |&(id, format): &(usize, BlockFormat)| block_ranges(format, &records[id]).is_none();
        let rounded: HashMap<usize, BlockFormat> = formats.iter().copied().filter(is_cut).collect();
        quantize(directory, (records, &formats), form, (&mut stored, &mut copied), (arena, kernels))?;
        let mut is_converted: Vec<bool> =
            stored.iter().zip(is_read).map(|(place, is_read)| is_read && place.is_none()).collect();
        let category = MemoryCategory::Parameters;
        let converted =
            StateStore::zeros_of_selected(arena, records, |id| is_converted[id], dtype, category)?;
        let unrounded = ids.into_iter().filter(|(_, id)| is_converted[*id] && !rounded.contains_key(id));
        for id in cast_stored(directory, (records, &unrounded.collect()), &converted, kernels)? {
            is_converted[id] = false;
        }
        convert(directory, (records, &rounded), &is_converted, &converted)?;
        let in_files = stored.iter().flatten().filter(|place| matches!(place.source, Source::File { .. }));
        let in_place_bytes = in_files.map(StoredPlace::bytes).sum();
        for (id, record) in records.iter().enumerate() {
            if let Some(table) = record.tie {
                let shape = Shape::from(record.local_shape().as_slice());
                stored[id] = stored[table.0].map(|place| StoredPlace { shape, ..place });
            }
        }
        Ok(Self { converted, files: files.files, copied, stored, in_place_bytes, held: None })
    }

    /// Loads the weights of a model, of which `resident` says for each parameter whether it stays in memory. Those of the
    /// first unit that do not are mapped, since only rows of their tables are read; those of other units are streamed.
    ///
    /// # Errors
    /// As for [`ModelWeights::load`].
    ///
    /// # Panics
    /// If a parameter that must be made is not resident.
    pub(crate) fn load_placed(
        directory: &ModelDirectory,
        parts: ModelParts,
        (resident, room): (&[bool], StreamingRoom),
        arena: &Arena,
        kernels: &dyn Kernels,
    ) -> Result<Self, InferError> {
        let dtype = parts.dtype();
        assert!(
            parts.made().all(|id| resident[id.0]),
            "only weights that are stored as they are used are on disk"
        );
        let mut is_converted = vec![false; parts.records.len()];
        let one_by_one = parts.one_by_one().filter(|id| resident[id.0]);
        let made = parts.made().chain(one_by_one);
        let numbers = made.filter(|&id| matches!(parts.elements(id), StoredElements::Dense(_)));
        numbers.for_each(|id| is_converted[id.0] = true);
        let category = MemoryCategory::Parameters;
        let converted =
            StateStore::zeros_of_selected(arena, &parts.records, |id| is_converted[id], dtype, category)?;
        convert(directory, (&parts.records, &HashMap::new()), &is_converted, &converted)?;
        let (files, mut stored) = Self::map_tables(&parts, resident)?;
        let in_place_bytes = stored.iter().flatten().map(StoredPlace::bytes).sum();
        let mut copied = Vec::new();
        make_blocks(directory, &parts, (&mut stored, &mut copied), (arena, kernels))?;
        let held = HeldUnits::load(parts, (resident, room), arena, kernels)?;
        let held = Some(RefCell::new(held));
        Ok(Self { converted, files, copied, stored, in_place_bytes, held })
    }

    /// Maps the files of the tables that are not resident.
    fn map_tables(
        parts: &ModelParts,
        resident: &[bool],
    ) -> Result<(Vec<MappedTensors>, Vec<Option<StoredPlace>>), InferError> {
        let (mut files, mut stored) = (Files::default(), vec![None; parts.records.len()]);
        for &id in parts.units[0].iter().filter(|id| !resident[id.0]) {
            let WeightPlace::Stored { file, offset, stored: elements, .. } = parts.place(id) else {
                continue;
            };
            let path = &parts.files[file];
            let file = files.index(path)?;
            let advised = files.files[file].for_lookups();
            advised.map_err(|source| InferError::Map { path: path.clone(), source })?;
            let shape = Shape::from(parts.records[id.0].shape.as_slice());
            let source = Source::File { file, offset: offset as usize };
            let layout = BlockLayout::Rows;
            stored[id.0] = Some(StoredPlace { source, stored: elements, layout, shape });
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
        let copied: usize = self.copied.iter().map(Buffer::len_bytes).sum();
        self.converted.len_bytes() + copied
    }

    /// Returns the parameters that stay as they are stored, by [`ParameterId`].
    pub(crate) fn in_place(&self) -> Vec<Option<Matrix<'_>>> {
        self.stored.iter().map(|place| self.matrix(place.as_ref()?)).collect()
    }

    fn matrix(&self, place: &StoredPlace) -> Option<Matrix<'_>> {
        matrix_of((place.stored, place.layout), place.shape, |dtype, shape| match place.source {
            Source::File { file, offset } => self.files[file].view(dtype, offset, shape),
            Source::Copied(index) => Some(self.copied[index].view(dtype, 0, shape)),
        })
    }
}

/// Returns the elements of a parameter that the rank holds.
fn local<'v>(record: &ParameterRecord, values: &'v [f32]) -> Cow<'v, [f32]> {
    let mut ranges = record.share.element_ranges(&record.shape).map(|(first, len)| first..first + len);
    match (ranges.next(), ranges.next()) {
        (Some(range), None) => Cow::Borrowed(&values[range]),
        _ => {
            let ranges = record.share.element_ranges(&record.shape);
            Cow::Owned(ranges.flat_map(|(first, len)| &values[first..first + len]).copied().collect())
        }
    }
}

/// Returns the bytes of this rank's shard among the blocks of a whole matrix; `None` if it cuts blocks.
fn block_ranges(format: BlockFormat, record: &ParameterRecord) -> Option<Vec<Range<usize>>> {
    byte_ranges(StoredElements::Blocks(format), RowOrder::Same, record)
}

/// Packs this rank's shard of a matrix into blocks; `None` if they do not fit the parameter.
fn packed(
    parameter: &PackedParameter<'_>,
    record: &ParameterRecord,
    copied: &mut Vec<Buffer>,
    arena: &Arena,
) -> Result<Option<StoredPlace>, InferError> {
    let packed = StoredElements::Blocks(parameter.format);
    let ranges = block_ranges(parameter.format, record);
    let Some(ranges) = ranges.filter(|_| record.shape == parameter.shape) else { return Ok(None) };
    let mut blocks = vec![0; parameter.bytes()];
    parameter.pack(&mut blocks)?;
    let pieces: Vec<&[u8]> = ranges.into_iter().map(|range| &blocks[range]).collect();
    copy(&pieces, (packed, record), copied, arena).map(Some)
}

/// Makes the quantized matrices that no file holds as they are used: packed ones, and numbers that are quantized.
fn make_blocks(
    directory: &ModelDirectory,
    parts: &ModelParts,
    (stored, copied): (&mut [Option<StoredPlace>], &mut Vec<Buffer>),
    memory: (&Arena, &dyn Kernels),
) -> Result<(), InferError> {
    let format = |id: ParameterId| match parts.elements(id) {
        StoredElements::Blocks(format) => Some((parts.records[id.0].name.as_str(), (id.0, format))),
        StoredElements::Dense(_) => None,
    };
    let mut formats: HashMap<&str, (usize, BlockFormat)> = parts.made().filter_map(format).collect();
    for parameter in directory.packed_parameters() {
        let Some(&(id, _)) = formats.get(parameter.name) else { continue };
        if let Some(place) = packed(&parameter, &parts.records[id], copied, memory.0)? {
            stored[id] = Some(place.arranged(parts.form(), None, copied, memory)?);
            formats.remove(parameter.name);
        }
    }
    let numbers: Vec<(usize, BlockFormat)> = formats.into_values().collect();
    quantize(directory, (&parts.records, &numbers), parts.form(), (stored, copied), memory)
}

/// Quantizes this rank's shards of matrices that are numbers, given with their formats, one matrix at a time: groups are those of the
/// whole matrix. Leaves out shards that cut blocks.
fn quantize(
    directory: &ModelDirectory,
    (records, formats): (&[ParameterRecord], &[(usize, BlockFormat)]),
    form: WeightForm,
    (stored, copied): (&mut [Option<StoredPlace>], &mut Vec<Buffer>),
    memory: (&Arena, &dyn Kernels),
) -> Result<(), InferError> {
    if formats.is_empty() {
        return Ok(());
    }
    let formats: HashMap<&str, (usize, BlockFormat)> =
        formats.iter().map(|&(id, format)| (records[id].name.as_str(), (id, format))).collect();
    directory.for_each_selected(
        |name| formats.contains_key(name),
        |name, values| -> Result<(), InferError> {
            let (id, format) = formats[name];
            let Some(ranges) = block_ranges(format, &records[id]) else { return Ok(()) };
            let blocks = encode_blocks(format, values);
            let pieces: Vec<&[u8]> = ranges.into_iter().map(|range| &blocks[range]).collect();
            let place = copy(&pieces, (StoredElements::Blocks(format), &records[id]), copied, memory.0)?;
            stored[id] = Some(place.arranged(form, None, copied, memory)?);
            Ok(())
        },
    )
}

/// Casts this rank's shards of parameters, given with their ids, from the mapped files into `store`. Returns the ids of those whose pieces are
/// all stored as numbers.
fn cast_stored(
    directory: &ModelDirectory,
    (records, ids): (&[ParameterRecord], &HashMap<&str, usize>),
    store: &StateStore,
    kernels: &dyn Kernels,
) -> Result<Vec<usize>, InferError> {
    let (stored_pieces, mut sources) = (directory.stored_pieces(), Files::default());
    let mut pieces: BTreeMap<usize, Vec<&StoredParameter<'_>>> = BTreeMap::new();
    for piece in &stored_pieces {
        if let Some(&id) = ids.get(piece.name) {
            sources.index(piece.file)?;
            pieces.entry(id).or_default().push(piece);
        }
    }
    let map_of = |piece: &StoredParameter<'_>| sources.map(piece.file);
    let is_cast = |(id, pieces): &(usize, Vec<&StoredParameter<'_>>)| {
        cast_pieces(pieces, &records[*id], map_of, store.view(ParameterId(*id)), kernels)
    };
    Ok(pieces.into_iter().filter(is_cast).map(|(id, _)| id).collect())
}

/// Reads this rank's shards of parameters into `store`: those that `is_converted` is true for. Those of `rounded` are the values of
/// quantized matrices.
fn convert(
    directory: &ModelDirectory,
    (records, rounded): (&[ParameterRecord], &HashMap<usize, BlockFormat>),
    is_converted: &[bool],
    store: &StateStore,
) -> Result<(), InferError> {
    let converted = records.iter().enumerate().filter(|(id, _)| is_converted[*id]);
    let ids: HashMap<&str, ParameterId> =
        converted.map(|(id, record)| (record.name.as_str(), ParameterId(id))).collect();
    if !ids.is_empty() {
        directory.for_each_selected(
            |name| ids.contains_key(name),
            |name, values| -> Result<(), CheckpointError> {
                let id = ids[name];
                let values = match rounded.get(&id.0) {
                    Some(&format) => {
                        let mut rounded = values.to_vec();
                        round_to_blocks(format, &mut rounded);
                        Cow::Owned(rounded)
                    }
                    None => Cow::Borrowed(values),
                };
                write(store.view(id), &local(&records[id.0], &values));
                Ok(())
            },
        )?;
    }
    Ok(())
}

/// Returns for each parameter whether a unit of `stage` reads it, a tied one through the parameter that owns its weights.
fn read_by(records: &[ParameterRecord], stage: Range<usize>) -> Vec<bool> {
    let mut is_read: Vec<bool> = records.iter().map(|record| stage.contains(&record.unit)).collect();
    for (id, record) in records.iter().enumerate() {
        if let Some(owner) = record.tie.filter(|_| is_read[id]) {
            is_read[owner.0] = true;
        }
    }
    is_read
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
