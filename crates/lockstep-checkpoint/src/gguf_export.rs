//! Export of a model as a GGUF file, which llama.cpp loads.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use lockstep_model::{HfMapping, HfTensor, LlamaConfig, LlamaFamily, RopeScaling, Yarn};
use lockstep_plan::{BlockFormat, DType};
use serde_json::Value as Json;

use self::experts::put_experts;
use crate::{
    BlockParameter, CheckpointError, RowOrder, convert,
    gguf::{
        StoredElements,
        architecture::{LOCAL_THETA, WINDOW_PATTERN, gemma_query_scale},
        names::Architecture,
        rope::{LONG_ROPE_FACTORS, divisors_of, rounds_yarn},
        tokenizer_export::{self, TokenizerSettings},
        writer::{TensorSpec, Value, write},
    },
    pretrained::{ModelDirectory, TOKENIZER_FILE},
    weight_quantization::encode_blocks,
};

/// Version of the block formats.
const QUANTIZATION_VERSION: u32 = 2;

/// Differences between an export and the request for it.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct GgufExportNotes {
    /// Matrices whose rows are no whole blocks of the type, by the type that they have instead.
    pub other_types: BTreeMap<String, usize>,
    /// True if the file has no tokenizer.
    pub lacks_tokenizer: bool,
}

/// Source of a tensor's elements.
enum Source<'a> {
    /// A tensor of the exported model, as Hugging Face names it.
    Tensor(&'a HfTensor),
    /// Elements in memory.
    Values(Vec<f32>),
}

impl ModelDirectory {
    /// Writes the model as a GGUF file with matrices of type `stored`; vectors and routers are f32. A matrix whose rows are no whole blocks
    /// gets q8_0, or f16. If the model has experts, MXFP4 is the type of these, and other matrices get q8_0.
    ///
    /// # Errors
    /// If the format cannot express the model, the file exists, or the disk is full.
    pub fn export_gguf(
        &self,
        stored: StoredElements,
        out: &Path,
    ) -> Result<GgufExportNotes, CheckpointError> {
        let invalid =
            |reason: String| CheckpointError::GgufExport { path: self.path().to_path_buf(), reason };
        let config = self.config().get::<LlamaConfig>().filter(|config| config.classes.is_none());
        let (config, architecture) =
            config.and_then(|config| Some((config, Architecture::of(config.family)?))).ok_or_else(|| {
                let kind = self.config().model_type();
                invalid(format!(
                    "its model type is {kind}; written are language models of {}",
                    Architecture::names()
                ))
            })?;
        self.check_base()?;
        let mut notes = GgufExportNotes::default();
        let mut metadata = model_metadata(config, architecture, stored).map_err(invalid)?;
        metadata.insert(1, ("general.name".to_owned(), Value::Text(self.name())));
        match self.tokenizer_metadata(config)? {
            Some(tokenizer) => metadata.extend(tokenizer),
            None => {
                metadata.push(("tokenizer.ggml.model".to_owned(), Value::Text("none".to_owned())));
                notes.lacks_tokenizer = true;
            }
        }
        let mapping = HfMapping::with_stacks(self.config());
        let (specs, sources) =
            tensors(&mapping, config, architecture, stored, &mut notes).map_err(invalid)?;
        let blocks = self.block_parameters();
        write(out, &metadata, &specs, |index| {
            let stored = specs[index].stored;
            let tensor = match &sources[index] {
                Source::Values(values) => return Ok(encode(values, stored)),
                Source::Tensor(tensor) => tensor,
            };
            // Blocks of the same format are copied: another choice of their scales would change values.
            let is_same = |blocks: &&BlockParameter<'_>| {
                StoredElements::Blocks(blocks.format) == stored && tensor.is_whole(blocks.name)
            };
            match blocks.iter().find(is_same) {
                Some(blocks) => {
                    let columns = tensor.shape.last().copied().unwrap_or(1);
                    let rows = blocks.blocks(columns)?;
                    let row_bytes = rows.len() / (blocks.elements / columns).max(1);
                    Ok(in_stored_order(tensor, (architecture, config), row_bytes, rows))
                }
                None => Ok(encode(&self.stored_values(tensor, architecture, config)?, stored)),
            }
        })?;
        Ok(notes)
    }

    /// Returns the values of a tensor in the layout of files.
    fn stored_values(
        &self,
        tensor: &HfTensor,
        architecture: &Architecture,
        config: &LlamaConfig,
    ) -> Result<Vec<f32>, CheckpointError> {
        let elements: usize = tensor.shape.iter().product();
        let mut values = self.assemble(tensor, elements)?;
        let shift = architecture.shift(&tensor.name);
        values.iter_mut().filter(|_| shift != 0.0).for_each(|x| *x += shift);
        let columns = elements / tensor.shape[0];
        Ok(in_stored_order(tensor, (architecture, config), columns, values))
    }

    /// Returns the name of the model: that of its directory.
    fn name(&self) -> String {
        self.path().file_stem().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Returns the metadata of the tokenizer; `None` without one.
    fn tokenizer_metadata(
        &self,
        config: &LlamaConfig,
    ) -> Result<Option<Vec<(String, Value)>>, CheckpointError> {
        let tokens = &config.tokens;
        let mut settings = TokenizerSettings {
            beginning: tokens.beginning,
            end: tokens.end.clone(),
            padding: tokens.padding,
            chat_template: None,
        };
        let vocabulary = config.vocab_size;
        let embedded = self.embedded_tokenizer()?;
        let (text, tokenizer_config, path) = match (self.tokenizer(), embedded) {
            (None, Some(embedded)) => {
                (embedded.tokenizer_json, embedded.config_json, self.path().to_path_buf())
            }
            (None, None) if (256..=259).contains(&vocabulary) => {
                return Ok(Some(tokenizer_export::of_bytes(vocabulary, &settings)));
            }
            (None, None) => return Ok(None),
            (Some(name), _) if name == "bytes" => {
                return Ok(Some(tokenizer_export::of_bytes(vocabulary, &settings)));
            }
            (Some(name), _) => {
                let mut path = PathBuf::from(name);
                if path.is_dir() {
                    path.push(TOKENIZER_FILE);
                }
                let text = fs::read_to_string(&path).map_err(CheckpointError::io("read", &path))?;
                (text, read_beside(&path, "tokenizer_config.json").unwrap_or_default(), path)
            }
        };
        let tokenizer_config: Json = serde_json::from_str(&tokenizer_config).unwrap_or_default();
        settings.chat_template = read_beside(&path, "chat_template.jinja")
            .or_else(|| tokenizer_config["chat_template"].as_str().map(str::to_owned));
        let invalid = |reason: String| CheckpointError::GgufExport { path: path.clone(), reason };
        let json: Json = serde_json::from_str(&text).map_err(|error| invalid(error.to_string()))?;
        tokenizer_export::of_json(&json, vocabulary, &settings).map(Some).map_err(invalid)
    }
}

