//! The modules of a model: names in Hugging Face's form, and the place and size of every parameter.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::Range,
    path::{Path, PathBuf},
};

use lockstep_checkpoint::{ModelDirectory, OffloadedWeight, RowOrder, StoredParameter, gguf::StoredElements};
use lockstep_model::{HfContent, HfMapping, RecordedModel};
use lockstep_plan::{Among, BlockFormat, DType, ParameterId, ParameterRecord};
use lockstep_tensor::{BlockLayout, Shape};

use crate::{
    experts::ExpertStack,
    weight_form::{WeightForm, bytes_of},
};

/// A row of a printed map: a module that is on one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    /// Path of the module, such as `model.layers.0`.
    pub name: String,
    /// Bytes of its weights in memory; 0 if all are tied to another module's.
    pub bytes: u64,
    /// Types of its weights with their bytes, the largest first.
    pub types: Vec<(StoredElements, u64)>,
    /// The module that owns its weights, if they are tied.
    pub tied_to: Option<String>,
}

/// Place of a parameter's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WeightPlace {
    /// In a file, as the model reads them, but for the type of numbers and the order of rows.
    Stored {
        /// Index of the file.
        file: usize,
        /// Byte of the file at which the first element lies.
        offset: u64,
        /// Elements in the file.
        stored: StoredElements,
        /// Order of the rows in the file.
        order: RowOrder,
    },
    /// A stack of experts whose matrices lie in a file one by one, as the model reads them.
    OneByOne,
    /// In another layout or type, from which they must be made.
    Made,
}

/// A module and its parameters.
#[derive(Debug)]
pub(crate) struct ModelModule {
    pub(crate) name: String,
    pub(crate) parameters: Vec<ParameterId>,
}

/// Inputs of a placement: parameters, modules, and places in files.
#[derive(Debug)]
pub(crate) struct ModelParts {
    pub(crate) records: Vec<ParameterRecord>,
    /// Units of this rank's stage: all without a pipeline.
    pub(crate) stage: Range<usize>,
    /// Parameters of each unit of the stage, tied ones included; none of other units.
    pub(crate) units: Vec<Vec<ParameterId>>,
    /// Modules in the model's order; those of one unit are consecutive.
    pub(crate) modules: Vec<ModelModule>,
    /// Hugging Face names of the tensors that each parameter is stored in.
    pub(crate) tensors: Vec<Vec<String>>,
    pub(crate) files: Vec<PathBuf>,
    places: Vec<WeightPlace>,
    /// File and first byte of each expert's matrix of the stacks that are stored [one by one](WeightPlace::OneByOne).
    matrices: HashMap<ParameterId, Vec<(usize, u64)>>,
    /// Elements of each parameter in memory.
    elements: Vec<StoredElements>,
    /// Parameters whose file is yet to be written.
    assumed: Vec<ParameterId>,
    form: WeightForm,
}

impl ModelParts {
    /// Returns the parts of a model whose weights are used in a form.
    pub(crate) fn new(directory: &ModelDirectory, recorded: &RecordedModel, form: WeightForm) -> Self {
        let records = recorded.records().to_vec();
        let units: Vec<Vec<ParameterId>> =
            (0..recorded.units()).map(|unit| recorded.unit_parameters(unit).to_vec()).collect();
        let tensors = tensor_names(directory, &records);
        let is_block = |unit: usize| recorded.layer(unit).is_some();
        let modules = modules(&units, &tensors, is_block, |id| is_expert_stack(&records[id.0]));
        let (files, places, assumed) = (Vec::new(), vec![WeightPlace::Made; records.len()], Vec::new());
        let elements = elements_in_memory(directory, &records, form);
        let (matrices, stage) = (HashMap::new(), 0..units.len());
        let mut parts = Self {
            records,
            stage,
            units,
            modules,
            tensors,
            files,
            places,
            matrices,
            elements,
            assumed,
            form,
        };
        parts.add_stored(directory.stored_parameters());
        parts.add_matrices(&directory.stored_pieces());
        parts
    }

