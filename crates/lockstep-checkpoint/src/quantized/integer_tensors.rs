//! The tensors of a matrix of integer codes: their names, types and shapes in each method, checked before a byte is used.

use ::safetensors::Dtype;

use super::{
    config::Quantization,
    integers::{
        Codes, Groups, IntegerMatrix, MIDDLE_OF_BYTE, ScaleOrder, Scales, Zeros, are_groups_permuted,
        are_groups_valid,
    },
};
use crate::{convert::is_float, hf::HfCheckpoint, safetensors::TensorRef};

/// Tensor of a module.
struct Part<'a> {
    name: String,
    tensor: TensorRef<'a>,
}

impl<'a> Part<'a> {
    /// Returns a tensor of a module; `None` if there is none.
    fn find(files: &'a HfCheckpoint, module: &str, suffix: &str) -> Option<Self> {
        let name = format!("{module}.{suffix}");
        let tensor = files.tensor(&name).ok()?;
        Some(Self { name, tensor })
    }

    fn require(files: &'a HfCheckpoint, module: &str, suffix: &str) -> Result<Self, String> {
        Self::find(files, module, suffix).ok_or_else(|| format!("`{module}.{suffix}` is missing"))
    }

    /// Checks the type.
    fn of_type(self, dtype: Dtype) -> Result<Self, String> {
        if self.tensor.dtype == dtype {
            return Ok(self);
        }
        Err(format!("`{}` is {}; expected is {dtype}", self.name, self.tensor.dtype))
    }

    /// Checks the shape.
    fn of_shape(self, shape: &[usize]) -> Result<Self, String> {
        if self.tensor.shape == shape {
            return Ok(self);
        }
        Err(format!("`{}` has the shape {:?}; expected is {shape:?}", self.name, self.tensor.shape))
    }

    /// Returns the shape of a matrix.
    fn matrix(&self) -> Result<[usize; 2], String> {
        let matrix = self.tensor.shape.try_into();
        matrix.map_err(|_| {
            format!("`{}` has the shape {:?}; it must be a matrix", self.name, self.tensor.shape)
        })
    }

    /// Returns the scales in it.
    fn scales(self, order: ScaleOrder) -> Result<Scales<'a>, String> {
        let dtype = self.tensor.known_dtype().filter(|&dtype| is_float(dtype));
        let dtype = dtype.ok_or_else(|| {
            format!("`{}` is {}; scales are f32, bf16 or f16", self.name, self.tensor.dtype)
        })?;
        Ok(Scales { bytes: self.tensor.bytes, dtype, order })
    }
}

/// Suffixes of all tensors of modules that a method replaces a weight by.
pub(super) fn suffixes(quantization: &Quantization) -> &'static [&'static str] {
    match quantization {
        Quantization::Gptq { .. } | Quantization::Awq { .. } => &["qweight", "qzeros", "scales", "g_idx"],
        Quantization::CompressedTensors { .. } => &[
            "weight_packed",
            "weight_scale",
            "weight_zero_point",
            "weight_shape",
            "weight_g_idx",
            "input_scale",
            "input_zero_point",
            "output_scale",
            "output_zero_point",
            "k_scale",
            "v_scale",
        ],
    }
}

/// Returns the modules whose weights are packed.
pub(super) fn modules<'a>(files: &'a HfCheckpoint, quantization: &Quantization) -> Vec<&'a str> {
    let module = |name: &'a str| match quantization {
        Quantization::Gptq { .. } | Quantization::Awq { .. } => name.strip_suffix(".qweight"),
        Quantization::CompressedTensors { .. } => name.strip_suffix(".weight_packed").or_else(|| {
            let module = name.strip_suffix(".weight")?;
            files.contains(&format!("{module}.weight_scale")).then_some(module)
        }),
    };
    files.names().filter_map(module).collect()
}

/// Returns the matrix of a module.
///
/// # Errors
/// If a tensor is missing or has another type or shape than the others imply.
pub(super) fn matrix<'a>(
    files: &'a HfCheckpoint,
    quantization: &Quantization,
    module: &str,
) -> Result<IntegerMatrix<'a>, String> {
    match quantization {
        Quantization::Gptq { bits, group, zero_shift } => gptq(files, module, (*bits, *group, *zero_shift)),
        Quantization::Awq { group } => awq(files, module, *group),
        Quantization::CompressedTensors { bits } => compressed_tensors(files, module, bits),
    }
}

