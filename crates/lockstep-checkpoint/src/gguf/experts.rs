//! Metadata of experts: their number and widths. What files leave out is a rule of the architecture in llama.cpp, such as whether the
//! weights of the chosen experts add up to one.

use lockstep_model::LlamaFamily;
use serde_json::{Value, json};

use super::keys::{Keys, TensorFacts};

/// Number of the softmax among the functions from a router's logits to scores (llama.cpp: `llama_expert_gating_func_type`).
const SOFTMAX: f64 = 1.0;
/// Number of the softmax over the chosen experts.
const SOFTMAX_OF_CHOSEN: f64 = 3.0;

/// Returns true if the weights of a token's experts add up to one in llama.cpp's models of a family.
pub(crate) fn normalizes(family: LlamaFamily) -> bool {
    family != LlamaFamily::Qwen2Moe
}

/// Puts the keys of families with experts.
pub(super) fn put_experts(
    keys: &Keys<'_>,
    facts: &TensorFacts,
    family: LlamaFamily,
    put: &mut impl FnMut(&str, Value) -> Option<Value>,
) -> Result<(), String> {
    if !family.has_experts() {
        return Ok(());
    }
    let (count, used) = (keys.size("expert_count")?, keys.size("expert_used_count")?);
    if let Some((tensor, found)) = &facts.experts
        && *found as u64 != count
    {
        let key = keys.name("expert_count");
        return Err(format!("`{key}` is {count}, and tensor `{tensor}` has the matrices of {found} experts"));
    }
    check_rules(keys, family)?;
    put("num_experts_per_tok", json!(used));
    if matches!(family, LlamaFamily::Mixtral | LlamaFamily::GptOss) {
        put("num_local_experts", json!(count));
        return Ok(());
    }
    let width = keys.size("feed_forward_length")?;
    let given = |key: &str| keys.optional_size(key).filter(|width| *width > 0);
    put("num_experts", json!(count));
    put("norm_topk_prob", json!(normalizes(family)));
    let of_each = given("expert_feed_forward_length").unwrap_or(width / used.max(1));
    put("moe_intermediate_size", json!(of_each));
    if family == LlamaFamily::Qwen2Moe {
        let of_shared = given("expert_shared_feed_forward_length").unwrap_or(width);
        put("shared_expert_intermediate_size", json!(of_shared));
    }
    Ok(())
}

/// Checks that keys which most files leave out say what the family does.
fn check_rules(keys: &Keys<'_>, family: LlamaFamily) -> Result<(), String> {
    let gating = if family == LlamaFamily::GptOss { SOFTMAX_OF_CHOSEN } else { SOFTMAX };
    for (key, allowed) in [
        ("expert_weights_scale", [0.0, 1.0]),
        ("expert_gating_func", [0.0, gating]),
        ("expert_group_count", [0.0, 1.0]),
        ("expert_shared_count", [0.0, f64::from(u8::from(family == LlamaFamily::Qwen2Moe))]),
    ] {
        if let Some(found) = keys.number(key).filter(|number| !allowed.contains(number)) {
            return Err(format!("`{}` is {found}, which this architecture is not read with", keys.name(key)));
        }
    }
    match keys.flag("expert_weights_norm") {
        Some(flag) if flag != normalizes(family) => {
            let key = keys.name("expert_weights_norm");
            Err(format!("`{key}` is {flag}, which this architecture is not read with"))
        }
        _ => Ok(()),
    }
}
