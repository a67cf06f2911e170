//! The tensors of a model's Hugging Face checkpoint, and the location of each parameter in them.
//!
//! [`HfMapping`] is computed from the configuration alone. Export walks its tensors and fills each one from
//! parameters. Import matches it with the names and shapes of a file, and reports every tensor that is missing,
//! unexpected or of the wrong shape. Both use the same [`HfPlace`], in opposite directions.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use lockstep_plan::ParameterRecord;

use crate::config::{Gpt2Config, LatentAttention, LlamaConfig, ModelConfig};
use crate::error::{CheckpointProblem, ModelError};
use crate::hf_transform::HfTransform;
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
}

/// A tensor of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HfTensor {
    /// Name, with the family's prefix.
    pub name: String,
    /// Shape as stored.
    pub shape: Vec<usize>,
    /// Source of the tensor's elements.
    pub content: HfContent,
}

/// Source of a checkpoint tensor's elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HfContent {
    /// Parameters, which together cover it exactly.
    Parameters(Vec<HfPlace>),
    /// Zeros: a bias that transformers expects and the model does not have.
    Zeros,
}

/// Location of a parameter, or of a part of one, in a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HfPlace {
    /// Canonical name of the parameter.
    pub parameter: String,
    /// Name of the tensor; in an [`HfImport`], the name in the file.
    pub tensor: String,
    /// Shape of the tensor as stored.
    pub tensor_shape: Vec<usize>,
    /// First element of the parameter that is in this tensor. In a checkpoint each expert of a stack has a tensor of its own.
    pub first_element: usize,
    /// Layout of these elements in the tensor.
    pub transform: HfTransform,
}

/// Instructions for reading a checkpoint into a model.
#[derive(Debug, Clone)]
pub struct HfImport {
    /// Places of each parameter that is not tied, in the model's order; the places of one parameter are consecutive,
    /// in the order of its elements.
    pub places: Vec<HfPlace>,
    /// Tensors of the file that must be zero (see [`Gpt2Config::bias`]); [`HfImport::require_zeros`] checks one.
    pub zeros: Vec<String>,
    /// Tensors of the file that repeat a tied parameter, as pairs of (tensor, place of the parameter that it must equal).
    pub tied_copies: Vec<(String, HfPlace)>,
}

