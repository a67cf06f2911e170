//! The tensors of a matrix of integer codes: their names, types and shapes in each method.

use ::safetensors::Dtype;
use lockstep_plan::DType;

use super::{
    integers::{
        Codes, Groups, IntegerMatrix, MIDDLE_OF_BYTE, ScaleOrder, Scales, Zeros, are_groups_permuted,
        are_groups_valid,
    },
    parts::Part,
};
use crate::hf::HfCheckpoint;

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

/// Returns the matrix of a module of GPTQ.
pub(super) fn gptq<'a>(
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

/// Returns the matrix of a module of AWQ.
pub(super) fn awq<'a>(
    files: &'a HfCheckpoint,
    module: &str,
    group: Option<usize>,
) -> Result<IntegerMatrix<'a>, String> {
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

/// Returns the matrix of a module of compressed-tensors.
pub(super) fn compressed_tensors<'a>(
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
        Some(zeros) => signed_zeros(zeros, [outputs, group_count], bits)?,
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
        Some(zeros) => signed_zeros(zeros, [outputs, group_count], 8)?,
    };
    let (codes, groups) =
        (Codes::Bytes { bytes: codes.tensor.bytes }, Groups::Contiguous(inputs / group_count));
    Ok(IntegerMatrix { codes, zeros, scales, groups, inputs, outputs, group_count })
}

/// Returns zero points of codes of `bits` bits in signed bytes.
fn signed_zeros<'a>(zeros: Part<'a>, shape: [usize; 2], bits: usize) -> Result<Zeros<'a>, String> {
    let zeros = zeros.of_type(Dtype::I8)?;
    if zeros.tensor.elements() != shape[0] * shape[1] {
        return Err(format!(
            "`{}` has the shape {:?}; expected is {shape:?}",
            zeros.name, zeros.tensor.shape
        ));
    }
    let limit = 1_i16 << (bits - 1);
    let bytes = zeros.tensor.bytes;
    if bytes.iter().any(|byte| !(-limit..limit).contains(&byte.cast_signed().into())) {
        return Err(format!("`{}` has a zero point beyond {bits} bits", zeros.name));
    }
    Ok(Zeros::Bytes { bytes })
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

/// Reciprocal of 127 as bitsandbytes has it (`_ops.py`: `int8_vectorwise_dequant`).
const RECIPROCAL_OF_127: f32 = 7.874_016e-3;

/// Returns the matrix of a module of bitsandbytes in 8 bits: each row has its largest magnitude.
pub(super) fn llm_int8<'a>(files: &'a HfCheckpoint, module: &str) -> Result<IntegerMatrix<'a>, String> {
    let codes = Part::require(files, module, "weight")?.of_type(Dtype::I8)?;
    let [outputs, inputs] = codes.matrix()?;
    if inputs == 0 {
        return Err(format!("`{}` has no columns", codes.name));
    }
    if let Some(order) = Part::find(files, module, "weight_format")
        && order.tensor.bytes != [0]
    {
        return Err(format!("`{}` is not 0, which is row by row", order.name));
    }
    let largest = Part::require(files, module, "SCB")?.of_type(Dtype::F32)?.of_shape(&[outputs])?;
    let scales = Scales {
        bytes: largest.tensor.bytes,
        dtype: DType::F32,
        order: ScaleOrder::ByOutput,
        factor: Some(RECIPROCAL_OF_127),
    };
    Ok(IntegerMatrix {
        codes: Codes::Bytes { bytes: codes.tensor.bytes },
        zeros: Zeros::Constant(MIDDLE_OF_BYTE),
        scales,
        groups: Groups::Contiguous(inputs),
        inputs,
        outputs,
        group_count: 1,
    })
}