/// Returns the number of groups of `group` inputs.
fn group_count(inputs: usize, group: usize) -> Result<usize, String> {
    match inputs.div_ceil(group) {
        0 => Err("it has no inputs".to_owned()),
        count => Ok(count),
    }
}

/// Returns `count · per_word`, the elements in a number of words.
fn elements(words: usize, per_word: usize) -> Result<usize, String> {
    words
        .checked_mul(per_word)
        .filter(|&count| count > 0)
        .ok_or_else(|| format!("{words} words are not a size"))
}

fn gptq<'a>(
    files: &'a HfCheckpoint,
    module: &str,
    (bits, group, shift): (usize, Option<usize>, u32),
) -> Result<IntegerMatrix<'a>, String> {
    let codes = Part::require(files, module, "qweight")?.of_type(Dtype::I32)?;
    let [lines, outputs] = codes.matrix()?;
    let inputs = elements(lines, 32 / bits)?;
    let group = group.unwrap_or(inputs);
    let group_count = group_count(inputs, group)?;
    let zero_words = outputs.div_ceil(32 / bits);
    let zeros =
        Part::require(files, module, "qzeros")?.of_type(Dtype::I32)?.of_shape(&[group_count, zero_words])?;
    let scales = Part::require(files, module, "scales")?.of_shape(&[group_count, outputs])?;
    let mut groups = Groups::Contiguous(group);
    if let Some(listed) = Part::find(files, module, "g_idx") {
        let listed = listed.of_type(Dtype::I32)?.of_shape(&[inputs])?;
        if !are_groups_valid(listed.tensor.bytes, group_count) {
            return Err(format!("`{}` names a group that is not below {group_count}", listed.name));
        }
        if are_groups_permuted(listed.tensor.bytes, group) {
            groups = Groups::Listed(listed.tensor.bytes);
        }
    }
    Ok(IntegerMatrix {
        codes: Codes::AlongInputs { words: codes.tensor.bytes, bits },
        zeros: Zeros::AcrossOutputs { words: zeros.tensor.bytes, bits, shift, is_awq: false },
        scales: scales.scales(ScaleOrder::ByGroup)?,
        groups,
        inputs,
        outputs,
        group_count,
    })
}

fn awq<'a>(files: &'a HfCheckpoint, module: &str, group: Option<usize>) -> Result<IntegerMatrix<'a>, String> {
    const PER_WORD: usize = 8;
    let codes = Part::require(files, module, "qweight")?.of_type(Dtype::I32)?;
    let [inputs, words] = codes.matrix()?;
    let outputs = elements(words, PER_WORD)?;
    let group = group.unwrap_or(inputs.max(1));
    let group_count = group_count(inputs, group)?;
    let zeros =
        Part::require(files, module, "qzeros")?.of_type(Dtype::I32)?.of_shape(&[group_count, words])?;
    let scales = Part::require(files, module, "scales")?.of_shape(&[group_count, outputs])?;
    Ok(IntegerMatrix {
        codes: Codes::AcrossOutputs { words: codes.tensor.bytes },
        zeros: Zeros::AcrossOutputs { words: zeros.tensor.bytes, bits: 4, shift: 0, is_awq: true },
        scales: scales.scales(ScaleOrder::ByGroup)?,
        groups: Groups::Contiguous(group),
        inputs,
        outputs,
        group_count,
    })
}

fn compressed_tensors<'a>(
    files: &'a HfCheckpoint,
    module: &str,
    bits: &[usize],
) -> Result<IntegerMatrix<'a>, String> {
    let Some(packed) = Part::find(files, module, "weight_packed") else {
        return plain_bytes(files, module);
    };
    let packed = packed.of_type(Dtype::I32)?;
    let [outputs, words] = packed.matrix()?;
    let shape = Part::require(files, module, "weight_shape")?;
    let inputs = match weight_shape(&shape)? {
        [rows, inputs] if rows == outputs && inputs > 0 => inputs,
        shape => {
            return Err(format!("`{module}.weight_shape` is {shape:?}, but there are {outputs} packed rows"));
        }
    };
    let fits = |bits: &&usize| inputs.checked_mul(**bits).is_some_and(|bits| bits.div_ceil(32) == words);
    let bits = *bits.iter().find(fits).ok_or_else(|| {
        format!("`{}` has {words} words a row, which are not {inputs} codes of {bits:?} bits", packed.name)
    })?;
    let (scales, group_count) = scales_by_output(files, module, outputs)?;
    let group = inputs.div_ceil(group_count);
    if !inputs.is_multiple_of(group_count) {
        return Err(format!("`{module}.weight_scale` has {group_count} groups for {inputs} inputs"));
    }
    let zeros = match Part::find(files, module, "weight_zero_point") {
        None => Zeros::Constant(1 << (bits - 1)),
        Some(zeros) if zeros.tensor.dtype == Dtype::I32 => {
            let zeros = zeros.of_shape(&[outputs.div_ceil(32 / bits), group_count])?;
            Zeros::DownOutputs { words: zeros.tensor.bytes, bits }
        }
        Some(zeros) => signed_zeros(zeros, [outputs, group_count])?,
    };
    let mut groups = Groups::Contiguous(group);
    if let Some(listed) = Part::find(files, module, "weight_g_idx") {
        let listed = listed.of_type(Dtype::I32)?.of_shape(&[inputs])?;
        if !are_groups_valid(listed.tensor.bytes, group_count) {
            return Err(format!("`{}` names a group that is not below {group_count}", listed.name));
        }
        if are_groups_permuted(listed.tensor.bytes, group) {
            groups = Groups::Listed(listed.tensor.bytes);
        }
    }
    let codes = Codes::Rows { words: packed.tensor.bytes, bits };
    Ok(IntegerMatrix { codes, zeros, scales, groups, inputs, outputs, group_count })
}

