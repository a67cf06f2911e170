//! Mixture-of-experts layers in place of feed-forward layers (Mixtral: Jiang et al., 2024; Qwen-MoE; DeepSeek-V3),
//! with an optional shared expert.

use lockstep_graph::{Bias, Linear, Mixture, Recorder, Routing, Split, Value};
use lockstep_plan::ParameterRecord;
use lockstep_tensor::GatedActivation;

use crate::config::ExpertsConfig;
use crate::hf_tensor::{HfPlace, HfTensor};
use crate::hf_transform::HfTransform;

/// Names of a family's mixture-of-experts modules.
pub(crate) struct ExpertNames {
    router: &'static str,
    /// Gate, up and down projections.
    layers: [&'static str; 3],
    /// Bias on the scores that choose the experts.
    selection_bias: Option<&'static str>,
    /// Gate, up and down projections of the shared expert. `shared_gate` is the layer that weights its output per token.
    shared: [&'static str; 3],
    shared_gate: Option<&'static str>,
    /// Biases of the router and of all projections.
    bias: Bias,
}

impl ExpertNames {
    pub(crate) const MIXTRAL: Self = Self {
        router: "block_sparse_moe.gate",
        layers: ["block_sparse_moe.experts.w1", "block_sparse_moe.experts.w3", "block_sparse_moe.experts.w2"],
        ..Self::QWEN
    };

    pub(crate) const QWEN: Self = Self {
        router: "mlp.gate",
        layers: ["mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj"],
        selection_bias: None,
        shared: ["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"],
        shared_gate: Some("mlp.shared_expert_gate"),
        bias: Bias::Without,
    };

    pub(crate) const GPT_OSS: Self = Self { router: "mlp.router", bias: Bias::With, ..Self::QWEN };

    /// Returns true if the router and all projections have biases.
    pub(super) fn have_biases(&self) -> bool {
        self.bias == Bias::With
    }

    pub(crate) const DEEPSEEK: Self = Self {
        selection_bias: Some("mlp.gate.e_score_correction_bias"),
        shared: [
            "mlp.shared_experts.gate_proj",
            "mlp.shared_experts.up_proj",
            "mlp.shared_experts.down_proj",
        ],
        shared_gate: None,
        ..Self::QWEN
    };
}

impl ExpertsConfig {
    /// Records the mixture, with the shared expert if there is one.
    pub(crate) fn record(
        &self,
        g: &mut Recorder,
        x: Value,
        names: &ExpertNames,
        gate: GatedActivation,
        std: f32,
    ) -> Value {
        let routed = g.mixture(
            x,
            &Mixture {
                router: names.router,
                selection_bias: names.selection_bias,
                layers: names.layers,
                experts: self.count,
                intermediate_size: self.intermediate_size,
                activation: gate,
                bias: names.bias,
                routing: self.routing(),
                std,
            },
        );
        match self.shared_intermediate_size {
            Some(width) => {
                let shared = Self::shared(g, x, names, width, gate, std);
                g.add(routed, shared)
            }
            None => routed,
        }
    }

    fn shared(
        g: &mut Recorder,
        x: Value,
        names: &ExpertNames,
        width: usize,
        kind: GatedActivation,
        std: f32,
    ) -> Value {
        let hidden = g.columns(x);
        let linear = |g: &mut Recorder, x, name, out_features| {
            g.linear(x, Linear { name, out_features, bias: Bias::Without, std })
        };
        let [gate, up, down] = names.shared;
        let (gate, up) = (linear(g, x, gate, width), linear(g, x, up, width));
        let active = g.gated(kind, gate, up);
        let y = linear(g, active, down, hidden);
        match names.shared_gate {
            Some(name) => {
                let share = linear(g, x, name, 1);
                g.gate_rows(share, y)
            }
            None => y,
        }
    }

    /// Returns the tensor-parallel sharding of the shared expert's modules.
    pub(crate) fn tensor_splits(&self) -> Vec<(&'static str, Split)> {
        let Some(pieces) = self.shared_intermediate_size else { return Vec::new() };
        let splits = |[gate, up, down]: [&'static str; 3]| {
            [
                (gate, Split::ColumnParallel { pieces }),
                (up, Split::ColumnParallel { pieces }),
                (down, Split::RowParallel),
            ]
        };
        [&ExpertNames::QWEN, &ExpertNames::DEEPSEEK]
            .into_iter()
            .flat_map(|names| splits(names.shared))
            .collect()
    }

    fn routing(&self) -> Routing {
        Routing {
            top_k: self.per_token,
            scores: self.scores,
            weights: self.weights,
            scale: self.scale as f32,
            groups: self.groups,
            auxiliary_loss: self.auxiliary_loss as f32,
            z_loss: self.z_loss as f32,
            capacity_factor: self.capacity_factor.map(|factor| factor as f32),
        }
    }
}

/// Part of the names of stacked expert weights that precedes the expert's number in a checkpoint.
pub(crate) const EXPERTS: &str = ".experts.";

/// Returns the tensors of a parameter: one, or one per expert.
pub(super) fn unstacked(record: &ParameterRecord) -> Vec<HfTensor> {
    let (Some(at), &[experts, rows, columns]) = (record.name.find(EXPERTS), &record.shape[..]) else {
        return vec![HfTensor::same(record)];
    };
    let (before, behind) = record.name.split_at(at + EXPERTS.len());
    let tensor = |expert: usize| {
        let name = format!("{before}{expert}.{behind}");
        let first_element = expert * rows * columns;
        let first = HfPlace::new(record, name, vec![rows, columns], HfTransform::Same);
        HfTensor::single(HfPlace { first_element, ..first })
    };
    (0..experts).map(tensor).collect()
}