    /// Keeps the units of a pipeline stage. A weight that is tied to one of another stage becomes a parameter of the unit that reads it.
    pub(crate) fn of_stage(mut self, stage: Range<usize>) -> Self {
        let (records, all) = (&self.records, 0..self.units.len());
        let is_here = |id: ParameterId| stage.contains(&records[id.0].unit);
        let owner = |id: ParameterId| records[id.0].tie.filter(|owner| !is_here(*owner)).unwrap_or(id);
        for (unit, ids) in all.zip(&mut self.units) {
            if stage.contains(&unit) {
                ids.iter_mut().for_each(|id| *id = owner(*id));
            } else {
                ids.clear();
            }
        }
        for module in &mut self.modules {
            module.parameters.retain(|&id| is_here(id));
            module.parameters.iter_mut().for_each(|id| *id = owner(*id));
        }
        self.modules.retain(|module| !module.parameters.is_empty());
        Self { stage, ..self }
    }

    /// Returns the parameters that own the weights of the stage's units.
    pub(crate) fn owned(&self) -> impl Iterator<Item = ParameterId> {
        let owners: BTreeSet<usize> = self.units.iter().flatten().map(|&id| self.owner(id).0).collect();
        owners.into_iter().map(ParameterId)
    }

    /// Returns the index of a file, which is added at its first use.
    fn file(&mut self, path: &Path) -> usize {
        self.files.iter().position(|file| file == path).unwrap_or_else(|| {
            self.files.push(path.to_owned());
            self.files.len() - 1
        })
    }

