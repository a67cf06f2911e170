//! Quantized checkpoints in the formats of Hugging Face: a weight is packed into several tensors, which `quantization_config` describes.
//!
//! To a reader, a module has one tensor `weight` `[outputs, inputs]` again. It is decoded to numbers, or repacked into blocks that
//! kernels read ([`BlockFormat`]) with the same values. [`QuantizedFiles`] finds the packed tensors, `config` reads the description, and
//! `reader` chooses the layout: `integers` (GPTQ, AWQ, compressed-tensors, LLM.int8), `fp8`, `codebook` (NF4, FP4) or `mxfp4`.

mod codebook;
mod config;
mod fp8;
mod integer_tensors;
mod integers;
mod mxfp4;
mod parts;
mod reader;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    ops::Range,
    path::{Path, PathBuf},
};

use lockstep_model::{HfMapping, ModelConfig};
use lockstep_plan::{BlockFormat, DType};
use rayon::prelude::*;
use serde_json::Value;

pub use self::config::{Quantization, QuantizationError, parse_quantization};
use self::reader::PackedReader;
use crate::{
    CheckpointError, QuantizationSummary, StoredParameter, convert::is_float, hf::HfCheckpoint,
    pretrained::CONFIG_FILE,
};

/// Rows that a task decodes at a time: a cache line of words of neighbouring outputs.
const TASK_ROWS: usize = 16;
/// Description of the first GPTQ checkpoints, beside `config.json`.
const FIRST_GPTQ_FILE: &str = "quantize_config.json";

/// Weights of a quantized Hugging Face directory.
#[derive(Debug)]
pub(crate) struct QuantizedFiles {
    files: HfCheckpoint,
    quantization: Quantization,
    dir: PathBuf,
    /// Packed tensors by name.
    packed: BTreeMap<String, PackedTensor>,
    /// Tensors that are stored as they are.
    dense: BTreeSet<String>,
    dtype: DType,
}

/// A packed tensor.
#[derive(Debug)]
struct PackedTensor {
    /// Shape when it is decoded.
    shape: Vec<usize>,
    /// Format of blocks with the same values, or the reason why there is none.
    format: Result<BlockFormat, &'static str>,
}

/// Packed tensors that can be repacked into blocks: a matrix, rows of one, or a stack of the matrices of experts.
#[derive(Debug, Clone)]
pub(crate) struct PackedTensors<'a> {
    /// Format of the blocks.
    pub(crate) format: BlockFormat,
    /// Shape; the last dimension is the columns of a row.
    pub(crate) shape: Vec<usize>,
    /// Rows of tensors that follow each other.
    rows: Vec<PackedRows<'a>>,
    files: &'a QuantizedFiles,
}

/// Rows of the matrices in a packed tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
struct PackedRows<'a> {
    tensor: &'a str,
    first: usize,
    /// Distance between rows.
    step: usize,
    count: usize,
}

impl PackedTensors<'_> {
    /// Repacks the rows, of which each takes `row_bytes` bytes of blocks.
    ///
    /// # Errors
    /// If a float of 8 bits or a scale of MXFP4 is NaN.
    pub(crate) fn pack(&self, row_bytes: usize, blocks: &mut [u8]) -> Result<(), CheckpointError> {
        let mut rest = blocks;
        for rows in &self.rows {
            let (blocks, after) = rest.split_at_mut(rows.count * row_bytes);
            self.pack_rows(rows, row_bytes, blocks)?;
            rest = after;
        }
        Ok(())
    }

    fn pack_rows(
        &self,
        &PackedRows { tensor, first, step, .. }: &PackedRows<'_>,
        row_bytes: usize,
        blocks: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let reader = self.files.reader(tensor)?;
        let packed = blocks.par_chunks_mut((row_bytes * TASK_ROWS).max(1)).enumerate().try_for_each(
            |(task, blocks)| {
                let (first, count) = (first + task * TASK_ROWS * step, blocks.len() / row_bytes);
                if step == 1 {
                    return reader.pack(self.format, first..first + count, blocks);
                }
                let mut rows = (first..).step_by(step).zip(blocks.chunks_exact_mut(row_bytes));
                rows.try_for_each(|(row, blocks)| reader.pack(self.format, row..row + 1, blocks))
            },
        );
        packed.map_err(|reason| self.files.damaged(tensor, reason))
    }
}

