//! The modules of a model: names in Hugging Face's form, and the place and size of every parameter.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use lockstep_checkpoint::{ModelDirectory, RowOrder, StoredParameter, gguf::StoredElements};
use lockstep_model::{HfContent, HfMapping, RecordedModel};
use lockstep_plan::{DType, ParameterId, ParameterRecord};

/// A row of a printed map: a module that is on one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    /// Path of the module, such as `model.layers.0`.
    pub name: String,
    /// Bytes of its weights in memory, in the type of the model; 0 if all are tied to another module's.
    pub bytes: u64,
    /// The module that owns its weights, if they are tied.
    pub tied_to: Option<String>,
}

/// Place of a parameter's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WeightPlace {
    /// In a file, as the model reads them, but for their type.
    Stored {
        /// Index of the file.
        file: usize,
        /// Byte of the file at which the first element lies.
        offset: u64,
        /// Type of the elements in the file.
        dtype: DType,
    },
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
    /// Parameters of each unit, tied ones included.
    pub(crate) units: Vec<Vec<ParameterId>>,
    /// Modules in the model's order; those of one unit are consecutive.
    pub(crate) modules: Vec<ModelModule>,
    /// Hugging Face names of the tensors that each parameter is stored in.
    pub(crate) tensors: Vec<Vec<String>>,
    pub(crate) files: Vec<PathBuf>,
    places: Vec<WeightPlace>,
    /// Parameters whose file is yet to be written.
    assumed: Vec<ParameterId>,
    dtype: DType,
}

impl ModelParts {
    /// Returns the parts of a model whose weights are used in type `dtype`.
    pub(crate) fn new(directory: &ModelDirectory, recorded: &RecordedModel, dtype: DType) -> Self {
        let records = recorded.records().to_vec();
        let units: Vec<Vec<ParameterId>> =
            (0..recorded.units()).map(|unit| recorded.unit_parameters(unit).to_vec()).collect();
        let tensors = tensor_names(directory, &records);
        let is_block = |unit: usize| recorded.layer(unit).is_some();
        let modules = modules(&units, &tensors, is_block);
        let (files, places, assumed) = (Vec::new(), vec![WeightPlace::Made; records.len()], Vec::new());
        let mut parts = Self { records, units, modules, tensors, files, places, assumed, dtype };
        parts.add_stored(directory.stored_parameters());
        parts
    }

    /// Notes the places of parameters that are stored in the model's layout, unless they are known. Parameters of the first unit
    /// are looked up in the file, so they must have the model's type as well.
    pub(crate) fn add_stored(&mut self, stored: Vec<StoredParameter<'_>>) {
        let ids: HashMap<&str, usize> =
            self.records.iter().enumerate().map(|(id, record)| (record.name.as_str(), id)).collect();
        let mut numbers = HashMap::<&Path, usize>::new();
        let places = &mut self.places;
        for parameter in stored {
            let Some(&id) = ids.get(parameter.name) else { continue };
            let record = &self.records[id];
            // Quantized and reordered ones are decoded.
            let (StoredElements::Dense(dtype), RowOrder::Same) = (parameter.stored, parameter.order) else {
                continue;
            };
            let is_usable = parameter.elements == record.elements()
                && parameter.offset.is_multiple_of(dtype.size_bytes())
                && (record.unit > 0 || dtype == self.dtype);
            if !is_usable || places[id] != WeightPlace::Made {
                continue;
            }
            let file = *numbers.entry(parameter.file).or_insert_with(|| {
                self.files.push(parameter.file.to_owned());
                self.files.len() - 1
            });
            places[id] = WeightPlace::Stored { file, offset: parameter.offset as u64, dtype };
        }
    }

    /// Returns the type in which the weights are used.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the parameter that owns the weights of `id`: the one that it is tied to, or itself.
    pub(crate) fn owner(&self, id: ParameterId) -> ParameterId {
        self.records[id.0].tie.unwrap_or(id)
    }

    /// Returns the place of a parameter, or of the one that it is tied to.
    pub(crate) fn place(&self, id: ParameterId) -> WeightPlace {
        self.places[self.owner(id).0]
    }

    /// Returns the bytes of a parameter in a type. Every size in a placement is computed here.
    pub(crate) fn bytes_in(&self, id: ParameterId, dtype: DType) -> u64 {
        self.records[id.0].elements() as u64 * dtype.size_bytes() as u64
    }

    /// Returns the bytes of a parameter in the model's type.
    pub(crate) fn bytes(&self, id: ParameterId) -> u64 {
        self.bytes_in(id, self.dtype)
    }

    /// Returns the parameters that must be made before they can be read from disk.
    pub(crate) fn made(&self) -> impl Iterator<Item = ParameterId> {
        let ids = (0..self.records.len()).map(ParameterId);
        ids.filter(|&id| self.records[id.0].tie.is_none() && self.places[id.0] == WeightPlace::Made)
    }

    /// Returns the records of [`ModelParts::made`].
    pub(crate) fn made_records(&self) -> Vec<&ParameterRecord> {
        self.made().map(|id| &self.records[id.0]).collect()
    }

    /// Assumes that the parameters that must be made are stored one after the other in a file yet to be written.
    pub(crate) fn assume_written(&mut self) {
        let (made, file, mut offset) = (self.made().collect::<Vec<_>>(), self.files.len(), 0);
        for id in made {
            self.places[id.0] = WeightPlace::Stored { file, offset, dtype: self.dtype };
            offset += self.bytes(id);
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
            let owned = module.parameters.iter().filter(|id| self.records[id.0].tie.is_none());
            let tie = module.parameters.iter().find_map(|id| self.records[id.0].tie);
            Module {
                name: module.name.clone(),
                bytes: owned.map(|&id| self.bytes(id)).sum(),
                tied_to: tie.and_then(name_of),
            }
        };
        self.modules.iter().map(row).collect()
    }
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

/// Returns the modules of the units: a block is one module; outside of blocks each module with tensors of its own.
fn modules(
    units: &[Vec<ParameterId>],
    tensors: &[Vec<String>],
    is_block: impl Fn(usize) -> bool,
) -> Vec<ModelModule> {
    let mut modules: Vec<ModelModule> = Vec::new();
    for (unit, ids) in units.iter().enumerate() {
        let block = is_block(unit).then(|| common_path(ids.iter().flat_map(|id| &tensors[id.0])));
        for &id in ids {
            let own = || tensors[id.0].first().and_then(|tensor| Some(tensor.rsplit_once('.')?.0));
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
        let found = modules(&[ids(0..1), ids(1..3), ids(3..6)], &tensors, |unit| unit == 1);
        let found: Vec<_> =
            found.iter().map(|module| (module.name.as_str(), module.parameters.len())).collect();
        let expected =
            [("transformer.wte", 1), ("transformer.h.0", 2), ("transformer.ln_f", 2), ("lm_head", 1)];
        assert_eq!(found, expected);
    }
}
