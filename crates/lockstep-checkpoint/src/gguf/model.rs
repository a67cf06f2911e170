//! The model of a GGUF file, or of several that it is split into: tensors by Hugging Face's names, in Hugging Face's layout.

use std::{
    collections::BTreeMap,
    fs,
    ops::Range,
    path::{Path, PathBuf},
};

use lockstep_model::ModelConfig;
use lockstep_plan::{BlockFormat, DType};
use lockstep_tensor::MappedFile;
use rayon::prelude::*;

use super::{
    architecture::{architecture_of, config},
    foreign::ForeignFormat,
    header::{GgufHeader, GgufTensor, StoredElements, TensorType, parse_gguf},
    keys::TensorFacts,
    names::Architecture,
    rope::LONG_ROPE_FACTORS,
    tokenizer::{self, EmbeddedTokenizer},
};
use crate::{
    QuantizationSummary, StoredParameter, convert, error::CheckpointError, stored_parameter::RowOrder,
};

/// Extension of the files.
pub(crate) const EXTENSION: &str = "gguf";
/// Tensor with the divisors of RoPE's frequencies.
const ROPE_DIVISORS: &str = "rope_freqs.weight";
/// End of the name of a tensor with the gates and the linear halves of experts.
const FUSED_EXPERTS: &str = ".ffn_gate_up_exps.weight";
/// Largest number of files of a model.
const MAX_FILES: u64 = 10_000;
/// Elements that a thread decodes at a time: whole blocks of every format.
const TASK_ELEMENTS: usize = 1 << 16;

/// A mapped file.
#[derive(Debug)]
struct GgufFile {
    path: PathBuf,
    map: MappedFile,
    header: GgufHeader,
}

/// Place of a tensor.
#[derive(Debug, Clone, Copy)]
struct Place {
    file: usize,
    /// Index in the file.
    index: usize,
    order: RowOrder,
    /// Number that was added to the elements.
    shift: f32,
}

/// Rows of a tensor in blocks of a foreign format.
#[derive(Debug, Clone)]
pub(crate) struct ForeignRows<'a> {
    format: ForeignFormat,
    /// Format of kernels with the same values.
    pub(crate) repacked: BlockFormat,
    /// Shape of the rows: the tensor's, or that of a matrix of some of them.
    pub(crate) shape: Vec<usize>,
    /// Bytes of the whole tensor.
    bytes: &'a [u8],
    row_bytes: usize,
    first_row: usize,
    order: RowOrder,
}

impl ForeignRows<'_> {
    /// Repacks the rows, of which each has `repacked_bytes` bytes in `blocks`.
    pub(crate) fn repack(&self, repacked_bytes: usize, blocks: &mut [u8]) {
        blocks.par_chunks_exact_mut(repacked_bytes.max(1)).enumerate().for_each(|(index, blocks)| {
            let start = self.order.stored_row(self.first_row + index) * self.row_bytes;
            self.format.repack(&self.bytes[start..start + self.row_bytes], blocks);
        });
    }
}

/// The weights of a model, mapped.
#[derive(Debug)]
pub(crate) struct GgufModel {
    architecture: &'static Architecture,
    files: Vec<GgufFile>,
    /// Tensors by Hugging Face's name.
    places: BTreeMap<String, Place>,
}

impl GgufFile {
    fn open(path: &Path) -> Result<Self, CheckpointError> {
        let metadata = fs::metadata(path).map_err(CheckpointError::io("open", path))?;
        if !metadata.is_file() {
            return Err(CheckpointError::NotAFile { path: path.to_path_buf() });
        }
        let map = MappedFile::open(path).map_err(CheckpointError::io("map", path))?;
        let header = parse_gguf(&map).map_err(|source| CheckpointError::Gguf {
            path: path.to_path_buf(),
            reason: source.to_string(),
        })?;
        Ok(Self { path: path.to_path_buf(), map, header })
    }

