//! `quantization_config` of a `config.json`: the method that packed the weights, and the numbers that its tensors do not tell.
//!
//! Only what decides the layout of tensors is read. Which modules are quantized follows from the tensors that are there, so lists of
//! exceptions (`modules_to_not_convert`, `ignore`) are not needed; quantization of activations is not applied.

use serde_json::{Map, Value};

/// Methods that are read, for messages.
const METHODS: &str = "gptq, awq, compressed-tensors, fp8, bitsandbytes and mxfp4";

/// Description of a method or a setting that is not supported.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct QuantizationError(pub(super) String);

/// Method that packed the weights of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Quantization {
    /// GPTQ: codes packed along the inputs.
    Gptq {
        /// Bits of a code: 4 or 8.
        bits: usize,
        /// Inputs of a group; `None` if all inputs are one group.
        group: Option<usize>,
        /// Number that is added to stored zero points: 1 in the first version of the format.
        zero_shift: u32,
    },
    /// AWQ, version `gemm`: codes of 4 bits packed across the outputs.
    Awq {
        /// Inputs of a group; `None` if all inputs are one group.
        group: Option<usize>,
    },
    /// compressed-tensors: one of several formats for each module.
    CompressedTensors {
        /// Bits of integer codes in groups of modules.
        bits: Vec<usize>,
        /// Rows and columns that share a scale of 8-bit floats; `None` for whole matrices or rows.
        block: Option<[usize; 2]>,
    },
    /// 8-bit floats with a scale for each block.
    Fp8 {
        /// Rows and columns of a block; `None` for whole matrices or rows.
        block: Option<[usize; 2]>,
    },
    /// bitsandbytes: LLM.int8, NF4 and FP4.
    BitsAndBytes,
    /// MXFP4 experts of gpt-oss.
    Mxfp4,
}

impl Quantization {
    /// Returns the name of the method.
    pub fn method(&self) -> &'static str {
        match self {
            Self::Gptq { .. } => "gptq",
            Self::Awq { .. } => "awq",
            Self::CompressedTensors { .. } => "compressed-tensors",
            Self::Fp8 { .. } => "fp8",
            Self::BitsAndBytes => "bitsandbytes",
            Self::Mxfp4 => "mxfp4",
        }
    }
}

/// Reads a `quantization_config`.
///
/// # Errors
/// If the method, or a setting that changes the layout, is not supported.
pub fn parse_quantization(config: &Value) -> Result<Quantization, QuantizationError> {
    parse(config).map_err(QuantizationError)
}

fn parse(config: &Value) -> Result<Quantization, String> {
    let table = config.as_object().ok_or("quantization_config is no table")?;
    match text(table, "quant_method")? {
        Some("gptq") => gptq(table),
        Some("awq") => awq(table),
        Some("compressed-tensors") => compressed_tensors(table),
        Some("fp8") => Ok(Quantization::Fp8 { block: block(table, "weight_block_size")? }),
        Some("bitsandbytes") => Ok(Quantization::BitsAndBytes),
        Some("mxfp4") => Ok(Quantization::Mxfp4),
        Some(other) => Err(format!("quant_method is `{}`; read are {METHODS}", shortened(other))),
        None => Err(format!("quantization_config has no quant_method; read are {METHODS}")),
    }
}

fn shortened(text: &str) -> String {
    text.chars().take(40).collect()
}

fn text<'a>(table: &'a Map<String, Value>, key: &str) -> Result<Option<&'a str>, String> {
    match table.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(other) => Err(format!("{key} is {}; it must be a string", shortened(&other.to_string()))),
    }
}

/// Returns an integer under the first of the keys that is there.
fn integer(table: &Map<String, Value>, keys: &[&str]) -> Result<Option<i64>, String> {
    let found = keys.iter().find_map(|key| Some((key, table.get(*key).filter(|value| !value.is_null())?)));
    let Some((key, value)) = found else { return Ok(None) };
    let integer = value.as_i64().filter(|value| (-1..=MOST_SIZE as i64).contains(value));
    let bad = || format!("{key} is {}; allowed are -1 and positive integers", shortened(&value.to_string()));
    integer.map(Some).ok_or_else(bad)
}

/// Returns the inputs of a group; `None` for -1.
fn group(table: &Map<String, Value>, keys: &[&str]) -> Result<Option<usize>, String> {
    match integer(table, keys)? {
        None | Some(-1) => Ok(None),
        Some(0) => Err(format!("{} is 0; allowed are -1 and positive integers", keys[0])),
        Some(group) => Ok(Some(group as usize)),
    }
}