impl HfMapping {
    /// Computes the mapping of the model that `config` describes.
    pub fn new(config: &ModelConfig) -> Self {
        let records = parameter_records(config);
        let (prefix, tensors) = match config {
            ModelConfig::Gpt2(config) => ("transformer.", gpt2_tensors(config, &records)),
            ModelConfig::Llama(config) => ("model.", llama_tensors(config, &records)),
        };
        let tied = records
            .iter()
            .filter_map(|record| record.tie.map(|id| (record.name.clone(), records[id.0].name.clone())))
            .collect();
        let parameters = own(&records).map(|record| record.name.clone()).collect();
        Self { prefix, tensors, tied, parameters }
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
    /// Buffers that older versions of transformers saved are skipped: causal masks (`attn.bias`, `attn.masked_bias`)
    /// and `rotary_emb.inv_freq`.
    ///
    /// # Errors
    /// If a tensor is missing, unexpected, duplicated or of the wrong shape; the error lists every such tensor.
    pub fn match_checkpoint<'a>(
        &self,
        checkpoint: impl IntoIterator<Item = (&'a str, &'a [usize])>,
    ) -> Result<HfImport, ModelError> {
        let mut problems = Vec::new();
        let mut found: BTreeMap<String, (&str, &[usize])> = BTreeMap::new();
        for (name, shape) in checkpoint {
            let full = self.full_name(name);
            if is_buffer(name) {
                continue;
            }
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

    /// Returns the name with the family's prefix, which all tensors but the output layer have.
    fn full_name(&self, name: &str) -> String {
        if name.starts_with(self.prefix) || name.starts_with("lm_head.") {
            name.to_owned()
        } else {
            format!("{}{name}", self.prefix)
        }
    }
}

impl HfPlace {
    /// Returns the range of the parameter's elements that this place holds.
    pub fn part(&self) -> Range<usize> {
        self.first_element..self.first_element + self.parameter_elements()
    }

    /// Copies these elements of the parameter, in canonical order, out of the stored tensor.
    ///
    /// # Errors
    /// If the length of a slice does not match its shape.
    pub fn read<T: Copy>(&self, stored: &[T], parameter: &mut [T]) -> Result<(), ModelError> {
        self.check(stored.len(), parameter.len())?;
        self.transform.read(stored, parameter);
        Ok(())
    }

    /// Copies these elements of the parameter into the stored tensor, and leaves its other elements alone.
    ///
    /// # Errors
    /// If the length of a slice does not match its shape.
    pub fn write<T: Copy>(&self, parameter: &[T], stored: &mut [T]) -> Result<(), ModelError> {
        self.check(stored.len(), parameter.len())?;
        self.transform.write(parameter, stored);
        Ok(())
    }

    /// Runs [`HfPlace::read`] on bytes, for elements of `ELEMENT_BYTES` each; no alignment is needed.
    ///
    /// # Errors
    /// If the length of a slice does not match its shape.
    pub fn read_bytes<const ELEMENT_BYTES: usize>(
        &self,
        stored: &[u8],
        parameter: &mut [u8],
    ) -> Result<(), ModelError> {
        let (stored, stored_rest) = stored.as_chunks::<ELEMENT_BYTES>();
        let (parameter, parameter_rest) = parameter.as_chunks_mut::<ELEMENT_BYTES>();
        self.check(stored.len() + stored_rest.len(), parameter.len() + parameter_rest.len())?;
        self.read(stored, parameter)
    }

    /// Runs [`HfPlace::write`] on bytes, for elements of `ELEMENT_BYTES` each; no alignment is needed.
    ///
    /// # Errors
    /// If the length of a slice does not match its shape.
    pub fn write_bytes<const ELEMENT_BYTES: usize>(
        &self,
        parameter: &[u8],
        stored: &mut [u8],
    ) -> Result<(), ModelError> {
        let (parameter, parameter_rest) = parameter.as_chunks::<ELEMENT_BYTES>();
        let (stored, stored_rest) = stored.as_chunks_mut::<ELEMENT_BYTES>();
        self.check(stored.len() + stored_rest.len(), parameter.len() + parameter_rest.len())?;
        self.write(parameter, stored)
    }

    /// Number of elements of the stored tensor.
    fn stored_elements(&self) -> usize {
        self.tensor_shape.iter().product()
    }

    /// Number of the parameter's elements that this place holds.
    pub fn parameter_elements(&self) -> usize {
        self.transform.parameter_elements(self.stored_elements())
    }

    fn check(&self, stored: usize, parameter: usize) -> Result<(), ModelError> {
        let checks = [
            (&self.tensor, "the stored tensor", self.stored_elements(), stored),
            (&self.parameter, "the parameter", self.parameter_elements(), parameter),
        ];
        for (tensor, what, expected, found) in checks {
            if expected != found {
                return Err(ModelError::Length { tensor: tensor.clone(), what, expected, found });
            }
        }
        Ok(())
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

/// Returns the parameters that are not tied to another.
fn own(records: &[ParameterRecord]) -> impl Iterator<Item = &ParameterRecord> {
    records.iter().filter(|record| record.tie.is_none())
}

/// Returns the tensor that consists of one place.
fn single(place: HfPlace) -> HfTensor {
    let (name, shape) = (place.tensor.clone(), place.tensor_shape.clone());
    HfTensor { name, shape, content: HfContent::Parameters(vec![place]) }
}

/// Returns the tensor of a parameter with the same name and layout.
fn same(record: &ParameterRecord) -> HfTensor {
    single(place(record, record.name.clone(), record.shape.clone(), HfTransform::Same))
}

/// Returns the place of a parameter from its first element on.
fn place(
    record: &ParameterRecord,
    tensor: String,
    tensor_shape: Vec<usize>,
    transform: HfTransform,
) -> HfPlace {
    HfPlace { parameter: record.name.clone(), tensor, tensor_shape, first_element: 0, transform }
}

/// Part of the names of stacked expert weights that precedes the expert's number in a checkpoint.
const EXPERTS: &str = ".experts.";

/// Returns the tensors of a parameter: one, or one per expert.
fn unstacked(record: &ParameterRecord) -> Vec<HfTensor> {
    let (Some(at), &[experts, rows, columns]) = (record.name.find(EXPERTS), &record.shape[..]) else {
        return vec![same(record)];
    };
    let (before, behind) = record.name.split_at(at + EXPERTS.len());
    let tensor = |expert: usize| {
        let name = format!("{before}{expert}.{behind}");
        let first_element = expert * rows * columns;
        single(HfPlace { first_element, ..place(record, name, vec![rows, columns], HfTransform::Same) })
    };
    (0..experts).map(tensor).collect()
}

/// Returns the tensors of a Llama-like model; some tensors of latent attention hold two parameters each.
fn llama_tensors(config: &LlamaConfig, records: &[ParameterRecord]) -> Vec<HfTensor> {
    let mut tensors: Vec<HfTensor> = Vec::new();
    for record in own(records) {
        let part = config.latent.as_ref().and_then(|latent| latent_part(config, latent, &record.name));
        let Some((name, transform)) = part else {
            tensors.extend(unstacked(record));
            continue;
        };
        let HfTransform::Rows { of, blocks, .. } = transform else { continue };
        let place = place(record, name, vec![of * blocks, record.shape[1]], transform);
        match tensors.iter_mut().find(|tensor| tensor.name == place.tensor) {
            Some(HfTensor { content: HfContent::Parameters(places), .. }) => places.push(place),
            _ => tensors.push(single(place)),
        }
    }
    tensors
}

/// Returns the tensor and the layout of a parameter of latent attention that shares a tensor with another; `None` for all others.
fn latent_part(
    config: &LlamaConfig,
    latent: &LatentAttention,
    parameter: &str,
) -> Option<(String, HfTransform)> {
    let LatentAttention { plain_dim, rotary_dim, value_dim, key_value_rank, .. } = *latent;
    let heads = config.num_attention_heads;
    // (suffix of the parameter, suffix of the tensor, first row in a block, rows, rows of a block, blocks)
    let parts = [
        ("q_proj_plain", "q_proj", 0, plain_dim, plain_dim + rotary_dim, heads),
        ("q_proj_rotary", "q_proj", plain_dim, rotary_dim, plain_dim + rotary_dim, heads),
        ("q_b_proj_plain", "q_b_proj", 0, plain_dim, plain_dim + rotary_dim, heads),
        ("q_b_proj_rotary", "q_b_proj", plain_dim, rotary_dim, plain_dim + rotary_dim, heads),
        ("kv_a_proj_narrow", "kv_a_proj_with_mqa", 0, key_value_rank, key_value_rank + rotary_dim, 1),
        (
            "kv_a_proj_rotary",
            "kv_a_proj_with_mqa",
            key_value_rank,
            rotary_dim,
            key_value_rank + rotary_dim,
            1,
        ),
        ("kv_b_proj_key", "kv_b_proj", 0, plain_dim, plain_dim + value_dim, heads),
        ("kv_b_proj_value", "kv_b_proj", plain_dim, value_dim, plain_dim + value_dim, heads),
    ];
    let module = parameter.strip_suffix(".weight")?;
    parts.into_iter().find_map(|(own, stored, first, len, of, blocks)| {
        let before = module.strip_suffix(own)?.strip_suffix('.').map(|before| format!("{before}."))?;
        let transform = HfTransform::Rows { rows: first..first + len, of, blocks };
        Some((format!("{before}{stored}.weight"), transform))
    })
}

/// Returns GPT-2's tensors: linear weights `[in, out]`, queries, keys and values side by side in `c_attn`, and biases in any case.
fn gpt2_tensors(config: &Gpt2Config, records: &[ParameterRecord]) -> Vec<HfTensor> {
    let has: BTreeSet<&str> = records.iter().map(|record| record.name.as_str()).collect();
    let with_biases = parameter_records(&ModelConfig::Gpt2(Gpt2Config { bias: true, ..config.clone() }));
    let mut tensors: Vec<HfTensor> = Vec::new();
    let mut index_of: HashMap<String, usize> = HashMap::new();
    for record in own(&with_biases) {
        let Some((name, third)) = gpt2_linear(&record.name) else {
            tensors.push(if has.contains(record.name.as_str()) { same(record) } else { zeros(record) });
            continue;
        };
        let outputs = record.shape[0];
        let (columns, stored_columns) = match third {
            Some(third) => (third * outputs..(third + 1) * outputs, 3 * outputs),
            None => (0..outputs, outputs),
        };
        let shape: Vec<usize> = record.shape[1..].iter().copied().chain([stored_columns]).collect();
        let index = *index_of.entry(name.clone()).or_insert_with(|| {
            tensors.push(HfTensor { name: name.clone(), shape: shape.clone(), content: HfContent::Zeros });
            tensors.len() - 1
        });
        if !has.contains(record.name.as_str()) {
            continue;
        }
        let place = place(record, name, shape, HfTransform::Columns { columns, stored_columns });
        match &mut tensors[index].content {
            HfContent::Parameters(places) => places.push(place),
            content @ HfContent::Zeros => *content = HfContent::Parameters(vec![place]),
        }
    }
    tensors
}

/// Returns the tensor of a parameter of GPT-2's linear layers, and the parameter's third of it if it is the fused
/// one; `None` for other parameters.
fn gpt2_linear(parameter: &str) -> Option<(String, Option<usize>)> {
    const FUSED: [&str; 3] = [".attn.q.", ".attn.k.", ".attn.v."];
    const PLAIN: [&str; 3] = [".attn.c_proj.", ".mlp.c_fc.", ".mlp.c_proj."];
    if let Some(third) = FUSED.iter().position(|part| parameter.contains(part)) {
        return Some((parameter.replace(FUSED[third], ".attn.c_attn."), Some(third)));
    }
    PLAIN.iter().any(|part| parameter.contains(part)).then(|| (parameter.to_owned(), None))
}

fn zeros(record: &ParameterRecord) -> HfTensor {
    HfTensor { name: record.name.clone(), shape: record.shape.clone(), content: HfContent::Zeros }
}

/// Returns true if a tensor is a buffer that older versions of transformers saved and newer ones compute.
fn is_buffer(name: &str) -> bool {
    [".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq"].iter().any(|end| name.ends_with(end))
}

fn wrong_shape(tensor: &str, expected: &[usize], found: &[usize]) -> Option<CheckpointProblem> {
    (expected != found).then(|| CheckpointProblem::Shape {
        tensor: tensor.to_owned(),
        expected: expected.to_vec(),
        found: found.to_vec(),
    })
}