/// Returns the quantization of the model in a directory; `None` if it is not quantized.
///
/// # Errors
/// If the file is damaged or its method is not supported.
pub(crate) fn quantization_in(dir: &Path) -> Result<Option<Quantization>, CheckpointError> {
    let config_file = dir.join(CONFIG_FILE);
    let refused = |path: &Path, source| CheckpointError::Quantization { path: path.to_path_buf(), source };
    let read = |path: &Path| -> Result<Value, CheckpointError> {
        let text = fs::read_to_string(path).map_err(CheckpointError::io("read", path))?;
        serde_json::from_str(&text).map_err(|error| refused(path, QuantizationError(error.to_string())))
    };
    let mut config = read(&config_file)?;
    let table = config["quantization_config"].take();
    if !table.is_null() {
        return parse_quantization(&table).map(Some).map_err(|source| refused(&config_file, source));
    }
    let first_file = dir.join(FIRST_GPTQ_FILE);
    if !first_file.is_file() {
        return Ok(None);
    }
    let mut table = read(&first_file)?;
    if let Value::Object(table) = &mut table {
        table.entry("quant_method").or_insert_with(|| "gptq".into());
    }
    parse_quantization(&table).map(Some).map_err(|source| refused(&first_file, source))
}

impl QuantizedFiles {
    /// Finds the packed matrices in a directory, and checks the tensors of each.
    ///
    /// # Errors
    /// If a tensor is missing or has another type or shape than the description implies.
    pub(crate) fn new(
        dir: &Path,
        files: HfCheckpoint,
        quantization: Quantization,
        config: &ModelConfig,
    ) -> Result<Self, CheckpointError> {
        let (dir, packed) = (dir.to_path_buf(), BTreeMap::new());
        let mut quantized =
            Self { files, quantization, dir, packed, dense: BTreeSet::new(), dtype: DType::F32 };
        for name in reader::tensors(&quantized.files, &quantized.quantization) {
            let reader = quantized.reader(&name)?;
            let (shape, format) = (reader.shape(), reader.format());
            quantized.packed.insert(name, PackedTensor { shape, format });
        }
        let known: BTreeSet<String> =
            HfMapping::new(config).tensors().iter().map(|tensor| tensor.name.clone()).collect();
        let is_dense = |name: &str| {
            let is_part =
                reader::is_part(&quantized.quantization, name) || quantized.packed.contains_key(name);
            // Packers give every module a bias, which is zero where the model has none.
            let is_added_bias = name.strip_suffix("bias").is_some_and(|module| {
                quantized.packed.contains_key(&format!("{module}weight"))
                    && !known.contains(name)
                    && quantized.files.tensor(name).is_ok_and(|bias| bias.bytes.iter().all(|&byte| byte == 0))
            });
            !is_part && !is_added_bias
        };
        quantized.dense = quantized.files.names().filter(|name| is_dense(name)).map(str::to_owned).collect();
        quantized.dtype = quantized.most_common_dtype();
        Ok(quantized)
    }

    /// Returns the type of most elements: of packed tensors, that of their scales.
    fn most_common_dtype(&self) -> DType {
        let mut elements = BTreeMap::<DType, usize>::new();
        let dense = self.dense.iter().filter_map(|name| self.files.tensor(name).ok());
        for tensor in dense {
            if let Some(dtype) = tensor.known_dtype().filter(|&dtype| is_float(dtype)) {
                *elements.entry(dtype).or_default() += tensor.elements();
            }
        }
        for (name, PackedTensor { shape, .. }) in &self.packed {
            if let Some(dtype) = self.reader(name).ok().and_then(|reader| reader.dtype()) {
                *elements.entry(dtype).or_default() += shape.iter().product::<usize>();
            }
        }
        elements.into_iter().max_by_key(|&(_, elements)| elements).map_or(DType::F32, |(dtype, _)| dtype)
    }

    /// Returns the type to compute in.
    pub(crate) fn compute_dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the names and shapes of the tensors, packed ones as they are when decoded.
    pub(crate) fn shapes(&self) -> Result<Vec<(String, Vec<usize>)>, CheckpointError> {
        let dense = self.dense.iter().map(|name| Ok((name.clone(), self.files.tensor(name)?.shape.to_vec())));
        let packed = self.packed.iter().map(|(name, packed)| Ok((name.clone(), packed.shape.clone())));
        dense.chain(packed).collect()
    }

