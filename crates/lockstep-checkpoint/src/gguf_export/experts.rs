//! Metadata of experts, and the rules that llama.cpp's architectures with experts leave no key for.

use lockstep_model::{ExpertsConfig, LlamaConfig, LlamaFamily};
use lockstep_tensor::{GatedActivation, RouterWeights};

use crate::gguf::{experts::normalizes, writer::Value};

/// The activation of gpt-oss in llama.cpp, which no key changes: slope and limit.
const CLAMPED: (f32, f32) = (1.702, 7.0);

/// Puts the keys of a model with experts.
pub(super) fn put_experts(config: &LlamaConfig, put: &mut impl FnMut(&str, Value)) -> Result<(), String> {
    let Some(experts) = &config.experts else { return Ok(()) };
    check_rules(config, experts)?;
    let size = |size: usize| Value::U32(size as u32);
    put("expert_count", size(experts.count));
    put("expert_used_count", size(experts.per_token));
    if config.family != LlamaFamily::Mixtral {
        put("expert_feed_forward_length", size(experts.intermediate_size));
    }
    if let Some(width) = experts.shared_intermediate_size {
        put("expert_shared_feed_forward_length", size(width));
    }
    Ok(())
}

/// Checks that readers, which find no key for these settings, compute with those of the model.
fn check_rules(config: &LlamaConfig, experts: &ExpertsConfig) -> Result<(), String> {
    let (family, model_type) = (config.family, config.family.model_type());
    let is_normalized = experts.weights == RouterWeights::Normalized;
    if is_normalized != normalizes(family) {
        return Err(format!(
            "norm_topk_prob is {is_normalized}; readers of files of {model_type} take {}",
            normalizes(family)
        ));
    }
    if let Some(layer) = (0..config.num_hidden_layers).find(|&layer| !experts.is_in(layer)) {
        return Err(format!("layer {layer} is dense; all layers of files of {model_type} have experts"));
    }
    if config.tie_word_embeddings && matches!(family, LlamaFamily::Qwen2Moe | LlamaFamily::GptOss) {
        return Err(format!(
            "its embeddings are tied; files of {model_type} have an output layer of their own"
        ));
    }
    match config.gate {
        GatedActivation::Clamped { slope, limit } if (slope, limit) != CLAMPED => Err(format!(
            "swiglu_alpha is {slope} and swiglu_limit {limit}; readers of files take {} and {}",
            CLAMPED.0, CLAMPED.1
        )),
        _ => Ok(()),
    }
}
