//! Configuration of experts: their number and width, the router, and load balancing.

use lockstep_tensor::{ExpertGroups, RouterScores, RouterWeights};
use serde_json::{Map, Value, json};

use super::family::LlamaFamily;
use super::limits::{Checks, EXPERTS, LAYERS, WIDTH};
use super::reader::Reader;

/// Configuration of mixture-of-experts layers, which replace feed-forward layers.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertsConfig {
    /// Number of experts of a layer.
    pub count: usize,
    /// Number of experts chosen per token.
    pub per_token: usize,
    /// Intermediate width of each expert.
    pub intermediate_size: usize,
    /// Intermediate width of the shared expert; `None` without one. Qwen2-MoE weights its output per token by a gate.
    pub shared_intermediate_size: Option<usize>,
    /// Function from router logits to scores.
    pub scores: RouterScores,
    /// Function from the chosen scores to the weights of experts.
    pub weights: RouterWeights,
    /// Factor on the weights of experts.
    pub scale: f64,
    /// Expert groups that restrict the choice.
    pub groups: Option<ExpertGroups>,
    /// Step size of the selection bias, which each step moves by the load of the experts: `router_bias_update_rate`,
    /// a key of Lockstep's own. 0 for families without such a bias.
    pub bias_update_rate: f64,
    /// Coefficient of the auxiliary loss, `router_aux_loss_coef`.
    pub auxiliary_loss: f64,
    /// Coefficient of the z-loss, `router_z_loss_coef`, a key of Lockstep's own.
    pub z_loss: f64,
    /// Capacity of an expert in training as a multiple of its even share of a sequence's slots:
    /// `expert_capacity_factor`, a key of Lockstep's own. `None` drops no slots.
    pub capacity_factor: Option<f64>,
    /// Period of layers with experts: the last of every `every` layers has them.
    pub every: usize,
    /// Indices of layers that are dense in spite of `every`.
    pub dense_layers: Vec<usize>,
}

/// Returns true if all layers have experts, which are as wide as the model's `intermediate_size`.
fn is_plain(family: LlamaFamily) -> bool {
    matches!(family, LlamaFamily::Mixtral | LlamaFamily::GptOss)
}

impl ExpertsConfig {
    /// Returns true if a layer has experts.
    pub fn is_in(&self, layer: usize) -> bool {
        (layer + 1).is_multiple_of(self.every.max(1)) && !self.dense_layers.contains(&layer)
    }

    /// Reads the keys of a family with experts; `None` for a dense family. `intermediate_size` is that of the model's
    /// configuration.
    pub(super) fn read(
        reader: &mut Reader<'_>,
        family: LlamaFamily,
        intermediate_size: usize,
    ) -> Option<Self> {
        if family == LlamaFamily::DeepseekV3 {
            return Some(Self::read_deepseek(reader));
        }
        let has_shared = family == LlamaFamily::Qwen2Moe;
        let (count, per_token, width) = match family {
            LlamaFamily::Mixtral => (8, 2, intermediate_size),
            LlamaFamily::GptOss => (128, 4, intermediate_size),
            LlamaFamily::Qwen2Moe => (60, 4, 1408),
            LlamaFamily::Qwen3Moe => (128, 8, 768),
            _ => return None,
        };
        let is_plain = is_plain(family);
        let normalizes = is_plain || reader.flag("norm_topk_prob", false);
        // transformers 5 writes `num_local_experts` in all families.
        let local = reader.optional_size("num_local_experts").given();
        let experts = if is_plain { None } else { reader.optional_size("num_experts").given() };
        if let (Some(local), Some(experts)) = (local, experts)
            && local != experts
        {
            reader.conflict(format!("`num_experts` = {experts} is not `num_local_experts` = {local}"));
        }
        Some(Self {
            count: local.or(experts).unwrap_or(count),
            per_token: reader.size("num_experts_per_tok", per_token),
            intermediate_size: if is_plain { width } else { reader.size("moe_intermediate_size", width) },
            shared_intermediate_size: has_shared
                .then(|| reader.size("shared_expert_intermediate_size", 5632)),
            scores: RouterScores::Softmax,
            weights: if normalizes { RouterWeights::Normalized } else { RouterWeights::Scores },
            scale: 1.0,
            groups: None,
            bias_update_rate: 0.0,
            auxiliary_loss: reader.number("router_aux_loss_coef", 0.001),
            z_loss: reader.number("router_z_loss_coef", 0.0),
            capacity_factor: reader.optional_number("expert_capacity_factor"),
            every: if is_plain { 1 } else { reader.size("decoder_sparse_step", 1) },
            dense_layers: if is_plain { Vec::new() } else { reader.sizes("mlp_only_layers") },
        })
    }

