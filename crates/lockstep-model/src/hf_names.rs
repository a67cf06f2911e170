//! The tensors of a model's Hugging Face checkpoint, and the location of each parameter in them.
//!
//! [`HfMapping`] is computed from the configuration alone. Export walks its tensors and fills each one from
//! parameters. Import matches it with the names and shapes of a file, and reports every tensor that is missing,
//! unexpected or of the wrong shape. Both use the same [`HfPlace`], in opposite directions.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use lockstep_plan::ParameterRecord;

use crate::config::ModelConfig;
use crate::error::{CheckpointProblem, ModelError};
use crate::families::EXPERTS;
use crate::hf_tensor::{HfContent, HfPlace, HfTensor};
use crate::model::Model;
use crate::recorded::parameter_records;

/// The tensors of a model's Hugging Face checkpoint.
#[derive(Debug, Clone)]
pub struct HfMapping {
    /// Prefix of the base model's tensors; checkpoints of the base model alone omit it.
    prefix: &'static str,
    tensors: Vec<HfTensor>,
    /// Pairs of (tensor that a checkpoint may contain, parameter that it repeats).
    tied: Vec<(String, String)>,
    /// Names of the parameters, in the model's order.
    parameters: Vec<String>,
    /// The model, which knows older names of tensors.
    model: Arc<dyn Model>,
}

/// Instructions for reading a checkpoint into a model.
#[derive(Debug, Clone)]
pub struct HfImport {
    /// Places of each parameter that is not tied, in the model's order; the places of one parameter are consecutive,
    /// in the order of its elements.
    pub places: Vec<HfPlace>,
    /// Tensors of the file that must be zero (see [`Gpt2Config::bias`](crate::Gpt2Config::bias)); [`HfImport::require_zeros`] checks one.
    pub zeros: Vec<String>,
    /// Tensors of the file that repeat a tied parameter, as pairs of (tensor, place of the parameter that it must equal).
    pub tied_copies: Vec<(String, HfPlace)>,
}

impl HfMapping {
    /// Computes the mapping of the model that `config` describes.
    pub fn new(config: &ModelConfig) -> Self {
        let records = parameter_records(config);
        let tensors = config.model().checkpoint_tensors(&records);
        Self::of(config, &records, tensors)
    }

    /// Computes the mapping of files in which a stack of experts is one tensor in the layout of the parameter, with its name: GGUF files.
    pub fn with_stacks(config: &ModelConfig) -> Self {
        let records = parameter_records(config);
        let (stacks, others): (Vec<_>, Vec<_>) =
            records.iter().cloned().partition(|record| record.name.contains(EXPERTS));
        if stacks.is_empty() {
            return Self::new(config);
        }
        let mut tensors = config.model().checkpoint_tensors(&others);
        tensors.extend(stacks.iter().map(HfTensor::same));
        let order: HashMap<&str, usize> =
            records.iter().enumerate().map(|(id, record)| (record.name.as_str(), id)).collect();
        tensors.sort_by_key(|tensor| match &tensor.content {
            HfContent::Parameters(places) => {
                places.first().and_then(|place| order.get(&*place.parameter).copied())
            }
            HfContent::Zeros => None,
        });
        Self::of(config, &records, tensors)
    }

    fn of(config: &ModelConfig, records: &[ParameterRecord], tensors: Vec<HfTensor>) -> Self {
        let prefix = config.model().checkpoint_prefix();
        let tied = records
            .iter()
            .filter_map(|record| record.tie.map(|id| (record.name.clone(), records[id.0].name.clone())))
            .collect();
        let owned = records.iter().filter(|record| record.tie.is_none());
        let parameters = owned.map(|record| record.name.clone()).collect();
        Self { prefix, tensors, tied, parameters, model: config.handle() }
    }

    /// Returns the tensors of an exported checkpoint. Tied parameters are omitted, as in transformers.
    pub fn tensors(&self) -> &[HfTensor] {
        &self.tensors
    }

    /// Returns the places of the parameter called `parameter`, in the order of its elements. Empty if the model has
    /// no such parameter, or if it is tied to another.
    pub fn places_of(&self, parameter: &str) -> impl Iterator<Item = &HfPlace> {
        self.places().filter(move |place| place.parameter == parameter)
    }

