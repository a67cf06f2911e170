//! Translation of a file's metadata to the keys of `config.json`.

use lockstep_model::LlamaFamily;
use serde_json::{Map, Value, json};

use super::{
    experts::put_experts,
    keys::{Keys, TensorFacts},
    metadata::GgufMetadata,
    names::Architecture,
    rope::{llama3_scaling, long_scaling, scaling},
};

/// Key of the period of layers without a sliding window.
pub(crate) const WINDOW_PATTERN: &str = "attention.sliding_window_pattern";
/// Key of RoPE's base in layers with a sliding window.
pub(crate) const LOCAL_THETA: &str = "rope.freq_base_swa";
/// Values for Gemma 3 without these keys, as files from before llama.cpp had them are.
const GEMMA3_FULL_EVERY: u64 = 6;
const GEMMA3_LOCAL_THETA: f64 = 10_000.0;

/// Returns the architecture that a file names.
pub(super) fn architecture_of(metadata: &GgufMetadata) -> Result<&'static Architecture, String> {
    let name = metadata.text("general.architecture").ok_or("`general.architecture` is missing")?;
    let experts = format!("{name}.expert_count");
    let has_experts = metadata.integer(&experts).is_some_and(|count| count > 0);
    let mut known = Architecture::called(name).peekable();
    if known.peek().is_none() {
        return Err(format!("its architecture is \"{name}\"; read here are {}", Architecture::names()));
    }
    known.find(|architecture| architecture.has_experts() == has_experts).ok_or_else(|| match has_experts {
        true => format!("`{experts}` is set, and models of \"{name}\" have no experts"),
        false => format!("`{experts}` is missing or 0, and models of \"{name}\" have experts"),
    })
}

/// Returns the configuration of a model as in `config.json`.
pub(super) fn config(
    metadata: &GgufMetadata,
    architecture: &'static Architecture,
    facts: &TensorFacts,
) -> Result<Map<String, Value>, String> {
    let keys = Keys { metadata, architecture };
    let window = keys.optional_size("attention.sliding_window").filter(|window| *window > 0);
    let families = architecture.families;
    let family = if window.is_some() { families[families.len() - 1] } else { families[0] };
    let heads = keys.size("attention.head_count")?;
    let hidden_size = keys.size("embedding_length")?;
    let head_dim = match keys.optional_size("attention.key_length") {
        Some(head_dim) => head_dim,
        None if heads > 0 && hidden_size.is_multiple_of(heads) => hidden_size / heads,
        None => return Err(format!("{heads} heads do not divide a width of {hidden_size}")),
    };
    let mut table = Map::new();
    let mut put = |key: &str, value: Value| table.insert(key.to_owned(), value);
    put("model_type", json!(family.model_type()));
    put("vocab_size", json!(facts.vocabulary));
    put("hidden_size", json!(hidden_size));
    put("intermediate_size", json!(feed_forward_length(&keys, family)?));
    put("num_hidden_layers", json!(keys.size("block_count")?));
    put("num_attention_heads", json!(heads));
    put("num_key_value_heads", json!(keys.optional_size("attention.head_count_kv").unwrap_or(heads)));
    put("head_dim", json!(head_dim));
    put("max_position_embeddings", json!(keys.size("context_length")?));
    put("tie_word_embeddings", json!(!facts.has_output));
    if let Some(epsilon) = keys.number("attention.layer_norm_rms_epsilon") {
        put("rms_norm_eps", json!(epsilon));
    }
    put_rope(&keys, facts, family, head_dim, &mut put)?;
    put_family(&keys, facts, family, window, &mut put)?;
    put_experts(&keys, facts, family, &mut put)?;
    put_tokens(metadata, &mut put);
    Ok(table)
}

/// Returns the width of the feed-forward layers. gpt-oss has that of its experts under both keys; llama.cpp reads the second.
fn feed_forward_length(keys: &Keys<'_>, family: LlamaFamily) -> Result<u64, String> {
    let of_experts = keys.optional_size("expert_feed_forward_length");
    match of_experts.filter(|_| family == LlamaFamily::GptOss) {
        Some(length) => Ok(length),
        None => keys.size("feed_forward_length"),
    }
}