    fn read_deepseek(reader: &mut Reader<'_>) -> Self {
        let width = reader.size("moe_intermediate_size", 2048);
        let shared = reader.size("n_shared_experts", 1);
        let (count, kept) = (reader.size("n_group", 8), reader.size("topk_group", 4));
        let first = reader.size("first_k_dense_replace", 3);
        let normalizes = reader.flag("norm_topk_prob", true);
        Self {
            count: reader.size("n_routed_experts", 256),
            per_token: reader.size("num_experts_per_tok", 8),
            intermediate_size: width,
            shared_intermediate_size: Some(shared.saturating_mul(width)).filter(|width| *width > 0),
            scores: RouterScores::Sigmoid,
            weights: if normalizes { RouterWeights::Normalized } else { RouterWeights::Scores },
            scale: reader.number("routed_scaling_factor", 2.5),
            groups: Some(ExpertGroups { count, kept }),
            bias_update_rate: reader.number("router_bias_update_rate", 0.001),
            auxiliary_loss: reader.number("router_aux_loss_coef", 0.0),
            z_loss: reader.number("router_z_loss_coef", 0.0),
            capacity_factor: reader.optional_number("expert_capacity_factor"),
            every: 1,
            dense_layers: (0..first.min(LAYERS)).collect(),
        }
    }

    /// Adds the keys of a family's `config.json`.
    pub(super) fn write(&self, family: LlamaFamily, table: &mut Map<String, Value>) {
        let mut put = |key: &str, value: Value| table.insert(key.to_owned(), value);
        put("num_experts_per_tok", json!(self.per_token));
        put("router_aux_loss_coef", json!(self.auxiliary_loss));
        if self.z_loss != 0.0 {
            put("router_z_loss_coef", json!(self.z_loss));
        }
        if let Some(factor) = self.capacity_factor {
            put("expert_capacity_factor", json!(factor));
        }
        if is_plain(family) {
            put("num_local_experts", json!(self.count));
            return;
        }
        if family == LlamaFamily::DeepseekV3 {
            put("n_routed_experts", json!(self.count));
            put("moe_intermediate_size", json!(self.intermediate_size));
            let shared = self.shared_intermediate_size.unwrap_or(0) / self.intermediate_size.max(1);
            put("n_shared_experts", json!(shared));
            put("n_group", json!(self.groups.map_or(1, |groups| groups.count)));
            put("topk_group", json!(self.groups.map_or(1, |groups| groups.kept)));
            put("first_k_dense_replace", json!(self.dense_layers.len()));
            put("norm_topk_prob", json!(self.weights == RouterWeights::Normalized));
            put("routed_scaling_factor", json!(self.scale));
            put("router_bias_update_rate", json!(self.bias_update_rate));
            return;
        }
        put("num_experts", json!(self.count));
        put("moe_intermediate_size", json!(self.intermediate_size));
        put("norm_topk_prob", json!(self.weights == RouterWeights::Normalized));
        put("decoder_sparse_step", json!(self.every));
        put("mlp_only_layers", json!(self.dense_layers));
        if let Some(width) = self.shared_intermediate_size {
            put("shared_expert_intermediate_size", json!(width));
        }
    }

    pub(super) fn check(&self, checks: &mut Checks) {
        checks.size("number of experts", self.count, EXPERTS);
        checks.size("num_experts_per_tok", self.per_token, self.count.max(1));
        checks.size("moe_intermediate_size", self.intermediate_size, WIDTH);
        checks.size("decoder_sparse_step", self.every, usize::MAX);
        if let Some(width) = self.shared_intermediate_size {
            checks.size("shared_expert_intermediate_size", width, WIDTH);
        }
        if let Some(groups) = self.groups {
            checks.size("n_group", groups.count, self.count.max(1));
            checks.size("topk_group", groups.kept, groups.count.max(1));
            checks.divides(("n_group", groups.count), ("n_routed_experts", self.count));
            let room = groups.kept.saturating_mul(self.count / groups.count.max(1));
            if self.per_token > room {
                checks.conflict(format!(
                    "`num_experts_per_tok` = {} is more than the {room} experts of `topk_group` = {} groups",
                    self.per_token, groups.kept
                ));
            }
        }
        checks.coefficient("router_bias_update_rate", self.bias_update_rate);
        checks.factor("routed_scaling_factor", self.scale);
        checks.coefficient("router_aux_loss_coef", self.auxiliary_loss);
        checks.coefficient("router_z_loss_coef", self.z_loss);
        if let Some(factor) = self.capacity_factor {
            checks.factor("expert_capacity_factor", factor);
        }
    }
}