    fn invalid(&self, reason: String) -> CheckpointError {
        CheckpointError::Gguf { path: self.path.clone(), reason }
    }

    fn bytes(&self, tensor: &GgufTensor) -> &[u8] {
        &self.map[tensor.offset..tensor.offset + tensor.bytes]
    }
}

/// Returns the GGUF file of a directory without a `config.json`: the only one, or the first of the only model that is split.
///
/// # Errors
/// If the directory has several models.
pub(crate) fn file_in(dir: &Path) -> Result<Option<PathBuf>, CheckpointError> {
    let Ok(entries) = fs::read_dir(dir) else { return Ok(None) };
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == EXTENSION))
        .filter(|path| split_place(path).is_none_or(|(_, number, _)| number == 1))
        .collect();
    files.sort();
    if let [first, second, ..] = files.as_slice() {
        let reason = format!("{} lies beside it; name one of the files", second.display());
        return Err(CheckpointError::Gguf { path: first.clone(), reason });
    }
    Ok(files.pop())
}

/// Returns the parts of a name `STEM-00001-of-00003.gguf`: stem, number of the file, number of files.
fn split_place(path: &Path) -> Option<(&str, u64, u64)> {
    let name = path.file_stem()?.to_str()?;
    let (rest, count) = name.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    Some((stem, number.parse().ok()?, count.parse().ok()?))
}

/// Opens a file and those that belong to it.
fn open_all(path: &Path) -> Result<Vec<GgufFile>, CheckpointError> {
    let first = GgufFile::open(path)?;
    let count = first.header.metadata.integer("split.count").unwrap_or(1);
    if count <= 1 {
        return Ok(vec![first]);
    }
    let Some((stem, number, _)) = split_place(path).filter(|(_, _, of)| *of == count && count <= MAX_FILES)
    else {
        return Err(
            first.invalid(format!("it is one of {count} files, and not named STEM-00001-of-{count:05}.gguf"))
        );
    };
    let named = |number: u64| path.with_file_name(format!("{stem}-{number:05}-of-{count:05}.{EXTENSION}"));
    if number != 1 {
        return Err(
            first.invalid(format!("it is a part of a model; name the first one, {}", named(1).display()))
        );
    }
    let mut files = vec![first];
    for number in 2..=count {
        files.push(GgufFile::open(&named(number)).map_err(|error| error.named_in(path.to_path_buf()))?);
    }
    for (index, file) in files.iter().enumerate() {
        if file.header.metadata.integer("split.no") != Some(index as u64) {
            return Err(file.invalid(format!("its `split.no` is not {index}, as its name says")));
        }
    }
    let found: usize = files.iter().map(|file| file.header.tensors().len()).sum();
    match files[0].header.metadata.integer("split.tensors.count") {
        Some(expected) if expected != found as u64 => {
            Err(files[0].invalid(format!("its parts have {found} tensors, it says {expected}")))
        }
        _ => Ok(files),
    }
}

impl GgufModel {
    /// Opens a model and returns its configuration with it.
    ///
    /// # Errors
    /// If a file is missing or breaks a rule of the format, or its architecture is not supported.
    pub(crate) fn open(path: &Path) -> Result<(Self, ModelConfig), CheckpointError> {
        let files = open_all(path)?;
        let first = &files[0];
        let metadata = &first.header.metadata;
        let architecture = architecture_of(metadata).map_err(|reason| first.invalid(reason))?;
        let facts = facts(&files).map_err(|reason| first.invalid(reason))?;
        let table = config(metadata, architecture, &facts).map_err(|reason| first.invalid(reason))?;
        let config = ModelConfig::from_table(&table, &path.display().to_string())?;
        let places = places(&files, architecture, config.head_dim())?;
        Ok((Self { architecture, files, places }, config))
    }