/// Returns the rows of a tensor, of `row_len` values each, in the order of files.
fn in_stored_order<T: Copy + Default>(
    tensor: &HfTensor,
    (architecture, config): (&Architecture, &LlamaConfig),
    row_len: usize,
    rows: Vec<T>,
) -> Vec<T> {
    if !architecture.is_interleaved(&tensor.name) {
        return rows;
    }
    let order = RowOrder::InterleavedHeads { head_dim: config.head_dim };
    let mut stored = vec![T::default(); rows.len()];
    for (row, values) in rows.chunks_exact(row_len).enumerate() {
        stored[order.stored_row(row) * row_len..][..row_len].copy_from_slice(values);
    }
    stored
}

/// Returns the text of a file beside another, if there is one.
fn read_beside(path: &Path, name: &str) -> Option<String> {
    fs::read_to_string(path.with_file_name(name)).ok()
}

/// Returns the tensors to write, and the sources of their elements.
fn tensors<'a>(
    mapping: &'a HfMapping,
    config: &LlamaConfig,
    architecture: &Architecture,
    stored: StoredElements,
    notes: &mut GgufExportNotes,
) -> Result<(Vec<TensorSpec>, Vec<Source<'a>>), String> {
    let (mut specs, mut sources) = (Vec::new(), Vec::new());
    if matches!(config.rope.scaling, RopeScaling::Llama3 { .. }) {
        let divisors: Vec<f32> =
            divisors_of(config.rope.theta, config.rope.scaling.clone(), config.head_dim).collect();
        let (name, shape) = ("rope_freqs.weight".to_owned(), vec![divisors.len()]);
        specs.push(TensorSpec { name, shape, stored: StoredElements::Dense(DType::F32) });
        sources.push(Source::Values(divisors));
    }
    if let RopeScaling::LongRope(long) = &config.rope.scaling {
        for (name, factors) in LONG_ROPE_FACTORS.into_iter().zip([&long.short_factor, &long.long_factor]) {
            let (name, shape) = (name.to_owned(), vec![factors.len()]);
            specs.push(TensorSpec { name, shape, stored: StoredElements::Dense(DType::F32) });
            sources.push(Source::Values(factors.iter().map(|factor| *factor as f32).collect()));
        }
    }
    for tensor in mapping.tensors() {
        let name = architecture
            .gguf_name(&tensor.name)
            .ok_or_else(|| format!("{} has no tensor for {}", architecture.name, tensor.name))?;
        let columns = tensor.shape.last().copied().unwrap_or(1);
        let of_numbers = StoredElements::Dense(DType::F32);
        let stored = match tensor.shape.len() {
            2.. if Architecture::is_matrix(&tensor.name) => {
                let wanted = wanted_type(stored, architecture, &tensor.name);
                let stored = type_for(wanted, columns);
                if stored != wanted {
                    *notes.other_types.entry(stored.to_string()).or_default() += 1;
                }
                stored
            }
            _ => of_numbers,
        };
        let shape = match Architecture::is_shared_gate(&tensor.name) {
            true => vec![columns],
            false => tensor.shape.clone(),
        };
        specs.push(TensorSpec { name, shape, stored });
        sources.push(Source::Tensor(tensor));
    }
    Ok((specs, sources))
}