    /// Matches the tensors (name, shape) of a checkpoint with the model.
    ///
    /// Names are accepted with and without the family's prefix (`transformer.`, `model.`), as in transformers.
    /// Buffers that older versions of transformers saved are skipped: causal masks (`attn.bias`, `attn.masked_bias`, of
    /// GPT-NeoX `attention.bias`, `attention.masked_bias`) and `rotary_emb.inv_freq`. So are tensors that
    /// [`Model::checkpoint_name`] does not know.
    ///
    /// # Errors
    /// If a tensor is missing, unexpected, duplicated or of the wrong shape; the error lists every such tensor.
    pub fn match_checkpoint<'a>(
        &self,
        checkpoint: impl IntoIterator<Item = (&'a str, &'a [usize])>,
    ) -> Result<HfImport, ModelError> {
        let mut problems = Vec::new();
        let mut found: BTreeMap<String, (&str, &[usize])> = BTreeMap::new();
        let outside = self.outside();
        for (name, shape) in checkpoint {
            let Some(present) = self.model.checkpoint_name(name).filter(|_| !is_buffer(name)) else {
                continue;
            };
            let is_full = present.starts_with(self.prefix) || outside.contains(&*present);
            let full = if is_full { present.into_owned() } else { format!("{}{present}", self.prefix) };
            if let Some((first, _)) = found.insert(full, (name, shape)) {
                problems.push(CheckpointProblem::Duplicate { tensors: [first.into(), name.into()] });
            }
        }
        let mut places: HashMap<&str, Vec<HfPlace>> = HashMap::new();
        let mut zeros = Vec::new();
        for tensor in &self.tensors {
            let Some((name, shape)) = found.remove(&tensor.name) else {
                if tensor.content != HfContent::Zeros {
                    problems.push(CheckpointProblem::Missing { tensor: tensor.name.clone() });
                }
                continue;
            };
            problems.extend(wrong_shape(name, &tensor.shape, shape));
            match &tensor.content {
                HfContent::Zeros => zeros.push(name.to_owned()),
                HfContent::Parameters(parts) => {
                    for part in parts {
                        let place = HfPlace { tensor: name.to_owned(), ..part.clone() };
                        places.entry(part.parameter.as_str()).or_default().push(place);
                    }
                }
            }
        }
        let mut tied_copies = Vec::new();
        for (tensor, parameter) in &self.tied {
            if let Some((name, shape)) = found.remove(tensor)
                && let Some(place) = places.get(parameter.as_str()).and_then(|places| places.first())
            {
                problems.extend(wrong_shape(name, &place.tensor_shape, shape));
                tied_copies.push((name.to_owned(), place.clone()));
            }
        }
        problems.extend(
            found.into_values().map(|(name, _)| CheckpointProblem::Unexpected { tensor: name.to_owned() }),
        );
        if !problems.is_empty() {
            return Err(ModelError::Checkpoint { problems });
        }
        let places =
            self.parameters.iter().filter_map(|name| places.remove(name.as_str())).flatten().collect();
        Ok(HfImport { places, zeros, tied_copies })
    }

    fn places(&self) -> impl Iterator<Item = &HfPlace> {
        self.tensors.iter().flat_map(|tensor| match &tensor.content {
            HfContent::Parameters(places) => places.as_slice(),
            HfContent::Zeros => &[],
        })
    }

    /// Returns the names that do not have the family's prefix: those of a head.
    fn outside(&self) -> BTreeSet<&str> {
        let names = self.tensors.iter().map(|tensor| &tensor.name);
        let tied = self.tied.iter().map(|(tensor, _)| tensor);
        names.chain(tied).map(String::as_str).filter(|name| !name.starts_with(self.prefix)).collect()
    }
}

impl HfImport {
    /// Checks that `bytes`, the data of a tensor in [`HfImport::zeros`] with elements of `element_bytes` each, are zero.
    ///
    /// # Errors
    /// If an element is not zero; the error names the first.
    pub fn require_zeros(tensor: &str, element_bytes: usize, bytes: &[u8]) -> Result<(), ModelError> {
        match bytes.iter().position(|&byte| byte != 0) {
            Some(byte) => {
                Err(ModelError::NotZero { tensor: tensor.to_owned(), element: byte / element_bytes.max(1) })
            }
            None => Ok(()),
        }
    }
}

/// Returns true if a tensor is a buffer that older versions of transformers saved and newer ones compute.
fn is_buffer(name: &str) -> bool {
    const ENDS: [&str; 5] = [
        ".attn.bias",
        ".attn.masked_bias",
        ".attention.bias",
        ".attention.masked_bias",
        "rotary_emb.inv_freq",
    ];
    ENDS.iter().any(|end| name.ends_with(end))
}

fn wrong_shape(tensor: &str, expected: &[usize], found: &[usize]) -> Option<CheckpointProblem> {
    (expected != found).then(|| CheckpointProblem::Shape {
        tensor: tensor.to_owned(),
        expected: expected.to_vec(),
        found: found.to_vec(),
    })
}