    /// Returns the tensors' names, in Hugging Face's form, and shapes.
    pub(crate) fn shapes(&self) -> Vec<(String, Vec<usize>)> {
        let shape = |name: &str, place| Architecture::shape_of(name, &self.tensor(place).shape);
        self.places.iter().map(|(name, place)| (name.clone(), shape(name, place))).collect()
    }

    /// Returns the name in the files of a tensor in Hugging Face's form; `None` if they cannot have it.
    pub(crate) fn stored_name(&self, name: &str) -> Option<String> {
        self.architecture.gguf_name(name)
    }

    /// Returns true if an expert has tensors of its own, as in files of before llama.cpp stacked them.
    pub(crate) fn has_single_experts(&self) -> bool {
        let mut experts = self.places.keys().filter_map(|name| name.split_once(".experts."));
        experts.any(|(_, rest)| rest.starts_with(|first: char| first.is_ascii_digit()))
    }

    /// Returns the type to compute in: bf16 if most elements are quantized, else that of most elements.
    pub(crate) fn compute_dtype(&self) -> DType {
        let mut elements = BTreeMap::<DType, usize>::new();
        for place in self.places.values() {
            let GgufTensor { stored, shape, .. } = self.tensor(place);
            let dtype = match stored {
                TensorType::Read(StoredElements::Dense(dtype)) => *dtype,
                TensorType::Read(StoredElements::Blocks(_)) | TensorType::Foreign(_) => DType::BF16,
            };
            *elements.entry(dtype).or_default() += shape.iter().product::<usize>();
        }
        elements.into_iter().max_by_key(|&(_, elements)| elements).map_or(DType::F32, |(dtype, _)| dtype)
    }