/// Returns the matrix of a module whose codes are bytes (`int-quantized`).
fn plain_bytes<'a>(files: &'a HfCheckpoint, module: &str) -> Result<IntegerMatrix<'a>, String> {
    let codes = Part::require(files, module, "weight")?.of_type(Dtype::I8)?;
    let [outputs, inputs] = codes.matrix()?;
    let (scales, group_count) = scales_by_output(files, module, outputs)?;
    if inputs == 0 || !inputs.is_multiple_of(group_count) {
        return Err(format!("`{module}.weight_scale` has {group_count} groups for {inputs} inputs"));
    }
    let zeros = match Part::find(files, module, "weight_zero_point") {
        None => Zeros::Constant(MIDDLE_OF_BYTE),
        Some(zeros) => signed_zeros(zeros, [outputs, group_count])?,
    };
    let (codes, groups) =
        (Codes::Bytes { bytes: codes.tensor.bytes }, Groups::Contiguous(inputs / group_count));
    Ok(IntegerMatrix { codes, zeros, scales, groups, inputs, outputs, group_count })
}

/// Returns zero points in signed bytes.
fn signed_zeros<'a>(zeros: Part<'a>, shape: [usize; 2]) -> Result<Zeros<'a>, String> {
    let zeros = zeros.of_type(Dtype::I8)?;
    let count: usize = zeros.tensor.elements();
    if count != shape[0] * shape[1] {
        return Err(format!(
            "`{}` has the shape {:?}; expected is {shape:?}",
            zeros.name, zeros.tensor.shape
        ));
    }
    Ok(Zeros::Bytes { bytes: zeros.tensor.bytes })
}

/// Returns the scales of a module of compressed-tensors, and the number of groups.
fn scales_by_output<'a>(
    files: &'a HfCheckpoint,
    module: &str,
    outputs: usize,
) -> Result<(Scales<'a>, usize), String> {
    let scales = Part::require(files, module, "weight_scale")?;
    let (order, groups) = match scales.tensor.shape {
        [] | [1] | [1, 1] => (ScaleOrder::One, 1),
        [rows] if *rows == outputs => (ScaleOrder::ByOutput, 1),
        [rows, groups] if *rows == outputs && *groups > 0 => (ScaleOrder::ByOutput, *groups),
        shape => {
            return Err(format!(
                "`{}` has the shape {shape:?}; expected is [{outputs}, groups]",
                scales.name
            ));
        }
    };
    Ok((scales.scales(order)?, groups))
}

/// Returns the shape in a tensor `weight_shape`.
fn weight_shape(shape: &Part<'_>) -> Result<[usize; 2], String> {
    let bad = || format!("`{}` is no shape of a matrix", shape.name);
    let bytes = shape.tensor.bytes;
    let numbers: Vec<i64> = match shape.tensor.dtype {
        Dtype::I64 => bytes.as_chunks::<8>().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect(),
        Dtype::I32 => {
            bytes.as_chunks::<4>().0.iter().map(|bytes| i32::from_le_bytes(*bytes).into()).collect()
        }
        _ => return Err(bad()),
    };
    match numbers[..] {
        [rows, columns] if (1..=1 << 40).contains(&rows) && (1..=1 << 40).contains(&columns) => {
            Ok([rows as usize, columns as usize])
        }
        _ => Err(bad()),
    }
}