fn put_rope(
    keys: &Keys<'_>,
    facts: &TensorFacts,
    family: LlamaFamily,
    head_dim: u64,
    put: &mut impl FnMut(&str, Value) -> Option<Value>,
) -> Result<(), String> {
    let theta = keys.number("rope.freq_base").unwrap_or(10_000.0);
    put("rope_theta", json!(theta));
    let rope_scaling = match (&facts.long_rope_factors, &facts.rope_divisors) {
        (Some(factors), _) => long_scaling(keys, factors)?,
        (None, Some(divisors)) => llama3_scaling(divisors, theta)?,
        (None, None) => scaling(keys.metadata, keys.architecture.name, family)?,
    };
    put("rope_scaling", rope_scaling);
    let rotated = keys.optional_size("rope.dimension_count").unwrap_or(head_dim);
    if rotated != head_dim {
        if family != LlamaFamily::Phi3 {
            return Err(format!(
                "`{}` is {rotated}; heads have {head_dim} elements",
                keys.name("rope.dimension_count")
            ));
        }
        put("partial_rotary_factor", json!(rotated as f64 / head_dim as f64));
    }
    Ok(())
}

/// Puts the keys of single families.
fn put_family(
    keys: &Keys<'_>,
    facts: &TensorFacts,
    family: LlamaFamily,
    window: Option<u64>,
    put: &mut impl FnMut(&str, Value) -> Option<Value>,
) -> Result<(), String> {
    match family {
        LlamaFamily::Llama => {
            put("attention_bias", json!(facts.has_query_bias));
            put("mlp_bias", json!(facts.has_feed_forward_bias));
        }
        LlamaFamily::Qwen2 | LlamaFamily::Qwen3 | LlamaFamily::Qwen2Moe | LlamaFamily::Qwen3Moe => {
            put("use_sliding_window", json!(false));
            if matches!(family, LlamaFamily::Qwen3 | LlamaFamily::Qwen3Moe) {
                put("attention_bias", json!(facts.has_query_bias));
            }
            if window.is_some() {
                return Err(format!("`{}` is set, which is not read", keys.name("attention.sliding_window")));
            }
        }
        LlamaFamily::Gemma2 | LlamaFamily::Gemma3 => {
            put("sliding_window", json!(window));
            put("attn_logit_softcapping", json!(keys.number("attn_logit_softcapping")));
            put("final_logit_softcapping", json!(keys.number("final_logit_softcapping")));
            let sizes = [
                keys.size("block_count")?,
                keys.size("embedding_length")?,
                keys.size("attention.head_count")?,
            ];
            put(
                "query_pre_attn_scalar",
                json!(gemma_query_scale(family, sizes, keys.size("attention.key_length")?)),
            );
            if family == LlamaFamily::Gemma3 {
                let every = keys.optional_size(WINDOW_PATTERN).unwrap_or(GEMMA3_FULL_EVERY);
                put("sliding_window_pattern", json!(every));
                put("rope_local_base_freq", json!(keys.number(LOCAL_THETA).unwrap_or(GEMMA3_LOCAL_THETA)));
            }
        }
        LlamaFamily::GptOss => {
            if keys.optional_size(WINDOW_PATTERN).is_some_and(|every| every != 2) {
                return Err(format!("`{}` is not 2, as in published models", keys.name(WINDOW_PATTERN)));
            }
            put("sliding_window", json!(window));
        }
        _ => {
            put("sliding_window", json!(window));
        }
    }
    Ok(())
}

/// Returns the number by whose root Gemma 2 and 3 divide scores, which files do not store: the size of a head, but for the models of 27
/// billion parameters. `sizes` are layers, width and heads.
pub(crate) fn gemma_query_scale(family: LlamaFamily, sizes: [u64; 3], head_dim: u64) -> u64 {
    let [layers, width, heads] = sizes;
    let layers_of_27b = if family == LlamaFamily::Gemma3 { 62 } else { 46 };
    if layers == layers_of_27b { width / heads.max(1) } else { head_dim }
}

/// Puts the ids of special tokens.
fn put_tokens(metadata: &GgufMetadata, put: &mut impl FnMut(&str, Value) -> Option<Value>) {
    let id = |name: &str| metadata.integer(&format!("tokenizer.ggml.{name}_token_id"));
    put("bos_token_id", json!(id("bos")));
    let mut end: Vec<u64> = ["eos", "eot"].into_iter().filter_map(id).collect();
    end.dedup();
    put("eos_token_id", json!(end));
    put("pad_token_id", json!(id("padding")));
}
