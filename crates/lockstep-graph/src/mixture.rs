//! Recording of a mixture of experts: a router, dispatch of tokens to the chosen experts, a gated feed-forward per
//! expert, and the weighted sum of the results.
//!
//! ```text
//! x [T, h] -> gate -> logits -> route -> weights [T, k], experts
//! x -> dispatch -> rows [slots, h], in the order of the experts
//!   -> gate, up (a product for each expert) -> SwiGLU -> down -> combine: y_t = Σ_k weights[t, k] · row of slot (t, k)
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

use lockstep_plan::{Among, DType, ExpertPlace, Initializer, Shard, Share};

use crate::{
    block::{Bias, Mode, Value},
    linear::Linear,
    operation::{Operation, PartCounts, RemoteRows, RouteOperation, Routing, SlotTables},
    recorder::Recorder,
};

/// A mixture of experts, each `down(silu(gate x) · up x)`, with stacked parameters `NAME.weight` of one matrix per expert.
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

    /// Records a mixture of experts on `x`. In a tensor-parallel group that holds the same tokens, each rank routes
    /// its own range of them, so that no token is routed twice.
    ///
    /// # Panics
    /// If `x` is not whole rows, or if the tokens or the experts do not divide evenly among the ranks.
    pub fn mixture(&mut self, x: Value, mixture: &Mixture<'_>) -> Value {
        let Mixture { router, layers, experts, intermediate_size, routing, std, .. } = *mixture;
        let x = self.shard_tokens(x);
        let hidden = self.columns(x);
        let linear = Linear { name: router, out_features: experts, bias: Bias::Without, std };
        let logits = self.linear(x, linear);
        let (weights, chosen) = self.route(logits, mixture);
        let (rows, tables) = self.dispatch(x, chosen, mixture);
        let [gate, up] = [layers[0], layers[1]].map(|name| {
            self.expert_linear((rows, tables), name, [experts, intermediate_size, hidden], 1, mixture)
        });
        let (rows, columns) = (self.values[gate.0].rows, self.values[gate.0].columns);
        let active = self.local(rows, columns, self.shape.dtype);
        self.operations.push(Operation::SwiGlu { gate, up, y: active, offsets: Some(tables.offsets) });
        let shape = [experts, hidden, intermediate_size];
        let down = self.expert_linear((active, tables), layers[2], shape, 2, mixture);
        let slots = self.values[x.0].rows * routing.top_k;
        let parts = self.experts.tensor_ranks;
        let returned = tables.remote.map(|_| self.local(slots * parts, hidden, self.shape.dtype));
        let y = self.value_like(x, hidden);
        self.operations.push(Operation::Combine { rows: down, weights, tables, returned, y });
        self.redistribute_to_stream(y)
    }

    /// Records `sigmoid(gate) · x`, with one number of `gate` per row.
    ///
    /// # Panics
    /// If the two do not have the same rows.
    pub fn gate_rows(&mut self, gate: Value, x: Value) -> Value {
        let kind = |value: Value| (self.values[value.0].rows, self.placement(value));
        assert_eq!((self.columns(gate), kind(gate)), (1, kind(x)), "one number for each row");
        let y = self.value_like(x, self.columns(x));
        self.operations.push(Operation::GateRows { gate, x, y });
        y
    }

    /// Records the router. Returns the weights and the indices of each token's experts; with a capacity, dropped
    /// slots are masked in the indices.
    fn route(&mut self, logits: Value, mixture: &Mixture<'_>) -> (Value, Value) {
        let Mixture { experts, routing, .. } = *mixture;
        let tokens = self.values[logits.0].rows;
        let bias = mixture.selection_bias.map(|name| {
            let share = self.whole_share(self.placement(logits));
            let share = Share { summands: 1, ..share };
            let parameter = self.parameter(name.to_owned(), &[experts], Initializer::Zeros, share);
            (parameter, self.local(1, experts, DType::F32))
        });
        let (sequences, ranks) = (self.shape.sequences, self.place.ranks);
        let tokens_here = self.tokens_of(self.placement(logits));
        let ranks = ranks * self.context.ranks;
        let ranges = sequences * self.context.pieces();
        let has_parts = ranks > 1 && (routing.auxiliary_loss != 0.0 || routing.capacity_factor.is_some());
        let capacity = routing.capacity_factor.filter(|_| self.mode == Mode::Training).map(|factor| {
            let seq_len = self.shape.seq_len * self.context.ranks;
            let even = (routing.top_k * seq_len) as f32 / experts as f32;
            (factor * even).ceil() as usize
        });
        let route = RouteOperation {
            logits,
            bias,
            routing,
            capacity,
            scores: self.local(tokens, experts, DType::F32),
            log_sum_exp: self.local(tokens, 1, DType::F32),
            experts: self.local(tokens, routing.top_k, DType::U32),
            weights: self.local(tokens, routing.top_k, DType::F32),
            tokens: tokens_here,
            counts: self.local(ranges, experts, DType::F32),
            parts: has_parts.then(|| PartCounts {
                totals: self.local(sequences, experts, DType::F32),
                gathered: self.local(ranks * ranges, experts, DType::F32),
                ordered: self.local(ranks * ranges, experts, DType::F32),
                before: self.local(ranges, experts, DType::F32),
            }),
            probabilities: self.local(ranges, experts, DType::F32),
            kept: capacity.map(|_| self.local(tokens, routing.top_k, DType::U32)),
        };
        self.operations.push(Operation::Route(route));
        (route.weights, route.kept.unwrap_or(route.experts))
    }

    /// Records the dispatch: copies the row of each slot of this rank's experts, sorted by expert.
    fn dispatch(&mut self, x: Value, chosen: Value, mixture: &Mixture<'_>) -> (Value, SlotTables) {
        let Mixture { routing, .. } = *mixture;
        let (place, hidden) = (self.experts, self.columns(x));
        let (ranks, parts, here) = (place.group_size(), place.tensor_ranks, self.experts_here(mixture));
        let slots = self.values[x.0].rows * routing.top_k * parts;
        // Upper bound: even if all tokens of all ranks came here, a token would fill at most one slot per local expert.
        let rows = if ranks == 1 { slots } else { self.values[x.0].rows * routing.top_k.min(here) * ranks };
        let mut numbers = |rows: usize| self.local(rows, 1, DType::U32);
        let tables = SlotTables {
            slots: numbers(slots),
            rows: numbers(slots),
            offsets: numbers(here + 1),
            remote: (ranks > 1).then(|| RemoteRows {
                place,
                experts: (parts > 1).then(|| numbers(slots)),
                sent: numbers(here * ranks + 1),
                received: numbers(here * ranks),
                arrived: numbers(rows),
                arrived_slots: numbers(rows),
                arrived_rows: numbers(rows),
                // Allocated below, once the row counts are known.
                sending: x,
                receiving: x,
            }),
        };
        let remote = tables.remote.map(|remote| RemoteRows {
            sending: self.local(slots, hidden, self.shape.dtype),
            receiving: self.local(rows, hidden, self.shape.dtype),
            ..remote
        });
        let tables = SlotTables { remote, ..tables };
        let rows = self.local(rows, hidden, self.shape.dtype);
        self.operations.push(Operation::Dispatch { x, chosen, tables, rows });
        (rows, tables)
    }

    fn experts_here(&self, mixture: &Mixture<'_>) -> usize {
        let (experts, ranks) = (mixture.experts, self.experts.ranks);
        assert!(experts.is_multiple_of(ranks), "{experts} experts are not divided among {ranks} ranks");
        experts / ranks
    }

    /// Records a grouped matrix product: each expert's rows with its matrix of `NAME.weight [experts, out, in]`.
    /// Expert tensor parallelism shards dimension `cut`.
    fn expert_linear(
        &mut self,
        (x, tables): (Value, SlotTables),
        name: &str,
        shape: [usize; 3],
        cut: usize,
        mixture: &Mixture<'_>,
    ) -> Value {
        let ExpertPlace { ranks, rank, tensor_ranks, tensor_rank } = self.experts;
        let range = |dim: usize, ranks: usize, rank: usize| {
            let len = shape[dim] / ranks;
            (ranks > 1).then_some(Shard { dim, start: rank * len, len })
        };
        assert!(shape[cut].is_multiple_of(tensor_ranks), "{name}: {shape:?} for {tensor_ranks} parts");
        let share = Share {
            shard: range(0, ranks, rank),
            inner: range(cut, tensor_ranks, tensor_rank),
            among: Among::Experts,
            ..Share::default()
        };
        let initializer = Initializer::Normal { std: mixture.std };
        let weight = self.parameter(format!("{name}.weight"), &shape, initializer, share);
        let held = share.shape_of(&shape);
        let y = self.local(self.values[x.0].rows, held[1], self.shape.dtype);
        let even_rows = self.values[tables.slots.0].rows;
        self.operations.push(Operation::GroupedLinear { x, weight, offsets: tables.offsets, even_rows, y });
        y
    }
}