    /// Notes the places of experts' matrices that are stored one by one.
    fn add_matrices(&mut self, pieces: &[StoredParameter<'_>]) {
        let mut of_stack = HashMap::<&str, Vec<&StoredParameter<'_>>>::new();
        for piece in pieces {
            of_stack.entry(piece.name).or_default().push(piece);
        }
        for id in (0..self.records.len()).map(ParameterId) {
            let record = &self.records[id.0];
            let [experts, rows, columns] = record.shape[..] else { continue };
            if !is_expert_stack(record) {
                continue;
            }
            let mut pieces = of_stack.remove(record.name.as_str()).unwrap_or_default();
            pieces.sort_by_key(|piece| piece.first_element);
            let is_matrix = |(expert, piece): (usize, &&StoredParameter<'_>)| {
                (piece.first_element, piece.elements) == (expert * rows * columns, rows * columns)
                    && piece.stored == self.elements[id.0]
                    && piece.order == RowOrder::Same
                    && piece.is_aligned()
            };
            let are_matrices = pieces.len() == experts && pieces.iter().enumerate().all(is_matrix);
            if are_matrices && self.places[id.0] == WeightPlace::Made {
                let places =
                    pieces.iter().map(|piece| (self.file(piece.file), piece.offset as u64)).collect();
                self.matrices.insert(id, places);
                self.places[id.0] = WeightPlace::OneByOne;
            }
        }
    }

    /// Returns the stacks of experts whose matrices can be read from disk one at a time.
    pub(crate) fn expert_stacks(&self) -> Vec<ExpertStack> {
        let stacks = self.owned().filter(|&id| is_expert_stack(&self.records[id.0]));
        stacks.filter_map(|id| self.expert_stack(id)).collect()
    }

    /// Returns those of [`ModelParts::expert_stacks`] that are not resident, which are read as they are used.
    pub(crate) fn expert_stacks_on_disk(&self, is_resident: &[bool]) -> Vec<ExpertStack> {
        let mut stacks = self.expert_stacks();
        stacks.retain(|stack| !is_resident[stack.id.0]);
        stacks
    }

    fn expert_stack(&self, id: ParameterId) -> Option<ExpertStack> {
        let record = &self.records[id.0];
        let [experts, rows, columns] = record.shape[..] else { return None };
        let elements = self.elements[id.0];
        let matrix_bytes = bytes_of(elements, BlockLayout::Rows, [rows, columns].into())? as u64;
        let places = match self.places[id.0] {
            WeightPlace::Stored { file, offset, stored, .. } if stored == elements => {
                (0..experts as u64).map(|expert| (file, offset + expert * matrix_bytes)).collect()
            }
            WeightPlace::OneByOne => self.matrices[&id].clone(),
            WeightPlace::Stored { .. } | WeightPlace::Made => return None,
        };
        let unit = record.unit;
        Some(ExpertStack { id, unit, elements, shape: [rows, columns], matrix_bytes, places })
    }

    /// Notes the places of parameters whose stored elements the model can use, unless they are known. Parameters of the first unit
    /// are looked up in the file, so they must be there as they are in memory.
    pub(crate) fn add_stored(&mut self, stored: Vec<StoredParameter<'_>>) {
        let names = self.records.iter().enumerate().map(|(id, record)| (record.name.clone(), id));
        let ids: HashMap<String, usize> = names.collect();
        for parameter in stored {
            let Some(&id) = ids.get(parameter.name) else { continue };
            let record = &self.records[id];
            let (stored, order, elements) = (parameter.stored, parameter.order, self.elements[id]);
            let is_same = stored == elements;
            let is_readable = match (stored, elements) {
                (StoredElements::Dense(_), StoredElements::Dense(_)) => {
                    parameter.is_aligned() && (is_same || order == RowOrder::Same)
                }
                _ => is_same,
            };
            let is_usable = is_readable
                && (order == RowOrder::Same || record.shape.len() == 2)
                && parameter.elements == record.elements()
                && (record.unit > 0 || (is_same && order == RowOrder::Same));
            if is_usable && self.places[id] == WeightPlace::Made {
                let file = self.file(parameter.file);
                self.places[id] =
                    WeightPlace::Stored { file, offset: parameter.offset as u64, stored, order };
            }
        }
    }

    /// Returns the type of weights that are numbers.
    pub(crate) fn dtype(&self) -> DType {
        self.form.dtype
    }

    /// Returns the form of the weights in memory.
    pub(crate) fn form(&self) -> WeightForm {
        self.form
    }

    /// Returns the elements of a parameter in memory, or of the one that it is tied to.
    pub(crate) fn elements(&self, id: ParameterId) -> StoredElements {
        self.elements[self.owner(id).0]
    }

    /// Returns the layout of a parameter's blocks if it is resident. Streamed ones are used row by row, as they are read: products with
    /// rows are faster than disks.
    pub(crate) fn layout(&self, id: ParameterId) -> BlockLayout {
        match self.form.interleaves(self.elements(id), self.shape(id)) {
            true => BlockLayout::Interleaved,
            false => BlockLayout::Rows,
        }
    }

    /// Returns the shape of a parameter, or of the one that it is tied to.
    pub(crate) fn shape(&self, id: ParameterId) -> Shape {
        Shape::from(self.records[self.owner(id).0].shape.as_slice())
    }

    /// Returns the parameter that owns the weights of `id`: the one that it is tied to, or itself.
    pub(crate) fn owner(&self, id: ParameterId) -> ParameterId {
        self.records[id.0].tie.unwrap_or(id)
    }

    /// Returns the place of a parameter, or of the one that it is tied to.
    pub(crate) fn place(&self, id: ParameterId) -> WeightPlace {
        self.places[self.owner(id).0]
    }

    /// Returns the bytes of a parameter as `elements`, row by row.
    pub(crate) fn bytes_in(&self, id: ParameterId, elements: StoredElements) -> u64 {
        bytes_of(elements, BlockLayout::Rows, self.shape(id)).unwrap_or(0) as u64
    }

    /// Returns the bytes of a parameter in memory if it is resident.
    pub(crate) fn bytes(&self, id: ParameterId) -> u64 {
        bytes_of(self.elements(id), self.layout(id), self.shape(id)).unwrap_or(0) as u64
    }

    /// Returns the parameters that must be made before they can be read from disk. Stacks of experts whose matrices are stored one by one
    /// are made only if they are resident.
    pub(crate) fn made(&self) -> impl Iterator<Item = ParameterId> {
        self.owned().filter(|&id| self.places[id.0] == WeightPlace::Made)
    }

    /// Returns the stacks of experts whose matrices are stored one by one.
    pub(crate) fn one_by_one(&self) -> impl Iterator<Item = ParameterId> {
        self.owned().filter(|&id| self.places[id.0] == WeightPlace::OneByOne)
    }

    /// Returns the parameters of [`ModelParts::made`] as a file is to hold them.
    pub(crate) fn made_weights(&self) -> Vec<OffloadedWeight<'_>> {
        let weight = |id| OffloadedWeight { record: &self.records[id], elements: self.elements[id] };
        self.made().map(|id| weight(id.0)).collect()
    }