    /// Returns the location of a tensor that a kernel can read as it is stored; `None` if its elements must be computed.
    pub(crate) fn stored(&self, name: &str) -> Option<StoredParameter<'_>> {
        let (name, place) = self.places.get_key_value(name)?;
        let tensor = self.tensor(place);
        let TensorType::Read(stored) = tensor.stored else { return None };
        // Kernels read routers and biases as numbers only.
        let is_readable = matches!(stored, StoredElements::Dense(_)) || Architecture::is_matrix(name);
        if place.shift != 0.0 || !is_readable {
            return None;
        }
        Some(StoredParameter {
            name,
            file: &self.files[place.file].path,
            offset: tensor.offset,
            stored,
            order: place.order,
            elements: tensor.shape.iter().product(),
            first_element: 0,
        })
    }

    /// Returns rows of a tensor in blocks of a foreign format, in Hugging Face's order; `None` if it has another type, or no format of
    /// kernels has its values.
    pub(crate) fn foreign_rows(&self, name: &str, rows: Range<usize>) -> Option<ForeignRows<'_>> {
        let place = self.places.get(name)?;
        let tensor = self.tensor(place);
        let TensorType::Foreign(format) = tensor.stored else { return None };
        let repacked = format.repacked().filter(|_| Architecture::is_matrix(name) && place.shift == 0.0)?;
        let columns = *tensor.shape.last()?;
        let is_whole = rows.len() * columns == tensor.shape.iter().product::<usize>();
        let shape = if is_whole { tensor.shape.clone() } else { vec![rows.len(), columns] };
        let bytes = self.files[place.file].bytes(tensor);
        let row_bytes = tensor.stored.row_bytes(columns)?;
        let (first_row, order) = (rows.start, place.order);
        Some(ForeignRows { format, repacked, shape, bytes, row_bytes, first_row, order })
    }

    /// Returns a summary of the tensors that are repacked or decoded; `None` if there are none.
    pub(crate) fn summary(&self) -> Option<QuantizationSummary> {
        let mut summary = QuantizationSummary { method: "GGUF", packed: 0, decoded: BTreeMap::new() };
        for place in self.places.values() {
            let TensorType::Foreign(format) = self.tensor(place).stored else { continue };
            match format.repacked() {
                Some(_) => summary.packed += 1,
                None => *summary.decoded.entry(format.reason_to_decode()).or_default() += 1,
            }
        }
        let is_any = summary.packed > 0 || !summary.decoded.is_empty();
        is_any.then_some(summary)
    }

    /// Fills `out` with a tensor, in Hugging Face's layout.
    ///
    /// # Errors
    /// If there is no such tensor, or `out` has another size.
    pub(crate) fn read_f32(&self, name: &str, out: &mut [f32]) -> Result<(), CheckpointError> {
        let place = self.place(name)?;
        let tensor = self.tensor(place);
        let elements: usize = tensor.shape.iter().product();
        if out.len() != elements {
            let (tensor, count) = (name.to_owned(), out.len());
            return Err(CheckpointError::Range { tensor, start: 0, count, elements });
        }
        decode(tensor.stored, self.files[place.file].bytes(tensor), out);
        if place.order != RowOrder::Same {
            let stored = out.to_vec();
            let columns = elements / tensor.shape[0].max(1);
            for (row, out) in out.chunks_exact_mut(columns.max(1)).enumerate() {
                out.copy_from_slice(&stored[place.order.stored_row(row) * columns..][..columns]);
            }
        }
        if place.shift != 0.0 {
            out.iter_mut().for_each(|x| *x -= place.shift);
        }
        Ok(())
    }

    /// Fills `out` with the elements of a tensor from `first` on, and returns true; false if they are not whole blocks in the tensor's order.
    ///
    /// # Errors
    /// If there is no such tensor, or the elements end beyond it.
    pub(crate) fn read_part(
        &self,
        name: &str,
        first: usize,
        out: &mut [f32],
    ) -> Result<bool, CheckpointError> {
        let place = self.place(name)?;
        let tensor = self.tensor(place);
        let range = tensor.stored.row_bytes(first).zip(tensor.stored.row_bytes(out.len()));
        let Some((start, bytes)) = range.filter(|_| place.order == RowOrder::Same && place.shift == 0.0)
        else {
            return Ok(false);
        };
        let stored = self.files[place.file].bytes(tensor);
        let stored = start.checked_add(bytes).and_then(|end| stored.get(start..end)).ok_or_else(|| {
            let (tensor, elements) = (name.to_owned(), tensor.shape.iter().product());
            CheckpointError::Range { tensor, start: first, count: out.len(), elements }
        })?;
        decode(tensor.stored, stored, out);
        Ok(true)
    }

    /// Returns the bytes of a tensor as they are stored.
    ///
    /// # Errors
    /// If there is no such tensor.
    pub(crate) fn bytes(&self, name: &str) -> Result<&[u8], CheckpointError> {
        let place = self.place(name)?;
        Ok(self.files[place.file].bytes(self.tensor(place)))
    }

    /// Returns the tokenizer in the file; `None` if it has none.
    ///
    /// # Errors
    /// If the tokenizer is of an unsupported kind, or damaged.
    pub(crate) fn tokenizer(&self) -> Result<Option<EmbeddedTokenizer>, CheckpointError> {
        let first = &self.files[0];
        tokenizer::read(&first.header.metadata, &first.map).map_err(|reason| first.invalid(reason))
    }

    fn place(&self, name: &str) -> Result<&Place, CheckpointError> {
        self.places.get(name).ok_or_else(|| CheckpointError::NoSuchTensor {
            path: self.files[0].path.clone(),
            tensor: name.to_owned(),
        })
    }

    fn tensor(&self, place: &Place) -> &GgufTensor {
        &self.files[place.file].header.tensors()[place.index]
    }
}