/// Returns the type of a matrix that fits every width: `stored`, but q8_0 beside experts in MXFP4, as in llama.cpp's type
/// `MOSTLY_MXFP4_MOE`.
fn wanted_type(stored: StoredElements, architecture: &Architecture, tensor: &str) -> StoredElements {
    let is_beside_experts = architecture.has_experts() && !Architecture::is_stack(tensor);
    match stored {
        StoredElements::Blocks(BlockFormat::Mxfp4) if is_beside_experts => {
            StoredElements::Blocks(BlockFormat::Q8_0)
        }
        _ => stored,
    }
}

/// Returns the type of a matrix with rows of `columns` elements.
fn type_for(stored: StoredElements, columns: usize) -> StoredElements {
    let fallbacks = [stored, StoredElements::Blocks(BlockFormat::Q8_0)];
    let fits = |stored: &StoredElements| stored.row_bytes(columns).is_some();
    fallbacks.into_iter().find(fits).unwrap_or(StoredElements::Dense(DType::F16))
}

/// Encodes values as a type.
fn encode(values: &[f32], stored: StoredElements) -> Vec<u8> {
    match stored {
        StoredElements::Dense(dtype) => {
            let mut bytes = vec![0; values.len() * dtype.size_bytes()];
            convert::narrow(dtype, values, &mut bytes);
            bytes
        }
        StoredElements::Blocks(format) => encode_blocks(format, values),
    }
}

/// Returns the metadata of a model without its tokenizer.
fn model_metadata(
    config: &LlamaConfig,
    architecture: &Architecture,
    stored: StoredElements,
) -> Result<Vec<(String, Value)>, String> {
    let name = architecture.name;
    let mut metadata = vec![
        ("general.architecture".to_owned(), Value::Text(name.to_owned())),
        ("general.quantization_version".to_owned(), Value::U32(QUANTIZATION_VERSION)),
        ("general.file_type".to_owned(), Value::U32(file_type(stored))),
    ];
    let mut put = |key: &str, value: Value| metadata.push((format!("{name}.{key}"), value));
    let size = |size: usize| Value::U32(size as u32);
    put("context_length", size(config.max_position_embeddings));
    put("embedding_length", size(config.hidden_size));
    put("block_count", size(config.num_hidden_layers));
    put("feed_forward_length", size(config.intermediate_size));
    put("attention.head_count", size(config.num_attention_heads));
    put("attention.head_count_kv", size(config.num_key_value_heads));
    put("attention.key_length", size(config.head_dim));
    put("attention.value_length", size(config.head_dim));
    put("attention.layer_norm_rms_epsilon", Value::F32(config.rms_norm_eps as f32));
    put("vocab_size", size(config.vocab_size));
    put("rope.freq_base", Value::F32(config.rope.theta as f32));
    let rotated = (config.head_dim as f64 * config.rotary_fraction).round() as usize;
    put("rope.dimension_count", size(rotated));
    match &config.rope.scaling {
        RopeScaling::Default | RopeScaling::Llama3 { .. } => {}
        RopeScaling::Linear { factor } => {
            put("rope.scaling.type", Value::Text("linear".to_owned()));
            put("rope.scaling.factor", Value::F32(*factor as f32));
        }
        RopeScaling::Yarn(yarn) => put_yarn(config, yarn, &mut put)?,
        RopeScaling::LongRope(long) => {
            put("rope.scaling.original_context_length", size(long.original_max_position_embeddings));
            put("rope.scaling.attn_factor", Value::F32(config.rope.amplitude() as f32));
        }
    }
    put_gemma(config, &mut put)?;
    put_window(config, &mut put)?;
    put_experts(config, &mut put)?;
    for (key, cap) in
        [("attn_logit_softcapping", config.score_cap), ("final_logit_softcapping", config.logit_cap)]
    {
        if let Some(cap) = cap {
            put(key, Value::F32(cap as f32));
        }
    }
    Ok(metadata)
}