    /// Returns the location of a tensor that is stored as it is; `None` if it is packed.
    pub(crate) fn stored(&self, name: &str) -> Option<StoredParameter<'_>> {
        if self.dense.contains(name) { self.files.stored(name) } else { None }
    }

    /// Returns some rows of a tensor to repack; `None` if it is not packed, or no blocks have its values.
    pub(crate) fn packed(&self, tensor: &str, rows: Option<Range<usize>>) -> Option<PackedTensors<'_>> {
        let (tensor, packed) = self.packed.get_key_value(tensor)?;
        let (format, &[all_rows, columns]) = (packed.format.ok()?, packed.shape.as_slice()) else {
            return None;
        };
        let rows = rows.unwrap_or(0..all_rows);
        let shape = vec![rows.len(), columns];
        let rows = vec![PackedRows { tensor, first: rows.start, step: 1, count: rows.len() }];
        Some(PackedTensors { format, shape, rows, files: self })
    }

    /// Returns every `step`-th column from `first` on of the matrices in a stack, transposed, to repack: they are rows as
    /// they are stored. `None` if the tensor is no packed stack.
    pub(crate) fn packed_columns(
        &self,
        tensor: &str,
        (first, step): (usize, usize),
    ) -> Option<PackedTensors<'_>> {
        let (tensor, packed) = self.packed.get_key_value(tensor)?;
        let (format, &[experts, inputs, columns]) = (packed.format.ok()?, packed.shape.as_slice()) else {
            return None;
        };
        let outputs = (first < step && columns.is_multiple_of(step)).then_some(columns / step)?;
        let rows = vec![PackedRows { tensor, first, step, count: experts * outputs }];
        let shape = vec![experts, outputs, inputs];
        Some(PackedTensors { format, shape, rows, files: self })
    }

    /// Returns a stack of tensors to repack; `None` if they are not packed, differ in shape or format, or no blocks have
    /// their values.
    pub(crate) fn packed_stack<'a>(
        &'a self,
        tensors: impl Iterator<Item = &'a str>,
    ) -> Option<PackedTensors<'a>> {
        let mut tensors = tensors.map(|tensor| self.packed(tensor, None));
        let mut stack = tensors.next()??;
        let matrix = stack.shape.clone();
        for tensor in tensors {
            let tensor = tensor.filter(|tensor| (tensor.format, &tensor.shape) == (stack.format, &matrix))?;
            stack.rows.extend(tensor.rows);
        }
        stack.shape.insert(0, stack.rows.len());
        Some(stack)
    }

    /// Fills `out` with a tensor.
    ///
    /// # Errors
    /// If there is no such tensor, or `out` has another size.
    pub(crate) fn read_f32(&self, name: &str, out: &mut [f32]) -> Result<(), CheckpointError> {
        let Some(PackedTensor { shape, .. }) = self.packed.get(name) else {
            return self.files.read_f32(name, out);
        };
        let elements: usize = shape.iter().product();
        if out.len() != elements {
            let (tensor, count) = (name.to_owned(), out.len());
            return Err(CheckpointError::Range { tensor, start: 0, count, elements });
        }
        let (reader, columns) = (self.reader(name)?, shape.last().copied().unwrap_or(1).max(1));
        let read = out.par_chunks_mut(columns * TASK_ROWS).enumerate().try_for_each(|(task, out)| {
            let first = task * TASK_ROWS;
            let rows = first..first + out.len() / columns;
            reader.decode(rows, out)
        });
        read.map_err(|reason| self.damaged(name, reason))
    }

    /// Returns true if two tensors have the same values.
    pub(crate) fn are_same(&self, a: &str, b: &str) -> Result<bool, CheckpointError> {
        let is_packed = [a, b].map(|name| self.packed.contains_key(name));
        if is_packed == [false, false] {
            return Ok(self.files.tensor(a)?.bytes == self.files.tensor(b)?.bytes);
        }
        let values = |name: &str| -> Result<Vec<f32>, CheckpointError> {
            let elements = match self.packed.get(name) {
                Some(packed) => packed.shape.iter().product(),
                None => self.files.tensor(name)?.elements(),
            };
            let mut values = vec![0.0; elements];
            self.read_f32(name, &mut values)?;
            Ok(values)
        };
        Ok(values(a)? == values(b)?)
    }

    /// Returns the tensors as they are stored.
    pub(crate) fn files(&self) -> &HfCheckpoint {
        &self.files
    }

    /// Returns a summary for people.
    pub(crate) fn summary(&self) -> QuantizationSummary {
        let mut summary =
            QuantizationSummary { method: self.quantization.method(), packed: 0, decoded: BTreeMap::new() };
        for packed in self.packed.values() {
            match packed.format {
                Ok(_) => summary.packed += 1,
                Err(reason) => *summary.decoded.entry(reason).or_default() += 1,
            }
        }
        summary
    }

    fn reader(&self, name: &str) -> Result<PackedReader<'_>, CheckpointError> {
        PackedReader::new(&self.files, &self.quantization, name).map_err(|reason| self.damaged(name, reason))
    }

    fn damaged(&self, tensor: &str, reason: String) -> CheckpointError {
        CheckpointError::PackedTensor { path: self.dir.clone(), tensor: tensor.to_owned(), reason }
    }
}