/// Returns a block of rows and columns; `None` if there is none.
fn block(table: &Map<String, Value>, key: &str) -> Result<Option<[usize; 2]>, String> {
    let Some(value) = table.get(key).filter(|value| !value.is_null()) else { return Ok(None) };
    let sizes = value.as_array().map(|sizes| sizes.iter().map(Value::as_u64).collect::<Option<Vec<_>>>());
    match sizes.flatten().as_deref() {
        Some(&[rows @ 1..=MOST_SIZE, columns @ 1..=MOST_SIZE]) => Ok(Some([rows as usize, columns as usize])),
        _ => Err(format!("{key} is {}; it must be two positive sizes", shortened(&value.to_string()))),
    }
}

/// Largest size of a group or a block.
const MOST_SIZE: u64 = 1 << 20;

/// Returns the bits of integer codes.
fn bits(table: &Map<String, Value>, keys: &[&str], allowed: &[i64]) -> Result<usize, String> {
    let list = allowed.iter().map(i64::to_string).collect::<Vec<_>>().join(" and ");
    match integer(table, keys)? {
        Some(bits) if allowed.contains(&bits) => Ok(bits as usize),
        Some(bits) => Err(format!("{} is {bits}; read are weights of {list} bits", keys[0])),
        None => Err(format!("{} is missing", keys[0])),
    }
}

fn gptq(table: &Map<String, Value>) -> Result<Quantization, String> {
    let zero_shift = match text(table, "checkpoint_format")? {
        None | Some("gptq" | "") => 1,
        Some("gptq_v2") => 0,
        Some(other) => {
            return Err(format!(
                "checkpoint_format is `{}`; of GPTQ, `gptq` and `gptq_v2` are read",
                shortened(other)
            ));
        }
    };
    Ok(Quantization::Gptq {
        bits: bits(table, &["bits"], &[4, 8])?,
        group: group(table, &["group_size"])?,
        zero_shift,
    })
}

fn awq(table: &Map<String, Value>) -> Result<Quantization, String> {
    match text(table, "version")?.map(str::to_lowercase).as_deref() {
        None | Some("gemm") => {}
        Some(other) => return Err(format!("version is `{}`; of AWQ, `gemm` is read", shortened(other))),
    }
    bits(table, &["bits", "w_bit"], &[4])?;
    Ok(Quantization::Awq { group: group(table, &["group_size", "q_group_size"])? })
}

/// Formats of compressed-tensors that are read.
const FORMATS: [&str; 6] = [
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp4-pack-quantized",
    "dense",
];

fn compressed_tensors(table: &Map<String, Value>) -> Result<Quantization, String> {
    let is_format = |format: Option<&str>| match format {
        None => Ok(()),
        Some(format) if FORMATS.contains(&format) || format == "mixed-precision" => Ok(()),
        Some(other) => Err(format!(
            "format is `{}`; of compressed-tensors, {} are read",
            shortened(other),
            FORMATS.join(", ")
        )),
    };
    is_format(text(table, "format")?)?;
    let is_given = |key: &str| {
        table.get(key).is_some_and(|value| match value {
            Value::Object(table) => !table.is_empty(),
            other => !other.is_null(),
        })
    };
    if is_given("transform_config") {
        return Err("transform_config rotates activations, which is not done here".to_owned());
    }
    if let Some(Value::Object(sparsity)) = table.get("sparsity_config")
        && let Some(format) = text(sparsity, "format")?.filter(|format| *format != "dense")
    {
        return Err(format!(
            "sparsity_config.format is `{}`; sparse weights are not read",
            shortened(format)
        ));
    }
    let (mut all, mut shared) = (Vec::new(), None);
    for group in table.get("config_groups").and_then(Value::as_object).into_iter().flat_map(Map::values) {
        let Some(group) = group.as_object() else { continue };
        is_format(text(group, "format")?)?;
        let Some(weights) = group.get("weights").and_then(Value::as_object) else { continue };
        if text(weights, "type")?.is_none_or(|kind| kind == "int") {
            all.push(bits(weights, &["num_bits"], &[4, 8])?);
        } else if let Some(found) = block(weights, "block_structure")?
            && shared.replace(found).is_some_and(|before| before != found)
        {
            return Err("block_structure differs between groups of modules".to_owned());
        }
    }
    all.sort_unstable();
    all.dedup();
    Ok(Quantization::CompressedTensors { bits: all, block: shared })
}