/// Puts the settings of YaRN.
fn put_yarn(config: &LlamaConfig, yarn: &Yarn, put: &mut impl FnMut(&str, Value)) -> Result<(), String> {
    let (truncate, attention) = (rounds_yarn(config.family), 1.0 + 0.1 * yarn.factor.ln());
    if yarn.truncate != truncate {
        return Err(format!("RoPE's truncate is {}; readers of files take {truncate}", yarn.truncate));
    }
    let found = config.rope.attention_factor();
    if (found - attention).abs() > 1e-6 {
        return Err(format!("RoPE's attention factor is {found}; readers of files take {attention}"));
    }
    let mut put = |key: &str, value: Value| put(&format!("rope.scaling.{key}"), value);
    put("type", Value::Text("yarn".to_owned()));
    put("factor", Value::F32(yarn.factor as f32));
    put("original_context_length", Value::U32(yarn.original_max_position_embeddings as u32));
    put("yarn_beta_fast", Value::F32(yarn.beta_fast as f32));
    put("yarn_beta_slow", Value::F32(yarn.beta_slow as f32));
    Ok(())
}

/// Puts the windows and RoPE of Gemma 3's layers. Checks that what the files of Gemma 2 and 3 leave out is as readers expect it.
fn put_gemma(config: &LlamaConfig, put: &mut impl FnMut(&str, Value)) -> Result<(), String> {
    let Some(scale) = config.query_scale else { return Ok(()) };
    let sizes =
        [config.num_hidden_layers, config.hidden_size, config.num_attention_heads].map(|size| size as u64);
    let expected = gemma_query_scale(config.family, sizes, config.head_dim as u64);
    if scale != expected as f64 {
        return Err(format!("query_pre_attn_scalar is {scale}; readers of files take {expected}"));
    }
    match (config.family, config.full_every) {
        (LlamaFamily::Gemma3, Some(every)) => {
            put(WINDOW_PATTERN, Value::U32(every as u32));
            if let Some(local) = &config.local_rope {
                put(LOCAL_THETA, Value::F32(local.theta as f32));
            }
            Ok(())
        }
        (_, Some(2)) => Ok(()),
        (LlamaFamily::Gemma3, None) => Err("it has no layer without a window".to_owned()),
        (_, every) => {
            Err(format!("layers without a window have the period {every:?}; readers of files take 2"))
        }
    }
}

fn put_window(config: &LlamaConfig, put: &mut impl FnMut(&str, Value)) -> Result<(), String> {
    let Some(window) = config.sliding_window else { return Ok(()) };
    let has_no_key = [
        LlamaFamily::Llama,
        LlamaFamily::Mixtral,
        LlamaFamily::Qwen2,
        LlamaFamily::Qwen3,
        LlamaFamily::Qwen2Moe,
        LlamaFamily::Qwen3Moe,
    ];
    if has_no_key.contains(&config.family) {
        return Err("it has a sliding window, for which this architecture has no key".to_owned());
    }
    put("attention.sliding_window", Value::U32(window as u32));
    Ok(())
}

/// Returns llama.cpp's number of the type of most matrices (`llama.h`: `llama_ftype`).
fn file_type(stored: StoredElements) -> u32 {
    match stored {
        StoredElements::Dense(DType::F16) => 1,
        StoredElements::Dense(DType::BF16) => 32,
        StoredElements::Blocks(BlockFormat::Q4_0) => 2,
        StoredElements::Blocks(BlockFormat::Q4_1) => 3,
        StoredElements::Blocks(BlockFormat::Q8_0) => 7,
        StoredElements::Blocks(BlockFormat::Q4K) => 14,
        StoredElements::Blocks(BlockFormat::Q5K) => 16,
        StoredElements::Blocks(BlockFormat::Q6K) => 18,
        StoredElements::Blocks(BlockFormat::Mxfp4) => 38,
        StoredElements::Dense(_) | StoredElements::Blocks(_) => 0,
    }
}

#[cfg(test)]
mod expert_tests;
mod experts;
#[cfg(test)]
mod tests;