/// Decodes stored elements to `out`.
fn decode(stored: TensorType, bytes: &[u8], out: &mut [f32]) {
    let task_bytes = stored.row_bytes(TASK_ELEMENTS).expect("whole blocks");
    let tasks = out.par_chunks_mut(TASK_ELEMENTS).zip(bytes.par_chunks(task_bytes));
    match stored {
        TensorType::Read(StoredElements::Dense(dtype)) => convert::widen(dtype, bytes, out),
        TensorType::Read(StoredElements::Blocks(format)) => {
            tasks.for_each(|(out, bytes)| format.dequantize(bytes, out));
        }
        TensorType::Foreign(format) => tasks.for_each(|(out, bytes)| format.dequantize(bytes, out)),
    }
}

fn facts(files: &[GgufFile]) -> Result<TensorFacts, String> {
    let find = |name: &str| files.iter().find_map(|file| Some((file, file.header.tensor(name)?)));
    let (_, embedding) = find("token_embd.weight").ok_or("tensor `token_embd.weight` is missing")?;
    let tensors = || files.iter().flat_map(|file| file.header.tensors());
    if let Some(fused) = tensors().find(|tensor| tensor.name.ends_with(FUSED_EXPERTS)) {
        return Err(format!(
            "it has `{}`, gates and linear halves of experts in one tensor, which are read from two only",
            fused.name
        ));
    }
    let stack = tensors().find(|tensor| tensor.name.contains("_exps.") && tensor.shape.len() == 3);
    let divisors = |name: &str| match find(name) {
        None => Ok(None),
        Some((file, tensor)) if tensor.stored == TensorType::Read(StoredElements::Dense(DType::F32)) => {
            let mut divisors = vec![0.0_f32; tensor.bytes / DType::F32.size_bytes()];
            convert::widen(DType::F32, file.bytes(tensor), &mut divisors);
            Ok(Some(divisors))
        }
        Some((_, tensor)) => Err(format!("tensor `{name}` is {}; f32 is read", tensor.stored)),
    };
    let rope_divisors = divisors(ROPE_DIVISORS)?;
    let [short, long] = LONG_ROPE_FACTORS.map(divisors);
    let long_rope_factors = match (short?, long?) {
        (None, None) => None,
        (Some(short), Some(long)) => Some([short, long]),
        _ => return Err(format!("of `{}` one is missing", LONG_ROPE_FACTORS.join("` and `"))),
    };
    Ok(TensorFacts {
        vocabulary: embedding.shape.first().copied().unwrap_or(0),
        has_output: find("output.weight").is_some(),
        has_query_bias: find("blk.0.attn_q.bias").is_some(),
        has_feed_forward_bias: find("blk.0.ffn_up.bias").is_some(),
        rope_divisors,
        long_rope_factors,
        experts: stack.map(|stack| (stack.name.clone(), stack.shape[0])),
    })
}

/// Returns the places of all tensors. One that the architecture does not know keeps its name, so that it is reported as unexpected.
fn places(
    files: &[GgufFile],
    architecture: &Architecture,
    head_dim: usize,
) -> Result<BTreeMap<String, Place>, CheckpointError> {
    let mut places = BTreeMap::new();
    for (file, of) in files.iter().enumerate() {
        for (index, tensor) in of.header.tensors().iter().enumerate() {
            if tensor.name == ROPE_DIVISORS || LONG_ROPE_FACTORS.contains(&tensor.name.as_str()) {
                continue;
            }
            let name = architecture.hf_name(&tensor.name).unwrap_or_else(|| tensor.name.clone());
            let rows = tensor.shape.first().copied().unwrap_or(1);
            let order = match architecture.is_interleaved(&name) {
                true if rows.is_multiple_of(head_dim) => RowOrder::InterleavedHeads { head_dim },
                true => {
                    let reason =
                        format!("tensor `{}` of {rows} rows has no whole heads of {head_dim}", tensor.name);
                    return Err(of.invalid(reason));
                }
                false => RowOrder::Same,
            };
            let shift = architecture.shift(&name);
            if places.insert(name, Place { file, index, order, shift }).is_some() {
                return Err(of.invalid(format!("tensor `{}` occurs twice", tensor.name)));
            }
        }
    }
    Ok(places)
}
