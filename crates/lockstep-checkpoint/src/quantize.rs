//! Quantization of a model's weights to a directory that `transformers` loads.
//!
//! The matrices of linear layers in blocks are quantized; embeddings, the head, routers and norms keep their type, as they do in
//! transformers. A directory is in the form of compressed-tensors (`pack-quantized`) or of bitsandbytes (NF4), of which transformers
//! loads no experts, which keep their type. Each tensor is read, quantized and written before the next one, so no more than one is in
//! memory.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::Path,
};

use ::safetensors::Dtype;
use lockstep_model::{HfContent, HfMapping, HfPlace, HfTensor, HfTransform, parameter_records};
use lockstep_plan::{
    DType,
    block_format::{NF4, int8_group},
};
use rayon::prelude::*;
use serde_json::{Value, json};

use crate::{
    ChannelScales, CheckpointError, convert,
    hf::{DEFAULT_SHARD_BYTES, ExportData, ExportTensor, HfExport, SINGLE_FILE},
    pretrained::{CONFIG_FILE, ModelDirectory, Weights},
    quantized_form::{QuantizedForm, nf4, symmetric_int4},
    safetensors::stored_dtype,
    trained::Trained,
    weight_quantization::{NF4_GROUP, WeightQuantization, WeightType, is_quantizable},
};

/// Result of a quantization.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuantizedModel {
    /// Number of matrices that were quantized.
    pub matrices: usize,
    /// Neighbours that share a scale.
    pub group_size: usize,
    /// Matrices of linear layers that keep their type.
    pub kept: Vec<String>,
    /// Bytes of all tensors.
    pub bytes: u64,
}

/// Parts of a quantized matrix, each a tensor.
#[derive(Debug, Clone, Copy)]
enum PackedPart {
    Codes,
    Scales,
    Shape,
    Table,
    State,
}

/// A matrix that is quantized on the way to its file.
struct Matrix<'a> {
    model: &'a ModelDirectory,
    tensor: &'a HfTensor,
    form: QuantizedForm,
}

/// The matrices that a quantization changes, and their form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuantizedMatrices {
    /// Form of the matrices.
    pub form: QuantizedForm,
    /// Parameters whose matrices are quantized.
    pub parameters: BTreeSet<String>,
    /// Modules of linear layers whose matrices keep their type.
    pub kept: Vec<String>,
    /// Names of the quantized matrices in files.
    pub tensors: BTreeSet<String>,
}

impl ModelDirectory {
    /// Returns the model with factors on its parameters.
    pub fn with_scales(self, scales: ChannelScales) -> Self {
        let (path, config) = (self.path.clone(), self.config.clone());
        Self {
            path,
            config,
            weights: Weights::Tuned { base: Box::new(self), trained: Trained::Scales(scales) },
        }
    }

    /// Returns true if parameters have factors.
    pub(crate) fn has_scales(&self) -> bool {
        matches!(&self.weights, Weights::Tuned { trained: Trained::Scales(scales), .. } if !scales.is_empty())
    }

    /// Returns the matrices that are quantized: those of linear layers in blocks whose rows are whole groups.
    ///
    /// # Errors
    /// If there is none.
    pub fn quantized_matrices(
        &self,
        quantization: WeightQuantization,
    ) -> Result<QuantizedMatrices, CheckpointError> {
        let mapping = HfMapping::new(&self.config);
        let shapes: BTreeMap<String, Vec<usize>> =
            parameter_records(&self.config).into_iter().map(|record| (record.name, record.shape)).collect();
        let packs_experts = quantization.to != WeightType::Nf4;
        let is_linear = |tensor: &&HfTensor| {
            let of_layer = |place: &HfPlace| {
                let is_stack = shapes.get(&place.parameter).is_none_or(|shape| shape.len() != 2);
                matches!(place.transform, HfTransform::Same | HfTransform::Rows { .. })
                    && is_quantizable(&place.parameter, &tensor.shape)
                    && (packs_experts || !is_stack)
            };
            tensor.content != HfContent::Zeros && places(tensor).iter().all(of_layer)
        };
        let linear: Vec<&HfTensor> = mapping.tensors().iter().filter(is_linear).collect();
        // One size for all matrices, the one that fits the most of them.
        let count =
            |group: usize| linear.iter().filter(|tensor| tensor.shape[1].is_multiple_of(group)).count();
        let group = quantization.groups().max_by_key(|&group| (count(group), group));
        let group_size =
            group.filter(|&group| count(group) > 0).ok_or_else(|| CheckpointError::NothingToQuantize {
                path: self.path.clone(),
                model_type: self.config.model_type().to_owned(),
            })?;
        let (packed, kept): (Vec<&HfTensor>, Vec<&HfTensor>) =
            linear.into_iter().partition(|tensor| tensor.shape[1].is_multiple_of(group_size));
        let parameters = packed.iter().flat_map(|tensor| places(tensor)).map(|place| place.parameter.clone());
        Ok(QuantizedMatrices {
            form: QuantizedForm { to: quantization.to, group_size, dtype: self.stored_dtype() },
            parameters: parameters.collect(),
            kept: kept.into_iter().map(|tensor| module_of(&tensor.name).to_owned()).collect(),
            tensors: packed.iter().map(|tensor| tensor.name.clone()).collect(),
        })
    }

