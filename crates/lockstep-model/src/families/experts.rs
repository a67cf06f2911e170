//! Mixtures of experts in the place of feed-forward layers (Mixtral: Jiang et al., 2024; Qwen-MoE; DeepSeek-V3), and the expert that
//! all tokens share.

use lockstep_graph::{Bias, Linear, Mixture, Recorder, Routing, Split, Value};

use crate::ExpertsConfig;

/// What a family calls the parts of a mixture.
pub(crate) struct ExpertNames {
    router: &'static str,
    /// Gate, up and down.
    layers: [&'static str; 3],
}

impl ExpertNames {
    pub(crate) const MIXTRAL: Self = Self {
        router: "block_sparse_moe.gate",
        layers: ["block_sparse_moe.experts.w1", "block_sparse_moe.experts.w3", "block_sparse_moe.experts.w2"],
    };

    pub(crate) const QWEN: Self = Self {
        router: "mlp.gate",
        layers: ["mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj"],
    };
}

impl ExpertsConfig {
    /// The mixture, with the shared expert if there is one.
    pub(crate) fn record(&self, g: &mut Recorder, x: Value, names: &ExpertNames, std: f32) -> Value {
        let routed = g.mixture(
            x,
            &Mixture {
                router: names.router,
                selection_bias: None,
                layers: names.layers,
                experts: self.count,
                intermediate_size: self.intermediate_size,
                routing: self.routing(),
                std,
            },
        );
        match self.shared_intermediate_size {
            Some(width) => {
                let shared = self.shared(g, x, width, std);
                g.add(routed, shared)
            }
            None => routed,
        }
    }

    fn shared(&self, g: &mut Recorder, x: Value, width: usize, std: f32) -> Value {
        let hidden = g.columns(x);
        let linear = |g: &mut Recorder, x, name, out_features| {
            g.linear(x, Linear { name, out_features, bias: Bias::Without, std })
        };
        let gate = linear(g, x, "mlp.shared_expert.gate_proj", width);
        let up = linear(g, x, "mlp.shared_expert.up_proj", width);
        let active = g.swiglu(gate, up);
        let y = linear(g, active, "mlp.shared_expert.down_proj", hidden);
        let share = linear(g, x, "mlp.shared_expert_gate", 1);
        g.gate_rows(share, y)
    }

    /// How tensor-parallel ranks split the shared expert.
    pub(crate) fn tensor_splits(&self) -> Vec<(&'static str, Split)> {
        let Some(pieces) = self.shared_intermediate_size else { return Vec::new() };
        vec![
            ("mlp.shared_expert.gate_proj", Split::Outputs { pieces }),
            ("mlp.shared_expert.up_proj", Split::Outputs { pieces }),
            ("mlp.shared_expert.down_proj", Split::Inputs),
        ]
    }

    fn routing(&self) -> Routing {
        Routing {
            top_k: self.per_token,
            scores: self.scores,
            weights: self.weights,
            scale: self.scale as f32,
            groups: None,
            auxiliary_loss: self.auxiliary_loss as f32,
            z_loss: self.z_loss as f32,
            capacity_factor: self.capacity_factor.map(|factor| factor as f32),
        }
    }
}