    /// Assumes that the parameters that must be made are stored one after the other in a file yet to be written.
    pub(crate) fn assume_written(&mut self) {
        let (made, file, mut offset) = (self.made().collect::<Vec<_>>(), self.files.len(), 0);
        for id in made {
            let (stored, order) = (self.elements[id.0], RowOrder::Same);
            self.places[id.0] = WeightPlace::Stored { file, offset, stored, order };
            offset += self.bytes_in(id, stored);
            self.assumed.push(id);
        }
    }

    /// Returns the parameters whose file is yet to be written.
    pub(crate) fn assumed(&self) -> &[ParameterId] {
        &self.assumed
    }

    /// Forgets the places of parameters whose file is yet to be written: they must be made.
    pub(crate) fn forget_assumed(&mut self) {
        for id in self.assumed.drain(..) {
            self.places[id.0] = WeightPlace::Made;
        }
    }

    /// Returns the rows of a printed map.
    pub(crate) fn rows(&self) -> Vec<Module> {
        let name_of = |id: ParameterId| {
            let module = self.modules.iter().find(|module| module.parameters.contains(&id));
            module.map(|module| module.name.clone())
        };
        let row = |module: &ModelModule| {
            let mut of_type = BTreeMap::new();
            for &id in module.parameters.iter().filter(|id| self.records[id.0].tie.is_none()) {
                *of_type.entry(self.elements(id)).or_default() += self.bytes(id);
            }
            let mut types: Vec<(StoredElements, u64)> = of_type.into_iter().collect();
            types.sort_by_key(|&(_, bytes)| Reverse(bytes));
            let tie = module.parameters.iter().find_map(|id| self.records[id.0].tie);
            Module {
                name: module.name.clone(),
                bytes: types.iter().map(|(_, bytes)| bytes).sum(),
                types,
                tied_to: tie.and_then(name_of),
            }
        };
        self.modules.iter().map(row).collect()
    }
}

/// Returns the elements of each parameter in memory: blocks of matrices that are stored in blocks, that can be packed into blocks, or
/// that are quantized; else numbers.
fn elements_in_memory(
    directory: &ModelDirectory,
    records: &[ParameterRecord],
    form: WeightForm,
) -> Vec<StoredElements> {
    let mut stored: HashMap<&str, (BlockFormat, usize)> = HashMap::new();
    for parameter in directory.stored_parameters() {
        if let StoredElements::Blocks(format) = parameter.stored {
            stored.insert(parameter.name, (format, parameter.elements));
        }
    }
    let packed = directory.packed_parameters();
    let packed: HashMap<&str, (BlockFormat, &[usize])> =
        packed.iter().map(|packed| (packed.name, (packed.format, &packed.shape[..]))).collect();
    let of_record = |record: &ParameterRecord| {
        let stored = stored.get(record.name.as_str()).filter(|(format, elements)| {
            let ([_, columns] | [_, _, columns]) = record.shape[..] else { return false };
            record.elements() == *elements && format.bytes(columns).is_some()
        });
        let packed = packed.get(record.name.as_str()).filter(|(_, shape)| record.shape == *shape);
        let stored = stored.map(|(format, _)| *format).or_else(|| packed.map(|(format, _)| *format));
        let format = stored.or_else(|| form.quantized_format(record));
        format.map_or(StoredElements::Dense(form.dtype), StoredElements::Blocks)
    };
    records.iter().map(of_record).collect()
}