    /// Writes the model with quantized weights as a directory that `transformers` loads.
    ///
    /// # Errors
    /// If the model has no linear layer whose rows are whole groups, or as for [`ModelDirectory::export_hf`].
    pub fn quantize(
        &self,
        quantization: WeightQuantization,
        out: &Path,
    ) -> Result<QuantizedModel, CheckpointError> {
        self.check_base()?;
        let QuantizedMatrices { form, kept, tensors: packed, .. } = self.quantized_matrices(quantization)?;
        let mapping = HfMapping::new(&self.config);
        let of_matrix = mapping.tensors().iter().filter(|tensor| packed.contains(&tensor.name));
        let matrices: Vec<Matrix<'_>> =
            of_matrix.map(|tensor| Matrix { model: self, tensor, form }).collect();
        let mut tensors: Vec<ExportTensor<'_>> = Vec::new();
        let by_name: HashMap<&str, &Matrix<'_>> =
            matrices.iter().map(|matrix| (matrix.tensor.name.as_str(), matrix)).collect();
        for tensor in mapping.tensors() {
            match by_name.get(tensor.name.as_str()) {
                Some(matrix) => tensors.extend(matrix.tensors()),
                None => tensors.push(self.export_tensor(tensor)),
            }
        }
        let mut config = self.config.to_json(form.dtype);
        config["quantization_config"] = description(form, &kept, self.other_modules(&mapping, &matrices));
        let config = serde_json::to_string_pretty(&config).unwrap_or_default() + "\n";
        let export = HfExport {
            tensors,
            dtype: Some(form.dtype),
            file: SINGLE_FILE,
            texts: BTreeMap::from([(CONFIG_FILE.to_owned(), config)]),
            copies: self.companions(),
            shard_bytes: DEFAULT_SHARD_BYTES,
        };
        export.write(out)?;
        let bytes = export.bytes();
        Ok(QuantizedModel { matrices: matrices.len(), group_size: form.group_size, kept, bytes })
    }

    /// Returns the modules outside of blocks with matrices, such as `lm_head`.
    fn other_modules(&self, mapping: &HfMapping, matrices: &[Matrix<'_>]) -> Vec<String> {
        let is_other = |tensor: &&HfTensor| {
            tensor.shape.len() == 2 && matrices.iter().all(|matrix| matrix.tensor.name != tensor.name)
        };
        let mut modules: Vec<String> = mapping
            .tensors()
            .iter()
            .filter(is_other)
            .map(|tensor| module_of(&tensor.name).to_owned())
            .collect();
        // A tied head has no tensor, and is a module all the same.
        modules.push("lm_head".to_owned());
        modules.sort();
        modules.dedup();
        modules
    }
}

/// Returns the places of the parameters in a tensor.
fn places(tensor: &HfTensor) -> &[HfPlace] {
    match &tensor.content {
        HfContent::Parameters(places) => places,
        HfContent::Zeros => &[],
    }
}

/// Returns the module of a tensor `MODULE.weight`.
fn module_of(tensor: &str) -> &str {
    tensor.strip_suffix(".weight").unwrap_or(tensor)
}

/// Returns the `quantization_config`.
fn description(
    QuantizedForm { to, group_size: group, dtype }: QuantizedForm,
    kept: &[String],
    others: Vec<String>,
) -> Value {
    let ignored: Vec<String> = kept.iter().cloned().chain(others).collect();
    let bits = match to {
        WeightType::Nf4 => {
            return json!({
                "quant_method": "bitsandbytes", "load_in_4bit": true, "load_in_8bit": false, "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_use_double_quant": false, "bnb_4bit_compute_dtype": torch_name(dtype),
                "bnb_4bit_quant_storage": "uint8", "llm_int8_skip_modules": ignored,
            });
        }
        WeightType::Int8 => 8,
        WeightType::Int4 => 4,
    };
    let weights = json!({
        "num_bits": bits, "type": "int", "strategy": "group", "group_size": group, "symmetric": true,
        "dynamic": false, "actorder": null,
    });
    json!({
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": null,
                                      "output_activations": null}},
        "ignore": ignored, "kv_cache_scheme": null,
    })
}

fn torch_name(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        _ => "float32",
    }
}

