//! Recording of a mixture of experts: a router, dispatch of tokens to the chosen experts, a gated feed-forward per
//! expert, and the weighted sum of the results.
//!
//! ```text
//! x [T, h] -> gate -> logits -> route -> weights [T, k], experts
//! x -> dispatch -> rows [slots, h], in the order of the experts
//!   -> gate, up (a product for each expert) -> gated activation -> down -> combine: y_t = Σ_k weights[t, k] · row of slot (t, k)
//! ```
//!
//! The router losses are defined per sequence (Fedus et al., 2021, section 2.2; Zoph et al., 2022). For a sequence of
//! `T` tokens, `E` experts and `k` slots per token,
//!
//! ```text
//! auxiliary  a · E / (k T²) · Σ_e (slots of e) · (Σ_t p_te)
//! z          z / T · Σ_t logsumexp(logits_t)²
//! ```
//!
//! Capacity is defined per sequence as well: an expert takes the first `ceil(c k T / E)` slots of each sequence. So
//! the result does not depend on which sequences are routed together.

use lockstep_plan::ExpertPlace;
use lockstep_tensor::GatedActivation;

use crate::{
    block::{Bias, Mode, Value},
    ops::{linear::Linear, route::Routing},
    placement::Placement,
    recorder::Recorder,
};

/// A mixture of experts, each `down(f(gate x) · up x)` with a gated activation `f`, with stacked parameters `NAME.weight` of one matrix per expert.
#[derive(Debug, Clone, Copy)]
pub struct Mixture<'a> {
    /// Name of the router's linear layer.
    pub router: &'a str,
    /// Name of the parameter `[experts]` that is added to scores for the choice of experts only, if the model has one.
    pub selection_bias: Option<&'a str>,
    /// Names of gate, up `[experts, intermediate, hidden]` and down `[experts, hidden, intermediate]`.
    pub layers: [&'a str; 3],
    /// Number of experts.
    pub experts: usize,
    /// Intermediate width of each expert.
    pub intermediate_size: usize,
    /// Biases of the router and of the experts' layers: `NAME.bias`, for experts `[experts, out]`.
    pub bias: Bias,
    /// Gated activation of each expert.
    pub activation: GatedActivation,
    /// Configuration of the router.
    pub routing: Routing,
    /// Standard deviation of the initial weights.
    pub std: f32,
}

impl Recorder {
    /// Records the block as one rank of the expert-parallel group.
    pub fn share_experts(&mut self, place: ExpertPlace) {
        self.experts = place;
    }

    /// Records a mixture of experts on `x`. In training, each rank of a tensor-parallel group that holds the same tokens
    /// routes its own range of them, so that no token is routed twice, and an all-to-all takes their rows to the experts. In
    /// inference every rank routes all tokens and computes its experts, or its columns of them; an all-reduce adds the results.
    /// So a step may have any number of tokens, and every weight is read by one rank.
    ///
    /// # Panics
    /// If `x` is not whole rows, or if the tokens or the experts do not divide evenly among the ranks.
    #[track_caller]
    pub fn mixture(&mut self, x: Value, mixture: &Mixture<'_>) -> Value {
        let Mixture { experts, intermediate_size, routing, bias, std, .. } = *mixture;
        let x = if self.replicates_routes() { x } else { self.shard_tokens(x) };
        let hidden = self.columns(x);
        let layer = |name, out_features| Linear { name, out_features, bias, std };
        let logits = self.linear(x, layer(mixture.router, experts));
        let routes = self.route(logits, routing, mixture.selection_bias);
        let (rows, tables) = self.dispatch(x, &routes, routing.top_k, experts);
        let [gate, up, down] = mixture.layers;
        let [gate, up] = [gate, up].map(|name| {
            self.expert_linear((rows, tables), layer(name, intermediate_size), [experts, hidden], 1)
        });
        let active =
            self.gated_of_experts(mixture.activation, [gate, up], tables.offsets, tables.expert_rows);
        let down = self.expert_linear((active, tables), layer(down, hidden), [experts, intermediate_size], 2);
        let y = self.combine(down, routes.weights, tables, x);
        let y = self.reduce_partial(y);
        self.redistribute_to_stream(y)
    }

    /// Returns true if all ranks of the expert-parallel group route the same tokens: in inference, where that group is the
    /// tensor-parallel one.
    pub(crate) fn replicates_routes(&self) -> bool {
        self.mode == Mode::Inference && self.stream() == Placement::Replicate
    }
}