/// Returns the tensors that each parameter is stored in; that of a tied parameter has its own name.
fn tensor_names(directory: &ModelDirectory, records: &[ParameterRecord]) -> Vec<Vec<String>> {
    let mapping = HfMapping::new(directory.config());
    let mut of_name: HashMap<&str, Vec<String>> = HashMap::new();
    for tensor in mapping.tensors() {
        let HfContent::Parameters(places) = &tensor.content else { continue };
        for place in places {
            of_name.entry(&place.parameter).or_default().push(place.tensor.clone());
        }
    }
    let names = |record: &ParameterRecord| {
        of_name.get(record.name.as_str()).cloned().unwrap_or_else(|| vec![record.name.clone()])
    };
    records.iter().map(names).collect()
}

/// Returns true if a parameter has a matrix for each expert.
fn is_expert_stack(record: &ParameterRecord) -> bool {
    record.share.among == Among::Experts && record.shape.len() == 3
}

/// Returns the modules of the units: a block is one module, and the experts within it another; outside of blocks each module with tensors
/// of its own.
fn modules(
    units: &[Vec<ParameterId>],
    tensors: &[Vec<String>],
    is_block: impl Fn(usize) -> bool,
    is_expert_stack: impl Fn(ParameterId) -> bool,
) -> Vec<ModelModule> {
    let mut modules: Vec<ModelModule> = Vec::new();
    for (unit, ids) in units.iter().enumerate() {
        let tensors_of = |ids: &[ParameterId]| common_path(ids.iter().flat_map(|id| &tensors[id.0]));
        let stacks: Vec<ParameterId> = ids.iter().copied().filter(|&id| is_expert_stack(id)).collect();
        let [block, experts] = [ids, &stacks].map(|ids| is_block(unit).then(|| tensors_of(ids)));
        for &id in ids {
            let own = || tensors[id.0].first().and_then(|tensor| Some(tensor.rsplit_once('.')?.0));
            let block = if is_expert_stack(id) { &experts } else { &block };
            let name = block.as_deref().or_else(own).unwrap_or_default();
            match modules.iter_mut().find(|module| module.name == name) {
                Some(module) => module.parameters.push(id),
                None => modules.push(ModelModule { name: name.to_owned(), parameters: vec![id] }),
            }
        }
    }
    modules
}

/// Returns the longest path of modules that all tensors lie in.
fn common_path<'a>(mut tensors: impl Iterator<Item = &'a String>) -> String {
    let first: Vec<&str> = tensors.next().map(|name| name.split('.').collect()).unwrap_or_default();
    let shared = tensors.fold(first.len().saturating_sub(1), |shared, name| {
        first[..shared].iter().zip(name.split('.')).take_while(|(a, b)| *a == b).count()
    });
    first[..shared].join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_one_module_and_others_are_the_modules_of_their_tensors() {
        let names = [
            "transformer.wte.weight",
            "transformer.h.0.ln_1.weight",
            "transformer.h.0.attn.c_attn.weight",
            "transformer.ln_f.weight",
            "transformer.ln_f.bias",
            "lm_head.weight",
        ];
        let tensors: Vec<Vec<String>> = names.map(|name| vec![name.to_owned()]).to_vec();
        let ids = |range: std::ops::Range<usize>| range.map(ParameterId).collect::<Vec<_>>();
        let found = modules(&[ids(0..1), ids(1..3), ids(3..6)], &tensors, |unit| unit == 1, |_| false);
        let found: Vec<_> =
            found.iter().map(|module| (module.name.as_str(), module.parameters.len())).collect();
        let expected =
            [("transformer.wte", 1), ("transformer.h.0", 2), ("transformer.ln_f", 2), ("lm_head", 1)];
        assert_eq!(found, expected);
    }
}