impl<'a> Matrix<'a> {
    /// Returns the tensors that replace the matrix.
    fn tensors(&'a self) -> Vec<ExportTensor<'a>> {
        let [rows, columns] = [self.tensor.shape[0], self.tensor.shape[1]];
        let groups = columns / self.form.group_size;
        let scales = (PackedPart::Scales, "weight_scale", stored_dtype(self.form.dtype), vec![rows, groups]);
        let shape = (PackedPart::Shape, "weight_shape", Dtype::I64, vec![2]);
        let parts = match self.form.to {
            WeightType::Int8 | WeightType::Int4 => {
                let per_word = if self.form.to == WeightType::Int8 { 4 } else { 8 };
                let words = vec![rows, columns / per_word];
                vec![(PackedPart::Codes, "weight_packed", Dtype::I32, words), scales, shape]
            }
            WeightType::Nf4 => vec![
                (PackedPart::Codes, "weight", Dtype::U8, vec![rows * columns / 2, 1]),
                (PackedPart::Scales, "weight.absmax", Dtype::F32, vec![rows * groups]),
                (PackedPart::Table, "weight.quant_map", Dtype::F32, vec![16]),
                (
                    PackedPart::State,
                    "weight.quant_state.bitsandbytes__nf4",
                    Dtype::U8,
                    vec![self.state().len()],
                ),
            ],
        };
        let module = module_of(&self.tensor.name);
        let tensor = |(part, suffix, dtype, shape): (PackedPart, &str, Dtype, Vec<usize>)| ExportTensor {
            name: format!("{module}.{suffix}"),
            shape,
            data: ExportData::Encoded { dtype, bytes: Box::new(move || self.bytes(part)) },
        };
        parts.into_iter().map(tensor).collect()
    }

    /// Returns the description of a module of bitsandbytes.
    fn state(&self) -> String {
        json!({"quant_type": "nf4", "blocksize": NF4_GROUP, "dtype": torch_name(self.form.dtype), "shape": self.tensor.shape}).to_string()
    }

    fn bytes(&self, part: PackedPart) -> Result<Vec<u8>, CheckpointError> {
        let [rows, columns] = [self.tensor.shape[0], self.tensor.shape[1]];
        match (part, self.form.to) {
            (PackedPart::Shape, _) => {
                return Ok([rows, columns].iter().flat_map(|&size| (size as i64).to_le_bytes()).collect());
            }
            (PackedPart::Table, _) => {
                return Ok(NF4.iter().flat_map(|value| value.to_le_bytes()).collect());
            }
            (PackedPart::State, _) => return Ok(self.state().into_bytes()),
            _ => {}
        }
        let mut values = self.model.assemble(self.tensor, rows * columns)?;
        // What is quantized are the weights in the model's type; those with factors are in no file.
        if !self.model.has_scales() {
            values.par_iter_mut().for_each(|value| *value = self.form.rounded(*value));
        }
        Ok(match (part, self.form.to) {
            (PackedPart::Codes, WeightType::Nf4) => {
                self.each_group(&values, |group, bytes| bytes.extend(nf4(group).1))
            }
            (PackedPart::Scales, WeightType::Nf4) => {
                self.each_group(&values, |group, bytes| bytes.extend(nf4(group).0.to_le_bytes()))
            }
            (PackedPart::Codes, WeightType::Int8) => self.each_group(&values, |group, bytes| {
                let mut codes = vec![0; group.len()];
                int8_group(group, |scale| self.form.rounded(scale), &mut codes);
                // Stored with 128 added, low bytes first.
                bytes.extend(codes.iter().map(|code| code.cast_unsigned() ^ 128));
            }),
            (PackedPart::Codes, _) => self.each_group(&values, |group, bytes| {
                let (_, codes) = symmetric_int4(group, |scale| self.form.rounded(scale));
                bytes.extend(codes.chunks_exact(2).map(|pair| pair[0] | pair[1] << 4));
            }),
            (_, to) => self.each_group(&values, |group, bytes| {
                let round = |scale| self.form.rounded(scale);
                let scale = match to {
                    WeightType::Int8 => int8_group(group, round, &mut vec![0; group.len()]),
                    _ => symmetric_int4(group, round).0,
                };
                let mut stored = vec![0; self.form.dtype.size_bytes()];
                convert::narrow(self.form.dtype, &[scale], &mut stored);
                bytes.extend(stored);
            }),
        })
    }

    /// Returns what a function makes of each group, in their order.
    fn each_group(&self, values: &[f32], make: impl Fn(&[f32], &mut Vec<u8>) + Sync) -> Vec<u8> {
        let rows: Vec<Vec<u8>> = values
            .par_chunks(self.tensor.shape[1])
            .map(|row| {
                let mut bytes = Vec::new();
                row.chunks_exact(self.form.group_size).for_each(|group| make(group, &mut bytes));
                bytes
            })
            .collect();
        rows.concat()
    }
}
