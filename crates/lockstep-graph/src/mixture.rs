//! Mixtures of experts, as model code records them: a router, tokens brought to the experts it has chosen, a gated feed-forward of
//! each expert on its rows, and the sum of what comes back.
//!
//! ```text
//! x [T, h] -> gate -> logits -> route -> weights [T, k], experts
//! x -> dispatch -> rows [slots, h], in the order of the experts
//!   -> gate, up (a product for each expert) -> SwiGLU -> down -> combine: y_t = Σ_k weights[t, k] · row of slot (t, k)
//! ```
//!
//! The losses of a router belong to sequences (Fedus et al., 2021, section 2.2; Zoph et al., 2022): of one with `T` tokens, with
//! `E` experts and `k` slots a token,
//!
//! ```text
//! auxiliary  a · E / (k T²) · Σ_e (slots of e) · (Σ_t p_te)
//! z          z / T · Σ_t logsumexp(logits_t)²
//! ```
//!
//! and so does the capacity: an expert takes the first `ceil(c k T / E)` slots of each sequence. Nothing of it depends on which
//! sequences are routed together.

use lockstep_plan::{DType, Initializer, Share};
use lockstep_tensor::{ExpertGroups, RouterScores, RouterWeights};

use crate::{
    Bias, Linear, Mode, Recorder, Value,
    operation::{Operation, RouteOperation, SlotTables},
};

/// How tokens choose experts, and what keeps the choice even.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routing {
    /// Experts of each token.
    pub top_k: usize,
    /// How logits become scores.
    pub scores: RouterScores,
    /// What scores become as weights.
    pub weights: RouterWeights,
    /// Factor on the weights.
    pub scale: f32,
    /// Groups that limit the choice.
    pub groups: Option<ExpertGroups>,
    /// Coefficient of the auxiliary loss.
    pub auxiliary_loss: f32,
    /// Coefficient of the z-loss.
    pub z_loss: f32,
    /// How many times its even share of a sequence's slots an expert takes; all without it, and in inference.
    pub capacity_factor: Option<f32>,
}

/// A mixture of experts, each `down(silu(gate x) · up x)`, with parameters `NAME.weight` that have one matrix for each expert.
#[derive(Debug, Clone, Copy)]
pub struct Mixture<'a> {
    /// Name of the router's linear layer.
    pub router: &'a str,
    /// Name of the parameter `[experts]` that is added to scores where experts are chosen, if there is one.
    pub selection_bias: Option<&'a str>,
    /// Names of gate, up `[experts, intermediate, hidden]` and down `[experts, hidden, intermediate]`.
    pub layers: [&'a str; 3],
    /// Number of experts.
    pub experts: usize,
    /// Width of each.
    pub intermediate_size: usize,
    /// How tokens choose.
    pub routing: Routing,
    /// Standard deviation of the initial weights.
    pub std: f32,
}

impl Recorder {
    /// What the experts that tokens choose make of them.
    ///
    /// # Panics
    /// If `x` is not whole rows.
    pub fn mixture(&mut self, x: Value, mixture: &Mixture<'_>) -> Value {
        let Mixture { router, layers, experts, intermediate_size, routing, std, .. } = *mixture;
        let hidden = self.columns(x);
        let linear = Linear { name: router, out_features: experts, bias: Bias::Without, std };
        let logits = self.linear(x, linear);
        let (weights, chosen) = self.route(logits, mixture);
        let (rows, tables) = self.dispatch(x, chosen, experts, routing.top_k);
        let [gate, up] = [layers[0], layers[1]]
            .map(|name| self.grouped_linear(rows, name, [experts, intermediate_size, hidden], tables, std));
        let active = self.table(self.values[gate.0].rows, intermediate_size, self.shape.dtype);
        self.operations.push(Operation::SwiGlu { gate, up, y: active, offsets: Some(tables.offsets) });
        let down = self.grouped_linear(active, layers[2], [experts, hidden, intermediate_size], tables, std);
        let y = self.value_like(x, hidden);
        self.operations.push(Operation::Combine { rows: down, weights, tables, y });
        y
    }

    /// `sigmoid(gate) · x`, with one number of `gate` for each row.
    ///
    /// # Panics
    /// If they do not have the same rows.
    pub fn gate_rows(&mut self, gate: Value, x: Value) -> Value {
        let kind = |value: Value| (self.values[value.0].rows, self.layout(value));
        assert_eq!((self.columns(gate), kind(gate)), (1, kind(x)), "one number for each row");
        let y = self.value_like(x, self.columns(x));
        self.operations.push(Operation::GateRows { gate, x, y });
        y
    }

    /// The weights of each token's experts, and the experts: all that it has chosen, or those that take it.
    fn route(&mut self, logits: Value, mixture: &Mixture<'_>) -> (Value, Value) {
        let Mixture { experts, routing, .. } = *mixture;
        let tokens = self.values[logits.0].rows;
        let bias = mixture.selection_bias.map(|name| {
            let share = self.whole_share(self.layout(logits));
            let share = Share { summands: 1, ..share };
            self.parameter_shared(name.to_owned(), &[experts], Initializer::Zeros, share)
        });
        let sequences = self.shape.sequences;
        let capacity = routing.capacity_factor.filter(|_| self.mode == Mode::Training).map(|factor| {
            let even = (routing.top_k * self.shape.seq_len) as f32 / experts as f32;
            (factor * even).ceil() as usize
        });
        let route = RouteOperation {
            logits,
            bias,
            routing,
            capacity,
            scores: self.table(tokens, experts, DType::F32),
            log_sum_exp: self.table(tokens, 1, DType::F32),
            experts: self.table(tokens, routing.top_k, DType::U32),
            weights: self.table(tokens, routing.top_k, DType::F32),
            counts: self.table(sequences, experts, DType::F32),
            probabilities: self.table(sequences, experts, DType::F32),
            kept: capacity.map(|_| self.table(tokens, routing.top_k, DType::U32)),
        };
        self.operations.push(Operation::Route(route));
        (route.weights, route.kept.unwrap_or(route.experts))
    }

    /// A row for each slot, in the order of the experts.
    fn dispatch(&mut self, x: Value, chosen: Value, experts: usize, top_k: usize) -> (Value, SlotTables) {
        let slots = self.values[x.0].rows * top_k;
        let tables = SlotTables {
            slots: self.table(slots, 1, DType::U32),
            rows: self.table(slots, 1, DType::U32),
            offsets: self.table(experts + 1, 1, DType::U32),
        };
        let rows = self.table(slots, self.columns(x), self.shape.dtype);
        self.operations.push(Operation::Dispatch { x, chosen, tables, rows });
        (rows, tables)
    }

    /// A product of each expert's rows with its matrix of `NAME.weight [experts, out, in]`.
    fn grouped_linear(
        &mut self,
        x: Value,
        name: &str,
        shape: [usize; 3],
        tables: SlotTables,
        std: f32,
    ) -> Value {
        let initializer = Initializer::Normal { std };
        let weight = self.parameter_shared(format!("{name}.weight"), &shape, initializer, Share::default());
        let y = self.table(self.values[x.0].rows, shape[1], self.shape.dtype);
        self.operations.push(Operation::GroupedLinear { x, weight, offsets: tables.offsets, y });
        y
    }
}
