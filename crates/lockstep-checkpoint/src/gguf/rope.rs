//! RoPE settings of GGUF files: keys of the metadata, and the divisors of Llama 3's frequencies, which files store as a tensor.

use lockstep_model::{LlamaFamily, LongRope, Rope, RopeScaling};
use serde_json::{Value, json};

use super::{keys::Keys, metadata::GgufMetadata};

/// Tensors of LongRoPE's divisors, of short and of long sequences.
pub(crate) const LONG_ROPE_FACTORS: [&str; 2] = ["rope_factors_short.weight", "rope_factors_long.weight"];
/// Context lengths before extension that published models have.
const CONTEXTS: [usize; 8] = [8192, 4096, 2048, 16_384, 32_768, 1024, 512, 32];
/// Largest relative difference of a divisor that is computed in another order of roundings.
const TOLERANCE: f32 = 1e-4;

/// Returns the value of `rope_scaling` for the metadata of `architecture`; null without scaling.
pub(super) fn scaling(
    metadata: &GgufMetadata,
    architecture: &str,
    family: LlamaFamily,
) -> Result<Value, String> {
    let key = |name: &str| format!("{architecture}.rope.scaling.{name}");
    let factor = metadata.number(&key("factor")).filter(|factor| *factor > 0.0);
    match (metadata.text(&key("type")), factor) {
        (None | Some("none"), _) | (Some("linear"), None) => Ok(Value::Null),
        (Some("linear"), Some(factor)) => Ok(json!({"rope_type": "linear", "factor": factor})),
        (Some("yarn"), Some(factor)) => {
            let name = key("original_context_length");
            let context = metadata.integer(&name).ok_or_else(|| format!("`{name}` is missing"))?;
            let mut scaling =
                json!({"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context});
            for beta in ["beta_fast", "beta_slow"] {
                if let Some(number) = metadata.number(&key(&format!("yarn_{beta}"))) {
                    scaling[beta] = json!(number);
                }
            }
            if !rounds_yarn(family) {
                scaling["truncate"] = json!(false);
            }
            Ok(scaling)
        }
        (Some(other), _) => Err(format!(
            "`{}` is \"{other}\"; read here are \"none\", \"linear\" and \"yarn\", with a factor",
            key("type")
        )),
    }
}

/// Returns the settings of LongRoPE with the factors of short and of long sequences. Files store the factor on cosines and sines,
/// configurations only one that does not follow from the contexts.
pub(super) fn long_scaling(keys: &Keys<'_>, [short, long]: &[Vec<f32>; 2]) -> Result<Value, String> {
    let original = keys.size("rope.scaling.original_context_length")?;
    let mut scaling = json!({
        "rope_type": "longrope", "short_factor": short, "long_factor": long,
        "original_max_position_embeddings": original,
    });
    let ratio = keys.size("context_length")? as f64 / original.max(1) as f64;
    let derived = LongRope::derived_amplitude(ratio, original as f64);
    let given = keys.number("rope.scaling.attn_factor");
    if let Some(factor) = given.filter(|factor| (factor - derived).abs() > 1e-6) {
        scaling["attention_factor"] = json!(factor);
    }
    Ok(scaling)
}

/// Returns true if YaRN rounds the ends of its band outwards, which files do not store. Published models of gpt-oss do not; llama.cpp does
/// in all models.
pub(crate) fn rounds_yarn(family: LlamaFamily) -> bool {
    family != LlamaFamily::GptOss
}

/// Returns the settings of Llama 3's scaling whose divisors of the frequencies are `divisors`.
pub(super) fn llama3_scaling(divisors: &[f32], theta: f64) -> Result<Value, String> {
    let head_dim = 2 * divisors.len();
    // Long wavelengths are divided by the whole factor.
    let factor = divisors.iter().fold(1.0_f32, |most, divisor| most.max(*divisor));
    let factor: f64 = factor.to_string().parse().unwrap_or(1.0);
    let (low_freq_factor, high_freq_factor) = (1.0, 4.0);
    for original_max_position_embeddings in CONTEXTS {
        let scaling = RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        };
        if divisors_of(theta, scaling, head_dim).zip(divisors).all(|(a, b)| (a - b).abs() <= TOLERANCE * a) {
            return Ok(json!({
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": original_max_position_embeddings,
            }));
        }
    }
    Err("`rope_freqs.weight` does not follow Llama 3's rule for any known context length".to_owned())
}

/// Returns the divisors of the frequencies of heads of `head_dim` elements.
pub(crate) fn divisors_of(theta: f64, scaling: RopeScaling, head_dim: usize) -> impl Iterator<Item = f32> {
    let plain = Rope::new(theta).inverse_frequencies(head_dim);
    let scaled = Rope { theta, scaling }.inverse_frequencies(head_dim);
    plain.into_iter().zip(scaled).map(|(plain, scaled)| plain / scaled)
}
